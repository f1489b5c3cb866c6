"""Write guide/measured.md, the tables of what was measured, from the JSON in results/. Nothing is measured.

    python bench/measured.py

Each table is a function. It reads files of results/, and gives each column a title and the format of its
cells: "{ms:.1f}" is filled from the fields of a row. A new table is a function, named in SECTIONS.
"""

import json
import math
import statistics
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import gaps, kernel_times
from bench.first_commits import measured_with

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "guide" / "measured.md"

INTRODUCTION = """# What was measured

You get every table of measurements, with its machine, its versions and the command that made it. The other
pages say what follows from them. `python bench/measured.py` writes this page from the JSON in `results/`.

- Each command is what was typed then. Where a script, an option or an arm of it is gone, the line above names
  a commit that has it, `results/X.py` as `bench/X.py`. Paths are shortened.
- `measured at` names the commit of the code that was measured. Before 2026-11-27 results did not record it:
  `or before` follows the first commit with all figures of a file (`results/first_commits.json`).
- Compare figures of one table: on other days and on other GPUs of the same model they differ by some percent.
- Steps that are compared took turns unless a table says otherwise. Intervals in brackets are 95 % intervals.
"""
VERSION_0_1 = "7790ae8"
BIASES_IN_GEMMS = "44b33a5"  # from this commit on model_te_fast.py adds a branch's bias before it rounds
BEFORE_BIASES_IN_GEMMS = ("374e0fe", "882fae7", "9291634")  # earlier commits that trained runs of paired.json
# scripts, options and arms of stored commands that are gone; VERSION_0_1 has them
GONE = ("bench/convergence.py", "--png", "--profile", "te_block", "hf-llama", "fsdp-keep", "ddp-all_reduce")
SPEED = "{ratio:.3f} ({ratio_interval[0]:.3f} to {ratio_interval[1]:.3f})"
SHAPES = {
    "124m-b32": "GPT-2 124M, 32 x 1,024",
    "124m-b16": "GPT-2 124M, 16 x 1,024",
    "124m-b4": "GPT-2 124M, 4 x 1,024",
    "350m-b16": "GPT-2 350M, 16 x 1,024",
    "c2048": "8 layers of 2,048, 8 x 2,048",
    "c4096": "4 layers of 4,096, 4 x 4,096",
    "guide": "4 layers of 768, 8 x 512",
    "llama3-8b": "Llama-3 8B, 1 x 8,192",
}


# ---------------------------------------------------------------- from JSON to Markdown

