"""FastAdam against torch.optim.AdamW in float64. Without a GPU it runs in Triton's interpreter."""

import copy
import math
import types

import pytest
import torch

pytest.importorskip("triton")
from fast_kernels import adam as fast_adam
from fast_kernels.adam import FastAdam
from kernel_tools import DEVICE, _as_on_a_gpu, on_gpu  # noqa: F401
from nanote import ddp, parallel, peers, training_state
from nanote.graphs import CudaGraph

LARGEST = fast_adam.LARGEST_BF16_BETA
SHAPES = [(96, 100), (7,), (8192 + 5,), (1,)]  # several chunks, less than one, a partial last one


def parameters(dtype):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in SHAPES]


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


def groups(params):
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


def train(optimizer, params, steps):
    for step in range(steps):
        for parameter, gradient in zip(params, gradients(step, params[0].dtype)):
            parameter.grad = gradient
        optimizer.step()


def assert_equal(ours, expected):
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def master(optimizer, parameter):
    value = optimizer.state[parameter].get("master_param", parameter.detach())
    if value.dtype == torch.int16:
        return training_state.join_remainder(parameter.detach(), value)
    return value.float()


@pytest.mark.parametrize("dtype, remainders, scale", [
    (torch.bfloat16, True, None), (torch.bfloat16, False, 0.25), (torch.float32, False, 0.25)])
def test_equals_adamw(dtype, remainders, scale):
    """Changed options apply from the next step."""
    params = parameters(dtype)
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    start = [p.detach().double() for p in params]
    ours = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95), store_param_remainders=remainders)
    theirs = torch.optim.AdamW(groups(exact), lr=1e-2, betas=(0.9, 0.95))
    for step in range(5):
        for parameter, reference, gradient in zip(params, exact, gradients(step, dtype)):
            gradient.view(-1)[-1] = 1e3  # also in a partial chunk
            parameter.grad, reference.grad = gradient, gradient.double() * (scale or 1)
        norm = torch.nn.utils.get_total_norm([parameter.grad.double() for parameter in params])
        assert ours.gradient_norm().item() == pytest.approx(norm.item(), rel=1e-6)
        if step == 3:
            for optimizer in (ours, theirs):
                optimizer.param_groups[1].update(betas=(0.5, 0.6), weight_decay=0.1, eps=1e-2)
        ours.step(**({} if scale is None else {"grad_scale": torch.tensor(scale, device=DEVICE)}))
        theirs.step()
    for parameter, reference, before in zip(params, exact, start):
        moved = (reference - before).norm()
        assert (master(ours, parameter).double() - reference).norm() < 1e-5 * moved + 1e-6 * before.norm()
        if dtype == torch.bfloat16:  # rounded to 8 bits
            assert (parameter.double() - reference).abs().max() <= 2.0**-8 * reference.abs().max()


def test_a_remainder_is_a_float32_master_bit_for_bit():
    masters = []
    for remainders in (True, False):
        params = parameters(torch.bfloat16)
        optimizer = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95), store_param_remainders=remainders)
        train(optimizer, params, 4)
        masters.append([master(optimizer, p) for p in params])
    assert_equal(*masters)


def test_the_reference_equals_adamw():
    weight = torch.nn.Parameter(parameters(torch.float32)[0].detach().double())
    theirs = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    ours = weight.detach().float()
    moments = torch.zeros_like(ours), torch.zeros_like(ours)
    for step in range(1, 4):
        gradient = gradients(step, torch.float32)[0]
        fast_adam.adam_reference(
            ours, gradient, *moments, step=step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
            grad_scale=0.5)
        weight.grad = gradient.double() * 0.5
        theirs.step()
    torch.testing.assert_close(ours, weight.detach().float(), rtol=1e-6, atol=1e-6)


def test_bf16_moments_change_an_update_little():
    updates = []
    for moment_dtype in (torch.float32, torch.bfloat16):
        params = parameters(torch.bfloat16)[:1]
        before = params[0].detach().float()
        optimizer = FastAdam(params, lr=1e-2, betas=(0.9, 0.95), moment_dtype=moment_dtype)
        train(optimizer, params, 4)
        updates.append(master(optimizer, params[0]) - before)
    difference = (updates[0] - updates[1]).norm()
    assert 0 < difference <= 0.02 * updates[0].norm()


