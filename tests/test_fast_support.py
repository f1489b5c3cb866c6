"""An edited model is never trained as if it had not been edited: what the kernels refuse, and say so once."""

import copy
import dataclasses
import functools
import importlib.util
import sys
import types
import warnings
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from test_fast_block import DEVICE, count_calls, make_model, make_tokens, modules_like_te  # noqa: E402, F401

import fast_kernels  # noqa: E402
import model_te_optimized  # noqa: E402
from fast_kernels import accelerate  # noqa: E402
from fast_kernels import block as fast_block  # noqa: E402
from fast_kernels import support as fast_support  # noqa: E402
from kernel_tools import HAS_GPU, _casts_that_round, _instructions  # noqa: E402, F401
from nanote import models  # noqa: E402

pytestmark = [pytest.mark.gpu] if HAS_GPU else []


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(fast_support, "_reported", set())


class Weighted(model_te_optimized.OptimizedGPT2Model):
    """A forward with an argument more."""

    def forward(self, input_ids, labels=None, weight=1.0):
        return weight * super().forward(input_ids, labels)


class Fewer(model_te_optimized.OptimizedGPT2Model):
    """A forward with only the arguments that the trainer needs."""

    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels)


def test_an_edited_forward_may_have_other_arguments():
    config = dataclasses.replace(make_model().config, use_fp8=False)
    tokens, labels = make_tokens(1)
    for model_class, options, factor in ((Weighted, {"weight": 3.0}, 3), (Weighted, {}, 1), (Fewer, {}, 1)):
        torch.manual_seed(1)
        model = model_class(config).to(DEVICE, torch.bfloat16)
        expected = model_te_optimized.OptimizedGPT2Model.forward(model, tokens, labels)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerate(model)
            torch.testing.assert_close(model(tokens, labels, **options), factor * expected, rtol=0.01, atol=0)


# Fingerprints


def test_fingerprints_are_those_of_the_model_file(capsys):
    """After an edit of the model that fast_kernels/block.py follows, `support.print_fingerprints` gives them.
    """
    fast_support.print_fingerprints()
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert len(printed) == 11 and all(printed.values())
    assert printed == fast_support.FINGERPRINTS


FUNCTION = "def forward(x, y=2):\n    return x + y\n"
SAME = ('def forward(x: int, y: float = 2) -> float:\n    """A docstring."""\n    # and a comment\n'
        '    return (\n        x + y)\n')
OTHERS = (FUNCTION.replace("2", "3"), FUNCTION.replace("+", "-"), FUNCTION.replace("x +", "x.detach() +"),
          FUNCTION.replace("return", "y = y\n    return"))
DECORATED = ("import functools\ndef twice(f):\n    @functools.wraps(f)\n    def run(*args):\n"
             "        return 2 * f(*args)\n    return run\n@twice\n" + FUNCTION)


def test_a_fingerprint_is_of_what_a_function_does(tmp_path):
    def of(source):
        path = tmp_path / f"source_{abs(hash(source))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return fast_support.fingerprint(module.forward)

    assert len(of(FUNCTION)) == 16 and of(SAME) == of(FUNCTION)
    assert len({of(source) for source in (FUNCTION, *OTHERS, DECORATED)}) == 6
    namespace = {}
    exec(FUNCTION, namespace)  # without source
    assert fast_support.fingerprint(namespace["forward"]) == fast_support.fingerprint(None) == ""


# What falls back to the modules


class ScaledBlock(model_te_optimized.Block):
    def forward(self, x, *args, **kwargs):
        return 2 * super().forward(x, *args, **kwargs)


class ScaledAttention(model_te_optimized.Attention):
    def forward(self, x, *args, **kwargs):
        return 2 * super().forward(x, *args, **kwargs)


class ReadsBeforeTheHead(model_te_optimized.OptimizedGPT2Model):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Called(model_te_optimized.Block):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def scaled_forward(self, x, *args, **kwargs):
    return 2 * x


def widen(parameter):
    return torch.nn.Parameter(parameter.detach().float())


