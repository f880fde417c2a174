r"""One alternative for every item under a budget: the multiple-choice knapsack, solved exactly.

    minimise   sum_i d_i(j_i)      subject to   sum_i c_i(j_i) <= B,     j_i in J_i

**Theorem** (Lagrange). For every price ``lam >= 0`` let ``r_ij = d_ij + lam c_ij - min_j (d_ij + lam c_ij)``. Every choice
within the budget satisfies

    sum_i d_i(j_i)  =  L(lam) + sum_i r_i(j_i) + lam (B - sum_i c_i(j_i))  >=  L(lam) + max_i r_i(j_i),

with ``L(lam) = sum_i min_j (d_ij + lam c_ij) - lam B``. So ``L`` bounds every plan from below, and an alternative whose
``r_ij`` exceeds the distance of a known plan from ``L`` is in no better plan.

Filling the segments of the lower convex hulls by falling damage saved per unit of cost gives the ``lam`` of the largest ``L``,
the price. What ``r`` does not settle, the core, is searched item by item, those whose best alternative is nearest to the price
first, as a list of states (room left, damage) that no other state dominates and whose own bound (room left is sold, room owed
is bought, at the best price among the items to come) is below the best plan found (Pisinger 1995, "A minimal algorithm for the
multiple-choice knapsack problem"). An empty list proves the plan optimal. Where the list outgrows its limits, states that are
evenly spread stay, and the bound says what may be lost with the others. Whole costs (bytes) stay whole: never one above ``B``.

**Steps of falling gain** (:func:`knapsack`). Where every item takes ``0, 1, 2, ...`` steps of one cost and each gains no more
than the one before, curves are convex: steps are their own segments.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget, InvalidInput, LengthMismatch, NotFinite
from .inputs import Vector, in_a_line

_STATES, _LONG, _WORK = 1_000_000, 3_000_000, 100_000_000  # states of an item; of all, for a search that is long, at most
_GREEDY = 5_000  # segments that are tried as a first plan
_ROUNDING = 1e-13
_LARGEST = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A certified choice.

    Attributes:
        chosen: Index of the alternative of every item, ``(K,)``; ``damage`` is their total, ``spent`` their bytes.
        status: ``optimal``, ``slack`` (every item has its best alternative, bytes are left), ``bounded`` (the search was cut).
        lower_bound: No choice within the budget has less damage. Equal to ``damage`` where the status is not ``bounded``.
        relaxed: ``L(price)``, the bound of the linear relaxation.
        price: Damage that one more byte would save at the margin.
        reduced: ``r_ij`` at the price, ``(K, m)``: how much worse than the relaxation an alternative is by itself.
        unit, among, subject: Words of the message: ``"bytes"``, ``" and with at most 1 layer gone"``, ``"plan"``.
    """

    chosen: np.ndarray
    damage: float
    spent: int
    budget: int
    status: str
    lower_bound: float
    relaxed: float
    price: float
    reduced: np.ndarray
    unit: str = "bytes"
    among: str = ""
    subject: str = "plan"

    @property
    def gap(self) -> float:
        """Damage above the proven bound, relative to it; zero where the choice is optimal."""
        return max(0.0, self.damage - self.lower_bound) / max(abs(self.damage), 1e-300)

    @property
    def message(self) -> str:
        """The status in a sentence."""
        left = self.budget - self.spent
        way = "" if self.subject == "plan" else f" by this {self.subject}"
        rest = f" The {left:,} {self.unit} that are left cannot be used for less damage{way}." if left else ""
        return {
            "optimal": f"Proven optimal: no other choice within {self.budget:,} {self.unit}{self.among} "
            f"has less predicted damage.{rest}",
            "slack": f"Every block has its own best choice, so {self.unit} do not limit this {self.subject}.",
            "bounded": f"The search was cut: at most {self.gap:.1e} of the damage could still be saved.",
        }[self.status]

    def __repr__(self) -> str:
        found = f"damage={self.damage:.6g}, spent={self.spent:,} of {self.budget:,} {self.unit}, gap={self.gap:.1e}"
        return f"{type(self).__name__}({self.status}, {in_a_line(self.chosen)}, {found})"

    def certificate(self) -> dict[str, Any]:
        """Return everything but the choice, with the fields that the certificate of every plan has, as plain values."""
        names = ("status", "damage", "spent", "budget", "lower_bound", "relaxed", "gap", "price", "message")
        common = {"shadow_price": self.price, "multiplier": self.price, "inert": [], "at_lower": 0, "at_upper": 0}
        return {**{name: getattr(self, name) for name in names}, **common}


