r"""The multiple-choice knapsack of :mod:`layerbudget.solvers.choices` with at most N marked alternatives (:func:`choose_few`).

    minimise   sum_i d_i(j_i)      subject to   sum_i c_i(j_i) <= B,     #{i : j_i marked} <= N

For every price ``mu >= 0`` of a marked alternative, the program with ``d_ij + mu [j marked]`` and no limit N has an optimum
``P(mu)``, and no choice within both limits has less damage than ``P(mu) - mu N``. The largest such bound is where a choice with
more than N marked ones and one with N or fewer cost the same: two such choices name the next ``mu``, until it finds none below
their line. Where the bound is below the best choice found, an item that is marked in the first of the two and not in the second
is settled both ways, the lowest bound first (branch and bound). No open branch below the best choice is a proof.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget
from .choices import Choice, choose

_BRANCHES, _PRICES = 400, 60
_ROUNDING = 1e-12


def choose_few(
    damage: ArrayLike, size: ArrayLike, budget: int, marked: ArrayLike, most: int, *, branches: int = _BRANCHES
) -> Choice:
    """Give every item one alternative, with the least total damage within a budget and at most so many marked ones.

    Args:
        damage: As in :func:`choose`.
        size: As in :func:`choose`.
        budget: As in :func:`choose`.
        marked: Which alternatives count, ``(K, m)``.
        most: How many items may take one of them.
        branches: After so many the search is cut and the status is ``bounded``; the ``lower_bound`` holds for all choices
            within both limits.

    Raises:
        InfeasibleBudget: No choice is within both limits.
        InvalidInput: As :func:`choose`.

    >>> choice = choose_few([[4.0, 0.0], [5.0, 0.0]], [[1, 1], [1, 1]], 2, [[False, True], [False, True]], 1)
    >>> choice.chosen.tolist(), choice.damage, choice.status
    ([0, 1], 4.0, 'optimal')
    """
    free, counted = choose(damage, size, budget), np.array(marked, dtype=bool, ndmin=2)
    if counted[np.arange(len(counted)), free.chosen].sum() <= most:
        return free
    return _Branches(np.array(damage, dtype=np.float64, ndmin=2), size, budget, counted, most).run(branches)


class _Branches:
    """Open branches, and the best choice within both limits so far."""

    def __init__(self, d: np.ndarray, size: ArrayLike, budget: int, marked: np.ndarray, most: int) -> None:
        self.d, self.size, self.budget, self.marked, self.most = d, size, budget, marked, most
        finite = d[np.isfinite(d)]
        largest = float(np.abs(finite).max(initial=0.0))
        self.tolerance = _ROUNDING * largest * len(d)
        self.dear = len(d) * (float(np.ptp(finite)) + 1e-6 * largest)  # above any difference of two choices
        self.best: Choice | None = None
        self.heap: list[tuple[float, int, int, np.ndarray]] = []
        self.lost, self.number = np.inf, itertools.count()

    def _marks(self, choice: Choice) -> np.ndarray:
        return self.marked[np.arange(len(self.d)), choice.chosen]

    def _solve(self, d: np.ndarray, price: float = 0.0) -> tuple[Choice, int, float]:
        """The best choice where a marked alternative costs a price, its marked ones and its damage."""
        choice = choose(d + price * self.marked, self.size, self.budget)
        count, damage = int(self._marks(choice).sum()), float(self.d[np.arange(len(self.d)), choice.chosen].sum())
        if count <= self.most and (self.best is None or damage < self.best.damage):
            self.best = dataclasses.replace(choice, damage=damage)
        return choice, count, damage

    @property
    def _limit(self) -> float:
        return np.inf if self.best is None else self.best.damage - self.tolerance

    def _bound(self, settled: np.ndarray) -> None:
        """Leave a branch open where it may hold something better; an item is settled as marked (1), unmarked (-1) or open."""
        if (settled == 1).sum() == self.most:
            settled = np.where(settled == 1, 1, -1)
        wrong = ((settled == 1)[:, None] & ~self.marked) | ((settled == -1)[:, None] & self.marked)
        d = np.where(wrong, np.inf, self.d)
        if not np.isfinite(d).any(axis=1).all():
            return
        try:
            many, more, least = self._solve(d)
        except InfeasibleBudget:
            return
        if more <= self.most:  # nothing better is in this branch than its program found
            self.lost = min(self.lost, many.lower_bound)
            return
        few, less, damage = self._solve(d, self.dear)
        if less > self.most:
            return
        bound = many.lower_bound
        for _ in range(_PRICES):
            price = max(0.0, (damage - least) / (more - less))
            choice, count, value = self._solve(d, price)
            bound = max(bound, choice.lower_bound - price * self.most)
            if value + price * count >= least + price * more - self.tolerance:
                break
            if count > self.most:
                many, more, least = choice, count, value
            else:
                few, less, damage = choice, count, value
        if bound < self._limit:
            item = int(np.argmax(self._marks(many) & ~self._marks(few)))
            heapq.heappush(self.heap, (bound, next(self.number), item, settled))

    def run(self, branches: int) -> Choice:
        """Search until no open branch is below the best choice, or so many were bounded."""
        self._bound(np.zeros(len(self.d), dtype=np.int64))
        relaxed = self.heap[0][0] if self.heap else None
        while self.heap and self.heap[0][0] < self._limit and next(self.number) < branches:
            _, _, item, settled = heapq.heappop(self.heap)
            for side in (1, -1):
                self._bound(np.where(np.arange(len(self.d)) == item, side, settled))
        if self.best is None:
            raise InfeasibleBudget(
                f"No choice within {self.budget} has at most {self.most} marked ones.", "", "Raise the budget, or allow more."
            )
        total = self.best.damage
        bound = min([total, self.lost, *(row[0] for row in self.heap)])
        proven = bound >= total - self.tolerance
        return dataclasses.replace(
            self.best,
            status="optimal" if proven else "bounded",
            lower_bound=total if proven else bound,
            relaxed=total if relaxed is None else relaxed,
        )
