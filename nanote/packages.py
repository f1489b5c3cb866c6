"""A corpus from what is installed: sources, documentation and licenses of packages and the standard library.

`python data.py packages` calls `package_documents`. It needs no network, and gives the same documents in the
same order for the same installed files.

Two ideas keep validation packages, and near-duplicates of their text, out of training:

- A hash of a package's name assigns the package, with every document in it, to train or val. It is the same
  on every machine. The standard library is in train.
- Documents are visited in descending order of that hash, so train comes before val wherever the threshold is.
  A document that repeats an earlier one is dropped: of two copies in different splits the one in train stays.

Validation text that is a small part of another document, such as a function that was copied, may remain.

Near-duplicates are found by MinHash over shingles of 5 whitespace-separated words. A document is dropped if
its Jaccard similarity to an earlier document that was kept is at least 0.7. Of two documents of at most 300
shingles the similarity is exact. Else it is estimated as the fraction of equal entries in two signatures of
160 entries, with a standard error of about 0.04. Documents are compared if their signatures agree in one of
32 bands of 5 entries, which for long documents happens with probability 1 - (1 - s**5)**32 for
similarity s: 0.997 at 0.7, 0.99999 at 0.8 (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, section
3.4). Each entry is the first hash at or after one of 160 starting points on the circle of 64-bit numbers. All
starting points read one sorted array of hashes (one-permutation hashing: Li, Owen, Zhang 2012; a starting
point whose interval is empty takes the next hash: Shrivastava, Li 2014).
"""
import csv
import hashlib
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections import Counter
from itertools import chain
from pathlib import Path
from zlib import crc32

import numpy as np
from tqdm import tqdm

from nanote.dataset import Document, hash_fraction, in_processes

SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cxx", ".cu", ".h", ".hh", ".hpp", ".hxx",
           ".cuh", ".inl"}
PROSE = {".md", ".rst", ".txt"}
LICENSE = re.compile(r"(licen[cs]es?|notice|copying|copyright)([-_.].*)?", re.IGNORECASE)
LARGEST = 2 << 20  # bytes; longer files are almost always generated
STDLIB = "python"  # the name of the standard library as a package

SHINGLE, BANDS, ROWS, SIMILARITY = 5, 32, 5, 0.7
FEW = 300  # shingles; the similarity of documents of no more is exact
STARTS = np.arange(BANDS * ROWS, dtype=np.uint64) * np.uint64(2**64 // (BANDS * ROWS))
GOLDEN, HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)  # to mix bits: multiply, then xor the halves


def package_documents(num_workers=None, folders=None, stdlib=None):
    """Return (documents, their bytes, "B", counts for meta.json).

    Args:
        num_workers: processes that read and hash files. None: one per core.
        folders: site-packages folders. None: those of the running Python.
        stdlib: folder of the standard library. None: that of the running Python.
    """
    if folders is None:
        folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    files = list_files(folders, stdlib or sysconfig.get_paths()["stdlib"])
    paths = [path for *_, path in files]
    tasks = [paths[start : start + 200] for start in range(0, len(paths), 200)]
    scanned = chain.from_iterable(in_processes(scan, tasks, num_workers or os.cpu_count()))

    left_out, exact, seen, candidates, signatures, few = Counter(), 0, set(), [], [], []
    bar = tqdm(scanned, "reading", len(files), unit="file", disable=None, leave=False)
    for (reason, digest, size, signature, shingles_if_few), file in zip(bar, files):
        if reason:
            left_out[reason] += 1
        elif digest in seen:
            exact += 1
        else:
            seen.add(digest)
            candidates.append((*file, size))
            signatures.append(signature)
            few.append(shingles_if_few)
    is_near = near_duplicates(np.array(signatures, np.uint32).reshape(-1, BANDS * ROWS), few)
    kept = [candidate for candidate, near in zip(candidates, is_near) if not near]
    counts = {
        "packages": len({package for _, package, *_ in files}), "files": len(files),
        "left_out": dict(sorted(left_out.items())), "exact_duplicates": exact,
        "near_duplicates": len(candidates) - len(kept),
    }
    documents = (Document(read(path)[0] or "", split) for split, _, _, path, _ in kept)
    return documents, sum(size for *_, size in kept), "B", counts


# ---------------------------------------------------------------- which files, and whose they are

def list_files(folders, stdlib):
    """Return (split, package, relative path, path) of each file to read, in descending order of split.

    Where no package is installed, the standard library's top-level modules are the packages.
    """
    found = []
    for folder in sorted({os.path.realpath(folder) for folder in folders}):
        owners = recorded_owners(folder)
        found += [(owner_of(path, owners), path, os.path.join(folder, path)) for path in walk(folder)]
    found = [(name_fraction(package), package, path, full) for package, path, full in found]
    has_packages, stdlib = bool(found), os.path.realpath(stdlib)
    for path in walk(stdlib):
        module = f"{STDLIB}/{top_level(path)}"
        split, package = (1.0, STDLIB) if has_packages else (name_fraction(module), module)
        found.append((split, package, path, os.path.join(stdlib, path)))
    return sorted(found, key=lambda file: (-file[0], *file[1:]))


def walk(root):
    """Yield the path, relative to `root`, of each file whose name says that it is wanted."""
    for folder, folders, names in os.walk(root):  # does not follow links to folders
        # a standard library may hold the site-packages of its Python
        folders[:] = set(folders) - {"__pycache__", "site-packages", "dist-packages"}
        parents = Path(folder).relative_to(root).parts
        for name in names:
            if is_wanted(parents, name):
                yield "/".join((*parents, name))


