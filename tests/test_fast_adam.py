"""FastAdam against torch.optim.AdamW in float64. Without a GPU it runs in Triton's interpreter."""

import copy
import itertools
import math
import os
import types
import unittest.mock

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
triton = pytest.importorskip("triton")

from fast_kernels import adam as fast_adam  # noqa: E402
from fast_kernels.adam import FastAdam  # noqa: E402
from kernel_tools import _casts_that_round  # noqa: E402, F401
from nanote import checkpoint, ddp, peers  # noqa: E402
from nanote.recipes import round_up  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(96, 100), (7,), (8192 + 5,), (1,)]  # several chunks, less than one, a partial last one


def parameters(dtype):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in SHAPES]


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


def groups(params):
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


def train(optimizer, params, steps, scale=None, dtype=None):
    for step in range(steps):
        for parameter, gradient in zip(params, gradients(step, dtype or params[0].dtype)):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step(**({} if scale is None else {"grad_scale": torch.tensor(scale, device=DEVICE)}))


def master(optimizer, parameter):
    value = optimizer.state[parameter].get("master_param", parameter.detach())
    return (
        checkpoint.join_remainder(parameter.detach(), value) if value.dtype == torch.int16 else value.float())


@pytest.mark.parametrize(
    "dtype, remainders", [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_equals_adamw(dtype, remainders, scale):
    params = parameters(dtype)
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    start = [p.detach().double() for p in params]
    ours = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95), store_param_remainders=remainders)
    theirs = torch.optim.AdamW(groups(exact), lr=1e-2, betas=(0.9, 0.95))
    for step in range(5):
        for parameter, reference, gradient in zip(params, exact, gradients(step, dtype)):
            parameter.grad, reference.grad = gradient, gradient.double() * (scale or 1)
        ours.step(**({} if scale is None else {"grad_scale": torch.tensor(scale, device=DEVICE)}))
        theirs.step()
    for parameter, reference, before in zip(params, exact, start):
        moved = (reference - before).norm()
        assert (master(ours, parameter).double() - reference).norm() < 1e-5 * moved + 1e-6 * before.norm()
        if dtype == torch.bfloat16:  # rounded to 8 bits
            assert (parameter.double() - reference).abs().max() <= 2.0**-8 * reference.abs().max()


def test_remainders_equal_float32_masters_bit_for_bit():
    outcomes = []
    for remainders in (True, False):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=1e-2, store_param_remainders=remainders)
        train(optimizer, params, 4)
        outcomes.append([master(optimizer, p) for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


def test_bfloat16_moments_are_close_to_float32_moments():
    outcomes = []
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95), moment_dtype=dtype)
        train(optimizer, params, 6)
        assert optimizer.state[params[0]]["exp_avg"].dtype == dtype
        pairs = zip(params, parameters(torch.bfloat16))
        updates = [(master(optimizer, p) - before.detach().float()).flatten() for p, before in pairs]
        outcomes.append(torch.cat(updates))
    assert 0 < (outcomes[0] - outcomes[1]).norm() < 0.02 * outcomes[0].norm()


