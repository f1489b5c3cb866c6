"""Train every pair of train.py's options, try every refused pair, and count what is missing.

    python bench/pairs.py                                # this machine's part: te_reference, on a CPU
    python bench/pairs.py --part gpu --jobs 8            # on one GPU: Transformer Engine and fast_kernels
    python bench/pairs.py --part gpus --jobs 4           # on two GPUs: ddp and fsdp
    python bench/pairs.py --part gpu --list              # print the commands of the rows; train nothing
    python bench/pairs.py --page                         # write guide/pairs.md

A row is a command line of train.py. For each way to run the GEMMs ("stack" below) the rows are a covering
array: every two values of two options stand together in some row, but for those that train.py refuses
(nanote/config.py, `REFUSED`, and the options that a model file lacks). Three ideas:

- A row is not only run. It trains 4 steps, evaluates, saves, and resumes from step 3, which must give step 4
  again. Its losses and gradient norms are those of the plain row: the same network and data on te_reference,
  in one process without FP8, without any option that only changes how a step is computed.
- Each refused pair is a command of its own, which must end with one line that names both options.
- The parts that need a GPU write the pairs that they trained to results/pairs.json. All parts read it, so that
  a pair that no part has trained is "missing" on any machine.

Reference: pairwise testing by allpairspy, github.com/thombashi/allpairspy.
"""
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing: no traceback

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import pair_runs  # noqa: E402
from nanote import config  # noqa: E402

JSON = ROOT / "results/pairs.json"
PAGE = ROOT / "guide/pairs.md"

# ---------------------------------------------------------------- options, and who runs them

# A row has one value of each. The names are those of TrainConfig, but for `layout`, `data` and NANOTE_ENGINE.
PARAMETERS = {
    "model": ("auto", "fast", "optimized", "advanced", "fused", "custom", "te"),
    "fp8_recipe": ("delayed", "current", "block", "mxfp8", "nvfp4", "none"),
    "fp8_format": ("auto", "hybrid", "e4m3"),
    "layout": ("one process", "ddp", "fsdp"),  # ddp and fsdp: two processes
    "optimizer": ("adamw", "muon"),
    "data": ("plain", "packed", "answers only"),
    "grad_accum": (1, 2),
    "gradient_checkpointing": (False, True),
    "loss_chunks": (1, 2),
    "dtype": ("bfloat16", "float32"),
    "tie_embeddings": (True, False),
    "bias": (True, False),
    "use_rotary": (False, True),
    "dropout": (0.0, 0.1),
    "compile": (False, True),
    "cuda_graph": ("auto", "off"),
    "preset": ("gpt2-124m", "tiny"),  # GPT-2's network, and Llama's
}
STACKS = {  # {who runs the GEMMs: values of NANOTE_ENGINE, and of the options that have fewer values there}
    "te_reference": dict(NANOTE_ENGINE=("reference",)),
    "te": dict(NANOTE_ENGINE=("te",)),
    "fast_kernels": dict(NANOTE_ENGINE=("fast",), model=("optimized", "advanced", "fused", "custom", "te")),
    "model_te_fast": dict(NANOTE_ENGINE=("", "fast"), model=("auto", "fast"), fp8_recipe=("delayed", "none"),
                          dtype=("bfloat16",), compile=(False,)),  # else `auto` is not the fast model
}
PARTS = ("cpu", "gpu", "gpus")
OTHER_CARD = ("mxfp8", "nvfp4")  # Transformer Engine has them, on Blackwell
SIZES = {  # of a row; 4 sequences a step. The sequences are longer on a GPU, for its kernels
    "cpu": "--n-head 2 --n-embd 64 --seq-len 32 --eval-tokens 64 --device cpu",
    "gpu": "--n-head 4 --n-embd 256 --seq-len 128 --eval-tokens 1024",
}
SEQUENCES = 4
STEPS = (f"--max-steps {pair_runs.STEPS} --lr 3e-3 --lr-schedule constant --warmup-steps 0 --fp8-amax-history-len 8 "
         "--log-interval 1 --eval-interval 3 --checkpoint-interval 3 --keep-checkpoints 2")