def become(pick, kind):
    def edit(model):
        pick(model).__class__ = kind
    return edit


def put(path, value):
    """Set an attribute, such as blocks.1.mlp.activation."""
    def edit(model):
        *parents, name = path.split(".")
        owner = model.get_submodule(".".join(parents))
        setattr(owner, name, value(owner) if isinstance(value, types.FunctionType) else value)
    return edit


def subclass_of_qkv(model):
    qkv = model.blocks[0].attn.qkv
    qkv.__class__ = type("WithAdapter", (type(qkv),), {"__module__": "adapters"})


EDITED = {  # words of the reason -> the edit
    "ScaledBlock.forward was edited": become(lambda model: model.blocks[1], ScaledBlock),
    "ScaledAttention.forward was edited": become(lambda model: model.blocks[1].attn, ScaledAttention),
    "ReadsBeforeTheHead.forward was edited": become(lambda model: model, ReadsBeforeTheHead),
    "Called.forward was edited": become(lambda model: model.blocks[0], Called),
    "Block.forward was edited": put("blocks.1.forward", lambda _: scaled_forward),
    "the forward method of blocks.0.mlp was replaced": put("blocks.0.mlp.forward", lambda _: scaled_forward),
    "blocks.0.attn.qkv is a WithAdapter of adapters": subclass_of_qkv,
    "blocks.0.attn.qkv is a Linear of torch": put("blocks.0.attn.qkv", lambda _: torch.nn.Linear(32, 96)),
    "blocks.1.mlp has activation='relu'": put("blocks.1.mlp.activation", "relu"),
    "blocks.1.mlp has zero_centered_gamma=True": put("blocks.1.mlp.zero_centered_gamma", True),
    "blocks.0.dropout has p=0.5": put("blocks.0.dropout.p", 0.5),
    "blocks.0.attn.qkv has parameters_split": put("blocks.0.attn.qkv.weight_names", ["q", "k", "v"]),
    "wte has padding_idx=3": put("wte.padding_idx", 3),
    "dropout is a Identity of torch": put("dropout", lambda _: torch.nn.Identity()),
    "dropout has p=0.5": put("dropout.p", 0.5),
    "OptimizedGPT2Model.run_block was edited": put("run_block", lambda _: scaled_forward),
    "OptimizedGPT2Model.output was edited": put("output", lambda _: scaled_forward),
    "the recipe runs attention in FP8": lambda model: setattr(model.fp8_recipe, "fp8_dpa", True),
    "blocks.1.mlp has hooks": lambda model: model.blocks[1].mlp.register_forward_hook(print),
    "lm_head has hooks": lambda model: model.lm_head.register_full_backward_pre_hook(print),
    "wte.weight is frozen": lambda model: model.wte.requires_grad_(False),
    "blocks.0.attn.qkv.layer_norm_weight is frozen": lambda model: model.blocks[0].requires_grad_(False),
    "wte.weight is not kept in BF16": lambda model: model.float(),
    "mlp.fc1_bias is not kept in BF16": put("blocks.1.mlp.fc1_bias", lambda mlp: widen(mlp.fc1_bias)),
    "n_embd=16400 is over 16384": lambda model: setattr(model.config, "n_embd", 16400)}


@pytest.mark.parametrize("words", EDITED)
def test_an_edited_model_goes_through_its_modules_and_is_named_once(words):
    model = make_model()
    EDITED[words](model)
    assert words in fast_support.unsupported_reason(model)
    with pytest.warns(UserWarning, match="fast kernels are not used: ") as warned:
        assert not fast_support.supports_pass(model)
    assert words in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not fast_support.supports_pass(model)  # warned once
        model = make_model()
        assert fast_support.supports_pass(model) and fast_support.unsupported_reason(model) == ""


@pytest.mark.parametrize("pick", [lambda model: model.blocks[0].mlp, lambda model: model.wte])
def test_a_method_replaced_in_the_librarys_class_is_seen(monkeypatch, pick):
    model = make_model()
    kind = type(pick(model))
    original = kind.forward
    monkeypatch.setattr(kind, "forward", functools.wraps(original)(lambda self, x, **_: original(self, x)))
    assert fast_support.unsupported_reason(model) == f"the forward method of {kind.__name__} was replaced"


