"""Integers under a budget, with the distance to the optimum.

A separable concave utility in whole steps is a knapsack of increments (:mod:`layerbudget.solvers.knapsack`): block k's next
step costs ``a_k m`` and earns less than its previous one. With equal costs the relaxation is integral: greedy is exact.

Floors rounded up to multiples change the program. ``floor`` and ``largest-remainder`` therefore round the continuous optimum
*under those floors*: it meets the budget with every block at its floor or above, and rounding down can only spend less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InfeasibleBudget, InvalidInput
from .inputs import Vector, choice, number
from .knapsack import knapsack
from .separable import Program, solve
from .solution import Solution, frozen

_ROUNDING = 1e-12
METHODS = ("auto", "greedy", "exact", "floor", "largest-remainder")


class Rounded:
    """Integer decision (frozen).

    Attributes:
        counts: Integers, shape ``(K,)``.
        value: Utility of the counts.  bound: No integer decision is better than this.  optimum: Continuous optimum.
        gap: ``(bound - value) / |bound|``; zero when the counts are proven optimal.
        spent, budget: In the user's unit; ``spent <= budget``.
        method: What was used.  exact: Whether optimality is proven.
        price: Shadow price (utility per unit of budget), where the method finds one.
    """

    counts: np.ndarray
    value: float
    bound: float
    optimum: float
    gap: float
    spent: float
    budget: float
    method: str
    exact: bool
    price: float | None = None

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        frozen(self.counts)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Rounded is frozen; {name} cannot be set")

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the counts as plain values."""
        return {name: value for name, value in self.__dict__.items() if name != "counts"}

    def __repr__(self) -> str:
        return (
            f"Rounded({self.method}, spent={self.spent:.6g} of {self.budget:.6g}, value={self.value:.6g}, "
            f"optimum={self.optimum:.6g}, gap={self.gap:.1e})"
        )


def round_capacity(solution: Solution, *, method: str = "auto", multiple: int = 1, minimum: int = 0) -> Rounded:
    """Turn an allocation into integers that never exceed the budget.

    Args:
        solution: What :func:`layerbudget.solvers.allocate` returned.
        method: ``auto`` (greedy where it is exact, else the exact core), ``greedy``, ``exact``, ``floor`` (the paper's rule),
            ``largest-remainder``.
        multiple: Counts are multiples of this (rank 8, say).
        minimum: Smallest count, on top of the program's own floors.

    Returns:
        Counts, their value, the proven gap and what was spent.

    Raises:
        InvalidInput: A solution of another program, or an unknown method.
        InfeasibleBudget: Floors rounded up to multiples cost more than the budget, or a block has no multiple below its cap.

    >>> from layerbudget.solvers import allocate
    >>> round_capacity(allocate([4.0, 2.0, 1.0], 1.0, 6, rule="exactly")).counts.tolist()
    [4, 2, 0]
    """
    p = solution.program
    if p.sign > 0:
        raise InvalidInput("This is a sparsity solution.", "round_capacity takes allocations.", "Use round_parameters.")
    choice(method, "method", METHODS)
    step = int(number(multiple, "multiple", positive=True))
    if step != multiple:
        raise InvalidInput(f"multiple is {multiple}.", "Counts are multiples of a whole number.", "Use 1 or 8, for example.")
    floor = np.ceil(np.maximum(solution.lower, minimum) / step - 1e-9) * step
    top = np.floor(np.minimum(solution.upper, floor + _room(p.amount, p.budget, floor)) / step + 1e-9) * step
    _check_floor(p.amount, p.budget, floor, solution.upper, step)
    top = np.maximum(top, floor)
    problem = _Steps(_above(solution, floor), floor, top, step)
    if method in ("floor", "largest-remainder"):
        counts = problem.rounded_down()
        if method == "largest-remainder":
            counts = problem.add_largest(counts)
        counts, bound, exact = counts, problem.bound(), False
    else:
        counts, bound, exact = problem.solve(exactly=method != "greedy")
    return problem.result(counts, bound, method if method != "auto" else ("exact" if not problem.equal else "greedy"), exact)


def _above(solution: Solution, floor: Vector) -> Solution:
    """The optimum with every block at its floor or above: the solution itself where it is there already."""
    if (solution.value >= floor).all():
        return solution
    p = solution.program
    fields = dict(p.__dict__)
    low = np.maximum(p.low, floor - p.base)
    least = float(np.dot(p.amount, low))
    return solve(Program(**{**fields, "low": low, "high": np.maximum(p.high, low), "target": max(p.target, least)}))


def _room(amount: Vector, budget: float, floor: Vector) -> Vector:
    left = budget * (1 + _ROUNDING) - float(np.dot(amount, floor))
    return max(left, 0.0) / amount


def _check_floor(amount: Vector, budget: float, floor: Vector, upper: Vector, step: int) -> None:
    least = float(np.dot(amount, floor))
    if least > budget * (1 + _ROUNDING):
        raise InfeasibleBudget(
            f"Floors rounded up to multiples of {step} cost {least:g}, the budget is {budget:g}.",
            f"At least {least:g} is needed.",
            "Raise the budget, or lower the minimum or the multiple.",
        )
    if (floor > upper + 1e-9).any():
        k = int(np.argmax(floor - upper))
        raise InfeasibleBudget(
            f"Block {k} has no multiple of {step} between its floor and its cap {upper[k]:g}.",
            f"Its cap must be at least {floor[k]:g}.",
            "Raise the cap or lower the multiple.",
        )


