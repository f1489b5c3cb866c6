"""One optimizer step of train.py: the optimizer, and forward, backward, clipping and update, on a GPU as CUDA
graphs.

`config` is train.py's TrainConfig throughout. Notable, and why:
- FP8 weights are cast once a step, in the first micro step of a gradient accumulation (is_first_microbatch).
- AdamW keeps its moments, and the master copy of BF16 weights, in float32; only matrices decay (not norms and
  biases).
- A gradient that is not finite changes nothing: neither weights nor the optimizer's state, and the host is
  not asked.
"""
import contextlib
import itertools
import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fast_kernels
from nanote import cli, fp8


def recipe_of(config):
    """TE's recipe of a run, or None without FP8; ValueError for one that cannot run here."""
    return fp8.make_recipe(
        config.fp8_recipe, config.fp8_format, config.fp8_amax_history_len, config.fp8_amax_compute_algo,
        config.fp8_margin,
    )


def accelerate(model, config):
    """Put the fast kernels into a model as the options say; return a line about it, "" for other models."""
    if fp8.IS_REFERENCE or config.model != "optimized":
        return ""
    if not config.fast_kernels:
        return "fast kernels are off: --no-fast-kernels"
    report = fast_kernels.accelerate(
        model, blocks=config.fused_block, loss=config.fused_loss,
        dgrad_fast_accum_k=config.fp8_dgrad_fast_accum_k)
    return str(report) if config.fused_block else "fast kernels are off: --no-fused-block"


