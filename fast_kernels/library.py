"""Registration of kernels as PyTorch operations, `torch.ops.fast_kernels.*`, and what all of them share.

- An operation never returns one of its arguments. An output that is not wanted is an empty tensor (0,).
- The fake version is the function itself, which returns after it has allocated its outputs: `is_fake`.
- The dispatcher takes about 4 us per call on the host, and a training step makes about 300 calls. So eager
  code calls the function itself, and only a tracer or another dispatch mode gets the operation.
- For the same reason kernels are launched by `launch.Launch`, not by Triton.
- Kernels that work on many tensors read a table of addresses: `device_tables`.
"""

import functools
import os
from collections import OrderedDict, namedtuple

import torch
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling

LIBRARY = torch.library.Library("fast_kernels", "DEF")
MAX_TABLES = 256
PLAIN = torch.Tensor, torch.nn.Parameter
count_dispatch_modes = torch._C._len_torch_dispatch_stack  # of those that are active


def ceil_div(a, b):
    """Return a / b, rounded up. (triton.cdiv takes 6 us on the host, since kernels can call it, too.)"""
    return (a + b - 1) // b


def next_power_of_2(n):
    """Return the smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def is_tracing():
    """Return whether a tracer or another dispatch mode must see each operation."""
    return is_compiling() or count_dispatch_modes() > 0


def is_transforming():
    """Return whether a transform of torch.func, such as vmap, is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_fake(tensor):
    """Return whether a tensor has no data, so that no kernel can be launched."""
    return type(tensor) is FakeTensor or tensor.is_meta  # isinstance takes 0.3 us for a class of tensors


@functools.cache
def unsupported_reason() -> str:
    """Return why kernels do not run here; "" if they do: on a Hopper GPU or in Triton's interpreter."""
    if not torch.cuda.is_available():
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # in tests
        return "" if interpreted else "fast_kernels needs a Hopper GPU, and there is no GPU here."
    if torch.cuda.get_device_capability() != (9, 0):
        name = torch.cuda.get_device_name()
        return f"fast_kernels was only run on Hopper, not on {name}; install Transformer Engine for it."
    return ""


@torch.compiler.assume_constant_result  # Dynamo would warn of the cache
def is_supported() -> bool:
    return unsupported_reason() == ""


def operation(schema, setup_context=None, backward=None):
    """Return a decorator that registers a function `name` or `_name`, called with positional arguments, as
    the operation `name`. The decorated function calls the operation under a tracer, else the function. For
    setup_context and backward see `torch.library.register_autograd`.

    schema: arguments and results, such as "(Tensor x, Tensor(a!) out, float eps) -> Tensor", where `a!` marks
        a tensor that is written to.
    """

    def register(function):
        name = function.__name__.lstrip("_")
        LIBRARY.define(name + schema)
        op = getattr(torch.ops.fast_kernels, name).default
        arguments = op._schema.arguments
        tensor_places = [place for place, x in enumerate(arguments) if "Tensor" in str(x.type)]
        first_place, *other_places = tensor_places
        takes_lists = "[]" in schema

        def on_device(*args):
            """Call the function on the device of its arguments, which need not be the current one."""
            firsts = list(map(_first, args)) if takes_lists else args
            index = firsts[first_place].get_device()  # the first tensor of a schema is never None
            for place in other_places:
                x = firsts[place]
                if x is not None and x.get_device() != index:
                    raise _device_error(name, [firsts[other] for other in tensor_places])
            if index < 0 or index == torch._C._cuda_getDevice():  # CUDA is initialized: a tensor is on it
                return function(*args)
            with torch.cuda.device(index):
                return function(*args)

        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, on_device, key)
        torch.library.register_fake(op, function, lib=LIBRARY)
        if backward is None:
            @functools.wraps(function)
            def call(*args):
                # `is_tracing`, without a call more
                return op(*args) if is_compiling() or count_dispatch_modes() else on_device(*args)
            return call

        torch.library.register_autograd(op, backward, setup_context=setup_context, lib=LIBRARY)
        with_autograd = _autograd_function(name, on_device, setup_context, backward).apply

        @functools.wraps(function)
        def call_with_autograd(*args):
            tensors = [args[place] for place in tensor_places]
            return op(*args) if is_tracing() or not are_plain(tensors) else with_autograd(*args)
        return call_with_autograd

    return register


