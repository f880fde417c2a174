r"""One format for every matrix under a budget of bytes: the multiple-choice knapsack, solved exactly.

    minimise   sum_i d_i(j_i)      subject to   sum_i c_i(j_i) <= B,     j_i in J_i,     c whole numbers (bytes)

**Theorem** (Lagrange). For every price ``lam >= 0`` let ``r_ij = d_ij + lam c_ij - min_j (d_ij + lam c_ij)``. Every choice
within the budget satisfies

    sum_i d_i(j_i)  =  L(lam) + sum_i r_i(j_i) + lam (B - sum_i c_i(j_i))  >=  L(lam) + max_i r_i(j_i),

with ``L(lam) = sum_i min_j (d_ij + lam c_ij) - lam B``. So ``L`` bounds every plan from below, and an alternative whose
``r_ij`` exceeds the distance of a known plan from ``L`` is in no better plan.

Filling the segments of the lower convex hulls by falling damage saved per byte gives the ``lam`` of the largest ``L``: the
price of a byte. What ``r`` does not settle, the core, is searched item by item, those whose best alternative is nearest to the
price first, as a list of states (bytes left, damage) that no other state dominates and whose own bound - bytes left are sold,
bytes owed are bought, at the best price among the items to come - is below the best plan found (Pisinger 1995, "A minimal
algorithm for the multiple-choice knapsack problem"). An empty list proves the plan optimal. Bytes are integers throughout:
never one above ``B``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget, InvalidInput, LengthMismatch
from .choices_core import Core

_ROUNDING = 1e-13


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A certified choice.

    Attributes:
        chosen: Index of the alternative of every item, ``(K,)``.
        damage: Its total.
        spent, budget: Bytes; ``spent <= budget`` always.
        status: ``optimal``, ``slack`` (every item has its best alternative, bytes are left), ``bounded`` (the search was cut).
        lower_bound: No choice within the budget has less damage. Equal to ``damage`` where the status is not ``bounded``.
        relaxed: ``L(price)``, the bound of the linear relaxation.
        price: Damage that one more byte would save at the margin.
        reduced: ``r_ij`` at the price, ``(K, m)``: how much worse than the relaxation an alternative is by itself.
        unit: Of ``spent`` and ``budget``.
        among: What else every choice keeps to, for the message: ``" and with at most 1 layer gone"``.
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

    @property
    def gap(self) -> float:
        """Damage above the proven bound, relative to it; zero where the choice is optimal."""
        return max(0.0, self.damage - self.lower_bound) / max(abs(self.damage), 1e-300)

    @property
    def message(self) -> str:
        """The status in a sentence."""
        limit, left = f"{self.budget} {self.unit}{self.among}", f"{self.budget - self.spent} {self.unit}"
        return {
            "optimal": f"No choice within {limit} has less damage; {left} are left and help nothing.",
            "slack": f"Every item has its best alternative and {left} are left.",
            "bounded": f"The search was cut: at most {self.gap:.1e} of the damage could still be saved.",
        }[self.status]

    def certificate(self) -> dict[str, Any]:
        """Everything but the choice, as plain values, with the fields that the certificate of every plan has."""
        names = ("status", "damage", "spent", "budget", "lower_bound", "relaxed", "gap", "price", "message")
        common = {"shadow_price": self.price, "multiplier": self.price, "inert": [], "at_lower": 0, "at_upper": 0}
        return {**{name: getattr(self, name) for name in names}, **common}


def choose(damage: ArrayLike, size: ArrayLike, budget: int, *, groups: Sequence[Any] | None = None) -> Choice:
    """Give every item one alternative, with the least total damage within a budget.

    Args:
        damage: ``(K, m)``; infinite where an item does not have that alternative. Curves need not fall nor be convex.
        size: Bytes, whole numbers, ``(K, m)``.
        budget: Bytes.
        groups: A label per item, ``(K,)``: items of one label take the same alternative.

    Raises:
        InfeasibleBudget: The smallest plan is larger.
        InvalidInput: NaN, negative or broken bytes, or an item (a group) without any alternative.
        LengthMismatch: Arrays of different shapes.

    >>> found = choose([[9.0, 4.0, 1.0], [5.0, 3.0, 1.0]], [[2, 3, 4], [2, 3, 4]], 5)
    >>> found.chosen.tolist(), found.spent, found.damage, found.status
    ([1, 0], 5, 9.0, 'optimal')
    """
    d, c = _checked(damage, size)
    labels = np.arange(len(d)) if groups is None else _labels(groups, len(d))
    d, c = together(d, c, labels)
    here = np.isfinite(d)
    _check_feasible(d, c, here, int(budget))
    found = _solve(d, c, int(budget))
    return dataclasses.replace(found, chosen=found.chosen[labels], reduced=found.reduced[labels])


def together(damage: np.ndarray, size: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum the rows of every label: what items that must agree cost as one."""
    count = int(labels.max()) + 1
    d, c = np.zeros((count, damage.shape[1])), np.zeros((count, damage.shape[1]), dtype=np.int64)
    np.add.at(d, labels, damage)
    np.add.at(c, labels, size)
    return d, c


def _labels(groups: Sequence[Any], count: int) -> np.ndarray:
    if len(groups) != count:
        raise LengthMismatch(f"{len(groups)} groups for {count} items.", "One label per item.", "Give one each.")
    order = {g: i for i, g in enumerate(dict.fromkeys(groups))}
    return np.array([order[g] for g in groups])


