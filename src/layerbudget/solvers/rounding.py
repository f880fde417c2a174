"""Whole numbers under a budget, with the distance to the optimum.

A separable concave utility in whole steps is a :func:`~layerbudget.solvers.choices.knapsack` of steps of falling gain: block
k's next step costs ``a_k m`` and earns less than its previous one. With equal costs the relaxation is integral: taking
steps by density is exact.

Floors rounded up to multiples change the program. ``floor`` therefore rounds the continuous optimum *under those floors*: it
meets the budget with every block at its floor or above, and rounding down can only spend less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget, InvalidInput, NotFinite
from .choices import knapsack
from .inputs import Vector, bound_vector, choice, cost_vector, in_a_line, number, whole_number
from .separable import Program, Solution, solve

_ROUNDING = 1e-12
_NEAR = 1e-9  # a long search ends with a decision that misses no larger share of what is gained
METHODS = ("auto", "floor")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RoundedCapacity:
    """Integer decision: ``counts``, shape ``(K,)``, with their utility ``value`` and what they ``spent`` of the ``budget``.

    No integer decision is better than ``bound``; ``optimum`` is that of the continuous program. ``gap`` is
    ``(bound - value) / |bound|``, zero where the counts are proven optimal (``exact``); a search that takes long
    ends where it is below 1e-9. ``price`` is the utility per unit of budget, where the method finds one.
    """

    counts: np.ndarray
    value: float
    bound: float
    optimum: float
    method: str
    exact: bool
    gap: float
    spent: float
    budget: float
    price: float | None = None

    def __post_init__(self) -> None:
        self.counts.flags.writeable = False

    def __repr__(self) -> str:
        proven = "exact" if self.exact else f"gap={self.gap:.1e}"
        found = f"value={self.value:.6g}, optimum={self.optimum:.6g}, spent={self.spent:.6g} of {self.budget:.6g}, {proven}"
        return f"{type(self).__name__}({in_a_line(self.counts)}, {found})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the counts, as plain values."""
        return {name: value for name, value in self.__dict__.items() if name != "counts" and (name, value) != ("price", None)}


def round_capacity(solution: Solution, *, method: str = "auto", multiple: int = 1) -> RoundedCapacity:
    """Turn what :func:`layerbudget.solvers.allocate` returned into multiples of a number that never exceed the budget.

    ``method`` is ``auto`` (the best integers) or ``floor`` (the paper's rule).

    Raises:
        InvalidInput: A solution of another program, or an unknown method.
        InfeasibleBudget: Floors rounded up to multiples cost more than the budget, or a block has no multiple below its cap.

    >>> from layerbudget.solvers import allocate
    >>> round_capacity(allocate([4.0, 2.0, 1.0], 1.0, 6, spend="exactly")).counts.tolist()
    [4, 2, 0]
    """
    p = solution.program
    if not isinstance(p, Program) or p.sign > 0:
        what = "a sparsity solution" if isinstance(p, Program) else "the solution of a joint program"
        raise InvalidInput(
            f"This is {what}.", "round_capacity takes those of allocate.", "Use round_parameters for sparsities."
        )
    choice(method, "method", METHODS)
    step = whole_number(multiple, "multiple")
    floor = np.ceil(solution.lower / step - 1e-9) * step
    least = float(np.dot(p.amount, floor))
    left = p.budget * (1 + _ROUNDING) - least
    if left < 0.0:
        raise InfeasibleBudget(
            f"Floors rounded up to multiples of {step} cost {least:.15g}, the budget is {p.budget:g}.",
            f"At least {least:.15g} is needed.",
            "Raise the budget, or lower the floors or the multiple.",
        )
    if (floor > solution.upper + 1e-9).any():
        k = int(np.argmax(floor - solution.upper))
        raise InfeasibleBudget(
            f"Block {k} has no multiple of {step} between its floor and its cap {solution.upper[k]:g}.",
            f"Its cap must be at least {floor[k]:g}.",
            "Raise the cap or lower the multiple.",
        )
    top = np.maximum(np.floor(np.minimum(solution.upper, floor + left / p.amount) / step + 1e-9) * step, floor)
    if not (solution.value >= floor).all():  # the optimum with every block at its floor or above
        low = np.maximum(p.low, floor - p.base)
        target = max(p.target, float(np.dot(p.amount, low)))
        solution = solve(p._replace(low=low, high=np.maximum(p.high, low), target=target))
    problem = _Steps(solution, floor, top, float(step), left)
    counts, bound, exact = problem.solve()
    if method == "floor":
        counts, exact = problem.rounded_down(), False
    else:
        method = "greedy" if problem.equal else "exact"
    value, optimum = problem.utility(counts), problem.utility(solution.value)
    bound = value if exact else float(max(min(bound, max(optimum, value)), value))
    return RoundedCapacity(
        counts=np.round(counts).astype(np.int64),
        value=value,
        bound=bound,
        optimum=optimum,
        method=method,
        exact=exact,
        gap=(bound - value) / abs(bound) if bound else 0.0,
        spent=float(np.dot(p.amount, counts)),
        budget=p.budget,
    )


