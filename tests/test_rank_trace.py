"""bench/rank_trace.py: from kernels with known times to figures; bytes that ranks send; text and picture.

The traces themselves need two GPUs.
"""
import json
import random

import pytest

from bench import kernel_times, pictures, rank_trace
from bench.kernel_times import Kernel, class_of, differences, profile_of
from trainer_tools import ROOT, run_ranks

MS = 1_000_000
GEMM = "nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_coopA_NTT"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BARRIER = "c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int)"
COPY = "void at::native::detail::chunk_cat_cuda_kernel<float, float>(float**)"


@pytest.mark.parametrize("name, expected", [
    (GEMM, "GEMM"), ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "GEMM"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "GEMM"),
    ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
    (GATHER, "communication"), (BARRIER, "communication"),
    ("Memcpy PtoP (Device -> Device)", "communication"),
    ("Memcpy DtoD (Device -> Device)", "copies"), (COPY, "copies"),
    ("void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)", "copies"),
    ("void at::native::multi_tensor_apply_kernel<at::native::CopyFunctor<float, 2, 1, 1>>", "copies"),
    ("_adam", "optimizer"), ("_squares", "optimizer"), ("_norm_kernel", "other"),
    ("_cast_all_kernel", "other"), ("_activation_backward_kernel", "other")])
def test_kernels_have_classes(name, expected):
    assert class_of(Kernel(name, 0, 1)) == expected


def test_a_copy_of_the_size_that_is_sent_communicates():
    """The memory of another GPU may look as if it were this GPU's."""
    copy = Kernel("Memcpy DtoD (Device -> Device)", 0, 1, size=4096)
    assert class_of(copy, [4096]) == "communication"
    assert class_of(copy, [8192]) == "copies"


def steps_of(kernels, step_ms, steps=2):
    """Return the kernels of equal steps and of one before. kernels: (name, start in ms, end in ms)."""
    found = []
    for step in range(steps + 1):
        for name, start, end in kernels:
            grid = None if name.startswith("Memcpy") else (132, 1, 1)
            found.append(Kernel(name, round((step * step_ms + start) * MS), round((end - start) * MS), grid))
    return sorted(found, key=lambda kernel: kernel.start)


# 10 ms: 1 idle, 6 of GEMM, 1 of norm, 2 of the update
ALONE = steps_of([(GEMM, 1, 7), ("_norm_kernel", 7, 8), ("_adam", 8, 9.5), ("_adam", 9.5, 10)], 10)
# 14 ms: 0.5 idle; 2 exposed before the GEMM and 0.5 after it, 2 beside it; a copy; half the update
TOGETHER = steps_of([
    (GATHER, 0.5, 4.5), (GEMM, 2.5, 10), (BARRIER, 11.25, 12), ("_norm_kernel", 10, 11), (COPY, 11, 11.5),
    (GATHER, 11.75, 12.5), ("_adam", 12.5, 13.75), ("_adam", 13.75, 14)], 14)


def test_times_of_a_step_sum_to_its_duration():
    profile = profile_of(TOGETHER, steps=2)
    assert profile.step == pytest.approx(14)
    assert profile.idle == pytest.approx(0.5)
    times = {name: profile.time(name) for name in kernel_times.CLASSES}
    assert times == pytest.approx({"communication": 3, "attention": 0, "GEMM": 7.5, "copies": 0.5,
                                   "optimizer": 1.5, "other": 1})
    assert sum(times.values()) + profile.idle == pytest.approx(14)
    assert profile.duration("communication") == pytest.approx(4 + 0.75 + 0.75)


def test_terms_sum_to_the_difference_of_the_steps():
    terms = differences(profile_of(ALONE, 2), profile_of(TOGETHER, 2))
    assert terms["slower kernels"] == pytest.approx({"GEMM": 1.5, "other": 0})
    assert terms["different kernels"] == pytest.approx({"copies": 0.5})
    assert terms["optimizer"] == pytest.approx({"optimizer": -0.5})
    assert terms["exposed communication"] == pytest.approx({"communication": 3})
    assert terms["idle"] == pytest.approx({"idle": -0.5})
    assert 1.5 + 0.5 - 0.5 + 3 - 0.5 == 14 - 10


