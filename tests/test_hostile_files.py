"""Run folders and token files from elsewhere may be damaged or hostile: nothing in them is run as code."""
import io
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from trainer_tools import OPTIONS, ROOT, make_tokens, run_script, run_train, sign

SMALL = f"{OPTIONS} --n-layer 1 --n-embd 32 --seq-len 16 --micro-batch-size 2 --grad-accum 1"
COMMANDS = {"train.py": "--resume --out-dir run --max-steps 3", "sample.py": "run --max-new-tokens 2"}


class Hostile:
    """Creates the file `ran` when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("ran").absolute(),)


def hostile_contents() -> list[bytes]:
    archive = io.BytesIO()
    torch.save({"model.wte.weight": Hostile()}, archive)
    return [pickle.dumps(Hostile()), archive.getvalue()]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with token files and a run of two steps."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_tokens("tokens")
        assert run_train(f"{SMALL} --max-steps 2 --out-dir run", "tokens") == 0
    return folder


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize("name", ["meta.json", "*.safetensors", "model.pt", ".metadata"])
def test_no_code_in_a_checkpoint_is_run(world, tmp_path, monkeypatch, capsys, script, name):
    for number, content in enumerate(hostile_contents()):
        shutil.copytree(world, tmp_path / str(number))
        monkeypatch.chdir(tmp_path / str(number))
        replaced = next(Path("run/step-2").glob(name), None)
        (replaced or Path("run/step-2", name)).write_bytes(content)
        sign("run/step-2")
        assert run_script(script, COMMANDS[script].split()) == (2 if replaced else 0)
        assert capsys.readouterr().err.count("\n") == bool(replaced) and not Path("ran").exists()


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "train.npy"])
def test_no_code_in_token_files_is_run(world, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world / "tokens", "tokens")
    Path("tokens", name).write_bytes(pickle.dumps(Hostile()))
    assert run_train(f"{SMALL} --max-steps 1", "tokens") == (0 if name == "train.npy" else 2)
    assert not Path("ran").exists()


def test_nothing_here_unpickles():
    folders = (ROOT, *(ROOT / name for name in ("nanote", "fast_kernels", "tools", "bench", "examples")))
    for path in [path for folder in folders for path in folder.glob("*.py")]:
        source = path.read_text()
        assert all("weights_only=True" in line for line in re.findall(r"torch\.load\(.*", source)), path
        for call in (r"pickle\.loads?\(", r"allow_pickle=True", r"trust_remote_code=True", r"joblib",
                     r"weights_only=False", r"add_safe_globals"):
            assert not re.search(call, source), (path, call)
        assert "Unpickler" not in source, path


@pytest.mark.parametrize("script, arguments", [*COMMANDS.items(), ("train.py", "--eval-only --out-dir run")])
@pytest.mark.parametrize("option, code", [("model", "evil.py:Net"), ("fp8_recipe", "custom:evil.f")])
def test_a_checkpoint_names_no_code(world, tmp_path, monkeypatch, capsys, script, arguments, option, code):
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('ran', 'w')")
    path = Path("run/step-2/meta.json")
    meta = json.loads(path.read_text())
    meta["config"][option] = code
    if option in meta:
        meta[option] = code
    path.write_text(json.dumps(meta))
    sign(path.parent)
    is_refused = script == "train.py" or option == "model"  # sample.py generates without FP8
    assert run_script(script, arguments.split()) == (2 if is_refused else 0)
    error, flag = capsys.readouterr().err, "--" + option.replace("_", "-")
    assert (f"pass {flag} {code}" in error) == is_refused and not Path("ran").exists()
