"""The logs of a run: losses, speed and model FLOP utilization (MFU).

A training loop calls `Log.add` after every step and, every few steps, `read`, `take_record`, `write` and
`restart_clock`, in this order. A log that cannot be written does not stop a run: its lines are kept and
written later.
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

from nanote import checkpoint, health, models, parallel
from nanote.command import error_line
from nanote.config import is_model_file

MAX_SKIPPED = 10  # steps of a process; one that skips more raises Diverged
MAX_EPOCHS = 10  # a run of more epochs says so
SHOWN = {"mfu": "MFU {:.1%}", "val_loss": "val loss {:.4f}", "val_bits_per_byte": "({:.4f} bits a byte)",
         "val_loss_without_fp8": "val loss without FP8 {:.4f}"}  # in a log line, where measured

# Dense BF16 peak in TFLOP/s by a part of the GPU's name, longer names first (NVIDIA's data sheets)
PEAK_TFLOPS = {"GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
               "A100": 312, "L40S": 362, "L4": 121, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165}


class Diverged(RuntimeError):
    """Too many losses or gradient norms are not finite; the run stops."""


def flops_per_token(model_config, parameters: int, seq_len: int) -> float:
    """Return 6N + 12·L·C·T, the FLOPs per token of forward and backward (PaLM, arXiv:2204.02311, appendix B).
    N: parameters used in GEMMs, so without the position table and, if untied, without the token embedding. L
    layers, C = heads times head dimension, T = seq_len."""
    if not getattr(model_config, "use_rotary", False):
        parameters -= model_config.n_positions * model_config.n_embd
    if not model_config.tie_embeddings:
        parameters -= model_config.vocab_size * model_config.n_embd
    head_dim = getattr(model_config, "head_dim", None) or model_config.n_embd // model_config.n_head
    return 6 * parameters + 12 * model_config.n_layer * model_config.n_head * head_dim * seq_len


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense BF16 peak in FLOP/s; None if unknown. FP8 can exceed 100 % of it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, tflops in PEAK_TFLOPS.items():
        if part in name:
            return 1e12 * tflops
    return None


def val_record(val_loss: float, meta: dict) -> dict:
    """Return the fields of metrics.jsonl: nats per token and, if meta.json counts them, bits per byte."""
    record = {"val_loss": val_loss}
    if meta.get("val_bytes") and "val_mask_sha256" not in meta:  # the loss is that of all bytes
        record["val_bits_per_byte"] = val_loss * meta["val_tokens"] / meta["val_bytes"] / math.log(2)
    return record


def describe_val_loss(val_loss: float, meta: dict) -> str:
    """Return a validation loss with its unit and, if meta.json counts bytes, bits per byte."""
    unit = "nats a byte" if meta["tokenizer"] == "byte" else f"nats a token ({meta['tokenizer']})"
    line = f"validation loss {val_loss:.4f} {unit}"
    record = val_record(val_loss, meta)
    if "val_bits_per_byte" in record:
        line += f", {record['val_bits_per_byte']:.4f} bits a byte"
    return line


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


class Stopwatch:
    """The time of training steps, without that of logging, evaluation and checkpoints."""

    def __init__(self):
        self.seconds = 0.0  # of `steps`
        self.steps = 0  # since the last `take`
        self.restart()

    def restart(self) -> None:
        """Go on, after `stop`."""
        self.restarted = time.perf_counter()

    def stop(self) -> None:
        """Add the time since `restart`."""
        self.seconds += time.perf_counter() - self.restarted

    def take(self) -> tuple[float, int]:
        """Return (seconds, steps), and start both at 0 again."""
        taken = self.seconds, self.steps
        self.seconds = 0.0
        self.steps = 0
        return taken


class Log:
    """Collect losses and training time, and write them. Every rank has one; rank 0 alone writes."""

    def __init__(self, config, loader, first_step: int, skipped_before=()):
        """`loader`: has meta, device, ranks and tokens_per_step. skipped_before: steps that the run skipped
        before it was resumed."""
        self.config = config
        self.folder = config.out_dir
        self.loader = loader
        self.ranks = loader.ranks
        self.is_writer = self.ranks.rank == 0
        self.flops = None  # of a token, if known
        self.first_step = first_step
        self.step = first_step - 1  # the last one that is done
        self.pending = []  # (step, loss, gradient norm) of the steps since the last `read`, on the device
        self.last_finite = None  # (loss, gradient norm) of the last step that was not skipped
        self.skipped = []  # steps
        self.skipped_before = list(skipped_before)
        self.without_labels = set()  # steps that changed nothing
        self.stopwatch = Stopwatch()
        self.seconds_per_step = 0.0  # at the last `take_record`
        self.started = time.perf_counter()
        self.is_plotted = True  # no record is missing in loss.png
        self.waiting = {}  # {file name: lines that are not written yet}
        self.bar = tqdm(total=config.max_steps, initial=self.step, unit="step",
                        disable=None if self.is_writer else True)  # None: no bar without a terminal
        self.boards = {}  # {name: its functions log(scalars, step) and close()}
        if self.is_writer:
            with self._reporting("tensorboard"):
                self.boards["tensorboard"] = open_tensorboard(self.folder, first_step)
        if self.is_writer and config.wandb:
            with self._reporting(f"--wandb {config.wandb}"):
                self.boards["wandb"] = open_wandb(self.folder, vars(config))

    def start(self, model, reason: str) -> None:
        """Say what is trained, on what and how. reason: why each rank updates all weights, if it does."""
        config = self.config
        loader = self.loader
        if loader.device.type == "cuda" and not is_model_file(config.model):
            size = sum(parameter.numel() for parameter in model.parameters())
            self.flops = flops_per_token(model.config, size, config.seq_len)
        device = torch.cuda.get_device_name(loader.device) if loader.device.type == "cuda" else "CPU"
        self.say(f"{self.folder} from step {self.first_step}: {config.preset} on {device}, "
                 f"{models.describe_fp8(model, config)}; {models.describe(model)}")
        tokens = loader.meta["train_tokens"]
        tokens_per_step = loader.tokens_per_step
        epochs = loader.samples_before(config.max_steps + 1) * config.seq_len / tokens
        line = f"{config.data}: {tokens:,} tokens, {epochs:.3g} epochs"
        if epochs > MAX_EPOCHS:
            line += (f", more than {MAX_EPOCHS}; make a larger corpus with data.py, or pass --max-steps "
                     f"{max(1, tokens // tokens_per_step)} for one epoch")
        self.say(f"{line}, {tokens_per_step:,} tokens a step")
        if reason:
            self.say(f"every rank updates all weights, after an all-reduce of their gradients: {reason}")

    @property
    def all_skipped(self) -> list[int]:
        """The steps that the run has skipped, in this process and before."""
        return self.skipped_before + self.skipped

    def add(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Note a step. loss: this rank's share, (); norm: of all gradients, (), the same on every rank."""
        self.pending.append((step, loss, norm))
        self.step = step
        self.stopwatch.steps += 1
        self.bar.update()

    def add_without_labels(self, step: int) -> None:
        """Note a step in which no token of any rank is a label, so that it changed nothing."""
        self.without_labels.add(step)
        self.say(f"step {step}: no token is a label: skipped")
        self.step = step
        self.bar.update()

    def read(self) -> None:
        """Read the losses and gradient norms of the pending steps, which waits for the device, and note the
        steps where one is not finite, which were skipped. Collective. Raises Diverged after too many of
        them."""
        reason = ""  # of the last skipped step
        for step, loss, norm in self._pending_values():
            if math.isfinite(loss) and math.isfinite(norm):
                self.last_finite = loss, norm
                continue
            self.skipped.append(step)
            reason = f"step {step}: loss {loss}, gradient norm {norm}"
            if len(self.skipped) > MAX_SKIPPED:
                raise self._diverged(reason)
            self.say(f"{reason}: skipped ({len(self.skipped)} of {MAX_SKIPPED})")
        is_over = self.step == self.config.max_steps
        if is_over and reason and self.last_finite is None:  # the run had no finite step at all
            raise self._diverged(reason)
        self.pending.clear()
        self.stopwatch.stop()  # until `restart_clock`

    def _pending_values(self) -> list[tuple[int, float, float]]:
        """Return (step, loss, gradient norm) of the pending steps, over all ranks. Waits for the device."""
        if not self.pending:
            return []
        # Both are summed over ranks. A loss is this rank's share already; a norm is the same on every rank.
        shares = torch.stack([torch.stack((loss, norm / self.ranks.count)) for _, loss, norm in self.pending])
        values = parallel.sum_over_ranks(shares).tolist()
        return [(step, loss, norm) for (step, _, _), (loss, norm) in zip(self.pending, values)]

    def _diverged(self, reason: str) -> Diverged:
        """Return the error that ends the run, with the checkpoint to go back to."""
        good = checkpoint.last_good(self.folder, self.skipped[-1], self.all_skipped)
        before = len(self.skipped) - 1
        return Diverged(f"{reason}, after {before} skipped steps; last good checkpoint: {good}")

    def say_outliers(self, step: int, fp8_state, updates_per_step: int) -> None:
        """Name a scale of delayed scaling that an outlier has lowered, and how long its history holds that.

        updates_per_step: how often a step updates the scales of inputs and gradients.
        """
        if not self.is_writer or self.config.fp8_amax_compute_algo != "max":
            return
        outliers = [(name, ago, rows) for name, ago, rows in fp8_state.outliers() if rows > 1]
        if not outliers:
            return
        name, ago, rows = outliers[0]
        more = f" and {len(outliers) - 1} more" if len(outliers) > 1 else ""
        if name.endswith("weight"):
            updates_per_step = 1  # weights are cast once a step
        steps = math.ceil(rows / updates_per_step)
        self.say(f"step {step - ago}: the scale of {name}{more} fell by more than 2^20, and the amax history "
                 f"holds its new amax for {steps} steps; to forget an outlier sooner, --resume with "
                 "--fp8-amax-compute-algo most_recent or a shorter --fp8-amax-history-len")

    def take_record(self, step: int, lr: float) -> dict:
        """Return the line of metrics.jsonl about the steps since the last one; call `read` first. The loss is
        that of the last finite step; None if no step was finite yet, or if this one had no label."""
        loss = None
        norm = None
        if self.last_finite is not None and step not in self.without_labels:
            loss, norm = self.last_finite
        seconds, steps = self.stopwatch.take()
        self.seconds_per_step = seconds / max(1, steps)
        tokens_per_s = self.loader.tokens_per_step * steps / seconds
        mfu = None
        peak_gib = None
        if self.loader.device.type == "cuda":
            peak_gib = torch.cuda.max_memory_allocated(self.loader.device) / 2**30
            peak = peak_flops(self.loader.device)
            if peak and self.flops and tokens_per_s > 0:  # 0: no step since the last record had a label
                mfu = tokens_per_s * self.flops / (peak * self.ranks.count)
        return {"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "skipped": len(self.skipped),
                "tokens_per_s": tokens_per_s, "mfu": mfu, "peak_gib": peak_gib}

    def restart_clock(self) -> None:
        """Start the clock of training time again, after logging, evaluation and checkpoint."""
        self.stopwatch.restart()

    def write(self, record: dict) -> None:
        """Write a line of metrics.jsonl and show it, unless no step was finite yet."""
        if not math.isfinite(record.get("val_loss", 0)):
            raise Diverged(f"step {record['step']}: validation loss {record['val_loss']}")
        step = record["step"]
        has_loss = record["loss"] is not None
        if not self.is_writer or (not has_loss and step not in self.without_labels):
            return
        record = record | {"seconds": time.perf_counter() - self.started}
        self._append("metrics.jsonl", record)
        self.is_plotted = "val_loss" in record
        if self.is_plotted:
            self._plot_losses()
        for name, (log, _) in self.boards.items():
            with self._reporting(name):
                log({field: value for field, value in record.items() if value is not None}, step=step)
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
        has_trained = record["tokens_per_s"] > 0  # else nothing says how long a step takes
        if has_trained:
            line += f"  {record['tokens_per_s']:,.0f} tokens/s"
        for name, shown in SHOWN.items():
            if record.get(name) is not None:
                line += "  " + shown.format(record[name])
        steps_left = self.config.max_steps - step
        if has_trained and steps_left > 0 and step > self.first_step:  # the first step may compile
            line += f"  ETA {tqdm.format_interval(steps_left * self.seconds_per_step)}"
        return line

    @contextlib.contextmanager
    def measure_fp8_health(self, step: int, model):
        """Write the FP8 health of the step inside."""
        with health.watch(model) as statistics:
            yield
        if self.is_writer:
            self._append("fp8_health.jsonl", {"step": step, "health": statistics})

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
                health.plot(records, Path(self.folder, "fp8_health.png"), self.folder, self.config.fp8_format)

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
    """Read metrics.jsonl or fp8_health.jsonl, without an incomplete last line; [] if there is no file."""
    if not Path(path).exists():
        return []
    records = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(keepends=True), 1):
        try:
            record = json.loads(line)
            record["step"] + 0  # TypeError or KeyError unless it has a number
            records.append(record)
        except (ValueError, TypeError, KeyError) as error:
            if line.endswith(b"\n"):
                raise ValueError(f"{path}:{number}: damaged ({error_line(error)}); remove this line"
                                 ) from None
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
    from matplotlib.figure import Figure  # slow to import
    records = read_metrics(Path(folder, "metrics.jsonl"))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        shown = [record for record in records if record.get(name) is not None]
        steps = [record["step"] for record in shown]
        losses = [record[name] for record in shown]
        if shown:
            axes.plot(steps, losses, style, lw=1.2, ms=4, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=str(folder))
    axes.legend()
    figure.savefig(Path(folder, "loss.png"), dpi=150)
