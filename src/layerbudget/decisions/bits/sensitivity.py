r"""Damage of every block in every format: the Fisher form along the rounding error.

For block i in format j, with ``Delta_ij`` what the format makes of its matrices less what they are,

    d_ij = 1/2 (1/N) sum_s E_y [ (sum_t b_st(y)' Delta_ij a_st)^2 ],

from ``1 + 2 draws`` passes: rounding is so small a step that the dense point is enough. It is measured along the errors of a
few formats, and pooled over these. The damage of every other one follows from what all its weights are scaled by and from the
squared error that is left, both of a sample of rows (:mod:`layerbudget.decisions.bits.rounding`,
:mod:`layerbudget.sensitivity.directional.terms`). The rounding errors are those of the quantiser that will write the file.
Embedding and head are measured likewise. Standard errors are over sequences and sampled rows.

Error feedback fits its codes to the inputs that it sees, so on these it looks better than it is on other text. There every
second sequence shows the inputs, and damages are of the others, with twice as many draws.
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
from ...execution.loss import IGNORE, answers, deal, pad_right, unlabelled
from ...execution.modes import inference
from ...models.blocks import describe
from ...models.machine import versions
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from ...sensitivity.directional.terms import QuadraticTerms, interpolated, pooled, quadratic_terms
from ...sensitivity.directional.trials import Originals
from ..formats.table import ESTIMATOR, Table
from .apply import quantiser_of, round_matrices
from .blocks import formats_table, modules_by_name
from .rounding import RoundingErrors

_LEAST = 0.1  # of the damage of its rest that a format has at the least: what scales weights may by chance undo some of it


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
    table: Table | None = None,
    progress: Progress | None = None,
    **formats: Any,
) -> Scores:
    """Scores with bytes and damage of every block in every format; the model is left as it was.

    Arguments are those of :func:`~layerbudget.decisions.bits.plan.plan_bits` and, as ``formats``, of
    :func:`~layerbudget.decisions.bits.blocks.formats_table`; labels are drawn ``draws`` times by ``seed``. So many ``rows`` of
    every matrix are rounded to every format, and the damage of a few formats is measured; with ``whole`` that of all of them,
    which ggml takes several times as long to round. ``imatrix`` is the importance matrix of llama.cpp that the file will be
    made with, for ``weighted``; by default importances are of the text. A ``table`` that was built before says the formats in
    the place of all arguments of :func:`~layerbudget.decisions.bits.blocks.formats_table`.
    """
    if rows < 2:
        raise InvalidInput(f"rows is {rows}.", "An error needs 2 rows or more.", "Use 16.")
    quantiser = quantiser_of(method).with_options({} if imatrix is None else {"imatrix": imatrix})
    table = table or formats_table(model, method=method, unwritten=unwritten, **formats)
    decided = [i for i, b in enumerate(table.blocks) if not all(m.name in table.unwritten for m in b.modules)]
    passes, kept, anchors = 0.0, 1.0, tuple[str, ...]()
    if decided:
        blocks, has = [table.blocks[i] for i in decided], table.has[decided]
        way: dict[str, Any] = {"family": table.family, "rows": rows, "seed": seed, "whole": whole}
        errors = RoundingErrors(model, data, quantiser, blocks, table.formats, has, **way)
        units = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        own: dict[str, Any] = {"draws": draws, "seed": seed, "batch_size": batch_size, "progress": progress}
        shape = len(blocks), errors.levels
        judges, own["watched"], counts = np.arange(data.samples), None, answers(model, data)
        if quantiser.statistic == "gram" and (counts > 0).sum() > 1:
            dealt = deal(counts, 2)
            shown = data.select(torch.from_numpy(np.flatnonzero(dealt == 0)))
            judges, own["draws"], own["watched"] = np.flatnonzero(dealt == 1), 2 * draws, shown
        some = data.select(torch.from_numpy(judges))
        terms = quadratic_terms(model, some, units, errors.of, shape, listen=errors.listen, watch=errors, **own)
        damage, error, rest = table.damage.copy(), table.error.copy(), np.zeros((*table.damage.shape, data.samples))
        found, spread, apart, kept = _damages(errors, table, decided, terms)
        damage[decided] = np.where(has, found, np.inf)
        error[decided] = np.where(has, spread, 0.0)
        rest[np.ix_(np.array(decided), np.arange(len(table.formats)), judges)] = np.where(has[..., None], apart, 0.0)
        table = dataclasses.replace(table, damage=damage, error=error, rest=rest)
        share = len(judges) / data.samples  # of the text; inputs take a pass more of a layer, and watched text its forward
        passes = terms.passes * share + quantiser.reads_text * (1.0 if share == 1.0 else 2.0 * (1.0 - share))
        anchors = errors.anchors
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
        extra={"formats": {**table.record(), **how}},
    )


def _damages(
    errors: RoundingErrors, table: Table, decided: Sequence[int], terms: QuadraticTerms
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Damage, standard error and ``rest`` of the decided blocks in all formats, and what pooling kept of the differences."""
    count, blocks, number = len(table.formats), [table.blocks[i] for i in decided], len(errors.anchors)
    rows = [np.concatenate([errors.sampled[m.name][0] for m in b.modules]) for b in blocks]
    left = np.array([max(errors.sampled[m.name][1] for m in b.modules) for b in blocks])
    norm = np.stack([r.sum(0) for r in rows])
    wanted, measured, second = norm[:, :count], norm[:, count:], terms.second[:, :number]
    steady, kept = pooled(np.where(measured > 0, second, np.inf), terms.error[:, :number], measured)
    damage, shares = interpolated(steady, measured, wanted)
    relative = terms.rest[:, :number] / np.where(second > 0, second, 1.0)[..., None]
    rest = damage[..., None] * np.einsum("inm,ims->ins", shares, relative)
    open_ = np.zeros(damage.shape)  # what the rows leave open
    for i, block in enumerate(blocks):
        total, variance = np.sum([errors.measured[m.name] for m in block.modules], axis=0)
        open_[i] = damage[i] * (shares[i] @ (np.sqrt(variance) / np.where(total > 0, total, 1.0)))
        each = rows[i] / np.where(norm[i] > 0, norm[i], 1.0)
        off = each[:, :count] - each[:, count:] @ shares[i].T
        share = left[i] * (off**2).sum(0) * len(each) / max(len(each) - 1, 1)
        open_[i] = np.hypot(open_[i], damage[i] * np.sqrt(share))
    if not errors.whole:
        more, apart = _scaled(errors, blocks, measured > 0, terms)
        damage, rest = np.maximum(damage + more, _LEAST * damage), rest + apart
    return damage, np.hypot(np.linalg.norm(rest, axis=-1), open_), rest, kept


