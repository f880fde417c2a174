"""Apply a treatment to a model's matrices, layer after layer, each with the inputs that the treated layers below it give.

Its caller looks at every matrix that a treatment returns: shape, count of zeros, pattern, finite values, whoever wrote it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CoverageError
from ..execution.inputs import InputMoments, InputStatistics
from ..execution.walk import Walk
from ..models.blocks import is_conv1d, reader_of, transposed, weight_of
from ..records import Module
from .base import Level, Treatment
from .select import by_groups, share

InputStats = Mapping[str, list[InputMoments]]
_ROUNDING = 10_000  # an update of 45 million weights in float32 ends at an exact zero about twice: one in so many may


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The level of one weight matrix (of all its copies, where it holds experts)."""

    module: Module
    level: Level


def matrices(owner: nn.Module, parameter: nn.Parameter) -> list[torch.Tensor]:
    """Two-dimensional ``(d_out, d_in)`` views of a weight; writing to them changes the model."""
    data = parameter.data
    if data.ndim == 3:
        return [m.T for m in data] if transposed(owner) else list(data)
    return [data.T] if is_conv1d(owner) else [data]


class LayerCompressor:
    """One treatment on a model.

    Args:
        model: The model; changed in place.
        treatment: What its matrices become.
        true_sequential: Collect inputs again for every group of matrices that share one.
    """

    def __init__(self, model: nn.Module, treatment: Treatment, *, true_sequential: bool = False) -> None:
        self.model, self.treatment, self.true_sequential = model, treatment, true_sequential
        self.lacks = "saw no token"

    def collect(self, walk: Walk, modules: Sequence[Module]) -> InputStatistics | None:
        """Statistics of the inputs of some matrices of the walk's current layer; None where none are needed."""
        if self.treatment.statistic == "none" or not modules:
            return None
        statistics = InputStatistics(self.model, modules, self.treatment.statistic, equal_tokens=self.treatment.equal_tokens)
        statistics.run(walk)
        return statistics

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

    def jobs(self, work: Sequence[Job], moments: InputStats, made: dict[InputMoments, Any] | None = None) -> list[str]:
        """Treat matrices with statistics that were collected before, one per copy; return notes.

        ``made`` holds what was prepared from statistics, and grows.
        """
        made = {} if made is None else made
        notes: list[str] = []
        for job in work:
            name, level = job.module.name, job.level
            if level.idle:
                continue
            owner, parameter = weight_of(self.model, name)
            views, statistics = matrices(owner, parameter), moments.get(name)
            looked_up = isinstance(owner, nn.Embedding) and reader_of(self.model, name) is None
            lacks = "is looked up, so that it has no inputs to weigh" if looked_up else self.lacks
            counts = share(level.zeros, [v.numel() for v in views])
            for i, (view, count) in enumerate(zip(views, counts, strict=True)):
                prepared = self.prepared(statistics[i] if statistics else None, made)
                if prepared is None and self.treatment.statistic != "none":
                    notes.append(f"{name}{f'[{i}]' * (len(views) > 1)} {lacks}; {self.treatment.unseen}.")
                rows = level.rows and (level.rows[0], np.split(level.rows[1], len(views))[i])
                count = count if rows is None else int(rows[1].sum())
                self.treat(name, view, prepared, dataclasses.replace(level, zeros=count, rows=rows))
        return notes

    def prepared(self, moments: InputMoments | None, made: dict[InputMoments, Any]) -> Any:
        """Return what the treatment needs of a statistic, made once; None where no token was seen."""
        if moments is None or moments.value is None:
            return None
        if moments not in made:
            mean = self.treatment.changes == "format" and moments.kind == "diagonal"  # as an importance matrix of llama.cpp
            made[moments] = self.treatment.prepare(moments.mean() if mean else moments.value)
        return made[moments]

    def treat(self, name: str, view: torch.Tensor, prepared: Any, level: Level) -> None:
        """Write one copy of a matrix, treated, over what it was."""
        view.copy_(self.become(name, view, prepared, level))

    def become(self, name: str, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """Return one copy of a matrix, treated."""
        return treated(self.treatment, weight, prepared, level)


def treated(treatment: Treatment, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
    """Return the treated matrix ``(d_out, d_in)``, checked; with ``level.rows`` every group of rows goes its own way.

    Raises:
        CoverageError: Another shape, values that are not finite, another count of zeros, or a pattern that is not kept.
    """
    version = None if weight.is_inference() else weight._version  # counts what was written into it
    if level.rows is None:
        made = treatment.apply(weight, prepared, level)
    else:
        made = treatment.apply_rows(weight, prepared, *level.rows)
    if version is not None and weight._version != version:
        what = "wrote into the matrix that it was given."
        raise _broken(treatment, what, "It returns a new one.", "Begin with weight.clone().")
    check(treatment, weight, made, level)
    return made


def check(treatment: Treatment, weight: torch.Tensor, made: Any, level: Level) -> None:
    """Refuse what a treatment made of a matrix where it is not what the level says; see :func:`treated`."""
    if not isinstance(made, torch.Tensor) or made.shape != weight.shape:
        seen = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise _broken(treatment, f"made {seen} of a matrix {tuple(weight.shape)}.", "The shape stays.", "Return (d_out, d_in).")
    if not bool(torch.isfinite(made.to(weight.dtype)).all()):
        what = f"made values that are not finite in {weight.dtype}."
        remedy = "Divide by no zero; of the package's own: use more calibration text, more damping, or float32."
        raise _broken(treatment, what, "Weights are finite.", remedy)
    if level.format is not None:
        return  # formats make zeros where they round to them
    gone = made == 0
    if level.pattern is not None:
        zeroed, group = level.pattern
        short = int((gone.reshape(-1, group).sum(1) < zeroed).sum())
        if short:
            raise _broken(
                treatment,
                f"left {short} of {gone.numel() // group} groups of {group} inputs with fewer than {zeroed} zeros.",
                f"The pattern {zeroed}:{group} is level.pattern of apply.",
                "Mark them with compressors.select.smallest_per_group(scores, *level.pattern), or leave the pattern out.",
            )
    if level.rows is not None:
        size, wanted = level.rows
        zeros_by_group = by_groups(gone.sum(1)[:, None], size, 0).sum(1).cpu().numpy()
        if (zeros_by_group < wanted).any():
            g = int((zeros_by_group < wanted).argmax())
            raise _count(treatment, int(zeros_by_group[g]), int(wanted[g]), f"the {size} rows from {g * size}")
    zeros, most = int(gone.sum()), level.zeros + 1 + weight.numel() // _ROUNDING
    many = level.pattern is None and zeros > most and int((gone & (weight != 0)).sum()) > most
    if zeros < level.zeros or many:
        raise _count(treatment, zeros, level.zeros, "a matrix")


def _count(treatment: Treatment, zeros: int, wanted: int, where: str) -> CoverageError:
    problem = f"left {zeros} zeros in {where}, {wanted} were asked for."
    what = "exactly level.zeros entries" if where == "a matrix" else "exactly zeros[g] entries of group g"
    return _broken(treatment, problem, "The count is exact.", f"Zero {what}, no others.")


def _broken(treatment: Treatment, what: str, feasible: str, remedy: str) -> CoverageError:
    return CoverageError(f"The method {treatment.name} {what}", feasible, remedy)