class _Steps:
    """The knapsack of steps around a continuous solution; ``left`` is the budget above the floors."""

    def __init__(self, solution: Solution, floor: Vector, top: Vector, step: float, left: float) -> None:
        self.solution, self.program = solution, solution.program
        self.floor, self.top, self.step, self.left = floor, top, step, left
        self.price = 0.0 if self.program.exact_budget else self.program.price
        self.equal = bool(self.program.amount.min() == self.program.amount.max())

    def utility(self, counts: Vector) -> float:
        """Return the utility of a decision under the price that the rounding uses."""
        p = self.program
        x = np.maximum(counts - p.base, 0.0)
        return float(np.add.reduce(p.scale * p.function.value(x))) - self.price * float(np.dot(p.amount, x))

    def solve(self) -> tuple[Vector, float, bool]:
        """Return counts, an upper bound on any integer utility, and whether optimality is proven.

        Steps are those within a window around the solution. A block's window grows until to leave it loses more than the
        distance between the steps by density and their bound: no better decision does.
        """
        p, m = self.program, self.step
        middle, width = np.floor(self.solution.value / m) * m, np.full(len(self.floor), 2.0)
        while True:
            start = np.clip(middle - width * m, self.floor, self.top)
            count = np.round((np.clip(middle + width * m, start, self.top) - start) / m).astype(np.int64)
            budget = self.left - float(np.dot(p.amount, start - self.floor))
            if budget < 0.0 and (start > self.floor).any():
                width *= 2.0
                continue
            gain, cost, budget = self._gains(start, count), p.amount * m, max(budget, 0.0)
            if self.equal:
                cost, budget = np.ones(len(cost)), np.floor(budget / cost[0] + 1e-9)
            *_, price, spread = knapsack(gain, cost, budget, enough=np.inf)
            settled = self._settled(start, count, gain - price * cost[:, None], spread)
            if settled.all():
                taken, bound, exact, *_ = knapsack(gain, cost, budget, enough=_NEAR)
                return start + taken * m, self.utility(start) + bound, exact
            width = np.where(settled, width, 2.0 * width)

    def _gains(self, start: Vector, count: np.ndarray) -> np.ndarray:
        """Gain of every step from ``start``, ``(K, L)``; minus infinity beyond the window."""
        p, index = self.program, np.arange(int(count.max(initial=1)) + 1)
        x = np.maximum(start[:, None] + np.minimum(index, count[:, None]) * self.step - p.base[:, None], 0.0)
        gain = p.scale[:, None] * np.diff(p.function.value(x), axis=1) - self.price * p.amount[:, None] * self.step
        return np.where(index[:-1] < count[:, None], gain, -np.inf)

    def _settled(self, start: Vector, count: np.ndarray, reduced: np.ndarray, spread: float) -> np.ndarray:
        """Whether to leave the window of a block on either side loses more than ``spread``, ``(K,)``."""
        rows = np.arange(len(count))
        first, last = reduced[rows, 0], reduced[rows, np.maximum(count - 1, 0)]
        some = np.isfinite(reduced)
        below = np.where(some & (reduced > 0.0), reduced, 0.0).sum(axis=1) + first  # steps below gain no less than the first
        above = np.where(some & (reduced < 0.0), reduced, 0.0).sum(axis=1) + last
        bottom, top = start <= self.floor, start + count * self.step >= self.top
        inside = (bottom | ((first > 0.0) & (below > spread))) & (top | ((last < 0.0) & (above < -spread)))
        return np.where(count > 0, inside, self.floor >= self.top)

    def rounded_down(self) -> Vector:
        """The optimum rounded down to steps. A value within 1e-9 below a step counts as reaching it where the budget allows."""
        m, value = self.step, self.solution.value
        near = np.clip(np.floor(value / m + 1e-9) * m, self.floor, self.top)
        if float(np.dot(self.program.amount, near - self.floor)) <= self.left:
            return near
        return np.clip(np.floor(value / m) * m, self.floor, self.top)


