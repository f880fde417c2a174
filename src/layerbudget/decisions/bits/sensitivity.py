r"""Damage of every block in every format: the Fisher form along the rounding error.

For block i in format j, with ``Delta_ij`` what the format makes of its matrices less what they are,

    d_ij = 1/2 (1/N) sum_s E_y [ (sum_t b_st(y)' Delta_ij a_st)^2 ],

from ``1 + 2 draws`` passes: rounding is so small a step that the dense point is enough. It is measured along the errors of a
few formats, and pooled over these. The damage of every other one follows from what all its weights are scaled by and from the
squared error that is left, both of a sample of rows (:mod:`layerbudget.decisions.bits.rounding`,
:mod:`layerbudget.sensitivity.directional.terms`). The rounding errors are those of the quantiser that will write the file.
Embedding and head are measured likewise. Standard errors are over sequences and sampled rows.

Error feedback fits its codes to the inputs that it sees, so on these it looks better than it is on other text. There some of
the sequences show the inputs, and damages are of the others, with twice as many draws: of every second sequence, and of no more
than 24. A gradient costs several times the forward that shows inputs, and a damage is known to a tenth from so many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.divergence import losses_of, next_tokens
from ...execution.inputs import InputStatistics
from ...execution.kept import KeptLayers
from ...execution.loss import IGNORE, Batch, assign_folds, count_scored_tokens, unlabelled
from ...execution.memory import Store, room_for
from ...execution.modes import inference
from ...execution.outputs import Outputs
from ...execution.processes import process_group, shard
from ...execution.replay import Replay
from ...execution.sharing import from_main
from ...execution.walk import Walk
from ...models.blocks import describe
from ...models.machine import give_back, versions
from ...models.offload import mapped
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from ...sensitivity.directional.terms import QuadraticTerms, interpolated, pooled, quadratic_terms
from ...sensitivity.directional.trials import Originals
from ...storage.writing import check_space
from ..formats.table import ESTIMATOR, FormatTable
from .apply import round_matrices
from .blocks import formats_table, modules_by_name
from .pieces import Shared, quantiser_of
from .rounding import RoundingErrors

_KEPT = 256 << 20  # bytes of log-probabilities that are kept in memory
_Logits = Callable[[Batch], Iterator[tuple[slice, torch.Tensor]]]
_Context = Callable[[], contextlib.AbstractContextManager[None]]
_JUDGES = 24  # sequences that tell the damage of error feedback, at the most
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
    table: FormatTable | None = None,
    progress: Progress | None = None,
    finished: KeptLayers | None = None,
    **formats: Any,
) -> Scores:
    """Scores with bytes and damage of every block in every format; the model is left as it was.

    Arguments are those of :func:`~layerbudget.decisions.bits.plan.plan_bits` and, as ``formats``, of
    :func:`~layerbudget.decisions.bits.blocks.formats_table`; labels are drawn ``draws`` times by ``seed``. So many ``rows`` of
    every matrix are rounded to every format, and the damage of a few formats is measured; with ``whole`` that of all of them,
    which ggml takes several times as long to round. ``imatrix`` is the importance matrix of llama.cpp that the file will be
    made with, for ``weighted``; by default importances are of the text. A ``table`` that was built before says the formats in
    the place of all arguments of :func:`~layerbudget.decisions.bits.blocks.formats_table`. With ``finished`` a run that was
    stopped goes on from the last layer that it finished.
    """
    if rows < 2:
        raise InvalidInput(f"rows is {rows}.", "An error needs 2 rows or more.", "Use 16.")
    quantiser = quantiser_of(method).with_options({} if imatrix is None else {"imatrix": imatrix})
    table = table or from_main(lambda: formats_table(model, method=method, unwritten=unwritten, **formats))
    decided = [i for i, b in enumerate(table.blocks) if not all(m.name in table.unwritten for m in b.modules)]
    passes, kept, anchors = 0.0, 1.0, tuple[str, ...]()
    if decided:
        blocks, has = [table.blocks[i] for i in decided], table.has[decided]
        way: dict[str, Any] = {"family": table.family, "rows": rows, "seed": seed, "whole": whole, "draws": draws}
        errors = RoundingErrors(model, data, quantiser, blocks, table.formats, has, **way)
        units = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        options: dict[str, Any] = {"draws": draws, "seed": seed, "batch_size": batch_size, "progress": progress}
        shape = len(blocks), errors.levels
        judges, options["watched"], counts = np.arange(data.samples), None, count_scored_tokens(model, data)
        if quantiser.statistic == "gram" and (counts > 0).sum() > 1:
            folds = judging_folds(int((counts > 0).sum()))
            judge = assign_folds(counts, folds) == folds - 1
            shown = data.select(torch.from_numpy(np.flatnonzero(~judge)))
            judges, options["draws"], options["watched"] = np.flatnonzero(judge), 2 * draws, shown
            options["batch_size"] = -(-batch_size // 2)  # as many batches as of the whole text, also for two processes
        some, errors.draws = data.select(torch.from_numpy(judges)), options["draws"]
        options |= {"listen": errors.listen, "watch": errors, "kept": finished}
        terms = quadratic_terms(model, some, units, errors.of, shape, **options)
        damage, error, rest = table.damage.copy(), table.error.copy(), np.zeros((*table.damage.shape, data.samples))
        decided_damage, spread, apart, kept = _damages(errors, table, decided, terms)
        damage[decided] = np.where(has, decided_damage, np.inf)
        error[decided] = np.where(has, spread, 0.0)
        rest[np.ix_(np.array(decided), np.arange(len(table.formats)), judges)] = np.where(has[..., None], apart, 0.0)
        table = dataclasses.replace(table, damage=_short(damage), error=_short(error), rest=rest)
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


def judging_folds(sequences: int) -> int:
    """Of how many sequences one tells the damage of error feedback, where the others show the inputs.

    >>> judging_folds(8), judging_folds(140)
    (2, 6)
    """
    return max(2, -(-sequences // _JUDGES))


def _short(values: np.ndarray) -> np.ndarray:
    """Numbers in nine digits: the last of sixteen is that of the order of sums, which is not the same everywhere."""
    return np.array([float(f"{v:.9g}") for v in values.ravel()]).reshape(values.shape)


def _damages(
    errors: RoundingErrors, table: FormatTable, decided: Sequence[int], terms: QuadraticTerms
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
    """Damage that formats add to that of their rests by scaling all weights alike, and its ``rest``; of anchors as measured."""
    count, number = len(errors.formats), len(errors.anchors)
    squares = np.stack([_factors(errors, block)[:count] for block in blocks]) ** 2
    more, apart = squares * terms.second[:, number, None], squares[..., None] * terms.rest[:, number, None]
    for a, j in ((a, errors.formats.index(f)) for a, f in enumerate(errors.anchors) if f in errors.formats):
        both = number + 1 + a
        more[:, j] = np.where(there[:, a], terms.second[:, both] - terms.second[:, a], more[:, j])
        apart[:, j] = np.where(there[:, a, None], terms.rest[:, both] - terms.rest[:, a], apart[:, j])
    return more, apart


def _factors(errors: RoundingErrors, block: Block) -> np.ndarray:
    """Factors of all weights of a block, in every format and anchor: the mean of its matrices."""
    sizes = [m.copies * m.numel for m in block.modules]
    return np.asarray(np.average([errors.factors[m.name] for m in block.modules], axis=0, weights=sizes))


class DenseOutput:
    """The dense model's output on a text, and how far another one's is from it; ``progress`` sees every batch and layer.

    Several processes share the sequences, and all have the rows of all. The dense model runs once. Its log-probabilities lie
    in temporary files where they take more than 256 MB, and those of a batch are looked at some positions at a time where the
    model's head can be asked for these.

    Attributes:
        own: See :meth:`rows`, of the dense model itself.
        heard: Whether :meth:`rows_as_quantised` follows, so that other plans listen for what it needs.
    """

    heard = False

    def __init__(self, model: nn.Module, data: CalibrationSet, batch_size: int = 8, progress: Progress | None = None) -> None:
        self.text, self.progress, self.batch_size = data.describe(), progress, batch_size
        self.samples, self.run = data.samples, process_group().batch(data.samples, batch_size)
        self.runs = list(unlabelled(model, shard(data, self.run), self.run))
        self.labelled = data.labels is not None
        self._clean: Store | None = None
        self._shared: dict[Any, Shared] = {}
        give_back()
        with inference(model):
            self.outputs = Outputs(model, self.runs)
            self.own = self._rows(self.outputs.of, "the check: the dense model")

    def rows(self, model: nn.Module) -> np.ndarray:
        """``(sequences, 4)``: summed KL in nats, compared tokens, summed loss, predicted tokens (of answers, if any)."""
        with inference(model):
            outputs = self.outputs if model is self.outputs.model else Outputs(model, self.runs)
            return self._rows(outputs.of)

    def _rows(self, outputs: _Logits, phase: str = "") -> np.ndarray:
        """See :meth:`rows`. The first outputs are the dense ones, and are kept."""
        out, tick, first = [], Steps(self.progress, len(self.runs), phase), self._clean is None
        for j, batch in enumerate(self.runs):
            each, losses, compared = [], [], batch.targets != IGNORE
            targets = self._targets(batch, compared)
            for places, logits in outputs(batch):
                now = torch.log_softmax(logits, dim=-1)
                losses.append(losses_of(now, targets[:, places]))
                if first:
                    self._keep((j, places.start), now)
                    each.append(logits.new_zeros(logits.shape[:2]))
                else:
                    clean = cast(Store, self._clean).get((j, places.start))
                    each.append(now.neg_().add_(clean).mul_(clean.exp()).sum(-1))  # in place: each of these has ``HEAD`` bytes
            nats, lost, predicted = torch.cat(each, 1), torch.cat(losses, 1)[:, :-1], targets != IGNORE
            columns = (nats * compared).double().sum(1), compared.sum(1), lost.double().sum(1), predicted.sum(1)
            out.append(torch.stack([c.double() for c in columns], 1).cpu().numpy())
            tick()
        return process_group().collect(np.concatenate(out), self.samples, self.run)

    def _keep(self, key: Any, clean: torch.Tensor) -> None:
        """Keep log-probabilities: in memory where those of the whole text are small, else in temporary files."""
        if self._clean is None:
            need = sum(b.targets.numel() for b in self.runs) * clean.shape[-1] * clean.element_size()
            if need > _KEPT:
                check_space({tempfile.gettempdir(): need})
            self._clean = Store("disk" if need > _KEPT else "device")
            weakref.finalize(self, self._clean.close)
        self._clean.put(key, clean)

    def _targets(self, batch: Batch, compared: torch.Tensor) -> torch.Tensor:
        """The token that every position predicts, ``(B, T)``; -100 for none."""
        mask = batch.kwargs.get("attention_mask", torch.ones_like(batch.kwargs["input_ids"])).bool()
        targets = next_tokens(batch.kwargs["input_ids"], mask)
        if self.labelled:
            targets = targets.masked_fill(~compared[:, :-1], IGNORE)
        return nn.functional.pad(targets, (0, 1), value=IGNORE)

    def rows_of(
        self,
        model: nn.Module,
        formats: Mapping[str, str],
        data: CalibrationSet | None = None,
        method: str = "rtn",
        **options: Any,
    ) -> np.ndarray:
        """See :meth:`rows`, of the dense model with some matrices in formats; it is afterwards as it was.

        Options are those of the method.
        """
        return self.rows_within(model, formats, [contextlib.nullcontext], data, method, **options)[0]

    def rows_as_quantised(self, model: nn.Module, formats: Mapping[str, str], data: CalibrationSet) -> np.ndarray:
        """See :meth:`rows_of`, of what ``llama-quantize`` makes with an importance matrix of a text.

        That is of the dense model's inputs. They come with those of the head where other plans were rounded with :attr:`heard`,
        else from a forward of their own.
        """
        key = next((k for k, shared in self._shared.items() if k[2] == data.digest and shared.importances), None)
        found = {} if key is None else self._shared[key].importances
        if not found:
            size = process_group().batch(data.samples, self.batch_size)
            statistics = InputStatistics(model, list(modules_by_name(model, formats).values()), "diagonal")
            walk = Walk(model, shard(data, size), batch_size=size)
            with inference(model), contextlib.closing(walk):
                InputStatistics.of_model(walk, [statistics])
            found = statistics.found
        return self.rows_of(model, formats, None, "weighted", importances=found)

    def rows_within(
        self,
        model: nn.Module,
        formats: Mapping[str, str],
        contexts: Sequence[_Context],
        data: CalibrationSet | None = None,
        method: str = "rtn",
        **options: Any,
    ) -> list[np.ndarray]:
        """See :meth:`rows_of`; the matrices are rounded once, and the text is run within each of some contexts.

        The text goes through every layer of a streamed model when that is rounded, so that no more than one layer is held.
        """
        if "importances" not in options:
            key = method, repr(options), None if data is None else data.digest
            options["shared"] = self._shared.setdefault(key, Shared(heard=self.heard))
        options |= {"method": method, "batch_size": self.batch_size, "progress": self.progress}
        give_back()
        if mapped(model) is not None:
            return self._streamed(model, formats, contexts, data, options)
        originals = Originals(model, [Block(name="all", modules=tuple(modules_by_name(model, formats).values()))])
        rows = []
        try:
            round_matrices(model, formats, data, **options)
            for each in contexts:
                with each():
                    rows.append(self.rows(model))
        finally:
            originals.restore()
        return rows

    def _streamed(
        self,
        model: nn.Module,
        formats: Mapping[str, str],
        contexts: Sequence[_Context],
        data: CalibrationSet | None,
        options: Mapping[str, Any],
    ) -> list[np.ndarray]:
        """See :meth:`rows_within`."""
        replay, rows = Replay(model), list[np.ndarray]()
        count = len(replay.layers)

        def follow(index: int) -> None:
            """Take the text through what was rounded."""
            if index < 0:
                replay.probe(self.runs[0].kwargs)
            for (c, context), (j, batch) in itertools.product(enumerate(contexts), enumerate(self.runs)):
                with context():
                    if index < 0:
                        states.put((c, j), replay.first_inputs(batch.kwargs))
                        continue
                    with replay.begin(index, states.get((c, j))), replay.end(index):
                        states.put((c, j), replay.run(batch.kwargs))
            for c in range(len(contexts)) if index == count - 1 else ():
                places = {id(batch): (c, j) for j, batch in enumerate(self.runs)}
                rows.append(self._rows(lambda batch, at=places: self.outputs.behind(replay, batch, states.get(at[id(batch)]))))  # type: ignore[misc]

        with inference(model), contextlib.closing(Store(room_for(model, self.runs, len(contexts)))) as states:
            round_matrices(model, formats, data, follow=follow, **options)
        return rows