@pytest.mark.parametrize("beta, decreases", [(0.996, True), (0.999, False)])
def test_bfloat16_moments_decrease_with_betas_up_to_0_996(monkeypatch, beta, decreases):
    """The reason for the limit: with zero gradients, both moments must decay to zero."""
    monkeypatch.setattr(fast_adam, "LARGEST_BF16_BETA", 1.0)
    parameter = torch.nn.Parameter(torch.ones(64, device=DEVICE, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = FastAdam([parameter], betas=(beta, beta), moment_dtype=torch.bfloat16)
    start = torch.linspace(0.5, 8, 64, device=DEVICE).bfloat16()
    moments = [optimizer.state[parameter][name].copy_(start) for name in ("exp_avg", "exp_avg_sq")]
    for _ in range(100 if decreases else 2):  # every step casts the same values
        optimizer.step()
    for moment in moments:
        assert (moment < 0.8 * start).all() if decreases else torch.equal(moment, start)


def test_bfloat16_moments_have_a_largest_beta():
    largest, options = fast_adam.LARGEST_BF16_BETA, dict(moment_dtype=torch.bfloat16)
    FastAdam(parameters(torch.bfloat16), betas=(0.9, largest), **options)
    with pytest.raises(ValueError, match="at most 0.996"):
        FastAdam(parameters(torch.bfloat16), betas=(0.9, math.nextafter(largest, 1)), **options)


def test_a_parameter_without_gradient_is_not_changed():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(groups(params), lr=1e-2)
    before = params[1].detach().clone()
    for parameter, gradient in zip(params, gradients(0, torch.bfloat16)):
        parameter.grad = None if parameter is params[1] else gradient
    optimizer.step()
    assert torch.equal(params[1], before)
    assert not torch.equal(params[3].detach(), parameters(torch.bfloat16)[3].detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_norm(dtype):
    params = parameters(dtype)
    optimizer = FastAdam(groups(params))
    for parameter, gradient in zip(params, gradients(0, dtype)):
        parameter.grad = gradient
    norm = optimizer.gradient_norm()
    exact = torch.cat([p.grad.double().flatten() for p in params]).norm()
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    params[2].grad[-1] = 1e3  # in the partial chunk
    expected = (exact**2 + 1e6 - gradients(0, dtype)[2][-1].double() ** 2).sqrt()
    assert optimizer.gradient_norm().item() == pytest.approx(expected.item(), rel=1e-6)
    params[2].grad[-1] = float("nan")
    assert optimizer.gradient_norm().isnan()
    params[2].grad = None
    rest = torch.cat([p.grad.double().flatten() for p in params if p.grad is not None]).norm()
    assert optimizer.gradient_norm().item() == pytest.approx(rest.item(), rel=1e-6)


def test_bfloat16_parameters_with_float32_gradients():
    """Gradients of nanote/ddp.py. Values that BF16 can hold train as BF16 gradients do, bit for bit."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=0.1)
        for parameter, gradient in zip(params, gradients(0, torch.bfloat16)):
            parameter.grad_dtype = None  # any
            parameter.grad = gradient.to(dtype)
        norm = optimizer.gradient_norm()
        optimizer.step()
        results.append([norm, *params, *(optimizer.state[p]["exp_avg"] for p in params)])
    assert all(torch.equal(of_bf16, of_float32) for of_bf16, of_float32 in zip(*results))
    params[0].grad = params[0].grad.bfloat16()
    with pytest.raises(ValueError, match="all must be float32, or all have the parameters' type"):
        optimizer.step()


@pytest.mark.parametrize("options, value", [
    (dict(), math.nan), (dict(), math.inf), (dict(store_param_remainders=False), math.nan),
    (dict(moment_dtype=torch.bfloat16), math.nan), (dict(dtype=torch.float32), math.nan)])
def test_fast_adam_skips_a_step(options, value):
    """A grad_scale that is not finite changes nothing, not even the step count."""
    options = dict(options)
    dtype = options.pop("dtype", torch.bfloat16)

    def run(scales):
        torch.manual_seed(0)
        sizes = (fast_adam.CHUNK + 5, 7)
        params = [torch.nn.Parameter(torch.randn(size, device=DEVICE).to(dtype)) for size in sizes]
        optimizer = FastAdam(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options)
        generator = torch.Generator().manual_seed(1)
        for scale in scales:
            for parameter in params:
                if math.isfinite(scale):
                    gradient = torch.randn(parameter.shape, generator=generator)
                else:
                    gradient = torch.full(parameter.shape, math.nan)
                parameter.grad = gradient.to(DEVICE, dtype)
            optimizer.step(grad_scale=torch.tensor(scale, device=DEVICE))
        moments = [value for p in params for value in optimizer.state[p].values()]
        return [*params, *moments, optimizer.param_groups[0]["step"]]

    for with_skips, without in (([0.5, value, 1.0, value], [0.5, 1.0]), ([value], [])):
        assert all(torch.equal(a, b) for a, b in zip(run(with_skips), run(without), strict=True))


def test_the_set_of_parameters_with_gradients_may_change():
    """Each parameter with a gradient is updated and counts in the norm, also if their number is unchanged."""
    params, beta1, beta2 = parameters(torch.float32), 0.9, 0.95
    exact = [[p.detach().double(), *torch.zeros(2, *p.shape, device=DEVICE).double()] for p in params]
    optimizer = FastAdam(params, lr=1e-2, betas=(beta1, beta2))
    for step, present in enumerate([(1, 3), (0, 2), (2, 3), (0, 1, 2, 3), (), (0, 1)], 1):
        given = gradients(step, torch.float32)
        for number, parameter in enumerate(params):
            parameter.grad = given[number] if number in present else None
        for number in present:
            w, m, v = exact[number]
            m.lerp_(given[number].double(), 1 - beta1)
            v.mul_(beta2).add_((1 - beta2) * given[number].double() ** 2)
            # the step count is the group's, as in Transformer Engine
            w -= 1e-2 * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + 1e-8)
        norm = math.sqrt(sum(given[number].double().square().sum().item() for number in present))
        assert optimizer.gradient_norm().item() == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        for parameter, (w, _, _) in zip(params, exact):
            torch.testing.assert_close(parameter.double(), w, rtol=1e-6, atol=1e-6)


def test_a_group_can_be_added_after_a_step():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params[:1], lr=1e-2, betas=(0.9, 0.95))
    train(optimizer, params[:1], 2)
    optimizer.add_param_group({"params": params[1:], "lr": 2e-2, "weight_decay": 0.1})
    before = [p.detach().clone() for p in params]
    train(optimizer, params, 1)
    assert not any(torch.equal(p, q) for p, q in zip(params, before))
    assert [group["step"].item() for group in optimizer.param_groups] == [3, 1]
    fresh = parameters(torch.bfloat16)[1:]
    alone = FastAdam(fresh, lr=2e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for parameter, gradient in zip(fresh, gradients(0, torch.bfloat16)[1:]):
        parameter.grad = gradient
    alone.step()
    assert all(torch.equal(p, q) for p, q in zip(params[1:], fresh))


@pytest.mark.parametrize("group, complaint", [(dict(dtype=torch.float32), "all must be"),
                                              (dict(betas=(0.9, 0.999)), "0.996")])
def test_an_invalid_group_is_not_added(group, complaint):
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params[:1], betas=(0.9, 0.95), moment_dtype=torch.bfloat16)
    other = torch.nn.Parameter(torch.zeros(8, device=DEVICE, dtype=group.pop("dtype", torch.bfloat16)))
    with pytest.raises(ValueError, match=complaint):
        optimizer.add_param_group({"params": [other], **group})
    assert len(optimizer.param_groups) == 1 and other not in optimizer.state
    train(optimizer, params[:1], 1)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    with pytest.raises(ValueError, match="0.996"):
        optimizer.step()


def test_changing_the_parameters_of_a_group_raises():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params, lr=1e-2)
    train(optimizer, params, 1)
    optimizer.param_groups[0]["params"] = params[:1]
    with pytest.raises(ValueError, match="use add_param_group"):
        optimizer.step()


def test_a_learning_rate_may_be_a_number():
    """A number set before or after a step is copied to the memory that a captured CUDA graph reads."""
    outcomes = []
    for as_number in (True, False):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(params, lr=5e-2)
        memory = optimizer.param_groups[0]["lr"].data_ptr()
        for rate in (1e-2, 3e-2):
            if as_number:
                optimizer.param_groups[0]["lr"] = rate
            else:
                optimizer.param_groups[0]["lr"].fill_(rate)
            train(optimizer, params, 1)
        assert optimizer.param_groups[0]["lr"].data_ptr() == memory
        outcomes.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


def test_a_scheduler_sets_the_learning_rate():
    params = parameters(torch.bfloat16)[:1]
    optimizer = FastAdam(params, lr=4e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for rate in (4e-2, 2e-2, 1e-2):
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rate)
        train(optimizer, params, 1)
        scheduler.step()


def test_changed_options_apply_from_the_next_step():
    params, fresh = parameters(torch.float32), parameters(torch.float32)
    options = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    ours, theirs = FastAdam(params, **options), torch.optim.AdamW(fresh, **options)
    for step in range(4):
        for optimizer, own in ((ours, params), (theirs, fresh)):
            if step == 2:
                optimizer.param_groups[0].update(betas=(0.5, 0.6), weight_decay=0.1, eps=1e-2)
            for parameter, gradient in zip(own, gradients(step, torch.float32)):
                parameter.grad = gradient
            optimizer.step()
    for parameter, reference in zip(params, fresh):
        torch.testing.assert_close(parameter, reference, rtol=1e-5, atol=1e-6)


def test_a_closure_is_called_with_gradients_enabled():
    parameter = torch.nn.Parameter(torch.ones(8, device=DEVICE))
    optimizer = FastAdam([parameter], lr=0.1, betas=(0.9, 0.95))

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert [optimizer.step(closure).item() for _ in range(2)] == [8.0, pytest.approx(8 * 0.9**2, rel=1e-5)]


@pytest.mark.parametrize("options, complaint", [
    (dict(moment_dtype=torch.bfloat16), r"betas \(0.9, 0.999\)"),
    (dict(betas=(0.999, 0.95), moment_dtype=torch.bfloat16), "0.996"),
    (dict(moment_dtype=torch.float16), "moment_dtype"), (dict(betas=(0.9, 1.0)), "betas"),
    (dict(lr=-1.0), "lr")])
def test_invalid_options_raise(options, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        FastAdam([torch.nn.Parameter(torch.zeros(4, device=DEVICE))], **options)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="all must be"):
        FastAdam([parameters(torch.float32)[0], parameters(torch.bfloat16)[0]])


@pytest.mark.parametrize("grad, complaint", [
    (lambda p: torch.zeros(p.numel() + 2, device=DEVICE)[2:].view_as(p), "multiple of 16 bytes"),
    (lambda p: torch.zeros(100, 96, device=DEVICE).T, "must be contiguous"),
    (lambda p: torch.zeros_like(p, device="cpu"), "cpu, cuda:0: all must be on one device")])
def test_gradients_that_the_kernel_cannot_read_raise(grad, complaint):
    if DEVICE == "cpu" and "cuda" in complaint:
        pytest.skip("needs a second device")
    parameter = torch.nn.Parameter(torch.zeros(96, 100, device=DEVICE))
    optimizer = FastAdam([parameter])
    if "cuda" in complaint:  # autograd refuses such a gradient
        optimizer.state[parameter]["exp_avg"] = grad(parameter)
        parameter.grad = torch.zeros_like(parameter)
    else:
        parameter.grad = grad(parameter)
    with pytest.raises(ValueError, match=complaint):
        optimizer.step()


@pytest.mark.multigpu
def test_on_a_device_that_is_not_the_current_one():
    outcomes = []
    for device in ("cuda:0", "cuda:1"):
        params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(torch.bfloat16)]
        optimizer = FastAdam(groups(params), lr=1e-2)
        for parameter, gradient in zip(params, gradients(0, torch.bfloat16)):
            parameter.grad = gradient.to(device)
        norm = optimizer.gradient_norm()
        optimizer.step(grad_scale=1 / norm)
        outcomes.append([x.detach().cpu() for x in (norm, *params)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))
    with pytest.raises(ValueError, match="grad_scale on cuda:0: must be on cuda:1"):
        optimizer.step(grad_scale=torch.ones((), device="cuda:0"))


def addresses(optimizer):
    tensors = [tensor for group in optimizer.param_groups for tensor in (group["lr"], group["step"])]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("dtype, options", [
    (torch.bfloat16, {}), (torch.bfloat16, dict(store_param_remainders=False)), (torch.float32, {}),
    (torch.bfloat16, dict(betas=(0.9, 0.95), moment_dtype=torch.bfloat16))])
def test_a_state_is_loaded_into_the_existing_tensors(dtype, options):
    """Captured CUDA graphs have their addresses. An optimizer that has already made steps continues exactly
    as the saved one."""
    params = parameters(dtype)
    optimizer = FastAdam(groups(params), **options | dict(lr=1e-2))
    train(optimizer, params, 3)
    others = parameters(dtype)
    other = FastAdam(groups(others), **options | dict(lr=5e-2))
    train(other, others, 1)
    before, saved = addresses(other), copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        for parameter, trained in zip(others, params):
            parameter.copy_(trained)
    other.load_state_dict(saved)
    assert addresses(other) == before
    train(optimizer, params, 2)
    train(other, others, 2)
    assert other.param_groups[0]["step"].item() == 5
    for parameter, own in zip(params, others):
        assert torch.equal(parameter, own)
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(value, other.state[own][name])


def test_loading_an_invalid_state_changes_nothing():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params, betas=(0.9, 0.95), moment_dtype=torch.bfloat16)
    train(optimizer, params, 2)
    before = copy.deepcopy(optimizer.state_dict())

    def masters(state):
        state["state"][2]["master_param"] = state["state"][2]["master_param"].float()

    def shape(state):
        state["state"][2]["exp_avg"] = state["state"][2]["exp_avg"][:1]  # it would broadcast

    for change, complaint in ((masters, "store_param_remainders"), (shape, "exp_avg"),
                              (lambda state: state["param_groups"][0].update(betas=(0.9, 0.999)), "0.996")):
        state = copy.deepcopy(before)
        change(state)
        with pytest.raises(ValueError, match=complaint):
            optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        for number, values in before["state"].items():
            assert all(torch.equal(value, after["state"][number][name]) for name, value in values.items())
        assert after["param_groups"][0]["betas"] == (0.9, 0.95)


def test_float32_weights_have_no_masters():
    """Nor after a state is loaded: masters would never be updated, but saved and loaded as weights."""
    params = parameters(torch.float32)
    optimizer = FastAdam(params)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["master_param"] = torch.zeros(SHAPES[0], device=DEVICE)
    optimizer.load_state_dict(state)
    train(optimizer, params, 1)
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_learning_rate_from_its_tensor():
    outcomes = []
    for graphed in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=1e-2)
        for parameter, gradient in zip(params, gradients(0, torch.bfloat16)):
            parameter.grad = gradient
        if graphed:
            optimizer.prepare()
            optimizer.step()  # compiles
            for parameter, fresh in zip(params, parameters(torch.bfloat16)):
                parameter.data.copy_(fresh)
                for value in optimizer.state[parameter].values():
                    value.zero_()
            for group in optimizer.param_groups:
                group["step"].zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for rate in (1e-2, 3e-2, 1e-3):
            for group in optimizer.param_groups:
                group["lr"].fill_(rate)
            graph.replay() if graphed else optimizer.step()
        outcomes.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


@pytest.mark.gpu
def test_a_replay_follows_gradients_and_options():
    """After `prepare`, a captured step uses the current options and the parameters with gradients now."""
    outcomes = []
    for graphed in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95))
        train(optimizer, params, 1)  # compiles
        if graphed:
            state = copy.deepcopy(optimizer.state_dict())
            weights = [p.detach().clone() for p in params]
            optimizer.prepare()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                norm = optimizer.gradient_norm()
                optimizer.step()
            graph.replay()
            optimizer.load_state_dict(state)  # into the memory that the graph reads
            for parameter, weight in zip(params, weights):
                parameter.data.copy_(weight)
        norms = []
        for step, present in enumerate([(1, 3), (0, 2), (0, 1, 2, 3)], 1):
            for number, (parameter, gradient) in enumerate(zip(params, gradients(step, torch.bfloat16))):
                parameter.grad = gradient if number in present else None
            optimizer.param_groups[0].update(lr=1e-2 * step, weight_decay=0.1 * step)
            if graphed:
                optimizer.prepare()
                graph.replay()
            else:
                norm = optimizer.gradient_norm()
                optimizer.step()
            norms.append(norm.item())
        outcomes.append([*(p.detach().clone() for p in params), torch.tensor(norms)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


@pytest.mark.gpu
def test_changed_gradients_raise_during_a_capture():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params, lr=1e-2)
    train(optimizer, params, 1)
    params[0].grad = params[0].grad.clone()  # at another address
    with pytest.raises(RuntimeError, match=r"call prepare\(\) before the CUDA graph is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    train(optimizer, params, 1)


@pytest.mark.gpu
def test_a_state_saved_on_the_host_is_loaded_onto_the_device():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params, lr=1e-2)
    train(optimizer, params, 2)
    on_host = lambda x: x.cpu() if isinstance(x, torch.Tensor) else x  # noqa: E731
    saved = torch.utils._pytree.tree_map(on_host, optimizer.state_dict())
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = FastAdam(others, lr=5e-2)
    other.load_state_dict(saved)
    train(optimizer, params, 2)
    train(other, others, 2)
    assert all(torch.equal(p, q) for p, q in zip(params, others)) and other.param_groups[0]["lr"].is_cuda


# ---------------------------------------------------------------- an update divided among GPUs

def divided_among(count, dtype, gradient_dtype, remainders):
    """Return (parameters, optimizer, buckets) of each rank, which are all in this process and can access each
    other's memory. Parts of the ranks begin within parameters."""
    ranks = []
    for rank in range(count):
        params, buckets = parameters(dtype), []
        for some in (params[:2], params[2:]):
            bucket = ddp.Bucket(gradient_dtype)
            for parameter in some:
                bucket.offsets[parameter] = bucket.size
                bucket.size += round_up(parameter.numel(), ddp.ALIGNMENT)
            bucket.buffer = torch.zeros(bucket.size, dtype=gradient_dtype, device=DEVICE)
            for parameter, start in bucket.offsets.items():
                parameter.grad_dtype = None
                parameter.grad = bucket.buffer[start:start + parameter.numel()].view_as(parameter)
            buckets.append(bucket)
        bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.offsets}
        with unittest.mock.patch.multiple(torch.distributed, get_rank=lambda rank=rank: rank,
                                          get_world_size=lambda: count):
            own = peers.Peers(types.SimpleNamespace(buckets=buckets, bucket_of=bucket_of))
        own.received = torch.zeros(own.count * own.width, dtype=gradient_dtype, device=DEVICE)
        own.stride, own.barrier = own.width * gradient_dtype.itemsize, lambda: None  # the ranks take turns
        own.weights = torch.zeros(sum(bucket.size for bucket in buckets), dtype=dtype, device=DEVICE)
        for bucket, part in zip(buckets, own.weights.split([bucket.size for bucket in buckets])):
            for parameter, start in bucket.offsets.items():
                place = part[start:start + parameter.numel()].view_as(parameter)
                parameter.data = place.copy_(parameter.detach())
        options = dict(lr=1e-2, betas=(0.9, 0.95), store_param_remainders=remainders)
        ranks.append((params, FastAdam(groups(params), **options), buckets, own))
    for rank, (_, optimizer, _, own) in enumerate(ranks):
        others = [ranks[(rank + step) % count][3] for step in range(1, count)]
        own.of_others = [(other.rank, other.received) for other in others]
        own.distances = torch.tensor(
            [other.weights.data_ptr() - own.weights.data_ptr() for other in others],
            device=DEVICE)
        optimizer.divide(own)
    return [rank[:3] for rank in ranks]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype, gradient_dtype, remainders", [
    (torch.bfloat16, torch.float32, True), (torch.bfloat16, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, True), (torch.float32, torch.float32, False)])
