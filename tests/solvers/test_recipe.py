"""The recipe against every combination, and against the two programs that it joins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layerbudget.errors import InfeasibleBudget, InvalidInput, LengthMismatch
from layerbudget.solvers.choices import choose
from layerbudget.solvers.mixed import mix_recipe


def instance(seed):
    rng = np.random.default_rng(seed)
    size = np.sort(rng.integers(2, 30, (3, 3)), 1)
    damage = np.sort(rng.gamma(1.0, size=(3, 3)), 1)[:, ::-1]
    gains = [np.sort(rng.gamma(0.7, size=n))[::-1] for n in (3, 2)]
    return damage, size, gains, rng.integers(1, 6, 2)


@pytest.mark.parametrize("seed", range(12))
def test_no_combination_is_better(seed):
    damage, size, gains, cost = instance(seed)
    low, exchange = seed % 2, (0.3, 1.0, 4.0)[seed % 3]
    least = int(size.min(1).sum() + low * cost.sum())
    for budget in (least, least + 9, least + 40):
        found = mix_recipe(damage, size, gains, cost, budget, lower=low, exchange=exchange)
        spent = int(size[np.arange(3), found.chosen].sum() + (cost * found.ranks).sum())
        assert spent <= budget and found.choice.spent == spent and (found.ranks >= low).all()
        best = min(
            damage[range(3), j].sum() - exchange * sum(g[:r].sum() for g, r in zip(gains, ranks, strict=True))
            for j in itertools.product(range(3), repeat=3)
            for ranks in itertools.product(*(range(low, len(g) + 1) for g in gains))
            if size[range(3), j].sum() + (cost * ranks).sum() <= budget
        )
        assert found.damage - exchange * found.gain == pytest.approx(best, abs=1e-12) and found.choice.status != "bounded"
        assert found.choice.damage == pytest.approx(best, abs=1e-12)


def test_without_worth_it_is_the_plan_of_bits_and_multiples_and_caps_hold():
    damage, size, gains, cost = instance(1)
    budget = int(size.sum(1).mean() * 2)
    assert (mix_recipe(damage, size, gains, cost, budget, exchange=0.0).chosen == choose(damage, size, budget).chosen).all()
    found = mix_recipe(damage, size, gains, cost, 10_000, multiple=2, upper=[9, 1])
    assert found.ranks.tolist() == [2, 0] and found.choice.status == "slack"


def test_bad_input_is_refused():
    damage, size, gains, cost = instance(2)
    with pytest.raises(InfeasibleBudget):
        mix_recipe(damage, size, gains, cost, 3)
    with pytest.raises(InvalidInput, match="at least 5"):
        mix_recipe(damage, size, gains, cost, 1000, lower=5)
    with pytest.raises(InvalidInput, match="negative or not finite"):
        mix_recipe(damage, size, [[-1.0], [1.0]], cost, 1000)
    with pytest.raises(LengthMismatch):
        mix_recipe(damage, size, gains, cost[:1], 1000)
