"""Damaged and hostile files: a command that reads one succeeds, or refuses in one line and writes nothing."""
import hashlib
import io
import json
import math
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from trainer_tools import OPTIONS, ROOT, make_tokens, run_script, run_train

CASES = 4  # of each file
SMALL = f"{OPTIONS} --n-layer 1 --n-embd 32 --seq-len 16 --micro-batch-size 2 --grad-accum 1"
ODD = [None, True, [], {}, "", "text", -1, 0, 2.5, 10**30, 1e300, math.nan, [1], {"a": 1}, "../../x", "\x00"]
COMMANDS = {"train.py": "--resume --out-dir run --max-steps 3", "sample.py": "run --max-new-tokens 2"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with good token files and a good run of two steps."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_tokens("tokens")
        options = f"{SMALL} --max-steps 2 --fp8-health-interval 1 --out-dir run"
        assert run_train(options, "tokens") == 0
    return folder


@pytest.fixture
def in_copy(world, tmp_path, monkeypatch):
    """in_copy(number): go to a new copy of the world."""
    def go(number=0):
        shutil.copytree(world, tmp_path / str(number))
        monkeypatch.chdir(tmp_path / str(number))
    return go


def sign(folder="run/step-2") -> None:
    """Write a valid SHA256SUMS, as an attacker would."""
    paths = [path for path in sorted(Path(folder).iterdir()) if path.name != "SHA256SUMS" and path.is_file()]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
    Path(folder, "SHA256SUMS").write_text("".join(lines))


def contents() -> dict:
    paths = [path for path in Path().rglob("*") if path.name != ".lock"]
    return {str(path): path.is_file() and path.read_bytes() for path in paths}


def check(script: str, arguments: str, capsys, case: str) -> tuple[int, str]:
    """Run a command, which must succeed, or end with one line; with exit code 2 no file may have changed."""
    before = contents()
    capsys.readouterr()
    code = run_script(script, arguments.split())
    error = capsys.readouterr().err if code else ""
    assert code in (0, 1, 2), case
    assert not code or error.startswith(f"{script}: ") and error.count("\n") == 1, f"{case}: {error}"
    assert code != 2 or contents() == before, f"{case}: {error}"
    return code, error


# ---------------------------------------------------------------- random damage, from a seed

def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """Replace or remove one value of a JSON document."""
    document = json.loads(content)
    holder, key, value = None, None, document
    while isinstance(value, (dict, list)) and value and (holder is None or draw.random() < 0.8):
        holder, key = value, draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[key]
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice([*ODD, [value], str(value)])
    return json.dumps(document).encode()


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut off a file, change or insert bytes, or replace it by something else."""
    place = draw.randrange(len(content))
    before, after = content[:place], content[place:]
    return draw.choice([before, before + draw.randbytes(3) + after[3:], before + draw.randbytes(20) + after,
                        content * 2, b"", b"[]", b"null", b"\0" * 100, b"[" * 100])


def damaged_lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines()
    number = draw.randrange(len(lines))
    lines[number] = draw.choice([damaged_json, damaged_bytes])(lines[number], draw)
    return b"\n".join(lines) + b"\n"


def damaged_tensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header, values = json.loads(content[8:end]), content[end:]
    name = draw.choice([name for name in header if name != "__metadata__"])
    change = draw.choice(["rename", "shape", "dtype", "drop", "odd"])
    if change == "rename":
        header[name + "x"] = header.pop(name)
    elif change == "drop":
        del header[name]
    elif change == "odd":
        header[name] = draw.choice(ODD)
    else:
        header[name][change] = {"shape": [1, *header[name]["shape"]], "dtype": "I64"}[change]
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + values


DAMAGE = {".json": [damaged_json, damaged_json, damaged_bytes], ".jsonl": [damaged_lines],
          ".safetensors": [damaged_tensors, damaged_bytes]}


@pytest.mark.parametrize("script, name, is_signed", [
    ("train.py", "step-2/meta.json", True), ("train.py", "step-2/meta.json", False),
    ("train.py", "step-2/SHA256SUMS", False), ("train.py", "step-2/*.safetensors", True),
    ("train.py", "step-2/*.safetensors", False), ("train.py", "metrics.jsonl", False),
    ("train.py", "fp8_health.jsonl", False), ("sample.py", "step-2/meta.json", True),
    ("sample.py", "step-2/*.safetensors", True)])
def test_a_damaged_run(in_copy, capsys, script, name, is_signed):
    codes = []
    for number in range(CASES):
        draw = random.Random(f"{name} {is_signed} {number}")
        in_copy(number)
        path = next(Path("run").glob(name))
        path.write_bytes(draw.choice(DAMAGE.get(path.suffix, [damaged_bytes]))(path.read_bytes(), draw))
        if is_signed:
            sign()
        codes.append(check(script, COMMANDS[script], capsys, f"{script} {name} {is_signed} case {number}")[0])
    assert 2 in codes


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin"])
def test_damaged_token_files(in_copy, capsys, name):
    codes = []
    for number in range(CASES):
        draw = random.Random(f"{name} {number}")
        in_copy(number)
        path = Path("tokens", name)
        path.write_bytes(draw.choice(DAMAGE.get(path.suffix, [damaged_bytes]))(path.read_bytes(), draw))
        argv = f"{SMALL} --data tokens --max-steps 1 --out-dir new"
        codes.append(check("train.py", argv, capsys, f"tokens/{name} case {number}")[0])
    assert 2 in codes


# ---------------------------------------------------------------- code

class Hostile:
    """Creates the file `ran` when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("ran").absolute(),)


@pytest.mark.parametrize("name", ["meta.json", "*.safetensors", "model.pt", ".metadata", "__0_0.distcp"])
def test_no_code_in_a_checkpoint_is_run(in_copy, capsys, name):
    archive = io.BytesIO()
    torch.save({"model.wte.weight": Hostile()}, archive)
    for number, content in enumerate((pickle.dumps(Hostile()), archive.getvalue())):
        in_copy(number)
        replaced = next(Path("run/step-2").glob(name), None)
        (replaced or Path("run/step-2", name)).write_bytes(content)
        sign()
        code, _ = check("train.py", COMMANDS["train.py"], capsys, name)
        assert code == (2 if replaced else 0)
        assert not Path("ran").exists()


def test_no_code_in_token_files_is_run(in_copy, capsys):
    in_copy()
    for name in ("train.bin", "meta.json", "train.npy"):
        shutil.copytree("tokens", f"tokens-{name}")
        Path(f"tokens-{name}", name).write_bytes(pickle.dumps(Hostile()))
        check("train.py", f"{SMALL} --data tokens-{name} --max-steps 1 --out-dir new-{name}", capsys, name)
        assert not Path("ran").exists()


def test_nothing_here_unpickles():
    """Except te_reference's reader of TE's state, which takes only tensors and plain containers."""
    folders = (ROOT, *(ROOT / name for name in ("nanote", "fast_kernels", "tools", "bench", "examples")))
    for path in [path for folder in folders for path in folder.glob("*.py")]:
        source = path.read_text()
        assert all("weights_only=True" in line for line in re.findall(r"torch\.load\(.*", source)), path
        for call in (r"pickle\.loads?\(", r"allow_pickle=True", r"trust_remote_code=True", r"joblib",
                     r"weights_only=False", r"add_safe_globals"):
            assert not re.search(call, source), (path, call)
        assert ("Unpickler" in source) == (path.name == "te_reference.py"), path