@pytest.mark.parametrize("options, value", [
    (dict(), math.inf), (dict(moment_dtype=torch.bfloat16), math.nan),
    (dict(dtype=torch.float32), math.nan)])
def test_fast_adam_skips_a_step(options, value):
    """A grad_scale that is not finite changes nothing, not even the step count."""
    dtype = options.get("dtype", torch.bfloat16)
    options = {name: option for name, option in options.items() if name != "dtype"}

    def run(scales):
        params = parameters(dtype)
        optimizer = FastAdam(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options)
        for scale in scales:
            for parameter, gradient in zip(params, gradients(0, dtype)):
                parameter.grad = gradient if math.isfinite(scale) else gradient * math.nan
            assert optimizer.gradient_norm().isfinite() == math.isfinite(scale)
            optimizer.step(grad_scale=torch.tensor(scale, device=DEVICE))
        moments = [value for p in params for value in optimizer.state[p].values()]
        return [*params, *moments, optimizer.param_groups[0]["step"]]

    assert_equal(run([value, 0.5, value]), run([0.5]))


@pytest.mark.parametrize("dtype, options", [
    (torch.float32, {}), (torch.bfloat16, dict(moment_dtype=torch.bfloat16))])
def test_equals_the_reference_as_gradients_come_and_go(dtype, options):
    """Each parameter with a gradient is updated and counts in the norm, also if their number is unchanged."""
    params, copies = parameters(dtype), parameters(dtype)
    optimizer = FastAdam(params, lr=1e-2, betas=(0.9, 0.95), **options)
    reference = types.SimpleNamespace(state={})
    for parameter, other in zip(params, copies):
        reference.state[other] = copy.deepcopy(optimizer.state[parameter])
    for step, present in enumerate([(1, 3), (0, 2), (0, 1, 2, 3), (), (0, 1)], 1):
        for number, (parameter, gradient) in enumerate(zip(params, gradients(step, dtype))):
            parameter.grad = gradient if number in present else None
        squares = 0
        for number in present:
            squares += fast_adam.squares_reference(params[number].grad, addends=[])
            other = copies[number]
            # the step count is the group's, as in Transformer Engine
            fast_adam.adam_reference(
                other, params[number].grad, **reference.state[other], step=step, lr=1e-2, betas=(0.9, 0.95),
                eps=1e-8, weight_decay=0.0)
        assert optimizer.gradient_norm().item() == pytest.approx(float(squares) ** 0.5, rel=1e-6)
        optimizer.step()
        for parameter, other in zip(params, copies):
            assert optimizer.state[parameter]["exp_avg"].dtype == options.get("moment_dtype", torch.float32)
            tolerance = 1e-4 if "moment_dtype" in options else 1e-6  # a moment may be rounded the other way
            torch.testing.assert_close(
                master(optimizer, parameter), master(reference, other), rtol=tolerance, atol=tolerance)


def test_a_learning_rate_may_be_a_number():
    """A number, also a scheduler's, is copied to the memory that a captured CUDA graph reads."""
    outcomes = []
    for way in ("tensor", "number", "scheduler"):
        params = parameters(torch.bfloat16)[1:2]
        optimizer = FastAdam(params, lr=4e-2)
        group, memory = optimizer.param_groups[0], optimizer.param_groups[0]["lr"].data_ptr()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for rate in (4e-2, 2e-2, 1e-2):
            if way == "tensor":
                group["lr"].fill_(rate)
            if way == "number":
                group["lr"] = rate
            params[0].grad = gradients(0, torch.bfloat16)[1]
            optimizer.step()
            assert float(group["lr"]) == pytest.approx(rate) and group["lr"].data_ptr() == memory
            if way == "scheduler":
                scheduler.step()
        outcomes.append(params)
    assert_equal(outcomes[0], outcomes[1])
    assert_equal(outcomes[0], outcomes[2])


