"""Metrics and paired tests: is plan A better than plan B, and could this experiment have told? Numpy and scipy only.

Two kinds of pairing. Over *samples*: both models answered the same questions (McNemar) or read the same rows (paired t). Over
*seeds*: the same seeds trained both (paired t). Only seeds say whether another training would do the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

from ..arguments import checked
from ..errors import InvalidInput, ModelMismatch
from ..verdicts import LEVEL_OF_TEST as _LEVEL
from ..verdicts import SMALL, outcome

Labels = Sequence[int] | np.ndarray
_DRAWS = 2000  # of the bootstrap of a ranking
_SAME = 1e-9  # mean differences of answers that are this near are one value


def accuracy(labels: Labels, predictions: Labels) -> float:
    """Share of predictions that equal the label.

    >>> accuracy([1, 0, 1, 1], [1, 1, 1, 0])
    0.5
    """
    y, p = _aligned(labels, predictions)
    return float((y == p).mean())


def f1(labels: Labels, predictions: Labels) -> float:
    """F1 of class 1, ``2 TP / (2 TP + FP + FN)``; 0 where it is undefined.

    >>> round(f1([1, 0, 1, 1], [1, 1, 1, 0]), 4)
    0.6667
    """
    y, p = _aligned(labels, predictions)
    true = int(((y == 1) & (p == 1)).sum())
    wrong = int(((y == 1) ^ (p == 1)).sum())
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
        what = f"There are {a.size} labels and {b.size} predictions."
        raise InvalidInput(what, "Two lists of the same length, not empty.", "Give one prediction for each label.")
    return a, b


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Outcome of a paired comparison of A with B: ``difference`` of A - B, its 95 % interval ``low`` to ``high``, two-sided
    ``p``.

    ``detectable`` is the smallest true difference that this experiment finds with 80 % power at level 0.05, where known.
    """

    test: str
    difference: float
    low: float
    high: float
    p: float
    n: int
    detectable: float | None = None

    def size(self, a: str, b: str, unit: str = "") -> str:
        """The difference with its interval, p-value and pairs, without a verdict; in as many digits as the interval needs.

        >>> Comparison(test="t", difference=2.13e-5, low=1.5e-5, high=2.7e-5, p=5e-4, n=16).size("A", "B", "nats")
        'A - B = +0.000021 nats (95 % +0.000015 to +0.000027, p = 0.0005, n = 16)'
        """
        unit, width = f" {unit}" if unit else "", self.high - self.low
        digits = max(4, 1 - math.floor(math.log10(width))) if 0 < width < math.inf else 4
        interval = f"95 % {self.low:+.{digits}f} to {self.high:+.{digits}f}" if width < math.inf else "no interval"
        return f"{a} - {b} = {self.difference:+.{digits}f}{unit} ({interval}, p = {self.p:.2g}, n = {self.n})"

    def outcome(self, a: str, b: str, *, lower_is_better: bool = False) -> str:
        """Who is better, without a number; level where the difference is small, not told apart where ``p`` is .05 or more."""
        result = outcome(self.difference, p=self.p)
        if result in ("level", "open"):
            return f"{a} {'is level with' if result == 'level' else 'cannot be told from'} {b}"
        return f"{a} {'beats' if (result == 'higher') != lower_is_better else 'is behind'} {b}"

    def sentence(self, a: str, b: str, unit: str = "", *, lower_is_better: bool = False) -> str:
        """Say the outcome in one sentence, a null with its power."""
        text = f"{self.outcome(a, b, lower_is_better=lower_is_better)}: {self.size(a, b, unit)}."
        if self.p < _LEVEL:
            small = outcome(self.difference, p=self.p) == "level"
            return f"{text} The difference is certain and too small to matter (below {SMALL:g})." if small else text
        if not self.detectable:
            return text
        return f"{text} A true difference of {self.detectable:.4f} would have been found 4 times in 5."


