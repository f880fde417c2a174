"""Metrics against scikit-learn, tests against scipy and against simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics

from layerbudget.errors import InvalidInput
from layerbudget.evaluation import statistics


@settings(deadline=None)
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
    result = statistics.mcnemar(a, b)
    assert result.difference == pytest.approx(0.15)
    assert result.p == pytest.approx(2 * stats.binom.sf(24, 35, 0.5))
    assert result.low < 0.15 < result.high
    assert statistics.mcnemar(a, a).p == 1.0


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


def test_bootstrap_finds_a_difference_and_reports_none_for_equal_models():
    generator = np.random.default_rng(1)
    y = generator.integers(0, 2, 300)
    good = np.where(generator.random(300) < 0.9, y, 1 - y)
    poor = np.where(generator.random(300) < 0.6, y, 1 - y)
    result = statistics.paired_bootstrap(y, good, poor, statistics.matthews, replicates=300)
    assert result.p < 0.02 and result.low > 0
    same = statistics.paired_bootstrap(y, good, good, statistics.matthews, replicates=100)
    assert same.p == 1.0 and same.difference == 0.0 and same.detectable is None


def test_a_null_is_said_with_its_power():
    sentence = statistics.paired_t([0.3, 0.5, 0.4], [0.31, 0.47, 0.42]).sentence("planned", "uniform")
    assert "cannot be told from" in sentence and "4 times in 5" in sentence


def test_bad_input_is_refused():
    with pytest.raises(InvalidInput):
        statistics.accuracy([1], [1, 2])
    with pytest.raises(InvalidInput):
        statistics.paired_t([1.0], [2.0])
    with pytest.raises(InvalidInput):
        statistics.mean_and_error([])


def test_two_seeds_with_the_same_difference_prove_nothing():
    for a, b in (([0.9, 0.9], [0.8, 0.8]), ([0.7, 0.8], [0.6, 0.7])):
        found = statistics.paired_t(a, b)
        assert found.p == 0.5 and "cannot be told from" in found.sentence("a", "b")
    assert statistics.paired_t([0.9] * 6, [0.8] * 6).p == 2.0**-5
    assert statistics.paired_t([0.5, 0.5], [0.5, 0.5]).p == 1.0
