"""Units of known worth: against brute force, the linear relaxation by a generic solver, and the surrogate-free optimum."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from layerbudget.errors import InfeasibleBudget, InvalidInput, NotFinite
from layerbudget.solvers import allocate_increments


def cases(count):
    generator = np.random.default_rng(7)
    while count:
        size = int(generator.integers(1, 5))
        rows = [np.sort(generator.random(int(generator.integers(0, 5))))[::-1] for _ in range(size)]
        cost, low = generator.integers(1, 6, size).astype(float), generator.integers(0, 3, size)
        high, budget = low + generator.integers(0, 5, size), float(generator.integers(0, 30))
        if cost @ low <= budget:
            count -= 1
            yield rows, cost, budget, low, high


def test_equals_brute_force_and_stays_below_the_relaxation():
    for rows, cost, budget, low, high in cases(80):
        found = allocate_increments(rows, cost, budget, lower=low, upper=high)
        worth = [np.concatenate([[0.0], np.cumsum(r), np.full(9, r.sum())]) for r in rows]
        decisions = itertools.product(*[range(a, b + 1) for a, b in zip(low, high, strict=True)])
        best = max(sum(w[n] for w, n in zip(worth, x, strict=True)) for x in decisions if cost @ np.array(x) <= budget)
        assert found.value == pytest.approx(best, abs=1e-12) and found.exact and found.gap == 0.0
        assert found.spent == cost @ found.counts <= budget
        assert (found.counts >= low).all() and (found.counts <= high).all()

        value = np.concatenate([np.pad(r, (0, max(0, n - len(r))))[:n] for r, n in zip(rows, high, strict=True)] or [[]])
        owner = np.repeat(np.arange(len(rows)), high)
        first = np.concatenate([np.arange(n) < m for n, m in zip(high, low, strict=True)])
        if value.size:
            bounds = [(1.0, 1.0) if f else (0.0, 1.0) for f in first]
            relaxed = linprog(-value, A_ub=[cost[owner]], b_ub=[budget], bounds=bounds)
            assert found.optimum == pytest.approx(-relaxed.fun, abs=1e-9)


def test_equal_costs_are_a_merge():
    found = allocate_increments([[5, 4, 1], [3, 2, 2]], 1, 4)
    assert found.counts.tolist() == [2, 2] and found.value == 14.0 == found.optimum


def test_order_scale_and_a_copy_of_everything_change_nothing():
    for rows, cost, budget, low, high in cases(30):
        found = allocate_increments(rows, cost, budget, lower=low, upper=high)
        turned = allocate_increments(rows[::-1], cost[::-1], budget, lower=low[::-1], upper=high[::-1])
        assert turned.value == pytest.approx(found.value)
        scaled = allocate_increments([7 * r for r in rows], 3 * cost, 3 * budget, lower=low, upper=high)
        assert scaled.value == pytest.approx(7 * found.value)


def test_multiples_are_whole_groups():
    found = allocate_increments([[5, 4, 3, 2], [4, 4, 4, 1]], 1, 6, multiple=2)
    assert found.counts.tolist() == [4, 2]  # 5+4 | 3+2 against 4+4 | 4+1, a tie that the first block wins
    with pytest.raises(InvalidInput, match="whole number"):
        allocate_increments([[1.0]], 1, 6, multiple=1.5)


def test_worthless_units_are_left_and_floors_are_paid():
    found = allocate_increments([[1.0], [0.5, 0.0]], 1, 10, lower=[3, 0])
    assert found.counts.tolist() == [3, 1] and found.spent == 4


def test_impossible_inputs_are_refused():
    for rows, options, error, said in (
        ([[1.0, 2.0]], {}, InvalidInput, "rise"),
        ([[-1.0]], {}, InvalidInput, "negative"),
        ([[np.nan]], {}, NotFinite, "block 0"),
        ([[1.0]], {"lower": 3, "upper": 2}, InfeasibleBudget, "floor"),
        ([[1.0]], {"lower": 11}, InfeasibleBudget, "below the 11"),
        ([], {}, InvalidInput, "no block"),
    ):
        with pytest.raises(error, match=said):
            allocate_increments(rows, 1, 10, **options)
