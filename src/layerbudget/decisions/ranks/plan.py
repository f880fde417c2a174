"""LoRA ranks for every block: the rule that spends gains rank by rank, the plan, and what a server must reserve. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike

from ...budget import Budget, rank_parameters
from ...errors import InfeasibleBudget, InvalidInput
from ...plan import Plan
from ...records import Block
from ...scores import Scores
from ...solvers.inputs import Vector
from ...solvers.rounding import Rounded, allocate_increments
from ...storage import reading
from ..capacity import Terms, blocks_of, decide, one_budget
from ..rules import Problem, RuleResult, rule
from .payload import SmallerReserve

SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as max_lora_rank
KEEPS = 0.95  # of the gain, under a lower cap that is named
FEW = 64  # scored rows below which gains by rank are those of these rows alone
TAKE_UNIFORM = 0.95  # share of the gain from which on uniform ranks are advised


def plan_ranks(
    scores: Scores | Sequence[Block],
    *,
    mean_rank: float | None = None,
    budget: str | float | None = None,
    multiple: int = 1,
    min_rank: ArrayLike = 1,
    max_rank: ArrayLike | None = None,
    rule: str | Callable[..., Any] | None = None,
    bytes_per_parameter: Annotated[float | None, "default: 2; of budgets in bytes"] = None,
    latency: Mapping[str, float] | None = None,
    fixed: Mapping[str, int] | None = None,
    **options: Any,
) -> Plan:
    """A plan of LoRA ranks (partition by ``linear`` for one rank per matrix).

    Args:
        scores: The scores; blocks alone suffice for ``uniform`` and ``size``.
        mean_rank: Budget: as many adapter parameters as this rank everywhere would take.
        budget: Or in any unit, see :func:`layerbudget.budget.parse_budget`; plain numbers are parameters.
        multiple: Ranks are multiples of this.
        min_rank: Smallest rank; 0 lets a block go without an adapter.
        max_rank: Cap; a rank never exceeds the smallest side of the block's matrices.
        rule: ``by-rank`` (the gain of every further rank; the default for scores of ``rank-gain``), ``mdl`` (for others),
            ``uniform``, ``size``, the controls ``by-rank-permuted`` and ``permuted``, a rule of your own
            (:mod:`layerbudget.decisions.rules`), or a function of a problem that returns one value per block.
        bytes_per_parameter: For budgets in bytes; 2 (bf16) by default.
        latency: Seconds per rank by block name, for latency budgets.
        fixed: Rank of some blocks, by name or regular expression.
        **options: Options of the rule: ``exponent``, ``damping``, ``utility``, ... (:mod:`layerbudget.decisions.rules`), or
            its own. One that the rule does not read is refused; the rule has a default for each that is left out.

    Returns:
        A plan of kind ``ranks``; ``count`` is the rank of every module of the block.

    Raises:
        InvalidInput: Not exactly one budget, an option outside its domain, or one that rule or unit do not read.
        UnknownUnit: A budget in an unknown or unpriced unit.
        InfeasibleBudget: The budget is below the minimum ranks, or cannot be spent under the caps.
    """
    wanted = one_budget({"mean_rank": mean_rank, "budget": budget}, "params")
    if mean_rank is not None:
        everywhere = float(rank_parameters(blocks_of(scores)).sum())
        wanted = Budget(amount=mean_rank * everywhere, unit="params", text=f"mean rank {mean_rank:g}")
    terms = Terms(
        kind="ranks",
        floor=min_rank,
        cap=max_rank,
        multiple=multiple,
        bytes_per_parameter=bytes_per_parameter,
        latency=latency,
        fixed=fixed,
    )
    by_rank = "increments" in getattr(scores, "extra", {})
    return decide(scores, terms, wanted, rule or ("by-rank" if by_rank else "mdl"), options, {"mean_rank": mean_rank})


def increments_of(scores: Scores, damping: float | None) -> list[list[float]]:
    """Return the gain of the first, second, ... rank of every block."""
    found = scores.extra.get("increments")
    if found is None:
        raise InvalidInput(
            "The rule by-rank needs the gain of every further rank.",
            f"The scores of {scores.estimator} have one number per block.",
            "Score with --estimator rank-gain --by linear.",
        )
    try:
        rows: list[list[list[float]]] = reading.converted(found, list[list[list[float]]])
    except ValueError as error:
        raise InvalidInput(f"The increments of these scores do not read ({error}).", "", "Score again.") from error
    if (len(rows), {len(row) for row in rows}) != (len(scores.damping), {len(scores.blocks)}):
        raise InvalidInput(
            "The increments of these scores are of another shape than the scores.",
            f"They are {len(scores.damping)} dampings x {len(scores.blocks)} blocks x ranks.",
            "Score again.",
        )
    return rows[scores.index(damping)]


def noise_share(scores: Scores, counts: Iterable[int], value: float, damping: float | None = None) -> float | None:
    """Share of a gain that noise alone gives the same ranks; None where the scores have no floor or nothing is gained."""
    floors = scores.extra.get("increments_floor")
    if floors is None or value <= 0:
        return None
    rows = zip(floors[scores.index(damping)], counts, strict=True)
    return float(sum(sum(row[: int(count)]) for row, count in rows)) / value


@rule("ranks", "by-rank-permuted", control=True, summary="the same with the blocks' curves shuffled: a control")
@rule("ranks", "by-rank", summary="the exact program of the gain of every further rank (rank-gain scores)")
def _by_rank(problem: Problem, *, damping: float | None = None) -> RuleResult:
    """The program of increments, without a surrogate utility between the measurement and the decision."""
    rows: Sequence[Sequence[float]] = increments_of(problem.need_scores(), damping)
    if problem.order is not None:
        rows = [rows[int(i)] for i in problem.order]
    rounded = _allocated(problem, rows, problem.high)
    ends = _at_their_end(problem, rows, rounded)
    payload: dict[str, Any] = {"rounding": rounded.to_dict(), "at_measured": ends}
    if problem.order is None:
        payload["uniform_share"] = _uniform_share(problem, rows, rounded.value, problem.high)
        payload["noise_share"] = noise_share(problem.need_scores(), rounded.counts, rounded.value, damping)
        payload["smaller_reserve"] = _smaller_reserve(problem, rows, rounded)
    if (scored := problem.need_scores().data.get("samples", FEW)) < FEW:
        payload["scored_rows"] = scored
    return RuleResult(value=rounded.counts.astype(float), counts=rounded.counts, payload=payload)


def _at_their_end(problem: Problem, rows: Sequence[Sequence[float]], plan: Rounded) -> dict[str, int]:
    """``{block: ranks}`` of the blocks that have all ranks whose gains were measured, and might earn more.

    Raises:
        InfeasibleBudget: All blocks are there, and the budget would buy more.
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
    return {problem.blocks[k].name: n for k, n in ends.items()}


