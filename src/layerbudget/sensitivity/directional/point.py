"""A model at a treated point: how far its output is from the dense model's, and what any change there would do.

One forward per point serves everything: the divergence, the graph of the backward, and the statistics by which the *next* point
is treated. So a point costs what its passes cost, and the pruner sees the inputs that the treated model gives, one point late;
at the plan that comes out, :meth:`TrustRegion.applied` treats the model as the pruner itself does, layer after layer.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level, Treatment
from ...compressors.conforming import treated
from ...compressors.select import share
from ...compressors.treating import Found, Treating, matrices
from ...data.calibration import CalibrationSet
from ...execution.divergence import Meter, kl_sum, mean
from ...execution.inputs import InputMoments, InputStatistics, share_statistics
from ...execution.loss import Batch, pad_right, unlabelled
from ...execution.memory import zeros_in_file
from ...execution.modes import inference
from ...execution.processes import shard
from ...execution.sites import Site
from ...execution.walk import Walk
from ...models.blocks import weight_of
from ...models.offload import mapped
from ...records import Module
from ...storage.writing import check_space
from .decisions import Decisions
from .directional import forms_along, spanning
from .directions import Directions, Nested, Written
from .sums import Candidates, QuadraticTerms
from .trials import trials


class Reference:
    """The dense model's output on some text, kept to compare with.

    Args:
        model: The dense model, at the moment of making this.
        data: The text; padding is moved behind the tokens, several processes share the sequences.
        batch_size: Sequences per forward.
        listen: Statistics to gather from the same forward.
    """

    def __init__(self, model: nn.Module, data: CalibrationSet, batch_size: int, listen: InputStatistics | None = None) -> None:
        padded = pad_right(data)
        self.data = padded if isinstance(padded, CalibrationSet) else data
        with inference(model):
            self.walk = Walk(model, shard(self.data), batch_size=batch_size)
            self.walk.capture()
            during = (lambda i: listen.listening(self.walk.token_mask(i))) if listen is not None else None
            self.meter = Meter(self.walk, "kl", during=during)
            if listen is not None:
                share_statistics(listen.found)

    def clean(self, batch: int) -> torch.Tensor:
        """Log-probabilities of a batch."""
        return self.meter.clean(batch)

    def measure(self) -> float:
        """Mean divergence of the model as it is now, in nats per token; one forward."""
        total = tokens = 0.0
        with inference(self.walk.model):
            if mapped(self.walk.model) is not None:  # every layer comes once, for all batches
                self.walk.capture()
                while self.walk.position < len(self.walk):
                    self.walk.advance()
                return self.meter.reached()
            for batch in range(self.walk.batches):
                logits = self.walk.model(**self.walk.inputs(batch)).logits
                each, count = kl_sum(logits, self.clean(batch), self.meter.counted(batch))
                total, tokens = total + each, tokens + count
        return mean(total, tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PointEvaluation:
    """What was seen at a point: divergence and forms, and statistics of the inputs there."""

    divergence: float
    forms: QuadraticTerms
    found: Found


def _gather(found: dict[str, list[InputMoments]], kind: str, folder: Path | None) -> Callable[[Site, Batch], None]:
    """Sum the second moments of what matrices are given, real tokens only; matrices of one site share theirs."""

    def listen(site: Site, batch: Batch) -> None:
        mask = batch.kwargs.get("attention_mask")
        x = site.a
        rows = x.flatten(0, 1) if mask is None or mask.shape != x.shape[:2] else x[mask.bool()]
        shared = found.get(site.names[0]) or [InputMoments(kind, folder=folder)]
        for name in site.names:
            found.setdefault(name, shared)
        shared[0].add(rows)

    return listen


def _below(parts: list[torch.Tensor]) -> torch.Tensor:
    """Copies below each other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class TrustRegion:
    """A model that moves between treated points; :meth:`restore` brings it back.

    Args:
        model: The dense model.
        data: The text that decides.
        decisions: Units.
        treatment: The pruner.
        options: Its options.
        batch_size: Sequences per forward.
        draws: Most draws of labels that will be asked for.

    Attributes:
        passes: Forward equivalents of this text so far: forward 1, backward 2.
        dense: Statistics of the dense model's inputs.
    """

    def __init__(
        self, model: nn.Module, data: CalibrationSet, decisions: Decisions, treatment: Treatment,
        options: Mapping[str, Any] | None = None, *, batch_size: int = 8, draws: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.decisions = model, decisions
        self.treating = Treating(model, treatment, options)
        single = any(m.copies > 1 for m in decisions.modules)
        self.batch_size = 1 if single else batch_size
        first = next(unlabelled(model, data, 1))
        self.trials = trials(self.treating, decisions, first, spanning=draws > 0 and spanning(model, decisions.first))
        self.folder = self._apart()
        listen = self._statistics()
        self.reference = Reference(model, data, self.batch_size, listen)
        self.dense: Found = {} if listen is None else listen.found
        self.passes = 1.0

    def _apart(self) -> Path | None:
        """Where Gram matrices and the changes made from them lie as files: only one layer of a streamed model is in memory.

        Raises:
            InvalidInput: The disk has no room for the Gram matrices of three points.
        """
        if self.treating.treatment.statistic != "gram" or mapped(self.model) is None:
            return None
        folder = Path(tempfile.gettempdir())
        check_space({folder: 12.0 * sum(m.d_in**2 * m.copies for m in self.decisions.modules)})
        return folder

    def _statistics(self) -> InputStatistics | None:
        kind = self.treating.treatment.statistic
        if kind == "none":
            return None
        return InputStatistics(self.model, self.decisions.modules, kind, folder=self.folder)

    def restore(self) -> None:
        """Put the dense weights back."""
        self.trials.restore()

    @torch.no_grad()
    def move(self, counts: np.ndarray, found: Found) -> None:
        """Treat the dense model by a plan, with statistics that were gathered before."""
        self.trials.move(self.decisions.jobs(counts), found)

    def look(self, counts: np.ndarray, found: Found, levels: np.ndarray, *, draws: int = 0, seed: int = 0) -> PointEvaluation:
        """Divergence, forms and statistics at the present point.

        Args:
            counts: The plan by which the model was moved here.
            found: The statistics with which it was.
            levels: Sparsities of every unit along which derivatives are wanted, ``(K, L)``.
            draws: Draws of labels; 0: first order only.
            seed: Of the draws.
        """
        units = self._candidates(counts, found, levels)
        gathered: dict[str, list[InputMoments]] = {}
        kind = self.treating.treatment.statistic
        experts = any(m.copies > 1 for m in self.decisions.modules) and kind != "none"
        forms = forms_along(
            self.model, self.reference.data, units, clean=self.reference.clean, draws=draws, seed=seed,
            batch_size=self.batch_size, listen=None if kind == "none" or experts else _gather(gathered, kind, self.folder),
            walk=self.trials.walk,
        )  # fmt: skip
        self.passes += forms.passes
        if experts:  # their inputs are formed inside their module: one more forward
            gathered = self._again().found
            self.passes += 1.0
        else:
            share_statistics(gathered)
        return PointEvaluation(divergence=forms.divergence, forms=forms, found=gathered)

    def _again(self) -> InputStatistics:
        """Statistics of the model's inputs as it is now, by a forward of its own."""
        found = InputStatistics(self.model, self.decisions.modules, self.treating.treatment.statistic, folder=self.folder)
        walk = self.reference.walk
        with inference(self.model):
            walk.capture()
            walk.finals(during=lambda i: found.listening(walk.token_mask(i)))
            share_statistics(found.found)
        return found

    def measure(self) -> float:
        """Divergence alone; one forward."""
        self.passes += 1.0
        return self.reference.measure()

    def applied(self, counts: np.ndarray) -> float:
        """Divergence of the plan as the pruner itself applies it, each layer seeing what the treated ones below it give."""
        walk = self.reference.walk
        self.restore()
        with inference(self.model):
            walk.forwards = 0
            walk.capture()
            for i, (name, _) in enumerate(walk.layers):
                walk.position = i
                self.trials.layer(walk, self.decisions.jobs(counts, f"{name}."))
            found = self.reference.meter.reached()
        self.passes += walk.forwards / (len(walk) * walk.batches)
        return found

    def _candidates(self, counts: np.ndarray, found: Found, levels: np.ndarray) -> Candidates:
        """The changes that lead from here to the levels, each matrix's made when its gradient is there."""
        made: dict[InputMoments, Any] = {}
        jobs = {job.module.name: job for job in self.decisions.jobs(counts)}
        modules = {m.name: m for m in self.decisions.modules}

        def make(name: str) -> Directions:
            statistics = found.get(name)
            if statistics and statistics[0] not in made:
                made.clear()  # what was prepared for the matrices of another input
            return self._directions(modules[name], jobs[name].level.zeros, counts, statistics, levels, made)

        return Candidates(self.decisions.first, make, len(self.decisions), levels.shape[1])

    @torch.no_grad()
    def _directions(
        self, m: Module, zeros: int, counts: np.ndarray, found: list[InputMoments] | None, levels: np.ndarray,
        made: dict[InputMoments, Any],
    ) -> Directions:  # fmt: skip
        owner, parameter = weight_of(self.model, m.name)
        dense = matrices(owner, nn.Parameter(self.trials.dense(m.name), requires_grad=False))
        prepared = [self.treating.prepared(s, made) for s in found] if found else [None] * len(dense)
        prepared = [self.treating.treatment.of(m.name, i, p) for i, p in enumerate(prepared)]
        of = self.decisions.of(m.name)
        share_of = m.numel / self.decisions.numel[of] if self.decisions.rows is None else np.ones(1)
        wanted = levels[of] * (self.decisions.numel[of] * share_of)[:, None]
        now = np.array([zeros]) if self.decisions.rows is None else counts[of]
        treatment = self.treating.treatment
        if treatment.nested and (treatment.by_row or m.copies == 1):
            order = _below([treatment.order(w, p) for w, p in zip(dense, prepared, strict=True)])
            device = order.device
            return Nested(
                _below(dense), order, torch.from_numpy(now).to(device), torch.from_numpy(wanted).to(device),
                rows=self.decisions.rows, by_row=treatment.by_row,
            )  # fmt: skip
        present = torch.cat([w.detach() for w in matrices(owner, parameter)])
        changes = []
        for row in wanted.T:
            change = self._become(dense, prepared, row) - present
            changes.append(
                change if self.folder is None else zeros_in_file(change.shape, self.folder, change.dtype).copy_(change)
            )
        return Written(changes, self.decisions.rows)

    @torch.no_grad()
    def _become(self, dense: list[torch.Tensor], prepared: list[Any], zeros: np.ndarray) -> torch.Tensor:
        """A matrix at one level of every group."""
        treatment, options, size = self.treating.treatment, self.treating.options, self.decisions.rows
        whole = np.rint(zeros).astype(np.int64)
        if size is None:
            counts = share(int(whole[0]), [w.numel() for w in dense])
            wanted = [Level(zeros=c) for c in counts]
        else:
            wanted = [Level(zeros=int(z.sum()), rows=(size, z)) for z in np.split(whole, len(dense))]
        return torch.cat([treated(treatment, w, p, v, options) for w, p, v in zip(dense, prepared, wanted, strict=True)])