LONGEST_RUN = 240  # seconds without a result
# Largest relative difference from the plain row: (loss, validation loss, gradient norm). Measured: FP8 0.2 % and
# 9 %, dropout 0.7 % and 10 %, BF16 0.01 % and 0.5 %, which is one bit of a norm in BF16.
BOUNDS = {"high precision": (1e-3, 1e-3, 0.02), "fp8": (5e-3, 5e-3, 0.2), "dropout": (2e-2, 2e-2, 0.25)}
RESUME_BOUND = 5e-3  # on a GPU, whose sums may have another order; te_reference repeats step 4 bit for bit


def part_of(row: dict) -> str:
    """Return the part of the test that trains a row."""
    if row["NANOTE_ENGINE"] == "reference":
        return "cpu"
    return "gpu" if row["layout"] == "one process" else "gpus"


def as_options(row: dict) -> dict:
    """Return a row, or a part of it, by the names of TrainConfig."""
    options = {name: value for name, value in row.items() if name not in ("layout", "data")}
    if row.get("layout", "one process") != "one process":
        options["parallel"] = row["layout"]
    if row.get("data") == "packed":
        options["pack_documents"] = True
    return options


# ---------------------------------------------------------------- refused pairs

EXAMPLES = dict(n_kv_head=2, head_dim=32, rope_theta=5e5, activation="swiglu", attention="sdpa",
                attn_dropout=0.1)  # values of options that are no switches


@dataclass(frozen=True)
class Refused:
    """Options that do not go together, as (name, value), and why: two, or three for an engine's."""

    options: tuple
    reason: str

    def matches(self, options: dict) -> bool:
        return all(options.get(name) == value for name, value in self.options)


def refused_pairs() -> list[Refused]:
    """Return all refused pairs: those of nanote/config.py, and the options that each model file lacks."""
    pairs = []
    for *conditions, reason in config.REFUSED:
        values = [[(name, value) for value in examples(name, some)] for name, some in conditions]
        pairs += [Refused(options, reason) for options in itertools.product(*values)]
    return pairs + [Refused((("model", model), option), "the model file has no such option")
                    for model in ("fast", "advanced", "fused", "custom", "te")
                    for option in lacked_options(model)]


def examples(option: str, values) -> tuple:
    """Return values of an option for an entry of REFUSED."""
    if values is config.ON:
        return (EXAMPLES.get(option, switched_on(option)),)
    return tuple("custom:my_recipe.quantizer_for" if value == "custom" else value for value in values)


def switched_on(option: str):
    return True if isinstance(getattr(config.TrainConfig(), option), bool) else 1


def lacked_options(model: str):
    """Yield the options that a model file lacks, each with a value that asks for it."""
    from nanote import models
    model_class, config_class = models.model_classes(model)
    fields = {field.name for field in dataclasses.fields(config_class)}
    listed = {other for (one, values), (other, _), *_ in config.REFUSED if one == "model" and model in values}
    if not models.takes_argument(model_class, "cu_seqlens"):
        yield "pack_documents", True
    for option in models.OPTIONS:
        if option not in fields and option not in listed:  # else the entry of REFUSED has a better reason
            yield option, EXAMPLES.get(option, switched_on(option))


# ---------------------------------------------------------------- covering arrays

def parameters_of(stack: str) -> dict:
    return {"NANOTE_ENGINE": ()} | PARAMETERS | STACKS[stack]


def pairs_of(row: dict) -> set:
    """Return the pairs ((name, value), (name, value)) that stand together in a row."""
    return set(itertools.combinations(row.items(), 2))


class Rules:
    """Which rows train.py takes."""

    def __init__(self):
        self.refused = refused_pairs()

    def allows(self, row: dict) -> bool:
        """Return whether no two options of a row, or of a part of it, are refused."""
        options = as_options(row)
        return not any(pair.matches(options) for pair in self.refused)

    def complete(self, row: dict, parameters: dict) -> dict | None:
        """Return a row that begins with these values; None if each would be refused."""
        missing = [name for name in parameters if name not in row]
        if not self.allows(row) or not missing:
            return row if self.allows(row) else None
        found = (self.complete(row | {missing[0]: value}, parameters) for value in parameters[missing[0]])
        return next((whole for whole in found if whole), None)


