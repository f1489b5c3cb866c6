"""One optimizer step: forward and backward of every micro-batch, clipping, update; on a GPU as CUDA graphs.

In a training loop of your own use `make_train_step`; train.py builds a `TrainStep` part by part. `config` is
a nanote.config.TrainConfig. Decisions:
- With gradient accumulation, weights are cast to FP8 once per step, in the first micro-batch
  (is_first_microbatch).
- A step whose gradient is not finite changes neither weights nor optimizer state, without asking the host.
"""
import contextlib
import functools
import gc
import itertools
import math
import warnings

import torch
from torch.distributed.fsdp import FSDPModule

from nanote import cli, fp8, fsdp_copies, models, parallel, peers
from nanote.config import TrainConfig, check_options
from nanote.gradients import make_gradients
from nanote.optimizers import fast_kernels, make_optimizer


def make_train_step(model, batch, **options) -> "TrainStep":
    """Return the training step of train.py, for a training loop of your own.

        train_step = make_train_step(model, (input_ids, labels))
        loss, grad_norm = train_step([(input_ids, labels)], lr=6e-4)

    A step is forward and backward pass of every micro-batch, clipping and update: with the fast kernels where
    they apply, and as CUDA graphs on a GPU. Under torchrun, call `train_step.close()` before
    dist.destroy_process_group().

    The loss is the mean over micro-batches and ranks of their mean losses. So a label counts for more in a
    micro-batch that has few (others are -100): fill all micro-batches about equally.

    `train_step.report` says which kernels run.

    Args:
        model: on its device, in BF16 for the kernels. Where its `fp8_recipe` is delayed scaling, its first
            scales are found.
        batch: a micro-batch, of the shape of those that follow.
        options: fields of TrainConfig, such as grad_accum, grad_clip, weight_decay, optimizer, cuda_graph or
            fast_kernels. Those of architecture, data and FP8 recipe have no effect: the model has them.
    """
    known = {"fp8_recipe": "none"}  # and what decides whether a step can be captured
    for name in "n_layer attn_dropout gradient_checkpointing checkpoint_every offload_activations".split():
        if hasattr(model.config, name):
            known[name] = getattr(model.config, name)
    config = TrainConfig(**known | options)
    check_options(config)
    report = apply_fast_kernels(model, config)
    parallel.shard(model, config, batch[0].device)
    model.train()
    if fp8.uses_delayed_scaling(model) and fp8.is_fresh(model):
        warm_up_scales(model, batch, config)
    net = compile_model(model, config)
    step = TrainStep(model, net, make_optimizer(model, config), config, batch[0].device)
    step.report = report
    return step


