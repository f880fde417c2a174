"""How much rank for this data: gain by mean rank uniform and its noise floor, parameters against tokens. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..decisions.ranks.plan import plan_ranks
from ..errors import InfeasibleBudget, InvalidInput
from ..planning.costs import rank_parameters
from ..records import Result
from ..scores import Scores
from .verdict import MOSTLY_NOISE, beside_uniform

RANKS = (4, 8, 16, 32, 64)
_ENOUGH = 0.05  # of the gain above its floor: what twice the rank must add


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RankTable(Result):
    """Rows by mean rank: parameters, their number per token, gain of the plan, its noise floor, uniform's share of the gain."""

    tokens: int
    rows: Sequence[Mapping[str, Any]]
    rank: int  # the recommended mean rank
    recommendation: str


def rank_table(scores: Scores, tokens: int, *, ranks: Sequence[int] = RANKS, damping: float | None = None) -> RankTable:
    """Expected gain of every mean rank on the scored text, before anything is trained.

    The gain is that of the quadratic model along the best directions of each matrix (estimator ``rank-gain``). Its floor is
    what noise alone gives the same ranks: the gain of the difference of two halves of the text.

    Args:
        scores: Scores of ``rank-gain``.
        tokens: Completion tokens of the training rows: those that the loss counts.
        ranks: Mean ranks to look at; those beyond what was measured are left out.
        damping: Which row of the scores.

    Raises:
        InvalidInput: Scores without the gain of every further rank, no tokens, or no rank that was measured.
    """
    if tokens < 1:
        raise InvalidInput(f"tokens is {tokens}.", "At least one is learned.", "Give the completion tokens of the rows.")
    own: dict[str, Any] = {} if damping is None else {"damping": damping}
    price, rows = rank_parameters(scores.blocks), list[dict[str, Any]]()
    for rank in sorted(ranks):
        try:
            plan = plan_ranks(scores, mean_rank=rank, rule="by-rank", **own)
        except InfeasibleBudget:
            break
        row: dict[str, Any] = {"rank": rank, "parameters": int(price @ plan.counts)}
        row |= {"parameters_per_token": row["parameters"] / tokens, "gain": plan.extra["rounding"]["value"]}
        noise = plan.extra["noise_share"]
        row |= {} if noise is None else {"floor": noise * row["gain"], "noise_share": noise}
        rows.append({**row, "uniform_share": plan.extra["uniform_share"], "largest": int(plan.counts.max())})
    if not rows:
        what = f"The scores know too few ranks for a mean rank of {min(ranks)}."
        raise InvalidInput(what, "", "Score with --set largest=64, or name smaller ranks.")
    return RankTable(tokens=tokens, rows=rows, **_recommended(rows, tokens))


def _recommended(rows: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """The smallest rank with as many parameters as tokens, or the one from which on the gain hardly grows; why, in words.

    Gains that are noise do not decide.
    """
    above = [row["gain"] - row.get("floor", 0.0) for row in rows]
    covers = next((i for i, row in enumerate(rows) if row["parameters"] >= tokens), len(rows) - 1)
    grows = (i for i in range(len(rows) - 1) if above[i + 1] - above[i] <= _ENOUGH * max(above[i + 1], 0.0))
    noise = rows[covers].get("noise_share")
    chosen = rows[covers if noise is not None and noise > MOSTLY_NOISE else max(covers, next(grows, len(rows) - 1))]
    size = f"{chosen['parameters']:,} parameters"
    if chosen["parameters"] >= tokens:
        told = f"Mean rank {chosen['rank']}: {size} for {tokens:,} completion tokens"
    else:
        told = f"Mean rank {chosen['rank']} or more: {size} are fewer than the {tokens:,} tokens"
    share = chosen["uniform_share"]
    told += "" if share is None else f"; {beside_uniform(share, chosen.get('noise_share'))}"
    return {"rank": int(chosen["rank"]), "recommendation": f"{told}."}
