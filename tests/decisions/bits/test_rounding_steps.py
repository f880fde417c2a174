"""Damage of formats taken again at the quantised point: against measured changes, and what a descent keeps and refuses."""

from __future__ import annotations

import numpy as np
import pytest
from tests import zoo

from layerbudget.decisions.bits import rounding_steps as S
from layerbudget.decisions.bits.jointly import plan_formats
from layerbudget.decisions.bits.plan import Table, plan_bits
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import describe


@pytest.fixture(scope="module")
def measured():
    model = zoo.build("llama", intermediate_size=64)
    return model, rounding_damage(model, zoo.tokens(16, 16), formats=["w4-g32", "w5-g32", "w6-g32"], draws=4)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_both_terms_predict_what_one_other_format_changes(measured, method, monkeypatch):
    """At the dense point products of blocks are left out; at the plan they are in the gradient."""
    model, scores = measured
    monkeypatch.setattr(S, "agreement", lambda *_: 1.0)
    held = {**scores.extra["choices"], "method": method}
    table = Table.of(type(scores)(**{**scores.__dict__, "extra": {"choices": held}}))
    now = S.chosen_of(table, plan_bits(scores, bits=5.4))
    point = S.Rounded(model, zoo.tokens(16, 16), table, 8)
    before = describe(model)
    seen = point.look(now, draws=4, seed=0)
    rng, pairs = np.random.default_rng(0), []
    for i in rng.permutation(len(now))[:5]:
        for j in (j for j in range(3) if j != now[i]):
            there = now.copy()
            there[i] = j
            pairs.append((seen["delta"][i, j], point.measure(there) - seen["divergence"]))
    point.restore()
    assert describe(model) == before
    predicted, found = np.array(pairs).T
    assert np.corrcoef(predicted, found)[0, 1] > 0.97
    assert 0.8 < (predicted @ found) / (found @ found) < 1.2


def test_a_descent_falls_on_its_text_stays_in_budget_and_continues(measured, tmp_path):
    model, scores = measured
    before, data = describe(model), zoo.tokens(16, 16)
    own = {"bits": 5.4, "steps": 2, "scores": scores, "draws": 2, "seed": 3, "resume": tmp_path / "kept"}
    plan, _ = plan_formats(model, data, **own)
    again, _ = plan_formats(model, data, **own)
    assert describe(model) == before and again.to_dict() == plan.to_dict()
    told = [s["divergence"] for s in plan.extra["steps"]]
    assert told == sorted(told, reverse=True) and plan.budget["spent"] <= plan.budget["limit"]
    assert plan.extra["passes"] > plan.extra["steps"][0]["passes"]
    if len(told) > 1:
        assert plan.extra["steps"][1]["measured"] == pytest.approx(told[1] - told[0])


def test_what_is_no_descent_is_refused(measured):
    model, scores = measured
    plan = plan_bits(scores, bits=5.4, rule="uniform")
    with pytest.raises(InvalidInput, match="from a plan by uniform"):
        S.stepped(model, zoo.tokens(4, 8), scores, plan)
    with pytest.raises(InvalidInput, match="one sequence"):
        S.stepped(model, zoo.tokens(1, 8), scores, plan_bits(scores, bits=5.4))
