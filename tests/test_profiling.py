"""nanote/profiling.py, nanote/memory.py: traces, tables, determinism, garbage collection, out of memory."""
import gc
import gzip
import json
import os
import pickle
import re
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from nanote import checkpoint, fp8, memory, models, profiling
from nanote.memory import GIB, what_would_fit
from train import TrainConfig
from trainer_tools import OPTIONS, metrics, run_train

SHORT = (
    OPTIONS.replace("--max-steps 24", "--max-steps 6").replace("--n-layer 2", "--n-layer 1")
    + " --eval-interval 0 --eval-steps 1"
)
ON_GPU = (
    OPTIONS.replace("--device cpu", "--device cuda")
    .replace("--dropout 0.1", "")
    .replace("--n-embd 64", "--n-embd 128")
)


@pytest.fixture(autouse=True)
def _here_and_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield
    torch.use_deterministic_algorithms(False)


def trace_of(run) -> list[dict]:
    with gzip.open(Path(run, "profile", "trace.json.gz")) as file:
        return json.load(file)["traceEvents"]


# ---------------------------------------------------------------- ranges

@pytest.mark.parametrize("text, steps", [("3:5", (3, 5)), ("7", (7, 7)), ("1:24", (1, 24))])
def test_a_range_is_of_whole_steps(text, steps):
    assert profiling.parse_range("profile", text, 24) == steps