def _allocated(problem: Problem, rows: Sequence[Sequence[float]], high: Vector) -> Rounded:
    return allocate_increments(rows, problem.amount, problem.target, lower=problem.low, upper=high, multiple=problem.multiple)


def _uniform_share(problem: Problem, rows: Sequence[Sequence[float]], value: float, high: Vector) -> float | None:
    """Gain of the same rank everywhere over the plan's: what there is to win.

    The rank is as large as the budget allows within the floors, the caps ``high`` and the fixed ranks, which the others pay for
    or are left; a fraction of a rank earns in proportion.
    """
    step = problem.multiple
    floor, cap = np.ceil(problem.low / step - 1e-9) * step, np.floor(high / step + 1e-9) * step
    levels = np.unique(np.concatenate([floor, cap]))  # what is spent is a straight line between these
    spent = [float(problem.amount @ np.clip(level, floor, cap)) for level in levels]
    rank: Vector = np.clip(np.interp(problem.target, spent, levels), floor, cap)
    curves = (np.concatenate([[0.0], np.cumsum(row)]) for row in rows)
    worth = sum(float(np.interp(r, np.arange(len(c)), c)) for r, c in zip(rank, curves, strict=True))
    return worth / value if value > 0 else None


def _smaller_reserve(problem: Problem, rows: Sequence[Sequence[float]], plan: Rounded) -> SmallerReserve | None:
    """The lowest cap at which a server reserves less for the adapter, :data:`KEEPS` of the gain stays, and uniform has less.

    Under a low cap little may be left above uniform: a cap whose plan would be advised against is none.
    """
    reserved = _served(int(plan.counts.max()))
    if reserved is None or plan.value <= 0:
        return None
    least = problem.multiple * np.ceil(problem.low.max(initial=0.0) / problem.multiple)
    for cap in (r for r in SERVED_RANKS if least <= r < reserved):
        high = np.minimum(problem.high, cap)
        capped = _allocated(problem, rows, high)
        share = _uniform_share(problem, rows, capped.value, high)
        if capped.value >= KEEPS * plan.value and share is not None and share < TAKE_UNIFORM:
            return SmallerReserve(max_rank=cap, share=capped.value / plan.value, reserved=reserved)
    return None


def _served(largest: int) -> int | None:
    """The rank that vLLM reserves for every module; None beyond what it accepts."""
    return next((r for r in SERVED_RANKS if r >= largest), None)


def serving_note(plan: Plan) -> str:
    """Return what a server must be told to hold a plan's adapter, in one sentence.

    vLLM (``--enable-lora``) reserves ``max_lora_rank`` for every module and reads one ``r`` and ``lora_alpha`` for the adapter.
    """
    ranks = np.repeat(plan.counts, [len(b.modules) for b in plan.blocks])
    ranks = ranks[ranks > 0]
    served = _served(int(ranks.max()))
    if served is None:
        return f"Rank {int(ranks.max())} is above the 512 that vLLM accepts: merge the adapter before serving."
    used = int(ranks.sum()) / (ranks.size * served)
    return (
        f"--enable-lora --max-lora-rank {served}. vLLM reserves rank {served} for every matrix; the plan uses {used:.0%} of it."
    )
