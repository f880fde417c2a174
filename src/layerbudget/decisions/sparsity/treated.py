"""A model that moves between treated points: how far its output is from the dense model's, and what a change there would do.

One forward per point serves everything: the divergence, the graph of the backward, and the statistics by which the *next* point
is treated. So a point costs what its passes cost, and the pruner sees the inputs that the treated model gives, one point late;
at the plan that comes out, :meth:`TreatedModel.apply` treats the model as the pruner itself does, layer after layer.

A batch becomes a number by four classes: :class:`TreatedModel` runs it, ``Directions`` have what every level would change in a
matrix, ``DirectionalSums`` adds up derivatives along them (:mod:`layerbudget.sensitivity.directional`), and :class:`Point` is
what comes out.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level, Treatment
from ...compressors.select import share
from ...compressors.treating import InputStats, Job, LayerCompressor, matrices, treated
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.divergence import Reference
from ...execution.inputs import InputMoments, InputStatistics, moments_of_sites, share_statistics
from ...execution.loss import unlabelled
from ...execution.modes import inference
from ...execution.replay import unwalkable
from ...models.blocks import partition, weight_of
from ...models.machine import zeros_in_file
from ...models.offload import mapped
from ...plan import PlanBlock, RowGroups, members
from ...records import Block, Module
from ...sensitivity.directional.directions import Directions, Nested, Written
from ...sensitivity.directional.terms import QuadraticTerms, quadratic_terms
from ...sensitivity.directional.trials import StreamedTrials, Trials
from ...storage.writing import check_space


class Units:
    """Units of a decision over the matrices of a model: blocks, or groups of ``rows`` rows of blocks with one matrix each.

    ``numel`` has the prunable parameters of every unit, ``(K,)``; a matrix has ``groups`` of them, from ``first``.
    """

    def __init__(self, blocks: Sequence[Block], rows: int | None = None) -> None:
        self.blocks, self.rows = tuple(blocks), rows
        self.modules = [m for b in self.blocks for m in b.modules]
        self.first: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        sizes = [np.array([b.numel]) if rows is None else _sizes(b.modules[0], rows) for b in self.blocks]
        starts = np.cumsum([0, *(len(size) for size in sizes)])
        for block, start, size in zip(self.blocks, starts, sizes, strict=False):
            for m in block.modules:
                self.first[m.name], self.groups[m.name] = int(start), len(size)
        self.numel = np.concatenate(sizes).astype(np.int64)

    @classmethod
    def by(cls, model: nn.Module, by: str) -> Units:
        """Units by name: ``layer``, ``linear``, ``rows:G``, or a regular expression over matrices."""
        if not by.startswith("rows"):
            return cls(partition(model, by))
        match = re.fullmatch(r"rows:([1-9]\d*)", by)
        if not match:
            raise InvalidInput(f"by is {by!r}.", "Groups of rows are rows:G with G at least 1.", "Use rows:1 or rows:16.")
        return cls(partition(model, "linear"), int(match.group(1)))

    def __len__(self) -> int:
        return len(self.numel)

    def of(self, name: str) -> slice:
        """Units of a matrix."""
        return slice(self.first[name], self.first[name] + self.groups[name])

    def _per_block(self, counts: np.ndarray) -> list[int]:
        if self.rows is None:
            return [int(c) for c in counts]
        return [int(counts[self.of(b.modules[0].name)].sum()) for b in self.blocks]

    def jobs(self, counts: np.ndarray, within: str = "") -> list[Job]:
        """Return the levels of matrices, of those below a layer or of all."""
        result = []
        for block, count in zip(self.blocks, self._per_block(counts), strict=True):
            for m, zeros in zip(block.modules, share(count, [m.numel for m in block.modules]), strict=True):
                if m.name.startswith(within):
                    rows = None if self.rows is None else (self.rows, counts[self.of(m.name)])
                    result.append(Job(module=m, level=Level(zeros=zeros, rows=rows)))
        return result

    def planned(self, counts: np.ndarray) -> tuple[tuple[PlanBlock, ...], RowGroups | None]:
        """Return counts of blocks, and of rows where they are decided."""
        pairs = zip(self.blocks, self._per_block(counts), strict=True)
        blocks = tuple(PlanBlock.of(b, c / b.numel, c) for b, c in pairs)
        if self.rows is None:
            return blocks, None
        return blocks, RowGroups(size=self.rows, counts={m.name: counts[self.of(m.name)] for m in self.modules})


def _sizes(m: Module, rows: int) -> np.ndarray:
    """Parameters of every group of rows of a matrix."""
    if m.copies > 1 and m.d_out % rows:
        what = f"The experts of {m.name} have {m.d_out} rows, which do not split into groups of {rows}."
        raise InvalidInput(what, "", "Choose a divisor, or decide by linear.")
    return np.tile(members(m.d_out, rows) * m.d_in, m.copies)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Point(QuadraticTerms):
    """Measurements at the point where a plan had put the model."""

    counts: np.ndarray  # the plan: pruned entries of every unit
    statistics: InputStats  # statistics with which the model was treated
    levels: np.ndarray  # sparsities of every unit along which the terms were taken, (K, L)
    moments: InputStats  # statistics of the inputs here


class TreatedModel:
    """A dense model on its way between points where a pruner has treated it; :meth:`restore` brings it back.

    Attributes:
        passes: Forward equivalents of this text so far: forward 1, backward 2.
        dense: Statistics of the dense model's inputs.
    """

    def __init__(
        self, model: nn.Module, data: CalibrationSet, units: Units, treatment: Treatment, *, batch_size: int = 8
    ) -> None:
        self.model, self.units, self.treatment = model, units, treatment
        self.treating = LayerCompressor(model, treatment)
        self.fused = any(m.copies > 1 for m in units.modules)
        self.batch_size = 1 if self.fused else batch_size
        files, first = mapped(model), next(unlabelled(model, data, 1))
        streamed = files is not None and not unwalkable(model, [m.name for m in units.modules], [first])
        self.trials = StreamedTrials(self.treating, files) if streamed and files else Trials(self.treating, units.blocks)
        self.folder = self._gram_folder()
        listen = self._statistics() if treatment.statistic != "none" else None
        self.reference = Reference(model, data, self.batch_size, listen)
        self.dense: InputStats = {} if listen is None else listen.found
        self.passes = 1.0

    def _gram_folder(self) -> Path | None:
        """Where Gram matrices and the changes made from them lie as files: only one layer of a streamed model is in memory."""
        if self.treatment.statistic != "gram" or mapped(self.model) is None:
            return None
        folder = Path(tempfile.gettempdir())
        check_space({folder: 12.0 * sum(m.d_in**2 * m.copies for m in self.units.modules)})  # of three points
        return folder

    def _statistics(self) -> InputStatistics:
        return InputStatistics(self.model, self.units.modules, self.treatment.statistic, folder=self.folder)

    def restore(self) -> None:
        """Put the dense weights back."""
        self.trials.restore()

    @torch.no_grad()
    def move(self, counts: np.ndarray, statistics: InputStats) -> None:
        """Treat the dense model by a plan, with statistics that were gathered before."""
        self.trials.move(self.units.jobs(counts), statistics)

    def evaluate(self, counts: np.ndarray, statistics: InputStats, levels: np.ndarray) -> Point:
        """Go to a plan and look around: three forward equivalents, one more for fused experts.

        ``statistics`` are those with which the model is treated, ``levels`` the sparsities of every unit along which
        derivatives are wanted, shape ``(K, L)``.
        """
        self.move(counts, statistics)
        gathered: dict[str, list[InputMoments]] = {}
        reads = self.treatment.statistic != "none"
        terms = quadratic_terms(
            self.model,
            self.reference.data,
            self.units.first,
            self.directions(counts, statistics, levels),
            levels.shape,
            clean=self.reference.clean,
            draws=0,
            batch_size=self.batch_size,
            walk=self.trials.walk,
            listen=moments_of_sites(gathered, self.treatment.statistic, self.folder) if reads and not self.fused else None,
        )
        self.passes += terms.passes
        if reads and self.fused:  # their inputs are formed inside their module: a forward of its own
            listener, walk = self._statistics(), self.reference.walk
            with inference(self.model):
                walk.capture()
                listener.finals(walk)
            gathered = listener.found
            self.passes += 1.0
        elif reads:
            share_statistics(gathered)
        return Point(**vars(terms), counts=counts, statistics=statistics, levels=levels, moments=gathered)

    def apply(self, counts: np.ndarray) -> float:
        """Divergence of a plan as the pruner itself applies it, each layer seeing what the treated ones below it give."""
        walk = self.reference.walk
        self.restore()
        with inference(self.model):
            walk.forwards = 0
            walk.capture()
            for i, (name, _) in enumerate(walk.layers):
                walk.position = i
                self.trials.layer(walk, self.units.jobs(counts, f"{name}."))
            divergence = self.reference.reached()
        self.passes += walk.forwards / (len(walk) * walk.batches)
        return divergence

    def directions(self, counts: np.ndarray, statistics: InputStats, levels: np.ndarray) -> Callable[[str], Directions]:
        """The changes that lead from a plan to some levels, each matrix's made when its gradient is there."""
        made: dict[InputMoments, Any] = {}
        zeros = {job.module.name: job.level.zeros for job in self.units.jobs(counts)}
        modules = {m.name: m for m in self.units.modules}

        @torch.no_grad()
        def make(name: str) -> Directions:
            moments, units = statistics.get(name), self.units.of(name)
            if moments and moments[0] not in made:
                made.clear()  # what was prepared for the matrices of another input
            numel, whole = self.units.numel[units], self.units.rows is None
            wanted = levels[units] * (numel * (modules[name].numel / numel if whole else 1.0))[:, None]
            present = np.array([zeros[name]]) if whole else counts[units]
            return self._directions(modules[name], moments, present, wanted, made)

        return make

    def _directions(
        self,
        m: Module,
        statistics: list[InputMoments] | None,
        present: np.ndarray,
        wanted: np.ndarray,
        made: dict[InputMoments, Any],
    ) -> Directions:
        """The changes of one matrix with ``present`` entries gone to ``wanted`` ones, ``(groups, levels)``."""
        owner, parameter = weight_of(self.model, m.name)
        dense = matrices(owner, nn.Parameter(self.trials.dense(m.name), requires_grad=False))
        prepared = [self.treating.prepared(s, made) for s in statistics] if statistics else [None] * len(dense)
        if self.treatment.nested and (self.treatment.by_row or m.copies == 1):
            order = _stacked([self.treatment.order(w, p) for w, p in zip(dense, prepared, strict=True)])
            return Nested(
                _stacked(dense),
                order,
                torch.from_numpy(present).to(order.device),
                torch.from_numpy(wanted).to(order.device),
                rows=self.units.rows,
                by_row=self.treatment.by_row,
            )
        now = torch.cat([w.detach() for w in matrices(owner, parameter)])
        changes = []
        for zeros in wanted.T:
            change = self._become(dense, prepared, np.rint(zeros).astype(np.int64)) - now
            changes.append(
                change if self.folder is None else zeros_in_file(change.shape, self.folder, change.dtype).copy_(change)
            )
        return Written(changes, self.units.rows)

    def _become(self, dense: list[torch.Tensor], prepared: list[Any], zeros: np.ndarray) -> torch.Tensor:
        """A matrix with so many zeros in every group."""
        size = self.units.rows
        if size is None:
            wanted = [Level(zeros=c) for c in share(int(zeros[0]), [w.numel() for w in dense])]
        else:
            wanted = [Level(zeros=int(z.sum()), rows=(size, z)) for z in np.split(zeros, len(dense))]
        return torch.cat([treated(self.treatment, w, p, v) for w, p, v in zip(dense, prepared, wanted, strict=True)])


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Copies below each other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
