r"""A model whose units are masked, not cut, so that they may come back; and what any change of a layer would do there.

Removing units of a part is, as far as the output goes, a change of one matrix, the one that reads them: the columns that belong
to them become zero and those that stay are made again (:mod:`layerbudget.decisions.shapes.compensation`),

    T(u) = V on S,   0 elsewhere.

A layer that goes gives nothing to the stream: both such matrices, and their biases, become zero. Zeros of what remains change
the other matrices too. All changes of one layer belong together: their derivatives are summed over its matrices before they are
squared, so that the Fisher form has what heads and MLP of a layer do to each other
(:mod:`layerbudget.sensitivity.directional.directional`).

Every sequence is judged by a refit that has not seen it: for each fold of the text the model is moved with the second moments
of the other folds, and the terms and the divergence of the folds are averaged. On its own text a refit looks better than it is,
and the wrong parts then seem cheap. It costs no more passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.treating import matrices
from ...compressors.wanda import Wanda
from ...data.calibration import CalibrationSet
from ...execution.inputs import InputMoments, InputStatistics
from ...execution.loss import Batch
from ...execution.sites import Site
from ...models.blocks import matrix_of, partition, weight_of
from ...sensitivity.directional.directional import forms_along
from ...sensitivity.directional.directions import Directions, Written
from ...sensitivity.directional.originals import Originals
from ...sensitivity.directional.point import Reference
from ...sensitivity.directional.sums import Candidates, QuadraticTerms
from .attention import Attention, channels
from .compensation import REMAKES
from .heads import choose_heads
from .mlp import Mlp
from .parts import Part
from .removable import where_is
from .search import folds_of
from .shape_steps import GONE, ShapeSpace
from .width import damped, refitted, removal_order

_NOTHING = (-1, 0)  # of a layer that goes
Grams = dict[str, InputMoments]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """Derivatives at a point, with the divergence there, and the second moments of the inputs there, for every fold."""

    forms: QuadraticTerms
    grams: list[Grams]

    @property
    def divergence(self) -> float:
        """From the dense model, nats per token."""
        return self.forms.divergence


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A matrix of side ``side`` of layer k; the one that reads the units, or one that makes them."""

    layer: int
    side: int
    part: Part
    where: Attention | Mlp
    reads: bool


class Indexed(Directions):
    """Few changes, many alternatives: alternative j makes change ``index[j]``."""

    def __init__(self, deltas: list[torch.Tensor], index: np.ndarray) -> None:
        self.written, self.index = Written(deltas), torch.from_numpy(index)
        self.groups, self.levels = 1, len(index)

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        found = self.written.along(gradient)
        return found[..., self.index.to(found.device)]


