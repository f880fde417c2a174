r"""The program of smaller shapes: what every layer may lose, and the best choice for all of them. No torch.

    minimise   sum_k f_k(j_k)      subject to      sum_k s_k(j_k) >= S,      j_k one of the alternatives of layer k

An alternative is a row ``(heads, mlp, zeros of the heads, zeros of the MLP, gone)``: units that go from both parts, the level
of zeros in what remains of each (:mod:`layerbudget.decisions.shapes.parts`), and whether the whole layer goes. ``s`` is what it
saves, ``f`` a model of the damage around the present plan, of any shape: the multiple-choice program
(:mod:`layerbudget.solvers.mixed`), exact for whole units and for at most N layers that go.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput
from ...plan import Plan, PlanBlock
from ...planning.costs import parse_budget
from ...records import check_fraction, to_jsonable
from ...solvers.choices import Choice
from ...solvers.mixed import choose_few
from .parts import KINDS, Part, Price

HEADS, MLP, GONE = 0, 1, 4


class ShapeSpace:
    """The program: alternatives of every layer, and what has to be saved.

    Args:
        parts: The parts of all layers, in order.
        budget: What is to be saved: ``"25% flops"``, ``"2 GiB"``, ``"300M params"``.
        kinds: Which kinds may lose units.
        max_removed: Largest share of the units of one part.
        depth: So many whole layers may go.
        zeros: Zeros of what remains: ``none``, ``2:4`` or ``packed``.
        even: All layers that stay lose the same number of heads and of MLP units.
        allowed: With ``even``: numbers of removed units that the config can express, by kind; all by default.
        context: See :class:`~layerbudget.decisions.shapes.parts.Price`.
        bytes_per_parameter: See there.

    Attributes:
        layers: Layers that may lose something, K of them.
        pair: Their attention and MLP, ``(K, 2)``, None where there is none of a known layout.
        units, top: Units that they have and may lose, ``(K, 2)``.
        base, need: What all parts amount to, and what has to be saved of it.

    Raises:
        InvalidInput: An unknown kind, a share outside [0, 1], zeros that save nothing, or no layer that can go.
        InfeasibleBudget: All of it together does not save enough.
        UnknownUnit: A budget in another unit.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        budget: str | float,
        *,
        kinds: Sequence[str] = KINDS,
        max_removed: float = 0.75,
        depth: int = 0,
        zeros: str = "none",
        even: bool = False,
        allowed: Mapping[str, Collection[int]] | None = None,
        context: int = 0,
        bytes_per_parameter: float = 2.0,
    ) -> None:
        wanted = parse_budget(budget, default="params")
        self.price = Price(unit=wanted.unit, context=context, bytes_per_parameter=bytes_per_parameter)
        self.zeros, self.parts, self.even = self.price.check(zeros), tuple(parts), even
        self.allowed = {k: [0, *fits] for k, fits in (allowed or {}).items()} if even else {}
        self.whole = {p.name: self.price.left(p) for p in parts}
        self.base = sum(self.whole.values())
        self.target = wanted.amount * self.base if wanted.relative else wanted.amount
        _check(parts, kinds, max_removed, self.target, self.base, wanted.text or str(budget))
        self.hyper = {"budget": str(budget), "kinds": list(kinds), "max_removed": max_removed, "even": even, "depth": depth}
        self.hyper |= {"zeros": zeros, "context": context, "bytes_per_parameter": bytes_per_parameter}
        top = {p.name: _top(p, kinds, max_removed) for p in parts}
        known = {(p.layer, p.kind): p for p in parts}
        self.layers = list(dict.fromkeys(p.layer for p in parts if top[p.name] or depth or len(self.zeros.shares) > 1))
        self.pair = [tuple(known.get((name, kind)) for kind in KINDS) for name in self.layers]
        self.units = np.array([[p.units if p else 0 for p in pair] for pair in self.pair]).reshape(-1, 2)
        self.top = np.array([[top[p.name] if p else 0 for p in pair] for pair in self.pair]).reshape(-1, 2)
        self.depth = max(0, min(depth, len(self.layers) - 1))
        self.rest = [sum(self.whole[p.name] for p in parts if p.layer == name) for name in self.layers]
        if self.depth and any(p is None for pair in self.pair for p in pair):
            raise InvalidInput("Not every layer has heads and an MLP of a known layout.", "", "Plan without depth.")
        if even and len(np.unique(self.units[:, [kind in kinds for kind in KINDS]], axis=0)) > 1:
            raise InvalidInput(
                "The layers differ in their heads or MLPs, so equal removal would not make them equal.",
                "What an ordinary checkpoint can hold is equal in all layers.",
                "Plan without --even, and use the model in memory.",
            )
        self.need = int(np.ceil(self.target - 1e-9))
        self._check_reach()

    def _check_reach(self) -> None:
        most = self.start()
        most[:, :2] = self.top
        most[:, 2:GONE] = (len(self.zeros.shares) - 1) * (self.units > 0)
        if self.even:
            for side, kind in enumerate(KINDS):
                top = int(self.top[:, side].min()) if len(self.top) else 0
                most[:, side] = max(u for u in self.allowed.get(kind, [top]) if u <= top)
        saved = self.saved(most[:, None])[:, 0]
        more = np.sort(np.maximum(np.array(self.rest) - saved, 0))[::-1][: self.depth]
        if int(saved.sum() + np.floor(more).sum()) >= self.need:
            return
        unit, most_share = self.price.unit, float(saved.sum() + more.sum()) / self.base
        raise InfeasibleBudget(
            f"{self.target:g} {unit} ({self.target / self.base:.1%}) are to be saved; whole units within the caps"
            f"{' equally in all layers' * self.even} save at most {most_share * self.base:g} ({most_share:.1%}).",
            f"Between 0 and {most_share:.1%} {unit} can be saved with max_removed={self.hyper['max_removed']:g} and "
            f"{self.depth} removable layers.",
            "Save less, raise max_removed, or allow whole layers to go (depth).",
        )

    def start(self) -> np.ndarray:
        """Nothing gone, ``(K, 5)``."""
        return np.zeros((len(self.layers), 5), dtype=np.int64)

    def around(self, present: np.ndarray, trust: float, count: int) -> np.ndarray:
        """Alternatives of every layer, ``(K, A, 5)``: at most ``trust`` of a part's units and one level of zeros away.

        ``count`` numbers of units of each part, in all combinations, and the whole layer. Around a layer that is gone lies the
        whole one.
        """
        stays = present[:, GONE] == 0
        common = present[stays][0] if self.even and stays.any() else np.zeros(5, dtype=np.int64)
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
                fits = self.allowed.get(KINDS[side], wanted)
                axes.append(np.unique(wanted[np.isin(wanted, fits)]))
            for side in (HEADS, MLP):
                step = np.arange(len(self.zeros.shares) if self.units[k, side] else 1)
                axes.append(step[np.abs(step - base[k, 2 + side]) <= (1 if trust < 1 else len(step))])
            rows = [(*units, 0) for units in itertools.product(*axes)]
            found.append([*rows, *([(0, 0, 0, 0, 1)] if self.depth else [])])
        longest = max(map(len, found))
        return np.array([[*rows, *[tuple(p)] * (longest - len(rows))] for rows, p in zip(found, present.tolist(), strict=True)])

    def saved(self, alternatives: np.ndarray) -> np.ndarray:
        """Savings of alternatives, whole numbers rounded down, ``(K, A, 5) -> (K, A)``."""
        out = np.zeros(alternatives.shape[:2])
        for k, pair in enumerate(self.pair):
            for j, row in enumerate(alternatives[k].tolist()):
                sides = [(side, part) for side, part in enumerate(pair) if part is not None]
                out[k, j] = (
                    self.rest[k]
                    if row[GONE]
                    else sum(self.whole[p.name] - self.price.left(p, row[side], self.zeros, row[2 + side]) for side, p in sides)
                )
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

        unit = self.price.unit
        among = f" and with at most {self.depth} of {len(self.layers)} layers gone" if self.depth else ""
        try:
            found = _alike(alternatives, solve, damage, gone) if self.even else solve(damage)
        except InfeasibleBudget as error:
            raise InfeasibleBudget(
                f"Within reach{' equally in all layers' * self.even}{among} nothing saves {need} {unit}.",
                f"These layers have {whole.sum()} {unit}.",
                "Save less, raise max_removed, or allow more layers to go (depth).",
            ) from error
        found = dataclasses.replace(found, unit=unit, among=among)
        return alternatives[np.arange(len(alternatives)), found.chosen], found

    def plan(
        self, state: np.ndarray, damage: float, solution: Choice, hyper: Mapping[str, Any], model: Mapping[str, Any]
    ) -> Plan:
        """Return a state as a plan: one block per part, ``count`` the matrix parameters that go.

        ``extra["shapes"]`` holds ``{part: {layer, kind, by, units, removed}}``, ``extra["dropped"]`` the layers that go.

        Raises:
            InfeasibleBudget: It does not save enough.
        """
        if int(self.saved(state[:, None]).sum()) < self.need:
            raise InfeasibleBudget(f"{state.tolist()} saves too little.", f"{self.need} are needed.", "Report this.")
        counts, levels = {p.name: 0 for p in self.parts}, {p.name: 0 for p in self.parts}
        for pair, row in zip(self.pair, state.tolist(), strict=True):
            for side, part in enumerate(pair):
                if part is not None and not row[GONE]:
                    counts[part.name], levels[part.name] = row[side], row[2 + side]
        dropped = [n for n, row in zip(self.layers, state, strict=True) if row[GONE]]
        stay = [p for p in self.parts if p.layer not in dropped]
        remains = sum(self.price.left(p, counts[p.name], self.zeros, levels[p.name]) for p in stay)
        shapes = {
            p.name: {"layer": p.layer, "kind": p.kind, "by": p.by, "units": p.units, "removed": counts[p.name]}
            for p in self.parts
            if p.kind != "rest"
        }
        extra = {"shapes": shapes, "dropped": dropped, "predicted": damage, "gap": solution.gap}
        if self.zeros.name != "none":
            left = {p.name: p.parameters - counts[p.name] * p.unit_parameters for p in stay if levels[p.name]}
            zeros = {n: {"share": self.zeros.shares[levels[n]], "zeros": self.zeros.count(left[n], levels[n])} for n in left}
            extra["zeros"] = {"pattern": self.zeros.name, "runtime": self.zeros.runtime, "parts": zeros}
        gone = {p.name: p.parameters if p.layer in dropped else counts[p.name] * p.unit_parameters for p in self.parts}
        blocks = tuple(
            PlanBlock(name=p.name, value=gone[p.name] / p.parameters, count=gone[p.name], numel=p.parameters, modules=p.modules)
            for p in self.parts
        )
        return Plan(
            kind="shapes",
            rule="directional",
            model=dict(model),
            blocks=blocks,
            budget={"unit": self.price.unit, "base": self.base, "limit": self.target, "spent": self.base - remains},
            hyperparameters=to_jsonable({**self.hyper, **hyper}),
            certificate=to_jsonable(solution.certificate()),
            extra=to_jsonable(extra),
        )


