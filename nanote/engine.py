"""The engine: the modules that run FP8 GEMMs, from Transformer Engine, fast_kernels or te_reference.

model_te_optimized.py decides which, because it also stands alone. Everything else imports the engine here.
`te` is its module and ENGINE its name: te, fast or reference. `recipes` is the module of TE's recipe classes.
The two functions write and read the FP8 state of a model.
"""
from model_te_optimized import ENGINE, DelayedScaling, Format, load_fp8_state, recipes, save_fp8_state, te

__all__ = ["ENGINE", "DelayedScaling", "Format", "load_fp8_state", "recipes", "save_fp8_state", "te"]
