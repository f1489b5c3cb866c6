"""GEMMs through cuBLASLt, autotuned: the fastest candidate algorithm of each shape, chosen by timing.

Use `gemm` (FP8) and `gemm_bf16` where the same shapes run many times, as in training. cuBLASLt offers several
algorithms, of which PyTorch and Transformer Engine take the first. On first use of a shape, both time all,
and keep the best.

- Large GEMMs run at the GPU's power limit, where the clock depends on the operands: zeros take less power
  than other values. So candidates are timed round-robin on the operands of the call, and timing waits until
  these are not mostly zeros, as gradients are in a first step.
- Algorithms sum in different orders, so the next process may choose another and round differently. Under
  `torch.use_deterministic_algorithms`, and where cuBLASLt has no algorithm, PyTorch computes the GEMM.
  Nothing can be timed while a CUDA graph is captured.
- Calls are safe from any stream, thread or device: a lock guards descriptors and tuning.

Reference: "Using the cuBLASLt API" in cuBLAS's documentation. Constants and structures are those of
`cublasLt.h`, the same in CUDA 12 and 13.
"""

import ctypes
import functools
import statistics
import threading

import torch
import torch.nn.functional as F
from triton.runtime import driver

from fast_kernels.library import are_plain, check_aligned, check_shape, is_fake, is_tracing, operation

ALGORITHMS = 16  # candidates requested
ROUNDS = 8  # timed runs of each candidate
MAX_TUNED = 256  # shapes timed per process; later ones use the heuristic's first algorithm
MAX_ATTEMPTS = 4096  # calls with a shape, from all blocks, whose operands are checked for zeros
WORKSPACE_BYTES = 32 * 2**20  # the largest workspace of a candidate: what NVIDIA recommends for Hopper

# Values of cuBLASLt's enumerations
R_32F = 0  # cudaDataType_t
R_16BF = 14
TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.bfloat16: R_16BF, torch.float32: R_32F}
COMPUTE_32F = 68  # cublasComputeType_t
EPILOGUE_BIAS = 4  # cublasLtEpilogue_t
TRANSA = 3  # cublasLtMatmulDescAttributes_t
TRANSB = 4
EPILOGUE = 7
BIAS_POINTER = 8
A_SCALE_POINTER = 17
B_SCALE_POINTER = 18
FAST_ACCUM = 25
BIAS_DATA_TYPE = 26
POINTER_BYTES = ctypes.c_size_t(8)
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
REDUCTION_SCHEME_MASK = 3
MIN_ALIGNMENT_BYTES = (5, 6, 7, 8)  # of A, B, C and D
REDUCTION_IN_COMPUTE_TYPE = 2  # cublasLtReductionScheme_t; the others add parts of a sum in `out`'s dtype

ONE = ctypes.byref(ctypes.c_float(1))  # alpha, and beta if the result is added
ZERO = ctypes.byref(ctypes.c_float(0))
# {argument of `gemm`: the values of FAST_ACCUM that are tried}
ACCUMULATIONS = {"precise": (False,), "fast": (True,), "either": (False, True)}


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


@functools.cache
def _library():
    """Return the cuBLASLt library that PyTorch has loaded, or None."""
    try:
        major = (torch.version.cuda or "none").split(".")[0]
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None
    # with these, ctypes takes addresses as plain numbers: half of the host's time per call
    library.cublasLtMatmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
    return library


def _set_attribute():
    """Return cublasLtMatmulDescSetAttribute, which takes values of ctypes and ints alone.

    It only copies some bytes. So it keeps Python's global lock, and has no argtypes: both halve the host's
    time per call."""
    library = _library()
    return ctypes.PyDLL(library._name, handle=library._handle).cublasLtMatmulDescSetAttribute


def gemm_reference(a, a_scale_inv, b, b_scale_inv, bias=None):
    """`gemm` in float32."""
    out = (a.float() * a_scale_inv) @ (b.float() * b_scale_inv).T
    return out if bias is None else out + bias