def make_optimizer(model, config):
    """AdamW with decay on matrices only; float32 masters where weights are kept in BF16 or FP8."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    moments = getattr(torch, config.moment_dtype)
    options = dict(lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8,
                   # with weights in FP8 there are no BF16 ones
                   store_param_remainders=config.param_remainders and not config.fp8_param)
    if parameters[0].is_cuda and not fp8.IS_REFERENCE and not config.fp8_param:
        from fast_kernels.adam import FastAdam  # needs Triton

        return FastAdam(groups, moment_dtype=moments, **options)
    masters = any(p.dtype != torch.float32 for p in parameters) or config.fp8_param
    optimizer = fp8.te.optimizers.FusedAdam(
        groups, adam_w_mode=True, master_weights=masters, master_weight_dtype=torch.float32,
        exp_avg_dtype=moments, exp_avg_sq_dtype=moments, **options,
    )
    fp8.init_master_weights(model, optimizer)
    return optimizer


def why_no_graph(config, device: torch.device) -> str:
    """The reason why a step of this run cannot be a CUDA graph; "" where it can."""
    reasons = [
        (device.type != "cuda" or fp8.IS_REFERENCE, "there is no GPU with Transformer Engine here"),
        (dist.is_initialized(), "several processes exchange gradients from Python"),
        (config.compile, "--compile takes its own, with --compile-mode reduce-overhead"),
        (config.gradient_checkpointing, "--gradient-checkpointing reads random states on the host"),
        (config.offload_activations > 0, "--offload-activations takes host memory anew in every step"),
        (config.attn_dropout > 0, "--attn-dropout's random numbers would repeat"),
        (config.fp8_param, "FusedAdam updates --fp8-param's weights from Python"),
    ]
    return next((reason for holds, reason in reasons if holds), "")


def compile_model(model, config):
    """Return the model as --compile, --compile-mode and --compile-fullgraph ask for."""
    if not config.compile:
        return model
    return torch.compile(model, mode=config.compile_mode, fullgraph=config.compile_fullgraph)


def wants_graph(config, device: torch.device) -> bool:
    reason = why_no_graph(config, device)
    if config.cuda_graph == "on" and reason:
        raise ValueError(f"--cuda-graph on: {reason}; leave the option out")
    return config.cuda_graph != "off" and not reason


class TrainStep:
    """One optimizer step: forward and backward of every micro-batch, clipping, update.

    On a GPU, the first call records the step as CUDA graphs, and each call replays them. Python takes longer
    to launch the thousand kernels of a small model's step than the GPU to run them; a graph is one launch.
    What a graph reads and writes stays where it is: token ids are copied in, gradients are overwritten and
    never freed, the learning rate is a tensor, and Transformer Engine's scales and histories are buffers
    already. Micro-batches need two graphs, since the first casts weights to FP8 and overwrites gradients, and
    the others do neither. What else a recording fixes must not change: batches of another shape, or another
    value of anything in `Fixed`, are a ValueError. `record` records the step again.
    """

    def __init__(self, model, net, optimizer, config, device: torch.device):
        """`net`: the model, or what compiles or parallelises it."""
        self.model, self.net, self.optimizer, self.config, self.device = model, net, optimizer, config, device
        self.graphed = wants_graph(config, device)
        self.graphs, self.inputs, self.fixed = {}, None, None

    def __call__(self, batches, lr: float, watch: bool = False):
        """Train one step; return the mean loss and the gradient norm before clipping, () float32 on the GPU.

        Args:
            batches: grad_accum tuples (input_ids, labels), each (B, S), or (input_ids, labels, cu_seqlens),
                see Loader.batch.
            watch: look at FP8's tensors in the first forward and backward pass (fp8.watch), without graphs.

        Raises:
            ValueError: the batches do not fit, or something that the recorded graphs fix has changed.
        """
        self._check_batches(batches, self.inputs if self.graphs else None)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if not self.graphed:
            return self.run(batches, watch)
        if not self.graphs:
            self.record(batches)
        self._check_unchanged()
        self.optimizer.write_options()
        if watch:
            kept = [(p, p.grad) for p in self.model.parameters()]
            self.optimizer.zero_grad(set_to_none=True)
            outcome = self.run(batches, watch)
            for parameter, gradient in kept:
                parameter.grad = gradient  # the graphs' own memory
            self.optimizer.prepare()
            return outcome
        for micro, batch in enumerate(batches):
            for kept, given in zip(self.inputs, batch):
                kept.copy_(given, non_blocking=True)
            self.graphs["rest" if micro else "first"].replay()
        self.graphs["update"].replay()
        return self.loss.clone(), self.norm.clone()

    def _check_batches(self, batches, recorded=None) -> None:
        """Raise ValueError unless these are grad_accum micro-batches, with graphs all of one shape: that of
        the `recorded` one, if there is one."""
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
        """Raise ValueError if something has changed that the recorded graphs do not see."""
        what = self.fixed.changed()
        if what:
            raise ValueError(f"{what} changed after the step was recorded as CUDA graphs, which do not see "
                             "it; call record(batches), or make the step with cuda_graph=\"off\"")

    def run(self, batches, watch=False):
        """The step, launched from Python."""
        total = torch.zeros((), device=self.device)
        for micro, batch in enumerate(batches):
            # ranks exchange gradients once a step
            waits = isinstance(self.net, DistributedDataParallel) and micro < len(batches) - 1
            with (self.net.no_sync() if waits else contextlib.nullcontext(),
                  fp8.watch(self.model) if watch and micro == 0 else contextlib.nullcontext()):
                total += self.forward_backward(batch, micro == 0)
        norm = self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def forward_backward(self, batch, first: bool):
        options = {}
        if self.config.compile and first:
            # From here on torch.compile's CUDA graphs may overwrite the last step's tensors. Left to guess,
            # PyTorch takes every call of a function that TE itself compiles for a new step, in backward too,
            # and overwrites what backward still needs. Not for each micro-batch: gradients are among them.
            torch.compiler.cudagraph_mark_step_begin()
        if self.config.grad_accum > 1 and not self.config.compile:  # TE's FP8 weight cache is not traceable
            options = {"is_first_microbatch": first}  # weights are cast to FP8 once a step
        loss = self.net(*batch, **options) / self.config.grad_accum
        # 1, but of a loss that is not finite NaN: then so are all gradients, and the gradients' norm, the
        # same on every rank, tells all
        loss.backward(1 + 0 * loss.detach())
        return loss.detach()

    def update(self):
        if hasattr(self.optimizer, "gradient_norm"):  # FastAdam clips as it reads the gradients
            norm = self.optimizer.gradient_norm()
            largest = self.config.grad_clip or math.inf
            # NaN, by which it skips a step: see there
            self.optimizer.step(grad_scale=(largest / (norm + 1e-6)).clamp(max=1.0) + 0 * norm)
            return norm
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None]
        ).float()
        # on a GPU this waits for it, which costs little where Python launches every kernel
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(), self.config.grad_clip or math.inf, norm
            )
            self.optimizer.step()
        return norm

    def record(self, batches) -> None:
        """Record the graphs. Nothing is trained by it: the passes that a recording must be preceded by leave
        the FP8 state, the random generator and the weights as they were. Raises ValueError for batches that
        do not fit."""
        self._check_batches(batches)
        accumulates = self.config.grad_accum > 1
        self.graphs = {}
        # what earlier passes left there is of no use to another stream, and a second time as much would be
        # taken
        torch.cuda.empty_cache()
        self.inputs = [tensor.clone() for tensor in batches[0]]
        generator = torch.cuda.get_rng_state(self.device)
        with _side_stream(), fp8.preserved_state(self.model):
            for micro in (0, 1, 0, 1) if accumulates else (0, 0):
                self.forward_backward(self.inputs, micro == 0)
                if not micro:
                    self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = torch.zeros((), device=self.device)

        def first():
            self.loss.copy_(self.forward_backward(self.inputs, True))

        def rest():
            self.loss.add_(self.forward_backward(self.inputs, False))

        def update():
            self.norm = self.update()

        pool, graphs = torch.cuda.graph_pool_handle(), {}
        with fp8.preserved_state(self.model):
            for name, function in {
                "first": first, **({"rest": rest} if accumulates else {}), "update": update,
            }.items():
                if name == "update":
                    self.optimizer.prepare()
                graphs[name] = _capture(function, pool)
        self.fixed = Fixed(self.model, self.config)
        self.graphs = graphs  # only now: after an error there are none
        torch.cuda.set_rng_state(generator, self.device)


class Fixed:
    """What CUDA graphs of a step fix: read when they are recorded, and again by `changed` before each replay.

    Modules, hooks and settings are listed once, since a walk through the model takes longer than the rest.
    Edits of a class or of a library are not seen.
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
        """Return the values by name."""
        model, chain = self.model, itertools.chain
        children = chain.from_iterable(map(dict.values, self.children))
        hooks = filter(None, chain(self.hooks, [p._backward_hooks for p in self.parameters],
                                   [p._post_accumulate_grad_hooks for p in self.parameters]))
        return {
            "config.grad_accum": self.config.grad_accum,
            "config.grad_clip": self.config.grad_clip,
            "model.config": _settings(model.config),
            "model.fp8_recipe": _settings(model.fp8_recipe),  # its repr leaves the two algorithms out
            "model.dgrad_fast_accum_k": getattr(model, "dgrad_fast_accum_k", None),
            "model.training": [settings["training"] for settings in self.settings],
            "the p of a dropout": [settings["p"] for settings in self.dropouts],
            "the kernel of an attention": [settings["kernel"] for settings in self.attentions],
            "the forward method of a module": [settings.get("forward") for settings in self.settings],
            "the set of modules and parameters": list(map(id, children)),
            "the set of hooks": list(chain.from_iterable(hooks)),
            "which parameters require gradients": [p.requires_grad for p in self.parameters],
            "where a parameter is in memory": [p.data_ptr() for p in self.parameters],
        }

    def changed(self) -> str:
        """Return the name of something that has changed, or ""."""
        return next((name for name, value in self.read().items() if value != self.values[name]), "")


