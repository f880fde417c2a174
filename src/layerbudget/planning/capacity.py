"""From scores to experts or LoRA ranks per block, in the user's unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..costs import Budget, amount_of, parse_budget, rank_parameters, unit_cost
from ..errors import InvalidInput
from ..plan import Plan
from ..program import rules
from ..program.allocation import allocate
from ..program.inputs import Vector, bound_vector, number
from ..program.rounding import round_capacity
from ..program.utilities import Function
from ..records import Block
from ..scores.record import Scores
from . import published
from .by_rank import RULES as BY_RANK
from .by_rank import by_rank
from .common import blocks_of, make_plan, matching, need_scores, weights_of

RANK_RULES = ("mdl", "permuted", "uniform", "size", *BY_RANK)


def plan_experts(
    scores: Scores | Sequence[Block],
    *,
    total: int | None = None,
    budget: str | float | None = None,
    flops_fraction: float | None = None,
    min_experts: ArrayLike = 1,
    max_experts: ArrayLike | None = None,
    expert_rank: int = 8,
    exponent: float | None = None,
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
        exponent: beta, see :func:`layerbudget.program.allocate`: 1 by default, for ``layerif`` and ``alphalora`` as published.
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
        fixed: Experts of some blocks, by name or regular expression; a published rule then divides the rest over the others.

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
    base, held = _pin(blocks, low, high, fixed)
    hyper: dict[str, Any] = {"min_experts": min_experts, "max_experts": max_experts, "expert_rank": expert_rank}
    hyper |= {"exponent": exponent, "exponent_on": exponent_on, "spend": spend, "method": method, "fixed": dict(fixed or {})}
    hyper |= {"damping": damping, "smoothing": smoothing, "utility": getattr(utility, "name", utility), "parity": parity}
    record = {"unit": wanted.unit, "limit": limit, "text": wanted.text}
    if rule not in ("mdl", "permuted"):
        make = published.maker(scores, rule, blocks, ~held, low, damping=damping, exponent=exponent, parity=parity)
        counts = published.counts_within(make, rule, cost, limit, (low, high, held), parity=parity)
        return make_plan(scores, "experts", rule, blocks, counts, counts, record | {"spent": float(cost @ counts)}, hyper, None)
    q = weights_of(scores, damping, smoothing, rule, seed)
    hyper |= {"exponent": 1.0 if exponent is None else exponent} | ({"seed": seed} if rule == "permuted" else {})
    program = {"base": base, "lower": low, "upper": high, "utility": utility}
    return _solved(scores, "experts", rule, q, cost, record, hyper, program)


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
        rule: ``by-rank`` (scores of ``rank-gain``: the gain of every further rank), ``mdl``, ``uniform``, ``size``, and the
            controls ``by-rank-permuted`` and ``permuted``.
        utility: phi of the program.
        spend: ``exactly`` or ``at_most``.
        method: Rounding, see :func:`layerbudget.program.round_capacity`.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score.
        seed: Seed of the controls.
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
    exponent = 1.0 if rule in ("uniform", "size") else exponent
    hyper: dict[str, Any] = {"mean_rank": mean_rank, "multiple": multiple, "min_rank": min_rank, "max_rank": max_rank}
    hyper |= {"exponent": exponent, "exponent_on": exponent_on, "spend": spend, "method": method, "fixed": dict(fixed or {})}
    hyper |= {"damping": damping, "smoothing": smoothing, "utility": getattr(utility, "name", utility)}
    hyper |= {"seed": seed} if rule.endswith("permuted") else {}
    record = {"unit": wanted.unit, "limit": limit, "text": wanted.text}
    if rule in BY_RANK:
        return by_rank(need_scores(scores), rule, cost, (low, high), record, hyper)
    q = _rank_weights(scores, rule, cost, damping, smoothing, seed)
    return _solved(scores, "ranks", rule, q, cost, record, hyper, {"lower": low, "upper": high, "utility": utility}, multiple)


def _solved(
    scores: Scores | Sequence[Block], kind: str, rule: str, q: Vector, cost: Vector, record: dict[str, Any],
    hyper: dict[str, Any], program: dict[str, Any], multiple: int = 1,
) -> Plan:  # fmt: skip
    """Solve the program, round, and bind both into a plan."""
    solution = allocate(
        q, cost, record["limit"], exponent=hyper["exponent"], exponent_on=hyper["exponent_on"], rule=hyper["spend"], **program
    )
    rounded = round_capacity(solution, method=hyper["method"], multiple=multiple)
    return make_plan(
        scores, kind, rule, blocks_of(scores), solution.value, rounded.counts, record | {"spent": rounded.spent}, hyper,
        solution if rule in ("mdl", "permuted") else None, rounding=rounded.to_dict(),
    )  # fmt: skip


def _rank_weights(
    scores: Scores | Sequence[Block], rule: str, cost: Vector, damping: float | None, smoothing: float, seed: int
) -> Vector:
    """Scores, or weights whose optimum is the rule: ``w = c`` gives equal ranks, ``w = c n`` ranks that grow with size."""
    rules.known(rule, RANK_RULES)
    if rule == "uniform":
        return cost.copy()
    if rule == "size":
        return cost * np.array([float(b.numel) for b in blocks_of(scores)])
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
    return number(amount_of(wanted, blocks, **options), "budget")


def _pin(blocks: Sequence[Block], low: Vector, high: Vector, fixed: Mapping[str, int] | None) -> tuple[Vector, np.ndarray]:
    """Pin fixed blocks between equal bounds, in place; return the base (the floor before pinning) and the mask of them."""
    base, held = low.copy(), np.zeros(len(blocks), dtype=bool)
    for pattern, value in (fixed or {}).items():
        found = matching(blocks, pattern)
        low[found] = high[found] = float(value)
        base[found] = np.minimum(base[found], float(value))
        held[found] = True
    return base, held
