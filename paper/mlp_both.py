"""The MLP tables as released and corrected, beside the published ones, and what each difference changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from layerbudget.progress import Progress, Steps

from . import mlp, mlp_parts
from . import mlp_released as script
from .published import mlp_entries

Tables = Mapping[str, Mapping[str, Mapping[str, Any]]]


def within(tables: Tables) -> dict[str, Any]:
    """How many of the 30 published correlations ours meet: ``|ours - theirs| <= sqrt(s_ours^2 + s_theirs^2)``.

    Returns:
        ``{count, of, outside[]}``; an entry without a value of ours (an indefinite Hessian in every seed) is outside.
    """
    count, outside = 0, []
    for tau, rows in mlp_entries().items():
        for proxy, metrics in rows.items():
            for metric, (mean, deviation) in metrics.items():
                ours = tables.get(str(tau), {}).get(proxy, {}).get(metric)
                if ours is not None and abs(ours[0] - mean) <= math.hypot(ours[1], deviation):
                    count += 1
                else:
                    outside.append({"tau": tau, "proxy": proxy, "metric": metric, "ours": ours, "theirs": [mean, deviation]})
    return {"count": count, "of": count + len(outside), "outside": outside}


def closest(tables: Tables) -> dict[str, str | None]:
    """The proxy with the largest mean Spearman at every damping: the conclusion of the paper's section."""
    found: dict[str, str | None] = {}
    for tau, rows in tables.items():
        known = {p: row["spearman"][0] for p, row in rows.items() if row["spearman"] is not None}
        found[tau] = max(known, key=lambda p: known[p]) if known else None
    return found


def sentence(name: str, before: Tables, after: Tables) -> str:
    """Return what one difference changes, in words: closest proxies by damping, the largest move of a correlation, the rest."""
    first, second = closest(before), closest(after)
    turned = [
        f"at tau {tau} the closest proxy becomes {second[tau]} instead of {first[tau]}"
        for tau in first
        if second[tau] not in (None, first[tau])
    ]
    lost = [tau for tau in first if second[tau] is None]
    moves = {
        (tau, p): after[tau][p]["spearman"][0] - before[tau][p]["spearman"][0]
        for tau in first
        for p in before[tau]
        if before[tau][p]["spearman"] and after[tau][p]["spearman"]
    }
    parts = turned + ([f"at tau {', '.join(lost)} no seed keeps a value in every layer"] if lost else [])
    text = f"{name}: " + ("; ".join(parts) if parts else "changes no conclusion, the closest proxies stay")
    if not moves:
        return text + "."
    at = max(moves, key=lambda k: abs(moves[k]))
    return text + f" (the largest move of a Spearman correlation is {moves[at]:+.2f}, {at[1]} at tau {at[0]})."


def as_released(seeds: Sequence[int] = (0, 1, 2), progress: Progress | None = None) -> dict[str, Any]:
    """The released script's tables and its three other parts.

    Returns:
        ``{recipe, seeds, accuracy[], negative_curvature[], converged[], tables, within, closest, agreement[], sensitivity[],
        pruning[]}``.

    Raises:
        MissingDependency: scikit-learn is not installed.
    """
    runs, tables = script.tables(seeds=seeds, progress=progress)
    parts: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
        "agreement": (mlp_parts.agreement, ("tau", "by"), ("continuous", "integer", "top3")),
        "sensitivity": (mlp_parts.sensitivity, ("alpha", "beta", "gamma_scale"), ("integer", "top3")),
        "pruning": (mlp_parts.pruning, ("target", "by", "penalty"), ("accuracy", "sparsity")),
    }
    made = {
        name: mlp_parts.summary([row for run in runs for row in call(run)], keys, values)
        for name, (call, keys, values) in parts.items()
    }
    return {
        "recipe": dataclasses.asdict(script.RELEASED), "seeds": list(seeds), "accuracy": [r.accuracy for r in runs],
        "negative_curvature": [{str(t): n for t, n in r.negative.items()} for r in runs],
        "converged": [{str(t): n for t, n in r.converged.items()} for r in runs], "tables": tables, "within": within(tables),
        "closest": closest(tables), **made,
    }  # fmt: skip


