"""LoRA ranks by the gain of every further rank: no surrogate utility between the measurement and the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InfeasibleBudget, InvalidInput
from ..plan import Plan
from ..program import rules
from ..program.increments import allocate_increments
from ..program.inputs import Vector
from ..scores.record import Scores
from .common import make_plan

RULES = ("by-rank", "by-rank-permuted")
_SURROGATE = {"exponent": 1.0, "smoothing": 0.0, "utility": "log", "spend": "exactly", "method": "auto"}


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
    return found[scores.index(damping)]


def by_rank(
    scores: Scores, rule: str, cost: Vector, bounds: tuple[Vector, Vector], budget: Mapping[str, Any], hyper: Mapping[str, Any],
) -> Plan:  # fmt: skip
    """Solve the program of increments under the options of :func:`layerbudget.planning.plan_ranks`.

    Args:
        scores: Scores of the estimator ``rank-gain``.
        rule: ``by-rank``, or ``by-rank-permuted``: the blocks' curves in random order, a control.
        cost: Budget per rank, shape ``(K,)``.
        bounds: Smallest and largest rank, shape ``(K,)`` each.
        budget: ``{unit, limit, text}``.
        hyper: Options, for the record.

    Raises:
        InvalidInput: Scores without increments, or an option of the surrogate utility.
        InfeasibleBudget: The budget is below the minimum ranks, or reaches beyond the ranks that were measured.
    """
    foreign = [name for name, default in _SURROGATE.items() if hyper[name] != default]
    if foreign:
        raise InvalidInput(
            f"{foreign[0]} has no meaning under {rule}.", "It shapes the surrogate utility of rule mdl.", "Leave it out."
        )
    rows: Sequence[Sequence[float]] = increments_of(scores, hyper["damping"])
    if rule == "by-rank-permuted":
        rows = [rows[int(i)] for i in rules.permuted(np.arange(len(rows)), hyper["seed"])]
    low, high = bounds
    rounded = allocate_increments(rows, cost, budget["limit"], lower=low, upper=high, multiple=hyper["multiple"])
    _check_reach(scores, rows, rounded.counts, high)
    kept = {k: v for k, v in hyper.items() if k not in _SURROGATE}
    share = _uniform_share(rows, cost, budget["limit"], high, rounded.value) if rule == "by-rank" else None
    counts = rounded.counts
    return make_plan(
        scores, "ranks", rule, scores.blocks, counts.astype(float), counts, {**budget, "spent": rounded.spent}, kept, None,
        rounding=rounded.to_dict(), uniform_share=share,
    )  # fmt: skip


def _uniform_share(rows: Sequence[Sequence[float]], cost: Vector, limit: float, high: Vector, value: float) -> float | None:
    """Gain of the same rank everywhere (up to the caps, a fraction in proportion) over the plan's: what there is to win."""
    rank = np.minimum(limit / float(np.sum(cost)), high)
    curves = (np.concatenate([[0.0], np.cumsum(row)]) for row in rows)
    worth = sum(float(np.interp(r, np.arange(len(c)), c)) for r, c in zip(rank, curves, strict=True))
    return worth / value if value > 0 else None


def _check_reach(scores: Scores, rows: Sequence[Sequence[float]], counts: np.ndarray, high: Vector) -> None:
    """Refuse a plan that ends where the measured ranks end and not where the block or its cap does."""
    for block, row, count, cap in zip(scores.blocks, rows, counts, high, strict=True):
        if len(row) <= count < cap and row[-1] > 0:
            raise InfeasibleBudget(
                f"{block.name} would take more than the {len(row)} ranks whose gains were measured.",
                f"The scores tell nothing beyond rank {len(row)}.",
                f"Score with --set largest={2 * len(row)}, plan with --max-rank {len(row)}, or lower the budget.",
            )
