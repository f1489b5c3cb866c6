"""Keep a skipped step out of the FP8 state of delayed scaling. Needs PyTorch only: copy it into a loop.

    fp8_state = FP8State(model)
    for batches in steps:
        fp8_state.save()  # before the first forward pass of the step
        for batch in batches:
            model(*batch).backward()  # updates scales and amax histories
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fp8_state.restore(unless=norm.isfinite())  # does not wait for the GPU
        if norm.isfinite():
            optimizer.step()

An amax history holds one huge value for as many steps as it has rows, and scales made for it flush everything
else to zero. So a step that is skipped must leave scales and histories as they were, like the weights.

The state is that of each module's `fp8_meta`, on any engine: the tensors that its kernels read, changed in
place. What else an engine keeps needs no restoring: FP8 copies of weights are written anew by the next step's
first micro-batch, and the scales that a recomputation uses are taken in its own forward pass.
"""
import operator

import torch

OUTLIER_FACTOR = 2.0**20  # a scale that falls by a larger factor within a step has met an outlier
TENSORS = {"scaling_fwd": ("input", "weight", "output"), "scaling_bwd": ("output_gradient", "input_gradient")}


class FP8State:
    """Scales and amax histories of a model, all on one device, and what they were before a step.

    Both methods of a step are a few kernels on fixed memory, without a host synchronization: CUDA graphs can
    capture them. A graph needs this object for as long as it lives. Without delayed scaling nothing happens.
    """

    def __init__(self, model):
        """`model`: with all its modules; it may have no FP8 state yet."""
        self.modules = [(name, part) for name, part in model.named_modules() if hasattr(part, "fp8_meta")]
        self.sources = []  # recipes and states of the modules, from which the tensors were taken
        self.tensors = []  # all scales, then all histories, as the modules have them now
        self.flat, self.parts = [], []  # the tensors, and their parts of `new`, all one-dimensional
        self.saved = self.new = None  # the values of all tensors before the step, and after it
        self.old_scales = self.new_scales = None  # the scales among these
        self.steps = None  # () int32, counted by `restore`
        self.fell_at = None  # int32, for each scale the step in which it fell last; 0: it did not

    @torch.no_grad()
    def save(self) -> None:
        """Remember the FP8 state before a step."""
        self._refresh()
        if self.tensors:
            torch.cat(self.flat, out=self.saved)

    @torch.no_grad()
    def restore(self, unless: torch.Tensor) -> None:
        """Restore the state that `save` remembered if `unless` is False. `unless`: bool tensor without
        dimensions, on the state's device. Call it after the last backward pass of the step."""
        self._refresh()  # the first step creates the state
        if not self.tensors:
            return
        torch.cat(self.flat, out=self.new)
        torch.where(unless, self.new, self.saved, out=self.new)
        torch._foreach_copy_(self.flat, self.parts)
        self.steps.add_(1)
        has_fallen = self.old_scales > OUTLIER_FACTOR * self.new_scales
        torch.where(has_fallen, self.steps, self.fell_at, out=self.fell_at)

    def outliers(self) -> list[tuple[str, int, int]]:
        """Return the scales that fell by more than OUTLIER_FACTOR within a step since the last call, earliest
        first: ("blocks.0.mlp fc1_input", how many steps ago, rows of its history). Waits for the device."""
        if not self.tensors:
            return []
        steps, *fell_at = torch.cat([self.steps.view(1), self.fell_at]).tolist()
        self.fell_at.zero_()
        found = [(name, steps - step, rows) for (name, rows), step in zip(self._names(), fell_at) if step]
        return sorted(found, key=lambda outlier: -outlier[1])

    def _states(self):
        """Yield (module's name, module, direction, state) of the modules that have scales."""
        for name, module in self.modules:
            meta = module.fp8_meta
            recipe = meta.get("recipe")
            has_weights = next(module.parameters(), None) is not None
            if not has_weights and not getattr(recipe, "fp8_dpa", False):
                continue  # TE's attention has scales, which it uses only with fp8_dpa
            for direction in TENSORS:
                state = meta.get(direction)
                if getattr(state, "scale", None) is not None:
                    yield name, module, direction, state

    def _names(self) -> list[tuple[str, int]]:
        """Return ("blocks.0.mlp fc1_input", rows of its history) of each scale."""
        names = []
        for name, module, direction, state in self._states():
            kinds = TENSORS[direction]
            for slot in range(len(state.scale)):
                gemm, kind = divmod(slot, len(kinds))
                prefix = f"fc{gemm + 1}_" if hasattr(module, "fc2_weight") else ""
                names.append((f"{name} {prefix}{kinds[kind]}", len(state.amax_history)))
        return names

    def _sources(self) -> list:
        """Return what decides which tensors the state has, to compare by identity. This runs twice a step."""
        objects = []
        for _, module in self.modules:
            meta = module.fp8_meta
            objects.append(meta.get("recipe"))
            for direction in TENSORS:
                state = meta.get(direction)
                objects += state, getattr(state, "amax_history", None)
        return objects

    def _refresh(self) -> None:
        """Collect the tensors again if they changed: on their creation, or for another recipe.

        A tensor that was created within the step has no value from before it: `saved` gets the initial one, 1
        for a scale and 0 for a history."""
        sources = self._sources()
        if len(sources) == len(self.sources) and all(map(operator.is_, sources, self.sources)):
            return
        self.sources = sources
        states = [state for *_, state in self._states()]
        tensors = [state.scale for state in states] + [state.amax_history for state in states]
        sizes = [tensor.numel() for tensor in self.tensors]
        before = dict(zip(map(id, self.tensors), self.saved.split(sizes) if sizes else ()))
        self.tensors, self.flat = tensors, [tensor.view(-1) for tensor in tensors]
        if not tensors:
            return
        initial = [torch.ones_like(own) for own in self.flat[:len(states)]]
        initial += [torch.zeros_like(own) for own in self.flat[len(states):]]
        self.saved = torch.cat([before.get(id(own), value) for own, value in zip(tensors, initial)])
        self.new = torch.empty_like(self.saved)
        self.parts = self.new.split([own.numel() for own in self.flat])
        count = sum(state.scale.numel() for state in states)
        self.old_scales, self.new_scales = self.saved[:count], self.new[:count]
        self.steps = torch.zeros((), dtype=torch.int32, device=self.saved.device)
        self.fell_at = torch.zeros(count, dtype=torch.int32, device=self.saved.device)
