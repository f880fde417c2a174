r"""Certificates: does the gain order blocks as the loss itself would?

The layer-restricted Newton step is ``d_k = -(C_k + tau I)^-1 g_k``. Paper, Appendix B.3: for the exact Hessian ``C_k = H_kk``

    L(theta + d_k) - L(theta) = -zeta_k^2 / 2 - tau/2 |d_k|^2 + R,     |R| <= M/6 |d_k|^3,

so k stands above l for certain when ``|zeta_k^2 - zeta_l^2| / 2 > eps_k + eps_l``, ``eps_k = tau/2 |d_k|^2 + M/6 |d_k|^3``.
For another curvature the same expansion has one more term, ``d'(H - C) d / 2``, which one Hessian-vector product gives exactly;
it is reported, and added to ``eps`` in the second of the two verdicts. With that product in hand only R is unknown, and a
sharper verdict compares ``g'd + d'Hd/2`` of two blocks with their remainders.

The direct check measures the left side with one forward pass. M, the Lipschitz constant of the Hessian, enters only along
``d_k``; it is estimated there from the curvature at 0, 1/2 and 1 of the step. An estimate is a lower bound of the true M: a
certificate is as good as that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInput
from ..execution.loss import Data, logits_of, summed_loss, token_count
from ..models.blocks import is_conv1d, weight_of
from ..progress import Progress, Steps
from ..records import Block
from .curvature.common import check_damping, check_inputs
from .curvature.gram import chunks, collect_rows, inner
from .curvature.products import BlockProducts, lanczos

CURVATURES = ("fisher", "diagonal", "ggn", "hessian")
DAMPINGS = (0.1, 1.0, 10.0)
Step = tuple[float, "Solved"]


def _positive(tau: float) -> float:
    return tau if tau > 0 else 1.0


def _fisher_steps(rows: torch.Tensor, tokens: int, damping: Sequence[float], unit: str) -> Iterator[Step]:
    """``d = -S'(K/N + tau I)^-1 1/N``: the step lies in the span of the n per-sequence gradients."""
    k = inner(rows) / tokens
    mu, u = np.linalg.eigh(k)
    scale = {"max": mu[-1], "mean": mu.clip(0).sum() / rows.shape[1], "absolute": 1.0}[unit]
    for tau in (_positive(d * float(scale)) for d in damping):
        a = -(u / (mu.clip(0) + tau)) @ (u.T @ np.ones(len(mu))) / tokens
        yield tau, Solved(torch.as_tensor(a).to(rows) @ rows, "ok")


def _diagonal_steps(rows: torch.Tensor, tokens: int, damping: Sequence[float], unit: str) -> Iterator[Step]:
    diagonal, g = rows.square().sum(0) / tokens, rows.sum(0) / tokens
    scale = {"max": float(diagonal.max()), "mean": float(diagonal.mean()), "absolute": 1.0}[unit]
    for tau in (_positive(d * scale) for d in damping):
        yield tau, Solved(-g / (diagonal + tau), "ok")


class Solved(NamedTuple):
    """Result of conjugate gradients: the solution (None under negative curvature) and how that was."""

    x: torch.Tensor | None
    status: str


def conjugate_gradients(
    product: Callable[[torch.Tensor], torch.Tensor], b: torch.Tensor, tau: float, *, steps: int = 200, tolerance: float = 1e-5
) -> Solved:
    """Solve ``(C + tau I) x = b``.

    Returns:
        The solution with the status ``ok``; ``not converged: ...`` where the residual is above ``tolerance`` (relative to b)
        after so many steps; nothing and ``negative curvature`` where such a direction turned up.

    >>> a = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> conjugate_gradients(lambda v: a @ v, torch.tensor([3.0, 5.0]), 1.0)
    Solved(x=tensor([1., 1.]), status='ok')
    """
    x, r = torch.zeros_like(b), b.clone()
    p, square = r.clone(), float(r.double().square().sum())
    start = square
    target = tolerance**2 * square
    for _ in range(steps):
        if square <= target:
            break
        q = product(p) + tau * p
        curvature = float(torch.dot(p.double(), q.double()))
        if curvature <= 0:
            return Solved(None, "negative curvature")
        x += square / curvature * p
        r -= square / curvature * q
        new = float(r.double().square().sum())
        p, square = r + new / square * p, new
    if square <= target:
        return Solved(x, "ok")
    return Solved(x, f"not converged: residual {(square / start) ** 0.5:.1e} after {steps} products")


