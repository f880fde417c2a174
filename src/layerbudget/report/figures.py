"""Figures. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingDependency
from ..plan import Plan
from ..scores import Scores
from ..storage.writing import write_bytes

INK, ACCENT, MUTED, ALERT = "#1f2933", "#0b7285", "#adb5bd", "#d9480f"


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no display.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("Figures need matplotlib.", "", 'pip install "layerbudget[report]".') from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path | str) -> Path:
    """Write a PNG for screens and, beside it, an SVG for papers whose words stay words; equal bytes for equal figures.

    Args:
        figure: From :func:`new_figure`.
        path: Of the PNG.
    """
    from matplotlib import rc_context

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "layerbudget"}):
        for suffix, own in ((path.suffix or ".png", {"dpi": 130, "metadata": {"Software": None}}), (".svg", _SVG)):
            text = io.BytesIO()
            figure.savefig(text, format=suffix[1:], **own)
            write_bytes(path.with_suffix(suffix), text.getvalue(), overwrite=True)
    return path


_SVG = {"metadata": {"Date": None, "Creator": None}}


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _vector(row: Sequence[float | None], missing: float = np.nan) -> np.ndarray:
    return np.array([missing if v is None else v for v in row], dtype=np.float64)


def draw_gains(axes: Any, scores: Scores, damping: float | None = None) -> None:
    """Bars of the scores with standard errors, and the noise floor of each block as a line."""
    row = scores.index(damping)
    gain = _vector(scores.gain[row])
    error = _vector(scores.standard_error[row], missing=0.0)
    x = np.arange(len(gain))
    axes.bar(x, gain, color=ACCENT, yerr=error, error_kw={"lw": 0.8, "ecolor": INK})
    floor = _vector(scores.noise_floor[row])
    if np.isfinite(floor).any():
        axes.hlines(floor, x - 0.4, x + 0.4, color=ALERT, lw=1.5, label="noise floor")
        axes.legend(fontsize=8, frameon=False)
    _plain(axes, f"{scores.estimator}: what each block can still gain")
    axes.set_xlabel("block", fontsize=8)
    axes.set_ylabel(scores.unit, fontsize=8)


def draw_plans(axes: Any, plans: Sequence[Plan]) -> None:
    """The plans as steps over the blocks."""
    colours = {"mdl": ACCENT, "uniform": INK, "permuted": MUTED, "calibrated": ALERT, "directional": ALERT}
    for plan in plans:
        x = (np.arange(len(plan.blocks)) + 0.5) * len(plans[0].blocks) / len(plan.blocks) - 0.5  # matrices within their layers
        axes.step(x, plan.values, where="mid", label=plan.rule, color=colours.get(plan.rule), lw=1.8)
    _plain(axes, "the plan: " + plans[0].kind + " per block")
    axes.set_xlabel("block", fontsize=8)
    axes.legend(fontsize=8, frameon=False)


def draw_results(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Perplexity of every model, grouped by target."""
    labels = [r["model"] if r["target"] is None else f"{r['model']} {r['target']:.0%}" for r in rows]
    colours = {"curvature plan": ACCENT, "uniform": INK, "permuted": MUTED, "dense": "#74b816", "directional plan": ALERT}
    y = np.arange(len(rows))[::-1]
    values = [r["perplexity"] for r in rows]
    axes.barh(y, values, xerr=[r["standard_error"] for r in rows], color=[colours.get(r["model"], ACCENT) for r in rows])
    axes.set_yticks(y, labels, fontsize=8)
    for place, value, row in zip(y, values, rows, strict=True):
        axes.text(value + row["standard_error"], place, f"  {value:.2f}", va="center", fontsize=8, color=INK)
    axes.margins(x=0.18)
    _plain(axes, "the result: held-out perplexity (lower is better)")


def overview(scores: Scores, plans: Sequence[Plan], rows: Sequence[Mapping[str, Any]], path: Path | str) -> Path:
    """One PNG: gains, plans, results."""
    figure = new_figure(13, 4.2)
    axes = figure.subplots(1, 3)
    draw_gains(axes[0], scores)
    draw_plans(axes[1], plans)
    draw_results(axes[2], rows)
    return save_figure(figure, path)


def damping_sweep(scores: Scores, path: Path | str) -> Path:
    """Share of every block against the damping: where lines cross, the ranking depends on the damping."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    table = np.stack([_vector(row) for row in scores.gain])
    share = table / np.nansum(table, axis=1, keepdims=True)
    for k, name in enumerate(scores.names):
        axes.plot(scores.damping, share[:, k], marker="o", ms=3, lw=1.2, label=name.rsplit(".", 1)[-1])
    if all(d > 0 for d in scores.damping):
        axes.set_xscale("log")
    axes.set_xlabel(f"damping ({scores.damping_unit})", fontsize=8)
    axes.legend(fontsize=7, ncols=2, frameon=False, title="block", title_fontsize=7)
    _plain(axes, f"{scores.estimator}: share of each block against the damping")
    return save_figure(figure, path)