def gemm(a, a_scale_inv, b, b_scale_inv, bias=None, accumulation="precise", out=None, accumulate=False):
    """Compute (a · a_scale_inv) @ (b · b_scale_inv)ᵀ + bias, such as x @ weightᵀ + bias.

    Args:
        a, b: (M, K) and (N, K) in FP8, contiguous, M, N and K multiples of 16, not both E5M2.
        a_scale_inv, b_scale_inv: float32, one element, on the device.
        bias: (N,) BF16 or None.
        accumulation: "precise" (float32), "fast" (the FP8 tensor cores' accumulator), or "either" (the
            faster of the two; precise where nothing can be timed).
        out: (M, N) BF16 or float32, contiguous, which the result is written to. None: new memory, BF16.
        accumulate: add the result to `out`.

    All but the scales must start at a multiple of 16 bytes. Returns (M, N), `out` if given.
    """
    if out is None:
        _check_new_output("gemm", accumulate)
        out = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    _gemm(a, a_scale_inv, b, b_scale_inv, bias, out, accumulation, accumulate)
    return out


@operation(
    "(Tensor a, Tensor a_scale_inv, Tensor b, Tensor b_scale_inv, Tensor? bias, Tensor(a!) out, "
    "str accumulation, bool accumulate) -> ()")
def _gemm(a, a_scale_inv, b, b_scale_inv, bias, out, accumulation, accumulate):
    if is_fake(a):
        return
    is_contiguous = a.is_contiguous() and b.is_contiguous() and out.is_contiguous()
    bias_key = None
    if bias is not None:
        is_contiguous = is_contiguous and bias.is_contiguous()
        bias_key = bias.shape, bias.dtype
    key = (a.shape, b.shape, out.shape, a.dtype, b.dtype, out.dtype, bias_key, accumulation, accumulate,
           a.get_device())
    plan = _plans.get(key)
    operands = a, a_scale_inv, b, b_scale_inv, bias, out
    if plan is None or not is_contiguous:  # a shape is checked when it is new; contiguity is not in the key
        _check(operands, accumulation)
    if torch.are_deterministic_algorithms_enabled():
        plan = None
    elif plan is None and a.is_cuda and _library() is not None:
        plan = _add_plan(key, operands, accumulate, accumulation)
    algorithm = None if plan is None else plan.find_algorithm(operands)
    if algorithm is None:
        check_aligned("fast_kernels.gemm", a=a, b=b, bias=bias, out=out)
        _run_torch(operands, accumulation, accumulate)
    else:
        plan.run(algorithm, a, a_scale_inv, b, b_scale_inv, bias, out)


def _check(operands, accumulation):
    """Raise ValueError unless cuBLASLt can run the GEMM."""
    a, a_scale_inv, b, b_scale_inv, bias, out = operands
    dtypes = {a.dtype, b.dtype}
    is_fp8 = dtypes <= {torch.float8_e4m3fn, torch.float8_e5m2}
    sizes = (*a.shape, len(b))
    scales = (a_scale_inv, b_scale_inv)
    rules = [
        (accumulation in ACCUMULATIONS, f"accumulation={accumulation!r} must be precise, fast or either"),
        (is_fp8 and dtypes != {torch.float8_e5m2},
         "a and b must be float8_e4m3fn or float8_e5m2, not both float8_e5m2"),
        (a.dim() == 2 and all(size > 0 and size % 16 == 0 for size in sizes),
         "sizes must be multiples of 16; pad with zeros"),
        (out.dtype in (torch.bfloat16, torch.float32), "out must be torch.bfloat16 or torch.float32"),
        (all(x.dtype == torch.float32 and x.numel() == 1 for x in scales),
         "a_scale_inv and b_scale_inv must be torch.float32, one element")]
    for is_met, rule in rules:
        if not is_met:
            raise ValueError(f"fast_kernels.gemm: a {tuple(a.shape)} {a.dtype}, b {tuple(b.shape)} "
                             f"{b.dtype}, out {out.dtype}: {rule}")
    check_shape("fast_kernels.gemm", a.shape, a=a)
    check_shape("fast_kernels.gemm", (len(b), a.shape[1]), b=b)
    check_shape("fast_kernels.gemm", (len(a), len(b)), out=out)
    check_shape("fast_kernels.gemm", (len(b),), torch.bfloat16, bias=bias)