def test_terms_sum_to_the_difference_whatever_overlaps():
    draw = random.Random(0)
    profiles = []
    for names in ([GEMM, "_norm_kernel"], [GEMM, "_norm_kernel", GATHER, COPY]):
        kernels = [(draw.choice(names), start := draw.uniform(0, 9), start + draw.uniform(0, 3))
                   for _ in range(30)]
        profiles.append(profile_of(steps_of([*kernels, ("_adam", 9, 10)], 10 + len(names)), 2))
    alone, together = profiles
    terms = differences(alone, together).values()
    assert sum(sum(parts.values()) for parts in terms) == pytest.approx(together.step - alone.step)
    for profile in profiles:
        times = sum(profile.time(name) for name in kernel_times.CLASSES)
        assert times + profile.idle == pytest.approx(profile.step)


def test_kernels_that_run_at_the_same_time_share_it():
    profile = profile_of(steps_of([(GEMM, 0, 4), ("_norm_kernel", 2, 6), ("_adam", 6, 7)], 7), 2)
    assert profile.time("GEMM") == pytest.approx(3)
    assert profile.time("other") == pytest.approx(3)


def test_kernels_are_compared_with_the_same_ones_alone():
    alone = steps_of([(GEMM, 0, 2), (GEMM, 2, 6), ("_adam", 6, 7)], 7)
    together = steps_of([(GEMM, 0, 3), (GATHER, 0, 3), (GEMM, 3, 7.4), ("_adam", 7.4, 8)], 8)
    found = kernel_times.slowdowns(profile_of(alone, 2), profile_of(together, 2))
    assert found == pytest.approx({"beside": 1.5, "apart": 1.1})


def test_a_trace_without_updates_is_an_error():
    with pytest.raises(ValueError, match="a trace of 3 steps has 4 kernels _adam, no multiple"):
        profile_of(ALONE[:-3], steps=2)


def test_clocks_are_aligned_by_the_ends_of_collectives():
    """Rank 1 starts two all-gathers a step 0.3 ms late, and its clock is 5 ms ahead."""
    late = []
    for kernel in TOGETHER:
        if kernel.name == GATHER:
            kernel = kernel._replace(start=kernel.start + 300_000, duration=kernel.duration - 300_000)
        late.append(kernel._replace(start=kernel.start + 5 * MS))
    profiles = [profile_of(kernels, 2) for kernels in (TOGETHER, late)]
    offsets = kernel_times.clock_offsets(profiles)
    assert offsets == [0, 5 * MS]
    assert kernel_times.waits(profiles, offsets) == [
        pytest.approx({"AllGather": 0.6, "barrier": 0}), pytest.approx({"AllGather": 0, "barrier": 0})]
    assert kernel_times.ends_apart(profiles, offsets) == pytest.approx([0, 0, 0])


def test_kernels_are_read_from_a_trace():
    """Their times are those of a clock that all ranks of a machine have, to the nanosecond."""
    trace = {"baseTimeNanoseconds": 1790857026000000000, "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 5038597767640.897, "dur": 12.345,
         "args": {"grid": [132, 1, 1], "stream": 7}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 1.0, "args": {}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 5038597767600.0, "dur": 1.5,
         "args": {"bytes": 32}},
        {"ph": "M", "name": "process_name"}]}
    assert kernel_times.kernels_of(trace) == [
        Kernel("Memcpy HtoD", 1795895623767600000, 1500, None, 32),
        Kernel(GEMM, 1795895623767640897, 12345, (132, 1, 1), 0)]


def recorded(layout):
    rank = {"alone": ALONE, "together": TOGETHER, "sent": {"AllGather": 95_000_000, "update": 10_000_000},
            "sent_sizes": [], "times": {"one": [10.1, 10.2], "all": [13.8, 13.9]}}
    row = {"gpus": 2, "gpu": "NVIDIA H200", "parallel": layout, "shape": "124m-b32", "recipe": "delayed",
           "tokens": 32768, "torch": "2.11", "te": "2.20", "date": "2026-11-28"}
    return json.loads(json.dumps({"row": row, "steps": 2, "ranks": [rank, rank]}))


