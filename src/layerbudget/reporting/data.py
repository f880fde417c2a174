"""Data of the page's charts: numbers of the records, rearranged; nothing is computed anew but the plans at other budgets."""

from __future__ import annotations

import math
from typing import Any

from ..decision import DECISIONS, decision_of
from ..decisions.charts import values_of
from ..plan import Plan
from .records import FolderResults
from .tables import grid_of

_LABELS = {"loss": "loss after", "loss_before": "loss before"}
_MOST = 40


def charts_of(results: FolderResults) -> dict[str, Any]:
    """Data of every chart that this folder has something for."""
    plan, scores = results.plan, results.scores
    data: dict[str, Any] = {"results": _results(results), "paired": _paired(results)}
    source = plan or scores
    if source is not None:
        blocks, grid = source.blocks, grid_of(source.blocks)
        cells = [[r, c, k] for (r, c), k in grid.cells.items()]
        data["network"] = {"rows": grid.rows, "columns": grid.columns, "cells": cells}
        data["network"] |= {"names": [b.name for b in blocks], "numel": [b.numel for b in blocks]}
        data["word"] = DECISIONS.find(source.kind).decides if isinstance(source, Plan) else source.unit
        data["value"] = None if plan is None else values_of(plan, whole=decision_of(plan).whole)
        why = [] if plan is None else decision_of(plan).matrices(plan)
        data["formats"] = [row["format"] for row in why] or None
        data["damage"] = [row["damage"] for row in why] if why and "damage" in why[0] else None
    if scores is not None:
        i = scores.index()
        data["gains"] = {
            "gain": scores.gain[i],
            "error": [e and 2 * e for e in scores.standard_error[i]],
            "floor": scores.noise_floor[i],
        }
        data["gains"] |= {"unit": scores.unit, "names": scores.names}
    if plan is not None:
        return data | decision_of(plan).charts(plan, scores if scores is results.decisive else None)
    if scores is not None:
        known = list(DECISIONS.all().values())
        charts = next((d for d in known if d.measured_by(scores)), known[0]).charts(None, scores)
        data |= charts
        if charts.get("grid"):
            data.setdefault("water", {"cap": None, "uniform": None})
    return data


def _results(results: FolderResults) -> dict[str, Any] | None:
    """Points with errors, by model and target."""
    if (t := results.tuned) is not None:
        points = [
            {"label": _LABELS.get(name, name), "value": m["value"], "error": 2 * (m["stderr"] or 0.0), "by": m["by_seed"]}
            for metrics in t["metrics"].values()
            for name, m in metrics.items()
        ]
        return {"unit": t["metric"], "points": points, "better": "lower" if t["metric"] == "loss" else "higher"}
    rows = (results.result or {}).get("rows") or []
    if not rows or not all("perplexity" in r and "model" in r for r in rows):
        return None
    points = [{"label": _label(r), "value": r["perplexity"], "error": 2 * (r.get("standard_error") or 0.0)} for r in rows]
    return {"unit": "perplexity", "points": points, "better": "lower"}


def _label(row: dict[str, Any]) -> str:
    return str(row["model"]) if row.get("target") is None else f"{row['model']} at {row['target']:.0%}"


def _paired(results: FolderResults) -> dict[str, Any] | None:
    """Differences with their 95 % intervals."""
    items: list[dict[str, Any]] = []
    if results.tuned is not None:
        unit = results.tuned["metric"]
        for split, tests in (results.tuned.get("against") or {}).items():
            for name in ("seeds", "samples"):
                if (t := tests.get(name)) and t["low"] is not None:
                    interval = {"value": t["difference"], "low": t["low"], "high": t["high"], "sentence": t["sentence"]}
                    items.append(
                        {"label": f"{split.replace('_', '-')} rows, over {name}", **interval, "detail": name != "seeds"}
                    )
    elif (record := results.contest) is not None:
        unit, many = f"{record['unit']}, against uniform", len(record["budgets"]) > 1
        for b in record["budgets"]:
            for r in b["rows"]:
                label = f"{r['name']} at {b['budget']:g}" if many else r["name"]
                u = r["versus_uniform"] or {"difference": 0.0, "low": 0.0, "high": 0.0}  # uniform itself
                if u["low"] is not None:
                    items.append({"label": label, "value": u["difference"], "low": u["low"], "high": u["high"]})
    else:
        unit = "% perplexity"
        for r in (results.result or {}).get("rows") or []:
            mean, error = r.get("log_difference"), r.get("log_difference_error")
            if mean is not None and error is not None:
                low, value, high = (100 * math.expm1(mean + k * 1.96 * error) for k in (-1, 0, 1))
                items.append({"label": _label(r), "value": value, "low": low, "high": high})
    return {"unit": unit, "items": items[:_MOST]} if items else None
