"""Regret <= sharper bound <= the bound of the paper, for every utility and penalty, with constants that are computed."""

import itertools

import numpy as np
import pytest

from layerbudget.errors import InfeasibleBudget, LengthMismatch
from layerbudget.solvers import transfer_allocation, transfer_sparsity
from layerbudget.solvers.utilities import PENALTIES as P
from layerbudget.solvers.utilities import UTILITIES as U
from layerbudget.solvers.utilities import CalibratedPenalty

UTILITIES = (U["log"](), U["power"](0.3), U["power"](-1.0))
PENALTIES = (P["quadratic"](), P["log-barrier"]())


def shown(function):
    return "-".join([function.name, *(str(v) for v in vars(function).values())])


def chain(t):
    assert not any(np.isnan(v) for v in (t.regret, t.sharp_bound, t.bound, t.drift, t.uniform_regret))
    slack = 1e-9 * abs(t.regret) + 1e-14
    assert 0 <= t.regret <= t.sharp_bound + slack and t.sharp_bound <= t.bound * (1 + 1e-9) + 1e-14
    assert t.squared_drift == t.drift**2


def drawn(rng, k=None):
    """Weights, weights and costs; some weights are zero where the number of blocks is drawn too."""
    zeros, k = k is None, k or int(rng.integers(2, 7))
    q = rng.random(k) ** 3
    q[zeros & (rng.random(k) < 0.15)] = 0.0
    return (q if q.any() else q + 1.0), rng.random(k) + 1e-3, rng.random(k) + 0.3, k


@pytest.mark.parametrize("utility", UTILITIES, ids=shown)
def test_allocations_under_every_utility(utility):
    rng, informative = np.random.default_rng(5), 0
    for exponent, on, rule in itertools.product((0.0, 0.5, 1.0, 2.0), ("density", "block"), ("at_most", "exactly")):
        for _ in range(6):
            q, r, cost, k = drawn(rng)
            low = rng.random(k) * rng.integers(0, 2)
            budget = float(cost @ low) + float(rng.random() * 8)
            t = transfer_allocation(
                q, r, cost, budget, exponent=exponent, exponent_on=on, spend=rule, utility=utility, lower=low,
                alpha=float(rng.random()),
            )  # fmt: skip
            chain(t)
            informative += t.regret > 0.05 * t.sharp_bound
    assert informative > 10


@pytest.mark.parametrize("penalty", PENALTIES, ids=shown)
def test_prunings_under_every_penalty(penalty):
    rng = np.random.default_rng(6)
    for exponent, on, rule in itertools.product((0.0, 0.5, 1.0, 2.0), ("density", "block"), ("at_least", "exactly")):
        for _ in range(6):
            q, r, numel, k = drawn(rng)
            q, r = q + 1e-2, r + 1e-2
            low, high = 0.05 * rng.random(k) * rng.integers(0, 2), 0.6 + 0.35 * rng.random(k)
            try:
                chain(transfer_sparsity(
                    q, r, numel, sparsity=0.1 + 0.4 * rng.random(), penalty=penalty, exponent=exponent, exponent_on=on,
                    spend=rule, min_sparsity=low, max_sparsity=high, bits=float(rng.choice([0.0, 1.0, 16.0])),
                ))  # fmt: skip
            except InfeasibleBudget:
                assert (low > 0).any()


def test_weights_without_exponent_have_no_drift_in_them():
    chain(transfer_allocation([0.0, 2, 1], [1.0, 2, 4], 1.0, 4.0, exponent=0, spend="exactly"))


def test_measured_curves_have_no_bound():
    curves = {n: [[0.2, 0.5, 0.8], [0.1, 0.3, 1.0]] for n in "ab"}
    t = transfer_sparsity([1, 2], [2, 1], 1.0, sparsity=0.3, penalty=CalibratedPenalty.from_curves(curves, list("ab")))
    assert t.regret < np.inf and (t.sharp_bound == np.inf or t.regret <= t.sharp_bound)


def test_relative_regret_is_unmoved_by_what_is_inert():
    """Under a budget that is met exactly neither the price of capacity nor the bits of a parameter move the plan."""
    pair = ([4.0, 2, 1], [1.0, 2, 4])
    shares = [transfer_allocation(*pair, 1.0, 4.0, alpha=a, spend="exactly").relative_regret for a in (0, 0.25, 0.5, 5)]
    assert np.ptp(shares) < 1e-12 and 0 < shares[0] < 1
    more = [transfer_sparsity(*pair, 1.0, sparsity=0.3, bits=b).relative_regret for b in (0, 1, 16, 64)]
    assert np.ptp(more) < 1e-12 and more[0] > 0
    assert np.ptp([transfer_sparsity(*pair, 1.0, sparsity=0.3, eta=e).relative_regret for e in (1, 2, 50)]) < 1e-12


def test_relative_regret_in_words():
    """The share of the utility of B's own plan that A's plan misses; by what share A's plan does more damage."""
    t = transfer_allocation([4.0, 2, 1], [1.0, 2, 4], 1.0, 4.0, spend="exactly")
    worth = lambda x: float(np.array([1.0, 2, 4]) @ np.log1p(x))  # noqa: E731
    assert t.relative_regret == pytest.approx(1 - worth(t.source.value) / worth(t.target.value))
    s = transfer_sparsity([4.0, 2, 1], [1.0, 2, 4], 1.0, sparsity=0.3)
    harm = lambda x: float(np.array([1.0, 2, 4]) @ np.square(x))  # noqa: E731
    assert s.relative_regret == pytest.approx(harm(s.source.value) / harm(s.target.value) - 1)
    differ = transfer_allocation([1e-3, 1e-3, 1.0], [1.0, 1.0, 1.0], 1.0, 60.0, alpha=0.6)
    assert (differ.relative_regret is None) == (abs(differ.source.spent - differ.target.spent) > 1e-6)


def test_no_drift_no_regret(rng):
    q, _, size, _ = drawn(rng, 8)
    t = transfer_sparsity(q + 1e-3, 3 * (q + 1e-3), size, sparsity=0.4)
    assert t.drift < 1e-15 and t.regret < 1e-14 and t.sharp_bound < 1e-25 and t.rank_correlation == pytest.approx(1)


def test_regret_is_the_loss_of_objective(rng):
    q, r, size = drawn(rng, 8)[:3]
    t = transfer_sparsity(q, r, size, sparsity=0.4, max_sparsity=0.7)
    w = t.target.program.scale
    assert t.regret == pytest.approx(w @ t.source.value**2 - w @ t.target.value**2, rel=1e-9)
    assert 0 < t.relative_regret


def test_lengths_must_agree():
    with pytest.raises(LengthMismatch):
        transfer_sparsity([1.0, 2.0], [1.0], 1.0, sparsity=0.1)
