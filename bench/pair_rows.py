"""The rows of bench/pairs.py: choices of train.py's options in which every two values stand together.

OPTIONS are the options and their values. A choice has one value of each: {option: value}. A stack is a way to
run the GEMMs, in which some options have fewer values. `covering_choices` makes the choices of a stack. A
`Row` is a choice and where it is trained, which makes it a command line.
"""
import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from bench.pair_refusals import TINY, refused_pairs, shell_command
from nanote import config

# ---------------------------------------------------------------- options, stacks, places

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
    "te": dict(  # its mxfp8 and nvfp4 need Blackwell
        NANOTE_ENGINE=("te",), fp8_recipe=("delayed", "current", "block", "none")),
    "fast_kernels": dict(NANOTE_ENGINE=("fast",), model=("optimized", "advanced", "fused", "custom", "te")),
    "model_te_fast": dict(  # with other values --model auto is not the fast model
        NANOTE_ENGINE=("", "fast"), model=("auto", "fast"), fp8_recipe=("delayed", "none"),
        dtype=("bfloat16",), compile=(False,)),
}
# Each stack begins with rows that have these, if it has their values.
STARTS = (
    # the only row that is traced in two processes, which is slow, and fastest without FP8
    dict(layout="ddp", compile=True, fp8_recipe="none"),
    # three values that failed together
    dict(layout="fsdp", fp8_recipe="none", bias=True),
    # with these, few of the later rows are traced
    *(dict(layout="one process", compile=True, fp8_recipe=recipe) for recipe in OPTIONS["fp8_recipe"]),
)


@dataclass(frozen=True)
class Place:
    """Where a row is trained: for how many steps, and with options for a size that is fast there."""

    steps: int
    size: str


CPU = Place(4, TINY)
INTERPRETER = Place(  # Triton's, in which a step takes seconds
    2, "--n-head 2 --n-embd 32 --seq-len 8 --eval-tokens 32 --device cpu")
GPU = Place(4, "--n-head 4 --n-embd 256 --seq-len 128 --eval-tokens 1024")
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


def is_in_two_processes(choice: dict) -> bool:
    return choice.get("layout", "one process") != "one process"


def is_slow(choice: dict) -> bool:
    return is_in_two_processes(choice) and choice.get("compile", False)


def train_options(choice: dict) -> dict:
    """Return a choice, or a part of it, by the names of TrainConfig."""
    options = {name: value for name, value in choice.items() if name not in ("layout", "data")}
    if is_in_two_processes(choice):
        options["parallel"] = choice["layout"]
    if choice.get("data") == "packed":
        options["pack_documents"] = True
    return options


# ---------------------------------------------------------------- choices with every pair

def is_allowed(choice: dict) -> bool:
    """Return whether a choice, or a part of one, has no refused pair."""
    options = train_options(choice)
    return not any(pair.items() <= options.items() for pair in refused_pairs())


def pairs_of(choice: dict) -> set:
    """Return the pairs ((option, value), (option, value)) that stand together in a choice."""
    return set(itertools.combinations(choice.items(), 2))


def all_pairs(values: dict) -> list:
    """Return the pairs of the values of any two options."""
    pairs = []
    for one, other in itertools.combinations(values, 2):
        for value, other_value in itertools.product(values[one], values[other]):
            pairs.append(((one, value), (other, other_value)))
    return pairs


def allowed_pairs(values: dict) -> list:
    """Return the pairs that train.py takes, with those options that have one value only."""
    fixed = {option: some[0] for option, some in values.items() if len(some) == 1}
    return [pair for pair in all_pairs(values) if is_allowed(fixed | dict(pair))]


def covering_choices(stack: str) -> list[dict]:
    """Return choices in which all allowed pairs of a stack stand together."""
    values = values_of(stack)
    missing = allowed_pairs(values)
    starts = []
    for start in STARTS:
        has_values = all(value in values[option] for option, value in start.items())
        fixed = {"NANOTE_ENGINE": values["NANOTE_ENGINE"][0]}  # it decides which values are refused
        if has_values and is_allowed(start | fixed):
            starts.append(start)
    choices = []
    while starts or missing:
        start = starts.pop(0) if starts else dict(missing[0])
        choice = complete(start, values, missing)
        choices.append(choice)
        found = pairs_of(choice)
        missing = [pair for pair in missing if pair not in found]
    return choices


