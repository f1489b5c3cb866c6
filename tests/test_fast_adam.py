"""fast_adam against torch.optim.AdamW in float64, bit for bit where numbers are only stored, on the CPU through Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
triton = pytest.importorskip("triton")

import checkpoint  # noqa: E402
from fast_adam import FastAdam  # noqa: E402
from kernel_tools import _casts_that_round  # noqa: E402, F401

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(96, 100), (7,), (8192 + 5,), (1,)]  # more than one chunk, less than one, a last one partly filled


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
    return checkpoint.join_remainder(parameter.detach(), value) if value.dtype == torch.int16 else value.float()


@pytest.mark.parametrize("dtype, remainders", [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_it_is_adamw(dtype, remainders, scale):
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


def test_remainders_are_the_master_weights_bit_for_bit():
    outcomes = []
    for remainders in (True, False):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=1e-2, store_param_remainders=remainders)
        train(optimizer, params, 4)
        outcomes.append([master(optimizer, p) for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


def test_bfloat16_moments_follow_float32_ones():
    outcomes = []
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=1e-2, moment_dtype=dtype)
        train(optimizer, params, 6)
        assert optimizer.state[params[0]]["exp_avg"].dtype == dtype
        outcomes.append(torch.cat([(master(optimizer, p) - q.detach().float()).flatten() for p, q in zip(params, parameters(torch.bfloat16))]))
    assert 0 < (outcomes[0] - outcomes[1]).norm() < 0.02 * outcomes[0].norm()


@pytest.mark.parametrize("beta, falls", [(0.996, True), (0.999, False)])
def test_bfloat16_moments_fall_with_betas_up_to_0_996(beta, falls):
    """Why train.py takes no other: without gradients both moments have to go to zero."""
    parameter = torch.nn.Parameter(torch.ones(64, device=DEVICE, dtype=torch.bfloat16))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = FastAdam([parameter], betas=(beta, beta), moment_dtype=torch.bfloat16)
    start = torch.linspace(0.5, 8, 64, device=DEVICE).bfloat16()
    moments = [optimizer.state[parameter][name].copy_(start) for name in ("exp_avg", "exp_avg_sq")]
    for _ in range(100):
        optimizer.step()
    for moment in moments:
        assert (moment < 0.8 * start).all() if falls else torch.equal(moment, start)


def test_a_state_dict_goes_on_where_it_was():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(groups(params), lr=1e-2)
    train(optimizer, params, 3)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = FastAdam(groups(copies), lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, params, 2)
    train(other, copies, 2)
    assert all(torch.equal(p, q) for p, q in zip(params, copies)) and other.param_groups[0]["step"].item() == 5


def test_a_parameter_without_gradient_stays():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(groups(params), lr=1e-2)
    before = params[1].detach().clone()
    for parameter, gradient in zip(params, gradients(0, torch.bfloat16)):
        parameter.grad = None if parameter is params[1] else gradient
    optimizer.step()
    assert torch.equal(params[1], before) and not torch.equal(params[3].detach(), parameters(torch.bfloat16)[3].detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_the_gradients(dtype):
    params = parameters(dtype)
    optimizer = FastAdam(groups(params))
    for parameter, gradient in zip(params, gradients(0, dtype)):
        parameter.grad = gradient
    norm = optimizer.gradient_norm()
    exact = torch.cat([p.grad.double().flatten() for p in params]).norm()
    assert norm.dtype == torch.float32 and norm.shape == () and norm.item() == pytest.approx(exact.item(), rel=1e-6)
    params[2].grad[-1] = 1e3  # in the chunk that is partly filled
    assert optimizer.gradient_norm().item() == pytest.approx((exact**2 + 1e6 - gradients(0, dtype)[2][-1].double() ** 2).sqrt().item(), rel=1e-6)
    params[2].grad[-1] = float("nan")
    assert optimizer.gradient_norm().isnan()
    params[2].grad = None
    rest = torch.cat([p.grad.double().flatten() for p in params if p.grad is not None]).norm()
    assert optimizer.gradient_norm().item() == pytest.approx(rest.item(), rel=1e-6)


def test_mixed_types_are_refused():
    with pytest.raises(ValueError, match="all must be"):
        FastAdam([torch.nn.Parameter(torch.zeros(4, device=DEVICE)), torch.nn.Parameter(torch.zeros(4, device=DEVICE).bfloat16())])


@pytest.mark.gpu
def test_a_cuda_graph_takes_the_learning_rate_from_its_tensor():
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
