"""Metrics and paired tests: is plan A better than plan B, and could this experiment have told? Numpy and scipy only.

Two kinds of pairing. Over *samples*: both models answered the same questions (McNemar, paired bootstrap). Over *seeds*: the
same seeds trained both (paired t), which also covers the spread of training and is the test to trust when seeds are cheap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from ..errors import InvalidInput

Labels = Sequence[int] | np.ndarray


def accuracy(labels: Labels, predictions: Labels) -> float:
    """Share of predictions that equal the label.

    >>> accuracy([1, 0, 1, 1], [1, 1, 1, 0])
    0.5
    """
    y, p = _aligned(labels, predictions)
    return float((y == p).mean())


def f1(labels: Labels, predictions: Labels, positive: int = 1) -> float:
    """F1 of one class, ``2 TP / (2 TP + FP + FN)``; 0 where it is undefined.

    >>> round(f1([1, 0, 1, 1], [1, 1, 1, 0]), 4)
    0.6667
    """
    y, p = _aligned(labels, predictions)
    true = int(((y == positive) & (p == positive)).sum())
    wrong = int(((y == positive) ^ (p == positive)).sum())
    return 2 * true / (2 * true + wrong) if true else 0.0


def matthews(labels: Labels, predictions: Labels) -> float:
    """Matthews correlation (any number of classes; Gorodkin 2004); 0 where one side is constant.

    >>> matthews([1, 1, 0, 0], [1, 0, 0, 0])
    0.5773502691896258
    """
    y, p = _aligned(labels, predictions)
    classes = np.union1d(y, p)
    a, b = (y[:, None] == classes).astype(float), (p[:, None] == classes).astype(float)
    n = len(y)
    cross = (a * b).sum() * n - (a.sum(0) * b.sum(0)).sum()
    spread = (n * n - (a.sum(0) ** 2).sum()) * (n * n - (b.sum(0) ** 2).sum())
    return float(cross / math.sqrt(spread)) if spread > 0 else 0.0


def _aligned(first: Labels, second: Labels) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(first), np.asarray(second)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise InvalidInput(f"{a.shape} labels and {b.shape} predictions.", "Two lists of the same length, not empty.", "")
    return a, b


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Outcome of a paired comparison of A with B.

    Attributes:
        test: Name of the test.
        difference: Estimate of A - B.
        low: Lower end of the 95 % interval.
        high: Upper end.
        p: Two-sided p-value.
        n: Pairs.
        detectable: Smallest true difference that this experiment finds with 80 % power at level 0.05, where known.
    """

    test: str
    difference: float
    low: float
    high: float
    p: float
    n: int
    detectable: float | None = None

    def sentence(self, a: str, b: str, unit: str = "", *, lower_is_better: bool = False) -> str:
        """Say the outcome in one sentence, a null with its power."""
        unit = f" {unit}" if unit else ""
        interval = f"95 % {self.low:+.4f} to {self.high:+.4f}"
        size = f"{a} - {b} = {self.difference:+.4f}{unit} ({interval}, p = {self.p:.2g}, n = {self.n})"
        if self.p < 0.05:
            return f"{a} {'beats' if (self.difference > 0) != lower_is_better else 'is behind'} {b}: {size}."
        power = f" A true difference of {self.detectable:.4f} would have been found 4 times in 5." if self.detectable else ""
        return f"{a} cannot be told from {b}: {size}.{power}"


def mcnemar(correct_a: Labels, correct_b: Labels) -> Comparison:
    """Exact McNemar test on paired answers: of the questions that one alone got right, is it half each?

    The p-value is the two-sided binomial test on the discordant pairs; the interval is for the difference in accuracy (Wald,
    with a continuity correction). ``detectable`` uses the observed share of discordant pairs.
    """
    a, b = (np.asarray(v, dtype=bool) for v in (correct_a, correct_b))
    _aligned(a, b)
    only_a, only_b, n = int((a & ~b).sum()), int((b & ~a).sum()), len(a)
    discordant = only_a + only_b
    p = float(stats.binomtest(only_a, discordant).pvalue) if discordant else 1.0
    difference = (only_a - only_b) / n
    error = math.sqrt(max(discordant - (only_a - only_b) ** 2 / n, 0.0)) / n
    margin = 1.959964 * error + 1 / n
    detectable = (1.959964 + 0.841621) * math.sqrt(discordant) / n if discordant else None
    return Comparison(
        test="McNemar, exact", difference=difference, low=difference - margin, high=difference + margin, p=p, n=n,
        detectable=detectable,
    )  # fmt: skip


