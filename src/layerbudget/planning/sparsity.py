"""From scores to a sparsity per block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from ..plan import Plan
from ..program import rules
from ..program.calibrated import CalibratedPenalty
from ..program.counts import round_parameters
from ..program.inputs import Vector, bound_vector
from ..program.sparsity import sparsify
from ..program.utilities import Function
from ..records import Block, check_fraction
from ..scores.record import Scores
from .common import blocks_of, make_plan, matching, oriented, weights_of

Penalty: TypeAlias = "str | Function | Mapping[str, tuple[Sequence[float], Sequence[float]]]"


def plan_sparsity(
    scores: Scores | Sequence[Block],
    *,
    sparsity: float = 0.5,
    max_sparsity: ArrayLike = 0.7,
    min_sparsity: ArrayLike = 0.0,
    exponent: float = 1.0,
    exponent_on: str = "density",
    rule: str = "mdl",
    penalty: Penalty = "quadratic",
    damping: float | None = None,
    smoothing: float = 0.0,
    seed: int = 0,
    width: float | None = None,
    parity: bool = False,
    fixed: Mapping[str, float] | None = None,
    exclude: str | None = None,
) -> Plan:
    """Choose a sparsity for every block so that the whole model reaches ``sparsity`` exactly.

    Args:
        scores: The scores; blocks alone suffice for the rules ``uniform`` and ``size``.
        sparsity: Pruned parameters over prunable parameters of all blocks, fixed and excluded ones included.
        max_sparsity: Cap per block (a scalar or one value per block).
        min_sparsity: Floor per block.
        exponent: kappa, see :func:`layerbudget.program.sparsify`.
        exponent_on: ``density`` or ``block``.
        rule: ``mdl`` (the program), ``permuted`` (the program on shuffled scores), ``uniform``, ``size``, ``layerif``,
            ``alphapruning``, ``owl``.
        penalty: Penalty of the program, see :func:`layerbudget.program.sparsify`; or measured curves
            ``{block name: (ratios, losses)}``, which replace the scores (damage is measured, not predicted) and cap every block
            at its last ratio. How far they were from convex is in ``plan.extra["convexified"]``.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score.
        seed: Seed of ``permuted``.
        width: Width of the maps of ``layerif``, ``alphapruning`` (0.3) and ``owl`` (0.08).
        parity: The published behaviour of those maps, see :mod:`layerbudget.program.rules`.
        fixed: Sparsity of some blocks, by name or regular expression.
        exclude: Regular expression: blocks that must stay dense.

    Returns:
        A plan of kind ``sparsity``. ``count`` is the whole number of parameters to prune per block; the counts sum to
        ``round(sparsity * total)``.

    Raises:
        InvalidInput: An option outside its domain.
        InfeasibleBudget: Caps, floors and fixed blocks do not allow the sparsity.
        DegenerateScores: No score is positive.
        UnknownBlock: ``fixed`` or ``exclude`` matches nothing.
    """
    blocks = blocks_of(scores)
    check_fraction(sparsity, "sparsity")
    rules.known(rule, rules.SPARSITY_RULES)
    numel = np.array([b.numel for b in blocks], dtype=np.float64)
    total = int(round(sparsity * float(numel.sum())))
    low, high, held = _bounds(blocks, min_sparsity, max_sparsity, fixed, exclude)
    hyper: dict[str, Any] = {"sparsity": sparsity, "max_sparsity": max_sparsity, "min_sparsity": min_sparsity}
    solution, extra = None, dict[str, Any]()
    if rule in ("mdl", "permuted"):
        q, penalty, extra = _objective(scores, rule, penalty, damping=damping, smoothing=smoothing, seed=seed)
        solution = sparsify(
            q, numel, total, max_sparsity=high, min_sparsity=low, exponent=exponent, exponent_on=exponent_on,
            penalty=penalty, rule="exactly",
        )  # fmt: skip
        value = solution.value
        hyper |= {"exponent": exponent, "exponent_on": exponent_on, "penalty": getattr(penalty, "name", penalty)}
        hyper |= {"damping": damping, "smoothing": smoothing} | ({"seed": seed} if rule == "permuted" else {})
    else:
        value = _mapped(scores, rule, numel, total, low, high, held, damping=damping, width=width, parity=parity)
        hyper |= {"width": width, "parity": parity} if rule in ("layerif", "alphapruning", "owl") else {}
        if parity:
            total, high = int(round(float(np.dot(value, numel)))), np.maximum(high, value)
    hyper |= {"fixed": dict(fixed or {}), "exclude": exclude}
    counts = round_parameters(value, numel, total, high)
    budget = {"unit": "parameters", "limit": total, "spent": int(counts.sum())}
    return make_plan(scores, "sparsity", rule, blocks, value, counts, budget, hyper, solution, **extra)


def _objective(
    scores: Scores | Sequence[Block], rule: str, penalty: Penalty, *, damping: float | None, smoothing: float, seed: int
) -> tuple[Vector, str | Function, dict[str, Any]]:
    """Weights, penalty, and what the plan should say about measured curves (which replace the scores)."""
    blocks = blocks_of(scores)
    if isinstance(penalty, Mapping):
        penalty = _curves(penalty, [b.name for b in blocks], rule, seed)
    if not isinstance(penalty, CalibratedPenalty):
        return weights_of(scores, damping, smoothing, rule, seed), penalty, {}
    bent = {b.name: float(v) for b, v in zip(blocks, penalty.change, strict=True) if v > 0}
    return np.ones(len(blocks)), penalty, {"convexified": bent}


def _curves(curves: Mapping[str, Any], names: Sequence[str], rule: str, seed: int) -> CalibratedPenalty:
    """Measured curves in the order of the blocks; on the wrong blocks for the rule ``permuted``."""
    known = CalibratedPenalty.from_curves(curves, names)
    if rule != "permuted":
        return known
    order = rules.permuted(np.arange(len(names)), seed).astype(int)
    return CalibratedPenalty.from_curves({n: curves[names[i]] for n, i in zip(names, order, strict=True)}, names)


def _mapped(
    scores: Scores | Sequence[Block], rule: str, numel: Vector, total: int, low: Vector, high: Vector, held: np.ndarray,
    *, damping: float | None, width: float | None, parity: bool,
) -> Vector:  # fmt: skip
    """A published map on the blocks that are not held."""
    value = low.copy()
    free = ~held
    n = numel[free]
    share = (total - float(np.dot(numel[held], low[held]))) / float(n.sum()) if n.size else 0.0
    bounds: dict[str, Any] = {"min_sparsity": low[free], "max_sparsity": high[free]}
    if rule in ("uniform", "size"):
        value[free] = (rules.uniform_sparsity if rule == "uniform" else rules.size_sparsity)(n, share, **bounds)
        return value
    wanted = {} if width is None else {"width": width}
    if rule == "owl":
        value[free] = rules.owl_sparsity(oriented(scores, damping)[free], n, share, parity=parity, **wanted, **bounds)
    else:
        metric = -oriented(scores, damping)[free]
        value[free] = rules.stretched_sparsity(metric, n, share, parity=parity, **wanted, **bounds)
    return value


def _bounds(
    blocks: Sequence[Block], least: ArrayLike, most: ArrayLike, fixed: Mapping[str, float] | None, exclude: str | None
) -> tuple[Vector, Vector, np.ndarray]:
    """Bounds with held blocks pinned, and the mask of those.

    Raises:
        InvalidInput: A cap above one, or below the floor.
    """
    size = len(blocks)
    low = np.full(size, 1.0) * bound_vector(least, size, "min_sparsity", 0.0)
    high = np.full(size, 1.0) * bound_vector(most, size, "max_sparsity", 1.0)
    held = np.zeros(size, dtype=bool)
    for pattern, value in [*(fixed or {}).items(), *([(exclude, 0.0)] if exclude else [])]:
        found = matching(blocks, pattern)
        low[found] = high[found] = check_fraction(value, f"fixed sparsity of {pattern}")
        held[found] = True
    if (low > high).any() or (high > 1.0).any():
        k = int(np.argmax((low > high) | (high > 1.0)))
        raise InvalidInput(
            f"{blocks[k].name} has min_sparsity {low[k]:g} and max_sparsity {high[k]:g}.",
            "They need 0 <= min_sparsity <= max_sparsity <= 1.",
            "Correct the bounds.",
        )
    return low, high, held
