"""LoRA ranks for every block: the plan, and what a server must reserve for it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike

from ...arguments import checked
from ...budget import Budget, rank_parameters
from ...plan import Plan
from ...records import Block
from ...scores import Scores
from ..capacity import CapacityBounds, decide, one_budget
from ..making import blocks_of
from .gains import measured, on_gains
from .rules import served


@checked
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
        InfeasibleBudget: The budget is below the minimum ranks, or cannot be spent under the caps (``by-rank`` spends what
            they take: ``budget`` and the verdict say what is left).
    """
    wanted = one_budget({"mean_rank": mean_rank, "budget": budget}, "params")
    if mean_rank is not None:
        everywhere = float(rank_parameters(blocks_of(scores)).sum())
        wanted = Budget(amount=mean_rank * everywhere, unit="params", text=f"mean rank {mean_rank:g}")
    terms = CapacityBounds(
        kind="ranks",
        floor=min_rank,
        cap=max_rank,
        multiple=multiple,
        bytes_per_parameter=bytes_per_parameter,
        latency=latency,
        fixed=fixed,
    )
    gains = measured(scores)
    chosen = rule or ("by-rank" if gains else "mdl")
    describer = on_gains if gains and chosen != "uniform" else None
    return decide(scores, terms, wanted, chosen, options, {"mean_rank": mean_rank}, describer)


def serving_note(plan: Plan) -> str:
    """Return what a server must be told to hold a plan's adapter, in one sentence.

    vLLM (``--enable-lora``) reserves ``max_lora_rank`` for every module and reads one ``r`` and ``lora_alpha`` for the adapter.
    """
    ranks = np.repeat(plan.counts, [len(b.modules) for b in plan.blocks])
    ranks = ranks[ranks > 0]
    reserved = served(int(ranks.max()))
    if reserved is None:
        return f"Rank {int(ranks.max())} is above the 512 that vLLM accepts: merge the adapter before serving."
    used = int(ranks.sum()) / (ranks.size * reserved)
    vllm = f"--enable-lora --max-lora-rank {reserved}. vLLM reserves rank {reserved} for every matrix"
    return f"{vllm}; the plan uses {used:.0%} of it."
