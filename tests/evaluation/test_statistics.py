"""Metrics against scikit-learn, tests against scipy and against simulation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics

from layerbudget.errors import InvalidInput
from layerbudget.evaluation import statistics
from layerbudget.evaluation.perplexity import Evaluation


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=40))
def test_metrics_equal_scikit_learn(pairs):
    y, p = map(list, zip(*pairs, strict=True))
    assert statistics.accuracy(y, p) == pytest.approx(metrics.accuracy_score(y, p))
    assert statistics.matthews(y, p) == pytest.approx(metrics.matthews_corrcoef(y, p), abs=1e-12)
    expected = metrics.f1_score([v == 1 for v in y], [v == 1 for v in p], zero_division=0)
    assert statistics.f1(y, p) == pytest.approx(expected)


def test_mcnemar_is_the_binomial_test_on_discordant_pairs():
    a = np.array([1] * 60 + [0] * 10 + [1] * 25 + [0] * 5, dtype=bool)
    b = np.array([1] * 60 + [1] * 10 + [0] * 25 + [0] * 5, dtype=bool)
    result = statistics.mcnemar((a, b))
    assert result.difference == pytest.approx(0.15)
    assert result.p == pytest.approx(2 * stats.binom.sf(24, 35, 0.5))
    assert result.low < 0.15 < result.high
    assert statistics.mcnemar((a, a)).p == 1.0


def test_paired_t_is_scipys():
    a, b = np.array([0.3, 0.5, 0.4, 0.6, 0.55]), np.array([0.2, 0.45, 0.42, 0.5, 0.5])
    result = statistics.paired_t(a, b)
    expected = stats.ttest_rel(a, b)
    assert result.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high))


def test_power_agrees_with_simulation():
    generator = np.random.default_rng(0)
    d = generator.normal(1.2, 1.0, size=(4000, 5))
    found = stats.ttest_1samp(d, 0, axis=1).pvalue < 0.05
    assert statistics.power(1.2, 1.0, 5) == pytest.approx(found.mean(), abs=0.025)
    assert statistics.power(statistics.detectable_difference(2.0, 5), 2.0, 5) == pytest.approx(0.8, abs=1e-6)


def test_two_seeds_find_only_what_is_larger_than_their_interval():
    """The noncentral t of scipy is wrong at one degree of freedom: .5 was called .8."""
    generator = np.random.default_rng(2)
    shift = statistics.detectable_difference(1.0, 2)
    d = generator.normal(shift, 1.0, size=(40_000, 2))
    found = (stats.ttest_1samp(d, 0, axis=1).pvalue < 0.05).mean()
    assert found == pytest.approx(0.8, abs=0.01)
    two = statistics.paired_t([0.30, 0.334], [0.29, 0.29])
    assert two.detectable > two.high - two.difference


def test_rows_count_by_their_tokens():
    """The sign of a mean of rows can be another one than that of the loss per token."""
    w, d = np.array([5.0] * 40 + [95.0] * 40), np.tile([0.7, 0.9], 40)
    d[40:] = np.tile([-0.2, 0.0], 20)
    found = statistics.paired_t(d, np.zeros(80), w)
    assert found.difference == pytest.approx(w @ d / w.sum()) and found.high < 0 < d.mean()
    twice = statistics.paired_t(np.append(d, 9.0), np.zeros(81), np.append(w, 0.0))  # a row without a token
    assert twice == found
    equal = statistics.paired_t(d, np.zeros(80), np.full(80, 7.0))
    assert vars(equal) == pytest.approx(vars(statistics.paired_t(d, np.zeros(80))))


@pytest.mark.parametrize("n", [8, 40])
def test_intervals_of_unequal_rows_hold_the_truth(n):
    generator = np.random.default_rng(n)
    w = np.ceil(generator.lognormal(3, 1, size=(2000, n)))
    d = 0.1 + generator.normal(size=w.shape) * (0.1 + 2 / np.sqrt(w))
    inside = 0
    for lengths, row in zip(w, d, strict=True):
        mean, error, df = statistics.ratio(row, lengths)
        inside += abs(mean - 0.1) <= stats.t.ppf(0.975, df) * error
    assert inside / 2000 == pytest.approx(0.95, abs=0.025)


def answers(generator, sizes, only_a, only_b):
    drawn = [generator.random(n) for n in sizes]
    return [((u < only_a) | (u > 0.7), ((u >= only_a) & (u < only_a + only_b)) | (u > 0.7)) for u in drawn]


@pytest.mark.parametrize(("sizes", "only_a", "only_b"), [((40,), 0.05, 0.0), ((100,), 0.1, 0.05), ((60, 100, 200), 0.04, 0.04)])
def test_mcnemar_and_its_interval_decide_the_same_and_hold_the_truth(sizes, only_a, only_b):
    generator = np.random.default_rng(3)
    found = [statistics.mcnemar(*answers(generator, sizes, only_a, only_b)) for _ in range(300)]
    assert all((c.p < 0.05) == (c.low > 1e-9 or c.high < -1e-9) for c in found)
    assert np.mean([c.low - 1e-9 <= only_a - only_b <= c.high + 1e-9 for c in found]) >= 0.93
    if only_a == only_b:
        assert np.mean([c.p < 0.05 for c in found]) <= 0.05


def test_few_discordant_pairs_prove_nothing():
    a, b = np.array([1] * 4 + [0] * 36), np.zeros(40)
    for found in (statistics.mcnemar((a, b)), statistics.mcnemar((a, b), (b, b))):
        assert found.p == pytest.approx(stats.binomtest(4, 4).pvalue) == 0.125
        assert found.low < 0 < found.high and found.detectable is None
    nothing = statistics.mcnemar((b, b))
    assert nothing.p == 1.0 and nothing.high == pytest.approx(stats.beta.ppf(0.975, 1, 40))


def test_many_discordant_pairs_are_drawn_and_means_of_seeds_are_answers():
    generator = np.random.default_rng(4)
    pairs = answers(generator, (900,) * 4, 0.1, 0.08)
    drawn = statistics.mcnemar(*pairs)  # 4 x some 150 pairs: too many values to list
    error = np.sqrt(sum((a ^ b).sum() for a, b in pairs)) / 3600
    assert drawn.p == pytest.approx(2 * stats.norm.sf(abs(drawn.difference) / error), rel=0.2)
    assert drawn.high - drawn.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    halves = statistics.mcnemar((np.array([1.0, 0.5, 0.5, 1.0]), np.array([0.5, 0.0, 1.0, 0.0])))
    assert halves.difference == pytest.approx(0.375) and halves.p == pytest.approx(1 / 2)


def test_a_null_is_said_with_its_power():
    sentence = statistics.paired_t([0.3, 0.5, 0.4], [0.31, 0.47, 0.42]).sentence("planned", "uniform")
    assert "is level with" in sentence and "4 times in 5" in sentence


def test_bad_input_is_refused():
    with pytest.raises(InvalidInput, match="There are 1 labels and 2 predictions"):
        statistics.accuracy([1], [1, 2])
    with pytest.raises(InvalidInput, match="1 on one side, 1 on the other"):
        statistics.paired_t([1.0], [2.0])
    with pytest.raises(InvalidInput):
        statistics.mean_and_error([])


def test_two_seeds_with_the_same_difference_prove_nothing():
    for a, b in (([0.9, 0.9], [0.8, 0.8]), ([0.7, 0.8], [0.6, 0.7])):
        found = statistics.paired_t(a, b)
        assert found.p == 0.5 and "cannot be told from" in found.sentence("a", "b")
    assert statistics.paired_t([0.9] * 6, [0.8] * 6).p == 2.0**-5
    assert statistics.paired_t([0.5, 0.5], [0.5, 0.5]).p == 1.0


def test_an_interval_of_mcnemar_holds_zero_where_its_p_says_so():
    """The margin was one of the values of the null distribution, rounded, and could end just short of the very difference."""
    for n in (*range(6, 40, 3), 75):
        for moved in range(6, min(n, 24)):
            for plus in range(moved + 1):
                a, b = np.zeros(n), np.zeros(n)
                a[:plus], b[plus:moved] = 1, 1
                found = statistics.mcnemar((a, b))
                assert (found.low <= 0 <= found.high) == (found.p >= 0.05), (n, moved, plus, found)


def test_equal_differences_have_an_interval_that_agrees_with_their_p():
    few, many = statistics.paired_t([0.9] * 5, [0.8] * 5), statistics.paired_t([0.9] * 6, [0.8] * 6)
    assert few.p >= 0.05 and few.low < 0 < few.high and "no interval" in few.size("a", "b")
    assert many.p < 0.05 and many.low == many.high == pytest.approx(0.1)
    one = statistics.difference(np.array([[2.0]]), np.array([[1.0]]))
    assert one["p"] == 1 and one["low"] < 0 < one["high"]
    assert statistics.corrected(one, 1.0, 3)["low"] < 0
    same = statistics.difference(np.ones((2, 3)), np.ones((2, 3)))
    assert same["low"] == same["high"] == 0 and same["p"] == 1


@pytest.mark.parametrize("seeds", [1, 3])
def test_holms_p_and_its_interval_decide_the_same(seeds):
    generator, seen = np.random.default_rng(seeds), set()
    for _ in range(60):
        shift = generator.normal(size=(6, 1, 1)) * 0.6
        each = [statistics.difference(generator.normal(size=(seeds, 9)) + s, np.zeros((seeds, 9))) for s in shift]
        for test, p in zip(each, statistics.holm([t["p"] for t in each]), strict=True):
            found = statistics.corrected(test, p, len(each))
            assert (found["low"] <= 0 <= found["high"]) == (found["holm"] >= 0.05)
            assert (test["low"] <= 0 <= test["high"]) == (test["p"] >= 0.05)
            seen.add(found["holm"] < 0.05)
    assert seen == {True, False}


def test_results_of_python_calls_are_compared_and_other_dictionaries_are_refused():
    read = Evaluation(
        value=3.0, standard_error=0.1, tokens=21, length=8, windows=3, source="s", digest="d", text=None,
        nll=(1.0, 1.2, 1.1), counts=(7, 7, 7),
    )  # fmt: skip
    worse = dataclasses.replace(read, nll=(1.1, 1.3, 1.25))
    found = statistics.compare_results({"perplexity": {"s": read}}, {"perplexity": {"s": worse}})
    assert found["perplexity"]["s"]["difference"] < 0 and found["tasks"] == {}
    answers = {"t": {"acc": 0.5, "stderr": 0.1, "correct": [1, 0, 1, 0], "digest": "x"}}
    assert statistics.compare_results({"tasks": answers}, {"tasks": answers})["tasks"]["t"]["difference"] == 0
    for wrong, said in ((answers, "An evaluation has t"), ({}, "An evaluation has nothing")):
        with pytest.raises(InvalidInput, match=said):
            statistics.compare_results(wrong, wrong)
    with pytest.raises(InvalidInput, match="There are 1 names"):
        statistics.compare_results({"tasks": answers}, {"tasks": answers}, ("A",))
