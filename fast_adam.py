"""AdamW in one kernel that moves each byte once, for a step that is replayed as a CUDA graph.

Notable, and why:
- Adam is bound by memory: 28 bytes a parameter (BF16 weight and gradient, float32 master and two moments), 26 where the master is kept as
  the 16 bits that the BF16 weight lacks and the weight is read, too, 18 with moments in BF16 as well. Transformer Engine's kernel for CUDA
  graphs takes twice the time of this one (`results/optimizer.json`), and refuses remainders.
- All parameters go in one launch: a table of pointers says where each one's tensors lie, a second table which chunk a program works on.
- Clipping is a factor that the kernel applies to gradients as it reads them, instead of a pass over all gradients.
- State, its names and its meaning are FusedAdam's: a checkpoint written with one loads in the other.

Formula: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2. The split of a float32 number in a BF16 one and 16 bits is Transformer Engine's.
"""

import torch
import triton
import triton.language as tl

CHUNK = 8192  # parameters of a program: enough to keep a processor's memory pipeline full, few enough to divide small tensors
TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _adam(tables, chunks, corrections, lr, grad_scale, beta1, beta2, eps, weight_decay, weight_type: tl.constexpr, master: tl.constexpr,
          moment_type: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """tables (tensors, 6) int64: addresses of weight, gradient, exp_avg, exp_avg_sq, master, and the number of elements.
    chunks (programs, 2) int32: which tensor, which chunk of it. master: none | float32 | remainder."""
    program = tl.program_id(0)
    row = tables + 6 * tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    correction1, correction2 = tl.load(corrections), tl.load(corrections + 1)
    rate, scale = tl.load(lr), tl.load(grad_scale)
    size = tl.where(tl.abs(scale) < float("inf"), tl.load(row + 5), 0)  # of a step that is skipped, not an element
    # The hint lets loads and stores be 16 bytes wide. A mask would forbid it, so whole chunks do without.
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int16 if master == "remainder" else weight_type)), 16)
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(weight_type)), 16)
    exp_avg = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(moment_type)), 16)
    exp_avg_sq = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(moment_type)), 16)
    exact = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.int16 if master == "remainder" else tl.float32)), 16)
    if start + CHUNK <= size:
        for block in range(CHUNK // BLOCK):
            _update(start + block * BLOCK + tl.arange(0, BLOCK), None, weight, gradient, exp_avg, exp_avg_sq, exact, correction1, correction2,
                    rate, scale, beta1, beta2, eps, weight_decay, master)
    else:
        for block in range(CHUNK // BLOCK):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            _update(at, at < size, weight, gradient, exp_avg, exp_avg_sq, exact, correction1, correction2,
                    rate, scale, beta1, beta2, eps, weight_decay, master)


@triton.jit
def _update(at, mask, weight, gradient, exp_avg, exp_avg_sq, exact, correction1, correction2, rate, scale, beta1, beta2, eps, weight_decay,
            master: tl.constexpr):
    """The elements `at` where `mask` says so, or all: new moments, new weight."""
    g = tl.load(gradient + at, mask).to(tl.float32) * scale
    m = tl.load(exp_avg + at, mask).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask).to(tl.float32)
    if master == "remainder":
        low = tl.load(exact + at, mask)
        high = tl.load(weight + at, mask).to(tl.int32) - (low < 0).to(tl.int32)  # a set first bit had rounded it up
        w = ((high << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    elif master == "float32":
        w = tl.load(exact + at, mask)
    else:
        w = tl.load(weight + at, mask).to(tl.float32)

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w -= rate * ((m / correction1) / (tl.sqrt(v / correction2) + eps) + weight_decay * w)

    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask)
    if master == "remainder":
        bits = w.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        tl.store(exact + at, low, mask)
        tl.store(weight + at, ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16), mask)
    else:
        if master == "float32":
            tl.store(exact + at, w, mask)
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask)


