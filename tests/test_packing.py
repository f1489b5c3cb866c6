"""--pack-documents: no token attends to another document, and a packed batch equals its documents run one by
one. tests/test_tokens.py holds what the Loader does."""

import pytest
import torch

import model_te_optimized
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote.tokens import write_tokens
from trainer_tools import MODERN, OPTIONS, metrics, run_train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = dict(vocab_size=288, n_positions=64, n_embd=64, n_layer=2, n_head=4)
# two rows of 32 tokens; a document of one token; one that fills the end of a row
STARTS = [0, 5, 6, 30, 32, 48]
PADDED = torch.tensor([*STARTS, 64, 64, 64], dtype=torch.int32, device=DEVICE)  # as a loader pads it


def make(**switches):
    torch.manual_seed(1)
    model = OptimizedGPT2Model(OptimizedConfig(**{**TINY, **switches})).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # so that attention is far from even
    return model


def tokens():
    return torch.randint(0, 288, (2, 32), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))


FLASH = pytest.param("flash", marks=pytest.mark.skipif(
    model_te_optimized.flash_attn_func is None, reason="needs FlashAttention"))
every_model = pytest.mark.parametrize("switches", [{}, MODERN | dict(n_kv_head=2)], ids=["gpt2", "modern"])
every_kernel = pytest.mark.parametrize("attention", ["sdpa", "te"])


@every_model
@every_kernel
def test_a_packed_batch_is_its_documents_run_alone(switches, attention):
    model, x = make(attention=attention, **switches).eval(), tokens()
    with torch.no_grad():
        packed = model(x, cu_seqlens=PADDED).flatten(0, 1)
        for start, end in zip(STARTS, [*STARTS[1:], 64]):
            alone = model(x.flatten()[None, start:end])[0]
            torch.testing.assert_close(packed[start:end], alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


@every_model
@every_kernel
@pytest.mark.parametrize("fp8", [False, True])
def test_no_token_sees_another_document(switches, attention, fp8):
    """Bit for bit; in FP8 as well, whose scales under delayed scaling do not depend on the batch. Without
    cu_seqlens, rows are documents."""
    model, x = make(attention=attention, use_fp8=fp8, **switches).eval(), tokens()
    rows = torch.tensor([0, 32, 64], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        packed, of_rows = model(x, cu_seqlens=PADDED), model(x)
        for start, end in zip(STARTS, [*STARTS[1:], 64]):
            changed = x.clone().flatten()
            changed[start:end] = (changed[start:end] + 7) % 288
            same = (packed == model(changed.view(2, 32), cu_seqlens=PADDED)).all(-1).flatten()
            assert not same[start:end].any() and same[:start].all() and same[end:].all()
        assert not torch.equal(of_rows[0], packed[0])
        torch.testing.assert_close(model(x, cu_seqlens=rows), of_rows, rtol=0, atol=1e-5)


@every_model
def test_gradients_stay_inside_a_document(switches):
    model, x = make(**switches), tokens()
    seen = {}
    model.blocks[0].register_forward_pre_hook(
        lambda module, inputs: seen.update(x=inputs[0]) or inputs[0].retain_grad())
    model(x, cu_seqlens=PADDED).flatten(0, 1)[20].sum().backward()  # a token of the third document
    reached = seen["x"].grad.flatten(0, 1).abs().sum(-1) > 0
    assert reached[6:21].all() and not reached[:6].any() and not reached[21:].any()


def test_generation_knows_one_document():
    model = make().eval()
    with pytest.raises(ValueError, match="drop cu_seqlens"):
        model(tokens(), cu_seqlens=PADDED, kv_cache=model.make_kv_cache(2, 64))


@pytest.mark.gpu
@every_model
@pytest.mark.parametrize("attention", ["te", FLASH])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_agree_on_a_gpu(attention, head_dim, switches):
    """In BF16, with empty documents at the end, forward and backward: every kernel against PyTorch's with a
    mask."""
    x, y = (torch.randint(0, 288, (4, 256), device="cuda") for _ in range(2))
    starts = torch.tensor([0, 1, 100, 256, 512, 700, 701, 768, *[1024] * 9], dtype=torch.int32, device="cuda")
    results = []
    for kernel in ("sdpa", attention):
        model = make(attention=kernel, n_positions=256, head_dim=head_dim, **switches).bfloat16()
        loss = model(x, y, starts)
        loss.backward()
        results.append([loss.detach().float(), *(p.grad.float() for p in model.parameters())])
    for ours, truth in zip(results[1], results[0]):
        assert float((ours - truth).norm() / truth.norm().clamp(min=1e-6)) < 3e-2


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["te", FLASH])
def test_no_token_sees_another_document_on_a_gpu(attention):
    model = make(attention=attention, n_positions=256, head_dim=64, n_kv_head=2, **MODERN).bfloat16().eval()
    x = torch.randint(0, 288, (2, 256), device="cuda")
    changed = x.clone()
    changed[0, 100:200] = (changed[0, 100:200] + 7) % 288
    starts = torch.tensor([0, 100, 200, 256, 300, 512, 512], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        same = (model(x, cu_seqlens=starts) == model(changed, cu_seqlens=starts)).all(-1).flatten()
    assert same[:100].all() and same[200:].all() and not same[100:200].any()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["te", FLASH])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_graph_packs_every_batch_anew(folder, tmp_path, attention, recipe):
    """On batches with different documents, a replayed CUDA graph is the step launched from Python."""
    options = (
        f"--n-layer 2 --n-head 2 --n-embd 128 --seq-len 256 --micro-batch-size 4 --max-steps 8 "
        "--log-interval 1 --eval-interval 4 "
        f"--pack-documents --attention {attention} --fp8-recipe {recipe}")
    for name in ("on", "off"):
        assert run_train(f"{options} --cuda-graph {name} --out-dir {tmp_path}/{name}", str(folder)) == 0
    on, off = (torch.tensor([line["loss"] for line in metrics(tmp_path / name)]) for name in ("on", "off"))
    torch.testing.assert_close(on, off, rtol=5e-3, atol=0)


# ---- the trainer

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of 1 to 60 tokens, each followed by an end-of-text token."""
    path = tmp_path_factory.mktemp("packing") / "tokens"
    write_tokens(("abcdefghij"[i % 10] * (1 + i * 7 % 60) for i in range(300)), path, val_fraction=0.2)
    return path


@pytest.mark.parametrize("options", ["--fp8-recipe delayed", "--fp8-recipe none --use-rotary --attention te"])
def test_trains_evaluates_and_resumes_exactly(folder, tmp_path, options):
    options = f"{OPTIONS} --n-layer 1 --max-steps 4 --checkpoint-interval 2 --eval-interval 2 {options}"
    assert run_train(f"{options} --pack-documents --out-dir {tmp_path}/whole", str(folder)) == 0
    assert run_train(f"{options} --out-dir {tmp_path}/unpacked", str(folder)) == 0
    whole, unpacked = metrics(tmp_path / "whole"), metrics(tmp_path / "unpacked")
    # evaluation masks, too
    assert whole[0]["loss"] != unpacked[0]["loss"] and whole[0]["val_loss"] != unpacked[0]["val_loss"]
    assert whole[-1]["val_loss"] < whole[0]["val_loss"]
    (tmp_path / "whole" / "step-4").rename(tmp_path / "step-4")
    assert run_train(f"--resume --out-dir {tmp_path}/whole") == 0
    assert metrics(tmp_path / "whole") == whole  # --pack-documents came from the checkpoint
