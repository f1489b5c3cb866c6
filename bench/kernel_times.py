"""What the time of a training step goes to, alone and on several GPUs, from its kernels.

bench/rank_trace.py records the kernels; nothing here needs a GPU. `summarize` makes the figures of a row.

At each instant a GPU computes, if a kernel runs that does not communicate; else it communicates, if one runs
that does: this communication is exposed; else it is idle. Kernels that run at the same time share that time
equally. So the times of a step add up to its duration, and their differences between two steps to the
difference of these.
"""
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

CLASSES = {  # class of kernels -> regular expression for their names; the first match counts
    "communication": "nccl|symmetric_memory|barrier_kernel|memcpy ptop",
    "attention": "flash|fmha|sdpa|attention|cudnn",
    "GEMM": "nvjet|gemm|cutlass|cublas|splitk|xmma",
    "copies": "memcpy|memset|copy|catarray|chunk_cat|fillfunctor",
    "optimizer": "^_adam|^_squares|multi_tensor",
    "other": "",  # norms, casts, activations, the loss, the embedding
}
LAST_KERNEL = "_adam"  # of a step: one for each parameter group
COLLECTIVES = "AllGather|ReduceScatter|AllReduce|Broadcast|barrier"
TERMS = ("slower kernels", "different kernels", "optimizer", "exposed communication", "idle")
NS_PER_MS = 1e6
NS_PER_US = 1e3


class Kernel(NamedTuple):
    """A kernel, or a copy, on a GPU."""

    name: str
    start: int  # ns
    duration: int  # ns
    grid: tuple | None = None  # None: a copy
    size: int = 0  # bytes of a copy

    @property
    def end(self) -> int:
        return self.start + self.duration

    @classmethod
    def from_json(cls, values):
        """Return a kernel that JSON has stored as a list, with a list as its grid."""
        name, start, duration, grid, size = values
        return cls(name, start, duration, grid and tuple(grid), size)


def kernels_of(trace: dict) -> list[Kernel]:
    """Return the kernels and copies of PyTorch's Chrome trace, by their starts. All ranks read
    one clock; `clock_offsets` finds what is left between them."""
    base = trace.get("baseTimeNanoseconds", 0)
    kernels = []
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            arguments = event["args"]
            grid = tuple(arguments["grid"]) if "grid" in arguments else None
            start = base + round(NS_PER_US * event["ts"])
            duration = round(NS_PER_US * event["dur"])
            kernels.append(Kernel(event["name"], start, duration, grid, arguments.get("bytes", 0)))
    return sorted(kernels, key=lambda kernel: kernel.start)


def class_of(kernel: Kernel, sent_sizes=()) -> str:
    """Return the class of a kernel. sent_sizes: bytes of the copies that go to other GPUs, which may have the
    name of a copy on the GPU."""
    if kernel.name.startswith("Memcpy") and kernel.size in sent_sizes:
        return "communication"
    for name, pattern in CLASSES.items():
        if re.search(pattern, kernel.name, re.IGNORECASE):
            return name


def collective_of(kernel: Kernel) -> str:
    """Return what a kernel of class communication does."""
    found = re.search(COLLECTIVES, kernel.name)
    return found[0] if found else "copies"


def step_ends(kernels: list[Kernel], steps: int) -> list[int]:
    """Return when each of `steps` updates ended. ValueError if the trace does not have as many."""
    ends = [kernel.end for kernel in kernels if kernel.name.startswith(LAST_KERNEL)]
    if not ends or len(ends) % steps:
        raise ValueError(f"a trace of {steps} steps has {len(ends)} kernels {LAST_KERNEL}, no multiple")
    per_step = len(ends) // steps
    return ends[per_step - 1::per_step]


