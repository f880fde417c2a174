"""LoRA ranks by the gain of every further rank: no surrogate utility between the measurement and the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput
from ...planning.rule import Decision, Problem, rule, shuffled
from ...scores import Scores
from ...solvers.increments import allocate_increments
from ...solvers.inputs import Vector
from ...solvers.rounding import Rounded
from ...storage import reading

SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as max_lora_rank
KEEPS = 0.95


def increments_of(scores: Scores, damping: float | None) -> list[list[float]]:
    """Gain of the first, second, ... rank of every block.

    Raises:
        InvalidInput: Scores without them, or no such damping.
    """
    found = scores.extra.get("increments")
    if found is None:
        raise InvalidInput(
            "The rule by-rank needs the gain of every further rank.",
            f"The scores of {scores.estimator} have one number per block.",
            "Score with --estimator rank-gain --by linear.",
        )
    try:
        rows: list[list[list[float]]] = reading.converted(found, list[list[list[float]]])
        shape = (len(rows), {len(row) for row in rows})
    except ValueError as error:
        raise InvalidInput(f"The increments of these scores do not read ({error}).", "", "Score again.") from error
    if shape != (len(scores.damping), {len(scores.blocks)}):
        raise InvalidInput(
            "The increments of these scores are of another shape than the scores.",
            f"They are {len(scores.damping)} dampings x {len(scores.blocks)} blocks x ranks.", "Score again.",
        )  # fmt: skip
    return rows[scores.index(damping)]


@rule("ranks", "by-rank-permuted", reads=("damping", "seed"), summary="the same with the blocks' curves shuffled: a control")
@rule("ranks", "by-rank", reads=("damping",), summary="the exact program of the gain of every further rank (rank-gain scores)")
def by_rank(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """The program of increments (:func:`layerbudget.solvers.allocate_increments`).

    Raises:
        InvalidInput: Scores without increments.
        InfeasibleBudget: The budget is below the minimum ranks, or reaches beyond the ranks that were measured.
    """
    scores = problem.need_scores()
    rows: Sequence[Sequence[float]] = increments_of(scores, options["damping"])
    if "seed" in options:
        rows = [rows[int(i)] for i in shuffled(len(rows), options["seed"])]
    rounded = allocate_increments(
        rows, problem.amount, problem.target, lower=problem.low, upper=problem.high, multiple=problem.multiple
    )
    _check_reach(problem, rows, rounded.counts)
    extra: dict[str, Any] = {"rounding": rounded.to_dict()}
    extra["uniform_share"] = _uniform_share(problem, rows, rounded.value) if "seed" not in options else None
    extra["smaller_reserve"] = _smaller_reserve(problem, rows, rounded) if "seed" not in options else None
    return Decision(value=rounded.counts.astype(float), counts=rounded.counts, extra=extra)


def _uniform_share(problem: Problem, rows: Sequence[Sequence[float]], value: float) -> float | None:
    """Gain of the same rank everywhere (up to the caps, a fraction in proportion) over the plan's: what there is to win."""
    rank: Vector = np.minimum(problem.target / float(np.sum(problem.amount)), problem.high)
    curves = (np.concatenate([[0.0], np.cumsum(row)]) for row in rows)
    worth = sum(float(np.interp(r, np.arange(len(c)), c)) for r, c in zip(rank, curves, strict=True))
    return worth / value if value > 0 else None


def _smaller_reserve(problem: Problem, rows: Sequence[Sequence[float]], plan: Rounded) -> dict[str, float] | None:
    """The lowest cap at which a server reserves less for the adapter and :data:`KEEPS` of the gain stays, with that share.

    A server reserves one of :data:`SERVED_RANKS` for every module, whatever its own rank.
    """
    reserved = next((r for r in SERVED_RANKS if r >= plan.counts.max()), None)
    if reserved is None or plan.value <= 0:
        return None
    for cap in (r for r in SERVED_RANKS if r < reserved and r >= problem.low.max(initial=0.0)):
        high = np.minimum(problem.high, cap)
        if (high < problem.low).any():
            continue
        capped = allocate_increments(
            rows, problem.amount, problem.target, lower=problem.low, upper=high, multiple=problem.multiple
        )
        if capped.value >= KEEPS * plan.value:
            return {"max_rank": cap, "share": capped.value / plan.value, "reserved": reserved}
    return None


def _check_reach(problem: Problem, rows: Sequence[Sequence[float]], counts: np.ndarray) -> None:
    """Refuse a plan that ends where the measured ranks end and not where the block or its cap does."""
    for block, row, count, cap in zip(problem.blocks, rows, counts, problem.high, strict=True):
        if len(row) <= count < cap and row[-1] > 0:
            raise InfeasibleBudget(
                f"{block.name} would take more than the {len(row)} ranks whose gains were measured.",
                f"The scores tell nothing beyond rank {len(row)}.",
                f"Score with --set largest={2 * len(row)}, plan with --max-rank {len(row)}, or lower the budget.",
            )
