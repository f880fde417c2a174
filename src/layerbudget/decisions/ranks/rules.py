"""The rules of LoRA ranks, but for ``mdl``, which ranks share with LoRA experts: :mod:`layerbudget.decisions.capacity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...budget import rank_parameters
from ...errors import InfeasibleBudget
from ...solvers.inputs import Vector
from ...solvers.rounding import RoundedCapacity, allocate_increments
from ..capacity import in_proportion
from ..rules import Problem, RuleResult, rule
from .gains import TAKE_UNIFORM, increments_of, uniform_share
from .payload import SmallerReserve

SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as max_lora_rank
KEEPS = 0.95  # of the gain, under a lower cap that is named


@rule("ranks", "uniform", summary="the same rank everywhere, as far as the bounds allow")
def _uniform(problem: Problem, *, method: str = "auto") -> RuleResult:
    return in_proportion(problem, np.ones(len(problem.blocks)), method=method)


@rule("ranks", "size", summary="ranks in proportion to the size of the block")
def _size(problem: Problem, *, method: str = "auto") -> RuleResult:
    return in_proportion(problem, [b.numel for b in problem.blocks], method=method)


@rule("ranks", "by-rank-permuted", control=True, summary="the same with the blocks' curves shuffled: a control")
@rule("ranks", "by-rank", summary="the exact program of the gain of every further rank (rank-gain scores)")
def _by_rank(problem: Problem, *, damping: float | None = None) -> RuleResult:
    """The program of increments, without a surrogate utility between the measurement and the decision."""
    rows: Sequence[Sequence[float]] = increments_of(problem.need_scores(), damping)
    if problem.order is not None:
        rows = [rows[int(i)] for i in problem.order]
    rounded = _allocated(problem, rows, problem.high)
    _check_measured(problem, rows, rounded)
    smaller = _smaller_reserve(problem, rows, rounded) if problem.order is None else None
    payload: dict[str, Any] = {"rounding": rounded.to_dict(), "smaller_reserve": smaller}
    return RuleResult(value=rounded.counts.astype(float), counts=rounded.counts, payload=payload)


def _check_measured(problem: Problem, rows: Sequence[Sequence[float]], plan: RoundedCapacity) -> None:
    """Refuse a budget that would buy more where all blocks have all ranks whose gains were measured.

    Raises:
        InfeasibleBudget: It would.
    """
    tops = [min(len(row), cap) for row, cap in zip(rows, problem.high, strict=True)]
    ends = {
        k: len(row)
        for k, (row, count, cap) in enumerate(zip(rows, plan.counts, problem.high, strict=True))
        if len(row) <= count < cap and row[-1] > 0
    }
    room = any(n < top and row[int(n)] > 0 for row, n, top in zip(rows, plan.counts, tops, strict=True))
    if ends and not room and plan.budget - plan.spent >= min(problem.amount[k] for k in ends) * problem.multiple:
        most = max(ends.values())
        unit = " parameters" if np.array_equal(problem.amount, rank_parameters(problem.blocks)) else ""
        raise InfeasibleBudget(
            f"The budget buys more than the {most} ranks of a block whose gains were measured.",
            f"All measured ranks, up to {most} a block, are {plan.spent:,.0f}{unit}; you asked for {plan.budget:,.0f}.",
            f"Score with --largest {2 * most}, or lower the budget.",
        )


def _allocated(problem: Problem, rows: Sequence[Sequence[float]], high: Vector) -> RoundedCapacity:
    return allocate_increments(rows, problem.amount, problem.target, lower=problem.low, upper=high, multiple=problem.multiple)


def _smaller_reserve(problem: Problem, rows: Sequence[Sequence[float]], plan: RoundedCapacity) -> SmallerReserve | None:
    """The lowest cap at which a server reserves less for the adapter, :data:`KEEPS` of the gain stays, and uniform has less.

    Under a low cap little may be left above uniform: a cap whose plan would be advised against is none.
    """
    reserved = served(int(plan.counts.max()))
    if reserved is None or plan.value <= 0:
        return None
    least = problem.multiple * np.ceil(problem.low.max(initial=0.0) / problem.multiple)
    for cap in (r for r in SERVED_RANKS if least <= r < reserved):
        high = np.minimum(problem.high, cap)
        capped = _allocated(problem, rows, high)
        share = uniform_share(problem, rows, capped.value, high)
        if capped.value >= KEEPS * plan.value and share is not None and share < TAKE_UNIFORM:
            return SmallerReserve(max_rank=cap, share=capped.value / plan.value, reserved=reserved)
    return None


def served(largest: int) -> int | None:
    """Return the rank that vLLM reserves for every module; None beyond what it accepts."""
    return next((r for r in SERVED_RANKS if r >= largest), None)
