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

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ..blocks import partition, weight_of
from ..errors import CurvatureFailure, InvalidInput, LengthMismatch, UnknownBlock
from ..records import Block
from ..running.loss import IGNORE, Batch, Data, logits_of, sampled_targets, summed_loss, unlabelled
from ..running.sites import Collector, Site
from .directions import Written
from .ledger import Forms, Ledger, Unit

Clean = Callable[[int], torch.Tensor]
During = Callable[[Batch], contextlib.AbstractContextManager[None]]
Progress = Callable[[int, int], None]


def forms_along(
    model: nn.Module,
    data: Data,
    units: Mapping[str, Unit],
    *,
    clean: Clean | None = None,
    draws: int = 2,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    during: During | None = None,
) -> Forms:
    """Both terms of the damage along all directions, from one forward and ``[1 +] draws`` backwards.

    Args:
        model: The model at the point where the terms are wanted.
        data: The text.
        units: Directions by full name of the matrix.
        clean: ``batch -> (B, T, V)`` log-probabilities of the dense model, padding behind the tokens; None at the dense point,
            where the first term vanishes.
        draws: Draws of labels for the second term; 0 leaves it out.
        seed: Of the draws. Every sequence draws by its own content, so order, padding and batch size change nothing.
        batch_size: Sequences per pass.
        progress: Called with (batches done, batches).
        during: A context to be in while a batch runs forwards (for statistics of the same forward).

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
    count, levels = _extent(units)
    ledger = Ledger(units, count, levels)
    passes = _Passes(model, units, ledger)
    with passes.collector as collector:
        size = 1 if collector.single else batch_size
        far, tokens, total = 0.0, 0, -(-data.samples // size)
        for i, batch in enumerate(unlabelled(model, data, size)):
            with during(batch) if during else contextlib.nullcontext():
                logits = logits_of(model, batch)
            if clean is not None:
                with torch.no_grad():
                    dense = clean(i)
                loss = divergence(logits, dense, batch.targets)
                far += float(loss.detach())
                passes.backward(batch, loss, apart=False, retain=draws > 0)
                ledger.gradient()
            for draw in range(draws):
                labels = sampled_targets(logits.detach(), batch, 1009 * seed + draw)
                passes.backward(batch, summed_loss(logits, labels), apart=True, retain=draw + 1 < draws)
                ledger.draw()
            ledger.close(batch.size)
            tokens += int((batch.targets != IGNORE).sum())
            if progress:
                progress(i + 1, total)
        collector.check_coverage()
    forms = ledger.forms(tokens, 1.0 + 2.0 * (draws + (clean is not None)))
    return dataclasses.replace(forms, divergence=far / tokens)


def divergence(logits: torch.Tensor, clean: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``sum_t KL(p_0t || p_t)`` over the tokens whose target is not -100, differentiable in the logits."""
    now = torch.log_softmax(logits, dim=-1)
    clean = clean.to(now)
    each = (clean.exp() * (clean - now)).sum(-1)
    return (each * (targets.reshape(each.shape) != IGNORE)).sum()


class _Passes:
    """Backwards of one model into one ledger."""

    def __init__(self, model: nn.Module, units: Mapping[str, Unit], ledger: Ledger) -> None:
        known = {m.name: m for b in partition(model, "linear") for m in b.modules}
        missing = [name for name in units if name not in known]
        if missing:
            raise UnknownBlock(f"The model has no matrix {missing[0]!r}.", f"It has {', '.join(list(known)[:3])}, ...", "")
        blocks = [Block(name=name, modules=(known[name],)) for name in units]
        self.ledger, self.apart = ledger, False
        self.collector = Collector(model, blocks, self._consume)

    def _consume(self, site: Site) -> None:
        for name, b in site.b.items():
            self.ledger.site(name, site.a, b, apart=self.apart)

    def backward(self, batch: Batch, loss: torch.Tensor, *, apart: bool, retain: bool) -> None:
        """One backward of a summed loss.

        Raises:
            CurvatureFailure: It is not finite.
        """
        if not bool(torch.isfinite(loss)):
            raise CurvatureFailure(
                f"The divergence of sequences {batch.rows.start} to {batch.rows.stop - 1} is {float(loss.detach())}.",
                "It must be finite.",
                "Load the model in float32 or bfloat16, and look at those sequences.",
            )
        self.apart = apart
        length = 1 if batch.targets.ndim == 1 and batch.args else int((batch.kwargs.get("input_ids", batch.targets)).shape[-1])
        self.collector.backward(loss, size=batch.size, length=length, retain=retain)
        for name, parameter in self.collector.direct.items():
            if parameter.grad is not None:  # one sequence per batch
                transposed = getattr(weight_of(self.collector.model, name)[0], "is_transposed", False)
                self.ledger.hold(name, (parameter.grad.mT if transposed else parameter.grad).flatten(0, 1)[None])


def _extent(units: Mapping[str, Unit]) -> tuple[int, int]:
    """Number of units and of levels.

    Raises:
        LengthMismatch: Different numbers of levels, or no unit.
    """
    levels = {u.directions.levels for u in units.values()}
    if len(levels) != 1:
        raise LengthMismatch(
            f"The matrices have {sorted(levels)} candidates.",
            "All need the same number.",
            "Repeat a candidate where one has less.",
        )
    return max(u.first + u.directions.groups for u in units.values()), levels.pop()


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
        progress: Called with (batches done, batches).

    Returns:
        Damage and standard errors by matrix. It took ``1 + 2 draws`` forward equivalents.

    Raises:
        UnknownBlock: A matrix that the model does not have.
        LengthMismatch: Candidates of different shapes or numbers.
        InvalidInput: No draws.
    """
    lists = {name: [d] if isinstance(d, torch.Tensor) else list(d) for name, d in deltas.items()}
    units = {name: Unit(directions=Written(d), first=i) for i, (name, d) in enumerate(lists.items())}
    forms = forms_along(model, data, units, draws=draws, seed=seed, batch_size=batch_size, progress=progress)
    return {name: Along(damage=forms.second[i], error=forms.error[i]) for i, name in enumerate(lists)}
