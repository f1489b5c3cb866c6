"""nanote/checkpoint.py: content of a checkpoint, damaged files, resuming, background saves."""
import errno
import json
import os
import random
import resource
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import train
from nanote import checkpoint, fp8, models, safetensors_files
from tools import hf_weights

CONFIG = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=288, n_positions=32, use_fp8=True)


def make(seed=0, dtype=torch.float32, recipe=("delayed", "hybrid", 4), **changes):
    """Return a small (model, optimizer)."""
    torch.manual_seed(seed)
    model = models.build_model(
        "optimized", models.make_model_config("optimized", CONFIG | changes), dtype=dtype
    )
    model.fp8_recipe = fp8.make_recipe(*recipe)
    return model, train.make_optimizer(model, train.TrainConfig(lr=1e-2))


def step(model, optimizer, seed):
    ids = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(seed))
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(run, number, model, optimizer, keep=9, saver=checkpoint, **config):
    run.mkdir(exist_ok=True)
    meta = {"config": config, "model": "optimized", "model_config": vars(model.config), "tokenizer": "byte"}
    return saver.save(run, number, model=model, optimizer=optimizer, meta=meta, keep=keep)


def load(folder, model, optimizer=None):
    meta = checkpoint.read_meta(folder)
    checkpoint.load(folder, meta, model, optimizer)
    return meta


def content(folder):
    """Return {file name: content} of a checkpoint."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def one_process_group():
    """torch.distributed with this process alone: saving uses the code path of several processes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def trained():
    model, optimizer = make()
    for seed in range(3):
        step(model, optimizer, seed)
    return model, optimizer


@pytest.mark.parametrize(
    "options", [dict(), dict(dtype=torch.bfloat16), dict(tie_embeddings=False), dict(recipe=("current",))]
)
def test_round_trip_is_exact(tmp_path, options):
    model, optimizer = make(**options)
    for seed in range(3):
        step(model, optimizer, seed)
    folder = save(tmp_path / "run", 3, model, optimizer)
    expected = [step(model, optimizer, seed) for seed in range(3, 6)]

    model, optimizer = make(seed=1, **options)
    assert load(folder, model, optimizer)["step"] == 3
    assert [step(model, optimizer, seed) for seed in range(3, 6)] == expected


def test_a_group_of_processes_writes_what_one_alone_does(tmp_path, trained, request):
    alone = save(tmp_path / "alone", 3, *trained)
    request.getfixturevalue("one_process_group")
    group = save(tmp_path / "group", 3, *trained)
    assert {path.name for path in alone.iterdir()} == {path.name for path in group.iterdir()}
    alone, group = (load_file(next(folder.glob("*.safetensors"))) for folder in (alone, group))
    assert alone.keys() == group.keys() and all(
        torch.equal(value, group[name]) for name, value in alone.items()
    )


def test_random_generators_come_back(tmp_path, trained):
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    random.gauss(0, 1)  # leaves a second number in store
    folder = save(tmp_path / "run", 3, *trained)
    expected = [random.gauss(0, 1), random.random(), np.random.rand(), torch.rand(()).item()]
    load(folder, *make(seed=1))
    assert [random.gauss(0, 1), random.random(), np.random.rand(), torch.rand(()).item()] == expected


def test_only_tensors_and_readable_json_are_stored(tmp_path, trained):
    """No pickle anywhere: loading a checkpoint from elsewhere cannot run code."""
    folder = save(tmp_path / "run", 3, *trained)
    names = {path.suffix or path.name for path in folder.iterdir()}
    assert names == {".safetensors", ".json", "SHA256SUMS"}
    stored = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    assert not [name for name in stored if "_extra_state" in name]
    assert {
        "model.wte.weight", "optimizer.wte.weight.exp_avg", "fp8.blocks.0.attn.qkv.scaling_fwd.scale",
    } <= set(stored)
    assert "model.lm_head.weight" not in stored, "a tied weight is stored once"
    assert json.loads((folder / "meta.json").read_text())["optimizer_groups"][0]["step"] == 3