def divide_time(kernels: list[Kernel], communicates: list[bool], start: int, end: int):
    """Divide the time from start to end among kernels -> (ns of each kernel, ns in which none runs)."""
    edges = []  # (time, whether a kernel begins, its index)
    for index, kernel in enumerate(kernels):
        begin = max(kernel.start, start)
        finish = min(kernel.end, end)
        if begin < finish:
            edges += [(begin, True, index), (finish, False, index)]
    times = [0.0] * len(kernels)
    idle = 0
    computing = set()
    communicating = set()
    now = start
    for time, begins, index in sorted(edges):
        running = computing or communicating
        for other in running:
            times[other] += (time - now) / len(running)
        if not running:
            idle += time - now
        now = time
        group = communicating if communicates[index] else computing
        if begins:
            group.add(index)
        else:
            group.remove(index)
    return times, idle + end - now


@dataclass
class Entry:
    """The kernels of one class, name and grid."""

    count: float = 0  # a step
    time: float = 0.0  # ms a step, of the time of the GPU that they got in `divide_time`
    duration: float = 0.0  # ms a step


@dataclass
class Profile:
    """What a GPU did in its steps."""

    ends: list[int]  # of the step before the first one, and of each step
    step: float  # ms
    idle: float  # ms a step
    kernels: list[Kernel]  # that started in these steps
    classes: list[str]  # of each kernel
    entries: dict  # {(class, name, grid): Entry}

    def time(self, wanted: str) -> float:
        """Return the ms a step of a class: of communication those exposed."""
        return sum(entry.time for (name, *_), entry in self.entries.items() if name == wanted)

    def duration(self, wanted: str) -> float:
        """Return the summed durations of the kernels of a class, in ms a step."""
        return sum(entry.duration for (name, *_), entry in self.entries.items() if name == wanted)


def profile_of(kernels: list[Kernel], steps: int, sent_sizes=()) -> Profile:
    """Return the profile of `steps` steps, from the kernels of one step more, the first of which only says
    when the others begin."""
    ends = step_ends(kernels, steps + 1)
    classes = [class_of(kernel, sent_sizes) for kernel in kernels]
    communicates = [name == "communication" for name in classes]
    times, idle = divide_time(kernels, communicates, ends[0], ends[-1])
    entries = defaultdict(Entry)
    started = []
    for kernel, name, time in zip(kernels, classes, times):
        entry = entries[name, kernel.name, kernel.grid]
        entry.time += time / steps / NS_PER_MS
        if ends[0] <= kernel.start < ends[-1]:
            entry.count += 1 / steps
            entry.duration += kernel.duration / steps / NS_PER_MS
            started.append((kernel, name))
    step = (ends[-1] - ends[0]) / steps / NS_PER_MS
    kernels, classes = zip(*started)
    return Profile(ends, step, idle / steps / NS_PER_MS, kernels, classes, dict(entries))


# ---------------------------------------------------------------- two profiles of a GPU

def is_same_work(key, alone: Profile, together: Profile) -> bool:
    """Return whether both steps have kernels of this class, name and grid, and as many."""
    if key not in alone.entries or key not in together.entries:
        return False
    return round(alone.entries[key].count, 3) == round(together.entries[key].count, 3)


def differences(alone: Profile, together: Profile) -> dict:
    """Return {term: {class: ms a step together minus ms a step alone}}, which sum to that of the steps."""
    terms = {term: defaultdict(float) for term in TERMS}
    nothing = Entry()
    for key in alone.entries | together.entries:
        kind = key[0]
        if kind == "communication":
            term = "exposed communication"
        elif kind == "optimizer":
            term = "optimizer"
        else:
            term = "slower kernels" if is_same_work(key, alone, together) else "different kernels"
        terms[term][kind] += together.entries.get(key, nothing).time - alone.entries.get(key, nothing).time
    terms["idle"]["idle"] = together.idle - alone.idle
    return terms