class _Steps:
    """The knapsack of increments around a continuous solution."""

    def __init__(self, solution: Solution, floor: Vector, top: Vector, step: int) -> None:
        self.solution, self.program = solution, solution.program
        self.floor, self.top, self.step = floor, top, float(step)
        self.price = 0.0 if self.program.exact_budget else self.program.price
        a = self.program.amount
        self.equal = bool(a.min() == a.max())
        self.left = self.program.budget * (1 + _ROUNDING) - float(np.dot(a, floor))

    def utility(self, counts: Vector) -> float:
        """Utility of a decision under the price that the rounding uses."""
        p = self.program
        x = np.maximum(counts - p.base, 0.0)
        return float(np.add.reduce(p.scale * p.function.value(x))) - self.price * float(np.dot(p.amount, x))

    def window(self, width: int) -> tuple[Vector, Vector, np.ndarray, Vector]:
        """First level below, gains, owners and costs of the increments within ``width`` steps of the solution."""
        p, m = self.program, self.step
        middle = np.floor(self.solution.value / m) * m
        start = np.clip(middle - width * m, self.floor, self.top)
        stop = np.clip(middle + width * m, start, self.top)
        count = np.round((stop - start) / m).astype(np.int64)
        owner = np.repeat(np.arange(start.size), count)
        index = np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)
        level = start[owner] + index * m
        base = p.base if isinstance(p.base, float) else p.base[owner]
        value = p.function.value
        rise = value(np.maximum(level + m - base, 0.0)) - value(np.maximum(level - base, 0.0))
        cost = p.amount[owner] * m
        return start, p.scale[owner] * rise - self.price * cost, owner, cost

    def solve(self, *, exactly: bool) -> tuple[Vector, float, bool]:
        """Counts, an upper bound on any integer utility, and whether optimality is proven."""
        a, width = self.program.amount, 2
        while True:
            start, gain, owner, cost = self.window(width)
            budget = self.left - float(np.dot(a, start - self.floor))
            if budget >= 0.0 or (start <= self.floor).all():
                if self.equal:
                    unit = a[0] * self.step
                    budget = np.floor(budget / unit + 1e-9) * unit
                take, bound, exact, price, spread = knapsack(gain, cost, budget, exactly=exactly)
                counts = start + np.bincount(owner[take], minlength=start.size) * self.step
                if self._settled(start, counts, gain, owner, cost, price, spread):
                    return counts, self.utility(start) + bound, exact
            width *= 2

    def _settled(
        self, start: Vector, counts: Vector, gain: Vector, owner: np.ndarray, cost: Vector, price: float, spread: float
    ) -> bool:
        """Whether no increment outside the window can belong to the optimum."""
        if not gain.size:
            return True
        reduced = gain - price * cost
        first = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
        last = np.flatnonzero(np.r_[owner[1:] != owner[:-1], True])
        block = owner[first]
        reach = start[block] + (last - first + 1) * self.step
        below = (start[block] <= self.floor[block]) | (reduced[first] > spread)
        above = (reach >= self.top[block]) | (reduced[last] < -spread)
        idle = np.ones(start.size, dtype=bool)
        idle[block] = False
        return bool(below.all() and above.all() and (self.floor[idle] >= self.top[idle]).all())

    def rounded_down(self) -> Vector:
        """The optimum rounded down to steps. A value within 1e-9 below a step counts as reaching it where the budget allows."""
        m, left = self.step, self.left
        down = np.clip(np.floor(self.solution.value / m) * m, self.floor, self.top)
        near = np.clip(np.floor(self.solution.value / m + 1e-9) * m, self.floor, self.top)
        spent = float(np.dot(self.program.amount, near - self.floor))
        return near if spent <= left else down

    def bound(self) -> float:
        """Upper bound on any integer utility."""
        return self.solve(exactly=False)[1]

    def add_largest(self, counts: Vector) -> Vector:
        """Give one step each to the largest fractional parts, as far as the budget goes."""
        a, counts = self.program.amount, counts.copy()
        left = self.left - float(np.dot(a, counts - self.floor))
        for k in np.argsort(counts - self.solution.value, kind="stable"):
            if counts[k] + self.step <= self.top[k] and a[k] * self.step <= left:
                counts[k] += self.step
                left -= a[k] * self.step
        return counts

    def result(self, counts: Vector, bound: float, method: str, exact: bool) -> Rounded:
        """Bind the counts."""
        p, value = self.program, self.utility(counts)
        x = self.solution.value - p.base
        optimum = float(np.add.reduce(p.scale * p.function.value(x))) - self.price * float(np.dot(p.amount, x))
        bound = value if exact else max(min(bound, max(optimum, value)), value)
        return Rounded(
            counts=np.round(counts).astype(np.int64), value=value, bound=bound, optimum=optimum, method=method, exact=exact,
            gap=(bound - value) / abs(bound) if bound else 0.0, spent=float(np.dot(p.amount, counts)), budget=p.budget,
        )  # fmt: skip
