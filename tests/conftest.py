"""Tests import from the repository's root, use te_reference without a GPU, and do not use the network."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if " " in tempfile.gettempdir():  # tests write commands as one text, with paths of tmp_path, and split it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")  # where pytest makes tmp_path

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["NANOTE_ENGINE"] = "reference"  # for subprocesses, too
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and Transformer Engine"))
        if "multigpu" in item.keywords and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


def pytest_collection_finish():
    """Keep modules that are imported by now out of gc.collect(), which many tests call."""
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # else some libraries print that objects are left


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _default_signals():
    """Handle SIGINT and SIGTERM even if the shell ignores them: nohup, "&" in a script, some CI."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _no_loss_picture(request, monkeypatch):
    """Leave loss.png empty: drawing it takes most of the time of a small run. test_logs.py draws it."""
    if "nanote.models" in sys.modules and request.module.__name__ != "test_logs":
        # a test may import the trainer later; beside nanote.models its logs take no time
        from nanote import logs

        monkeypatch.setattr(logs, "plot_losses", lambda folder: Path(folder, "loss.png").touch())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """The folder of a small corpus, one for all tests of a file."""
    from trainer_tools import make_tokens  # imports the scripts, which must see the variables above

    return make_tokens(tmp_path_factory.mktemp("corpus") / "tokens")


@pytest.fixture
def deterministic(monkeypatch):
    """PyTorch's deterministic algorithms, for results of a GPU that are equal bit for bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys):
    """A function that runs a command with a mistake: exit code 2, one line, which it returns, and no file."""
    from trainer_tools import exit_code, tree

    def refused(main, arguments, script="command"):
        argv, before = arguments.split() if isinstance(arguments, str) else arguments, tree()
        capsys.readouterr()
        assert exit_code(lambda: main(argv), script) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"{script}: ") and line.count("\n") == 1, line
        assert tree() == before
        return line
    return refused


@pytest.fixture
def compiles(monkeypatch):
    """The arguments of each torch.compile call. Traced graphs run uncompiled, since compiling is slow."""
    calls, compile_ = [], torch.compile

    def stand_in(net, **arguments):
        calls.append({"fullgraph": False} | arguments)
        return compile_(net, backend="eager", fullgraph=calls[-1]["fullgraph"])

    monkeypatch.setattr(torch, "compile", stand_in)
    torch._dynamo.reset()
    return calls
