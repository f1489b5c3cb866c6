"""Is a layout as near to one GPU as other orders of summation on one GPU are? Distances over several seeds.

    python bench/order_scatter.py --json results/order_scatter.json     # two or four GPUs

Runs of tests/test_multi_gpu.py in FP8: 30 steps of 16 sequences, on one GPU in one micro-batch, in 4, 8 and
16, and on all GPUs with ddp and fsdp, each GPU's share in one micro-batch and in micro-batches of one
sequence. The distance of a run is the mean difference of its losses from those of one micro-batch on one GPU,
step by step, with equal weights.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch

from bench.report import row_origin, write_json
from trainer_tools import RUN_ALL, finish, make_tokens, metrics, start_ranks

OPTIONS = ("--n-layer 4 --n-head 4 --n-embd 256 --seq-len 256 --max-steps 30 --warmup-steps 20 --lr 1e-3 "
           "--fp8-amax-history-len 16 --log-interval 1 --eval-interval 0 --checkpoint-interval 0")
ON_ONE = {"1 x 16": 1, "4 x 4": 4, "8 x 2": 8, "16 x 1": 16}
GPUS = torch.cuda.device_count() or 2
SHARE = 16 // GPUS
ON_ALL = {
    f"{layout}, {count} x {SHARE // count}":
    f"--parallel {layout} --micro-batch-size {SHARE // count} --grad-accum {count}"
    for layout in ("ddp", "fsdp") for count in (1, SHARE)}


def start(runs, gpus):
    command = [sys.executable, "-c", f"{RUN_ALL}\nparallel.end_process(0)", str(ROOT), json.dumps(runs), "-"]
    return finish(start_ranks(command, len(gpus.split(",")), CUDA_VISIBLE_DEVICES=gpus))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    path = args.json.resolve()
    os.chdir(tempfile.mkdtemp())
    data = make_tokens(Path("tokens").resolve())
    options = f"{OPTIONS} --data {data}"
    alone = [{f"one {seed} {name}": f"{options} --seed {seed} --micro-batch-size {16 // count} "
              f"--grad-accum {count}" for seed in args.seeds[gpu::GPUS] for name, count in ON_ONE.items()}
             for gpu in range(GPUS)]
    alone = [{name.replace(" ", "_"): value for name, value in some.items()} for some in alone]
    with ThreadPoolExecutor(GPUS) as pool:
        list(pool.map(start, alone, map(str, range(GPUS))))
    rows = []
    for seed in args.seeds:
        runs = {f"all {seed} {name}".replace(" ", "_"): f"{options} --seed {seed} {extra}"
                for name, extra in ON_ALL.items()}
        start(runs, ",".join(map(str, range(GPUS))))

        def losses(kind, name, seed=seed):
            return [record["loss"] for record in metrics(f"{kind} {seed} {name}".replace(" ", "_"))]

        one = losses("one", "1 x 16")
        for kind, names in (("one", list(ON_ONE)[1:]), ("all", ON_ALL)):
            for name in names:
                other = losses(kind, name)
                assert len(other) == len(one) == 30
                distance = statistics.mean(abs(a - b) for a, b in zip(other, one, strict=True))
                rows.append({"seed": seed, "gpus": 1 if kind == "one" else GPUS, "run": name,
                             "losses": other, "distance": distance})
        write_json(path, row_origin("bench/order_scatter.py", sys.argv[1:]) | {"rows": rows})
    for run in dict.fromkeys(row["run"] for row in rows):
        distances = [row["distance"] for row in rows if row["run"] == run]
        print(f"{run:14} mean {statistics.mean(distances):.5f}  " + " ".join(f"{d:.5f}" for d in distances))


if __name__ == "__main__":
    main()