def _krylov_steps(p: BlockProducts, curvature: str, damping: Sequence[float], unit: str, steps: int) -> Iterator[Step]:
    product, g = (p.ggn if curvature == "ggn" else p.hessian), p.gradient()
    scale = float(lanczos(product, g, 15).ritz()[-1]) if unit == "max" else 1.0
    for tau in (_positive(d * scale) for d in damping):
        yield tau, conjugate_gradients(product, -g, tau, steps=steps)


def _ordered(model: nn.Module, block: Block, step: Step) -> Step:
    """Reorder a step from gradients ``(d_out, d_in)`` to parameters (Conv1D stores the transpose)."""
    (tau, (flat, status)), parts = step, []
    if flat is None:
        return step
    for m, part in zip(block.modules, flat.split([m.numel for m in block.modules]), strict=True):
        owner, _ = weight_of(model, m.name)
        parts.append(part.view(m.d_out, m.d_in).t().reshape(-1) if is_conv1d(owner) else part)
    return tau, Solved(torch.cat(parts), status)


@torch.no_grad()
def _loss(p: BlockProducts) -> float:
    return sum(float(summed_loss(logits_of(p.model, b).double(), b.targets)) for b in p.batches) / p.tokens


@torch.no_grad()
def _move(p: BlockProducts, origin: Sequence[torch.Tensor], step: torch.Tensor, t: float) -> None:
    for parameter, start, part in zip(p.parameters, origin, p.split(step), strict=True):
        parameter.copy_(start + t * part)


@torch.no_grad()
def _restore(p: BlockProducts, origin: Sequence[torch.Tensor]) -> None:
    for parameter, start in zip(p.parameters, origin, strict=True):
        parameter.copy_(start)


def _row(p: BlockProducts, tau: float, solved: Solved, base: float, g: torch.Tensor) -> dict[str, Any]:
    found = {"block": p.block.name, "damping": tau, "status": solved.status}
    if solved.x is None:
        return found
    d = solved.x
    origin = [q.detach().clone() for q in p.parameters]
    slope, square = float(torch.dot(g.double(), d.double())), float(d.double().square().sum())
    gain = -slope
    try:
        bends = []
        for t in (0.0, 0.5, 1.0):
            _move(p, origin, d, t)
            bends.append(float(torch.dot(d.double(), p.hessian(d).double())))
        _move(p, origin, d, 1.0)
        actual = _loss(p) - base
    finally:
        _restore(p, origin)
    third = max(abs(bends[i] - bends[j]) / (0.5 * (j - i)) for i, j in ((0, 1), (1, 2), (0, 2)))
    own = gain - tau * square
    bias, remainder, gap = tau / 2 * square, third / 6, abs(bends[0] - own) / 2
    return {
        **found,
        "gain": gain,
        "step_norm": square**0.5,
        "predicted": -gain / 2 - bias,
        "quadratic": slope + bends[0] / 2,
        "actual": actual,
        "curvature_gap": (bends[0] - own) / 2,
        "lipschitz": third / square**1.5 if square > 0 else 0.0,
        "epsilon": bias + remainder,
        "epsilon_with_gap": bias + remainder + gap,
    }


