"""From scores to experts or LoRA ranks per block, in the user's unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..costs import Budget, amount_of, parse_budget, rank_parameters, unit_cost
from ..errors import InvalidInput
from ..plan import Plan
from ..program.inputs import Vector, bound_vector, number
from ..program.utilities import Function
from ..records import Block
from ..scores.record import Scores
from .common import blocks_of, make_plan, matching, record_of, recorded
from .rule import Decision, Problem, find_rule
from .rules.capacity import in_proportion

# Options of the price, and the units of budgets that read them.
_PRICING: Mapping[str, tuple[str, ...]] = {
    "latency": ("latency",), "bytes_per_parameter": ("bytes",), "router": ("params", "bytes", "flops"),
}  # fmt: skip


def plan_experts(
    scores: Scores | Sequence[Block],
    *,
    total: int | None = None,
    budget: str | float | None = None,
    flops_fraction: float | None = None,
    min_experts: ArrayLike = 1,
    lower: ArrayLike = 0,
    max_experts: ArrayLike | None = None,
    expert_rank: int = 8,
    exponent: float | None = None,
    exponent_on: str | None = None,
    rule: str = "mdl",
    utility: str | Function | None = None,
    spend: str | None = None,
    method: str | None = None,
    damping: float | None = None,
    smoothing: float | None = None,
    seed: int | None = None,
    parity: bool = False,
    router: bool = False,
    bytes_per_parameter: float | None = None,
    latency: Mapping[str, float] | None = None,
    fixed: Mapping[str, int] | None = None,
    **own: Any,
) -> Plan:
    """Divide LoRA experts over blocks.

    An option that the rule does not read is refused; what is left out has the rule's own default.

    Args:
        scores: The scores; blocks alone suffice for ``uniform``, ``size`` and the MoLA shapes.
        total: Budget as a number of experts, the minimum ones included.
        budget: Or in any unit: ``"64M params"``, ``"1.2 GiB"``, ``"3% flops"``, see :func:`layerbudget.costs.parse_budget`.
        flops_fraction: Or as a fraction of the base blocks' FLOPs per token.
        min_experts: Experts that every block has anyway (the base, which earns no utility).
        lower: Smallest number of experts; what it has above ``min_experts`` earns utility.
        max_experts: Cap per block.
        expert_rank: Rank of one expert.
        exponent: beta, see :func:`layerbudget.program.allocate`: 1 by default, for ``layerif`` and ``alphalora`` as published.
        exponent_on: ``density`` (default) or ``block``.
        rule: ``mdl``, ``permuted``, ``uniform``, ``size``, ``layerif``, ``alphalora``, ``mola-5555``, ``mola-2468``,
            ``mola-8642`` (or ``mola-`` with other digits), or a rule of your own (:mod:`layerbudget.planning.rule`).
        utility: phi of the program; ``log`` by default.
        spend: ``exactly`` (default) or ``at_most``.
        method: Rounding, see :func:`layerbudget.program.round_capacity`.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score; 0 by default.
        seed: Seed of ``permuted``; 0 by default.
        parity: AlphaLoRA as published.
        router: Count router outputs in the cost (budgets in parameters, bytes or FLOPs).
        bytes_per_parameter: For budgets in bytes; 2 (bf16) by default.
        latency: Seconds per expert by block name, for latency budgets.
        fixed: Experts of some blocks, by name or regular expression; a published rule then divides the rest over the others.
        **own: Options of a rule of your own.

    Returns:
        A plan of kind ``experts``; ``count`` is the number of experts of every module of the block.

    Raises:
        InvalidInput: Not exactly one budget, an option outside its domain, or one that rule or unit do not read.
        UnknownUnit: A budget in an unknown or unpriced unit.
        InfeasibleBudget: The budget is below the minimum, or cannot be spent under the caps.
    """
    wanted = _one_budget({"total": total, "budget": budget, "flops_fraction": flops_fraction}, "experts")
    blocks = blocks_of(scores)
    pricing = {"router": router, "bytes_per_parameter": bytes_per_parameter, "latency": latency}
    cost, limit = _priced(blocks, wanted, pricing, capacity="experts", expert_rank=expert_rank)
    low = np.full(len(blocks), 1.0) * bound_vector(min_experts, len(blocks), "min_experts", 0.0)
    high = np.full(len(blocks), 1.0) * bound_vector(max_experts, len(blocks), "max_experts", np.inf)
    base = low.copy()
    low = np.maximum(low, bound_vector(lower, len(blocks), "lower", 0.0))
    held = _pin(blocks, low, high, fixed)
    base[held] = np.minimum(base, low)[held]
    problem = Problem(
        kind="experts", blocks=blocks, scores=record_of(scores), amount=cost, target=limit, low=low, high=high, held=held,
        base=base,
    )  # fmt: skip
    given: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "utility": utility, "spend": spend}
    given |= {"method": method, "damping": damping, "smoothing": smoothing, "seed": seed, "parity": parity, **own}
    hyper = {
        "min_experts": min_experts,
        "lower": lower,
        "max_experts": max_experts,
        "expert_rank": expert_rank,
        **_read(pricing),
    }
    return _decided(scores, problem, rule, given, wanted, {**hyper, "fixed": dict(fixed or {})})


def plan_ranks(
    scores: Scores | Sequence[Block],
    *,
    mean_rank: float | None = None,
    budget: str | float | None = None,
    multiple: int = 1,
    min_rank: ArrayLike = 1,
    max_rank: ArrayLike | None = None,
    exponent: float | None = None,
    exponent_on: str | None = None,
    rule: str = "mdl",
    utility: str | Function | None = None,
    spend: str | None = None,
    method: str | None = None,
    damping: float | None = None,
    smoothing: float | None = None,
    seed: int | None = None,
    bytes_per_parameter: float | None = None,
    latency: Mapping[str, float] | None = None,
    fixed: Mapping[str, int] | None = None,
    **own: Any,
) -> Plan:
    """Divide LoRA ranks over blocks (partition by ``linear`` for one rank per matrix).

    An option that the rule does not read is refused; what is left out has the rule's own default.

    Args:
        scores: The scores; blocks alone suffice for ``uniform`` and ``size``.
        mean_rank: Budget: as many adapter parameters as this rank everywhere would take.
        budget: Or in any unit, see :func:`layerbudget.costs.parse_budget`; plain numbers are parameters.
        multiple: Ranks are multiples of this.
        min_rank: Smallest rank; 0 lets a block go without an adapter.
        max_rank: Cap; a rank never exceeds the smallest side of the block's matrices.
        exponent: beta, see :func:`layerbudget.program.allocate`; 1 by default.
        exponent_on: ``density`` (default) or ``block``.
        rule: ``by-rank`` (scores of ``rank-gain``: the gain of every further rank), ``mdl``, ``uniform``, ``size``, the
            controls ``by-rank-permuted`` and ``permuted``, or a rule of your own (:mod:`layerbudget.planning.rule`).
        utility: phi of the program; ``log`` by default.
        spend: ``exactly`` (default) or ``at_most``.
        method: Rounding, see :func:`layerbudget.program.round_capacity`.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score; 0 by default.
        seed: Seed of the controls; 0 by default.
        bytes_per_parameter: For budgets in bytes; 2 (bf16) by default.
        latency: Seconds per rank by block name, for latency budgets.
        fixed: Rank of some blocks, by name or regular expression.
        **own: Options of a rule of your own.

    Returns:
        A plan of kind ``ranks``; ``count`` is the rank of every module of the block.

    Raises:
        InvalidInput: Not exactly one budget, an option outside its domain, or one that rule or unit do not read.
        UnknownUnit: A budget in an unknown or unpriced unit.
        InfeasibleBudget: The budget is below the minimum ranks, or cannot be spent under the caps.
    """
    blocks = blocks_of(scores)
    wanted = _one_budget({"mean_rank": mean_rank, "budget": budget}, "params")
    if mean_rank is not None:
        wanted = Budget(amount=mean_rank * float(rank_parameters(blocks).sum()), unit="params", text=f"mean rank {mean_rank:g}")
    pricing = {"bytes_per_parameter": bytes_per_parameter, "latency": latency}
    cost, limit = _priced(blocks, wanted, pricing)
    sides = smallest_sides(blocks)
    low = np.minimum(sides, bound_vector(min_rank, len(blocks), "min_rank", 0.0))
    high = np.minimum(sides, bound_vector(max_rank, len(blocks), "max_rank", np.inf))
    held = _pin(blocks, low, high, fixed, sides)
    problem = Problem(
        kind="ranks", blocks=blocks, scores=record_of(scores), amount=cost, target=limit, low=low, high=high, held=held,
        multiple=multiple,
    )  # fmt: skip
    given: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "utility": utility, "spend": spend}
    given |= {"method": method, "damping": damping, "smoothing": smoothing, "seed": seed, **own}
    hyper = {"mean_rank": mean_rank, "multiple": multiple, "min_rank": min_rank, "max_rank": max_rank, **_read(pricing)}
    return _decided(scores, problem, rule, given, wanted, {**hyper, "fixed": dict(fixed or {})})


def _decided(
    scores: Scores | Sequence[Block], problem: Problem, rule: str, given: Mapping[str, Any], wanted: Budget,
    hyper: Mapping[str, Any],
) -> Plan:  # fmt: skip
    """Let the rule decide, and bind its decision into a plan."""
    chosen = find_rule(problem.kind, rule)
    options = chosen.heard(given)
    decision: Decision = chosen.decide(problem, options)
    if decision.counts is None:
        value = np.asarray(decision.value, dtype=np.float64)
        if value.shape != problem.amount.shape or not np.isfinite(value).all():
            raise InvalidInput(
                f"The rule {rule} gave values of shape {value.shape}.", f"It must give {problem.amount.size} finite ones.", ""
            )
        decision = in_proportion(problem, value)
    counts = np.asarray(decision.counts)
    record = {"unit": wanted.unit, "limit": problem.target, "text": wanted.text, "spent": float(problem.amount @ counts)}
    return make_plan(
        scores, problem.kind, rule, decision.value, counts, record, {**hyper, **recorded(options)}, decision.solution,
        decision.extra,
    )  # fmt: skip


def smallest_sides(blocks: Sequence[Block]) -> Vector:
    """Largest rank that makes sense per block: the smallest side of its matrices, shape ``(K,)``."""
    return np.array([min(min(m.d_in, m.d_out) for m in b.modules) for b in blocks], dtype=np.float64)


def _read(pricing: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the price that were given."""
    return {name: value for name, value in pricing.items() if value is not None and value is not False}


