r"""How many experts of each layer stay, and in which types, in one program of bytes. No torch.

    minimise   sum_l [ D_l(m_l) + sum_i R_li(f_li) ] + sum_j R_j(f_j)
    subject to sum_l (E_l - m_l) ( sum_i s_li(f_li) / E_l + r_l ) + sum_j s_j(f_j)  <=  B,

``D_l(m)`` the damage of layer l without m experts, ``R`` that of rounding a matrix to a type, ``s`` its bytes with all experts,
``r`` the bytes beside one expert (its row of the router); j goes over all other matrices. One type per matrix of a layer: all
its experts share it, as in a GGUF file. A layer's alternatives are the products of its counts and types that no other
alternative beats in both bytes and damage.

Rounding is taken to cost what it costs with all experts: a token still passes as many of them, in the same types. That is an
assumption, as is that removal and rounding add up; ``benchmarks/results/experts_joint.md`` has both measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ...compressors.formats import GGUF
from ...errors import InfeasibleBudget, InvalidInput
from ...scores import Scores
from ...solvers.choices import Choice, choose
from ..bits.table import Table
from .program import Counts, KeptProgram, Removal

_PAD = 32  # bytes to which GGUF fills a tensor up


@dataclasses.dataclass(frozen=True, eq=False)
class Alternatives:
    """Alternatives for the experts of a layer, the smallest first: bytes, damage, steps of removal, types by matrix."""

    size: np.ndarray
    damage: np.ndarray
    steps: np.ndarray
    types: tuple[tuple[int, ...], ...]


class Rounding:
    """Costs of every type of every matrix, of which the experts' matrices are apart.

    Args:
        scores: A record of the damage of every format, of the same model.
        modules: Full names of the experts' matrices, by name of their block.
        beside: Bytes beside one expert of every such block.
    """

    def __init__(self, scores: Scores, modules: Mapping[str, Sequence[str]], beside: Sequence[int]) -> None:
        self.scores, self.table, self.beside = scores, Table.of(scores), list(beside)
        names = [{m.name for m in b.modules} for b in self.table.blocks]
        self.rows = [[i for i, held in enumerate(names) if held & set(own)] for own in modules.values()]
        own = set().union(*modules.values())
        if own != set().union(*(names[i] for rows in self.rows for i in rows)):
            raise InvalidInput(
                "The record of formats does not have the experts' matrices apart from others.",
                "Every matrix of experts is a block of its own there, or shares one with others of its layer.",
                "Measure again: layerbudget plan bits MODEL --format gguf --save-scores FILE.",
            )
        inside = set(itertools.chain(*self.rows))
        self.others = [i for i in range(len(names)) if i not in inside]

    def least(self, counts: Sequence[int], floors: Sequence[int]) -> int:
        """Bytes of the smallest file: as few experts as the routers need, and the smallest types."""
        small, total = self.table.smallest, self.table.beside + int(self.table.smallest[self.others].sum())
        for rows, count, floor, row in zip(self.rows, counts, floors, self.beside, strict=True):
            total += int(small[rows].sum()) * floor // count + row * (floor - count)
        return total

    def types(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]:
        """Bytes (all experts), damage and types of some matrices that no other types beat in both, the smallest first."""
        size, damage = np.zeros(1, dtype=np.int64), np.zeros(1)
        types: list[tuple[int, ...]] = [()]
        for i in rows:
            able = np.flatnonzero(self.table.has[i])
            size = (size[:, None] + self.table.size[i, able]).ravel()
            damage = (damage[:, None] + self.table.damage[i, able]).ravel()
            types = [(*t, int(j)) for t in types for j in able]
            best = _frontier(size, damage)
            size, damage, types = size[best], damage[best], [types[k] for k in best]
        return size, damage, types

    def alternatives(self, layer: int, removal: Removal, only: int | None = None) -> Alternatives:
        """Counts and types of a layer, ``only`` those with so many experts left where that is given."""
        held, rounded, types = self.types(self.rows[layer])
        left = removal.experts - removal.after
        able = np.arange(len(left)) if only is None else np.flatnonzero(left == only)
        stay = left[able][:, None]
        pad = _PAD if self.table.family == GGUF else 1
        size = -(-held[None] * stay // (removal.experts * pad)) * pad
        size = size + self.beside[layer] * (stay - removal.experts)
        damage = removal.damage[able][:, None] + rounded[None]
        best = _frontier(size.ravel(), damage.ravel())
        steps = np.repeat(able, len(held))[best]
        return Alternatives(size.ravel()[best], damage.ravel()[best], steps, tuple(types[k % len(held)] for k in best))


def _frontier(size: np.ndarray, damage: np.ndarray) -> np.ndarray:
    """Indices of what nothing beats in both, the smallest first."""
    order = np.lexsort((damage, size))
    least = np.minimum.accumulate(np.append(np.inf, damage[order][:-1]))
    return np.asarray(order[damage[order] < least])


class TypedProgram(KeptProgram):
    """Plans from removals and the types of what stays; a budget is the bytes of the whole file.

    Arguments are those of :class:`~layerbudget.decisions.kept_experts.program.KeptProgram`, and the ``rounding``.
    """

    def __init__(
        self, removals: Sequence[Removal], rivals: Sequence[Removal] | None = None, *, even: bool = False, rounding: Rounding
    ) -> None:
        super().__init__(removals, rivals, even=even)
        self.rounding = rounding

    def within(self, most: int, price: np.ndarray) -> tuple[Counts, Choice | None]:
        """The counts of the best plan whose file has at most so many bytes."""
        found, choice = self.solve(most)
        return tuple(int(a.steps[k]) for a, k in zip(found, choice.chosen, strict=False)), choice

    def solve(self, most: int) -> tuple[list[Alternatives], Choice]:
        """The alternatives of all layers, and the choice among them and the types of all other matrices."""
        if not self.even:
            return self._solve(most)
        counts = set.intersection(*({int(r.experts - n) for n in r.after} for r in self.removals))
        able = list[tuple[list[Alternatives], Choice]]()
        for count in sorted(counts):
            try:
                able.append(self._solve(most, count))
            except InfeasibleBudget:
                if count == min(counts):
                    raise
        return min(able, key=lambda each: each[1].damage)

    def _solve(self, most: int, only: int | None = None) -> tuple[list[Alternatives], Choice]:
        table, others = self.rounding.table, self.rounding.others
        found = [self.rounding.alternatives(i, r, only) for i, r in enumerate(self.removals)]
        width = max(len(table.formats), *(len(a.size) for a in found))
        size = np.zeros((len(found) + len(others), width), dtype=np.int64)
        damage = np.full(size.shape, np.inf)
        for i, a in enumerate(found):
            size[i, : len(a.size)], damage[i, : len(a.size)] = a.size - a.size.min(), a.damage
        least = sum(int(a.size.min()) for a in found)  # bytes beside experts that go may make a size negative
        size[len(found) :, : len(table.formats)] = table.size[others]
        damage[len(found) :, : len(table.formats)] = table.damage[others]
        smallest = least + table.beside + int(np.where(np.isfinite(damage), size, np.iinfo(np.int64).max).min(1).sum())
        if most < smallest:
            raise InfeasibleBudget(
                f"A file of {most:,} bytes is too small.", f"The smallest takes {smallest:,} bytes.", "Allow more bytes."
            )
        choice = choose(damage, size, most - least - table.beside)
        return found, dataclasses.replace(choice, unit="bytes")

    def told(self, most: int) -> dict[str, object]:
        """Record of a plan's types: by matrix, bytes of the whole file, damage predicted of removal and of rounding."""
        found, choice = self.solve(most)
        table, formats, removal, spent = self.rounding.table, dict[str, str](), 0.0, self.rounding.table.beside
        for i, (a, k, r) in enumerate(zip(found, choice.chosen, self.removals, strict=False)):
            removal += float(r.damage[a.steps[k]])
            spent += int(a.size[k])
            for row, j in zip(self.rounding.rows[i], a.types[k], strict=True):
                formats |= {m.name: table.formats[j] for m in table.blocks[row].modules}
        for row, j in zip(self.rounding.others, choice.chosen[len(found) :], strict=True):
            spent += int(table.size[row, j])
            formats |= {m.name: table.formats[j] for m in table.blocks[row].modules}
        held = {"formats": formats, "bytes": spent, "removal": removal, "rounding": float(choice.damage) - removal}
        return {**held, "family": table.family, "method": table.method, "scores": self.rounding.scores.digest}