def test_positions_need_not_be_a_multiple_of_16():
    model = make_model(n_positions=17)
    assert fast_support.unsupported_reason(model) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_to_another_type_goes_through_the_modules(monkeypatch, dtype):
    model = make_model()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype)
    reason = fast_support.unsupported_reason(model)
    assert reason == ("" if dtype == torch.bfloat16 else "torch.autocast is on, not to BF16")


MODES = {
    "no gradients": ({}, lambda model: model.eval()),
    "recipe is not delayed": ({}, put("fp8_recipe", types.SimpleNamespace(delayed=lambda: False))),
    "not delayed scaling": (dict(use_fp8=False), None),
    "high precision": (dict(fp8_skip_last=1), None),
    "blocks stay in high precision": (
        {},
        lambda model: setattr(model.config, "in_fp8", lambda layer: layer != 1)),
    "recomputed or offloaded": (dict(gradient_checkpointing=True), None),
    "dropout is on": (dict(dropout=0.1), None)}


@pytest.mark.parametrize("words", MODES)
def test_what_a_user_chose_is_no_cause_for_a_warning(words):
    options, change = MODES[words]
    model = make_model(**options)
    if change:
        change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert words in fast_support.unsupported_reason(model) and not fast_support.supports_pass(model)


@pytest.mark.parametrize("edit", ["ScaledBlock.forward was edited", "ScaledAttention.forward was edited",
                                  "wte.weight is frozen", "blocks.0.attn.qkv.layer_norm_weight is frozen"])
@pytest.mark.filterwarnings("ignore:fast kernels are not used")
def test_what_is_trained_is_the_edited_model(monkeypatch, edit):
    """Loss and gradients are those without the kernels; frozen weights get none."""
    calls, results = count_calls(monkeypatch), []
    for fused in (True, False):
        model = make_model(fused)
        EDITED[edit](model)
        for _ in range(2):  # the first pass chooses the scales
            model.zero_grad()
            loss = model(*make_tokens(0))
            loss.backward()
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    (loss, gradients), (expected, expected_gradients) = results
    assert not calls and torch.equal(loss, expected)
    for gradient, other in zip(gradients, expected_gradients):
        if other is not None:  # attention's gradients on a GPU are summed in any order
            torch.testing.assert_close(gradient, other, rtol=0.02, atol=1e-6)


def test_a_second_pass_after_unfreezing_takes_the_kernels(monkeypatch):
    calls, model = count_calls(monkeypatch), make_model()
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    with pytest.warns(UserWarning, match="is frozen"):
        model(*make_tokens(0)).backward()
    assert not calls
    model.requires_grad_(True)
    model(*make_tokens(0)).backward()
    assert calls == ["pass"]


@pytest.mark.parametrize("reason, options, words", [
    ("", {}, "fast kernels: blocks, loss on; off: attention (sdpa is used, not FlashAttention); "
             "dgrad GEMMs with K up to 3,072 use fast accumulation where it is faster"),
    ("", dict(dgrad_fast_accum_k=0),
     "fast kernels: blocks, loss on; off: attention (sdpa is used, not FlashAttention)"),
    ("", dict(dgrad_fast_accum_k=0, logits_rounding="stochastic"),
     "fast kernels: blocks, loss on; off: attention (sdpa is used, not FlashAttention); the FP8 gradient of "
     "the logits is rounded stochastically"),
    ("dropout is on", {},
     "fast kernels: loss on; off: blocks (dropout is on), attention (sdpa is used, not FlashAttention)"),
    ("", dict(blocks=False, loss=False),
     "fast kernels: none on; off: blocks (not asked for), attention (sdpa is used, not FlashAttention), "
     "loss (not asked for)")])
