"""The multiple-choice knapsack against brute force, HiGHS and its own theorem."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from layerbudget.errors import InfeasibleBudget, InvalidInput, LengthMismatch
from layerbudget.solvers import choices as C


def brute(d, c, budget):
    """Least damage over all choices."""
    best = np.inf
    for pick in itertools.product(*(range(d.shape[1]) for _ in d)):
        k = np.arange(len(d))
        if c[k, pick].sum() <= budget and np.isfinite(d[k, pick]).all():
            best = min(best, d[k, pick].sum())
    return best


def highs(d, c, budget):
    """The same as a mixed-integer program: ``(value, proven bound)``."""
    n, m = d.shape
    rows = [LinearConstraint(np.kron(np.eye(n), np.ones(m)), 1, 1), LinearConstraint(c.reshape(1, -1), -np.inf, budget)]
    done = milp(d.ravel(), constraints=rows, integrality=np.ones(n * m), bounds=Bounds(0, 1), options={"mip_rel_gap": 1e-9})
    assert done.status == 0
    return done.fun


def curves(rng, n, m, *, noise=0.3, shapes=4):
    """Damages that fall by about four per bit, bytes that depend on a few shapes: what a language model gives."""
    bits = np.linspace(2.5, 8.5, m)
    numel = rng.choice(rng.integers(2_000, 90_000, shapes), n)
    c = np.ceil(numel[:, None] * bits / 8).astype(np.int64)
    d = np.exp(rng.normal(size=(n, 1))) * 4.0**-bits * np.exp(noise * rng.normal(size=(n, m)))
    return d, c


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.floats(0, 1.05), st.booleans())
def test_it_is_the_best_of_all_choices(seed, n, m, share, gaps):
    rng = np.random.default_rng(seed)
    d, c = rng.normal(size=(n, m)).round(1), rng.integers(0, 9, (n, m))
    if gaps and m > 1:
        d[rng.random((n, m)) < 0.3] = np.inf
        d[:, 0] = np.where(np.isfinite(d).any(1), d[:, 0], 1.0)
    least = np.where(np.isfinite(d), c, 99).min(1).sum()
    budget = int(least + share * (c.max(1).sum() - least))
    found = C.choose(d, c, budget)
    k = np.arange(n)
    assert found.spent == c[k, found.chosen].sum() <= budget
    assert found.damage == pytest.approx(d[k, found.chosen].sum())
    assert found.damage == pytest.approx(brute(d, c, budget), abs=1e-12)
    assert found.status in ("optimal", "slack") and found.gap == 0.0
    assert found.relaxed <= found.damage + 1e-12


@pytest.mark.parametrize(("n", "share", "seed"), [(32, 0.2, 0), (32, 0.5, 1), (100, 0.1, 2), (300, 0.7, 4)])
def test_it_is_what_highs_finds(n, share, seed):
    d, c = curves(np.random.default_rng(seed), n, 6)
    budget = int(c.min(1).sum() + share * (c.max(1).sum() - c.min(1).sum()))
    found = C.choose(d, c, budget)
    assert found.status == "optimal" and found.spent <= budget
    assert found.damage == pytest.approx(highs(d, c, budget), rel=2e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.01, 1))
def test_the_theorem(seed, share):
    """Damage = bound + reduced costs + price of what is left, for the plan and for any other."""
    rng = np.random.default_rng(seed)
    d, c = curves(rng, 12, 5)
    budget = int(c.min(1).sum() + share * (c.max(1).sum() - c.min(1).sum()))
    found, k = C.choose(d, c, budget), np.arange(12)
    for pick in (found.chosen, rng.integers(0, 5, 12)):
        total = found.relaxed + found.reduced[k, pick].sum() + found.price * (budget - c[k, pick].sum())
        assert total == pytest.approx(d[k, pick].sum(), rel=1e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5))
def test_the_relaxation_of_many_budgets_is_that_of_each(seed, n, m):
    rng = np.random.default_rng(seed)
    d, c = rng.normal(size=(n, m)), rng.integers(0, 50, (n, m))
    low, high = int(c.min(1).sum()), int(c.max(1).sum())
    budgets = np.unique(np.linspace(low, high + 9, 7).astype(int))
    found = C.Relaxation.of(d, c)
    assert np.isinf(found.at([low - 1])).all()
    choices = [C.choose(d, c, int(b)) for b in budgets]
    np.testing.assert_allclose(found.at(budgets), [choice.relaxed for choice in choices], atol=1e-12)
    assert (found.at(budgets) <= [choice.damage + 1e-12 for choice in choices]).all()


def test_more_bytes_never_hurt_and_the_price_says_how_much_they_help():
    d, c = curves(np.random.default_rng(5), 60, 6)
    low, high = c.min(1).sum(), c.max(1).sum()
    found = [C.choose(d, c, int(b)) for b in np.linspace(low, high, 25)]
    damage = np.array([f.damage for f in found])
    assert (np.diff(damage) <= 1e-15).all()
    for a, b in itertools.pairwise(found):
        assert a.relaxed - b.relaxed <= a.price * (b.budget - a.budget) + 1e-15


def test_order_of_items_and_scale_of_damage_do_not_matter():
    d, c = curves(np.random.default_rng(6), 40, 6)
    budget, order = int(c[:, 2].sum()), np.random.default_rng(1).permutation(40)
    a, b = C.choose(d, c, budget), C.choose(1e-6 * d[order], c[order], budget)
    assert a.damage == pytest.approx(1e6 * b.damage, rel=1e-12) and (a.chosen[order] == b.chosen).mean() > 0.95


def test_a_large_one_is_proven_optimal():
    d, c = curves(np.random.default_rng(7), 10_000, 6, shapes=40)
    found = C.choose(d, c, int(c[:, 1].sum()))
    assert found.status == "optimal" and 0 <= found.damage - found.relaxed <= 1e-4 * found.damage


def test_a_cut_search_says_so(monkeypatch):
    monkeypatch.setattr(C, "_STATES", 16)
    rng = np.random.default_rng(8)
    c = rng.integers(1, 10_000, (30, 4))
    d = 10_000.0 - c + 1e-3 * rng.random((30, 4))  # damage falls with bytes alike everywhere: nothing settles anything
    found = C.choose(d, c, int(np.sort(c, 1)[:, 1].sum()))
    assert found.status == "bounded" and found.lower_bound <= found.damage and found.spent <= found.budget
    assert "at most" in found.message and found.certificate()["gap"] == found.gap


def test_ties_within_noise_are_named():
    d, c = np.array([[4.0, 1.0], [4.0, 1.05]]), np.array([[1, 2], [1, 2]])
    found = C.choose(d, c, 3)
    assert found.chosen.tolist() == [1, 0]
    sure, close = C.near_ties(found, np.full((2, 2), 1e-4)), C.near_ties(found, np.full((2, 2), 0.1))
    assert not sure or all(abs(e) < n for _, _, e, n in sure)
    assert {(i, j) for i, j, _, _ in close} == {(0, 0), (1, 1)}


def test_bad_input_is_one_sentence():
    with pytest.raises(InfeasibleBudget, match="smallest plan, 4 bytes"):
        C.choose([[1.0, 0.0]] * 2, [[2, 3]] * 2, 3)
    with pytest.raises(InvalidInput, match="not a number"):
        C.choose([[np.nan]], [[1]], 3)
    with pytest.raises(InvalidInput, match="negative or broken"):
        C.choose([[1.0]], [[1.5]], 3)
    with pytest.raises(InvalidInput, match="Item 1 has no alternative"):
        C.choose([[1.0], [np.inf]], [[1], [1]], 3)
    with pytest.raises(LengthMismatch):
        C.choose([[1.0]], [[1, 2]], 3)