def allocate_increments(
    increments: Sequence[ArrayLike],
    cost: ArrayLike,
    budget: float,
    *,
    lower: ArrayLike = 0,
    upper: ArrayLike | None = None,
    multiple: int = 1,
) -> RoundedCapacity:
    r"""Divide a budget over blocks whose every unit has a worth of its own (ranks by their own gains).

        maximise   sum_k  sum_{i <= r_k} m_ki      subject to  sum_k c_k r_k <= B,   l_k <= r_k <= u_k,   r_k whole,

    with ``m_k1 >= m_k2 >= ... >= 0``. The linear relaxation takes units in the order of ``m_ki / c_k`` until the budget is
    spent: its value is ``optimum``, its shadow price the density of the unit that no longer fits. Units of one block cost the
    same, so the best set of units is a prefix of every block: a knapsack of steps, solved exactly up to the reported gap, zero
    with equal costs.

    Args:
        increments: K descending rows of any lengths; beyond a row's end a unit is worth nothing and is not bought.
        cost: Of a unit, ``c_k > 0``.
        budget: What may be spent, in the unit of ``cost``.
        lower: Floors, which are paid first, whatever they are worth.
        upper: Caps (none by default).
        multiple: Counts are multiples of it.

    Raises:
        InvalidInput: A worth that is negative or above its predecessor, or another input outside its domain.
        InfeasibleBudget: Floors above caps, or above the budget.

    >>> allocate_increments([[4, 1], [3, 2]], cost=1, budget=3).counts.tolist()
    [1, 2]
    """
    rows = [_row(r, k) for k, r in enumerate(increments)]
    size, total, step = len(rows), number(budget, "budget"), whole_number(multiple, "multiple")
    if not rows:
        raise InvalidInput("There is no block.", "The budget is divided over one block or more.", "Give one row per block.")
    c = cost_vector(cost, size) * step
    low = np.ceil(bound_vector(lower, size, "lower", 0.0) / step - 1e-9)
    high = np.floor(bound_vector(upper, size, "upper", np.inf) / step + 1e-9)
    groups = [np.add.reduceat(row, np.arange(0, row.size, step)) if row.size else row for row in rows]
    left = total * (1 + _ROUNDING) - float(c @ low)
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
    low = low.astype(np.int64)
    top = np.minimum(high, [max(len(g), n) for g, n in zip(groups, low, strict=True)]).astype(np.int64)
    offered = [g[n:t] for g, n, t in zip(groups, low, top, strict=True)]
    gain = np.zeros((size, max(map(len, offered))))
    for row, worths in zip(gain, offered, strict=True):
        row[: len(worths)] = worths
    taken, bound, exact, price, _ = knapsack(gain, c, max(left, 0.0))
    units = low + taken
    paid = sum(float(g[:n].sum()) for g, n in zip(groups, low, strict=True))
    value = sum(float(g[:n].sum()) for g, n in zip(groups, units, strict=True))
    owner = np.repeat(np.arange(size), list(map(len, offered)))
    optimum = paid + _relaxed(np.concatenate(offered), c[owner], max(total - float(c @ low), 0.0))
    bound = value if exact else float(max(min(paid + bound, optimum), value))
    return RoundedCapacity(
        counts=units * step,
        value=value,
        bound=bound,
        optimum=max(optimum, value),
        method="increments",
        exact=exact,
        gap=(bound - value) / bound if bound else 0.0,
        spent=float(c @ units),
        budget=total,
        price=price,
    )


def _row(values: ArrayLike, k: int) -> Vector:
    try:
        row = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            f"The worths of block {k} are no numbers ({error}).", "", "Give a row of numbers per block."
        ) from error
    if row.ndim != 1 or not np.isfinite(row).all():
        raise NotFinite(f"The worths of block {k} are no row of finite numbers.", "", "Score again.")
    if (row < 0).any() or (np.diff(row) > 1e-9 * row.max(initial=0.0)).any():
        raise InvalidInput(
            f"The worths of block {k} are negative or rise.",
            "Every unit earns zero or more, and no more than the one before.",
            "Sort squared singular values, or take the concave hull of a measured curve.",
        )
    return row


def _relaxed(gain: Vector, cost: Vector, budget: float) -> float:
    """Optimum of the linear relaxation: units by density, the last one in part."""
    order = np.argsort(-gain / cost, kind="stable")
    room = np.clip(budget - (np.cumsum(cost[order]) - cost[order]), 0.0, cost[order])
    return float((gain[order] * room / cost[order]).sum())


