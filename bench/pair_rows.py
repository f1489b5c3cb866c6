"""The rows of bench/pairs.py: options of train.py in which every two values stand together, as commands.

A row is {option: value}. For each way to run the GEMMs, a "stack", the rows are a covering array, made by
allpairspy (github.com/thombashi/allpairspy), without the pairs that train.py refuses. Those are `REFUSED` of
nanote/config.py, and the options that a model file lacks.
"""
import dataclasses
import itertools
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nanote import config

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
OTHER_CARD = ("mxfp8", "nvfp4")  # recipes of Transformer Engine that need Blackwell
PLACES = {  # {where a run is made: (steps, its size)}. A step has 4 sequences
    "cpu": (4, "--n-head 2 --n-embd 64 --seq-len 32 --eval-tokens 64 --device cpu"),
    # Triton's, in which a step takes seconds
    "interpreter": (2, "--n-head 2 --n-embd 32 --seq-len 8 --eval-tokens 32 --device cpu"),
    "gpu": (4, "--n-head 4 --n-embd 256 --seq-len 128 --eval-tokens 1024"),
}
SEQUENCES = 4
TRAINING = "--lr 3e-4 --lr-schedule constant --warmup-steps 0 --log-interval 1 --keep-checkpoints 2"
# Options that went wrong together, and more than two: each stack has a row with them.
MORE_THAN_PAIRS = (dict(layout="fsdp", fp8_recipe="none", bias=True),)
# Rows of model_te_fast for the interpreter; their other options are chosen.
INTERPRETED = (
    dict(fp8_recipe="delayed", data="packed", use_rotary=False, grad_accum=2, preset="gpt2-124m"),
    dict(fp8_recipe="delayed", data="plain", use_rotary=True, tie_embeddings=False, dropout=0.1,
         loss_chunks=2, gradient_checkpointing=True, preset="tiny"),
    dict(fp8_recipe="none", data="answers only", use_rotary=True, tie_embeddings=True, bias=False),
)


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
    for refusal in config.REFUSED:
        values = [[(setting.option, value) for value in examples(setting)] for setting in refusal.settings]
        pairs += [Refused(options, refusal.reason) for options in itertools.product(*values)]
    return pairs + [Refused((("model", model), option), "the model file has no such option")
                    for model in ("fast", "advanced", "fused", "custom", "te")
                    for option in lacked_options(model)]


def examples(setting: config.Setting) -> tuple:
    """Return values of an option with which a setting of REFUSED applies."""
    if not setting.values:
        return (EXAMPLES.get(setting.option, switched_on(setting.option)),)
    return tuple("custom:my_recipe.quantizer_for" if value == "custom" else value for value in setting.values)


def switched_on(option: str):
    return True if isinstance(getattr(config.TrainConfig(), option), bool) else 1


def lacked_options(model: str):
    """Yield the options that a model file lacks, each with a value that asks for it."""
    from nanote import models
    model_class, config_class = models.model_classes(model)
    fields = {field.name for field in dataclasses.fields(config_class)}
    listed = set()
    for refusal in config.REFUSED:
        first, second, *_ = refusal.settings
        if first.option == "model" and model in first.values:
            listed.add(second.option)
    if not models.takes_argument(model_class, "cu_seqlens"):
        yield "pack_documents", True
    for option in models.MODEL_OPTIONS:
        if option not in fields and option not in listed:  # else the row of REFUSED has a better reason
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
        here = [recipe for recipe in parameters["fp8_recipe"] if recipe not in OTHER_CARD]
        parameters["fp8_recipe"] = tuple(here)
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
    for options in MORE_THAN_PAIRS:
        if not any(options.items() <= row.items() for row in rows):
            whole = rules.complete(options, parameters)
            rows.append({name: whole[name] for name in names})
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
    """Leave out rows that no pair needs, and give an option its cheap value wherever no pair is lost."""
    rows = sorted(rows, key=lambda row: -row["compile"])  # the slow ones first
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


def rows_of(part: str) -> list[tuple]:
    """Return the rows of a part, as (stack, row, place)."""
    rules = Rules()
    place = "cpu" if part == "cpu" else "gpu"
    rows = [(stack, row, place) for stack in STACKS if (stack == "te_reference") == (part == "cpu")
            for row in covering_array(stack, rules) if part_of(row) == part]
    if part == "cpu":
        parameters = parameters_of("model_te_fast")
        fixed = dict(NANOTE_ENGINE="fast", model="fast", layout="one process", cuda_graph="off")
        for some in INTERPRETED:
            row = rules.complete(fixed | some, parameters)
            rows.append(("model_te_fast", {name: row[name] for name in parameters}, "interpreter"))
    return rows


# ---------------------------------------------------------------- a row as a command

def arguments_of(row: dict, place: str, corpora: str, layers: int) -> list[str]:
    """Return train.py's arguments for a row, without the values that the preset has."""
    ranks, (steps, size) = 1 if row["layout"] == "one process" else 2, PLACES[place]
    defaults = vars(config.TrainConfig(**config.PRESETS[row["preset"]]))
    is_plain_gpt = row["model"] in ("fused", "custom", "te")  # with learned positions, whatever the preset
    arguments = ["--preset", row["preset"]]
    for name, value in as_options(row).items():
        if name in ("preset", "NANOTE_ENGINE") or name == "use_rotary" and is_plain_gpt:
            continue
        if value != defaults[name]:
            arguments += config.as_typed(name, value).split()
    corpus = "answers" if row["data"] == "answers only" else "documents"
    return [*arguments, *size.split(), *TRAINING.split(), "--n-layer", str(layers), "--max-steps", str(steps),
            "--eval-interval", str(steps - 1), "--checkpoint-interval", str(steps - 1),
            "--micro-batch-size", str(SEQUENCES // (ranks * row["grad_accum"])),
            "--data", f"{corpora}/{corpus}"]


def layers_of(row: dict, place: str) -> int:
    """Return the blocks of a row's model: one in the interpreter, or where Dynamo traces te_reference."""
    return 1 if place == "interpreter" or row["compile"] and place == "cpu" else 2


def command_of(row: dict, place: str, corpora: str) -> str:
    """Return the line that trains a row, for a shell."""
    engine = f"NANOTE_ENGINE={row['NANOTE_ENGINE']} " if row["NANOTE_ENGINE"] else ""
    engine = f"TRITON_INTERPRET=1 {engine}" if place == "interpreter" else engine
    launcher = "python" if row["layout"] == "one process" else "torchrun --nproc-per-node 2"
    arguments = arguments_of(row, place, corpora, layers_of(row, place))
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
    options = [config.as_typed(name, value).split() for name, value in refused.options
               if name != "NANOTE_ENGINE"]
    once = "--max-steps 1 --eval-interval 0 --checkpoint-interval 0"
    rest = f"{PLACES['cpu'][1]} {once} --data {corpora}/documents"
    return [*itertools.chain(*options), *rest.split()]


def refused_command(refused: Refused, corpora: str) -> str:
    """Return the line that tries a refused pair, for a shell."""
    engine = dict(refused.options).get("NANOTE_ENGINE")
    set_engine = f"NANOTE_ENGINE={engine} " if engine else ""
    return f"{set_engine}python train.py {shlex.join(refused_arguments(refused, corpora))}"
