"""The first update of GPT-2 124M in BF16, on different engines: gradients, weights and the second loss.

    python data.py stdlib --tokenizer r50k_base
    python bench/first_update.py fast       # then te, fast-optimized, ref-f32, te-f32: to /tmp/one_step/ARM.pt
    python bench/first_update.py compare    # gradients against float32, and the second loss of each one's weights
"""
import os, sys, json
arm = sys.argv[1]
DATA = os.environ.get("DATA", "data/stdlib-r50k_base"); SEED = int(os.environ.get("SEED", 3))
ARMS = {"fast": {}, "fast-eager": dict(cuda_graph="off"), "te": dict(model="optimized"), "fast-optimized": dict(model="optimized"),
        "te-f32": dict(model="optimized", dtype="float32", attention="sdpa", micro_batch_size=16, grad_accum=8),
        "ref-f32": dict(model="optimized", dtype="float32", attention="sdpa", micro_batch_size=16, grad_accum=8)}
ENGINE = {"te": "te", "te-f32": "te", "fast-optimized": "fast", "ref-f32": "reference"}
if arm in ENGINE: os.environ["NANOTE_ENGINE"] = ENGINE[arm]
sys.path.insert(0, os.getcwd())
import torch
import train
from bench import paired
from bench.step import make_parts
from nanote import models, training_state
from nanote.loader import Loader
from nanote.parallel import Ranks
from nanote.schedule import learning_rate
torch.backends.cuda.matmul.allow_tf32 = False
FOLDER = "/tmp/one_step"; os.makedirs(FOLDER, exist_ok=True)
TINY = os.environ.get("TINY")
def make(arm):
    options = paired.Options(arms=["fp8"], seeds=[SEED], tokens=[100e6], data=DATA, size="tiny" if TINY else "124m")
    config = paired.config_of(options, "bf16", SEED)
    from dataclasses import replace
    fields = dict(ARMS[arm])
    if TINY: fields.pop("micro_batch_size", None); fields.pop("grad_accum", None)
    config = replace(config, fp8_recipe="none", **fields)
    device = models.pick_device(config.device)
    loader = Loader(config, "train", Ranks(), device)
    train.fit_to_data(config, loader.meta, resumed_meta={})
    return config, device, loader, *make_parts(config, device)
def load(model, stored):
    with torch.no_grad():
        for name, weight in training_state.weights_of(model).items(): weight.copy_(stored[name])
if arm != "compare":
    config, device, loader, model, optimizer, gradients = make(arm)
    first = f"{FOLDER}/first.pt"
    weights = training_state.weights_of(model)
    if arm == "fast": torch.save({n: w.detach().cpu() for n, w in weights.items()}, first)
    elif arm.endswith("f32"):
        load(model, torch.load(first))
        print("masters", [k for k in list(optimizer.state.values())[0]] if optimizer.state else None)
    else:
        same = all(torch.equal(w.detach().cpu(), torch.load(first)[n]) for n, w in weights.items())
        print(arm, "first weights equal:", same)
    before = {n: w.detach().clone() for n, w in weights.items()}
    step = train.make_step(config, model, optimizer, gradients)
    lr = learning_rate(1, config); optimizer.set_lr(lr)
    loss = train.run_micro_batches(step.forward_backward, loader.batches(1))
    gradients.set_grad()
    grads = {n: p.grad.detach().float().cpu().clone() for n, p in weights.items() if p.grad is not None}
    norm = step.update()
    after = {n: w.detach().float().cpu() for n, w in weights.items()}
    state = {}
    for n, w in weights.items():
        s = optimizer.state.get(w, {})
        state[n] = {k: v.detach().cpu() for k, v in s.items() if isinstance(v, torch.Tensor)}
    with torch.no_grad():
        loss2 = sum(model(*b.inputs).float() / b.divisor for b in loader.batches(2))
    print(f"{arm}: lr {lr:.2e} loss {loss.item():.6f} norm {norm.item():.6f} second {loss2.item():.6f} {type(model).__name__} grads {next(iter(grads.values())).dtype} missing {sorted(set(weights)-set(grads))}", models.describe(model))
    torch.save(dict(grads=grads, after=after, state=state), f"{FOLDER}/{arm}.pt")
else:
    names = [a for a in ("fast", "te", "fast-optimized", "te-f32", "ref-f32") if os.path.exists(f"{FOLDER}/{a}.pt")]
    data = {a: torch.load(f"{FOLDER}/{a}.pt") for a in names}
    first = {n: w.float() for n, w in torch.load(f"{FOLDER}/first.pt").items()}
    ref = data["ref-f32" if "ref-f32" in data else names[-1]]
    import re
    groups = {}
    for n in ref["grads"]: groups.setdefault(re.sub(r"\.\d+\.", ".*.", n), []).append(n)
    print(f"{'group':44s}" + "".join(f"{a:>34s}" for a in names) + "   (rel. gradient error; signs that differ; zeros; weights changed)")
    for g, ns in groups.items():
        cat = lambda d: torch.cat([d[n].flatten().float() for n in ns])
        r = cat(ref["grads"]); f = cat(first); line = f"{g:44s}"
        for a in names:
            if any(n not in data[a]["grads"] for n in ns): line += f"{'no gradient':>34s}"; continue
            x = cat(data[a]["grads"])
            line += f"{((x-r).norm()/r.norm()).item():10.4f}{((x.sign()!=r.sign()).float().mean()).item():9.4f}{(x==0).float().mean().item():8.4f}{(cat(data[a]['after'])!=f).float().mean().item():7.3f}"
        print(line)
    os.environ.pop("NANOTE_ENGINE", None)
    config, device, loader, model, optimizer, gradients = make("fast")
    def loss2(stored):
        load(model, stored)
        with torch.no_grad(): return sum(model(*b.inputs).float() / b.divisor for b in loader.batches(2)).item()
    for a in names: print(f"second loss of {a}'s weights in the fast model: {loss2({n: w for n, w in data[a]['after'].items()}):.6f}")
    base = {n: w for n, w in data["fast"]["after"].items()}
    for other in [a for a in names if a != "fast"]:
        for g, ns in groups.items():
            print(f"fast with {g} of {other}: {loss2(base | {n: data[other]['after'][n] for n in ns}) :.6f}")
    print("fast with all weights before the step:", loss2(first))