def complete(start: dict, values: dict, missing=()) -> dict:
    """Return a choice that has the values of `start`. One option after the other gets the allowed value that
    makes most of the missing pairs with those before it, and of several such values the first.

    An option that has several values has one that is refused with no other, so there always is one.
    """
    choice = start
    for option in values:
        if option not in choice:
            candidates = [choice | {option: value} for value in values[option]]
            candidates = [candidate for candidate in candidates if is_allowed(candidate)]
            if not is_slow(start):
                candidates = [candidate for candidate in candidates if not is_slow(candidate)]
            choice = max(candidates, key=lambda candidate: count_found(missing, candidate))
    return {option: choice[option] for option in values}


def count_found(pairs, choice: dict) -> int:
    return len([pair for pair in pairs if dict(pair).items() <= choice.items()])


# ---------------------------------------------------------------- rows

@dataclass(frozen=True)
class Row:
    """A choice that is trained, and where."""

    stack: str
    choice: dict
    place: Place
    layers: int

    @property
    def ranks(self) -> int:
        return 2 if is_in_two_processes(self.choice) else 1

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that it needs. An empty value counts as unset."""
        engine = self.choice["NANOTE_ENGINE"]
        variables = {"NANOTE_ENGINE": engine}
        if self.place is not GPU:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        if self.place is INTERPRETER and engine != "reference":
            variables["TRITON_INTERPRET"] = "1"
        return variables

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
        options = train_options(self.choice)
        preset = options.pop("preset")
        defaults = vars(config.TrainConfig(**config.PRESETS[preset]))
        del options["NANOTE_ENGINE"]
        if options["model"] in ("fused", "custom", "te"):  # with learned positions, whatever the preset
            del options["use_rotary"]
        chosen = []
        for name, value in options.items():
            if value != defaults[name]:
                chosen += config.as_typed(name, value).split()
        corpus = "answers" if self.choice["data"] == "answers only" else "documents"
        before_last = str(self.place.steps - 1)
        micro_batch = SEQUENCES // (self.ranks * self.choice["grad_accum"])
        return [
            "--preset", preset, *chosen, *self.place.size.split(), *TRAINING.split(),
            "--n-layer", str(self.layers), "--max-steps", str(self.place.steps),
            "--eval-interval", before_last, "--checkpoint-interval", before_last,
            "--micro-batch-size", str(micro_batch), "--data", f"{corpora}/{corpus}"]

    def command(self, corpora: str) -> str:
        """Return the line that trains the row, for a shell."""
        return shell_command(self.arguments(corpora), self.environment, self.ranks)


def rows_of(part: str) -> list[Row]:
    """Return the rows of a part: "cpu", "gpu" or "gpus"."""
    rows = []
    if part == "cpu":
        for choice in covering_choices("te_reference"):
            layers = 1 if choice["compile"] else 2  # Dynamo traces te_reference
            rows.append(Row("te_reference", choice, CPU, layers))
        return rows + interpreted_rows()
    ranks = 1 if part == "gpu" else 2
    for stack in ("te", "fast_kernels", "model_te_fast"):
        of_stack = [Row(stack, choice, GPU, layers=2) for choice in covering_choices(stack)]
        rows += [row for row in of_stack if row.ranks == ranks]
    return rows


def interpreted_rows() -> list[Row]:
    """Return the rows of model_te_fast for Triton's interpreter."""
    values = values_of("model_te_fast")
    fixed = dict(NANOTE_ENGINE="fast", model="fast", layout="one process", cuda_graph="off")
    choices = [complete(fixed | some, values) for some in INTERPRETED]
    return [Row("model_te_fast", choice, INTERPRETER, layers=1) for choice in choices]


def make_corpora(folder: str) -> None:
    """Write the token files of the rows: documents, and questions whose answers alone are labels."""
    from nanote.tokens import write_tokens
    documents = []
    for i in range(400):
        letters = [chr(97 + (i * j + j // 3) % 26) for j in range(5 + 7 * i % 60)]
        documents.append("".join(letters))
    questions = [["q" * (3 + i % 7), f"{i % 10}{i % 7}{i % 3}."] for i in range(1000)]
    write_tokens(iter(documents), Path(folder, "documents"), val_fraction=0.2)
    write_tokens(iter(questions), Path(folder, "answers"), val_fraction=0.2, answers_only=True)