def test_a_row_says_what_a_step_takes_longer():
    row = rank_trace.make_row(recorded("fsdp"))
    assert row["efficiency"] == pytest.approx((10.1 / 13.8 + 10.2 / 13.9) / 2)
    gather = row["ranks"][1]["communication"]["AllGather"]
    assert gather == pytest.approx({"kernels": 2, "ms": 4.75, "exposed_ms": 2.625, "channels": 132,
                                    "wait_ms": 0, "bytes": 95_000_000, "gb_per_s": 20})
    lines = rank_trace.text_of(row).splitlines()
    assert "    slower kernels           +1.50  +1.50 to +1.50: GEMM +1.50" in lines
    assert "    sum                      +4.00  +4.00 to +4.00" in lines
    assert "    update: 10.0 MB, not sent by kernels of class communication" in lines


def test_intervals_of_a_step_are_stored():
    """Those of one class that touch are one; the update is the end of the step."""
    timeline, _ = rank_trace.make_row(recorded("fsdp"))["timeline"]
    intervals = kernel_times.read_timeline(timeline)
    assert intervals == [
        ("communication", 500, 4000), ("GEMM", 2500, 7500), ("other", 10000, 1000),
        ("copies", 11000, 500), ("communication", 11250, 1250), ("optimizer", 12500, 1500)]


def test_the_picture_has_each_layout_and_says_what_it_costs(tmp_path, monkeypatch):
    titles = []
    make_figure = pictures.make_figure

    def recorded_figure(width, height, title, *arguments, **options):
        titles.append(title)
        return make_figure(width, height, title, *arguments, **options)

    monkeypatch.setattr(pictures, "make_figure", recorded_figure)
    rows = [rank_trace.make_row(recorded(layout)) for layout in ("ddp", "fsdp")]
    rows.append({"gpus": 2, "shape": "124m-b32", "parallel": "fsdp", "error": "OutOfMemoryError"})
    pictures.draw_rank_trace(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000
    timed = [f"{row['ms_all'] - row['ms_one']:+.1f}" for row in rows[:2]]
    assert titles == ["What a step on 2 GPUs takes longer than alone, in a trace:\n"
                      f"ddp +4.0 ms (timed {timed[0]}), mostly exposed communication\n"
                      f"fsdp +4.0 ms (timed {timed[1]}), mostly exposed communication"]


COUNT = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import torch
from bench import multi_gpu, rank_trace, step
from nanote import parallel, peers

parallel.start()
device = torch.device("cpu")
for layout in ("ddp", "fsdp"):
    config = dataclasses.replace(step.make_config(multi_gpu.SHAPES["124m-b32"], device),
                                 fp8_recipe="none", parallel=layout)
    batches = step.make_batches(config, device)
    training = step.Training(config, device, batches)
    training(batches, 0.0)
    sent = {}
    with rank_trace.count_sent(sent):
        training(batches, 0.0)
    training(batches, 0.0)  # is not counted
    in_blocks = sum(part.nbytes for part in parallel.local_parameters(training.model.blocks))
    whole = sum(part.nbytes for part in parallel.local_parameters(training.model))
    if layout == "ddp":
        copied, sizes = rank_trace.sent_by_copies(peers.ShardedAdam(None, training.gradients.buckets))
        assert sum(sizes) == copied["copies"]  # of one bucket, to one rank
        sent |= copied
    print("sent", json.dumps([sent, in_blocks, whole]))
"""


def test_bytes_sent_are_those_of_the_parameters():
    """On two ranks: a ring sends a gradient twice by halves. Copies and the update send one half each. FSDP2
    gathers the other rank's half of the weights, those of blocks for the backward pass, too."""
    for output in run_ranks(COUNT, [str(ROOT)]):
        ddp, fsdp = (json.loads(line.removeprefix("sent ")) for line in output.splitlines()
                     if line.startswith("sent "))
        sent, in_blocks, whole = ddp
        assert sent["AllReduce"] == pytest.approx(whole, rel=0.01)  # buckets are padded
        assert sent["AllGather"] == sent["ReduceScatter"] == 0
        assert sent["copies"] == pytest.approx(whole / 2, rel=0.01)
        assert sent["update"] == pytest.approx(whole / 2, rel=0.01)
        sent, in_blocks, whole = fsdp
        assert sent["AllGather"] == whole + in_blocks + 4  # and the norm
        assert sent["ReduceScatter"] == whole
