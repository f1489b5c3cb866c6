"""Compare a model in FP8 with the same model without FP8: `python doctor.py --model my_model.py:MyModel`.

FP8 rounds, so the loss and the gradients differ in any model. By how much an edit may differ is measured on
the file that it started from, model_te_optimized.py or model_te_fast.py, with the same engine, size and
seeds. A gap is |in FP8 - without| / |without| over the measured steps.

A module that computes a wrong gradient spoils the gradients of the modules before it, and one with a wrong
output those of all. So the first module whose output is off is the cause, or else the last parameter whose
gradient is.
"""
import dataclasses
import math
import os
import re
import sys
import traceback
import types
import unittest.mock
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from nanote import engine, models, own_model, recipes
from nanote.command import error_line
from nanote.config import is_model_file
from nanote.health import gemms_with_weights, runs_in_fp8

ROOT = Path(__file__).resolve().parent.parent
# Fields of a config; the others keep their defaults
SIZES = dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 2  # of 32 tokens; Triton's interpreter takes a second for each pass of 128
FIRST_STEPS = 4  # not measured: a weight that starts at zero has a scale after its first steps
MEASURED_STEPS = 4
FACTOR = 2  # an edit may have this times the gap of the unedited file; those of examples/edits have up to 1.4
LOSS_GAP = 1e-3  # and this gap of the loss in any case: that of the unedited file is below 1e-4


class Candidate(NamedTuple):
    """A model to measure."""

    model_class: type
    config: object


@dataclasses.dataclass
class Gaps:
    """Relative differences between a model in FP8 and without; of outputs in the order of execution."""

    loss: float
    outputs: dict[str, float]  # {module: gap}
    gradients: dict[str, float]  # {parameter: gap}
    in_fp8: set[str]  # the modules whose forward pass ran in FP8


def check_model(name):
    """Yield (status, line, fix) for each check of the model path/to/file.py:Class; fail: a module is off.

    Raises ValueError for a file, a class or a machine with which there is nothing to compare."""
    edited, unedited = find_models(name)
    try:
        model = build(edited)
        twin = build(edited, use_fp8=False)
    except Exception as error:  # whatever the user's file raises
        reason = f"{type(error).__name__}: {error_line(error)}"
        raise ValueError(f"--model {name}: cannot be built: {reason}") from error
    batch = make_batch(0, edited.config)
    own_model.check_first_pass(twin, batch)
    file = Path(sys.modules[unedited.model_class.__module__].__file__).name
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    engine_name = models.engine_of(model)
    if DEVICE == "cpu" and engine_name == "fast_kernels":
        engine_name += " in Triton's interpreter"
    yield "ok", f"{name} in {dtype} on {engine_name}, compared with {file}", ""
    try:
        gaps = measure(model, twin)
    except Exception as error:  # of the user's file, which raised none without FP8
        line = f"{find_module(error, model)}: only in FP8: {type(error).__name__}: {error_line(error)}"
        yield "fail", line, "guide/changing_the_model.md says what FP8 asks of an edit"
        return
    yield from report_gemms(model, gaps.in_fp8)
    unedited_gaps = measure(build(unedited), build(unedited, use_fp8=False))
    yield compare_loss(gaps, unedited_gaps, file)
    yield from compare_gradients(gaps, unedited_gaps, file)
    yield check_graph(edited, unedited, batch, file)