def paired_bootstrap(
    labels: Labels,
    predictions_a: Labels,
    predictions_b: Labels,
    metric: Callable[[Labels, Labels], float] = accuracy,
    *,
    replicates: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Paired bootstrap over samples, for a metric that is not a mean (Matthews, F1).

    Questions are drawn with replacement, the same for both models. The interval is the 2.5 and 97.5 percentile; the
    p-value is twice the smaller share of replicates on either side of zero, never below ``1/replicates``.
    """
    y, a = _aligned(labels, predictions_a)
    _, b = _aligned(labels, predictions_b)
    generator = np.random.default_rng(seed)
    draws = np.empty(replicates)
    for i in range(replicates):
        rows = generator.integers(0, len(y), len(y))
        draws[i] = metric(y[rows], a[rows]) - metric(y[rows], b[rows])
    low, high = np.percentile(draws, [2.5, 97.5])
    tail = min((draws <= 0).mean(), (draws >= 0).mean())
    return Comparison(
        test="paired bootstrap", difference=metric(y, a) - metric(y, b), low=float(low), high=float(high),
        p=float(min(1.0, max(2 * tail, 1 / replicates))), n=len(y),
        detectable=float((1.959964 + 0.841621) * draws.std(ddof=1)) or None,
    )  # fmt: skip


def paired_t(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Paired t-test over seeds: ``a[i]`` and ``b[i]`` come from the same seed.

    Differences that are all equal (metrics of few questions often are) have no variance to test against; the exact sign test
    then says what so many seeds can, ``p = 2^(1 - n)``.

    Raises:
        InvalidInput: Fewer than two pairs.
    """
    first, second = (np.asarray(v, dtype=float) for v in (a, b))
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise InvalidInput(
            f"{first.shape} and {second.shape} values.", "A paired test needs two seeds at least.", "Run more seeds."
        )
    d = first - second
    n, mean, error = len(d), float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d)))
    if error <= 1e-9 * abs(mean):
        p = 2.0 ** (1 - n) if mean else 1.0
        return Comparison(test="sign, exact", difference=mean, low=mean, high=mean, p=p, n=n, detectable=None)
    width = float(stats.t.ppf(0.975, n - 1)) * error
    return Comparison(
        test="paired t", difference=mean, low=mean - width, high=mean + width, n=n,
        p=float(2 * stats.t.sf(abs(mean) / error, n - 1)), detectable=detectable_difference(error * math.sqrt(n), n),
    )  # fmt: skip


def power(difference: float, deviation: float, n: int, level: float = 0.05) -> float:
    """Power of the two-sided paired t-test for a true difference, given the standard deviation of the paired differences.

    >>> round(power(1.0, 1.0, 10), 3)
    0.803
    """
    critical = stats.t.ppf(1 - level / 2, n - 1)
    shift = difference / deviation * math.sqrt(n)
    return float(stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift))


def detectable_difference(deviation: float, n: int, target: float = 0.8, level: float = 0.05) -> float:
    """Smallest true difference that the paired t-test finds with the target power.

    >>> round(detectable_difference(1.0, 10), 2)
    1.0
    """
    low, high = 0.0, deviation
    while power(high, deviation, n, level) < target:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, deviation, n, level) < target else (low, middle)
    return high


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error over seeds; no error for one value.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    v = np.asarray(values, dtype=float)
    if not len(v):
        raise InvalidInput("There are no values to average.", "At least one seed is needed.", "Run a seed.")
    return float(v.mean()), float(v.std(ddof=1) / math.sqrt(len(v))) if len(v) > 1 else None
