r"""The program of smaller shapes: the parts of every layer, what they save, and the best choice for all of them. No torch.

    minimise   sum_k f_k(j_k)      subject to      sum_k s_k(j_k) >= S,      j_k one of the alternatives of layer k

An alternative is a row ``(heads, mlp, gone)``: units that go from both parts, and whether the whole layer goes. ``s`` is what
it saves, ``f`` a model of the damage around the present plan, of any shape: the multiple-choice program
(:mod:`layerbudget.solvers.counted`), exact for whole units and for at most N layers that go.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ...budget import parse_budget
from ...canonical import to_jsonable
from ...errors import InfeasibleBudget, InvalidInput, UnknownUnit
from ...plan import Plan, PlanBlock, payload_of
from ...records import check_fraction
from ...solvers.choices import Choice
from ...solvers.counted import choose_few
from .payload import ShapedPart, ShapesPayload

KINDS = ("heads", "mlp")
UNITS = ("auto", "groups", "queries")  # of heads
WAYS = ("auto", "refit", "stream")  # of compensation
PASSES = 46.0  # forward equivalents of a search
DAMPING = 0.01  # of the refit, relative to the mean of the second moments' diagonal
OTHER_KIND = {  # remedies where parts of one kind cannot go
    "heads": "Remove MLP units (--parts mlp), or prune its weights instead: layerbudget plan sparsity MODEL, then apply.",
    "mlp": "Remove heads (--parts heads), or prune its weights instead: layerbudget plan sparsity MODEL, then apply.",
}
NEITHER = "Prune its weights instead: layerbudget plan sparsity MODEL, then apply."
HEADS, MLP, GONE = 0, 1, 2
NANOSECONDS = "nanoseconds"  # of a request, 256 tokens read and 64 written: a budget of latency, in whole numbers


def layers_differ(plan: Plan, kinds: Collection[str] = KINDS) -> bool:
    """Return whether a plan of shapes leaves layers with different heads or widths."""
    payload = payload_of(plan, ShapesPayload)
    parts = [part for part in payload.shapes.values() if part.layer not in payload.dropped]
    left = [(part.kind, part.removed) for part in parts if part.kind in kinds]
    return len(set(left)) > len({kind for kind, _ in left})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrunablePart:
    """The attention, the MLP, or the other matrices (``rest``, which only goes with its layer) of one layer.

    A unit is one of ``groups``, of ``queries``, or ``8 channels`` (``by``), and has ``unit_parameters``; at least one of the
    ``units`` stays unless the whole layer goes. ``parameters`` are those of the part's matrices, ``flops`` theirs per token;
    ``price`` and ``unit_price`` are measured nanoseconds of a request, where they are known.
    """

    name: str
    layer: str
    kind: str
    by: str = ""
    units: int = 0
    unit_parameters: int = 0
    parameters: int
    flops: int
    price: int = 0
    unit_price: int = 0
    modules: tuple[str, ...]

    def size(self, unit: str, bytes_per_parameter: float = 2.0, removed: int = 0) -> float:
        """Return what is left when so many units are gone, in ``params``, ``bytes``, ``flops`` (two per multiply-add) or
        ``nanoseconds``.

        >>> sizes = {"units": 4, "unit_parameters": 16, "parameters": 64, "flops": 128}
        >>> part = PrunablePart(name="a", layer="l", kind="mlp", modules=(), **sizes)
        >>> [part.size(unit, removed=1) for unit in ("flops", "bytes", "params")]
        [96.0, 96.0, 48.0]
        """
        gone = removed * self.unit_parameters
        if unit == NANOSECONDS:
            return float(self.price - removed * self.unit_price)
        if unit == "flops":
            return float(self.flops - 2 * gone)
        return (self.parameters - gone) * (bytes_per_parameter if unit == "bytes" else 1.0)


class ShapeSpace:
    """The program: alternatives of every layer, and what has to be saved.

    Arguments are those of :func:`~layerbudget.decisions.shapes.plan.plan_shapes`, and ``allowed``: numbers of removed units
    that the config can express, by kind, with ``even``; all by default. ``even`` may also be the kinds alone that are equal in
    all layers. ``droppable`` says whether the model's config can say that a layer is gone.

    K ``layers`` may lose something. ``pair`` has their attention and MLP, ``(K, 2)``, None where there is none of a known
    layout; ``units``, ``top`` and ``each`` what these have, may lose, and save by one of them. ``base`` is what all parts
    amount to, ``need`` what has to be saved of it.
    """

    def __init__(
        self,
        parts: Sequence[PrunablePart],
        budget: str | float,
        *,
        kinds: Sequence[str] = KINDS,
        max_removed: float = 0.75,
        depth: int = 0,
        even: bool | Collection[str] = False,
        allowed: Mapping[str, Collection[int]] | None = None,
        bytes_per_parameter: float = 2.0,
        droppable: Callable[[], bool] = lambda: True,
    ) -> None:
        wanted = parse_budget(budget, default="params")
        timed = wanted.unit == "latency" and any(p.price for p in parts)
        if not timed and wanted.unit not in ("flops", "params", "bytes"):
            raise UnknownUnit(
                f"Heads and MLP units are not priced in {wanted.unit}.",
                "Units: flops, params, bytes; latency where it was measured.",
                "Write '25% flops', for example.",
            )
        self.unit, self.parts = NANOSECONDS if timed else wanted.unit, tuple(parts)
        self.even = tuple(k for k in KINDS if k in (even if isinstance(even, Collection) else KINDS)) if even else ()
        self.sides = [KINDS.index(kind) for kind in self.even]
        self.allowed = {k: [0, *fits] for k, fits in (allowed or {}).items() if k in self.even}
        whole = {p.name: p.size(self.unit, bytes_per_parameter) for p in parts}
        each = {p.name: whole[p.name] - p.size(self.unit, bytes_per_parameter, 1) for p in parts}
        self.base = sum(whole.values())
        self.target = wanted.amount * (self.base if wanted.relative else 1e9 if timed else 1.0)
        _check(parts, kinds, max_removed, self.target, self.base, wanted.text or str(budget))
        self.hyper: dict[str, Any] = {
            "budget": str(budget),
            "kinds": list(kinds),
            "max_removed": max_removed,
            "even": even if isinstance(even, bool) else list(self.even),
            "depth": depth,
        }
        self.hyper |= {"bytes_per_parameter": bytes_per_parameter}
        top = {p.name: _top(p, kinds, max_removed) for p in parts}
        known = {(p.layer, p.kind): p for p in parts}
        self.layers = list(dict.fromkeys(p.layer for p in parts if top[p.name] or depth))
        self.pair = [tuple(known.get((name, kind)) for kind in KINDS) for name in self.layers]
        self.units, self.top, self.each = (
            np.array([[value(p) if p else 0 for p in pair] for pair in self.pair]).reshape(-1, 2)
            for value in (lambda p: p.units, lambda p: top[p.name], lambda p: each[p.name])
        )
        self.depth = max(0, min(depth, len(self.layers) - 1))
        self.rest = np.array([sum(whole[p.name] for p in parts if p.layer == name) for name in self.layers])
        whole_pairs = all(known.get((p.layer, kind)) for p in parts for kind in KINDS)
        self.droppable = lambda: whole_pairs and droppable()
        if self.depth and not whole_pairs:
            raise InvalidInput("Not every layer has heads and an MLP of a known layout.", "", "Plan without depth.")
        for kind, what in (("heads", "heads"), ("mlp", "MLPs")):
            if (
                kind in kinds
                and kind in self.even
                and len({(p.units, p.by, p.unit_parameters, p.parameters) for p in parts if p.kind == kind}) > 1
            ):
                raise InvalidInput(
                    f"The layers differ in their {what}, so equal removal would not make them equal.",
                    "What an ordinary checkpoint can hold is equal in all layers.",
                    f"{OTHER_KIND[kind]} Or plan without --even, and use the model in memory.",
                )
        self.need = int(np.ceil(self.target - 1e-9))
        self._check_reach()

    def _check_reach(self) -> None:
        most = self.start()
        most[:, :2] = self.top
        for side, kind in zip(self.sides, self.even, strict=True):
            top = int(self.top[:, side].min()) if len(self.top) else 0
            most[:, side] = max(u for u in self.allowed.get(kind, [top]) if u <= top)
        saved = self.saved(most[:, None])[:, 0]
        more = np.sort(np.maximum(self.rest - saved, 0))[::-1][: self.depth]
        if int(saved.sum() + np.floor(more).sum()) >= self.need:
            return
        unit, most_share = self.unit, float(saved.sum() + more.sum()) / self.base
        raise InfeasibleBudget(
            f"{self.target:g} {unit} ({self.target / self.base:.1%}) are to be saved; whole units within the caps"
            f"{self._equally()} save at most {most_share * self.base:g} ({most_share:.1%}).",
            f"Between 0 and {most_share:.1%} {unit} can be saved with max_removed={self.hyper['max_removed']:g} and "
            f"{self.depth} removable layers.",
            self._remedy(),
        )

    def _remedy(self) -> str:
        """What helps where too little can be saved: of depth only where there is more of it."""
        more = self.depth < len({p.layer for p in self.parts}) - 1 and self.droppable()
        return f"Save less, {'' if more else 'or '}raise max_removed{', or allow more layers to go (depth)' if more else ''}."

    def _equally(self) -> str:
        """Words for what is equal in all layers."""
        part = f", {self.even[0]} alone" if len(self.even) == 1 else ""
        return f" equally in all layers{part}" if self.even else ""

    def start(self) -> np.ndarray:
        """Nothing gone, ``(K, 3)``."""
        return np.zeros((len(self.layers), 3), dtype=np.int64)

    def around(self, present: np.ndarray, trust: float, count: int) -> np.ndarray:
        """Alternatives of every layer, ``(K, A, 3)``: at most ``trust`` of a part's units away.

        ``count`` numbers of units of each part, in all combinations, and the whole layer. Around a layer that is gone lies the
        whole one.
        """
        stays = present[:, GONE] == 0
        common = np.zeros(3, dtype=np.int64)
        if stays.any():
            common[self.sides] = present[stays][0, self.sides]
        base = np.where(stays[:, None], present, common)
        radius = np.maximum(np.rint(trust * self.units), 1)
        low, high = np.maximum(base[:, :2] - radius, 0), np.minimum(base[:, :2] + radius, self.top)
        low = np.minimum(low, high)
        alternatives = []
        for k in range(len(base)):
            axes = []
            for side in (HEADS, MLP):
                wanted = np.rint(np.linspace(low[k, side], high[k, side], count)).astype(np.int64)
                wanted[np.abs(wanted - base[k, side]).argmin()] = base[k, side]
                fits = self.allowed.get(KINDS[side], wanted)
                axes.append(np.unique(wanted[np.isin(wanted, fits)]))
            alternatives.append([*((*units, 0) for units in itertools.product(*axes)), *([(0, 0, 1)] if self.depth else [])])
        longest = max(map(len, alternatives))
        return np.array(
            [[*rows, *[tuple(p)] * (longest - len(rows))] for rows, p in zip(alternatives, present.tolist(), strict=True)]
        )

    def saved(self, alternatives: np.ndarray) -> np.ndarray:
        """Savings of alternatives, whole numbers rounded down, ``(K, A, 3) -> (K, A)``."""
        units = (alternatives[:, :, :2] * self.each[:, None]).sum(2)
        return np.floor(np.where(alternatives[:, :, GONE] == 1, self.rest[:, None], units) + 1e-6).astype(np.int64)

    def evened(self, even: bool) -> ShapeSpace:
        """The same program with the same numbers in all layers that stay, or with any."""
        other = copy.copy(self)
        other.even = KINDS if even else ()
        other.sides = [KINDS.index(kind) for kind in other.even]
        return other

    def within(self, depth: int) -> ShapeSpace:
        """The same program with so many layers that may go."""
        other = copy.copy(self)
        other.depth = depth
        return other

    def step(self, alternatives: np.ndarray, damage: np.ndarray, share: float = 1.0) -> tuple[np.ndarray, Choice]:
        """Rows ``(K, 3)`` with the least damage by the model among alternatives ``(K, A, 3)`` that save enough, and the choice.

        ``damage``, ``(K, A)``, has any sign, and is infinite where an alternative is out of reach; ``share`` is that of what
        has to be saved in the end.
        """
        saved, gone = self.saved(alternatives), alternatives[:, :, GONE] == 1
        need = int(np.ceil(share * self.need))
        whole = np.ceil(self.rest - 1e-6).astype(np.int64)

        def solve(values: np.ndarray) -> Choice:
            return choose_few(values, whole[:, None] - saved, int(whole.sum()) - need, gone, self.depth)

        among = f" and with at most {self.depth} of {len(self.layers)} layers gone" if self.hyper["depth"] else ""
        try:
            choice = _alike(alternatives, solve, damage, gone, self.sides) if self.even else solve(damage)
        except InfeasibleBudget as error:
            raise InfeasibleBudget(
                f"Within reach{self._equally()}{among} nothing saves {need} {self.unit}.",
                f"These layers have {whole.sum()} {self.unit}.",
                self._remedy(),
            ) from error
        among += "" if self._all_in(alternatives, damage) else ", and among those that this step may reach,"
        choice = dataclasses.replace(choice, unit=self.unit, among=among, subject="step")
        return alternatives[np.arange(len(alternatives)), choice.chosen], choice

    def _all_in(self, alternatives: np.ndarray, damage: np.ndarray) -> bool:
        """Whether every number of units that may go is among the alternatives of every layer."""
        for rows, known, top in zip(alternatives[:, :, :2], np.isfinite(damage), self.top, strict=True):
            numbers = [[n for n in self.allowed.get(k, range(m + 1)) if n <= m] for k, m in zip(KINDS, top, strict=True)]
            if len(np.unique(rows[known], axis=0)) < math.prod(map(len, numbers)):
                return False
        return True

    def _gone(self, state: np.ndarray) -> tuple[list[str], dict[str, int]]:
        """Layers that go whole in a state, and units that go from every part of the others."""
        counts = {p.name: 0 for p in self.parts}
        for pair, row in zip(self.pair, state.tolist(), strict=True):
            if not row[GONE]:
                counts |= {part.name: gone for part, gone in zip(pair, row, strict=False) if part is not None}
        return [n for n, row in zip(self.layers, state, strict=True) if row[GONE]], counts

    def removed(self, state: np.ndarray) -> np.ndarray:
        """Matrix parameters of every part that go in a state, ``(parts,)``."""
        dropped, counts = self._gone(state)
        return np.array([p.parameters if p.layer in dropped else counts[p.name] * p.unit_parameters for p in self.parts])

    def plan(
        self, state: np.ndarray, damage: float, solution: Choice, hyper: Mapping[str, Any], model: Mapping[str, Any]
    ) -> Plan:
        """A state as a plan: one block per part, ``count`` the matrix parameters that go."""
        if int(self.saved(state[:, None]).sum()) < self.need:
            raise InfeasibleBudget(f"{state.tolist()} saves too little.", f"{self.need} are needed.", "Report this.")
        dropped, counts = self._gone(state)
        sizes = (
            p.size(self.unit, self.hyper["bytes_per_parameter"], counts[p.name]) for p in self.parts if p.layer not in dropped
        )
        shapes = {
            p.name: ShapedPart(layer=p.layer, kind=p.kind, by=p.by, units=p.units, removed=int(counts[p.name]))
            for p in self.parts
            if p.kind != "rest"
        }
        blocks = tuple(
            PlanBlock(name=p.name, value=gone / p.parameters, count=gone, numel=p.parameters, modules=p.modules)
            for p, gone in zip(self.parts, self.removed(state).tolist(), strict=True)
        )
        return Plan(
            kind="shapes",
            rule="directional",
            model=dict(model),
            blocks=blocks,
            budget={"unit": self.unit, "base": self.base, "limit": self.target, "spent": self.base - sum(sizes)},
            hyperparameters=to_jsonable({**self.hyper, **hyper}),
            certificate=to_jsonable(solution.certificate()),
            payload=ShapesPayload(shapes=shapes, dropped=list(dropped), predicted=float(damage), gap=float(solution.gap)),
        )


def _check(parts: Sequence[PrunablePart], kinds: Sequence[str], share: float, target: float, base: float, text: str) -> None:
    """Refuse kinds that are not there, and a target outside of what there is."""
    check_fraction(share, "max_removed")
    wrong, there = [k for k in kinds if k not in KINDS], sorted({p.kind for p in parts} - {"rest"})
    if wrong or not any(p.kind in kinds for p in parts):
        raise InvalidInput(
            f"There is nothing of kind {next(iter(wrong or kinds), '')!r} to remove.",
            f"Kinds are {', '.join(KINDS)}; these layers have {', '.join(there) or 'none'}.",
            "Correct kinds.",
        )
    if not 0 <= target < base:
        raise InfeasibleBudget(
            f"The budget {text!r} asks to save {target:g} of {base:g}.", f"It must lie in [0, {base:g}).", "Save less."
        )


def _top(part: PrunablePart, kinds: Sequence[str], share: float) -> int:
    return max(0, min(int(share * part.units + 1e-9), part.units - 1)) if part.kind in kinds else 0


def _alike(
    alternatives: np.ndarray, solve: Callable[[np.ndarray], Choice], damage: np.ndarray, gone: np.ndarray, sides: Sequence[int]
) -> Choice:
    """The best numbers of some ``sides`` for all layers that stay: all are tried, and the bound is that of all of them."""
    choices, refused = list[Choice](), list[InfeasibleBudget]()
    for common in np.unique(alternatives[~gone][:, sides], axis=0):
        values = np.where((alternatives[:, :, sides] == common).all(2) | gone, damage, np.inf)
        if not np.isfinite(values).any(axis=1).all():  # some layer cannot go there
            continue
        try:
            choices.append(solve(values))
        except InfeasibleBudget as error:
            refused.append(error)
    if not choices:
        raise refused[0] if refused else InfeasibleBudget("No numbers of units are within reach of all layers.", "", "")
    best = min(choices, key=lambda f: f.damage)
    if best.status == "slack":  # of these numbers; others may take less damage and save too little
        best = dataclasses.replace(best, status="optimal")
    below = [f for f in choices if f.status == "bounded" and f.lower_bound < best.damage]
    return dataclasses.replace(best, status="bounded", lower_bound=min(f.lower_bound for f in below)) if below else best
