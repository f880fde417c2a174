"""A function as a rule."""

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.rules import RuleResult
from layerbudget.errors import InvalidInput


def later(problem):
    return problem.share + 0.1 * np.linspace(-1, 1, len(problem.blocks))


def test_a_function_is_a_rule_for_every_kind():
    scores = zoo.scores(np.arange(1.0, 6.0))
    plan = lb.plan_sparsity(scores, sparsity=0.5, rule=later)
    assert plan.rule == "later" and (np.diff(plan.values) > 0).all() and plan.budget["spent"] == plan.budget["limit"]
    ranks = lb.plan_ranks(scores, mean_rank=4, rule=lambda problem: np.arange(1.0, 6.0))
    assert (np.diff(ranks.counts) >= 0).all() and ranks.budget["spent"] <= ranks.budget["limit"]
    experts = lb.plan_lora_experts(scores, total=20, rule=lambda p: RuleResult(value=p.low, counts=np.array([8, 6, 3, 2, 1])))
    assert experts.counts.tolist() == [8, 6, 3, 2, 1]
    with pytest.raises(InvalidInput, match="has no option exponent"):
        lb.plan_sparsity(scores, rule=later, exponent=2)
    with pytest.raises(InvalidInput, match="shape"):
        lb.plan_sparsity(scores, rule=lambda p: np.ones(2))
