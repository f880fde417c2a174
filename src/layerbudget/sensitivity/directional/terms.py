r"""Directional damage: what the output loses when weights move along the change that a treatment really makes.

``D(theta)`` is the mean over tokens of ``KL(p_0 || p_theta)``, ``p_0`` the dense model's distribution. Treating the matrices of
a unit (a matrix, a layer, a group of rows) changes ``theta`` by ``Delta``; to second order, with the curvature of D taken as
its generalised Gauss-Newton form,

    D(theta + Delta) - D(theta)  ~  <dD/dtheta, Delta> + 1/2 (1/N) sum_s E_y [ ( sum_{t in s} b_st(y)' Delta a_st )^2 ],

with inputs ``a`` and output gradients ``b`` of the matrix, sequences s, tokens t, N tokens in all, and labels ``y`` drawn from
``p_theta`` itself. The Hessian of a KL divergence with respect to the logits of its second argument is ``diag(p) - pp'``
whatever the first argument is, and that is the covariance of the gradient of ``-log p(y)``; scores of different tokens are
uncorrelated, so the squared *sum* over a sequence has the exact Gauss-Newton form as its mean. It is a number per direction: no
factor, no assumption of independence, and nothing of size ``d^2`` kept. Dropped are the second derivatives of the network
itself, which do not count at the dense point, and products between units, which the gradient at the next point brings in.

A forward costs one pass, a backward two: ``3 + 2 draws`` with the first term, ``1 + 2 draws`` without (:doc:`/theory`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...errors import InvalidInput, LengthMismatch, UnknownBlock
from ...execution.backward import Accumulator, Loss, SampledLoss, feed
from ...execution.draws import Drawn
from ...execution.kept import KeptLayers
from ...execution.loss import IGNORE, Batch, Data, unlabelled
from ...execution.processes import process_group, shard
from ...execution.sites import Site, tracked
from ...models.blocks import end_modules, layer_lists, partition
from ...models.machine import give_back
from ...progress import Progress, Steps
from ...records import Block
from ..sequences import deviations
from .directions import Directions
from .drawn import DrawnLabels

Clean = Callable[[int, slice], torch.Tensor]
Listen = Callable[[Site, Batch], None]
_SWEEPS = 50


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuadraticTerms:
    """Predicted damage of every unit at every level, in nats per token; zero for no change.

    Attributes:
        first: ``<dD/dtheta, Delta>``, shape ``(units, levels)``; zero at the dense point.
        second: Half the Fisher form, the same shape.
        tokens: N.
        passes: Forward equivalents spent: forward 1, backward 2.
        rest: What every sequence adds to ``second`` beside its share, ``(units, levels, sequences)``: the norm of a sum of
            units is its standard error, draws included. No sequences without draws.
        divergence: D at the present point, in nats per token; zero at the dense one.
    """

    first: np.ndarray
    second: np.ndarray
    rest: np.ndarray
    tokens: int
    passes: float
    divergence: float = 0.0

    @property
    def total(self) -> np.ndarray:
        """Both terms, ``(units, levels)``."""
        return self.first + self.second

    @property
    def error(self) -> np.ndarray:
        """Standard error of ``second`` over sequences, ``(units, levels)``."""
        return np.linalg.norm(self.rest, axis=-1)


class Watch:
    """View of a run for the makers of directions: one layer's matrices after the other, or all of them at once."""

    def start(self, names: Sequence[str]) -> None:
        """These matrices are about to come."""

    def watching(self, batch: Batch) -> AbstractContextManager[Any] | None:
        """See :meth:`Accumulator.watching`."""
        return None

    @property
    def ahead(self) -> bool:
        """Whether directions can be made once all of a layer's inputs were watched, before there is a graph beside them."""
        return False

    def by_labels(self, name: str) -> bool:
        """Whether the damage of a head comes from the rows of the labels that were drawn: see :class:`DrawnLabels`."""
        return False

    def of_labels(self, name: str, rows: torch.Tensor) -> Directions:
        """The changes of some rows of such a head, which are asked for by their places in the whole matrix."""
        raise NotImplementedError

    def settle(self, names: Sequence[str]) -> None:
        """All gradients of these matrices have been there."""

    def record(self, names: Sequence[str]) -> Any:
        """See :meth:`Accumulator.record`."""

    def restore(self, names: Sequence[str], recorded: Any) -> None:
        """See :meth:`Accumulator.restore`."""