def read(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def read_rows(name):
    """Return the rows of a file: all of it, or its field `rows`."""
    content = read(name)
    return content if isinstance(content, list) else content["rows"]


def card_of(gpu):
    """Return "H100" of "NVIDIA H100 80GB HBM3"."""
    return gpu.removeprefix("NVIDIA ").split()[0].rstrip(",")


def find(rows, **values):
    """Return the rows whose fields have these values."""
    return [row for row in rows if all(row.get(field) == value for field, value in values.items())]


def add_speeds_over(rows, arms, same):
    """Give each row `over_` and the name of an arm: its speed over that arm's, in the row whose fields `same`
    have the same values."""
    for row in rows:
        values = {field: row[field] for field in same}
        for arm in arms:
            for other in find(rows, arm=arm, **values):
                row[f"over_{arm}"] = other["ms"] / row["ms"]


def fill(cell, row):
    """Fill the format of a cell from a row. A field that the row lacks or that is None leaves it empty."""
    try:
        return cell.format(**row)
    except (KeyError, TypeError):
        return ""


def column_of(cell, rows):
    """Fill the format of a column's cells from each row. KeyError if all would be empty."""
    cells = [fill(cell, row) for row in rows]
    if not any(cells):
        raise KeyError(f"{cell}: no row has these fields")
    return cells


def unique(values):
    """Return each value once, in their order, without None and empty strings."""
    return list(dict.fromkeys(value for value in values if value))


def origin_of_file(name, shows=None):
    """Return where a file comes from: machine, versions, commits, dates and at most three of its commands, of
    those for which shows(command) is true."""
    content = read(name)
    first_commit = read("first_commits").get(name)
    rows = content
    if isinstance(content, dict):
        rows = [content, *content.get("rows", []), *content.get("runs", [])]
    facts = []
    commands = []
    for row in rows:
        facts.append(row.get("machine") or row.get("gpu"))
        if "torch" in row:
            facts.append(f"PyTorch {row['torch']}")
        te = row.get("te") or row.get("transformer_engine")
        if isinstance(te, str):  # a list where two engines were compared
            facts.append(f"TE {te}")
        if commit := measured_with(row):
            facts.append(f"measured at {commit[:7]}")
        elif first_commit:
            facts.append(f"measured at {first_commit} or before")
            if "commit" in row:
                facts.append(f"commit {row['commit'][:7]} has the script")
        facts.append(row.get("date"))
        commands += row["command"].split("; ") if "command" in row else row.get("commands", [])
    commands = unique(commands)
    gone = [word for word in GONE if word in " ".join(commands)]
    if gone and f"commit {VERSION_0_1} has the script" not in facts:
        facts.append(f"commit {VERSION_0_1} (version 0.1) has {', '.join(gone)}")
    shown = list(filter(shows, commands))[:3]
    lines = [f"# {name}.json: {'; '.join(unique(facts))}", *shown]
    if len(commands) > len(shown):
        lines.append(f"# commands not shown: {len(commands) - len(shown)}")
    return "\n".join(lines)


def section(heading, text, files, columns, rows=None, shows=None):
    """Return a section.

    Args:
        files: names in results/.
        columns: {title: format of its cells}.
        rows: of the table; None: those of the only file, as they are.
        shows: whether a command made rows of this table; None: all commands did.
    """
    if rows is None:
        [name] = files
        rows = read_rows(name)
    for row in rows:
        row["shape"] = SHAPES.get(row.get("shape"), row.get("shape"))
        if row.get("gpu"):
            row["card"] = card_of(row["gpu"])
        if row.get("tokens_per_s"):
            row["k_tokens_per_s"] = row["tokens_per_s"] / 1e3
    lines = [f"## {heading}", "", textwrap.fill(" ".join(text.split()), 108), ""]
    lines += [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for cells in zip(*[column_of(cell, rows) for cell in columns.values()]):
        lines.append(f"| {' | '.join(cells)} |")
    origins = [origin_of_file(name, shows) for name in files]
    return "\n".join([*lines, "", "```text", *origins, "```", ""])


# ---------------------------------------------------------------- speed

def speed():
    rows = read("speed")
    for row in rows:
        row["arm"] = row["arm"].replace("te_block", "te_modules")  # what it was called then
    add_speeds_over(rows, ["bf16", "fp8"], same=["shape", "block"])
    return section(
        "A step beside plain PyTorch",
        """Forward, loss, backward, clipping, optimizer. `plain` is the same architecture in plain PyTorch
        (`bench/plain_gpt.py`): BF16 autocast, `torch.compile`, fused AdamW. `te_modules` has TE's modules
        in place of the fast kernels of blocks, `eager` no CUDA graph. The modern block has RMSNorm, RoPE,
        QK-norm, grouped queries, SwiGLU and no biases. Llama-3 8B has BF16 moments: float32 moments would
        not fit. MFU counts 6N + 12·L·C·T FLOPs a token, as PaLM and nanoGPT do, against the dense BF16
        peak, which FP8 can exceed. The speed of light is the time of a step at the best rates that this GPU
        reached.""",
        ["speed"],
        {"shape": "{shape}", "block": "{block}", "step": "{arm}", "ms": "{ms:.1f}",
         "k tokens/s": "{k_tokens_per_s:.1f}", "× plain": "{ratio_to_plain:.2f}",
         "× BF16": "{over_bf16:.2f}", "× FP8": "{over_fp8:.2f}", "MFU": "{mfu:.0%}", "GiB": "{peak_gib:.1f}",
         "speed of light, ms": "{floor_ms:.1f}"},
        rows)


def parts():
    kinds = {
        "GEMMs": ["GEMM FP8", "GEMM BF16"],
        "attention": ["attention"],
        "casts, transposes": ["cast/transpose"],
        "loss": ["loss"],
        "norms": ["norm"],
        "activation": ["activation"],
        "residual adds": ["elementwise/residual"],
        "optimizer, clipping": ["optimizer"],
        "copies, embedding, other": ["copy/concat", "embedding", "other"],
    }
    rows = []
    for row in read("speed"):
        shown = row["shape"] in ("124m-b32", "c4096", "llama3-8b") and row["arm"] in ("plain", "fp8")
        if shown and row["block"] != "modern":
            for kind, names in kinds.items():
                row[kind] = sum(row["profile_ms"].get(name, 0) for name in names)
            rows.append(row)
    return section(
        "The parts of a step",
        """In ms. GEMMs are bound by tensor cores and power, attention by tensor cores in BF16, the rest by
        memory.""",
        ["speed"],
        {"shape": "{shape}", "step": "{arm}", **{kind: f"{{{kind}:.1f}}" for kind in kinds},
         "W of limit": "{watts:.0f} of {watts_limit:.0f}",
         "MHz of limit": "{sm_mhz:,.0f} of {sm_mhz_limit:,.0f}"},
        rows)


def nanogpt():
    rows = read("nanogpt")
    for row in rows:
        theirs = find(rows, shape=row["shape"], block=row["block"], arm="nanogpt")[0]
        row["over_alone"] = theirs["ms"] / row["ms"]
    return section(
        "A step beside nanoGPT",
        """nanoGPT's own `model.py`, trained as its `train.py` does. With 4 x 1,024 tokens it waits for
        Python and is slower in turns than alone, so the last speed is over its steps alone.""",
        ["nanogpt"],
        {"shape": "{shape}", "both": "{block}", "step": "{arm}", "ms": "{ms:.1f}",
         "k tokens/s": "{k_tokens_per_s:.0f}", "× nanoGPT": "{ratio_to_nanogpt:.2f}",
         "× nanoGPT alone": "{over_alone:.2f}", "GiB": "{peak_gib:.1f}"},
        rows)


def loops():
    files = ["minimal", "minimal_busy", "minimal_h200", "minimal_busy_h200", "minimal_h200_later"]
    return section(
        "The loops of README",
        """GPT-2 124M, 32 x 1,024 tokens. `readme` is the first loop and `example` is `examples/minimal.py`,
        both on TE; `fast` is the second loop; `…_eager` are the same without CUDA graphs: a slow
        host limits their speed, so they vary from machine to machine. They were timed apart from those
        in graphs, each beside nanoGPT. Busy: all other cores of the machine compute meanwhile. The H200's
        last rows are of another machine and a later commit.""",
        files,
        {"loop": "{loop}", "GPU": "{card}", "busy cores": "{busy_cores}",
         "ms": "{ms:.1f} ({ms_interval[0]:.1f} to {ms_interval[1]:.1f})",
         "k tokens/s": "{k_tokens_per_s:.0f}",
         "× nanoGPT in BF16": "{ratio_to_nanogpt_bf16:.2f} ({ratio_to_nanogpt_bf16_interval[0]:.2f} to "
                              "{ratio_to_nanogpt_bf16_interval[1]:.2f})"},
        [row for name in files for row in read(name)])


def crossover():
    measured = read("crossover")
    columns = {"tokens a step": "{tokens:,}"}
    for width in sorted({row["width"] for row in measured}):
        title = f"width {width:,}"
        columns[title] = f"{{{title}[graph]:.2f}} ({{{title}[eager]:.2f}})"
    rows = []
    for tokens in sorted({row["tokens"] for row in measured}):
        row = {"tokens": tokens}
        for cell in find(measured, tokens=tokens):
            row[f"width {cell['width']:,}"] = cell
        rows.append(row)
    return section(
        "FP8 over BF16 by width and tokens",
        """Speed of a step as a CUDA graph, in brackets launched from Python. Two layers, a vocabulary of
        1,024 ([picture](../results/crossover.png)).""",
        ["crossover"], columns, rows)


def rewritten_trainer():
    older, newer = read("trees")["trees"]
    return section(
        "The rewritten trainer over version 0.1",
        f"""In FP8 with TE's attention. Version 0.1 is `{older}`; the other side is {newer}, the trainer of
        version 0.2 before `model_te_fast.py`. Each row of width 4,096 is another pair of processes.""",
        ["trees"],
        {"shape": "{shape}", "speed": SPEED,
         "GiB reserved": "{peak_reserved_gib[1]:.1f}", "by 0.1": "{peak_reserved_gib[0]:.1f}"})


def fast_engine():
    rows = read_rows("fast_speed")
    for row in rows:
        row["other"] = f"`{row['trees'][0]}` on TE, FlashAttention 4"
        row["step"] = "`model_te_fast.py`, no FlashAttention 4"
        if row["fa4"][1]:
            row["step"] = "`model_te_fast.py`, FlashAttention 4"
        if row["arm"] == "fp8-te_modules":
            row["other"] = "`model_te_optimized.py` on TE"
            row["step"] = "`model_te_optimized.py` on `fast_kernels`"
    return section(
        "The engine without Transformer Engine",
        """In FP8. `cd54110` is eleven commits after version 0.1: the rewritten trainer with the modules of TE
        and, as in version 0.1, fast kernels patched into `model_te_optimized.py`.""",
        ["fast_speed"],
        {"shape": "{shape}", "step": "{step}", "ms": "{median_ms[1]:.1f}", "beside": "{other}",
         "its ms": "{median_ms[0]:.1f}", "speed": SPEED},
        rows)


def attention():
    rows = [row for row in read_rows("attention") if row.get("both_ms")]
    for row in rows:
        if row.get("errors"):
            row["error"] = max(row["errors"].values())
        if row.get("peak_gib"):
            row["mib"] = row["peak_gib"] * 1024
    return section(
        "Attention kernels",
        """Causal; batch x length x heads x KV heads x head width. A name with a precision is a whole block
        whose GEMMs have it. The error is the largest of output and gradients
        ([picture](../results/attention.png)).""",
        ["attention"],
        {"shape": "{shape}", "kernel": "{name}", "forward, ms": "{forward_ms:.2f}",
         "backward": "{backward_ms:.2f}",
         "both": "{both_ms:.2f}", "TFLOP/s": "{both_tflops:.0f}", "MiB": "{mib:.0f}", "error": "{error:.1%}"},
        rows)


def memory():
    rows = read("memory")
    for row in rows:
        if row.get("ms") and row.get("defaults_ms"):
            row["change"] = row["ms"] / row["defaults_ms"] - 1
    return section(
        "The memory of a step",
        """In FP8. A time is compared with the defaults of the same run. Weights in FP8 were an option that
        is gone; activations on the host are an edit now, `offload`.""",
        ["memory"],
        {"shape": "{shape}", "switch": "{switch}", "ms": "{ms:.1f}", "change": "{change:+.0%}",
         "GiB": "{peak_gib:.1f}", "GiB reserved": "{peak_reserved_gib:.1f}"},
        rows)


def formats():
    formats_of = {"bf16": "BF16", "fp8-e4m3": "FP8, E4M3", "fp8": "FP8, hybrid"}
    rows = read("formats")
    for row in rows:
        row["model"] = "default"
        for model in ("fused", "custom"):
            if row["arm"].endswith(f"-{model}"):
                row["model"] = model
        arm = row["arm"].removesuffix(f"-{row['model']}")
        row["format"] = formats_of.get(arm, arm)
        row["both_ms"] = row["forward_ms"] + row["backward_ms"]
    for row in rows:
        [bf16] = find(rows, model=row["model"], format="BF16")
        row["over_bf16"] = bf16["both_ms"] / row["both_ms"]
        row["step_over_bf16"] = bf16["ms"] / row["ms"]
    return section(
        "Forward and backward pass by format",
        """4 layers of 768, 8 x 512 tokens. Both passes are launched from Python, as in a loop of your own; a
        step is a CUDA graph. `default` is what `train.py` takes, with fast kernels; `fused` and `custom` have
        TE's modules.""",
        ["formats"],
        {"model": "{model}", "precision": "{format}", "forward, ms": "{forward_ms:.2f}",
         "backward": "{backward_ms:.2f}", "both": "{both_ms:.2f}", "× BF16": "{over_bf16:.2f}",
         "step, ms": "{ms:.2f}", "step × BF16": "{step_over_bf16:.2f}"},
        rows)


def bf16():
    files = ["bf16", "bf16_h200"]
    rows = [row for name in files for row in read(name)]
    add_speeds_over(rows, ["bf16", "plain"], same=["shape", "block", "gpu"])
    return section(
        "BF16 and FP8 beside nanoGPT and plain PyTorch",
        """A step of `train.py`, which takes `model_te_fast.py`; with `te_modules` it takes
        `model_te_optimized.py` on TE. Where nanoGPT took part, `both` is its config's `bias`. A speed is the
        ratio of two medians; with an interval, that of steps in turns. With 4 x 1,024 tokens and fewer plain
        PyTorch waits for Python, so that its times in turns and alone differ.""",
        files,
        {"shape": "{shape}", "GPU": "{card}", "both": "{block}", "step": "{arm}", "ms": "{ms:.1f}",
         "k tokens/s": "{k_tokens_per_s:.0f}",
         "× nanoGPT": "{ratio_to_nanogpt:.2f}",
         "interval": "{ratio_to_nanogpt_interval[0]:.2f} to {ratio_to_nanogpt_interval[1]:.2f}",
         "× plain": "{over_plain:.2f}", "× plain in turns": "{ratio_to_plain:.2f}",
         "× BF16": "{over_bf16:.2f}", "MFU": "{mfu:.0%}", "GiB": "{peak_gib:.1f}"},
        rows)


def later_commits():
    files = ["turns", "turns_launch", "turns_h100", "turns_bias", "turns_fc1_bias"]
    rows = []
    for name in files:
        card = card_of(read(name)["machine"])
        older, newer = (commit[:7] for commit in read(name)["commits"])
        for row in read_rows(name):
            kind, _, shape = row["case"].partition(":")
            rows.append(row | {"older": older, "newer": newer, "shape": shape, "card": card,
                               "step": row["function"] if kind == "loops" else kind})
    return section(
        "A later commit over an earlier one",
        """In FP8, but for the rows `bf16`. `readme`, `example` and `fast` are loops of README at GPT-2 124M,
        32 x 1,024, `fast_eager` is `fast` launched from Python; ddp and fsdp are of two GPUs. A speed is the
        median of the turns' ratios, in brackets their range. It is not the quotient of the medians beside it:
        loops that Python launches scatter.""",
        files,
        {"step": "{step}", "shape": "{shape}", "GPU": "{card}", "earlier": "`{older}`", "later": "`{newer}`",
         "ms": "{median_ms[1]:.1f}", "ms, earlier": "{median_ms[0]:.1f}",
         "speed": "{ratio:.3f} ({ratio_range[0]:.3f} to {ratio_range[1]:.3f})"},
        rows)


def read_pairs(fine_tuning=False):
    """Return (rows, runs) of paired.json: those from random weights, or those of fine-tuning."""
    content = read("paired")
    return [[row for row in content[name] if gaps.is_fine_tuning(row) == fine_tuning]
            for name in ("rows", "runs")]


def add_seeds(rows):
    """Give rows of bench/paired.py the text of their column `seeds`, which counts diverged ones too."""
    for row in rows:
        row["described_seeds"] = gaps.describe_seeds(row)
    return rows


def savings_of(row, groups):
    """Return the training losses of `fp8` minus those of a row's arm, seed by seed, of the seeds that both
    have. groups: of bench/paired.py."""
    losses = {}
    for fields, pairs, _ in groups:
        if all(fields.get(name) == row.get(name) for name in gaps.PAIR_FIELDS):
            losses |= {(fields["arm"], run["seed"], run["train_sha256"]): gaps.training_loss(run)
                       for run, _ in pairs}
    return [losses["fp8", seed, corpus] - loss for (arm, seed, corpus), loss in sorted(losses.items())
            if arm == row["arm"] and ("fp8", seed, corpus) in losses]


def with_interval(value, interval, number="{:+.4f}"):
    """Return "1.0 (0.9 to 1.1)"; "1.0" without an interval; "-" without a value."""
    if value is None:
        return "-"
    described = gaps.describe_interval(interval, number)
    return number.format(value) + (f" ({described})" if described else "")


def percent_of(loss, interval, of):
    """Return a difference of losses and its interval in percent of a loss; "-" without one."""
    if loss is None:
        return "-"
    percent_interval = None if interval is None else [100 * end / of for end in interval]
    return with_interval(100 * loss / of, percent_interval, "{:+.2f}")


def add_percents(rows):
    """Give rows of bench/paired.py their differences in percent of BF16's losses."""
    for row in rows:
        for name in ("training", "validation"):
            row[f"{name}_in_percent"] = percent_of(
                row[name], row[f"{name}_interval"], row[f"baseline_{name}_loss"])
    return rows


def cards_of(runs):
    """Return "H100s and H200s", the GPUs of runs."""
    return " and ".join(sorted({card_of(run["machine"]) + "s" for run in runs}))


def corpora_of(runs):
    """Return the first digits of the checksums of the runs' token files."""
    return " and ".join(sorted({run["train_sha256"][:8] for run in runs}))


def read_whole_runs():
    """Return the whole runs of paired.json, from random weights."""
    _, runs = read_pairs()
    return list(filter(gaps.is_whole_run, runs))


def groups_by_rounding(runs):
    """Return the groups of runs, over corpora. Those of one arm, length and window are two if they were
    trained before and after a change of rounding, which the field `rounding` says: see "The first update"."""
    groups = []
    for rounding, is_in in {"before": True, "since": False}.items():
        of_this = [run for run in runs if is_before_change(run) == is_in]
        for group in gaps.groups_over_corpora(of_this):
            groups.append(group._replace(fields=group.fields | {"rounding": f"{rounding} {BIASES_IN_GEMMS}"}))
    return groups


def is_before_change(run):
    return short_commit(run) in BEFORE_BIASES_IN_GEMMS


def short_commit(run):
    return (run.get("commit") or "unknown")[:7]


def whole_runs():
    runs = read_whole_runs()
    groups = groups_by_rounding(runs)
    rows = add_percents(add_seeds(gaps.rows_of(groups)))
    for row, group in zip(rows, groups):
        row["commits"] = commits_of(group.pairs)
        row["equal_loss"] = with_interval(
            row["speed_to_equal_loss"], row["speed_to_equal_loss_interval"], "{:.2f}")
        row["described_slope"] = gaps.describe_slope(row)
        row["more_tokens"] = "-"
        if row["speed_to_equal_loss"]:
            row["more_tokens"] = f"{100 * (row['speed'] / row['speed_to_equal_loss'] - 1):.1f}"
        row["break_even_slope"] = "-"
        if row["seeds"] and row["speed"] and row["speed"] > 1:
            row["break_even_slope"] = f"{row['training'] / math.log(row['speed']):.2f}"
        savings = [] if row["arm"] == "fp8" else savings_of(row, groups)
        row["saving"] = with_interval(gaps.mean_of(savings), gaps.interval_of(savings))
    return section(
        "FP8 in whole runs",
        f"""GPT-2 from random weights, on {cards_of(runs)}, in nats, with 95 % intervals over the pairs. Both
        runs of a pair begin with the same weights and read the same tokens. `commits` has those of the pairs,
        each with the corpus that they read, packages of one machine, and the differences by seed. A training
        loss is the mean over the last tenth of the steps. A step is skipped if its gradient norm is not
        finite. `saves`: how much lower the arm's training loss is than that of `fp8`, over the seeds of both.
        The slope is the fall of BF16's training loss between two lengths over the log of their ratio. `more
        tokens` is what makes up for the difference, exp(difference / slope) times as many, and `to equal
        loss` counts them; its interval is that of the difference alone. Below the break-even slope these
        tokens take longer than the arm's speed saves. The runs of a pair did not take turns. Commit
        {BIASES_IN_GEMMS} changed a rounding of `model_te_fast.py` ([the first update](#the-first-update)),
        e70d90d that of fc1's bias: it lies between 44b33a5 and 08af75d. Pairs before and since also read
        other corpora.""",
        ["paired"],
        {"arm": "`{arm}`", "size": "{size}", "tokens": "{tokens:,}", "trained": "{rounding}",
         "seeds": "{described_seeds}",
         "commits": "{commits}", "skipped steps": "{skipped_steps}",
         "training loss above BF16's": "{training:+.4f} ({training_interval[0]:+.4f} to "
                                       "{training_interval[1]:+.4f})",
         "in %": "{training_in_percent}", "saves": "{saving}",
         "validation loss": "{validation:+.4f} ({validation_interval[0]:+.4f} to "
                            "{validation_interval[1]:+.4f})",
         "validation loss in %": "{validation_in_percent}",
         "evaluated in BF16": "{validation_without_fp8:+.4f}", "× BF16's speed": "{speed:.2f}",
         "more tokens, %": "{more_tokens}", "to equal loss": "{equal_loss}",
         "break-even slope": "{break_even_slope}",
         "slope, nats per e-fold of tokens": "{described_slope}"},
        sorted(rows, key=lambda row: (row["size"], row["tokens"])), shows=is_of_whole_runs)


def commits_of(pairs):
    """Return the commits of pairs, their corpora, and the differences of their training losses by seed:
    "9291634 (85ce9021): +0.0543, +0.0604"."""
    differences = {}
    for run, baseline in sorted(pairs, key=lambda pair: pair.run["seed"]):
        origin = f"{short_commit(run)} ({run['train_sha256'][:8]})"
        difference = gaps.training_loss(run) - gaps.training_loss(baseline)
        differences.setdefault(origin, []).append(f"{difference:+.3f}")
    return "; ".join(f"{origin}: {', '.join(values)}" for origin, values in differences.items())


def is_of_whole_runs(command):
    return "--start" not in command and "--stop" not in command


def difference_over_run():
    runs = [run for run in read_whole_runs() if not is_before_change(run)]
    groups = [group for group in gaps.groups_over_corpora(runs) if group.pairs]
    groups.sort(key=lambda group: (group.fields["size"], group.fields["tokens"]))
    percent = 100 // gaps.SEGMENTS
    rows = [{"part": f"{percent * part} % to {percent * (part + 1)} %"} for part in range(gaps.SEGMENTS)]
    columns = {"steps": "{part}"}
    for group in groups:
        fields = group.fields
        title = (f"`{fields['arm']}`, {fields['size']}, {fields['tokens']:,} tokens, "
                 f"{len(group.pairs)} seeds")
        columns[title] = "{" + title + "}"
        for row, (mean, interval) in zip(rows, gaps.differences_over_run(group.pairs)):
            row[title] = with_interval(mean, interval)
    return section(
        "The difference over a run",
        f"""Training loss above BF16's in each twentieth of the whole runs trained since {BIASES_IN_GEMMS}, in
        nats: the mean over its steps and over the seeds, with its 95 % interval
        ([picture](../results/loss_gap.png)).""",
        ["paired"], columns, rows, shows=is_of_whole_runs)


def fine_tuning_speed():
    rows = read("finetune")
    for row in rows:
        row["millions_trained"] = f"{(row.get('trained_parameters') or row['parameters']) / 1e6:,.1f}"
        row["over_peft"] = with_interval(
            row.get("ratio_to_peft"), row.get("ratio_to_peft_interval"), "{:.2f}")
        row["over_full"] = with_interval(row.get("ratio_to_full"), None, "{:.2f}")
    peer_ms = min(row["ms"] for row in rows if row["arm"].startswith("peft-"))
    # PEFT's time beside an arm over that in its own row
    slower = [row["ms"] * row["ratio_to_peft"] / peer_ms - 1 for row in rows
              if row.get("ratio_to_peft_interval")]
    return section(
        "Speed and memory of fine-tuning",
        f"""Random weights of the real shapes, one sequence of 4,096 tokens a step, on H200s. `fp8` trains all
        weights, with BF16 moments. The others train adapters of rank 16: `frozen` with the base in FP8,
        `frozen_transposes` with its transpose, too, `checkpointing` with recomputed blocks, `loss8` with the
        loss in eight parts. PEFT trains transformers' model in BF16, compiled. The arms with an interval
        took turns with the faster PEFT arm, which was {100 * min(slower):.0f} to {100 * max(slower):.0f} %
        slower then than in its own row: a ratio is not that of two rows. PEFT and `checkpointing` run without
        CUDA graphs. Memory is what PyTorch allocates. All moments are BF16, but 70B's, which are float32.
        8B was measured while other tests ran on the machine's second GPU, 70B while another job
        used its CPU.""",
        ["finetune"],
        {"shape": "{model}", "arm": "`{arm}`", "million parameters trained": "{millions_trained}",
         "ms": "{ms:.1f}", "tokens/s": "{tokens_per_s:,.0f}", "× PEFT": "{over_peft}",
         "× `fp8`": "{over_full}", "GiB": "{peak_gib:.1f}"},
        sorted(rows, key=lambda row: (row["model"], row["tokens_per_s"])))


def fine_tuning():
    """Return the section, "" if there is no such run yet."""
    all_rows, all_runs = read_pairs(fine_tuning=True)
    rows = list(filter(gaps.is_whole_run, all_rows))
    runs = list(filter(gaps.is_whole_run, all_runs))
    if not rows:
        return ""
    for row in add_percents(add_seeds(rows)):
        row["base"] = row["base_sha256"][:8]
        row["trained"] = gaps.describe_trained(row)
        for name in ("training", "validation"):
            row[f"described_{name}"] = with_interval(row[name], row[f"{name}_interval"])
    return section(
        "Fine-tuning in FP8",
        f"""From the weights of a base, on {cards_of(runs)}, corpus {corpora_of(runs)}; the base is named by
        the first digits of the checksum of its files. `full` trains all weights, `LoRA` adapters of this
        rank alone: with `fp8` each step quantizes the weights of the base, with `fp8-frozen` they are in FP8
        alone. Both runs of a pair begin with the same weights, and the order of the batches differs from seed
        to seed; with LoRA so do the first adapters. In nats and in percent of BF16's loss, with 95 %
        intervals over the seeds. A training loss is the mean over the last tenth of the steps.""",
        ["paired"],
        {"arm": "`{arm}`", "base": "`{base}`", "size": "{size}", "trained": "{trained}",
         "learning rate": "{lr:g}",
         "tokens": "{tokens:,}", "seeds": "{described_seeds}", "skipped steps": "{skipped_steps}",
         "training loss above BF16's": "{described_training}", "in %": "{training_in_percent}",
         "validation loss above BF16's": "{described_validation}",
         "validation loss in %": "{validation_in_percent}"},
        sorted(rows, key=lambda row: (row["base"], row["size"], row["trained"], row["lr"], row["tokens"],
                                      row["arm"])))


def first_update():
    content = read("first_update")
    before, after = "837129b", "44b33a5"
    rows = [row | {"commit": row["commit"][:7]} for row in content["runs"]]
    return section(
        "The first update",
        f"""GPT-2 124M in BF16 from equal weights, 131,072 tokens a step of Python's standard library. Each
        commit read that of another Python: compare rows of one commit. The second loss is that of the second
        batch, after one update; in the last column the updated weights are in `model_te_fast.py`. Until
        {before} that model added the bias of a branch to an output that was already rounded to BF16. After
        the first update a bias is 1e-5, below the last bit: it decided the ties of the residual's rounding,
        so that it counted several times. From {after} on the GEMM adds it in float32. Script:
        {content["script"]}.""",
        ["first_update"],
        {"model": "{run}", "commit": "{commit}", "first loss": "{loss:.4f}",
         "gradient norm": "{gradient_norm:.2f}", "second loss": "{second_loss:.4f}",
         "in `model_te_fast.py`": "{second_loss_in_model_te_fast:.4f}", "data": "{data}"},
        rows)


def windows():
    _, all_runs = read_pairs()
    runs = [run for run in all_runs if not gaps.is_whole_run(run)]
    groups = [group for group in groups_by_rounding(runs) if group.fields["arm"] == "fp8"]
    rows = add_seeds(gaps.rows_of(groups))
    for row, group in zip(rows, groups):
        row["window"] = f"{row['start']:.0%} to {row['stop']:.0%}"
        of_pairs = [run for run, _ in group.pairs]
        row["cards"] = cards_of(of_pairs)
        row["corpora"] = corpora_of(of_pairs)
    return section(
        "FP8 in a part of a run",
        """GPT-2 124M. FP8 in one part of the run, after BF16; both runs of a pair begin it with the same
        weights and moments and stop at its end, where the losses are compared. In nats, with 95 % intervals
        over the seeds. A training loss is the mean over as many steps as the last tenth of the run has.""",
        ["paired"],
        {"tokens of the run": "{tokens:,}", "FP8 in": "{window}", "trained": "{rounding}", "on": "{cards}",
         "corpus": "{corpora}", "seeds": "{described_seeds}",
         "skipped steps": "{skipped_steps}",
         "training loss above BF16's": "{training:+.4f} ({training_interval[0]:+.4f} to "
                                       "{training_interval[1]:+.4f})",
         "in %": "{training_percent:+.2f}",
         "validation loss": "{validation:+.4f} ({validation_interval[0]:+.4f} to "
                            "{validation_interval[1]:+.4f})",
         "evaluated in BF16": "{validation_without_fp8:+.4f}"},
        sorted(rows, key=lambda row: (row["tokens"], row["start"], row["rounding"])))


def parts_of_last_quarter():
    return parts_of_fp8("What costs in the last quarter", "the last quarter of 45 M tokens",
                        tokens=45_088_768, start=0.75, stop=1.0)


def parts_of_fp8(title, window, **of_runs):
    """Return the section that compares the arms of a window. window: what its text calls it."""
    _, all_runs = read_pairs()
    runs = find(all_runs, size="124m", **of_runs)
    newer = [run for run in runs if not is_before_change(run)]
    if any(run["arm"] not in ("bf16", "fp8") for run in newer):
        runs = newer
    seeds = {run["seed"] for run in runs if run["arm"] not in ("bf16", "fp8")}
    runs = [run for run in runs if run["seed"] in seeds]
    groups = gaps.groups_of(runs)
    rows = add_seeds(gaps.summarize(runs))
    for row in rows:
        row["saved"] = ", ".join(f"{saving:+.4f}" for saving in savings_of(row, groups))
    return section(
        title,
        f"""As above, {window} in FP8, of seeds {", ".join(map(str, sorted(seeds)))} on {cards_of(runs)},
        commit {" and ".join(sorted(set(map(short_commit, runs))))}.
        `fp8` is FP8 in all GEMMs; `fp8-gradients`, `-activations` and `-weights` round one operand of each
        GEMM alone, `fp8-no-operand` none; the others change one setting. In nats. Emulated arms have no
        speed; the runs of a pair did not take turns.""",
        ["paired"],
        {"arm": "`{arm}`", "seeds": "{described_seeds}", "skipped steps": "{skipped_steps}",
         "training loss above BF16's": "{training:+.4f} ({training_interval[0]:+.4f} to "
                                       "{training_interval[1]:+.4f})",
         "below `fp8`'s, seed by seed": "{saved}", "validation loss above BF16's": "{validation:+.4f}",
         "evaluated in BF16": "{validation_without_fp8:+.4f}", "× BF16's speed": "{speed:.2f}"},
        sorted(rows, key=lambda row: math.inf if row["training"] is None else row["training"]))


def edits():
    return section(
        "Edited models over unedited ones",
        """GPT-2 124M, 32 x 1,024 tokens, CUDA graphs; `optimized` runs on `fast_kernels`. Speeds and
        intervals are those of the median ratio of steps that took turns; `bench/edits.py` now writes the
        ratio of the median steps beside the same interval.""",
        ["fast_edits"],
        {"edit": "{edit}", "of": "{model}", "ms": "{ms:.1f}",
         "speed": "{ratio:.2f} ({ratio_interval[0]:.2f} to {ratio_interval[1]:.2f})"})


# ---------------------------------------------------------------- torch.compile and several GPUs

def compiled():
    return section(
        "torch.compile on fast_kernels",
        """`bf16` is plain PyTorch; `fp8` is `model_te_optimized.py`, compiled, and `graph` the same in CUDA
        graphs, not compiled. `nanochat` and `torchao` are plain PyTorch with their FP8. The others are
        edits of `examples/edits/compiled`; `f_cross_entropy` smooths labels by `F.cross_entropy`.""",
        ["compiled"],
        {"shape": "{shape}", "step": "{arm}", "mode": "{mode}", "FlashAttention 4": "{fa4}",
         "ms": "{ms:.1f}",
         "× BF16, compiled": "{over_bf16:.2f}", "× unedited": "{ratio:.2f}"})


def compile_modes():
    rows = find(read("compile"), model="optimized")
    rows.sort(key=lambda row: (row["engine"], row["recipe"], row["mode"]))
    return section(
        "Engines and modes of torch.compile",
        """`model_te_optimized.py`, 4 layers of width 768, 8 x 512 tokens. TE runs delayed scaling
        uncompiled.""",
        ["compile"],
        {"engine": "{engine}", "recipe": "{recipe}", "mode": "{mode}",
         "k tokens/s": "{k_tokens_per_s:.0f}",
         "graph breaks": "{graph_breaks}", "compiling, s": "{compile_s:.0f}", "GPU": "{card}"},
        rows)


def several_gpus():
    versions = {"multi_gpu_four": "after 0.2", "multi_gpu_h100": "0.2", "multi_gpu_h200": "0.2",
                "multi_gpu": "0.1", "multi_gpu_pairs": "0.1"}
    rows = []
    for name, version in versions.items():
        for row in find(read(name), grad_accum=1):
            if row["parallel"] in ("ddp", "ddp-all_reduce", "fsdp", "nanogpt"):
                row["version"] = version
                row["precision"] = "BF16" if row["recipe"] == "none" else "FP8"
                row["k_per_gpu"] = row["tokens_per_s_per_gpu"] / 1e3
                row["of_one"] = row["over_one"] = "-"  # of a model that does not fit on one GPU
                if "efficiency" in row:
                    row["of_one"] = with_interval(
                        row["efficiency"], row.get("efficiency_interval"), "{:.3f}")
                    row["over_one"] = f"{row['gpus'] * row['efficiency']:.2f}"
                # rows of these versions do not say it
                row.setdefault("fa4", version == "0.1" and row["parallel"] != "nanogpt")
                rows.append(row)
    return section(
        "Several GPUs over one",
        """One machine, without NVLink multicast. `ddp-all_reduce` reduces by NCCL, `nanogpt` is nanoGPT
        under DDP. Version 0.2's fsdp on H200s reduced in float32. The GiB are the first GPU's. Llama-3 8B has
        BF16 moments, and does not fit on one GPU a second time, beside its shards.""",
        list(versions),
        {"layout": "{parallel}", "version": "{version}", "GPUs": "{gpus} {gpu}",
         "tokens per micro-batch": "{shape}",
         "precision": "{precision}", "FlashAttention 4": "{fa4}", "k tokens/s per GPU": "{k_per_gpu:.1f}",
         "of one GPU alone": "{of_one}", "all over one": "{over_one}",
         "GiB": "{peak_gib:.1f}"},
        rows)


def why_several_gpus_are_slower():
    rows = read("rank_trace")
    for row in rows:
        terms = kernel_times.mean_terms(row)
        row |= terms | {"sum": sum(terms.values())}
        row["beside"] = statistics.mean(rank["slowdown"]["beside"] for rank in row["ranks"])
        sent = []
        for name, found in row["ranks"][0]["communication"].items():
            if found["bytes"] > 1e5:
                sent.append(f"{name} {found['bytes'] / 1e6:.0f} MB at {found['gb_per_s']:.0f} GB/s, "
                            f"{found['channels']:.0f} SMs")
        row["sent"] = "; ".join(sent)
    return section(
        "Why a step on several GPUs is slower",
        """What a step on all GPUs takes longer than one alone, in ms. `timed` are steps that took turns.
        `traced` is the difference of five steps in a row under the profiler, which is smaller, for a reason
        that the traces do not show; the columns after it sum to it. `different kernels` are those that one
        step has and the other not, such as copies of FSDP2, and GEMMs that write float32 gradients. `exposed`
        is communication while nothing computes, with what a GPU waits for the others. The optimizer's part is
        negative: each GPU updates its share of the weights. Timed steps are those of the slowest GPU, the
        other figures means over the GPUs, which differ by up to 1 ms. `beside` is how many times as long the
        kernels that run beside communication take as alone. Bytes and rates are of the first GPU, without
        waiting; copies take no SMs ([picture](../results/rank_trace.png)). The row of fsdp at width 4,096
        was cut.""",
        ["rank_trace"],
        {"layout": "{parallel}", "GPUs": "{gpus} {gpu}", "shape": "{shape}", "alone, timed": "{ms_one:.2f}",
         "together, timed": "{ms_all:.2f}", "difference, traced": "{sum:+.2f}",
         "slower kernels": "{slower kernels:+.2f}", "beside": "{beside:.2f}",
         "different kernels": "{different kernels:+.2f}",
         "optimizer": "{optimizer:+.2f}", "exposed": "{exposed communication:+.2f}", "idle": "{idle:+.2f}",
         "sent by a GPU": "{sent}"},
        rows)


def orders_of_summation():
    content = read("order_scatter")
    by_run = {}
    for row in content["rows"]:
        by_run.setdefault((row["run"], row["gpus"]), []).append(row["distance"])
    rows = [{"run": run, "gpus": gpus, "mean": statistics.mean(distances),
             "distances": ", ".join(f"{distance:.4f}" for distance in distances)}
            for (run, gpus), distances in by_run.items()]
    return section(
        "Losses in another order of summation",
        """A small GPT in FP8, 30 steps of 16 sequences: how far the losses of a run lie from those of one GPU
        with all sequences in one micro-batch, the mean over the steps, with the same first weights. A run of
        `8 x 2` has 8 micro-batches of 2 sequences; on two GPUs each has its own. Script:
        bench/order_scatter.py of commit 6e3fdc9; seed 4 was cut.""",
        ["order_scatter"],
        {"run": "{run}", "GPUs": "{gpus}", "mean": "{mean:.4f}", "seeds 1, 2, 3": "{distances}"},
        rows)


# ---------------------------------------------------------------- does FP8 learn as much?

LOSSES = {
    "arm": "{arm}", "FP8 in": "{part}", "M tokens": "{m_tokens:.0f}", "seeds": "{seeds}",
    "loss": "{mean:.4f}", "standard error": "{standard_error:.4f}", "deviation of seeds": "{deviation:.1%}",
    "behind BF16, %": "{gap_percent:+.2f}", "interval": "{gap_interval[0]:+.2f} to {gap_interval[1]:+.2f}",
    "evaluated in BF16, %": "{gap_without_fp8_percent:+.2f}",
    "its interval": "{gap_without_fp8_interval[0]:+.2f} to {gap_without_fp8_interval[1]:+.2f}",
    "seconds": "{seconds:.0f}",
}
SPEEDS_TO_A_LOSS = {
    "speed to BF16's loss": "{loss_matched_speedup:.2f}",
    "interval of it": "{loss_matched_interval[0]:.2f} to {loss_matched_interval[1]:.2f}",
    "speed to nanoGPT's loss": "{loss_matched_speedup_over_nanogpt:.2f}",
    "interval of this": "{loss_matched_interval_over_nanogpt[0]:.2f} to "
                        "{loss_matched_interval_over_nanogpt[1]:.2f}",
}


def read_losses(parts):
    """Return the rows of stored summaries. `parts` maps a file to the part of a run that was in FP8."""
    rows = []
    for name, part in parts.items():
        for row in read(name)["summary"]:
            row["part"] = part
            row["m_tokens"] = row["tokens"] / 1e6
            if row["standard_error"]:
                row["deviation"] = row["standard_error"] * row["seeds"] ** 0.5 / row["mean"]
            rows.append(row)
    return rows


def gpt2_losses():
    parts = {"convergence": "the whole run", "convergence_switched": "the last quarter",
             "convergence_early": "the last three quarters", "convergence_repeat": ""}
    return section(
        "Losses in FP8 and BF16",
        """GPT-2 124M; `modern`: the modern block; `350m`: GPT-2 350M, whose arms had different attention
        kernels, so their seconds do not compare. Behind `@` is the learning rate. `fp8-stochastic` rounded
        the logits' gradient stochastically, which the kit no longer does. Where FP8 begins late, all arms
        of a seed share the first part of a BF16 run; `bf16-again` is restarted there and stays in BF16. The
        last file repeats one seed on another GPU.""",
        list(parts), LOSSES | SPEEDS_TO_A_LOSS, read_losses(parts))


def small_losses():
    parts = {"convergence_switched_small": "the last quarter",
             "convergence_switched_width128": "the last quarter", "convergence_small": "the whole run"}
    names = ["all", "only_activations", "only_weights", "only_gradients", "no_forward", "skip_first",
             "skip_head", "block"]
    arms = [f"small-emulated-{name}@4e-3" for name in names]
    arms += ["small-modern-emulated-all@4e-3", "small-bfloat16@4e-3"]
    return section(
        "Which part of FP8 costs loss",
        """A GPT with 3 layers of width 64, in the second file 128, on a CPU with emulated FP8: all
        operands, only some, all but the forward GEMM, the first block or the output head; block scaling.
        `small-bfloat16` has weights and residuals in BF16 and no FP8, beside float32.""",
        list(parts), LOSSES, [row for row in read_losses(parts) if row["arm"] in arms])


# ---------------------------------------------------------------- precision and stability

def stability():
    groups = {}  # cells that differ in the margin alone
    for name in ("stability_h200", "stability_te_h200"):
        for cell in read(name)["cells"]:
            if cell["recipe"] != "none":
                fields = ("recipe", "format", "history", "model", "size", "disturbance")
                groups.setdefault(tuple(cell[field] for field in fields), []).append(cell)
    rows = []
    for cells in groups.values():
        behind = [100 * cell["final_vs_high_precision"] for cell in cells]
        recovered = [cell["recovered_after"] for cell in cells]
        steps = "never" if None in recovered else max(recovered)
        rows.append(cells[0] | {"low": min(behind), "high": max(behind), "steps": steps})
    return section(
        "What throws FP8 off",
        """A byte-level GPT, 500 steps, disturbed at 40 % of them. The final loss is relative to BF16's
        after the same disturbance, from the best to the worst of margins 0, 1 and 2. Recovered: the most
        steps until the loss was within 5 %. Only delayed scaling has a history; 1 is `most_recent`.""",
        ["stability_h200", "stability_te_h200"],
        {"recipe": "{recipe}", "format": "{format}", "history": "{history}", "model": "{model}",
         "layers x width": "{size}", "disturbance": "{disturbance}",
         "final loss, %": "{low:+.1f} to {high:+.1f}",
         "recovered, steps": "{steps}"},
        rows)


def accumulation():
    rows = find(read_rows("accumulation"), part="gradients")
    for row in rows:
        row["gemm"] = "wgrad" if row["summands"] == 8192 else "dgrad"
    return section(
        "Fast accumulation in backward GEMMs",
        """After 200 steps: the median error, relative to the norm of the result; in brackets the
        largest.""",
        ["accumulation"],
        {"model": "{shape}", "GEMMs": "{products} {gemm}", "K": "{summands:,}",
         "fast accumulation": "{fast_sums:.2%} ({largest_fast_sums:.2%})",
         "float32": "{float32_sums:.2%} ({largest_float32_sums:.2%})"},
        rows)


def emulation():
    labels = {"bytes": "quantized bytes", "scales": "scales", "histories": "amax history entries",
              "bytes_behind_norm": "bytes of a fused norm's output, each by one FP8 value"}
    found = read("reference_vs_te")
    rows = []
    for field, label in labels.items():
        rows.append({
            "label": label, "number": found[f"compared_{field}"], "differ": found[f"mismatched_{field}"]})
    return section(
        "te_reference beside Transformer Engine",
        f"{found['cases']} random cases under delayed, current and block scaling.",
        ["reference_vs_te"], {"compared": "{label}", "number": "{number:,}", "differ": "{differ}"}, rows)


def single_figures():
    """Return the section of figures that stand alone in their files."""
    run = read("training")["speed"]
    switches = read("training")["switches"]["rows"]
    default = find(switches, switch="default")[0]
    changes = []  # by one switch, with the default's model and seed
    for row in switches:
        if "seed" not in row["switch"] and "modern" not in row["switch"]:
            changes.append(abs(row["difference"]))
    launched = {row["arm"]: row["forward_ms"] + row["backward_ms"] for row in read("formats")}
    steps = {row["arm"]: row["ms"] for row in read("stack")}
    compiled_loss = find(read("compiled_seeds")["summary"], arm="compiled")[0]
    adam = {row["optimizer"]: row["ms"] for row in find(read_rows("optimizer"), size="GPT-2 124M")}
    save = read("saves")[0]
    kills = read("faults")["killed"]["counts"]
    laptop = read("laptop")
    minutes = statistics.median(row["seconds"] for row in laptop["runs"]) / 60
    peak = {(row["shape"], row["switch"]): row["peak_gib"] for row in read("gqa_rmsnorm")}
    saved = {shape: 1 - peak[shape, "GQA"] / peak[shape, "default"] for shape in ("124m-b32", "c4096")}
    head = find(read_rows("accumulation_bias"), gemm="head")[0]
    rounding = {row["part"]: row["mean_error_of_blocks"] for row in read_rows("rounding")}

    figures = {
        "`train.py` between checkpoints, k tokens/s": f"{run['tokens_per_s_between_checkpoints'] / 1e3:.0f}",
        "its bare steps in the benchmark, k tokens/s": f"{run['benchmark_tokens_per_s'] / 1e3:.0f}",
        "`train.py` by the wall clock over bare steps": f"{run['ratio']:.1%}",
        "loss after 300 steps of 124M": f"{default['final_loss']:.2f}",
        "its largest change by one kernel or switch": f"{max(changes):.3f}",
        "its spread over three seeds": f"{default['spread_of_seeds']:.3f}",
        "FP8 over BF16, launched from Python: 4 layers of 768": f"{launched['bf16'] / launched['fp8']:.2f}",
        "FP8 over BF16, launched from Python: TE's modules, 124M":
            f"{steps['bf16-libraries-eager'] / steps['fp8-libraries-eager']:.2f}",
        "plain PyTorch, compiled over uncompiled, 124M": f"{steps['plain-eager'] / steps['plain']:.2f}",
        "loss after 300 steps, compiled over TE's modules, %": f"{compiled_loss['gap_percent']:+.2f}",
        "AdamW of `fast_kernels` with remainders at 124M, ms": f"{adam['fast_adam, remainders']:.2f}",
        "TE's FusedAdam with float32 masters, ms": f"{adam['TE FusedAdam, float32 masters']:.2f}",
        "a checkpoint of 350M, GiB": f"{save['gib']:.1f}",
        "its cost every 200 steps on two H100s, of the time": f"{save['cost_percent']:.1f} %",
        "kills with `kill -9`": f"{kills['kills']}",
        "runs after a kill that equal the uninterrupted run": f"{kills['equal_to_the_uninterrupted_run']}",
        "`make train` on two cores, nats a byte": f"{laptop['val_loss']:.2f}",
        "its time, minutes": f"{minutes:.1f}",
        "building TE with 8 jobs, s": f"{read('install')['install_seconds']:.0f}",
        "peak saved by grouped queries at 124M": f"{saved['124m-b32']:.1%}",
        "peak saved by them at width 4,096": f"{saved['c4096']:.1%}",
        "error of the head's dgrad with fast accumulation": f"{head['fast_error']:.1%}",
        "error of gradients, the logits' gradient quantized": f"{rounding['only_head_gradients']:.1%}",
        "error of gradients, all other gradients quantized": f"{rounding['only_block_gradients']:.1%}",
        "saving the FP8 state for skipped steps, of a step": f"{read('skipped_step')[0]['share']:.2%}",
    }
    files = ["training", "formats", "stack", "compiled_seeds", "optimizer", "saves", "faults", "laptop",
             "install", "gqa_rmsnorm", "accumulation_bias", "rounding", "skipped_step"]
    return section("Single figures", "In the order of the files below.", files,
                   {"what": "{what}", "figure": "{figure}"},
                   [{"what": what, "figure": figure} for what, figure in figures.items()])


SECTIONS = [
    speed, parts, nanogpt, bf16, loops, crossover, formats, rewritten_trainer, fast_engine, later_commits,
    attention, memory, edits, whole_runs, difference_over_run, first_update, windows,
    parts_of_last_quarter,
    fine_tuning_speed, fine_tuning, compiled, compile_modes, several_gpus, why_several_gpus_are_slower,
    orders_of_summation, gpt2_losses, small_losses,
    stability, accumulation, emulation, single_figures,
]


def page():
    """Return the text of guide/measured.md."""
    sections = [make() for make in SECTIONS]
    return "\n".join([INTRODUCTION, *filter(None, sections)])


if __name__ == "__main__":
    text = page()
    PAGE.write_text(text)
    tables = text.count("\n## ")
    print(f"{PAGE}: {tables} tables")
