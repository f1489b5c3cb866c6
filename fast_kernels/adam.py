"""AdamW as one multi-tensor kernel, for steps that are captured in a CUDA graph.

Use `FastAdam` in place of Transformer Engine's FusedAdam: a checkpoint written with one loads in the other.

- Adam is bound by memory, and each byte is moved once. Per parameter: 28 bytes with a BF16 weight and
  gradient, a float32 master weight and two float32 moments; 26 if the master is stored as a remainder, the 16
  bits that the BF16 weight lacks, as in Transformer Engine; 18 with BF16 moments as well.
- One launch per parameter group, which stays valid in a graph whichever parameters have gradients.
- Gradient clipping is a factor applied as the kernel reads the gradients, not another pass over them.

`adam_reference` and `squares_reference` say in plain PyTorch what the two kernels do. FastAdam launches them.

Reference: algorithm 2 of Loshchilov and Hutter, arXiv:1711.05101.
"""

import weakref
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from fast_kernels.launch import Launch, per_shape
from fast_kernels.library import addresses_of, ceil_div

# With a larger beta a BF16 moment never decreases: a change of less than half of its last bit rounds back.
LARGEST_BF16_BETA = 1 - torch.finfo(torch.bfloat16).eps / 2
CHUNK = 8192  # elements per program
# Tables per parameter group that are ready for captures. A graph takes one for each set of gradients that it
# makes. `prepare` refills them outside captures. A capture raises RuntimeError if none is left.
SPARES = 4
TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

# Columns of the kernels' `pointers`: addresses, but for SIZE, the number of elements
WEIGHT = tl.constexpr(0)
GRADIENT = tl.constexpr(1)
EXP_AVG = tl.constexpr(2)
EXP_AVG_SQ = tl.constexpr(3)
MASTER_WEIGHT = tl.constexpr(4)
SIZE = tl.constexpr(5)
ADDEND = tl.constexpr(6)  # the first one of the gradient; 0 without addends
ROW_SIZE = tl.constexpr(7)


@torch.no_grad()
def adam_reference(weight, gradient, exp_avg, exp_avg_sq, master_param=None, *, step, lr, betas, eps,
                   weight_decay, grad_scale=1.0):
    """Update a weight, its moments and its master weight in place: `_adam` in plain PyTorch.

    All arithmetic is float32. master_param: float32; or int16, the remainder; or None, of a float32 weight.
    """
    if master_param is None:
        w = weight
    elif master_param.dtype == torch.int16:
        # the bits of the float32 master are those of the BF16 weight, then 16 zeros, plus the remainder
        w = ((weight.view(torch.int16).int() << 16) + master_param).view(torch.float32)
    else:
        w = master_param
    beta1, beta2 = betas
    g = gradient.float() * grad_scale
    m = beta1 * exp_avg.float() + (1 - beta1) * g
    v = beta2 * exp_avg_sq.float() + (1 - beta2) * g.square()
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    w = w - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * w)
    exp_avg.copy_(m)  # rounded if moments are BF16
    exp_avg_sq.copy_(v)
    if master_param is None:
        weight.copy_(w)
    elif master_param.dtype == torch.int16:
        bits = w.view(torch.int32)
        master_param.copy_(bits.to(torch.int16))  # the low 16 bits, as a signed number
        weight.view(torch.int16).copy_((bits - master_param) >> 16)
    else:
        master_param.copy_(w)
        weight.copy_(w)


@torch.no_grad()
def squares_reference(gradient, addends):
    """Add tensors to a gradient, in place; return the sum of its squares, (): `_squares` in plain PyTorch."""
    total = gradient.float()
    for addend in addends:
        total = total + addend.float()
    gradient.copy_(total)
    return gradient.float().square().sum()


# ---------------------------------------------------------------- kernels

