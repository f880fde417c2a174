"""Integers against brute force, and never over budget."""

import itertools

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.solvers import allocate, allocate_increments, choices, round_capacity, round_parameters, sparsify
from layerbudget.solvers.choices import knapsack


def best_by_enumeration(s, multiple, top):
    p, best = s.program, -np.inf
    price = 0.0 if p.exact_budget else p.price
    for e in itertools.product(range(0, top + 1, multiple), repeat=len(s.value)):
        e = np.array(e, float)
        if p.amount @ e <= p.budget * (1 + 1e-12):
            best = max(best, p.scale @ np.log1p(e) - price * (p.amount @ e))
    return best


@pytest.mark.parametrize("seed", range(120))
def test_brute_force(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 7))
    top = int(rng.integers(1, 8 if k < 5 else 4))
    cost = (np.ones(k), rng.integers(1, 7, k).astype(float), rng.random(k) + 0.3)[seed % 3]
    s = allocate(rng.random(k) + 0.01, cost, float(rng.random() * top * cost.sum()), upper=float(top), alpha=0.01)
    multiple = int(rng.integers(1, 3))
    r = round_capacity(s, multiple=multiple)
    assert r.exact and r.gap == 0 and r.spent <= s.budget * (1 + 1e-12) and (r.counts % multiple == 0).all()
    assert r.value == pytest.approx(best_by_enumeration(s, multiple, top), rel=1e-9, abs=1e-12)
    other = round_capacity(s, multiple=multiple, method="floor")
    assert other.spent <= s.budget * (1 + 1e-12) and other.value <= r.value + 1e-9 <= other.bound + 1e-8


def test_unit_costs_spend_everything_and_floor_does_not(rng):
    s = allocate(rng.random(32), 1.0, 160, base=1.0, spend="exactly")
    exact, floor = round_capacity(s), round_capacity(s, method="floor")
    assert exact.spent == 160 and exact.method == "greedy" and exact.exact
    assert 160 - floor.spent >= 8 and floor.gap > 0 and floor.value < exact.value <= exact.optimum


def test_ranks_in_eights_and_minimum(rng):
    cost = rng.integers(5, 19, 100) * 1024.0
    s = allocate(rng.random(100), cost, 16 * cost.sum(), spend="exactly", lower=8.0, upper=64.0)
    r = round_capacity(s, multiple=8)
    assert r.counts.min() == 8 and r.counts.max() <= 64 and not (r.counts % 8).any()
    assert r.exact and r.spent <= s.budget and s.budget - r.spent < cost.max() * 8


def test_many_blocks_have_a_proven_gap(rng):
    s = allocate(rng.random(3000), rng.random(3000) + 1, 5000.0, spend="exactly")
    r = round_capacity(s)
    assert 0 <= r.gap < 1e-3 and r.spent <= 5000 * (1 + 1e-12) and r.value <= r.bound <= r.optimum + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_windows_hold_what_belongs_to_the_optimum_where_costs_are_far_apart(seed):
    """A cheap block is counted in thousands, a dear one in ones. All steps, without any window, give the same."""
    rng = np.random.default_rng(seed)
    w, c = rng.exponential(size=8), np.round(rng.lognormal(0, 1.5, 8), 2) + 0.01
    budget = float(rng.uniform(1, 6)) * c.sum()
    r = round_capacity(allocate(w, c, budget, spend="exactly"))
    rows = [x * np.diff(np.log1p(np.arange(int(budget / y) + 2))) for x, y in zip(w, c, strict=True)]
    every = allocate_increments(rows, c, budget)
    unit = len(c) * 0.9 / w.sum()  # of the utility: gamma, and weights of mean one
    assert r.spent <= budget * (1 + 1e-12) and r.gap <= 1e-9
    assert r.value == pytest.approx(every.value * unit, rel=2e-9) and r.bound >= every.value * unit * (1 - 1e-12)


def test_a_thousand_blocks_with_costs_far_apart_are_rounded_within_a_billionth_or_so(rng):
    c = rng.lognormal(0, 2, 1000)
    r = round_capacity(allocate(np.ones(1000), c, 4.3 * c.sum(), spend="exactly"))
    assert r.spent <= r.budget and r.gap < 1e-7


def test_impossible_floors():
    with pytest.raises(InfeasibleBudget):
        round_capacity(allocate([1.0, 1.0], 1.0, 10.0, lower=4.5, spend="exactly"), multiple=6)
    with pytest.raises(InfeasibleBudget):
        round_capacity(allocate([1.0], 1.0, 10.0, lower=1.0, upper=7.0), multiple=8)
    with pytest.raises(InvalidInput):
        round_capacity(sparsify([1.0], 10.0, 1))