def is_wanted(parents, name):
    """Return whether to read the file `name` in the folders `parents`: sources, prose and licenses, but only
    sources of tests, and of a package's metadata only its description and its licenses."""
    suffix = os.path.splitext(name)[1].lower()
    is_license = LICENSE.fullmatch(name) is not None
    if any(parent.endswith((".dist-info", ".egg-info")) for parent in parents):
        return is_license or name in ("METADATA", "PKG-INFO") or "licenses" in parents
    in_tests = {"test", "tests", "testing"} & set(parents)
    return suffix in SOURCES or not in_tests and (suffix in PROSE or is_license)


def recorded_owners(folder):
    """Return {relative path: package} of the packages in `folder`: of every file in a package's RECORD, or
    without one of the top-level names in the top_level.txt of its egg-info."""
    found = []
    for dist in importlib.metadata.distributions(path=[folder]):
        try:
            name = normalized(dist.metadata["Name"] or "")
            record = (dist.read_text("RECORD") or "").splitlines()
            paths = [row[0] for row in csv.reader(record) if row]
            found.append((name, paths or (dist.read_text("top_level.txt") or "").split()))
        except (ValueError, OSError, csv.Error):  # damaged: its folder's name will do
            continue
    owners = {}
    for name, paths in sorted(found):
        for path in paths if name else ():
            owners.setdefault(path, name)
    return owners


def owner_of(path, owners):
    """Return the name of the package that owns a file: by its metadata, else the file's top-level folder."""
    name = top_level(path)
    return owners.get(path) or owners.get(name) or normalized(name)


def top_level(path):
    """Return "numpy" for numpy/x.py, numpy.py and numpy-2.4.dist-info/METADATA."""
    return re.split(r"[-.]", path.split("/")[0])[0] or path


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def name_fraction(name):
    """Return the hash of a package's name in [0, 1)."""
    return hash_fraction(name.encode(errors="replace"))


# ---------------------------------------------------------------- reading and comparing documents

def read(path):
    """Return (text, None), or (None, the reason to leave the file out)."""
    try:
        if not os.path.isfile(path):
            return None, "not a regular file"
        if os.path.getsize(path) > LARGEST:
            return None, "over 2 MiB"
        raw = Path(path).read_bytes()
    except OSError:
        return None, "unreadable"
    if os.path.basename(path) in ("METADATA", "PKG-INFO"):  # the description follows the headers
        raw = b"".join(re.split(rb"\r?\n\r?\n", raw, maxsplit=1)[1:])  # there may be none
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None, "not UTF-8 text"
    if b"\0" in raw:
        return None, "not UTF-8 text"
    words = raw.split()
    if not words:
        return None, "empty"
    return (None, "tables") if is_table(words) else (text, None)


def is_table(words):
    """Return whether less than 40% of a file is letters (numbers), or a word is over 1,000 bytes (data in
    a string, or code without spaces)."""
    visible = np.frombuffer(b"".join(words), np.uint8)
    is_letter = (visible | 32) - np.uint8(ord("a")) < 26  # modulo 256
    letters = np.count_nonzero(is_letter | (visible >= 128))  # every other alphabet in UTF-8
    return 5 * letters < 2 * len(visible) or max(map(len, words)) > 1000


def scan(paths):
    """Return (reason, digest, size, signature, shingles if few) of each file; only a reason to skip it."""
    rows = []
    for path in paths:
        text, reason = read(path)
        if reason:
            rows.append((reason, None, None, None, None))
        else:
            raw = text.encode()
            digest, hashes = hashlib.blake2b(raw, digest_size=16).digest(), shingles(raw)
            rows.append((None, digest, len(raw), signature(hashes), hashes if len(hashes) <= FEW else None))
    return rows


def shingles(raw):
    """Return the hashes of the shingles of a text, sorted and without repetitions."""
    words = np.array([crc32(word) for word in raw.split()], np.uint64)
    count = max(len(words) - SHINGLE + 1, 1)
    hashes = np.zeros(count, np.uint64)
    for offset in range(min(SHINGLE, len(words))):
        hashes = (hashes + words[offset : offset + count]) * GOLDEN
        hashes ^= hashes >> HALF
    return np.unique(hashes * GOLDEN)


def signature(hashes):
    """Return the MinHash signature of sorted hashes: uint32 (ROWS * BANDS,). See the module's docstring."""
    return hashes[np.searchsorted(hashes, STARTS) % len(hashes)].astype(np.uint32)


def jaccard(first, second):
    """Return the Jaccard similarity of two arrays without repetitions."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def near_duplicates(signatures, few):
    """Return for each row whether it is similar to an earlier row that was kept.

    Args:
        signatures: uint32 (documents, ROWS * BANDS).
        few: the shingles of each document, or None if there are more than FEW.
    """
    # The entries of a band are far apart on the circle: neighbors of a short text are often the same hash.
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), (len(signatures), BANDS))
    for entries in signatures.reshape(-1, ROWS, BANDS).swapaxes(0, 1):
        keys = (keys + entries) * GOLDEN
        keys = keys ^ keys >> HALF
    buckets, near = {}, []
    for row, bands in enumerate(keys.tolist()):
        others = sorted({other for band in bands for other in buckets.get(band, ())})
        similarities = (signatures[others] == signatures[row]).mean(axis=1)
        if few[row] is not None:
            similarities = [estimate if few[other] is None else jaccard(few[row], few[other])
                            for other, estimate in zip(others, similarities)]
        near.append(bool(max(similarities, default=0) >= SIMILARITY))
        if not near[-1]:
            for band in bands:
                buckets.setdefault(band, []).append(row)
    return near
