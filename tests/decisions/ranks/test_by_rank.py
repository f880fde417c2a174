"""Ranks by the gain of every further rank, from scores as a file would hold them."""

import dataclasses

import numpy as np
import pytest

from layerbudget.decision import decision_of
from layerbudget.decisions.ranks.payload import SmallerReserve
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.errors import CorruptFile, InfeasibleBudget, InvalidInput
from layerbudget.models.loading import blocks_from_config
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.sweep import diff_plans, sweep
from layerbudget.reporting.verdict import verdict
from layerbudget.scores import Scores

CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def scores(rng):
    """Matrices of two layers with falling increments of their own scale and decay."""
    blocks = blocks_from_config(CONFIG, by="linear")
    curves = [rng.gamma(2.0) * np.exp(-np.arange(32) / rng.uniform(2, 12)) for _ in blocks]
    plain = Scores.from_values(blocks, {b.name: float(c.sum()) for b, c in zip(blocks, curves, strict=True)})
    return dataclasses.replace(plain, extra={"increments": [[c.tolist() for c in curves]]})


def test_the_plan_says_what_uniform_ranks_would_have(scores):
    curves = np.array(scores.extra["increments"][0])
    plan = plan_ranks(scores, mean_rank=6, rule="by-rank", min_rank=0)
    had = sum(c[:n].sum() for c, n in zip(curves, plan.counts, strict=True))
    assert plan.payload.uniform_share == pytest.approx(curves[:, :6].sum() / had) and plan.payload.uniform_share < 1
    half = plan_ranks(scores, mean_rank=6.5, rule="by-rank", min_rank=0)
    worth = (curves[:, :6].sum() + curves[:, :7].sum()) / 2
    assert half.payload.uniform_share == pytest.approx(worth / half.payload.rounding["value"])
    said = " ".join(explain_plan(plan)["sentences"])
    assert f"Uniform ranks with as many parameters have {plan.payload.uniform_share:.1%} of the plan's gain" in said
    assert plan_ranks(scores, mean_rank=6, min_rank=0).rule == "by-rank", "the rule follows the scores"
    assert plan_ranks(dataclasses.replace(scores, extra={}), mean_rank=6).rule == "mdl"
    assert plan_ranks(scores, mean_rank=6, rule="by-rank", max_rank=4).payload.uniform_share == pytest.approx(1.0)
    assert plan_ranks(scores, mean_rank=6, rule="by-rank-permuted", seed=1).payload.uniform_share is None


@pytest.mark.parametrize(
    "terms",
    [
        {"fixed": {"layers.0.self_attn": 0}, "min_rank": 0},
        {"fixed": {"layers.1.mlp": 20}, "min_rank": 0},
        {"max_rank": 9},
        {"min_rank": [1] * 7 + [8] * 7},
        {"max_rank": [32] * 7 + [2] * 7, "multiple": 2},
    ],
)
def test_uniform_ranks_are_those_of_the_rule_uniform_under_the_same_terms(scores, terms):
    """What blocks that are fixed or capped do not take goes to the others, and what floors take is paid by them."""
    plan, uniform = (plan_ranks(scores, mean_rank=6, rule=rule, **terms) for rule in ("by-rank", "uniform"))
    curves = np.array(scores.extra["increments"][0])
    had = sum(c[:n].sum() for c, n in zip(curves, uniform.counts, strict=True))
    assert abs(uniform.budget["spent"] / plan.budget["spent"] - 1) < 0.02
    assert plan.payload.uniform_share == pytest.approx(had / plan.payload.rounding["value"], rel=0.02)
    alike = dataclasses.replace(scores, extra={"increments": [[[1.0 / (r + 1) for r in range(32)]] * len(scores.names)]})
    even = plan_ranks(alike, mean_rank=6, rule="by-rank", **terms)
    assert even.payload.uniform_share > 0.97, "a plan that is uniform has what uniform has"