@pytest.mark.parametrize("options, complaint", [
    (dict(moment_dtype=torch.bfloat16), r"betas \(0.9, 0.999\)"),
    (dict(betas=(math.nextafter(LARGEST, 1), 0.95), moment_dtype=torch.bfloat16), "at most 0.996"),
    (dict(moment_dtype=torch.float16), "moment_dtype"), (dict(betas=(0.9, 1.0)), "betas")])
def test_invalid_options_raise(options, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        FastAdam(parameters(torch.float32), **options)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="all must be"):
        FastAdam([parameters(torch.float32)[0], parameters(torch.bfloat16)[0]])
    FastAdam(parameters(torch.float32), betas=(LARGEST, LARGEST), moment_dtype=torch.bfloat16)


@pytest.mark.parametrize("grad, complaint", [
    (lambda p: torch.zeros(p.numel() + 2, device=DEVICE)[2:].view_as(p), "multiple of 16 bytes"),
    (lambda p: torch.zeros(100, 96, device=DEVICE).T, "must be contiguous")])
def test_gradients_that_the_kernel_cannot_read_raise(grad, complaint):
    parameter = torch.nn.Parameter(torch.zeros(96, 100, device=DEVICE))
    optimizer = FastAdam([parameter])
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
    (torch.bfloat16, {}), (torch.float32, dict(betas=(0.9, 0.95), moment_dtype=torch.bfloat16)),
    on_gpu(torch.bfloat16, {})])
def test_a_state_is_loaded_into_the_existing_tensors(dtype, options, tmp_path):
    """Captured CUDA graphs have their addresses. An optimizer that has already made steps continues exactly
    as the saved one. The file is read into the host's memory."""
    params = parameters(dtype)
    optimizer = FastAdam(groups(params), **options | dict(lr=1e-2))
    train(optimizer, params, 2)
    others = parameters(dtype)
    other = FastAdam(groups(others), **options | dict(lr=5e-2))
    train(other, others, 1)
    before = addresses(other)
    torch.save(optimizer.state_dict(), tmp_path / "adam.pt")
    with torch.no_grad():
        for parameter, trained in zip(others, params):
            parameter.copy_(trained)
    other.load_state_dict(torch.load(tmp_path / "adam.pt", map_location="cpu", weights_only=True))
    assert addresses(other) == before
    train(optimizer, params, 1)
    train(other, others, 1)
    assert other.param_groups[0]["step"].item() == 3
    assert_equal(params, others)
    for parameter, own in zip(params, others):
        assert_equal(optimizer.state[parameter].values(), other.state[own].values())


def test_missing_master_weights_become_the_parameters():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params, lr=1e-2, store_param_remainders=False)
    train(optimizer, params, 1)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})
    assert_equal([p.float() for p in params], [optimizer.state[p]["master_param"] for p in params])


def test_a_state_that_is_replaced_is_used():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params, lr=1e-2)
    train(optimizer, params, steps=1)
    old = optimizer.state[params[0]]
    before = old["exp_avg_sq"].clone()
    optimizer.state[params[0]] = {name: value.clone() for name, value in old.items()}
    optimizer.step()  # parameters and gradients are those of before
    assert torch.equal(old["exp_avg_sq"], before)
    assert not torch.equal(optimizer.state[params[0]]["exp_avg_sq"], before)