def choose(damage: ArrayLike, size: ArrayLike, budget: int) -> Choice:
    """Give every item one alternative, with the least total damage within a budget.

    Args:
        damage: ``(K, m)``; infinite where an item does not have that alternative. Curves need not fall nor be convex.
        size: Bytes, whole numbers, ``(K, m)``.
        budget: Bytes.

    Raises:
        InfeasibleBudget: The smallest plan is larger.
        InvalidInput: NaN, negative or broken bytes, or an item without any alternative.
        LengthMismatch: Arrays of different shapes.

    >>> choice = choose([[9.0, 4.0, 1.0], [5.0, 3.0, 1.0]], [[2, 3, 4], [2, 3, 4]], 5)
    >>> choice.chosen.tolist(), choice.spent, choice.damage, choice.status
    ([1, 0], 5, 9.0, 'optimal')
    """
    d, c = _checked(damage, size)
    try:
        budget = int(budget)
    except (TypeError, ValueError, OverflowError) as error:
        raise NotFinite(f"The budget is {budget!r}.", "It is a number of bytes.", "Give a whole number.") from error
    least = int(np.where(np.isfinite(d), c, _LARGEST).min(axis=1).sum())
    if budget < least:
        raise InfeasibleBudget(
            f"A budget of {budget} bytes is below the smallest plan, {least} bytes.",
            f"Feasible are {least} bytes and more.",
            "Raise the budget, or allow smaller formats.",
        )
    return _solve(d, c, budget, _segments(d, c))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """The linear relaxation of :func:`choose` as a function of the budget: a convex line of pieces.

    Attributes:
        least: Bytes of the smallest plan, whose least damage is ``damage``.
        room: Bytes above the smallest plan at the ends of the pieces, rising from zero.
        saved: Damage that is saved there.
    """

    least: int
    damage: float
    room: np.ndarray
    saved: np.ndarray

    @classmethod
    def of(cls, damage: ArrayLike, size: ArrayLike) -> Relaxation:
        """Return that of some items; arguments and errors as of :func:`choose`."""
        d, c = _checked(damage, size)
        hulls = _segments(d, c)
        order, rows = np.argsort(-hulls.density, kind="stable"), np.arange(len(d))
        cost, density = hulls.cost[order], hulls.density[order]
        room, saved = (np.concatenate([[0.0], np.cumsum(values)]) for values in (cost, cost * density))
        least, base = int(c[rows, hulls.start].sum()), float(d[rows, hulls.start].sum())
        return cls(least=least, damage=base, room=room, saved=saved)

    def at(self, budget: ArrayLike) -> np.ndarray:
        """Return ``L`` at its best price for every budget: no choice within it has less damage; infinite where none fits.

        >>> Relaxation.of([[9.0, 4.0, 1.0], [5.0, 3.0, 1.0]], [[2, 3, 4], [2, 3, 4]]).at([3, 5, 8]).tolist()
        [inf, 9.0, 2.0]
        """
        room = np.asarray(budget, dtype=np.float64) - self.least
        return np.where(room < 0, np.inf, self.damage - np.interp(room, self.room, self.saved))


