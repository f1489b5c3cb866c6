"""The update of all scales, bit for bit against te_reference, which tests/test_te_reference.py compares with
Transformer Engine."""

import pytest
import torch

import te_reference

pytest.importorskip("triton")
from fast_kernels import library, scales
from kernel_tools import DEVICE

LENGTHS = [1, 2, 3, 16, 511, 512, 513, 1024, 1100]
SPECIAL = torch.tensor([0.0, torch.inf, torch.nan, 1e-40, 1e-45, 3e38, 1.2e-38])


def make_states(lengths, seed=0):
    """Make (scale, history) pairs with amaxes of all magnitudes, some of them special, some slots unused."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for number, length in enumerate(lengths):
        slots = [1, 2, 3, 8, 9, 40][number % 6]
        history = torch.randn(length, slots, generator=generator).mul(8).exp2()
        special = SPECIAL[torch.randint(len(SPECIAL), history.shape, generator=generator)]
        share = 0.3 if length < 20 else 2 / length
        is_special = torch.rand(history.shape, generator=generator) < share
        history = torch.where(is_special, special, history)
        is_unused = torch.rand(slots, generator=generator) < 0.2
        history[0, is_unused] = 0
        states.append([torch.rand(slots, generator=generator).to(DEVICE), history.to(DEVICE)])
    return states


def rolled_by_reference(states, fp8_max, margin, algorithm):
    recipe = te_reference.DelayedScaling(margin=margin, amax_compute_algo=algorithm)
    for scale, history in states:
        state = te_reference._ScalingState(recipe, len(scale), "cpu")
        state.scale, state.amax_history = scale.cpu().clone(), history.cpu().clone()
        state.roll(recipe, fp8_max)
        yield state.scale, state.amax_history


def assert_same_bits(ours, expected):
    for pair, others in zip(ours, expected, strict=True):
        for a, b in zip(pair, others, strict=True):
            assert torch.equal(a.cpu().view(torch.int32), b.cpu().view(torch.int32))


@pytest.mark.parametrize("fp8_max, margin, algorithm", [
    (448.0, 0, "max"), (57344.0, 0, "most_recent"), (448.0, 3, "most_recent"), (57344.0, -2, "max")])
def test_equals_te_reference_bit_for_bit(fp8_max, margin, algorithm):
    for seed, lengths in enumerate([LENGTHS, [1] * 12, [16] * 24]):
        states = make_states(lengths, seed)
        plain = [[t.clone() for t in state] for state in states]
        for _ in range(1 if seed == 0 else 2):  # a second update sees what the first one wrote
            expected = list(rolled_by_reference(states, fp8_max, margin, algorithm))
            scales.update(states, fp8_max, margin, algorithm)
            assert_same_bits(states, expected)
            scales.update_reference(plain, fp8_max, margin, algorithm)
            assert_same_bits(plain, expected)
            for (_, history), (_, copied) in zip(states, plain):
                amax = torch.rand(history.shape[1], device=DEVICE)
                history[0] = amax
                copied[0] = amax


def test_memory_that_is_used_again():
    """The table of addresses holds for tensors of other sizes at the same place, too."""
    memory = torch.zeros(4096, device=DEVICE)
    for length, slots in ((16, 8), (8, 16), (16, 8), (31, 4)):
        end = 64 + length * slots
        scale = memory[:slots].fill_(1)
        history = memory[64:end].view(length, slots)
        history.copy_(torch.rand(length, slots))
        expected = list(rolled_by_reference([(scale, history)], 448.0, 0, "max"))
        before = memory.clone()
        scales.update([(scale, history)], 448.0)
        assert_same_bits([(scale, history)], expected)
        assert torch.equal(memory[end:], before[end:])


def test_operation_is_registered():
    (scale, history), = make_states([16])
    op = torch.ops.fast_kernels.update_scales.default
    torch.library.opcheck(op, ([scale], [history], 448.0, 0, "max"))
    graph = torch.compile(lambda *state: scales.update([state], 448.0), fullgraph=True, backend="aot_eager")
    expected = list(rolled_by_reference([(scale, history)], 448.0, 0, "max"))
    graph(scale, history)
    assert_same_bits([(scale, history)], expected)


@pytest.mark.parametrize("scale, history, options, message", [
    (torch.ones(3), torch.ones(2, 4), {}, r"must be \(n,\) and \(length, n\)"),
    (torch.ones(3), torch.ones(3, 2).T, {}, "contiguous"), (torch.ones(3), torch.ones(0, 3), {}, "must be"),
    (torch.ones(3).double(), torch.ones(2, 3), {}, "float32"),
    (torch.ones(3), torch.ones(2, 3), dict(algorithm="mean"), "must be max or most_recent")])
def test_invalid_arguments_raise(scale, history, options, message):
    with pytest.raises(ValueError, match=message):
        scales.update([(scale.to(DEVICE), history.to(DEVICE))], 448.0, **options)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    states = make_states(LENGTHS)
    others = make_states([7])
    with pytest.raises(RuntimeError, match="run the function once before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            scales.update(others, 448.0)
    scales.update(states, 448.0)
    graph, kept = torch.cuda.CUDAGraph(), library.cached_tables()
    with torch.cuda.graph(graph):
        scales.update(states, 448.0)
    for _ in range(3):
        expected = list(rolled_by_reference(states, 448.0, 0, "max"))
        graph.replay()
        assert_same_bits(states, expected)
        for _, history in states:
            history[0] = torch.rand(history.shape[1], device=DEVICE)
    assert kept


@pytest.mark.multigpu
def test_on_a_device_that_is_not_the_current_one():
    states = [[t.to("cuda:1") for t in state] for state in make_states([16, 3])]
    expected = list(rolled_by_reference(states, 448.0, 0, "max"))
    scales.update(states, 448.0)
    assert_same_bits(states, expected)
    with pytest.raises(ValueError, match="must be on cuda:1"):
        scales.update([states[0], [t.to("cuda:0") for t in states[1]]], 448.0)