def find_module(error, model) -> str:
    """Return the name of the innermost module of a model in whose code an exception was raised."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = type(model).__name__
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the innermost is the last
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


# ---------------------------------------------------------------- the edited and the unedited model

def find_models(name):
    """Return the Candidate of a file and that of the file of the kit that it started from."""
    if not is_model_file(name):
        raise ValueError(f"--model {name}: must be path/to/file.py:Class, as in my_model.py:MyModel")
    own_model.load_file(name)
    model_class, config_class = models.model_classes(name)
    config = models.make_model_config(name, small_sizes(name, config_class))
    engine_name = find_engine(model_class)
    if engine_name == "fast":
        prepare_fast_kernels(name)
    is_fused = "fast_kernels.fused" in imported_modules(model_class)
    file, class_name, config_name = models.FAST if is_fused else models.MODELS["optimized"]
    module = load_unedited(file, engine_name)
    unedited_config = same_config(getattr(module, config_name), config)
    return Candidate(model_class, config), Candidate(getattr(module, class_name), unedited_config)


def small_sizes(name, config_class):
    """Return the fields with which a config of this class is small enough to measure."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    if "use_fp8" not in defaults:
        raise ValueError(f"--model {name}: {config_class.__name__} has no field use_fp8, so it does not "
                         "train in FP8; guide/changing_the_model.md says how it can")
    if isinstance(defaults.get("n_kv_head"), int):  # grouped-query attention is the file's default
        return SIZES | {"n_kv_head": 1}
    return SIZES


def imported_modules(model_class):
    """Return the names of the modules that the files of a class and of its bases have imported."""
    names = []
    for base in model_class.__mro__:
        values = vars(sys.modules[base.__module__]).values()
        names += [value.__name__ for value in values if isinstance(value, types.ModuleType)]
    return names


def find_engine(model_class):
    """Return the engine, as in NANOTE_ENGINE, that the file of a class has imported; else the kit's own."""
    for name in imported_modules(model_class):
        found = engine.of_module(name)
        if found and name != "fast_kernels.fused":
            return found
    return recipes.ENGINE


def prepare_fast_kernels(name):
    """Make fast_kernels run on this machine: on Hopper, or without a GPU in Triton's interpreter."""
    from fast_kernels import modules
    if DEVICE == "cpu":
        from fast_kernels import interpreter
        interpreter.install()
    elif reason := modules.unsupported_reason():
        raise ValueError(f"--model {name}: {reason} Without the GPU it is checked in Triton's interpreter: "
                         f'CUDA_VISIBLE_DEVICES="" python doctor.py --model {name}')


def load_unedited(file, engine):
    """Import a model file of the kit as a new module that uses this engine."""
    with unittest.mock.patch.dict(os.environ, NANOTE_ENGINE=engine):
        return own_model.import_path(ROOT / f"{file}.py", f"unedited_{file}")


def same_config(config_class, edited):
    """Return a config of the unedited model with the edited one's values, or SIZES if it refuses them."""
    names = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in dataclasses.asdict(edited).items() if name in names}
    try:
        return config_class(**values)
    except ValueError:  # an activation, say, that the edit has added
        return config_class(**SIZES)


def build(candidate, use_fp8=True):
    """Return the model in training mode, on the GPU if there is one."""
    config = dataclasses.replace(candidate.config, use_fp8=use_fp8)
    is_bfloat16 = DEVICE == "cuda" or find_engine(candidate.model_class) == "fast"
    torch.manual_seed(0)
    return candidate.model_class(config).to(DEVICE, torch.bfloat16 if is_bfloat16 else torch.float32)


# ---------------------------------------------------------------- the gaps

def make_batch(step, config):
    """Return random token ids and labels of a config's vocabulary."""
    generator = torch.Generator().manual_seed(step)
    length = min(SIZES["n_positions"], config.n_positions)
    tokens = torch.randint(config.vocab_size, (ROWS, length + 1), generator=generator)
    tokens = tokens.to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure(model, twin) -> Gaps:
    """Train a model in FP8 for some steps, and run its twin without FP8 on the weights of each step."""
    losses = Sums()
    outputs = Sums()
    gradients = Sums()
    in_fp8 = set()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    recipes.find_first_scales(model, make_batch(0, model.config), divisor=1)
    for step in range(FIRST_STEPS + MEASURED_STEPS):
        batch = make_batch(step, model.config)
        loss, model_outputs = train_pass(model, batch, step, in_fp8)
        if step >= FIRST_STEPS:
            copy_weights(model, twin)
            twin_loss, twin_outputs = train_pass(twin, batch, step, set())
            losses.add("loss", loss, twin_loss)
            for name in twin_outputs:
                for tensor, expected in zip(model_outputs.get(name, ()), twin_outputs[name]):
                    outputs.add(name, tensor, expected)
            for (name, parameter), expected in zip(model.named_parameters(), twin.parameters()):
                gradients.add(name, parameter.grad, expected.grad)
        optimizer.step()
    return Gaps(losses.gaps()["loss"], outputs.gaps(), gradients.gaps(gradients.floors_of_modules()), in_fp8)