def _checked(damage: ArrayLike, size: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    try:
        d, raw = np.array(damage, dtype=np.float64, ndmin=2), np.array(size, ndmin=2)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            f"Damages and sizes are no numbers in rows of equal lengths ({error}).", "", "Pad with inf."
        ) from error
    if d.shape != raw.shape or not d.size:
        raise LengthMismatch(f"Damages of shape {d.shape}, sizes of {raw.shape}.", "Both are (items, alternatives).", "")
    if np.isnan(d).any() or (d == -np.inf).any():
        raise InvalidInput(
            "A damage is not a number.", "Damages are finite, or infinite for what is no choice.", "Measure again."
        )
    known = np.isfinite(d)
    if not known.any(axis=1).all():
        raise InvalidInput(f"Item {int(np.argmin(known.any(axis=1)))} has no alternative.", "Every item needs one.", "Add one.")
    c = np.where(known, raw, 0).astype(np.int64)
    if (c < 0).any() or (c[known] != raw[known]).any():
        raise InvalidInput("A size is negative or broken.", "Bytes are whole numbers from zero on.", "Count again.")
    return d, c


class _Segments(NamedTuple):
    """Where every item starts, and the segments of its hull in order; ``to`` is the alternative at the end."""

    start: np.ndarray
    item: np.ndarray
    to: np.ndarray
    cost: np.ndarray
    density: np.ndarray


def _segments(d: np.ndarray, c: np.ndarray) -> _Segments:
    """Lower convex hulls of all items at once, by marching from the cheapest point along the steepest descent."""
    least = np.where(np.isfinite(d), c, _LARGEST).min(axis=1)
    start = np.argmin(np.where((c == least[:, None]) & np.isfinite(d), d, np.inf), axis=1)
    now, rows = start.copy(), np.arange(len(d))
    parts: list[tuple[np.ndarray, ...]] = []
    while rows.size:
        more = c[rows] - c[rows, now[rows]][:, None]
        less = d[rows, now[rows]][:, None] - d[rows]
        good = (more > 0) & (less > 0)
        density = np.where(good, less / np.where(good, more, 1), -np.inf)
        best = density.max(axis=1)
        nearest = np.argmin(np.where(density == best[:, None], more, _LARGEST), axis=1)
        on = best > 0
        rows, nearest, index = rows[on], nearest[on], np.flatnonzero(on)
        parts.append((rows, nearest, more[index, nearest], best[on]))
        now[rows] = nearest
    return _Segments(start, *(np.concatenate(x) for x in zip(*parts, strict=True)))


def _solve(d: np.ndarray, c: np.ndarray, budget: Any, hulls: _Segments, enough: float = 0.0) -> Choice:
    """Fill and search; a long search ends where the damage is no further from the bound than the share ``enough``."""
    k, chosen = np.arange(len(d)), hulls.start.copy()
    order = np.argsort(-hulls.density, kind="stable")
    item, to, cost, density = (v[order] for v in hulls[1:])
    room = budget - c[k, chosen].sum()
    fit = int(np.searchsorted(np.cumsum(cost), room, side="right"))
    np.maximum.at(position := np.full(len(d), -1), item[:fit], np.arange(fit))
    moved = position >= 0
    chosen[moved] = to[position[moved]]
    room = max(room - cost[:fit].sum(), 0)
    price = float(density[fit]) if fit < density.size else 0.0
    change, more = d - d[k, chosen][:, None], c - c[k, chosen][:, None]
    reduced = np.where(np.isfinite(d), change + price * more, np.inf)
    base, status, lost = float(d[k, chosen].sum()), "slack", -np.inf
    relaxed = float(base - price * room)
    if fit < density.size:
        tolerance = _ROUNDING * (float(np.abs(d[k, chosen]).sum()) + price * room)
        core = _Core(change, more, reduced, price, room, tolerance)
        core.fill(item[fit:], to[fit:])
        goal = enough * abs(base) - price * room if enough else -np.inf
        lost = core.solve(goal) if enough < np.inf else -price * room
        for i, j in core.moves():
            chosen[i] = j
        status = "optimal" if lost >= core.best - core.tolerance else "bounded"
    damage = float(d[k, chosen].sum())
    return Choice(
        chosen=chosen,
        damage=damage,
        spent=c[k, chosen].sum().item(),
        budget=budget,
        status=status,
        lower_bound=float(max(relaxed, base + lost)) if status == "bounded" else damage,
        relaxed=relaxed,
        price=price,
        reduced=np.maximum(reduced, 0.0),
    )


