r"""One step of a sequential plan of smaller shapes: the best alternative of every layer within reach. No torch.

    minimise   sum_k f_k(j_k)      subject to      sum_k s_k(j_k) >= S,      j_k one of the alternatives of layer k

An alternative is a row ``(heads, mlp, zeros of the heads, zeros of the MLP, gone)``: units that go from both parts, the level
of zeros in what remains of each (:mod:`layerbudget.decisions.shapes.zeros`), and whether the whole layer goes. ``s`` is what
it saves,
``f`` a model of the damage around the present plan, of any shape: the multiple-choice program
(:mod:`layerbudget.solvers.counted`), exact for whole units and for at most N layers that go.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput
from ...plan import Plan
from ...planning.costs import parse_budget
from ...records import to_jsonable
from ...solvers.choices import Choice
from ...solvers.counted import choose_few
from .parts import KINDS, Part
from .program import FoundShapes, ShapeProblem, priced, shaped_plan, too_much
from .zeros import left, zeros_of

HEADS, MLP, GONE = 0, 1, 4
Solve = Callable[[np.ndarray], Choice]


class ShapeSpace:
    """What every layer may lose, and what has to be saved.

    Args:
        parts: The parts of all layers, in order.
        budget: What is to be saved: ``"25% flops"``, ``"2 GiB"``, ``"300M params"``.
        kinds: Which kinds may lose units.
        max_removed: Largest share of the units of one part.
        depth: So many whole layers may go.
        zeros: Zeros of what remains: ``none``, ``2:4`` or ``packed``.
        even: All layers that stay lose the same number of heads and of MLP units.
        allowed: With ``even``: numbers of removed units that the config can express, by kind; all by default.
        context: See :func:`layerbudget.decisions.shapes.parts.amount`.
        bytes_per_parameter: See there.

    Attributes:
        layers: Layers that may lose something, K of them.
        pair: Their attention and MLP, ``(K, 2)``, None where there is none of a known layout.
        units, top: Units that they have and may lose, ``(K, 2)``.

    Raises:
        InvalidInput: An unknown kind, a share outside [0, 1], zeros that save nothing, or no layer that can go.
        InfeasibleBudget: All of it together does not save enough.
    """

    def __init__(
        self, parts: Sequence[Part], budget: str | float, *, kinds: Sequence[str], max_removed: float, depth: int = 0,
        zeros: str = "none", even: bool = False, allowed: Mapping[str, Collection[int]] | None = None, context: int = 0,
        bytes_per_parameter: float = 2.0,
    ) -> None:  # fmt: skip
        self.zeros = zeros_of(zeros, parse_budget(budget, default="params").unit)
        each, whole, target, base, unit = priced(parts, budget, kinds, max_removed, context, bytes_per_parameter)
        self.cost: dict[str, Any] = {"context": context, "bytes_per_parameter": bytes_per_parameter}
        top = {p.name: self._top(p, kinds, max_removed) for p in parts}
        self.problem = ShapeProblem(
            parts=tuple(parts), each=each, whole=whole, top=top, levels={}, target=target, even=even, allowed=allowed
        )
        self.budget: dict[str, Any] = {"unit": unit, "base": base}
        self.hyper = {
            "budget": str(budget), "kinds": list(kinds), "max_removed": max_removed, "even": even, "depth": depth,
            "zeros": zeros, **self.cost,
        }  # fmt: skip
        known = {(p.layer, p.kind): p for p in parts}
        names = dict.fromkeys(p.layer for p in parts if top[p.name] or depth or len(self.zeros.shares) > 1)
        self.layers = list(names)
        self.pair = [tuple(known.get((name, kind)) for kind in KINDS) for name in names]
        self.units = np.array([[p.units if p else 0 for p in pair] for pair in self.pair])
        self.top = np.array([[top[p.name] if p else 0 for p in pair] for pair in self.pair])
        self.depth = min(depth, len(self.layers) - 1)
        self.rest = [sum(whole[p.name] for p in parts if p.layer == name) for name in names]
        if self.depth and any(p is None for pair in self.pair for p in pair):
            raise InvalidInput("Not every layer has heads and an MLP of a known layout.", "", "Plan without depth.")
        if even and len(np.unique(self.units[:, [kind in kinds for kind in KINDS]], axis=0)) > 1:
            raise InvalidInput(
                "The layers differ in their heads or MLPs, so equal removal would not make them equal.",
                "What an ordinary checkpoint can hold is equal in all layers.",
                "Plan without --even, and use the model in memory.",
            )  # fmt: skip
        self.need = int(np.ceil(target - 1e-9))
        most = self._most()
        if int(self.saved(most[:, None]).sum()) < self.need and not self._with_depth(most):
            order = [(n, 0.0) for n in self.layers[: self.depth]]
            raise too_much(self.problem, order, base, unit, max_removed)

    @staticmethod
    def _top(part: Part, kinds: Sequence[str], share: float) -> int:
        return max(0, min(int(share * part.units + 1e-9), part.units - 1)) if part.kind in kinds else 0

    def _most(self) -> np.ndarray:
        """Everything that may go but whole layers."""
        most = self.start()
        most[:, :2] = self.top
        most[:, 2:GONE] = (len(self.zeros.shares) - 1) * (self.units > 0)
        return most

    def _with_depth(self, most: np.ndarray) -> bool:
        more = np.array(self.rest) - self.saved(most[:, None])[:, 0]
        most[np.argsort(-more, kind="stable")[: self.depth], GONE] = 1
        return int(self.saved(most[:, None]).sum()) >= self.need

    def start(self) -> np.ndarray:
        """Nothing gone, ``(K, 5)``."""
        return np.zeros((len(self.layers), 5), dtype=np.int64)

    def around(self, present: np.ndarray, trust: float, count: int) -> np.ndarray:
        """Alternatives of every layer, ``(K, A, 5)``: at most ``trust`` of a part's units and one level of zeros away.

        ``count`` numbers of units of each part, in all combinations, and the whole layer. Around a layer that is gone lies the
        whole one.
        """
        stays = present[:, GONE] == 0
        common = present[stays][0] if self.problem.even and stays.any() else np.zeros(5, dtype=np.int64)
        base = np.where(stays[:, None], present, common)
        radius = np.maximum(np.rint(trust * self.units), 1)
        low, high = np.maximum(base[:, :2] - radius, 0), np.minimum(base[:, :2] + radius, self.top)
        low = np.minimum(low, high)
        found = []
        for k in range(len(base)):
            axes = []
            for side in (HEADS, MLP):
                wanted = np.rint(np.linspace(low[k, side], high[k, side], count)).astype(np.int64)
                wanted[np.abs(wanted - base[k, side]).argmin()] = base[k, side]
                axes.append(self._allowed(np.unique(wanted), side))
            for side in (HEADS, MLP):
                step = np.arange(len(self.zeros.shares) if self.units[k, side] else 1)
                axes.append(step[np.abs(step - base[k, 2 + side]) <= (1 if trust < 1 else len(step))])
            rows = [(*units, 0) for units in itertools.product(*axes)]
            found.append([*rows, *([(0, 0, 0, 0, 1)] if self.depth else [])])
        longest = max(map(len, found))
        return np.array([[*rows, *[tuple(p)] * (longest - len(rows))] for rows, p in zip(found, present.tolist(), strict=True)])

    def _allowed(self, units: np.ndarray, side: int) -> np.ndarray:
        """Those that the config can express, with ``even``."""
        fits = (self.problem.allowed or {}).get(KINDS[side]) if self.problem.even else None
        return units if fits is None else units[np.isin(units, [0, *fits])]

    def saved(self, alternatives: np.ndarray) -> np.ndarray:
        """What alternatives save, whole numbers rounded down, ``(K, A, 5) -> (K, A)``."""
        unit = self.budget["unit"]
        out = np.zeros(alternatives.shape[:2])
        for k, pair in enumerate(self.pair):
            for j, row in enumerate(alternatives[k].tolist()):
                if row[GONE]:
                    out[k, j] = self.rest[k]
                    continue
                for side, part in enumerate(pair):
                    if part is not None:
                        remains = left(part, unit, row[side], self.zeros, row[2 + side], **self.cost)
                        out[k, j] += self.problem.whole[part.name] - remains
        return np.floor(out + 1e-6).astype(np.int64)

    def step(self, alternatives: np.ndarray, damage: np.ndarray, share: float = 1.0) -> tuple[np.ndarray, Choice]:
        """The alternatives with the least damage by the model among those that save enough.

        Args:
            alternatives: ``(K, A, 5)``.
            damage: Of the model, of any sign, ``(K, A)``; infinite where an alternative is out of reach.
            share: Of what has to be saved in the end.

        Returns:
            The rows chosen, ``(K, 5)``, and the choice.

        Raises:
            InfeasibleBudget: Nothing within reach saves enough.
        """
        saved, gone = self.saved(alternatives), alternatives[:, :, GONE] == 1
        need = int(np.ceil(share * self.need))
        whole = np.ceil(np.array(self.rest) - 1e-6).astype(np.int64)

        def solve(values: np.ndarray) -> Choice:
            return choose_few(values, whole[:, None] - saved, int(whole.sum()) - need, gone, self.depth)

        unit, even = str(self.budget["unit"]), self.problem.even
        among = f" and with at most {self.depth} of {len(self.layers)} layers gone" if self.depth else ""
        try:
            found = self._alike(alternatives, solve, damage, gone) if even else solve(damage)
        except InfeasibleBudget as error:
            raise InfeasibleBudget(
                f"Within reach{' equally in all layers' * even}{among} nothing saves {need} {unit}.",
                f"These layers have {whole.sum()} {unit}.",
                "Save less, raise max_removed, or allow more layers to go (depth).",
            ) from error
        found = dataclasses.replace(found, unit=unit, among=among)
        return alternatives[np.arange(len(alternatives)), found.chosen], found

    def _alike(self, alternatives: np.ndarray, solve: Solve, damage: np.ndarray, gone: np.ndarray) -> Choice:
        """The best pair of numbers for all layers that stay: every pair is tried, and the bound is that of all of them."""
        found, refused = list[Choice](), list[InfeasibleBudget]()
        for pair in np.unique(alternatives[~gone][:, :2], axis=0):
            values = np.where((alternatives[:, :, :2] == pair).all(2) | gone, damage, np.inf)
            if not np.isfinite(values).any(axis=1).all():  # some layer cannot go there
                continue
            try:
                found.append(solve(values))
            except InfeasibleBudget as error:
                refused.append(error)
        if not found:
            raise refused[0] if refused else InfeasibleBudget("No numbers of units are within reach of all layers.", "", "")
        best = min(found, key=lambda f: f.damage)
        below = [f for f in found if f.status == "bounded" and f.lower_bound < best.damage]
        if not below:
            return best
        return dataclasses.replace(best, status="bounded", lower_bound=min(f.lower_bound for f in below))

    def plan(
        self, state: np.ndarray, damage: float, solution: Choice, hyper: Mapping[str, Any], model: Mapping[str, Any]
    ) -> Plan:
        """Write a state down.

        Raises:
            InfeasibleBudget: It does not save enough.
        """
        if int(self.saved(state[:, None]).sum()) < self.need:
            raise InfeasibleBudget(f"{state.tolist()} saves too little.", f"{self.need} are needed.", "Report this.")
        counts = {p.name: 0 for p in self.problem.parts}
        levels = dict[str, int]()
        for pair, row in zip(self.pair, state.tolist(), strict=True):
            for side, part in enumerate(pair):
                if part is not None and not row[GONE]:
                    counts[part.name] = row[side]
                    levels[part.name] = row[2 + side]
        dropped = [n for n, row in zip(self.layers, state, strict=True) if row[GONE]]
        found = FoundShapes(dropped=dropped, counts=counts, damage=damage, gap=solution.gap, solution=solution)
        plan = shaped_plan(self.problem, found, self.budget, {**self.hyper, **hyper}, model)
        extra, budget = dict(plan.extra), dict(plan.budget)
        if self.zeros.name != "none":
            parts, unit = {p.name: p for p in self.problem.parts}, str(self.budget["unit"])
            extra["zeros"] = to_jsonable(self._zeros(parts, counts, levels))
            stay = [p for p in parts.values() if p.layer not in dropped]
            remains = [left(p, unit, counts[p.name], self.zeros, levels.get(p.name, 0), **self.cost) for p in stay]
            budget["spent"] = float(self.budget["base"]) - sum(remains)
        return dataclasses.replace(plan, rule="directional", extra=extra, budget=budget)

    def _zeros(self, parts: Mapping[str, Part], counts: Mapping[str, int], levels: Mapping[str, int]) -> dict[str, Any]:
        """``{part: {share, zeros}}`` of what remains, with the pattern and the runtime in which it saves."""
        remains = {n: parts[n].parameters - counts[n] * parts[n].unit_parameters for n in levels}
        return {
            "pattern": self.zeros.name, "runtime": self.zeros.runtime,
            "parts": {
                n: {"share": self.zeros.shares[j], "zeros": self.zeros.count(remains[n], j)} for n, j in levels.items() if j
            },
        }  # fmt: skip
