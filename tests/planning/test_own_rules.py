"""A function as a rule, and a plan from values of one's own."""

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.errors import InvalidInput
from layerbudget.planning.rule import Decision


def later(problem):
    return problem.share + 0.1 * np.linspace(-1, 1, len(problem.blocks))


def test_a_function_is_a_rule_for_every_kind():
    scores = zoo.scores(np.arange(1.0, 6.0))
    plan = lb.plan_sparsity(scores, sparsity=0.5, rule=later)
    assert plan.rule == "later" and (np.diff(plan.values) > 0).all() and plan.budget["spent"] == plan.budget["limit"]
    ranks = lb.plan_ranks(scores, mean_rank=4, rule=lambda problem: np.arange(1.0, 6.0))
    assert (np.diff(ranks.counts) >= 0).all() and ranks.budget["spent"] <= ranks.budget["limit"]
    experts = lb.plan_experts(scores, total=20, rule=lambda p: Decision(value=p.low, counts=np.array([8, 6, 3, 2, 1])))
    assert experts.counts.tolist() == [8, 6, 3, 2, 1]
    with pytest.raises(InvalidInput, match="has no option exponent"):
        lb.plan_sparsity(scores, rule=later, exponent=2)
    with pytest.raises(InvalidInput, match="shape"):
        lb.plan_sparsity(scores, rule=lambda p: np.ones(2))


def test_a_plan_from_values_is_applied_and_saved(tmp_path, mistral, data):
    blocks = lb.partition(mistral)
    wanted = {b.name: 0.2 + 0.1 * i for i, b in enumerate(blocks)}
    plan = lb.Plan.from_values(blocks, wanted)
    assert plan.rule == "given" and plan.values.tolist() == pytest.approx(list(wanted.values()))
    receipt = lb.prune(mistral, plan, method="magnitude")
    assert receipt.sparsity == pytest.approx(plan.sparsity, abs=1e-3)
    assert lb.Plan.load(plan.save(tmp_path / "p.json")).digest == plan.digest
    ranks = lb.Plan.from_values(blocks, [4] * len(blocks), kind="ranks")
    assert ranks.budget["spent"] == lb.plan_ranks(blocks, mean_rank=4, rule="uniform").budget["spent"]


@pytest.mark.parametrize(
    ("values", "kind", "match"),
    [
        ([0.5], "sparsity", "1 values for 3"),
        ({"x": 1.0}, "sparsity", "unknown blocks"),
        ([0.1, 0.2, 1.5], "sparsity", "lies in"),
        ([1, 2, 2.5], "ranks", "counted"),
        ([1, 1, np.nan], "experts", "finite"),
        ([1, 1, 1], "shapes", "more than one"),
        ([1, 1, 1], "windows", "kind of plan"),
    ],
)
def test_values_outside_their_domain(values, kind, match, mistral):
    with pytest.raises(InvalidInput, match=match):
        lb.Plan.from_values(lb.partition(mistral), values, kind=kind)