class TrainStep:
    """One optimizer step: forward and backward of every micro-batch, clipping, update.

    On a GPU, the first call captures the step as CUDA graphs, and every call replays them. Python needs
    longer to launch the thousand kernels of a small model's step than the GPU to run them; a graph is one
    launch. All memory that a graph uses is static: token ids are copied in, gradients are overwritten and
    never freed, the learning rate is a tensor, and Transformer Engine's scales and amax histories are buffers
    already. Micro-batches have graphs of their own where they differ, see `_graph_name`. Collectives are
    captured with the rest, so all ranks must capture and replay together.

    Everything else that a capture fixes must stay the same: batches of another shape, or a changed value in
    `CapturedValues`, raise ValueError. `record` captures the step again.
    """

    def __init__(self, model, net, optimizer, config, device: torch.device):
        """`net`: the model, or its compiled form, which is called in its place."""
        self.model, self.net, self.optimizer, self.config, self.device = model, net, optimizer, config, device
        self.nccl_reason = fsdp_copies.use_copy_engines(model, config)
        self._make_gradients()
        self.graphed = wants_graph(config, device)
        self.updates_in_graph = hasattr(optimizer, "prepare")  # FastAdam; any other is launched from Python
        self.model_is_ours = type(model).__module__ in {module for module, *_ in models.MODELS.values()}
        self.casts_once = models.takes_argument(type(model), "is_first_microbatch")
        self.graphs, self.inputs, self.captured = {}, None, None
        self.mark = object()  # FastAdam.used_by: the step that used the optimizer last

    def __call__(self, batches, lr: float, watch: bool = False):
        """Train one step; return the mean loss and the gradient norm before clipping, each () on the device.

        Args:
            batches: grad_accum tuples (input_ids, labels), each (B, S), or (input_ids, labels, cu_seqlens),
                see Loader.batch.
            watch: measure the FP8 tensors of the first micro-batch (fp8.watch), without graphs.

        Raises:
            ValueError: the batches do not fit, or something that the captured graphs fix has changed.
        """
        self._check_batches(batches, self.inputs if self.graphs else None)
        parallel.reshard(self.model)
        self._set_lr(lr)
        if self.graphed and not self.graphs:
            self._record_if_possible(batches)
        if not self.graphed:
            return self.run(batches, watch)
        self._check_unchanged()
        if self.updates_in_graph:
            self.optimizer.write_options()
        return self._run_between_replays(batches, watch) if watch else self._replay(batches)

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group_lr = lr * group.get("lr_factor", 1.0)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(group_lr)
            else:
                group["lr"] = group_lr

    def _run_between_replays(self, batches, watch):
        """Run the step without graphs, and leave the gradients of the graphs as they were."""
        graph_gradients = [(p, p.grad) for p in parallel.local_parameters(self.model)]
        self.optimizer.zero_grad(set_to_none=True)
        outcome = self.run(batches, watch)
        for parameter, gradient in graph_gradients:
            parameter.grad = gradient  # the memory that the graphs write to
        if self.updates_in_graph:
            self.optimizer.prepare()
        return outcome

    def _replay(self, batches):
        """Copy the token ids to the memory that the graphs read, and launch the graphs."""
        for micro, batch in enumerate(batches):
            for static, given in zip(self.inputs, batch):
                static.copy_(given, non_blocking=True)
            self.graphs[self._graph_name(micro)].replay()
        if not self.updates_in_graph:
            return self.loss.clone(), self.update()
        self.graphs["update"].replay()
        return self.loss.clone(), self.norm.clone()

    def run(self, batches, watch=False):
        """Run the step without graphs."""
        self._prepare_gradients()
        total = torch.zeros((), device=self.device)
        try:
            for micro, batch in enumerate(batches):
                with fp8.watch(self.model) if watch and micro == 0 else contextlib.nullcontext():
                    total += self.forward_backward(batch, micro)
            norm = self.update()
        except Exception:  # after which a loop of one's own may go on
            self.optimizer.zero_grad(set_to_none=True)
            parallel.forget_step(self.model)
            raise
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def forward_backward(self, batch, micro: int):
        """Accumulate the gradients of micro-batch `micro`, counted from 0; return its loss / grad_accum."""
        options, count = {}, self.config.grad_accum
        if isinstance(self.model, FSDPModule):  # reduce gradients once per step
            self.model.set_requires_gradient_sync(micro == count - 1)
        if self.config.compile and micro == 0:
            # From here on torch.compile's CUDA graphs may overwrite the last step's tensors. Without this
            # mark PyTorch takes every call of a function that TE itself compiles as a new step, in backward
            # too, and overwrites what backward still needs. Not in later micro-batches: gradients would be
            # lost.
            torch.compiler.cudagraph_mark_step_begin()
        if self.casts_once and count > 1 and not self.config.compile:
            # TE's FP8 weight cache is not traceable
            options = {"is_first_microbatch": micro == 0}  # weights are cast to FP8 once per step
        collecting = contextlib.nullcontext()
        if self.gradients is not None:
            collecting = self.gradients.micro_batch(first=micro == 0, last=micro == count - 1)
        with collecting:
            loss = self.net(*batch, **options) / count
            # Gradients are summed over the ranks: with as many labels on each, a rank's are those of one
            # process that has all samples, and so are their FP8 scales. NaN if the loss is not finite makes
            # the norm NaN on every rank.
            loss.backward((1 + 0 * loss.detach()) / parallel.world_size())
        if micro == count - 1:
            parallel.move_gradients(self.model)
        return loss.detach()

    def update(self):
        """Clip gradients and update the weights, unless the gradient norm is not finite; return the norm."""
        max_norm = self.config.grad_clip or math.inf
        if hasattr(self.optimizer, "gradient_norm"):  # FastAdam scales gradients as it reads them
            norm = parallel.norm_over_shards(self.optimizer.gradient_norm(), self.model)
            # + 0 * norm makes the scale NaN if the norm is not finite: FastAdam then skips the step
            self.optimizer.step(grad_scale=(max_norm / (norm + 1e-6)).clamp(max=1.0) + 0 * norm)
            return norm
        parameters = parallel.local_parameters(self.model)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = parallel.norm_over_shards(torch.nn.utils.get_total_norm(gradients).float(), self.model)
        if norm.isfinite():  # waits for the GPU, which costs little where Python launches every kernel
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            self.optimizer.step()
        return norm

    def record(self, batches) -> None:
        """Capture the step as CUDA graphs.

        Nothing is trained: the warm-up passes that a capture requires leave weights, FP8 state and random
        generator as they were. ValueError for batches that do not fit.
        """
        self._warm_up(batches)
        self._capture_graphs()

    def _warm_up(self, batches) -> None:
        """Run the passes that a capture requires."""
        self._check_batches(batches)
        self._prepare_gradients()
        self.graphs = {}
        # Shared memory of a deleted model waits for the GPU when it is freed, which must not be in a capture.
        gc.collect()
        # Memory cached by earlier passes cannot be reused on the side stream, which would allocate as much
        # again.
        torch.cuda.empty_cache()
        self.inputs = [tensor.clone() for tensor in batches[0]]
        generator = torch.cuda.get_rng_state(self.device)
        try:
            with _side_stream(), fp8.preserved_state(self.model):
                for micro in 2 * list(self._first_micro_batches().values()):
                    self.forward_backward(self.inputs, micro)
                    if micro == 0:
                        self.optimizer.zero_grad(set_to_none=True)
        finally:
            torch.cuda.set_rng_state(generator, self.device)
        self.optimizer.zero_grad(set_to_none=True)

    def _capture_graphs(self) -> None:
        """Capture the graphs, after the passes of `_warm_up`."""
        self.loss = torch.zeros((), device=self.device)
        generator = torch.cuda.get_rng_state(self.device)

        def run_micro_batch(micro):
            if micro == 0:
                self.loss.zero_()
            self.loss.add_(self.forward_backward(self.inputs, micro))

        def run_update():
            self.norm = self.update()

        pool, graphs = torch.cuda.graph_pool_handle(), {}
        try:
            with fp8.preserved_state(self.model):
                for name, micro in self._first_micro_batches().items():
                    graphs[name] = _capture(functools.partial(run_micro_batch, micro), pool)
                if self.updates_in_graph:
                    self.optimizer.prepare()
                    graphs["update"] = _capture(run_update, pool)
        finally:
            torch.cuda.set_rng_state(generator, self.device)
        self.captured = CapturedValues(self.model, self.config)
        self.graphs = graphs  # last, so that there are none after an error

    def _record_if_possible(self, batches) -> None:
        """Do what `record` does. If a model of the user's own cannot be captured, or the collectives of
        several ranks, steps run without graphs: then on every rank, because captured collectives would not
        meet those that another rank launches from Python."""
        several, reason = parallel.world_size() > 1, ""
        self._warm_up(batches)  # an error in it raises: other ranks may wait in a collective of these passes
        try:
            self._capture_graphs()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            can_be_captured = self.model_is_ours and not several and not isinstance(self.model, FSDPModule)
            if self.config.cuda_graph == "on" or can_be_captured:
                raise
            reason = cli.in_a_line(error)
        if several:
            reason = parallel.reason_of_any_rank(reason)
        if reason and isinstance(self.model, FSDPModule):  # which has lost track of what it has gathered
            raise ValueError(f"this sharded model cannot be captured as CUDA graphs: {reason}; pass "
                             "--cuda-graph off")
        if reason:
            self.graphed, self.graphs = False, {}
            self.optimizer.zero_grad(set_to_none=True)  # gradients in the memory of the capture
            warnings.warn(f"CUDA graphs are off, and steps are launched from Python: {reason}", stacklevel=3)

    def _first_micro_batches(self) -> dict[str, int]:
        """Return the names of the step's graphs, each with the first micro-batch that replays it."""
        first_with = {}
        for micro in range(self.config.grad_accum):
            first_with.setdefault(self._graph_name(micro), micro)
        return first_with

    def _graph_name(self, micro: int) -> str:
        """Return the name of the graph of micro-batch number `micro`: the first casts weights to FP8 and
        overwrites gradients, the last reduces them over ranks."""
        if micro == 0:
            return "first"
        reduces = self.gradients is not None or isinstance(self.model, FSDPModule)
        return "last" if reduces and micro == self.config.grad_accum - 1 else "rest"

    def gather_state(self) -> None:
        """Give every rank the whole optimizer state, for optimizer.state_dict(). All ranks must call this."""
        peers.gather_state(self.optimizer)

    def close(self) -> None:
        """Free the CUDA graphs: destroy_process_group() would wait forever for the collectives in them."""
        self.graphs = {}

    def _make_gradients(self) -> None:
        """Make the gradient buffers, for the current config.grad_accum."""
        self.gradients, self.made_for = make_gradients(self.model, self.config), self.config.grad_accum
        self.undivided_reason = peers.divide_update(self.model, self.optimizer, self.gradients, self.config)

    def _prepare_gradients(self) -> None:
        """Make the gradient buffers that a changed config.grad_accum needs. Restore what this step needs,
        after parameters were moved or another step has used the optimizer."""
        if self.config.grad_accum != self.made_for:
            self._make_gradients()
        divided_among = None if self.undivided_reason else self.gradients.peers
        if divided_among is not None:
            divided_among.weights.hold()
        if self._another_used_optimizer():
            self.optimizer.divide(divided_among)
            self.optimizer.used_by = self.mark

    def _another_used_optimizer(self) -> bool:
        """Return whether the tables of FastAdam are those of another step."""
        return getattr(self.optimizer, "used_by", self.mark) is not self.mark

    def _check_batches(self, batches, recorded=None) -> None:
        """Raise ValueError unless these are grad_accum micro-batches.

        With graphs all must have one shape, that of the captured batch `recorded` if there is one.
        """
        count, wanted = len(batches), self.config.grad_accum
        if count != wanted:
            then = " and call record(batches)" if self.graphed else ""
            other = f", or set grad_accum={count}{then}" if count else ""
            raise ValueError(f"{cli.counted(count, 'micro-batch', 'micro-batches')}: grad_accum is {wanted}, "
                             f"by which the loss is divided; pass {wanted}{other}")
        expected = _describe(recorded or batches[0])
        for number, batch in enumerate(batches, 1):
            found = _describe(batch)
            if len(batch) not in (2, 3) or batch[0].shape != batch[1].shape:
                raise ValueError(f"micro-batch {number} of {count}: {found}; pass (input_ids, labels), or "
                                 "cu_seqlens as a third, with a label for each token (-100 for none)")
            if self.graphed and found != expected:
                raise ValueError(f"micro-batch {number} of {count}: {found}; this step's CUDA graphs are for "
                                 f"{expected}; pass batches of one shape, or make the step with "
                                 "cuda_graph=\"off\"")

    def _check_unchanged(self) -> None:
        """Raise ValueError if something has changed that the captured graphs fix."""
        what = self.captured.changed()
        if self._another_used_optimizer():
            what = "the step that uses the optimizer"
        if what:
            raise ValueError(f"{what} changed after the step was recorded as CUDA graphs, which do not see "
                             "it; call record(batches), or make the step with cuda_graph=\"off\"")


