"""The least time of a training step (speed of light, roofline): every part of it at the GPU's peak.

`floor_ms` is the arithmetic. train.py and benchmark_te.py log it as `roofline`: at the peaks of NVIDIA's
data sheets, over the time of a step. The tables of benchmark_te.py have `floor_ms` at the rates that the GPU
reached that day (`measure_ceilings` in bench/timing.py), which are lower, so their fractions are higher.
"""
import dataclasses

import torch

from nanote import models

# Dense BF16 peak in TFLOP/s and memory bandwidth in TB/s by a part of the GPU's name, longer names first
# (NVIDIA's data sheets and architecture white papers, boost clock, without sparsity; GeForce: float32
# accumulation). The dense FP8 peak of a GPU with FP8 tensor cores is twice its BF16 peak.
PEAKS = {
    "GB200": (2500, 8.0), "B200": (2250, 8.0), "GH200 144G": (989, 4.9), "GH200": (989, 4.0),
    "H200": (989, 4.8), "H100 PCIe": (756, 2.0), "H100 NVL": (835, 3.9), "H100": (989, 3.35),
    "H800": (989, 3.35), "A100-SXM4-80GB": (312, 2.04), "A100 80GB": (312, 1.94), "A100": (312, 1.56),
    "A800": (312, 2.04), "L40S": (362, 0.864), "L40": (181, 0.864), "L4": (121, 0.3), "A10G": (70, 0.6),
    "RTX 6000 Ada": (364, 0.96), "RTX 4090": (165, 1.01), "RTX 5090": (210, 1.79), "RTX 3090": (71, 0.936),
}


def peaks(device: torch.device) -> dict | None:
    """Return the device's peaks, with the names of `measure_ceilings`; None on the CPU or an unknown GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for part, (tflops, bandwidth) in PEAKS.items():
        if part in name:
            return {"bf16_tflops": tflops, "fp8_tflops": 2 * tflops, "copy_tbs": bandwidth}
    return None


def floor_ms(config, B, T, fp8, ceilings, optimizer_bytes=28) -> float:
    """Return the least ms of a training step on B sequences of T tokens: every part at its ceiling.

    The sum of:

    GEMMs       6·B·T·(L·P + V·C) FLOPs at the FP8 or BF16 rate; P = C·(Hq + 2·Hkv)·D + Hq·D·C + 2·C·I
                (SwiGLU: 3·C·I) are the weights of a block
    attention   7·B·T²·Hq·D·L FLOPs at the BF16 rate: 3.5 times the forward pass, which is 2·B·T²·Hq·D per
                layer (the causal half of two GEMMs)
    optimizer   optimizer_bytes per parameter. 28: the BF16 gradient read twice (norm, update); weight, 16-bit
                remainder and two float32 moments read and written
    loss        4·B·T·V bytes: BF16 logits read, their gradient written

    Biases and norms are left out, and so is work that only some runs have: recomputed activations, gradients
    exchanged between GPUs. A packed sequence counts as one document.

    Args:
        config: the configuration of a model.
        ceilings: bf16_tflops, fp8_tflops and copy_tbs.
    """
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    swiglu = getattr(config, "activation", "gelu") == "swiglu"
    block = config.n_embd * (2 * q + 2 * kv + config.n_inner * (3 if swiglu else 2))
    head = config.vocab_size * config.n_embd
    parameters = config.n_layer * block + head * (1 if config.tie_embeddings else 2)
    gemm_rate = 1e12 * ceilings["fp8_tflops" if fp8 else "bf16_tflops"]
    seconds = 6 * B * T * (config.n_layer * block + head) / gemm_rate
    seconds += 7 * B * T**2 * q * config.n_layer / (1e12 * ceilings["bf16_tflops"])
    seconds += (optimizer_bytes * parameters + 4 * B * T * config.vocab_size) / (1e12 * ceilings["copy_tbs"])
    return 1e3 * seconds


def optimizer_bytes(config) -> int:
    """Return the bytes per parameter that an optimizer step of train.py moves. config: a TrainConfig.

    The gradient is read twice (norm, update); weights, master weights and moments are read and written.
    """
    weights = 2 * (2 + 2) if config.param_remainders else 2 * 4 + 2
    moment = 2 if config.moment_dtype == "bfloat16" else 4
    return 2 * 2 + weights + 2 * (2 * moment)


def least_ms(config, device: torch.device) -> float | None:
    """Return floor_ms of a step of train.py on each GPU, at the peaks of the data sheets.

    None on the CPU, on a GPU that is not in PEAKS, and where the arithmetic is not that of the run: for
    NVFP4, for float32 weights, where some GEMMs stay in BF16, for another optimizer than AdamW, and for a
    model of the user's own.
    """
    ceilings = peaks(device)
    mixed = not config.fp8_lm_head or config.fp8_skip_first or config.fp8_skip_last
    others = config.optimizer != "adamw" or models.is_file(config.model) or config.dtype == "float32"
    if ceilings is None or config.fp8_recipe == "nvfp4" or mixed and config.fp8_recipe != "none" or others:
        return None
    model_config = models.make_model_config(config.model, dataclasses.asdict(config))
    sequences, in_fp8 = config.micro_batch_size * config.grad_accum, config.fp8_recipe != "none"
    moved = optimizer_bytes(config)
    return floor_ms(model_config, sequences, config.seq_len, in_fp8, ceilings, moved)
