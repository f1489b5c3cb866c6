"""Damaged and hostile files: a command that reads one succeeds, or ends with one line and exit code 2 and changes nothing.

First cases with a name, then some hundreds that are drawn from a seed.
"""
import contextlib
import copy
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

import checkpoint
import cli
import data
import export_hf
import import_hf
import sample
import train
from test_bad_input import tree
from trainer_tools import make_tokens, run_train

pytest.importorskip("transformers")
CASES = 20  # of each file
ODD = [None, True, [], {}, "", "text", "\ud800", -1, 0, 1, 2.5, 10**12, 10**30, -10**12, 1e300, float("nan"), float("inf"), [1], [[]],
       {"a": 1}, "byte", "gpt9", "step-1", "../../x", "custom:evil.f", "\x00"]
SMALL = ("--n-layer 1 --n-head 2 --n-embd 32 --seq-len 16 --micro-batch-size 2 --warmup-steps 0 --fp8-amax-history-len 4 --log-interval 1 "
         "--eval-interval 0 --eval-steps 1 --checkpoint-interval 0 --no-background-saves --device cpu")


COMMANDS = {"train.py": (train.main, "--resume --out-dir run --max-steps 3 --fp8-health-interval 1"),
            "sample.py": (sample.main, "run --max-new-tokens 2 --device cpu"), "export_hf.py": (export_hf.main, "run folder")}


class Hang(BaseException):
    pass


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with good token files, a good run and a good Hugging Face folder."""
    from test_hf import make_folder

    folder = tmp_path_factory.mktemp("fuzz")
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else pytest.MonkeyPatch.context() as patch:
        if patch is not None:
            patch.chdir(folder)
        make_tokens("tokens")
        assert run_train(f"{SMALL} --max-steps 2 --fp8-health-interval 1 --out-dir run", "tokens") == 0
        make_folder("hf", "qwen3")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without the parts of a run that read no file."""
    monkeypatch.setattr(train, "plot_losses", lambda run: "no picture")
    monkeypatch.setattr(train.fp8_health, "plot", lambda *_: None)
    monkeypatch.setattr(train, "generate", lambda *_, **__: [])
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.__init__", lambda *_, **__: None)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", lambda *_, **__: None)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- what is done to a file

def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """A JSON document with one value replaced or removed, or a field added."""
    document = json.loads(content)
    holder, key, value = None, None, document
    while isinstance(value, (dict, list)) and value and (holder is None or draw.random() < 0.8):
        holder, key = value, draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[key]
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(draw.choice([*ODD, value, [value], str(value)]))
    return json.dumps(document).encode()


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """A file cut off, with bytes changed or inserted, or something else altogether."""
    place = draw.randrange(len(content) or 1)
    return draw.choice([
        lambda: content[:place], lambda: content[:place] + draw.randbytes(3) + content[place + 3:], lambda: content + draw.randbytes(9),
        lambda: content[:place] + draw.randbytes(20) + content[place:], lambda: b"", lambda: b"[]", lambda: b"null", lambda: b"3",
        lambda: b"[" * 10_000, lambda: b"[" * 10_000 + b"]" * 10_000, lambda: b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        lambda: b"\xff\xfe" + content, lambda: b"\0" * 100, lambda: b'"' + b"a" * 100_000 + b'"', lambda: content * 2])()


def damaged_lines(content: bytes, draw: random.Random) -> bytes:
    """A .jsonl file with one line damaged."""
    lines = content.splitlines()
    number = draw.randrange(len(lines))
    lines[number] = draw.choice([damaged_json, damaged_bytes])(lines[number], draw)
    return b"\n".join(lines) + draw.choice([b"\n", b""])