def slowdowns(alone: Profile, together: Profile) -> dict:
    """Return the duration of kernels over that of the same ones alone: beside communication, and apart from
    it. None if there are none. A kernel is beside communication if one runs in its middle."""
    durations_alone = defaultdict(list)  # {key: ns of its kernels}
    for kernel, name in zip(alone.kernels, alone.classes):
        durations_alone[name, kernel.name, kernel.grid].append(kernel.duration)
    intervals = merge([kernel for kernel, name in zip(together.kernels, together.classes)
                       if name == "communication"])
    starts = [start for start, _ in intervals]
    numbers = defaultdict(int)  # {key: how many of its kernels came before}
    sums = {"beside": [0, 0], "apart": [0, 0]}  # ns together, ns alone
    for kernel, name in zip(together.kernels, together.classes):
        key = name, kernel.name, kernel.grid
        if name in ("communication", "optimizer") or not is_same_work(key, alone, together):
            continue
        duration_alone = durations_alone[key][numbers[key]]
        numbers[key] += 1
        middle = kernel.start + kernel.duration / 2
        last = bisect_right(starts, middle) - 1
        is_beside = last >= 0 and middle < intervals[last][1]
        found = sums["beside" if is_beside else "apart"]
        found[0] += kernel.duration
        found[1] += duration_alone
    return {place: together_ns / alone_ns if alone_ns else None
            for place, (together_ns, alone_ns) in sums.items()}


def merge(kernels: list[Kernel], gap=0) -> list[list[int]]:
    """Return [start, end] of the intervals in which any of these kernels runs, by their starts. Intervals
    that are at most `gap` ns apart are one."""
    intervals = []
    for kernel in kernels:
        if intervals and kernel.start <= intervals[-1][1] + gap:
            intervals[-1][1] = max(intervals[-1][1], kernel.end)
        else:
            intervals.append([kernel.start, kernel.end])
    return intervals


# ---------------------------------------------------------------- several ranks

def meetings(profiles: list[Profile]) -> list[list[Kernel]]:
    """Return the kernels of each collective that all ranks call, a kernel per rank."""
    of_ranks = []
    for profile in profiles:
        calls = defaultdict(list)  # {name: its kernels}
        for kernel, name in zip(profile.kernels, profile.classes):
            if name == "communication" and collective_of(kernel) != "copies":
                calls[kernel.name].append(kernel)
        of_ranks.append(calls)
    found = []
    for name, kernels in of_ranks[0].items():
        if all(len(calls[name]) == len(kernels) for calls in of_ranks):
            found += zip(*(calls[name] for calls in of_ranks))
    return found


def clock_offsets(profiles: list[Profile]) -> list[int]:
    """Return the ns by which each rank's clock is ahead of that of rank 0: a collective ends on all ranks at
    about the same time."""
    collectives = meetings(profiles)
    if not collectives:
        return [0] * len(profiles)
    return [round(statistics.median(kernels[rank].end - kernels[0].end for kernels in collectives))
            for rank in range(len(profiles))]


def waits(profiles: list[Profile], offsets: list[int]) -> list[dict]:
    """Return for each rank {collective: ms a step in which its kernels wait for another rank's to start}."""
    found = [defaultdict(float) for _ in profiles]
    for kernels in meetings(profiles):
        starts = [kernel.start - offset for kernel, offset in zip(kernels, offsets)]
        for rank, kernel in enumerate(kernels):
            wait = min(max(starts) - starts[rank], kernel.duration)
            steps = len(profiles[rank].ends) - 1
            found[rank][collective_of(kernel)] += wait / steps / NS_PER_MS
    return found


def communication(profile: Profile, sent: dict, waits_ms: dict) -> dict:
    """Return {collective: its figures a step} of a rank. sent: {collective: bytes a step}."""
    found = {}
    for (name, kernel_name, grid), entry in profile.entries.items():
        if name != "communication" or not entry.count:
            continue
        collective = collective_of(Kernel(kernel_name, 0, 0))
        figures = found.setdefault(collective, {"kernels": 0, "ms": 0.0, "exposed_ms": 0.0, "channels": 0})
        figures["kernels"] += entry.count
        figures["ms"] += entry.duration
        figures["exposed_ms"] += entry.time
        figures["channels"] = max(figures["channels"], grid[0] if grid else 0)
    for collective, figures in found.items():
        figures["wait_ms"] = waits_ms.get(collective, 0.0)
        figures["bytes"] = sent.get(collective, 0)
        transfer_ms = figures["ms"] - figures["wait_ms"]
        figures["gb_per_s"] = figures["bytes"] / transfer_ms / 1e6 if transfer_ms > 0 else 0.0
    return found