@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """Load an address, a multiple of 16 bytes: the hint allows accesses of that width."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _adam(pointers, chunks, corrections, lr, grad_scale, hyperparameters, distances,
          weight_type: tl.constexpr, gradient_type: tl.constexpr, master: tl.constexpr,
          moment_type: tl.constexpr, COPIES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Update one chunk of one parameter, and write its weights to COPIES other places, too.

    Args:
        pointers: (parameters, ROW_SIZE) int64.
        chunks: (programs, 2) int32: row of `pointers`, chunk of that parameter.
        corrections: (2,) float32: 1 - beta1^step, 1 - beta2^step.
        hyperparameters: (4,) float64: beta1, beta2, eps, weight_decay.
        distances: (COPIES,) int64: bytes from a weight to each of its copies.
        master: "none", "float32" or "remainder".
    """
    program = tl.program_id(0)
    row = pointers + ROW_SIZE * tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    correction1 = tl.load(corrections)
    correction2 = tl.load(corrections + 1)
    learning_rate = tl.load(lr)
    grad_factor = tl.load(grad_scale)
    beta1 = tl.load(hyperparameters).to(tl.float32)
    beta2 = tl.load(hyperparameters + 1).to(tl.float32)
    eps = tl.load(hyperparameters + 2).to(tl.float32)
    weight_decay = tl.load(hyperparameters + 3).to(tl.float32)
    numbers = (correction1, correction2, learning_rate, grad_factor, beta1, beta2, eps, weight_decay)
    # a grad_scale that is not finite skips the step: no elements
    size = tl.where(tl.abs(grad_factor) < float("inf"), tl.load(row + SIZE), 0)
    weight = _pointer(row + WEIGHT, tl.int16 if master == "remainder" else weight_type)
    gradient = _pointer(row + GRADIENT, gradient_type)
    exp_avg = _pointer(row + EXP_AVG, moment_type)
    exp_avg_sq = _pointer(row + EXP_AVG_SQ, moment_type)
    master_weight = _pointer(row + MASTER_WEIGHT, tl.int16 if master == "remainder" else tl.float32)
    tensors = (weight, gradient, exp_avg, exp_avg_sq, master_weight)
    if start + CHUNK <= size:  # without a mask, which would prevent 16-byte loads and stores
        for block in range(CHUNK // BLOCK):
            offsets = start + block * BLOCK + tl.arange(0, BLOCK)
            _update(offsets, None, tensors, numbers, distances, master, COPIES)
    else:
        for block in range(CHUNK // BLOCK):
            offsets = start + block * BLOCK + tl.arange(0, BLOCK)
            _update(offsets, offsets < size, tensors, numbers, distances, master, COPIES)


@triton.jit
def _update(offsets, mask, tensors, numbers, distances, master: tl.constexpr, COPIES: tl.constexpr):
    """Update moments and weight of the elements at `offsets`, where `mask` is true or None."""
    weight, gradient, exp_avg, exp_avg_sq, master_weight = tensors
    correction1, correction2, lr, grad_factor, beta1, beta2, eps, weight_decay = numbers
    g = tl.load(gradient + offsets, mask).to(tl.float32) * grad_factor
    m = tl.load(exp_avg + offsets, mask).to(tl.float32)
    v = tl.load(exp_avg_sq + offsets, mask).to(tl.float32)
    if master == "remainder":
        low = tl.load(master_weight + offsets, mask)
        # a set sign bit of the remainder means that the BF16 weight was rounded up
        high = tl.load(weight + offsets, mask).to(tl.int32) - (low < 0).to(tl.int32)
        w = ((high << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    elif master == "float32":
        w = tl.load(master_weight + offsets, mask)
    else:
        w = tl.load(weight + offsets, mask).to(tl.float32)

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w -= lr * ((m / correction1) / (tl.sqrt(v / correction2) + eps) + weight_decay * w)

    tl.store(exp_avg + offsets, m.to(exp_avg.dtype.element_ty), mask)
    tl.store(exp_avg_sq + offsets, v.to(exp_avg_sq.dtype.element_ty), mask)
    if master == "remainder":
        bits = w.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        tl.store(master_weight + offsets, low, mask)
        updated = ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16)
    else:
        if master == "float32":
            tl.store(master_weight + offsets, w, mask)
        updated = w.to(weight.dtype.element_ty)
    tl.store(weight + offsets, updated, mask)
    for copy in tl.static_range(COPIES):
        address = weight.to(tl.int64) + tl.load(distances + copy)
        copied = tl.multiple_of(address.to(tl.pointer_type(weight.dtype.element_ty)), 16)
        tl.store(copied + offsets, updated, mask)


@triton.jit
def _squares(pointers, chunks, sums, stride, gradient_type: tl.constexpr, ADDENDS: tl.constexpr,
             CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of one chunk's gradients into sums (programs,) float32. Arguments as of `_adam`. First
    add ADDENDS to the gradients, in place; these are `stride` bytes apart."""
    program = tl.program_id(0)
    row = pointers + ROW_SIZE * tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    gradient = _pointer(row + GRADIENT, gradient_type)
    size = tl.load(row + SIZE)
    addend = tl.load(row + ADDEND)
    if start + CHUNK <= size:  # as in `_adam`
        squares = _sum_of_squares(gradient, addend, stride, start, None, ADDENDS, CHUNK, BLOCK)
    else:
        squares = _sum_of_squares(gradient, addend, stride, start, size, ADDENDS, CHUNK, BLOCK)
    tl.store(sums + program, tl.sum(squares))


@triton.jit
def _sum_of_squares(gradient, addend, stride, start, size, ADDENDS: tl.constexpr, CHUNK: tl.constexpr,
                    BLOCK: tl.constexpr):
    """Add ADDENDS to a chunk of the gradient, in float32, and store it; return the sum of its squares."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for block in range(CHUNK // BLOCK):
        offsets = start + block * BLOCK + tl.arange(0, BLOCK)
        mask = None if size is None else offsets < size
        g = tl.load(gradient + offsets, mask).to(tl.float32)
        for number in tl.static_range(ADDENDS):
            added = (addend + number * stride).to(tl.pointer_type(gradient.dtype.element_ty))
            g += tl.load(tl.multiple_of(added, 16) + offsets, mask).to(tl.float32)
        if ADDENDS:
            tl.store(gradient + offsets, g.to(gradient.dtype.element_ty), mask)
            g = g.to(gradient.dtype.element_ty).to(tl.float32)
        if mask is None:
            squares += g * g
        else:
            squares += tl.where(mask, g * g, 0.0)
    return squares


@per_shape
def _adam_launch(programs, dtype, gradient_dtype, master, moment_dtype, copies):
    return Launch(
        _adam, (programs,), weight_type=TYPES[dtype], gradient_type=TYPES[gradient_dtype], master=master,
        moment_type=TYPES[moment_dtype], COPIES=copies, CHUNK=CHUNK, BLOCK=1024, num_warps=4)


@per_shape
def _squares_launch(programs, stride, gradient_dtype, addends):
    return Launch(
        _squares, (programs,), stride=stride, gradient_type=TYPES[gradient_dtype], ADDENDS=addends,
        CHUNK=CHUNK, BLOCK=1024, num_warps=4)


# ---------------------------------------------------------------- the optimizer

@dataclass
class _KernelArguments:
    """Arguments of the kernels for one parameter group. A replay of a CUDA graph reads the memory of these
    tensors. All but `pointers` are updated in place; a captured step gets a table of its own. A launch is the
    same whichever parameters have gradients."""

    pointers: torch.Tensor  # what the next launch reads: `table`, or while capturing the graph's own table
    table: torch.Tensor  # (parameters, ROW_SIZE) int64; a row of zeros skips a parameter without a gradient
    chunks: torch.Tensor  # (programs, 2) int32, see `_adam`
    lr: torch.Tensor  # () float32
    hyperparameters: torch.Tensor  # (4,) float64, see `_adam`
    addresses: tuple | None = None  # of the tensors for which `table` was written
    gradients: list = field(default_factory=list)  # weak references to the last step's; None without one
    spares: list = field(default_factory=list)  # (rows in pinned memory, table) pairs for captures
    # The pairs that graphs have taken. Never freed: nothing tells the optimizer that a graph is gone.
    captured: list = field(default_factory=list)
    host_hyperparameters: list | None = None  # the same numbers on the host


@dataclass(frozen=True)
class Slice:
    """The elements of a parameter that a FastAdam updates, after `FastAdam.set_slices`."""

    start: int  # index of the first one in the parameter
    size: int  # their number
    addend_start: int = 0  # column of `addends` that belongs to the first one


def _check_betas(betas, moment_dtype):
    """Raise ValueError for betas with which AdamW does not train."""
    are_betas = all(0 <= beta < 1 for beta in betas)
    are_too_large = moment_dtype == torch.bfloat16 and max(betas) > LARGEST_BF16_BETA
    if not are_betas or are_too_large:
        raise ValueError(f"FastAdam: betas {betas}: must be in [0, 1), at most {LARGEST_BF16_BETA:.3f} with "
                         "BF16 moments, else these never decrease; (0.9, 0.95) works")


def _refers_to(reference, gradient):
    """Return whether `gradient` is the tensor of a weak reference. Both are None without a gradient."""
    referent = None if reference is None else reference()
    return gradient is referent


class FastAdam(torch.optim.Optimizer):
    """AdamW for parameters that are all BF16 (with float32 master weights) or all float32. Gradients have the
    same type, or are all float32.

    With CUDA graphs, call `prepare` before `step` or `gradient_norm` is captured. Each step calls it, too.
    Gradients either exist before the capture (a replay reads those of the last `prepare`) or are made in the
    graph and freed there by zero_grad(). Call `write_hyperparameters` before a replay if one has changed.

    moment_dtype: dtype of both moments. torch.bfloat16 needs betas of at most 0.996.
    store_param_remainders: store a BF16 parameter's float32 master weight as a remainder.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *,
                 moment_dtype=torch.float32, store_param_remainders=True):
        if moment_dtype not in TYPES:
            raise ValueError(f"FastAdam: moment_dtype {moment_dtype}: use torch.float32 or torch.bfloat16")
        self.moment_dtype = moment_dtype
        self.store_param_remainders = store_param_remainders
        self.dtype = None  # of the parameters
        self.gradient_dtype = None
        self.kernel_arguments = []  # of each parameter group
        self.slices = None  # see `set_slices`; None: update all elements of all parameters
        self.addends = None
        self.copy_distances = None
        # foreach: for PyTorch's zero_grad
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=True))

    def add_param_group(self, param_group):
        """Add parameters, also after the first step; their moments and step count start at zero."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        parameters = group["params"]
        try:
            _check_betas(group["betas"], self.moment_dtype)
            self.dtype = self._common_dtype(parameters)
        except ValueError:
            self.param_groups.pop()
            raise
        if self.dtype == torch.float32:
            self.master = "none"
        elif self.store_param_remainders:
            self.master = "remainder"
        else:
            self.master = "float32"
        groups_with_parameters = [group for group in self.param_groups if group["params"]]
        device = groups_with_parameters[-1]["params"][0].device  # an empty group has that of one before
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
        group["step"] = torch.zeros(1, dtype=torch.int, device=device)
        table = torch.zeros(len(parameters), ROW_SIZE.value, dtype=torch.int64, device=device)
        self.kernel_arguments.append(_KernelArguments(
            pointers=table,
            table=table,
            chunks=self._make_chunks(parameters).to(device),
            lr=group["lr"],
            hyperparameters=torch.zeros(4, dtype=torch.float64, device=device)))
        for parameter in parameters:
            state = self.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = parameter.new_zeros(parameter.shape, dtype=self.moment_dtype)
            if self.master == "remainder":
                state["master_param"] = parameter.new_zeros(parameter.shape, dtype=torch.int16)
            elif self.master == "float32":
                state["master_param"] = parameter.detach().float().clone()

    def _common_dtype(self, parameters) -> torch.dtype:
        """Return the dtype of these parameters and of those before. ValueError unless all have one."""
        types = {parameter.dtype for parameter in parameters}
        if self.dtype is not None:
            types.add(self.dtype)
        if len(types) != 1 or not types <= TYPES.keys():
            raise ValueError(f"FastAdam: parameters of {types}: all must be BF16, or all float32")
        return types.pop()

    # ------------------------------------------------------------ a step

    @torch.no_grad()
    def gradient_norm(self):
        """Return the total L2 norm of all gradients, () float32."""
        return self.reduce_and_sum_squares().sqrt()

    @torch.no_grad()
    def reduce_and_sum_squares(self):
        """Return the sum of the squares of all gradients, () float32. After `set_slices`, first add the
        addends to the gradients; the sum is that of the slices."""
        self.prepare()
        addends = 0
        stride = 0  # bytes
        if self.addends is not None:
            addends = len(self.addends)
            stride = self.addends.stride(0) * self.addends.element_size()
        sums = []
        for arguments in self.kernel_arguments:
            sums.append(torch.empty(len(arguments.chunks), device=arguments.lr.device))
            if len(arguments.chunks):
                with torch.cuda.device_of(arguments.lr):  # Triton launches on the current device
                    launch = _squares_launch(len(arguments.chunks), stride, self.gradient_dtype, addends)
                    launch.run(arguments.pointers, arguments.chunks, sums[-1])
        return torch.cat(sums).sum()

    @torch.no_grad()
    def step(self, closure=None, grad_scale=None):
        """Update every parameter that has a gradient; return what `closure` returned, or None. grad_scale: ()
        float32 on the device, multiplies the gradients. If it is not finite, weights, state and step count do
        not change; no host synchronization."""
        loss = None
        device = self.kernel_arguments[0].lr.device
        if grad_scale is not None and grad_scale.device != device:
            raise ValueError(f"FastAdam: grad_scale on {grad_scale.device}: must be on {device}; use .to()")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare()
        copies = 0 if self.copy_distances is None else len(self.copy_distances)
        counted_steps = 1 if grad_scale is None else torch.isfinite(grad_scale)  # 0 or 1
        for group, arguments in zip(self.param_groups, self.kernel_arguments):
            group["step"] += counted_steps
            if not len(arguments.chunks):
                continue
            betas = arguments.hyperparameters[:2]
            corrections = (1 - betas ** group["step"]).float()
            grad_factor = grad_scale
            if grad_scale is None:
                grad_factor = torch.ones((), device=arguments.lr.device)
            with torch.cuda.device_of(arguments.lr):
                launch = _adam_launch(
                    len(arguments.chunks), self.dtype, self.gradient_dtype, self.master, self.moment_dtype,
                    copies)
                launch.run(
                    arguments.pointers, arguments.chunks, corrections, arguments.lr, grad_factor,
                    arguments.hyperparameters, self.copy_distances)
        return loss

    # ------------------------------------------------------------ the kernels' arguments

    @torch.no_grad()
    def prepare(self):
        """Copy changed hyperparameters and addresses to the device. Called by `step` and `gradient_norm`."""
        self.write_hyperparameters()
        gradients_of_groups = []
        for group in self.param_groups:
            gradients_of_groups.append([parameter.grad for parameter in group["params"]])
        self.gradient_dtype = self._find_gradient_dtype(gradients_of_groups)
        for group, gradients, arguments in zip(self.param_groups, gradients_of_groups, self.kernel_arguments):
            tensors = list(group["params"])
            for parameter in group["params"]:
                tensors += self.state[parameter].values()
            gradient_addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
            addresses = *gradient_addresses, *addresses_of(tensors)
            has_same_tensors = addresses == arguments.addresses
            if self._is_capturing():
                # Gradients that the graph makes may have the addresses of those of the last step
                has_same_tensors = has_same_tensors and all(map(_refers_to, arguments.gradients, gradients))
            else:
                arguments.gradients = [gradient if gradient is None else weakref.ref(gradient)
                                       for gradient in gradients]
                self._add_spares(arguments)
            arguments.pointers = arguments.table
            if not has_same_tensors:
                rows = [self._pointer_row(parameter, arguments.lr.device) for parameter in group["params"]]
                self._write_pointers(arguments, torch.tensor(rows, dtype=torch.int64), addresses)

    def _write_pointers(self, arguments, rows, addresses):
        """Write rows to `table`. While capturing, let each replay write them to a table of the graph's own,
        and `pointers` be that table: steps from Python and other graphs write to `table`."""
        rows = rows.view(-1, ROW_SIZE.value)
        if self._is_capturing():
            pinned, arguments.pointers = self._captured_pair(arguments, rows)
            arguments.pointers.copy_(pinned, non_blocking=True)
            return
        arguments.table.copy_(rows)
        arguments.addresses = addresses

    def _captured_pair(self, arguments, rows):
        """Return the (rows in pinned memory, table) pair of graphs with these rows."""
        for pair in arguments.captured:
            if torch.equal(pair[0], rows):  # a graph writes them again, and those of others stay right
                return pair
        if not arguments.spares:
            self._refuse_while_capturing()
        pinned, table = arguments.spares.pop()
        arguments.captured.append((pinned.copy_(rows), table))
        return arguments.captured[-1]

    def _add_spares(self, arguments):
        table = arguments.table
        while table.is_cuda and len(arguments.spares) < SPARES:
            pinned = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            arguments.spares.append((pinned, torch.empty_like(table)))

    @torch.no_grad()
    def write_hyperparameters(self):
        """Copy changed learning rates, betas, eps and weight decays to the device, also for replays."""
        for group, arguments in zip(self.param_groups, self.kernel_arguments):
            hyperparameters = [*group["betas"], group["eps"], group["weight_decay"]]
            is_new_lr = group["lr"] is not arguments.lr  # a number, or a tensor that no captured graph reads
            if not is_new_lr and hyperparameters == arguments.host_hyperparameters:
                continue
            self._refuse_while_capturing()
            _check_betas(group["betas"], self.moment_dtype)
            if is_new_lr:
                group["lr"] = arguments.lr.fill_(float(group["lr"]))
            arguments.hyperparameters.copy_(torch.tensor(hyperparameters, dtype=torch.float64))
            arguments.host_hyperparameters = hyperparameters

    def _find_gradient_dtype(self, gradients_of_groups):
        """Return the dtype of all gradients."""
        types = set()
        for gradients in gradients_of_groups:
            types |= {gradient.dtype for gradient in gradients if gradient is not None}
        if not types:
            return self.dtype
        if len(types) > 1 or not types <= {self.dtype, torch.float32}:
            raise ValueError(f"FastAdam: gradients of types {types}: all must be float32, or all have the "
                             f"parameters' type, {self.dtype}")
        return types.pop()

    def _pointer_row(self, parameter, device):
        """Return a row of `_KernelArguments.table`."""
        gradient = parameter.grad
        state = self.state[parameter]
        updated = self._slice(parameter)
        if gradient is None or updated.size == 0:
            return [0] * ROW_SIZE.value
        master = state.get("master_param", parameter)  # without one, not read
        tensors = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"], master]
        addresses = [tensor.data_ptr() + updated.start * tensor.element_size() for tensor in tensors]
        if not all(tensor.is_contiguous() for tensor in tensors) or any(x % 16 for x in addresses):
            raise ValueError("FastAdam: tensors must be contiguous and start at a multiple of 16 bytes")
        other_devices = {str(tensor.device) for tensor in tensors} - {str(device)}
        if other_devices:
            found = ", ".join(sorted(other_devices))
            raise ValueError(f"FastAdam: tensors of a group on {found}, {device}: all must be on one device; "
                             "make the optimizer after the model is moved")
        addend = 0
        if self.addends is not None:
            addend = self.addends[0, updated.addend_start:].data_ptr()
        return [*addresses, updated.size, addend]

    def _is_capturing(self):
        return self.kernel_arguments[0].lr.is_cuda and torch.cuda.is_current_stream_capturing()

    def _refuse_while_capturing(self):  # a copy from pageable host memory cannot be captured
        if self._is_capturing():
            raise RuntimeError("FastAdam: gradients or hyperparameters have changed since the last "
                               "prepare(); call prepare() before the CUDA graph is captured, in which "
                               f"{SPARES} sets of gradients may be new")

    # ------------------------------------------------------------ an update that several optimizers divide

    def set_slices(self, slices, addends, copy_distances):
        """Update only a slice of each parameter from now on. Several optimizers can then divide an update:
        each adds the others' gradients to its own, and writes the new weights to all. Only the state of the
        slices is then up to date.

        Call `reduce_and_sum_squares` once before each `step`: it adds the addends to the gradients, in place.

        Args:
            slices: {parameter: Slice}; other parameters are not updated.
            addends: (n, width), of the gradients' dtype: what is added to the gradients of all slices.
            copy_distances: (m,) int64: bytes from a weight to each of its copies, which `step` writes, too.
        """
        self.slices = slices
        self.addends = addends
        self.copy_distances = copy_distances
        for group, arguments in zip(self.param_groups, self.kernel_arguments):
            arguments.chunks = self._make_chunks(group["params"]).to(arguments.lr.device)
            arguments.addresses = None  # `prepare` writes the pointers anew

    def _slice(self, parameter) -> Slice:
        if self.slices is None:
            return Slice(start=0, size=parameter.numel())
        return self.slices.get(parameter, Slice(start=0, size=0))

    def _make_chunks(self, parameters):
        """Return `_KernelArguments.chunks`, on the host."""
        chunks = []
        for row, parameter in enumerate(parameters):
            count = ceil_div(self._slice(parameter).size, CHUNK)
            chunks += [[row, chunk] for chunk in range(count)]
        return torch.tensor(chunks, dtype=torch.int32).view(-1, 2)

    # ------------------------------------------------------------ checkpoints

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Copy a saved state into the existing tensors, whose addresses captured CUDA graphs have. Missing
        moments become zero, and missing master weights the parameters. ValueError for a state that does not
        fit, which may then be loaded in part."""
        state = self.state
        own_tensors = [(group["lr"], group["step"]) for group in self.param_groups]
        # only the groups: PyTorch would cast the moments of BF16 parameters to BF16
        super().load_state_dict({**state_dict, "state": {}})
        self.state = state
        for group, (lr, step) in zip(self.param_groups, own_tensors):
            group["lr"] = lr.fill_(float(group["lr"]))
            group["step"] = step.fill_(int(group.get("step", 0)))
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"]):
            for parameter, saved_id in zip(group["params"], saved_group["params"]):
                self._load_parameter(parameter, state_dict["state"].get(saved_id, {}))

    def _load_parameter(self, parameter, saved):
        """Copy one parameter's saved state into its tensors."""
        for name, own in self.state[parameter].items():
            if name in saved:
                value = saved[name]
            elif name == "master_param" and self.master == "float32":
                value = parameter
            else:
                value = torch.zeros_like(own)
            if value.shape != own.shape or (value.dtype == torch.int16) != (own.dtype == torch.int16):
                raise ValueError(
                    f"FastAdam: saved {name} {tuple(value.shape)} {value.dtype}, own {tuple(own.shape)} "
                    f"{own.dtype}; int16 is a remainder: use the store_param_remainders of the saved run")
            own.copy_(value)