def test_a_divided_update_equals_one_of_summed_gradients(count, dtype, gradient_dtype, remainders):
    """Gradients are multiples of 1/64, so that their sums are exact in any order and dtype."""
    ranks = divided_among(count, dtype, gradient_dtype, remainders)
    params = parameters(dtype)
    alone = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95), store_param_remainders=remainders)
    for step in range(3):
        for parameter in params:
            parameter.grad_dtype = None
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype)
        for rank, (own, _, _) in enumerate(ranks):
            for parameter, mine, value in zip(params, own, gradients(10 * step + rank, torch.float32)):
                value = (4 * value).round().clamp(-16, 16) / 64
                mine.grad.copy_(value)
                parameter.grad += value.to(gradient_dtype)
        norm = alone.gradient_norm()
        alone.step(grad_scale=1 / norm)
        for _, optimizer, buckets in ranks:
            for bucket in buckets:
                optimizer.peers.send(bucket)
        squares = []
        for _, optimizer, _ in ranks:
            optimizer.peers.all_reduce = squares.append
            optimizer.gradient_norm()
        assert sum(squares).sqrt().item() == pytest.approx(norm.item(), rel=1e-5)
        for _, optimizer, _ in ranks:
            optimizer.step(grad_scale=1 / norm)
    for own, optimizer, _ in ranks:
        for parameter, mine, of_first in zip(params, own, ranks[0][0]):
            assert torch.equal(mine, of_first)
            first, size = optimizer.peers.part(mine)
            state, expected_state = optimizer.state[mine], alone.state[parameter]
            part = slice(first, first + size)
            for found, expected, atol in (  # a compiler may round other operations of the two kernels
                    (state["exp_avg"], expected_state["exp_avg"], 1e-9),
                    (state["exp_avg_sq"], expected_state["exp_avg_sq"], 0),  # a sum of positive numbers
                    (master(optimizer, mine), master(alone, parameter), 1e-8)):  # 1e-6 of the learning rate
                torch.testing.assert_close(
                    found.view(-1)[part], expected.view(-1)[part], rtol=1e-5, atol=atol)
    parts = [sum(optimizer.peers.part(p)[1] for p in own) for own, optimizer, _ in ranks]
    assert sum(parts) == sum(p.numel() for p in params) and max(parts) < 1.2 * sum(parts) / count


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
def test_a_divided_update_at_the_sizes_of_training(monkeypatch):
    monkeypatch.setitem(globals(), "SHAPES", [(50304, 768), (768,), (16384, 1040), (8208,)])
    test_a_divided_update_equals_one_of_summed_gradients(2, torch.bfloat16, torch.float32, True)