def _run_torch(operands, accumulation, accumulate):
    """Run the GEMM with torch._scaled_mm, which takes the heuristic's first algorithm."""
    a, a_scale_inv, b, b_scale_inv, bias, out = operands
    gemm_bias = bias if out.dtype == torch.bfloat16 else None  # _scaled_mm adds one to a BF16 result only
    result = torch._scaled_mm(
        a, b.t(), scale_a=a_scale_inv.view(1), scale_b=b_scale_inv.view(1), bias=gemm_bias,
        out_dtype=out.dtype, use_fast_accum=accumulation == "fast")
    if bias is not None and gemm_bias is None:
        result += bias
    if accumulate:
        out.add_(result)
    else:
        out.copy_(result)


def _check_new_output(name, accumulate):
    if accumulate:
        raise ValueError(f"fast_kernels.{name}: accumulate=True adds to `out`; pass out=…")


def gemm_bf16(a, b, bias=None, out=None, accumulate=False):
    """Compute a @ bᵀ + bias in BF16. The GEMMs of a linear layer are

        gemm_bf16(x, weight, bias)  # forward, x @ weightᵀ + bias
        gemm_bf16(dy, weight.T)     # dgrad, dy @ weight
        gemm_bf16(dy.T, x.T)        # wgrad, dyᵀ @ x

    Args:
        a, b: (M, K) and (N, K), each contiguous or the transpose of a contiguous matrix.
        bias: (N,) or None.
        out: (M, N) BF16 or float32, contiguous, which the result is written to. None: new memory, BF16.
        accumulate: add the result to `out`. On Hopper a BF16 `out` is then rounded twice, after the product
            and after the sum, as in torch.addmm.

    PyTorch computes what cuBLASLt cannot: M, N or K that is not a multiple of 8, an address that is not a
    multiple of 16 bytes, other dtypes and strides. Not differentiable. Returns (M, N), `out` if given.
    """
    if out is None:
        _check_new_output("gemm_bf16", accumulate)
    result = _run_cublaslt_in_bf16(a, b, bias, out, accumulate)
    if result is None:
        result = _run_torch_in_bf16(a, b, bias, out, accumulate)
    return result


def _run_cublaslt_in_bf16(a, b, bias, out, accumulate):
    """Return the result of `gemm_bf16`, or None where PyTorch has to run it."""
    if is_tracing() or not are_plain((a, b, bias, out)):  # a tracer or a transform must see its operations
        return None
    if _library() is None or not a.is_cuda or torch.are_deterministic_algorithms_enabled():
        return None
    if a.get_device() != torch._C._cuda_getDevice():
        return None
    key = (_describe(a), _describe(b), _describe(bias), _describe(out), accumulate)
    plan = _plans.get(key)
    if plan is None and not _is_supported_in_bf16(a, b, bias, out):  # operands are checked when they are new
        return None
    if (_address(a) | _address(b) | _address(bias) | _address(out)) % 16:  # one of them is not aligned
        return None
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[0]))
    operands = a, None, b, None, bias, out
    if plan is None:
        plan = _add_plan(key, operands, accumulate)
    algorithm = plan.find_algorithm(operands)
    if algorithm is None:
        return None
    plan.run(algorithm, *operands)
    return out