def test_the_report_says_what_the_kernels_do(monkeypatch, reason, options, words):
    model = make_model(attention="sdpa")
    monkeypatch.setattr(fast_kernels, "_replace_loss", lambda model: "")  # there is none on a CPU
    monkeypatch.setattr(fast_support, "mode_reason", lambda model: reason)
    assert str(accelerate(model, **options)) == words


# accelerate


def test_accelerate_changes_no_weight_and_no_name():
    model, other = make_model(), make_model(fused=False)
    assert list(model.state_dict()) == list(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_a_copy_of_an_accelerated_model_is_accelerated_itself(monkeypatch):
    calls, model = count_calls(monkeypatch), make_model()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.wte.weight.zero_()
    assert other.forward.__self__ is other and other.cross_entropy.__self__ is other
    losses = [each(*make_tokens(0)) for each in (model, other)]
    assert calls == ["pass", "pass"] and not torch.equal(*losses)


def test_parts_that_are_not_asked_for_stay():
    model = make_model(fused=False)
    report = accelerate(model, blocks=False, attention=False, loss=False)
    assert {report.blocks, report.attention, report.loss} == {"not asked for"}
    assert not {"forward", "cross_entropy"} & set(vars(model))


@pytest.mark.parametrize("name", ["advanced", "fused", "custom", "te"])
def test_other_models_are_left_alone(name):
    config = models.make_model_config(
        name, dict(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16))
    model = models.build_model(name, config)
    report = accelerate(model)
    assert "is not built like model_te_optimized.py" in str(report)
    assert not {"forward", "cross_entropy"} & set(vars(model))


def test_a_forward_method_that_the_user_put_in_place_stays():
    model = make_model(fused=False)
    model.forward = mine = types.MethodType(scaled_forward, model)
    assert (
        accelerate(model).blocks == "the forward method of the model was replaced" and model.forward is mine)


class OwnLoss(model_te_optimized.OptimizedGPT2Model):
    def cross_entropy(self, logits, labels):
        return 3 * super().cross_entropy(logits, labels)


def test_an_edited_loss_is_what_is_trained(monkeypatch):
    calls, model = count_calls(monkeypatch), make_model(fused=False)
    model.__class__ = OwnLoss
    report = accelerate(model)
    assert (report.loss, report.blocks) == ("OwnLoss.cross_entropy was edited", "")
    model(*make_tokens(0)).backward()
    own = model(*make_tokens(0)).item()
    model.__class__ = model_te_optimized.OptimizedGPT2Model
    assert own == pytest.approx(3 * model(*make_tokens(0)).item(), rel=1e-2) and len(calls) == 3


@pytest.mark.filterwarnings("ignore:fast kernels are not used")
@pytest.mark.parametrize("edit", ["the class", "the method"])
def test_a_loss_that_is_edited_after_accelerate_is_what_is_trained(monkeypatch, edit):
    calls, model = [], make_model(fused=False)
    accelerate(model)
    monkeypatch.setattr(fast_block.fast_loss, "cross_entropy", lambda *_: calls.append("kernel"))
    logits = types.SimpleNamespace(is_cuda=True)
    model.cross_entropy(logits, None)
    assert calls == ["kernel"]
    own = lambda self, logits, labels: calls.append("own")  # noqa: E731
    if edit == "the class":
        model.__class__ = type("Own", (type(model),), {"cross_entropy": own})
    else:
        monkeypatch.setattr(type(model), "cross_entropy", own)
    model.cross_entropy(logits, None)
    assert calls == ["kernel", "own"]


def test_the_loss_takes_the_rounding_that_was_asked_for(monkeypatch):
    calls, model = [], make_model(fused=False)
    monkeypatch.setattr(fast_block.fast_loss, "cross_entropy", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(fast_kernels.support, "loss_reason", lambda model: "")
    for rounding in ("stochastic", "nearest"):
        accelerate(model, logits_rounding=rounding)
        model.cross_entropy(types.SimpleNamespace(is_cuda=True), None)
    assert [arguments[2:] for arguments in calls] == [
        (model.lm_head, "stochastic"), (model.lm_head, "nearest")]


def test_the_report_names_a_rounding_only_where_the_head_is_in_fp8(monkeypatch):
    monkeypatch.setattr(fast_kernels, "_replace_loss", lambda model: "")  # there is none on a CPU
    for options, words in (({}, "rounded stochastically"), (dict(fp8_lm_head=False), "")):
        report = accelerate(make_model(fused=False, **options), logits_rounding="stochastic")
        assert str(report).endswith(words) and ("stochastically" in str(report)) == bool(words)


BROKEN = {
    "Block has no attn": lambda model: vars(model.blocks[1])["_modules"].pop("attn"),
    "Attention has no kernel": lambda model: delattr(model.blocks[0].attn, "kernel"),
    "OptimizedConfig has no use_rotary": lambda model: vars(model.config).pop("use_rotary")}


@pytest.mark.parametrize("words", BROKEN)
def test_another_structure_is_refused_with_a_reason(monkeypatch, words):
    model = make_model(fused=False)
    if "config" in words.lower():
        model.config = types.SimpleNamespace(**vars(model.config), in_fp8=model.config.in_fp8)
        words = words.replace("OptimizedConfig", "SimpleNamespace")
    BROKEN[words.replace("SimpleNamespace", "OptimizedConfig")](model)
    assert words in str(accelerate(model)) and "forward" not in vars(model)


def test_accelerate_again_replaces_what_is_asked_for_now():
    model = make_model()
    assert accelerate(model, blocks=False, loss=False).blocks == "not asked for"
    assert not {"forward", "cross_entropy"} & set(vars(model))
    # what unpickling an accelerated model leaves
    model.forward = types.MethodType(type(model).forward, model)
    assert accelerate(model).blocks == "" and model.forward.__func__ is fast_block.forward


def test_attention_is_replaced_in_all_layers_or_in_none():
    model = make_model(fused=False, attention="sdpa")
    for block in model.blocks:
        block.attn.kernel = "flash"
    model.blocks[1].attn.__class__ = TwiceAttending
    assert accelerate(model).attention == "TwiceAttending.attend was edited"
    assert not any("mix" in vars(block.attn) for block in model.blocks)


def test_a_kernel_that_is_chosen_after_accelerate_is_used(monkeypatch):
    packed = []
    monkeypatch.setattr(fast_block, "packed_attention", lambda qkv, *_, **__: packed.append(1) or qkv)
    model = make_model(fused=False, attention="sdpa")
    for block in model.blocks:
        block.attn.kernel = "flash"
    accelerate(model)
    attention = model.blocks[0].attn
    attention.kernel = "sdpa"
    attention.mix(torch.randn(2, 16, 6, 16, device=DEVICE).bfloat16())
    assert not packed


def test_a_compiled_model_under_delayed_scaling_reaches_the_kernels(monkeypatch):
    calls, model = count_calls(monkeypatch), make_model(**dict(n_layer=1))
    with pytest.warns(UserWarning, match="the model runs uncompiled"):
        torch.compile(model, backend="eager")(*make_tokens(0)).backward()
    assert calls == ["pass"]


# Versions and machines


@pytest.mark.skipif(HAS_GPU, reason="there Transformer Engine itself is asked")
@pytest.mark.parametrize("capability, version, words", [
    ((9, 0), "2.20.2", ""), ((9, 0), "2.20.0+abc", ""), ((9, 0), "2.21.0", "this is 2.21.0"),
    ((9, 0), "2.2.0", "this is 2.2.0"), ((10, 0), "2.20.2", "compute capability 9.0"),
    ((8, 9), "2.20.2", "compute capability 9.0"),
    ((9, 0), None, "cannot be imported"), (None, "2.20.2", "no CUDA device")])
def test_which_machines_and_versions_are_left_to_the_modules(monkeypatch, capability, version, words):
    monkeypatch.undo()  # the stand-in for this function
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    stub = types.ModuleType("transformer_engine")
    stub.__version__ = version
    monkeypatch.setitem(sys.modules, "transformer_engine", stub if version else None)
    fast_support._installed_version_reason.cache_clear()
    try:
        reason = fast_support.environment_reason()
    finally:
        fast_support._installed_version_reason.cache_clear()
    assert words in reason and bool(words) == bool(reason)


@pytest.mark.gpu
def test_the_tested_version_is_installed_here():
    assert fast_support.environment_reason() == ""


# Attention


def attend_twice(self, q, k, v, generating, documents=None):
    return 2 * model_te_optimized.Attention.attend(self, q, k, v, generating, documents)


class TwiceAttending(model_te_optimized.Attention):
    attend = attend_twice


def mix_without_values(self, qkv, *args, **kwargs):
    return 0 * model_te_optimized.Attention.mix(self, qkv, *args, **kwargs)


class WithoutValues(model_te_optimized.Attention):
    mix = mix_without_values


ATTENTION_EDITS = {
    "WithoutValues.mix was edited": lambda attention: setattr(attention, "__class__", WithoutValues),
    "q_norm has settings of its own": lambda attention: setattr(attention.q_norm, "eps", 1e-2),
    "TwiceAttending.attend was edited": lambda attention: setattr(attention, "__class__", TwiceAttending),
    "the source of Attention.attend cannot be read":
        lambda attention: vars(attention).update(attend=partial(attend_twice, attention)),
    "q_norm has hooks": lambda attention: attention.q_norm.register_forward_hook(lambda *_: None),
    "k_norm is not Transformer Engine's": lambda attention: setattr(attention, "k_norm", torch.nn.Identity())}


@pytest.mark.parametrize("words", ATTENTION_EDITS)
def test_edited_attention_is_not_packed(monkeypatch, words):
    packed = []
    monkeypatch.setattr(fast_block, "packed_attention", lambda qkv, *_, **__: packed.append(1) or qkv)
    model = make_model(use_qk_norm=True, use_rotary=True, attention="sdpa")
    for block in model.blocks:
        block.attn.kernel = "flash"
    assert accelerate(model).attention == ""
    attention = model.blocks[0].attn
    qkv = torch.randn(2, 16, 6, 16, device=DEVICE).bfloat16()
    attention.mix(qkv)
    assert packed == [1]
    ATTENTION_EDITS[words](attention)
    monkeypatch.setattr(model_te_optimized, "flash_attn_func", lambda q, k, v, causal: v)
    with pytest.warns(UserWarning, match=words):
        out = attention.mix(qkv)
    assert packed == [1]
    if "attend" in words:
        assert torch.equal(out, 2 * qkv[:, :, 4:].flatten(2))  # the edit runs


@pytest.mark.filterwarnings("ignore:fast kernels are not used")
def test_another_attention_function_is_not_left_out(monkeypatch):
    """A sliding window, say."""
    def flash_attn_func(q, k, v, causal):
        return v

    flash_attn_func.__module__ = "flash_attn.flash_attn_interface"
    attention = make_model().blocks[0].attn
    for function, takes in ((flash_attn_func, True), (torch.compiler.disable(flash_attn_func), True),
                            (partial(flash_attn_func, window_size=(256, 0)), False)):
        monkeypatch.setattr(model_te_optimized, "flash_attn_func", function)
        assert fast_support.takes_attention(attention) == takes


def test_compiled_code_gets_the_answer_that_accelerate_stored(monkeypatch):
    model = make_model(fused=False)
    for block in model.blocks:
        block.attn.kernel = "flash"
    attention = model.blocks[0].attn
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert fast_support.takes_attention(attention)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fast_support.takes_attention(attention)  # whatever eager passes there were
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    accelerate(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert fast_support.takes_attention(attention)


@pytest.mark.filterwarnings("ignore:fast kernels are not used")
def test_an_edited_rotation_is_not_packed(monkeypatch):
    attention = make_model(use_rotary=True).blocks[0].attn
    assert fast_support.takes_attention(attention)
    monkeypatch.setattr(model_te_optimized, "apply_rope", lambda x, cos, sin: x)
    assert fast_support.attention_reason(attention) == "apply_rope was edited"
    assert not fast_support.takes_attention(attention)
