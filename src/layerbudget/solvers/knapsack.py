r"""A knapsack of increments: a bound, a greedy choice, and the exact solution of the undecided core.

    maximise   sum_i g_i x_i      subject to  sum_i c_i x_i <= B,   x_i in {0, 1}

Filling by density ``g/c`` and cutting the critical item gives an upper bound (the linear relaxation), greedy a lower one. An
item whose reduced gain ``|g_i - price c_i|`` exceeds the difference of the two is settled for certain. What remains, the core,
grows outwards from the critical item, one item at a time, as a list of states (room left, value) that no other state dominates
and whose own linear bound is above the best value found (Pisinger 1997, "A minimal algorithm for the 0-1 knapsack problem").
When no state is left, the best value is optimal. Costs need no common unit. Where the list outgrows its limits (gains nearly
proportional to costs), every other state is let go, and the bound says what that may have lost.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .inputs import Vector

_STATES = 50_000
_HISTORY = 10_000_000
_ROUNDING = 1e-14


def knapsack(
    gain: Vector, cost: Vector, budget: float, *, exactly: bool = True
) -> tuple[np.ndarray, float, bool, float, float]:
    """Choose items of the largest total gain within a budget.

    Args:
        gain: Gains, shape ``(N,)``; what gains nothing is never chosen.
        cost: Costs, positive, shape ``(N,)``.
        budget: What may be spent, not negative.
        exactly: Solve the core; else leave it at greedy.

    Returns:
        ``(mask, bound, exact, price, spread)``: the choice, an upper bound, whether the choice is proven optimal (to 1e-14 of
        the bound), the density of the critical item, and the distance between the linear bound and the value of the choice.
    """
    take = np.zeros(gain.size, dtype=bool)
    order = np.argsort(-gain / cost, kind="stable")
    order = order[gain[order] > 0.0]
    g, c = gain[order], cost[order]
    used = np.cumsum(c)
    fit = int(np.searchsorted(used, budget, side="right"))
    take[order[:fit]] = True
    if fit == order.size:
        return take, float(gain[take].sum()), True, 0.0, 0.0
    room = max(budget - (float(used[fit - 1]) if fit else 0.0), 0.0)
    base, price = float(g[:fit].sum()), float(g[fit] / c[fit])
    core = _Core(g, c, fit, room, _ROUNDING * (base + room * price))
    lost = core.solve() if exactly else core.top
    take[order[core.changed()]] ^= True
    spread = max(core.top - core.best, 0.0)
    exact = min(lost, core.top) - core.best <= core.tolerance
    value = float(gain[take].sum())
    return take, value if exact else base + min(lost, core.top), exact, price, spread


@dataclasses.dataclass
class _Core:
    """The search around the critical item; values count from the filling by density.

    Attributes:
        gain, cost: Items by falling density.
        fit: The critical item, the first that does not fit.
        room: What the items before it leave of the budget.
        tolerance: Differences of value below this do not count.
    """

    gain: Vector
    cost: Vector
    fit: int
    room: float
    tolerance: float

    def __post_init__(self) -> None:
        self.density = self.gain / self.cost
        price = self.density[self.fit]
        self.top = self.room * float(price)
        self.doubt = self.top - np.abs(self.gain - price * self.cost)  # the linear bound once the item's choice is reversed
        self.history: list[tuple[int, np.ndarray]] = []
        self.reached: tuple[int, int] | None = None
        self.greedy: list[int] = []
        self.best, left, rest = 0.0, self.room, np.arange(self.fit, self.gain.size)
        while (rest := rest[self.cost[rest] <= left]).size:
            first, rest = int(rest[0]), rest[1:]
            self.greedy.append(first)
            left -= float(self.cost[first])
            self.best += float(self.gain[first])

    def solve(self) -> float:
        """Search; returns what no state that was let go can exceed (``-inf`` where none was)."""
        room, value, lost, kept = np.array([self.room]), np.zeros(1), -np.inf, 0
        before, after, forward = self._before(self.fit - 1), self._after(self.fit), True
        while room.size and (before >= 0 or after < self.gain.size):
            forward = after < self.gain.size and (forward or before < 0)
            item, sign = (after, 1.0) if forward else (before, -1.0)
            room = np.concatenate([room, room - sign * self.cost[item]])
            value = np.concatenate([value, value + sign * self.gain[item]])
            self._improve(room, value)
            after, before = self._after(after + forward), self._before(before - (not forward))
            bound = self._bounds(room, value, before, after)
            keep = self._undominated(room, value, np.flatnonzero(bound > self.best + self.tolerance))
            if keep.size > _STATES:  # every other one: what is left still covers every amount of room
                lost = max(lost, float(bound[keep[1::2]].max()))
                keep = keep[::2]
            half = room.size // 2
            self.history.append((item, np.where(keep < half, keep, half - 1 - keep).astype(np.int32)))
            room, value, kept, forward = room[keep], value[keep], kept + keep.size, not forward
            if kept > _HISTORY:
                return max(lost, float(bound[keep].max(initial=-np.inf)))
        return lost

    def _after(self, item: int) -> int:
        """The next item from here on that may be worth taking."""
        while item < self.gain.size and self.doubt[item] <= self.best + self.tolerance:
            item += 1
        return item

    def _before(self, item: int) -> int:
        """The next item down from here that may be worth leaving."""
        while item >= 0 and self.doubt[item] <= self.best + self.tolerance:
            item -= 1
        return item

    def _improve(self, room: Vector, value: Vector) -> None:
        """Remember the best state within the budget."""
        fits = np.flatnonzero(room >= 0.0)
        if fits.size and value[fits].max() > self.best:
            state = int(fits[np.argmax(value[fits])])
            half = room.size // 2
            self.best, self.reached = float(value[state]), (len(self.history), state if state < half else half - 1 - state)

    def _bounds(self, room: Vector, value: Vector, before: int, after: int) -> Vector:
        """Linear bound of every state: room is filled at the next density after the core, debt paid at the one before it."""
        fill = self.density[after] if after < self.gain.size else 0.0
        bound = value + np.maximum(room, 0.0) * fill
        debt = room < 0.0
        bound[debt] += room[debt] * self.density[before] if before >= 0 else -np.inf
        return bound

    @staticmethod
    def _undominated(room: Vector, value: Vector, states: np.ndarray) -> np.ndarray:
        """States by falling room and rising value: none has both less room and no more value than another."""
        states = states[np.lexsort((-value[states], -room[states]))]
        best = np.maximum.accumulate(value[states])
        return states[np.concatenate([[True], value[states][1:] > best[:-1]])] if states.size else states

    def changed(self) -> np.ndarray:
        """Items whose choice differs from the filling by density, in the best solution found."""
        if self.reached is None:
            return np.array(self.greedy, dtype=np.int64)
        step, code = self.reached
        items = []
        while step >= 0:
            item, _ = self.history[step]
            if code < 0:
                items.append(item)
            parent = -1 - code if code < 0 else code
            step -= 1
            code = int(self.history[step][1][parent]) if step >= 0 else 0
        return np.array(items, dtype=np.int64)