def _describe(x):
    """Return what a plan depends on of an operand of `gemm_bf16`."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


def _address(x):
    return 0 if x is None else x.data_ptr()


def _is_supported_in_bf16(a, b, bias, out):
    """Return whether cuBLASLt can run the GEMM. PyTorch raises if nothing can."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        return False
    sizes = (*a.shape, len(b))
    rules = [
        all(size > 0 and size % 8 == 0 for size in sizes),
        a.dtype == b.dtype == torch.bfloat16,
        b.get_device() == a.get_device(),
        all(_memory(x).is_contiguous() for x in (a, b))]
    if bias is not None:
        rules += [
            bias.shape == (len(b),) and bias.is_contiguous(),
            bias.dtype == torch.bfloat16,
            bias.get_device() == a.get_device()]
    if out is not None:
        rules += [
            out.shape == (len(a), len(b)) and out.is_contiguous(),
            out.dtype in (torch.bfloat16, torch.float32),
            out.get_device() == a.get_device()]
    return all(rules)


def _run_torch_in_bf16(a, b, bias, out, accumulate):
    """Run the GEMM with PyTorch."""
    if out is None:
        return F.linear(a, b, bias)
    if out.dtype != a.dtype:  # torch.mm writes no other dtype
        a = a.to(out.dtype)
        b = b.to(out.dtype)
    if accumulate:
        out.addmm_(a, b.T)
    else:
        torch.mm(a, b.T, out=out)
    if bias is not None:
        out += bias
    return out


_plans = {}  # the autotune cache: {the key of `_gemm` or of `gemm_bf16`, which differ in length: _Plan}
_lock = threading.RLock()  # tune() calls run(), which takes it again


def _add_plan(key, operands, accumulate, accumulation="precise"):
    with _lock:
        if key not in _plans:  # by another thread
            _plans[key] = _Plan(operands, accumulate, accumulation)
        return _plans[key]


