"""Run a compressed-tensors folder in FP8, in plain PyTorch, for tests of the folder. Imports nothing of the
kit: it knows config.json, the tensors, and what compressed-tensors says of static scales per tensor:

    FP8 input = input / input_scale, saturated       weight = FP8 weight · weight_scale
    output = sum over FP8 input · FP8 weight, times input_scale · weight_scale, plus the bias
"""
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file


class FP8Linear(nn.Module):
    """A linear layer with both operands in E4M3: (…, in) -> (…, out)."""

    def __init__(self, tensors, name):
        super().__init__()
        self.weight = tensors[f"{name}.weight"]
        self.weight_scale = tensors[f"{name}.weight_scale"]
        self.input_scale = tensors[f"{name}.input_scale"]
        self.bias = tensors.get(f"{name}.bias")
        assert self.weight.dtype == torch.float8_e4m3fn

    def quantize(self, x):
        return (x.float() / self.input_scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def forward(self, x):
        y = F.linear(self.quantize(x).float(), self.weight.float()) * (self.input_scale * self.weight_scale)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def load(folder):
    """Return the transformers model of a folder, each layer that config.json does not ignore an FP8Linear."""
    fields = json.loads(Path(folder, "config.json").read_text())
    quantization = fields.pop("quantization_config")
    [group] = quantization["config_groups"].values()
    assert quantization["format"] == "float-quantized" and group["targets"] == ["Linear"]
    for kind in ("weights", "input_activations"):
        assert group[kind] == dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
    model_class = getattr(transformers, fields["architectures"][0])
    model = model_class(model_class.config_class(**fields)).eval()
    tensors = load_file(Path(folder, "model.safetensors"))
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in layers:
        if name not in quantization["ignore"]:
            model.set_submodule(name, FP8Linear(tensors, name))
    rest = {name: tensor for name, tensor in tensors.items() if name in model.state_dict()}
    model.load_state_dict(rest, strict=not model.config.tie_word_embeddings)
    return model


@torch.no_grad()
def mean_loss(model, ids, batch=16):
    """Return the mean cross-entropy of the next token of ids (rows, length + 1)."""
    losses = [model(rows[:, :-1]).logits.float().flatten(0, 1) for rows in ids.split(batch)]
    return F.cross_entropy(torch.cat(losses), ids[:, 1:].flatten()).item()
