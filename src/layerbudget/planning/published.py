"""Published rules for experts (MoLA shapes, LayerIF, AlphaLoRA, uniform, by size) under a budget, caps and fixed blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import InfeasibleBudget
from ..program import rules
from ..program.inputs import Vector
from ..records import Block
from ..scores.record import Scores
from .common import need_scores, oriented


def maker(
    scores: Scores | Sequence[Block], rule: str, blocks: Sequence[Block], free: np.ndarray, low: Vector, *,
    damping: float | None, exponent: float | None, parity: bool,
) -> Callable[[int], Vector]:  # fmt: skip
    """A published rule as a function ``total -> counts`` of the blocks that are not fixed."""
    rules.known("mola-2468" if rule.startswith("mola-") else rule, rules.EXPERT_RULES)
    size, least = int(free.sum()), int(low[free].max(initial=0.0))
    power: dict[str, Any] = {} if exponent is None else {"exponent": exponent}
    if rule.startswith("mola-"):
        return lambda total: rules.mola_experts(size, rule[5:], total)
    if rule == "uniform":
        return lambda total: rules.apportion(np.ones(size), total, minimum=least)
    if rule == "size":
        numel = np.array([float(b.numel) for b in blocks])[free]
        return lambda total: rules.apportion(numel, total, minimum=least)
    if rule == "layerif":
        values = oriented(scores, damping)[free]
        return lambda total: rules.layerif_experts(-values, total, **power)
    alpha = need_scores(scores).values(damping)[free]  # as they are: a larger tail exponent earns more experts
    return lambda total: rules.alphalora_experts(alpha, total, parity=parity, **power)


def counts_within(
    make: Callable[[int], Vector], rule: str, cost: Vector, limit: float, bounds: tuple[Vector, Vector, np.ndarray], *,
    parity: bool,
) -> Vector:  # fmt: skip
    """Counts of a published rule: fixed blocks as they are, for the others the largest total whose counts fit the budget."""
    low, high, held = bounds
    counts, free = low.copy(), ~held
    left = limit - float(cost[held] @ low[held])
    if not free.any():
        if left >= -1e-12 * limit:
            return counts
        raise _unpaid(rule, limit, float(cost @ low))
    total = int(max(left, 0.0) / cost[free].min() * (1 + 1e-12))
    while total > 0:
        counts[free] = make(total)
        spent = float(cost[free] @ counts[free])
        if spent <= left * (1 + 1e-12):
            _within(rule, counts, None if parity else low, high)
            return counts
        total = min(total - 1, int(total * left / spent) + 1)
    raise _unpaid(rule, limit, float(cost @ low))


def _within(rule: str, counts: Vector, low: Vector | None, high: Vector) -> None:
    if (counts > high).any():
        raise InfeasibleBudget(
            f"The rule {rule} gives up to {counts.max():g} experts, the caps allow {high.min():g}.", "", "Raise max_experts."
        )
    if low is not None and (counts < low).any():
        k = int(np.argmax(low - counts))
        raise InfeasibleBudget(
            f"The rule {rule} gives block {k} {counts[k]:g} experts, its minimum is {low[k]:g}.",
            "",
            "Lower min_experts, raise the budget, or use rule='mdl'.",
        )


def _unpaid(rule: str, limit: float, least: float) -> InfeasibleBudget:
    return InfeasibleBudget(f"The budget {limit:g} pays no plan of the rule {rule}.", f"At least {least:g}.", "Raise it.")