def test_verdicts_stand_at_their_thresholds(scores):
    """Nearly equal curves: uniform is recommended; a cap that keeps 95 % of the gain is named with what it keeps."""
    level = np.exp(-np.arange(32) / 8.0)
    alike = [(level * (1 + 0.01 * k)).tolist() for k in range(len(scores.names))]
    plan = plan_ranks(dataclasses.replace(scores, extra={"increments": [alike]}), mean_rank=6)
    assert plan.payload.uniform_share > 0.95 and "take uniform" in " ".join(explain_plan(plan)["sentences"])
    steep = [(np.exp(-np.arange(32) / (1 if k % 2 else 3)) * (20 if k == 0 else 1)).tolist() for k in range(len(scores.names))]
    wide = plan_ranks(dataclasses.replace(scores, extra={"increments": [steep]}), mean_rank=5, min_rank=1)
    smaller = wide.payload.smaller_reserve
    assert wide.counts.max() > 8 and (smaller.max_rank, smaller.reserved) == (8, 16)
    capped = plan_ranks(dataclasses.replace(scores, extra={"increments": [steep]}), mean_rank=5, min_rank=1, max_rank=8)
    assert smaller.share == pytest.approx(capped.payload.rounding["value"] / wide.payload.rounding["value"])
    said = " ".join(explain_plan(wide)["sentences"])
    assert f"--max-rank 8 keeps {smaller.share:.1%} of the gain and halves what vLLM reserves" in said
    assert capped.payload.smaller_reserve is None


@pytest.mark.parametrize("multiple", [12, 16])
def test_no_lower_cap_is_tried_below_the_smallest_multiple(scores, multiple):
    """Every block has one multiple at least: a cap of 8 leaves it none."""
    plan = plan_ranks(scores, mean_rank=26, rule="by-rank", multiple=multiple)
    assert plan.counts.min() == multiple and plan.counts.max() > multiple and not (plan.counts % multiple).any()


def test_no_lower_cap_is_named_whose_plan_would_be_advised_against(scores):
    """Whatever --max-rank a plan names: the plan under that cap is not uniform, and its own verdict does not say to take it."""
    rng, named = np.random.default_rng(7), 0
    for _ in range(60):
        rows = [(rng.gamma(2.0) * np.exp(-np.arange(32) / rng.uniform(1, 9))).tolist() for _ in scores.names]
        rows[0] = (np.exp(-np.arange(32) / rng.uniform(5, 30)) * rng.uniform(1, 20)).tolist()
        measured = dataclasses.replace(scores, extra={"increments": [rows]})
        plan = plan_ranks(measured, mean_rank=6)
        said = " ".join(decision_of(plan).describe(plan).advice)
        if "--max-rank" not in said:
            continue
        named += 1
        assert "take uniform" not in verdict(plan)
        cap = int(said.partition("--max-rank ")[2].split()[0])
        capped = plan_ranks(measured, mean_rank=6, max_rank=cap)
        assert "train both" in verdict(capped) and np.ptp(capped.counts) > 0
    assert named > 5
    wide = plan.with_payload(uniform_share=0.93)
    for kept, told in ((0.97, False), (0.99, True)):  # an older plan names a cap under which uniform has 95.9 % and 93.9 %
        older = wide.with_payload(smaller_reserve=SmallerReserve(max_rank=8, share=kept, reserved=16))
        assert ("--max-rank 8" in " ".join(decision_of(older).describe(older).advice)) == told


def test_a_sweep_reports_the_measured_gain(scores):
    rows = sweep(scores, kind="ranks", budgets=[2, 4, 8], rule="by-rank")["rows"]
    for row in rows:
        plan = plan_ranks(scores, mean_rank=row["budget"], rule="by-rank")
        assert row["value"] == pytest.approx(plan.payload.rounding["value"]) and row["status"] == "binding"
    assert all(a["value"] < b["value"] for a, b in zip(rows, rows[1:], strict=False)) and all(r["front"] for r in rows)


