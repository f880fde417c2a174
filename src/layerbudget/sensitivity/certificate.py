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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..arguments import checked
from ..errors import InvalidInput
from ..execution.loss import Data, logits_of, summed_loss
from ..models.blocks import is_conv1d, weight_of
from ..progress import Progress, Steps
from ..records import Block
from .curvature.common import check_damping, check_inputs
from .curvature.exact import BlockProducts, lanczos
from .curvature.gradients import chunks, collect_rows
from .curvature.gram import inner

CURVATURES, UNITS = ("fisher", "ggn", "hessian"), ("max", "absolute")
DAMPINGS = (0.1, 1.0, 10.0)
_MEMORY = 2 << 30  # bytes of per-sequence gradients
Solved = tuple[torch.Tensor | None, str]  # a step, where there is one, and how that was


def _absolute(damping: Sequence[float], scale: float) -> Iterator[float]:
    return (d * scale if d * scale > 0 else 1.0 for d in damping)


def _fisher_steps(p: BlockProducts, rows: torch.Tensor, damping: Sequence[float], unit: str) -> Iterator[tuple[float, Solved]]:
    """``d = -S'(K/N + tau I)^-1 1/N``: the step lies in the span of the n per-sequence gradients."""
    mu, u = np.linalg.eigh(inner(rows) / p.tokens)
    for tau in _absolute(damping, float(mu[-1]) if unit == "max" else 1.0):
        a = -(u / (mu.clip(0) + tau)) @ (u.T @ np.ones(len(mu))) / p.tokens
        flat, parts = torch.as_tensor(a).to(rows) @ rows, []
        for m, part in zip(p.block.modules, flat.split([m.numel for m in p.block.modules]), strict=True):
            owner, _ = weight_of(p.model, m.name)  # gradients are (d_out, d_in), Conv1D stores the transpose
            parts.append(part.view(m.d_out, m.d_in).t().reshape(-1) if is_conv1d(owner) else part)
        yield tau, (torch.cat(parts), "ok")


