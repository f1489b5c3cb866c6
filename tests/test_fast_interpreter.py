"""fast_kernels without a GPU, in Triton's interpreter. bench/pairs.py trains model_te_fast there."""

import pytest

pytest.importorskip("triton")
import benchmark_te
import sample
import train
from fast_kernels import interpreter, modules
from kernel_tools import HAS_GPU
from nanote import recipes


@pytest.mark.skipif(HAS_GPU, reason="a machine without a GPU")
def test_without_the_interpreter_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(recipes, "ENGINE", "fast")
    monkeypatch.setattr(recipes, "IS_REFERENCE", False)
    monkeypatch.setattr(recipes, "te", modules)
    monkeypatch.setattr(modules, "unsupported_reason", lambda: "there is no GPU here")
    line = "^NANOTE_ENGINE=fast: fast_kernels needs a GPU; NANOTE_ENGINE=reference works$"
    with pytest.raises(ValueError, match=line):
        train.prepare_cpu(2**20)
    with pytest.raises(ValueError, match=line):
        benchmark_te.main([])
    with pytest.raises(ValueError, match=line):
        sample.main(["out/run", "--score", "text.txt"])


def test_install_is_refused_where_kernels_run_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="start Python with TRITON_INTERPRET=1"):
        interpreter.install.__wrapped__()