def are_plain(args):
    """Return whether nothing but autograd has to see an operation: no transform of torch.func, and no tensor
    of a class that defines what operations do, such as a Float8Tensor or a DTensor."""
    if is_transforming():
        return False
    # isinstance last: it takes 0.3 us for what is not a tensor
    return all(x is None or type(x) in PLAIN or not isinstance(x, torch.Tensor) for x in args)


def _autograd_function(name, function, setup_context, backward):
    """Return the autograd function that the dispatcher would make of an operation."""
    def forward(ctx, *inputs):
        output = function(*inputs)
        # with a separate setup_context PyTorch inspects forward's signature at each call
        setup_context(ctx, inputs, output)
        return output

    methods = dict(forward=staticmethod(forward), backward=staticmethod(backward))
    return type(name, (torch.autograd.Function,), methods)


def _first(x):
    """Return the first tensor of a list, None of an empty one; anything else as it is."""
    if isinstance(x, list):
        return x[0] if x else None
    return x


def _device_error(name, tensors):
    """Return a ValueError that names the devices of tensors (None is skipped)."""
    devices = ", ".join(sorted({str(x.device) for x in tensors if x is not None}))
    return ValueError(f"{name}: tensors on {devices}: all must be on one device; use .to()")


def input_names(class_name, names):
    """Return a named tuple type with a field for each input of an autograd function or an operation. It holds
    which inputs need a gradient, or their gradients, by default None. A backward function returns tuple(…) of
    it, since Dynamo drops gradients in a named tuple."""
    return namedtuple(class_name, names, defaults=[None] * len(names.split()))


def check_shape(name, shape, dtype=None, **tensors):
    """Raise ValueError unless every tensor but None is contiguous, of this shape, and of dtype if given."""
    for argument, x in tensors.items():
        if x is None:
            continue
        has_other_dtype = dtype is not None and x.dtype != dtype
        if x.shape != shape or has_other_dtype or not x.is_contiguous():
            raise ValueError(f"{name}: {argument} {tuple(x.shape)} {x.dtype}: must be {tuple(shape)} "
                             f"{dtype or x.dtype}, contiguous; call .contiguous()")


def check_aligned(name, **tensors):
    """Raise ValueError unless every tensor (None is skipped) starts at a multiple of 16 bytes."""
    if torch.compiler.is_compiling():
        return  # tensors have no address yet
    for argument, tensor in tensors.items():
        offset = 0 if tensor is None else tensor.data_ptr() % 16
        if offset:
            raise ValueError(f"{name}: {argument} starts {offset} bytes after a multiple of 16; use .clone()")


def addresses_of(tensors):
    """Return the tensors' addresses, (number of tensors,)."""
    return tuple(map(torch.Tensor.data_ptr, tensors))


_tables = OrderedDict()  # (device, addresses and sizes) -> tensors, least recently used first


def device_tables(device, key, make):
    """Return `make()`, tensors that are a function of `key` alone, addresses and sizes. Made once per key and
    kept on `device`, because a CUDA graph cannot record a copy from the host."""
    key = device, key
    tables = _tables.get(key)
    if tables is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("fast_kernels: a CUDA graph cannot record the copy of new tensors' addresses; "
                               "run the function once before the capture")
        tables = [table.to(device) for table in make()]
        _tables[key] = tables
        if len(_tables) > MAX_TABLES:  # sharded weights are gathered to other addresses
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return tables


def cached_tables():
    """Return the tables that are kept between calls. A CUDA graph that was captured must hold them."""
    return [table for tables in _tables.values() for table in tables]
