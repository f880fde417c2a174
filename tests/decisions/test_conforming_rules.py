"""What every rule keeps to; with ``LAYERBUDGET_RULES="ranks my.py:root"`` (kind and name) in the environment, yours too."""

import dataclasses
import os

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.rules import find_rule, rules_of
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.plan import Plan

VALUES = np.array([7.0, 1.0, 3.0, 0.5, 2.0, 5.0])
K = len(VALUES)
PLANNERS = {"sparsity": lb.plan_sparsity, "lora-experts": lb.plan_lora_experts, "ranks": lb.plan_ranks}
BUDGETS = {"sparsity": {"sparsity": 0.4}, "lora-experts": {"total": 60}, "ranks": {"mean_rank": 10}}
_yours = os.environ.get("LAYERBUDGET_RULES", "").split()
CASES = [(kind, name) for kind in PLANNERS for name in rules_of(kind)] + list(zip(_yours[::2], _yours[1::2], strict=True))
OF_EVERY_KIND = pytest.mark.parametrize(("kind", "name"), CASES)


def scores(values=VALUES, unit=1.0, sizes=None):
    """One number per block, and the gain of every further rank, which falls more slowly where the number is large."""
    plain = zoo.scores(unit * np.asarray(values), sizes)
    rows = [(unit * v * np.exp(-np.arange(64) / (4 + v))).tolist() for v in values]
    return dataclasses.replace(plain, extra={"increments": [rows]})


def plan(kind, name, record=None, **options):
    """A plan by a rule; the rules of measured curves get curves that bend by the values."""
    record = scores() if record is None else record
    if name.startswith("calibrated"):
        x = np.linspace(0, 0.95, 20)
        options["curves"] = {n: (x.tolist(), (v * x**2).tolist()) for n, v in zip(record.names, record.values(), strict=True)}
    return PLANNERS[kind](record, rule=name, **{**BUDGETS[kind], **options})


@OF_EVERY_KIND
def test_the_unit_of_the_scores_changes_nothing(kind, name):
    expected = plan(kind, name)
    for unit in (1e-6, 1e6):
        again = plan(kind, name, scores(unit=unit))
        assert again.counts.tolist() == expected.counts.tolist() and again.values == pytest.approx(expected.values)


@OF_EVERY_KIND
def test_the_total_is_spent_and_never_exceeded(kind, name):
    for sizes in (None, [64, 320, 192, 64, 128, 256]):
        record = scores(sizes=sizes)
        made = plan(kind, name, record)
        price = record.numel / 64 + 64 if kind == "ranks" else np.ones(K)
        assert made.budget["spent"] == pytest.approx(float(price @ made.counts))
        assert (
            made.budget["spent"] <= made.budget["limit"] and made.counts.min() >= 0 and made.rule == find_rule(kind, name).name
        )
        step = price.max() if sizes is not None and kind == "ranks" else 0.5
        assert made.budget["limit"] - made.budget["spent"] < step


@OF_EVERY_KIND
def test_floors_caps_and_fixed_blocks_hold(kind, name):
    """A published rule that cannot keep them says so by its name."""
    bounds = {
        "sparsity": {"min_sparsity": 0.3, "max_sparsity": 0.5},
        "lora-experts": {"min_experts": 7, "max_experts": 13},
        "ranks": {"min_rank": 7, "max_rank": 13},
    }[kind]
    low, high = bounds.values()
    fixed = 0.45 if kind == "sparsity" else 9
    for terms in (bounds, {"fixed": {"layers.1": fixed}}, {**bounds, "fixed": {"layers.1": fixed}}):
        try:
            made = plan(kind, name, **terms)
        except InfeasibleBudget as error:
            assert kind == "lora-experts" and f"rule {name} gives" in str(error) and error.remedy
            continue
        got = made.counts / made.numel if kind == "sparsity" else made.counts
        if bounds.items() <= terms.items():
            assert got.min() >= low - 1e-3 and got.max() <= high + 1e-3
        if "fixed" in terms:
            assert got[1] == pytest.approx(fixed, abs=1e-3)
        assert made.budget["limit"] - made.budget["spent"] < 1


@pytest.mark.parametrize("name", [name for kind, name in CASES if kind == "ranks"])
def test_ranks_are_multiples(name):
    made = plan("ranks", name, multiple=4, min_rank=0)
    assert set(made.counts % 4) == {0} and 0 <= made.budget["limit"] - made.budget["spent"] < 4 * 128


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, n in CASES if find_rule(k, n).control])
def test_a_control_is_its_rule_on_shuffled_values(kind, name):
    rule = "mdl" if name == "permuted" else name.removesuffix("-permuted")
    made = plan(kind, rule)
    orders = []
    for seed in range(3):
        control = plan(kind, name, seed=seed)
        assert sorted(control.values) == pytest.approx(sorted(made.values)) and control.hyperparameters["seed"] == seed
        orders.append(tuple(control.counts))
    assert len(set(orders)) > 1 and any(order != tuple(made.counts) for order in orders)
    assert find_rule(kind, rule).options.keys() | {"seed"} == find_rule(kind, name).options.keys()


@OF_EVERY_KIND
def test_what_it_reads_is_said_and_nothing_else_is_taken(kind, name, tmp_path):
    known = find_rule(kind, name)
    assert known.summary and not known.summary.endswith(".")
    with pytest.raises(InvalidInput, match=f"The rule {known.name} has no option unheard"):
        plan(kind, name, unheard=1)
    made = plan(kind, name)
    assert Plan.load(made.save(tmp_path / "plan.json")) == made
    said = " ".join(lb.explain_plan(made)["sentences"])
    assert f"The rule {known.name} decides" in said
    assert bool(made.certificate) == ("KKT residual" in said) == ("solves no program" not in said and name[:7] != "by-rank")
