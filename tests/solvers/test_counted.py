"""At most N marked alternatives: against every combination, with an honest status where the search is cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.solvers.choices import choose
from layerbudget.solvers.counted import choose_few


def instance(rng):
    """Damages of any shape and sign, some of them out of reach; the last alternative (and sometimes one more) is marked."""
    count, width = int(rng.integers(2, 6)), int(rng.integers(2, 5))
    damage = rng.uniform(0, 10, (count, width)) * rng.choice([0.2, 1.0, 3.0], size=(count, width))
    if rng.random() < 0.3:
        damage = np.round(damage) - 8.0
    if rng.random() < 0.3:
        damage[rng.random(damage.shape) < 0.15] = np.inf
        damage[:, 0] = rng.uniform(0, 20, count)
    size = rng.integers(0, 40, (count, width))
    marked = np.zeros(damage.shape, dtype=bool)
    marked[:, -1] = True
    if width > 2 and rng.random() < 0.3:
        marked |= rng.random(damage.shape) < 0.3
    least = int(np.where(np.isfinite(damage), size, 10**6).min(1).sum())
    return damage, size, least + int(rng.integers(0, 25 * count)), marked, int(rng.integers(0, count))


def best_of_all(damage, size, budget, marked, most):
    rows = np.arange(len(damage))
    every = np.array(list(itertools.product(range(damage.shape[1]), repeat=len(damage))))
    fits = (size[rows, every].sum(1) <= budget) & (marked[rows, every].sum(1) <= most)
    return damage[rows, every].sum(1)[fits].min(initial=np.inf)


@pytest.mark.parametrize("count", [400, pytest.param(60_000, marks=pytest.mark.slow)])
def test_no_combination_is_better(count):
    rng, binding, refused = np.random.default_rng(11), 0, 0
    for _ in range(count):
        damage, size, budget, marked, most = instance(rng)
        best = best_of_all(damage, size, budget, marked, most)
        if not np.isfinite(best):
            refused += 1
            with pytest.raises(InfeasibleBudget):
                choose_few(damage, size, budget, marked, most)
            continue
        found = choose_few(damage, size, budget, marked, most)
        rows = np.arange(len(damage))
        assert found.spent == size[rows, found.chosen].sum() <= budget and marked[rows, found.chosen].sum() <= most
        assert found.damage == pytest.approx(damage[rows, found.chosen].sum(), abs=1e-12) == pytest.approx(best, abs=1e-9)
        assert found.status != "bounded" and found.gap < 1e-10 and found.relaxed <= best + 1e-9
        binding += choose(damage, size, budget).damage < best - 1e-9
    assert binding > count / 5 and refused > count / 50


def test_a_search_that_is_cut_says_so_and_its_bound_holds():
    rng, cut = np.random.default_rng(12), 0
    for _ in range(250):
        given = instance(rng)
        best = best_of_all(*given)
        if np.isfinite(best):
            found = choose_few(*given, branches=0)
            cut += found.status == "bounded"
            assert found.lower_bound <= best + 1e-9 <= found.damage + 2e-9
            assert (found.status == "bounded") == (found.gap > 1e-10)
    assert cut > 5


def test_dozens_of_layers_are_proven():
    rng = np.random.default_rng(13)
    damage = np.concatenate((rng.gamma(1.0, size=(48, 1)) * np.linspace(0, 0.75, 25) ** 2, rng.uniform(0.1, 0.5, (48, 1))), 1)
    damage[:, 1:] += rng.normal(0, 0.02, (48, 25))
    each = rng.integers(10**8, 4 * 10**8, 48)[:, None]
    size = each - (each * [*np.linspace(0, 0.75, 25), 1.0]).astype(np.int64)
    marked = np.zeros(size.shape, dtype=bool)
    marked[:, -1] = True
    found = choose_few(damage, size, int(0.6 * each.sum()), marked, 4)
    assert found.status == "optimal" and marked[np.arange(48), found.chosen].sum() <= 4


def test_bad_input_is_refused():
    with pytest.raises(InvalidInput, match="Item 1 has no alternative"):
        choose_few([[1.0, 2.0], [np.inf, np.inf]], [[1, 1], [1, 1]], 5, [[False, True]] * 2, 1)
    with pytest.raises(InfeasibleBudget, match="at most 0 marked"):
        choose_few([[1.0, 2.0]], [[9, 1]], 5, [[False, True]], 0)