def test_a_state_that_does_not_fit_raises():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params)
    train(optimizer, params, 2)
    before = copy.deepcopy(optimizer.state_dict())

    def masters(state):
        state["state"][2]["master_param"] = state["state"][2]["master_param"].float()

    def shape(state):
        state["state"][2]["exp_avg"] = state["state"][2]["exp_avg"][:1]  # it would broadcast

    for change, complaint in ((masters, "store_param_remainders"), (shape, "exp_avg")):
        state = copy.deepcopy(before)
        change(state)
        with pytest.raises(ValueError, match=complaint):
            optimizer.load_state_dict(state)


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
            optimizer.param_groups[1]["lr"].fill_(3e-2 / step)  # no other call between it and a replay
            if graphed:
                graph.replay()
            else:
                norm = optimizer.gradient_norm()
                optimizer.step()
            norms.append(norm.item())
        outcomes.append([*(p.detach().clone() for p in params), torch.tensor(norms)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


@pytest.mark.gpu
def test_graphs_may_make_and_free_gradients():
    """Steps from Python, and of three graphs, come one after the other, with gradients at other addresses or
    at the same."""
    outcomes = [train_with_gradients_inside(graphed) for graphed in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))


def train_with_gradients_inside(graphed):
    """Return weights and gradient norms of 24 steps, of which some are never graphed."""
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95))

    def train_step(factors):
        losses = [(parameter.float() * factors.mean() - 1).square().mean() for parameter in params]
        sum(losses).backward()
        norm = optimizer.gradient_norm()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    graphs = [CudaGraph(train_step) for _ in range(3)]
    norms = []
    for step in range(24):
        factors = torch.full((2,), 1.0 + step / 10, device="cuda")
        unused = torch.empty(step % 5 << 20, device="cuda")  # gradients then have other addresses
        run = train_step
        if graphed and step not in (14, 15, 18):
            graph = step // 4 % 3  # each graph takes four steps in a row
            run = graphs[graph]
        norms.append(run(factors).item())
        del unused
    return [*(parameter.detach() for parameter in params), torch.tensor(norms)]


@pytest.mark.gpu
def test_a_capture_before_the_first_step_raises():
    params = parameters(torch.bfloat16)
    optimizer = FastAdam(params, lr=1e-2)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"call prepare\(\) before the CUDA graph is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    train(optimizer, params, 1)


# ---------------------------------------------------------------- a sharded optimizer

class SharedMemory:
    """Memory of ranks that are all in this process, in place of PyTorch's symmetric memory. `rank`: the one
    whose turn it is to allocate and exchange its memory; in the order of ranks."""

    def __init__(self, ranks):
        self.ranks, self.rank = ranks, 0
        self.tensors = []  # of each allocation, those of all ranks

    def allocate_shared(self, size, dtype, device):
        if self.rank == 0:
            self.tensors.append([torch.zeros(size, dtype=dtype, device=device) for _ in range(self.ranks)])
            return self.tensors[-1][0]
        self.allocations += 1
        return self.tensors[self.allocations - 1][self.rank]

    def rendezvous(self, tensor, group):
        tensors = next(tensors for tensors in self.tensors if tensors[self.rank] is tensor)
        return types.SimpleNamespace(
            get_buffer=lambda rank, shape, dtype: tensors[rank],
            buffer_ptrs=[tensor.data_ptr() for tensor in tensors],
            barrier=lambda: None)  # the ranks take turns

    def start(self, rank, patch):
        """Let the functions of nanote.peers see one rank of a machine with as many GPUs."""
        self.rank, self.allocations = rank, 0
        patch.setenv("LOCAL_WORLD_SIZE", str(self.ranks))
        patch.setattr(torch.cuda, "device_count", lambda: self.ranks)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
        patch.setattr(torch.distributed, "get_rank", lambda: rank)
        patch.setattr(torch.distributed, "get_world_size", lambda: self.ranks)
        world = types.SimpleNamespace(group_name="world")
        patch.setattr(torch.distributed, "group", types.SimpleNamespace(WORLD=world))
        patch.setattr(parallel, "gather_first", lambda value: value)
        patch.setattr(peers, "allocate_shared", self.allocate_shared)
        patch.setattr(peers._symmetric_memory, "rendezvous", self.rendezvous)


def sharded_over(ranks, dtype, gradient_dtype, remainders, monkeypatch):
    """Return (parameters, gradients, update) of each rank. The parameters are in two buckets, and shards of
    the ranks begin within parameters."""
    elements = sum(math.prod(shape) for shape in SHAPES)
    monkeypatch.setattr(ddp, "BUCKET_BYTES", elements // 2 * gradient_dtype.itemsize)
    memory, made = SharedMemory(ranks), []
    for rank in range(ranks):
        params = parameters(dtype)
        gradients = ddp.Gradients(torch.nn.ParameterList(params), gradient_dtype)
        assert len(gradients.buckets) == 2
        adam = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95), store_param_remainders=remainders)
        with pytest.MonkeyPatch.context() as patch:
            memory.start(rank, patch)
            update = peers.ShardedAdam(adam, gradients.buckets)
            assert update.connect() == ""
        gradients.used.update(params)
        gradients.set_grad()
        made.append((params, gradients, update))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    return made


