"""The search that settles what the price of a byte leaves open; the theorem is in :mod:`layerbudget.solvers.choices`."""

from __future__ import annotations

import numpy as np

_STATES = 50_000
_HISTORY = 20_000_000
_GREEDY = 5_000


class Core:
    """The search around the filling by density; damages and bytes count from it.

    Args:
        change, more: Damage and bytes of every alternative less those of the filling, ``(K, m)``.
        reduced: ``r_ij``.
        price: Of a byte.
        room: Bytes that the filling leaves.
        tolerance: Differences of damage below this do not count.
    """

    def __init__(
        self, change: np.ndarray, more: np.ndarray, reduced: np.ndarray, price: float, room: int, tolerance: float
    ) -> None:
        self.change, self.more, self.reduced = change, more, reduced
        self.price, self.room, self.tolerance = price, room, tolerance
        self.best = 0.0
        self.found: list[tuple[int, int]] = []
        self.history: list[tuple[int, np.ndarray, np.ndarray, int]] = []
        self.reached: tuple[int, int] | None = None

    def greedy(self, items: np.ndarray, to: np.ndarray) -> None:
        """Take whatever still fits, in the order of density: a first plan."""
        left = self.room
        at: dict[int, int] = {}
        for i, j in zip(items[:_GREEDY].tolist(), to[:_GREEDY].tolist(), strict=True):
            step = int(self.more[i, j]) - (int(self.more[i, at[i]]) if i in at else 0)
            if step <= left:
                left, at[i] = left - step, j
        self.found = list(at.items())
        self.best = min(0.0, float(sum(self.change[i, j] for i, j in self.found)))

    def _open(self) -> np.ndarray:
        """Alternatives that may be in a better plan than the best found: ``r`` below the distance from the bound."""
        return (self.reduced - self.price * self.room < self.best - self.tolerance) & ((self.more != 0) | (self.change < 0))

    def _order(self, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items by their nearest alternative, with the best price at which the items from there on sell and buy bytes."""
        items = np.flatnonzero(alive.any(axis=1))
        density = np.where(
            self.more[items] != 0, -self.change[items] / np.where(self.more[items] != 0, self.more[items], 1), 0.0
        )
        up = np.where(alive[items] & (self.more[items] > 0), density, 0.0).max(axis=1, initial=0.0)
        down = np.where(alive[items] & (self.more[items] < 0), density, np.inf).min(axis=1, initial=np.inf)
        order = np.argsort(np.minimum(self.price - up, down - self.price), kind="stable")
        sell = np.append(np.maximum.accumulate(up[order][::-1])[::-1], 0.0)
        buy = np.append(np.minimum.accumulate(down[order][::-1])[::-1], np.inf)
        return items[order], sell, buy

    def solve(self) -> float:
        """Search; returns what no state that was let go can fall below (infinite where none was)."""
        alive = self._open()
        items, sell, buy = self._order(alive)
        room, value = np.array([self.room], dtype=np.int64), np.zeros(1)
        lost, kept = np.inf, 0
        for step, i in enumerate(items.tolist()):
            moves = np.flatnonzero(alive[i] & (self.reduced[i] - self.price * self.room < self.best - self.tolerance))
            if not moves.size:
                continue
            count = room.size
            room = np.concatenate([room, *(room - self.more[i, j] for j in moves)])
            value = np.concatenate([value, *(value + self.change[i, j] for j in moves)])
            self._improve(room, value)
            bound = _bounds(room, value, float(sell[step + 1]), float(buy[step + 1]))
            keep = _undominated(room, value, np.flatnonzero(bound < self.best - self.tolerance))
            if keep.size > _STATES:
                lost = min(lost, float(bound[keep[1::2]].min()))
                keep = keep[::2]
            self.history.append((i, moves, keep.astype(np.int32), count))
            room, value, kept = room[keep], value[keep], kept + keep.size
            if not room.size or kept > _HISTORY:
                return min(lost, float(bound[keep].min(initial=np.inf)))
        return lost

    def _improve(self, room: np.ndarray, value: np.ndarray) -> None:
        fits = np.flatnonzero(room >= 0)
        if fits.size and value[fits].min() < self.best:
            state = int(fits[np.argmin(value[fits])])
            self.best, self.reached = float(value[state]), (len(self.history), state)

    def moves(self) -> list[tuple[int, int]]:
        """``(item, alternative)`` that differ from the filling in the best plan found."""
        return self.found if self.reached is None else self._traced(*self.reached)

    def _traced(self, step: int, state: int) -> list[tuple[int, int]]:
        out = []
        while step >= 0:
            item, moves, _, count = self.history[step]
            turn, state = divmod(state, count)
            if turn:
                out.append((item, int(moves[turn - 1])))
            step -= 1
            state = int(self.history[step][2][state]) if step >= 0 else 0
        return out


def _bounds(room: np.ndarray, value: np.ndarray, sell: float, buy: float) -> np.ndarray:
    """Least damage that a state can end with: bytes left are spent at the best price to come, bytes owed are paid for."""
    bound = value - np.maximum(room, 0) * sell
    debt = room < 0
    bound[debt] = value[debt] - room[debt] * buy if np.isfinite(buy) else np.inf
    return bound


def _undominated(room: np.ndarray, value: np.ndarray, states: np.ndarray) -> np.ndarray:
    """States by falling room and falling damage: none has both less room and no less damage than another."""
    states = states[np.lexsort((value[states], -room[states]))]
    best = np.minimum.accumulate(value[states])
    return states[np.concatenate([[True], value[states][1:] < best[:-1]])] if states.size else states