def _priced(blocks: Sequence[Block], wanted: Budget, pricing: Mapping[str, Any], **capacity: Any) -> tuple[Vector, float]:
    """Cost per unit of every block, and the budget, in its unit.

    Raises:
        InvalidInput: An option that budgets in this unit do not read.
    """
    given = _read(pricing)
    for name in given:
        if wanted.unit not in _PRICING[name]:
            raise InvalidInput(
                f"{name} has no meaning for a budget in {wanted.unit}.",
                f"Budgets in {' or '.join(_PRICING[name])} read it.",
                f"Leave {name} out, or state the budget in another unit.",
            )
    cost = unit_cost(blocks, wanted.unit, **capacity, **given)
    size = {"bytes_per_parameter": given["bytes_per_parameter"]} if "bytes_per_parameter" in given and wanted.relative else {}
    return cost, number(amount_of(wanted, blocks, **size), "budget")


def _one_budget(given: Mapping[str, Any], default: str) -> Budget:
    named = {k: v for k, v in given.items() if v is not None}
    if len(named) != 1:
        raise InvalidInput(
            f"{len(named)} budgets were given ({', '.join(named) or 'none'}).",
            f"Give exactly one of {', '.join(given)}.",
            "For example budget='64M params'.",
        )
    name, value = next(iter(named.items()))
    if name == "flops_fraction":
        return Budget(amount=float(value), unit="flops", relative=True, text=f"{float(value):.4%} flops")
    return parse_budget(value, default=default)


def _pin(
    blocks: Sequence[Block], low: Vector, high: Vector, fixed: Mapping[str, int] | None, sides: Vector | None = None
) -> np.ndarray:
    """Pin fixed blocks between equal bounds, in place; return the mask of them.

    Raises:
        InvalidInput: A count that is no whole number of zero or more, or a rank above the smallest side of its block.
    """
    held = np.zeros(len(blocks), dtype=bool)
    for pattern, value in (fixed or {}).items():
        found = matching(blocks, pattern)
        if number(value, f"the fixed count of {pattern}") != int(value):
            raise InvalidInput(f"{pattern} is fixed at {value}.", "Ranks and experts are counted.", "Give a whole number.")
        if sides is not None and (sides[found] < value).any():
            k = found[int(np.argmin(sides[found]))]
            raise InvalidInput(
                f"{blocks[k].name} is fixed at rank {value}; its smallest side is {sides[k]:g}.", "", "Fix a smaller rank."
            )
        low[found] = high[found] = float(value)
        held[found] = True
    return held
