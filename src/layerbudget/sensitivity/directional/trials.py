"""The dense model's output to compare with, and the way from the dense weights to a treated point and back.

Weights in memory are copied once and overwritten by every trial. Weights that stay in their files would become memory by that,
all of them; there the *plan* is kept, and a layer is treated when its forward begins and dense again when another one's does.
The masks of one trial are then made as often as its layers are run, and no more than one layer is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...compressors.treating import InputStats, Job, LayerCompressor
from ...errors import CoverageError
from ...execution.walk import Walk
from ...models.blocks import weight_of
from ...models.offload import Mapped, mapped
from ...records import Block


class Originals:
    """Copies of the weights of some blocks, to go back to."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self.model = model
        files, names = mapped(model), [m.name for b in blocks for m in b.modules]
        if files is not None and any(files.comes(weight_of(model, name)[1]) for name in names):
            raise CoverageError(
                "What is tried on a layer would be lost when the next one takes its place on the device.",
                "Trials need weights that stay: in memory, or mapped in the checkpoint's own precision.",
                "Use --dtype auto on the processor, or load without --stream.",
            )
        self.held = {name: self._copy(weight_of(model, name)[1]) for name in names}

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy; where weights are mapped, the file is one."""
        files = mapped(self.model)
        mapped_copy = None if files is None else files.again(parameter)
        same = mapped_copy is not None and (mapped_copy.dtype, mapped_copy.device) == (parameter.dtype, parameter.device)
        return mapped_copy if mapped_copy is not None and same else parameter.detach().clone()

    def restore(self, names: Sequence[str] | None = None) -> None:
        """Put weights back; all of them by default."""
        for name in self.held if names is None else names:
            weight_of(self.model, name)[1].data.copy_(self.held[name])


class Trials:
    """Treatments that are written over the weights of some blocks, and taken back from copies.

    Attributes:
        walk: How gradients at a treated point are to be had, see :func:`layerbudget.execution.backward.feed`.
    """

    walk = "auto"

    def __init__(self, treating: LayerCompressor, blocks: Sequence[Block]) -> None:
        self.treating, self.originals = treating, Originals(treating.model, blocks)

    def move(self, jobs: Sequence[Job], statistics: InputStats) -> None:
        """Treat the dense model, with statistics that were gathered before."""
        self.restore()
        self.treating.jobs(jobs, statistics)

    def layer(self, walk: Walk, jobs: Sequence[Job]) -> None:
        """Treat the walk's current layer as the pruner does, and go on to the next one."""
        self.treating.layer(walk, jobs)
        walk.advance()

    def dense(self, name: str) -> torch.Tensor:
        """A matrix before it was treated."""
        return self.originals.held[name]

    def restore(self) -> None:
        """Put the dense weights back."""
        self.originals.restore()


class StreamedTrials(Trials):
    """Treatments of weights that stay in their files, made when a layer arrives."""

    walk = "layers"

    def __init__(self, treating: LayerCompressor, files: Mapped) -> None:
        self.treating, self.files = treating, files
        self._jobs: dict[int, list[Job]] = {}
        self._statistics: InputStats = {}
        self._current, self._arrived = -1, 0
        self._dense: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def move(self, jobs: Sequence[Job], statistics: InputStats) -> None:
        """See :meth:`Trials.move`."""
        self.restore()
        self._expect(jobs, statistics)

    def _expect(self, jobs: Sequence[Job], statistics: InputStats) -> None:
        self._leave()
        for _, layer in () if self._handles else self.files.layers:
            self._handles.append(layer.register_forward_pre_hook(self._arrive))
        self._statistics = statistics
        layers = enumerate(self.files.layers)
        self._jobs = {i: [j for j in jobs if j.module.name.startswith(f"{name}.")] for i, (name, _) in layers}

    def _arrive(self, layer: nn.Module, inputs: Any) -> None:
        index = next(i for i, (_, known) in enumerate(self.files.layers) if known is layer)
        same = index == self._current and self._arrived == self.files.arrived
        if same or getattr(layer.forward, "skips", False):
            return
        self._leave()
        self._current, self._arrived = index, self.files.arrived
        with torch.no_grad():
            for job in self._jobs.get(index, ()):
                parameter = weight_of(self.treating.model, job.module.name)[1]
                self._dense[job.module.name] = parameter.data
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
            self.treating.jobs(self._jobs.get(index, ()), self._statistics)

    def _leave(self) -> None:
        """Make the treated layer dense again; one that was brought to the device is gone from there when the next one comes."""
        for name, tensor in self._dense.items():
            parameter = weight_of(self.treating.model, name)[1]
            if not self.files.comes(parameter) or self.files.at_hand(self._current):
                parameter.data = tensor
        self._dense, self._current = {}, -1

    def layer(self, walk: Walk, jobs: Sequence[Job]) -> None:
        """See :meth:`Trials.layer`."""
        self._leave()
        self._jobs = {}
        statistics = self.treating.collect(walk, [j.module for j in jobs])
        self._expect(jobs, {} if statistics is None else statistics.found)
        walk.advance()

    def dense(self, name: str) -> torch.Tensor:
        """See :meth:`Trials.dense`."""
        if name in self._dense:
            return self._dense[name]
        return self.files.computed(weight_of(self.treating.model, name)[1])

    def restore(self) -> None:
        """See :meth:`Trials.restore`."""
        self._leave()
        self._jobs, self._statistics = {}, {}
        for handle in self._handles:
            handle.remove()
        self._handles = []
