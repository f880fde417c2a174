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
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ...errors import InvalidInput, UnknownBlock
from ...execution.backward import Accumulator, Loss, SampledLoss, feed
from ...execution.loss import IGNORE, Batch, Data, unlabelled
from ...execution.processes import process_group, shard, total
from ...execution.sites import Site, tracked
from ...models.blocks import layer_lists, partition
from ...progress import Progress, Steps
from ...records import Block
from .directions import Written
from .sums import Candidates, DirectionalSums, QuadraticTerms, Unit

Clean = Callable[[int], torch.Tensor]
Listen = Callable[[Site, Batch], None]


def forms_along(
    model: nn.Module,
    data: Data,
    units: Mapping[str, Unit] | Candidates,
    *,
    clean: Clean | None = None,
    draws: int = 2,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    listen: Listen | None = None,
    walk: str = "auto",
    apart: bool = False,
) -> QuadraticTerms:
    """Both terms of the damage along all directions, from one forward and ``[1 +] draws`` backwards.

    Args:
        model: The model at the point where the terms are wanted.
        data: The text; several processes share its sequences.
        units: Directions by full name of the matrix; :class:`Candidates` are made one layer at a time.
        clean: ``batch -> (B, T, V)`` log-probabilities of the dense model on this process's sequences, padding behind the
            tokens; None at the dense point, where the first term vanishes.
        draws: Draws of labels for the second term; 0 leaves it out.
        seed: Of the draws. Every sequence draws by its own content, so order, padding and batch size change nothing.
        batch_size: Sequences per pass.
        progress: Called with (sequences done, sequences).
        listen: Called with every site and batch once, for statistics of the same forward.
        walk: ``whole``, ``layers`` or ``auto``, see :func:`layerbudget.execution.backward.feed`; draws along units that
            span layers need the whole graph.
        apart: Keep sequences apart, for errors of sums over units.

    Raises:
        InvalidInput: Neither term is wanted, or an option outside its domain.
        CoverageError: A matrix that never ran.
        CurvatureFailure: A divergence that is not finite.
    """
    if draws < 0 or batch_size < 1 or (draws == 0 and clean is None):
        raise InvalidInput(
            f"draws is {draws} and batch_size {batch_size}.",
            "Draws are 1 or more at the dense point, 0 or more elsewhere; batch_size 1 or more.",
            "Use draws=2, batch_size=8.",
        )
    candidates = units if isinstance(units, Candidates) else Candidates.of(units)
    blocks = _blocks(model, candidates.first)
    size = 1 if tracked(model, blocks)[1] else batch_size
    sums = DirectionalSums(candidates, data.samples if apart else 0)
    losses: list[Loss] = [SampledLoss(1009 * seed + draw) for draw in range(draws)]
    if clean is not None:
        losses.insert(0, _Divergence(clean, size))
    own = shard(data)
    batches = list(unlabelled(model, own, size))
    together = process_group()
    places = range(data.samples) if together is None else together.shard(range(data.samples))
    consumer = _Along(model, sums, losses, plain=clean is not None, listen=listen, places=places)
    way = "whole" if draws and spanning(model, candidates.first) else walk
    fed = feed(model, batches, blocks, consumer, walk=way, tick=Steps(progress, own.samples, "gradients"), alone=True)
    sums.take(total(sums.sums()))
    counts = np.zeros(data.samples)
    for batch in batches:
        counts[list(places[batch.rows])] = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().numpy()
    loss, *each = total(np.array([fed.loss, *counts])).tolist()
    tokens, sums.rows = sum(each), total(sums.rows) if apart else sums.rows
    forms = sums.forms(round(tokens), data.samples, 1.0 + 2.0 * len(losses), np.array(each) if apart else None)
    return dataclasses.replace(forms, divergence=loss / tokens if clean is not None else 0.0)