@triton.jit
def _squares(tables, chunks, sums, gradient_type: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """sums (programs,) float32: of each chunk's gradients, squared. Tables as for `_adam`."""
    program = tl.program_id(0)
    row = tables + 6 * tl.load(chunks + 2 * program)
    start = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    gradient, size = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(gradient_type)), 16), tl.load(row + 5)
    squares = tl.zeros((BLOCK,), tl.float32)
    if start + CHUNK <= size:
        for block in range(CHUNK // BLOCK):
            g = tl.load(gradient + start + block * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
            squares += g * g
    else:
        for block in range(CHUNK // BLOCK):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            g = tl.load(gradient + at, at < size, 0.0).to(tl.float32)
            squares += g * g
    tl.store(sums + program, tl.sum(squares))


class FastAdam(torch.optim.Optimizer):
    """AdamW for BF16 parameters (with float32 masters) or float32 ones, all of one type. The learning rate and the step count are tensors
    on the device, so that a CUDA graph may hold the step: `group["lr"].fill_(…)`.

    moment_dtype: of both moments. torch.bfloat16 needs betas of at most 0.996: what a step takes off a moment, 1 - beta of it, is rounded off
    where it is below half of its last bit, 2^-8 of it, and the moment never falls again."""

    capturable, master_weights = True, True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *, moment_dtype=torch.float32,
                 store_param_remainders=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        types = {p.dtype for group in self.param_groups for p in group["params"]}
        if len(types) != 1 or not types <= {torch.bfloat16, torch.float32}:
            raise ValueError(f"FastAdam: parameters of types {types}: all must be torch.bfloat16, or all torch.float32")
        self.dtype, = types
        self.moment_dtype, self.store_param_remainders = moment_dtype, store_param_remainders and self.dtype == torch.bfloat16
        self.master = "none" if self.dtype == torch.float32 else "remainder" if store_param_remainders else "float32"
        self.tables = {}
        for group in self.param_groups:
            device = group["params"][0].device
            group["lr"] = torch.tensor(float(lr), device=device)
            group["step"] = torch.zeros(1, dtype=torch.int, device=device)
            for parameter in group["params"]:
                self.initialize_state(parameter)

    def initialize_state(self, param):
        state = self.state[param]
        state["exp_avg"] = torch.zeros_like(param, dtype=self.moment_dtype, memory_format=torch.contiguous_format)
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        if self.master == "remainder":
            state["master_param"] = torch.zeros_like(state["exp_avg"], dtype=torch.int16)
        elif self.master == "float32":
            state["master_param"] = param.detach().float().clone()

    def prepare(self):
        """Write the tables of pointers. `step` does it where a pointer has changed; before a CUDA graph is recorded, call it yourself."""
        for number, group in enumerate(self.param_groups):
            rows = [[p.data_ptr(), p.grad.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(),
                     state["master_param"].data_ptr() if "master_param" in state else 0, p.numel()]
                    for p in group["params"] if p.grad is not None for state in [self.state[p]]]
            if number in self.tables and self.tables[number][0] == rows:
                continue
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and not (parameter.is_contiguous() and gradient.is_contiguous() and gradient.dtype == self.dtype):
                    raise ValueError("FastAdam: parameters and gradients must be contiguous and of one type")
            if any(address % 16 for row in rows for address in row[:5]):
                raise ValueError("FastAdam: a tensor does not start at a multiple of 16 bytes")
            chunks = [[tensor, chunk] for tensor, row in enumerate(rows) for chunk in range(-(-row[5] // CHUNK))]
            device = group["lr"].device
            table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 6)
            _, old, *others = self.tables.get(number, ((), table))
            if len(old) == len(table) and others:  # in place: a CUDA graph that was recorded reads this memory
                self.tables[number] = (rows, old.copy_(table), *others)
                continue
            self.tables[number] = (rows, table, torch.tensor(chunks, dtype=torch.int32, device=device).view(-1, 2),
                                   torch.tensor(group["betas"], dtype=torch.float64, device=device))

    @torch.no_grad()
    def gradient_norm(self):
        """The 2-norm of all gradients together, () float32. (torch.nn.utils.get_total_norm rounds one of each tensor to the gradients' type.)"""
        self.prepare()
        sums = []
        for _, table, chunks, _ in self.tables.values():
            sums.append(torch.empty(len(chunks), device=table.device))
            if len(chunks):
                _squares[(len(chunks),)](table, chunks, sums[-1], TYPES[self.dtype], CHUNK, BLOCK=1024, num_warps=4)
        return torch.cat(sums).sum().sqrt()

    @torch.no_grad()
    def step(self, closure=None, grad_scale=None):
        """`grad_scale`: () float32 on the device, what gradients are multiplied by; the gradients themselves stay as they are. Where it is
        not finite the step is skipped: weights, state and step count stay as they are, and the host does not learn of it."""
        self.prepare()
        counts = 1 if grad_scale is None else torch.isfinite(grad_scale)
        for number, group in enumerate(self.param_groups):
            group["step"] += counts
            _, table, chunks, betas = self.tables[number]
            if not len(chunks):
                continue
            corrections = (1 - betas ** group["step"]).float()
            scale = torch.ones((), device=table.device) if grad_scale is None else grad_scale
            _adam[(len(chunks),)](table, chunks, corrections, group["lr"], scale, *group["betas"], group["eps"], group["weight_decay"],
                                  TYPES[self.dtype], self.master, TYPES[self.moment_dtype], CHUNK, BLOCK=1024, num_warps=4)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)  # this rounds the state to the parameters' type: put the values back
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, [p for group in self.param_groups for p in group["params"]]):
            for name, value in state_dict["state"].get(number, {}).items():
                dtype = value.dtype if name == "master_param" else self.moment_dtype
                self.state[parameter][name] = value.detach().to(device=parameter.device, dtype=dtype, copy=True).contiguous()
        self.tables = {}
