"""Launches of Triton kernels that cost the host less than Triton's own.

Triton finds the compiled variant of a kernel anew at each launch: it binds the arguments by name, asks each
for its type and alignment, and builds a key of strings. The key of `launch` is a plain tuple: kernel, device,
dtypes, which tensors are not aligned, and values.
"""

import triton
from triton.runtime import driver

MAX_VARIANTS = 4096
UNALIGNED = "unaligned"  # in the key after the dtype of a tensor that starts at no multiple of 16 bytes
NO_HOOKS = (None, None, None)  # launch metadata, and what Triton's own profiler calls before and after
_variants = {}  # {key of `launch`: _Variant}


class _Variant:
    """A compiled kernel, and the values of the arguments that are passed by keyword."""

    def __init__(self, compiled, names, options):
        self.run = compiled.run
        self.head = compiled.function, compiled.packed_metadata, *NO_HOOKS
        self.tail = tuple([options[name] for name in names])


def launch(kernel, grid, *args, **options):
    """Launch `kernel[grid](*args, **options)` on the current stream. The tensors are on the current device.

    Args:
        kernel: a function of triton.jit. A number is always passed to it as an int, or always as a float.
        grid: programs in one, two or three dimensions.
        args: the leading arguments: tensors or None; the first is a tensor.
        options: the other arguments, in any order, and num_warps.
    """
    if not isinstance(kernel, triton.JITFunction):  # in the interpreter
        kernel[grid](*args, **options)
        return
    device_index = args[0].get_device()
    key = [kernel.fn, device_index]
    values = []
    for tensor in args:
        if tensor is None:
            key.append(None)
            values.append(None)
            continue
        address = tensor.data_ptr()
        key.append(tensor.dtype)
        if address % 16:  # Triton compiles another variant for it
            key.append(UNALIGNED)
        values.append(address)
    key = (*key, *options, *options.values())
    variant = _variants.get(key)
    if variant is None:
        compiled = kernel[grid](*args, **options)
        names = kernel.arg_names[len(args):]
        if len(_variants) == MAX_VARIANTS:  # each batch length has its own
            _variants.clear()
        _variants[key] = _Variant(compiled, names, options)
        return
    stream = driver.active.get_current_stream(device_index)
    x, y, z = (*grid, 1, 1)[:3]
    variant.run(x, y, z, stream, *variant.head, *values, *variant.tail)
