"""CUDA graphs for a function that trains: `CudaGraph(function)` is called like the function.

    forward_backward = CudaGraph(forward_backward)
    loss = forward_backward((input_ids, labels), is_first_microbatch=True, is_last_microbatch=True)

Copy this file into a loop of your own: it needs PyTorch only. Without a GPU the function is called as it is.

Python needs longer to launch the thousand kernels of a small model's step than the GPU needs to run them. A
CUDA graph is one launch. Three ideas:

- Keyword arguments select a graph, and each combination has its own. So a step of 64 micro-batches is three
  graphs: the first casts weights to FP8 and overwrites gradients, the last reduces them over ranks.
- Calls run the function without a capture until each combination so far has had two of them. They are real
  steps, so nothing has to be restored; they allocate state, compile kernels and select algorithms, which a
  capture cannot.
- All memory that a replay reads or writes lives as long as the graphs. These calls and the capture allocate
  from a private pool, and `keep` returns what was allocated before, such as Transformer Engine's FP8
  state.

Reference: docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""
import contextlib
import gc
import warnings
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves, tree_map

EAGER_CALLS = 2  # of each variant, before a capture


@dataclass
class Variant:
    """The calls of a function with the same keyword arguments, and their graph."""

    shapes: str  # shapes and dtypes of the tensors, the same in every call
    eager_calls: int = 0  # without a graph
    graph: torch.cuda.CUDAGraph | None = None  # None until the capture
    # set by the capture:
    inputs: list | None = None  # the tensors that the graph reads
    output: torch.Tensor | None = None  # the tensor that it writes
    kept: object = None  # what `keep` has returned


class CudaGraph:
    """Replay a function on the GPU as CUDA graphs.

    The function takes tensors, or tuples of tensors, as positional arguments. They are copied to the memory
    that the graph reads. It returns a tensor or None, and each call returns a new tensor. Without a GPU, or
    with tensors on the CPU, each call runs the function.

    A capture fixes everything else: Python in the function does not run again. The shapes of the arguments,
    the settings of modules (dropout, an activation, eps, train and eval), hooks, the recipe, which parameters
    require gradients, and where parameters, gradients and optimizer state are in memory stay as they were.
    After a change of any of these call `recapture()`. With keywords that do not come again, such as those of
    a warm-up, call the function itself: the graph would wait for their second call. A learning rate has to be
    a tensor. Gradients that the function makes and also frees, by zero_grad(), need nothing. Others must keep
    their memory between calls: use zero_grad(set_to_none=False), or tensors of your own as
    nanote.ddp.Gradients does.
    """

    def __init__(self, function, keep=None):
        """keep: a function that returns objects whose tensors the graph uses. It is called before each
        capture, and its result lives as long as the graph."""
        self.function = function
        self.keep = keep
        self.stream = None  # of the calls before a capture and of the capture, as PyTorch requires
        if torch.cuda.is_available():
            self.stream = torch.cuda.Stream()
        self.recapture()

    def recapture(self) -> None:
        """Forget the graphs: the next calls run the function again, and then capture it as it is by then."""
        self.variants = {}  # {keyword arguments: Variant}
        if not torch.cuda.is_available():
            return
        self.pool = torch.cuda.MemPool()
        gc.collect()
        torch.cuda.empty_cache()  # a private pool cannot reuse memory that other pools cache

    def __call__(self, *arguments, **options):
        tensors = tree_leaves(arguments)
        check_arguments(tensors)
        is_on_gpu = tensors[0].is_cuda if tensors else torch.cuda.is_available()
        if not is_on_gpu:
            return copy_of(self.function(*arguments, **options))
        key = tuple(sorted(options.items()))
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        variant = self.variants.setdefault(key, Variant(shapes))
        if variant.shapes != shapes:
            raise ValueError(f"CUDA graph: tensors of {shapes}, and the graph is for {variant.shapes}; "
                             "pass tensors of one shape, or call recapture()")
        if variant.graph is None:
            if not self._can_capture():
                variant.eager_calls += 1
                return self._run(arguments, options)
            self._capture(variant, arguments, options)
        for static, tensor in zip(variant.inputs, tensors):
            static.copy_(tensor, non_blocking=True)
        variant.graph.replay()
        return copy_of(variant.output)

    def _can_capture(self) -> bool:
        """Return whether every variant so far has had its calls without a graph.

        A function may hand memory to its next call, as FSDP2 hands a sum of gradients from micro-batch to
        micro-batch. If the second micro-batch were captured in an earlier step than the first, its graph
        would add to the sum of that step, but the graph of the first begins another one.
        """
        return all(variant.eager_calls >= EAGER_CALLS for variant in self.variants.values())

    def _run(self, arguments, options):
        """Run the function itself, with memory of the private pool."""
        self.stream.wait_stream(torch.cuda.current_stream())
        # PyTorch selects the pool for a thread, so the backward pass has to run on this one.
        with (torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool),
              torch.autograd.set_multithreading_enabled(False)):
            output = self.function(*arguments, **options)
        torch.cuda.current_stream().wait_stream(self.stream)
        return copy_of(output)

    def _capture(self, variant, arguments, options):
        """Capture the function for a variant. Nothing runs on the GPU yet."""
        arguments = tree_map(torch.clone, arguments)
        kept = self.keep() if self.keep else None
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # to free memory that ranks share waits for the GPU, which a capture forbids
        try:
            with torch.cuda.graph(graph, pool=self.pool.id, stream=self.stream,
                                  capture_error_mode="thread_local"):
                output = self.function(*arguments, **options)
        except RuntimeError as error:
            _end_failed_capture(self.pool)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"CUDA graphs cannot capture this step: {str(error).splitlines()[0]}; call the "
                             "function without CudaGraph, or pass --cuda-graph off to train.py") from error
        variant.graph = graph
        variant.inputs = tree_leaves(arguments)
        variant.output = output
        variant.kept = kept


def check_arguments(arguments: list) -> None:
    """Raise TypeError or ValueError for arguments that a replay could not read."""
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            raise TypeError(f"CudaGraph: an argument is a {type(argument).__name__}: must be a tensor; pass "
                            "another value by keyword, and each value has its own graph")
    if len({tensor.is_cuda for tensor in arguments}) > 1:
        raise ValueError("CudaGraph: arguments on the CPU and on the GPU: must be on one; use .to()")


def copy_of(output):
    """Return a new tensor with the values of a function's output, which may be None."""
    return None if output is None else output.clone()


def _end_failed_capture(pool) -> None:
    """End a capture that failed: PyTorch 2.11 leaves the allocator and the random generator in it, and a
    later capture in this process would abort."""
    with contextlib.suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool.id)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the end of an empty graph's capture takes the generator out
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            pass
