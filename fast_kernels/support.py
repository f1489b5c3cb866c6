"""Which passes the fast kernels support, and why any other falls back to the modules.

The kernels compute what the methods of `model_te_optimized.py` compute, without calling them. A copy of that
file is meant to be edited, and an edited model must never be trained as if it had not been edited. So the
kernels run only where everything that they replace is what they were written for:

- The methods, compared by a fingerprint of their syntax tree: comments, docstrings, annotations and layout
  may change, and nothing else. Subclasses, replaced methods and methods without source are refused.
- The modules: Transformer Engine's (TE) own classes, with the settings that the kernels implement, without
  hooks; those of FSDP2 may be on the model and its blocks.
- The parameters: BF16, and all of them trained; whole, or sharded by FSDP2.
- The environment: a Hopper GPU, and a version of TE whose internals were tested.
"""

import ast
import functools
import hashlib
import inspect
import operator
import os
import sys
import textwrap
import warnings

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Fingerprints of the methods and functions of model_te_optimized.py that the kernels replace. After an edit
# of that file which the kernels follow, `print_fingerprints` prints the new ones.
FINGERPRINTS = {
    "OptimizedGPT2Model.forward": "bf47ddaba3f906be",
    "OptimizedGPT2Model.run_block": "15519f62be3d531a",
    "OptimizedGPT2Model.output": "47e0b4c5fd8880d5",
    "OptimizedGPT2Model.cross_entropy": "59b6ff64112a8391",
    "Block.forward": "56a87cc3791ffd02",
    "Attention.forward": "8555dccafec477a3",
    "Attention.mix": "3fcae2af94fda1c3",
    "Attention.attend": "c4dc3ab6abca1070",
    "Attention._attend_te": "8ae44bd1fbee47b2",
    "Attention._attend_flash": "2ae491a9aa36ee4c",
    "apply_rope": "dc11255ad30db48f",
}
TESTED_TE = ("2.20",)  # minor versions: the kernels use internals, which move between them
CONFIG_FIELDS = ("use_fp8 fp8_lm_head loss_chunks gradient_checkpointing offload_activations dropout n_embd "
                 "use_rotary use_qk_norm layernorm_epsilon n_head n_kv_head head_dim in_fp8")
MAX_WIDTH = 16384  # of the residual: a norm kernel holds whole rows
MODULE_SETTINGS = {  # of TE's modules: what the kernels implement
    "zero_centered_gamma": False,
    "return_layernorm_output": False,
    "return_bias": False,
    "fuse_wgrad_accumulation": False,
    "tp_size": 1,
    "sequence_parallel": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
    "checkpoint": False,
    "activation_params": None,
}
EMBEDDING_SETTINGS = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}


# ---------------------------------------------------------------- fingerprints

def fingerprint(function):
    """Hash a function's syntax tree: 16 digits, the same in every Python version; "" without source."""
    function = getattr(function, "__func__", function)
    return _hash_source(function) if hasattr(function, "__code__") else ""


@functools.lru_cache(maxsize=256)
def _hash_source(function):
    try:
        source = inspect.getsource(function.__code__)  # of the function itself would follow __wrapped__
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, SyntaxError):
        return ""
    return hashlib.sha256(repr(_simplify(tree.body[0])).encode()).hexdigest()[:16]


