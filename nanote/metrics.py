"""What a run measures and logs: losses, speed, model FLOP utilization (MFU), the log files and their plots.

Use `Meter` and `Log` in a training loop, and `read_metrics` to read the logs of a run. Losses stay on the
device until `Meter.read`, so that the host does not wait for the GPU between log lines. A log that cannot be
written does not stop a run: its records are kept and written later.
"""
import contextlib
import dataclasses
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from nanote import cli, fp8_health, json_files, models, peers, roofline
from nanote.config import TrainConfig
from nanote.dataset import without_checksum
from nanote.parallel import mean_over_ranks
from nanote.slow_ranks import SLOW, SlowestRank


class Diverged(RuntimeError):
    """Too many losses or gradient norms are not finite; the run stops."""


# ---------------------------------------------------------------- losses and speed

def flops_per_token(parameters: int, config: TrainConfig) -> float:
    """Return 6N + 12·L·C·T, the FLOPs per token of forward and backward (PaLM, arXiv:2204.02311, appendix B).

    N: parameters used in GEMMs, so without the position table and, if untied, without the token embedding. L
    layers, C = heads times head dimension, T = seq_len. Recomputed activations are not counted.
    """
    if not config.use_rotary:
        parameters -= config.n_positions * config.n_embd
    if not config.tie_embeddings:
        parameters -= config.vocab_size * config.n_embd
    width = config.n_head * config.head_dim if config.head_dim else config.n_embd
    return 6 * parameters + 12 * config.n_layer * width * config.seq_len


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense BF16 peak in FLOP/s; None if unknown. FP8 can exceed 100 % of it."""
    peaks = roofline.peaks(device)
    return peaks and peaks["bf16_tflops"] * 1e12


def read_losses(pending: list, skipped: int, limit: int, say) -> tuple[tuple[float, float] | None, list[int]]:
    """Read losses and gradient norms from the device, averaged over ranks, and report skipped steps.

    Args:
        pending: (step, loss, gradient norm) of each step since the last call, as tensors on the device.
        skipped: number of steps skipped before these.
        limit: maximum number of skipped steps.
        say: prints a line.

    Returns:
        (loss, gradient norm) of the last step that was not skipped, or None; the steps that were skipped.

    Raises:
        Diverged: more than `limit` steps were skipped.
    """
    values = mean_over_ranks(torch.stack([torch.stack((loss, norm)) for _, loss, norm in pending])).tolist()
    finite, skipped_steps = None, []
    for (step, *_), (loss, norm) in zip(pending, values):
        if math.isfinite(loss + norm):
            finite = loss, norm
            continue
        skipped_steps.append(step)
        count, what = skipped + len(skipped_steps), f"step {step}: loss {loss}, gradient norm {norm}"
        if count > limit:
            raise Diverged(f"{what}" + (f", after {cli.counted(count - 1, 'skipped step')}" if limit else ""))
        say(f"{what}: skipped ({count} of {limit})")
    return finite, skipped_steps


class Meter:
    """Collect losses, skipped steps and training time between log lines."""

    def __init__(self, config: TrainConfig, parameters: int, device: torch.device, world_size: int,
                 slowest_rank: SlowestRank | None = None):
        """`parameters`: their number, for MFU."""
        self.tokens_per_step = config.micro_batch_size * config.seq_len * config.grad_accum * world_size
        self.flops_per_token = flops_per_token(parameters, config)
        # the FLOPs of a model of the user's own are not known
        self.peak_flops = None if models.is_file(config.model) else peak_flops(device)
        self.least_ms = roofline.least_ms(config, device)
        self.device, self.world_size, self.limit = device, world_size, config.max_skipped_steps
        self.slowest_rank = slowest_rank
        self.pending = []  # (step, loss, gradient norm) of the steps since the last `read`
        self.finite = None  # (loss, gradient norm) of the last step that was not skipped
        self.skipped = 0
        self.seconds, self.steps = 0.0, 0  # training time and steps since the last `record`
        self.run_started = self.clock_started = time.perf_counter()
        self.step, self.eta_from = 0, None  # the last step; (step, time) from which the ETA is measured

    def start(self) -> None:
        """Start the clocks of the run and of the next step."""
        self.run_started = self.clock_started = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self.pending.append((step, loss, grad_norm))
        self.steps += 1
        self.step = step

    def read(self, say) -> bool:
        """Wait for the device, read the losses, and stop the clock of training time.

        Returns whether the last step was skipped, which changed no weight.
        """
        last_step = self.pending[-1][0]
        finite, skipped_steps = read_losses(self.pending, self.skipped, self.limit, say)
        self.pending.clear()
        self.seconds += time.perf_counter() - self.clock_started
        self.finite = finite or self.finite
        self.skipped += len(skipped_steps)
        return last_step in skipped_steps

    def record(self, step: int, lr: float) -> dict:
        """Return a line of metrics.jsonl. Call `read` first. Collective."""
        loss, grad_norm = self.finite
        tokens_per_s = self.tokens_per_step * self.steps / self.seconds
        ms = 1e3 * self.seconds / self.steps
        found = self.slowest_rank.find(self.steps, ms) if self.slowest_rank else {}
        self.seconds, self.steps = 0.0, 0
        mfu = peak_gib = None
        if self.peak_flops:
            mfu = tokens_per_s * self.flops_per_token / (self.peak_flops * self.world_size)
        if self.device.type == "cuda":
            peak_gib = (torch.cuda.max_memory_allocated(self.device) + peers.shared_bytes()) / 2**30
        return {"step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "skipped": self.skipped,
                "tokens_per_s": tokens_per_s, "mfu": mfu, "peak_gib": peak_gib,
                "roofline": self.least_ms and self.least_ms / ms} | found

    def restart(self) -> None:
        """Start the clock of training time again, after logging, evaluation and checkpoint."""
        self.clock_started = time.perf_counter()
        if self.eta_from is None:  # until here the time includes compilation, capture and warm-up
            self.eta_from = self.step, self.clock_started

    def seconds_left(self, last_step: int) -> float | None:
        """Return the expected time to `last_step`, evaluations and checkpoints included; None if unknown."""
        if self.eta_from is None or self.step == last_step:
            return None
        first_step, since = self.eta_from
        return (time.perf_counter() - since) / (self.step - first_step) * (last_step - self.step)

    def total_seconds(self) -> float:
        """Return the time since `start`, evaluations and checkpoints included."""
        return time.perf_counter() - self.run_started


def shown_time(seconds: float) -> str:
    """Return a duration in the unit that fits: 40 s, 12 min, 3.5 h, 2.1 days."""
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.{0 if unit == 'min' else 1}f} {unit}"
    return f"{seconds:.0f} s"


# ---------------------------------------------------------------- corpus and validation

MOST_EPOCHS = 10  # beyond it a run says how to get a larger corpus


def describe_corpus(config: TrainConfig, meta: dict, tokens_per_step: int) -> tuple[str, str]:
    """Return the size of the corpus and how often the run reads it, and a warning if that is too often.

    `meta`: meta.json of the token files. The warning is "" if there is none.
    """
    tokens = meta["train_tokens"]
    epochs = config.max_steps * tokens_per_step / tokens
    shown = f"{epochs:,.1f}" if epochs >= 1 else f"{epochs:.2g}"
    steps = cli.counted(config.max_steps, "step")
    size = f"{config.data}: {tokens:,} tokens, {shown} epochs in {steps}"
    if epochs <= MOST_EPOCHS:
        return size, ""
    tokenizer = without_checksum(meta["tokenizer"])
    same = "" if tokenizer == "byte" else " " + shlex.join(["--tokenizer", tokenizer])
    return size, (f"{config.data}: {shown} epochs of the same tokens, more than {MOST_EPOCHS}; make "
                  f"a larger corpus with python data.py packages{same} or python data.py hf "
                  f"HuggingFaceFW/fineweb-edu --subset sample-10BT --streaming{same}, "
                  f"or pass --max-steps {max(1, tokens // tokens_per_step)} for one epoch")


def bits_per_byte(val_loss: float, meta: dict) -> float | None:
    """Return a validation loss in bits per byte of text, which compares runs with different tokenizers.

    `meta`: meta.json of the token files; None if it does not count the bytes, as older ones.
    """
    if not meta.get("val_bytes"):
        return None
    return val_loss * meta["val_tokens"] / meta["val_bytes"] / math.log(2)


def val_record(val_loss: float, meta: dict) -> dict:
    """Return the fields of metrics.jsonl that a validation loss gives."""
    bits = bits_per_byte(val_loss, meta)
    return {"val_loss": val_loss} | ({} if bits is None else {"val_bits_per_byte": bits})


def describe_val_loss(val_loss: float, meta: dict) -> str:
    """Return a validation loss with its units: nats per token, and bits per byte if the bytes are known."""
    unit = "nats a byte" if meta["tokenizer"] == "byte" else f"nats a token ({meta['tokenizer']})"
    bits = bits_per_byte(val_loss, meta)
    return f"validation loss {val_loss:.4f} {unit}" + ("" if bits is None else f", {bits:.4f} bits a byte")


# ---------------------------------------------------------------- logs

class Log:
    """Write metrics.jsonl, TensorBoard, the progress bar and log lines; on ranks above 0 nothing."""

    def __init__(self, run: str, first_step: int, max_steps: int, enabled: bool):
        self.enabled, self.wandb = enabled, None
        self.is_unread = False  # whether the reader of stdout, as in `train.py | head`, is gone
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.run, self.step, self.max_steps = run, first_step - 1, max_steps
        self.waiting = {}  # file name -> records that are not written yet
        self.board = SummaryWriter(str(Path(run, "tensorboard")), purge_step=first_step)
        # disable=None: no bar without a terminal
        self.bar = tqdm(total=max_steps, initial=first_step - 1, unit="step", dynamic_ncols=True,
                        disable=None)

    def start_wandb(self, config: TrainConfig) -> None:
        """Log to Weights & Biases as well, under the name of the run's folder; its files go into that folder.

        ValueError, in one line, if it cannot start: without an account, for example.
        """
        if config.wandb is None:
            return
        try:
            import wandb  # optional

            self.wandb = wandb.init(project=config.wandb, name=Path(self.run).name, dir=self.run,
                                    config=dataclasses.asdict(config))
        except Exception as error:  # of many kinds
            raise ValueError(f"--wandb {config.wandb}: {json_files.reason(error)}; run wandb login, or set "
                             "WANDB_MODE=offline to log to files") from error

    def say(self, line: str) -> None:
        """Print a line. One that cannot be written, to a file on a full disk, does not stop the run."""
        if self.enabled:
            try:
                tqdm.write(line)
                if sys.stdout is not None:  # the shell has closed it (>&-)
                    sys.stdout.flush()
            except BrokenPipeError:
                self.is_unread = True
            except OSError:
                pass  # cli.run reports it at the end

    def advance(self) -> None:
        """Move the progress bar by one step."""
        if self.enabled:
            self.bar.update()
            self.step += 1

    def write(self, record: dict, seconds_left: float | None = None) -> None:
        """Log a record of metrics.jsonl everywhere; the time left is for the screen."""
        if not self.enabled:
            return
        self._append("metrics.jsonl", record)
        self._plot(record["step"], {key: value for key, value in record.items() if key != "step"})
        speed = f"{record['tokens_per_s']:,.0f} tokens/s"
        eta = "" if seconds_left is None else f"  ETA {shown_time(seconds_left)}"
        self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {speed}{eta}")
        mfu = f"  MFU {100 * record['mfu']:.1f} %" if record["mfu"] is not None else ""
        roofline = f"  roofline {100 * record['roofline']:.1f} %" if record["roofline"] is not None else ""
        val = f"  val loss {record['val_loss']:.4f}" if "val_loss" in record else ""
        if "val_bits_per_byte" in record:
            val += f" ({record['val_bits_per_byte']:.4f} bits a byte)"
        if "val_loss_without_fp8" in record:
            val += f"  val loss without FP8 {record['val_loss_without_fp8']:.4f}"
        slow = ""
        if record.get("slowest_ratio", 0.0) > SLOW:
            slow = f"  rank {record['slowest_rank']} is slow: {record['slowest_ratio']:.2f} x the median rank"
        self.say(f"step {record['step']}/{self.max_steps}  loss {record['loss']:.4f}  "
                 f"grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
                 f"{speed}{mfu}{roofline}{val}{eta}{slow}")

    def write_health(self, step: int, health: dict) -> None:
        """Log what fp8.health returns."""
        if not self.enabled:
            return
        self._append("fp8_health.jsonl", {"step": step, "health": health})
        self._plot(step, {f"fp8_{name}/{module}.{tensor}": value for module, tensors in health.items()
                          for tensor, figures in tensors.items() for name, value in figures.items()})

    def _plot(self, step: int, scalars: dict) -> None:
        """Log scalars to TensorBoard and Weights & Biases, without those that are None."""
        scalars = {name: value for name, value in scalars.items() if value is not None}
        with self._reporting_errors(step, "tensorboard"):
            for name, value in scalars.items():
                self.board.add_scalar(name, value, step)
        if self.wandb:
            try:
                self.wandb.log(scalars, step=step)
            except Exception as error:  # of many kinds; none of them is worth the run
                self.say(f"step {step}: not logged to wandb: {json_files.reason(error)}; training continues")

    def close(self) -> None:
        if self.enabled:
            self.bar.close()
            for name in self.waiting:
                self._write_waiting(name, self.step)
            with self._reporting_errors(self.step, "tensorboard"):
                self.board.close()
            if self.wandb:
                try:
                    self.wandb.finish()
                except Exception as error:  # of many kinds; none of them is worth the run
                    self.say(f"step {self.step}: wandb has not finished: {json_files.reason(error)}")

    def _append(self, name: str, record: dict) -> None:
        """Append a record to a file, after those that could not be written before."""
        self._restore_folder(record["step"])
        self.waiting.setdefault(name, []).append(record)
        self._write_waiting(name, record["step"])

    def _restore_folder(self, step: int) -> None:
        """Make the run's folder again if it was renamed or deleted, so that what follows is kept."""
        board = Path(self.run, "tensorboard")
        if not board.is_dir():
            if not Path(self.run).is_dir():
                self.say(f"step {step}: {self.run} was renamed or deleted; training goes on in a new folder "
                         f"{self.run}")
            with self._reporting_errors(step, "tensorboard"):
                board.mkdir(parents=True, exist_ok=True)

    def _write_waiting(self, name: str, step: int) -> None:
        if self.waiting[name]:
            with self._reporting_errors(step, name):
                json_files.append_lines(Path(self.run, name), self.waiting[name])
                self.waiting[name] = []

    @contextlib.contextmanager
    def _reporting_errors(self, step: int, name: str):
        """Report an OSError and continue: a full disk must not stop the run."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            self.say(f"step {step}: {self.run}/{name} is not written: {reason}; training continues")


# the only fields in which two equal runs differ
VARYING_FIELDS = ("tokens_per_s", "mfu", "roofline", "peak_gib", "seconds", "slowest_rank", "slowest_ratio")

# What json_files.check accepts in a line of metrics.jsonl and of fp8_health.jsonl.
METRICS = {"step": json_files.SIZE, "loss": json_files.FLOAT32, "val_loss?": json_files.FLOAT32,
           "val_bits_per_byte?": json_files.FLOAT32, "val_loss_without_fp8?": json_files.FLOAT32,
           "peak_gib?": float | None}
AMAX = json_files.between(0, json_files.FLOAT32_MAX) | Literal[math.inf]
FIGURES = {"amax": AMAX, "scale": AMAX | None, "saturated": json_files.SHARE | None,
           "flushed": json_files.SHARE | None}  # of one tensor
HEALTH = {"step": json_files.SIZE, "health": dict[str, dict[str, FIGURES]]}


def read_metrics(path) -> list[dict]:
    """Read a metrics.jsonl or fp8_health.jsonl; [] if it does not exist.

    ValueError, which names the line, if it is damaged.
    """
    kind = HEALTH if Path(path).name == "fp8_health.jsonl" else METRICS
    return json_files.read_lines(path, kind, "remove it from there: it is only a log")


def read_logs(run: str) -> dict[Path, list[dict]]:
    """Read metrics.jsonl and fp8_health.jsonl of a run. ValueError if one of them is damaged."""
    return {path: read_metrics(path) for path in (Path(run, "metrics.jsonl"), Path(run, "fp8_health.jsonl"))}


def logged_val_loss(run: str, step: int) -> float | None:
    """Return the validation loss logged for a step, NaN if it has none; None if the step is not logged."""
    records = read_metrics(Path(run, "metrics.jsonl"))
    found = [record.get("val_loss", math.nan) for record in records if record["step"] == step]
    return found[-1] if found else None


def cut_logs(run: str, first_step: int, names=("metrics.jsonl", "fp8_health.jsonl")) -> None:
    """Remove the records of `first_step` and later from a run's logs, before the run repeats these steps.

    Nothing is written unless both logs can be read.
    """
    for path, records in read_logs(run).items():
        if not path.exists() or path.name not in names:
            continue
        kept = [json.dumps(record) + "\n" for record in records if record["step"] < first_step]
        json_files.replace_text(path, "".join(kept), "not rewritten", "free some space")


# ---------------------------------------------------------------- plots

def plot_losses(run: str) -> str:
    """Plot metrics.jsonl as loss.png, and return its path."""
    from matplotlib.figure import Figure  # slow to import

    records = read_metrics(Path(run, "metrics.jsonl"))
    evaluated = [r for r in records if "val_loss" in r]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], lw=1.2, color="tab:blue", alpha=0.8,
              label="training")
    axes.plot([r["step"] for r in evaluated], [r["val_loss"] for r in evaluated], "o-", ms=4,
              color="tab:orange", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(run, "loss.png"), dpi=150)
    return str(Path(run, "loss.png"))


def plot_health(run: str, title: str, fp8_format: str) -> str:
    """Plot fp8_health.jsonl as fp8_health.png, and return its path; "" if there are no records."""
    records = read_metrics(Path(run, "fp8_health.jsonl"))
    if not records:
        return ""
    fp8_health.plot(records, Path(run, "fp8_health.png"), title, fp8_format)
    return str(Path(run, "fp8_health.png"))


def draw(name: str, say, plot, *arguments) -> str:
    """Return plot(*arguments), the path of a plot; "" if the log is damaged or the disk full."""
    try:
        return plot(*arguments)
    except (ValueError, OSError) as error:
        say(f"{name} is not drawn: {getattr(error, 'strerror', None) or error}")
        return ""