def conjugate_gradients(
    product: Callable[[torch.Tensor], torch.Tensor], b: torch.Tensor, tau: float, *, steps: int = 200, tolerance: float = 1e-5
) -> Solved:
    """Solve ``(C + tau I) x = b``.

    Returns:
        The solution with the status ``ok``; ``not converged: ...`` where the residual is above ``tolerance`` (relative to b)
        after so many steps; nothing and ``negative curvature`` where such a direction turned up.

    >>> a = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> conjugate_gradients(lambda v: a @ v, torch.tensor([3.0, 5.0]), 1.0)
    (tensor([1., 1.]), 'ok')
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
            return None, "negative curvature"
        x += square / curvature * p
        r -= square / curvature * q
        new = float(r.double().square().sum())
        p, square = r + new / square * p, new
    if square <= target:
        return x, "ok"
    return x, f"not converged: residual {(square / start) ** 0.5:.1e} after {steps} products"


def _krylov_steps(
    p: BlockProducts, curvature: str, damping: Sequence[float], unit: str, steps: int
) -> Iterator[tuple[float, Solved]]:
    product, g = (p.ggn if curvature == "ggn" else p.hessian), p.gradient()
    for tau in _absolute(damping, float(lanczos(product, g, 15).ritz()[-1]) if unit == "max" else 1.0):
        yield tau, conjugate_gradients(product, -g, tau, steps=steps)


@torch.no_grad()
def _loss(p: BlockProducts) -> float:
    return sum(float(summed_loss(logits_of(p.model, b).double(), b.targets)) for b in p.batches) / p.tokens


@torch.no_grad()
def _move(p: BlockProducts, origin: Sequence[torch.Tensor], step: torch.Tensor | None) -> None:
    """Go a step from the origin; without one, back to it."""
    places = origin if step is None else [start + part for start, part in zip(origin, p.split(step), strict=True)]
    for parameter, place in zip(p.parameters, places, strict=True):
        parameter.copy_(place)


def _row(p: BlockProducts, tau: float, solved: Solved, base: float, g: torch.Tensor) -> dict[str, Any]:
    d, status = solved
    row = {"block": p.block.name, "damping": tau, "status": status}
    if d is None:
        return row
    origin = [q.detach().clone() for q in p.parameters]
    slope, square = float(torch.dot(g.double(), d.double())), float(d.double().square().sum())
    gain = -slope
    try:
        bends = []
        for t in (0.0, 0.5, 1.0):
            _move(p, origin, t * d)
            bends.append(float(torch.dot(d.double(), p.hessian(d).double())))
        actual = _loss(p) - base
    finally:
        _move(p, origin, None)
    third = max(abs(bends[i] - bends[j]) / (0.5 * (j - i)) for i, j in ((0, 1), (1, 2), (0, 2)))
    step_curvature = gain - tau * square
    bias, remainder, gap = tau / 2 * square, third / 6, abs(bends[0] - step_curvature) / 2
    return {
        **row,
        "gain": gain,
        "step_norm": square**0.5,
        "predicted": -gain / 2 - bias,
        "quadratic": slope + bends[0] / 2,
        "actual": actual,
        "curvature_gap": (bends[0] - step_curvature) / 2,
        "lipschitz": third / square**1.5 if square > 0 else 0.0,
        "epsilon": bias + remainder,
        "epsilon_with_gap": bias + remainder + gap,
    }


@checked
def direct_check(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    curvature: str = "fisher",
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    steps: int = 200,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Take each block's Newton step and compare the loss with the prediction.

    Args:
        model: The model; its weights are moved and put back bit for bit.
        data: The calibration set.
        blocks: Blocks whose matrices are nn.Linear or Conv1D.
        curvature: ``fisher`` (empirical, exact, from the Gram matrix), ``ggn`` or ``hessian`` (conjugate gradients).
        damping: tau, one or several, in ``damping_unit``; ``None`` for 0.1, 1 and 10.
        damping_unit: ``max`` (of each block's largest eigenvalue) or ``absolute``.
        batch_size: Sequences per pass.
        steps: Largest number of products of conjugate gradients (GGN, Hessian).
        progress: Called with blocks done and in total.

    Returns:
        One row per block and damping: ``gain`` (zeta^2), ``step_norm``, ``predicted`` (``-zeta^2/2 - tau/2 |d|^2``), ``actual``
        (change of the mean token loss, nats), ``quadratic`` (``g'd + d'Hd/2`` with the exact Hessian), ``curvature_gap``
        (``d'(H-C)d/2``), ``lipschitz`` (M along the step), ``epsilon`` (the paper's), ``epsilon_with_gap``, ``status``: ``ok``;
        ``not converged: ...``, the step then being no solution and the row no certificate; or ``negative curvature``, and
        only block and damping are given.

    Raises:
        InvalidInput: An unknown curvature or unit.
        CoverageError: A matrix that was never seen.
    """
    check_inputs(batch_size)
    values = check_damping(damping, damping_unit) or DAMPINGS
    if curvature not in CURVATURES or damping_unit not in UNITS:
        raise InvalidInput(
            f"curvature={curvature!r} with damping_unit={damping_unit!r}.",
            f"The curvature is one of {', '.join(CURVATURES)}; the unit is {' or '.join(UNITS)}.",
            "Use damping_unit='max'.",
        )
    tick, table = Steps(progress, len(blocks)), []
    fisher = curvature == "fisher"
    for run in chunks(blocks, data.samples, 4, _MEMORY) if fisher else [[k] for k in range(len(blocks))]:
        group = [blocks[k] for k in run]
        rows = collect_rows(model, data, group, batch_size=batch_size, walk="whole") if fisher else None
        for i, block in enumerate(group):
            with BlockProducts(model, data, block, batch_size) as p:
                solutions = (
                    _krylov_steps(p, curvature, values, damping_unit, steps)
                    if rows is None
                    else _fisher_steps(p, rows[i], values, damping_unit)
                )
                base, g = _loss(p), p.gradient()
                for relative, (tau, solved) in zip(values, solutions, strict=True):
                    table.append({**_row(p, tau, solved, base, g), "relative_damping": relative})
            tick()
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
    if not isinstance(table, Sequence) or not all(isinstance(row, Mapping) for row in table):
        raise InvalidInput("This is no table of losses.", "It is a list of rows.", "Make it: layerbudget.direct_check(...).")
    key = "epsilon_with_gap" if with_gap else "epsilon"
    pairs = []
    for tau in dict.fromkeys(row["relative_damping"] for row in table):
        rows = [r for r in table if r["relative_damping"] == tau and r["status"] == "ok"]
        rows.sort(key=lambda r: -r["gain"])
        for a, b in itertools.combinations(rows, 2):
            margin, needed = (a["gain"] - b["gain"]) / 2, a[key] + b[key]
            unknown = sum(r["lipschitz"] * r["step_norm"] ** 3 / 6 for r in (a, b))
            pairs.append(
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
    return pairs
