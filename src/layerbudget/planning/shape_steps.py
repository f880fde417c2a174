r"""One step of a sequential plan of smaller shapes: the best whole units within reach of the present ones. No torch.

    minimise   sum_k f_k(u_k)
    subject to sum_k a_k u_k >= S,    |u_k - v_k| <= r_k,    0 <= u_k <= cap_k,    u_k one of a few whole numbers

with ``f_k`` a model of the damage around the present plan ``v``, of any shape: the multiple-choice program
(:mod:`layerbudget.program.choices`), exact for whole units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InfeasibleBudget
from ..plan import Plan
from ..program.choices import Choice, choose
from .parts import Part
from .shapes import FoundShapes, ShapeProblem, priced, shaped_plan, too_much


class ShapeSpace:
    """The parts that may lose units, and what has to be saved.

    Args:
        parts: The parts of all layers, in order.
        budget: What is to be saved: ``"25% flops"``, ``"2 GiB"``, ``"300M params"``.
        kinds: Which kinds may lose units.
        max_removed: Largest share of the units of one part.
        context: See :func:`layerbudget.planning.parts.amount`.
        bytes_per_parameter: See there.

    Attributes:
        free: Parts that may lose units, K of them.
        units, top: Units that they have and may lose, ``(K,)``.

    Raises:
        InvalidInput: An unknown kind, or a share outside [0, 1].
        InfeasibleBudget: Whole units within the caps do not save enough.
    """

    def __init__(
        self, parts: Sequence[Part], budget: str | float, *, kinds: Sequence[str], max_removed: float, context: int = 0,
        bytes_per_parameter: float = 2.0,
    ) -> None:  # fmt: skip
        each, whole, target, base, unit = priced(parts, budget, kinds, max_removed, context, bytes_per_parameter)
        top = {p.name: self._top(p, kinds, max_removed) for p in parts}
        self.problem = ShapeProblem(
            parts=tuple(parts), each=each, whole=whole, top=top, levels={}, target=target, even=False, allowed=None
        )
        self.budget = {"unit": unit, "base": base}
        self.hyper = {
            "budget": str(budget), "kinds": list(kinds), "max_removed": max_removed, "even": False, "context": context,
            "bytes_per_parameter": bytes_per_parameter,
        }  # fmt: skip
        self.free = [p for p in parts if top[p.name]]
        self.units = np.array([p.units for p in self.free])
        self.top = np.array([top[p.name] for p in self.free])
        self.each = np.array([round(each[p.name]) for p in self.free], dtype=np.int64)
        self.need = int(np.ceil(target - 1e-9))
        if int(self.each @ self.top) < self.need:
            raise too_much(self.problem, (), base, unit, max_removed)

    @staticmethod
    def _top(part: Part, kinds: Sequence[str], share: float) -> int:
        return max(0, min(int(share * part.units + 1e-9), part.units - 1)) if part.kind in kinds else 0

    def reach(self, present: np.ndarray, trust: float, count: int) -> np.ndarray:
        """Numbers of units around a plan, at most ``trust`` of a part's units away, ``(K, count)``; repeated where few."""
        radius = np.maximum(np.rint(trust * self.units), 1)
        low, high = np.maximum(present - radius, 0), np.minimum(present + radius, self.top)
        share = np.linspace(0.0, 1.0, count)
        around = np.rint(low[:, None] + (high - low)[:, None] * share).astype(np.int64)
        around[np.arange(len(present)), np.abs(around - present[:, None]).argmin(1)] = present
        return np.sort(around, axis=1)

    def step(self, levels: np.ndarray, damage: np.ndarray) -> tuple[np.ndarray, Choice]:
        """The units of every part with the least damage by the model among those that save enough.

        Args:
            levels: Units that go, ``(K, L)``.
            damage: Of the model, of any sign, the same shape; infinite where a level is out of reach.

        Raises:
            InfeasibleBudget: Nothing within reach saves enough.
        """
        size = (self.top[:, None] - levels) * self.each[:, None]
        found = choose(damage, size, int(self.each @ self.top) - self.need)
        return levels[np.arange(len(levels)), found.chosen], found

    def plan(
        self, counts: np.ndarray, damage: float, solution: Choice, hyper: Mapping[str, Any], model: Mapping[str, Any]
    ) -> Plan:
        """Write counts down.

        Raises:
            InfeasibleBudget: They do not save enough.
        """
        if int(self.each @ counts) < self.need:
            raise InfeasibleBudget(f"{counts.tolist()} units save too little.", f"{self.need} are needed.", "Report this.")
        chosen = {p.name: 0 for p in self.problem.parts} | {p.name: int(u) for p, u in zip(self.free, counts, strict=True)}
        found = FoundShapes(dropped=[], counts=chosen, damage=damage, gap=solution.gap, solution=solution)
        plan = shaped_plan(self.problem, found, self.budget, {**self.hyper, **hyper}, model)
        return dataclasses.replace(plan, rule="directional")