class _Plan:
    """Descriptors, candidate algorithms and the chosen algorithm of one GEMM shape.

    cuBLAS is column-major and takes each of our matrices for its transpose:

        ours        a (M, K)                     b (N, K)                    out = a @ bᵀ
        cuBLAS's    aᵀ (K, M), second operand    bᵀ (K, N), first operand    outᵀ = (bᵀ)ᵀ @ aᵀ

    A BF16 matrix may also be the transpose of a contiguous one: memory holds aᵀ or bᵀ, which cuBLAS takes for
    a or b. The product needs op(A) = b, (N, K), and op(B) = aᵀ, (K, M), of its first and second operand:

        memory holds    cuBLAS takes it for    leading dimension    operation
        b  (N, K)       A = bᵀ (K, N)          K                    TRANSA: transposed
        bᵀ (K, N)       A = b  (N, K)          N                    TRANSA: not transposed
        a  (M, K)       B = aᵀ (K, M)          K                    TRANSB: not transposed
        aᵀ (K, M)       B = a  (M, K)          M                    TRANSB: transposed

    operands: a, a_scale_inv, b, b_scale_inv, bias, out. BF16 has no scales: None.
    """

    tuned_count = 0  # shapes timed in this process

    def __init__(self, operands, accumulate, accumulation):
        a, a_scale_inv, b, _, _, out = operands
        self.accumulate = accumulate
        self.beta = ONE if accumulate else ZERO
        self.device_index = a.get_device()
        self.handle = _handle(self.device_index)
        self.get_stream = driver.active.get_current_stream
        self.multiply = _library().cublasLtMatmul
        self.set_attribute = _set_attribute()
        self.preferences = _make_preferences(is_fp8=a_scale_inv is not None)
        self.pointer_value = ctypes.c_void_p()  # what `run` writes to a descriptor; a new one costs time
        self.pointer_reference = ctypes.byref(self.pointer_value)
        self.is_tuned = False
        self.attempts = 0  # calls that wanted to time this shape
        self.layouts = [_make_layout(x) for x in (a, b, out)]
        self.candidates = []  # (descriptor, _Algorithm), in the heuristic's order
        for is_fast in ACCUMULATIONS[accumulation]:
            descriptor = _make_descriptor(operands, is_fast)
            for algorithm in self._ask_heuristic(descriptor):
                self.candidates.append((descriptor, algorithm))
        self.chosen = self.candidates[0] if self.candidates else None

    def _ask_heuristic(self, descriptor):
        """Return cuBLASLt's candidates in the heuristic's order; none if it does not support the GEMM."""
        a, b, out = self.layouts
        library = _library()
        preference = _create("MatmulPreference")
        for attribute, value in self.preferences:
            _check_status(library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.sizeof(value)))
        found = (_Algorithm * ALGORITHMS)()
        count = ctypes.c_int(0)
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, descriptor, b, a, out, out, preference, ALGORITHMS, found, ctypes.byref(count))
        _check_status(library.cublasLtMatmulPreferenceDestroy(preference))
        if status != 0:
            return []
        return [algorithm for algorithm in found[:count.value] if algorithm.state == 0]

    def find_algorithm(self, operands):
        """Return the candidate to run; None if cuBLASLt has none."""
        if not self.is_tuned and not torch.cuda.is_current_stream_capturing():
            self.tune(operands)
        return self.chosen

    def tune(self, operands):
        """Time every candidate on the operands of this call, and set `chosen` to the fastest."""
        with _lock:
            if self.is_tuned:  # by another thread
                return
            a, _, b, *_ = operands
            self.attempts += 1
            if not self.candidates or _Plan.tuned_count >= MAX_TUNED or self.attempts > MAX_ATTEMPTS:
                self.is_tuned = True  # keep the heuristic's first algorithm
            elif _is_mostly_nonzero(a) and _is_mostly_nonzero(b):
                self.chosen = self._find_fastest(operands)
                self.is_tuned = True

    def _find_fastest(self, operands):
        """Return the candidate with the shortest median time; None if none runs."""
        _Plan.tuned_count += 1
        if self.accumulate:  # the result of a timed run must not be added to the caller's `out`
            *inputs, out = operands
            operands = *inputs, torch.zeros_like(out)
        candidates = [candidate for candidate in self.candidates if self._can_run(candidate, operands)]
        if not candidates:
            return None
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        ends = []
        for candidate in ROUNDS * candidates:  # round-robin
            self.run(candidate, *operands)
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            ends.append(end)
        ends[-1].synchronize()
        times = [before.elapsed_time(after) for before, after in zip([start, *ends], ends)]
        # every len(candidates)-th run is of the same candidate
        medians = [statistics.median(times[i::len(candidates)]) for i in range(len(candidates))]
        fastest = medians.index(min(medians))
        return candidates[fastest]

    def _can_run(self, candidate, operands):
        try:
            self.run(candidate, *operands)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a candidate that this GPU does not support
            return False
        return True

    def run(self, candidate, a, a_scale_inv, b, b_scale_inv, bias, out):
        """Launch the GEMM with one of `candidates` on the current stream."""
        descriptor, algorithm = candidate
        workspace_bytes = algorithm.workspace_bytes
        workspace = workspace_address = None
        if workspace_bytes:
            workspace = a.new_empty(workspace_bytes, dtype=torch.uint8)
            workspace_address = workspace.data_ptr()
        a_layout, b_layout, out_layout = self.layouts
        a_address = a.data_ptr()
        b_address = b.data_ptr()
        out_address = out.data_ptr()
        bias_address = 0 if bias is None else bias.data_ptr()
        if (a_address | b_address | out_address | bias_address) % 16:  # one of them is not aligned
            check_aligned("fast_kernels.gemm", a=a, b=b, bias=bias, out=out)
        set_attribute = self.set_attribute
        value = self.pointer_value
        reference = self.pointer_reference
        status = 0
        with _lock:  # cuBLASLt reads the descriptor before it returns
            if a_scale_inv is not None:
                value.value = b_scale_inv.data_ptr()  # b is its first operand
                status = set_attribute(descriptor, A_SCALE_POINTER, reference, POINTER_BYTES)
                value.value = a_scale_inv.data_ptr()
                status = status or set_attribute(descriptor, B_SCALE_POINTER, reference, POINTER_BYTES)
            if bias is not None:
                value.value = bias_address
                status = status or set_attribute(descriptor, BIAS_POINTER, reference, POINTER_BYTES)
            status = status or self.multiply(
                self.handle, descriptor, ONE, b_address, b_layout, a_address, a_layout, self.beta,
                out_address, out_layout, out_address, out_layout, ctypes.byref(algorithm), workspace_address,
                workspace_bytes, self.get_stream(self.device_index))
        if status:
            _check_status(status)


