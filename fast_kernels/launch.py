"""Launches of Triton kernels that cost the host less than Triton's own.

Triton finds the compiled variant of a kernel anew at each launch: it binds the arguments by name, asks each
for its type and alignment, and builds a key of strings. `launch` finds it by a key of its own.
"""

import torch
import triton
from triton.runtime import driver

MAX_VARIANTS = 4096
_variants = {}  # {key of `launch`: _Variant}


class _Variant:
    """A compiled kernel, and the values of the arguments that are passed by keyword."""

    def __init__(self, compiled, names, options):
        self.run = compiled.run
        # what Triton passes on: the function, its metadata, and no hooks of Triton's own profiler
        self.head = compiled.function, compiled.packed_metadata, None, None, None
        self.tail = tuple([options[name] for name in names])


def launch(kernel, grid, *args, **options):
    """Do `kernel[grid](*args, **options)` on the current stream of the tensors' device, the current one.

    kernel: a function of triton.jit. grid: programs in one, two or three dimensions.
    args: the first arguments; all tensors are among them, and the first is one. options: the other arguments,
        numbers, types and words, in any order, and num_warps.
    """
    if not isinstance(kernel, triton.JITFunction):  # in the interpreter
        kernel[grid](*args, **options)
        return
    device_index = args[0].get_device()
    key = [kernel.fn, device_index]
    values = []
    addresses = 0  # all of them, or-ed
    for value in args:
        if isinstance(value, torch.Tensor):
            key.append(value.dtype)
            value = value.data_ptr()
            addresses |= value
        else:
            key.append(value)
        values.append(value)
    # Triton compiles a variant for each type, alignment and value that is part of this key
    key = (*key, addresses % 16 == 0, *options, *options.values())
    variant = _variants.get(key)
    if variant is None:
        compiled = kernel[grid](*args, **options)
        if addresses % 16 == 0:  # else Triton sees which tensors are not aligned
            names = kernel.arg_names[len(args):]
            if len(_variants) == MAX_VARIANTS:  # each length of a batch has its own
                _variants.clear()
            _variants[key] = _Variant(compiled, names, options)
        return
    stream = driver.active.get_current_stream(device_index)
    variant.run(*grid, *(1,) * (3 - len(grid)), stream, *variant.head, *values, *variant.tail)
