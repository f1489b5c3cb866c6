"""The rows of bench/pairs.py: choices of train.py's options in which every two values stand together.

OPTIONS are the options and their values. A choice has one value of each: {option: value}. A stack is a way to
run the GEMMs, in which some options have fewer values. `covering_array` makes the choices of a stack, without
the pairs that train.py refuses, by allpairspy (github.com/thombashi/allpairspy). A `Row` is a choice and
where it is trained, which makes it a command line.
"""
import dataclasses
import itertools
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.pair_refusals import TINY, refused_pairs
from nanote import config

# ---------------------------------------------------------------- options, stacks, parts, places

OPTIONS = {  # names are those of TrainConfig, but for `layout` and `data`
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
# Stacks: the values of NANOTE_ENGINE, which counts as an option, and of options that have fewer values there.
STACKS = {
    "te_reference": dict(NANOTE_ENGINE=("reference",)),
    "te": dict(NANOTE_ENGINE=("te",)),
    "fast_kernels": dict(NANOTE_ENGINE=("fast",), model=("optimized", "advanced", "fused", "custom", "te")),
    "model_te_fast": dict(  # with other values --model auto is not the fast model
        NANOTE_ENGINE=("", "fast"), model=("auto", "fast"), fp8_recipe=("delayed", "none"),
        dtype=("bfloat16",), compile=(False,)),
}
PARTS = ("cpu", "gpu", "gpus")  # machines: without a GPU, with one, with two
OTHER_CARD = ("mxfp8", "nvfp4")  # recipes of Transformer Engine that need Blackwell
# Options that went wrong together, and are more than two: each stack has a row with them.
MORE_THAN_PAIRS = (dict(layout="fsdp", fp8_recipe="none", bias=True),)
# Tracing te_reference is slow, in two processes most, and fastest without FP8: one of its rows does that.
COMPILED_ON_TWO = dict(layout="ddp", compile=True, fp8_recipe="none")


@dataclass(frozen=True)
class Place:
    """Where a row is trained: for how many steps, and with options for a size that is fast there."""

    name: str
    steps: int
    size: str


CPU = Place("cpu", 4, TINY)
INTERPRETER = Place(  # Triton's, in which a step takes seconds
    "interpreter", 2, "--n-head 2 --n-embd 32 --seq-len 8 --eval-tokens 32 --device cpu")
GPU = Place("gpu", 4, "--n-head 4 --n-embd 256 --seq-len 128 --eval-tokens 1024")
SEQUENCES = 4  # of a step
TRAINING = "--lr 3e-4 --lr-schedule constant --warmup-steps 0 --log-interval 1 --keep-checkpoints 2"
# Rows of model_te_fast for the interpreter. Their other options get the first value that is not refused.
INTERPRETED = (
    dict(fp8_recipe="delayed", data="packed", use_rotary=False, grad_accum=2, preset="gpt2-124m"),
    dict(fp8_recipe="delayed", data="plain", use_rotary=True, tie_embeddings=False, dropout=0.1,
         loss_chunks=2, gradient_checkpointing=True, preset="tiny"),
    dict(fp8_recipe="none", data="answers only", use_rotary=True, tie_embeddings=True, bias=False),
)


def values_of(stack: str) -> dict[str, tuple]:
    """Return {option: values} of a stack."""
    return {"NANOTE_ENGINE": ()} | OPTIONS | STACKS[stack]


def part_of(choice: dict) -> str:
    """Return the part of the test that trains a choice."""
    if choice["NANOTE_ENGINE"] == "reference":
        return "cpu"
    return "gpu" if choice["layout"] == "one process" else "gpus"


def train_options(choice: dict) -> dict:
    """Return a choice, or a part of it, by the names of TrainConfig."""
    options = {name: value for name, value in choice.items() if name not in ("layout", "data")}
    if choice.get("layout", "one process") != "one process":
        options["parallel"] = choice["layout"]
    if choice.get("data") == "packed":
        options["pack_documents"] = True
    return options


# ---------------------------------------------------------------- covering arrays

class Rules:
    """Which choices train.py takes."""

    def __init__(self):
        self.refused = refused_pairs()

    def allows(self, choice: dict) -> bool:
        """Return whether a choice, or a part of one, has no refused pair."""
        options = train_options(choice)
        return not any(pair.is_in(options) for pair in self.refused)

    def complete(self, start: dict, values: dict) -> dict | None:
        """Return the first choice that has the values of `start`; None if each would be refused."""
        if not self.allows(start):
            return None
        missing = [option for option in values if option not in start]
        if not missing:
            return {option: start[option] for option in values}  # in the order of all choices
        option = missing[0]
        for value in values[option]:
            choice = self.complete(start | {option: value}, values)
            if choice is not None:
                return choice
        return None


def pairs_of(choice: dict) -> set:
    """Return the pairs ((option, value), (option, value)) that stand together in a choice."""
    return set(itertools.combinations(choice.items(), 2))


def pairs_in(choices: list[dict]) -> set:
    """Return the pairs that stand together in some of the choices."""
    return set().union(*map(pairs_of, choices))


def allowed_pairs(values: dict, rules: Rules) -> set:
    """Return the pairs that stand together in some choice that train.py takes."""
    pairs = set()
    for one, other in itertools.combinations(values, 2):
        for value, other_value in itertools.product(values[one], values[other]):
            pair = ((one, value), (other, other_value))
            if pair in pairs:
                continue
            choice = rules.complete(dict(pair), values)
            if choice is not None:
                pairs |= pairs_of(choice)
    return pairs


def covering_array(stack: str, rules: Rules) -> list[dict]:
    """Return choices in which all allowed pairs of a stack stand together."""
    values = values_of(stack)
    if stack == "te":
        values["fp8_recipe"] = tuple(name for name in values["fp8_recipe"] if name not in OTHER_CARD)
    choices = choices_of_allpairs(values, rules)
    if stack == "te_reference":
        choices.append(rules.complete(COMPILED_ON_TWO, values))
    left = allowed_pairs(values, rules) - pairs_in(choices)
    while left:  # pairs of slow choices, and what allpairspy leaves out where many pairs are refused
        pair = min(left, key=repr)
        choices.append(rules.complete(dict(pair), values))
        left -= pairs_of(choices[-1])
    choices = make_cheaper(choices, "compile", False, rules)
    choices = make_cheaper(choices, "layout", "one process", rules)
    choices = make_cheaper(choices, "layout", "one process", rules)  # some are useless now
    for options in MORE_THAN_PAIRS:
        if not any(options.items() <= choice.items() for choice in choices):
            choices.append(rules.complete(options, values))
    return choices


def choices_of_allpairs(values: dict, rules: Rules) -> list[dict]:
    """Return the choices that allpairspy makes, none of which is refused, or compiled in two processes."""
    from allpairspy import AllPairs

    def is_good(some_values) -> bool:  # allpairspy asks after each value that it adds
        choice = dict(zip(values, some_values))
        in_two_processes = choice.get("layout", "one process") != "one process"
        is_slow = choice.get("compile", False) and in_two_processes
        return rules.allows(choice) and not is_slow

    found = AllPairs(list(values.values()), filter_func=is_good)
    choices = [dict(zip(values, all_values)) for all_values in found]
    return [choice for choice in choices if len(choice) == len(values)]


def make_cheaper(choices: list[dict], option: str, cheap, rules: Rules) -> list[dict]:
    """Leave out choices whose pairs all stand in other choices, too. In the rest, give `option` its cheap
    value unless a pair that stands only there would be lost."""
    choices = sorted(choices, key=lambda choice: choice["compile"], reverse=True)  # the slow ones first
    count = Counter()
    for choice in choices:
        count.update(pairs_of(choice))
    kept = []
    for choice in choices:
        only_here = {pair for pair in pairs_of(choice) if count[pair] == 1}
        if not only_here:
            count.subtract(pairs_of(choice))
            continue
        changed = choice | {option: cheap}
        if rules.allows(changed) and only_here <= pairs_of(changed):
            count.subtract(pairs_of(choice))
            count.update(pairs_of(changed))
            choice = changed
        kept.append(choice)
    return kept


# ---------------------------------------------------------------- rows

@dataclass
class Row:
    """A choice that is trained, and where."""

    stack: str
    choice: dict
    place: Place
    layers: int

    @property
    def engine(self) -> str:
        """The value of NANOTE_ENGINE; "": unset."""
        return self.choice["NANOTE_ENGINE"]

    @property
    def ranks(self) -> int:
        return 1 if self.choice["layout"] == "one process" else 2

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs it. The plain row of such a row runs on te_reference instead."""
        return self.place is INTERPRETER and self.engine != "reference"

    def plain(self) -> "Row":
        """Return the row of the same network, data and optimizer without what only changes how a step is
        computed: on te_reference, in one process, without FP8."""
        model = self.choice["model"]
        if model in ("auto", "fast"):
            model = "optimized"
        plain = dict(
            NANOTE_ENGINE="reference", model=model, fp8_recipe="none", fp8_format="auto",
            layout="one process", grad_accum=1, gradient_checkpointing=False, loss_chunks=1,
            compile=False, cuda_graph="off")
        return dataclasses.replace(self, choice=self.choice | plain)

    def arguments(self, corpora: str) -> list[str]:
        """Return train.py's arguments, without values that are the preset's."""
        corpus = "answers" if self.choice["data"] == "answers only" else "documents"
        before_last = str(self.place.steps - 1)
        micro_batch = SEQUENCES // (self.ranks * self.choice["grad_accum"])
        return [
            *self._chosen_arguments(), *self.place.size.split(), *TRAINING.split(),
            "--n-layer", str(self.layers), "--max-steps", str(self.place.steps),
            "--eval-interval", before_last, "--checkpoint-interval", before_last,
            "--micro-batch-size", str(micro_batch), "--data", f"{corpora}/{corpus}"]

    def _chosen_arguments(self) -> list[str]:
        preset = self.choice["preset"]
        defaults = vars(config.TrainConfig(**config.PRESETS[preset]))
        options = train_options(self.choice)
        del options["preset"], options["NANOTE_ENGINE"]
        if options["model"] in ("fused", "custom", "te"):  # with learned positions, whatever the preset
            del options["use_rotary"]
        arguments = ["--preset", preset]
        for name, value in options.items():
            if value != defaults[name]:
                arguments += config.as_typed(name, value).split()
        return arguments

    def command(self, corpora: str) -> str:
        """Return the line that trains the row, for a shell."""
        launcher = "python" if self.ranks == 1 else "torchrun --nproc-per-node 2"
        command = f"{launcher} train.py {shlex.join(self.arguments(corpora))}"
        if self.engine:
            command = f"NANOTE_ENGINE={self.engine} {command}"
        if self.is_interpreted:
            command = f"TRITON_INTERPRET=1 {command}"
        return command


def rows_of(part: str) -> list[Row]:
    """Return the rows of a part."""
    rules = Rules()
    if part == "cpu":
        rows = []
        for choice in covering_array("te_reference", rules):
            layers = 1 if choice["compile"] else 2  # Dynamo traces te_reference
            rows.append(Row("te_reference", choice, CPU, layers))
        return rows + interpreted_rows(rules)
    rows = []
    for stack in ("te", "fast_kernels", "model_te_fast"):
        for choice in covering_array(stack, rules):
            if part_of(choice) == part:
                rows.append(Row(stack, choice, GPU, layers=2))
    return rows


def interpreted_rows(rules: Rules) -> list[Row]:
    """Return the rows of model_te_fast for Triton's interpreter."""
    values = values_of("model_te_fast")
    fixed = dict(NANOTE_ENGINE="fast", model="fast", layout="one process", cuda_graph="off")
    choices = [rules.complete(fixed | some, values) for some in INTERPRETED]
    return [Row("model_te_fast", choice, INTERPRETER, layers=1) for choice in choices]


def make_corpora(folder: str) -> None:
    """Write the token files of the rows: documents, and questions whose answers alone are labels."""
    from nanote.tokens import write_tokens
    documents = []
    for i in range(400):
        letters = [chr(97 + (i * j + j // 3) % 26) for j in range(5 + 7 * i % 60)]
        documents.append("".join(letters))
    questions = [["q" * (3 + i % 7), f"{i % 10}{i % 7}{i % 3}."] for i in range(1000)]
    if not Path(folder, "documents").exists():
        write_tokens(iter(documents), Path(folder, "documents"), val_fraction=0.2)
    if not Path(folder, "answers").exists():
        write_tokens(iter(questions), Path(folder, "answers"), val_fraction=0.2, answers_only=True)
