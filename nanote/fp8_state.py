"""Keep a skipped step out of the FP8 state of delayed scaling. Needs PyTorch only: copy it into a loop.

    fp8_state = FP8State(model)
    for batches in steps:
        fp8_state.save()  # before the first forward pass of the step
        for batch in batches:
            model(*batch).backward()  # updates scales and amax histories
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        is_skipped = ~norm.isfinite()
        fp8_state.restore(when=is_skipped)  # does not wait for the GPU
        if not is_skipped:
            optimizer.step()
        optimizer.zero_grad()

An amax history holds one huge value for as many steps as it has rows, and scales made for it flush everything
else to zero. So a step that is skipped must leave scales and histories as they were, like the weights.

The state is that of each module's `fp8_meta`, on any engine: the tensors that its kernels read, changed in
place. What else an engine keeps needs no restoring: FP8 copies of weights are written anew by the next step's
first micro-batch, and the scales that a recomputation uses are taken in its own forward pass.
"""
from typing import NamedTuple

import torch

OUTLIER_FACTOR = 2.0**20  # a scale that falls by a larger factor within a step has met an outlier
TENSORS = {"scaling_fwd": ("input", "weight", "output"), "scaling_bwd": ("output_gradient", "input_gradient")}


class Outlier(NamedTuple):
    """A scale that fell by more than OUTLIER_FACTOR within a step."""

    name: str  # "blocks.0.mlp fc1_input"
    steps_ago: int
    rows: int  # of its amax history


