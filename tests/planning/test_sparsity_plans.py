"""plan_sparsity: every rule meets the same recounted budget."""

import json

import numpy as np
import pytest
from tests import zoo

from layerbudget.decisions.apply import rules_of
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CorruptFile, InfeasibleBudget, InvalidInput, UnknownBlock
from layerbudget.plan import Plan
from layerbudget.records import dumps
from layerbudget.scores import Scores

SPARSITY_RULES = [name for name in rules_of("sparsity") if not name.startswith("calibrated")]
SIZES = [64 + 7 * i for i in range(12)]


@pytest.mark.parametrize("rule", SPARSITY_RULES)
@pytest.mark.parametrize("sparsity", [0.0, 0.31, 0.5, 0.7])
def test_every_rule_spends_the_same_budget(rule, sparsity, rng):
    scores = zoo.scores(rng.random(12), SIZES)
    plan = plan_sparsity(scores, sparsity=sparsity, max_sparsity=0.7, rule=rule)
    assert plan.counts.sum() == round(sparsity * scores.numel.sum())
    assert np.all(plan.counts <= np.ceil(0.7 * scores.numel))
    assert np.all(np.abs(plan.counts - plan.values * scores.numel) <= 1 + 1e-6)


def test_larger_scores_are_pruned_less():
    values = np.linspace(1, 3, 12)
    plan = plan_sparsity(zoo.scores(values), sparsity=0.5)
    assert np.all(np.diff(plan.values) <= 0) and plan.values[0] > plan.values[-1]
    assert plan.certificate["status"] == "binding" and plan.certificate["gap"] <= 1e-9


def test_held_blocks_are_inside_the_program(rng):
    scores = zoo.scores(rng.random(12) + 0.5, SIZES)
    plan = plan_sparsity(scores, sparsity=0.5, exclude=r"layers\.0$", fixed={"model.layers.3": 0.6})
    assert plan.values[0] == 0.0 and plan.counts[0] == 0 and plan.values[3] == 0.6
    assert plan.counts.sum() == round(0.5 * scores.numel.sum())


def test_permuted_is_a_permutation_of_the_scores_and_follows_the_seed(rng):
    scores = zoo.scores(rng.random(12))
    real, one, two = (plan_sparsity(scores, rule=r, seed=s) for r, s in (("mdl", None), ("permuted", 1), ("permuted", 2)))
    assert np.allclose(np.sort(one.values), np.sort(real.values))
    assert not np.allclose(one.values, real.values) and not np.allclose(one.values, two.values)


def test_measured_curves_replace_scores_and_can_be_permuted(rng):
    blocks = zoo.scores(rng.random(6)).blocks
    curves = {b.name: ([0.2, 0.4, 0.6], [x * (i + 1) for x in (0.1, 0.3, 0.9)]) for i, b in enumerate(blocks)}
    plan = plan_sparsity(blocks, sparsity=0.4, penalty=curves)
    assert np.all(np.diff(plan.values) <= 1e-12) and plan.values.max() <= 0.6
    wrong = plan_sparsity(blocks, sparsity=0.4, penalty=curves, rule="permuted", seed=3)
    assert np.allclose(np.sort(wrong.values), np.sort(plan.values)) and not np.allclose(wrong.values, plan.values)
    assert (plan.rule, wrong.rule) == ("calibrated", "calibrated-permuted")
    assert plan.counts.sum() == wrong.counts.sum() == round(0.4 * sum(b.numel for b in blocks))
    with pytest.raises(UnknownBlock):
        plan_sparsity(blocks, sparsity=0.4, penalty={**curves, "ghost": ([0.5], [1.0])})


def test_plan_file_round_trip(rng, tmp_path):
    plan = plan_sparsity(zoo.scores(rng.random(12)))
    assert Plan.load(plan.save(tmp_path / "plan.json")).digest == plan.digest


def test_refusals_have_three_parts(rng):
    scores = zoo.scores(rng.random(12))
    for options, kind in (
        ({"sparsity": 0.8, "max_sparsity": 0.7}, InfeasibleBudget),
        ({"sparsity": 1.2}, InvalidInput),
        ({"rule": "magic"}, InvalidInput),
        ({"exclude": "nothing_here"}, UnknownBlock),
    ):
        with pytest.raises(kind) as caught:
            plan_sparsity(scores, **options)
        assert caught.value.what and caught.value.feasible and caught.value.remedy


def test_caps_above_one_and_caps_below_floors_are_refused_by_every_rule(rng):
    scores = zoo.scores(rng.random(12), SIZES)
    for rule in SPARSITY_RULES:
        with pytest.raises(InvalidInput, match="max_sparsity 1.5"):
            plan_sparsity(scores, sparsity=0.7, max_sparsity=1.5, rule=rule)
        with pytest.raises(InvalidInput, match="min_sparsity 0.8"):
            plan_sparsity(scores, sparsity=0.7, max_sparsity=0.75, min_sparsity=0.8, rule=rule)


def test_an_expression_that_does_not_compile_is_named(rng):
    with pytest.raises(InvalidInput, match="regular expression"):
        plan_sparsity(zoo.scores(rng.random(12), SIZES), exclude="(")


def test_a_plan_file_with_a_hole_is_corrupt_and_not_a_plan_with_nan(rng, tmp_path):
    path = plan_sparsity(zoo.scores(rng.random(12), SIZES)).save(tmp_path / "plan.json")
    record = json.loads(path.read_text())
    record["blocks"][0]["value"] = None
    path.write_text(json.dumps(record))
    with pytest.raises(CorruptFile):
        Plan.load(path)


@pytest.mark.parametrize("change", [{"gain": [["x"] * 12]}, {"blocks": [1, 2]}, {"damping": ["x"]}])
def test_a_broken_scores_file_is_corrupt(rng, tmp_path, change):
    path = tmp_path / "scores.json"
    path.write_text(dumps({**zoo.scores(rng.random(12), SIZES).to_dict(), **change}))
    with pytest.raises(CorruptFile):
        Scores.load(path)
    path.write_text(dumps({**zoo.scores(rng.random(12), SIZES).to_dict(), "status": [["ok"]]}))
    with pytest.raises(InvalidInput, match="status"):
        Scores.load(path)
