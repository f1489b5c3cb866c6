"""Shared by the tests of bench/paired.py: records of runs, and bench/measured.py's tables of them."""
from bench import gaps, measured


def run_of(arm, seed, loss, ms=100.0, steps=10, **fields):
    """Return the record of a run whose losses are all the same."""
    pair = {"size": "124m", "train_sha256": "5b348f31", "lr": 1e-3, "tokens": 1000 * steps,
            "start": 0.0, "stop": 1.0, "end": 1.0}
    return pair | {"arm": arm, "seed": seed, "steps": steps, "ms": ms, "losses": [loss] * steps,
                   "skipped_steps": 0, "val_loss": loss + 0.5, "machine": "a GPU"} | fields


def set_results(monkeypatch, runs):
    """Give bench/measured.py these runs as results/paired.json."""
    content = {"commands": [], "rows": gaps.summarize(runs), "runs": runs}
    monkeypatch.setattr(measured, "read", lambda name: content if name == "paired" else {})


def tables_of(section) -> list[list[str]]:
    """Return the cells of each row of a section's table, the first with the titles."""
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
