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
_COLOURS = {  # of a demo's plans, by the names that its table has
    "gain, per layer": ACCENT,
    "uniform": INK,
    "gain, permuted": MUTED,
    "directional damage": ALERT,
    "dense": "#74b816",
}


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no display, or say that matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("Figures need matplotlib.", "", "pip install '.[report]' in the clone.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path | str) -> Path:
    """Write a PNG and, beside it, an SVG whose words stay words; equal bytes for equal figures. Returns the PNG's path."""
    from matplotlib import rc_context

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "layerbudget"}):
        png, svg = {"dpi": 130, "metadata": {"Software": None}}, {"metadata": {"Date": None, "Creator": None}}
        for suffix, options in ((path.suffix or ".png", png), (".svg", svg)):
            text = io.BytesIO()
            figure.savefig(text, format=suffix[1:], **options)
            write_bytes(path.with_suffix(suffix), text.getvalue(), overwrite=True)
    return path


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _vector(row: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in row])


def _draw_gains(axes: Any, scores: Scores) -> None:
    """Bars of the scores with two standard errors, and the noise floor of each block as a line."""
    row = scores.index()
    x, gain, floor = np.arange(len(scores.blocks)), _vector(scores.gain[row]), _vector(scores.noise_floor[row])
    error = 2 * np.nan_to_num(_vector(scores.standard_error[row]))
    axes.bar(x, gain, color=ACCENT, yerr=error, error_kw={"lw": 0.8, "ecolor": INK})
    if np.isfinite(floor).any():
        axes.hlines(floor, x - 0.4, x + 0.4, color=ALERT, lw=1.5, label="noise floor")
        axes.legend(fontsize=8, frameon=False)
    _plain(axes, "gain: what each layer can still gain")
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel(scores.unit, fontsize=8)


def _draw_plans(axes: Any, plans: Mapping[str, Plan]) -> None:
    """The plans as steps over the layers; matrices stand within theirs."""
    first = next(iter(plans.values()))
    for name, plan in plans.items():
        x = (np.arange(len(plan.blocks)) + 0.5) * len(first.blocks) / len(plan.blocks) - 0.5
        axes.step(
            x,
            plan.values,
            where="mid",
            label=name,
            color=_COLOURS.get(name),
            lw=1.8 if len(plan.blocks) <= len(first.blocks) else 1.0,
        )
    _plain(axes, f"plans: {first.kind} of each layer")
    axes.set_xlabel("layer", fontsize=8)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))  # room for the names above all lines
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)


def _draw_results(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Perplexity of every model, grouped by target; what is left of zero is not drawn."""
    labels = [r["model"] if r["target"] is None else f"{r['model']}, {r['target']:.0%}" for r in rows]
    y = np.arange(len(rows))[::-1]
    values = [r["perplexity"] for r in rows]
    axes.barh(y, values, xerr=[2 * r["standard_error"] for r in rows], color=[_COLOURS.get(r["model"], ACCENT) for r in rows])
    axes.set_yticks(y, labels, fontsize=8)
    for place, value, row in zip(y, values, rows, strict=True):
        axes.text(value + 2 * row["standard_error"], place, f"  {value:.2f}", va="center", fontsize=8, color=INK)
    axes.margins(x=0.18)
    _plain(axes, "held-out perplexity (less is better)")
    axes.set_xlabel("lines: two standard errors, not paired", fontsize=8)


def overview(scores: Scores, plans: Mapping[str, Plan], rows: Sequence[Mapping[str, Any]], path: Path | str) -> Path:
    """One PNG: gains, plans by the names that the rows have, results."""
    figure = new_figure(11, 3.9)
    axes = figure.subplots(1, 3)
    _draw_gains(axes[0], scores)
    _draw_plans(axes[1], plans)
    _draw_results(axes[2], rows)
    return save_figure(figure, path)
