"""Metrics and paired tests: is plan A better than plan B, and could this experiment have told? Numpy and scipy only.

Two kinds of pairing. Over *samples*: both models answered the same questions (McNemar) or read the same rows (paired t). Over
*seeds*: the same seeds trained both (paired t). Only seeds say whether another training would do the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from ..errors import InvalidInput

Labels = Sequence[int] | np.ndarray
_LEVEL = 0.05


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

    def size(self, a: str, b: str, unit: str = "") -> str:
        """The difference with its interval, p-value and pairs, without a verdict."""
        unit = f" {unit}" if unit else ""
        interval = f"95 % {self.low:+.4f} to {self.high:+.4f}"
        return f"{a} - {b} = {self.difference:+.4f}{unit} ({interval}, p = {self.p:.2g}, n = {self.n})"

    def sentence(self, a: str, b: str, unit: str = "", *, lower_is_better: bool = False) -> str:
        """Say the outcome in one sentence, a null with its power."""
        size = self.size(a, b, unit)
        if self.p < _LEVEL:
            return f"{a} {'beats' if (self.difference > 0) != lower_is_better else 'is behind'} {b}: {size}."
        power = f" A true difference of {self.detectable:.4f} would have been found 4 times in 5." if self.detectable else ""
        return f"{a} cannot be told from {b}: {size}.{power}"


def mcnemar(correct_a: Labels, correct_b: Labels) -> Comparison:
    """Exact McNemar test on paired answers: of the questions that one alone got right, is it half each?

    See :func:`mcnemar_over_tasks`; the p-value is the two-sided binomial test on the discordant pairs.
    """
    return mcnemar_over_tasks([(correct_a, correct_b)])


def mcnemar_over_tasks(answers: Sequence[tuple[Labels, Labels]]) -> Comparison:
    """The exact McNemar test for several tasks: is A better than B in the unweighted mean of their accuracies?

    Under the null hypothesis every discordant pair falls to either side with probability 1/2. That gives the distribution of
    the mean difference: exactly, or by 10^5 draws where it has more than 10^6 values. Answers may be means over models (0.5:
    one of two was right).

    Args:
        answers: Which questions A and B got right, a pair for every task.

    Returns:
        The interval has the differences that the same test does not reject, so it holds zero where p is .05 or more. Where too
        few pairs are discordant to reject any, it is that of the share of discordant pairs, and ``detectable`` is None.
    """
    pairs = [_aligned(np.asarray(a, dtype=float), np.asarray(b, dtype=float)) for a, b in answers]
    apart = [(a - b).round(9) for a, b in pairs]
    sizes, many = [len(d) for d in apart], len(pairs)
    difference = float(np.mean([d.mean() for d in apart]))
    groups = [(size / len(d) / many, int((abs(d) == size).sum())) for d in apart for size in np.unique(abs(d[d != 0]))]
    value, chance = _by_chance(groups)
    margin, blind = float(value[np.cumsum(chance) > _LEVEL + 1e-12].max()), chance[0] > _LEVEL
    if blind:  # whatever the signs, nothing would be rejected
        moved = [(int((d != 0).sum()), len(d)) for d in apart]
        most = [float(stats.beta.ppf(1 - _LEVEL / 2, k + 1, n - k)) if k < n else 1.0 for k, n in moved]
        margin = max(margin, float(np.linalg.norm(most)) / many)
    return Comparison(
        test="McNemar, exact", difference=difference, low=max(-1.0, difference - margin), high=min(1.0, difference + margin),
        p=float(min(1.0, chance[value >= abs(difference) - 1e-9].sum())), n=sum(sizes),
        detectable=None if blind else (1.959964 + 0.841621) * math.sqrt(sum(k * step**2 for step, k in groups)),
    )  # fmt: skip


def _by_chance(groups: Sequence[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    """``|sum of +-step|`` over k fair signs for every ``(step, k)``: its values, the largest first, and their probabilities."""
    if math.prod(k + 1 for _, k in groups) <= 1_000_000:
        value, chance = np.zeros(1), np.ones(1)
        for step, k in groups:
            heads = np.arange(k + 1)
            value = np.add.outer(value, step * (2 * heads - k)).ravel()
            chance = np.multiply.outer(chance, stats.binom.pmf(heads, k, 0.5)).ravel()
    else:
        steps, each = (np.array(column) for column in zip(*groups, strict=True))
        draws = np.random.default_rng(0).binomial(each.astype(int), 0.5, size=(100_000, len(each)))
        value = np.append((2 * draws - each) @ steps, 2.0)  # one more that is beyond all: what was observed is itself a draw
        chance = np.full(len(value), 1 / len(value))
    found, where = np.unique(abs(value).round(12), return_inverse=True)
    return found[::-1], np.bincount(where, chance)[::-1]


def paired_t(a: Sequence[float], b: Sequence[float], weights: Sequence[float] | None = None) -> Comparison:
    """Paired t-test: ``a[i]`` and ``b[i]`` come from the same seed, or from the same row of ``weights[i]`` tokens.

    With weights the difference is that of the ratios ``sum w a / sum w``, as a loss per token is; its error is the jackknife's,
    ``(n - 1) / n * sum (d_(-i) - mean)^2`` over the differences without one row, and the degrees of freedom are those of the
    rows that really count, ``(sum w)^2 / sum w^2 - 1`` (one at least). Equal weights give the plain test.

    Differences that are all equal (metrics of few questions often are) have no variance to test against; the exact sign test
    then says what so many seeds can, ``p = 2^(1 - n)``.

    Raises:
        InvalidInput: Fewer than two pairs.
    """
    first, second = (np.asarray(v, dtype=float) for v in (a, b))
    w = np.ones(first.shape) if weights is None else np.asarray(weights, dtype=float)
    if not first.shape == second.shape == w.shape or first.ndim != 1 or (w > 0).sum() < 2:
        raise InvalidInput(
            f"{first.shape} and {second.shape} values.", "A paired test needs two seeds, or two rows, at least.",
            "Run more seeds, or give more rows.",
        )  # fmt: skip
    d, w = (first - second)[w > 0], w[w > 0]
    mean, error, df = ratio(d, w)
    n = len(d)
    if error <= 1e-9 * abs(mean):
        p = 2.0 ** (1 - n) if mean else 1.0
        return Comparison(test="sign, exact", difference=mean, low=mean, high=mean, p=p, n=n, detectable=None)
    width = float(stats.t.ppf(1 - _LEVEL / 2, df)) * error
    return Comparison(
        test="paired t", difference=mean, low=mean - width, high=mean + width, n=n,
        p=float(2 * stats.t.sf(abs(mean) / error, df)), detectable=detectable_difference(error * math.sqrt(df + 1), df + 1),
    )  # fmt: skip


def ratio(d: np.ndarray, w: np.ndarray) -> tuple[float, float, float]:
    """``sum w d / sum w`` over rows, its standard error (jackknife) and its degrees of freedom; see :func:`paired_t`.

    >>> tuple(round(x, 3) for x in ratio(np.array([1.0, 2.0, 3.0]), np.ones(3)))
    (2.0, 0.577, 2.0)
    """
    n, whole = len(d), float(w.sum())
    mean = float(w @ d / whole)
    without = mean - w * (d - mean) / (whole - w)
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    return mean, error, max(1.0, round(whole**2 / float(w @ w), 9) - 1)


def power(difference: float, deviation: float, n: float, level: float = _LEVEL) -> float:
    """Power of the two-sided paired t-test for a true difference, given the standard deviation of the paired differences.

    >>> round(power(1.0, 1.0, 10), 3)
    0.803
    """
    width, shift = stats.t.ppf(1 - level / 2, n - 1) * _deviations(n), difference / deviation * math.sqrt(n)
    return float((stats.norm.cdf(shift - width) + stats.norm.cdf(-shift - width)).mean())


@functools.cache
def _deviations(n: float) -> np.ndarray:
    """Quantiles of the deviation that n values of deviation 1 show.

    Power is a mean over them: scipy's noncentral t is wrong where two values meet a large shift.
    """
    return np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, n - 1) / (n - 1))


def detectable_difference(deviation: float, n: float, target: float = 0.8, level: float = _LEVEL) -> float:
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
