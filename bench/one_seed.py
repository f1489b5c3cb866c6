"""Rank arms by the training loss of the first part of a run of 100 M tokens: python gap.py TREE JSON SEED ARM[:tokens]…
Differences from BF16 of the same seed: that of this file if it was run, else the stored one."""
import json, os, sys, time, statistics, pathlib
tree, out, seed, *arms = sys.argv[1:]
seed = int(seed)
sys.path.insert(0, tree)
os.chdir(tree)
import torch
from bench import paired, fp8_arms
from fast_kernels import fused
from nanote import models, recipes, checkpoint
from contextlib import closing
from nanote.parallel import Ranks, StopRequest
from nanote.loader import Loader
import train
STOP = float(os.environ.get("STOP", 0.6))

def precise_forward():
    def forward_gemm(x, weight, bias=None, added_to=None):
        return fused.gemm(x.rowwise, x.scale_inv, weight.rowwise, weight.scale_inv, bias, "precise", out=added_to,
                          accumulate=added_to is not None)
    return [(fused, "forward_gemm", forward_gemm), (fused, "DGRAD_FAST_ACCUM_K", 0)]

fp8_arms.CHANGES |= {
    "fp8-none": lambda: fp8_arms.one_in_fp8("nothing"),  # all operands in BF16, FP8's path
    "fp8-precise": precise_forward,
}
extra = {"fp8-none": dict(model="fast"), "fp8-precise": dict(model="fast"),
         "fp8-te": dict(model="optimized"), "bf16-te": dict(fp8_recipe="none", model="optimized"),
         "fp8-margin-1": dict(fp8_margin=1), "fp8-most-recent": dict(fp8_amax_compute_algo="most_recent"),
         "fp8-attention-bf16": {}}
if os.environ.get("DTYPE"):
    for fields in [*paired.ARMS.values(), *extra.values()]: fields["dtype"] = os.environ["DTYPE"]
for name, fields in extra.items():
    paired.ARMS[name] = fields
paired.CHANGED_FP8 = tuple(fp8_arms.CHANGES)
rows = {}
if os.path.exists(out): rows = json.load(open(out))
bins = int(os.environ.get("BIN", 40))

def stored(arm, seed):
    for r in json.load(open(os.environ.get("STORED", "results/paired.json")))["runs"]:
        if (r["arm"], r["seed"], r["tokens"], r["start"], r["stop"]) == (arm, seed, 100007936, 0.0, 1.0) and r["size"] == "124m":
            return r["losses"]

def run(arm, seed, tokens):
    options = paired.Options(arms=[arm], seeds=[seed], tokens=[tokens], data=os.environ.get("DATA", "/tmp/packages-r50k_base"))
    if os.environ.get("SIZE"): options.size = os.environ["SIZE"]
    began = time.time()
    te = arm.endswith("-te") or arm in ("fp8-current", "fp8-block")
    if te: os.environ["NANOTE_ENGINE"] = "te"
    config = paired.config_of(options, arm, seed)
    device = models.pick_device(config.device)
    loader = Loader(config, "train", Ranks(), device)
    train.fit_to_data(config, loader.meta, resumed_meta={})
    with paired.changes_of(arm):
        model, optimizer, gradients = paired.make_parts(config, device)
        if recipes.uses_delayed_scaling(model):
            batch = loader.batches(1)[0]
            recipes.find_first_scales(model, batch.inputs, config.grad_accum)
        digest = paired.weights_sha256(model)[:8]
        functions = train.make_step(config, model, optimizer, gradients)
        if config.uses_cuda_graph(recipes.has_fp8_gpu(device)):
            functions = train.with_cuda_graphs(model, optimizer, functions)
        with closing(StopRequest()) as stop:
            limit = paired.TimeLimit(1e9, stop)
            trained = paired.train_steps(config, optimizer, functions, loader, 1, round(STOP * options.steps), limit)
    ms = paired.ms_of_chunks(trained.times)
    result = dict(losses=trained.losses, ms=statistics.median(ms) if ms else None, skipped=trained.skipped_steps,
                  model=type(model).__name__, engine=getattr(model, "engine_description", ""), weights=digest, seconds=time.time() - began,
                  sha=loader.meta["train_sha256"][:8], tokens=tokens)
    if recipes.uses_delayed_scaling(model) and os.environ.get("STATS"):
        try: result["state"] = stats(model)
        except Exception as e: result["state"] = repr(e)
    os.environ.pop("NANOTE_ENGINE", None)
    del functions, model, optimizer, gradients
    paired.free(); torch._dynamo.reset()
    return result

def stats(model):
    found = {}
    for name, module in model.named_modules():
        for part in ("scaling_fwd", "scaling_bwd"):
            meta = getattr(module, "fp8_meta", {}).get(part) if hasattr(module, "fp8_meta") else None
            if meta is not None:
                h = meta.amax_history.float()
                found[f"{name}.{part}"] = dict(max=h.max(0).values.tolist(), now=h[1].tolist() if len(h) > 1 else None, scale=meta.scale.tolist())
    return found

def line(key):
    arm, s = key.split("/")[:2]
    base = rows.get(f"bf16/{s}", {}).get("losses") or stored("bf16", int(s))
    if not base: return key
    d = [a - b for a, b in zip(rows[key]["losses"], base)]
    cells = [f"{statistics.mean(d[i:i+bins]):+.3f}" for i in range(0, len(d) - bins // 2, bins)]
    return f"{key:28s} {rows[key]['ms'] or 0:6.1f} ms {rows[key]['seconds']:4.0f} s {rows[key]['model'][:8]} {rows[key]['sha']} {rows[key]['weights']} {' '.join(cells)}"

for arm in arms:
    key = f"{arm}/{seed}"
    try:
        rows[key] = run(arm, seed, float(os.environ.get("TOKENS", 100e6)))
        print(line(key), flush=True)
    except Exception as e:
        import traceback; traceback.print_exc(); print(key, "FAILED", repr(e)[:200], flush=True)
    json.dump(rows, open(out + ".new", "w")); os.replace(out + ".new", out)
for name in ("fp8", "fp8-first-bf16"):
    L = stored(name, seed)
    if L:
        rows[f"{name}/{seed}"] = rows.get(f"{name}/{seed}") or dict(losses=L[:round(STOP*763)], ms=0, seconds=0, model="stored", sha="", weights="")
        print(line(f"{name}/{seed}"))
