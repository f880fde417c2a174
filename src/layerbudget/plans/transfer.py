"""Transfer between two score records: what planning on one task costs on another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..decisions.sparsity.plan import default_cap
from ..errors import InvalidInput, ModelMismatch
from ..planning.costs import amount_of, parse_budget, unit_cost
from ..scores import Scores
from ..solvers.inputs import choice
from ..solvers.transfer import Transfer, transfer_allocation, transfer_sparsity
from ..solvers.utilities import Function


def transfer_scores(
    source: Scores,
    target: Scores,
    *,
    program: str = "sparsity",
    sparsity: float | None = None,
    max_sparsity: ArrayLike | None = None,
    budget: str | float | None = None,
    min_experts: float | None = None,
    max_experts: float | None = None,
    expert_rank: int | None = None,
    exponent: float = 1.0,
    exponent_on: str = "density",
    damping: float | None = None,
    smoothing: float = 0.0,
    utility: str | Function | None = None,
    penalty: str | Function | None = None,
) -> Transfer:
    """Compare deciding on the source's scores with deciding on the target's own, under the target's objective.

    Args:
        source: Scores that the decision is made from.
        target: Scores of the task that it is used on; the same blocks.
        program: ``sparsity`` or ``experts``.
        sparsity: Sparsity program: global sparsity, 0.5 by default.
        max_sparsity: Sparsity program: cap, :func:`layerbudget.decisions.sparsity.plan.default_cap` by default.
        budget: Experts program: budget, see :func:`layerbudget.planning.costs.parse_budget`; 160 experts by default.
        min_experts: Experts program: base, 1 by default.
        max_experts: Experts program: cap, none by default.
        expert_rank: Experts program: rank of one expert, 8 by default.
        exponent: Exponent of the weights.
        exponent_on: ``density`` or ``block``.
        damping: Which row of the scores.
        smoothing: Added to every score, in units of the mean score; the bounds need positive weights.
        utility: Experts program: utility of capacity, ``log`` by default.
        penalty: Sparsity program: penalty, ``quadratic`` by default. A bound needs its smallest second derivative; where that
            is zero (``power`` above 2 with a floor of zero) the bounds are infinite.

    Returns:
        Drift, exact regret, the paper's bound and the sharper one, with both solutions.

    Raises:
        ModelMismatch: The records hold different blocks.
        InvalidInput: An option of the other program.
        InvalidInput, UnknownUnit, InfeasibleBudget: As the programs raise them.
    """
    choice(program, "program", ("sparsity", "experts"))
    own = {"sparsity": {"sparsity": sparsity, "max_sparsity": max_sparsity, "penalty": penalty}}
    own["experts"] = {"budget": budget, "min_experts": min_experts, "max_experts": max_experts, "expert_rank": expert_rank}
    own["experts"] |= {"utility": utility}
    other = next(options for name, options in own.items() if name != program)
    foreign = [name for name, value in other.items() if value is not None]
    if foreign:
        raise InvalidInput(
            f"The program {program} does not read {foreign[0]}.",
            f"It reads {', '.join(own[program])}.",
            f"Leave {foreign[0]} out.",
        )
    if source.names != target.names or (source.numel != target.numel).any():
        raise ModelMismatch(
            f"The source has {len(source.names)} blocks and the target {len(target.names)}, not the same ones.",
            "Both records need the same blocks of one model.",
            "Score both tasks with one model and one partition.",
        )
    q, r = source.weights(damping, smoothing=smoothing), target.weights(damping, smoothing=smoothing)
    shared: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "spend": "exactly"}
    if program == "sparsity":
        share = 0.5 if sparsity is None else sparsity
        cap = default_cap(share) if max_sparsity is None else max_sparsity
        shape: dict[str, Any] = {} if penalty is None else {"penalty": penalty}
        return transfer_sparsity(q, r, source.numel, sparsity=share, max_sparsity=cap, **shared, **shape)
    wanted = parse_budget("160 experts" if budget is None else budget, default="experts")
    cost = unit_cost(source.blocks, wanted.unit, capacity="experts", expert_rank=8 if expert_rank is None else expert_rank)
    upper = None if max_experts is None else np.full(cost.size, float(max_experts))
    base = 1.0 if min_experts is None else min_experts
    shared |= {} if utility is None else {"utility": utility}
    return transfer_allocation(q, r, cost, amount_of(wanted, source.blocks), base=base, upper=upper, **shared)
