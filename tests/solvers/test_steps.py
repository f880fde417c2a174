"""One step of a sequential plan: against brute force, and for many units."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layerbudget.errors import InfeasibleBudget
from layerbudget.solvers.steps import curves_at, damage_at, reach, step_within
from layerbudget.solvers.utilities import CalibratedPenalty


def hull(x, y):
    """Lower convex hull by its definition: the largest convex function below the points."""
    out = []
    for v, own in zip(x, y, strict=True):
        chords = [own]
        for (a, ya), (b, yb) in itertools.combinations(zip(x, y, strict=True), 2):
            if a <= v <= b and a < b:
                chords.append(ya + (yb - ya) * (v - a) / (b - a))
        out.append(min(chords))
    return np.array(out)


def test_hulls_of_many_curves_are_the_hulls_one_by_one():
    rng = np.random.default_rng(0)
    x = np.sort(rng.random((40, 9)), axis=1)
    x[::2, 0] = 0.0
    y = rng.normal(size=(40, 9))
    y[::2, 0] = 0.0
    penalty = CalibratedPenalty(x, y)
    for k in range(40):
        a, b = (x[k], y[k]) if k % 2 == 0 else (np.r_[0, x[k]], np.r_[0, y[k]])
        wanted = hull(a, b)
        found = [penalty.value(np.full(40, v))[k] for v in a]
        assert found == pytest.approx(wanted, abs=1e-12)
        assert penalty.change[k] == pytest.approx(np.abs(wanted - b).max())


def test_the_best_plan_within_reach_is_the_best_of_all():
    rng = np.random.default_rng(1)
    for _ in range(20):
        levels = reach(rng.uniform(0.3, 0.6, 3), 0.2, 0.7, 5)
        damage = np.cumsum(np.sort(rng.normal(size=(3, 5)), axis=1), axis=1)  # convex
        numel, total = np.array([40, 40, 40]), 58
        counts, solution = step_within(levels, damage, numel, total)
        assert counts.sum() == total and solution.kkt_residual < 1e-9
        ranges = [range(int(np.ceil(a * 40 - 1e-9)), int(np.floor(b * 40 + 1e-9)) + 1) for a, b in levels[:, [0, -1]]]
        best = min(damage_at(levels, damage, np.array(c) / 40) for c in itertools.product(*ranges) if sum(c) == total)
        assert damage_at(levels, damage, counts / 40) <= best + 0.3  # rounding of at most one entry per unit
        relaxed = float(curves_at(levels, damage, (levels[:, 0] + solution.value)[:, None]).sum())
        assert relaxed <= best + 1e-9


def test_a_hundred_thousand_units():
    rng = np.random.default_rng(2)
    count = 100_000
    numel = rng.integers(100, 5000, count)
    levels = reach(np.full(count, 0.7), 0.06, 0.95, 9)
    damage = rng.normal(size=(count, 9)).cumsum(1)
    total = round(0.7 * int(numel.sum()))
    counts, solution = step_within(levels, damage, numel, total)
    assert counts.sum() == total and solution.gap < 1e-9
    assert damage_at(levels, damage, counts / numel) < damage_at(levels, damage, np.full(count, 0.7))
    assert (np.abs(counts / numel - 0.7) < 0.06 + 1.0 / numel + 1e-9).all()


def test_bounds_that_do_not_hold_the_budget_are_refused():
    with pytest.raises(InfeasibleBudget):
        step_within(np.array([[0.1, 0.2]]), np.zeros((1, 2)), np.array([100]), 50)
