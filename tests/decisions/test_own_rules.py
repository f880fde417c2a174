"""A function as a rule: what it gives is fitted, or refused by the rule's name where it cannot stand."""

import dataclasses

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.rules import RuleResult
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.verdict import verdict


def later(problem):
    return problem.share + 0.1 * np.linspace(-1, 1, len(problem.blocks))


def test_a_function_is_a_rule_for_every_kind():
    scores = zoo.scores(np.arange(1.0, 6.0))
    plan = lb.plan_sparsity(scores, sparsity=0.5, rule=later)
    assert plan.rule == "later" and (np.diff(plan.values) > 0).all() and plan.budget["spent"] == plan.budget["limit"]
    ranks = lb.plan_ranks(scores, mean_rank=6, rule=lambda problem: np.arange(1.0, 6.0))
    assert ranks.counts.tolist() == [2, 4, 6, 8, 10] and ranks.budget["spent"] == ranks.budget["limit"]
    experts = lb.plan_lora_experts(scores, total=20, rule=lambda p: RuleResult(value=p.low, counts=np.array([8, 6, 3, 2, 1])))
    assert experts.counts.tolist() == [8, 6, 3, 2, 1]
    with pytest.raises(InvalidInput, match="has no option exponent"):
        lb.plan_sparsity(scores, rule=later, exponent=2)
    with pytest.raises(InvalidInput, match="shape"):
        lb.plan_sparsity(scores, rule=lambda p: np.ones(2))


def root(problem, *, damping=None):
    return np.sqrt(problem.weights(damping))


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1.0, 8.0, 1e3, 1e9])
def test_values_are_shares_whose_unit_changes_nothing(unit):
    """4:2:1:1 times .001, 1, 8 and 1000 gave 8,8,8,8 / 14,8,5,5 / 16,8,4,4 / 17,8,4,3."""
    scores = zoo.scores(unit * np.array([16.0, 4.0, 1.0, 1.0]))
    plan = lb.plan_ranks(scores, mean_rank=8, rule=root)
    assert plan.counts.tolist() == [16, 8, 4, 4] and plan.values == pytest.approx([16, 8, 4, 4])
    values = lb.plan_ranks(scores, mean_rank=8, rule=lambda problem: unit * np.array([4.0, 2.0, 1.0, 1.0]))
    assert values.counts.tolist() == [16, 8, 4, 4] and values.rule == "<lambda>"
    experts = lb.plan_lora_experts(scores, total=32, rule=lambda problem: unit * np.array([4.0, 2.0, 1.0, 1.0]))
    assert experts.counts.tolist() == [16, 8, 4, 4]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("terms", [{}, {"min_rank": 0}, {"min_rank": 5}, {"max_rank": 12}, {"fixed": {"layers.0": 3}}])
def test_proportions_hold_between_the_bounds(seed, terms):
    share = np.random.default_rng(seed).gamma(0.5, size=9)
    plan = lb.plan_ranks(zoo.scores(share), mean_rank=8, rule=lambda problem: share, **terms)
    assert plan.budget["spent"] == plan.budget["limit"] and np.abs(plan.counts - plan.values).max() < 1
    low, high, free = terms.get("min_rank", 1), terms.get("max_rank", 64), np.arange(9) >= ("fixed" in terms)
    assert (plan.counts[free] >= low).all() and plan.counts.max() <= high and (plan.counts[~free] == 3).all()
    inside = free & (plan.values > low + 1e-9) & (plan.values < high - 1e-9)
    level = plan.values[inside] / share[inside]
    assert inside.sum() > 1 and level == pytest.approx(np.full(level.size, level[0]))


def test_zeros_are_uniform_and_large_blocks_pay_more_for_a_rank():
    scores = zoo.scores([9.0, 4.0, 1.0], sizes=[64, 192, 320])
    none = lb.plan_ranks(scores, mean_rank=8, rule=lambda problem: np.zeros(3))
    assert none.counts.tolist() == lb.plan_ranks(scores, mean_rank=8, rule="uniform").counts.tolist() == [8, 8, 8]
    plan = lb.plan_ranks(scores, mean_rank=8, rule=root, multiple=2)
    assert plan.values / plan.values[2] == pytest.approx([3, 2, 1]) and set(plan.counts % 2) == {0}
    assert 0 <= plan.budget["limit"] - plan.budget["spent"] < 2 * (64 + 320)
    sized = lb.plan_ranks(scores.blocks, mean_rank=8, rule="size", min_rank=0)
    assert sized.values / sized.values[0] == pytest.approx([1, 3, 5])
    only = lb.plan_ranks(scores, mean_rank=8, rule=lambda problem: np.array([1.0, 0.0, 0.0]), max_rank=16)
    assert only.counts[0] == 16 and only.counts[1:].min() > 1, "what the cap leaves goes to the others"


