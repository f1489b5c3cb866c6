"""Compare a model in FP8 with the same model without FP8: `python doctor.py --model my_model.py:MyModel`.

FP8 rounds, so the loss and the gradients differ in any model. By how much an edit may differ is measured on
the file that it started from, model_te_optimized.py or model_te_fast.py, with the same engine, size and
seeds. A gap is |in FP8 - without| / |without| over the measured steps.

A module that computes a wrong gradient spoils the gradients of the modules before it, and one with a wrong
output those of all. So if gradients are off, `compare` names the first module whose output is off, too, or
else the last parameter whose gradient is.
"""
import dataclasses
import importlib.util
import math
import os
import re
import sys
import traceback
import unittest.mock
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from nanote import models, recipes
from nanote.config import in_a_line

ROOT = Path(__file__).resolve().parent.parent
# Fields of a config; the others keep their defaults
SIZES = dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
ROWS = 2  # of 32 tokens; Triton's interpreter takes a second for each pass of 128
FIRST_STEPS, MEASURED_STEPS = 4, 4  # a weight that starts at zero has a scale after its first steps
FACTOR = 2  # an edit may have this times the gap of the unedited file; those of examples/edits have up to 1.4
LOSS_GAP = 1e-3  # and this gap of the loss in any case: that of the unedited file is below 1e-4
ENGINES = {"transformer_engine": "te", "fast_kernels": "fast", "te_reference": "reference"}  # NANOTE_ENGINE


@dataclasses.dataclass
class Gaps:
    """Relative differences between a model in FP8 and without; of outputs in the order of execution."""

    loss: float
    outputs: dict[str, float]  # {module: gap}
    gradients: dict[str, float]  # {parameter: gap}
    in_fp8: set[str]  # the modules whose forward pass ran in FP8


class PassError(Exception):
    """A forward or backward pass in FP8 failed."""


def check_model(name):
    """Yield (status, line, fix) for each check of the model path/to/file.py:Class; fail: a module is off.

    Raises ValueError for a file, a class or a machine with which there is nothing to compare."""
    edited, unedited = find_models(name)
    try:
        model, twin = build(*edited), build(*edited, use_fp8=False)
    except Exception as error:  # whatever the user's file raises
        reason = f"{type(error).__name__}: {in_a_line(error)}"
        raise ValueError(f"--model {name}: cannot be built: {reason}") from error
    batch = make_batch(0, edited[1])
    models.check_first_pass(twin, batch)
    file = Path(sys.modules[unedited[0].__module__].__file__).name
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    yield "ok", f"{name} in {dtype} on {describe_engine(edited[0])}, compared with {file}", ""
    try:
        gaps = measure(model, twin)
    except PassError as error:
        yield "fail", str(error), "guide/changing_the_model.md says what FP8 asks of an edit"
        return
    yield from check_gemms(model, gaps.in_fp8)
    yield from compare(gaps, measure(build(*unedited), build(*unedited, use_fp8=False)), file)
    yield check_graph(edited, unedited, batch, file)


# ---------------------------------------------------------------- the edited and the unedited model

def find_models(name):
    """Return (model class, config) of a file and of the file of the kit that it started from."""
    if not models.is_file(name):
        raise ValueError(f"--model {name}: must be path/to/file.py:Class, as in my_model.py:MyModel")
    try:
        models.load_file(name)
    except ValueError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "triton":
            raise ValueError(f"--model {name}: fast_kernels needs Triton: pip install triton") from None
        raise
    model_class, config_class = models.model_classes(name)
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    if "use_fp8" not in fields:
        raise ValueError(f"--model {name}: {config_class.__name__} has no field use_fp8, so it does not "
                         "train in FP8; guide/changing_the_model.md says how it can")
    sizes = dict(SIZES)
    if isinstance(fields.get("n_kv_head"), int):  # grouped-query attention is the file's default
        sizes["n_kv_head"] = 1
    config = models.make_model_config(name, sizes)
    engine = find_engine(model_class)
    if engine == "fast":
        prepare_fast_kernels(name)
    is_fused = any("fast_kernels.fused" in names for names in imported(model_class))
    file, base, base_config = ("model_te_fast", *models.FAST[1:]) if is_fused else models.MODELS["optimized"]
    module = load_unedited(file, engine)
    return (model_class, config), (getattr(module, base), same_config(getattr(module, base_config), config))


def imported(model_class):
    """Yield the modules' names that the files of a class and of its bases have imported."""
    for base in model_class.__mro__:
        values = vars(sys.modules[base.__module__]).values()
        yield {getattr(value, "__name__", "") for value in values if isinstance(value, type(sys))}