def knapsack(
    gain: np.ndarray, cost: Vector, budget: float, *, enough: float = 0.0
) -> tuple[np.ndarray, float, bool, float, float]:
    """Take steps of the largest total gain within a budget.

    ``gain`` is that of the first, second, ... step of every item, falling, ``(K, L)``; what gains nothing is never taken. A
    step of item k costs ``cost_k > 0``. A search that takes long ends with what misses no more than the share ``enough`` of the
    gain; there is none where that is infinite.

    Returns:
        ``(counts, bound, exact, price, spread)``: steps of every item, an upper bound of the gain, whether the counts are
        proven optimal, the density of the first step that does not fit, and the distance between the linear bound and the gain.
    """
    usable = np.logical_and.accumulate(gain > 0.0, axis=1)
    item, step = np.nonzero(usable)
    density = np.minimum.accumulate(np.where(usable, gain, 0.0) / cost[:, None], axis=1)[usable]
    levels = np.arange(gain.shape[1] + 1)
    d = np.zeros((len(gain), levels.size))
    np.cumsum(np.where(usable, -gain, 0.0), axis=1, out=d[:, 1:])
    d[levels > usable.sum(1)[:, None]] = np.inf
    start = np.zeros(len(gain), dtype=np.int64)
    choice = _solve(d, levels * cost[:, None], budget, _Segments(start, item, step + 1, cost[item], density), enough)
    spread = max(choice.damage - choice.relaxed, 0.0)
    return choice.chosen, -choice.lower_bound, choice.status != "bounded", choice.price, spread


