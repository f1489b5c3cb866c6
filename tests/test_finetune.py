"""bench/finetune.py: transformers' model and this kit's are one network, and rows say what ran. bench/fits.py
counts what was measured, and the page has its table."""
import json

import pytest
import torch

from bench import finetune, fits, hf_models, measure, measured, step
from model_te_optimized import OptimizedGPT2Model, freeze_in_fp8, is_frozen_in_fp8
from nanote.config import TrainConfig
from nanote.models import make_model_config
from trainer_tools import ROOT, randomize

pytest.importorskip("transformers")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
CPU = torch.device("cpu")


@on_cpu
@pytest.mark.parametrize("name", sorted({setting.model for setting in finetune.SETTINGS.values()}))
def test_the_peer_is_the_same_network(name):
    hf_config = hf_models.hf_config(name, is_tiny=True)
    setting = finetune.Setting(name, micro_batch_size=2, seq_len=32)
    config = finetune.train_config(setting, hf_config)
    peer = finetune.make_peer(hf_config, "sdpa", False, config, CPU)
    model = randomize(OptimizedGPT2Model(measure.model_config_of(config)))
    finetune.copy_weights(model.state_dict(), peer.model, config)
    tokens = torch.randint(512, (2, 33))
    x = tokens[:, :-1]
    y = tokens[:, 1:].contiguous()
    y[0, :5] = -100
    logits = model(x)
    torch.testing.assert_close(peer.model(x).logits, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    torch.testing.assert_close(peer.forward(x, y), model(x, y), rtol=1e-5, atol=1e-5)


@on_cpu
def test_rows_compare_the_kit_with_transformers_and_llmq(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finetune, "attention_names", lambda: ["sdpa", "flash_attention_4"])
    path = tmp_path / "finetune.json"
    command = "--settings qwen2.5-0.5b llama-3-8b qwen2.5-0.5b-llmq --arms fp8 --no-compile --steps 4 --json"
    finetune.main([*command.split(), str(path)])
    assert "the times mean nothing" in capsys.readouterr().out
    rows = {(row["setting"], row["arm"]): row for row in json.loads(path.read_text())}
    for setting in ("qwen2.5-0.5b", "llama-3-8b"):
        assert "FlashAttention" in rows.pop((setting, "transformers-flash_attention_4"))["error"]
    in_turns, alone = "qwen2.5-0.5b", "llama-3-8b"
    assert list(rows) == [(in_turns, "transformers-sdpa"), (in_turns, "fp8"),
                          (alone, "transformers-sdpa"), (alone, "fp8"), ("qwen2.5-0.5b-llmq", "fp8")]
    for row in rows.values():
        tokens = row["micro_batch_size"] * row["seq_len"] * row["grad_accum"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms"], rel=1e-4)
        assert any("attention" in name for name in row["attention_kernels"])
    for setting in (in_turns, alone):
        peer = rows[setting, "transformers-sdpa"]
        kit = rows[setting, "fp8"]
        assert "transformers 5" in peer["kernels"] and peer["ratio_to_transformers"] == 1
        assert kit["parameters"] == peer["parameters"]
        assert kit["loss"] == pytest.approx(peer["loss"], rel=1e-3), "from the same weights"
        assert kit["in_turns"] == (setting == in_turns)
        assert ("ratio_to_transformers_interval" in kit) == (setting == in_turns)
    assert kit["moment_dtype"] == "bfloat16"
    assert kit["ratio_to_transformers"] == pytest.approx(peer["ms"] / kit["ms"], rel=1e-4)
    beside_llmq = rows["qwen2.5-0.5b-llmq", "fp8"]
    assert beside_llmq["ratio_to_llmq"] == pytest.approx(beside_llmq["tokens_per_s"] / 164e3, rel=1e-4)


@on_cpu
@pytest.mark.parametrize("arm, frozen_in_fp8", [("fp8-adapters", 0), ("fp8-checkpointing-frozen", 4)])
def test_arms_of_adapters_train_them_alone(arm, frozen_in_fp8, tmp_path):
    config = finetune.train_config(
        finetune.Setting("qwen2.5-0.5b", 2, seq_len=32), hf_models.hf_config("qwen2.5-0.5b", is_tiny=True))
    timing = measure.Timing(CPU, steps=4, phases=0)
    figures, training = finetune.measure_adapters(arm, config, timing, tmp_path)
    assert figures["arm"] == arm and figures["tokens_per_s"] > 0
    assert training.model.config.gradient_checkpointing == ("checkpointing" in arm)
    assert {name.split(".")[-2] for name, p in training.model.named_parameters() if p.requires_grad} == {
        "lora_qkv", "lora_proj", "lora_fc1", "lora_fc2"}
    weights = training.model.blocks[0].parameters()
    assert sum(is_frozen_in_fp8(weight) for weight in weights) == frozen_in_fp8


@on_cpu
def test_peft_begins_with_the_adapters_of_the_kit(tmp_path):
    pytest.importorskip("peft")
    hf_config = hf_models.hf_config("llama-3.1-8b", is_tiny=True)
    setting = finetune.Setting("llama-3.1-8b", micro_batch_size=2, seq_len=32)
    config = finetune.write_edit(finetune.train_config(setting, hf_config), "bf16", CPU, tmp_path)
    [batch] = step.make_batches(config, CPU)
    kit = step.Training(config, CPU, [batch]).model
    peer = finetune.make_peft(hf_config, "sdpa", False, config, CPU)
    kit(*batch).backward()
    peer.forward(*batch).backward()
    trained = {name: p for name, p in peer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    attention = "model.layers.1.self_attn"
    ours = kit.blocks[1].attn.lora_qkv
    for projection in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(trained[f"{attention}.{projection}.lora_A.default.weight"], ours.a)
    gradients = [trained[f"{attention}.{name}.lora_B.default.weight"].grad
                 for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(torch.cat(gradients), ours.b.grad, rtol=1e-3, atol=1e-6)


@on_cpu
def test_rows_compare_adapters_with_peft_and_all_weights(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(finetune, "attention_names", lambda: ["sdpa"])
    path = tmp_path / "finetune.json"
    command = "--settings llama-3.1-8b --arms fp8 fp8-checkpointing-loss8-frozen --no-compile --steps 4"
    finetune.main([*command.split(), "--json", str(path)])
    full, peer, kit = json.loads(path.read_text())
    assert [row["arm"] for row in (full, peer, kit)] == [
        "fp8", "peft-sdpa", "fp8-checkpointing-loss8-frozen"]
    assert "peft 0.21" in peer["kernels"] and peer["ratio_to_peft"] == 1
    assert kit["loss"] == pytest.approx(peer["loss"], rel=1e-3)
    assert kit["in_turns"] and len(kit["ratio_to_peft_interval"]) == 2
    assert kit["ratio_to_full"] == pytest.approx(kit["tokens_per_s"] / full["tokens_per_s"], rel=1e-3)
    of_a = 2 * 16 * 64  # in two blocks; PEFT has two more for q, k and v, and one more for gate and up
    assert peer["trained_parameters"] == kit["trained_parameters"] + 3 * of_a


@pytest.mark.parametrize("setting", finetune.SETTINGS.values())
def test_the_arms_of_a_setting_can_be_measured(setting):
    for arm in setting.arms:
        finetune.check_arm(arm)


@pytest.mark.parametrize("name, parameters", [
    ("qwen2.5-0.5b", 494_032_768), ("llama-3.2-1b", 1_235_814_400), ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688), ("qwen2.5-7b", 7_615_616_512), ("llama-3-8b", 8_030_261_248),
    ("llama-3.1-8b", 8_030_261_248),
    ("qwen2.5-14b", 14_770_033_664), ("qwen2.5-32b", 32_763_876_352), ("llama-3-70b", 70_553_706_496)])
def test_a_shape_has_the_published_number_of_parameters(name, parameters):
    assert fits.published(name).total == parameters


@pytest.mark.parametrize("shape", ["124m-b32", "c4096"])
def test_counted_memory_is_at_most_30_percent_above_measured(shape):
    options = step.SHAPES[shape] | dict(vocab_size=50304)
    config = TrainConfig(**options, n_positions=options["seq_len"])
    sizes = fits.sizes_of(measure.model_config_of(config))
    counted = fits.full(sizes) + fits.activations(sizes, config.micro_batch_size * config.seq_len)
    rows = json.loads((ROOT / "results/memory.json").read_text())
    [row] = measured.find(rows, shape=shape, switch="gradient checkpointing")
    assert 1 < counted / 2**30 / row["peak_gib"] < 1.3


@on_cpu
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3-8b"])  # a tied head, and one of its own
def test_frozen_weights_take_the_bytes_that_are_counted(name):
    options = hf_models.options_of(hf_models.hf_config(name, is_tiny=True))
    model = OptimizedGPT2Model(make_model_config("optimized", options)).to(torch.bfloat16)
    freeze_in_fp8(model)
    in_bf16 = 0
    in_fp8 = 0
    for parameter in model.parameters():
        if is_frozen_in_fp8(parameter):
            in_fp8 += parameter.numel()
        else:
            in_bf16 += parameter.numel()
    sizes = fits.sizes_of(model.config)
    made_in_each_step = fits.FP8_COPIES * sizes.head if model.config.tie_embeddings else 0
    for bytes_in_fp8, keeps_transpose in ((1, False), (2, True)):
        counted = fits.frozen(sizes, keeps_transpose) - fits.adapters(sizes) - made_in_each_step
        assert counted == 2 * in_bf16 + bytes_in_fp8 * in_fp8


def test_the_page_has_the_table_of_what_fits():
    assert fits.table() in (ROOT / "guide/fine_tuning.md").read_text()
