"""The pairs of options that train.py refuses, for bench/pairs.py: all of them, a try of each, and the page.

A refused pair comes from `REFUSED` in nanote/config.py, or is an option that a model file lacks. Trying it
must end with exit code 2 and one line that names its options.
"""
import contextlib
import functools
import io
import itertools
import os
import shlex
import shutil
import textwrap
from unittest import mock

from nanote import config
from nanote.command import error_line, run_command

TINY = "--n-head 2 --n-embd 64 --seq-len 32 --eval-tokens 64 --device cpu"
ONE_STEP = "--max-steps 1 --eval-interval 0 --checkpoint-interval 0"  # if it trains after all
OTHER_MODELS = ("advanced", "fused", "custom", "te")  # which lack some options that `optimized` has
# Values that turn on an option that is neither a switch nor a number of steps.
EXAMPLES = dict(
    n_kv_head=2, head_dim=32, rope_theta=5e5, rope_scaling="8:1:4:8192", activation="swiglu",
    attention="sdpa", attn_dropout=0.1)


def shell_command(arguments: list[str], environment: dict, ranks=1) -> str:
    """Return a command line of train.py for a shell."""
    variables = [f"{name}={value}" for name, value in environment.items() if value]
    launcher = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", "2"]
    return " ".join([*variables, *launcher, "train.py", shlex.join(arguments)])


# ---------------------------------------------------------------- all of them

@functools.cache
def refused_pairs() -> list[dict]:
    """Return the options, {name: value}, that train.py refuses together: those of REFUSED, with every value
    that it names, and what each model file lacks.

    Where the engine counts, they are three: NANOTE_ENGINE stands among them as if it were an option.
    """
    pairs = []
    for refusal in config.REFUSED:
        examples = [example_values(option, values) for option, values in refusal.settings.items()]
        for some in itertools.product(*examples):
            pairs.append(dict(zip(refusal.settings, some)))
    for model in ("fast", *OTHER_MODELS):
        for option in lacked_options(model):
            pairs.append({"model": model, option: value_on(option)})
    return pairs


def example_values(option: str, values: tuple) -> list:
    """Return the values to try for an option and its values in REFUSED."""
    if values == config.ANY_VALUE_BUT_OFF:
        return [value_on(option)]
    return ["custom:my_recipe.quantizer_for" if value == "custom" else value for value in values]


def value_on(option: str):
    """Return a value that turns an option on."""
    if option in EXAMPLES:
        return EXAMPLES[option]
    is_switch = isinstance(getattr(config.TrainConfig(), option), bool)
    return True if is_switch else 1


def lacked_options(model: str) -> list[str]:
    """Return the options that a model file lacks, without those that REFUSED names with a better reason."""
    from nanote import models
    return list(models.lacked_options(model))


# ---------------------------------------------------------------- a try of each

def arguments_of(pair: dict, corpora: str) -> list[str]:
    """Return train.py's arguments that try a pair, with the defaults of all other options."""
    words = []
    for name, value in pair.items():
        if name != "NANOTE_ENGINE":
            words += config.as_typed(name, value).split()
    return [*words, *TINY.split(), *ONE_STEP.split(), "--data", f"{corpora}/documents"]


def environment_of(pair: dict) -> dict[str, str]:
    return {"NANOTE_ENGINE": pair.get("NANOTE_ENGINE", "")}


def command_of(pair: dict, corpora: str) -> str:
    """Return the line that tries a pair, for a shell."""
    return shell_command(arguments_of(pair, corpora), environment_of(pair))


def what_is_wrong(pair: dict, corpora: str) -> str:
    """Try a refused pair in this process; return what is wrong with its refusal, "" if nothing is."""
    folder = f"{corpora}/refused"
    with mock.patch.dict(os.environ, environment_of(pair)):
        code, line = run_train([*arguments_of(pair, corpora), "--out-dir", folder])
    names = [name if name == "NANOTE_ENGINE" else config.flag(name) for name in pair]
    wrote_files = os.path.exists(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if code == 2 and "\n" not in line and all(name in line for name in names) and not wrote_files:
        return ""
    return f"code {code}, and must be 2; one line must name {' and '.join(names)}: {line}"


def run_train(arguments: list[str]) -> tuple:
    """Run train.py in this process -> (its exit code, what it wrote to stderr). For an exception that is no
    refusal, the code is its type's name."""
    import train
    stdout = io.TextIOWrapper(io.BytesIO())
    stderr = io.TextIOWrapper(io.BytesIO())
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = run_command(lambda: train.run(arguments), "train.py")
    except (Exception, SystemExit) as error:
        return type(error).__name__, error_line(error)
    return code, stderr.buffer.getvalue().decode().strip()


# ---------------------------------------------------------------- the page

PAGE = """# Which options go together?

```text
$ python train.py --parallel fsdp --compile
train.py: --parallel fsdp: does not go with --compile: not tested with sharded weights; leave one of them out
```

Every two of the options in the next paragraph go together, but for the pairs in the tables, which are
refused. So are `--init-from` with `--resume` or `--eval-only`, and `--attention flash` with `--attn-dropout`.

{trained}

## Options that exclude each other

{refused}

## Options that a model file lacks

`optimized` has them all. What a preset sets and a model lacks is left out, and one line says so. What you
type is refused.

{lacked}

`python bench/pairs.py --page` writes this page from `REFUSED` in `nanote/config.py` and the configs of the
model files.
"""


def page(options) -> str:
    """Return the text of guide/pairs.md. `options`: those that are trained in pairs."""
    names = [option if option in ("layout", "data") else f"`{config.flag(option)}`" for option in options]
    trained = ("`python bench/pairs.py` trains every two of these options on `te_reference`, with `--part "
               "gpu` and `--part gpus` on TE and `fast_kernels`, but for `mxfp8` and `nvfp4` on TE, which "
               f"need a Blackwell GPU, and tries each pair that is refused: {', '.join(names)}.")
    trained = textwrap.fill(trained, 110, break_on_hyphens=False)
    return PAGE.format(trained=trained, refused=refused_table(), lacked=lacked_table())


def refused_table() -> str:
    from bench.report import markdown
    rows = []
    for refusal in config.REFUSED:
        *others, last = [as_shown(option, values) for option, values in refusal.settings.items()]
        rows.append([" with ".join(others), last, refusal.reason])
    return markdown(("option", "not with", "why"), rows, left=3)


def as_shown(option: str, values: tuple) -> str:
    """Return an option and its values in REFUSED for the page: "`--parallel fsdp`, `hsdp`"."""
    if values == config.ANY_VALUE_BUT_OFF:
        return f"`{config.flag(option)}`"
    first, *others = values
    texts = [config.as_typed(option, first), *others]
    return ", ".join(f"`{text}`" for text in texts)


def lacked_table() -> str:
    """Return a row for each list of lacked options, with the models that lack them."""
    from bench.report import markdown
    models_of = {}  # {lacked options: models}
    for model in OTHER_MODELS:
        flags = [f"`{config.flag(option)}`" for option in lacked_options(model)]
        models_of.setdefault(", ".join(flags), []).append(f"`{model}`")
    rows = [[", ".join(models), flags] for flags, models in models_of.items()]
    return markdown(("`--model`", "has no"), rows, left=2)
