r"""From measured damage to smaller shapes: how many heads and MLP units every layer loses, and which layers go. No torch.

    minimise   sum_k psi_k(u_k / U_k)
    subject to sum_k a_k u_k >= S - (what the dropped layers save),    0 <= u_k <= cap_k,  u_k whole

Part k is the attention or the MLP of one layer, with ``U_k`` units (key-value groups, query heads per group, or some MLP
channels) of ``a_k`` FLOPs, bytes or parameters each; ``n_k = a_k U_k`` in the sparsity program. ``psi_k`` is what removing
units of that part alone was measured to cost, made convex. Layers go in a given order; every number of them is tried.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput
from ...plan import Plan, PlanBlock
from ...planning.costs import parse_budget
from ...records import check_fraction, to_jsonable
from ...solvers.calibrated import CalibratedPenalty
from ...solvers.choices import Choice
from ...solvers.counts import round_units
from ...solvers.inputs import Vector
from ...solvers.solution import Solution
from ...solvers.sparsity import sparsify
from .parts import KINDS, Part, amount

Curve = tuple[Sequence[float], Sequence[float]]
Certified = Solution | Choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeProblem:
    """Parts, what a unit and the whole of each amount to, how many units may go, and what is to be saved."""

    parts: tuple[Part, ...]
    each: Mapping[str, float]
    whole: Mapping[str, float]
    top: Mapping[str, int]
    levels: Mapping[str, Vector]
    target: float
    even: bool
    allowed: Mapping[str, Collection[int]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundShapes:
    """Layers and units that go, with their predicted damage."""

    dropped: list[str]
    counts: dict[str, int]
    damage: float
    gap: float
    solution: Certified | None


def plan_shapes(parts: Sequence[Part], curves: Mapping[str, Curve], **options: Any) -> Plan:
    """The first of :func:`shape_plans`: the least predicted damage."""
    return shape_plans(parts, curves, **options)[0]


def priced(
    parts: Sequence[Part],
    budget: str | float,
    kinds: Sequence[str],
    max_removed: float,
    context: int,
    bytes_per_parameter: float,
) -> tuple[dict[str, float], dict[str, float], float, float, str]:
    """What a unit of every part and the whole part cost, what is to be saved, what all parts cost, and in which unit.

    Raises:
        InvalidInput: An unknown kind, or a share outside [0, 1].
        InfeasibleBudget: The parts cannot save so much.
        UnknownUnit: A budget in another unit.
    """
    wanted = parse_budget(budget, default="params")
    options: dict[str, Any] = {"context": context, "bytes_per_parameter": bytes_per_parameter}
    each, whole = ({p.name: amount(p, wanted.unit, **options)[i] for p in parts} for i in (0, 1))
    base = sum(whole.values())
    target = wanted.amount * base if wanted.relative else wanted.amount
    check_shapes(parts, kinds, max_removed, target, base, wanted.text or str(budget))
    return each, whole, target, base, wanted.unit


def shape_plans(
    parts: Sequence[Part],
    curves: Mapping[str, Curve],
    *,
    budget: str | float,
    kinds: Sequence[str] = KINDS,
    max_removed: float = 0.75,
    order: Sequence[tuple[str, float]] = (),
    even: bool = False,
    allowed: Mapping[str, Collection[int]] | None = None,
    context: int = 0,
    bytes_per_parameter: float = 2.0,
    model: Mapping[str, Any] | None = None,
) -> list[Plan]:
    """Choose how many units of every part go so that at least ``budget`` is saved at the least predicted damage.

    Args:
        parts: The parts of all layers, in order.
        curves: Damage by part, ``{name: (removed units, damage)}``, measured at increasing numbers; interpolated between
            (log-linearly) and not used beyond the last. Parts without a curve stay whole.
        budget: What is to be saved: ``"25% flops"`` (of the layers' matrices), ``"2 GiB"``, ``"300M params"``.
        kinds: Which kinds may lose units.
        max_removed: Largest share of the units of one part that may go.
        order: Layers that may go as a whole, the first one first, each with its damage on top of those before it.
        even: All layers lose the same number of heads and of MLP units, as a plain config needs.
        allowed: With ``even``: numbers of removed units that the config can express, by kind; all by default.
        context: See :func:`amount`.
        bytes_per_parameter: See :func:`amount`.
        model: ``{id, revision, digest}``.

    Returns:
        Plans in the order of predicted damage, one for every number of dropped layers, and with ``even`` for every number of
        heads; the exact best of each. Kind ``sparsity``, rule ``structured``, one block per part, ``count`` the matrix
        parameters that go. ``extra["shapes"]`` holds ``{part: {layer, kind, by, units, removed}}``, ``extra["dropped"]`` the
        layers.

    Raises:
        InvalidInput: An unknown kind, a share outside [0, 1], or ``even`` with layers of different shapes.
        InfeasibleBudget: Whole units within the caps, and the layers of ``order``, do not save enough.
        UnknownUnit: A budget in another unit.
    """
    each, whole, target, base, unit = priced(parts, budget, kinds, max_removed, context, bytes_per_parameter)
    top = {p.name: _top(p, kinds, max_removed, curves) for p in parts}
    levels = {p.name: _levels(p, top[p.name], curves) for p in parts}
    problem = ShapeProblem(
        parts=tuple(parts), each=each, whole=whole, top=top, levels=levels, target=target, even=even, allowed=allowed
    )
    found = [f for d in range(len(order) + 1) for f in _with_dropped(problem, [n for n, _ in order[:d]])]
    if not found:
        raise too_much(problem, order, base, unit, max_removed)
    steps = np.concatenate(([0.0], np.cumsum([damage for _, damage in order])))
    found = [dataclasses.replace(f, damage=f.damage + float(steps[len(f.dropped)])) for f in found]
    found.sort(key=lambda f: f.damage)
    hyper = {
        "budget": str(budget),
        "kinds": list(kinds),
        "max_removed": max_removed,
        "even": even,
        "context": context,
        "bytes_per_parameter": bytes_per_parameter,
    }
    return [shaped_plan(problem, f, {"unit": unit, "base": base}, hyper, model or {}) for f in found]


def shaped_plan(
    problem: ShapeProblem, found: FoundShapes, budget: Mapping[str, Any], hyper: Mapping[str, Any], model: Mapping[str, Any]
) -> Plan:
    """Write a decision down as a plan."""
    parts, gone = problem.parts, found.dropped
    spent = sum(problem.whole[p.name] if p.layer in gone else problem.each[p.name] * found.counts[p.name] for p in parts)
    return Plan(
        kind="structured", rule="measured", model=dict(model), blocks=tuple(_block(p, found) for p in parts),
        budget={**budget, "limit": problem.target, "spent": spent}, hyperparameters=to_jsonable(hyper),
        certificate=to_jsonable(found.solution.certificate()) if found.solution is not None else {},
        extra=to_jsonable({
            "shapes": {p.name: {"layer": p.layer, "kind": p.kind, "by": p.by, "units": p.units,
                                "removed": found.counts[p.name]} for p in parts if p.kind != "rest"},
            "dropped": gone, "predicted": found.damage, "gap": found.gap,
        }),
    )  # fmt: skip


def check_shapes(parts: Sequence[Part], kinds: Sequence[str], share: float, target: float, base: float, text: str) -> None:
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


def _top(part: Part, kinds: Sequence[str], share: float, curves: Mapping[str, Any]) -> int:
    """Most units of a part that may go: caps, at least one stays, nothing beyond what was measured."""
    if part.kind not in kinds or part.name not in curves or not len(curves[part.name][0]):
        return 0
    return max(0, min(int(share * part.units + 1e-9), part.units - 1, int(curves[part.name][0][-1])))


def _levels(part: Part, top: int, curves: Mapping[str, Any]) -> Vector:
    """Damage after 0, 1, ..., top units: log-linear between measured points, quadratic below the first."""
    if not top:
        return np.zeros(1)
    x, y = (np.asarray(v, dtype=np.float64) for v in curves[part.name])
    x, y = x[x > 0], y[x > 0]
    if not (np.isfinite(y).all() and (np.diff(x) > 0).all()):
        raise InvalidInput(
            f"The curve of {part.name} is not finite, or its units do not increase.",
            "Removed units increase and damage is finite.",
            "Measure again.",
        )
    y = np.maximum.accumulate(np.maximum(y, 1e-12))
    units = np.arange(top + 1.0)
    value = np.exp(np.interp(units, x, np.log(y)))
    return np.where(units < x[0], y[0] * (units / x[0]) ** 2, value)


def _with_dropped(problem: ShapeProblem, dropped: list[str]) -> list[FoundShapes]:
    """The best shapes of the layers that stay; one for every number of heads with ``even``; none that saves too little."""
    left = [p for p in problem.parts if p.layer not in dropped]
    counts = {p.name: 0 for p in problem.parts}
    need = problem.target - sum(problem.whole[p.name] for p in problem.parts if p.layer in dropped)
    if not left:
        return []
    if need <= 0:
        return [FoundShapes(dropped=dropped, counts=counts, damage=0.0, gap=0.0, solution=None)]
    free = [p for p in left if problem.top[p.name]]
    if sum(problem.each[p.name] * problem.top[p.name] for p in free) < need * (1 - 1e-12):
        return []
    if problem.even:
        solution, gap, choices = None, 0.0, _even(problem, left, free, need)
    else:
        solution, units = _relax(problem, free, need)
        rounded, gap = round_units(solution, units)
        choices = [{p.name: int(u) for p, u in zip(free, rounded, strict=True)}]
    return [
        FoundShapes(
            dropped=dropped, counts=counts | chosen, gap=gap, solution=solution,
            damage=sum(float(problem.levels[n][u]) for n, u in chosen.items()),
        )
        for chosen in choices
    ]  # fmt: skip


def _relax(problem: ShapeProblem, free: Sequence[Part], need: float) -> tuple[Solution, Vector]:
    """The sparsity program on the hulls of the levels; rows get equally many points, all extra ones collinear."""
    units = np.array([p.units for p in free], dtype=np.float64)
    size = max(len(problem.levels[p.name]) for p in free)
    ratios, losses = [], []
    for p in free:
        y = problem.levels[p.name]
        x = np.arange(len(y)) / p.units
        first = np.linspace(0.0, x[1], size - len(y) + 2)[:-1]
        ratios.append(np.concatenate((first, x[1:])))
        losses.append(np.concatenate((first / x[1] * y[1], y[1:])))
    curves = CalibratedPenalty(ratios, losses)
    n = np.array([problem.each[p.name] for p in free]) * units
    caps = np.array([problem.top[p.name] for p in free]) / units
    most = float(np.dot(n, caps))
    solution = sparsify(np.ones(len(free)), n, min(need, most), max_sparsity=caps, penalty=curves, spend="exactly")
    return solution, units


def _even(problem: ShapeProblem, left: Sequence[Part], free: Sequence[Part], need: float) -> list[dict[str, int]]:
    """Numbers of units that all layers share: for every number of heads the fewest MLP units that save enough."""
    kinds = sorted({p.kind for p in free})
    groups = {k: [p for p in left if p.kind == k] for k in kinds}
    for k, group in groups.items():
        if len({(p.units, p.by, p.unit_parameters, p.parameters) for p in group}) > 1:
            raise InvalidInput(
                f"The layers differ in their {'MLPs' if k == 'mlp' else k}, so equal removal would not make them equal.",
                "What an ordinary checkpoint can hold is equal in all layers.",
                "Plan without --even, and use the model in memory.",
            )
    *others, last = [_choices(problem, k, groups[k]) for k in kinds]
    found = []
    for pick in itertools.product(*others):
        saved = sum(s for _, s in pick)
        enough = [u for u, s in last if saved + s >= need * (1 - 1e-12)]
        if enough:
            numbers = [u for u, _ in pick] + [enough[0]]
            found.append({p.name: u for k, u in zip(kinds, numbers, strict=True) for p in groups[k]})
    return found


def _choices(problem: ShapeProblem, kind: str, group: Sequence[Part]) -> list[tuple[int, float]]:
    """``(removed, saved)`` of every number of units that this kind may lose in all layers, increasing."""
    most = min(problem.top[p.name] for p in group)
    numbers = [u for u in range(most + 1) if u == 0 or problem.allowed is None or u in problem.allowed.get(kind, range(u + 1))]
    saved = sum(problem.each[p.name] for p in group)
    return [(u, saved * u) for u in numbers]


def _block(part: Part, found: FoundShapes) -> PlanBlock:
    gone = part.layer in found.dropped
    count = part.parameters if gone else found.counts[part.name] * part.unit_parameters
    return PlanBlock(name=part.name, value=count / part.parameters, count=count, numel=part.parameters, modules=part.modules)


def too_much(
    problem: ShapeProblem, order: Sequence[tuple[str, float]], base: float, unit: str, share: float
) -> InfeasibleBudget:
    """The refusal that says what could be saved at most, and what to change."""
    gone = {n for n, _ in order}
    most = 0.0
    for dropped in (set[str](), gone):
        left = [p for p in problem.parts if p.layer not in dropped]
        whole = sum(problem.whole[p.name] for p in problem.parts if p.layer in dropped)
        if problem.even:
            groups = [[p for p in left if p.kind == k] for k in sorted({p.kind for p in left if problem.top[p.name]})]
            saved = sum(max(s for _, s in _choices(problem, g[0].kind, g)) for g in groups)
        else:
            saved = sum(problem.each[p.name] * problem.top[p.name] for p in left)
        most = max(most, whole + saved)
    even = " equally in all layers" if problem.even else ""
    return InfeasibleBudget(
        f"{problem.target:g} {unit} ({problem.target / base:.1%}) are to be saved; whole units within the caps{even} "
        f"save at most {most:g} ({most / base:.1%}).",
        f"Between 0 and {most / base:.1%} {unit} can be saved with max_removed={share:g} and {len(order)} removable layers.",
        "Save less, raise max_removed, or allow whole layers to go (depth).",
    )