def divergence(logits: torch.Tensor, clean: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``sum_t KL(p_0t || p_t)`` over the tokens whose target is not -100, differentiable in the logits."""
    now = torch.log_softmax(logits, dim=-1)
    clean = clean.to(now)
    each = (clean.exp() * (clean - now)).sum(-1)
    return (each * (targets.reshape(each.shape) != IGNORE)).sum()


@dataclasses.dataclass(frozen=True)
class _Divergence:
    """The divergence as a loss of batches."""

    clean: Clean
    size: int

    def __call__(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            dense = self.clean(batch.rows.start // self.size)
        return divergence(logits, dense, batch.targets)


class _Along(Accumulator):
    """Adds what a backward pass leaves to the sums."""

    def __init__(
        self, model: nn.Module, sums: DirectionalSums, losses: Sequence[Loss], *, plain: bool, listen: Listen | None,
        places: Sequence[int],
    ) -> None:  # fmt: skip
        self.model, self.sums, self.losses, self.plain, self.listen = model, sums, losses, plain, listen
        self.places = places
        self.batch: Batch | None = None
        self.loss = 0

    def begin(self, batch: Batch, loss: int) -> None:
        """See :meth:`Accumulator.begin`."""
        self.batch, self.loss = batch, loss

    def update(self, site: Site) -> None:
        """See :meth:`Accumulator.update`."""
        for name, b in site.b.items():
            self.sums.site(name, site.a, b, apart=not self.plain or self.loss > 0)
        if self.listen is not None and self.loss == 0 and self.batch is not None:
            self.listen(site, self.batch)

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """See :meth:`Accumulator.direct`: experts below each other, one sequence per batch."""
        self.sums.hold(name, gradient.flatten(0, 1)[None])

    def finish(self, batch: Batch, loss: int) -> None:
        """See :meth:`Accumulator.finish`."""
        if self.plain and loss == 0:
            self.sums.gradient()
        else:
            self.sums.draw()
        if loss == len(self.losses) - 1:
            self.sums.close(self.places[batch.rows])

    def finalize(self, names: Sequence[str]) -> bool:
        """See :meth:`Accumulator.close`."""
        self.sums.candidates.drop(names)
        return False

    def bytes(self, blocks: Sequence[Block]) -> int:
        """See :meth:`Accumulator.bytes`: places and values of the entries within reach."""
        return 12 * sum(b.numel for b in blocks)


def _blocks(model: nn.Module, units: Iterable[str]) -> list[Block]:
    """One block per matrix.

    Raises:
        UnknownBlock: The model lacks one.
    """
    known = {m.name: m for b in partition(model, "linear") for m in b.modules}
    missing = [name for name in units if name not in known]
    if missing:
        raise UnknownBlock(f"The model has no matrix {missing[0]!r}.", f"It has {', '.join(list(known)[:3])}, ...", "")
    return [Block(name=name, modules=(known[name],)) for name in units]


def spanning(model: nn.Module, units: Mapping[str, int]) -> bool:
    """Whether matrices of several layers are treated together: whether they have the same first unit."""
    stacks = [name for name, _ in layer_lists(model)]
    where: dict[int, set[str]] = {}
    for name, first in units.items():
        layer = next((".".join((s, name[len(s) + 1 :].split(".")[0])) for s in stacks if name.startswith(f"{s}.")), "")
        where.setdefault(first, set()).add(layer)
    return any(len(found) > 1 for found in where.values())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Along:
    """Predicted damage of some changes of one matrix.

    Attributes:
        damage: Nats per token, shape ``(candidates,)``.
        error: Standard errors over sequences, the same shape.
    """

    damage: np.ndarray
    error: np.ndarray


def fisher_along(
    model: nn.Module,
    data: Data,
    deltas: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    *,
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    walk: str = "auto",
) -> dict[str, Along]:
    """What changes of single matrices cost a model's own output: half the Fisher form along each, at the present weights.

    For a rounding error at the dense point this is the damage to within a few percent; for changes as large as pruning most of
    a matrix it is not (:doc:`/theory`, section 7).

    Args:
        model: The dense model; left as it was.
        data: The text.
        deltas: New minus present weights by full name of the matrix: ``(d_out, d_in)`` (experts below each other,
            ``(copies * d_out, d_in)``), one tensor or several candidates; as many for every matrix.
        draws: Draws of labels; the standard error falls with their root until that of the text is left.
        seed: Of the draws.
        batch_size: Sequences per pass.
        progress: Called with (sequences done, sequences).
        walk: See :func:`forms_along`.

    Returns:
        Damage and standard errors by matrix. It took ``1 + 2 draws`` forward equivalents.

    Raises:
        UnknownBlock: A matrix that the model does not have.
        LengthMismatch: Candidates of different shapes or numbers.
        InvalidInput: No draws.
    """
    lists = {name: [d] if isinstance(d, torch.Tensor) else list(d) for name, d in deltas.items()}
    units = {name: Unit(directions=Written(d), first=i) for i, (name, d) in enumerate(lists.items())}
    forms = forms_along(model, data, units, draws=draws, seed=seed, batch_size=batch_size, progress=progress, walk=walk)
    return {name: Along(damage=forms.second[i], error=forms.error[i]) for i, name in enumerate(lists)}
