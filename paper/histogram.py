"""Figure 1 (a): the curvature scores of the layers vary substantially. Drawn in the paper; measured here.

The gain ``zeta_k^2`` under the empirical Fisher, with the noise floor that is expected of it were the gradients pure noise.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from layerbudget.data.text import calibration
from layerbudget.models.blocks import describe, partition
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.sensitivity.gain import score

from .outcome import Claim, Outcome
from .setting import SETTINGS, text_source

SAMPLES = {"small": 64, "full": 128}


def run_histogram(
    *, scale: str = "small", model: str = "demo", data_dir: Path | str | None = None,
    progress: Callable[[int, int], None] | None = None, **_: Any,
) -> Outcome:  # fmt: skip
    """Measure and draw the gains of a model's layers."""
    started, setting = time.process_time(), SETTINGS[scale]
    loaded, tokenizer = load_model(model, dtype=setting.dtype), load_tokenizer(model)
    blocks = partition(loaded)
    source = text_source(data_dir, scale)
    data = calibration(source, tokenizer, samples=SAMPLES[scale], length=setting.length)
    data = dataclasses.replace(data, source=Path(source).name)  # what is kept names no folder
    scores = score(loaded, data, blocks, "fisher-gram", damping=1.0, damping_unit="median", progress=progress)
    gain = scores.values()
    floor, error = (np.array([np.nan if v is None else v for v in t[0]]) for t in (scores.noise_floor, scores.standard_error))
    rows = [
        {"block": b.name, "gain": float(g), "error": float(e), "noise floor": float(f)}
        for b, g, e, f in zip(blocks, gain, error, floor, strict=True)
    ]
    spread, ratio = float(gain.std() / gain.mean()), float(gain.max() / gain.min())
    typical = float(np.nanmean(error) / gain.mean())
    claims = [Claim(
        claim="gains vary substantially over the layers", met=spread > 2 * typical,
        detail=f"deviation {spread:.0%} of the mean, largest {ratio:.1f} times the smallest, standard error {typical:.0%}",
    )]  # fmt: skip
    top = blocks[int(gain.argmax())].name
    return Outcome(
        name="histogram", items=("figure-1",), rows=rows, claims=claims, result={"scores": scores.to_dict()},
        setting={"scale": scale, "model": model, "digest": describe(loaded)["digest"], "data": data.describe()},
        finding=f"the largest gain ({top}) is {ratio:.1f} times the smallest; {float((gain > floor).mean()):.0%} of the layers "
        "are above their noise floor",
        seconds=time.process_time() - started, draw=lambda path: _draw(rows, path),
    )  # fmt: skip


def _draw(rows: list[dict[str, Any]], path: Path) -> Path:
    from layerbudget.reporting.figures import ACCENT, ALERT, new_figure, save_figure

    figure = new_figure(max(4.0, 0.35 * len(rows)), 2.8)
    axes = figure.subplots()
    axes.bar(range(len(rows)), [r["gain"] for r in rows], yerr=[r["error"] for r in rows], color=ACCENT)
    axes.plot(range(len(rows)), [r["noise floor"] for r in rows], "_", color=ALERT, markersize=12, label="noise floor")
    axes.set(xlabel="layer", ylabel="gain, nats")
    axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)
