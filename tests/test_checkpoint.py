"""checkpoint: what comes back, which checkpoints are kept, forged files, several ranks."""
import contextlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from nanote import checkpoint, ddp, models, recipes, training_state
from nanote.config import TrainConfig
from nanote.optimizers import clip_coefficient, make_optimizer
from trainer_tools import fork_ranks, largest_file, sign

SIZE = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=288, n_positions=32)
OPTIONS = dict(lr=1e-2, fp8_amax_history_len=4, micro_batch_size=2, seq_len=16)


def make(seed=0, dtype=torch.float32, device="cpu", **changes):
    """Return a small (model, optimizer)."""
    config = TrainConfig(**SIZE | OPTIONS | changes)
    torch.manual_seed(seed)
    recipe = recipes.make(config)
    model = models.make_model(config, device, dtype, recipe)
    model = ddp.distribute(model, config.parallel, config.grad_accum)
    return model, make_optimizer(model, config)


def step(model, optimizer, seed):
    """Train a step on random tokens; return the loss."""
    ids = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(next(model.parameters()).device)
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    norm = optimizer.gradient_norm()
    optimizer.step(clip_coefficient(norm, 1.0), skip=~norm.isfinite())
    model.zero_grad()
    return loss.item()


def trained(steps=3, **options):
    model, optimizer = make(**options)
    for seed in range(steps):
        step(model, optimizer, seed)
    return model, optimizer


def save(run, number, model, optimizer, keep=9, skipped=()):
    Path(run).mkdir(exist_ok=True)
    meta = {"config": {}, "model": "optimized", "model_config": vars(model.config), "tokenizer": "byte",
            "skipped": skipped}
    with checkpoint.Checkpoints(run, keep) as checkpoints:
        checkpoints.save(number, model, optimizer, meta)
    return Path(run, f"step-{number}")


def shard(folder):
    return next(Path(folder).glob("*.safetensors"))


def names(run):
    return sorted(path.name for path in Path(run).iterdir())


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# ---------------------------------------------------------------- what comes back

IN_FLOAT32 = [
    dict(), dict(moment_dtype="bfloat16"), dict(tie_embeddings=False), dict(fp8_recipe="current")]
IN_BF16 = [dict(dtype=torch.bfloat16) | options for options in (
    dict(), dict(moment_dtype="bfloat16"), dict(param_remainders=False), dict(optimizer="muon"))]


@pytest.mark.parametrize("options", [
    *IN_FLOAT32, *IN_BF16,
    *(pytest.param(options | dict(device="cuda"), marks=pytest.mark.gpu) for options in IN_BF16)])
def test_a_resumed_run_continues_exactly(tmp_path, options):
    """What is saved after loading is the same; on a GPU attention's gradients are summed in any order."""
    model, optimizer = trained(**options)
    saved = load_file(shard(save(tmp_path / "first", 3, model, optimizer)))
    expected = [step(model, optimizer, seed) for seed in range(3, 6)]
    model, optimizer = make(seed=1, **options)
    checkpoint.load(tmp_path / "first/step-3", model, optimizer)
    assert checkpoint.read_meta(tmp_path / "first/step-3")["step"] == 3
    again = load_file(shard(save(tmp_path / "again", 3, model, optimizer)))
    assert_same_tensors(again, saved)
    if "device" not in options:
        assert [step(model, optimizer, seed) for seed in range(3, 6)] == expected


def test_files_hold_plain_tensors_and_json(tmp_path):
    folder = save(tmp_path, 3, *trained())
    assert names(folder) == ["SHA256SUMS", "meta.json", shard(folder).name]
    stored = load_file(shard(folder))
    for name in ("model.wte.weight", "optimizer.wte.weight.exp_avg", "rng0.torch",
                 "fp8.blocks.0.attn.qkv.scaling_fwd.scale"):
        assert name in stored
    assert "model.lm_head.weight" not in stored, "it is tied to the embedding"
    assert not [name for name in stored if "_extra_state" in name]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["optimizer_groups"][0]["step"] == 3
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    assert shard(folder).stat().st_mode & 0o777 == 0o644, "colleagues can read it"


