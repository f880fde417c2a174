"""Rules and estimators of one's own: a function and a decorator; what they do not read is refused."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest
from tests import zoo

from layerbudget.decisions.lora_experts.plan import plan_lora_experts
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.decisions.rules import RULES, RuleResult, find_rule, rule, rules_of
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import partition
from layerbudget.scores import Scores
from layerbudget.sensitivity import estimators as registry
from layerbudget.sensitivity.gain import score
from layerbudget.sensitivity.noise import subtract_floor


@pytest.fixture
def own():
    """Rules that are gone after the test."""
    rules_of("sparsity")
    with contextlib.ExitStack() as stack:
        for kind in ("sparsity", "lora-experts", "ranks"):
            stack.enter_context(RULES[kind].kept())
        yield


def test_a_rule_of_ones_own(own):
    @rule("sparsity", "later", summary="grows with depth")
    def later(problem, *, slope=0.2):
        return RuleResult(value=problem.share + slope * np.linspace(-1, 1, len(problem.blocks)))

    @rule("ranks", "first-only")
    def first(problem, *, damping=None):
        return (np.arange(len(problem.blocks)) == 0) * 8.0

    assert "later" in rules_of("sparsity") and "later" not in rules_of("ranks")
    scores = zoo.scores([3, 2, 1, 1])
    plan = plan_sparsity(scores, sparsity=0.5, rule="later", fixed={"model.layers.0": 0.3})
    assert (
        plan.rule == "later" and plan.budget["spent"] == plan.budget["limit"] and plan.values[0] == pytest.approx(0.3, abs=1e-3)
    )
    assert np.diff(plan.values).min() > 0 and plan.hyperparameters["slope"] == 0.2
    steep = plan_sparsity(scores, sparsity=0.5, rule="later", slope=0.1)
    assert np.ptp(steep.values) == pytest.approx(0.2, abs=1e-3)
    with pytest.raises(InvalidInput, match="later has no option exponent"):
        plan_sparsity(scores, sparsity=0.5, rule="later", exponent=2.0)
    with pytest.raises(InvalidInput, match="has no option slop"):
        plan_sparsity(scores, sparsity=0.5, rule="later", slop=0.1)
    ranks = plan_ranks(scores, mean_rank=4, rule="first-only")
    assert ranks.counts[0] == ranks.counts.max() and ranks.budget["spent"] <= ranks.budget["limit"]
    with pytest.raises(InvalidInput, match="spend of the rule mdl is 'maybe'. It is exactly, at_most, at_least."):
        plan_sparsity(scores, spend="maybe")
    with pytest.raises(InvalidInput, match="It is one of"):
        find_rule("sparsity", "x")


def test_options_that_are_not_read_are_not_recorded():
    for plan in (
        plan_sparsity(zoo.scores([3, 2]), rule="uniform"),
        plan_lora_experts(zoo.scores([3, 2]), total=8, rule="uniform"),
    ):
        recorded = set(plan.hyperparameters)
        assert not recorded & {"exponent", "penalty", "utility", "spend", "method", "smoothing", "damping", "seed"}


@pytest.mark.parametrize(
    ("maker", "options"),
    [
        (plan_sparsity, {"rule": "uniform", "exponent": 2.0}), (plan_sparsity, {"rule": "alphapruning", "penalty": "power"}),
        (plan_lora_experts, {"total": 8, "rule": "mola-2468", "utility": "power"}),
        (plan_lora_experts, {"total": 8, "rule": "alphalora", "smoothing": 0.1}),
        (plan_lora_experts, {"total": 8, "rule": "uniform", "spend": "at_most"}),
        (plan_ranks, {"mean_rank": 4, "rule": "uniform", "utility": "power"}),
    ],
)  # fmt: skip
def test_options_under_rules_that_do_not_read_them(maker, options):
    with pytest.raises(InvalidInput, match="has no option"):
        maker(zoo.scores([3, 2, 1, 1]), **options)


def test_the_excess_of_a_rank_gain_moves_a_plan_by_rank():
    """The increments were left as they are, so the excess planned as the raw gain."""
    scores, curve = zoo.scores([3.0, 2.0]), np.linspace(2, 0.1, 16)
    floors = [np.full(16, 0.05).tolist(), np.full(16, 0.9).tolist()]
    extra = {"increments": [[curve.tolist(), curve.tolist()]], "increments_floor": [floors]}
    raw = dataclasses.replace(scores, extra=extra, noise_floor=((0.1, 1.5),))
    less = subtract_floor(raw)
    assert plan_ranks(raw, mean_rank=6, rule="by-rank").counts.tolist() == [6, 6]
    counts = plan_ranks(less, mean_rank=6, rule="by-rank").counts
    assert counts[0] > 6 > counts[1]
    assert all(np.diff(row).max() <= 1e-12 and min(row) >= 0 for row in less.extra["increments"][0])


def test_a_target_equal_to_its_cap_is_feasible_and_the_default_cap_has_room():
    """``--sparsity 0.7`` was refused: 11469 parameters are to go and the caps allow 11468.8."""
    scores = zoo.scores([30, 30, 6.5, 6.5])
    for target in (0.7, 0.71, 0.9, 0.99):
        plan = plan_sparsity(scores, sparsity=target)
        assert plan.counts.sum() == pytest.approx(target * scores.numel.sum(), abs=1) and np.ptp(plan.values) > 0
        held = plan_sparsity(scores, sparsity=target, max_sparsity=target)
        assert np.ptp(held.counts) <= 1 and held.counts.sum() > target * scores.numel.sum() - len(scores.names)
    assert plan_sparsity(scores, sparsity=1.0).counts.sum() == scores.numel.sum()


def test_an_estimator_of_ones_own():
    model = zoo.speaker("llama")
    with registry.ESTIMATORS.kept():

        @registry.estimator("weight-norm", summary="squared norm of the weights", data=False)
        def weight_norm(model, data, blocks, *, power=2.0):
            weights = dict(model.named_parameters())
            found = {b.name: sum(weights[f"{m.name}.weight"].norm().item() ** power for m in b.modules) for b in blocks}
            return Scores.from_values(blocks, found, estimator="weight-norm", unit="squared weights")

        assert registry.ESTIMATORS.find("weight-norm").options["power"].default == 2.0
        found = score(model, None, partition(model), "weight-norm", power=1.0)
        assert min(found.values()) > 0 and found.model["computation"]["dtype"] == "float32"
        with pytest.raises(InvalidInput, match="weight-norm has no option damping"):
            score(model, None, partition(model), "weight-norm", damping=0.1)
    with pytest.raises(InvalidInput, match="There is no estimator"):
        registry.ESTIMATORS.find("weight-norm")


@pytest.mark.parametrize(
    ("kind", "planner", "budget"),
    [
        ("sparsity", plan_sparsity, {"sparsity": 0.5}),
        ("lora-experts", plan_lora_experts, {"total": 40}),
        ("ranks", plan_ranks, {"mean_rank": 4}),
    ],
)
def test_a_default_that_the_help_says_is_the_one_that_holds(kind, planner, budget):
    """Where a setting has no value of its own, as the constants of the programs and the widths of maps."""
    scores, tried = zoo.scores([5, 3, 2, 1, 1]), set()
    for name, known in rules_of(kind).items():
        said = {n: re.match(r"default: ([\d.]+|relative)[;,]", o.help) for n, o in known.options.items()}
        for option, found in said.items():
            if not found or "calibrated" in name:
                continue
            given = found[1] if found[1] == "relative" else float(found[1])
            plain, same = (planner(scores, rule=name, **budget, **own) for own in ({}, {option: given}))
            assert plain.values.tolist() == same.values.tolist() and plain.certificate == same.certificate, (name, option)
            tried.add(option)
    assert tried == ({"width", "bits", "eta", "units"} if kind == "sparsity" else {"alpha", "gamma", "units"})
