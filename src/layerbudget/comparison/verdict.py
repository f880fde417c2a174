r"""Is one plan better than another, and how sure is the order of all of them? Numpy and scipy only.

A plan's measurement is a table ``x[s, i]``: seeds (draws of the calibration text, or of the training) by items (windows of
held-out text, or questions), smaller is better. Both are samples of what one would meet tomorrow, so the error of a mean
difference counts both: ``se^2 = var_s / S + var_i / I`` over the marginal means of ``x_a - x_b`` (the interaction is counted
twice, which errs on the safe side), with Satterthwaite's degrees of freedom. One seed has no
spread over seeds, and the record says so. Items of unequal lengths count by their tokens: the means are ratios of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from ..evaluation.statistics import ratio

Table = np.ndarray


def difference(a: Table, b: Table, weights: Table | None = None) -> dict[str, Any]:
    """Mean of ``a - b`` with its error over seeds and items.

    Args:
        a: Measurements, ``(seeds, items)``.
        b: Others of the same seeds and items.
        weights: Tokens of the items, ``(items,)``; equal ones by default.

    Returns:
        ``{difference, low, high, p, error, df, seeds, items}``; two-sided p, 95 % interval.

    >>> round(difference(np.array([[2.0, 3.0, 4.0]]), np.array([[1.0, 2.5, 3.0]]))["difference"], 4)
    0.8333
    """
    d = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    w = np.ones(d.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    d, w = d[:, w > 0], w[w > 0]
    by_seed = d @ w / w.sum()
    mean = float(by_seed.mean())
    found = [ratio(m, own) for m, own in ((by_seed, np.ones(len(d))), (d.mean(0), w)) if len(m) > 1]
    parts = [(error**2, df) for _, error, df in found]
    variance = sum(v for v, _ in parts)
    record = {"seeds": d.shape[0], "items": d.shape[1]}
    if variance <= (1e-12 * abs(mean)) ** 2:  # equal plans, or one item
        return {"difference": mean, "low": mean, "high": mean, "p": 1.0, "error": 0.0, "df": None, **record}
    error = math.sqrt(variance)
    df = round(variance**2 / sum(v**2 / n for v, n in parts if v > 0), 9)
    width = float(stats.t.ppf(0.975, df)) * error
    return {
        "difference": mean, "low": mean - width, "high": mean + width, "p": float(2 * stats.t.sf(abs(mean) / error, df)),
        "error": error, "df": df, **record,
    }  # fmt: skip


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
    order = np.argsort(p, kind="stable")
    adjusted, worst = np.empty(len(p)), 0.0
    for step, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p) - step) * p[i]))
        adjusted[i] = worst
    return adjusted.tolist()


def ranking(
    tables: Mapping[str, Table], weights: Table | None = None, *, replicates: int = 2000, seed: int = 0
) -> list[dict[str, Any]]:
    """Order by mean, with the uncertainty of every place: bootstrap over seeds and items, the same draws for all.

    Args:
        tables: Measurements by name.
        weights: Tokens of the items; equal ones by default.
        replicates: Draws.
        seed: Of the draws.

    Returns:
        Best first, equals on one place: ``{name, mean, rank, rank_low, rank_high (95 %), first (share of draws in which it is
        best)}``.
    """
    names = list(tables)
    x = np.stack([np.asarray(tables[n], dtype=np.float64) for n in names])
    w = np.ones(x.shape[2]) if weights is None else np.asarray(weights, dtype=np.float64)
    generator = np.random.default_rng(seed)
    ranks = np.empty((replicates, len(names)))
    for r in range(replicates):
        s, i = generator.integers(0, x.shape[1], x.shape[1]), generator.integers(0, x.shape[2], x.shape[2])
        ranks[r] = stats.rankdata(x[:, s].mean(1)[:, i] @ w[i], method="min")
    means = x.mean(1) @ w / w.sum()
    place = stats.rankdata(means, method="min")
    ties = ranks == ranks.min(1, keepdims=True)
    first = (ties / ties.sum(1, keepdims=True)).mean(0)
    low, high = np.percentile(ranks, [2.5, 97.5], axis=0)
    order = np.argsort(means, kind="stable")
    return [
        {"name": names[k], "mean": float(means[k]), "rank": float(place[k]), "rank_low": float(low[k]),
         "rank_high": float(high[k]), "first": float(first[k])}
        for k in order
    ]  # fmt: skip