def test_masters_merge_and_appear_when_the_dtype_changes(tmp_path):
    model, optimizer = trained(dtype=torch.bfloat16)
    master = optimizer.state[model.wte.weight]["master_param"].clone()
    folder = save(tmp_path, 1, model, optimizer)
    model, optimizer = make(seed=1)
    checkpoint.load(folder, model, optimizer)
    assert torch.equal(model.wte.weight, master), "not the rounded weight"
    assert "master_param" not in optimizer.state[model.wte.weight]
    folder = save(tmp_path, 2, model, optimizer)
    model, optimizer = make(seed=1, dtype=torch.bfloat16)
    checkpoint.load(folder, model, optimizer)
    assert torch.equal(model.wte.weight, master.bfloat16())
    assert torch.equal(optimizer.state[model.wte.weight]["master_param"], master)


def test_remainders_restore_masters_bit_for_bit():
    """Which only optimizers on a GPU keep."""
    bits = torch.randint(-2**31, 2**31 - 1, (100_000,), dtype=torch.int64).int()
    values = bits.view(torch.float32)
    master = values[values.isfinite()]
    weight, remainder = training_state.split_remainder(master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    joined = training_state.join_remainder(weight, remainder)
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))
    error = (weight.float() - master).abs()
    smallest_error = (master.bfloat16().float() - master).abs()
    assert (error <= smallest_error).all(), "the weight is the rounded master"


def test_a_save_is_of_the_moment_it_was_asked_for(tmp_path):
    model, optimizer = trained()
    expected = load_file(shard(save(tmp_path / "before", 3, model, optimizer)))
    with checkpoint.Checkpoints(tmp_path, 3) as checkpoints:
        checkpoints.save(3, model, optimizer, {})
        for tensor in (*model.parameters(), *optimizer.state[model.wte.weight].values()):
            tensor.data.zero_()
        checkpoints.save(4, model, optimizer, {})  # waits for the one before
    assert_same_tensors(load_file(shard(tmp_path / "step-3")), expected)


# ---------------------------------------------------------------- which ones are kept

def test_the_last_ones_are_kept_and_leftovers_removed(tmp_path):
    model, optimizer = make()
    for number in (9, 10, 11):
        save(tmp_path, number, model, optimizer, keep=2)
    for leftover in (".saving-step-12", ".removing-step-8", "step-notes"):  # a run was killed
        Path(tmp_path, leftover).mkdir()
    assert checkpoint.find(tmp_path).name == "step-11"
    save(tmp_path, 100, model, optimizer, keep=2)
    assert names(tmp_path) == ["step-100", "step-11", "step-notes"]


# ---------------------------------------------------------------- files that do not fit

def refused(folder, model, optimizer):
    """Return the line that refuses a checkpoint."""
    with pytest.raises((ValueError, OSError)) as error:
        checkpoint.read_meta(folder)
        checkpoint.load(folder, model, optimizer)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


FORGED_META = [
    dict(format=2), dict(format="x"), dict(optimizer_groups=7), dict(optimizer_groups=[0]), "null",
    "[" * 9999, "{"]
FORGED_TENSORS = [
    {"model.wte.weight": None}, {"model.wte.weight": torch.ones(5)}, {"model.other": torch.ones(5)},
    {"optimizer.wte.weight.exp_avg": torch.ones(5)},
    {"fp8.blocks.0.attn.qkv.scaling_fwd.scale": torch.ones(7)},
    {"rng0.host": torch.ones(9, dtype=torch.uint8)}, {"rng0.torch": torch.ones(9, dtype=torch.uint8)}]


