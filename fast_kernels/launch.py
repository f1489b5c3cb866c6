"""Launches of Triton kernels that cost the host less than Triton's own.

    @per_shape
    def _double_launch(rows):
        return Launch(_double_kernel, (rows,), N=rows, num_warps=4)

    _double_launch(len(x)).run(x, out)

Triton finds the compiled variant of a kernel anew at each launch: it binds the arguments by name, asks each
for its type and alignment, and builds a key of strings. Here grid and numbers are chosen once per shape, and
a launch looks its variant up by device, dtypes and alignment of the tensors.
"""

import functools

import triton
from triton.runtime import driver

MAX_LAUNCHES = 1024  # of one function: each batch length has its own
NO_HOOKS = (None, None, None)  # launch metadata, and what Triton's own profiler calls before and after

# Decorates a function that returns a Launch
per_shape = functools.lru_cache(MAX_LAUNCHES)


class Launch:
    """`kernel[grid](*tensors, **options)` on the current stream, for any tensors on the current device.

    Args:
        kernel: a function of triton.jit.
        grid: programs in one, two or three dimensions.
        options: all arguments after the tensors, in any order, also those that have a default, and num_warps.
            A number is always an int or always a float, since `per_shape` takes 1 and 1.0 for the same.
    """

    def __init__(self, kernel, grid, **options):
        self.kernel = kernel
        self.grid = grid
        self.options = options
        self.is_interpreted = not isinstance(kernel, triton.JITFunction)
        self.variants = {}  # {key of `run`: what it calls}

    def run(self, *tensors):
        """Launch the kernel. Any tensor but the first may be None."""
        if self.is_interpreted:
            self.kernel[self.grid](*tensors, **self.options)
            return
        device_index = tensors[0].get_device()
        addresses = []
        key = [device_index]  # and the dtypes
        address_bits = 0
        for x in tensors:
            if x is None:
                addresses.append(None)
                key.append(None)
            else:
                address = x.data_ptr()
                address_bits |= address
                addresses.append(address)
                key.append(x.dtype)
        if address_bits % 16:  # Triton compiles another variant for tensors that are not aligned
            key += [address is not None and address % 16 > 0 for address in addresses]
        key = tuple(key)
        variant = self.variants.get(key)
        if variant is None:
            compiled = self.kernel[self.grid](*tensors, **self.options)
            self.variants[key] = self._make_variant(compiled, len(tensors))
            return
        launch, get_stream, grid, binary, numbers = variant
        # what Triton's launcher takes: grid, stream, binary, then all arguments of the kernel, in its order
        launch(*grid, get_stream(device_index), *binary, *addresses, *numbers)

    def _make_variant(self, compiled, tensor_count):
        """Return what `run` calls, and what it passes beside stream and tensors."""
        grid = (*self.grid, 1, 1)[:3]
        binary = compiled.function, compiled.packed_metadata, *NO_HOOKS
        numbers = [self.options[name] for name in self.kernel.arg_names[tensor_count:]]
        return compiled.run, driver.active.get_current_stream, grid, binary, numbers
