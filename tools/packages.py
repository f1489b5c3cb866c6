"""The corpus of `data.py packages`: text of what is installed, without duplicates; it needs no download."""
import importlib.metadata
import re
from pathlib import Path
from zlib import crc32

from datasketch import MinHash, MinHashLSH

from nanote.corpus import stdlib_files
from nanote.tokens import hash_fraction

SOURCES = set(".py .pyi .pyx .pxd .c .cc .cpp .cxx .cu .h .hh .hpp .hxx .cuh .inl .md .rst .txt".split())
NO_LETTERS = bytes(byte for byte in range(128) if not chr(byte).isalpha())


def package_documents(left_out):
    """Yield the sources and documentation of the installed packages and of the standard library.

    A hash of its name assigns a package to train or val. Documents come in descending order of that hash, and
    one that repeats an earlier one is dropped: that in train stays. Near-duplicates have a Jaccard similarity
    of at least 0.7 over sequences of 5 words; MinHash finds 99 % of them (25 bands of 5 hashes).
    """
    index = MinHashLSH(params=(25, 5), num_perm=125)
    minhashes = []  # of the documents, by their number in `index`
    for fraction, _, path in sorted(package_files(), key=lambda file: (-file[0], file[1])):
        text = read_text(path)
        words = text.encode().split()
        if not is_prose(text, words):
            left_out["files that are no text, empty, over 2 MiB, or mostly numbers or long words"] += 1
            continue
        minhash = MinHash(num_perm=125, hashfunc=crc32)
        starts = range(max(len(words) - 4, 1))
        minhash.update_batch({b" ".join(words[start:start + 5]) for start in starts})
        if any(minhash.jaccard(minhashes[other]) >= 0.7 for other in index.query(minhash)):
            left_out["duplicates or near-duplicates"] += 1
            continue
        index.insert(len(minhashes), minhash)
        minhashes.append(minhash)
        yield text, fraction


def read_text(path):
    """Return the text of a UTF-8 file, "" if it is none."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def is_prose(text, words):
    """Return whether a text is source code or prose: not empty, huge, or mostly numbers or long words."""
    if not words or len(text) > 2 << 20 or max(map(len, words)) > 1000:
        return False
    visible = b"".join(words)
    letters = visible.translate(None, delete=NO_LETTERS)
    return len(letters) >= 0.4 * len(visible)


def package_files():
    """Yield (hash of the package's name, relative path, path) of each file to read."""
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        for file in package.files or ():
            if file.suffix in SOURCES and ".dist-info" not in file.parts[0]:
                yield hash_fraction(name.encode()), str(file), Path(package.locate_file(file))
    for path in stdlib_files():
        if path.suffix in SOURCES:
            yield 1.0, str(path), path
