r"""A model whose units are masked, not cut, so that they may come back; and what any change of a layer would do there.

Removing units of a part is, as far as the output goes, a change of one matrix, the one that reads them: the columns that belong
to them become zero and those that stay are made again (:mod:`layerbudget.decisions.shapes.compensation`),

    T(u) = V on S,   0 elsewhere.

A layer that goes gives nothing to the stream: both such matrices, and their biases, become zero. Derivatives are summed over
the two matrices of a layer before they are squared, so that the Fisher form has what heads and MLP do to each other
(:mod:`layerbudget.sensitivity.directional.terms`).

Every sequence is judged by a refit that has not seen it: for each fold of the text the model is moved with the second moments
of the other folds, and the terms and the divergence of the folds are averaged. On its own text a refit looks better than it is,
and the wrong parts then seem cheap. It costs no more passes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...execution.divergence import Reference
from ...execution.inputs import InputMoments, InputStatistics, moments_of_sites, share_statistics
from ...execution.loss import assign_folds, count_scored_tokens
from ...execution.modes import inference
from ...execution.panels import panels
from ...execution.processes import Teams, among, process_group
from ...models.blocks import is_conv1d, matrix_of, partition
from ...models.machine import zeros_in_file
from ...progress import Progress
from ...sensitivity.directional.directions import Directions, Written
from ...sensitivity.directional.terms import QuadraticTerms, quadratic_terms
from ...sensitivity.directional.trials import Originals
from ...storage.writing import check_space
from .layouts import Where
from .program import GONE, PrunablePart, ShapeSpace
from .units import damped, refitted, stays, where_is

PARTS = "parts of the text"  # of which every team of processes has some
_FOLDS = 4
_IN_MEMORY = 1 << 28  # bytes of the moments of one state, at most
_NOTHING = -1  # units of a layer that goes
Grams = dict[str, InputMoments]


class LazyMoments:
    """Second moments of the inputs at a state, for folds of this process those of the others; made when they are asked for."""

    def __init__(self, make: Callable[[], dict[int, Grams]]) -> None:
        self._make: Callable[[], dict[int, Grams]] | None = make
        self._found = dict[int, Grams]()

    def __call__(self) -> dict[int, Grams]:
        """Return them."""
        if self._make is not None:
            self._found, self._make = self._make(), None  # what they were made from is needed no more
        return self._found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShapeEvaluation:
    """Measurements at a state."""

    state: np.ndarray  # (K, 3)
    around: np.ndarray  # alternatives, (K, A, 3)
    forms: QuadraticTerms  # derivatives along the way to them, with the divergence at the state
    moments: LazyMoments  # of the inputs at the state

    @property
    def divergence(self) -> float:
        """Divergence from the dense model, nats per token."""
        return self.forms.divergence


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Matrix:
    """The matrix that reads the units of side ``side`` of layer k."""

    layer: int
    side: int
    part: PrunablePart
    where: Where


class _Indexed(Directions):
    """Few changes, many alternatives: alternative j makes change ``index[j]``."""

    def __init__(self, deltas: list[torch.Tensor], index: np.ndarray) -> None:
        self.written, self.index = Written(deltas), torch.from_numpy(index)
        self.groups, self.levels = 1, len(index)

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        products = self.written.along(gradient)
        return products[..., self.index.to(products.device)]


class ShapePoint:
    """The model on its way through states of a :class:`~layerbudget.decisions.shapes.program.ShapeSpace`.

    ``passes`` are forward equivalents so far (forward 1, backward 2). Several processes share the folds (``teams``): a process
    has the dense model's output on its own ones, ``references``, and for each of them the second moments of the dense model's
    inputs on the other folds, ``dense``.
    """

    def __init__(self, model: nn.Module, data: CalibrationSet, space: ShapeSpace, damping: float, batch_size: int) -> None:
        self.model, self.space, self.damping, self.batch_size = model, space, damping, batch_size
        self.matrices: dict[str, _Matrix] = {}
        for k, pair in enumerate(space.pair):
            for side, part in enumerate(pair):
                if part is not None:
                    where = where_is(model, part)
                    self.matrices[where.consumer] = _Matrix(layer=k, side=side, part=part, where=where)
        known = {b.name: b for b in partition(model, "linear")}
        blocks = [known[name] for name in self.matrices]
        self.originals = Originals(model, blocks)
        owners: dict[str, Any] = {n: model.get_submodule(n) for n in self.matrices if space.depth}
        self.biases = {n: (o.bias, o.bias.detach().clone()) for n, o in owners.items() if o.bias is not None}
        folds = folds_of(model, data)
        self.teams = Teams.of([fold.samples for fold in folds], PARTS)
        self.folder = _gram_folder(model, [m.d_in for b in blocks for m in b.modules], len(self.teams.mine))
        self.folds, self.references = len(folds), dict[int, Reference]()
        grams = dict[int, Grams]()
        with among(self.teams.team):
            for fold in self.teams.mine:
                listen = InputStatistics(model, [m for b in blocks for m in b.modules], "gram", folder=self.folder)
                self.references[fold] = Reference(model, folds[fold], batch_size, listen, len(self.teams.mine) - 1)
                grams[fold] = {name: listen.found[name][0] for name in self.matrices}
        self.dense = self._others(grams)
        self.passes = 1.0

    def restore(self) -> None:
        """Put the dense weights back."""
        self.originals.restore()
        for bias, original in self.biases.values():
            bias.data.copy_(original)

    @torch.no_grad()
    def become(self, name: str, gram: InputMoments, wanted: Sequence[int]) -> list[torch.Tensor]:
        """A matrix when so many units are gone; -1: when its layer is."""
        m, module = self.matrices[name], self.model.get_submodule(name)
        dense = (self.originals.held[name].T if is_conv1d(module) else self.originals.held[name]).double()
        h = damped(torch.as_tensor(gram.value), self.damping)
        gram.rest()
        units = sorted({u for u in wanted if u > 0})
        keep = {u: m.where.columns(k) for u, k in stays(m.where, dense, h, units, m.part.by).items()} if units else {}
        made = []
        for gone in wanted:
            weight = torch.zeros_like(dense) if gone else dense.clone()
            if gone in keep:
                weight[:, keep[gone]] = refitted(dense, h, keep[gone])
            made.append(weight.to(self.originals.held[name].dtype))
        return made

    def _wanted(self, name: str, row: list[int]) -> int:
        return _NOTHING if row[GONE] else row[self.matrices[name].side]

    @torch.no_grad()
    def move(self, state: np.ndarray, grams: Grams) -> None:
        """Go to a state, from the dense weights."""
        self.restore()
        for name, m in self.matrices.items():
            wanted = self._wanted(name, state[m.layer].tolist())
            if wanted:
                matrix_of(self.model.get_submodule(name)).copy_(self.become(name, grams[name], [wanted])[0])
            if wanted == _NOTHING and name in self.biases:
                self.biases[name][0].data.zero_()

    def evaluate(
        self,
        state: np.ndarray,
        alternatives: np.ndarray,
        grams: Mapping[int, Grams],
        *,
        draws: int,
        seed: int,
        spent: Callable[[float], None] = lambda passes: None,
    ) -> ShapeEvaluation:
        """Go to a state, by moments for every fold, and measure both terms along the way to every alternative.

        At the dense model the first one vanishes.

        Args:
            state: What every layer keeps, ``(K, 3)``.
            alternatives: What every layer may keep instead, ``(K, A, 3)``.
            grams: Moments that refit the matrices, for every fold of this process.
            draws: Draws of labels.
            seed: Of the draws.
            spent: Called with the forward equivalents so far, after every batch.
        """
        terms, gathered, before = dict[int, QuadraticTerms](), dict[int, Grams](), self.passes
        for number, (fold, reference) in enumerate(self.references.items()):
            self.move(state, grams[fold])

            def within(done: int, total: int, number: int = number) -> None:
                """A share of this fold's text was run forwards and backwards."""
                share = (number + done / max(total, 1)) / len(self.references)
                spent(before + share * (1.0 + 2.0 * (draws + bool(state.any()))))

            with among(self.teams.team):
                terms[fold], gathered[fold] = self._evaluate(
                    reference, alternatives, grams[fold], draws, seed, within, dense=not state.any()
                )
        every = self.teams.spread(terms)
        self.passes += every[0].passes
        later = self._others(gathered)
        return ShapeEvaluation(state=state, around=alternatives, forms=_mean(every), moments=LazyMoments(lambda: later))

    def measure(self, state: np.ndarray, grams: Mapping[int, Grams]) -> QuadraticTerms:
        """Go to a state and measure the divergence there alone, in one forward that is not counted here: terms of no change."""
        nats = dict[int, QuadraticTerms]()
        for fold, reference in self.references.items():
            self.move(state, grams[fold])
            with among(self.teams.team):
                total, tokens = process_group().sum(np.array([each.sum() for each in reference.measure_sequences()]))
            zero = np.zeros((len(state), 1))
            nats[fold] = QuadraticTerms(
                first=zero, second=zero, rest=zero[..., None], tokens=round(tokens), passes=1.0, divergence=total / tokens
            )
        return _mean(self.teams.spread(nats))

    def look(self, state: np.ndarray, grams: Mapping[int, Grams]) -> dict[int, Grams]:
        """Second moments at a state that was measured, by one forward: those of its :class:`ShapeEvaluation`, to the bit."""
        known, gathered = {b.name: b for b in partition(self.model, "linear")}, dict[int, Grams]()
        for fold, reference in self.references.items():
            self.move(state, grams[fold])
            modules = [m for name in self.matrices for m in known[name].modules]
            listen = InputStatistics(self.model, modules, "gram", folder=self.folder)
            with among(self.teams.team), inference(self.model):
                listen.finals(reference.walk)
            gathered[fold] = {name: listen.found[name][0] for name in self.matrices}
        return self._others(gathered)

    def _others(self, grams: Mapping[int, Grams]) -> dict[int, Grams]:
        """For every fold of this process the sum over the others; its own where there is one only."""
        if self.folds == 1:
            return dict(grams)
        others = {fold: Grams() for fold in grams}
        for name in self.matrices:
            mine = {fold: torch.as_tensor(made.pop(name).value) for fold, made in grams.items()}
            values = self.teams.squares(mine)
            for fold, made in others.items():
                made[name] = self._sum([v for k, v in enumerate(values) if k != fold])
                made[name].rest()
        return others

    def _sum(self, values: Sequence[torch.Tensor]) -> InputMoments:
        """Moments of several folds together, panel by panel."""
        like, folder = values[0], self.folder
        total = torch.zeros_like(like) if folder is None else zeros_in_file(like.shape, folder, like.dtype)
        for panel, *each in zip(panels(total), *(panels(value) for value in values), strict=True):
            panel.copy_(torch.stack(each).sum(0))
        return InputMoments("gram", value=total, folder=folder)

    def _evaluate(
        self,
        reference: Reference,
        alternatives: np.ndarray,
        grams: Grams,
        draws: int,
        seed: int,
        progress: Progress | None,
        *,
        dense: bool,
    ) -> tuple[QuadraticTerms, Grams]:
        gathered: dict[str, list[InputMoments]] = {}

        def make(name: str) -> Directions:
            rows = [self._wanted(name, row) for row in alternatives[self.matrices[name].layer].tolist()]
            distinct = list(dict.fromkeys(rows))
            present = matrix_of(self.model.get_submodule(name)).detach()
            deltas = [w - present for w in self.become(name, grams[name], distinct)]
            return _Indexed(deltas, np.array([distinct.index(row) for row in rows]))

        forms = quadratic_terms(
            self.model,
            reference.data,
            {n: m.layer for n, m in self.matrices.items()},
            make,
            (alternatives.shape[0], alternatives.shape[1]),
            clean=None if dense else reference.clean,
            draws=draws,
            seed=seed,
            batch_size=self.batch_size,
            progress=progress,
            listen=moments_of_sites(gathered, "gram", self.folder),
        )
        share_statistics(gathered)
        return forms, {name: moments[0] for name, moments in gathered.items()}