@pytest.mark.parametrize(
    "options, told",
    [
        ("--profile 5:3", ["--profile 5:3", "10:12"]), ("--profile 0:3", ["--profile 0:3"]),
        ("--profile three", ["--profile three", "START:STOP"]), ("--profile 3:", ["--profile 3:"]),
        ("--profile 20:30", ["--profile 20:30", "step 24"]),
        ("--memory-snapshot 3-5", ["--memory-snapshot 3-5"]),
        ("--memory-snapshot 2:3", ["--memory-snapshot 2:3", "CPU"]),
        ("--nsys 2:3", ["--nsys 2:3", "CPU", "--profile"]),
        ("--profile 2:3 --nsys 2:3", ["--profile", "--nsys", "one"]),
        ("--gc-interval -1", ["--gc-interval -1", "0 or more"]),
        ("--expandable-segments", ["--expandable-segments", "CPU"]),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tokens, capsys, options, told):
    assert run_train(f"{OPTIONS} {options} --out-dir run", tokens) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and all(part in lines[0] for part in told), lines
    assert not Path("run").exists()


def test_a_trace_holds_its_steps_and_no_others(tokens, capsys):
    assert run_train(f"{SHORT} --profile 3:4 --out-dir run", tokens) == 0
    names = [event.get("name") for event in trace_of("run")]
    assert names.count("step 3") == names.count("step 4") == 1 and not {"step 2", "step 5"} & set(names)
    assert "aten::mm" in names or "aten::addmm" in names
    table, printed = Path("run/profile/table.txt").read_text(), capsys.readouterr().out
    assert table.startswith("steps 3 to 4 on a CPU, means of a step\n") and re.search(
        r"^GEMM +[\d.]+ +[\d.]+%", table, re.MULTILINE
    )
    assert table.strip() in printed and "run/profile/trace.json.gz" in printed


def test_looking_changes_nothing(tokens):
    assert run_train(f"{SHORT} --profile 2:3 --gc-interval 2 --out-dir seen", tokens) == 0
    assert run_train(f"{SHORT} --out-dir unseen", tokens) == 0
    assert metrics("seen") == metrics("unseen") and not Path("unseen/profile").exists()


def test_a_range_is_for_one_process(tokens, capsys):
    """A resumed run does not profile again, and refuses steps that are done."""
    assert run_train(f"{SHORT} --profile 2 --out-dir run", tokens) == 0
    Path("run/profile/table.txt").unlink()
    assert run_train("--resume --out-dir run --max-steps 8") == 0
    assert not Path("run/profile/table.txt").exists()
    capsys.readouterr()
    assert run_train("--resume --out-dir run --max-steps 10 --profile 2:3") == 2
    assert "--profile 2:3: this run goes on with step 9" in capsys.readouterr().err
    assert run_train("--resume --out-dir run --max-steps 10 --profile 7:9") == 0
    assert Path("run/profile/table.txt").read_text().startswith("step 9 on")


def test_a_run_that_ends_early_leaves_the_trace_so_far(tmp_path):
    said = []
    profiler = profiling.Profiler(TrainConfig(profile="2:90"), torch.device("cpu"))
    profiler.run, profiler.say = tmp_path, said.append
    for step in (1, 2):
        profiler.begin(step)
        torch.ones(8) @ torch.ones(8)
        profiler.end(step)
    profiler.begin(3)
    profiler.close(3)
    profiler.close(3)
    assert (
        len(said) == 1
        and said[0].startswith("steps 2 to 3")
        and (tmp_path / "profile" / "trace.json.gz").exists()
    )
    profiler = profiling.Profiler(TrainConfig(profile="50:90"), torch.device("cpu"))
    profiler.say = said.append
    profiler.close(3)
    assert said[1:] == ["--profile 50:90: the run ended before, after step 3"]


def test_without_options_there_is_nothing_to_do():
    profiler = profiling.Profiler(TrainConfig(), torch.device("cpu"))
    profiler._start = profiler._stop = profiler.say = lambda *_: pytest.fail("something was done")
    profiler.begin(1)
    profiler.end(1)
    profiler.close(1)
    assert gc.isenabled()


def test_a_table_sums_by_class_for_each_step():
    kernels = [
        ("nvjet_qqtst_128x128", 0.0, 1000.0), ("void flash_fwd_kernel", 500.0, 1000.0),
        ("nvjet_qqtst_128x128", 3000.0, 1000.0),
    ]
    # 0 to 1500, of which two overlap, and 3000 to 4000
    assert profiling.span_and_busy(kernels) == (4000.0, 2500.0)
    lines = profiling.table(kernels, steps=2, on_gpu=True).splitlines()
    assert lines[1].split() == ["GEMM", "FP8", "1.000", "66.7%", "1"] and lines[2].split() == [
        "attention", "0.500", "33.3%", "0",
    ]
    assert lines[3].split() == ["all", "1.500", "2"]
    assert "busy 62.5% of 2.000 ms" in lines[4]
    assert lines[6].split() == ["1.000", "ms", "1", "x", "GEMM", "FP8:", "nvjet_qqtst_128x128"]


# ---------------------------------------------------------------- the process

def test_garbage_is_collected_in_the_steps_asked_for(tokens, monkeypatch):
    steps, now, plain_rate, plain_collect = [], [0], train.learning_rate, gc.collect

    def learning_rate(step, config):
        now[0] = step
        assert gc.isenabled() == (step == 1), "Python's own collections are off from the first step on"
        return plain_rate(step, config)

    def collect(*arguments):
        steps.append(now[0])
        return plain_collect(*arguments)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    monkeypatch.setattr(profiling.gc, "collect", collect)
    assert run_train(f"{SHORT} --gc-interval 2 --out-dir run", tokens) == 0
    assert steps[:4] == [1, 2, 4, 6] and gc.isenabled()


def test_deterministic_is_set_and_repeats_bit_for_bit(tokens, monkeypatch):
    seen, plain = [], train.learning_rate

    def learning_rate(step, config):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"],
                     os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"]))
        return plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    for run in ("one", "two"):
        assert run_train(f"{SHORT} --torch-deterministic --out-dir {run}", tokens) == 0
    assert set(seen) == {(True, ":4096:8", "0")}
    assert metrics("one") == metrics("two")


def test_what_cannot_be_deterministic_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    monkeypatch.setattr(profiling, "_installed", lambda module: True)
    config = TrainConfig(torch_deterministic=True)
    with pytest.raises(ValueError, match="--torch-deterministic: FlashAttention 4 .*--attention sdpa"):
        profiling.prepare_process(config, torch.device("cuda"))
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert profiling.nondeterministic_reason(config, torch.device("cuda")) == ""


def test_a_small_model_on_a_cpu_takes_few_threads(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def prepare(n_embd, device="cpu"):
        config = TrainConfig(micro_batch_size=8, seq_len=128, n_embd=n_embd)
        profiling.prepare_process(config, torch.device(device))

    for n_embd in (16, 64, 768):
        prepare(n_embd)
    assert chosen == [1, 2, 6]
    prepare(16, "cuda")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # the user's choice
    prepare(16)
    assert len(chosen) == 3


def test_expandable_segments_keep_the_allocators_other_settings(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", given.append)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    profiling.prepare_process(TrainConfig(expandable_segments=True), torch.device("cuda"))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    profiling.prepare_process(TrainConfig(expandable_segments=True), torch.device("cuda"))
    assert given == ["max_split_size_mb:512,expandable_segments:True", "expandable_segments:True"]


# ---------------------------------------------------------------- what cannot fit

@pytest.mark.parametrize("model, options", [
    ("optimized", {}), ("te", {}), ("custom", {}), ("fused", {"tie_embeddings": False}),
    ("advanced", {"n_kv_head": 2}),
    ("optimized", dict(use_rotary=True, use_rmsnorm=True, activation="swiglu", n_kv_head=1, head_dim=32,
                       n_inner=96, tie_embeddings=False, use_qk_norm=True, bias=False))])
def test_weights_are_counted_before_a_model_is_built(model, options):
    options = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=288, n_positions=32) | options
    config = models.make_model_config(model, options)
    built = models.build_model(model, config)
    assert models.weight_count(config) == sum(p.numel() for p in built.parameters() if p.dim() == 2)


@pytest.mark.parametrize("options", [dict(), dict(fp8_param=True), dict(fp8_recipe="none"),
                                     dict(fp8_skip_first=1)])
def test_the_least_memory_is_no_more_than_a_step_takes(options):
    small = dict(n_layer=2, n_head=2, n_embd=64, vocab_size=288, n_positions=32, seq_len=32)
    config = train.TrainConfig(**small | options, fp8_amax_history_len=64)
    recipe = train.recipe_of(config)
    model_config = models.make_model_config("optimized", vars(config) | {"use_fp8": recipe is not None})
    of_weights = recipe if config.fp8_param else None
    model = models.build_model("optimized", model_config, fp8_weights_recipe=of_weights)
    model.fp8_recipe = recipe or model.fp8_recipe
    optimizer = train.make_optimizer(model, config)
    batch = [torch.zeros(8, 32, dtype=torch.int64)] * 2
    train.TrainStep(model, model, optimizer, config, torch.device("cpu"))([batch], 1e-3)
    sizes = {what: size for size, what, _ in memory.least_memory(config, model_config, torch.float32)}
    assert 0 < sizes["weights, gradients and optimizer state"] <= memory.step_bytes(model, optimizer)
    histories = [value for name, value in fp8.get_state(model).items() if name.endswith("amax_history")]
    assert sizes["amax histories"] <= sum(history.nbytes for history in histories)
    assert (sizes["amax histories"] > 0) == (config.fp8_recipe == "delayed")
    assert sizes["token ids and labels of a step"] == sum(part.nbytes for part in batch)


class Memory(TorchDispatchMode):
    """Measure the peak of the bytes of all tensors."""

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.peak = set(), 0, 0

    def add(self, outcome):
        for tensor in tree_leaves(outcome):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)

    def remove(self, storage, size):
        self.seen.remove(storage)
        self.now -= size

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        outcome = function(*arguments, **options or {})
        self.add(outcome)
        return outcome


DEEP = dict(n_layer=48, n_head=1, head_dim=16, n_inner=16, vocab_size=32, seq_len=32, micro_batch_size=3,
            gradient_checkpointing=True, fp8_recipe="none")  # gradients and activations of the same size


@pytest.mark.parametrize("options", [
    dict(), dict(grad_accum=2), dict(fp8_recipe="none"), dict(gradient_checkpointing=True),
    dict(loss_chunks=4), dict(micro_batch_size=1), dict(max_steps=1), dict(vocab_size=2048),
    DEEP, DEEP | dict(max_steps=1), DEEP | dict(grad_accum=2)])
def test_the_least_memory_is_no_more_than_the_peak_of_a_step(options):
    small = dict(
        n_layer=2, n_head=2, n_embd=64, vocab_size=512, n_positions=64, seq_len=64, micro_batch_size=4,
        max_steps=2, eval_steps=1, fp8_amax_history_len=4, fp8_recipe="current",
    )
    config = train.TrainConfig(**small | options)
    recipe = train.recipe_of(config)
    model_config = models.make_model_config("optimized", vars(config) | {"use_fp8": recipe is not None})
    model = models.build_model("optimized", model_config)
    model.fp8_recipe = recipe or model.fp8_recipe
    optimizer = train.make_optimizer(model, config)
    shape = 2, config.micro_batch_size, config.seq_len
    batches = [tuple(torch.zeros(shape, dtype=torch.int64)) for _ in range(config.grad_accum)]
    step = train.TrainStep(model, model, optimizer, config, torch.device("cpu"))
    usage = Memory()
    usage.add([model.state_dict(), batches, [optimizer.state[p] for p in model.parameters()]])
    with usage:
        for _ in range(config.max_steps):
            step(batches, 1e-3)
    least = sum(size for size, *_ in memory.least_memory(config, model_config, torch.float32))
    assert usage.peak / 4 < least <= usage.peak


def test_a_run_that_fits_exactly_is_not_refused(monkeypatch):
    config = train.TrainConfig(n_positions=64, vocab_size=288)
    model_config = models.make_model_config("optimized", vars(config))
    least = sum(size for size, *_ in memory.least_memory(config, model_config, torch.float32))
    for pages, refused in ((least, False), (least - 1, True)):
        monkeypatch.setattr(memory.os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else pages)
        if refused:
            with pytest.raises(ValueError, match=r"--n-embd 768 .* this machine has .* lower one of them"):
                memory.check_memory(config, model_config, torch.device("cpu"), torch.float32)
        else:
            memory.check_memory(config, model_config, torch.device("cpu"), torch.float32)


# ---------------------------------------------------------------- out of memory

def config(**options):
    return TrainConfig(**{**dict(micro_batch_size=16, grad_accum=2, seq_len=1024), **options})


def test_what_fits_is_on_a_straight_line():
    # 1 sequence: 12 GiB, 2: 13.5 GiB, so 1.5 GiB each; 0.95 * 40 = 38 GiB hold 1 + floor(26 / 1.5) = 18,
    # though 16 did not fit: fewer than 16
    said = what_would_fit(
        config(), fixed=10 * GIB, parameters=GIB // 2, capacity=40 * GIB,
        points=[(1, 12 * GIB), (2, int(13.5 * GIB))],
    )
    assert "take 10.0 of 40.0 GiB" in said and "1.50 GiB" in said and "18 fit" in said
    assert "--micro-batch-size 8 --grad-accum 4 (the same 32 sequences a step)" in said
    # 4 GiB each: 1 + floor(26 / 4) = 7; of 48 sequences in all the largest divisor up to 7 is 6
    said = what_would_fit(
        config(grad_accum=3), fixed=10 * GIB, parameters=1, capacity=40 * GIB,
        points=[(1, 12 * GIB), (2, 16 * GIB)],
    )
    assert "7 fit" in said and "--micro-batch-size 6 --grad-accum 8 (the same 48 sequences a step)" in said
    # one point: from 10 GiB for none to 24 GiB for one, 14 GiB each: floor(28 / 14) = 2
    said = what_would_fit(config(), fixed=10 * GIB, parameters=1, capacity=40 * GIB, points=[(1, 24 * GIB)])
    assert "2 fit" in said and "--micro-batch-size 2 --grad-accum 16" in said


def test_one_sequence_is_no_plural():
    said = what_would_fit(config(micro_batch_size=1), fixed=GIB, capacity=GIB, points=[(1, 2 * GIB)])
    assert "each of 1 sequence of 1024 tokens 1.00 GiB" in said
    assert "a pass over 1 of 1 sequence of 1024" in what_would_fit(config(micro_batch_size=1), points=[])


def test_alternatives_come_in_order_and_only_where_they_are_left():
    said = what_would_fit(
        config(fused_loss=False), fixed=10 * GIB, parameters=GIB // 2, capacity=40 * GIB, points=[],
        graphed=True,
    )
    # fewer sequences would not help
    assert "a pass over 1 of 16 sequences" in said and "--micro-batch-size" not in said
    ways = (
        "--gradient-checkpointing", "--moment-dtype bfloat16 (saves 2.0 GiB)", "--fused-loss",
        "--cuda-graph off",
    )
    places = [said.index(way) for way in ways]
    assert places == sorted(places)
    said = what_would_fit(
        config(gradient_checkpointing=True, moment_dtype="bfloat16"), capacity=GIB, points=[]
    )
    assert said.endswith("try, in this order: a smaller model or --seq-len 512")
    assert "--gradient-checkpointing" not in what_would_fit(config(model="fused"))  # it has no such switch


def test_unmeasured_half_is_tried_and_fp8_keeps_its_multiple():
    assert "--micro-batch-size 8 --grad-accum 4" in what_would_fit(config())
    # 24 tokens: FP8's 32 need 4 sequences or a multiple; half of 12 is 6, so 4
    odd = dict(seq_len=24, micro_batch_size=12, grad_accum=1)
    assert "--micro-batch-size 4 --grad-accum 3" in what_would_fit(config(**odd))
    assert "--micro-batch-size 6 --grad-accum 2" in what_would_fit(config(**odd, fp8_recipe="none"))


def test_bytes_of_a_step():
    model = torch.nn.Linear(8, 4, dtype=torch.bfloat16)  # 36 parameters
    optimizer = SimpleNamespace(
        state={
            p: {
                "exp_avg": torch.zeros(p.shape), "exp_avg_sq": torch.zeros(p.shape),
                "master_param": torch.zeros(p.shape, dtype=torch.int16),
            }
            for p in model.parameters()
        }
    )
    assert memory.step_bytes(model, optimizer) == 36 * (2 + 2 + 4 + 4 + 2)


def test_running_out_of_memory_is_recognised():
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    try:
        try:
            raise lack
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert memory.is_out_of_memory(error)
    on_a_cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: …")
    assert memory.is_out_of_memory(MemoryError()) and memory.is_out_of_memory(on_a_cpu)
    assert memory.is_out_of_memory(lack) and memory.is_out_of_memory(
        RuntimeError("CUDA error: out of memory")
    )
    assert not memory.is_out_of_memory(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )


def test_out_of_memory_in_a_step_is_one_line_and_the_checkpoint_stands(tokens, capsys, monkeypatch):
    plain, calls = train.TrainStep.run, []

    def run(step, *arguments, **options):
        calls.append(step)
        if len(calls) == 14:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(step, *arguments, **options)

    def explain(*arguments):
        assert Path("run/profile/table.txt").exists(), "what was under way is written before memory is freed"
        return plain_explain(*arguments)

    plain_explain = memory.explain
    with monkeypatch.context() as patch:
        patch.setattr(train.TrainStep, "run", run)
        patch.setattr(memory, "explain", explain)
        assert run_train(f"{OPTIONS} --profile 13:20 --out-dir run", tokens) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(
        "train.py: step 14: out of memory; try, in this order: --micro-batch-size 2 --grad-accum 4"
    )
    assert "the last checkpoint is run/step-12" in lines[0] and checkpoint.latest("run").name == "step-12"
    assert Path("run/profile/table.txt").read_text().startswith("steps 13 to 14")
    assert run_train("--resume --out-dir run --micro-batch-size 2 --grad-accum 4") == 0


def test_out_of_memory_while_the_first_batch_is_read_is_one_line(tokens, capsys, monkeypatch):
    def get_batches(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train, "get_batches", get_batches)
    assert run_train(f"{OPTIONS} --out-dir run", tokens) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(
        "train.py: step 1: out of memory; try, in this order: --micro-batch-size 2 --grad-accum 4")
    assert lines[0].endswith("there is no checkpoint yet")


def test_out_of_memory_before_the_first_step_is_one_line(tokens, capsys, monkeypatch):
    def make_optimizer(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train, "make_optimizer", make_optimizer)
    assert run_train(f"{OPTIONS} --out-dir run", tokens) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    # 2 + 2 + 4 + 4 + 2
    assert len(lines) == 1 and "14 bytes a parameter" in lines[0] and "--moment-dtype bfloat16" in lines[0]
    assert not list(Path(".").glob("run/step-*"))


def test_out_of_memory_in_the_pass_for_the_scales_says_what_to_do(tokens, capsys, monkeypatch):
    """This is the first pass of a new run with delayed scaling, so a batch that is too large fails here."""
    def warm_up_scales(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(train, "warm_up_scales", warm_up_scales)
        assert run_train(f"{OPTIONS} --out-dir run", tokens) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert (
        len(lines) == 1
        and "the first pass: out of memory; try, in this order: --micro-batch-size 2 --grad-accum 4"
        in lines[0]
    )
    assert "nothing is trained yet" in lines[0]
    again = f"{OPTIONS} --micro-batch-size 2 --grad-accum 4 --max-steps 2 --eval-interval 0 --out-dir run"
    assert run_train(again, tokens) == 0  # under the same name: it holds nothing yet
    assert run_train(again, tokens) == 2 and "--out-dir run exists" in capsys.readouterr().err


def test_another_error_passes_as_it_is(tokens, monkeypatch):
    def run(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train.TrainStep, "run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        run_train(f"{OPTIONS} --out-dir run", tokens)


# ---------------------------------------------------------------- on a GPU

@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_trace_sees_kernels_inside_cuda_graphs(tokens, graph):
    assert run_train(f"{ON_GPU} --cuda-graph {graph} --profile 3:4 --out-dir run", tokens) == 0
    table = Path("run/profile/table.txt").read_text()
    assert (
        re.search(r"^GEMM FP8 ", table, re.MULTILINE)
        and re.search(r"^optimizer ", table, re.MULTILINE)
        and "the GPU was busy" in table
    )
    names = [event.get("name", "") for event in trace_of("run")]
    assert any("step 3" == name for name in names) and any(
        ("cudaGraphLaunch" in name) == (graph == "on") for name in names
    )


@pytest.mark.gpu
def test_nsys_range(tokens, monkeypatch):
    calls = []
    for name in ("start", "stop"):
        monkeypatch.setattr(
            torch.cuda.profiler, name,
            lambda name=name, plain=getattr(torch.cuda.profiler, name): (calls.append(name), plain()),
        )
    assert run_train(f"{ON_GPU} --nsys 3:4 --out-dir run", tokens) == 0
    assert calls == ["start", "stop"]


@pytest.mark.gpu
def test_a_memory_snapshot_tells_who_allocated(tokens):
    assert run_train(f"{ON_GPU} --memory-snapshot 1:2 --out-dir run", tokens) == 0
    snapshot = pickle.loads(Path("run/memory.pickle").read_bytes())
    frames = {
        frame["name"]
        for trace in snapshot["device_traces"]
        for entry in trace
        for frame in entry.get("frames", [])
    }
    assert {"build_model", "forward_backward"} <= frames


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        "", "--cuda-graph off", "--fp8-recipe none", "--fp8-recipe current", "--attention te",
        "--attention sdpa", "--no-fused-loss", "--gradient-checkpointing", "--model fused",
        "--activation swiglu --use-rmsnorm --use-rotary --use-qk-norm --no-bias --n-head 4 --n-kv-head 2",
        "--dropout 0.1",
    ],
)
def test_deterministic_runs_are_equal_bit_for_bit(tokens, options):
    for run in ("one", "two"):
        assert (
            run_train(
                f"{ON_GPU} --seq-len 256 --micro-batch-size 8 {options} --torch-deterministic "
                f"--out-dir {run}",
                tokens,
            )
            == 0
        )
    assert metrics("one") == metrics("two")


@pytest.mark.gpu
def test_what_is_said_to_fit_fits(tokens, capsys):
    """Limit a run to 4 GiB, and follow the advice in its error message."""
    big = f"{ON_GPU} --seq-len 256 --n-embd 256 --vocab-size 50304 --max-steps 2 --grad-accum 1"
    torch.cuda.empty_cache()
    for _ in range(60):  # other tests may fill a GPU that the workers of pytest -n share
        if torch.cuda.mem_get_info()[0] > 16 * GIB:
            break
        time.sleep(1)
    try:
        torch.cuda.set_per_process_memory_fraction(4 * GIB / torch.cuda.get_device_properties(0).total_memory)
        assert run_train(f"{big} --micro-batch-size 256 --out-dir run", tokens) == 1
        line = capsys.readouterr().err.strip()
        pattern = r"by linear extrapolation (\d+) fit.*--micro-batch-size (\d+) --grad-accum (\d+)"
        found = re.search(pattern, line)
        assert found and int(found[2]) <= int(found[1]), line
        assert (
            run_train(
                f"{big} --micro-batch-size {found[2]} --grad-accum {found[3]} --out-dir smaller", tokens
            )
            == 0
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_expandable_segments_are_there(tokens):
    import subprocess
    import sys

    code = ("import sys, torch, train; code = train.main(sys.argv[1:]); "
            "assert any(s['is_expandable'] for s in torch.cuda.memory_snapshot()); sys.exit(code)")
    done = subprocess.run(
        [
            sys.executable, "-c", code,
            *f"{ON_GPU} --expandable-segments --out-dir run --data {tokens}".split(),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(train.__file__).parent), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