def differences(released: Tables, seeds: Sequence[int] = (0, 1, 2), progress: Progress | None = None) -> list[dict[str, Any]]:
    """Each of the six differences by itself, from the released script: ``{difference, within, sentence}``."""
    found = []
    tick = Steps(progress, len(script.SWITCHES), "differences")
    for name, change in script.SWITCHES.items():
        _, tables = script.tables(dataclasses.replace(script.RELEASED, **change), seeds)
        found.append({
            "difference": name, "within": within(tables)["count"], "tables": tables,
            "sentence": sentence(name, released, tables),
        })  # fmt: skip
        tick()
    return found


def both(seeds: Sequence[int] = (0, 1, 2), progress: Progress | None = None) -> dict[str, Any]:
    """Released and corrected, the single differences between them, and how many published entries each meets.

    Returns:
        ``{released, corrected, differences[], within: {released, corrected (GGN), corrected (Hessian)}}``.

    Raises:
        MissingDependency: scikit-learn is not installed.
    """
    released = as_released(seeds)
    corrected = mlp.tables(seeds, progress=progress)
    counts = {
        "released": released["within"]["count"],
        **{f"corrected ({d})": within(corrected["tables"][d])["count"] for d in ("ggn", "hessian")},
    }
    single = differences(released["tables"], seeds)
    return {"released": released, "corrected": corrected, "differences": single, "within": counts}


def render_released(result: Mapping[str, Any]) -> str:
    """Markdown of :func:`as_released`: the tables beside the published ones, and its other parts."""
    lines = [
        "# The 8-layer MLP as the released script runs it", "",
        f"Seeds {result['seeds']}, test accuracy {', '.join(f'{a:.3f}' for a in result['accuracy'])}. "
        f"{result['within']['count']} of {result['within']['of']} published entries lie within one joint standard deviation.",
        "", "| tau | proxy | Spearman | published | Kendall | published |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    theirs = mlp_entries()
    for tau, rows in result["tables"].items():
        for proxy, row in rows.items():
            paper = theirs[float(tau)][proxy]
            cells = " | ".join(f"{pair(row[m])} | {pair(paper[m])}" for m in ("spearman", "kendall"))
            lines.append(f"| {tau} | {proxy} | {cells} |")
    lines += ["", "Allocation of 20 experts against that of the direct gain (L1 of whole numbers, relative):", ""]
    lines += ["| tau | by | continuous | whole | top 3 |", "|---|---|---|---|---|"]
    lines += [f"| {r['tau']} | {r['by']} | {pair(r['continuous'])} | {pair(r['integer'])} | {pair(r['top3'])} |"
              for r in result["agreement"]]  # fmt: skip
    lines += [
        "",
        "Sensitivity of that allocation at tau 0.01:",
        "",
        "| alpha | beta | gamma | L1 | top 3 |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r['alpha']} | {r['beta']} | x {r['gamma_scale']} | {pair(r['integer'])} | {pair(r['top3'])} |"
              for r in result["sensitivity"]]  # fmt: skip
    lines += [
        "",
        "Magnitude pruning at exact budgets (test accuracy):",
        "",
        "| target | score | penalty | accuracy |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['target']} | {r['by']} | {r['penalty']} | {pair(r['accuracy'])} |" for r in result["pruning"]]
    return "\n".join(lines) + "\n"


def render(result: Mapping[str, Any]) -> str:
    """Markdown of :func:`both`."""
    counts = ", ".join(f"{name} {n}" for name, n in result["within"].items())
    lines = [render_released(result["released"]), mlp.render(result["corrected"]), "# What each difference changes", ""]
    lines += [f"Of the 30 published entries within one joint standard deviation: {counts}.", ""]
    lines += [f"- {d['sentence']} {d['within']} of 30 published entries are met." for d in result["differences"]]
    return "\n".join(lines) + "\n"


def pair(values: Sequence[float] | None) -> str:
    """``mean +- deviation``.

    >>> pair([0.5, 0.1]), pair(None)
    ('0.500 +- 0.100', '-')
    """
    return "-" if values is None else f"{values[0]:.3f} +- {values[1]:.3f}"