def covering_array(stack: str, rules: Rules) -> list[dict]:
    """Return rows in which every two values of two options of a stack stand together, unless refused."""
    from allpairspy import AllPairs
    parameters = parameters_of(stack)
    if stack == "te":
        recipes = [recipe for recipe in parameters["fp8_recipe"] if recipe not in OTHER_CARD]
        parameters["fp8_recipe"] = tuple(recipes)
    names = list(parameters)

    def is_good(values) -> bool:
        row = dict(zip(names, values))
        is_slow = row.get("compile") and row.get("layout", "one process") != "one process"
        return rules.allows(row) and not is_slow

    rows = [dict(zip(names, values)) for values in AllPairs(list(parameters.values()), filter_func=is_good)]
    rows = [row for row in rows if len(row) == len(names)]
    left = wanted_pairs(parameters, rules) - set().union(*map(pairs_of, rows))
    while left:  # those of slow rows, and what allpairspy leaves out where many pairs are refused
        whole = rules.complete(dict(sorted(left, key=repr)[0]), parameters)
        rows.append({name: whole[name] for name in names})
        left -= pairs_of(rows[-1])
    for name, cheap in (("compile", False), ("layout", "one process"), ("layout", "one process")):
        rows = with_fewer(rows, name, cheap, rules)
    return rows


def wanted_pairs(parameters: dict, rules: Rules) -> set:
    """Return the pairs that some row could have."""
    pairs = set()
    for one, other in itertools.combinations(parameters, 2):
        for values in itertools.product(parameters[one], parameters[other]):
            pair = dict(zip((one, other), values))
            if rules.complete(pair, parameters):
                pairs.add(tuple(pair.items()))
    return pairs


def with_fewer(rows: list, name: str, cheap, rules: Rules) -> list[dict]:
    """Return the rows without those that no pair needs, and with the cheap value of an option wherever no pair
    is lost; compiled rows first."""
    rows = sorted(rows, key=lambda row: -row["compile"])
    count = Counter(itertools.chain(*map(pairs_of, rows)))
    for number, row in enumerate(rows):
        changed = row | {name: cheap}
        lost = {pair for pair in pairs_of(row) if count[pair] == 1}
        if not lost:
            rows[number] = None
            count -= Counter(pairs_of(row))
        elif rules.allows(changed) and lost <= pairs_of(changed):
            rows[number] = changed
            count += Counter(pairs_of(changed))
            count -= Counter(pairs_of(row))
    return [row for row in rows if row]


def all_rows() -> dict:
    """Return {stack: rows}."""
    rules = Rules()
    return {stack: covering_array(stack, rules) for stack in STACKS}


# ---------------------------------------------------------------- a row as a command

def typed(name: str, value) -> list[str]:
    """Return an option as it is typed."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    return [flag, str(value)]


def arguments_of(row: dict, place: str, corpora: str, layers: int = 2) -> list[str]:
    """Return train.py's arguments for a row. Left out: values that the preset has, and those that the model
    file cannot change."""
    options = as_options(row)
    ranks = 1 if row["layout"] == "one process" else 2
    defaults = vars(config.TrainConfig(**config.PRESETS[row["preset"]]))
    is_plain_gpt = row["model"] in ("fused", "custom", "te")  # with learned positions, whatever the preset
    arguments = ["--preset", row["preset"]]
    for name, value in options.items():
        if name in ("preset", "NANOTE_ENGINE") or name == "use_rotary" and is_plain_gpt:
            continue
        if value != defaults[name]:
            arguments += typed(name, value)
    if row["preset"] == "gpt2-124m":
        arguments += typed("grad_accum", row["grad_accum"]) if row["grad_accum"] == 1 else []
    size = "gpu" if place == "gpu" else "cpu"
    corpus = "answers" if row["data"] == "answers only" else "documents"
    return [*arguments, *SIZES[size].split(), *STEPS.split(), "--n-layer", str(layers),
            "--micro-batch-size", str(SEQUENCES // (ranks * row["grad_accum"])),
            "--data", f"{corpora}/{corpus}"]


def layers_of(row: dict, place: str) -> int:
    """Return the blocks of a row's model: compiled on a CPU one, since tracing te_reference takes seconds."""
    return 1 if row["compile"] and place == "cpu" else 2