@torch.no_grad()
def copy_weights(model, twin):
    for source, target in zip(model.parameters(), twin.parameters()):
        target.copy_(source)
    for source, target in zip(model.buffers(), twin.buffers()):
        target.copy_(source)


def train_pass(model, batch, seed, in_fp8: set):
    """Run a forward and a backward pass; return the loss and {module: its outputs}. Add the modules whose
    forward pass runs in FP8 to `in_fp8`."""
    torch.manual_seed(seed)  # of dropout
    model.zero_grad(set_to_none=True)
    with recorded_outputs(model) as outputs:
        loss = model(*batch)
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

    handles = [module.register_forward_hook(partial(record, name))
               for name, module in model.named_modules() if name]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class Sums:
    """Sums of squares, by name, from which relative gaps follow."""

    def __init__(self):
        self.differences = Counter()
        self.expected = Counter()
        self.sizes = {}

    def add(self, name, tensor, expected):
        """Add a tensor, None: zeros, and its expected values, None: it is not compared."""
        if expected is None:
            return
        difference = expected.double()
        if tensor is not None:
            difference = tensor.double() - difference
        self.differences[name] += difference.norm().item()**2
        self.expected[name] += expected.double().norm().item()**2
        self.sizes[name] = expected.numel()

    def gaps(self, floors=None):
        """Return {name: gap}, without what is always zero. floors: {name: the least sum to divide by}."""
        floors = floors or {}
        gaps = {}
        for name, difference in self.differences.items():
            expected = max(self.expected[name], floors.get(name, 0))
            if expected:
                gaps[name] = (difference / expected)**0.5
            elif difference:
                gaps[name] = math.inf
        return gaps

    def floors_of_modules(self):
        """Return {parameter: its size · the mean square of all gradients of its module}. The gradient of a
        key's bias needs it, which is zero but for rounding: softmax does not depend on it."""
        sums = Counter()
        sizes = Counter()
        for name, size in self.sizes.items():
            sums[module_of(name)] += self.expected[name]
            sizes[module_of(name)] += size
        return {name: size * sums[module_of(name)] / sizes[module_of(name)]
                for name, size in self.sizes.items()}


# ---------------------------------------------------------------- the lines about them

def module_of(parameter):
    """Return the module's name of a parameter's: blocks.3.attn.qkv.bias -> blocks.3.attn.qkv."""
    return parameter.rpartition(".")[0]