def damaged_tensors(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file with another header, as whoever makes one by hand could write it, or with other values."""
    end = 8 + int.from_bytes(content[:8], "little")
    header, values = json.loads(content[8:end]), content[end:]
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.sample(names, 2)

    def rename():
        header[draw.choice([name + "x", "model.x", "optimizer.x.exp_avg", "fp8.x.scaling_fwd.scale", "fp8.x", "rng0.x", ""])] = header.pop(name)

    def reshape():
        shape = header[name]["shape"]
        header[name]["shape"] = draw.choice([[], [*shape, 1], shape[::-1], [1, *shape], [-1], [10**12, 0]])

    def other_type():
        start, stop = header[name]["data_offsets"]
        bits = (stop - start) * 8
        for dtype, size in draw.sample([("BOOL", 8), ("I32", 32), ("U8", 8), ("F64", 64), ("F16", 16), ("BF16", 16), ("C64", 64), ("F8_E4M3", 8)], 8):
            if bits % size == 0 and dtype != header[name]["dtype"]:
                header[name] |= {"dtype": dtype, "shape": [bits // size]}
                return

    def metadata():
        header["__metadata__"] = draw.choice([{"format": 3}, {"DCP_SHARDING_INFO": "[]"}, {"DCP_SHARDING_INFO": json.dumps(
            {each: {"saved_offsets": [10**9] * len(header[each]["shape"])} for each in names})}])

    def swap():
        header[name]["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], header[name]["data_offsets"]

    draw.choice([rename, rename, reshape, reshape, other_type, other_type, metadata, swap,
                 lambda: header.__setitem__(name, draw.choice(ODD))])()
    encoded = json.dumps(header).encode()
    if draw.random() < 0.3:
        header.pop(name, None)
        values = draw.choice([b"\x7f" * len(values), values[:-1], b"\xff" * len(values)])
    return len(encoded).to_bytes(8, "little") + encoded + values


def replaced_by_no_file(path: Path, draw: random.Random) -> None:
    path.unlink()
    draw.choice([lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to("nowhere"), lambda: None])()


DAMAGE = {".json": [damaged_json, damaged_json, damaged_bytes], ".jsonl": [damaged_lines], ".safetensors": [damaged_tensors, damaged_bytes]}


def damage(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.1:
        replaced_by_no_file(path, draw)
    else:
        path.write_bytes(draw.choice(DAMAGE.get(path.suffix, [damaged_bytes]))(path.read_bytes(), draw))


# ---------------------------------------------------------------- what must hold

def contents(folder: Path) -> dict:
    return {name: Path(folder, name).read_bytes() if isinstance(kind, int) and kind else None for name, kind in tree(folder).items()}


def check(script, main, argv, capsys, case):
    """Run a command -> (exit code, stderr). It is 0, or 1 (diverged) or 2 with one line on stderr; after 2 every file is as it was."""
    def hang(*_):
        raise Hang(case)

    before = contents(Path.cwd())
    capsys.readouterr()
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    try:
        code = cli.run(lambda: main(argv.split()), script)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
    error = "".join(line for line in capsys.readouterr().err.splitlines(True) if line.startswith(f"{script}: ") or code)
    assert code in (0, 1, 2), case
    if code:
        assert error.startswith(f"{script}: ") and error.count("\n") == 1, f"{case}: {error}"
    if code == 2:
        assert len(error) < 1000, case
        assert contents(Path.cwd()) == before, f"{case}: {error}"
    return code, error


def in_copy(world, tmp_path, names, number):
    folder = tmp_path / str(number)
    folder.mkdir()
    for name in names:
        shutil.copytree(world / name, folder / name)
    os.chdir(folder)


@pytest.fixture(autouse=True)
def back():
    before = Path.cwd()
    yield
    os.chdir(before)


def sign(folder="run/step-2"):
    """SHA256SUMS as whoever sends a checkpoint would make it."""
    sums = checkpoint._checksums(Path(folder))
    Path(folder, "SHA256SUMS").write_text("".join(f"{checksum}  {file}\n" for file, checksum in sums.items()))


def change_json(path, **fields):
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | fields))


def change_tensors(path, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


META = Path("run/step-2/meta.json")
RUNS = {  # what is done, what the line holds
    "a list": (lambda: META.write_text("[]"), "meta.json: the document is [], not an object"),
    "null": (lambda: META.write_text("null"), "meta.json: the document is null, not an object"),
    "NaN": (lambda: change_json(META, step=float("nan")), "meta.json: step is NaN, not an integer of 0 or more"),
    "nesting": (lambda: META.write_text("[" * 10_000 + "]" * 10_000), "meta.json: lists or objects more than 200 deep"),
    "nesting in a field": (lambda: META.write_text(META.read_text().replace('"step": 2', '"step": 2, "x": ' + "[" * 300 + "]" * 300)), "deep"),
    "step as text": (lambda: change_json(META, step="2"), 'meta.json: step is "2", not'),
    "step below 0": (lambda: change_json(META, step=-1), "meta.json: step is -1, not"),
    "half a step": (lambda: change_json(META, step=2.5), "meta.json: step is 2.5, not"),
    "a huge step": (lambda: change_json(META, step=10**30), "meta.json: step is 1000"),
    "no model_config": (lambda: META.write_text(META.read_text().replace('"model_config"', '"other"')), "meta.json: model_config is missing"),
    "hf as text": (lambda: change_json(META, hf="x"), 'meta.json: hf is "x", not an object'),
    "a huge model": (lambda: change_json(META, model_config={"n_layer": 10**12}), "meta.json: model_config describes a model of"),
    "no regular file": (lambda: (META.unlink(), os.mkfifo(META)), "meta.json is not a regular file"),
    "a pipe as SHA256SUMS": (lambda: (Path("run/step-2/SHA256SUMS").unlink(), os.mkfifo("run/step-2/SHA256SUMS")), "not a regular file"),
    "a file not listed": (lambda: shutil.copy(next(Path("run/step-2").glob("*.safetensors")), "run/step-2/more.safetensors"), "is not listed"),
}


@pytest.mark.parametrize("script", ["train.py", "sample.py", "export_hf.py"])
@pytest.mark.parametrize("case", RUNS)
def test_a_hostile_checkpoint(world, tmp_path, capsys, script, case):
    in_copy(world, tmp_path, ["run", "tokens"], 0)
    do, words = RUNS[case]
    do()
    if META.is_file() and "SHA256SUMS" not in case and "listed" not in case:
        sign()
    code, line = check(script, *COMMANDS[script], capsys, case)
    assert code == 2 and words in line, line


@pytest.mark.parametrize("change, words", [
    (lambda tensors: tensors.update({"fp8.blocks.7.attn.qkv.scaling_fwd.scale": torch.ones(3)}), "FP8 state for a module 'blocks.7.attn.qkv'"),
    (lambda tensors: tensors.pop("fp8.lm_head.scaling_fwd.scale"), "FP8 state of the module 'lm_head'"),
    (lambda tensors: tensors.update({"fp8.lm_head.scaling_bwd.amax_history": torch.ones(4, 9)}), "FP8 state lm_head.scaling_bwd"),
    (lambda tensors: tensors.update({"optimizer.wte.weight.exp_avg": torch.ones(3)}), "optimizer.wte.weight.exp_avg is (3,)"),
    (lambda tensors: tensors.pop("optimizer.wte.weight.exp_avg_sq"), "of exp_avg and exp_avg_sq of wte.weight one is missing"),
    (lambda tensors: tensors.update({"model.wte.weight": torch.ones(288, 32, dtype=torch.int32)}), "model.wte.weight is torch.int32"),
    (lambda tensors: tensors.update({"rng0.host": torch.zeros(5, dtype=torch.uint8)}), "random generators is damaged"),
    (lambda tensors: tensors.update({"rng0.torch": torch.zeros(5, dtype=torch.uint8)}), "random generators is damaged")])
def test_hostile_tensors_of_a_checkpoint(world, tmp_path, capsys, change, words):
    in_copy(world, tmp_path, ["run", "tokens"], 0)
    change_tensors(next(Path("run/step-2").glob("*.safetensors")), change)
    sign()
    code, line = check("train.py", *COMMANDS["train.py"], capsys, words)
    assert code == 2 and words in line, line


@pytest.mark.parametrize("log", ["metrics.jsonl", "fp8_health.jsonl"])
@pytest.mark.parametrize("line", ["[]", "3", '"text"', "{}", '{"step": "a"}', '{"step": 1, "loss": NaN, "health": 1}', "[" * 9999, "\0" * 9])
def test_other_json_in_a_log(world, tmp_path, capsys, log, line):
    in_copy(world, tmp_path, ["run", "tokens"], 0)
    path = Path("run", log)
    path.write_text(line + "\n" + path.read_text())
    for script in ["train.py"] + ["export_hf.py"] * (log == "metrics.jsonl"):
        code, told = check(script, *COMMANDS[script], capsys, line)
        assert code == 2 and f"run/{log}:1: " in told, told


def test_a_last_line_that_a_kill_cut_off_goes(world, tmp_path, capsys):
    in_copy(world, tmp_path, ["run", "tokens"], 0)
    for log in ("metrics.jsonl", "fp8_health.jsonl"):
        with open(Path("run", log), "a") as file:
            file.write('{"step": 3, "lo')
    assert check("train.py", *COMMANDS["train.py"], capsys, "cut off")[0] == 0
    assert [record["step"] for record in train.read_metrics("run/metrics.jsonl")] == [1, 2, 3]


def weight(name, value):
    return lambda: change_tensors("hf/model.safetensors", lambda tensors: tensors.update({name: value}))


def second_copy():
    shutil.copy("hf/model.safetensors", "hf/other.safetensors")
    change_tensors("hf/other.safetensors", lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64)}))


HEAD = torch.zeros(300, 64)
FOLDERS = {
    "nanote is a list": (lambda: change_json("hf/config.json", nanote=[1]), "config.json: nanote is [1], not an object"),
    "nanote.bias is text": (lambda: change_json("hf/config.json", nanote={"bias": "x"}), 'config.json: nanote.bias is "x", not true or false'),
    "no heads": (lambda: change_json("hf/config.json", num_attention_heads=0), "num_attention_heads is 0, not an integer of 1 or more"),
    "many layers": (lambda: change_json("hf/config.json", num_hidden_layers=10**12, layer_types=None),
                    "num_hidden_layers is 1000000000000, not an integer from 1 to 65535"),
    "0 dimensions": (weight("model.norm.weight", torch.tensor(1.0)), "tensor model.norm.weight has shape (); config.json asks for (64,)"),
    "another shape": (weight("model.layers.0.self_attn.k_proj.weight", torch.ones(64, 63)), "has shape (64, 63); config.json asks for (64, 64)"),
    "complex": (weight("model.norm.weight", torch.ones(64, dtype=torch.complex64)), "model.norm.weight is torch.complex64; float32"),
    "integers": (weight("model.norm.weight", torch.ones(64, dtype=torch.int64)), "model.norm.weight is torch.int64; float32"),
    "booleans": (weight("model.norm.weight", torch.ones(64, dtype=torch.bool)), "model.norm.weight is torch.bool; float32"),
    "NaN": (weight("model.norm.weight", torch.full((64,), float("nan"))), "model.norm.weight holds values that are NaN or infinite"),
    "infinity": (weight("model.norm.weight", torch.full((64,), float("-inf"), dtype=torch.float16)), "NaN or infinite"),
    "a second copy": (second_copy, "is in model.safetensors and in other.safetensors; keep one copy"),
    "another head than the embedding": (weight("lm_head.weight", HEAD), "lm_head.weight differs from the embedding"),
    "a pipe beside it": (lambda: os.mkfifo("hf/generation.json"), "generation.json: not a regular file"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_hostile_hugging_face_folder(world, tmp_path, capsys, case):
    in_copy(world, tmp_path, ["hf"], 0)
    do, words = FOLDERS[case]
    do()
    code, line = check("import_hf.py", import_hf.main, "hf run", capsys, case)
    assert code == 2 and words in line, line


# ---------------------------------------------------------------- drawn from a seed

@pytest.mark.parametrize("name", ["step-2/meta.json", "step-2/SHA256SUMS", "step-2/*.safetensors", "metrics.jsonl", "fp8_health.jsonl"])
@pytest.mark.parametrize("script", ["train.py", "sample.py", "export_hf.py"])
def test_a_damaged_run(world, tmp_path, capsys, name, script):
    if script == "sample.py" and name.endswith("jsonl") or script == "export_hf.py" and name.startswith("fp8"):
        pytest.skip("does not read it")
    codes = []
    for number in range(CASES):
        draw = random.Random(f"{name} {number}")
        in_copy(world, tmp_path, ["run", "tokens"], number)
        damage(next(Path("run").glob(name)), draw)
        if not name.endswith("SHA256SUMS") and name.startswith("step-2") and draw.random() < 0.9:  # as whoever sends it would
            sign()
        codes.append(check(script, *COMMANDS[script], capsys, f"{script} {name} case {number}")[0])
    assert 2 in codes


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin"])
def test_damaged_token_files(world, tmp_path, capsys, name):
    codes = []
    for number in range(CASES):
        draw = random.Random(f"{name} {number}")
        in_copy(world, tmp_path, ["tokens"], number)
        path = Path("tokens", name)
        damage(path, draw)
        with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):  # as whoever makes them would
            if not all(Path("tokens", each).is_file() for each in ("meta.json", name)):
                raise ValueError
            meta = json.loads(Path("tokens/meta.json").read_text())
            if path.suffix == ".bin":
                meta |= {f"{path.stem}_tokens": path.stat().st_size // 2, f"{path.stem}_sha256": data.sha256(path)}
            meta["sha256"] = data._meta_checksum(meta)
            Path("tokens/meta.json").write_text(json.dumps(meta))
        codes.append(check("train.py", train.main, f"{SMALL} --data tokens --max-steps 1 --out-dir run", capsys, f"tokens/{name} case {number}")[0])
    assert 2 in codes


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_damaged_hugging_face_folder(world, tmp_path, capsys, name):
    codes = []
    for number in range(CASES):
        in_copy(world, tmp_path, ["hf"], number)
        damage(Path("hf", name), random.Random(f"{name} {number}"))
        codes.append(check("import_hf.py", import_hf.main, "hf run", capsys, f"hf/{name} case {number}")[0])
    assert 2 in codes
