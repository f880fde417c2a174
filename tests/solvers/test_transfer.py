"""Regret <= sharper bound <= the paper's bound, with constants that are computed."""

import numpy as np
import pytest

from layerbudget.errors import LengthMismatch
from layerbudget.solvers import transfer_allocation, transfer_sparsity

SLACK = 1e-12


def pair(rng, k):
    q = rng.random(k) ** 3 + 1e-3
    return q, q * np.exp(rng.normal(0, rng.random(), k)), rng.random(k) + 0.2


@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", ["allocation", "sparsity"])
def test_the_chain_of_bounds(program, count):
    rng = np.random.default_rng(7)
    informative = 0
    for _ in range(count):
        q, r, size = pair(rng, int(rng.integers(1, 12)))
        options = {"exponent": float(rng.choice([0.5, 1, 2, 3])), "exponent_on": str(rng.choice(["density", "block"]))}
        if program == "allocation":
            options["spend"] = str(rng.choice(["at_most", "exactly"]))
            options["upper"] = None if rng.random() < 0.5 else float(1 + rng.random() * 9)
            most = 4.0 if options["upper"] is None else options["upper"]
            t = transfer_allocation(q, r, size, float(rng.random() * most * size.sum()), **options)
        else:
            options["spend"] = str(rng.choice(["at_least", "exactly"]))
            t = transfer_sparsity(q, r, size, sparsity=float(rng.random() * 0.5), **options)
        assert 0 <= t.regret <= t.sharp_bound * (1 + 1e-9) + SLACK
        assert t.sharp_bound <= t.bound * (1 + 1e-9) + SLACK
        informative += t.regret > 0.05 * t.sharp_bound
    assert informative > count / 10


def test_no_drift_no_regret(rng):
    q, _, size = pair(rng, 8)
    t = transfer_sparsity(q, 3 * q, size, sparsity=0.4)
    assert t.drift < 1e-15 and t.regret < 1e-15 and t.sharp_bound < 1e-25 and t.rank_correlation == pytest.approx(1)


def test_regret_is_the_loss_of_objective(rng):
    q, r, size = pair(rng, 8)
    t = transfer_sparsity(q, r, size, sparsity=0.4, max_sparsity=0.7)
    w = t.target.program.scale
    assert t.regret == pytest.approx(w @ t.source.value**2 - w @ t.target.value**2, rel=1e-9)
    assert 0 < t.relative_regret


def test_lengths_must_agree():
    with pytest.raises(LengthMismatch):
        transfer_sparsity([1.0, 2.0], [1.0], 1.0, sparsity=0.1)