def direct_check(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    curvature: str = "fisher",
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    max_bytes: int = 2 << 30,
    steps: int = 200,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Take each block's Newton step and compare the loss with the prediction.

    Args:
        model: The model; its weights are moved and put back bit for bit.
        data: The calibration set.
        blocks: Blocks whose matrices are nn.Linear or Conv1D.
        curvature: ``fisher`` (empirical, exact, from the Gram matrix), ``diagonal`` (its diagonal), ``ggn`` or ``hessian``
            (conjugate gradients).
        damping: tau, one or several, in ``damping_unit``; ``None`` for 0.1, 1 and 10.
        damping_unit: ``max`` (of each block's largest eigenvalue), ``mean`` (Fisher only) or ``absolute``.
        batch_size: Sequences per pass.
        max_bytes: Memory for per-sequence gradients (Fisher).
        steps: Largest number of products of conjugate gradients (GGN, Hessian).
        progress: Called with blocks done and in total.

    Returns:
        One row per block and damping: ``gain`` (zeta^2), ``step_norm``, ``predicted`` (``-zeta^2/2 - tau/2 |d|^2``), ``actual``
        (change of the mean token loss, nats), ``quadratic`` (``g'd + d'Hd/2`` with the exact Hessian), ``curvature_gap``
        (``d'(H-C)d/2``), ``lipschitz`` (M along the step), ``epsilon`` (the paper's), ``epsilon_with_gap``, ``status``: ``ok``;
        ``not converged: ...``, the step then being no solution and the row no certificate; or ``negative curvature``, and
        only block and damping are given.

    Raises:
        InvalidInput: An unknown curvature, or a unit that it does not have.
        CoverageError: A matrix that was never seen.
    """
    check_inputs(batch_size)
    values = check_damping(damping, damping_unit) or DAMPINGS
    if curvature not in CURVATURES or damping_unit == "median" or (damping_unit == "mean" and curvature in ("ggn", "hessian")):
        raise InvalidInput(
            f"curvature={curvature!r} with damping_unit={damping_unit!r}.",
            f"curvature is one of {CURVATURES}; the unit is max, absolute, or (Fisher and its diagonal) mean.",
            "Use damping_unit='max'.",
        )
    tick, table = Steps(progress, len(blocks)), []
    krylov = curvature in ("ggn", "hessian")
    runs = [[k] for k in range(len(blocks))] if krylov else list(chunks(blocks, data.samples, 4, max_bytes))
    tokens = token_count(model, data)
    for run in runs:
        own = [blocks[k] for k in run]
        rows = None if krylov else collect_rows(model, data, own, batch_size=batch_size, walk="whole")
        for i, block in enumerate(own):
            with BlockProducts(model, data, block, batch_size) as p:
                if rows is None:
                    found = _krylov_steps(p, curvature, values, damping_unit, steps)
                else:
                    make = _fisher_steps if curvature == "fisher" else _diagonal_steps
                    found = (_ordered(model, block, step) for step in make(rows[i], tokens, values, damping_unit))
                base, g = _loss(p), p.gradient()
                table += [_row(p, tau, solved, base, g) for tau, solved in found]
            tick(1)
    for index, entry in enumerate(table):
        entry["relative_damping"] = values[index % len(values)]
    return table


def certify_ranking(table: Sequence[dict[str, Any]], *, with_gap: bool = True) -> list[dict[str, Any]]:
    """Which pairs of blocks the gain orders for certain, per damping of a :func:`direct_check` table.

    Args:
        table: Rows of one or several dampings; those whose status is not ``ok`` certify nothing and are left out.
        with_gap: Add ``|d'(H-C)d|/2`` to every ``eps`` (needed unless C is the Hessian); false gives the paper's formula.

    Returns:
        One row per relative damping and pair: ``above``, ``below`` (by gain), ``margin`` (half the difference of gains),
        ``needed`` (``eps_k + eps_l``), ``certified``; ``sharp``: certified by the expansion with the exact Hessian, of
        which only the remainder ``M/6 |d|^3`` is unknown (the paper counts the damping term as an error although it is
        known); ``agrees``: whether the measured losses have the same order.
    """
    key = "epsilon_with_gap" if with_gap else "epsilon"
    found = []
    for tau in dict.fromkeys(row["relative_damping"] for row in table):
        rows = [r for r in table if r["relative_damping"] == tau and r["status"] == "ok"]
        rows.sort(key=lambda r: -r["gain"])
        for a, b in itertools.combinations(rows, 2):
            margin, needed = (a["gain"] - b["gain"]) / 2, a[key] + b[key]
            unknown = sum(r["lipschitz"] * r["step_norm"] ** 3 / 6 for r in (a, b))
            found.append(
                {
                    "relative_damping": tau,
                    "above": a["block"],
                    "below": b["block"],
                    "margin": margin,
                    "needed": needed,
                    "certified": margin > needed,
                    "sharp": b["quadratic"] - a["quadratic"] > unknown,
                    "agrees": a["actual"] < b["actual"],
                }
            )
    return found
