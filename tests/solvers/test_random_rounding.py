"""Random roundings with floors, caps, multiples, held blocks and every method: the budget holds, or the refusal is right."""

import numpy as np
import pytest

from layerbudget.errors import InfeasibleBudget
from layerbudget.solvers import allocate, round_capacity

METHODS = ("auto", "floor")


def enumerated(s, floor, top, step) -> float | None:
    """Best utility of whole counts; ``None`` where no counts fit the budget."""
    p = s.program
    price = 0.0 if p.exact_budget else p.price
    ranges = [np.arange(lo, hi + 1e-9, step) for lo, hi in zip(floor, top, strict=True)]
    every = np.stack([m.ravel() for m in np.meshgrid(*ranges, indexing="ij")], 1)
    every = every[every @ p.amount <= p.budget * (1 + 1e-12)]
    x = np.maximum(every - p.base, 0.0)
    return float((p.function.value(x) @ p.scale - price * (x @ p.amount)).max()) if len(x) else None


def draw(rng):
    """A random program, its solution and how to round it; ``None`` where the program itself is infeasible."""
    k = int(rng.integers(1, 5))
    cost = (np.ones(k), rng.integers(1, 7, k).astype(float), rng.random(k) + 0.3)[rng.integers(3)]
    top = rng.integers(1, 7, k).astype(float) if rng.random() < 0.7 else np.full(k, np.inf)
    low = np.minimum(rng.integers(0, 4, k) * (rng.random(k) < 0.5), top).astype(float)
    held = rng.random(k) < 0.2
    low, top = np.where(held, np.minimum(top, 2.0), low), np.where(held, np.minimum(top, 2.0), top)
    base = float(rng.integers(0, 2)) if (low >= 1).all() else 0.0
    most = float(cost @ np.minimum(top, 8.0))
    budget = float(cost @ low) + rng.random() ** 2 * max(most - float(cost @ low), 0.0)
    options = {"base": base, "lower": low, "upper": top, "spend": ("exactly", "at_most")[rng.integers(2)], "alpha": 0.01}
    utility = ("log", "power")[rng.integers(2)]
    try:
        s = allocate(rng.random(k) ** 3 + 1e-3, cost, budget, utility=utility, **options)
    except InfeasibleBudget:
        return None
    return s, int(rng.integers(1, 4))


@pytest.mark.parametrize("count", [700, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_roundings_keep_the_budget_and_their_certificate(count):
    rng, rounded, refused = np.random.default_rng(12), 0, 0
    while rounded < count:
        made = draw(rng)
        if made is None:
            continue
        s, step = made
        floor = np.ceil(s.lower / step - 1e-9) * step
        top = np.floor(np.minimum(s.upper, s.budget / s.program.amount + 1e-9) / step + 1e-9) * step
        best = enumerated(s, floor, top, step)
        for method in METHODS:
            try:
                r = round_capacity(s, method=method, multiple=step)
            except InfeasibleBudget:
                assert best is None or (floor > s.upper + 1e-9).any()
                refused += 1
                continue
            rounded += 1
            assert best is not None
            assert r.spent <= s.budget * (1 + 1e-12) and r.spent == pytest.approx(float(s.program.amount @ r.counts))
            assert (r.counts >= floor).all() and (r.counts <= s.upper + 1e-9).all() and not (r.counts % step).any()
            assert r.value <= best + 1e-9 * abs(best) + 1e-12 <= r.bound + 2e-9 * abs(best) + 2e-12
            if r.exact:
                assert r.value == pytest.approx(best, rel=1e-9, abs=1e-12) and r.gap == 0
    assert refused > 0.05 * count


def test_floors_that_exceed_the_optimum_are_paid_by_the_others():
    s = allocate([4.45, 4.45, 1.1, 1.1], 1.0, 7.0, lower=0.5, spend="exactly")
    r = round_capacity(s, method="floor")
    assert r.spent <= 7 and r.counts.min() == 1 and (r.gap > 0 or r.value == pytest.approx(r.bound))