BROKEN = {
    "cost": ([32, 32, 32, 32], {}, r"The counts of the rule \w+ cost 16,?384\. The budget is 4,?096"),
    "negative": ([-3, 1, 1, 1], {}, "rule broken gave model.layers.0 -3 ranks. They are zero or more"),
    "cap": ([21, 1, 1, 1], {"max_rank": 20}, "rule broken gave model.layers.0 21 ranks. The most that it may have are 20"),
    "side": ([99, 0, 0, 0], {"min_rank": 0, "mean_rank": 30}, "The most that it may have are 64"),
    "floor": ([8, 8, 0, 8], {}, "rule broken gave model.layers.2 0 ranks. The smallest that it may have are 1"),
    "fixed": ([4, 8, 8, 8], {"fixed": {"layers.0": 3}}, "The most that it may have are 3"),
    "multiple": ([8, 6, 8, 8], {"multiple": 4}, "gave model.layers.1 6 ranks. They are multiples of 4"),
    "whole": ([1.5, 1, 1, 1], {}, "gave model.layers.0 1.5 ranks. They are whole numbers"),
    "nan": ([np.nan, 1, 1, 1], {}, "They are whole numbers"),
    "shape": ([8, 8], {}, "rule broken gave counts of shape"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_counts_of_a_rule_keep_budget_and_bounds(case):
    """[99, 99, 99, 99] made a plan that spends 50,688 of 4,096, and 1.5 was cut to 1."""
    counts, terms, words = BROKEN[case]

    def broken(problem):
        return RuleResult(value=np.ones(4), counts=np.array(counts))

    with pytest.raises(InvalidInput, match=words):
        lb.plan_ranks(zoo.scores([4.0, 2.0, 1.0, 1.0]), rule=broken, **{"mean_rank": 8, **terms})


def test_what_a_kind_does_not_read_of_a_result_is_refused():
    scores, half = zoo.scores([4.0, 2.0, 1.0, 1.0]), np.full(4, 0.5)
    for result, words in (
        (RuleResult(value=half, counts=np.ones(4)), "gave counts, which rules of ranks and experts have"),
        (RuleResult(value=half * 3, target=24576), "gave model.layers.0 1.5. Its bounds are 0 and 0.7"),
        (RuleResult(value=half, target=9000), "prune 8,192 parameters. They must prune 9,000"),
        (RuleResult(value=half / 2, target=4096), "prune 4,096 parameters. They must prune 8,192"),
    ):
        with pytest.raises(InvalidInput, match=words):
            lb.plan_sparsity(scores, sparsity=0.5, rule=lambda problem, result=result: result)
    with pytest.raises(InvalidInput, match="gave a target, which rules of sparsity have"):
        lb.plan_ranks(scores, mean_rank=8, rule=lambda problem: RuleResult(value=half, counts=np.full(4, 8), target=4096))
    with pytest.raises(InvalidInput, match="rule below gave model.layers.1 the value -1"):
        lb.plan_ranks(scores, mean_rank=8, rule=below)


def below(problem):
    return np.array([1.0, -1.0, 1.0, 1.0])


def test_what_a_rule_says_stands_in_the_plan():
    """What a rule without counts said was dropped, and so was its certificate."""
    from layerbudget.solvers import allocate

    def solved(problem):
        options = {"lower": problem.low, "upper": problem.high, "spend": "exactly"}
        solution = allocate(problem.weights(), problem.amount, problem.target, **options)
        return RuleResult(value=solution.value, solution=solution, payload={"flat_scores": 0.25})

    scores = zoo.scores([4.0, 2.0, 1.0, 1.0])
    plan, same = lb.plan_ranks(scores, mean_rank=8, rule=solved), lb.plan_ranks(scores, mean_rank=8)
    assert plan.counts.tolist() == same.counts.tolist() and plan.certificate["status"] == same.certificate["status"]
    assert plan.payload.flat_scores == 0.25 and plan.payload.rounding["exact"]
    fitted = lb.plan_ranks(scores, mean_rank=8, rule=lambda problem: RuleResult(value=np.ones(4), payload={"flat_scores": 0.5}))
    assert fitted.payload.flat_scores == 0.5 and fitted.payload.rounding is None


@pytest.mark.parametrize("planned", ["ranks", "sparsity"])
def test_what_a_plan_has_no_field_for_is_refused(planned):
    def noting(problem):
        return RuleResult(value=np.full(4, 0.5), payload={"note": "mine"})

    kind = {"ranks": lb.plan_ranks, "sparsity": lb.plan_sparsity}[planned]
    budget = {"ranks": {"mean_rank": 8}, "sparsity": {"sparsity": 0.5}}[planned]
    with pytest.raises(InvalidInput, match=f"rule noting gave a field note. A plan of {planned} has .*flat_scores"):
        kind(zoo.scores([4.0, 2.0, 1.0, 1.0]), rule=noting, **budget)


@pytest.mark.parametrize("rule", ["size", "uniform", root])
def test_a_rule_without_a_program_claims_no_optimum(rule):
    """'This rule solves no program' stood before 'Whole numbers, proven optimal: utility 8.4034'."""
    plan = lb.plan_ranks(zoo.scores([9.0, 4.0, 1.0], sizes=[64, 192, 320]), mean_rank=7.5, rule=rule)
    said = " ".join(explain_plan(plan)["sentences"])
    assert "solves no program" in said and "optimal" not in said and "utility" not in said


@pytest.mark.parametrize("rule", ["uniform", "size", root])
def test_a_budget_above_the_caps_is_refused_with_what_can_be_done(rule):
    scores = zoo.scores([4.0, 2.0, 1.0, 1.0])
    with pytest.raises(InfeasibleBudget, match=r"at most 2,?048. Lower the budget to 2,048, or raise max_rank") as error:
        lb.plan_ranks(scores, mean_rank=8, max_rank=4, rule=rule)
    assert "at_most" not in str(error.value) and "spend" not in error.value.remedy
    with pytest.raises(InfeasibleBudget, match=r"Lower the budget to [0-9,]+\.$"):
        lb.plan_ranks(scores, mean_rank=65, rule=rule)


def gains(rows=64):
    """Scores with the gain of every further rank, of blocks whose gains fall at their own rate."""
    curves = [(scale * np.exp(-np.arange(32) / decay)).tolist() for scale, decay in ((8, 9), (4, 4), (1, 3), (1, 2))]
    plain = zoo.scores([sum(curve) for curve in curves], data={"samples": rows})
    return dataclasses.replace(plain, extra={"increments": [curves]})


@pytest.mark.parametrize("rule", ["mdl", "size", root])
def test_measured_gains_say_what_uniform_has_beside_any_rule(rule):
    """Under another rule than by-rank it said that the scores do not say what uniform would gain."""
    scores = gains()
    curves = np.array(scores.extra["increments"][0])
    plan = lb.plan_ranks(scores, mean_rank=6, rule=rule)
    had = sum(curve[:n].sum() for curve, n in zip(curves, plan.counts, strict=True))
    assert plan.payload.uniform_share == pytest.approx(curves[:, :6].sum() / had)
    assert "do not say" not in verdict(plan) and (rule == "size" or "of the plan's gain" in verdict(plan))
    few = lb.plan_ranks(gains(rows=8), mean_rank=6, rule=root)
    assert few.payload.scored_rows == 8 and "8 scored rows" in verdict(few)
    row = lb.sweep(scores, kind="ranks", budgets=[6], **({"rule": rule}))["rows"][0]
    assert row["value"] == pytest.approx(had) and row["uniform_share"] == plan.payload.uniform_share


def test_beyond_the_measured_ranks_nothing_is_known_of_uniform():
    plan = lb.plan_ranks(gains(), mean_rank=16, rule=lambda problem: np.array([5.0, 1.0, 1.0, 1.0]))
    assert plan.counts[0] > 32 and plan.payload.uniform_share is None and plan.payload.at_measured == {"model.layers.0": 32}
    assert "score with --largest 64" in " ".join(explain_plan(plan)["sentences"])
    even = lb.plan_ranks(gains(), mean_rank=6.5, rule="uniform")
    assert set(even.counts.tolist()) == {6, 7} and verdict(even).startswith("Verdict: ranks from 6 to 7: this is uniform")
