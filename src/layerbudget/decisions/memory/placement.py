r"""Two memories for llama.cpp: a card, and the processor's memory for the first layers or for their experts. No torch.

llama-server keeps the experts of the first ``n`` decoder layers in the processor's memory with ``--n-cpu-moe n``, and the first
``n`` layers of a model without experts with ``--n-gpu-layers L + 1 - n``; the cache of these lies with them. The embedding of
tokens always lies with the processor; one that is the head too lies in both. Everything else lies on the card.

A card computes long batches of the processor's matrices too. For these its buffers have room for the largest of them, of
``T`` bytes, and for the largest cache of a layer at the processor. For a given ``n``, a format ``h`` of a head that lies in
both, formats ``g`` of a cache that is divided, and ``T``, the plan is two separate programs:

    minimise sum_{i in P} R_i(f_i)       subject to  F_P + s_h + c_P(g) + sum_{i in P} s_i(f_i)        <= RAM,  tensors <= T
    minimise sum_{i not in P} R_i(f_i)   subject to  F   + s_h + c(g) + sum_{i not in P} s_i(f_i) + T  <= GPU,

``P`` the tensors that lie with the processor alone, ``F`` and ``F_P`` what no format changes. No variable is in both, so that
the sum of the two optima is the optimum of ``(n, h, g, T)``, and the least of these sums that of all plans. The relaxations of
both programs bound a sum from below, and those of the smallest and the largest ``T`` of a range all sums of the range: ranges
and formats are tried by rising bounds, until no bound is below the best sum. Of equal sums the smaller ``n`` is taken: it reads
less from the slower memory. The program of the card is that of one memory, with the other formats fixed.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable

import numpy as np

from ...solvers.choices import Relaxation, choose
from ..formats.table import HUGE, FormatTable
from .program import Fit
from .splits import Split, check_memories, splits_of

_EQUAL = 1e-12  # relative; sums of the same damages in another order differ by less


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """The best plan of a number of layers: ``chosen`` are the formats of all blocks."""

    split: Split
    damage: float
    chosen: np.ndarray


def place(fit: Fit, gpu: int, ram: int) -> tuple[Fit, int, list[Placed]]:
    """Return the program of the card, its bytes in all, and the best plans: of all first, then of every number of layers.

    The program has the formats of the processor's tensors fixed, and their bytes are within those that are returned.

    Raises:
        InvalidInput, InfeasibleBudget: See :func:`~layerbudget.decisions.memory.splits.splits_of` and ``check_memories``.
    """
    check_memories(fit, gpu, ram)
    plans = [plan for split in splits_of(fit) if (plan := _Search(split, gpu, ram).best()) is not None]
    least = min(plan.damage for plan in plans)
    best = next(plan for plan in plans if plan.damage <= least * (1 + _EQUAL))  # the first of equals: the fewest layers
    split, (weights, cache) = best.split, fit.apart(best.chosen)
    card, _ = split.sides(weights, cache)
    memory = int(fit.table.totals(best.chosen)["spent"]) + fit.beside + gpu - card.bytes
    tied = [] if split.tied is None else [split.tied]
    fixed = dataclasses.replace(
        fit,
        weights=_fixed(fit.weights, [*split.rows.tolist(), *tied], weights),
        cache=_fixed(fit.cache, range(len(cache)) if split.cached else (), cache),
    )
    return fixed, memory, [best, *plans]


def _fixed(table: FormatTable, rows: Iterable[int], chosen: np.ndarray) -> FormatTable:
    """The same with one format only for some of the blocks."""
    has = table.has.copy()
    for row in rows:
        has[row] = np.arange(has.shape[1]) == chosen[row]
    return dataclasses.replace(table, damage=np.where(has, table.damage, np.inf), size=np.where(has, table.size, 0))


class _Search:
    """The best plan of a number of layers: both programs for every way to couple them, by rising bounds.

    A way is a format of a head in both memories and the formats of a divided cache, ``ways``. Of each, ``damage`` is what it
    costs, ``card`` and ``processor`` are the bytes that it leaves for the blocks of one side alone; those of the card are also
    for the copy of a matrix, ``caps`` bytes at most.
    """

    def __init__(self, split: Split, gpu: int, ram: int) -> None:
        fit, self.split = split.fit, split
        self.table, self.rows = fit.table, split.rows
        count = len(fit.weights.blocks)
        cached = np.arange(count, len(self.table.blocks)) if split.cached else np.arange(0)
        self.coupled = np.array([*cached, *([] if split.tied is None else [split.tied])], dtype=np.int64)
        self.others = np.setdiff1d(np.arange(len(self.table.blocks)), [*self.rows, *self.coupled])
        ways = list(itertools.product(*(np.flatnonzero(self.table.has[row]) for row in self.coupled)))
        self.ways = np.array(ways, dtype=np.int64).reshape(len(ways), self.coupled.size)
        self.damage = self.table.damage[self.coupled, self.ways].sum(axis=1)
        smallest = np.where(self.table.has, self.table.size, HUGE).argmin(axis=1)
        left = [self._left(gpu, ram, smallest, way) for way in self.ways]
        self.card, self.processor = (np.array(side, dtype=np.int64) for side in zip(*left, strict=True))
        self.relaxed = _relaxation(self.table.damage[self.others], self.table.size[self.others])
        self.relaxed_at = dict[int, Relaxation]()
        sizes = np.where(fit.weights.has[self.rows], split.tensor, HUGE)
        needed = int(sizes.min(axis=1).max()) if self.rows.size else 0
        self.caps = np.unique(sizes[(sizes >= needed) & (sizes < HUGE)]) if self.rows.size else np.zeros(1, dtype=np.int64)

    def _left(self, gpu: int, ram: int, smallest: np.ndarray, way: np.ndarray) -> tuple[int, int]:
        chosen = smallest.copy()
        chosen[self.coupled] = way
        weights, cache = self.split.fit.apart(chosen)
        card, processor = self.split.sides(weights, cache)
        others, rows = (int(self.table.size[part, chosen[part]].sum()) for part in (self.others, self.rows))
        return gpu - card.bytes + self._matrix(weights[self.rows]) + others, ram - processor.bytes + rows

    def _matrix(self, chosen: np.ndarray) -> int:
        """Bytes of the matrix that a card has room for, of the formats of the processor's tensors."""
        return int(self.split.tensor[np.arange(chosen.size), chosen].max(initial=0))

    def _damage(self, cap: int) -> np.ndarray:
        """Damages of the processor's tensors, none of which is larger than a cap."""
        return np.where(self.split.tensor <= self.caps[cap], self.split.fit.weights.damage[self.rows], np.inf)

    def _bounds(self, low: int, high: int) -> np.ndarray:
        """Lower bounds of the damage of every way, with a cap of this range."""
        return self.damage + self._alone(high) + self.relaxed.at(self.card - self.caps[low])

    def _alone(self, cap: int) -> np.ndarray:
        """The same of the processor's program."""
        if cap not in self.relaxed_at:
            self.relaxed_at[cap] = _relaxation(self._damage(cap), self.split.fit.weights.size[self.rows])
        return self.relaxed_at[cap].at(self.processor)

    def best(self) -> Placed | None:
        """Return the best plan; None where none fits."""
        found: Placed | None = None
        last = self.caps.size - 1
        ranges = [(float(self._bounds(0, last).min()), 0, last)]
        while ranges:
            bound, low, high = heapq.heappop(ranges)
            if bound >= (np.inf if found is None else found.damage):
                break
            if low == high:
                found = self._exact(low, found)
                continue
            middle = (low + high) // 2
            for ends in ((low, middle), (middle + 1, high)):
                heapq.heappush(ranges, (float(self._bounds(*ends).min()), *ends))
        return found

    def _exact(self, cap: int, found: Placed | None) -> Placed | None:
        """The best plan of a cap, where it is better than one that was found."""
        bounds, size = self._bounds(cap, cap), self.table.size
        for way in np.argsort(bounds, kind="stable"):
            if bounds[way] >= (np.inf if found is None else found.damage):
                break
            chosen = np.zeros(len(self.table.blocks), dtype=np.int64)
            chosen[self.coupled] = self.ways[way]
            own = self._damage(cap), self.split.fit.weights.size[self.rows], self.processor[way]
            chosen[self.rows] = _chosen(*own)
            left = self.card[way] - self._matrix(chosen[self.rows])
            chosen[self.others] = _chosen(self.table.damage[self.others], size[self.others], left)
            damage = float(self.table.damage[np.arange(chosen.size), chosen].sum())
            if found is None or damage < found.damage:
                found = Placed(split=self.split, damage=damage, chosen=chosen)
        return found


def _relaxation(damage: np.ndarray, size: np.ndarray) -> Relaxation:
    """The relaxation of a program that may have no block."""
    if size.size:
        return Relaxation.of(damage, size)
    return Relaxation(least=0, damage=0.0, room=np.zeros(1), saved=np.zeros(1))


def _chosen(damage: np.ndarray, size: np.ndarray, budget: np.int64) -> np.ndarray:
    """The choice of a program that may have no block."""
    return choose(damage, size, int(budget)).chosen if size.size else np.zeros(0, dtype=np.int64)
