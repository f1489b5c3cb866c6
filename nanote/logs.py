"""The logs of a run: lines on stdout, metrics.jsonl, fp8_health.jsonl, TensorBoard, Weights & Biases, and the
pictures of them.

A log that cannot be written does not stop a run: its lines are kept and written later.
"""
import contextlib
import json
import math
import signal
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from nanote import health, models, recipes
from nanote.command import error_line
from nanote.schedule import describe_long_warmup

MAX_EPOCHS = 10  # a run of more epochs says so
SHOWN = {"mfu": "MFU {:.1%}", "val_loss": "val loss {:.4f}", "val_bits_per_byte": "({:.4f} bits a byte)",
         "val_loss_without_fp8": "val loss without FP8 {:.4f}"}  # in a log line, where measured


def open_wandb(folder: str, options: dict):
    """Return the functions log(scalars, step) and close() of Weights & Biases."""
    import wandb  # optional
    run = wandb.init(project=options["wandb"], name=Path(folder).name, dir=folder, config=options)
    return run.log, run.finish


def open_tensorboard(folder: str, first_step: int):
    """Return the functions log(scalars, step) and close() of TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # slow to import
    writer = SummaryWriter(str(Path(folder, "tensorboard")), purge_step=first_step)

    def log(scalars, step):
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


class Log:
    """Write what a run says and measures. Every rank has a Log, but rank 0 alone writes."""

    def __init__(self, config, loader):
        self.config = config
        self.loader = loader
        self.folder = config.out_dir
        self.is_writer = loader.ranks.rank == 0
        self.step = loader.first_step - 1  # the last step that is done
        self.started = time.perf_counter()
        self.is_plotted = True  # no record is missing in loss.png
        self.waiting = {}  # {file name: lines that are not written yet}
        disable = None if self.is_writer else True  # None: tqdm shows the bar on a terminal only
        self.bar = tqdm(total=config.max_steps, initial=self.step, unit="step", disable=disable)
        self.boards = {}  # {name: its functions log(scalars, step) and close()}
        if self.is_writer:
            with self._reporting("tensorboard"):
                self.boards["tensorboard"] = open_tensorboard(self.folder, loader.first_step)
        if self.is_writer and config.wandb:
            with self._reporting(f"--wandb {config.wandb}"):
                self.boards["wandb"] = open_wandb(self.folder, vars(config))

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if not self.is_writer:
            return
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads stdout, as in `train.py | head`: stop as after a signal
            signal.raise_signal(signal.SIGTERM)
        except OSError:
            pass  # a full disk does not stop a run

    def say_start(self, model, not_sharded_reason: str) -> None:
        """Say what is trained, on what and how. not_sharded_reason: see nanote.optimizers.Optimizer."""
        config = self.config
        loader = self.loader
        device = torch.cuda.get_device_name(loader.device) if loader.device.type == "cuda" else "CPU"
        self.say(f"{self.folder} from step {loader.first_step}: {config.preset} on {device}, "
                 f"{models.describe_fp8(model, config)}; {models.describe(model)}")
        tokens = loader.meta["train_tokens"]
        tokens_per_step = loader.tokens_per_step
        epochs = loader.samples_before(config.max_steps + 1) * config.seq_len / tokens
        line = f"{config.data}: {tokens:,} tokens, {epochs:.3g} epochs"
        if epochs > MAX_EPOCHS:
            line += (f", more than {MAX_EPOCHS}; make a larger corpus with data.py, or pass --max-steps "
                     f"{max(1, tokens // tokens_per_step)} for one epoch")
        self.say(f"{line}, {tokens_per_step:,} tokens a step")
        if not_sharded_reason:
            self.say("every rank updates all weights, after an all-reduce of their gradients: "
                     f"{not_sharded_reason}")
        if config.warmup_steps >= config.max_steps:
            self.say(describe_long_warmup(config))

    def say_outliers(self, step: int, fp8_state) -> None:
        """Name a scale of delayed scaling that an outlier has lowered, and how long its history holds it."""
        if not self.is_writer or self.config.fp8_amax_compute_algo != "max":
            return
        outliers = [outlier for outlier in fp8_state.outliers() if outlier.rows > 1]
        if not outliers:
            return
        name, steps_ago, rows = outliers[0]
        more = f" and {len(outliers) - 1} more" if len(outliers) > 1 else ""
        # a history has a row for each update of its scale: weights are cast once a step
        updates_per_step = 1 if name.endswith("weight") else self.config.grad_accum
        steps = math.ceil(rows / updates_per_step)
        self.say(f"step {step - steps_ago}: the scale of {name}{more} fell by more than 2^20, and the amax "
                 f"history holds its new amax for {steps} steps; to forget an outlier sooner, --resume with "
                 "--fp8-amax-compute-algo most_recent or a shorter --fp8-amax-history-len")

    def move_bar(self, step: int) -> None:
        """Let the progress bar show that a step is done."""
        self.step = step
        self.bar.update()

    def write(self, record: dict) -> None:
        """Write a line of metrics.jsonl, and show it."""
        if not self.is_writer:
            return
        record = record | {"seconds": time.perf_counter() - self.started}
        self._append("metrics.jsonl", record)
        self.is_plotted = "val_loss" in record
        if self.is_plotted:
            self._plot_losses()
        for name, (log, _) in self.boards.items():
            with self._reporting(name):
                scalars = {field: value for field, value in record.items() if value is not None}
                log(scalars, step=record["step"])
        self.say(self._describe(record))

    def _describe(self, record: dict) -> str:
        """Return the line that shows a record."""
        step = record["step"]
        line = f"step {step}/{self.config.max_steps}"
        if record["loss"] is None:
            line += "  no label"
        else:
            line += f"  loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}"
        line += f"  lr {record['lr']:.2e}"
        tokens_per_s = record["tokens_per_s"]
        has_trained = tokens_per_s > 0  # else no step had a label, and the time of a step is not known
        if has_trained:
            line += f"  {tokens_per_s:,.0f} tokens/s"
        for name, shown in SHOWN.items():
            if record.get(name) is not None:
                line += "  " + shown.format(record[name])
        steps_left = self.config.max_steps - step
        if has_trained and steps_left > 0 and step > self.loader.first_step:  # the first step may compile
            seconds_left = steps_left * self.loader.tokens_per_step / tokens_per_s
            line += f"  ETA {tqdm.format_interval(seconds_left)}"
        return line

    @contextlib.contextmanager
    def fp8_health(self, step: int, model):
        """Write the FP8 health of the micro-batches inside, by hooks."""
        with health.watch(model) as statistics:
            yield
        if self.is_writer:
            self._append("fp8_health.jsonl", {"step": step, "health": statistics})

    def close(self) -> None:
        """Write what waits, and draw loss.png and fp8_health.png."""
        self.bar.close()
        if not self.is_writer:
            return
        for name in self.waiting:
            self._write_waiting(name)
        for name, (_, close) in self.boards.items():
            with self._reporting(name):
                close()
        if not self.is_plotted:  # since the last record
            self._plot_losses()
        if "fp8_health.jsonl" in self.waiting:  # something was measured
            with self._reporting("fp8_health.png"):
                records = read_metrics(Path(self.folder, "fp8_health.jsonl"))
                recipe = self.config.fp8_recipe
                fp8_format = recipes.resolve_format(recipe, self.config.fp8_format)
                title = f"{self.folder}, recipe {recipe}, format {fp8_format}"
                health.plot(records, Path(self.folder, "fp8_health.png"), title, fp8_format)

    def _plot_losses(self) -> None:
        with self._reporting("loss.png"):
            plot_losses(self.folder)

    def _append(self, name: str, record: dict) -> None:
        """Append a record to a file, after those that could not be written before."""
        self.waiting[name] = self.waiting.get(name, "") + json.dumps(record) + "\n"
        self._write_waiting(name)

    def _write_waiting(self, name: str) -> None:
        content = self.waiting[name].encode()
        with self._reporting(name), open(Path(self.folder, name), "ab", buffering=0) as file:
            size = file.tell()
            written = file.write(content)
            if written < len(content):
                file.truncate(size)  # else the next line would follow a partial one
                raise OSError("no space left on the disk")
            self.waiting[name] = ""

    @contextlib.contextmanager
    def _reporting(self, what: str):
        """Print an error inside as a line that names what is not written."""
        try:
            yield
        except Exception as error:  # of many kinds; none of them is worth the run
            reason = error_line(error)
            if isinstance(error, ModuleNotFoundError):
                reason = f"{error.name} is not installed; pip install {error.name}"
            self.say(f"step {self.step}: {what} is not written: {reason}; training continues")


def read_metrics(path) -> list[dict]:
    """Return the lines of metrics.jsonl or fp8_health.jsonl, without an incomplete last one. A file that does
    not exist has none."""
    if not Path(path).exists():
        return []
    records = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(keepends=True), 1):
        try:
            record = json.loads(line)
            float(record["step"])  # TypeError or KeyError unless it has a number
            records.append(record)
        except (ValueError, TypeError, KeyError) as error:
            if line.endswith(b"\n"):
                reason = error_line(error)
                raise ValueError(f"{path}:{number}: damaged ({reason}); remove this line") from None
    return records


def cut(folder, first_step: int) -> None:
    """Remove `first_step` and later steps from a run's logs, before the run repeats these steps."""
    paths = [Path(folder, name) for name in ("metrics.jsonl", "fp8_health.jsonl")]
    records_of = {path: read_metrics(path) for path in paths if path.exists()}  # both, before one is written
    for path, records in records_of.items():
        kept = [json.dumps(record) + "\n" for record in records if record["step"] < first_step]
        replace_file(path, "".join(kept))


def replace_file(path: Path, text: str) -> None:
    """Write a file, or leave it as it was and raise an OSError that names it."""
    unfinished = path.with_suffix(".tmp")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        error.filename = str(path)
        error.filename2 = None
        raise


def plot_losses(folder) -> None:
    """Draw metrics.jsonl as loss.png."""
    from matplotlib import rc_context  # slow to import
    from matplotlib.figure import Figure
    records = read_metrics(Path(folder, "metrics.jsonl"))
    with rc_context({"font.size": 15}):
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        axes = figure.subplots()
        last = []
        # no line between evaluations: the loss does not fall straight
        for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o")):
            shown = [record for record in records if record.get(name) is not None]
            steps = [record["step"] for record in shown]
            losses = [record[name] for record in shown]
            if shown:
                axes.plot(steps, losses, style, lw=2, ms=9, label=label)
                last.append(f"{losses[-1]:.3f} in {label}")
        axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{folder}: loss {', '.join(last)}")
        axes.legend()
        axes.grid(alpha=0.4)
        figure.savefig(Path(folder, "loss.png"), dpi=130)
