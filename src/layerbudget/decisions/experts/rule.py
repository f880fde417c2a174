"""Published rules for experts (MoLA shapes, LayerIF, AlphaLoRA), uniform and by size, under a budget, caps and fixed blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget
from ...planning.rule import Decision, Problem, rule
from ...solvers import rules as published
from ...solvers.inputs import Vector

Make = Callable[[int], Vector]


@rule("experts", "uniform", summary="the same number everywhere")
def uniform(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """Equal counts, the earlier blocks first where the total does not divide."""
    free = ~problem.held
    return _largest(problem, "uniform", lambda total: published.apportion(np.ones(free.sum()), total, minimum=_least(problem)))


@rule("experts", "size", summary="experts in proportion to a block's size")
def size(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """:func:`layerbudget.solvers.rules.apportion` by parameters."""
    numel = np.array([b.numel for b in problem.blocks], dtype=np.float64)[~problem.held]
    return _largest(problem, "size", lambda total: published.apportion(numel, total, minimum=_least(problem)))


@rule("experts", "layerif", reads=("damping",), exponent=2.0, summary="LayerIF's heuristic: one each, the rest by influence")
def layerif(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """:func:`layerbudget.solvers.rules.layerif_experts`."""
    values = -problem.oriented(options["damping"])[~problem.held]
    return _largest(
        problem, "layerif", lambda total: published.layerif_experts(values, total, exponent=options["exponent"])
    )  # fmt: skip


@rule(
    "experts",
    "alphalora",
    reads=("damping", "parity"),
    exponent=2.5,
    summary="AlphaLoRA: the lighter the tail, the more experts",
)
def alphalora(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """:func:`layerbudget.solvers.rules.alphalora_experts`; the values as they are, whatever their orientation."""
    alpha, parity = problem.need_scores().values(options["damping"])[~problem.held], options["parity"]
    return _largest(
        problem, "alphalora",
        lambda total: published.alphalora_experts(alpha, total, exponent=options["exponent"], parity=parity), parity=parity,
    )  # fmt: skip


def _shapes(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """:func:`layerbudget.solvers.rules.mola_experts`: the digits are experts per group of neighbouring layers."""
    free, name = ~problem.held, str(options["rule"])
    return _largest(problem, name, lambda total: published.mola_experts(int(free.sum()), name[5:], total))


for _name in ("mola-5555", "mola-2468", "mola-8642"):
    rule("experts", _name, summary="MoLA's shape (any digits)", pattern=r"mola-.+", rule=_name)(_shapes)


def _least(problem: Problem) -> int:
    return int(problem.low[~problem.held].max(initial=0.0))


def _largest(problem: Problem, name: str, make: Make, *, parity: bool = False) -> Decision:
    """Fixed blocks as they are, for the others the largest total whose counts fit the budget."""
    counts, free, cost, limit = problem.low.copy(), ~problem.held, problem.amount, problem.target
    left = limit - float(cost[problem.held] @ problem.low[problem.held])
    if not free.any():
        if left >= -1e-12 * limit:
            return Decision(value=counts, counts=counts)
        raise _unpaid(problem, name)
    total = int(max(left, 0.0) / cost[free].min() * (1 + 1e-12))
    while total > 0:
        counts[free] = make(total)
        spent = float(cost[free] @ counts[free])
        if spent <= left * (1 + 1e-12):
            _within(problem, name, counts, parity=parity)
            return Decision(value=counts, counts=counts)
        total = min(total - 1, int(total * left / spent) + 1)
    raise _unpaid(problem, name)


def _within(problem: Problem, name: str, counts: Vector, *, parity: bool) -> None:
    if (counts > problem.high).any():
        raise InfeasibleBudget(
            f"The rule {name} gives up to {counts.max():g} experts, the caps allow {problem.high.min():g}.", "",
            "Raise max_experts.",
        )  # fmt: skip
    if not parity and (counts < problem.low).any():
        k = int(np.argmax(problem.low - counts))
        raise InfeasibleBudget(
            f"The rule {name} gives block {k} {counts[k]:g} experts, its minimum is {problem.low[k]:g}.",
            "",
            "Lower min_experts, raise the budget, or use rule='mdl'.",
        )


def _unpaid(problem: Problem, name: str) -> InfeasibleBudget:
    least = float(problem.amount @ problem.low)
    return InfeasibleBudget(
        f"The budget {problem.target:g} pays no plan of the rule {name}.", f"At least {least:g}.", "Raise it."
    )  # fmt: skip
