r"""Capacity whose worth is known unit by unit (the program behind ranks by their own gains).

    maximise   sum_k  sum_{i <= r_k} m_ki      subject to  sum_k c_k r_k <= B,   l_k <= r_k <= u_k,   r_k whole,

with ``m_k1 >= m_k2 >= ... >= 0``: every further unit of a block earns no more than the one before. The linear relaxation takes
units in the order of ``m_ki / c_k`` until the budget is spent; its shadow price is the density of the unit that no longer
fits. Units of one block cost the same, so the best set of units is a prefix of every block, and the program is a plain
knapsack: solved exactly up to the reported gap, which is zero with equal costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget, InvalidInput, NotFinite
from .inputs import Vector, bound_vector, cost_vector, number
from .knapsack import knapsack
from .rounding import Rounded

_ROUNDING = 1e-12


def allocate_increments(
    increments: Sequence[ArrayLike],
    cost: ArrayLike,
    budget: float,
    *,
    lower: ArrayLike = 0,
    upper: ArrayLike | None = None,
    multiple: int = 1,
) -> Rounded:
    """Divide a budget over blocks whose every unit has a worth of its own.

    Args:
        increments: Worth of the first, second, ... unit of every block, descending; K rows of any lengths. Beyond a row's
            end a unit is worth nothing and is not bought.
        cost: Budget per unit ``c_k > 0``, shape ``(K,)`` or a scalar.
        budget: What may be spent.
        lower: Smallest count (paid first, whatever it is worth).
        upper: Largest count (none by default).
        multiple: Counts are multiples of this.

    Returns:
        Counts with their value, an upper bound (``optimum`` is that of the linear relaxation), the proven gap, what was spent
        and the shadow price.

    Raises:
        NotFinite, InvalidCost, LengthMismatch, NegativeValue: An input outside its domain.
        InvalidInput: A worth that is negative or above its predecessor, or a multiple that is no whole number.
        InfeasibleBudget: Floors above caps, or above the budget.

    >>> allocate_increments([[4, 1], [3, 2]], cost=1, budget=3).counts.tolist()
    [1, 2]
    """
    rows = [_row(r, k) for k, r in enumerate(increments)]
    size, total, step = len(rows), number(budget, "budget"), int(number(multiple, "multiple", positive=True))
    if step != multiple or not rows:
        raise InvalidInput(
            f"multiple is {multiple}, for {size} blocks.", "Counts are multiples of a whole number, of one block or more.", ""
        )
    c = cost_vector(cost, size) * step
    low = np.ceil(np.full(size, 1.0) * bound_vector(lower, size, "lower", 0.0) / step - 1e-9).astype(np.int64)
    high = np.floor(np.full(size, 1.0) * bound_vector(upper, size, "upper", np.inf) / step + 1e-9)
    grouped = [_grouped(r, step) for r in rows]
    left = total * (1 + _ROUNDING) - float(c @ low)
    _check(low, high, left, total, step)
    top = np.minimum(high, [max(len(g), n) for g, n in zip(grouped, low, strict=True)]).astype(np.int64)
    owner = np.repeat(np.arange(size), top - low)
    gain = np.concatenate([g[n:t] for g, n, t in zip(grouped, low, top, strict=True)] or [np.zeros(0)])
    taken, bound, exact, price, _ = knapsack(gain, c[owner], max(left, 0.0))
    units = low + np.bincount(owner[taken], minlength=size)
    paid = sum(float(g[:n].sum()) for g, n in zip(grouped, low, strict=True))
    value = sum(float(g[:n].sum()) for g, n in zip(grouped, units, strict=True))
    optimum = paid + _relaxed(gain, c[owner], max(total - float(c @ low), 0.0))
    bound = value if exact else max(min(paid + bound, optimum), value)
    return Rounded(
        counts=units * step, value=value, bound=bound, optimum=max(optimum, value), method="increments", exact=exact,
        gap=(bound - value) / bound if bound else 0.0, spent=float(c @ units), budget=total, price=price,
    )  # fmt: skip


def _row(values: ArrayLike, k: int) -> Vector:
    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1 or not np.isfinite(row).all():
        raise NotFinite(f"The worths of block {k} are no row of finite numbers.", "", "Score again.")
    if (row < 0).any() or (np.diff(row) > 1e-9 * row.max(initial=0.0)).any():
        raise InvalidInput(
            f"The worths of block {k} are negative or rise.",
            "Every unit earns zero or more, and no more than the one before.",
            "Sort squared singular values, or take the concave hull of a measured curve.",
        )
    return row


def _grouped(row: Vector, step: int) -> Vector:
    return np.add.reduceat(row, np.arange(0, row.size, step)) if row.size else row


def _check(low: np.ndarray, high: Vector, left: float, total: float, step: int) -> None:
    if (low > high).any():
        k = int(np.argmax(low > high))
        raise InfeasibleBudget(
            f"Block {k} needs at least {low[k] * step:g} and may have at most {high[k] * step:g}.",
            "Every floor must lie below its cap.",
            f"Raise the cap of block {k} or lower its floor.",
        )
    if left < 0.0:
        raise InfeasibleBudget(
            f"The budget {total:g} is below the {total - left:g} that the floors cost.",
            f"It must be at least {total - left:g}.",
            "Raise the budget or lower the floors.",
        )


def _relaxed(gain: Vector, cost: Vector, budget: float) -> float:
    """Optimum of the linear relaxation: units by density, the last one in part."""
    order = np.argsort(-gain / cost, kind="stable")
    room = np.clip(budget - (np.cumsum(cost[order]) - cost[order]), 0.0, cost[order])
    return float((gain[order] * room / cost[order]).sum())