def _gram_folder(model: nn.Module, widths: Sequence[int], folds: int) -> Path | None:
    """Where second moments of inputs of so many widths lie: in files where those of some states would fill the memory.

    Held are those of ``folds`` of the dense model, twice where two units of heads are looked at, of the present state, of the
    one that is tried, and those that are being summed.
    """
    need = 4.0 * sum(width**2 for width in widths)
    if next(model.parameters()).device.type != "cpu" or folds * need < _IN_MEMORY:
        return None
    folder = Path(tempfile.gettempdir())
    check_space({folder: (5 * folds + 2) * need})
    return folder


def folds_of(model: nn.Module, data: CalibrationSet) -> list[CalibrationSet]:
    """The folds of a text, dealt in turn; one where too few sequences have answers."""
    counts = count_scored_tokens(model, data)
    dealt = assign_folds(counts, _FOLDS if (counts > 0).sum() >= _FOLDS else 1)
    return [data.select(np.flatnonzero(dealt == k).tolist()) for k in range(dealt.max() + 1)]


def _mean(terms: Sequence[QuadraticTerms]) -> QuadraticTerms:
    """Over the tokens of all folds."""
    tokens = sum(f.tokens for f in terms)
    share = [f.tokens / tokens for f in terms]
    mean = {n: sum(w * getattr(f, n) for w, f in zip(share, terms, strict=True)) for n in ("first", "second", "divergence")}
    rest = np.concatenate([w * f.rest for w, f in zip(share, terms, strict=True)], axis=-1)
    return dataclasses.replace(terms[0], **mean, rest=rest, tokens=tokens)