def _memory(x):
    """Return a contiguous matrix as it is, and its transpose transposed: the rows that are in memory."""
    return x if x.is_contiguous() else x.T


def _make_layout(x):
    """Create the layout of a matrix, to cuBLAS that of the transpose of what is in memory; see `_Plan`."""
    rows, columns = (ctypes.c_uint64(size) for size in _memory(x).shape)
    leading_dimension = columns
    return _create("MatrixLayout", TYPES[x.dtype], columns, rows, leading_dimension)


def _make_preferences(is_fp8):
    """Return (attribute, value) pairs of the preference with which the heuristic is asked."""
    preferences = [(MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES))]
    if not is_fp8:
        # no less exact than one rounding of a float32 sum
        preferences.append((REDUCTION_SCHEME_MASK, ctypes.c_uint32(REDUCTION_IN_COMPUTE_TYPE)))
        preferences += [(attribute, ctypes.c_uint32(16)) for attribute in MIN_ALIGNMENT_BYTES]
    return preferences


def _make_descriptor(operands, is_fast):
    """Create the descriptor of out = a @ bᵀ; see `_Plan`."""
    a, a_scale_inv, b, _, bias, _ = operands
    descriptor = _create("MatmulDesc", COMPUTE_32F, R_32F)
    _set(descriptor, TRANSA, ctypes.c_int32(b.is_contiguous()))
    _set(descriptor, TRANSB, ctypes.c_int32(not a.is_contiguous()))
    # any address: the heuristic only checks that the pointers are set
    if a_scale_inv is not None:
        _set(descriptor, FAST_ACCUM, ctypes.c_int8(is_fast))
        _set(descriptor, A_SCALE_POINTER, ctypes.c_void_p(16))
        _set(descriptor, B_SCALE_POINTER, ctypes.c_void_p(16))
    if bias is not None:
        _set(descriptor, EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
        _set(descriptor, BIAS_DATA_TYPE, ctypes.c_int32(R_16BF))
        _set(descriptor, BIAS_POINTER, ctypes.c_void_p(16))
    return descriptor


def _is_mostly_nonzero(x):
    """Return whether at least half of a sample of x's elements is not zero. Synchronizes with the device."""
    stride = max(1, x.numel() // 2**16) | 1  # odd: an even one may visit a few columns only
    sample = _memory(x).flatten()[::stride]
    nonzeros = sample.float().count_nonzero().item()  # FP8 has no count_nonzero
    return 2 * nonzeros >= sample.numel()


def _set(descriptor, attribute, value):
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _check_status(_set_attribute()(descriptor, attribute, ctypes.byref(value), size))


def _check_status(status):
    if status:
        raise RuntimeError(f"cuBLASLt: status {status} (cublasStatus_t)")


def _create(kind, *arguments):
    handle = ctypes.c_void_p()
    _check_status(getattr(_library(), f"cublasLt{kind}Create")(ctypes.byref(handle), *arguments))
    return handle


@functools.cache
def _handle(device_index):
    with torch.cuda.device(device_index):
        return _create("")
