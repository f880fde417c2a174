"""Thousands of random instances: feasible, certified, and never less than what theory promises.

The short versions run always; the ones marked slow draw 10,000 instances per program.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from tests.instances import instances

from layerbudget.errors import InfeasibleBudget
from layerbudget.solvers import CalibratedPenalty, allocate, solve_joint, sparsify

BAR = 1e-9
LENGTHS = [pytest.param(150, id="150"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
EXACT = {"spend": "exactly"}


def certified(s, exact):
    assert s.gap <= BAR and s.kkt_residual <= BAR, repr(s)
    assert np.isfinite(s.value).all() and (s.value >= s.lower).all()
    assert (s.value <= s.upper * (1 + 1e-15)).all()
    if exact:
        assert abs(s.slack) <= 1e-9 * max(abs(s.budget), 1e-300)
    low, high = s.multiplier_interval
    assert low <= s.multiplier <= high


def same(a, b, amount, total):
    """Equal decisions up to what rounding the budget itself can move."""
    return bool((np.abs(amount * (a - b)) <= 1e-9 * np.abs(amount * b) + 1e-11 * abs(total)).all())


def run(examples, check):
    settings(max_examples=examples)(given(instances())(check))()


@pytest.mark.parametrize("examples", LENGTHS)
def test_allocation(examples):
    def check(i):
        q, c, rng = i["q"], i["size"], i["rng"]
        base = float(rng.choice([0.0, 1.0]))
        lower, upper = base + i["low"] * 10, base + i["high"] * 20
        upper = None if rng.random() < 0.3 else np.maximum(upper, lower)
        least = c @ lower
        most = c @ upper if upper is not None else least + c.sum() * 20
        budget = least + i["part"] * (most - least)
        options = {"base": base, "lower": lower, "upper": upper, "exponent": float(rng.choice([1.0, 1.0, 0.5, 2.0, 3.0]))}
        options["exponent_on"] = str(rng.choice(["density", "block"]))
        for rule in ("exactly", "at_most"):
            s = allocate(q, c, budget, spend=rule, **options)
            certified(s, rule == "exactly")
            assert s.spent - budget <= 1e-12 * (budget + c.sum())
            assert rule == "exactly" or s.multiplier >= 0
        shuffled = rng.permutation(q.size)
        upper_shuffled = None if upper is None else upper[shuffled]
        t = allocate(
            q[shuffled], c[shuffled], budget, spend="at_most", **{**options, "lower": lower[shuffled], "upper": upper_shuffled}
        )
        assert same(t.value, s.value[shuffled], c[shuffled], budget + c.sum())
        scaled = allocate(q * 8.0, c * 0.25, budget * 0.25, spend="at_most", **options)
        assert same(scaled.value, s.value, c, budget + c.sum())

    run(examples, check)


@pytest.mark.parametrize("examples", LENGTHS)
def test_sparsity(examples):
    def check(i):
        q, n, rng = i["q"], i["size"], i["rng"]
        low, high = i["low"], i["high"]
        target = n @ low + i["part"] * (n @ (high - low))
        options = {
            "exponent": float(rng.choice([1.0, 1.0, 0.5, 2.0, 3.0])),
            "exponent_on": str(rng.choice(["density", "block"])),
        }
        for rule in ("exactly", "at_least"):
            s = sparsify(q, n, target, min_sparsity=low, max_sparsity=high, spend=rule, bits=float(rng.random() * 3), **options)
            certified(s, rule == "exactly")
            assert s.spent >= target * (1 - 1e-12)
            assert rule == "exactly" or s.multiplier >= 0
        other = sparsify(
            q, n, target, min_sparsity=low, max_sparsity=high, bits=float(rng.random()), eta=float(rng.random() + 0.1), **EXACT,
            **options,
        )  # fmt: skip
        s = sparsify(q * 4.0, n * 0.5, target * 0.5, min_sparsity=low, max_sparsity=high, **EXACT, **options)
        assert same(other.value, s.value, n, target)
        o = rng.permutation(q.size)
        t = sparsify(q[o], n[o], target, min_sparsity=low[o], max_sparsity=high[o], **EXACT, **options)
        assert same(t.value, s.value[o], n[o], target)

    run(examples, check)


@pytest.mark.parametrize("examples", LENGTHS)
def test_joint(examples):
    def check(i):
        q, c, rng = np.maximum(i["q"], i["q"].max() * 1e-12), i["size"], i["rng"]
        savings = c * float(rng.choice([0.1, 1.0, 40.0]))
        least, most = -savings.sum() * 0.6, c.sum() * 9
        budget = least + (0.02 + 0.96 * i["part"]) * (most - least)
        for rule in ("exactly", "at_most"):
            s = solve_joint(q, c, savings, budget, max_sparsity=0.6, upper=9.0, spend=rule, gamma=float(rng.random() + 0.1))
            assert s.gap <= BAR and s.kkt_residual <= BAR, repr(s)
            net = c @ s.capacity - savings @ s.sparsity
            assert net <= budget + 1e-9 * (abs(budget) + c @ s.capacity)
            assert rule == "at_most" or net == pytest.approx(budget, rel=1e-9, abs=1e-9 * (c @ s.capacity + savings.sum()))

    run(examples, check)


@pytest.mark.parametrize("examples", LENGTHS)
def test_calibrated(examples):
    def check(i):
        n, rng = i["size"], i["rng"]
        k, points = n.size, int(rng.integers(1, 6))
        ratios = np.sort(rng.choice(np.arange(1, 20), points, replace=False)) / 20
        losses = np.cumsum(rng.random((k, points)) * np.arange(1, points + 1), 1)
        if rng.random() < 0.3:
            losses = np.round(losses * 2) / 2
        curves = CalibratedPenalty(ratios, losses)
        target = i["part"] * float(n @ curves.limit)
        for rule in ("exactly", "at_least"):
            s = sparsify(np.ones(k), n, target, max_sparsity=1.0, penalty=curves, spend=rule, bits=float(rng.random()))
            certified(s, rule == "exactly")

    run(examples, check)


def test_power_and_log_barrier():
    def check(i):
        q, c = np.clip(i["q"], i["q"].max() * 1e-6, None), i["size"]
        upper, high = 1.0 + i["high"] * 20, 0.2 + i["high"] * 0.7
        certified(allocate(q, c, (0.05 + 0.9 * i["part"]) * (c @ upper), upper=upper, utility="power", **EXACT), True)
        target = (0.02 + 0.96 * i["part"]) * (c @ high)
        certified(sparsify(q, c, target, max_sparsity=high, penalty="log-barrier", **EXACT), True)

        spread = (q / q.max()) ** (1 + 40 * i["part"])  # the largest wish is 1 but for the last digit
        certified(sparsify(spread, c, target, max_sparsity=1.0, penalty="log-barrier", **EXACT), True)

    run(60, check)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0])
def test_two_halves_do_not_move_anybody(exponent):
    def check(i):
        q, n = np.maximum(i["q"], i["q"].max() * 1e-9), i["size"]
        k = int(i["rng"].integers(q.size))
        halved = [np.insert(np.where(np.arange(q.size) == k, v / 2, v), k, v[k] / 2) for v in (q, n)]
        s = sparsify(q, n, sparsity=0.3, exponent=exponent, **EXACT)
        t = sparsify(*halved, sparsity=0.3, exponent=exponent, **EXACT)
        assert np.allclose(np.delete(t.value, k), s.value, rtol=1e-8, atol=1e-10)
        a = allocate(q, n, 3 * n.sum(), exponent=exponent, **EXACT)
        b = allocate(*halved, 3 * n.sum(), exponent=exponent, **EXACT)
        assert np.allclose(np.delete(b.value, k), a.value, rtol=1e-8, atol=1e-8)

    run(50, check)


def test_more_weight_more_capacity_and_less_pruning():
    def check(i):
        q, n = np.maximum(i["q"], i["q"].max() * 1e-9), i["size"]
        k = int(i["rng"].integers(q.size))
        more = q.copy()
        more[k] *= 1.7
        a, b = (allocate(v, n, 3 * n.sum(), **EXACT).value[k] for v in (q, more))
        assert b >= a * (1 - 1e-12)
        a, b = (sparsify(v, n, sparsity=0.3, **EXACT).value[k] for v in (q, more))
        assert b <= a * (1 + 1e-12)

    run(80, check)


def test_alpha_and_gamma_cancel_when_the_budget_binds():
    def check(i):
        q, c = i["q"], i["size"]
        values = [
            allocate(q, c, 3 * c.sum(), alpha=a, gamma=g, **EXACT).value for a, g in ((0.5, 0.9), (0.0, 40.0), (7.0, 1e-3))
        ]
        assert np.allclose(values[0], values[1], rtol=1e-10) and np.allclose(values[0], values[2], rtol=1e-10)

    run(80, check)


def test_infeasible_instances_are_refused():
    def check(i):
        q, n = i["q"], i["size"]
        with pytest.raises(InfeasibleBudget):
            sparsify(q, n, sparsity=0.61, max_sparsity=0.6)
        with pytest.raises(InfeasibleBudget):
            allocate(q, n, 0.99 * n.sum(), base=1.0)
        with pytest.raises(InfeasibleBudget):
            allocate(q, n, 2.01 * n.sum(), upper=2.0, **EXACT)

    run(30, check)