class FP8State:
    """Scales and amax histories of a model, all on one device, and what they were before a step.

    Both methods of a step are a few kernels on fixed memory, without a host synchronization: CUDA graphs can
    capture them. A graph needs `graph_tensors` while it lives. Without delayed scaling they do nothing.

    The tensors of the state are many and small, so each method copies all of them at once. `save` copies the
    modules' values to `before`. `restore` copies them to `after`, replaces these by `before` if the step is
    skipped, and copies `after` back to the modules.
    """

    def __init__(self, model):
        """The model must have all its modules, but may have no FP8 state yet."""
        self.modules = [(name, part) for name, part in model.named_modules() if hasattr(part, "fp8_meta")]
        self.sources = []  # recipes and states of the modules, from which the tensors were taken
        self.tensors = []  # all scales, then all histories, as the modules have them now
        self.flat_tensors = []  # the same memory, one-dimensional
        self.before = None  # the values of all tensors before the step, in one tensor
        self.after = None  # their values after the step; those of `before` if it is skipped
        self.views_of_after = []  # one for each tensor
        self.fallen = None  # FallenScales

    @torch.no_grad()
    def save(self) -> None:
        """Remember the FP8 state before a step."""
        self._refresh()
        if self.tensors:
            torch.cat(self.flat_tensors, out=self.before)

    @torch.no_grad()
    def restore(self, when: torch.Tensor) -> None:
        """Restore the state that `save` remembered if `when`, () bool on the state's device, is true. Call it
        after the last backward pass of the step."""
        self._refresh()  # the first step creates the state
        if not self.tensors:
            return
        torch.cat(self.flat_tensors, out=self.after)
        torch.where(when, self.before, self.after, out=self.after)
        torch._foreach_copy_(self.flat_tensors, self.views_of_after)
        self.fallen.update()

    def graph_tensors(self) -> list:
        """Return the tensors that a captured CUDA graph of both methods uses."""
        if not self.tensors:
            return []
        return [*self.tensors, self.before, self.after, self.fallen.steps, self.fallen.fell_at]

    def outliers(self) -> list[Outlier]:
        """Return the outliers since the last call, earliest first. Waits for the device."""
        if not self.tensors:
            return []
        outliers = []
        for (name, rows), steps_ago in zip(self._names(), self.fallen.take()):
            if steps_ago is not None:
                outliers.append(Outlier(name, steps_ago, rows))
        return sorted(outliers, key=lambda outlier: outlier.steps_ago, reverse=True)

    def _states(self):
        """Yield (module's name, module, direction, state) of the modules that have scales."""
        for name, module in self.modules:
            meta = module.fp8_meta
            has_weights = next(module.parameters(), None) is not None
            if not has_weights and not getattr(meta.get("recipe"), "fp8_dpa", False):
                continue  # TE's attention has scales, which it uses only with fp8_dpa
            for direction in TENSORS:
                state = meta.get(direction)
                if getattr(state, "scale", None) is not None:
                    yield name, module, direction, state

    def _names(self) -> list[tuple[str, int]]:
        """Return ("blocks.0.mlp fc1_input", rows of its history) of each scale."""
        names = []
        for name, module, direction, state in self._states():
            kinds = TENSORS[direction]  # of one GEMM
            is_mlp = hasattr(module, "fc2_weight")
            for index in range(len(state.scale)):
                gemm = index // len(kinds)
                kind = kinds[index % len(kinds)]
                tensor = f"fc{gemm + 1}_{kind}" if is_mlp else kind
                names.append((f"{name} {tensor}", len(state.amax_history)))
        return names

    def _sources(self) -> list:
        """Return what decides which tensors the state has, to compare by identity."""
        objects = []
        for _, module in self.modules:
            meta = module.fp8_meta
            objects.append(meta.get("recipe"))
            for direction in TENSORS:
                state = meta.get(direction)
                objects.append(state)
                objects.append(getattr(state, "amax_history", None))
        return objects

    def _refresh(self) -> None:
        """Collect the tensors again if they changed: on their creation, or for another recipe or history.

        This runs twice a step, except in a replayed CUDA graph."""
        sources = self._sources()
        if are_identical(sources, self.sources):
            return
        self.sources = sources
        saved_values = self._saved_values()
        states = [state for *_, state in self._states()]
        scales = [state.scale for state in states]
        histories = [state.amax_history for state in states]
        self.tensors = scales + histories
        self.flat_tensors = [tensor.view(-1) for tensor in self.tensors]
        if not self.tensors:
            return
        # a tensor that was created within the step has no value from before it: take its initial one
        initial = [torch.ones_like(scale).view(-1) for scale in scales]
        initial += [torch.zeros_like(history).view(-1) for history in histories]
        before = [saved_values.get(id(tensor), value) for tensor, value in zip(self.tensors, initial)]
        self.before = torch.cat(before)
        self.after = torch.empty_like(self.before)
        self.views_of_after = self.after.split([flat.numel() for flat in self.flat_tensors])
        count = sum(scale.numel() for scale in scales)
        self.fallen = FallenScales(self.before[:count], self.after[:count])

    def _saved_values(self) -> dict[int, torch.Tensor]:
        """Return {id of a tensor: its values before the step}."""
        if not self.tensors:
            return {}
        values = self.before.split([tensor.numel() for tensor in self.tensors])
        return {id(tensor): value for tensor, value in zip(self.tensors, values)}


class FallenScales:
    """In which step each scale fell by more than OUTLIER_FACTOR, for the log alone."""

    def __init__(self, old_scales: torch.Tensor, new_scales: torch.Tensor):
        """Both (n,): the scales before and after a step, in memory that stays."""
        self.old_scales = old_scales
        self.new_scales = new_scales
        self.steps = torch.zeros((), dtype=torch.int32, device=old_scales.device)  # number of `update` calls
        self.fell_at = torch.zeros_like(old_scales, dtype=torch.int32)  # the last such step; 0: none

    def update(self) -> None:
        """Count a step, and note the scales that fell in it."""
        self.steps.add_(1)
        has_fallen = self.old_scales > OUTLIER_FACTOR * self.new_scales
        torch.where(has_fallen, self.steps, self.fell_at, out=self.fell_at)

    def take(self) -> list[int | None]:
        """Return how many steps ago each scale fell, None if it did not since the last call. Waits for the
        device."""
        steps, *fell_at = torch.cat([self.steps.view(1), self.fell_at]).tolist()  # one wait for both
        self.fell_at.zero_()
        return [steps - step if step > 0 else None for step in fell_at]


def are_identical(objects: list, others: list) -> bool:
    """Return whether two lists have the same objects, not only equal ones."""
    if len(objects) != len(others):
        return False
    return all(one is other for one, other in zip(objects, others))