class _Core:
    """The search around the filling; ``change`` and ``more`` are damage and cost less those of the filling, ``(K, m)``."""

    def __init__(
        self, change: np.ndarray, more: np.ndarray, reduced: np.ndarray, price: float, room: Any, tolerance: float
    ) -> None:
        self.change, self.more, self.reduced = change, more, reduced
        self.price, self.room, self.tolerance = price, room, tolerance
        self.best = 0.0
        self.filling: list[tuple[int, int]] = []
        self.history: list[tuple[int, np.ndarray, np.ndarray, int]] = []
        self.reached: tuple[int, int] | None = None

    def fill(self, items: np.ndarray, to: np.ndarray) -> None:
        """Take whatever still fits, in the order of density: a first plan."""
        left = self.room
        at: dict[int, int] = {}
        for i, j in zip(items[:_GREEDY].tolist(), to[:_GREEDY].tolist(), strict=True):
            step = self.more[i, j] - (self.more[i, at[i]] if i in at else 0)
            if step <= left:
                left, at[i] = left - step, j
        self.filling = list(at.items())
        self.best = min(0.0, float(sum(self.change[i, j] for i, j in self.filling)))

    def _open(self, reduced: np.ndarray) -> np.ndarray:
        """Alternatives that may be in a better plan than the best found: ``r`` below the distance from the bound."""
        return reduced - self.price * self.room < self.best - self.tolerance

    def _order(self, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items by their nearest alternative, with the best price at which the items from there on sell and buy room."""
        items = np.flatnonzero(alive.any(axis=1))
        more, alive = self.more[items], alive[items]
        density = np.where(more != 0, -self.change[items] / np.where(more != 0, more, 1), 0.0)
        up = np.where(alive & (more > 0), density, 0.0).max(axis=1, initial=0.0)
        down = np.where(alive & (more < 0), density, np.inf).min(axis=1, initial=np.inf)
        order = np.argsort(np.minimum(self.price - up, down - self.price), kind="stable")
        sell = np.append(np.maximum.accumulate(up[order][::-1])[::-1], 0.0)
        buy = np.append(np.minimum.accumulate(down[order][::-1])[::-1], np.inf)
        return items[order], sell, buy

    def solve(self, goal: float) -> float:
        """Search; return what no state that was let go can fall below, infinite without any.

        A search that takes long ends where a plan has reached the goal.
        """
        alive = self._open(self.reduced) & ((self.more != 0) | (self.change < 0))
        items, sell, buy = self._order(alive)
        room, value = np.array([self.room]), np.zeros(1)
        lost, made, later = np.inf, 0, np.append(alive.sum(axis=1)[items[1:]], 0)
        for step, i in enumerate(items.tolist()):
            moves = np.flatnonzero(alive[i] & self._open(self.reduced[i]))
            if not moves.size:
                continue
            count, made = room.size, made + room.size * (1 + moves.size)
            room = np.concatenate([room, *(room - self.more[i, j] for j in moves)])
            value = np.concatenate([value, *(value + self.change[i, j] for j in moves)])
            fits = np.flatnonzero(room >= 0)
            if fits.size and value[fits].min() < self.best:
                state = int(fits[np.argmin(value[fits])])
                self.best, self.reached = float(value[state]), (len(self.history), state)
            near = self.best <= goal and made > _LONG
            bound = _bounds(room, value, float(sell[step + 1]), float(buy[step + 1]))
            keep = _undominated(room, value, np.flatnonzero(bound < self.best - self.tolerance))
            most = max(_STATES // (1 + int(later[step])), 1)
            if keep.size > most:  # evenly spread ones: what is left still covers every amount of room
                spread = np.zeros(keep.size, dtype=bool)
                spread[:: -(-keep.size // most)] = True
                lost, keep = min(lost, float(bound[keep[~spread]].min())), keep[spread]
            self.history.append((i, moves, keep.astype(np.int32), count))
            room, value = room[keep], value[keep]
            if near:
                return -self.price * self.room
            if not room.size or made > _WORK:
                return min(lost, float(bound[keep].min(initial=np.inf)))
        return lost

    def moves(self) -> list[tuple[int, int]]:
        """Return the ``(item, alternative)`` that differ from the filling in the best plan found."""
        if self.reached is None:
            return self.filling
        out = []
        step, state = self.reached
        while step >= 0:
            item, moves, _, count = self.history[step]
            turn, state = divmod(state, count)
            if turn:
                out.append((item, int(moves[turn - 1])))
            step -= 1
            state = int(self.history[step][2][state]) if step >= 0 else 0
        return out


def _bounds(room: np.ndarray, value: np.ndarray, sell: float, buy: float) -> np.ndarray:
    """Least damage that a state can end with: room left is spent at the best price to come, room owed is paid for."""
    bound = value - np.maximum(room, 0) * sell
    debt = room < 0
    bound[debt] = value[debt] - room[debt] * buy if np.isfinite(buy) else np.inf
    return bound


def _undominated(room: np.ndarray, value: np.ndarray, states: np.ndarray) -> np.ndarray:
    """States by falling room and falling damage: none has both less room and no less damage than another."""
    states = states[np.lexsort((value[states], -room[states]))]
    best = np.minimum.accumulate(value[states])
    return states[np.concatenate([[True], value[states][1:] < best[:-1]])] if states.size else states


def near_ties(choice: Choice, error: ArrayLike) -> list[tuple[int, int, float, float]]:
    """Return single changes that noise cannot tell from the plan, at the price of a byte, the closest first.

    Each is ``(item, alternative, reduced damage, noise)``, relative to what the chosen alternative costs. Standard errors
    ``error`` of the damages, ``(K, m)``, of two alternatives are added in squares; where they were measured on one text they
    fall and rise together, so this is on the safe side. Two of them count as noise.
    """
    e, k = np.broadcast_to(np.asarray(error, dtype=np.float64), choice.reduced.shape), np.arange(len(choice.chosen))
    excess = choice.reduced - choice.reduced[k, choice.chosen][:, None]
    noise = 2.0 * np.sqrt(e**2 + e[k, choice.chosen][:, None] ** 2)
    close = np.isfinite(excess) & (np.abs(excess) < noise)
    close[k, choice.chosen] = False
    rows = [(int(i), int(j), float(excess[i, j]), float(noise[i, j])) for i, j in zip(*np.nonzero(close), strict=True)]
    return sorted(rows, key=lambda row: abs(row[2]) / row[3])