def test_saving_and_loading_do_not_wait_for_extra_state(tmp_path, monkeypatch):
    """And everything else of state_dict() is there: buffers, but for those that are not persistent."""
    (model, optimizer), (other, _) = make(), make(seed=1)
    for each, value in ((model, 2.0), (other, 0.0)):
        for name, persistent in (("count", True), ("cache", False)):
            each.blocks[1].register_buffer(name, torch.full((3,), value), persistent=persistent)
    kind = type(model.blocks[0].attn.qkv)
    before = kind.get_extra_state
    with monkeypatch.context() as patched:
        patched.setattr(kind, "get_extra_state", lambda module: pytest.fail("extra state is collected"))
        load(save(tmp_path / "run", 1, model, optimizer), other)
    assert kind.get_extra_state is before
    assert other.blocks[1].count.tolist() == [2.0] * 3 and other.blocks[1].cache.tolist() == [0.0] * 3
    assert "blocks.0.attn.qkv._extra_state" in model.state_dict()


def test_weights_load_without_an_optimizer_and_with_fp8_off(tmp_path, trained):
    folder = save(tmp_path / "run", 3, *trained)
    model, _ = make(seed=1, use_fp8=False, recipe=("current",))
    load(folder, model)
    for name, value in trained[0].named_parameters():
        assert torch.equal(value, model.get_parameter(name))


@pytest.mark.parametrize("length", [2, 16])
def test_fp8_history_may_change_its_length(tmp_path, trained, length):
    folder = save(tmp_path / "run", 3, *trained)
    scales = {name: value for name, value in fp8.get_state(trained[0]).items() if name.endswith("scale")}
    model, optimizer = make(seed=1, recipe=("delayed", "hybrid", length))
    load(folder, model, optimizer)
    state = fp8.get_state(model)
    assert scales and all(torch.equal(state[name], value) for name, value in scales.items())
    assert all(len(value) == length for name, value in state.items() if name.endswith("amax_history"))
    step(model, optimizer, 3)


def rewrite(folder, change):
    """Change a checkpoint's tensors and meta.json, and sign it: change(tensors, meta)."""
    path, listing = next(folder.glob("*.safetensors")), folder / "SHA256SUMS"
    tensors, meta = load_file(path), json.loads((folder / "meta.json").read_text())
    change(tensors, meta)
    save_file(tensors, path, {"format": "pt"})
    (folder / "meta.json").write_text(json.dumps(meta))
    sums = checkpoint._checksums(folder)
    listing.write_text("".join(f"{checksum}  {name}\n" for name, checksum in sums.items()))