def exact_gradients(seed):
    """Return multiples of 1/64, whose sums are exact in any order and dtype."""
    return [(4 * value).round().clamp(-16, 16) / 64 for value in gradients(seed, torch.float32)]


def assert_slice_equals(update, parameter, expected, expected_parameter):
    """Compare the state of what a rank updates of a parameter with that of an optimizer of its own."""
    adam = update.fast_adam
    updated = adam.slices[parameter]
    elements = slice(updated.start, updated.start + updated.size)
    state, expected_state = adam.state[parameter], expected.state[expected_parameter]
    pairs = [  # a compiler may round other operations of the two kernels
        (state["exp_avg"], expected_state["exp_avg"], 1e-9),
        (state["exp_avg_sq"], expected_state["exp_avg_sq"], 0),  # a sum of positive numbers
        (master(adam, parameter), master(expected, expected_parameter), 1e-8)]  # 1e-6 of the learning rate
    for found, wanted, atol in pairs:
        torch.testing.assert_close(found.view(-1)[elements], wanted.view(-1)[elements], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("ranks, dtype, gradient_dtype, remainders", [
    (2, torch.bfloat16, torch.float32, True), (2, torch.float32, torch.float32, False),
    (4, torch.bfloat16, torch.bfloat16, True)])
def test_a_sharded_update_equals_one_of_summed_gradients(
        ranks, dtype, gradient_dtype, remainders, monkeypatch):
    made = sharded_over(ranks, dtype, gradient_dtype, remainders, monkeypatch)
    params = parameters(dtype)
    alone = FastAdam(groups(params), lr=1e-2, betas=(0.9, 0.95), store_param_remainders=remainders)
    for step in range(2):
        for parameter in params:
            parameter.grad_dtype = None
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype)
        for rank, (own, _, _) in enumerate(made):
            for parameter, mine, value in zip(params, own, exact_gradients(10 * step + rank)):
                mine.grad.copy_(value)
                parameter.grad += value.to(gradient_dtype)
        norm = alone.gradient_norm()
        alone.step(grad_scale=1 / norm)
        for _, buffers, update in made:
            for bucket in buffers.buckets:
                update.send(bucket)
        of_parts = torch.stack([update.gradient_norm() for _, _, update in made])
        assert of_parts.norm().item() == pytest.approx(norm.item(), rel=1e-5)
        for _, _, update in made:
            update.step(grad_scale=1 / norm)
    for own, _, update in made:
        assert_equal(own, made[0][0])
        for parameter, mine in zip(params, own):
            assert_slice_equals(update, mine, alone, parameter)


def test_ranks_have_shards_of_about_one_size(monkeypatch):
    made = sharded_over(4, torch.float32, torch.float32, False, monkeypatch)
    sizes = [sum(updated.size for updated in update.fast_adam.slices.values()) for _, _, update in made]
    elements = sum(math.prod(shape) for shape in SHAPES)
    assert sum(sizes) == elements and max(sizes) < 1.2 * elements / 4


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
def test_a_sharded_update_at_the_sizes_of_training(monkeypatch):
    monkeypatch.setitem(globals(), "SHAPES", [(50304, 768), (768,), (16384, 1040), (8208,)])
    test_a_sharded_update_equals_one_of_summed_gradients(2, torch.bfloat16, torch.float32, True, monkeypatch)


def test_a_sharded_update_is_not_done_in_part(monkeypatch):
    _, _, update = sharded_over(2, torch.float32, torch.float32, False, monkeypatch)[0]
    with pytest.raises(ValueError, match="call gradient_norm"):
        update.step(grad_scale=torch.ones((), device=DEVICE))
    update.gradient_norm()
    with pytest.raises(ValueError, match="summed over GPUs already"):
        update.gradient_norm()
