"""The engine: the modules that run FP8 GEMMs, from Transformer Engine, fast_kernels or te_reference.

model_te_optimized.py decides which, because it also stands alone. Everything else imports the engine here.
`te` is its module, `te_recipe` the module of TE's recipe classes, and ENGINE its name: te, fast or reference.
save_fp8_state and load_fp8_state write and read the FP8 state of a model. ENGINES has all engines' names.
"""
from dataclasses import dataclass
from importlib import import_module

from model_te_optimized import (
    ENGINE,
    DelayedScaling,
    Format,
    is_frozen_in_fp8,
    is_te_tensor,
    load_fp8_state,
    save_fp8_state,
    te,
    te_recipe,
)

__all__ = ["ENGINE", "ENGINES", "TE_VERSION", "DelayedScaling", "Format", "is_frozen_in_fp8",
           "is_te_tensor", "load_fp8_state", "of_module", "save_fp8_state", "te", "te_recipe"]
TE_VERSION = import_module("transformer_engine").__version__ if ENGINE == "te" else None
TE_NAME = f"Transformer Engine {TE_VERSION}" if TE_VERSION else "Transformer Engine"


@dataclass(frozen=True)
class Engine:
    """What one engine is called."""

    package: str  # of its modules
    name: str  # in log lines
    label_in_results: str  # and in meta.json, after the name of the device


ENGINES = {  # by NANOTE_ENGINE
    "te": Engine("transformer_engine", TE_NAME, TE_NAME),
    "fast": Engine("fast_kernels", "fast_kernels", "FP8 by fast_kernels"),
    "reference": Engine("te_reference", "te_reference, which emulates FP8", "FP8 emulated by te_reference"),
}


def of_module(name: str) -> str | None:
    """Return the engine that a Python module belongs to: te, fast, reference or None."""
    package, _, _ = name.partition(".")
    for engine, names in ENGINES.items():
        if names.package == package:
            return engine
    return None
