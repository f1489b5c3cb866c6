"""nanote/plan.py: memory against measurements on one GPU, traffic against sums by hand."""
import dataclasses
import json
from types import SimpleNamespace

import pytest

from bench import arms
from bench import memory as memory_switches
from nanote import cli, config, layouts, plan, roofline
from nanote.layouts import Cluster, Layout
from trainer_tools import ROOT

# Estimates are below the measurements: they leave out biases, norms and their statistics, token ids,
# workspaces of cuBLASLt and what modules allocate for a moment. With delayed scaling that is 0.1 to 0.4 GiB,
# at most 3 %; with current scaling at width 4,096 it is 1 GiB, 4 %. So the margin is 5 %, and 1 % above.
MISSING, ABOVE = 0.05, 0.01
ARMS = ("fp8", "bf16", "fp8-current", "fp8-te_block", "fp8-bf16_moments", "fp8-accum4")
SHAPES = ("124m-b32", "350m-b16", "c2048", "c4096", "llama3-8b")
GPU = SimpleNamespace(type="cuda")


def rows(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def measured_runs():
    """Return (name, options of train.py, measured GiB) of one GPU."""
    found = []
    for row in rows("speed"):
        if row["arm"] in ARMS and row["shape"] in SHAPES:
            run = arms.arm_config(row["arm"], arms.make_config(arms.SHAPES[row["shape"]], GPU, row["block"]))
            run = dataclasses.replace(run, grad_accum_dtype="bfloat16")  # as these were measured
            found.append((f"{row['shape']} {row['block']} {row['arm']}", run, row["peak_gib"]))
    for row in rows("memory"):
        switch = memory_switches.SWITCHES[row["switch"]]
        if switch and switch.keys() <= {"gradient_checkpointing", "checkpoint_every", "moment_dtype",
                                        "param_remainders", "loss_chunks"}:
            run = arms.make_config(arms.SHAPES[row["shape"]] | switch, GPU)
            found.append((f"{row['shape']} {row['switch']}", run, row["peak_gib"]))
    return found


def test_memory_of_one_gpu_is_what_was_measured():
    found = measured_runs()
    names = [name for name, *_ in found]
    assert len(found) >= 30 and {"llama3-8b own fp8", "llama3-8b own fp8-accum4"} <= set(names)
    for name, run, gib in found:
        layout = Layout("ddp", checkpointing=run.gradient_checkpointing)
        estimate = sum(layouts.memory(run, plan.model_of(run), layout).values()) / 2**30
        assert 1 - MISSING <= estimate / gib <= 1 + ABOVE, f"{name}: {estimate:.2f} of {gib:.2f} GiB"


# ---------------------------------------------------------------- by hand

def small(**options):
    """A model with 2 blocks of 12·16² = 3,072 weights and (32 + 16)·16 = 768 outside them: 6,912 weights."""
    run = config.TrainConfig(n_layer=2, n_head=1, n_embd=16, vocab_size=32, seq_len=16, micro_batch_size=1,
                             fp8_recipe="none", **options)
    return run, plan.model_of(run)


@pytest.mark.parametrize("layout, reshard, accum, expected", [
    (Layout("ddp", 1, 1), True, 1, (0, 0)),
    (Layout("ddp", 1, 4), True, 1, (0, 2 * 3 / 4 * 27_648)),  # gradients in float32
    (Layout("ddp", 1, 4), True, 8, (0, 2 * 3 / 4 * 27_648)),  # which are reduced once a step
    (Layout("ddp", 1, 4, one_node=True), True, 8, (0, 3 / 4 * (27_648 + 13_824))),  # and BF16 weights
    (Layout("fsdp", 4, 1), False, 1, (3 / 4 * (13_824 + 27_648), 0)),
    (Layout("fsdp", 4, 1), True, 1, (3 / 4 * (13_824 + 12_288 + 27_648), 0)),
    (Layout("fsdp", 4, 1), True, 2, (3 / 4 * (2 * (13_824 + 12_288) + 27_648), 0)),
    (Layout("hsdp", 2, 4), False, 1, (1 / 2 * (13_824 + 27_648), 2 * 3 / 4 * 13_824)),
])
def test_bytes_that_a_gpu_sends(layout, reshard, accum, expected):
    run, model = small(grad_accum=accum, reshard_after_forward=reshard)
    assert layouts.traffic(run, model, layout) == pytest.approx(expected)


def test_a_slow_network_makes_fsdp_wait_and_hsdp_less():
    run, model = small(grad_accum=4)
    cluster = Cluster(gpus=4, gpus_per_node=2, link_gbs=1.0, network_gbs=0.1, efficiency=1.0)
    found = {one.layout.name: one for one in layouts.estimates(cluster, run, model)[:3]}
    sent = 3 / 4 * (4 * (13_824 + 12_288) + 27_648)
    # half of a ring's bytes leave a node of 2 GPUs
    assert found["fsdp"].network_bytes == pytest.approx(sent / 2) == found["fsdp"].link_bytes
    assert found["fsdp"].links_ms == pytest.approx(sent / 2 / 0.1 / 1e6)
    # the all-reduce of half the gradients over 2 nodes follows the gathers within the node
    inside, across = 1 / 2 * (4 * (13_824 + 12_288) + 27_648), 2 * 1 / 2 * 27_648 / 2
    assert found["hsdp"].links_ms == pytest.approx((inside / 1.0 + across / 0.1) / 1e6)
    assert found["fsdp"].bottleneck == "network"


def test_sharding_divides_weights_gradients_and_optimizer_state():
    run, model = small()
    whole, parts = (layouts.memory(run, model, layout) for layout in (Layout("ddp"), Layout("fsdp", 8)))
    assert whole["weights"] == 2 * 6_912 and whole["optimizer state"] == 10 * 6_912
    assert parts["weights"] == 2 * 6_912 / 8 and parts["optimizer state"] == 10 * 6_912 / 8
    assert parts["gathered"] > 0 == whole["gathered"] == parts["shared buffers"]


def test_sharding_on_one_machine_keeps_buffers_of_the_largest_units():
    """Of a block, 3,072 weights: two in BF16, and from one other rank half the gradients in float32."""
    run, model = small()
    found = layouts.memory(run, model, Layout("fsdp", 2, one_node=True))
    assert found["shared buffers"] == 2 * 2 * 3_072 + 4 * 3_072 / 2
    run = dataclasses.replace(run, vocab_size=512)  # 8,448 weights outside blocks, gathered beside one block
    found = layouts.memory(run, plan.model_of(run), Layout("fsdp", 2, one_node=True))
    assert found["shared buffers"] == 2 * (8_448 + 3_072) + 4 * 8_448 / 2


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    run = config.TrainConfig(**config.PRESETS["llama3-8b"])
    for one in layouts.estimates(Cluster(gpus=16), run, plan.model_of(run)):
        fits = []
        for size in (one.largest, one.largest + 1):
            sized = dataclasses.replace(run, micro_batch_size=size)
            fits.append(sum(layouts.memory(sized, plan.model_of(sized), one.layout).values()) <= 141e9)
        assert fits == [True, False] or one.largest == 0 and not fits[1]
        assert one.fits == (one.largest >= 1)


def test_compute_is_the_roofline_over_the_efficiency():
    run = config.TrainConfig(**config.PRESETS["gpt2-124m"] | {"grad_accum": 2})
    model, h200 = plan.model_of(run), {"bf16_tflops": 989, "fp8_tflops": 2 * 989, "copy_tbs": 4.8}
    least = roofline.floor_ms(model, 32, 1024, True, h200, roofline.optimizer_bytes(run))
    cluster = Cluster(efficiency=0.4)
    assert layouts.compute_ms(run, model, Layout("ddp"), cluster) == pytest.approx(least / 0.4)
    assert layouts.compute_ms(run, model, Layout("fsdp", 8), cluster) < least / 0.4


# ---------------------------------------------------------------- the command

def run(arguments):
    return cli.run(lambda: plan.main(arguments.split()), "nanote/plan.py")


def test_it_recommends_the_simplest_of_the_fastest_layouts_that_fit(capsys, monkeypatch):
    monkeypatch.setattr(config.TrainConfig, "parallel", "ddp", raising=False)
    assert run("--preset gpt2-124m --gpus 8") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "recommended (estimate): ddp: torchrun --nproc-per-node 8 train.py --preset gpt2-124m"
    assert run("--gpus 64 --preset llama3-8b --network-gbs 50") == 0
    out = capsys.readouterr().out
    assert out.startswith("estimate, nothing measured: llama3-8b, 8.03 billion weights")
    assert "33,554,432 tokens per step" in out
    assert out.splitlines()[-1].endswith("train.py --preset llama3-8b --parallel hsdp --hsdp-replicas 8")


@pytest.mark.parametrize("options, end", [
    ("--gpus 8 --parallel fsdp", "(estimate): fsdp: torchrun --nproc-per-node 8 train.py --parallel fsdp"),
    ("--preset llama3-8b --gpus 8 --fp8-recipe none --compile",  # fsdp does not go with it
     "(estimate): ddp with --gradient-checkpointing: torchrun --nproc-per-node 8 train.py --preset llama3-8b "
     "--fp8-recipe none --compile --gradient-checkpointing"),
    ("--gpus 8 --preset llama3-8b --no-gradient-checkpointing --micro-batch-size 1",
     "(estimate): fsdp: torchrun --nproc-per-node 8 train.py --preset llama3-8b --no-gradient-checkpointing "
     "--micro-batch-size 1 --parallel fsdp"),
    ("--gpus 8 --config fsdp.json", "fsdp: torchrun --nproc-per-node 8 train.py --config fsdp.json"),
    ("--gpus 8 --gradient-checkpointing",
     "ddp with --gradient-checkpointing: torchrun --nproc-per-node 8 train.py --gradient-checkpointing")])
def test_it_recommends_what_train_py_takes(capsys, monkeypatch, tmp_path, options, end):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.json").write_text('{"parallel": "fsdp"}')
    assert run(options) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(end)


def test_it_says_what_fits_when_nothing_does(capsys):
    assert run("--preset llama3-8b --gpus 8 --gpu h100 --micro-batch-size 64 --grad-accum 1") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "which fits with fsdp with --gradient-checkpointing; nothing does with" in line
    assert run("--preset llama3-8b --gpus 1 --gpu l40s") == 0
    assert "nothing fits, not even --micro-batch-size 1" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    ("--gpus 12", "--gpus 12: not a multiple of --gpus-per-node 8; pass 8 or 16"),
    ("--gpu H900", "--gpu H900: unknown; use one of GB200, B200"),
    ("--preset llama9", "unknown preset 'llama9': one of tiny"),
    ("--gpus -8", "--gpus -8: must be above 0"), ("--gpus", "--gpus"), ("--network-gbs 0", "must be above 0"),
    ("--efficiency 50", "--efficiency 50.0: is a fraction of the peak; pass at most 1"),
    ("--gpus 8 --parallel hsdp", "--parallel hsdp: has a replica on each node, and here is one"),
    ("--gpus 16 --hsdp-replicas 4", "--hsdp-replicas 4: the plan has one on each node; leave it out"),
    ("--gpu A100", "--gpu A100: has no FP8 tensor cores; pass --fp8-recipe none"),
    ("--fp8-recipe block", "the plan knows its memory only for delayed or current or none"),
    ("--preset gpt2-124m --micro-batch-size 1 --seq-len 8", "needs a multiple of 16"),
    ("--n-layers 3", "use --n-layer"),
])
def test_bad_input_is_one_line(capsys, arguments, message):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
