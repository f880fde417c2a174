r"""Damage of every block in every format: the Fisher form along the rounding error.

For block i in format j, with ``Delta_ij`` what the format makes of its matrices less what they are,

    d_ij = 1/2 (1/N) sum_s E_y [ (sum_t b_st(y)' Delta_ij a_st)^2 ],

from ``1 + 2 draws`` passes: rounding is so small a step that the dense point is enough. It is measured along the errors of a
few formats, and pooled over these. The damage of every other one is interpolated between them, in its squared error from a
sample of rows (:mod:`layerbudget.decisions.bits.rounding`, :mod:`layerbudget.sensitivity.directional.terms`). The rounding
errors are those of the quantiser that will write the file. Embedding and head are measured likewise. Standard errors are over
sequences and sampled rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.divergence import next_tokens, sequence_losses, token_divergence
from ...execution.loss import IGNORE, pad_right, unlabelled
from ...execution.modes import inference
from ...models.blocks import describe
from ...models.machine import versions
from ...progress import Progress
from ...records import Block
from ...scores import Scores
from ...sensitivity.directional.terms import QuadraticTerms, interpolated, pooled, quadratic_terms
from ...sensitivity.directional.trials import Originals
from .apply import quantiser_of, round_matrices
from .blocks import formats_table, modules_by_name
from .rounding import RoundingErrors
from .table import ESTIMATOR, Table


def rounding_damage(
    model: nn.Module,
    data: CalibrationSet,
    *,
    draws: int = 4,
    batch_size: int = 8,
    seed: int = 0,
    method: str = "rtn",
    unwritten: str = "plan",
    rows: int = 16,
    whole: bool = False,
    imatrix: str | None = None,
    progress: Progress | None = None,
    **formats: Any,
) -> Scores:
    """Scores with bytes and damage of every block in every format; the model is left as it was.

    Arguments are those of :func:`~layerbudget.decisions.bits.plan.plan_bits` and, as ``formats``, of
    :func:`~layerbudget.decisions.bits.blocks.formats_table`; labels are drawn ``draws`` times by ``seed``. So many ``rows`` of
    every matrix are rounded to every format, and the damage of a few formats is measured; with ``whole`` that of all of them,
    which ggml takes several times as long to round. ``imatrix`` is the importance matrix of llama.cpp that the file will be
    made with, for ``weighted``; by default importances are of the text.
    """
    if rows < 2:
        raise InvalidInput(f"rows is {rows}.", "An error needs 2 rows or more.", "Use 16.")
    quantiser = quantiser_of(method).with_options({} if imatrix is None else {"imatrix": imatrix})
    table = formats_table(model, method=method, unwritten=unwritten, **formats)
    decided = [i for i, b in enumerate(table.blocks) if not all(m.name in table.unwritten for m in b.modules)]
    passes, kept, anchors = 0.0, 1.0, tuple[str, ...]()
    if decided:
        blocks, has = [table.blocks[i] for i in decided], table.has[decided]
        way: dict[str, Any] = {"family": table.family, "rows": rows, "seed": seed, "whole": whole}
        errors = RoundingErrors(model, data, quantiser, blocks, table.formats, has, **way)
        units = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        own: dict[str, Any] = {"draws": draws, "seed": seed, "batch_size": batch_size, "progress": progress}
        shape = len(blocks), len(errors.anchors)
        terms = quadratic_terms(model, data, units, errors.of, shape, listen=errors.listen, watch=errors, **own)
        damage, error, rest = table.damage.copy(), table.error.copy(), np.zeros((*table.damage.shape, data.samples))
        found, spread, apart, kept = _damages(errors, table, decided, terms)
        damage[decided] = np.where(has, found, np.inf)
        error[decided], rest[decided] = np.where(has, spread, 0.0), np.where(has[..., None], apart, 0.0)
        table = dataclasses.replace(table, damage=damage, error=error, rest=rest)
        passes, anchors = terms.passes + quantiser.reads_text, errors.anchors
    first, k = np.argmax(table.has, axis=1), np.arange(len(table.blocks))
    how: dict[str, Any] = {"passes": passes, "kept": kept, "measure": "directional", "seed": seed, "rows": rows}
    how |= {"anchors": anchors} | ({} if imatrix is None else {"imatrix": str(imatrix)})
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


def _damages(
    errors: RoundingErrors, table: Table, decided: Sequence[int], terms: QuadraticTerms
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Damage, standard error and ``rest`` of the decided blocks in all formats, and what pooling kept of the differences."""
    count, blocks = len(table.formats), [table.blocks[i] for i in decided]
    rows = [np.concatenate([errors.sampled[m.name][0] for m in b.modules]) for b in blocks]
    left = np.array([max(errors.sampled[m.name][1] for m in b.modules) for b in blocks])
    norm = np.stack([r.sum(0) for r in rows])
    wanted, measured = norm[:, :count], norm[:, count:]
    steady, kept = pooled(np.where(measured > 0, terms.second, np.inf), terms.error, measured)
    damage, shares = interpolated(steady, measured, wanted)
    relative = terms.rest / np.where(terms.second > 0, terms.second, 1.0)[..., None]
    rest = damage[..., None] * np.einsum("inm,ims->ins", shares, relative)
    error = np.linalg.norm(rest, axis=-1)
    for i, block in enumerate(blocks):  # rows that were not measured leave something open, the same for all formats
        total, variance = np.sum([errors.measured[m.name] for m in block.modules], axis=0)
        error[i] = np.hypot(error[i], damage[i] * (shares[i] @ (np.sqrt(variance) / np.where(total > 0, total, 1.0))))
    for i, each in enumerate(rows):
        each = each / np.where(norm[i] > 0, norm[i], 1.0)
        off = each[:, :count] - each[:, count:] @ shares[i].T
        error[i] = np.hypot(error[i], damage[i] * np.sqrt(left[i] * (off**2).sum(0) * len(each) / max(len(each) - 1, 1)))
    return damage, error, rest, kept


class DenseOutput:
    """The dense model's output on a text, and how far another one's is from it."""

    def __init__(self, model: nn.Module, data: CalibrationSet, batch_size: int = 8) -> None:
        self.text = data.describe()
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
        self,
        model: nn.Module,
        formats: Mapping[str, str],
        data: CalibrationSet | None = None,
        method: str = "rtn",
        **own: Any,
    ) -> np.ndarray:
        """See :meth:`rows`, of the dense model with some matrices in formats; it is afterwards as it was.

        Options are those of the method.
        """
        return self.rows_within(model, formats, [contextlib.nullcontext()], data, method, **own)[0]

    def rows_within(
        self,
        model: nn.Module,
        formats: Mapping[str, str],
        contexts: Iterable[contextlib.AbstractContextManager[None]],
        data: CalibrationSet | None = None,
        method: str = "rtn",
        **own: Any,
    ) -> list[np.ndarray]:
        """See :meth:`rows_of`; the matrices are rounded once, and the text is run within each of some contexts."""
        held = Originals(model, [Block(name="all", modules=tuple(modules_by_name(model, formats).values()))])
        found = []
        try:
            round_matrices(model, formats, data, method=method, batch_size=self.batch_size, **own)
            for each in contexts:
                with each:
                    found.append(self.rows(model))
        finally:
            held.restore()
        return found


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
