"""Transfer between two score records: what planning on one task costs on another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..costs import amount_of, parse_budget, unit_cost
from ..errors import ModelMismatch
from ..program.inputs import choice
from ..program.transfer import Transfer, transfer_allocation, transfer_sparsity
from ..scores.record import Scores


def transfer_scores(
    source: Scores,
    target: Scores,
    *,
    program: str = "sparsity",
    sparsity: float = 0.5,
    max_sparsity: ArrayLike = 0.7,
    budget: str | float = "160 experts",
    min_experts: float = 1.0,
    max_experts: float | None = None,
    expert_rank: int = 8,
    exponent: float = 1.0,
    exponent_on: str = "density",
    damping: float | None = None,
    smoothing: float = 0.0,
) -> Transfer:
    """Compare deciding on the source's scores with deciding on the target's own, under the target's objective.

    Args:
        source: Scores that the decision is made from.
        target: Scores of the task that it is used on; the same blocks.
        program: ``sparsity`` or ``experts``.
        sparsity: Global sparsity of the sparsity program.
        max_sparsity: Its cap.
        budget: Budget of the experts program, see :func:`layerbudget.costs.parse_budget`.
        min_experts: Base of the experts program.
        max_experts: Its cap.
        expert_rank: Rank of one expert.
        exponent: Exponent of the weights.
        exponent_on: ``density`` or ``block``.
        damping: Which row of the scores.
        smoothing: Added to every score, in units of the mean score; the bounds need positive weights.

    Returns:
        Drift, exact regret, the paper's bound and the sharper one, with both solutions.

    Raises:
        ModelMismatch: The records hold different blocks.
        InvalidInput, UnknownUnit, InfeasibleBudget: As the programs raise them.
    """
    choice(program, "program", ("sparsity", "experts"))
    if source.names != target.names or (source.numel != target.numel).any():
        raise ModelMismatch(
            f"The source has {len(source.names)} blocks and the target {len(target.names)}, not the same ones.",
            "Both records need the same blocks of one model.",
            "Score both tasks with one model and one partition.",
        )
    q, r = source.weights(damping, smoothing=smoothing), target.weights(damping, smoothing=smoothing)
    shared: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "rule": "exactly"}
    if program == "sparsity":
        return transfer_sparsity(q, r, source.numel, sparsity=sparsity, max_sparsity=max_sparsity, **shared)
    wanted = parse_budget(budget, default="experts")
    cost = unit_cost(source.blocks, wanted.unit, capacity="experts", expert_rank=expert_rank)
    upper = None if max_experts is None else np.full(cost.size, float(max_experts))
    return transfer_allocation(q, r, cost, amount_of(wanted, source.blocks), base=min_experts, upper=upper, **shared)
