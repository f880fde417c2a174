"""The paper's paired comparisons (Table 13), recomputed from its own tables, with both kinds of p-value.

The published p-values are those of ``t = mean(d) / (s / sqrt(n))`` against the alternative that MDL is ahead: one-sided, five
tasks. The text does not say so. Two-sided values are twice as large here, for all three differences are positive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from layerbudget.evaluation.statistics import detectable_difference

from .outcome import Claim, Outcome
from .published import column, item

PAIRS: Mapping[str, tuple[str, str, str]] = {
    "Mistral (+ve)": ("table-5", "MDL (+ve)", "LayerIF (+ve)"),
    "Mistral (All)": ("table-5", "MDL (All)", "LayerIF (All)"),
    "Gemma": ("table-6", "MDL (+ve)", "LayerIF"),
}


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, Any]:
    """Paired t-test over tasks of ``first - second``.

    Returns:
        ``{n, difference, deviation, t, one_sided (first ahead), two_sided, wilcoxon (two-sided, exact), detectable, largest}``.

    >>> round(paired({"a": 2.0, "b": 3.0, "c": 5.0}, {"a": 1.0, "b": 2.5, "c": 4.0})["two_sided"], 4)
    0.0377
    """
    names = list(first)
    d = np.array([first[k] - second[k] for k in names])
    test = stats.ttest_rel([first[k] for k in names], [second[k] for k in names])
    t, n = float(test.statistic), len(d)
    return {
        "n": n, "difference": float(d.mean()), "deviation": float(d.std(ddof=1)), "t": t,
        "one_sided": float(stats.t.sf(t, n - 1)), "two_sided": float(test.pvalue),
        "wilcoxon": float(stats.wilcoxon(d, method="exact").pvalue),
        "detectable": detectable_difference(float(d.std(ddof=1)), n),
        "largest": {"task": names[int(np.abs(d).argmax())], "difference": float(d[np.abs(d).argmax()])},
    }  # fmt: skip


def run_tests(**_: Any) -> Outcome:
    """Table 13 from tables 5 and 6."""
    started = time.monotonic()
    theirs = item("table-13")["rows"]
    rows, claims = [], []
    for name, (table, a, b) in PAIRS.items():
        found = paired(column(table, a), column(table, b))
        same = math.isclose(found["one_sided"], theirs[name]["p"], abs_tol=5e-5)
        largest = found.pop("largest")
        rows.append({
            "comparison": name, "published": theirs[name]["p"], **found, "largest_task": largest["task"],
            "largest_difference": largest["difference"],
        })  # fmt: skip
        claims.append(Claim(
            claim=f"p = {theirs[name]['p']} for {name}", met=same,
            detail=f"one-sided {found['one_sided']:.4f}, two-sided {found['two_sided']:.4f}",
        ))  # fmt: skip
    claims.append(Claim(
        claim="no difference is significant", met=all(r["two_sided"] > 0.05 for r in rows),
        detail=f"five tasks would find {min(r['detectable'] for r in rows):.1f} points or more four times in five",
    ))  # fmt: skip
    return Outcome(
        name="tests", items=("table-13",), setting={}, result={"rows": rows}, rows=rows, claims=claims,
        finding="the published p-values are one-sided; two-sided they are "
        + ", ".join(f"{r['two_sided']:.3f}" for r in rows)
        + "; none is significant either way",
        seconds=time.monotonic() - started, draw=lambda path: _draw(rows, path),
    )  # fmt: skip


def _draw(rows: list[dict[str, Any]], path: Path) -> Path:
    from layerbudget.reporting.figures import ACCENT, INK, new_figure, save_figure

    figure = new_figure(6.0, 2.6)
    axes = figure.subplots()
    for i, row in enumerate(rows):
        width = float(stats.t.ppf(0.975, row["n"] - 1)) * row["deviation"] / math.sqrt(row["n"])
        axes.errorbar(row["difference"], i, xerr=width, fmt="o", color=ACCENT, capsize=3)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [r["comparison"] for r in rows])
    axes.set_xlabel("MDL - LayerIF, percentage points (95 %, paired over five tasks)")
    return save_figure(figure, path)