def _check(parts: Sequence[Part], kinds: Sequence[str], share: float, target: float, base: float, text: str) -> None:
    """Refuse kinds that are not there, and a target outside of what there is."""
    check_fraction(share, "max_removed")
    wrong, there = [k for k in kinds if k not in KINDS], sorted({p.kind for p in parts} - {"rest"})
    if wrong or not any(p.kind in kinds for p in parts):
        raise InvalidInput(
            f"There is nothing of kind {(wrong or list(kinds))[0]!r} to remove.",
            f"Kinds are {', '.join(KINDS)}; these layers have {', '.join(there) or 'none'}.",
            "Correct kinds, or remove blocks (plan_depth).",
        )
    if not 0 <= target < base:
        raise InfeasibleBudget(
            f"The budget {text!r} asks to save {target:g} of {base:g}.", f"It must lie in [0, {base:g}).", "Save less."
        )


def _top(part: Part, kinds: Sequence[str], share: float) -> int:
    return max(0, min(int(share * part.units + 1e-9), part.units - 1)) if part.kind in kinds else 0


def _alike(alternatives: np.ndarray, solve: Callable[[np.ndarray], Choice], damage: np.ndarray, gone: np.ndarray) -> Choice:
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
    return dataclasses.replace(best, status="bounded", lower_bound=min(f.lower_bound for f in below)) if below else best