METHODS = ("locate", "run_block", "output", "cross_entropy")  # those that a model's forward calls


class CapturedValues:
    """The values that a step's CUDA graphs fix: read at capture, and again by `changed` before each replay.

    The dictionaries of modules, hooks and settings are listed once, because walking the model takes longer
    than reading them. Changes of a class or of a library are not detected.
    """

    def __init__(self, model, config):
        self.model, self.config, self.parameters = model, config, list(model.parameters())
        modules, every = list(model.modules()), torch.nn.modules.module
        self.settings = [vars(module) for module in modules]
        self.dropouts = [settings for settings in self.settings if "p" in settings]
        self.attentions = [settings for settings in self.settings if "kernel" in settings]
        self.children = [children for m in modules for children in (m._parameters, m._modules) if children]
        self.hooks = [every._global_forward_hooks, every._global_forward_pre_hooks,
                      every._global_backward_hooks, every._global_backward_pre_hooks]
        for m in modules:
            self.hooks += m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
        self.values = self.read()

    def read(self) -> dict:
        """Return the current values by name."""
        model, chain = self.model, itertools.chain
        children = chain.from_iterable(map(dict.values, self.children))
        hooks = filter(None, chain(self.hooks, [p._backward_hooks for p in self.parameters],
                                   [p._post_accumulate_grad_hooks for p in self.parameters]))
        return {
            "config.grad_accum": self.config.grad_accum,
            "config.grad_clip": self.config.grad_clip,
            "model.config": _settings(getattr(model, "config", None)),
            "model.fp8_recipe": _settings(getattr(model, "fp8_recipe", None)),
            "model.dgrad_fast_accum_k": getattr(model, "dgrad_fast_accum_k", None),
            "model.logits_rounding": getattr(model, "logits_rounding", None),
            "model.training": [settings["training"] for settings in self.settings],
            "the p of a dropout": [settings["p"] for settings in self.dropouts],
            "the kernel of an attention": [settings["kernel"] for settings in self.attentions],
            "the forward method of a module": [settings.get("forward") for settings in self.settings],
            "a method of the model": [vars(model).get(name) for name in METHODS],
            "the mix of an attention": [settings.get("mix") for settings in self.attentions],
            "the attend of an attention": [settings.get("attend") for settings in self.attentions],
            "the set of modules and parameters": list(map(id, children)),
            "the set of hooks": list(chain.from_iterable(hooks)),
            "which parameters require gradients": [p.requires_grad for p in self.parameters],
            "where a parameter is in memory": [parallel.local(p).data_ptr() for p in self.parameters],
        }

    def changed(self) -> str:
        """Return the name of a value that has changed since the capture, or ""."""
        for name, value in self.read().items():
            if value != self.values[name]:
                return name
        return ""