def summarize(ranks: list[dict], steps: int) -> dict:
    """Return the figures of a row from what each rank has recorded.

    ranks: {"alone": kernels, "together": kernels, "sent": {collective: bytes a step}, "sent_sizes": bytes of
        the copies to other GPUs} of each.
    """
    alone = [profile_of(rank["alone"], steps) for rank in ranks]
    together = [profile_of(rank["together"], steps, rank["sent_sizes"]) for rank in ranks]
    offsets = clock_offsets(together)
    waits_of_ranks = waits(together, offsets)
    rows = []
    for number, rank in enumerate(ranks):
        by_class = differences(alone[number], together[number])
        both = {"alone": alone[number], "together": together[number]}
        compute = [name for name in CLASSES if name != "communication"]
        rows.append({
            "step_ms": {name: profile.step for name, profile in both.items()},
            "difference_ms": {term: sum(parts.values()) for term, parts in by_class.items()},
            "difference_by_class_ms": by_class,
            "compute_ms": {name: {kind: profile.time(kind) for kind in compute}
                           for name, profile in both.items()},
            "summed_ms": {name: {kind: profile.duration(kind) for kind in CLASSES}
                          for name, profile in both.items()},
            "exposed_ms": together[number].time("communication"),
            "idle_ms": {name: profile.idle for name, profile in both.items()},
            "slowdown": slowdowns(**both),
            "sent_bytes": rank["sent"],
            "communication": communication(together[number], rank["sent"], waits_of_ranks[number]),
            "clock_offset_us": offsets[number] / NS_PER_US})
    apart = ends_apart(together, offsets)
    return {"ranks": rows, "timeline": timelines(together, offsets),
            "ends_apart_us": {"mean": statistics.mean(apart), "max": max(apart)}}


def mean_terms(row: dict) -> dict:
    """Return {term: ms, mean over ranks} of what a step together takes longer than a step alone."""
    return {term: statistics.mean(rank["difference_ms"][term] for rank in row["ranks"]) for term in TERMS}


def ends_apart(profiles: list[Profile], offsets: list[int]) -> list[float]:
    """Return for each step the us from the first rank's end of it to the last one's."""
    found = []
    for ends in zip(*(profile.ends for profile in profiles)):
        ends = [end - offset for end, offset in zip(ends, offsets)]
        found.append((max(ends) - min(ends)) / NS_PER_US)
    return found


# ---------------------------------------------------------------- intervals for a picture

def timelines(profiles: list[Profile], offsets: list[int]) -> list[str]:
    """Return the kernels of the last step as a text for each rank, which `read_timeline` reads: "2 0.0 12.3;"
    is class 2 of CLASSES for 12.3 us from the start of the step. Kernels of a class that are at most 1 us
    apart are one."""
    start = min(profile.ends[-2] - offset for profile, offset in zip(profiles, offsets))
    texts = []
    for profile, offset in zip(profiles, offsets):
        intervals = []
        for number, wanted in enumerate(CLASSES):
            kernels = [kernel for kernel, name in zip(profile.kernels, profile.classes)
                       if name == wanted and kernel.start >= profile.ends[-2]]
            intervals += [(begin, end, number) for begin, end in merge(kernels, gap=1000)]
        texts.append("".join(
            f"{number} {(begin - offset - start) / NS_PER_US:.1f} {(end - begin) / NS_PER_US:.1f};"
            for begin, end, number in sorted(intervals)))
    return texts


def read_timeline(text: str) -> list[tuple[str, float, float]]:
    """Return (class, start in us, duration in us) of the intervals in a text of `timelines`."""
    names = list(CLASSES)
    found = []
    for interval in text.split(";")[:-1]:
        number, start, duration = interval.split()
        found.append((names[int(number)], float(start), float(duration)))
    return found