def test_a_sweep_has_the_share_of_noise_at_every_budget(scores):
    known = {**scores.extra, "increments_floor": (0.3 * np.array(scores.extra["increments"])).tolist()}
    for row in sweep(dataclasses.replace(scores, extra=known), kind="ranks", budgets=[2, 8], rule="by-rank")["rows"]:
        assert row["noise_share"] == pytest.approx(0.3)
    assert sweep(scores, kind="ranks", budgets=[2], rule="by-rank")["rows"][0]["noise_share"] is None


@pytest.mark.parametrize("floor", ["many", [[["a"]]], [[[[1.0]]]], [[[0.1]]]])
def test_a_floor_that_is_no_table_is_refused(scores, floor):
    """It was added up as it stood: a TypeError."""
    broken = dataclasses.replace(scores, extra={**scores.extra, "increments_floor": floor})
    with pytest.raises(InvalidInput, match="increments_floor of these scores"):
        plan_ranks(broken, mean_rank=6)


def test_what_a_plan_cannot_say_is_refused_where_it_is_read(scores):
    """A key that was written wrong was left out without a word."""
    record = plan_ranks(scores, mean_rank=6).to_dict()
    with pytest.raises(CorruptFile, match="part hyperparameters of this plan does not read: Expected"):
        Plan.from_dict({**record, "hyperparameters": {**record["hyperparameters"], "mean_rank": [6]}})
    record["extra"]["rounding"]["colour"] = 1
    with pytest.raises(CorruptFile, match="the key rounding.colour is not read"):
        Plan.from_dict(record)


def test_blocks_get_at_most_the_ranks_that_were_measured(scores):
    """Up to the measured ranks every budget is planned, as under a cap there; beyond, nothing is known."""
    plan, capped = (plan_ranks(scores, mean_rank=30, rule="by-rank", max_rank=cap) for cap in (None, 32))
    assert (plan.counts == capped.counts).all() and plan.counts.max() == 32
    ends = plan.payload.at_measured
    assert ends == {n: 32 for n, c in zip(plan.names, plan.counts, strict=True) if c == 32}
    assert not capped.payload.at_measured, "the user's own cap is no lack of measurement"
    assert f"{len(ends)} blocks have all 32 ranks that were measured" in " ".join(decision_of(plan).describe(plan).advice)
    assert (plan_ranks(scores, mean_rank=32, rule="by-rank").counts == 32).all()
    control = plan_ranks(scores, mean_rank=30, rule="by-rank-permuted", seed=3)
    assert control.counts.max() == 32 and "This is a control" in verdict(control)
    with pytest.raises(InfeasibleBudget, match=r"more than the 32 ranks .* --largest 64"):
        plan_ranks(scores, mean_rank=33, rule="by-rank")
    with pytest.raises(InvalidInput, match="has no option exponent"):
        plan_ranks(scores, mean_rank=4, rule="by-rank", exponent=2.0)


def test_a_sweep_says_which_budgets_cannot_be_planned(scores):
    found = sweep(scores, kind="ranks", budgets=[4, 33, 8], rule="by-rank")["rows"]
    alone = sweep(scores, kind="ranks", budgets=[4, 8], rule="by-rank")["rows"]
    assert [found[0], found[2]] == alone
    assert found[1]["status"] == "infeasible" and "more than the 32 ranks" in found[1]["why"] and not found[1]["front"]
    with pytest.raises(InfeasibleBudget, match="more than the 32 ranks"):
        sweep(scores, kind="ranks", budgets=[33, 40], rule="by-rank")


def test_a_uniform_plan_ranks_nothing(scores):
    plan, even = (plan_ranks(scores, mean_rank=6, rule=rule) for rule in ("by-rank", "uniform"))
    assert diff_plans(plan, even)["rank_correlation"] == 0.0
    assert diff_plans(even, even)["rank_correlation"] == 1.0
    assert diff_plans(plan, plan)["rank_correlation"] == pytest.approx(1.0)