def mcnemar(*answers: tuple[Labels, Labels]) -> Comparison:
    """Exact McNemar test on paired answers: is A better than B in the unweighted mean of the accuracies of some tasks?

    Under the null hypothesis every question that one alone got right falls to either side with probability 1/2. That gives the
    distribution of the mean difference: exactly, or by 10^5 draws where it has more than 10^6 values. For one task it is the
    two-sided binomial test. Answers may be means over models (0.5: one of two was right).

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
    margin, blind = float(value[np.cumsum(chance) >= _LEVEL].max()), chance[0] >= _LEVEL
    if blind:  # whatever the signs, nothing would be rejected
        moved = [(int((d != 0).sum()), len(d)) for d in apart]
        most = [float(stats.beta.ppf(1 - _LEVEL / 2, k + 1, n - k)) if k < n else 1.0 for k, n in moved]
        margin = max(margin, float(np.linalg.norm(most)) / many)
    p = float(min(1.0, chance[value >= abs(difference) - _SAME].sum()))
    if p >= _LEVEL:  # the margin may be the very difference, but for its last digits
        margin = max(margin, abs(difference))
    return Comparison(
        test="McNemar, exact",
        difference=difference,
        low=max(-1.0, difference - margin),
        high=min(1.0, difference + margin),
        p=p,
        n=sum(sizes),
        detectable=None if blind else (1.959964 + 0.841621) * math.sqrt(sum(k * step**2 for step, k in groups)),
    )


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
    values, where = np.unique(abs(value).round(12), return_inverse=True)
    return values[::-1], np.bincount(where, chance)[::-1]


def paired_t(a: Sequence[float], b: Sequence[float], weights: Sequence[float] | None = None) -> Comparison:
    """Paired t-test: ``a[i]`` and ``b[i]`` come from the same seed, or from the same row of ``weights[i]`` tokens.

    With weights the difference is that of the ratios ``sum w a / sum w``, as a loss per token is; its error is the jackknife's,
    ``(n - 1) / n * sum (d_(-i) - mean)^2`` over the differences without one row, and the degrees of freedom are those of the
    rows that really count, ``(sum w)^2 / sum w^2 - 1`` (one at least). Equal weights give the plain test.

    Differences that are all equal (metrics of few questions often are) have no variance to test against; the exact sign test
    then says what so many seeds can, ``p = 2^(1 - n)``. Up to five of them reject nothing, and the interval has no end.
    """
    first, second = (np.asarray(v, dtype=float) for v in (a, b))
    w = np.ones(first.shape) if weights is None else np.asarray(weights, dtype=float)
    if not first.shape == second.shape == w.shape or first.ndim != 1 or (w > 0).sum() < 2:
        weighted = "" if weights is None else f", with {(w > 0).sum()} weights above zero"
        raise InvalidInput(
            f"Values to pair: {first.size} on one side, {second.size} on the other{weighted}.",
            "A paired test needs as many on both sides, two seeds or two rows at least.",
            "Run more seeds, or give more rows.",
        )
    d, w = (first - second)[w > 0], w[w > 0]
    mean, error, df = ratio(d, w)
    n = len(d)
    if error <= 1e-9 * abs(mean):
        p = 2.0 ** (1 - n) if mean else 1.0
        return Comparison(test="sign, exact", difference=mean, **_only(mean, p), p=p, n=n, detectable=None)
    detectable = detectable_difference(error * math.sqrt(df + 1), df + 1)
    return Comparison(test="paired t", difference=mean, **_t_test(mean, error, df), n=n, detectable=detectable)


def _only(mean: float, p: float) -> dict[str, float]:
    """95 % interval of differences that are all equal: a test that does not reject zero rejects no other value either."""
    return {"low": mean, "high": mean} if p < _LEVEL or not mean else {"low": -math.inf, "high": math.inf}


def _t_test(mean: float, error: float, df: float) -> dict[str, float]:
    """95 % interval and two-sided p-value of a mean."""
    width = float(stats.t.ppf(1 - _LEVEL / 2, df)) * error
    return {"low": mean - width, "high": mean + width, "p": float(2 * stats.t.sf(abs(mean) / error, df))}


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


def power(difference: float, deviation: float, n: float) -> float:
    """Power of the two-sided paired t-test at level 0.05 for a true difference, given the deviation of the paired differences.

    >>> round(power(1.0, 1.0, 10), 3)
    0.803
    """
    width, shift = stats.t.ppf(1 - _LEVEL / 2, n - 1) * _deviations(n), difference / deviation * math.sqrt(n)
    return float((stats.norm.cdf(shift - width) + stats.norm.cdf(-shift - width)).mean())


@functools.cache
def _deviations(n: float) -> np.ndarray:
    """Quantiles of the deviation that n values of deviation 1 show.

    Power is a mean over them: scipy's noncentral t is wrong where two values meet a large shift.
    """
    return np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, n - 1) / (n - 1))


def detectable_difference(deviation: float, n: float) -> float:
    """Smallest true difference that the paired t-test finds with power 0.8.

    >>> round(detectable_difference(1.0, 10), 2)
    1.0
    """
    high = deviation
    while power(high, deviation, n) < 0.8:
        high *= 2
    return float(optimize.brentq(lambda x: power(x, deviation, n) - 0.8, 0.0, high, xtol=1e-12 * high))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error over seeds; no error for one value.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    v = np.asarray(values, dtype=float)
    if not len(v):
        raise InvalidInput("There are no values to average.", "At least one seed is needed.", "Run a seed.")
    return float(v.mean()), float(v.std(ddof=1) / math.sqrt(len(v))) if len(v) > 1 else None


def difference(a: np.ndarray, b: np.ndarray, weights: np.ndarray | None = None) -> dict[str, Any]:
    """Mean of ``a - b`` with its error over seeds and items.

    Both are ``(seeds, items)``; ``weights`` are tokens of the items, equal ones by default.

    Returns:
        ``{difference, low, high, p, error, df, seeds, items}``; two-sided p, 95 % interval, which has no end where there is
        one seed and one item.

    >>> round(difference(np.array([[2.0, 3.0, 4.0]]), np.array([[1.0, 2.5, 3.0]]))["difference"], 4)
    0.8333
    """
    d = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    w = np.ones(d.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    d, w = d[:, w > 0], w[w > 0]
    by_seed = d @ w / w.sum()
    mean = float(by_seed.mean())
    estimates = [ratio(m, item_weights) for m, item_weights in ((by_seed, np.ones(len(d))), (d.mean(0), w)) if len(m) > 1]
    parts = [(error**2, df) for _, error, df in estimates]
    variance = sum(v for v, _ in parts)
    record = {"seeds": d.shape[0], "items": d.shape[1]}
    if variance <= (1e-12 * abs(mean)) ** 2:  # equal plans, or one item
        return {"difference": mean, **_only(mean, 1.0), "p": 1.0, "error": 0.0, "df": None, **record}
    error = math.sqrt(variance)
    df = round(variance**2 / sum(v**2 / n for v, n in parts if v > 0), 9)
    return {"difference": mean, **_t_test(mean, error, df), "error": error, "df": df, **record}


def corrected(test: Mapping[str, Any], adjusted: float, tests: int) -> dict[str, Any]:
    """The test with its p-value after Holm's correction, and the interval that the same correction makes wider.

    Returns:
        The test with ``holm``; low and high hold zero where ``holm`` is .05 or more, and do not where it is less.
    """
    if not test["error"]:
        return {**test, "holm": adjusted}
    times = adjusted / test["p"] if 0 < test["p"] and adjusted < 1 else tests
    width = float(stats.t.ppf(1 - 0.025 / times, test["df"])) * test["error"]
    return {**test, "holm": adjusted, "low": test["difference"] - width, "high": test["difference"] + width}


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p-values, in the order given.

    >>> [round(x, 3) for x in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order, adjusted = np.argsort(p, kind="stable"), np.empty(len(p))
    scaled = np.arange(len(p), 0, -1) * np.asarray(p, dtype=np.float64)[order]
    adjusted[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    return adjusted.tolist()


def ranking(tables: Mapping[str, np.ndarray], weights: np.ndarray | None = None, *, seed: int = 0) -> list[dict[str, Any]]:
    """Order by mean, with the uncertainty of every place: bootstrap over seeds and items, the same draws for all.

    Tables are ``(seeds, items)``; ``weights`` are tokens of the items, equal ones by default.

    Returns:
        Best first, equals on one place: ``{name, mean, rank, rank_low, rank_high (95 %), first (share of draws in which it is
        best)}``.
    """
    names = list(tables)
    x = np.stack([np.asarray(tables[n], dtype=np.float64) for n in names])
    w = np.ones(x.shape[2]) if weights is None else np.asarray(weights, dtype=np.float64)
    generator = np.random.default_rng(seed)
    ranks = np.empty((_DRAWS, len(names)))
    for r in range(_DRAWS):
        s, i = generator.integers(0, x.shape[1], x.shape[1]), generator.integers(0, x.shape[2], x.shape[2])
        ranks[r] = stats.rankdata(x[:, s].mean(1)[:, i] @ w[i], method="min")
    means = x.mean(1) @ w / w.sum()
    place = stats.rankdata(means, method="min")
    ties = ranks == ranks.min(1, keepdims=True)
    first = (ties / ties.sum(1, keepdims=True)).mean(0)
    low, high = np.percentile(ranks, [2.5, 97.5], axis=0)
    order = np.argsort(means, kind="stable")
    return [
        {
            "name": names[k],
            "mean": float(means[k]),
            "rank": float(place[k]),
            "rank_low": float(low[k]),
            "rank_high": float(high[k]),
            "first": float(first[k]),
        }
        for k in order
    ]


Rows = Mapping[str, Mapping[str, Any]]


def mean_accuracy(tasks: Rows) -> dict[str, Any]:
    """Unweighted mean over tasks, with its standard error ``sqrt(sum_t se_t^2) / T`` (questions are the sample, tasks are not).

    >>> mean_accuracy({"a": {"acc": 0.5, "stderr": 0.3}, "b": {"acc": 1.0, "stderr": 0.4}})
    {'acc': 0.75, 'stderr': 0.25, 'tasks': ['a', 'b']}
    """
    if not tasks:
        raise InvalidInput("There is no task to average.", "At least one is needed.", "Name some with --tasks.")
    error = math.sqrt(sum(float(r["stderr"]) ** 2 for r in tasks.values())) / len(tasks)
    return {"acc": sum(float(r["acc"]) for r in tasks.values()) / len(tasks), "stderr": error, "tasks": list(tasks)}


def compare_means(first: Rows, second: Rows) -> Comparison:
    """The exact McNemar test over all tasks, of the difference of mean accuracies."""
    return mcnemar(*((row["correct"], second[name]["correct"]) for name, row in first.items()))


def flipped(first: Rows, second: Rows) -> dict[str, np.ndarray]:
    """Return, for every task, which answers flipped: right in one model and wrong in the other.

    Accuracy hides them where as many flip either way. They and KL say how far a smaller model is from its original (Dutta,
    Krishnan, Kwatra and Ramjee, Accuracy is Not All You Need, NeurIPS 2024).

    >>> flipped({"t": {"correct": [1, 0, 1]}}, {"t": {"correct": [1, 1, 0]}})["t"].tolist()
    [False, True, True]
    """
    return {name: np.not_equal(row["correct"], second[name]["correct"]) for name, row in first.items()}


def _on_flips(first: Sequence[float], second: Sequence[float], names: Sequence[str]) -> str:
    """A sentence on the answers to a task that flipped."""
    gained, lost, (a, b) = int(np.greater(first, second).sum()), int(np.less(first, second).sum()), names
    return f"{gained + lost} of {len(first)} answers flipped: {gained} are right in {a} alone, {lost} in {b} alone."


@checked
def compare_results(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str] = ("A", "B")) -> dict[str, Any]:
    """Compare two results of ``evaluate``.

    Both have ``tasks`` (what :func:`~layerbudget.evaluation.harness.evaluate_tasks` returned), ``perplexity`` (what
    :func:`~layerbudget.evaluation.perplexity.perplexity` returned, by name), or both, of the same questions and text.
    ``names`` is how to call them.

    Returns:
        ``{tasks: {name: test}, mean (two tasks and more), perplexity: {source: test}, sentences[], verdict}``; differences are
        first minus second, of accuracies and of nats per token. A test of tasks has ``flips``, the share of answers that are
        right in one model alone. The verdict leaves out single tasks where there is their mean.

    Raises:
        ModelMismatch: They answered other questions, or read other text.
        InvalidInput: They have nothing in common, or one window alone.
    """
    if len(names) != 2:
        raise InvalidInput(f"There are {len(names)} names.", "Each of the two results has one.", "Give ('A', 'B').")
    (a, b), first, second = names, _whole(first), _whole(second)
    tasks, texts = _shared(first, second)
    for name in tasks:
        _same(first["tasks"][name], second["tasks"][name], name)
    check_texts(first, second)
    result: dict[str, Any] = {"tasks": {}, "perplexity": {}, "sentences": []}
    said = []
    ours, theirs = ({t: side["tasks"][t] for t in tasks} for side in (first, second))
    flips = {name: float(f.mean()) for name, f in flipped(ours, theirs).items()}
    for name in tasks:
        test, share = compare_means({name: ours[name]}, theirs), flips[name]
        result["tasks"][name] = {**vars(test), "flips": share}
        on_flips = _on_flips(ours[name]["correct"], theirs[name]["correct"], names)
        result["sentences"].append(f"{name}: {test.sentence(a, b, 'accuracy')} {on_flips}")
    if len(tasks) > 1:
        test, share = compare_means(ours, theirs), float(np.mean(list(flips.values())))
        result["mean"] = {"first": mean_accuracy(ours), "second": mean_accuracy(theirs), **vars(test), "flips": share}
        result["sentences"].append(f"mean of {len(tasks)} tasks: {test.sentence(a, b, 'accuracy')}")
    if tasks:  # the last test: of the one task, or of their mean
        on = tasks[0] if len(tasks) == 1 else f"the mean of {len(tasks)} tasks"
        said.append(f"{test.outcome(a, b)} on {on} (accuracy {test.difference:+.2%}; {share:.1%} of the answers flipped)")
    for name in texts:
        one, other = first["perplexity"][name], second["perplexity"][name]
        test = paired_t(one["nll"], other["nll"], one["counts"])
        result["perplexity"][name] = vars(test)
        result["sentences"].append(f"{name}: {test.sentence(a, b, 'nats per token', lower_is_better=True)}")
        change = f"perplexity {math.expm1(test.difference):+.1%}"
        said.append(f"{test.outcome(a, b, lower_is_better=True)} on {name} ({change})")
    return {**result, "verdict": f"{'; '.join(said)}."}


def check_texts(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Refuse two results of ``evaluate`` whose texts cannot be paired; of tasks only the names are read.

    Raises:
        ModelMismatch, InvalidInput: As :func:`compare_results`.
    """
    first, second = _whole(first), _whole(second)
    for name in _shared(first, second)[1]:
        one, other = first["perplexity"][name], second["perplexity"][name]
        _same(one, other, name)
        if sum(count > 0 for count in one["counts"]) < 2:
            raise InvalidInput(
                f"{name} has one window.",
                "A paired test needs two at least.",
                "Evaluate both models with more --windows, a smaller --length, or more text.",
            )


