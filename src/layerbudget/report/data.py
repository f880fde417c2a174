"""Data of the page's charts: numbers of the records, rearranged; nothing is computed anew but the plans at other budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..decisions.bits.reasons import reasons
from ..decisions.experts.plan import plan_experts
from ..decisions.ranks.plan import plan_ranks
from ..decisions.sparsity.plan import default_cap, plan_sparsity
from ..errors import LayerbudgetError
from ..kinds import KINDS
from ..plan import Plan
from ..plans.verdict import names_of
from ..records import unit_of
from ..scores import Scores
from ..verdicts import less_than
from .records import Found
from .tables import grid_of

LARGEST = 400  # blocks; beyond them plans at other budgets would make the page heavy
_BUDGETS: dict[str, tuple[str, list[float]]] = {
    "sparsity": ("sparsity", [round(0.05 * i, 2) for i in range(1, 18)]),
    "ranks": ("mean rank", [1, 2, 4, 8, 16, 32, 64]),
    "experts": ("experts per block", [1, 2, 3, 4, 5, 6, 8, 10]),
}
_LABELS = {"loss": "loss after", "loss_before": "loss before"}
_MOST = 40
_NOTHING = 1e-12  # nats per token; less is left of formats that hold the weights exactly, by the arithmetic of their damage


def charts_of(found: Found) -> dict[str, Any]:
    """Data of every chart that this folder has something for."""
    plan, scores = found.plan, found.scores
    data: dict[str, Any] = {"results": _results(found), "paired": _paired(found)}
    source = plan or scores
    if source is not None:
        blocks, grid = source.blocks, grid_of(source.blocks)
        cells = [[r, c, k] for (r, c), k in grid.cells.items()]
        data["network"] = {"rows": grid.rows, "columns": grid.columns, "cells": cells}
        data["network"] |= {"names": [b.name for b in blocks], "numel": [b.numel for b in blocks]}
        data["word"] = KINDS.find(source.kind).decides if isinstance(source, Plan) else source.unit
        data["value"] = None if plan is None else _values(plan)
        why = [] if plan is None else reasons(plan)
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
    kind = plan.kind if plan is not None else "ranks" if scores is not None and "increments" in scores.extra else "sparsity"
    if scores is not None and (plan is None or scores is found.decisive) and "cache" not in scores.extra:
        data["grid"] = solved_grid(scores, kind, plan)
    if plan is not None and plan.kind == "fit":
        data["memory"] = _memory(plan)
    if plan is not None:
        data["grid"] = data.get("grid") or curved_grid(plan) or walked_grid(plan)
        data["forecast"] = _forecast(plan)
    if plan is not None or data.get("grid"):
        data["water"] = {"cap": None, "uniform": None} if plan is None else {**_water(plan), **_told(plan)}
    return data


def _values(plan: Plan) -> list[float]:
    return [float(f"{v:.6g}") for v in (plan.counts if plan.kind in ("ranks", "experts") else plan.values)]


def _water(plan: Plan) -> dict[str, Any]:
    """Cap of every block, and what uniform would give."""
    cap, values = plan.hyperparameters.get("max_sparsity"), np.array(_values(plan))
    whole = isinstance(cap, (int, float)) or (isinstance(cap, (list, tuple)) and len(cap) == len(values))
    numel, counted = plan.numel.astype(np.float64), plan.kind in ("ranks", "experts")
    even = plan.hyperparameters.get("mean_rank") or values.mean() if counted else values @ numel / numel.sum()
    return {"cap": cap if whole else None, "uniform": float(even)}


def _told(plan: Plan) -> dict[str, Any]:
    """Words of the slider on the plan itself: uniform's share of the gain, or the damage beside uniform's."""
    path, measured = plan.extra.get("path") or (), plan.extra.get("measured")
    share = plan.extra.get("uniform_share")
    if share is not None or measured is None or not path or plan.kind != "sparsity":
        return {"share": share}
    return {"told": f"{measured:.3g} nats per token, {less_than(measured, path[0]['divergence'], 'uniform')}"}


def walked_grid(plan: Plan) -> dict[str, Any] | None:
    """The steps of a measured plan, for the slider, as :func:`solved_grid`; None without their values."""
    steps = [step for step in plan.extra.get("path") or () if "values" in step]
    if len(steps) < 2:
        return None
    first, told = steps[0]["divergence"], [f"{s['divergence']:.3g} nats per token" for s in steps]
    from_uniform, unit = plan.kind == "sparsity", "step"
    if from_uniform:
        beside = [less_than(s["divergence"], first, "uniform") for s in steps]
        told = [f"{told[0]}: this is uniform", *(f"{t}, {b}" for t, b in zip(told[1:], beside[1:], strict=True))]
        unit = "step, from uniform to the plan"
    water = _water(plan) if from_uniform else {"cap": None, "uniform": None}
    plans = [{"values": s["values"], **water, "share": None, "told": t} for s, t in zip(steps, told, strict=True)]
    budgets = list(range(not from_uniform, len(steps) + (not from_uniform)))
    return {"kind": plan.kind, "unit": unit, "place": "Step", "budgets": budgets, "plans": plans, "start": len(steps) - 1}


def _forecast(plan: Plan) -> dict[str, Any] | None:
    """Predicted and measured damage of every step, of every share of experts, or of every plan that was checked."""
    e = plan.extra
    if "forecast" in e:
        note, points = "by the share of the experts; the bar is two standard errors", _by_share(e["forecast"])
    elif "check" in e and plan.kind in ("bits", "cache"):
        note, points = (
            "on held-out text, of the plan and what it was compared with; the bar is two standard errors",
            _by_rule(plan),
        )
    else:
        note, points = "on the text that decided, step by step", _by_step(e.get("path") or ())
    known = len(points) > 1 and any(point["predicted"] is not None for point in points)
    return {"note": f"nats per token {note}", "points": points} if known else None


def _point(label: str, predicted: float | None, measured: float, error: float | None = None) -> dict[str, Any]:
    return {"label": label, "predicted": predicted, "measured": measured, "error": error and 2 * error}


def _by_share(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    return [_point(f"{100 * r['keep']:.3g} % stay", r["predicted"], r["measured"], r["measured_error"]) for r in rows]


def _by_rule(plan: Plan) -> list[dict[str, Any]]:
    e = plan.extra
    words = {**names_of(plan), plan.rule: "this plan"}
    predicted = {name: row["predicted"] for name, row in e["baselines"].items()} | {plan.rule: e["predicted"]}
    rows = {name: row for name, row in e["check"]["rows"].items() if not row.get("same")}
    return [_point(words.get(n, n), predicted.get(n), row["kl"], row["kl_error"]) for n, row in rows.items()]


def _by_step(path: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Every step of a measured plan; the first plans of shapes are predicted whole, later steps as a change."""
    points, first = list[dict[str, Any]](), int(bool(path) and "share" in path[0])
    for number, step in enumerate(path):
        change, whole = step.get("predicted"), "share" in step
        before = 0.0 if whole or not number else path[number - 1]["divergence"]
        label = f"step {number + first}" if number + first else "uniform"
        points.append(_point(label, None if change is None else before + change, step["divergence"]))
    return points


