"""From scores to experts or LoRA ranks per block, in the user's unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..costs import Budget, amount_of, parse_budget, rank_parameters, unit_cost
from ..errors import InfeasibleBudget, InvalidInput
from ..plan import Plan
from ..program import rules
from ..program.allocation import allocate
from ..program.inputs import Vector, bound_vector
from ..program.rounding import round_capacity
from ..program.utilities import Function
from ..records import Block
from ..scores.record import Scores
from .common import blocks_of, make_plan, matching, oriented, weights_of


def plan_experts(
    scores: Scores | Sequence[Block],
    *,
    total: int | None = None,
    budget: str | float | None = None,
    flops_fraction: float | None = None,
    min_experts: ArrayLike = 1,
    max_experts: ArrayLike | None = None,
    expert_rank: int = 8,
    exponent: float = 1.0,
    exponent_on: str = "density",
    rule: str = "mdl",
    utility: str | Function = "log",
    spend: str = "exactly",
    method: str = "auto",
    damping: float | None = None,
    smoothing: float = 0.0,
    seed: int = 0,
    parity: bool = False,
    router: bool = False,
    bytes_per_parameter: float = 2.0,
    latency: Mapping[str, float] | None = None,
    fixed: Mapping[str, int] | None = None,
) -> Plan:
    """Divide LoRA experts over blocks.

    Args:
        scores: The scores; blocks alone suffice for ``uniform``, ``size`` and the MoLA shapes.
        total: Budget as a number of experts, the minimum ones included.
        budget: Or in any unit: ``"64M params"``, ``"1.2 GiB"``, ``"3% flops"``, see :func:`layerbudget.costs.parse_budget`.
        flops_fraction: Or as a fraction of the base blocks' FLOPs per token.
        min_experts: Experts that every block has anyway (the base, which earns no utility).
        max_experts: Cap per block.
        expert_rank: Rank of one expert.
        exponent: beta, see :func:`layerbudget.program.allocate`.
        exponent_on: ``density`` or ``block``.
        rule: ``mdl``, ``permuted``, ``uniform``, ``size``, ``layerif``, ``alphalora``, ``mola-5555``, ``mola-2468``,
            ``mola-8642`` (or ``mola-`` with other digits).
        utility: phi of the program.
        spend: ``exactly`` or ``at_most``.
        method: Rounding, see :func:`layerbudget.program.round_capacity`.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score.
        seed: Seed of ``permuted``.
        parity: AlphaLoRA as published.
        router: Count router outputs in the cost.
        bytes_per_parameter: 2 for bf16.
        latency: Seconds per expert by block name, for latency budgets.
        fixed: Experts of some blocks, by name or regular expression.

    Returns:
        A plan of kind ``experts``; ``count`` is the number of experts of every module of the block.

    Raises:
        InvalidInput: Not exactly one budget, or an option outside its domain.
        UnknownUnit: A budget in an unknown or unpriced unit.
        InfeasibleBudget: The budget is below the minimum, or cannot be spent under the caps.
    """
    wanted = _one_budget({"total": total, "budget": budget, "flops_fraction": flops_fraction}, "experts")
    blocks = blocks_of(scores)
    cost = unit_cost(
        blocks, wanted.unit, capacity="experts", expert_rank=expert_rank, router=router,
        bytes_per_parameter=bytes_per_parameter, latency=latency,
    )  # fmt: skip
    limit = _limit(wanted, blocks, bytes_per_parameter)
    low = np.full(len(blocks), 1.0) * bound_vector(min_experts, len(blocks), "min_experts", 0.0)
    high = np.full(len(blocks), 1.0) * bound_vector(max_experts, len(blocks), "max_experts", np.inf)
    base = _pin(blocks, low, high, fixed)
    hyper: dict[str, Any] = {"min_experts": min_experts, "max_experts": max_experts, "expert_rank": expert_rank}
    hyper |= {"exponent": exponent, "exponent_on": exponent_on, "spend": spend, "method": method, "fixed": dict(fixed or {})}
    hyper |= {"damping": damping, "smoothing": smoothing, "utility": getattr(utility, "name", utility), "parity": parity}
    budget_record = {"unit": wanted.unit, "limit": limit, "text": wanted.text}
    if rule not in ("mdl", "permuted"):
        counts = _by_rule(scores, rule, blocks, cost, limit, low, high, damping=damping, exponent=exponent, parity=parity)
        budget_record["spent"] = float(cost @ counts)
        return make_plan(scores, "experts", rule, blocks, counts, counts, budget_record, hyper, None)
    q = weights_of(scores, damping, smoothing, rule, seed)
    hyper |= {"seed": seed} if rule == "permuted" else {}
    solution = allocate(
        q, cost, limit, base=base, lower=low, upper=high, exponent=exponent, exponent_on=exponent_on, utility=utility,
        rule=spend,
    )  # fmt: skip
    rounded = round_capacity(solution, method=method)
    budget_record["spent"] = rounded.spent
    return make_plan(
        scores, "experts", rule, blocks, solution.value, rounded.counts, budget_record, hyper, solution,
        rounding=rounded.to_dict(),
    )  # fmt: skip


def plan_ranks(
    scores: Scores | Sequence[Block],
    *,
    mean_rank: float | None = None,
    budget: str | float | None = None,
    multiple: int = 1,
    min_rank: ArrayLike = 1,
    max_rank: ArrayLike | None = None,
    exponent: float = 1.0,
    exponent_on: str = "density",
    rule: str = "mdl",
    utility: str | Function = "log",
    spend: str = "exactly",
    method: str = "auto",
    damping: float | None = None,
    smoothing: float = 0.0,
    seed: int = 0,
    bytes_per_parameter: float = 2.0,
    latency: Mapping[str, float] | None = None,
    fixed: Mapping[str, int] | None = None,
) -> Plan:
    """Divide LoRA ranks over blocks (partition by ``linear`` for one rank per matrix).

    Args:
        scores: The scores; blocks alone suffice for ``uniform`` and ``size``.
        mean_rank: Budget: as many adapter parameters as this rank everywhere would take.
        budget: Or in any unit, see :func:`layerbudget.costs.parse_budget`; plain numbers are parameters.
        multiple: Ranks are multiples of this.
        min_rank: Smallest rank; 0 lets a block go without an adapter.
        max_rank: Cap; a rank never exceeds the smallest side of the block's matrices.
        exponent: beta, see :func:`layerbudget.program.allocate`.
        exponent_on: ``density`` or ``block``.
        rule: ``mdl``, ``permuted``, ``uniform`` or ``size``.
        utility: phi of the program.
        spend: ``exactly`` or ``at_most``.
        method: Rounding, see :func:`layerbudget.program.round_capacity`.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score.
        seed: Seed of ``permuted``.
        bytes_per_parameter: 2 for bf16.
        latency: Seconds per rank by block name, for latency budgets.
        fixed: Rank of some blocks, by name or regular expression.

    Returns:
        A plan of kind ``ranks``; ``count`` is the rank of every module of the block.

    Raises:
        InvalidInput: Not exactly one budget, or an option outside its domain.
        UnknownUnit: A budget in an unknown or unpriced unit.
        InfeasibleBudget: The budget is below the minimum ranks, or cannot be spent under the caps.
    """
    blocks = blocks_of(scores)
    wanted = _one_budget({"mean_rank": mean_rank, "budget": budget}, "params")
    if mean_rank is not None:
        wanted = Budget(amount=mean_rank * float(rank_parameters(blocks).sum()), unit="params", text=f"mean rank {mean_rank:g}")
    cost = unit_cost(blocks, wanted.unit, bytes_per_parameter=bytes_per_parameter, latency=latency)
    limit = _limit(wanted, blocks, bytes_per_parameter)
    sides = np.array([min(min(m.d_in, m.d_out) for m in b.modules) for b in blocks], dtype=np.float64)
    low = np.minimum(sides, bound_vector(min_rank, len(blocks), "min_rank", 0.0))
    high = np.minimum(sides, bound_vector(max_rank, len(blocks), "max_rank", np.inf))
    _pin(blocks, low, high, fixed)
    hyper: dict[str, Any] = {"mean_rank": mean_rank, "multiple": multiple, "min_rank": min_rank, "max_rank": max_rank}
    hyper |= {"exponent": exponent, "exponent_on": exponent_on, "spend": spend, "method": method, "fixed": dict(fixed or {})}
    hyper |= {"damping": damping, "smoothing": smoothing, "utility": getattr(utility, "name", utility)}
    hyper |= {"seed": seed} if rule == "permuted" else {}
    q = _rank_weights(scores, rule, blocks, damping, smoothing, seed)
    solution = allocate(
        q, cost, limit, lower=low, upper=high, exponent=exponent, exponent_on=exponent_on, utility=utility, rule=spend
    )
    rounded = round_capacity(solution, method=method, multiple=multiple)
    record = {"unit": wanted.unit, "limit": limit, "spent": rounded.spent, "text": wanted.text}
    return make_plan(
        scores, "ranks", rule, blocks, solution.value, rounded.counts, record, hyper,
        solution if rule in ("mdl", "permuted") else None, rounding=rounded.to_dict(),
    )  # fmt: skip


def _rank_weights(
    scores: Scores | Sequence[Block], rule: str, blocks: Sequence[Block], damping: float | None, smoothing: float, seed: int
) -> Vector:
    """Scores, or weights whose optimum is the rule: ``w = c`` gives equal ranks, ``w = c n`` ranks that grow with size."""
    rules.known(rule, ("mdl", "permuted", "uniform", "size"))
    if rule == "uniform":
        return rank_parameters(blocks)
    if rule == "size":
        return rank_parameters(blocks) * np.array([float(b.numel) for b in blocks])
    return weights_of(scores, damping, smoothing, rule, seed)


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


def _limit(wanted: Budget, blocks: Sequence[Block], bytes_per_parameter: float) -> float:
    options = {"bytes_per_parameter": bytes_per_parameter} if wanted.relative else {}
    return amount_of(wanted, blocks, **options)


def _pin(blocks: Sequence[Block], low: Vector, high: Vector, fixed: Mapping[str, int] | None) -> Vector:
    """Pin fixed blocks between equal bounds, in place; return the base, which is the floor before pinning."""
    base = low.copy()
    for pattern, value in (fixed or {}).items():
        found = matching(blocks, pattern)
        low[found] = high[found] = float(value)
        base[found] = np.minimum(base[found], float(value))
    return base


def _by_rule(
    scores: Scores | Sequence[Block], rule: str, blocks: Sequence[Block], cost: Vector, limit: float, low: Vector, high: Vector,
    *, damping: float | None, exponent: float, parity: bool,
) -> Vector:  # fmt: skip
    """Counts of a published rule: the largest total whose counts fit the budget."""
    size = len(blocks)
    least = int(low.max())
    power: dict[str, Any] = {} if exponent == 1.0 else {"exponent": exponent}
    if rule.startswith("mola-"):
        make: Callable[[int], Vector] = lambda total: rules.mola_experts(size, rule[5:], total)  # noqa: E731
    elif rule == "uniform":
        make = lambda total: rules.apportion(np.ones(size), total, minimum=least)  # noqa: E731
    elif rule == "size":
        make = lambda total: rules.apportion([b.numel for b in blocks], total, minimum=least)  # noqa: E731
    elif rule == "layerif":
        make = lambda total: rules.layerif_experts(-oriented(scores, damping), total, **power)  # noqa: E731
    else:
        rules.known(rule, rules.EXPERT_RULES)
        make = lambda total: rules.alphalora_experts(oriented(scores, damping), total, parity=parity, **power)  # noqa: E731
    total = int(limit / cost.min() * (1 + 1e-12))
    while total > 0:
        counts = np.asarray(make(total), dtype=np.float64)
        spent = float(cost @ counts)
        if spent <= limit * (1 + 1e-12):
            if (counts > high).any():
                raise InfeasibleBudget(
                    f"The rule {rule} gives up to {counts.max():g} experts, the caps allow {high.min():g}.",
                    "",
                    "Raise max_experts.",
                )
            return counts
        total = min(total - 1, int(total * limit / spent) + 1)
    raise InfeasibleBudget(
        f"The budget {limit:g} pays no plan of the rule {rule}.", f"At least {float(cost @ low):g}.", "Raise it."
    )
