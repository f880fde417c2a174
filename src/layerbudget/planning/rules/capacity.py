"""Experts and ranks by the program of the paper (:func:`layerbudget.solvers.allocate`), rounded with a proven gap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...solvers.inputs import Vector
from ...solvers.programs import allocate
from ...solvers.rounding import round_capacity
from ..options import constants_of
from ..rule import Decision, Problem, rule

_READS = ("exponent", "exponent_on", "damping", "smoothing", "utility", "spend", "method", "alpha", "gamma", "units")


def allocated(problem: Problem, weights: Vector, *, method: str = "auto", spend: str = "exactly", **options: Any) -> Decision:
    """Solve and round.

    Args:
        problem: The problem.
        weights: Weights, shape ``(K,)``.
        method: Rounding, see :func:`layerbudget.solvers.round_capacity`.
        spend: ``exactly`` or ``at_most``.
        **options: Of :func:`layerbudget.solvers.allocate`.
    """
    base = 0.0 if problem.base is None else problem.base
    solution = allocate(
        weights, problem.amount, problem.target, spend=spend, base=base, lower=problem.low, upper=problem.high, **options
    )
    rounded = round_capacity(solution, method=method, multiple=problem.multiple)
    return Decision(
        value=solution.value, counts=rounded.counts, solution=solution, extra={"rounding": rounded.to_dict()}
    )  # fmt: skip


def in_proportion(problem: Problem, value: Vector, *, method: str = "auto") -> Decision:
    """Whole capacities nearest to a wish that may cost more or less than the budget.

    With the log utility and weights ``w = c (1 + value)`` the optimum is ``t (1 + value) - 1``: the wish itself where it
    costs the budget, else the wish scaled. There is no certificate: no program was asked.
    """
    decision = allocated(problem, problem.amount * (1.0 + np.maximum(value, 0.0)), method=method)
    return Decision(value=decision.value, counts=decision.counts, extra=decision.extra)


@rule("experts", "permuted", reads=(*_READS, "seed"), summary="the same on shuffled scores: a control")
@rule("experts", "mdl", reads=_READS, summary="the program of the paper on the scores")
@rule("ranks", "permuted", reads=(*_READS, "seed"), summary="the same on shuffled scores: a control")
@rule("ranks", "mdl", reads=_READS, summary="the program of the paper on the scores")
def by_scores(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """Water-filling with the scores as weights."""
    chosen = {name: options[name] for name in ("exponent", "exponent_on", "utility", "spend", "method")}
    return allocated(problem, problem.weights(options), **chosen, **constants_of(options))


@rule("ranks", "uniform", reads=("method",), summary="the same rank everywhere, as far as the bounds allow")
def uniform(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """Equal ranks."""
    return in_proportion(problem, np.zeros(len(problem.blocks)), method=options["method"])


@rule("ranks", "size", reads=("method",), summary="ranks that grow with the size of the block")
def size(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """Ranks in proportion to ``n``: with ``w = c n`` the water level is the same per parameter."""
    numel = np.array([b.numel for b in problem.blocks], dtype=np.float64)
    decision = allocated(problem, problem.amount * numel, method=options["method"])
    return Decision(value=decision.value, counts=decision.counts, extra=decision.extra)
