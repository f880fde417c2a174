"""Apply a treatment to a model's matrices, layer after layer, each with the inputs that the treated layers below it give."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..execution.inputs import InputMoments, InputStatistics
from ..execution.walk import Walk
from ..models.blocks import is_conv1d, transposed, weight_of
from ..records import Module
from .base import Level, Treatment
from .conforming import treated
from .select import share

Found = Mapping[str, list[InputMoments]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one weight matrix (all its copies, where it holds experts) becomes."""

    module: Module
    level: Level


def matrices(owner: nn.Module, parameter: nn.Parameter) -> list[torch.Tensor]:
    """Two-dimensional ``(d_out, d_in)`` views of a weight; writing to them changes the model."""
    data = parameter.data
    if data.ndim == 3:
        return [m.T for m in data] if transposed(owner) else list(data)
    return [data.T] if is_conv1d(owner) else [data]


class Treating:
    """One treatment with its options.

    Args:
        model: The model; changed in place.
        treatment: What its matrices become.
        options: Options of the treatment.
        parity: Statistics and order of operations of the reference implementations.
        true_sequential: Collect inputs again for every group of matrices that share one.
    """

    def __init__(
        self, model: nn.Module, treatment: Treatment, options: Mapping[str, Any] | None = None, *, parity: bool = False,
        true_sequential: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.treatment, self.parity, self.true_sequential = model, treatment, parity, true_sequential
        self.options = treatment.resolve_options(options or {})

    def begin(self, data: CalibrationSet, batch_size: int) -> None:
        """Let the treatment look at the dense model before anything is treated."""
        self.treatment.begin(self.model, data, batch_size=batch_size, **self.options)

    def collect(self, walk: Walk, modules: Sequence[Module]) -> InputStatistics | None:
        """Statistics of the inputs of some matrices of the walk's current layer; None where none are needed."""
        if self.treatment.statistic == "none" or not modules:
            return None
        found = InputStatistics(self.model, modules, self.treatment.statistic, parity=self.parity)
        found.run(walk)
        return found

    def layer(self, walk: Walk, work: Sequence[Job]) -> list[str]:
        """Treat matrices of the walk's current layer; return notes."""
        statistics = self.collect(walk, [t.module for t in work])
        if statistics is None:
            return self.jobs(work, {})
        notes: list[str] = []
        by_name = {t.module.name: t for t in work}
        unseen = [n for n in by_name if n not in statistics.found]
        for turn, group in enumerate([*statistics.groups(), unseen]):
            members = [by_name[n] for n in group]
            if self.true_sequential and turn and members:
                statistics = self.collect(walk, [t.module for t in members]) or statistics
            notes += self.jobs(members, {n: statistics.found.pop(n) for n in group if n in statistics.found})
        return notes

    def jobs(self, work: Sequence[Job], found: Found, made: dict[InputMoments, Any] | None = None) -> list[str]:
        """Treat matrices with statistics that were collected before.

        Args:
            work: What to treat.
            found: Statistics by matrix, one per copy.
            made: What was prepared from statistics before; grows.

        Returns:
            Notes.
        """
        made = {} if made is None else made
        notes: list[str] = []
        for job in work:
            notes += self._matrix(job, found.get(job.module.name), made)
        return notes

    def _matrix(self, job: Job, statistics: list[InputMoments] | None, made: dict[InputMoments, Any]) -> list[str]:
        if job.level.idle:
            return []
        notes, name = [], job.module.name
        views = matrices(*weight_of(self.model, name))
        counts = share(job.level.zeros, [v.numel() for v in views])
        for i, (view, count) in enumerate(zip(views, counts, strict=True)):
            prepared = self.prepared(statistics[i] if statistics else None, made)
            unseen = prepared is None
            prepared = self.treatment.of(name, i, prepared)
            if unseen and self.treatment.statistic != "none":
                notes.append(f"{name}[{i}] saw no token; {self.treatment.unseen}.")
            rows = job.level.rows and (job.level.rows[0], np.split(job.level.rows[1], len(views))[i])
            count = count if rows is None else int(rows[1].sum())
            view.copy_(self.become(name, i, view, prepared, dataclasses.replace(job.level, zeros=count, rows=rows)))
        return notes

    def prepared(self, found: InputMoments | None, made: dict[InputMoments, Any]) -> Any:
        """What the treatment needs of a statistic, made once; None where no token was seen."""
        if found is None or found.value is None:
            return None
        if found not in made:
            made[found] = self.treatment.prepare(found.value, parity=self.parity, **self.options)
        return made[found]

    def become(self, name: str, copy: int, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """What one copy of a matrix becomes."""
        return treated(self.treatment, weight, prepared, level, self.options)
