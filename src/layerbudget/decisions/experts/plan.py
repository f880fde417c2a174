"""LoRA experts for every block: plans. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from ...plan import Plan
from ...planning.capacity import decide, one_budget
from ...planning.terms import Terms
from ...records import Block
from ...scores import Scores
from ...solvers.utilities import Function
from . import rule as _rules  # noqa: F401 - registers the rules


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
    rule: str | Callable[..., Any] = "mdl",
    utility: str | Function | None = None,
    spend: str | None = None,
    method: str | None = None,
    damping: float | None = None,
    smoothing: float | None = None,
    alpha: float | None = None,
    gamma: float | None = None,
    units: str | None = None,
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
        budget: Or in any unit: ``"64M params"``, ``"1.2 GiB"``, ``"3% flops"``, see
            :func:`layerbudget.planning.costs.parse_budget`.
        flops_fraction: Or as a fraction of the base blocks' FLOPs per token.
        min_experts: Experts that every block has anyway (the base, which earns no utility).
        lower: Smallest number of experts; what it has above ``min_experts`` earns utility.
        max_experts: Cap per block.
        expert_rank: Rank of one expert.
        exponent: beta, see :func:`layerbudget.solvers.allocate`: 1 by default, for ``layerif`` and ``alphalora`` as published.
        exponent_on: ``density`` (default) or ``block``.
        rule: ``mdl``, ``permuted``, ``uniform``, ``size``, ``layerif``, ``alphalora``, ``mola-5555``, ``mola-2468``,
            ``mola-8642`` (or ``mola-`` with other digits), a rule of your own
            (:mod:`layerbudget.planning.rule`), or a function of a problem that returns one value per block.
        utility: phi of the program; ``log`` by default.
        spend: ``exactly`` (default) or ``at_most``.
        method: Rounding, see :func:`layerbudget.solvers.round_capacity`.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score; 0 by default.
        alpha: Price of capacity in the program; 0.5 by default. Inert where the budget binds.
        gamma: Weight of its utility; 0.9 by default. Inert where the budget binds.
        units: ``relative`` (default), or ``literal``: costs and weights as they are, as the paper's text has it.
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
    wanted = one_budget({"total": total, "budget": budget, "flops_fraction": flops_fraction}, "experts")
    terms = Terms(
        kind="experts", base=min_experts, floor=lower, cap=max_experts, expert_rank=expert_rank, router=router,
        bytes_per_parameter=bytes_per_parameter, latency=latency, fixed=fixed,
    )  # fmt: skip
    given = {"exponent": exponent, "exponent_on": exponent_on, "utility": utility, "spend": spend, "method": method}
    given |= {"alpha": alpha, "gamma": gamma, "units": units}
    given |= {"damping": damping, "smoothing": smoothing, "seed": seed, "parity": parity, **own}
    return decide(scores, terms, wanted, rule, given)