class ShapePoint:
    """The model on its way through states of a :class:`~layerbudget.decisions.shapes.shape_steps.ShapeSpace`.

    Args:
        model: The dense model; :meth:`restore` brings it back.
        data: Calibration tokens.
        space: What every layer may lose.
        compensate: ``none``; else columns are refitted.
        damping: Relative to the mean of the second moments' diagonal.
        size: Sequences per forward.

    Attributes:
        passes: Forward equivalents so far: forward 1, backward 2.
        dense: Second moments of the dense model's inputs, for every fold those of the other folds.
        references: The dense model's output on every fold.
    """

    def __init__(
        self, model: nn.Module, data: CalibrationSet, space: ShapeSpace, compensate: str, damping: float, size: int
    ) -> None:
        self.model, self.space, self.damping, self.size = model, space, damping, size
        self.remake = REMAKES.get(compensate, refitted)
        self.matrices = {name: m for k in range(len(space.layers)) for name, m in self._of(k)}
        known = {b.name: b for b in partition(model, "linear")}
        blocks = [known[name] for name in self.matrices]
        self.held = Originals(model, blocks)
        self.biases = self._biases() if space.depth else {}
        self.references: list[Reference] = []
        found: list[Grams] = []
        for _, fold in folds_of(data):
            listen = InputStatistics(model, [m for b in blocks for m in b.modules], "gram")
            self.references.append(Reference(model, fold, size, listen))
            found.append({name: listen.found[name][0] for name in self.matrices})
        self.dense = _others(found)
        self.passes = 1.0

    def _of(self, k: int) -> list[tuple[str, _Matrix]]:
        found = []
        for side, part in enumerate(self.space.pair[k]):
            if part is None:
                continue
            where = where_is(self.model.get_submodule(part.layer), part)
            names = [*where.producers, where.consumer] if len(self.space.zeros.shares) > 1 else [where.consumer]
            found += [(n, _Matrix(layer=k, side=side, part=part, where=where, reads=n == where.consumer)) for n in names]
        return found

    def _biases(self) -> dict[str, torch.Tensor]:
        owners: dict[str, Any] = {n: self.model.get_submodule(n) for n, m in self.matrices.items() if m.reads}
        return {n: o.bias.detach().clone() for n, o in owners.items() if o.bias is not None}

    def restore(self) -> None:
        """Put the dense weights back."""
        self.held.restore()
        for name, bias in self.biases.items():
            self._bias(name).copy_(bias)

    def _bias(self, name: str) -> torch.Tensor:
        owner: Any = self.model.get_submodule(name)
        return cast(torch.Tensor, owner.bias.data)

    def _dense(self, name: str) -> torch.Tensor:
        owner = self.model.get_submodule(name)
        return matrices(owner, nn.Parameter(self.held.held[name], requires_grad=False))[0]

    @torch.no_grad()
    def become(self, name: str, gram: InputMoments, wanted: list[tuple[int, int]]) -> list[torch.Tensor]:
        """A matrix when so many units are gone and what remains has zeros of a level; ``(-1, 0)``: when the layer is gone."""
        m, dense = self.matrices[name], self._dense(name).double()
        h = damped(torch.as_tensor(gram.value), self.damping)
        kept = self._kept(m, dense, h, sorted({u for u, _ in wanted if u > 0})) if m.reads else {}
        dtype = matrix_of(self.model.get_submodule(name)).dtype
        made = []
        for units, level in wanted:
            weight = torch.zeros_like(dense) if (units, level) == _NOTHING else dense.clone()
            if units > 0 and m.reads:
                keep = kept[units]
                weight.zero_()[:, keep] = self._sparse(self.remake(dense, h, keep), h.diagonal()[keep], level)
            elif level:
                weight = self._sparse(weight, h.diagonal(), level)
            made.append(weight.to(dtype))
        return made

    def _kept(self, m: _Matrix, dense: torch.Tensor, h: torch.Tensor, units: list[int]) -> dict[int, torch.Tensor]:
        """Columns that stay, by the number of units that go."""
        if isinstance(m.where, Attention):
            heads = {u: choose_heads(dense, h, m.where, u, by=m.part.by) for u in units}
            return {u: channels(keep, m.where.head_dim) for u, keep in heads.items()}
        each, found = int(m.part.by.split()[0]), dict[int, torch.Tensor]()
        order = removal_order(dense, h, max(units, default=0) * each)
        for u in units:
            alive = torch.ones(len(h), dtype=torch.bool, device=h.device)
            alive[order[: u * each]] = False
            found[u] = torch.nonzero(alive).flatten()
        return found

    def _sparse(self, weight: torch.Tensor, moment: torch.Tensor, level: int) -> torch.Tensor:
        zeros = self.space.zeros
        if not level:
            return weight
        count = int(zeros.shares[level] * weight.numel())
        return Wanda().apply(weight, moment, Level(zeros=count, pattern=zeros.pattern))

    def _wanted(self, name: str, row: list[int]) -> tuple[int, int]:
        m = self.matrices[name]
        if row[GONE]:
            return _NOTHING if m.reads else (0, 0)
        return (row[m.side] if m.reads else 0, row[2 + m.side])

    @torch.no_grad()
    def move(self, state: np.ndarray, grams: Grams) -> None:
        """Go to a state, from the dense weights."""
        self.restore()
        for name, m in self.matrices.items():
            wanted = self._wanted(name, state[m.layer].tolist())
            if wanted != (0, 0):
                matrices(*weight_of(self.model, name))[0].copy_(self.become(name, grams[name], [wanted])[0])
            if wanted == _NOTHING and name in self.biases:
                self._bias(name).zero_()

    def look(self, state: np.ndarray, alternatives: np.ndarray, grams: Sequence[Grams], *, draws: int, seed: int) -> Seen:
        """Go to a state, and see both terms along the way to every alternative; at the dense model the first one vanishes.

        Args:
            state: ``(K, 5)``.
            alternatives: ``(K, A, 5)``.
            grams: Moments with which the model is moved there, for every fold.
            draws: Draws of labels.
            seed: Of the draws.
        """
        found, gathered = list[QuadraticTerms](), list[Grams]()
        for reference, moments in zip(self.references, grams, strict=True):
            self.move(state, moments)
            forms, seen = self._look(reference, alternatives, moments, draws, seed, dense=not state.any())
            found.append(forms)
            gathered.append(seen)
        self.passes += found[0].passes
        return Seen(forms=_mean(found), grams=_others(gathered))

    def _look(
        self, reference: Reference, alternatives: np.ndarray, grams: Grams, draws: int, seed: int, *, dense: bool
    ) -> tuple[QuadraticTerms, Grams]:
        gathered: Grams = {}

        def make(name: str) -> Directions:
            rows = [self._wanted(name, row) for row in alternatives[self.matrices[name].layer].tolist()]
            distinct = list(dict.fromkeys(rows))
            present = matrices(*weight_of(self.model, name))[0].detach()
            deltas = [w - present for w in self.become(name, grams[name], distinct)]
            return Indexed(deltas, np.array([distinct.index(row) for row in rows]))

        def listen(site: Site, batch: Batch) -> None:
            mask, x = batch.kwargs.get("attention_mask"), site.a
            rows = x.flatten(0, 1) if mask is None or mask.shape != x.shape[:2] else x[mask.bool()]
            shared = gathered.get(site.names[0]) or InputMoments("gram")
            for name in site.names:
                gathered.setdefault(name, shared)
            shared.add(rows)

        forms = forms_along(
            self.model, reference.data,
            Candidates({n: m.layer for n, m in self.matrices.items()}, make, *alternatives.shape[:2]),
            clean=None if dense else reference.clean, draws=draws, seed=seed, batch_size=self.size, listen=listen,
        )  # fmt: skip
        return forms, gathered

    def measure(self, state: np.ndarray, grams: Sequence[Grams]) -> float:
        """Divergence at a state alone, every sequence by a refit that has not seen it; nats per token."""
        total = 0.0
        for reference, moments in zip(self.references, grams, strict=True):
            self.move(state, moments)
            total += reference.measure() * reference.data.samples
        self.passes += 1.0
        return total / sum(r.data.samples for r in self.references)


def _others(found: Sequence[Grams]) -> list[Grams]:
    """For every fold the sum over the others; its own where there is one only."""
    if len(found) == 1:
        return list(found)
    out = []
    for mine in range(len(found)):
        sums: dict[int, InputMoments] = {}
        made: Grams = {}
        for name, first in found[mine].items():  # matrices of one input share theirs
            if id(first) not in sums:
                rest = [torch.as_tensor(g[name].value) for i, g in enumerate(found) if i != mine]
                sums[id(first)] = InputMoments("gram", value=torch.stack(rest).sum(0))
            made[name] = sums[id(first)]
        out.append(made)
    return out


def _mean(found: Sequence[QuadraticTerms]) -> QuadraticTerms:
    """Over the tokens of all folds."""
    tokens = sum(f.tokens for f in found)
    share = [f.tokens / tokens for f in found]
    mean = {n: sum(w * getattr(f, n) for w, f in zip(share, found, strict=True)) for n in ("first", "second", "divergence")}
    error = np.sqrt(sum((w * f.error) ** 2 for w, f in zip(share, found, strict=True)))
    return dataclasses.replace(found[0], **mean, error=error, tokens=tokens)
