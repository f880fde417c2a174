"""plan_sparsity: every rule meets the same recounted budget."""

import json
import re

import numpy as np
import pytest
from tests import zoo

from layerbudget.canonical import dumps
from layerbudget.decisions.rules import rules_of
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CorruptFile, InfeasibleBudget, InvalidInput, UnknownBlock
from layerbudget.plan import Plan
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


SMOOTHED = [
    0.0328, 0.5723, 0.7624, 0.7378, 0.6498, 0.6838, 0.6919, 0.8031, 0.8723, 0.8932, 0.9228, 0.9439, 0.9428, 0.9332, 0.8999,
    0.8894, 0.8875, 0.9048, 0.8685, 0.8095, 0.7992, 0.8360, 0.8801, 0.9501, 0.9468, 0.9160, 0.8693, 0.8342, 0.8020, 0.7901,
    0.8010, 0.8401,
]  # fmt: skip


def mapped(metric, sparsity=0.5, rule="layerif", sizes=None, **options):
    """Values of a published map; ``layerif`` prunes what has the larger metric, ``owl`` the smaller."""
    scores = zoo.scores(metric, sizes, orientation="redundancy" if rule == "layerif" else "gain")
    return plan_sparsity(scores, sparsity=sparsity, rule=rule, **options).values


@pytest.mark.parametrize(("width", "first", "largest"), [(0.1, 0.4207, 0.5141), (0.3, 0.2894, 0.5375)])
def test_published_layerif_sparsities(width, first, largest):
    rho = mapped(SMOOTHED, width=width)
    assert rho[0] == pytest.approx(first, abs=5e-5) and rho.max() == pytest.approx(largest, abs=5e-5)
    assert np.argmax(rho) == 23 and rho.mean() == pytest.approx(0.5)


def test_owl_width_mean_and_shift(rng):
    outliers, uneven = rng.random(32), list(range(1, 33))
    rho = mapped(outliers, rule="owl")
    assert np.ptp(rho) == pytest.approx(0.16) and rho.mean() == pytest.approx(0.5) and np.argmin(rho) == np.argmax(outliers)
    assert np.allclose(mapped(outliers, 0.4, rule="owl"), rho - 0.1)
    ours = mapped(outliers, rule="owl", sizes=uneven, max_sparsity=0.55)
    assert ours.max() <= 0.55 and np.array(uneven) @ ours == pytest.approx(0.5 * sum(uneven))


def test_flat_metrics_give_the_uniform_plan_and_caps_redistribute_what_they_cut_off():
    for rule in ("layerif", "owl"):
        assert np.allclose(mapped([2.0, 2.0, 2.0], 0.3, rule, [1, 5, 9]), 0.3)
    rho = mapped([0.0, 1.0, 5.0], 0.7, width=0.5, max_sparsity=0.8)
    assert rho.max() <= 0.8 and rho.mean() == pytest.approx(0.7, abs=1e-4)
    assert mapped([1.0] * 3, rule="size", sizes=[1, 2, 3], max_sparsity=0.6)[2] == 0.6
    with pytest.raises(InfeasibleBudget, match="does not fit the caps"):
        mapped([1.0, 2.0], 0.9, "uniform", max_sparsity=0.8)


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
    with pytest.raises(InfeasibleBudget, match="Lower min_sparsity to 0.5, or prune 0.6 or more"):
        plan_sparsity(scores, sparsity=0.5, min_sparsity=0.6)
    for works in ({"sparsity": 0.5, "min_sparsity": 0.5}, {"sparsity": 0.6, "min_sparsity": 0.6}):
        assert plan_sparsity(scores, **works).budget["spent"] >= int(works["sparsity"] * scores.numel.sum())


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


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (("blocks", 3), {"value": 0.9}, r"layers\.3 has the value 0\.9 and the count [\d,]+ of .*: they contradict each other"),
        (("budget",), {"spent": 5}, r"spends 5 parameters, and its counts are [\d,]+ in all: they contradict each other"),
        ((), {"colour": 1}, "has the key colour, which is not read"),
        (("budget",), {"limits": 5}, "The part budget of this plan does not read: the key limits is not read"),
        (("extra",), {"colour": 1}, "The part extra of this plan does not read: the key colour is not read"),
    ],
)
def test_a_plan_that_contradicts_itself_is_corrupt(rng, tmp_path, place, change, said):
    path = plan_sparsity(zoo.scores(rng.random(12), SIZES)).save(tmp_path / "plan.json")
    record = part = json.loads(path.read_text())
    for key in place:
        part = part[key]
    part |= change
    path.write_text(json.dumps(record | {"verdict": "as --json prints it"}))
    with pytest.raises(CorruptFile, match=said):
        Plan.load(path)


@pytest.mark.parametrize("change", [{"value": 4.0}, {"value": -0.1}, {"count": 10**9}])
def test_a_plan_that_prunes_more_than_there_is_is_corrupt(rng, tmp_path, change):
    """Also a plan of ranks whose kind was changed."""
    path = plan_sparsity(zoo.scores(rng.random(12), SIZES)).save(tmp_path / "plan.json")
    record = json.loads(path.read_text())
    record["blocks"][3] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(CorruptFile, match=re.escape(record["blocks"][3]["name"])):
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
