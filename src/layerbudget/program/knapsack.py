"""A knapsack of increments: bound, greedy choice, and the exact solution of the undecided core.

Filling by density and cutting the critical item gives an upper bound (the linear relaxation), greedy a lower one. Items whose
reduced gain exceeds the difference are settled for certain; what remains, the core, is usually a handful and is solved exactly:
by dynamic programming where costs are small multiples of a common unit (shapes usually are), else by HiGHS through scipy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import numpy as np

from .inputs import Vector

_CORE = 2000
_FIRST = 200
_TABLE = 40_000_000


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
    """Settle what reduced gains settle and solve the rest exactly, beginning with the most doubtful items."""
    bound, value, price, spread = found
    reduced = gain - price * cost
    doubt = np.abs(reduced)
    core = np.argsort(doubt, kind="stable")[:_FIRST]
    for _ in range(4):
        answer, proven = _solve_core(gain, cost, budget, reduced > 0.0, core)
        if answer is not None and (better := float(gain[answer].sum())) >= value:
            take, value = answer, better
            spread = max(bound - value, 0.0)
        open_ = np.flatnonzero(doubt <= spread * (1 + 1e-9))
        if answer is None or open_.size > _CORE:
            return take, bound, False, price, spread
        if np.isin(open_, core).all():
            return take, value if proven else bound, proven, price, spread
        core = open_
    return take, bound, False, price, spread


def _solve_core(
    gain: Vector, cost: Vector, budget: float, settled: np.ndarray, core: np.ndarray
) -> tuple[np.ndarray | None, bool]:
    """Best choice of the core's items with all others settled, and whether it is proven best."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    chosen = settled.copy()
    chosen[core] = False
    left = budget - float(cost[chosen].sum())
    if left < 0.0:
        return None, False
    whole = _dynamic(gain[core], cost[core], left)
    if whole is not None:
        chosen[core] = whole
        return chosen, True
    unit, size = float(gain[core].max()), float(cost[core].max())
    with _quiet():
        answer = milp(
            -gain[core] / unit * 1e3,
            constraints=LinearConstraint((cost[core] / size)[None, :], -np.inf, left / size),
            bounds=Bounds(0, 1),
            integrality=np.ones(core.size),
            options={"mip_rel_gap": 0.0, "time_limit": 10.0, "presolve": False},
        )
    if answer.x is None:
        return None, False
    chosen[core] = answer.x > 0.5
    if float(cost[chosen].sum()) > budget:
        return None, False
    found, top = float(gain[chosen].sum()), -answer.mip_dual_bound * unit * 1e-3
    rest = found - float(gain[core][answer.x > 0.5].sum())
    return chosen, answer.status == 0 and rest + top - found <= 1e-9 * abs(found)


def _dynamic(gain: Vector, cost: Vector, budget: float) -> np.ndarray | None:
    """Exact choice by dynamic programming over whole units of cost; ``None`` where costs have no small common unit."""
    if cost.max() > 2**52 or (cost != np.floor(cost)).any():
        return None
    unit = int(np.gcd.reduce(cost.astype(np.int64)))
    size = (cost / unit).astype(np.int64)
    room = min(int(budget / unit * (1 + 1e-12)), int(size.sum()))
    if room < 0 or (room + 1) * gain.size > _TABLE:
        return None
    best = np.zeros(room + 1)
    taken = np.zeros((gain.size, room + 1), dtype=bool)
    for i, (g, s) in enumerate(zip(gain.tolist(), size.tolist(), strict=True)):
        if s <= room:
            better = best[: room + 1 - s] + g
            taken[i, s:] = better > best[s:]
            best[s:] = np.maximum(best[s:], better)
    chosen = np.zeros(gain.size, dtype=bool)
    for i in range(gain.size - 1, -1, -1):
        if taken[i, room]:
            chosen[i] = True
            room -= int(size[i])
    return chosen


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what HiGHS writes to the process's standard output out of it: commands print one JSON document there."""
    with contextlib.ExitStack() as stack:
        try:
            flush = ctypes.CDLL(None).fflush
            sys.stdout.flush()
            kept = os.dup(1)
        except (OSError, TypeError, AttributeError, ValueError):
            yield
            return
        stack.callback(os.close, kept)
        flush(None)
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(kept, 1)