def find_engine(model_class):
    """Return the engine, as in NANOTE_ENGINE, that the file of a class has imported; else the kit's own."""
    for names in imported(model_class):
        for name in names:
            if name.partition(".")[0] in ENGINES and name != "fast_kernels.fused":
                return ENGINES[name.partition(".")[0]]
    return recipes.ENGINE


def prepare_fast_kernels(name):
    """Make fast_kernels run on this machine: on Hopper, or without a GPU in Triton's interpreter."""
    from fast_kernels import modules
    if not torch.cuda.is_available():
        from fast_kernels import interpreter
        interpreter.install()
    elif reason := modules.unsupported_reason():
        raise ValueError(f"--model {name}: {reason} Without the GPU it is checked in Triton's interpreter: "
                         f'CUDA_VISIBLE_DEVICES="" python doctor.py --model {name}')


def load_unedited(file, engine):
    """Import a model file of the kit as a new module that uses this engine."""
    spec = importlib.util.spec_from_file_location(f"unedited_{file}", ROOT / f"{file}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.dict(os.environ, NANOTE_ENGINE=engine):
        spec.loader.exec_module(module)
    return module


def same_config(config_class, edited):
    """Return a config of the unedited model with those values of the edited one that it has and accepts."""
    names = {field.name for field in dataclasses.fields(config_class)}
    values = dict(SIZES)
    for name, value in dataclasses.asdict(edited).items():
        try:
            if name in names:
                config_class(**values | {name: value})
                values[name] = value
        except ValueError:  # an activation, say, that the edit has added
            continue
    return config_class(**values)


def build(model_class, config, use_fp8=True):
    """Return the model in training mode, on the GPU if there is one."""
    config = dataclasses.replace(config, use_fp8=use_fp8)
    is_cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if is_cuda or find_engine(model_class) == "fast" else torch.float32
    torch.manual_seed(0)
    return model_class(config).to("cuda" if is_cuda else "cpu", dtype)


def describe_engine(model_class):
    engine = find_engine(model_class)
    if engine == "fast" and not torch.cuda.is_available():
        return "fast_kernels in Triton's interpreter"
    return {"te": "Transformer Engine", "fast": "fast_kernels", "reference": "te_reference"}[engine]


# ---------------------------------------------------------------- the gaps

def make_batch(step, config):
    """Return random token ids and labels of a config's vocabulary."""
    generator = torch.Generator().manual_seed(step)
    length = min(SIZES["n_positions"], config.n_positions)
    tokens = torch.randint(config.vocab_size, (ROWS, length + 1), generator=generator)
    tokens = tokens.to("cuda" if torch.cuda.is_available() else "cpu")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure(model, twin) -> Gaps:
    """Train a model in FP8 for some steps, and run its twin without FP8 on the weights of each step."""
    losses, outputs, gradients, in_fp8 = Sums(), Sums(), Sums(), set()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run_pass(model, partial(recipes.find_first_scales, model, [make_batch(0, model.config)], 1))
    for step in range(FIRST_STEPS + MEASURED_STEPS):
        batch = make_batch(step, model.config)
        loss, of_model = run_pass(model, partial(train_pass, model, batch, step, in_fp8))
        if step >= FIRST_STEPS:
            copy_weights(model, twin)
            expected_loss, of_twin = train_pass(twin, batch, step)
            losses.add("loss", loss, expected_loss)
            for name in of_twin:
                for tensor, expected in zip(of_model.get(name, ()), of_twin[name]):
                    outputs.add(name, tensor, expected)
            for (name, parameter), expected in zip(model.named_parameters(), twin.parameters()):
                gradients.add(name, parameter.grad, expected.grad)
        optimizer.step()
    floors = gradients.floors_of_modules()
    return Gaps(losses.gaps()["loss"], outputs.gaps(), gradients.gaps(floors), in_fp8)


@torch.no_grad()
def copy_weights(model, twin):
    for source, target in zip((*model.parameters(), *model.buffers()), (*twin.parameters(), *twin.buffers())):
        target.copy_(source)


def train_pass(model, batch, seed, in_fp8=None):
    """Run a forward and a backward pass; return the loss and {module: its outputs}. Add the modules whose
    forward pass runs in FP8 to the set `in_fp8`."""
    torch.manual_seed(seed)  # of dropout
    model.zero_grad(set_to_none=True)
    with recorded_outputs(model) as outputs:
        loss = model(*batch)
    if in_fp8 is not None:
        in_fp8.update(name for name, module in model.named_modules() if runs_in_fp8(module))
    loss.backward()
    return loss.detach(), outputs


@contextmanager
def recorded_outputs(model):
    """Record the tensors that each module returns, in the order of execution."""
    outputs = {}

    def record(name, module, arguments, output):
        tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.dim() > 1]
        if tensors:
            outputs.setdefault(name, []).extend(tensor.detach().clone() for tensor in tensors)

    handles = [module.register_forward_hook(partial(record, name)) for name, module in model.named_modules()
               if name]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class Sums:
    """Sums of squares, by name, from which relative gaps follow."""

    def __init__(self):
        self.differences, self.expected, self.sizes = {}, {}, {}

    def add(self, name, tensor, expected):
        """Add a tensor and its expected values; None is zero."""
        present = tensor if tensor is not None else expected
        if present is None:
            return
        tensor, expected = (torch.zeros_like(present) if x is None else x for x in (tensor, expected))
        difference = (tensor.double() - expected.double()).norm().item()
        self.differences[name] = self.differences.get(name, 0) + difference**2
        self.expected[name] = self.expected.get(name, 0) + expected.double().norm().item()**2
        self.sizes[name] = present.numel()

    def gaps(self, floors=None):
        """Return {name: gap}, without what is always zero. floors: {name: the least sum to divide by}."""
        gaps = {}
        for name, difference in self.differences.items():
            expected = max(self.expected[name], (floors or {}).get(name, 0))
            if expected:
                gaps[name] = (difference / expected)**0.5
            elif difference:
                gaps[name] = math.inf
        return gaps

    def floors_of_modules(self):
        """Return for each parameter the sum that its gradient had if its elements were as large as those of
        its module on average. The gradient of a key's bias is zero but for rounding, since softmax does not
        depend on it."""
        sums, sizes = {}, {}
        for name, expected in self.expected.items():
            module = name.rpartition(".")[0]
            sums[module] = sums.get(module, 0) + expected
            sizes[module] = sizes.get(module, 0) + self.sizes[name]
        modules = {name: name.rpartition(".")[0] for name in self.expected}
        return {name: self.sizes[name] * sums[module] / sizes[module] for name, module in modules.items()}


