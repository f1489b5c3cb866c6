"""--pack-documents: no token attends to another document, and a packed batch equals its documents run one by
one. tests/test_tokens.py holds what the Loader does."""

import pytest
import torch

import model_te_optimized
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote.tokens import write_tokens
from trainer_tools import MODERN, OPTIONS, losses, metrics, run_train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = dict(vocab_size=288, n_positions=64, n_embd=64, n_layer=2, n_head=4)
# Two rows of 32 tokens; a document of one token; one that fills the end of a row.
DOCUMENTS = [(0, 5), (5, 6), (6, 30), (30, 32), (32, 48), (48, 64)]
CU_SEQLENS = [0, 5, 6, 30, 32, 48, 64, 64, 64]  # padded, as by a loader


def make(**switches):
    torch.manual_seed(1)
    model = OptimizedGPT2Model(OptimizedConfig(**{**TINY, **switches})).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # so that attention is far from even
    return model


def tokens():
    return torch.randint(0, 288, (2, 32), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))


def as_cu_seqlens(starts):
    return torch.tensor(starts, dtype=torch.int32, device=DEVICE)


def with_other_tokens(x, start, end):
    """Return token ids that differ from x in x.flatten()[start:end]."""
    changed = x.clone().flatten()
    changed[start:end] = (changed[start:end] + 7) % 288
    return changed.view_as(x)


FLASH = pytest.param("flash", marks=pytest.mark.skipif(
    model_te_optimized.flash_attn_func is None, reason="needs FlashAttention"))
every_model = pytest.mark.parametrize("switches", [{}, MODERN | dict(n_kv_head=2)], ids=["gpt2", "modern"])
every_kernel = pytest.mark.parametrize("attention", ["sdpa", "te"])


@every_model
@every_kernel
def test_a_packed_batch_is_its_documents_run_alone(switches, attention):
    model, x = make(attention=attention, **switches).eval(), tokens()
    with torch.no_grad():
        packed = model(x, cu_seqlens=as_cu_seqlens(CU_SEQLENS)).flatten(0, 1)
        for start, end in DOCUMENTS:
            document = x.flatten()[start:end].unsqueeze(0)
            expected = model(document)[0]
            tolerance = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(packed[start:end], expected, rtol=0, atol=tolerance)


@every_model
@every_kernel
@pytest.mark.parametrize("fp8", [False, True])
def test_no_token_sees_another_document(switches, attention, fp8):
    """Bit for bit; in FP8 as well, whose scales under delayed scaling do not depend on the batch."""
    model, x = make(attention=attention, use_fp8=fp8, **switches).eval(), tokens()
    cu_seqlens = as_cu_seqlens(CU_SEQLENS)
    with torch.no_grad():
        expected = model(x, cu_seqlens=cu_seqlens)
        for start, end in DOCUMENTS:
            found = model(with_other_tokens(x, start, end), cu_seqlens=cu_seqlens)
            is_same = (found == expected).all(-1).flatten()  # for each token
            assert not is_same[start:end].any()
            assert is_same[:start].all() and is_same[end:].all()


@every_model
@every_kernel
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_documents_without_cu_seqlens(switches, attention, fp8):
    model, x = make(attention=attention, use_fp8=fp8, **switches).eval(), tokens()
    with torch.no_grad():
        rows = model(x)
        packed_rows = model(x, cu_seqlens=as_cu_seqlens([0, 32, 64]))
        packed = model(x, cu_seqlens=as_cu_seqlens(CU_SEQLENS))
    torch.testing.assert_close(packed_rows, rows, rtol=0, atol=1e-5)
    assert not torch.equal(packed[0], rows[0])


@every_model
def test_gradients_stay_inside_a_document(switches):
    model, seen = make(**switches), []

    def keep_gradient(block, inputs):
        embeddings = inputs[0]
        embeddings.retain_grad()
        seen.append(embeddings)

    model.blocks[0].register_forward_pre_hook(keep_gradient)
    logits = model(tokens(), cu_seqlens=as_cu_seqlens(CU_SEQLENS)).flatten(0, 1)
    logits[20].sum().backward()  # a token of the third document, which begins at 6
    has_gradient = seen[0].grad.flatten(0, 1).abs().sum(-1) > 0
    assert has_gradient[6:21].all()
    assert not has_gradient[:6].any() and not has_gradient[21:].any()


def test_generation_knows_one_document():
    model = make().eval()
    with pytest.raises(ValueError, match="drop cu_seqlens"):
        model(tokens(), cu_seqlens=as_cu_seqlens(CU_SEQLENS), kv_cache=model.make_kv_cache(2, 64))


@pytest.mark.gpu
@every_model
@pytest.mark.parametrize("attention", ["te", FLASH])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_agree_on_a_gpu(attention, head_dim, switches):
    """In BF16, with empty documents at the end, forward and backward: every kernel against PyTorch's with a
    mask."""
    x, y = (torch.randint(0, 288, (4, 256), device="cuda") for _ in range(2))
    cu_seqlens = as_cu_seqlens([0, 1, 100, 256, 512, 700, 701, 768] + [1024] * 9)

    def loss_and_gradients(kernel):
        model = make(attention=kernel, n_positions=256, head_dim=head_dim, **switches).bfloat16()
        loss = model(x, y, cu_seqlens)
        loss.backward()
        return [loss.detach().float(), *(p.grad.float() for p in model.parameters())]

    for found, expected in zip(loss_and_gradients(attention), loss_and_gradients("sdpa")):
        distance = (found - expected).norm() / expected.norm().clamp(min=1e-6)
        assert float(distance) < 3e-2


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["te", FLASH])
def test_no_token_sees_another_document_on_a_gpu(attention):
    model = make(attention=attention, n_positions=256, head_dim=64, n_kv_head=2, **MODERN).bfloat16().eval()
    x = torch.randint(0, 288, (2, 256), device="cuda")
    cu_seqlens = as_cu_seqlens([0, 100, 200, 256, 300, 512, 512])
    with torch.no_grad():
        expected = model(x, cu_seqlens=cu_seqlens)
        found = model(with_other_tokens(x, 100, 200), cu_seqlens=cu_seqlens)
    is_same = (found == expected).all(-1).flatten()  # for each token
    assert not is_same[100:200].any()
    assert is_same[:100].all() and is_same[200:].all()


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
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=5e-3)


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
