"""LoRA ranks for every block: plans. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from ...plan import Plan
from ...planning.capacity import decide, one_budget
from ...planning.common import blocks_of
from ...planning.costs import Budget, rank_parameters
from ...planning.terms import Terms
from ...records import Block
from ...scores import Scores
from ...solvers.utilities import Function
from . import rule as _rules  # noqa: F401 - registers the rules

ALPHA_POLICIES = ("constant-ratio", "constant-alpha", "rslora")


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
    rule: str | Callable[..., Any] | None = None,
    utility: str | Function | None = None,
    spend: str | None = None,
    method: str | None = None,
    damping: float | None = None,
    smoothing: float | None = None,
    alpha: float | None = None,
    gamma: float | None = None,
    units: str | None = None,
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
        budget: Or in any unit, see :func:`layerbudget.planning.costs.parse_budget`; plain numbers are parameters.
        multiple: Ranks are multiples of this.
        min_rank: Smallest rank; 0 lets a block go without an adapter.
        max_rank: Cap; a rank never exceeds the smallest side of the block's matrices.
        exponent: beta, see :func:`layerbudget.solvers.allocate`; 1 by default.
        exponent_on: ``density`` (default) or ``block``.
        rule: ``by-rank`` (scores of ``rank-gain``: the gain of every further rank; the default for those), ``mdl`` (the
            default for others), ``uniform``, ``size``, the controls ``by-rank-permuted`` and ``permuted``, a rule of your
            own (:mod:`layerbudget.planning.rule`), or a function of a problem that returns one value per block.
        utility: phi of the program; ``log`` by default.
        spend: ``exactly`` (default) or ``at_most``.
        method: Rounding, see :func:`layerbudget.solvers.round_capacity`.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score; 0 by default.
        alpha: Price of capacity in the program; 0.5 by default. Inert where the budget binds.
        gamma: Weight of its utility; 0.9 by default. Inert where the budget binds.
        units: ``relative`` (default), or ``literal``: costs and weights as they are, as the paper's text has it.
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
    wanted = one_budget({"mean_rank": mean_rank, "budget": budget}, "params")
    if mean_rank is not None:
        everywhere = float(rank_parameters(blocks_of(scores)).sum())
        wanted = Budget(amount=mean_rank * everywhere, unit="params", text=f"mean rank {mean_rank:g}")
    terms = Terms(
        kind="ranks", floor=min_rank, cap=max_rank, multiple=multiple, bytes_per_parameter=bytes_per_parameter,
        latency=latency, fixed=fixed,
    )  # fmt: skip
    given = {"exponent": exponent, "exponent_on": exponent_on, "utility": utility, "spend": spend, "method": method}
    given |= {"alpha": alpha, "gamma": gamma, "units": units}
    given |= {"damping": damping, "smoothing": smoothing, "seed": seed, **own}
    return decide(scores, terms, wanted, rule or rank_rule(scores), given, {"mean_rank": mean_rank})


def rank_rule(scores: Scores | Sequence[Block]) -> str:
    """The rule that fits the scores: ``by-rank`` where they hold the gain of every further rank, else ``mdl``."""
    return "by-rank" if "increments" in getattr(scores, "extra", {}) else "mdl"
