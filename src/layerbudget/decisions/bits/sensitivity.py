r"""Damage of every block in every format: the Fisher form along the rounding error.

For block i in format j, with ``Delta_ij`` what the format makes of its matrices less what they are,

    d_ij = 1/2 (1/N) sum_s E_y [ (sum_t b_st(y)' Delta_ij a_st)^2 ],

for all i and j from ``1 + 2 draws`` passes: rounding is so small a step that the dense point is enough. Predictions of one
matrix are pooled over its formats (:mod:`layerbudget.sensitivity.directional.terms`). The rounding errors are those of the
quantiser that will write the file. The damage of embedding and head is measured (mean KL from the dense output): they are few,
and an embedding has no inputs. Standard errors are over sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.quantisers import Quantiser
from ...compressors.treating import Found, Job, Treating, matrices
from ...data.calibration import CalibrationSet
from ...errors import CoverageError
from ...execution.divergence import next_tokens, sequence_losses, token_divergence
from ...execution.loss import IGNORE, pad_right, unlabelled
from ...execution.modes import inference
from ...execution.walk import Walk
from ...models.blocks import describe, weight_of
from ...models.machine import versions
from ...models.offload import Mapped, mapped
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from ...sensitivity.directional.directions import Directions, Written
from ...sensitivity.directional.terms import pooled, quadratic_terms
from ...sensitivity.directional.trials import Originals
from .apply import need_data, quantiser_of, round_matrices
from .blocks import formats_table, layers_of, modules_by_name, peaks
from .program import ESTIMATOR, Table

KEEP_BYTES = 1 << 30  # rounding errors of larger models are made again whenever they are needed
CACHED = 1 << 17  # entries of a matrix that are rounded together


def rounding_damage(
    model: nn.Module,
    data: CalibrationSet,
    *,
    draws: int = 4,
    batch_size: int = 8,
    seed: int = 0,
    method: str = "rtn",
    unwritten: str = "plan",
    progress: Progress | None = None,
    **formats: Any,
) -> Scores:
    """Scores with bytes and damage of every block in every format; the model is left as it was.

    Arguments are those of :func:`~layerbudget.decisions.bits.plan.plan_bits` and, as ``formats``, of
    :func:`~layerbudget.decisions.bits.blocks.formats_table`; labels are drawn ``draws`` times by ``seed``.
    """
    quantiser = quantiser_of(method)
    if mapped(model) is not None and quantiser.statistic != "none":
        raise CoverageError(
            f"The rounding errors of {method} depend on inputs: all of them would be held, a copy of the model per format.",
            "A streamed model is planned by rounding errors that are made again when they are needed.",
            "Plan with --method rtn, or use --no-stream.",
        )
    table = formats_table(model, method=method, unwritten=unwritten, **formats)
    table, passes, kept = _Damage(model, data, table, batch_size).run(draws, seed, progress)
    first, k = np.argmax(table.has, axis=1), np.arange(len(table.blocks))
    how = {"passes": passes, "kept": kept, "measure": "directional", "seed": seed}
    return Scores(
        estimator=ESTIMATOR,
        blocks=tuple(table.blocks),
        gain=(tuple(table.damage[k, first]),),
        unit="nats per token",
        standard_error=(tuple(table.error[k, first]),),
        model=describe(model),
        data=data.describe(),
        versions=versions(),
        extra={"choices": {**table.record(), **how}},
    )


class _Damage:
    """Damage of a table's blocks in its formats."""

    def __init__(self, model: nn.Module, data: CalibrationSet, table: Table, batch_size: int) -> None:
        self.model, self.data, self.table, self.batch_size = model, data, table, batch_size
        self.quantiser = quantiser_of(table.method)
        need_data(self.quantiser, data)
        self.treating = Treating(model, self.quantiser)
        decided = [i for i, b in enumerate(table.blocks) if not all(m.name in table.unwritten for m in b.modules)]
        first = {i: table.blocks[i].modules[0].name for i in decided}
        where = layers_of(model, first.values())
        self.layer = {i: where[name] for i, name in first.items()}
        small = dict.fromkeys((m.name for i in decided for m in table.blocks[i].modules), "nvfp4")
        self.peaks = peaks(model, small) if "nvfp4" in table.formats else {}
        self.damage, self.rest = table.damage.copy(), np.zeros((*table.damage.shape, data.samples))
        self.passes = 0.0

    def run(self, draws: int, seed: int, progress: Progress | None) -> tuple[Table, float, float]:
        """The table with damages, the passes that it took, and the share of the formats' differences that pooling kept."""
        kept, inside = 1.0, [i for i, layer in self.layer.items() if layer is not None]
        with inference(self.model):
            self._measure_ends()
            errors = self._rounding_errors(inside, progress)
        if inside:
            own: dict[str, Any] = {"draws": draws, "seed": seed, "batch_size": self.batch_size, "progress": progress}
            has, blocks = self.table.has[inside], [self.table.blocks[i] for i in inside]
            units = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
            shape = (len(blocks), len(self.table.formats))
            terms = quadratic_terms(self.model, self.data, units, errors.__getitem__, shape, **own)
            self.rest[inside] = np.where(has[..., None], terms.rest, 0.0)
            norm = np.stack([sum(_norms(errors[m.name]) for m in b.modules) for b in blocks])
            self.damage[inside], kept = pooled(np.where(has, terms.second, np.inf), terms.error, norm)
            self.passes += terms.passes
        error = np.linalg.norm(self.rest, axis=-1)
        return dataclasses.replace(self.table, damage=self.damage, error=error, rest=self.rest), self.passes, kept

    def _measure_ends(self) -> None:
        """Embedding and head, by whole forwards in every format."""
        ends = [i for i, layer in self.layer.items() if layer is None]
        if not ends:
            return
        dense = DenseOutput(self.model, self.data, self.batch_size)
        self.passes += 1.0
        for i in ends:
            names = [m.name for m in self.table.blocks[i].modules]
            for j in np.flatnonzero(self.table.has[i]):
                rows = dense.rows_of(self.model, dict.fromkeys(names, self.table.formats[j]))
                self.damage[i, j], self.rest[i, j] = mean_and_rest(rows[:, :2])
                self.passes += 1.0
        offloaded = mapped(self.model)
        if offloaded is not None:
            offloaded.leave()

    def _rounding_errors(self, inside: Sequence[int], progress: Progress | None) -> dict[str, Directions]:
        """Rounding errors of all matrices inside the layers; a quantiser that reads inputs walks the dense model."""
        reads = self.quantiser.statistic != "none"
        walk = Walk(self.model, self.data, batch_size=self.batch_size) if reads else None
        last = 1 + max((layer for layer in self.layer.values() if layer is not None), default=-1)
        errors: dict[str, Directions] = {}
        tick = Steps(progress, last, "rounding layers")
        try:
            if walk is not None:
                walk.capture()
            for layer in range(last):
                members = [i for i in inside if self.layer[i] == layer]
                found = None
                if walk is not None:
                    found = self.treating.collect(walk, [m for i in members for m in self.table.blocks[i].modules])
                for i in members:
                    errors |= self._errors(i, {} if found is None else found.found)
                if walk is not None and layer + 1 < last:
                    walk.advance()
                tick()
        finally:
            if walk is not None:
                self.passes += walk.forwards / (len(walk) * walk.batches)
                walk.close()
        return errors

    def _errors(self, i: int, statistics: Found) -> dict[str, Directions]:
        """The rounding errors of a block's matrices in every format, none where it does not have one."""
        names = [f if has else None for f, has in zip(self.table.formats, self.table.has[i], strict=True)]
        views = {m.name: matrices(*weight_of(self.model, m.name)) for m in self.table.blocks[i].modules}
        if self.quantiser.statistic == "none":
            offloaded = mapped(self.model)
            again = {n: RoundingErrors(v, self.quantiser, names, offloaded, self.peaks.get(n)) for n, v in views.items()}
            size = 4 * len(names) * sum(b.numel for b in self.table.blocks)
            keep = offloaded is None and size <= KEEP_BYTES
            return {n: Written(e.all()) if keep else e for n, e in again.items()}
        dense = {name: torch.cat([v.detach() for v in held]).clone() for name, held in views.items()}
        deltas = {name: [torch.zeros_like(w) for _ in names] for name, w in dense.items()}
        originals, made = Originals(self.model, [self.table.blocks[i]]), dict[Any, Any]()
        for j in np.flatnonzero(self.table.has[i]):
            originals.restore()
            name, modules = self.table.formats[j], self.table.blocks[i].modules
            jobs = [Job(module=m, level=Level(format=name, peak=self.peaks.get(m.name))) for m in modules]
            self.treating.jobs(jobs, statistics, made)
            for name, held in views.items():
                deltas[name][j] = torch.cat([v.detach() for v in held]) - dense[name]
        originals.restore()
        return {name: Written(d) for name, d in deltas.items()}


