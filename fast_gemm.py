"""FP8 matrix products by the fastest of cuBLASLt's algorithms, found by trying.

For every product cuBLASLt knows several algorithms and orders them by a guess; PyTorch and Transformer Engine (TE) take the first,
which need not be the fastest. Here the first time that a shape comes by, those suggested run in turns, and the fastest is kept for the rest of
the process.

- What a large product is bound by is the GPU's power limit: its clock falls until it keeps to that. So the algorithms run in turns, all at the
  same clock, and on random values, not on what comes by first, which may be zeros: those take less power, and another algorithm may be
  the fastest then.
- Algorithms add up in different orders, so another choice gives other roundings, and the next run may choose otherwise. Under
  `torch.use_deterministic_algorithms` nothing is tried.
- While a CUDA graph is recorded nothing can be timed: shapes that are new then get the first algorithm.
- cuBLASLt is called through ctypes, since no Python package offers its list of algorithms. Numbers and layouts are those of `cublasLt.h`,
  the same in CUDA 12 and 13; what each call needs is in cuBLAS's documentation, "Using the cuBLASLt API".
"""

import ctypes
import functools
import statistics

import torch

# Summands of an input's gradient: up to so many the tensor cores' own sums, which have fewer bits than float32, add less of an error than BF16's
# rounding does after them, in the median of the products of models in training, and about as much in the worst (results/accumulation.py). Weights'
# gradients have as many as there are tokens: about 3 % would be lost there. 0: all gradients in float32, as in Transformer Engine's recipe.
FAST_SUMS = 3072
SUGGESTIONS, ROUNDS, WORKSPACE_BYTES = 16, 8, 32 * 2**20  # the workspace: what NVIDIA recommends for Hopper
COMPUTE_32F, R_32F, R_16BF, EPILOGUE_BIAS = 68, 0, 14, 4
TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # cudaDataType_t
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, BIAS_DATA_TYPE = 3, 4, 7, 8, 17, 18, 25, 26
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t


class _Suggestion(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algorithm", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
                ("reserved", ctypes.c_int * 4)]