def _unit(plan: Plan) -> tuple[int, str]:
    """Bytes of the unit in which a memory is read, and its name."""
    return unit_of(plan.budget["limit"])


def curved_grid(plan: Plan) -> dict[str, Any] | None:
    """Return the best plans of other budgets, for the slider, as :func:`solved_grid`; None of a large model."""
    rows = [row for row in plan.extra.get("curve") or () if "values" in row]
    if len(rows) < 2:
        return None
    budgets, unit, own, told = _curve(plan, rows)
    plans = [
        {"values": r["values"], "cap": None, "uniform": None, "share": None, "told": t} for r, t in zip(rows, told, strict=True)
    ]
    start = int(np.argmin([abs(budget - own) for budget in budgets]))
    shown = [float(f"{budget:.4g}") for budget in (*budgets, own)]
    return {
        "kind": plan.kind,
        "unit": unit,
        "place": "At",
        "budgets": shown[:-1],
        "plans": plans,
        "start": start,
        "own": shown[-1],
    }


def _curve(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], str, float, list[str]]:
    """Budgets of the rows of a curve, their unit, the plan's own budget, and a few words on the damage at each."""
    if plan.kind == "kept-experts":
        told = [f"{row['forecast']:.3g} nats per token, measured with the others masked" for row in rows]
        own = 100 * plan.counts.sum() / sum(b.count / b.value for b in plan.blocks)
        return [100 * row["keep"] for row in rows], "% of the experts that stay", own, told
    told = [f"{row['predicted']:.3g} nats per token predicted" for row in rows]
    if plan.kind == "bits":
        return [row["bits"] for row in rows], "bits per weight", plan.extra["bits"], told
    size, unit = _unit(plan)
    return [row["memory"] / size for row in rows], f"memory, {unit}", plan.budget["limit"] / size, told


def _memory(plan: Plan) -> dict[str, Any]:
    """Bytes by part and predicted damage of the best plans over memory, and of the plan itself."""
    (size, unit), e = _unit(plan), plan.extra
    own = {"memory": plan.budget["spent"], "predicted": e["predicted"], "own": True}
    own |= {f"{name}_bytes": part["bytes"] for name, part in e["parts"].items()}
    rows = sorted((*e["curve"], own), key=lambda row: (row["memory"], "own" in row))
    names = list(e["parts"])
    points = [
        {
            "label": f"{row['memory'] / size:.4g}",
            "parts": [row[f"{name}_bytes"] / size for name in names],
            "predicted": row["predicted"] if row["predicted"] > _NOTHING else 0.0,
            "own": "own" in row,
        }
        for row in rows
    ]
    return {"unit": unit, "names": names, "points": points}