def _checked(damage: ArrayLike, size: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    d, raw = np.array(damage, dtype=np.float64, ndmin=2), np.array(size, ndmin=2)
    if d.shape != raw.shape or not d.size:
        raise LengthMismatch(f"Damages of shape {d.shape}, sizes of {raw.shape}.", "Both are (items, alternatives).", "")
    if np.isnan(d).any() or (d == -np.inf).any():
        raise InvalidInput(
            "A damage is not a number.", "Damages are finite, or infinite for what is no choice.", "Measure again."
        )
    c = np.zeros(d.shape, dtype=np.int64)
    there = np.isfinite(d)
    if not there.any(axis=1).all():
        raise InvalidInput(f"Item {int(np.argmin(there.any(axis=1)))} has no alternative.", "Every item needs one.", "Add one.")
    c[there] = raw[there]
    if (c < 0).any() or (c[there] != raw[there]).any():
        raise InvalidInput("A size is negative or broken.", "Bytes are whole numbers from zero on.", "Count again.")
    return d, c


def _check_feasible(d: np.ndarray, c: np.ndarray, here: np.ndarray, budget: int) -> None:
    if not here.any(axis=1).all():
        raise InvalidInput("A group has no alternative that all of its members have.", "", "Split the group, or add formats.")
    least = int(np.where(here, c, np.iinfo(np.int64).max).min(axis=1).sum())
    if budget < least:
        raise InfeasibleBudget(
            f"A budget of {budget} bytes is below the smallest plan, {least} bytes.",
            f"Feasible are {least} bytes and more.",
            "Raise the budget, or allow smaller formats.",
        )


def _segments(d: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, ...]:
    """Lower convex hulls of all items at once, by marching from the smallest point along the steepest descent.

    Returns:
        Start ``(K,)``, and of all segments ``item, to, bytes, density``, the segments of an item in order.
    """
    k = np.arange(len(d))
    least = np.where(np.isfinite(d), c, np.iinfo(np.int64).max).min(axis=1)
    start = np.argmin(np.where((c == least[:, None]) & np.isfinite(d), d, np.inf), axis=1)
    now, rows = start.copy(), k
    parts: list[tuple[np.ndarray, ...]] = []
    while rows.size:
        here = now[rows]
        more = c[rows] - c[rows, here][:, None]
        less = d[rows, here][:, None] - d[rows]
        good = (more > 0) & (less > 0)
        density = np.where(good, less / np.where(good, more, 1), -np.inf)
        best = density.max(axis=1)
        nearest = np.argmin(np.where(density == best[:, None], more, np.iinfo(np.int64).max), axis=1)
        on = best > 0
        rows, nearest, index = rows[on], nearest[on], np.flatnonzero(on)
        parts.append((rows, nearest, more[index, nearest], best[on]))
        now[rows] = nearest
    joined = [np.concatenate(x) for x in zip(*parts, strict=True)]
    return (start, *joined)


def _solve(d: np.ndarray, c: np.ndarray, budget: int) -> Choice:
    k = np.arange(len(d))
    chosen, item, to, more, density = _segments(d, c)
    order = np.argsort(-density, kind="stable")
    item, to, more, density = item[order], to[order], more[order], density[order]
    room = budget - int(c[k, chosen].sum())
    fit = int(np.searchsorted(np.cumsum(more), room, side="right"))
    np.maximum.at(position := np.full(len(d), -1), item[:fit], np.arange(fit))
    moved = position >= 0
    chosen[moved] = to[position[moved]]
    room -= int(more[:fit].sum())
    price = float(density[fit]) if fit < density.size else 0.0
    change, bytes_ = d - d[k, chosen][:, None], c - c[k, chosen][:, None]
    reduced = np.where(np.isfinite(d), change + price * bytes_, np.inf)
    base, status, lost = float(d[k, chosen].sum()), "slack", -np.inf
    relaxed = base - price * room
    if fit < density.size:
        core = Core(change, bytes_, reduced, price, room, _ROUNDING * (float(np.abs(d[k, chosen]).sum()) + price * room))
        core.greedy(item[fit:], to[fit:])
        lost = core.solve()
        for i, j in core.moves():
            chosen[i] = j
        status = "optimal" if lost >= core.best - core.tolerance else "bounded"
    total = float(d[k, chosen].sum())
    bound = total if status != "bounded" else max(relaxed, base + lost)
    return Choice(
        chosen=chosen, damage=total, spent=int(c[k, chosen].sum()), budget=budget, status=status, lower_bound=bound,
        relaxed=relaxed, price=price, reduced=np.maximum(reduced, 0.0),
    )  # fmt: skip


def near_ties(found: Choice, error: ArrayLike, *, sigmas: float = 2.0) -> list[tuple[int, int, float, float]]:
    """Single changes that noise cannot tell from the plan, at the price of a byte.

    Args:
        found: A choice.
        error: Standard errors of the damages, ``(K, m)``; those of two alternatives are added in squares (where they were
            measured on one text they fall and rise together, so this is on the safe side).
        sigmas: How many standard errors count as noise.

    Returns:
        ``(item, alternative, reduced damage, noise)``, the closest first: relative to what the chosen alternative costs.
    """
    e, k = np.asarray(error, dtype=np.float64), np.arange(len(found.chosen))
    excess = found.reduced - found.reduced[k, found.chosen][:, None]
    noise = sigmas * np.sqrt(e**2 + e[k, found.chosen][:, None] ** 2)
    close = np.isfinite(excess) & (np.abs(excess) < noise)
    close[k, found.chosen] = False
    rows = [(int(i), int(j), float(excess[i, j]), float(noise[i, j])) for i, j in zip(*np.nonzero(close), strict=True)]
    return sorted(rows, key=lambda row: abs(row[2]) / row[3])