def command_of(row: dict, place: str, corpora: str) -> str:
    """Return the line that trains a row, for a shell."""
    engine = f"NANOTE_ENGINE={row['NANOTE_ENGINE']} " if row["NANOTE_ENGINE"] else ""
    engine = f"TRITON_INTERPRET=1 {engine}" if place == "interpreter" else engine
    arguments = arguments_of(row, place, corpora, layers_of(row, place))
    launcher = "python" if row["layout"] == "one process" else "torchrun --nproc-per-node 2"
    return f"{engine}{launcher} train.py {shlex.join(arguments)}"


def plain_row(row: dict) -> dict:
    """Return the row with the same network, data and optimizer, without what only changes how it is computed:
    on te_reference, in one process, without FP8."""
    model = "optimized" if row["model"] in ("auto", "fast") else row["model"]
    return row | dict(NANOTE_ENGINE="reference", model=model, fp8_recipe="none", fp8_format="auto",
                      layout="one process", grad_accum=1, gradient_checkpointing=False, loss_chunks=1,
                      compile=False, cuda_graph="off")


def make_corpora(folder: str) -> None:
    """Write the token files of the rows: documents, and questions whose answers alone are labels."""
    from nanote.tokens import write_tokens
    documents = ["".join(chr(97 + (i * j + j // 3) % 26) for j in range(5 + 7 * i % 60)) for i in range(400)]
    pairs = [["q" * (3 + i % 7), f"{i % 10}{i % 7}{i % 3}."] for i in range(1000)]
    for name, texts, answers_only in (("documents", documents, False), ("answers", pairs, True)):
        if not Path(folder, name).exists():
            write_tokens(iter(texts), Path(folder, name), val_fraction=0.2, answers_only=answers_only)


def refused_arguments(refused: Refused, corpora: str) -> list[str]:
    """Return train.py's arguments that try a refused pair, with defaults otherwise; one step if it trains."""
    options = [typed(name, value) for name, value in refused.options if name != "NANOTE_ENGINE"]
    rest = f"{SIZES['cpu']} --max-steps 1 --eval-interval 0 --checkpoint-interval 0 --data {corpora}/documents"
    return [*itertools.chain(*options), *rest.split()]


def refused_command(refused: Refused, corpora: str) -> str:
    """Return the line that tries a refused pair, for a shell."""
    engine = dict(refused.options).get("NANOTE_ENGINE")
    set_engine = f"NANOTE_ENGINE={engine} " if engine else ""
    return f"{set_engine}python train.py {shlex.join(refused_arguments(refused, corpora))}"


def try_refused(refused: Refused, corpora: str) -> str:
    """Return what is wrong with how train.py refuses a pair, in this process; "" if nothing is."""
    import train as program
    arguments, before = refused_arguments(refused, corpora), os.environ.pop("NANOTE_ENGINE", None)
    if engine := dict(refused.options).get("NANOTE_ENGINE"):
        os.environ["NANOTE_ENGINE"] = engine
    out, error = (io.TextIOWrapper(io.BytesIO()) for _ in range(2))
    run = f"{corpora}/refused"
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
            code = config.run_command(lambda: program.run([*arguments, "--out-dir", run]), "train.py")
    except (Exception, SystemExit) as failure:
        return f"{type(failure).__name__} instead of a line: {config.in_a_line(failure)}"
    finally:
        os.environ.pop("NANOTE_ENGINE", None)
        os.environ |= {"NANOTE_ENGINE": before} if before else {}
    line = error.buffer.getvalue().decode().strip()
    names = [name if name == "NANOTE_ENGINE" else typed(name, value)[0] for name, value in refused.options]
    if code != 2 or "\n" in line or not all(name in line for name in names) or os.path.exists(run):
        shutil.rmtree(run, ignore_errors=True)
        return f"code {code}, and must be 2; one line must name {' and '.join(names)}: {line}"
    return ""


# ---------------------------------------------------------------- workers

class Worker:
    """Processes that make runs one after the other: one process, or one for each of two ranks.

    After a failed run they end, and new ones make the runs that are left.
    """

    def __init__(self, engine: str, place: str, ranks: int, runs: list[dict], folder: Path):
        self.engine, self.place, self.ranks, self.runs, self.folder = engine, place, ranks, runs, folder
        self.results, self.log, self.job = (folder / name for name in ("results.jsonl", "log.txt", "job.json"))
        folder.mkdir(parents=True)
        self.results.touch()
        self.found, self.processes = {}, []  # {name of a run: its result}

    def start(self) -> None:
        """Start the processes for the runs that have no result yet."""
        self.news, self.found_before = time.monotonic(), len(self.found)
        left = [run for run in self.runs if run["name"] not in self.found]
        self.job.write_text(json.dumps(dict(folder=str(self.folder), place=self.place, runs=left)))
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.processes = [self._start_rank(rank, port) for rank in range(self.ranks)]

    def _start_rank(self, rank: int, port: int):
        environment = {"OMP_NUM_THREADS": "1", "NANOTE_ENGINE": self.engine}
        if self.ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
                            "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "localhost",
                            "MASTER_PORT": str(port)}
        if self.place == "interpreter":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.place == "cpu":  # a fork has imported everything
            process = multiprocessing.get_context("fork").Process(target=self._in_fork, args=(environment,))
            process.start()
            return process
        command = [sys.executable, str(ROOT / "bench/pair_runs.py"), str(self.job), str(self.results)]
        with open(self.log, "a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)

    def _in_fork(self, environment: dict) -> None:
        import torch
        log = open(self.log, "a", buffering=1)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        sys.stdout = sys.stderr = log
        os.environ.update(environment)
        torch.set_num_threads(1)  # a fork has no threads of OpenMP
        code = 1
        try:
            code = pair_runs.work(json.loads(self.job.read_text()), str(self.results))
        finally:
            log.flush()
            os._exit(code)

    def poll(self) -> bool:
        """Return whether each run has a result. Start processes for those that are left after a failure."""
        self._read()
        codes = [code_of(process) for process in self.processes]
        if None in codes:
            patience = 5 if any(codes) else LONGEST_RUN  # a rank waits for one that has failed
            if time.monotonic() - self.news < patience:
                return False
            self.end()
        self._read()
        left = [run["name"] for run in self.runs if run["name"] not in self.found]
        if left and len(self.found) == self.found_before:  # the first of them ended its process
            self.found[left[0]] = {"error": f"the process ended with {codes}, or ran {LONGEST_RUN} s"}
            left = left[1:]
        if left:
            self.start()
        return not left

    def _read(self) -> None:
        """Read the results that have come."""
        results = [json.loads(line) for line in self.results.read_text().splitlines()]
        for result in results:
            if result["name"] not in self.found:
                self.found[result["name"]], self.news = result, time.monotonic()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait() if isinstance(process, subprocess.Popen) else process.join()


def code_of(process) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def make_runs(rows: list, place: str, folder: Path, jobs: int) -> dict:
    """Make the runs of rows, and of their plain rows; return {command: result}. `place`: "cpu" or "gpu"."""
    runs = {}  # {(engine, place, ranks): {command: run}}
    corpora = f"{folder}/corpora"
    make_corpora(corpora)
    for row, where in rows:
        layers = layers_of(row, where)
        plain = plain_row(row), "gpu" if where == "gpu" else "cpu", False
        for made, its_place, resumes in ((row, where, True), plain):
            key = made["NANOTE_ENGINE"], its_place, 1 if made["layout"] == "one process" else 2
            arguments = arguments_of(made, its_place, corpora, layers)
            resume = ["--no-compile"] if made["compile"] and its_place == "cpu" else []  # it traces once
            run = {"arguments": arguments, "resume": resume if resumes else None,
                   "cost": 5 if made["compile"] else 1}
            runs.setdefault(key, {}).setdefault(name_of(made, arguments), run)
    waiting = []
    total = sum(run["cost"] * ranks for (_, _, ranks), some in runs.items() for run in some.values())
    for (engine, its_place, ranks), some in runs.items():
        cost = sum(run["cost"] * ranks for run in some.values())
        for part in divided(some, max(1, round(jobs * cost / total))):
            waiting.append(Worker(engine, its_place, ranks, part, folder / f"worker-{len(waiting)}"))
    return finish(waiting, jobs)


def name_of(row: dict, arguments: list) -> str:
    """Return a name of a run that is a folder, too."""
    text = f"{row['NANOTE_ENGINE']} {row['layout']} {arguments}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def divided(runs: dict, parts: int) -> list[list]:
    """Return the runs in `parts` lists of about equal cost."""
    lists, costs = [[] for _ in range(parts)], [0] * parts
    for name, run in sorted(runs.items(), key=lambda item: -item[1]["cost"]):
        cheapest = costs.index(min(costs))
        lists[cheapest].append(run | {"name": name})
        costs[cheapest] += run["cost"]
    return [some for some in lists if some]


def finish(waiting: list, jobs: int) -> dict:
    """Let up to `jobs` workers make their runs at a time; return {name of a run: result}."""
    waiting.sort(key=lambda worker: (-worker.ranks, -sum(run["cost"] for run in worker.runs)))
    active, found = [], {}
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                active.append(waiting.pop(0))
                active[-1].start()
            for worker in [worker for worker in active if worker.poll()]:
                active.remove(worker)
                found |= {name: result | {"log": str(worker.log)} for name, result in worker.found.items()}
            time.sleep(0.05)
    finally:
        for worker in active:
            worker.end()
    return found


# ---------------------------------------------------------------- what is right

def problems(row: dict, found: dict, plain: dict) -> list[str]:
    """Return what is wrong with a row's run, a line each."""
    for name, result in (("", found), ("the plain row: ", plain)):
        if "error" in result:
            return [f"{name}{result['error']}; its log: {result.get('log')}"]
    wrong = []
    steps = [record["step"] for record in found["metrics"]]
    if steps != [*range(1, pair_runs.STEPS + 1)]:
        return [f"metrics.jsonl has the steps {steps}"]
    exact = row["NANOTE_ENGINE"] == "reference"
    for record, again in zip(found["metrics"], found["resumed"], strict=True):
        for name in ("loss", "grad_norm", "val_loss"):
            bound = 0 if exact or record["step"] < pair_runs.STEPS else RESUME_BOUND
            if name in record and not abs(again[name] / record[name] - 1) <= bound:
                wrong.append(f"step {record['step']}: {name} {record[name]}, resumed {again[name]}")
    kind = "dropout" if row["dropout"] else "fp8" if row["fp8_recipe"] != "none" else "high precision"
    for record, its_plain in zip(found["metrics"], plain["metrics"], strict=True):
        for name, bound in zip(("loss", "val_loss", "grad_norm"), BOUNDS[kind]):
            if name in record and not abs(record[name] / its_plain[name] - 1) <= bound:
                wrong.append(f"step {record['step']}: {name} {record[name]}, the plain row's {its_plain[name]}")
    return wrong


@dataclass
class Outcome:
    """What became of a row."""

    stack: str
    row: dict
    command: str
    wrong: list
    seconds: float


def train(rows: list, folder: Path, jobs: int) -> list[Outcome]:
    """Train rows, as (stack, row, place), and compare each with its plain row."""
    found, outcomes = make_runs([row[1:] for row in rows], rows[0][2], folder, jobs), []
    for stack, row, place in rows:
        layers, corpora, plain = layers_of(row, place), f"{folder}/corpora", plain_row(row)
        of_plain = arguments_of(plain, "gpu" if place == "gpu" else "cpu", corpora, layers)
        result = found[name_of(row, arguments_of(row, place, corpora, layers))]
        wrong = problems(row, result, found[name_of(plain, of_plain)])
        command = command_of(row, place, corpora)
        outcomes.append(Outcome(stack, row, command, wrong, result.get("seconds", 0)))
    return outcomes