def _whole(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result with both of its parts; a perplexity of ``perplexity`` is read by its fields."""
    if not {"tasks", "perplexity"} & set(result):
        raise InvalidInput(
            f"An evaluation has {', '.join(map(str, result)) or 'nothing'}.",
            "It has tasks, perplexity, or both.",
            "Give {'tasks': evaluate_tasks(...)}, {'perplexity': {NAME: perplexity(...)}}, or what evaluate --out wrote.",
        )
    texts = {n: each if isinstance(each, Mapping) else vars(each) for n, each in result.get("perplexity", {}).items()}
    return {"tasks": result.get("tasks", {}), "perplexity": texts}


def _shared(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of the tasks and of the texts that two results share; refuses two that share nothing."""
    tasks, texts = ([name for name in first[what] if name in second[what]] for what in ("tasks", "perplexity"))
    if not tasks and not texts:
        raise InvalidInput(
            "The two evaluations share no task and no text.", "Something must be paired.", "Evaluate both on one."
        )
    return tasks, texts


def _same(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> None:
    values = "correct" if "correct" in first else "nll"
    if values not in first or values not in second or (values == "nll" and "counts" not in first):
        raise InvalidInput(f"An evaluation of {name} holds no single answers.", "", "Evaluate again with this release.")
    if first.get("digest") != second.get("digest") or len(first[values]) != len(second[values]):
        raise ModelMismatch(
            f"The two evaluations of {name} are of other questions or other text.",
            "They must be the same ones, in order, and of text the same tokens.",
            "Use the same data, --limit, --length and --windows; models of two tokenizers are compared by --tasks alone.",
        )
