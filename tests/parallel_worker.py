"""Run by torchrun from tests/test_parallel.py: several train.py runs in one group of processes, to start once.

Arguments: one run each, as on train.py's command line. "copy A B N" copies the run A without checkpoints after
step N; a run that begins with "nan" has a loss that is not finite in step 2 of the last rank.
"""
import shutil
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
import train
from nanote import checkpoint, cli, parallel

ranks = parallel.init()
parallel.init, parallel.shut_down = lambda: ranks, lambda ranks: None  # one group for all runs
train.draw = lambda *arguments: ""  # no plots, which take longer than the runs
plain, passes = train.TrainStep.forward_backward, []


def with_a_nan(self, batch, first):
    passes.append(first)
    if ranks.rank < ranks.world_size - 1 or passes.count(True) != 2:
        return plain(self, batch, first)
    net, self.net = self.net, lambda *inputs, **options: net(*inputs, **options) * float("nan")
    try:
        return plain(self, batch, first)
    finally:
        self.net = net


def copy(source, target, last):
    shutil.copytree(source, target)
    for folder in checkpoint.list_checkpoints(target):
        if int(folder.name[5:]) > int(last):
            shutil.rmtree(folder)


for line in sys.argv[1:]:
    words = line.split()
    if words[0] == "copy":
        checkpoint.on_rank0(lambda: copy(*words[1:]))
        continue
    train.TrainStep.forward_backward = with_a_nan if words[0] == "nan" else plain
    code = cli.run(lambda: train.main([word for word in words if word != "nan"]), "train.py")
    if code:
        sys.exit(code)
    train.sample_text = lambda run: ""  # a sample after the first run only
