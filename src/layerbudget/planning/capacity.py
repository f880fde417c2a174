"""From scores to experts or LoRA ranks per block, in the user's unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .costs import Budget, parse_budget, rank_parameters
from ..errors import InvalidInput
from ..plan import Plan
from ..solvers.utilities import Function
from ..records import Block
from ..scores import Scores
from .common import blocks_of, make_plan, recorded
from .rule import Decision, as_rule
from .rules.capacity import in_proportion
from .terms import Terms


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
        budget: Or in any unit: ``"64M params"``, ``"1.2 GiB"``, ``"3% flops"``, see :func:`layerbudget.planning.costs.parse_budget`.
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


def decide(
    scores: Scores | Sequence[Block], terms: Terms, wanted: Budget, rule: str | Callable[..., Any], given: Mapping[str, Any],
    record: Mapping[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """Let a rule decide under terms and a budget, and bind its decision into a plan.

    Args:
        scores: Scores, or blocks alone for rules that need none.
        terms: What binds the plan.
        wanted: The budget.
        rule: Name of the rule, or a function.
        given: Options for it; None means not given.
        record: What the plan shall record beside terms and options.

    Raises:
        InvalidInput: An option that the rule does not read, or a decision that is none.
        InfeasibleBudget: The budget is below the floors, or cannot be spent under the caps.
    """
    chosen = as_rule(terms.kind, rule)
    options = chosen.heard(given)
    problem = terms.problem(scores, wanted)
    decision: Decision = chosen.decide(problem, options)
    if decision.counts is None:
        value = np.asarray(decision.value, dtype=np.float64)
        if value.shape != problem.amount.shape or not np.isfinite(value).all():
            raise InvalidInput(
                f"The rule {chosen.name} gave values of shape {value.shape}.",
                f"It must give {problem.amount.size} finite ones.",
                "Correct it.",
            )
        decision = in_proportion(problem, value)
    counts = np.asarray(decision.counts)
    budget = {"unit": wanted.unit, "limit": problem.target, "text": wanted.text, "spent": float(problem.amount @ counts)}
    hyper = {**(record or {}), **terms.record(), **recorded(options)}
    return make_plan(scores, terms.kind, chosen.name, decision.value, counts, budget, hyper, decision.solution, decision.extra)


def one_budget(given: Mapping[str, Any], default: str) -> Budget:
    """The one budget that was given.

    Raises:
        InvalidInput: None was, or several.
    """
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
