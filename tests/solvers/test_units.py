"""Whole units of different sizes against trying every combination."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layerbudget.errors import InfeasibleBudget
from layerbudget.solvers import sparsify
from layerbudget.solvers.rounding import round_units


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("penalty", ["quadratic", "exponential"])
def test_counts_are_the_best_of_all_combinations(seed, penalty):
    rng = np.random.default_rng(seed)
    units = rng.integers(1, 6, 4)
    each = rng.integers(3, 40, 4)
    n, w = (units * each).astype(float), rng.uniform(0.1, 3.0, 4)
    caps = rng.uniform(0.5, 1.0, 4)
    top = np.floor(caps * units + 1e-9)
    target = float(rng.uniform(0.2, 1.0) * (top * each).sum())
    if target == 0:
        pytest.skip("no unit may go")
    solution = sparsify(w, n, target, max_sparsity=caps, penalty=penalty, spend="exactly")
    counts, gap = round_units(solution, units)
    p = solution.program

    def cost(pick):
        return float((p.scale * p.function.value(np.array(pick) / units)).sum())

    feasible = [c for c in itertools.product(*(range(int(t) + 1) for t in top)) if np.dot(c, each) >= target * (1 - 1e-9)]
    assert tuple(counts) in feasible
    assert cost(counts) == pytest.approx(min(map(cost, feasible)), rel=1e-9)
    assert gap == pytest.approx(0, abs=1e-9)


def test_caps_round_down():
    tight = sparsify([1.0, 4.0], [100, 100], sparsity=0.5, max_sparsity=0.6)
    with pytest.raises(InfeasibleBudget, match="rounded down to whole units, 66.6667 can go; 100 should.*smaller units"):
        round_units(tight, [3, 3])