def _settings(values) -> tuple:
    """Type and attributes of a configuration or recipe, to compare with later."""
    return type(values), dict(getattr(values, "__dict__", {}))


@contextlib.contextmanager
def _side_stream():
    """Run what is inside on a stream of its own, as passes before a recording must."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _capture(function, pool) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph


def _describe(batch) -> str:
    """Names, shapes and types of a micro-batch's tensors."""
    names = ("input_ids", "labels", "cu_seqlens")
    return ", ".join(f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                     for name, tensor in itertools.zip_longest(names[:len(batch)], batch, fillvalue="?"))


def warm_up_scales(model, batch) -> None:
    """Run four forward and backward passes without an update, after which the scales of delayed scaling are
    known.

    They start at 1, which flushes small gradients to zero, and behind a GEMM whose gradient is zero there is
    no amax for the next one. So the first pass finds the scale of the head, the second those of proj and fc2,
    which take the residual stream's gradient, the third those of qkv and fc1 behind them, and the fourth the
    ones of the stream with all branches in it. Without them a new run would lose its first steps, and one
    that was in BF16 so far would take wrong ones.
    """
    for _ in range(4):
        model(*batch).backward()
        model.zero_grad(set_to_none=True)


def first_compiled_pass(model, net, config, batch) -> None:
    """Compile: one forward and backward pass without an update.

    Raises:
        ValueError: in one line, what PyTorch cannot compile, and where. Called before a run writes anything.
    """
    try:
        with fp8.preserved_state(model):
            TrainStep(model, net, None, config, batch[0].device).forward_backward(batch, True)
    except torch._dynamo.exc.TorchDynamoException as error:
        breaks = config.compile_fullgraph and isinstance(error, torch._dynamo.exc.Unsupported)
        option, what = "--compile", "does not compile"
        if breaks:
            option, what = "--compile-fullgraph", "is not one graph"
        raise ValueError(f"{option}: model {config.model!r} with --fp8-recipe {config.fp8_recipe} {what}: "
                         f"{cli.in_a_line(error)}; leave {option} out") from error
    finally:
        model.zero_grad(set_to_none=True)