@functools.cache
def _library():
    """The cuBLASLt that PyTorch has loaded, or None."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}") if torch.version.cuda else None
    except OSError:
        return None


def available():
    return _library() is not None and not torch.are_deterministic_algorithms_enabled()


def multiply(a, a_scale_inv, b, b_scale_inv, bias=None, fast=False):
    """b @ aᵀ, times both scales, + bias -> (N, M) BF16.

    a (M, K), b (N, K): FP8, contiguous, M, N and K multiples of 16, not both E5M2. Scales: one float32 each, on the device. bias: (M,) BF16.
    fast: sums within FP8's tensor cores, of less precision than float32's.
    """
    key = (*a.shape, len(b), a.dtype, b.dtype, bias is not None, fast, a.device.index)
    operands = a, a_scale_inv, b, b_scale_inv, bias, torch.empty((len(b), len(a)), dtype=torch.bfloat16, device=a.device)
    product = _products.get(key)
    if product is None:
        product = _Product(*key)
        if not torch.cuda.is_current_stream_capturing():
            product.choose(operands)
            _products[key] = product
    product.run(product.best, *operands)
    return operands[-1]


_products = {}  # of each kind and shape: what is known


class _Product:
    def __init__(self, m, k, n, a_type, b_type, has_bias, fast, device_index):
        self.description, self.best = _create("MatmulDesc", COMPUTE_32F, R_32F), 0
        self._set(TRANSA, ctypes.c_int32(1))  # cuBLAS sees rows as columns: to it, this is outᵀ = (aᵀ)ᵀ bᵀ
        self._set(TRANSB, ctypes.c_int32(0))
        self._set(FAST_ACCUM, ctypes.c_int8(fast))
        self._set(A_SCALE_POINTER, ctypes.c_void_p(16))  # any but null: the suggestions depend on whether there are some
        self._set(B_SCALE_POINTER, ctypes.c_void_p(16))
        if has_bias:
            self._set(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
            self._set(BIAS_DATA_TYPE, ctypes.c_int32(R_16BF))
            self._set(BIAS_POINTER, ctypes.c_void_p(16))
        self.layouts = [_create("MatrixLayout", kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
                        for kind, rows, columns in ((TYPES[a_type], k, m), (TYPES[b_type], k, n), (R_16BF, m, n))]
        a, b, out = self.layouts
        preference, size = _create("MatmulPreference"), ctypes.c_uint64(WORKSPACE_BYTES)
        _check(_library().cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE_BYTES, ctypes.byref(size), ctypes.sizeof(size)))
        self.suggestions, found = (_Suggestion * SUGGESTIONS)(), ctypes.c_int(0)
        _check(_library().cublasLtMatmulAlgoGetHeuristic(_handle(device_index), self.description, a, b, out, out, preference, SUGGESTIONS,
                                                         self.suggestions, ctypes.byref(found)))
        _check(_library().cublasLtMatmulPreferenceDestroy(preference))
        self.found = found.value

    def _set(self, attribute, value):
        _check(_library().cublasLtMatmulDescSetAttribute(self.description, attribute, ctypes.byref(value), ctypes.sizeof(value)))

    def choose(self, operands):
        """Time every algorithm on operands like these, and keep the fastest in `best`."""
        a, a_scale_inv, b, *others = operands
        operands = _random_like(a), a_scale_inv, _random_like(b), *others
        numbers = [number for number in range(self.found) if self._runs(number, operands)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS * len(numbers) + 1)]
        events[0].record()
        for number, event in zip(ROUNDS * numbers, events[1:]):
            self.run(number, *operands)
            event.record()
        events[-1].synchronize()
        spans = [before.elapsed_time(after) for before, after in zip(events, events[1:])]
        times = {number: statistics.median(spans[i::len(numbers)]) for i, number in enumerate(numbers)}
        self.best = min(times, key=times.get, default=0)

    def _runs(self, number, operands):
        try:
            self.run(number, *operands)
        except RuntimeError:  # suggested, but not for this GPU
            return False
        return True

    def run(self, number, a, a_scale_inv, b, b_scale_inv, bias, out):
        self._set(A_SCALE_POINTER, ctypes.c_void_p(a_scale_inv.data_ptr()))
        self._set(B_SCALE_POINTER, ctypes.c_void_p(b_scale_inv.data_ptr()))
        if bias is not None:
            self._set(BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        a_layout, b_layout, out_layout = self.layouts
        _check(_library().cublasLtMatmul(
            _handle(a.device.index), self.description, ctypes.byref(one), _pointer(a), a_layout, _pointer(b), b_layout, ctypes.byref(zero),
            _pointer(out), out_layout, _pointer(out), out_layout, ctypes.byref(self.suggestions[number]), _pointer(_workspace(a.device)),
            ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(torch.cuda.current_stream(a.device).cuda_stream)))


def _random_like(x):
    """Normally distributed FP8 values, the largest of which are near the end of the type's range, as delayed scaling has it. They come again every
    million or so: to draw as many as there are words times tokens would take six times x's memory."""
    largest, generator = torch.finfo(x.dtype).max, torch.Generator(x.device).manual_seed(0)  # its own: nobody's random numbers change
    some = torch.randn(2**20, device=x.device, generator=generator).mul_(largest / 5).clamp_(-largest, largest)
    bytes_ = some.to(x.dtype).view(torch.uint8)
    return bytes_.repeat(-(-x.numel() // len(bytes_)))[:x.numel()].view(x.shape).view(x.dtype)


def _pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def _check(status):
    if status:
        raise RuntimeError(f"cuBLASLt: status {status} (cublasStatus_t)")


def _create(kind, *arguments):
    handle = ctypes.c_void_p()
    _check(getattr(_library(), f"cublasLt{kind}Create")(ctypes.byref(handle), *arguments))
    return handle


@functools.cache
def _handle(device_index):
    with torch.cuda.device(device_index):
        handle = ctypes.c_void_p()
        _check(_library().cublasLtCreate(ctypes.byref(handle)))
        return handle


@functools.cache
def _workspace(device):
    """Products run after each other, and share it."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