@pytest.mark.parametrize("names_fp8_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_beside_float32_weights_are_not_read(tmp_path, dtype, names_fp8_weights):
    """Earlier versions stored such masters after a resume and never updated them."""
    def add_masters(tensors, meta):
        for name in [name for name in tensors if name.endswith(".exp_avg")]:
            tensors[name.replace("exp_avg", "master_param")] = torch.zeros_like(tensors[name])
        assert meta["fp8_weights"] == []
        if not names_fp8_weights:
            del meta["fp8_weights"]

    model, optimizer = make()
    step(model, optimizer, 0)
    folder = save(tmp_path / "run", 1, model, optimizer)
    rewrite(folder, add_masters)
    other, other_optimizer = make(seed=1, dtype=dtype)
    meta = load(folder, other, other_optimizer)
    for parameter, saved in zip(other.parameters(), model.parameters()):
        assert torch.equal(parameter, saved.to(dtype))
        assert torch.equal(other_optimizer.state[parameter].get("master_param", saved), saved)
    exported = hf_weights.read_weights(folder, meta, masters=True)
    assert torch.equal(exported["wte.weight"], model.wte.weight)


def test_master_weights_appear_and_merge_when_the_precision_changes(tmp_path):
    model, optimizer = make(dtype=torch.bfloat16)
    step(model, optimizer, 0)
    master = optimizer.state[model.wte.weight]["master_param"].clone()
    folder = save(tmp_path / "run", 1, model, optimizer)
    model, optimizer = make(seed=1)
    load(folder, model, optimizer)
    assert torch.equal(model.wte.weight, master)  # not the rounded weight
    assert "master_param" not in optimizer.state[model.wte.weight]

    folder = save(tmp_path / "run", 2, model, optimizer)
    model, optimizer = make(seed=1, dtype=torch.bfloat16)
    load(folder, model, optimizer)
    assert torch.equal(model.wte.weight, master.bfloat16())
    assert optimizer.state[model.wte.weight]["master_param"].dtype == torch.float32
    step(model, optimizer, 1)


def test_a_float32_weight_comes_back_though_its_master_was_never_updated(tmp_path):
    """TE's FusedAdam allocates a master for a float32 parameter as well, and never updates it."""
    model, optimizer = make(dtype=torch.float32)
    step(model, optimizer, 0)
    optimizer.state[model.wte.weight]["master_param"] = torch.zeros_like(model.wte.weight)
    folder = save(tmp_path / "run", 1, model, optimizer)
    again, _ = make(seed=1)
    load(folder, again, _)
    assert torch.equal(again.wte.weight, model.wte.weight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name, earlier", [("delayed", False), ("current", False), ("current", True)])
def test_weights_kept_in_fp8_come_back_with_the_float32_ones_beside_them(tmp_path, device, name, earlier):
    def make_in_fp8(seed):
        torch.manual_seed(seed)
        options = train.TrainConfig(lr=1e-2, fp8_param=True, fp8_recipe=name, fp8_amax_history_len=4)
        config = models.make_model_config("optimized", CONFIG)
        recipe = train.recipe_of(options)
        model = models.build_model("optimized", config, device=device, fp8_weights_recipe=recipe)
        model.fp8_recipe = recipe
        return model, train.make_optimizer(model, options)

    def steps(model, optimizer, numbers):
        for number in numbers:
            ids = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(number)).to(device)
            model(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make_in_fp8(0)
    steps(model, optimizer, range(3))
    folder = save(tmp_path / "run", 3, model, optimizer)
    if earlier:  # versions that stored in the trainer's options that weights are kept in FP8
        rewrite(folder, lambda _, meta: meta.pop("fp8_weights") and meta["config"].update(fp8_param=True))
    again, other = make_in_fp8(1)
    meta = load(folder, again, other)
    exported = hf_weights.read_weights(folder, meta, masters=True)
    for weight, value in model.named_parameters():
        loaded = again.get_parameter(weight)
        if checkpoint._in_fp8(value):
            value, loaded = optimizer.state[value]["master_param"], other.state[loaded]["master_param"]
        assert torch.equal(value, loaded) and torch.equal(exported[weight], value.cpu()), weight
    steps(again, other, range(3, 4))
    again = save(tmp_path / "again", 4, again, other)
    steps(model, optimizer, range(3, 4))
    whole = save(tmp_path / "whole", 4, model, optimizer)
    whole, again = (load_file(next(folder.glob("*.safetensors"))) for folder in (whole, again))
    assert whole.keys() == again.keys()


def test_the_meta_of_a_resumed_checkpoint_may_be_saved_again(tmp_path, trained):
    meta = checkpoint.read_meta(save(tmp_path / "run", 3, *trained)) | {"fp8_weights": ["wte.weight"]}
    step(*trained, seed=3)
    folder = checkpoint.save(tmp_path / "run", 4, model=trained[0], optimizer=trained[1], meta=meta, keep=2)
    again = checkpoint.read_meta(folder)
    assert (again["step"], again["optimizer_groups"][0]["step"], again["fp8_weights"]) == (4, 4, [])


def damage(folder, name):
    if name == "missing":
        next(folder.glob("*.safetensors")).unlink()
    elif name == "empty":
        (folder / "SHA256SUMS").write_text("")
    else:
        path = next(folder.glob(name))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["*.safetensors", "meta.json", "SHA256SUMS", "missing", "empty"])
def test_a_damaged_checkpoint_is_refused_and_the_whole_one_before_it_named(tmp_path, trained, how):
    for number in (1, 2, 3):
        save(tmp_path / "run", number, *trained)
    damage(tmp_path / "run/step-2", "*.safetensors")
    damage(tmp_path / "run/step-3", how)
    with pytest.raises(ValueError) as error:
        checkpoint.read_meta(checkpoint.find(tmp_path / "run"))
    message = str(error.value)
    assert "\n" not in message and "run/step-3/" in message and "step-1, is whole" in message
    if how in ("*.safetensors", "meta.json"):
        file = next((tmp_path / "run/step-3").glob(how))
        written = dict(
            reversed(line.split("  "))
            for line in (tmp_path / "run/step-3/SHA256SUMS").read_text().splitlines()
        )
        assert (
            file.name in message
            and written[file.name] in message
            and checkpoint._checksums(file.parent)[file.name] in message
        )
    shutil.rmtree(tmp_path / "run/step-1")
    with pytest.raises(ValueError, match="no other checkpoint of this run is whole"):
        checkpoint.read_meta(tmp_path / "run/step-3")


def test_a_stray_file_or_one_that_cannot_be_read_is_no_reason_to_remove_a_checkpoint(tmp_path, trained,
                                                                                     monkeypatch):
    for number in (1, 2):
        save(tmp_path / "run", number, *trained)
    folder = tmp_path / "run/step-2"
    for name in ("zzz.safetensors", "._shard-00001-model-00001-of-00001.safetensors"):
        save_file({"model.wte.weight": torch.zeros(288, 32)}, folder / name)
        with pytest.raises(ValueError, match=f"step-2/{name}: is not listed.*; remove this file$"):
            checkpoint.read_meta(folder)
        (folder / name).unlink()

    def sha256(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(checkpoint, "sha256", sha256)
    with pytest.raises(PermissionError):
        checkpoint.read_meta(folder)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(n_layer=3), "blocks.2"), (dict(n_layer=1), "blocks.1"), (dict(vocab_size=320), r"\(288, 32\)"),
        (dict(tie_embeddings=False), "lm_head.weight"), (dict(use_rotary=True), "wpe.weight"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, trained, change, named):
    folder = save(tmp_path / "run", 3, *trained)
    model, optimizer = make(seed=1, **change)
    before = model.wte.weight.clone()
    with pytest.raises(ValueError, match=f"another architecture.*{named}"):
        load(folder, model, optimizer)
    assert torch.equal(model.wte.weight, before)


def test_the_last_ones_are_kept_and_leftovers_removed(tmp_path, trained):
    run = tmp_path / "run"
    for number in (9, 10, 11):
        save(run, number, *trained, keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(run)] == ["step-10", "step-11"]
    (run / ".saving-step-12").mkdir(), (run / ".removing-step-8").mkdir(), (run / "step-notes").mkdir()
    assert checkpoint.latest(run).name == "step-11"
    save(run, 100, *trained, keep=2)
    assert sorted(path.name for path in run.iterdir()) == ["step-100", "step-11", "step-notes"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", ["write", "sync"])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, trained, monkeypatch, where, background):
    run, saver = tmp_path / "run", checkpoint.BackgroundSaver()
    save(run, 1, *trained, keep=1)
    limits, reason = resource.getrlimit(resource.RLIMIT_FSIZE), "No space left on device"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if where == "write":  # half a file is written
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        reason = "File too large"
    else:
        monkeypatch.setattr(checkpoint, "_sync", full)
    try:
        if background:
            save(run, 2, *trained, keep=1, saver=saver)
            saver.wait()
            error = saver.error()
            assert saver.error() is None, "told once"
        else:
            with pytest.raises(OSError) as raised:
                save(run, 2, *trained, keep=1)
            error = raised.value
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"step-2 not written: {reason}" in str(error) and "step-1;" in str(error)
    assert [path.name for path in run.iterdir()] == ["step-1"]
    load(run / "step-1", *make(seed=1))

    monkeypatch.undo()
    save(run, 3, *trained, keep=1, saver=saver)
    saver.wait()
    assert saver.error() is None and [path.name for path in run.iterdir()] == ["step-3"]


@pytest.mark.parametrize("options", [dict(), dict(dtype=torch.bfloat16)])
def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path, monkeypatch, options):
    model, optimizer = make(**options)
    step(model, optimizer, 0)
    torch.manual_seed(5), random.seed(6)
    expected = content(save(tmp_path / "synchronous", 1, model, optimizer))

    model, optimizer = make(**options)
    step(model, optimizer, 0)
    torch.manual_seed(5), random.seed(6)
    go_on, plain, saver = threading.Event(), checkpoint._write_parts, checkpoint.BackgroundSaver()
    monkeypatch.setattr(checkpoint, "_write_parts", lambda *arguments: go_on.wait(60) and plain(*arguments))
    save(tmp_path / "run", 1, model, optimizer, saver=saver)
    torch.rand(3), random.random()
    for seed in (1, 2):
        step(model, optimizer, seed)
    assert checkpoint.latest(tmp_path / "run") is None and saver.error() is None, (
        "nothing is there before all is"
    )
    go_on.set()
    saver.wait()
    assert content(tmp_path / "run/step-1") == expected


def test_background_saves_are_written_one_after_the_other(tmp_path, trained, monkeypatch):
    plain, saver, expected = checkpoint._write_parts, checkpoint.BackgroundSaver(), []

    def write_parts(parts, folder):
        # slow: the next must not take its place in memory, nor be there before it
        if folder == tmp_path / "run/.saving-step-3":
            time.sleep(0.5)
        plain(parts, folder)

    monkeypatch.setattr(checkpoint, "_write_parts", write_parts)
    for number in (3, 4, 5):
        expected.append(content(save(tmp_path / "synchronous", number, *trained)))
        save(tmp_path / "run", number, *trained, saver=saver)
        assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "run")] == [
            f"step-{n}" for n in range(3, number)
        ]
        step(*trained, number)
    saver.wait()
    assert [content(tmp_path / f"run/step-{number}") for number in (3, 4, 5)] == expected


