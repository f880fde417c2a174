"""Constants, utilities and penalties from a plan's options, gains in bits."""

import math

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.errors import InvalidInput, ModelMismatch
from layerbudget.reporting.explain import codelengths
from layerbudget.solvers import allocate, sparsify


@pytest.fixture
def scores():
    return zoo.scores(np.arange(1.0, 6.0))


def test_constants_reach_the_program_and_the_record(scores):
    plan = lb.plan_sparsity(scores, sparsity=0.3, spend="at_least", bits=9.0, eta=9.0, max_sparsity=0.9)
    truth = sparsify(scores.weights(), scores.numel, sparsity=0.3, spend="at_least", bits=9.0, eta=9.0, max_sparsity=0.9)
    assert plan.values == pytest.approx(truth.value) and truth.slack > 0  # the bits alone prune more than asked for
    assert plan.budget["spent"] == pytest.approx(truth.spent, abs=1) and plan.certificate["status"] == "slack"
    assert {k: plan.hyperparameters[k] for k in ("bits", "eta", "spend")} == {"bits": 9.0, "eta": 9.0, "spend": "at_least"}
    assert "eta" not in lb.plan_sparsity(scores).hyperparameters  # recorded where it was given


def test_the_literal_program_of_the_paper_is_degenerate(scores):
    plan = lb.plan_sparsity(scores, sparsity=0.5, max_sparsity=0.51, units="literal", spend="at_least")
    assert plan.values == pytest.approx(np.full(5, 0.51)) and plan.certificate["status"] == "degenerate"
    nothing = lb.plan_ranks(scores, mean_rank=4, min_rank=0, units="literal", spend="at_most", alpha=0.5, gamma=0.9)
    assert not nothing.counts.any() and nothing.certificate["status"] == "degenerate"
    q, cost = scores.weights(), np.array([b.numel for b in scores.blocks], dtype=float)
    assert allocate(q, cost, 1e9, units="literal").value == pytest.approx(np.zeros(5))


def test_constants_are_inert_where_the_budget_binds(scores):
    a, b = (lb.plan_lora_experts(scores, total=30, alpha=x, gamma=y) for x, y in ((0.5, 0.9), (2.0, 7.0)))
    assert (a.counts == b.counts).all() and set(a.certificate["inert"]) == {"alpha", "gamma"}
    with pytest.raises(InvalidInput, match="has no option gamma"):
        lb.plan_lora_experts(scores, total=30, rule="uniform", gamma=2.0)
    with pytest.raises(InvalidInput, match="at_least"):
        lb.plan_sparsity(scores, spend="at_most")


@pytest.mark.parametrize(
    ("program", "options"), [("lora-experts", {"utility": "power", "max_experts": 9}), ("sparsity", {"penalty": "log-barrier"})]
)
def test_transfer_bounds_for_every_utility_and_penalty(scores, program, options):
    other = zoo.scores(np.array([2.0, 1.0, 5.0, 4.0, 3.0]))
    money = {"budget": "20 experts"} if program == "lora-experts" else {"sparsity": 0.4, "max_sparsity": 0.6}
    t = lb.transfer_scores(scores, other, program=program, **money, **options)
    assert 0 < t.regret <= t.sharp_bound <= t.bound
    foreign = {"penalty": "log-barrier"} if program == "lora-experts" else {"utility": "power"}
    with pytest.raises(InvalidInput, match="does not read"):
        lb.transfer_scores(scores, other, program=program, **money, **foreign)


def test_bits_of_codelength():
    fields = {"unit": "nats of average loss", "data": {"samples": 6, "length": 10}}
    scores, other = (zoo.scores(v, **fields) for v in ([0.3, 0.2, 0.1], [0.3, 0.2, 0.2]))
    plan, n = lb.plan_sparsity(scores), 6 * 9
    found = codelengths(plan, scores)
    assert found["tokens"] == n
    for name, gain in zip(scores.names, scores.values(), strict=True):
        assert found["bits"][name] == pytest.approx(n * gain / (2 * math.log(2)))
    assert found["per_parameter"][scores.names[0]] == found["bits"][scores.names[0]] / scores.blocks[0].numel
    text = " ".join(lb.explain_plan(plan, scores).sentences)
    assert "bits of codelength" in text and "bits of codelength" not in " ".join(lb.explain_plan(plan).sentences)
    assert codelengths(plan, scores, 1000)["bits"][scores.names[0]] == pytest.approx(300 / (2 * math.log(2)))
    with pytest.raises(ModelMismatch):
        codelengths(plan, other)
    norm = zoo.scores([3.0, 2.0, 1.0])
    with pytest.raises(InvalidInput, match="not nats of loss"):
        codelengths(lb.plan_sparsity(norm), norm)
