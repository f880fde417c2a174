"""A knapsack of increments: bound, greedy choice, and the exact solution of the undecided core.

Filling by density and cutting the critical item gives an upper bound (the linear relaxation), greedy a lower one. Items whose
reduced gain exceeds the difference are settled for certain; what remains, the core, is usually a handful and goes to the
exact solver (HiGHS through scipy).
"""

from __future__ import annotations

import numpy as np

from .inputs import Vector

_CORE = 2000


def knapsack(
    gain: Vector, cost: Vector, budget: float, *, exactly: bool = True
) -> tuple[np.ndarray, float, bool, float, float]:
    """Choose items of the largest total gain within a budget.

    Returns:
        ``(mask, bound, exact, price, spread)``: the choice, an upper bound, whether the choice is proven optimal, the
        density of the critical item, and the distance between bound and greedy value.
    """
    take = np.zeros(gain.size, dtype=bool)
    order = np.argsort(-gain / cost, kind="stable")
    order = order[gain[order] > 0.0]
    used = np.cumsum(cost[order])
    fit = int(np.searchsorted(used, budget, side="right"))
    take[order[:fit]] = True
    if fit == order.size:
        return take, float(gain[take].sum()), True, 0.0, 0.0
    critical = order[fit]
    left = budget - (float(used[fit - 1]) if fit else 0.0)
    price = float(gain[critical] / cost[critical])
    bound = float(gain[take].sum()) + max(left, 0.0) * price
    rest = order[fit:]
    while (able := rest[cost[rest] <= left]).size:
        take[able[0]] = True
        left -= float(cost[able[0]])
        rest = able[1:]
    value = float(gain[take].sum())
    spread = max(bound - value, 0.0)
    if spread <= 1e-14 * abs(bound):
        return take, bound, True, price, spread
    if not exactly:
        return take, bound, False, price, spread
    return _exact_core(gain, cost, budget, take, (bound, value, price, spread))


def _exact_core(
    gain: Vector, cost: Vector, budget: float, take: np.ndarray, found: tuple[float, float, float, float]
) -> tuple[np.ndarray, float, bool, float, float]:
    """Settle what reduced gains settle and solve the rest exactly."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    bound, value, price, spread = found
    reduced = gain - price * cost
    core = np.flatnonzero(np.abs(reduced) <= spread * (1 + 1e-9))
    if core.size > _CORE:
        return take, bound, False, price, spread
    choice_ = reduced > 0.0
    choice_[core] = False
    left = budget - float(cost[choice_].sum())
    unit, size = float(gain[core].max()), float(cost[core].max())
    answer = milp(
        -gain[core] / unit * 1e3,
        constraints=LinearConstraint((cost[core] / size)[None, :], -np.inf, left / size),
        bounds=Bounds(0, 1),
        integrality=np.ones(core.size),
        options={"mip_rel_gap": 0.0, "time_limit": 20.0, "presolve": False},
    )
    if answer.x is None:
        return take, bound, False, price, spread
    choice_[core] = answer.x > 0.5
    better = float(gain[choice_].sum())
    if float(cost[choice_].sum()) > budget or better < value:
        return take, bound, False, price, spread
    top = float(gain[reduced > 0.0].sum() - gain[core][reduced[core] > 0.0].sum()) - answer.mip_dual_bound * unit * 1e-3
    proven = answer.status == 0 and top - better <= 1e-9 * abs(better)
    return choice_, better if proven else max(min(bound, top), better), proven, price, spread