def _settings(values) -> tuple:
    """Return the type and attributes of a config or recipe, for comparison (its repr is incomplete)."""
    return type(values), dict(getattr(values, "__dict__", {}))


@contextlib.contextmanager
def _side_stream():
    """Run the passes that precede a capture on another CUDA stream, as PyTorch requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _capture(function, pool) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
    except RuntimeError:
        # PyTorch 2.11 leaves the random generator in a capture that failed: dropout would raise an error
        # from then on. The end of another capture takes it out.
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is empty
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                pass
        raise
    return graph


def _describe(batch) -> str:
    """Return names, shapes and types of a micro-batch's tensors, for a message."""
    names = ("input_ids", "labels", "cu_seqlens")
    return ", ".join(f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                     for name, tensor in itertools.zip_longest(names[:len(batch)], batch, fillvalue="?"))


# ---------------------------------------------------------------- before the first step

def recipe_of(config):
    """Return TE's recipe, or None without FP8. ValueError if the GPU does not support it."""
    return fp8.make_recipe(
        config.fp8_recipe, config.fp8_format, config.fp8_amax_history_len, config.fp8_amax_compute_algo,
        config.fp8_margin,
    )


def weight_dtype(config, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights of a run, which is that of all that is not in FP8."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def apply_fast_kernels(model, config):
    """Put the fast kernels into a model as the options say; return a line about it, "" for other models."""
    if fp8.IS_REFERENCE or not (config.model == "optimized" or models.is_file(config.model)):
        return ""
    if not config.fast_kernels:
        return "fast kernels are off: --no-fast-kernels"
    if fast_kernels is None:
        return "fast kernels are off: there is no folder fast_kernels"
    report = fast_kernels.accelerate(
        model, blocks=config.fused_block, loss=config.fused_loss,
        dgrad_fast_accum_k=config.fp8_dgrad_fast_accum_k, logits_rounding=config.fp8_logits_rounding)
    return str(report)


def compile_model(model, config):
    """Return the model, compiled if --compile says so."""
    if not config.compile:
        return model
    return torch.compile(model, mode=config.compile_mode, fullgraph=config.compile_fullgraph)


def wants_graph(config, device: torch.device) -> bool:
    """Return whether steps are captured as CUDA graphs. ValueError if --cuda-graph on is impossible."""
    reason = graph_unsupported_reason(config, device)
    if config.cuda_graph == "on" and reason:
        raise ValueError(f"--cuda-graph on: {reason}; leave the option out")
    return config.cuda_graph != "off" and not reason


def graph_unsupported_reason(config, device: torch.device) -> str:
    """Return why a step of this run cannot be captured as CUDA graphs; "" if it can."""
    reasons = [
        (device.type != "cuda" or fp8.IS_REFERENCE, "there is no GPU with Transformer Engine here"),
        (config.compile, "--compile makes its own, with --compile-mode reduce-overhead"),
        (config.gradient_checkpointing, "--gradient-checkpointing reads random states on the host"),
        (config.offload_activations > 0, "--offload-activations allocates host memory in every step"),
        (config.attn_dropout > 0, "--attn-dropout's random numbers would repeat"),
        (config.fp8_param, "FusedAdam updates --fp8-param's weights from Python"),
    ]
    return next((reason for holds, reason in reasons if holds), "")


def warm_up_scales(model, batch, config=None) -> None:
    """Find the first scales of delayed scaling: run four forward and backward passes without an update.

    Scales start at 1, which flushes small gradients to zero, and a GEMM whose gradient is zero passes no amax
    to the next one. So the first pass finds the scale of lm_head; the second those of proj and fc2, which
    receive the gradient of the residual; the third those of qkv and fc1 behind them; the fourth those of the
    residual with the gradients of all branches. Without this a new run would lose its first steps, and a run
    resumed from BF16 would take wrong ones.

    `config`: its grad_accum divides the loss, as in a step.
    """
    divisor = parallel.world_size() * (config.grad_accum if config else 1)
    for _ in range(4):
        (model(*batch) / divisor).backward()
        model.zero_grad(set_to_none=True)


def first_compiled_pass(model, net, config, batch) -> None:
    """Compile the model by one forward and backward pass without an update, before a run writes anything.

    Raises:
        ValueError: what PyTorch cannot compile and where, in one line.
    """
    try:
        with fp8.preserved_state(model):
            torch.compiler.cudagraph_mark_step_begin()
            net(*batch).backward()
    except torch._dynamo.exc.TorchDynamoException as error:
        breaks = config.compile_fullgraph and isinstance(error, torch._dynamo.exc.Unsupported)
        option, what = "--compile", "does not compile"
        if breaks:
            option, what = "--compile-fullgraph", "is not one graph"
        raise ValueError(f"{option}: model {config.model!r} with --fp8-recipe {config.fp8_recipe} {what}: "
                         f"{cli.in_a_line(error)}; leave {option} out") from error
    finally:
        model.zero_grad(set_to_none=True)