@pytest.mark.parametrize("meta, tensors", [
    *((change, {}) for change in FORGED_META), *(({}, change) for change in FORGED_TENSORS)])
def test_a_forged_file_is_one_line(tmp_path, meta, tensors):
    model, optimizer = trained(steps=1)
    folder = save(tmp_path, 3, model, optimizer)
    path = folder / "meta.json"
    if isinstance(meta, dict):
        meta = json.dumps(json.loads(path.read_text()) | meta)
    path.write_text(meta)
    stored = load_file(shard(folder)) | tensors
    save_file({name: value for name, value in stored.items() if value is not None}, shard(folder))
    sign(folder)
    line = refused(folder, model, optimizer)
    assert all(name.removeprefix("model.") in line for name in tensors if name.startswith("model."))


# ---------------------------------------------------------------- several ranks

def on_ranks(count, function, *arguments):
    """Call function(*arguments) in `count` processes of two machines with torch.distributed."""
    def one_rank():
        dist.init_process_group("gloo")
        function(*arguments)
        dist.barrier()
    fork_ranks(one_rank, count, LOCAL_WORLD_SIZE=str(count // 2))


def load_on_ranks(source, run, kind, options):
    model, optimizer = make(seed=1, parallel=kind, **options)
    checkpoint.load(source, model, optimizer)
    save(run, 2, model, optimizer)


def content(run):
    """Return the tensors of a run's checkpoint, but for the random generators."""
    return checkpoint.read_tensors(Path(run, "step-2"), ("model.", "optimizer."))


def test_a_checkpoint_moves_between_numbers_of_ranks(tmp_path):
    """With masters, the state of Muon and AdamW, and matrices whose rows ranks cannot share equally."""
    options = dict(optimizer="muon", dtype=torch.bfloat16, n_inner=101, fp8_recipe="none")
    save(tmp_path / "one", 2, *trained(2, **options))
    expected = content(tmp_path / "one")
    on_ranks(2, load_on_ranks, tmp_path / "one/step-2", tmp_path / "fsdp", "fsdp", options)
    on_ranks(4, load_on_ranks, tmp_path / "fsdp/step-2", tmp_path / "hsdp", "hsdp", options)
    on_ranks(2, load_on_ranks, tmp_path / "hsdp/step-2", tmp_path / "ddp", "ddp", options)
    sizes = {}  # of the files of each run
    for run in ("fsdp", "hsdp", "ddp"):
        assert_same_tensors(content(tmp_path / run), expected)
        files = Path(tmp_path, run, "step-2").glob("*.safetensors")
        sizes[run] = [path.stat().st_size for path in files]
    assert [len(sizes[run]) for run in ("fsdp", "hsdp", "ddp")] == [2, 4, 2]
    first, second = sizes["ddp"]
    assert 0.7 < first / second < 1.4, "the ranks divide the writing"
    for run in ("hsdp", "ddp"):
        assert sum(sizes[run]) < 1.3 * sum(sizes["fsdp"]), "each tensor is stored once"
    model, optimizer = make(seed=1, **options)
    checkpoint.load(tmp_path / "ddp/step-2", model, optimizer)
    assert model.wte.weight.tolist() == expected["model.wte.weight"].tolist()


def fill_disk_of_rank_1(run):
    model, optimizer = make()
    run.mkdir(exist_ok=True)
    checkpoints = checkpoint.Checkpoints(run, 1)
    with largest_file(9_000) if dist.get_rank() == 1 else contextlib.nullcontext():
        checkpoints.save(1, model, optimizer, {})
        checkpoints.wait()
    assert "File too large" in str(checkpoints.pop_error()), "on both ranks"
    checkpoints.save(2, model, optimizer, {})
    checkpoints.wait()
    assert checkpoints.pop_error() is None


def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path):
    on_ranks(2, fill_disk_of_rank_1, tmp_path / "run")
    assert names(tmp_path / "run") == ["step-2"]
