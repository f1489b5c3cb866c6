"""Damaged and hostile files: a command that reads one succeeds, or refuses in one line and changes nothing.

First cases with a name, then some hundreds that are drawn from a seed.
"""
import contextlib
import copy
import json
import math
import os
import random
import re
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from test_bad_input import tree

import sample
import train
from nanote import checkpoint, cli, dataset
from nanote.metrics import read_metrics
from tools import export_hf, import_hf
from trainer_tools import make_tokens, run_train, short_endings

pytest.importorskip("transformers")
CASES = 12  # of each file
ODD = [None, True, [], {}, "", "text", "\ud800", -1, 0, 1, 2.5, 10**12, 10**30, -10**12, 1e300,
       math.nan, math.inf, [1], [[]], {"a": 1}, "byte", "gpt9", "step-1", "../../x", "custom:evil.f", "\x00"]
SMALL = ("--n-layer 1 --n-head 2 --n-embd 32 --seq-len 16 --micro-batch-size 2 --warmup-steps 0 "
         "--fp8-amax-history-len 4 --log-interval 1 --eval-interval 0 --eval-steps 1 --checkpoint-interval 0 "
         "--no-background-saves --device cpu")


COMMANDS = {"train.py": (train.main, "--resume --out-dir run --max-steps 3 --fp8-health-interval 1"),
            "sample.py": (sample.main, "run --max-new-tokens 2 --device cpu"),
            "tools/export_hf.py": (export_hf.main, "run folder")}


class Hang(BaseException):
    pass


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with good token files, a good run and a good Hugging Face folder."""
    from test_hf import make_folder

    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_tokens("tokens")
        assert run_train(f"{SMALL} --max-steps 2 --fp8-health-interval 1 --out-dir run", "tokens") == 0
        make_folder("hf", "qwen3")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short endings and no TensorBoard, which reads nothing."""
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.__init__", lambda *_, **__: None)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", lambda *_, **__: None)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with short_endings():
        yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- damage

def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """Replace or remove one value of a JSON document, or add a field."""
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
    """Cut off a file, change or insert bytes, or replace it by something else."""
    place = draw.randrange(len(content) or 1)
    before, after = content[:place], content[place:]
    return draw.choice([
        before, before + draw.randbytes(3) + after[3:], before + draw.randbytes(20) + after,
        content + draw.randbytes(9), content * 2, b"\xff\xfe" + content,
        b"", b"[]", b"null", b"3", b"\0" * 100, b'"' + b"a" * 100_000 + b'"',
        b"[" * 10_000, b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000])


def damaged_lines(content: bytes, draw: random.Random) -> bytes:
    """Damage one line of a .jsonl file."""
    lines = content.splitlines()
    number = draw.randrange(len(lines))
    lines[number] = draw.choice([damaged_json, damaged_bytes])(lines[number], draw)
    return b"\n".join(lines) + draw.choice([b"\n", b""])