def taken(gain, cost, budget):
    """Items of one step each."""
    counts, *rest = knapsack(gain[:, None], cost, budget)
    return counts.astype(bool), *rest


@pytest.mark.parametrize("seed", range(40))
def test_knapsack_brute_force(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 11))
    gain, cost = rng.random(k), (rng.random(k) + 0.01 if seed % 2 else rng.integers(1, 9, k).astype(float))
    budget = float(rng.random() * cost.sum())
    take, bound, exact, _, _ = taken(gain, cost, budget)
    best = max(gain @ np.array(x) for x in itertools.product((0, 1), repeat=k) if cost @ np.array(x) <= budget)
    assert exact and cost[take].sum() <= budget and gain[take].sum() == pytest.approx(best) == pytest.approx(bound)


@pytest.mark.parametrize("kind", ["latency", "parameters"])
def test_the_core_of_a_large_model_is_solved_as_another_solver_solves_it(rng, kind):
    """Optimal for 224 matrices with 64 steps each, whether or not costs share a unit; HiGHS says so where it ends in time."""
    each = rng.random(224) + 0.5 if kind == "latency" else np.tile([8192.0] * 4 + [15104.0] * 3, 32)
    scale = rng.gamma(2.0, 1.0, 224)
    rows = scale[:, None] * np.diff(np.log1p(np.arange(65)))
    budget = 0.13 * 64 * each.sum()
    counts, bound, exact, price, spread = knapsack(rows, each, budget)
    gain, cost, take = rows.ravel(), np.repeat(each, 64), (np.arange(64) < counts[:, None]).ravel()
    value = gain[take].sum()
    assert exact and cost[take].sum() <= budget and bound == pytest.approx(value, rel=1e-12)
    open_ = np.flatnonzero(np.abs(gain - price * cost) <= spread * (1 + 1e-9) + 1e-12)
    settled = take.copy()
    settled[open_] = False
    answer = milp(
        -gain[open_], constraints=LinearConstraint(cost[open_][None, :], -np.inf, budget - cost[settled].sum()),
        bounds=Bounds(0, 1), integrality=np.ones(open_.size), options={"time_limit": 1.0, "mip_rel_gap": 0.0},
    )  # fmt: skip
    assert answer.x is None or gain[settled].sum() - answer.fun <= value * (1 + 1e-9)
    assert gain[settled].sum() - answer.mip_dual_bound >= value * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_a_core_that_outgrows_its_limits_keeps_a_true_bound(seed, monkeypatch):
    monkeypatch.setattr(choices, "_STATES", 6)
    monkeypatch.setattr(choices, "_WORK", 24 if seed % 2 else 10**6)
    rng = np.random.default_rng(seed)
    cost = rng.random(12) + 0.1
    gain, budget = cost + 0.01 * rng.random(12), float(0.5 * cost.sum())
    take, bound, exact, _, _ = taken(gain, cost, budget)
    best = max(gain @ np.array(x) for x in itertools.product((0, 1), repeat=12) if cost @ np.array(x) <= budget)
    value = gain[take].sum()
    assert cost[take].sum() <= budget * (1 + 1e-15) and value <= best + 1e-12 <= bound + 2e-12
    assert not exact or value == pytest.approx(best, abs=1e-12)


def test_gains_proportional_to_costs_leave_a_small_gap_and_no_wait(rng):
    cost = rng.random(5000) + 0.5
    for gain in (cost, cost + 0.1):
        take, bound, _, _, _ = taken(gain, cost, float(0.3 * cost.sum()))
        assert cost[take].sum() <= 0.3 * cost.sum() * (1 + 1e-12)
        assert 0 <= bound - gain[take].sum() <= 1e-4 * bound


def test_parameters_sum_to_the_total_and_respect_caps(rng):
    for _ in range(200):
        n = rng.integers(1, 1000, 9)
        caps = np.full(9, 0.7)
        total = int(rng.integers(0, np.floor(caps * n).sum() + 1))
        s = sparsify(rng.random(9) + 0.01, n, min(total, float(0.7 * n.sum())), max_sparsity=0.7, spend="exactly")
        counts = round_parameters(s.value, n, total, caps)
        assert counts.sum() == total and (counts <= np.floor(caps * n * (1 + 1e-15))).all() and (counts >= 0).all()


def test_a_multiple_that_is_no_whole_number_is_refused():
    with pytest.raises(InvalidInput, match="multiple"):
        round_capacity(allocate([4.0, 2.0, 1.0], 1.0, 6, spend="exactly"), multiple=0.5)