def _simplify(node):
    """Return a syntax tree as nested tuples, without docstrings, annotations and empty fields."""
    if isinstance(node, list):
        return [_simplify(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    left_out = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in left_out]
    fields = [(name, _simplify(value)) for name, value in fields if value not in (None, [])]
    return type(node).__name__, fields


def method_of(module, name):
    """Return a module's method as it was before `accelerate`: replaced by the user, or its class's."""
    own, inherited = vars(module).get(name), getattr(type(module), name, None)
    # A pickled model comes back with its class's method where a kernel was
    if own is None or is_accelerated(own) or getattr(own, "__func__", None) is inherited:
        return inherited
    return own


def is_accelerated(method):
    """Return whether `accelerate` put this method in place."""
    return getattr(method, "__module__", None) == "fast_kernels.block"


# ---------------------------------------------------------------- the blocks' training pass

def structure_reason(model):
    """Return why this is no model that `accelerate` can work on; "" if it is one."""
    parts = [(model, "config wte dropout blocks lm_head fp8_recipe run_block output cross_entropy")]
    for block in getattr(model, "blocks", ()):
        attention = getattr(block, "attn", None)
        parts += [(block, "attn mlp dropout"), (attention, "qkv proj mix attend kernel config")]
    parts.append((getattr(model, "config", None), CONFIG_FIELDS))
    for owner, names in parts:
        for name in names.split():
            if not hasattr(owner, name):
                kinds = f"{type(model).__name__} is not built like model_te_optimized.py"
                return f"{kinds}: {type(owner).__name__} has no {name}"
    return ""


def supports_pass(model):
    """Return whether the kernels take this pass of a model.

    A warning says why not, except where nobody expects the kernels, as in evaluation (`mode_reason`).
    """
    if torch.compiler.is_compiling() or mode_reason(model):  # first, so that the rest is not traced
        return False
    return _warn_unless_empty(model_reason(model))


def unsupported_reason(model, is_reported=False):
    """Return why a training pass of this model falls back to its modules; "" where the kernels support it.

    is_reported: the caller tells the user the reason, so that no warning repeats it.
    """
    reason = mode_reason(model) or model_reason(model)
    if is_reported:
        _reported.add(reason)
    return reason


def mode_reason(model):
    """Return the part of `unsupported_reason` that follows from how the model is run."""
    config = model.config
    if not _runs_on_te(model):
        return "the modules are not Transformer Engine's"
    if not (model.training and torch.is_grad_enabled()):
        return "no gradients are computed"
    if not config.use_fp8 or not model.fp8_recipe.delayed():
        return "the recipe is not delayed scaling"
    if not all(config.in_fp8(layer) for layer in range(len(model.blocks))):
        return "some blocks stay in high precision"
    if config.gradient_checkpointing or config.offload_activations > 0:
        return "activations are recomputed or offloaded"
    if config.dropout > 0:
        return "dropout is on"
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return "torch.autocast is on, not to BF16"
    return ""


def _runs_on_te(model):
    return model.wte.weight.is_cuda and _package(model.lm_head) != "te_reference"


def model_reason(model):
    """Return the part of `unsupported_reason` that follows from what the model is."""
    for check in (environment_reason, _method_reason, _module_reason, _hook_reason, _parameter_reason):
        reason = check(model)
        if reason:
            return reason
    return ""


def environment_reason(_model=None):
    """Return why the kernels that write FP8 for TE's modules cannot run on this machine; "" if they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "they need compute capability 9.0: Ada rounds a cast twice, Blackwell needs no transposed copy"
    return _installed_version_reason()


@functools.cache
def _installed_version_reason():
    try:
        import transformer_engine
    except ImportError as error:
        return f"Transformer Engine cannot be imported ({error})"
    return version_reason(transformer_engine.__version__)


def version_reason(version):
    """Return why the kernels, which use internals of TE, do not run with a version of it; "" if they do."""
    if version.startswith(tuple(f"{tested}." for tested in TESTED_TE)):
        return ""
    return f"they use internals of Transformer Engine {', '.join(TESTED_TE)}, and this is {version}"


def _method_reason(model):
    attentions = [getattr(block, "attn", None) for block in model.blocks]
    known = [(model, name, f"OptimizedGPT2Model.{name}") for name in ("forward", "run_block", "output")]
    known += [(block, "forward", "Block.forward") for block in model.blocks]
    known += [(attention, "forward", "Attention.forward") for attention in attentions]
    for module, name, original in known:
        title = f"{type(module).__name__}.{name}"
        if type(module).__call__ is not torch.nn.Module.__call__:
            return f"{title} was edited"
        problem = _edit_reason(title, method_of(module, name), original)
        if problem:
            return problem
    return ""


def _edit_reason(title, function, original):
    """Return why a function is not the `original`, a key of FINGERPRINTS; "" if it is."""
    found = fingerprint(function)
    if found == FINGERPRINTS[original]:
        return ""
    return f"{title} was edited" if found else f"the source of {title} cannot be read"


def _module_reason(model):
    if model.config.n_embd > MAX_WIDTH:
        return f"n_embd={model.config.n_embd} is over {MAX_WIDTH}"
    recipe = model.fp8_recipe
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        return "the recipe runs attention in FP8"
    debug = sys.modules.get("transformer_engine.debug.pytorch.debug_state")
    if debug is not None and debug.TEDebugState.debug_enabled:
        return "Transformer Engine's debug tools are on"
    for name, module, kind in _replaced_modules(model):
        package = "torch" if kind in ("Embedding", "Dropout") else "transformer_engine"
        if (_package(module), type(module).__name__) != (package, kind):
            return f"{name} is a {type(module).__name__} of {_package(module)}, not {package}'s {kind}"
        if not all(_is_library_code(function) for function in (type(module).forward, type(module).__call__)):
            return f"the forward method of {kind} was replaced"
        problem = _setting_reason(module, kind)
        if problem:
            return f"{name} has {problem}"
    return ""


def _replaced_modules(model):
    """Yield (name, module, class name) of each module that the kernels replace."""
    yield "wte", model.wte, "Embedding"
    yield "dropout", model.dropout, "Dropout"
    if not model.config.use_rotary:
        yield "wpe", model.wpe, "Embedding"
    for layer, block in enumerate(model.blocks):
        yield f"blocks.{layer}.attn.qkv", block.attn.qkv, "LayerNormLinear"
        yield f"blocks.{layer}.attn.proj", block.attn.proj, "Linear"
        yield f"blocks.{layer}.mlp", block.mlp, "LayerNormMLP"
        yield f"blocks.{layer}.dropout", block.dropout, "Dropout"
    yield "lm_head", model.lm_head, "LayerNormLinear"


def _is_library_code(function):
    """Return whether a function, and all that it wraps, was written in PyTorch or Transformer Engine."""
    while function is not None:
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        if not file.startswith(_library_folders()):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _library_folders():
    libraries = [sys.modules[name] for name in ("torch", "transformer_engine") if name in sys.modules]
    files = [getattr(library, "__file__", None) for library in libraries]
    return tuple(os.path.dirname(file) + os.sep for file in files if file)


def _setting_reason(module, kind):
    settings = EMBEDDING_SETTINGS if kind == "Embedding" else MODULE_SETTINGS
    for name, value in settings.items():
        if getattr(module, name, value) != value:
            return f"{name}={getattr(module, name)!r}"
    if kind == "LayerNormMLP" and module.activation not in ("gelu", "swiglu"):
        return f"activation={module.activation!r}"
    if kind == "Dropout" and module.p > 0:
        return f"p={module.p}"
    if "Linear" in kind and getattr(module, "weight_names", ["weight"]) != ["weight"]:
        return f"parameters_split, with the weights {', '.join(module.weight_names)}"
    store = getattr(module, "wgrad_store", None)
    return "delay_wgrad_compute=True" if store is not None and store.delay_wgrad_compute() else ""


def _hook_reason(model):
    # FSDP2's units: block.py finds the parameters of these gathered
    units = {model, *model.blocks} if isinstance(model, FSDPModule) else set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) != (module in units):
            return (f"FSDP2 must shard the model and each of its blocks, and nothing else; "
                    f"fully_shard was {'not ' if module in units else ''}called on {name}")
        if method_of(module, "forward") is not getattr(type(module), "forward", None):
            return f"the forward method of {name or 'the model'} was replaced"
        if _has_hooks(module, ignore_fsdp=module in units):
            return f"{name or 'the model'} has hooks"
    return "there are global hooks" if torch.nn.modules.module._has_any_global_hook() else ""


def _parameter_reason(model):
    for unit in (model, *model.blocks) if isinstance(model, FSDPModule) else ():
        dtype = unit._get_fsdp_state()._mp_policy.param_dtype  # of gathered parameters; None: the shards'
        if dtype not in (None, torch.bfloat16):
            return f"MixedPrecisionPolicy(param_dtype={dtype}) gathers parameters in another dtype than BF16"
    for module_name, module, kind in _replaced_modules(model):
        for own_name, parameter in module.named_parameters():
            name = f"{module_name}.{own_name}"
            if not parameter.requires_grad:
                return f"{name} is frozen"
            if not _is_readable(parameter, model) or parameter.dtype != torch.bfloat16:
                return f"{name} is not kept in BF16"
            if kind != "Embedding" and parameter.dim() == 2 and any(size % 16 for size in parameter.shape):
                return f"{name} is {tuple(parameter.shape)}: dimensions must be multiples of 16"
    return ""


def _is_readable(parameter, model):
    """Return whether the kernels find a plain tensor: now, or when FSDP2 has gathered a parameter that
    nothing else shards."""
    if type(parameter) is not DTensor:
        return type(parameter) is torch.nn.Parameter
    *replicas, shards = parameter.placements
    sharded_once = shards.is_shard() and all(replica.is_replicate() for replica in replicas)
    return sharded_once and isinstance(model, FSDPModule)


def _has_hooks(module, ignore_fsdp=False):
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
             module._backward_pre_hooks)
    hooks = [hook for kind in kinds for hook in kind.values()]
    if ignore_fsdp:
        hooks = [hook for hook in hooks if not str(hook.__module__).startswith("torch.distributed.fsdp.")]
    return bool(hooks)


def _package(module):
    return type(module).__module__.partition(".")[0]


# ---------------------------------------------------------------- attention

def takes_attention(attention):
    """Return whether packed_attention computes what the methods of this `Attention` compute. Where it does
    not, a warning says why."""
    if torch.compiler.is_compiling():  # torch.compile cannot trace the checks; `accelerate` has made them
        return getattr(attention, "takes_packed_attention", False)
    return _warn_unless_empty(attention_reason(attention))


def attention_reason(attention):
    """Return why queries, keys and values do not go through packed_attention; "" where they do."""
    kind, namespace = type(attention).__name__, getattr(type(attention).mix, "__globals__", {})
    known = [
        (f"{kind}.mix", method_of(attention, "mix"), "Attention.mix"),
        ("apply_rope", namespace.get("apply_rope"), "apply_rope"),
    ]
    known += [
        (f"{kind}.{name}", method_of(attention, name), f"Attention.{name}")
        for name in ("attend", "_attend_te", "_attend_flash")
    ]
    for title, function, original in known:
        problem = _edit_reason(title, function, original)
        if problem:
            return problem
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        problem = "" if norm is None else _head_norm_reason(norm, attention.config)
        if problem:
            return f"{name} {problem}"
    flash = namespace.get("flash_attn_func")
    if flash is not None and not getattr(inspect.unwrap(flash), "__module__", "").startswith("flash_attn"):
        return "flash_attn_func was replaced"
    return ""


def _head_norm_reason(norm, config):
    """Return why the kernels do not compute this norm of queries or keys; "" where they do."""
    if _package(norm) not in ("transformer_engine", "te_reference") or type(norm).__name__ != "RMSNorm":
        return "is not Transformer Engine's RMSNorm"
    if getattr(norm, "zero_centered_gamma", False) or norm.eps != config.layernorm_epsilon:
        return "has settings of its own"
    if "forward" in vars(norm):
        return "has a forward method of its own"
    return "has hooks" if _has_hooks(norm) else ""


# ---------------------------------------------------------------- the loss

def takes_loss(model):
    """Return whether loss.cross_entropy computes this model's loss. Where it does not, a warning says why."""
    if torch.compiler.is_compiling():  # as in `takes_attention`
        return getattr(model, "takes_fast_loss", False)
    return _warn_unless_empty(loss_reason(model))


def loss_reason(model):
    """Return why the loss does not go through loss.cross_entropy; "" where it does."""
    title = f"{type(model).__name__}.cross_entropy"
    return _edit_reason(title, method_of(model, "cross_entropy"), "OptimizedGPT2Model.cross_entropy")


# ---------------------------------------------------------------- warnings, and fingerprints after an edit

_reported = set()  # reasons that the user knows


def _warn_unless_empty(reason):
    """Warn of a reason against the kernels, if there is one; return whether there is none."""
    if reason:
        warn_once(reason)
    return not reason


def warn_once(reason):
    """Warn, once in a process for each reason, that modules run where kernels would be faster."""
    if reason not in _reported:
        _reported.add(reason)
        warnings.warn(f"fast kernels are not used: {reason}; the modules run instead", stacklevel=2)


def print_fingerprints():
    """Print FINGERPRINTS for model_te_optimized.py as it is now."""
    import model_te_optimized

    for name in FINGERPRINTS:
        function = operator.attrgetter(name)(model_te_optimized)
        print(f"{name:36} {fingerprint(function)}")
