"""FP8 on a Hopper GPU with PyTorch and Triton alone: an engine, and kernels to build a model from.

    from fast_kernels import modules as te      # Transformer Engine's modules: any model file on this engine
    from fast_kernels import fused              # what model_te_fast.py adds: fusions that cross modules

Read the files in this order. A kernel's formula in plain PyTorch, `…_reference`, stands before it.

- fp8.py          FP8 tensors: data, transposed data and scale_inv; one class passes through autograd
- scales.py       the update of all scales under delayed scaling, in one launch
- casts.py        norm, activation and cast, each writing FP8; cast_kernels.py has the Triton kernels
- frozen.py       weights that are not trained and stay in FP8 alone
- unquantized.py  the same norm and activation without FP8
- gemm.py         FP8 and BF16 GEMMs in cuBLASLt, with the fastest of its algorithms
- narrow_gemm.py  LoRA beside a layer in FP8, on the FP8 tensors of its GEMMs
- fused.py        a training pass in which each kernel does what the module before it left
- modules.py      LayerNormLinear, Linear, LayerNormMLP, autocast …: delayed scaling in FP8, or no FP8
- attention.py    attention on the packed QKV tensor, with QK-norm and RoPE in one kernel
- embedding.py    token and position embedding in one kernel, and their gradients
- loss.py         cross-entropy whose gradient is written in FP8
- adam.py         AdamW with clipping in one pass

When you need them:

- traced.py       the modules under torch.compile, as one graph
- state_dict.py   scales and amax histories in a model's state dict
- library.py      how kernels become operations of PyTorch
- interpreter.py  the kernels on a CPU, in Triton's interpreter
"""