class RoundingErrors(Directions):
    """Rounding errors that are made again whenever they are needed: nothing is kept of a large model.

    ``views`` are the copies of the matrix, ``(d_out, d_in)`` each; names of formats are None where the block does not have
    them, ``peak`` is that of a :class:`~layerbudget.compressors.base.Level`. Of ``offloaded`` weights the errors are those of
    what layers compute with.
    """

    def __init__(
        self,
        views: Sequence[torch.Tensor],
        quantiser: Quantiser,
        names: Sequence[str | None],
        offloaded: Mapped | None = None,
        peak: float | None = None,
    ) -> None:
        self.views, self.quantiser, self.names, self.offloaded = list(views), quantiser, list(names), offloaded
        self.peak = peak
        self.groups, self.levels = 1, len(self.names)

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        found = gradient.new_zeros(len(gradient), 1, self.levels, dtype=torch.float64)
        for level in range(self.levels):
            start = 0
            for errors in self._rows(level):
                rows = gradient[:, start : start + len(errors)]
                found[:, 0, level] += torch.einsum("boi,oi->bo", rows, errors.to(gradient)).double().sum(1)
                start += len(errors)
        return found

    def all(self) -> list[torch.Tensor]:
        """The errors in every format, ``(copies * d_out, d_in)`` each; zero where there is no format."""
        none = torch.cat([torch.zeros_like(v) for v in self.views])
        return [none if name is None else torch.cat(list(self._rows(j))) for j, name in enumerate(self.names)]

    def norms(self) -> np.ndarray:
        """Squared norms of the rounding errors, ``(levels,)``."""
        return np.array([sum(float(errors.square().sum()) for errors in self._rows(j)) for j in range(self.levels)])

    def _rows(self, level: int) -> Iterator[torch.Tensor]:
        """Errors of some rows at a time: as many as stay in the processor's cache through all that rounding does to them."""
        if self.names[level] is None:
            return
        for view in self.views:
            for rows in view.detach().split(max(1, CACHED // view.shape[1])):
                held = rows if self.offloaded is None else rows.to(self.offloaded.device, self.offloaded.dtype)
                yield self.quantiser.apply(held, None, Level(format=self.names[level], peak=self.peak)) - held


def _norms(directions: Directions) -> np.ndarray:
    if isinstance(directions, RoundingErrors):
        return directions.norms()
    deltas = directions.deltas if isinstance(directions, Written) else []
    return np.array([float(d.square().sum()) for d in deltas])


class DenseOutput:
    """The dense model's output on a text, and how far another one's is from it."""

    def __init__(self, model: nn.Module, data: CalibrationSet, batch_size: int = 8) -> None:
        self.data, self.batch_size = cast(CalibrationSet, pad_right(data)), batch_size
        self.device = next(model.parameters()).device
        self.compared = [b.targets != IGNORE for b in unlabelled(model, data, batch_size)]
        with inference(model):
            self.clean = [torch.log_softmax(model(**b).logits.float(), dim=-1) for b in self._batches()]

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.data.batches(self.batch_size, self.device))

    def rows(self, model: nn.Module) -> np.ndarray:
        """``(sequences, 4)``: summed KL in nats, compared tokens, summed loss, predicted tokens (of answers, if any)."""
        out = []
        with inference(model):
            for batch, clean, compared in zip(self._batches(), self.clean, self.compared, strict=True):
                logits = model(**batch).logits.float()
                each = token_divergence(logits, clean)
                mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                target = next_tokens(batch["input_ids"], mask)
                if self.data.labels is not None:
                    target = target.masked_fill(~compared[:, :-1], IGNORE)
                losses = sequence_losses(logits[:, :-1], target)
                columns = (each * compared).double().sum(1), compared.sum(1), losses, (target != IGNORE).sum(1)
                out.append(torch.stack([c.double() for c in columns], 1).cpu().numpy())
        return np.concatenate(out)

    def rows_of(
        self, model: nn.Module, formats: Mapping[str, str], data: CalibrationSet | None = None, method: str = "rtn"
    ) -> np.ndarray:
        """See :meth:`rows`, of the dense model with some matrices in formats; it is afterwards as it was."""
        held = Originals(model, [Block(name="all", modules=tuple(modules_by_name(model, formats).values()))])
        try:
            round_matrices(model, formats, data, method=method, batch_size=self.batch_size)
            return self.rows(model)
        finally:
            held.restore()


def mean_and_rest(rows: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean per token of ``(sums, tokens)`` by sequence, and what every sequence adds beside its share, ``(sequences,)``.

    Its norm is the standard error over sequences (ratio estimator); of a sum of means it is the norm of the sum.
    """
    total, tokens = rows.sum(0)
    n = len(rows)
    rest = (rows[:, 0] - total / tokens * rows[:, 1]) * np.sqrt(n / max(n - 1, 1))
    return float(total / tokens), rest / tokens


def mean_and_error(rows: np.ndarray) -> tuple[float, float]:
    """Mean per token of ``(sums, tokens)`` by sequence, and its standard error over sequences."""
    mean, rest = mean_and_rest(rows)
    return mean, float(np.linalg.norm(rest))
