"""nanote/evaluation.py on several ranks. Its losses on one: tests/test_train.py."""

from trainer_tools import ROOT, run_ranks

CHANGED_SHARDS = """
import sys
sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace
import torch
from nanote import ddp, evaluation, models, parallel, recipes
from nanote.config import TrainConfig

ranks, device = parallel.start(), torch.device("cpu")
config = TrainConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16, seq_len=16,
                     fp8_recipe="none", parallel="fsdp", device="cpu")
model = ddp.distribute(models.make_model(config, device, torch.float32, recipes.make(config)), "fsdp", 1)
tokens = torch.randint(64, (1, 17))
inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
loader = SimpleNamespace(device=device, evaluation=lambda count: [(inputs, 16)])
shards = parallel.local_parameters(model)
before = evaluation.validation_loss(config, model, loader)
for shard in shards:  # as the optimizer does in a replayed CUDA graph
    shard.data.mul_(2)
after = evaluation.validation_loss(config, model, loader)
with torch.no_grad():
    for unit in (model, *model.blocks):
        unit.reshard()
    expected = parallel.sum_over_ranks(model(*inputs)).item() / 2
print("found", before, after, expected, flush=True)
parallel.end_process(0)
"""


def test_an_evaluation_reads_the_weights_of_the_last_step():
    """FSDP2 keeps some weights gathered after a pass without gradients."""
    for output in run_ranks(CHANGED_SHARDS, [str(ROOT)]):
        before, after, expected = map(float, output.split()[-3:])
        assert abs(after - expected) < 1e-6
        assert abs(after - before) > 1e-6