def damaged_tensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header or the values of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header, values = json.loads(content[8:end]), content[end:]
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.sample(names, 2)

    def rename():
        new = [name + "x", "model.x", "optimizer.x.exp_avg", "fp8.x.scaling_fwd.scale", "fp8.x", "rng0.x", ""]
        header[draw.choice(new)] = header.pop(name)

    def reshape():
        shape = header[name]["shape"]
        header[name]["shape"] = draw.choice([[], [*shape, 1], shape[::-1], [1, *shape], [-1], [10**12, 0]])

    def other_type():
        start, stop = header[name]["data_offsets"]
        sizes = {"BOOL": 1, "I32": 4, "U8": 1, "F64": 8, "F16": 2, "BF16": 2, "C64": 8, "F8_E4M3": 1}
        fitting = [dtype for dtype, size in sizes.items() if (stop - start) % size == 0]
        dtype = draw.choice(fitting)
        header[name] |= {"dtype": dtype, "shape": [(stop - start) // sizes[dtype]]}

    def metadata():
        offsets = {each: {"saved_offsets": [10**9] * len(header[each]["shape"])} for each in names}
        header["__metadata__"] = draw.choice([{"format": 3}, {"DCP_SHARDING_INFO": "[]"},
                                              {"DCP_SHARDING_INFO": json.dumps(offsets)}])

    def swap():
        places = header[name]["data_offsets"], header[other]["data_offsets"]
        header[other]["data_offsets"], header[name]["data_offsets"] = places

    def odd():
        header[name] = draw.choice(ODD)

    draw.choice([rename, rename, reshape, reshape, other_type, other_type, metadata, swap, odd])()
    encoded = json.dumps(header).encode()
    if draw.random() < 0.3:
        header.pop(name, None)
        values = draw.choice([b"\x7f" * len(values), values[:-1], b"\xff" * len(values)])
    return len(encoded).to_bytes(8, "little") + encoded + values


def replaced_by_no_file(path: Path, draw: random.Random) -> None:
    path.unlink()
    draw.choice([lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to("/dev/zero"),
                 lambda: path.symlink_to("nowhere"), lambda: None])()


DAMAGE = {".json": [damaged_json, damaged_json, damaged_bytes], ".jsonl": [damaged_lines],
          ".safetensors": [damaged_tensors, damaged_bytes]}


def damage(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.1:
        replaced_by_no_file(path, draw)
    else:
        path.write_bytes(draw.choice(DAMAGE.get(path.suffix, [damaged_bytes]))(path.read_bytes(), draw))


# ---------------------------------------------------------------- checks

def contents(folder: Path) -> dict:
    return {name: Path(folder, name).read_bytes() if mtime else None for name, mtime in tree(folder).items()}


def check(script, main, argv, capsys, case):
    """Run a command; return its exit code and the line on stderr.

    The code must be 0, or 1 (diverged) or 2 with one line. After 2 no file may have changed.
    """
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
    said = capsys.readouterr()
    error = said.err if code else ""
    assert code in (0, 1, 2), case
    assert "is not drawn" not in said.out, f"{case}: {said.out}"  # a log that passed the check can be plotted
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
    """Write a valid SHA256SUMS, as an attacker would."""
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
SUMS = Path("run/step-2/SHA256SUMS")
HEADS = {"n_head": 10**12 + 39, "n_kv_head": 5 * 10**11, "head_dim": 1}  # prime: no divisor
DEEP = "[" * 300 + "]" * 300


def change_text(path, before, after):
    path.write_text(path.read_text().replace(before, after))


RUNS = {  # name: (what is done, words of the line)
    "a list": (lambda: META.write_text("[]"), "meta.json: the document is [], not an object"),
    "null": (lambda: META.write_text("null"), "meta.json: the document is null, not an object"),
    "NaN": (lambda: change_json(META, step=math.nan), "meta.json: step is NaN, not an integer of 0 or more"),
    "nesting": (lambda: META.write_text("[" * 10_000 + "]" * 10_000), "lists or objects more than 200 deep"),
    "nesting in a field": (lambda: change_text(META, '"step"', f'"x": {DEEP}, "step"'), "more than 200 deep"),
    "step as text": (lambda: change_json(META, step="2"), 'meta.json: step is "2", not'),
    "step below 0": (lambda: change_json(META, step=-1), "meta.json: step is -1, not"),
    "half a step": (lambda: change_json(META, step=2.5), "meta.json: step is 2.5, not"),
    "a huge step": (lambda: change_json(META, step=10**30), "meta.json: step is 1000"),
    "no model_config": (lambda: change_text(META, '"model_config"', '"x"'), "model_config is missing"),
    "hf as text": (lambda: change_json(META, hf="x"), 'meta.json: hf is "x", not an object'),
    "a huge model": (lambda: change_json(META, model_config={"n_layer": 10**12}), "describes a model of"),
    "many heads": (lambda: change_json(META, model_config=HEADS), "OptimizedConfig.n_kv_head=5000000000"),
    "advanced, many heads": (lambda: change_json(META, model_config=HEADS, model="advanced"),
                             "AdvancedConfig.n_kv_head=500000000000: must divide"),
    "no regular file": (lambda: (META.unlink(), os.mkfifo(META)), "meta.json is not a regular file"),
    "a pipe as SHA256SUMS": (lambda: (SUMS.unlink(), os.mkfifo(SUMS)),
                             "SHA256SUMS: missing, or not a regular file"),
    "a file not listed": (lambda: META.with_name("x.safetensors").write_bytes(b""), "is not listed"),
}


@pytest.mark.parametrize("script", ["train.py", "sample.py", "tools/export_hf.py"])
@pytest.mark.parametrize("case", RUNS)
def test_a_hostile_checkpoint(world, tmp_path, capsys, script, case):
    in_copy(world, tmp_path, ["run", "tokens"], 0)
    do, words = RUNS[case]
    do()
    if META.is_file() and "SHA256SUMS" not in case and "listed" not in case:
        sign()
    code, line = check(script, *COMMANDS[script], capsys, case)
    assert code == 2 and words in line, line


BYTES = torch.zeros(5, dtype=torch.uint8)


@pytest.mark.parametrize("name, value, words", [  # None: the tensor is removed
    ("fp8.blocks.7.attn.qkv.scaling_fwd.scale", torch.ones(3), "FP8 state for a module 'blocks.7.attn.qkv'"),
    ("fp8.lm_head.scaling_fwd.scale", None, "FP8 state of the module 'lm_head'"),
    ("fp8.lm_head.scaling_bwd.amax_history", torch.ones(4, 9), "FP8 state lm_head.scaling_bwd"),
    ("optimizer.wte.weight.exp_avg", torch.ones(3), "optimizer.wte.weight.exp_avg is (3,)"),
    ("optimizer.wte.weight.exp_avg_sq", None, "of exp_avg and exp_avg_sq of wte.weight one is missing"),
    ("model.wte.weight", torch.ones(288, 32, dtype=torch.int32), "model.wte.weight is torch.int32"),
    ("rng0.host", BYTES, "random generators is damaged"),
    ("rng0.torch", BYTES, "random generators is damaged")])
def test_hostile_tensors_of_a_checkpoint(world, tmp_path, capsys, name, value, words):
    def change(tensors):
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    in_copy(world, tmp_path, ["run", "tokens"], 0)
    change_tensors(next(Path("run/step-2").glob("*.safetensors")), change)
    sign()
    code, line = check("train.py", *COMMANDS["train.py"], capsys, words)
    assert code == 2 and words in line, line


def generators(**changes):
    """Return the state of Python's and NumPy's generators as checkpoints store it, with changes."""
    version, numbers, gauss = random.Random(1).getstate()
    key = np.random.RandomState(1).get_state()[1]
    state = {"version": version, "numbers": list(numbers), "gauss": gauss, "name": "MT19937",
             "key": key.tolist(), "position": 624, "has_gauss": 0, "cached": 0.0} | changes
    return [list(state.values())[:3], list(state.values())[3:]]


@pytest.fixture
def keep_generators():
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


@pytest.mark.parametrize("state", [
    {"position": 500_000_000}, {"position": 625}, {"position": -1}, {"position": 1.5}, {"position": None},
    {"key": [1] * 623}, {"key": [1] * 625}, {"key": [1.5] * 624}, {"key": [-1] * 624}, {"key": [2**32] * 624},
    {"key": []}, {"key": "text"}, {"name": "PCG64"}, {"has_gauss": 2}, {"cached": None}, {"cached": math.nan},
    {"gauss": "text"}, {"gauss": math.inf}, {"numbers": [1] * 624}, {"numbers": [1.5] * 625},
    {"numbers": [1] * 624 + [625]}, {"version": 9}, [], [[]], [3, 4], None],
    ids=lambda state: json.dumps(state)[:30])
def test_a_hostile_state_of_the_random_generators(world, tmp_path, capsys, keep_generators, state):
    def change(tensors):
        text = json.dumps(generators(**state) if isinstance(state, dict) else state)
        tensors["rng0.host"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    in_copy(world, tmp_path, ["run", "tokens"], 0)
    change_tensors(next(Path("run/step-2").glob("*.safetensors")), change)
    sign()
    code, line = check("train.py", *COMMANDS["train.py"], capsys, str(state)[:60])
    assert code == 2 and "the state of the random generators is damaged (" in line, line
    assert state != {"position": 625} or "position is 625, not an integer from 0 to 624)" in line, line


def test_a_good_state_of_the_random_generators_is_taken(keep_generators):
    for gauss, has_gauss in ((None, 0), (0.5, 1)):
        text = json.dumps(generators(gauss=gauss, has_gauss=has_gauss, cached=0.25))
        host = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        checkpoint._set_rng_state("run/step-2", {"host": host, "torch": torch.get_rng_state()})
        assert random.gauss(0, 1) == (0.5 if gauss else random.Random(1).gauss(0, 1))
        assert np.random.normal() == (0.25 if has_gauss else np.random.RandomState(1).normal())


@pytest.mark.parametrize("log", ["metrics.jsonl", "fp8_health.jsonl"])
@pytest.mark.parametrize("line", ["[]", "3", '"text"', "{}", '{"step": "a"}', "[" * 9999, "\0" * 9,
                                  '{"step": 1, "loss": NaN, "health": 1}'])
def test_other_json_in_a_log(world, tmp_path, capsys, log, line):
    in_copy(world, tmp_path, ["run", "tokens"], 0)
    path = Path("run", log)
    path.write_text(line + "\n" + path.read_text())
    for script in ["train.py"] + ["tools/export_hf.py"] * (log == "metrics.jsonl"):
        code, told = check(script, *COMMANDS[script], capsys, line)
        assert code == 2 and f"run/{log}:1: " in told, told


FIGURES = {"amax": 1.0, "scale": 2.0, "saturated": 0.0, "flushed": 0.1}
TAKEN = [0, 1e-320, 1]  # valid for every figure; block scaling has no single scale
ALSO_TAKEN = {"amax": [3e38, math.inf], "scale": [None, 3e38, math.inf], "saturated": [None],
              "flushed": [None]}
REFUSED = [-1, 1e300, -math.inf, math.nan, "x", [], "missing"]
ALSO_REFUSED = {"amax": [None], "scale": [], "saturated": [1.5, math.inf], "flushed": [1.5, math.inf]}


@pytest.mark.parametrize("name", FIGURES)
def test_odd_figures_in_fp8_health_are_drawn_or_refused(world, tmp_path, capsys, name):
    def write(values):
        health = {}
        for block, value in enumerate(values):
            figures = FIGURES | {name: value}
            if value == "missing":
                del figures[name]
            health[f"blocks.{block}.mlp"] = {"fc1_input": figures}
        Path("run/fp8_health.jsonl").write_text(json.dumps({"step": 1, "health": health}) + "\n")

    def code_and_line(values, number):
        in_copy(world, tmp_path, ["run", "tokens"], number)
        write(values)
        return check("train.py", *COMMANDS["train.py"], capsys, f"{name} {values}")

    assert code_and_line(TAKEN + ALSO_TAKEN[name], 0)[0] == 0
    told = f"run/fp8_health.jsonl:1: health.blocks.0.mlp.fc1_input.{name} is"
    first, *others = REFUSED + ALSO_REFUSED[name]
    code, line = code_and_line([first], 1)
    assert code == 2 and told in line, line
    for value in others:
        write([value])
        with pytest.raises(ValueError, match=re.escape(told)):
            read_metrics("run/fp8_health.jsonl")


@pytest.mark.parametrize("name", ["loss", "val_loss"])
def test_losses_beyond_float32(world, tmp_path, capsys, name):
    def write(values):
        records = [{"step": step, "loss": 2.0, name: value} for step, value in enumerate(values, 1)]
        Path("run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def code_and_line(values, number):
        in_copy(world, tmp_path, ["run", "tokens"], number)
        write(values)
        return check("train.py", *COMMANDS["train.py"], capsys, f"{name} {values}")

    assert code_and_line([3.4e38, -3.4e38], 0)[0] == 0
    assert [record[name] for record in read_metrics("run/metrics.jsonl")][:2] == [3.4e38, -3.4e38]
    assert code_and_line([10**18], 1)[0] == 0
    told = f"run/metrics.jsonl:2: {name} is {{}}, not"
    code, line = code_and_line([2.0, 1e308], 2)
    assert code == 2 and told.format("1e+308") in line, line
    for value in (-1e308, math.inf, math.nan, None):
        write([2.0, value])
        with pytest.raises(ValueError, match=re.escape(told.format(json.dumps(value)))):
            read_metrics("run/metrics.jsonl")


def test_an_incomplete_last_line_is_removed(world, tmp_path, capsys):
    in_copy(world, tmp_path, ["run", "tokens"], 0)
    for log in ("metrics.jsonl", "fp8_health.jsonl"):
        with open(Path("run", log), "a") as file:
            file.write('\n{"step": 3, "lo')
    assert check("train.py", *COMMANDS["train.py"], capsys, "cut off")[0] == 0
    assert [record["step"] for record in read_metrics("run/metrics.jsonl")] == [1, 2, 3]


def weight(name, value):
    return lambda: change_tensors("hf/model.safetensors", lambda tensors: tensors.update({name: value}))


def index(*files):
    """Rename the weights to a.safetensors; name `files` in an index."""
    def do():
        os.rename("hf/model.safetensors", "hf/a.safetensors")
        shutil.copy("hf/a.safetensors", "hf/b.safetensors")
        weight_map = {str(number): file for number, file in enumerate(files)}
        Path("hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return do


def config(**fields):
    return lambda: change_json("hf/config.json", **fields)


NORM, KEYS = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"
FOLDERS = {
    "nanote is a list": (config(nanote=[1]), "config.json: nanote is [1], not an object"),
    "nanote.bias is text": (config(nanote={"bias": "x"}), 'nanote.bias is "x", not true or false'),
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0, not an integer of 1 or more"),
    "many layers": (config(num_hidden_layers=10**12, layer_types=None), "num_hidden_layers is 1000000000000"),
    "0 dimensions": (weight(NORM, torch.tensor(1.0)), f"{NORM} has shape (); config.json asks for (64,)"),
    "another shape": (weight(KEYS, torch.ones(64, 63)), "has shape (64, 63); config.json asks for (64, 64)"),
    "complex": (weight(NORM, torch.ones(64, dtype=torch.complex64)), f"{NORM} is torch.complex64; float32"),
    "integers": (weight(NORM, torch.ones(64, dtype=torch.int64)), f"{NORM} is torch.int64; float32"),
    "booleans": (weight(NORM, torch.ones(64, dtype=torch.bool)), f"{NORM} is torch.bool; float32"),
    "NaN": (weight(NORM, torch.full((64,), math.nan)), f"{NORM} holds values that are NaN or infinite"),
    "infinity": (weight(NORM, torch.full((64,), -math.inf).half()), f"{NORM} holds values that are NaN or"),
    "a second copy": (index("a.safetensors", "b.safetensors"), "is in a.safetensors and in b.safetensors"),
    "a missing shard": (index("a.safetensors", "c.safetensors"), "names c.safetensors, which is no file in"),
    "a shard elsewhere": (index("../hf/a.safetensors"), "names ../hf/a.safetensors, which is no"),
    "negative epsilon": (config(rms_norm_eps=-1.0), "rms_norm_eps is -1.0, not a number from 0 to 1"),
    "another head": (weight("lm_head.weight", torch.zeros(300, 64)), "differs from the embedding"),
    "a pipe beside it": (lambda: os.mkfifo("hf/generation.json"), "generation.json: not a regular file"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_hostile_hugging_face_folder(world, tmp_path, capsys, case):
    in_copy(world, tmp_path, ["hf"], 0)
    do, words = FOLDERS[case]
    do()
    code, line = check("tools/import_hf.py", import_hf.main, "hf run", capsys, case)
    assert code == 2 and words in line, line


@contextlib.contextmanager
def memory_limit(more: int):
    """Limit this process to `more` further bytes of address space, so that a hostile size fails at once."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("fields", [
    {"num_labels": 300_000_000}, {"id2label": None, "num_labels": 300_000_000}, {"num_labels": 2**63 - 1},
    {"per_layer_config": {"0": {"num_labels": 300_000_000}}},
    {"attribute_map": {"hidden_size": "vocab_size"}},
    {"configuration_files": ["config.0.0.1.json"]}], ids=str)
def test_config_json_fields_that_import_does_not_know_reach_no_library(world, tmp_path, capsys, fields):
    in_copy(world, tmp_path, ["hf"], 0)
    other = json.loads(Path("hf/config.json").read_text()) | {"num_labels": 300_000_000}
    Path("hf/config.0.0.1.json").write_text(json.dumps(other))
    change_json("hf/config.json", **fields)
    with memory_limit(2**30):
        code, line = check("tools/import_hf.py", import_hf.main, "hf run", capsys, str(fields))
    assert code == 0, line


# ---------------------------------------------------------------- random damage, from a seed

CHECKPOINT = ["step-2/meta.json", "step-2/SHA256SUMS", "step-2/*.safetensors"]
READ = {"train.py": [*CHECKPOINT, "metrics.jsonl", "fp8_health.jsonl"], "sample.py": CHECKPOINT,
        "tools/export_hf.py": [*CHECKPOINT, "metrics.jsonl"]}


@pytest.mark.parametrize("script, name", [(script, name) for script, names in READ.items() for name in names])
def test_a_damaged_run(world, tmp_path, capsys, script, name):
    codes = []
    for number in range(CASES):
        draw = random.Random(f"{name} {number}")
        in_copy(world, tmp_path, ["run", "tokens"], number)
        damage(next(Path("run").glob(name)), draw)
        if name in ("step-2/meta.json", "step-2/*.safetensors") and draw.random() < 0.9:
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
        if Path("tokens/meta.json").is_file() and path.is_file():
            sign_tokens(path)
        argv = f"{SMALL} --data tokens --max-steps 1 --out-dir run"
        codes.append(check("train.py", train.main, argv, capsys, f"tokens/{name} case {number}")[0])
    assert 2 in codes


def sign_tokens(changed: Path):
    """Make meta.json match the changed token files, if it is still readable."""
    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
        meta = json.loads(Path("tokens/meta.json").read_text())
        if changed.suffix == ".bin":
            tokens = changed.stat().st_size // 2
            meta |= {f"{changed.stem}_tokens": tokens, f"{changed.stem}_sha256": dataset.sha256(changed)}
        meta["sha256"] = dataset._meta_checksum(meta)
        Path("tokens/meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json",
                                  "model.safetensors"])
def test_a_damaged_hugging_face_folder(world, tmp_path, capsys, name):
    codes = []
    for number in range(CASES):
        in_copy(world, tmp_path, ["hf"], number)
        damage(Path("hf", name), random.Random(f"{name} {number}"))
        codes.append(
            check("tools/import_hf.py", import_hf.main, "hf run", capsys, f"hf/{name} case {number}")[0]
        )
    assert 2 in codes
