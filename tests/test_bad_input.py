"""User mistakes: one line that names the value and one that works, exit code 2, no file written."""
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import run_python
from nanote import checkpoint, dataset, fp8
from trainer_tools import OPTIONS, ROOT, make_tokens, run_script, run_train


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Good token files, a good run, and one example of each kind of bad input."""
    folder = tmp_path_factory.mktemp("world")
    before = Path.cwd()
    os.chdir(folder)
    try:
        make_tokens("tokens")
        assert run_train(f"{OPTIONS} --max-steps 4 --checkpoint-interval 2 --out-dir out/good", "tokens") == 0
        shutil.copytree("out/good", "out/damaged")
        path = next(Path("out/damaged/step-4").glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)
        shutil.copytree("tokens", "altered")
        content = bytearray(Path("altered/train.bin").read_bytes())
        content[99] ^= 1
        Path("altered/train.bin").write_bytes(content)
        shutil.copytree("tokens", "truncated")
        Path("truncated/val.bin").write_bytes(Path("truncated/val.bin").read_bytes()[:-2])
        shutil.copytree("tokens", "newer")
        meta = json.loads(Path("newer/meta.json").read_text()) | {"format": 99}
        Path("newer/meta.json").write_text(json.dumps(meta | {"sha256": dataset._meta_checksum(meta)}))
        shutil.copytree("tokens", "no-val")
        Path("no-val/val.bin").unlink()
        dataset.write_tokens(iter(["short", "text"]), "short", val_fraction=0.5)
        Path("out/empty").mkdir()
        Path("empty.txt").touch()
        Path("file.txt").write_text("some text\n")
        Path("binary.txt").write_bytes(b"\xff\xfe\x00")
        Path("broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
        Path("deep.jsonl").write_text("[" * 100_000 + "]" * 100_000 + "\n")
        Path("other.jsonl").write_text('{"body": "no text"}\n')
    finally:
        os.chdir(before)
    return folder


def a100(monkeypatch):
    """Answer as TE does on a GPU older than Ada."""
    answer = False, "Device compute capability 8.9 or higher required for FP8 execution."
    for name in ("delayed", "current"):
        monkeypatch.setitem(fp8._AVAILABLE, name, lambda return_reason=False: answer)


def full_disk(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)


GOOD = f"{OPTIONS} --data tokens"
HUGE = 6400 * 10**15  # below 2^63, and a multiple of 32
CASES = [  # script, arguments, words of the line, and optionally what to break first
    # train.py: names
    ("train.py", "--preset gpt3", ["gpt3", "tiny", "llama3-8b"]),
    ("train.py", "--preset=", ["preset"]),
    ("train.py", f"{GOOD} --model best", ["best", "optimized"]),
    ("train.py", f"{GOOD} --learning-rate 1", ["--learning-rate", "--help"]),
    ("train.py", f"{GOOD} --max-step 1", ["--max-step", "perhaps --max-steps"]),
    ("train.py", f"{GOOD} --fp8-recipe fp4", ["fp4", "delayed", "mxfp8"]),
    ("train.py", f"{GOOD} --lr-schedule linear", ["linear", "cosine", "wsd"]),
    ("train.py", f"{GOOD} --device tpu", ["tpu", "cpu"]),
    ("train.py", f"{GOOD} --device cpu:5", ["--device cpu:5", "auto, cpu, cuda or cuda:N"]),
    ("train.py", f"{GOOD} --device cuda:99", ["cuda:99", "CUDA devices"]),
    ("train.py", f"{GOOD} stray", ["stray"]),
    # train.py: numbers
    ("train.py", f"{GOOD} --max-steps -5", ["--max-steps -5", "at least 1"]),
    ("train.py", f"{GOOD} --max-steps many", ["--max-steps", "many"]),
    ("train.py", f"{GOOD} --lr", ["--lr"]),
    ("train.py", f"{GOOD} --lr 0", ["--lr 0", "above 0"]),
    ("train.py", f"{GOOD} --lr nan", ["--lr nan", "above 0"]),
    ("train.py", f"{GOOD} --micro-batch-size 0", ["--micro-batch-size 0"]),
    ("train.py", f"{GOOD} --grad-accum 0", ["--grad-accum 0"]),
    ("train.py", f"{GOOD} --keep-checkpoints 0", ["--keep-checkpoints 0"]),
    ("train.py", f"{GOOD} --beta2 1", ["--beta2 1", "below 1"]),
    (
        "train.py", f"{GOOD} --beta2 0.997 --moment-dtype bfloat16",
        ["--beta2 0.997", "at most 0.996", "--moment-dtype bfloat16"],
    ),
    ("train.py", f"{GOOD} --grad-clip -1", ["--grad-clip -1"]),
    ("train.py", f"{GOOD} --warmup-steps -1", ["--warmup-steps -1"]),
    ("train.py", f"{GOOD} --fp8-amax-history-len 0", ["--fp8-amax-history-len 0", "1024"]),
    ("train.py", f"{GOOD} --decay-fraction 2", ["--decay-fraction 2"]),
    ("train.py", f"{GOOD} --fp8-margin 100000", ["fp8-margin 100000", "from 0 to 18"]),
    ("train.py", f"{GOOD} --fp8-margin -100000", ["fp8-margin -100000", "from 0 to 18"]),
    ("train.py", f"{GOOD} --layernorm-epsilon -1", ["--layernorm-epsilon -1", "0 or more"]),
    ("train.py", f"{GOOD} --rope-theta 0", ["--rope-theta 0", "above 0"]),
    # train.py: sizes that fit in no machine's memory
    ("train.py", f"{GOOD} --n-embd {HUGE}", [f"--n-embd {HUGE}", "weights", "GiB", "lower"]),
    ("train.py", f"{GOOD} --vocab-size {HUGE}", [f"--vocab-size {HUGE}", "weights", "GiB"]),
    ("train.py", f"{GOOD} --n-layer {10**12}", [f"--n-layer {10**12}", "weights", "GiB"]),
    ("train.py", f"{GOOD} --n-inner {16 * 10**12}", [f"--n-inner {16 * 10**12}", "weights", "GiB"]),
    ("train.py", f"{GOOD} --no-use-rotary --n-positions {HUGE}", [f"--n-positions {HUGE}", "weights", "GiB"]),
    ("train.py", f"{GOOD} --fp8-amax-history-len {HUGE}", [f"history-len {HUGE}", "amax histories", "GiB"]),
    ("train.py", f"{GOOD} --grad-accum {10**12}", [f"--grad-accum {10**12}", "token ids", "GiB"]),
    ("train.py", f"{GOOD} --micro-batch-size {HUGE}", [f"--micro-batch-size {HUGE}", "activations", "GiB"]),
    ("train.py", f"{GOOD} --eval-tokens 0", ["--eval-tokens 0", "at least 1"]),
    ("train.py", f"{GOOD} --eval-steps 0", ["--eval-steps 0", "at least 1"]),
    ("train.py", f"{GOOD} --n-positions 0", ["--n-positions 0", "at least 1"]),
    ("train.py", f"{GOOD} --data=", ["--data", "a folder of token files, such as data/stdlib"]),
    ("train.py", f"{GOOD} --out-dir=", ["--out-dir", "a folder, such as out/mine"]),
    ("train.py", f"{GOOD} --n-head {10**12}", [f"--n-head {10**12}", "at most"]),
    ("train.py", f"{GOOD} --n-head 999983 --n-kv-head 500000", ["--n-head 999983", "at most"]),
    ("train.py", f"{GOOD} --max-steps {10**30}", [f"--max-steps {10**30}", "64 bits"]),
    ("train.py", f"{GOOD} --seed {10**30}", [f"--seed {10**30}", "64 bits"]),
    ("sample.py", f"out/good --seed {10**30}", [f"--seed {10**30}", "64 bits"]),
    ("sample.py", "out/good --seed -1", ["--seed -1", "0 or more"]),
    # train.py: architecture and FP8
    ("train.py", f"{GOOD} --n-inner 0", ["n_inner=0", "1 or more", "256 works"]),
    ("train.py", f"{GOOD} --n-inner -16", ["n_inner=-16", "1 or more"]),
    ("train.py", f"{GOOD} --vocab-size 50257", ["50257", "50304", "32"]),
    ("train.py", f"{GOOD} --vocab-size 256", ["256", "288"]),
    ("train.py", f"{GOOD} --n-head 3", ["n_head=3", "64"]),
    ("train.py", f"{GOOD} --n-head 4 --n-kv-head 6", ["n_kv_head=6", "must divide n_head=4; 4 works"]),
    ("train.py", f"{GOOD} --n-embd 72", ["n_embd", "16", "80"]),
    ("train.py", f"{GOOD} --n-layer 0", ["n_layer"]),
    ("train.py", f"{GOOD} --dropout 1.5", ["dropout"]),
    ("train.py", f"{GOOD} --micro-batch-size 3 --seq-len 20", ["60 tokens", "--micro-batch-size 4 works"]),
    ("train.py", f"{GOOD} --seq-len 64 --n-positions 32", ["--seq-len 64", "32"]),
    (
        "train.py", f"{GOOD} --fp8-recipe mxfp8 --seq-len 24 --micro-batch-size 2",
        ["48 tokens", "multiple of 32", "--micro-batch-size 4 works"],
    ),
    ("train.py", f"{GOOD} --fp8-recipe delayed", ["compute capability 8.9", "can run: none"], a100),
    ("train.py", f"{GOOD} --fp8-param --fp8-recipe none", ["--fp8-param", "--fp8-recipe delayed"]),
    ("train.py", f"{GOOD} --model fused --use-qk-norm", ["--use-qk-norm", "'fused'", "--model optimized"]),
    ("train.py", f"{GOOD} --compile", ["--compile", "DelayedScaling", "--fp8-recipe current"]),
    ("train.py", f"{GOOD} --cuda-graph on", ["--cuda-graph on", "no GPU", "leave the option out"]),
    # train.py: data
    ("train.py", f"{OPTIONS} --data nowhere", ["nowhere", "python data.py"]),
    ("train.py", f"{OPTIONS} --data file.txt", ["file.txt", "python data.py"]),
    ("train.py", f"{OPTIONS} --data altered", ["altered/train.bin", "SHA-256"]),
    ("train.py", f"{OPTIONS} --data truncated", ["truncated/val.bin", "SHA-256"]),
    ("train.py", f"{OPTIONS} --data newer", ["newer/meta.json: format is 99, not 1", "data.py --force"]),
    ("train.py", f"{OPTIONS} --data no-val", ["no-val/val.bin"]),
    ("train.py", f"{OPTIONS} --data short", ["short/", "65", "use a larger corpus"]),
    # train.py: run folders and checkpoints
    ("train.py", f"{GOOD} --out-dir out/good", ["out/good", "--resume"]),
    ("train.py", f"{GOOD} --out-dir step-5", ["step-5", "name of a checkpoint", "--out-dir out/mine"]),
    ("train.py", f"{GOOD} --out-dir file.txt", ["file.txt", "exists"]),
    ("train.py", f"{GOOD} --out-dir file.txt/run", ["file.txt"]),
    (
        "train.py", f"{GOOD} --out-dir out/new --max-steps 1", ["out/new/step-1", "No space left on device"],
        full_disk,
    ),
    ("train.py", "--resume", ["out/tiny"]),
    ("train.py", "--resume --out-dir out/none", ["out/none", "out/good"]),
    ("train.py", "--resume --out-dir out/empty", ["out/empty", "no checkpoint"]),
    ("train.py", "--resume --out-dir file.txt", ["file.txt"]),
    (
        "train.py", "--resume --out-dir out/damaged",
        ["out/damaged/step-4", ".safetensors", "SHA-256", "out/damaged/step-2"],
    ),
    ("train.py", "--resume --out-dir out/good --max-steps 3", ["4 steps", "--max-steps 8"]),
    ("train.py", "--resume --out-dir out/good/step-2", ["later checkpoints than step-2", "step-4"]),
    (
        "train.py", "--resume --out-dir out/good --max-steps 9 --n-layer 3",
        ["--n-layer 3", "n-layer 2", "out/good/step-4"],
    ),
    ("train.py", "--resume --out-dir out/good --max-steps 9 --preset gpt2-124m", ["gpt2-124m", "tiny"]),
    # sample.py
    ("sample.py", "", ["run"]),
    ("sample.py", "out/none", ["out/none", "out/good"]),
    ("sample.py", "file.txt", ["file.txt", "folder"]),
    ("sample.py", "out/empty", ["out/empty", "no checkpoint"]),
    ("sample.py", "out/damaged", ["SHA-256", "out/damaged/step-2"]),
    ("sample.py", "out/good --temperature -1", ["--temperature -1"]),
    ("sample.py", "out/good --top-k 0", ["--top-k 0"]),
    ("sample.py", "out/good --top-p 1.5", ["--top-p 1.5"]),
    ("sample.py", "out/good --max-new-tokens 0", ["--max-new-tokens 0"]),
    ("sample.py", "out/good --num-samples 0", ["--num-samples 0"]),
    ("sample.py", "out/good --seed x", ["--seed"]),
    # data.py
    ("data.py", "", ["data.py"]),
    ("data.py", "hf ''", ["hf '': names no dataset", "roneneldan/TinyStories"]),
    ("data.py", "text nothing.txt", ["nothing.txt"]),
    ("data.py", "text tokens", ["tokens", "directory"]),
    ("data.py", "text empty.txt", ["empty"]),
    ("data.py", "text binary.txt", ["binary.txt", "UTF-8"]),
    ("data.py", "text broken.jsonl", ["broken.jsonl:2"]),
    ("data.py", "text other.jsonl", ["other.jsonl", "--column"]),
    ("data.py", "text file.txt --tokenizer gpt9", ["gpt9", "byte", "cl100k_base"]),
    ("data.py", "text file.txt --val-fraction 1", ["--val-fraction 1"]),
    ("data.py", "text file.txt --num-workers 0", ["--num-workers 0"]),
    ("data.py", f"text file.txt --num-workers {10**12}", [f"--num-workers {10**12}", "at most"]),
    ("data.py", "text deep.jsonl", ["deep.jsonl:1", "deep"]),
    ("data.py", "text file.txt --out-dir tokens", ["tokens", "--force"]),
    ("data.py", "text file.txt --out-dir file.txt", ["file.txt", "--out-dir"]),
]


def tree(folder):
    """Return all files with their modification times, and all folders."""
    return {
        str(path.relative_to(folder)): path.is_file() and path.stat().st_mtime_ns
        for path in Path(folder).rglob("*")
    }


def check(script, error, words):
    assert error.startswith(f"{script}: ") and error.endswith("\n") and error.count("\n") == 1, error
    assert all(word in error for word in words), error


@pytest.mark.parametrize("script, arguments, words, break_", [(*case, None)[:4] for case in CASES],
                         ids=[f"{case[0]} {case[1].replace(OPTIONS, '')}"[:70] for case in CASES])
def test_one_line_exit_2_and_nothing_written(world, monkeypatch, capsys, script, arguments, words, break_):
    monkeypatch.chdir(world)
    before = tree(world)
    if break_:
        break_(monkeypatch)
    code = run_script(script, shlex.split(arguments))
    monkeypatch.undo()
    assert code == 2
    check(script, capsys.readouterr().err, words)
    written = {path for path, time in tree(world).items() if before.get(path) != time}
    if break_ is full_disk:  # the log of the steps that ran is kept, but no part of the checkpoint
        assert not [path for path in written if "step-" in path]
    else:
        assert not written


@pytest.mark.parametrize(
    "script, arguments, words",
    [
        ("train.py", "--preset gpt3", ["gpt3"]),
        ("sample.py", "out/none", ["out/good"]),
        ("data.py", "text tokens", ["directory"]),
        ("bench/first_run.py", "--plott", ["--plot"]),
        ("bench/memory.py", "--switches less", ["less"]),
    ],
)
def test_the_scripts_themselves_say_it_the_same_way(world, script, arguments, words):
    done = run_python(ROOT / script, *arguments.split(), cwd=world)
    assert done.returncode == 2 and done.stdout == ""
    check(script, done.stderr, words)


@pytest.mark.parametrize("script, arguments", [
    ("train.py", f"{GOOD} --max-steps 1 --out-dir"), ("sample.py", "out/good --prompt"),
    ("data.py", "text file.txt --out-dir")])
def test_arguments_that_are_not_utf8(world, monkeypatch, capsys, script, arguments):
    monkeypatch.chdir(world)
    before = tree(world)
    assert run_script(script, [*arguments.split(), os.fsdecode(b"r\xff")]) == 2
    check(script, capsys.readouterr().err, ["r\\udcff", "not UTF-8"])
    assert tree(world) == before


def test_a_terminal_that_only_knows_ascii(world, tmp_path):
    train = ["train.py", *GOOD.split(), "--max-steps", "1", "--out-dir"]

    def run(*command):
        return run_python(ROOT / command[0], *command[1:], cwd=world, env={"PYTHONIOENCODING": "ascii"})

    done = run(*train, tmp_path / "run")
    assert done.returncode == 0 and "--- a sample ---" in done.stdout, done.stderr
    done = run("sample.py", tmp_path / "run", "--max-new-tokens", "30")
    assert done.returncode == 0, done.stderr
    done = run(*train, tmp_path / "caf\u00e9")
    assert done.returncode == 0 and (tmp_path / "caf\u00e9").exists(), done.stderr


def test_a_locale_that_only_knows_ascii(world, tmp_path):
    """The interpreter then decodes files and arguments with it, too; test_arguments_that_are_not_utf8 has
    those that it cannot."""
    arguments = [*GOOD.split(), "--max-steps", "1", "--out-dir", tmp_path / "run"]
    variables = {"NANOTE_REFERENCE": "1", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, ROOT / "train.py", *arguments], cwd=world, capture_output=True,
                          timeout=120, env=os.environ | variables)
    assert done.returncode == 0 and b"--- a sample ---" in done.stdout, done.stderr


def test_a_checkpoint_of_other_tokens_is_not_resumed(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    shutil.copytree("tokens", "other")
    meta = json.loads(Path("other/meta.json").read_text()) | {"tokenizer": "gpt2"}
    meta["sha256"] = dataset._meta_checksum(meta)
    Path("other/meta.json").write_text(json.dumps(meta))
    assert run_train("--resume --out-dir out/good --max-steps 9", "other") == 2
    check("train.py", capsys.readouterr().err, ["gpt2", "byte", "out/good/step-4"])
