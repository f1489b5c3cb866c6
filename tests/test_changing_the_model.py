"""guide/changing_the_model.md: each diff applies to the model file, trains in FP8 and does what the
page says, and `accelerate` reports it in the words of the page."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from test_fast_block import DEVICE, modules_like_te  # noqa: E402, F401

import fast_kernels  # noqa: E402
from fast_kernels import accelerate  # noqa: E402
from fast_kernels import support as fast_support  # noqa: E402
from kernel_tools import HAS_GPU  # noqa: E402
from nanote import checkpoint  # noqa: E402
from trainer_tools import make_tokens as make_corpus  # noqa: E402
from trainer_tools import run_script, run_train  # noqa: E402

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "guide" / "changing_the_model.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.M)[1:]}
FREEZE, LORA, HEAD, ACTIVATION, WINDOW = SECTIONS
SMALL = dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_fp8=True)


def block_of(section, language):
    """Return the section's only code block of this language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.M | re.S)
    return block


def edited(section, folder):
    """Apply a section's diff to a copy of the model file, as the page says; return the module."""
    path = folder / "my_model.py"
    path.write_text((ROOT / "model_te_optimized.py").read_text())
    (folder / "change.diff").write_text(block_of(section, "diff"))
    done = subprocess.run(["git", "apply", "change.diff"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("my_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_model"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_model", None)  # put back what was there

    def build(section, **options):
        module = edited(section, tmp_path)
        torch.manual_seed(1)
        return module.OptimizedGPT2Model(module.OptimizedConfig(**SMALL | options)).to(DEVICE)

    return build


def make_tokens(rows=4, length=32):
    tokens = torch.randint(64, (rows, length + 1), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def train(model, loss_of, steps=12):
    """Return the first and the last loss on one batch."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_edited_model_trains_in_fp8_on_the_losss_contract(section, build):
    """`model(input_ids, labels)` returns the loss, which is what train.py calls."""
    model, (input_ids, labels) = build(section), make_tokens()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first, last = train(model, lambda model: model(input_ids, labels))
    assert last < first - 0.05
    assert model.blocks[0].mlp.fp8_meta["recipe"].delayed()  # it ran in FP8
    for name, parameter in model.named_parameters():
        learns = parameter.requires_grad and not name.startswith("value_head")
        assert torch.equal(parameter, before[name]) != learns, name
        assert (parameter.grad is not None) == learns, name


def test_train_py_takes_every_edit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_model", None)
    tokens = make_corpus("tokens")
    options = ("--model my_model.py:OptimizedGPT2Model --n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 "
               f"--micro-batch-size 2 --max-steps 2 --eval-tokens 64 --dtype float32 --device {DEVICE}")
    for number, section in enumerate(SECTIONS):
        edited(section, tmp_path)
        assert run_train(f"{options} --out-dir {number}", tokens) == 0, section
        if section == ACTIVATION:  # whatever train.py's --activation is
            saved = checkpoint.read_meta(checkpoint.find(str(number)))
            assert saved["model_config"]["activation"] == "srelu"
        if section == HEAD:
            argv = [str(number), "--model", "my_model.py:OptimizedGPT2Model", "--max-new-tokens", "4"]
            assert run_script("sample.py", [*argv, "--device", DEVICE]) == 0


def test_what_is_frozen(build):
    frozen = {name for name, p in build(FREEZE).named_parameters() if not p.requires_grad}
    assert {name.partition(".attn")[0].partition(".mlp")[0] for name in frozen} == {"wte.weight", "blocks.0"}


def test_only_adapters_learn_and_they_start_as_the_base_model(build):
    import model_te_optimized as original

    model, (input_ids, _) = build(LORA), make_tokens()
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learns == {f"blocks.{i}.attn.lora_{ab}.weight" for i in (0, 1) for ab in "ab"}
    base = original.OptimizedGPT2Model(original.OptimizedConfig(**SMALL)).to(DEVICE)
    model.load_state_dict(base.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(model(input_ids), base(input_ids))


def test_the_adapters_rank_must_be_a_multiple_of_16_in_fp8(build):
    model, batch = build(LORA, lora_rank=8), make_tokens()
    with pytest.raises((ValueError, AssertionError, RuntimeError), match="16"):
        model(*batch).backward()


def test_the_second_head_trains_in_the_loop_of_the_page(build):
    model, (input_ids, labels) = build(HEAD), make_tokens()
    names = {"model": model, "input_ids": input_ids, "labels": labels, "F": F,
             "targets": (input_ids > 32).float()}

    def loss_of(model):
        exec(block_of(HEAD, "python"), names)
        return names["loss"]

    before = [p.detach().clone() for p in model.value_head.parameters()]
    first, last = train(model, loss_of)
    assert last < first - 0.05 and names["values"].shape == input_ids.shape
    assert not any(torch.equal(p, old) for p, old in zip(model.value_head.parameters(), before))
    model.autocast = lambda enabled=True: type(model).autocast(model)
    with pytest.raises((ValueError, AssertionError, RuntimeError), match="16"):  # the head in FP8
        model(input_ids)


def test_relu_squared_is_its_formula(build):
    mlp = build(ACTIVATION, use_fp8=False).blocks[0].mlp
    x = torch.randn(2, 16, 32, device=DEVICE)
    normed = F.layer_norm(x, (32,), mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.eps)
    hidden = F.relu(normed @ mlp.fc1_weight.T + mlp.fc1_bias) ** 2
    torch.testing.assert_close(mlp(x), hidden @ mlp.fc2_weight.T + mlp.fc2_bias)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_a_position_sees_its_window_and_no_more(packed, build):
    model = build(WINDOW, use_fp8=False, window=4, n_layer=1).eval()
    input_ids, _ = make_tokens(1)
    cu_seqlens = torch.tensor([0, 3, 32], dtype=torch.int32, device=DEVICE) if packed else None
    other = input_ids.clone()
    other[0, 2] = (other[0, 2] + 1) % 64
    differs = (model(input_ids, cu_seqlens=cu_seqlens) - model(other, cu_seqlens=cu_seqlens)).abs() > 1e-6
    seen_by = differs.any(-1)[0].nonzero().flatten().tolist()
    assert seen_by == ([2] if packed else [2, 3, 4, 5])


@torch.no_grad()
def test_the_window_holds_in_generation(build):
    model = build(WINDOW, use_fp8=False, window=4).eval()
    input_ids, _ = make_tokens(1)
    cache = model.make_kv_cache(1, 32)
    steps = [model(chunk, kv_cache=cache) for chunk in input_ids.split([10, 5, *[1] * 17], dim=1)]
    # on a GPU, GEMMs of other shapes round differently (TF32)
    tolerance = dict(rtol=0.01, atol=1e-3) if DEVICE == "cuda" else {}
    torch.testing.assert_close(torch.cat(steps, 1), model(input_ids), **tolerance)


def test_flash_attention_gets_the_window(build, monkeypatch):
    model, windows = build(WINDOW, use_fp8=False, window=4).to(torch.bfloat16), []

    def flash_attn_func(q, k, v, causal, window_size):
        windows.append(window_size)
        return q

    monkeypatch.setattr(sys.modules["my_model"], "flash_attn_func", flash_attn_func)
    monkeypatch.setattr(sys.modules["my_model"], "flash_attn_varlen_func",
                        lambda *qkv, causal, window_size, **_: flash_attn_func(*qkv, causal, window_size))
    for block in model.blocks:
        block.attn.kernel = "flash"
    input_ids, labels = make_tokens()
    model(input_ids, labels)
    model(input_ids, labels, cu_seqlens=torch.arange(0, 129, 32, dtype=torch.int32, device=DEVICE))
    assert windows == [(3, 0)] * 4  # two blocks, two passes


@pytest.mark.parametrize("section", SECTIONS)
def test_accelerate_reports_what_the_page_quotes(section, build, monkeypatch):
    """As on a Hopper GPU with FlashAttention 4: modules_like_te stands for the GPU."""
    monkeypatch.setattr(fast_kernels, "_replace_loss", fast_support.loss_reason)  # there is none on a CPU
    model = build(section).to(torch.bfloat16)
    for block in model.blocks:
        block.attn.kernel = "flash"
    report = str(accelerate(model))
    assert report == block_of(section, "text").strip()
    on = re.search(r"fast kernels: (.*?) on;", report)[1]
    rows = dict(re.findall(r"^\| \[.*?\]\(#(.*?)\) \|.*\| (.*?) \|$", PAGE, re.M))
    anchor = re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")
    assert rows[anchor] == on


@pytest.mark.filterwarnings("ignore:fast kernels are not used")
@pytest.mark.parametrize("section", [FREEZE, LORA, HEAD, ACTIVATION])
def test_an_accelerated_edit_trains_as_the_edit(section, build):
    """Loss and gradients are those of the edited modules, bit for bit."""
    results = []
    for fast in (False, True):
        model = build(section).to(torch.bfloat16)
        if fast:
            accelerate(model)
        torch.manual_seed(2)
        loss = model(*make_tokens())
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 1 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))