def test_a_divided_update_is_not_done_or_saved_in_part():
    ranks = divided_among(2, torch.float32, torch.float32, False)
    _, optimizer, _ = ranks[0]
    optimizer.peers.all_reduce = lambda total: None
    with pytest.raises(ValueError, match="call gradient_norm"):
        optimizer.step()
    with pytest.raises(ValueError, match="gather_state"):
        optimizer.state_dict()
    optimizer.gradient_norm()
    with pytest.raises(ValueError, match="summed over GPUs already"):
        optimizer.gradient_norm()


def test_gathered_state_is_the_whole_state():
    ranks = divided_among(3, torch.bfloat16, torch.float32, True)
    for rank, (params, optimizer, _) in enumerate(ranks):
        for parameter in params:
            for tensor in optimizer.state[parameter].values():
                tensor.fill_(rank + 1)
        optimizer.write_options()
    sent = {}
    for rank, (_, optimizer, _) in [*enumerate(ranks), *enumerate(ranks)]:  # in the second round, all is sent
        numbers = itertools.count()

        def broadcast(tensor, src, rank=rank, numbers=numbers):
            number = next(numbers)
            if src == rank:
                sent[number] = tensor.clone()
            elif number in sent:
                tensor.copy_(sent[number])

        with unittest.mock.patch.object(torch.distributed, "broadcast", broadcast):
            optimizer.is_gathered = False
            optimizer.gather_state()
    assert len(sent) > 3
    for number in range(len(SHAPES)):
        owners = [optimizer.peers.part(params[number])[1] for params, optimizer, _ in ranks]
        expected = torch.cat([torch.full((size,), rank + 1) for rank, size in enumerate(owners)]).to(DEVICE)
        for params, optimizer, _ in ranks:
            for state in optimizer.state[params[number]].values():
                assert torch.equal(state.view(-1), expected.to(state.dtype))


def test_a_frozen_parameter_is_not_part_of_a_divided_update():
    ranks = divided_among(2, torch.float32, torch.float32, False)
    _, optimizer, _ = ranks[0]
    frozen = torch.nn.Parameter(torch.ones(16, device=DEVICE), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    optimizer.peers.all_reduce = lambda total: None
    optimizer.step(grad_scale=optimizer.gradient_norm() * 0 + 1)
    assert torch.equal(frozen, torch.ones(16, device=DEVICE))
