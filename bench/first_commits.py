"""Write results/first_commits.json: since which commit the figures of results/*.json are in this repository.

    python bench/first_commits.py

Results of RECORDED_SINCE and later have the commit that they were measured with. That of older ones is not
known: it is the commit found here, the first one with all their figures, or one before it. This reads the
whole history of a clone. bench/measured.py prints what it found.
"""
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
FIRST_COMMITS = RESULTS / "first_commits.json"
PAIRS = RESULTS / "pairs.json"  # verdicts, not figures
RECORDED_SINCE = "2026-11-27"  # in results of before, `commit` is one that has their script


def git(*arguments) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measured_with(row) -> str | None:
    """Return the commit that a row was measured with, None if the row does not say it."""
    return row.get("commit") if (row.get("date") or "") >= RECORDED_SINCE else None


def numbers_in(content) -> set:
    """Return all numbers of a JSON document."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return set().union(*map(numbers_in, content))
    return {content} if isinstance(content, (int, float)) else set()


def versions_of(path):
    """Yield (commit, content) of each committed version of a file, the oldest first."""
    log = git("log", "--follow", "--name-only", "--format=commit %h", "--", str(path))
    for entry in reversed(log.split("commit ")[1:]):
        commit, name = entry.split()  # the name that the file had then
        yield commit, json.loads(git("show", f"{commit}:{name}"))


def first_commit(path) -> str | None:
    """Return the first commit with all figures whose own commit is not known, None if it is known of all."""
    content = json.loads(path.read_text())
    rows = content
    if isinstance(content, dict):
        rows = content.get("runs", [content])  # bench/paired.py's runs, from which its other figures follow
    figures = numbers_in([row for row in rows if not measured_with(row)])
    if not figures:
        return None
    for commit, version in versions_of(path):
        if figures <= numbers_in(version):
            return commit
    raise ValueError(f"{path}: commit it first")


def main():
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        if path in (FIRST_COMMITS, PAIRS):
            continue
        if commit := first_commit(path):
            found[path.stem] = commit
    FIRST_COMMITS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{FIRST_COMMITS}: {len(found)} files")


if __name__ == "__main__":
    main()
