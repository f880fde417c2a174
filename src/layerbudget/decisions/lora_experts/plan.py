"""LoRA experts for every block: plans, and the published rules (MoLA shapes, LayerIF, AlphaLoRA, by size). No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike

from ...arguments import checked
from ...errors import InfeasibleBudget
from ...plan import Plan
from ...records import Block
from ...scores import Scores
from ...solvers import published
from ...solvers.inputs import Vector
from ..capacity import CapacityBounds, decide, one_budget
from ..rules import Problem, RuleResult, rule


@checked
def plan_lora_experts(
    scores: Scores | Sequence[Block],
    *,
    total: int | None = None,
    budget: str | float | None = None,
    min_experts: ArrayLike = 1,
    lower: ArrayLike = 0,
    max_experts: ArrayLike | None = None,
    expert_rank: int = 8,
    rule: str | Callable[..., Any] = "mdl",
    bytes_per_parameter: Annotated[float | None, "default: 2; of budgets in bytes"] = None,
    latency: Mapping[str, float] | None = None,
    fixed: Mapping[str, int] | None = None,
    **options: Any,
) -> Plan:
    """A plan of LoRA experts.

    Args:
        scores: The scores; blocks alone suffice for ``uniform``, ``size`` and the MoLA shapes.
        total: Budget as a number of experts, the minimum ones included.
        budget: Or in any unit: ``"64M params"``, ``"1.2 GiB"``, ``"3% flops"`` of the blocks' own. Routers come on top: a
            matrix with n inputs and E experts, two or more, has one of ``E x n`` numbers.
        min_experts: Experts that every block has anyway (the base, which earns no utility).
        lower: Smallest number of experts; what it has above ``min_experts`` earns utility.
        max_experts: Cap per block.
        expert_rank: Rank of one expert.
        rule: ``mdl``, ``permuted``, ``uniform``, ``size``, ``layerif``, ``alphalora``, ``mola-5555`` (or other digits), a rule
            of your own (:mod:`layerbudget.decisions.rules`), or a function of a problem that returns one value per block.
        bytes_per_parameter: For budgets in bytes; 2 (bf16) by default.
        latency: Seconds per expert by block name, for latency budgets.
        fixed: Experts of some blocks, by name or regular expression; a published rule then divides the rest over the others.
        **options: Options of the rule: ``exponent``, ``damping``, ... (:mod:`layerbudget.decisions.rules`), or
            its own. One that the rule does not read is refused; the rule has a default for each that is left out.

    Returns:
        A plan of kind ``lora-experts``; ``count`` is the number of experts of every module of the block.

    Raises:
        InvalidInput: Not exactly one budget, an option outside its domain, or one that rule or unit do not read.
        UnknownUnit: A budget in an unknown or unpriced unit.
        InfeasibleBudget: The budget is below the minimum, or cannot be spent under the caps.
    """
    wanted = one_budget({"total": total, "budget": budget}, "experts")
    terms = CapacityBounds(
        kind="lora-experts",
        base=min_experts,
        floor=lower,
        cap=max_experts,
        expert_rank=expert_rank,
        bytes_per_parameter=bytes_per_parameter,
        latency=latency,
        fixed=fixed,
    )
    return decide(scores, terms, wanted, rule, options)


@rule("lora-experts", "uniform", summary="the same number everywhere")
def _uniform(problem: Problem) -> RuleResult:
    free = ~problem.held
    return _largest(problem, "uniform", lambda total: published.apportion(np.ones(free.sum()), total, minimum=_least(problem)))


@rule("lora-experts", "size", summary="experts in proportion to a block's size")
def _size(problem: Problem) -> RuleResult:
    numel = np.array([b.numel for b in problem.blocks], dtype=np.float64)[~problem.held]
    return _largest(problem, "size", lambda total: published.apportion(numel, total, minimum=_least(problem)))


@rule("lora-experts", "layerif", summary="LayerIF's heuristic: one each, the rest by influence")
def _layerif(problem: Problem, *, damping: float | None = None, exponent: float = 2.0) -> RuleResult:
    values = -problem.oriented(damping)[~problem.held]
    return _largest(problem, "layerif", lambda total: published.layerif_experts(values, total, exponent=exponent))


@rule("lora-experts", "alphalora", summary="AlphaLoRA: the lighter the tail, the more experts")
def _alphalora(problem: Problem, *, damping: float | None = None, exponent: float = 2.5) -> RuleResult:
    """The values as they are, whatever their orientation."""
    alpha = problem.need_scores().values(damping)[~problem.held]
    return _largest(problem, "alphalora", lambda total: published.alphalora_experts(alpha, total, exponent=exponent))


@rule("lora-experts", "mola-8642", summary="MoLA's shape (any digits)", pattern=r"mola-.+")
@rule("lora-experts", "mola-2468", summary="MoLA's shape (any digits)", pattern=r"mola-.+")
@rule("lora-experts", "mola-5555", summary="MoLA's shape (any digits)", pattern=r"mola-.+")
def _shapes(problem: Problem, *, rule: str) -> RuleResult:
    """The digits are experts per group of neighbouring layers."""
    free = int((~problem.held).sum())
    return _largest(problem, rule, lambda total: published.mola_experts(free, rule[5:], total))


def _least(problem: Problem) -> int:
    return int(problem.low[~problem.held].max(initial=0.0))


def _largest(problem: Problem, name: str, make: Callable[[int], Vector]) -> RuleResult:
    """Fixed blocks as they are, for the others the largest total whose counts fit the budget."""
    counts, free, cost, limit = problem.low.copy(), ~problem.held, problem.amount, problem.target
    left = limit - float(cost[problem.held] @ problem.low[problem.held])
    if not free.any() and left >= -1e-12 * limit:
        return RuleResult(value=counts, counts=counts)
    total = int(max(left, 0.0) / cost[free].min() * (1 + 1e-12)) if free.any() else 0
    while total > 0:
        counts[free] = make(total)
        spent = float(cost[free] @ counts[free])
        if spent <= left * (1 + 1e-12):
            _check_bounds(problem, name, counts)
            return RuleResult(value=counts, counts=counts)
        total = min(total - 1, int(total * left / spent) + 1)
    raise InfeasibleBudget(
        f"The budget {limit:g} pays no plan of the rule {name}.", f"At least {float(cost @ problem.low):g}.", "Raise it."
    )


def _check_bounds(problem: Problem, name: str, counts: Vector) -> None:
    if (counts > problem.high).any():
        raise InfeasibleBudget(
            f"The rule {name} gives up to {counts.max():g} experts, the caps allow {problem.high.min():g}.",
            "",
            "Raise max_experts.",
        )
    if (counts < problem.low).any():
        k = int(np.argmax(problem.low - counts))
        raise InfeasibleBudget(
            f"The rule {name} gives block {k} {counts[k]:g} experts, its minimum is {problem.low[k]:g}.",
            "",
            "Lower min_experts, raise the budget, or use rule='mdl'.",
        )