def without_numbers(name):
    """Replace the number of a block, so that its name is that of the others: blocks.3.mlp -> blocks.*.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def compare_loss(edited: Gaps, unedited: Gaps, file):
    """Return the result for the loss."""
    status = "ok" if edited.loss <= max(FACTOR * unedited.loss, LOSS_GAP) else "fail"
    return status, f"loss: changes by {edited.loss:.3%} in FP8; {file}: {unedited.loss:.3%}", ""


def compare_gradients(edited: Gaps, unedited: Gaps, file):
    """Yield a result for all gradients. If some are off, it names the first module whose output is off, too,
    or else the last parameter whose gradient is."""
    if not edited.gradients:
        yield "fail", "every gradient is zero", "compute the loss from parameters that are trained"
        return
    expected = expected_gaps(edited.gradients, unedited.gradients)
    gradients_off = names_off(edited.gradients, expected)
    if not gradients_off:
        ratios = {name: gap / expected[name] for name, gap in edited.gradients.items()}
        worst = max(ratios, key=ratios.get)
        line = (f"{len(ratios)} gradients: {worst} is furthest from {file}: it changes by "
                f"{edited.gradients[worst]:.1%} in FP8, {ratios[worst]:.2f} times as much as there; up to "
                f"{FACTOR} is right")
        yield "ok", line, ""
        return
    expected_outputs = expected_gaps(edited.outputs, unedited.outputs)
    outputs_off = names_off(edited.outputs, expected_outputs)
    if outputs_off:
        first = outputs_off[0]
        yield failed_result(first, "output", edited.outputs[first], expected_outputs[first], file)
        return
    last = gradients_off[-1]
    yield failed_result(last, "gradient", edited.gradients[last], expected[last], file)
    if len(gradients_off) > 1:
        others = unique(without_numbers(module_of(name)) for name in gradients_off[:-1])
        yield "info", f"off, too, with what comes after it in the backward pass: {others}", ""


def expected_gaps(edited: dict, unedited: dict):
    """Return {name in the edited model: the gap that is expected there}: the largest that this module or
    parameter has in any block of the unedited model, or the largest of all if the unedited model lacks it."""
    largest = {}
    for name, gap in unedited.items():
        kind = without_numbers(name)
        largest[kind] = max(gap, largest.get(kind, 0))
    return {name: largest.get(without_numbers(name)) or max(largest.values()) for name in edited}


def names_off(gaps: dict, expected: dict):
    """Return the names whose gap is more than FACTOR times what is expected, or NaN."""
    return [name for name, gap in gaps.items() if math.isnan(gap) or gap > FACTOR * expected[name]]


def failed_result(name, what, gap, expected, file):
    """Return the result for an output or a gradient whose gap is too large."""
    line = (f"{name}: its {what} changes by {gap:.1%} in FP8; {file}: {expected:.1%}, so at most "
            f"{FACTOR * expected:.1%}")
    return "fail", line, "look at what it does in FP8 only; guide/changing_the_model.md says what FP8 asks"


def report_gemms(model, in_fp8):
    """Yield which GEMMs ran in FP8, and which did not, with the reason. `in_fp8`: see Gaps."""
    gemms = {}  # {why they did not run in FP8, or "": GEMMs}
    recomputed = []  # modules
    for name, module, gemm, weights in gemms_with_weights(model):
        reason = reason_against_fp8(module, weights[0], name in in_fp8)
        gemms.setdefault(reason, []).append(gemm)
        if name in in_fp8 and not runs_in_fp8(module):
            recomputed.append(name)
    total = sum(map(len, gemms.values()))
    gemms_in_fp8 = gemms.pop("", [])
    if gemms_in_fp8:
        names = unique(map(without_numbers, gemms_in_fp8))
        yield "ok", f"{len(gemms_in_fp8)} of {total} GEMMs in FP8: {names}", ""
    else:
        fix = "call te's modules inside self.autocast() in forward"
        yield "fail", f"{type(model).__name__}: none of {total} GEMMs runs in FP8", fix
    for reason, names in gemms.items():
        yield "info", f"not in FP8: {unique(map(without_numbers, names))}: {reason}", ""
    if recomputed:
        line = f"{recomputed[0]}: in FP8 in the forward pass, but recomputed without FP8 in the backward pass"
        yield "fail", line, "te.checkpoint(block, x), with te imported from the model file"


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
    forward = edited.model_class.forward
    if getattr(forward, "_torchdynamo_disable", False):
        reason = getattr(forward, "_torchdynamo_disable_msg", None) or "it gives no reason"
        return "info", f"torch.compile leaves it alone: forward is @torch.compiler.disable: {reason}", ""
    reason = find_graph_break(build(edited), batch)
    if not reason:
        return "ok", "one graph under torch.compile", ""
    if find_graph_break(build(unedited), batch):
        return "info", f"not one graph under torch.compile, as {file}: {reason}", ""
    return "warn", f"not one graph under torch.compile: {reason}", "see guide/compile.md"


def find_graph_break(model, batch) -> str:
    """Return the line and the reason of the first graph break; "" if the model is one graph."""
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(model, backend="eager", fullgraph=True)(*batch)
    except Exception as error:  # also what the user's file raises under torch.compile only
        return own_model.reason_of_graph_break(error)
    return ""