def test_reserved_memory_is_what_is_saved_from(tmp_path, trained):
    saver = checkpoint.BackgroundSaver()
    saver.reserve(*trained)
    reserved = {name: copy.data_ptr() for name, copy in saver.copies.items()}
    step(*trained, 1)
    expected = content(save(tmp_path / "synchronous", 1, *trained))
    save(tmp_path / "run", 1, *trained, saver=saver)
    saver.wait()
    assert {name: copy.data_ptr() for name, copy in saver.copies.items()} == reserved
    assert content(tmp_path / "run/step-1") == expected
    waits = checkpoint.BackgroundSaver(background=False)
    waits.reserve(*trained)
    assert not waits.copies


def test_without_host_memory_for_copies_it_writes_at_once(tmp_path, trained, monkeypatch):
    def no_memory(*shape, **options):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …")

    expected, saver, empty = (
        content(save(tmp_path / "synchronous", 1, *trained)), checkpoint.BackgroundSaver(), torch.empty,
    )
    monkeypatch.setattr(torch, "empty", no_memory)
    assert saver.reserve(*trained) == "CUDA error: out of memory" and not saver.copies
    monkeypatch.setattr(torch, "empty", empty)
    save(tmp_path / "run", 1, *trained, saver=saver)
    assert content(tmp_path / "run/step-1") == expected and not saver.copies  # without waiting for it
    assert checkpoint.BackgroundSaver().reserve(*trained) == ""


def test_a_defect_in_the_background_is_raised(tmp_path, trained, monkeypatch):
    saver = checkpoint.BackgroundSaver()
    monkeypatch.setattr(checkpoint, "_checksums", lambda folder: 1 / 0)
    save(tmp_path / "run", 1, *trained, saver=saver)
    with pytest.raises(ZeroDivisionError):
        saver.wait()


def test_a_model_in_several_files_comes_back(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 50_000)
    folder = save(tmp_path / "run", 3, *trained)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model, optimizer = make(seed=1)
    load(folder, model, optimizer)
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in trained[0].named_parameters())


def test_sha256sums_is_what_sha256sum_reads(tmp_path, trained):
    import subprocess
    folder = save(tmp_path / "run", 3, *trained)
    if shutil.which("sha256sum"):
        assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder).returncode == 0
    assert len(Path(folder, "SHA256SUMS").read_text().splitlines()) == len(list(folder.iterdir())) - 1