class DirectionalSums(Accumulator):
    """Derivatives along directions, added up batch by batch from the inputs and output gradients of every matrix.

    The first ``gradients`` losses (0 or 1) are divergences, whose gradient is the first term. The others are draws of labels:
    their derivatives are squared, sequence by sequence. ``places`` says which of all ``sequences`` this process has,
    ``ends`` which matrices are embedding and head: a tied one has both damages, as if they were of two matrices.
    """

    def __init__(
        self,
        units: Mapping[str, int],
        directions: Callable[[str], Directions],
        shape: tuple[int, int],
        losses: Sequence[Loss],
        *,
        gradients: int,
        listen: Listen | None,
        places: Sequence[int],
        sequences: int,
        ends: Collection[str] = (),
        watch: Watch | None = None,
    ) -> None:
        self.ends, self.watch = ends, watch or Watch()
        self.units, self.make, self.losses, self.gradients = units, directions, losses, gradients
        self.listen, self.places = listen, places
        self.by_position = not gradients  # squares of single tokens add up
        self.sums = np.zeros((2, *shape))  # first derivatives, squares of draws
        self.rows = np.zeros((sequences, *shape))
        self._directions: dict[str, Directions] = {}
        self._along: dict[int, torch.Tensor] = {}  # (B, groups, levels) by first unit: calls and matrices of one unit add up
        self._draws: list[dict[int, torch.Tensor]] = []
        self._squares: dict[int, torch.Tensor] = {}
        self._drawn: dict[str, DrawnLabels] = {}
        self._batch: Batch | None = None
        self._loss = 0

    def start(self, names: Sequence[str]) -> None:
        """See :meth:`Accumulator.start`."""
        self.watch.start(names)

    def watching(self, batch: Batch) -> AbstractContextManager[Any] | None:
        """See :meth:`Accumulator.watching`."""
        return self.watch.watching(batch)

    def looked(self, names: Sequence[str]) -> None:
        """See :meth:`Accumulator.looked`."""
        if self.watch.ahead:
            for name in names:
                if name in self.units and name not in self.ends:
                    self._of(name)
            give_back()

    def begin(self, batch: Batch, loss: int) -> None:
        """See :meth:`Accumulator.begin`."""
        self._batch, self._loss = batch, loss

    def update(self, site: Site) -> None:
        """See :meth:`Accumulator.update`."""
        a = site.a
        for name, b in site.b.items():
            if name not in self.units:
                continue
            if a.is_floating_point() and name in self.ends and self.watch.by_labels(name):
                self._draw(name, a, b)
                continue
            directions = self._of(name)
            if not a.is_floating_point():
                self._add(name, directions.looked_up(a[..., 0], b))
            elif name in self.ends:  # the labels of tokens are drawn apart, so the sum of squares has the same mean
                self._squares[self.units[name]] = directions.by_token(a, b).double().square().sum(1)[:, None]
            elif self._loss < self.gradients:
                self._add(name, directions.along((b.flatten(0, 1).T @ a.flatten(0, 1))[None]))
            else:
                self._add(name, directions.between(a, b))
        if self.listen is not None and self._loss == 0 and self._batch is not None:
            self.listen(site, self._batch)

    def takes_labels(self, name: str) -> bool:
        """See :meth:`Accumulator.takes_labels`."""
        return name not in self.units or (name in self.ends and self.watch.by_labels(name))

    def labelled(self, name: str, batch: Batch, drawn: Drawn) -> None:
        """See :meth:`Accumulator.labelled`."""
        if name in self.units:
            self._drawn.setdefault(name, DrawnLabels()).keep(drawn.a, drawn.labels, drawn.scales, self.places[batch.rows])
        if self.listen is not None:
            self.listen(Site(a=drawn.a, source=drawn.a, names=[name], b={}), batch)

    def _draw(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Keep the inputs and labels of a head of many rows."""
        sequences = self.places[cast(Batch, self._batch).rows]
        self._drawn.setdefault(name, DrawnLabels()).add(a, b, sequences, last=self._loss == len(self.losses) - 1)

    def _add_drawn(self, name: str) -> None:
        """Add the damages of such a head, whose labels are complete."""
        sequences, squares = self._drawn.pop(name).squares(lambda rows: self.watch.of_labels(name, rows))
        if len(squares):
            self.sums[1, self.units[name]] += squares.sum(0).numpy()
            np.add.at(self.rows[:, self.units[name]], sequences.numpy(), squares.numpy())

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """See :meth:`Accumulator.direct`: experts below each other, one sequence per batch."""
        self._add(name, self._of(name).along(gradient.flatten(0, 1)[None]))

    def _of(self, name: str) -> Directions:
        if name not in self._directions:
            made = self._directions[name] = self.make(name)
            if made.levels != self.sums.shape[2]:
                raise LengthMismatch(
                    f"{name} has {made.levels} candidates.",
                    f"Every matrix needs {self.sums.shape[2]}.",
                    "Repeat a candidate where one has less.",
                )
        return self._directions[name]

    def _add(self, name: str, along: torch.Tensor) -> None:
        first = self.units[name]
        summed = self._along.get(first)
        self._along[first] = along if summed is None else summed + along

    def finish(self, batch: Batch, loss: int) -> None:
        """See :meth:`Accumulator.finish`."""
        if loss < self.gradients:
            for first, along in self._along.items():
                self.sums[0, first : first + along.shape[1]] += along.sum(0).cpu().numpy()
        else:
            squares = {first: along.square() for first, along in self._along.items()}
            self._draws.append(squares | {f: s + squares[f] if f in squares else s for f, s in self._squares.items()})
        self._along.clear()
        self._squares.clear()
        if loss == len(self.losses) - 1:
            self._end(self.places[batch.rows])

    def _end(self, sequences: Sequence[int]) -> None:
        for first in self._draws[0] if self._draws else ():
            mean = torch.stack([draw[first] for draw in self._draws]).mean(0)
            units = slice(first, first + mean.shape[1])
            self.sums[1, units] += mean.sum(0).cpu().numpy()
            self.rows[list(sequences), units] += mean.cpu().numpy()
        self._draws.clear()

    def finalize(self, names: Sequence[str]) -> bool:
        """See :meth:`Accumulator.finalize`."""
        for name in [n for n in names if n in self._drawn]:
            self._add_drawn(name)
        self.watch.settle(names)
        for name in names:
            self._directions.pop(name, None)
        return False

    def record(self, names: Sequence[str]) -> Any:
        """See :meth:`Accumulator.record`: the sums of these matrices' units, and what the watch has."""
        units = self._units_of(names)
        return {"sums": self.sums[:, units].tolist(), "rows": self.rows[:, units].tolist(), "watch": self.watch.record(names)}

    def restore(self, names: Sequence[str], recorded: Any) -> None:
        """See :meth:`Accumulator.restore`."""
        if units := self._units_of(names):
            self.sums[:, units], self.rows[:, units] = recorded["sums"], recorded["rows"]
        self.watch.restore(names, recorded["watch"])

    def _units_of(self, names: Sequence[str]) -> list[int]:
        """The units of some matrices; groups of rows of one matrix follow each other."""
        starts = sorted({*self.units.values(), self.sums.shape[1]})
        ends = dict(zip(starts, starts[1:], strict=False))
        return [unit for first in sorted({self.units[n] for n in names}) for unit in range(first, ends[first])]

    def bytes(self, blocks: Sequence[Block]) -> int:
        """See :meth:`Accumulator.bytes`: places and values of the entries within reach."""
        return 12 * sum(b.numel for b in blocks)


def quadratic_terms(
    model: nn.Module,
    data: Data,
    units: Mapping[str, int],
    directions: Callable[[str], Directions],
    shape: tuple[int, int],
    *,
    clean: Clean | None = None,
    draws: int = 2,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    listen: Listen | None = None,
    watch: Watch | None = None,
    watched: Data | None = None,
    walk: str = "auto",
    kept: KeptLayers | None = None,
) -> QuadraticTerms:
    """Return both terms of the damage along all directions, from one forward and ``[1 +] draws`` backwards.

    Args:
        model: The model, at the point where the terms are taken.
        data: The calibration set.
        units: Index of the first unit of every matrix, by its full name. Groups of rows of one matrix follow each other.
            Matrices with the same index are treated together: the sum of their changes is squared.
        directions: Makes the changes of a matrix when its gradient is there; they are dropped behind its layer.
        shape: Number of units, and of levels of each.
        clean: Gives the dense model's log-probabilities ``(B, T, V)`` of a batch of this process at some of its positions,
            padding behind the tokens; None at the dense point, where the first term vanishes.
        draws: Labels that every sequence draws by its own content and the seed; 0 leaves the second term out.
        seed: Of the labels.
        batch_size: Sequences per pass.
        progress: Called with sequences done and in total.
        listen: Called with every site and batch once.
        watch: Sees how the run goes.
        watched: Other text on which ``watch`` sees the matrices run, instead of the data.
        walk: ``whole``, ``layers`` or ``auto``; draws along units that span layers need the whole graph.
        kept: See :func:`~layerbudget.execution.backward.feed`.
    """
    if draws < 0 or batch_size < 1 or (draws == 0 and clean is None):
        raise InvalidInput(
            f"draws is {draws} and batch_size {batch_size}.",
            "Draws are 1 or more at the dense point, 0 or more elsewhere; batch_size 1 or more.",
            "Use draws=2, batch_size=8.",
        )
    blocks = _blocks(model, units)
    size = 1 if tracked(model, blocks)[1] else batch_size
    losses: list[Loss] = [SampledLoss(1009 * seed + draw) for draw in range(draws)]
    if clean is not None:
        losses.insert(0, _divergence_from(clean, size))
    group, samples = process_group(), data.samples
    size = size if clean is not None else group.batch(samples, size)
    run = 1 if clean is not None else size  # sequences that follow each other in a process
    local_data, places = shard(data, run), group.places(samples, run)
    batches = list(unlabelled(model, local_data, size))
    sums = DirectionalSums(
        units,
        directions,
        shape,
        losses,
        gradients=int(clean is not None),
        listen=listen,
        places=places,
        sequences=samples if draws else 0,
        ends={m.name for m in end_modules(model)},
        watch=watch,
    )
    way = "whole" if draws and _spanning(model, units) else walk
    seen = [] if watched is None else _watched(model, watched, size)
    tick = Steps(progress, local_data.samples, "gradients")
    fed = feed(model, batches, blocks, sums, walk=way, tick=tick, alone=True, watched=seen, kept=kept)
    counts = np.zeros(samples)
    for batch in batches:
        counts[places[batch.rows]] = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().numpy()
    totals, rows = group.sum(sums.sums), group.sum(sums.rows) if draws else sums.rows
    if draws:
        totals[1] = rows.sum(0)  # in the order of the sequences, whoever had them
    loss, *each = group.sum(np.array([fed.loss, *counts])).tolist()
    tokens = round(sum(each))
    first, second = totals[0] / tokens, totals[1] / (2 * tokens)
    halves = (rows.T / 2).transpose(1, 0, 2)
    return QuadraticTerms(
        first=first,
        second=second,
        rest=deviations(halves, np.array(each), second) if draws else halves,
        tokens=tokens,
        passes=1.0 + 2.0 * len(losses),
        divergence=loss / sum(each) if clean is not None else 0.0,
    )


def _watched(model: nn.Module, data: Data, size: int) -> list[Batch]:
    """Batches of this process of text on which matrices are seen to run."""
    size = process_group().batch(data.samples, size)
    return list(unlabelled(model, shard(data, size), size))


def divergence(logits: torch.Tensor, clean: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``sum_t KL(p_0t || p_t)`` over the tokens whose target is not -100, differentiable in the logits."""
    now = torch.log_softmax(logits, dim=-1)
    clean = clean.to(now)
    each = (clean.exp() * (clean - now)).sum(-1)
    return (each * (targets.reshape(each.shape) != IGNORE)).sum()


def _divergence_from(clean: Clean, size: int) -> Loss:
    def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            dense = clean(batch.rows.start // size, batch.places)
        return divergence(logits, dense, batch.targets)

    loss.by_position = True  # type: ignore[attr-defined]  # some positions of a batch after the other add up to it
    return loss


def _blocks(model: nn.Module, names: Mapping[str, int]) -> list[Block]:
    """One block per matrix."""
    known = {m.name: m for b in partition(model, "linear") for m in b.modules} | {m.name: m for m in end_modules(model)}
    missing = [name for name in names if name not in known]
    if missing:
        raise UnknownBlock(f"The model has no matrix {missing[0]!r}.", f"It has {', '.join(list(known)[:3])}, ...", "")
    return [Block(name=name, modules=(known[name],)) for name in names]


def _spanning(model: nn.Module, units: Mapping[str, int]) -> bool:
    """Whether matrices of several layers are treated together: whether they have the same first unit."""
    stacks = [name for name, _ in layer_lists(model)]
    where: dict[int, set[str]] = {}
    for name, first in units.items():
        layer = next((".".join((s, name[len(s) + 1 :].split(".")[0])) for s in stacks if name.startswith(f"{s}.")), "")
        where.setdefault(first, set()).add(layer)
    return any(len(layers) > 1 for layers in where.values())


def pooled(damage: np.ndarray, error: np.ndarray, norm: np.ndarray) -> tuple[np.ndarray, float]:
    r"""Predicted damages of matrices in several formats, made steadier by what the formats share.

    Draws of labels are noise, and nearly independent along the rounding errors of different formats. But rounding errors of one
    matrix are nearly random directions of the same space, so its damage per squared error is nearly the same number in every
    format, ``log d_ij = log ||Delta_ij||^2 + level_i + format_j + rest_ij``. The additive part is fitted by least squares; of
    the rest the share ``w = max(0, 1 - noise / scatter)`` is kept (empirical Bayes: noise from the standard errors).

    Damages are nats per token, ``(K, m)``; infinite or zero entries stay as they are. ``norm`` is ``||Delta_ij||^2``. With the
    damages comes the share ``w`` that was kept of what the formats do not share.
    """
    there = np.isfinite(damage) & (damage > 0) & (norm > 0)
    free = int(there.sum() - there.any(1).sum() - there.any(0).sum() + 1)
    if free < 1:
        return damage, 1.0
    safe = np.where(there, damage, 1.0)
    rest = np.where(there, np.log(safe / np.where(there, norm, 1.0)), 0.0)
    for _ in range(_SWEEPS):  # alternating means: what rows and columns leave of a table with gaps
        for axis in (1, 0):
            mean = rest.sum(axis, keepdims=True) / np.maximum(there.sum(axis, keepdims=True), 1)
            rest = np.where(there, rest - mean, 0.0)
    scatter = float((rest[there] ** 2).sum() / free)
    noise = float(np.mean((error[there] / damage[there]) ** 2))
    kept = max(0.0, 1.0 - noise / scatter) if scatter > 0 else 1.0
    return np.where(there, safe * np.exp((kept - 1.0) * rest), damage), kept


def interpolated(damage: np.ndarray, norm: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Damages of formats that were not measured, from those of :func:`pooled` formats of the same matrix.

    The damage per squared error of a matrix is interpolated in the logarithm of the squared error, and is that of the nearest
    measured format beyond the last one. ``damage`` and ``norm`` are ``(K, m)`` of measured formats (infinite or zero: not
    there), ``wanted`` ``||Delta_ij||^2`` of n others. With the damages ``(K, n)`` come the shares ``(K, n, m)`` that measured
    formats have in them: the derivatives of the logarithms.
    """
    shares = np.zeros((*wanted.shape, damage.shape[1]))
    there = np.isfinite(damage) & (damage > 0) & (norm > 0)
    for i, known in enumerate(there):
        places = np.flatnonzero(known)[np.argsort(norm[i, known], kind="stable")]
        if not len(places):
            continue
        at = np.log(norm[i, places])
        x = np.log(np.maximum(wanted[i], np.finfo(float).tiny))
        for k, place in enumerate(places):
            shares[i, :, place] = np.interp(x, at, np.eye(len(places))[k])
    log = np.log(np.where(there, damage / np.where(there, norm, 1.0), 1.0))
    damages = np.where(shares.sum(-1) > 0, wanted * np.exp(np.einsum("inm,im->in", shares, log)), 0.0)
    return damages, shares
