"""A model that stands at a treated point, and the way back: copies of its weights, or treatments made when a layer runs.

Weights in memory are copied once and overwritten by every trial. Weights that stay in their files would become memory by that,
all of them; there the *plan* is kept, and a layer is treated when its forward begins and dense again when another one's does.
The masks of one trial are then made as often as its layers are run, and no more than one layer is ever held.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...compressors.treating import Found, Job, Treating
from ...execution.loss import Batch
from ...execution.replay import unwalkable
from ...execution.walk import Walk
from ...models.blocks import weight_of
from ...models.offload import Mapped, mapped
from .decisions import Decisions
from .originals import Originals


class Trials(abc.ABC):
    """Where a model's treated weights are.

    Attributes:
        walk: How gradients at a treated point are to be had, see :func:`layerbudget.execution.backward.feed`.
    """

    walk = "auto"

    @abc.abstractmethod
    def move(self, jobs: Sequence[Job], found: Found) -> None:
        """Treat the dense model, with statistics that were gathered before."""

    @abc.abstractmethod
    def layer(self, walk: Walk, jobs: Sequence[Job]) -> None:
        """Treat the walk's current layer as the pruner does, and go on to the next one."""

    @abc.abstractmethod
    def dense(self, name: str) -> torch.Tensor:
        """A matrix before it was treated."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Put the dense weights back."""


class Copies(Trials):
    """Trials that are written over the weights."""

    def __init__(self, treating: Treating, decisions: Decisions) -> None:
        self.treating, self.held = treating, Originals(treating.model, decisions.blocks)

    def move(self, jobs: Sequence[Job], found: Found) -> None:
        """See :meth:`Trials.move`."""
        self.restore()
        self.treating.jobs(jobs, found)

    def layer(self, walk: Walk, jobs: Sequence[Job]) -> None:
        """See :meth:`Trials.layer`."""
        self.treating.layer(walk, jobs)
        walk.advance()

    def dense(self, name: str) -> torch.Tensor:
        """See :meth:`Trials.dense`."""
        return self.held.held[name]

    def restore(self) -> None:
        """See :meth:`Trials.restore`."""
        self.held.restore()


class Arriving(Trials):
    """Trials on weights that stay in their files: layers are treated when they arrive."""

    walk = "layers"

    def __init__(self, treating: Treating, lies: Mapped) -> None:
        self.treating, self.lies = treating, lies
        self.jobs: dict[int, list[Job]] = {}
        self.found: Found = {}
        self.current = -1
        self._held: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def move(self, jobs: Sequence[Job], found: Found) -> None:
        """See :meth:`Trials.move`."""
        self.restore()
        self._expect(jobs, found)

    def _expect(self, jobs: Sequence[Job], found: Found) -> None:
        self._leave()
        for _, layer in () if self._handles else self.lies.layers:
            self._handles.append(layer.register_forward_pre_hook(self._arrive))
        self.found = found
        self.jobs = {i: [j for j in jobs if j.module.name.startswith(f"{n}.")] for i, (n, _) in enumerate(self.lies.layers)}

    def _arrive(self, layer: nn.Module, given: Any) -> None:
        """Treat a layer whose forward begins."""
        index = next(i for i, (_, own) in enumerate(self.lies.layers) if own is layer)
        if index == self.current or getattr(layer.forward, "skips", False):
            return
        self._leave()
        self.current = index
        with torch.no_grad():
            for job in self.jobs.get(index, ()):
                parameter = weight_of(self.treating.model, job.module.name)[1]
                self._held[job.module.name] = parameter.data
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
            self.treating.jobs(self.jobs.get(index, ()), self.found)

    def _leave(self) -> None:
        """Make the treated layer dense again; one that was brought to the device is gone from there when the next one comes."""
        for name, tensor in self._held.items():
            parameter = weight_of(self.treating.model, name)[1]
            if not self.lies.comes(parameter) or self.lies.at_hand(self.current):
                parameter.data = tensor
        self._held, self.current = {}, -1

    def layer(self, walk: Walk, jobs: Sequence[Job]) -> None:
        """See :meth:`Trials.layer`."""
        self._leave()
        self.jobs = {}
        statistics = self.treating.collect(walk, [j.module for j in jobs])
        self._expect(jobs, {} if statistics is None else statistics.found)
        walk.advance()

    def dense(self, name: str) -> torch.Tensor:
        """See :meth:`Trials.dense`."""
        if name in self._held:
            return self._held[name]
        return self.lies.computed(weight_of(self.treating.model, name)[1])

    def restore(self) -> None:
        """See :meth:`Trials.restore`."""
        self._leave()
        self.jobs, self.found = {}, {}
        for handle in self._handles:
            handle.remove()
        self._handles = []


def trials(treating: Treating, decisions: Decisions, batch: Batch, *, spanning: bool) -> Trials:
    """Layers treated as they arrive where weights stay in files and the model can be walked; else copies.

    Args:
        treating: The treatment.
        decisions: What is decided.
        batch: What the model will run on.
        spanning: Whether the whole graph is needed (draws along units that span layers).

    Raises:
        CoverageError: Neither can be: layers come and go, and are needed all together.
    """
    lies = mapped(treating.model)
    names = [m.name for m in decisions.modules]
    if lies is None or spanning or unwalkable(treating.model, names, [batch]):
        return Copies(treating, decisions)
    return Arriving(treating, lies)
