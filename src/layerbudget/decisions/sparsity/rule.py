"""Sparsity by the program of the paper (:func:`layerbudget.solvers.sparsify`), by measured curves, and their controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InvalidInput
from ...planning.options import constants_of
from ...planning.rule import Decision, Problem, rule, shuffled
from ...solvers.programs import sparsify
from ...solvers.utilities import CalibratedPenalty

_CONSTANTS = ("spend", "bits", "eta", "units")
_READS = ("exponent", "exponent_on", "damping", "smoothing", "penalty", *_CONSTANTS)


def _solve(problem: Problem, weights: Any, spend: str = "exactly", **options: Any) -> Decision:
    solution = sparsify(
        weights, problem.amount, problem.target, max_sparsity=problem.high, min_sparsity=problem.low, spend=spend, **options
    )
    more = None if spend == "exactly" else max(int(round(solution.spent)), int(round(problem.target)))
    return Decision(value=solution.value, solution=solution, target=more)


@rule("sparsity", "permuted", reads=(*_READS, "seed"), summary="the same on shuffled scores: a control")
@rule("sparsity", "mdl", reads=_READS, summary="the program of the paper on the scores")
def by_scores(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """Protected pruning with the scores as weights."""
    chosen = {name: options[name] for name in ("exponent", "exponent_on", "penalty", "spend")}
    return _solve(problem, problem.weights(options), **chosen, **constants_of(options))


@rule(
    "sparsity",
    "calibrated-permuted",
    reads=("seed", *_CONSTANTS),
    summary="the same on shuffled curves: a control",
    curves=None,
)
@rule(
    "sparsity", "calibrated", reads=_CONSTANTS, summary="the program on measured curves, which replace the scores", curves=None
)
def by_curves(problem: Problem, options: Mapping[str, Any]) -> Decision:
    """Protected pruning with the damage that was measured at several sparsities of every block."""
    given, names = options["curves"], [b.name for b in problem.blocks]
    if not isinstance(given, Mapping):
        raise InvalidInput("The rule calibrated needs measured curves.", "", "Give them: plan sparsity --curves FILE.")
    penalty = CalibratedPenalty.from_curves(given, names)
    if "seed" in options:
        order = shuffled(len(names), options["seed"])
        wrong = {n: given[names[i]] for n, i in zip(names, order, strict=True)}
        penalty = CalibratedPenalty.from_curves(wrong, names)
    decision = _solve(problem, np.ones(len(names)), penalty=penalty, spend=options["spend"], **constants_of(options))
    bent = {name: float(v) for name, v in zip(names, penalty.change, strict=True) if v > 0}
    return dataclasses.replace(decision, extra={"convexified": bent})