def run_pass(model, function):
    """Call `function`. An exception becomes a PassError that names the module in whose code it was raised."""
    try:
        return function()
    except Exception as error:  # whatever the user's file raises
        names = {id(module): name for name, module in model.named_modules() if name}
        inside = [names[id(frame.f_locals["self"])] for frame, _ in traceback.walk_tb(error.__traceback__)
                  if id(frame.f_locals.get("self")) in names]
        where = inside[-1] if inside else type(model).__name__
        raise PassError(f"{where}: only in FP8: {type(error).__name__}: {in_a_line(error)}") from error


# ---------------------------------------------------------------- what is said about them

def kind_of(name):
    """Return a name without the number of its block: blocks.3.attn.qkv -> blocks.*.attn.qkv."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def compare(edited: Gaps, unedited: Gaps, file):
    """Yield a result for the loss, and for the module that is off or for all gradients."""
    limit = max(FACTOR * unedited.loss, LOSS_GAP)
    status = "ok" if edited.loss <= limit else "fail"
    yield status, f"loss: changes by {edited.loss:.3%} in FP8; {file}: {unedited.loss:.3%}", ""

    expected, largest = expected_gaps(edited.gradients, unedited.gradients)
    off = [name for name, gap in edited.gradients.items() if not gap <= FACTOR * expected[name]]
    if off:
        of_outputs, _ = expected_gaps(edited.outputs, unedited.outputs)
        for name, gap in edited.outputs.items():
            if not gap <= FACTOR * of_outputs[name]:
                yield failed(name, "output", gap, of_outputs[name], file)
                return
        yield failed(off[-1], "gradient", edited.gradients[off[-1]], expected[off[-1]], file)
        if off[:-1]:
            others = unique(kind_of(name.rpartition(".")[0]) for name in off[:-1])
            yield "info", f"off, too, with what comes after it in the backward pass: {others}", ""
        return
    if not edited.gradients:
        yield "fail", "every gradient is zero", "compute the loss from parameters that are trained"
        return
    ratios = {name: gap / expected[name] for name, gap in edited.gradients.items()}
    worst = max(ratios, key=ratios.get)
    yield "ok", f"{len(ratios)} gradients: change by at most {max(edited.gradients.values()):.1%} in FP8", ""
    yield "ok", f"the most, beside {file}: {worst}, {ratios[worst]:.2f} times; up to {FACTOR} is right", ""


def expected_gaps(edited: dict, unedited: dict):
    """Return for each name of an edited model the gap of its kind in the unedited one, of a new kind the
    largest; and the largest."""
    by_kind = {}
    for name, gap in unedited.items():
        by_kind[kind_of(name)] = max(gap, by_kind.get(kind_of(name), 0))
    largest = max(by_kind.values())
    return {name: by_kind.get(kind_of(name)) or largest for name in edited}, largest


def failed(name, what, gap, expected, file):
    line = (f"{name}: its {what} changes by {gap:.1%} in FP8; {file}: {expected:.1%}, so at most "
            f"{FACTOR * expected:.1%}")
    return "fail", line, "look at what it does in FP8 only; guide/changing_the_model.md says what FP8 asks"


def check_gemms(model, in_fp8):
    """Yield which GEMMs ran in FP8, and which did not, with the reason. `in_fp8`: see Gaps."""
    found, others, recomputed = [], {}, []  # kinds of GEMMs; {reason: kinds}; modules
    for name, module, gemm, weight in gemms(model):
        reason = reason_against_fp8(module, weight, name in in_fp8)
        (others.setdefault(reason, []) if reason else found).append(kind_of(gemm))
        if name in in_fp8 and not runs_in_fp8(module):
            recomputed.append(name)
    total = len(found) + sum(map(len, others.values()))
    if found:
        yield "ok", f"{len(found)} of {total} GEMMs in FP8: {unique(found)}", ""
    else:
        fix = "call te's modules inside self.autocast() in forward"
        yield "fail", f"{type(model).__name__}: none of {total} GEMMs runs in FP8", fix
    for reason, kinds in others.items():
        yield "info", f"not in FP8: {unique(kinds)}: {reason}", ""
    if recomputed:
        line = f"{recomputed[0]}: in FP8 in the forward pass, but recomputed without FP8 in the backward pass"
        yield "fail", line, "te.checkpoint(block, x), with te imported from the model file"


def gemms(model):
    """Yield (module's name, module, GEMM's name, weight) of each linear layer."""
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not isinstance(module, nn.Embedding):
                part = own.removesuffix("weight").removesuffix("_")  # fc1, fc2, or nothing
                yield name, module, f"{name}.{part}".rstrip("."), parameter


def runs_in_fp8(module) -> bool:
    """Return whether the last pass of a module was in FP8."""
    return bool(getattr(module, "fp8_meta", {}).get("fp8_checkpoint"))


def reason_against_fp8(module, weight, in_fp8) -> str:
    """Return why a GEMM did not run in FP8; "" if it did."""
    if in_fp8:
        return ""
    if not hasattr(module, "fp8_meta"):
        return f"{type(module).__name__} of {type(module).__module__}; te.Linear in self.autocast() is FP8"
    if weight.requires_grad and weight.grad is None:
        return "not part of the loss"
    return "called outside self.autocast(), or under autocast(False)"


def unique(names) -> str:
    return ", ".join(dict.fromkeys(names))


# ---------------------------------------------------------------- torch.compile

def check_graph(edited, unedited, batch, file):
    """Return whether the model is one graph under torch.compile, or the reason of its first break."""
    reason = not_compiled_reason(edited[0])
    if reason is not None:
        return "info", f"torch.compile leaves it alone: forward is @torch.compiler.disable: {reason}", ""
    reason = find_graph_break(build(*edited), batch)
    if not reason:
        return "ok", "one graph under torch.compile", ""
    if find_graph_break(build(*unedited), batch):
        return "info", f"not one graph under torch.compile, as {file}: {reason}", ""
    return "warn", f"not one graph under torch.compile: {reason}", "see guide/compile.md"


def not_compiled_reason(model_class):
    """Return the reason with which torch.compiler.disable keeps forward out of graphs; None: it does not."""
    if not getattr(model_class.forward, "_torchdynamo_disable", False):
        return None
    return getattr(model_class.forward, "_torchdynamo_disable_msg", None) or "it gives no reason"


def find_graph_break(model, batch) -> str:
    """Return the line and the reason of the first graph break; "" if the model is one graph."""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(model, backend="eager", fullgraph=True)(*batch)
    except Exception as error:  # also what the user's file raises under torch.compile only
        stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
        return f"{Path(stack[-1].filename).name}:{stack[-1].lineno}: {in_a_line(error)}"
    return ""
