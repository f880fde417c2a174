"""The rules that ranks and LoRA experts share: the program of the paper, and proportions. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...errors import InvalidInput
from ...solvers.dual import piecewise_root
from ...solvers.inputs import Vector
from ...solvers.programs import allocate
from ...solvers.rounding import round_capacity
from ..making import constants_of
from ..rules import Problem, RuleResult, rule
from .bounds import check_caps

FLAT = 0.1  # standard deviation over mean of scores below which costs decide


@rule("lora-experts", "permuted", control=True, summary="the same on shuffled scores: a control")
@rule("lora-experts", "mdl", summary="the program of the paper on the scores")
@rule("ranks", "permuted", control=True, summary="the same on shuffled scores: a control")
@rule("ranks", "mdl", summary="the program of the paper on the scores")
def _by_scores(
    problem: Problem,
    *,
    exponent: float = 1.0,
    exponent_on: str = "density",
    damping: float | None = None,
    smoothing: float = 0.0,
    utility: Any = "log",
    spend: str = "exactly",
    method: str = "auto",
    alpha: float | None = None,
    gamma: float | None = None,
    units: str | None = None,
) -> RuleResult:
    """Water-filling with the scores as weights (:func:`layerbudget.solvers.allocate`), rounded with a proven gap."""
    constants = constants_of(alpha=alpha, gamma=gamma, units=units)
    q, chosen = problem.weights(damping, smoothing), {"exponent": exponent, "exponent_on": exponent_on, "utility": utility}
    decision = _allocated(problem, q, spend=spend, method=method, **chosen, **constants)
    spread = float(q.std() / q.mean())
    if len(q) < 2 or spread >= FLAT:
        return decision
    return dataclasses.replace(decision, payload={**decision.payload, "flat_scores": spread})


def in_proportion(problem: Problem, value: ArrayLike, *, method: str = "auto", name: str = "in proportion") -> RuleResult:
    """Return whole capacities in proportion to ``value``, as far as the bounds allow, that cost the budget or a little less.

    ``e_k = clip(t v_k, l_k, u_k)`` with the ``t`` at which it costs the budget: the unit of ``v`` changes nothing. All zeros
    mean the same everywhere. Whole numbers follow by the program of the paper with the log utility and the weights
    ``c_k (1 + t v_k)``, whose optimum these ``e_k`` are.

    Args:
        problem: The problem.
        value: Zero or more, shape ``(K,)``.
        method: ``auto`` (the best whole numbers) or ``floor`` (rounded down).
        name: What the rule is called in an error.

    Raises:
        InvalidInput: A value below zero.
        InfeasibleBudget: The caps cannot take the budget.
    """
    v, cost, low, high = np.asarray(value, dtype=np.float64), problem.amount, problem.low, problem.high
    if (v < 0).any():
        k = int(np.argmin(v))
        what = f"The rule {name} gave {problem.blocks[k].name} the value {v[k]:g}."
        raise InvalidInput(what, "Capacities are in proportion to values, which are zero or more.", "Correct it.")
    v = np.maximum(v / v.max(), 1e-12) if v.any() else np.ones(v.size)
    level, _, _ = piecewise_root(cost * v, np.zeros(v.size), cost * low, cost * high, problem.target)
    wish = np.minimum(level * v, high.max())
    ground = 1.0 + np.maximum(wish - (0.0 if problem.base is None else problem.base), 0.0)
    decision = _allocated(problem, cost * (ground / ground.max()), method=method)
    return RuleResult(value=decision.value, counts=decision.counts)


def _allocated(
    problem: Problem, weights: Vector, *, method: str = "auto", spend: str = "exactly", **options: Any
) -> RuleResult:
    """Solve the program of the paper and round."""
    base = 0.0 if problem.base is None else problem.base
    if spend == "exactly":
        check_caps(problem)
    solution = allocate(
        weights, problem.amount, problem.target, spend=spend, base=base, lower=problem.low, upper=problem.high, **options
    )
    rounded = round_capacity(solution, method=method, multiple=problem.multiple)
    return RuleResult(value=solution.value, counts=rounded.counts, solution=solution, payload={"rounding": rounded.to_dict()})
