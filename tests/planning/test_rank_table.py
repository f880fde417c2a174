"""How much rank for this data: the table against sums by hand, and what is recommended where the answer is known."""

import numpy as np
import pytest
from tests import zoo

from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.errors import InvalidInput
from layerbudget.plans.explain import explain_plan
from layerbudget.plans.rank_table import rank_table
from layerbudget.plans.verdict import verdict


def scores_of(rows, floor=None):
    """Scores of blocks of 64 x 64 whose ranks gain these rows."""
    extra = {"increments": [[list(map(float, row)) for row in rows]]}
    extra |= {} if floor is None else {"increments_floor": [[list(map(float, row)) for row in floor]]}
    return zoo.scores([sum(row) for row in rows], estimator="rank-gain", extra=extra)


def test_the_rows_are_sums_of_the_increments_that_the_plans_take():
    rng = np.random.default_rng(0)
    rows = np.sort(rng.gamma(0.5, size=(5, 48)))[:, ::-1]
    floor = 0.3 * rows
    found = rank_table(scores_of(rows, floor), 5000)
    assert [row["rank"] for row in found["rows"]] == [4, 8, 16, 32]  # 64 were not measured
    for row in found["rows"]:
        plan = plan_ranks(scores_of(rows), mean_rank=row["rank"])
        by_hand = sum(sum(each[:count]) for each, count in zip(rows, plan.counts, strict=True))
        best = np.sort(rows.ravel())[::-1][: row["rank"] * 5].sum()  # all ranks cost the same here, and no floor binds much
        assert row["gain"] == pytest.approx(by_hand) and row["gain"] <= best + 1e-9
        assert (
            row["floor"] == pytest.approx(0.3 * by_hand) and row["parameters"] == 128 * plan.counts.sum() == 640 * row["rank"]
        )
        uniform = rows[:, : row["rank"]].sum()
        assert row["uniform_share"] == pytest.approx(uniform / by_hand)
        assert row["parameters_per_token"] == pytest.approx(row["parameters"] / 5000)


def test_what_is_recommended():
    flat = [[1.0, *[1e-6] * 63]] * 4  # nearly nothing beyond the first rank
    assert rank_table(scores_of(flat), 1000)["rank"] == 4
    found = rank_table(scores_of(flat), 8 * 4 * 128)  # rank 8 has just as many parameters as there are tokens
    assert found["rank"] == 8 and "take uniform" in found["recommendation"]
    assert rank_table(scores_of(flat), 8 * 4 * 128 + 1)["rank"] == 16
    found = rank_table(scores_of(flat), 10**9)
    assert found["rank"] == 64 and "fewer than the 1,000,000,000 tokens" in found["recommendation"]
    grows = [[1.0] * 64] * 4  # every rank brings as much as the first
    assert rank_table(scores_of(grows), 1000)["rank"] == 64
    uneven = [[1.0] * 64, *[[1e-3] * 64] * 3]
    assert "the rest is what there is to win" in rank_table(scores_of(uneven), 1000)["recommendation"]
    noise = rank_table(scores_of(grows, 0.95 * np.ones((4, 64))), 1000)
    assert "noise alone would give 95% of the gain" in noise["recommendation"] and noise["rank"] == 4


@pytest.mark.parametrize(("part", "uniform"), [(0.95, True), (0.5, False), (None, False)])
def test_the_verdict_of_a_plan_says_what_the_table_says(part, uniform):
    """At the mean rank of the plan both give one piece of advice, and the share of noise is that of the ranks bought."""
    rows = np.array([[1.0 / (1 + i / w) ** 2 for i in range(48)] for w in (1.0, 4.0, 40.0)])
    scores = scores_of(rows, None if part is None else part * rows)
    plan = plan_ranks(scores, mean_rank=8)
    table = rank_table(scores, 1, ranks=(8,))["recommendation"]
    said = verdict(plan), " ".join(explain_plan(plan)["sentences"]), table
    assert [("take uniform" in text) for text in said] == [uniform] * 3
    assert [("decides nothing" in text) for text in said] == [part == 0.95] * 3
    assert plan.extra["noise_share"] == (None if part is None else pytest.approx(part))
    if part == 0.5:
        assert all("and noise alone would give 50%: the rest" in text for text in said)
    assert plan.extra["uniform_share"] < 0.95  # without the noise the advice would be another one


def test_what_cannot_be_told_is_refused():
    with pytest.raises(InvalidInput, match="needs the gain of every further rank"):
        rank_table(zoo.scores([1.0, 2.0]), 100)
    with pytest.raises(InvalidInput, match="tokens is 0"):
        rank_table(scores_of([[1.0] * 64] * 2), 0)
    with pytest.raises(InvalidInput, match="too few ranks"):
        rank_table(scores_of([[3.0, 2.0, 1.0]] * 2), 100)