def _scaled(
    errors: RoundingErrors, blocks: Sequence[Block], there: np.ndarray, terms: QuadraticTerms
) -> tuple[np.ndarray, np.ndarray]:
    """What formats add to the damage of their rests by scaling all weights alike, and its ``rest``; of anchors as measured."""
    count, number = len(errors.formats), len(errors.anchors)
    squares = np.stack([_factors(errors, block)[:count] for block in blocks]) ** 2
    more, apart = squares * terms.second[:, number, None], squares[..., None] * terms.rest[:, number, None]
    for a, j in ((a, errors.formats.index(f)) for a, f in enumerate(errors.anchors) if f in errors.formats):
        both = number + 1 + a
        more[:, j] = np.where(there[:, a], terms.second[:, both] - terms.second[:, a], more[:, j])
        apart[:, j] = np.where(there[:, a, None], terms.rest[:, both] - terms.rest[:, a], apart[:, j])
    return more, apart


def _factors(errors: RoundingErrors, block: Block) -> np.ndarray:
    """What all weights of a block are scaled by, in every format and anchor: the mean of its matrices."""
    sizes = [m.copies * m.numel for m in block.modules]
    return np.asarray(np.average([errors.factors[m.name] for m in block.modules], axis=0, weights=sizes))


class DenseOutput:
    """The dense model's output on a text, and how far another one's is from it; ``progress`` sees every batch and layer."""

    def __init__(self, model: nn.Module, data: CalibrationSet, batch_size: int = 8, progress: Progress | None = None) -> None:
        self.text, self.progress = data.describe(), progress
        self.data, self.batch_size = cast(CalibrationSet, pad_right(data)), batch_size
        self.device = next(model.parameters()).device
        self.compared = [b.targets != IGNORE for b in unlabelled(model, data, batch_size)]
        self.clean, tick = list[torch.Tensor](), Steps(progress, len(self.compared), "the check: the dense model")
        with inference(model):
            for batch in self._batches():
                self.clean.append(torch.log_softmax(model(**batch).logits.float(), dim=-1))
                tick()

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.data.batches(self.batch_size, self.device))

    def rows(self, model: nn.Module) -> np.ndarray:
        """``(sequences, 4)``: summed KL in nats, compared tokens, summed loss, predicted tokens (of answers, if any)."""
        out, tick = [], Steps(self.progress, len(self.compared))
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
                tick()
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
            own |= {"batch_size": self.batch_size, "progress": self.progress}
            round_matrices(model, formats, data, method=method, **own)
            for each in contexts:
                with each:
                    found.append(self.rows(model))
        finally:
            held.restore()
        return found