def _results(found: Found) -> dict[str, Any] | None:
    """Points with errors, by model and target."""
    if (t := found.tuned) is not None:
        points = [
            {"label": _LABELS.get(name, name), "value": m["value"], "error": 2 * (m["stderr"] or 0.0), "by": m["by_seed"]}
            for metrics in t["metrics"].values()
            for name, m in metrics.items()
        ]
        return {"unit": t["metric"], "points": points, "better": "lower" if t["metric"] == "loss" else "higher"}
    rows = (found.result or {}).get("rows") or []
    if not rows or not all("perplexity" in r and "model" in r for r in rows):
        return None
    points = [{"label": _label(r), "value": r["perplexity"], "error": 2 * (r.get("standard_error") or 0.0)} for r in rows]
    return {"unit": "perplexity", "points": points, "better": "lower"}


def _label(row: dict[str, Any]) -> str:
    return str(row["model"]) if row.get("target") is None else f"{row['model']} at {row['target']:.0%}"


def _paired(found: Found) -> dict[str, Any] | None:
    """Differences with their 95 % intervals."""
    items: list[dict[str, Any]] = []
    if found.tuned is not None:
        unit = found.tuned["metric"]
        for split, tests in (found.tuned.get("against") or {}).items():
            for name in ("seeds", "samples"):
                if (t := tests.get(name)) and t["low"] is not None:
                    interval = {"value": t["difference"], "low": t["low"], "high": t["high"], "sentence": t["sentence"]}
                    items.append(
                        {"label": f"{split.replace('_', '-')} rows, over {name}", **interval, "detail": name != "seeds"}
                    )
    elif (record := found.contest) is not None:
        unit, many = f"{record['unit']}, against uniform", len(record["budgets"]) > 1
        for b in record["budgets"]:
            for r in b["rows"]:
                label = f"{r['name']} at {b['budget']:g}" if many else r["name"]
                u = r["versus_uniform"] or {"difference": 0.0, "low": 0.0, "high": 0.0}  # uniform itself
                if u["low"] is not None:
                    items.append({"label": label, "value": u["difference"], "low": u["low"], "high": u["high"]})
    else:
        unit = "% perplexity"
        for r in (found.result or {}).get("rows") or []:
            mean, error = r.get("log_difference"), r.get("log_difference_error")
            if mean is not None and error is not None:
                low, value, high = (100 * math.expm1(mean + k * 1.96 * error) for k in (-1, 0, 1))
                items.append({"label": _label(r), "value": value, "low": low, "high": high})
    return {"unit": unit, "items": items[:_MOST]} if items else None


def solved_grid(scores: Scores, kind: str, plan: Plan | None = None) -> dict[str, Any] | None:
    """``{kind, unit, budgets, plans, start}``: plans at several budgets for the slider, which starts at ``plan``.

    Each has ``values``, ``cap``, ``uniform`` and ``share``. None where these scores make no such plans.
    """
    if kind not in _BUDGETS or not 1 < len(scores.blocks) <= LARGEST:
        return None
    unit, budgets = _BUDGETS[kind]
    plans: dict[float, dict[str, Any]] = {}
    for budget in budgets:
        try:
            plans[budget] = _solved(scores, kind, budget)
        except LayerbudgetError:  # beyond the ranks that were measured, or below the floors: no place on the slider
            continue
    if len(plans) < 2:
        return None
    known = list(plans)
    held = plan.hyperparameters if plan is not None else {}
    usual = known[len(known) // 2] if plan is None else plan.counts.mean()
    wanted = held.get("sparsity") or held.get("mean_rank") or usual
    start = int(np.argmin([abs(b - wanted) for b in known]))
    return {"kind": kind, "unit": unit, "budgets": known, "plans": list(plans.values()), "start": start}


def _solved(scores: Scores, kind: str, budget: float) -> dict[str, Any]:
    if kind == "sparsity":
        plan = plan_sparsity(scores, sparsity=budget)
    elif kind == "ranks":
        plan = plan_ranks(scores, mean_rank=budget)
    else:
        plan = plan_experts(scores, total=int(budget * len(scores.blocks)))
    cap = default_cap(budget) if kind == "sparsity" else None
    values = [float(f"{v:.4g}") for v in (plan.values if kind == "sparsity" else plan.counts.astype(float))]
    return {"values": values, "cap": cap, "uniform": budget, "share": plan.extra.get("uniform_share")}