def round_parameters(values: ArrayLike, numel: ArrayLike, total: int, caps: ArrayLike = 1.0) -> np.ndarray:
    """Return whole numbers of pruned parameters per block that sum to ``total``, each within one of ``values * numel``.

    ``values`` and ``caps`` are sparsities; no count exceeds ``floor(caps * numel)`` unless the total demands it. What blocks at
    their caps cannot take goes to the others, which may then have more than one beyond.

    Raises:
        InfeasibleBudget: A total above the number of all parameters.
        InvalidInput: An input outside its domain.

    >>> round_parameters([0.25, 0.5, 0.5], [3, 3, 3], 4).tolist()
    [1, 2, 1]
    """
    v, wanted = bound_vector(values, np.size(values), "values", 0.0), number(total, "total")
    n = cost_vector(numel, v.size, "numel").astype(np.int64)
    if wanted != int(wanted) or not np.isfinite(v).all():
        raise InvalidInput("The total is not whole, or a sparsity is not finite.", "Parameters are counted.", "Correct it.")
    if wanted > n.sum():
        what = f"{wanted:,.0f} parameters are to go, of {n.sum():,}"
        raise InfeasibleBudget(f"{what}.", f"At most {n.sum():,} can.", "Prune less.")
    ideal = v * n
    top = np.minimum(np.floor(bound_vector(caps, v.size, "caps", 1.0) * n * (1 + 1e-15)).astype(np.int64), n)
    counts = np.clip(np.floor(ideal).astype(np.int64), 0, top)
    while (missing := int(wanted) - int(counts.sum())) != 0:
        rest: Vector = ideal - counts
        step = 1 if missing > 0 else -1
        able = counts < (top if (counts < top).any() else n) if step > 0 else counts > 0
        order = np.argsort(-rest if step > 0 else rest, kind="stable")
        order = order[able[order]]
        if not order.size:
            break
        each, extra = divmod(abs(missing), order.size)
        room = (np.where(counts < top, top, n) - counts if step > 0 else counts)[order]
        counts[order] += step * np.minimum(np.where(np.arange(order.size) < extra, each + 1, each), room)
    return counts


def few_levels(values: ArrayLike, weights: ArrayLike, levels: int) -> Vector:
    r"""Return values, shape ``(K,)``, of which at most so many are distinct, with the same weighted sum.

        minimise   sum_k n_k (rho_k - c_{s(k)})^2     over  N levels c and an assignment s.

    In one dimension the groups of an optimum are intervals of the sorted values and a level is the weighted mean of its group,
    so ``sum n_k c_{s(k)} = sum n_k rho_k``: what the plan spends stays. Dynamic programming is exact. The first value of the
    last group rises with its last one (the cost of a group has the Monge property), so the ends are looked at by halving, in
    ``O(N K log K)``.

    Raises:
        InvalidInput: Fewer than one level, values that are not finite, or weights that are not positive, one per value.

    >>> few_levels([0.1, 0.5, 0.2, 0.6], [1, 1, 1, 1], 2).round(6).tolist()
    [0.15, 0.55, 0.15, 0.55]
    """
    v = bound_vector(values, np.size(values), "values", 0.0)
    n = cost_vector(weights, v.size, "weights")
    if not np.isfinite(v).all():
        raise NotFinite("A value is not finite.", "Every value must be finite.", "Correct it.")
    levels = whole_number(levels, "levels")
    order = np.argsort(v, kind="stable")
    x, w = v[order], n[order]
    size, count = len(x), min(levels, len(np.unique(x)))
    mass, first, second = (np.concatenate([[0.0], np.cumsum(w * x**p)]) for p in (0, 1, 2))
    best, cut = np.full(size + 1, np.inf), np.zeros((count + 1, size + 1), dtype=np.int64)
    best[0] = 0.0
    for k in range(1, count + 1):
        before, best = best, np.full(size + 1, np.inf)
        jobs = [(k, size, k - 1, size - 1)]  # ends of the last group, and starts that it may have
        while jobs:
            low, high, least, most = jobs.pop()
            j = (low + high) // 2
            i = np.arange(least, min(most, j - 1) + 1)
            spread = second[j] - second[i] - (first[j] - first[i]) ** 2 / (mass[j] - mass[i])
            distances = before[i] + np.maximum(spread, 0.0)  # squared, from the means of the groups
            at = int(np.argmin(distances))
            best[j], cut[k, j] = distances[at], i[at]
            if low < j:
                jobs.append((low, j - 1, least, int(i[at])))
            if j < high:
                jobs.append((j + 1, high, int(i[at]), most))
    result, end = np.empty(size), size
    for k in range(count, 0, -1):
        start = int(cut[k, end])
        result[order[start:end]] = (first[end] - first[start]) / (mass[end] - mass[start])
        end = start
    return result
