"""One byte budget for adapting and pruning, by the program of :mod:`layerbudget.solvers.joint` (:doc:`/theory`, section 5)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...arguments import checked
from ...budget import parse_budget, unit_cost
from ...decision import DECISIONS
from ...errors import InvalidInput, UnknownUnit
from ...plan import Plan, payload_of
from ...scores import Scores
from ...solvers.inputs import Vector, bound_vector, choice
from ...solvers.joint import JointSolution, solve_joint
from ...solvers.programs import allocate
from ...solvers.rounding import RoundedCapacity, round_capacity, round_parameters
from ..capacity import CapacityBounds, check_expert_rank, smallest_sides
from ..making import make_plan
from ..rules import RuleResult
from .payload import Capacity, JointPayload


@checked
def plan_joint(
    scores: Scores,
    *,
    budget: str | float,
    capacity: str = "ranks",
    expert_rank: int | None = None,
    min_capacity: ArrayLike = 0,
    max_capacity: ArrayLike | None = None,
    max_sparsity: ArrayLike = 0.7,
    exponent: float = 1.0,
    exponent_on: str = "density",
    alpha: float = 0.5,
    gamma: float = 0.9,
    eta: float = 2.0,
    spend: str = "exactly",
    damping: float | None = None,
    bytes_per_parameter: float = 2.0,
) -> Plan:
    """Return a plan of pruning and adapters together: bytes added minus bytes freed meet one budget.

    Args:
        scores: The scores: a block with a large gain deserves adapters and protection.
        budget: Net bytes, such as ``"-2GiB"`` (shrink) or ``"100 MB"``; parameters are converted.
        capacity: What is added: ``ranks`` or ``lora-experts`` (of ``expert_rank``).
        expert_rank: Rank of one expert, 8 by default; not read for ranks.
        min_capacity: Ranks or experts that every block gets.
        max_capacity: Cap per block; a rank never exceeds the smallest side of the block's matrices.
        max_sparsity: Cap per block.
        exponent: Exponent of the adapting weights.
        exponent_on: ``density`` or ``block``.
        alpha: Price of capacity.
        gamma: Weight of the utility.
        eta: Weight of the penalty; ``gamma / eta`` decides how much is pruned to pay for adapters.
        spend: ``exactly`` or ``at_most``.
        damping: Which row of the scores.
        bytes_per_parameter: 2 for bf16, for weights and adapters.

    Returns:
        A plan of kind ``joint``: values and counts are sparsities and pruned parameters; ``payload.capacity`` holds ``{kind,
        expert_rank, values, counts}`` by block. :func:`split_joint` gives the two plans.

    Raises:
        UnknownUnit: The budget is not in bytes or parameters.
        InvalidInput: An unknown kind of capacity, a rank of experts that are none, or another option outside its domain.
        InfeasibleBudget: Pruning to the caps does not free enough, or the caps cannot use the budget up.
    """
    choice(capacity, "capacity", ("ranks", "lora-experts"))
    if capacity == "ranks" and expert_rank is not None:
        raise InvalidInput(f"expert_rank is {expert_rank} for a plan of ranks.", "Experts have one.", "Leave it out.")
    if expert_rank is not None:
        check_expert_rank(expert_rank, scores.blocks)
    limit, text = _limit(budget, bytes_per_parameter)
    numel = scores.numel.astype(np.float64)
    options: dict[str, Any] = {"capacity": capacity, "bytes_per_parameter": bytes_per_parameter}
    options |= {"expert_rank": 8 if expert_rank is None else expert_rank} if capacity == "lora-experts" else {}
    cost, q = unit_cost(scores.blocks, "bytes", **options), scores.weights(damping)
    sides = smallest_sides(scores.blocks) if capacity == "ranks" else np.full(numel.size, np.inf)
    constants: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "alpha": alpha, "gamma": gamma}
    adapting: dict[str, Any] = {
        **constants,
        "lower": np.minimum(bound_vector(min_capacity, numel.size, "min_capacity", 0.0), sides),
        "upper": np.minimum(bound_vector(max_capacity, numel.size, "max_capacity", np.inf), sides),
    }
    savings = numel * bytes_per_parameter
    solution = solve_joint(q, cost, savings, limit, eta=eta, max_sparsity=max_sparsity, spend=spend, **adapting)
    wish = int(np.ceil(float(numel @ solution.sparsity) * (1.0 - 1e-12) - 1e-9))
    pruned = round_parameters(solution.sparsity, numel, wish, solution.program.prune.high)
    freed = float(pruned.sum()) * bytes_per_parameter
    rounded = _whole(q, cost, solution, limit + freed, spend, adapting)
    hyper = {**constants, "eta": eta, "spend": spend, **options, "max_sparsity": max_sparsity, "damping": damping}
    hyper |= {"min_capacity": min_capacity, "max_capacity": max_capacity}
    values, counts = (dict(zip(scores.names, v.tolist(), strict=True)) for v in (solution.capacity, rounded.counts))
    adapters = Capacity(
        kind=capacity, values=values, counts=counts, bytes=rounded.spent, expert_rank=options.get("expert_rank")
    )
    record = {"unit": "bytes", "limit": limit, "spent": rounded.spent - freed, "text": text}
    payload = {"capacity": adapters, "rounding": rounded.to_dict()}
    decision = RuleResult(value=solution.sparsity, solution=solution, payload=payload)
    return make_plan(scores, "joint", "mdl", decision, pruned, record, hyper)


def _limit(budget: str | float, bytes_per_parameter: float) -> tuple[float, str]:
    """The net bytes of a budget, and its text."""
    wanted = parse_budget(budget, default="bytes")
    if wanted.unit not in ("bytes", "params"):
        raise UnknownUnit(
            f"The joint budget {budget!r} is in {wanted.unit}.",
            "It must be in bytes or parameters.",
            "Write '-2GiB' or '-1B params'.",
        )
    if wanted.relative:
        raise InvalidInput(
            f"The joint budget {budget!r} is a percentage.",
            "It is net: what adapters take less what pruning frees, in bytes or parameters.",
            "Write '-2GiB' or '-1B params'.",
        )
    return wanted.amount * (bytes_per_parameter if wanted.unit == "params" else 1.0), wanted.text


def _whole(
    q: Vector, cost: Vector, solution: JointSolution, left: float, spend: str, options: dict[str, Any]
) -> RoundedCapacity:
    """Whole capacities for the bytes that are left after pruning (which rounds up, so there may be a few more)."""
    spare = min(left, float(cost @ solution.capacity) + float(cost.min()))
    if spend == "exactly":
        most = float(cost @ options["upper"])
        return round_capacity(allocate(q, cost, min(spare, most), spend="exactly", **options))
    return round_capacity(allocate(q, cost, spare, spend="at_most", **options))


@checked
def split_joint(plan: Plan) -> tuple[Plan, Plan]:
    """Return the sparsity plan and the ranks (or experts) plan of a joint plan, ready to be applied one after the other."""
    payload, hyperparameters, pruned = payload_of(plan, JointPayload), plan.hyperparameters, int(plan.counts.sum())
    adapters, zeros = payload.capacity, {"unit": "parameters", "limit": pruned, "spent": pruned}
    prune = dataclasses.replace(plan, kind="sparsity", budget=zeros, payload=None)
    blocks = tuple(dataclasses.replace(b, value=adapters.values[b.name], count=adapters.counts[b.name]) for b in plan.blocks)
    money = {"unit": "bytes", "limit": adapters.bytes, "spent": adapters.bytes}
    terms = CapacityBounds(  # as a plan of adapters alone records them
        kind=adapters.kind,
        floor=hyperparameters["min_capacity"],
        cap=hyperparameters["max_capacity"],
        expert_rank=hyperparameters.get("expert_rank", 8),
        bytes_per_parameter=hyperparameters["bytes_per_parameter"],
    )
    options = ("exponent", "exponent_on", "spend", "alpha", "gamma", "damping")
    hyper = terms.record() | {name: hyperparameters[name] for name in options if name in hyperparameters}
    rounding = DECISIONS.find(adapters.kind).Payload(rounding=payload.rounding)
    changed: dict[str, Any] = {"blocks": blocks, "budget": money, "hyperparameters": hyper, "payload": rounding}
    return prune, dataclasses.replace(plan, kind=adapters.kind, **changed)
