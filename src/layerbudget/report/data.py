"""Data of the page's charts, and its headline: numbers of the records, rearranged; nothing is computed anew but the grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..decisions.experts.plan import plan_experts
from ..decisions.ranks.plan import plan_ranks
from ..decisions.sparsity.plan import default_cap, plan_sparsity
from ..errors import LayerbudgetError
from ..kinds import KINDS
from ..plan import Plan
from ..scores import Scores
from .records import Found, contest_headline, contest_paired, curve_of, experiment_headline
from .tables import grid_of


def headline_of(found: Found) -> tuple[str, str]:
    """A title, and what is to be known in one sentence."""
    plan, verdict = found.plan, ""
    if found.tuned is not None:
        t = found.tuned
        title = f"{t['task'].rpartition('/')[2]}: {t['kind']}, rule {t['rule']}"
        metric = next(iter(t["metrics"].values()))[t["metric"]]
        error = "" if metric["stderr"] is None else f" ± {metric['stderr']:.2g}"
        verdict = f"Held-out {t['metric']} {metric['value']:.4f}{error} over {_seeds(t['seeds'])}."
        before = next(iter(t["metrics"].values())).get("loss_before")
        if before is not None:
            verdict += f" Before: {before['value']:.4f}."
        return title, " ".join([verdict, *_sentences(t.get("against"))])
    if found.contest is not None:
        return contest_headline(found.contest)
    if found.result is not None and "experiment" in found.result:
        return experiment_headline(found.result)
    if found.result is not None:
        verdict = str(found.result.get("verdict") or found.result.get("sentence") or "")
    if plan is not None:
        of = str(plan.model.get("id") or "the model").rpartition("/")[2]
        title = f"{_amount(plan)} for {of}"
        return title, verdict or _plan_verdict(plan, found)
    if found.scores is not None:
        of = str(found.scores.model.get("id") or "the model").rpartition("/")[2]
        said = verdict or str(found.scores.extra.get("verdict") or f"{len(found.scores.blocks)} blocks scored.")
        return f"What the layers of {of} can still gain", said
    return f"Results of {found.folder}", verdict


def _seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"


def _amount(plan: Plan) -> str:
    if plan.kind == "sparsity":
        return f"{plan.sparsity:.0%} sparsity"
    if plan.kind == "ranks":
        return f"LoRA ranks {plan.counts.min()} to {plan.counts.max()}"
    if plan.kind == "experts":
        return f"{plan.counts.sum()} LoRA experts"
    return f"A plan of {plan.kind}"


def _plan_verdict(plan: Plan, found: Found) -> str:
    share = plan.extra.get("uniform_share")
    if found.receipt is not None and "bits" in found.receipt:
        bits = f"{found.receipt['bits']:.4f} bits per weight in {found.receipt['family']}"
        return f"Recounted: {found.receipt['bytes']:,} bytes, {bits}, by {found.receipt['method']}."
    if found.receipt is not None:
        planned = found.receipt["planned"]
        return f"Recounted: {found.receipt['sparsity']:.4%} zeros, {planned:.4%} planned, by {found.receipt['method']}."
    if share is not None:
        advice = "take uniform" if share >= 0.95 else "the rest is what there is to win"
        return f"The same rank everywhere has {share:.1%} of this plan's gain: {advice}."
    spread = plan.values.std() / max(abs(plan.values.mean()), 1e-300)
    near = ", nearly uniform" if spread < 0.05 else ""
    return f"{plan.rule} over {len(plan.blocks)} blocks, from {plan.values.min():.3g} to {plan.values.max():.3g}{near}."


def _sentences(against: Mapping[str, Any] | None) -> list[str]:
    """The verdict on the first split."""
    return [verdict for split in (against or {}).values() if (verdict := split.get("verdict"))][:1]


def cards_of(found: Found) -> list[tuple[str, str]]:
    """Short facts beside the headline."""
    cards: list[tuple[str, str]] = []
    plan = found.plan
    if plan is not None:
        cards.append(("blocks", f"{len(plan.blocks)}"))
        given = plan.counts if plan.kind in ("ranks", "experts") else plan.values
        cards.append((KINDS.find(plan.kind).decides, f"{given.min():.3g} – {given.max():.3g}"))
        cards.append(("rule", plan.rule))
        status = plan.certificate.get("status") or ("optimal" if plan.extra.get("rounding", {}).get("exact") else None)
        cards += [("certificate", str(status))] if status else []
    if found.scores is not None:
        cards.append(("scores", found.scores.estimator))
    if found.receipt is not None:
        quantised = "bits" in found.receipt
        name = "recounted bits per weight" if quantised else "recounted zeros"
        cards.append((name, f"{found.receipt['bits']:.4f}" if quantised else f"{found.receipt['sparsity']:.3%}"))
    if found.tuned is not None:
        cards.append(("trained parameters", f"{found.tuned['trained_parameters']:,}"))
    if found.result is not None and found.result.get("seconds"):
        cards.append(("run time", f"{found.result['seconds']:.0f} s"))
    return cards


def charts_of(found: Found) -> dict[str, Any]:
    """Data of every chart that this folder has something for."""
    plan, scores = found.plan, found.scores
    data: dict[str, Any] = {}
    source = plan.blocks if plan is not None else scores.blocks if scores is not None else None
    if source is not None:
        grid = grid_of(source)
        data["network"] = {
            "rows": grid.rows, "columns": grid.columns,
            "cells": [[r, c, k] for (r, c), k in grid.cells.items()],
            "names": [b.name for b in source], "numel": [b.numel for b in source],
        }  # fmt: skip
        data["value"] = _values(plan) if plan is not None else None
        data["word"] = KINDS.find(plan.kind).decides if plan is not None else scores.unit if scores is not None else ""
    if scores is not None:
        row = scores.index()
        data["gains"] = {
            "gain": scores.gain[row], "error": scores.standard_error[row], "floor": scores.noise_floor[row],
            "unit": scores.unit, "names": scores.names,
        }  # fmt: skip
    _add_water(data, plan, scores)
    data["results"], data["paired"], data["curve"] = _results(found), _paired(found), curve_of(found)
    data["predicted"] = _predicted(found)
    return data


def _values(plan: Plan) -> list[float]:
    counted = plan.kind in ("ranks", "experts")
    return [float(f"{v:.6g}") for v in (plan.counts if counted else plan.values)]


def _add_water(data: dict[str, Any], plan: Plan | None, scores: Scores | None) -> None:
    by_rank = scores is not None and "increments" in scores.extra
    kind = plan.kind if plan is not None else ("ranks" if by_rank else "sparsity")
    same = plan is None or scores is None or plan.names == scores.names
    grid = solved_grid(scores, kind) if scores is not None and same else None
    if grid is not None:
        grid["start"] = _start(grid, plan)
        data["grid"] = grid
    if plan is not None:
        cap = plan.hyperparameters.get("max_sparsity")
        numel = plan.numel.astype(np.float64)
        values = np.array(_values(plan))
        mean = plan.hyperparameters.get("mean_rank") or float(values.mean())
        mean = float(values @ numel / numel.sum()) if plan.kind == "sparsity" else float(mean)
        whole = isinstance(cap, (int, float)) or (isinstance(cap, (list, tuple)) and len(cap) == len(values))
        data["water"] = {"cap": cap if whole else None, "uniform": mean, "own": True}
    elif grid is not None:
        data["water"] = {"cap": None, "uniform": None, "own": False}


def _start(grid: dict[str, Any], plan: Plan | None) -> list[int]:
    """Place of the sliders: nearest to the plan's own budget and exponent."""
    held = plan.hyperparameters if plan is not None else {}
    exponent = held.get("exponent") if held.get("exponent") is not None else 1.0
    wanted = held.get("sparsity") or held.get("mean_rank") or (plan.counts.mean() if plan is not None else None)
    wanted = grid["budgets"][len(grid["budgets"]) // 2] if wanted is None else wanted
    row = int(np.argmin([abs(e - exponent) for e in grid["exponents"]])) if grid["exponents"] else 0
    return [row, int(np.argmin([abs(b - wanted) for b in grid["budgets"]]))]


_LABELS = {"loss": "loss after", "loss_before": "loss before"}


def _results(found: Found) -> dict[str, Any] | None:
    """Points with errors, by model and target."""
    rows = (found.result or {}).get("rows") or []
    if found.tuned is not None:
        t = found.tuned
        points = [
            {"series": split, "label": _LABELS.get(name, name), "value": m["value"], "error": m["stderr"] or 0.0,
             "by": m["by_seed"]}
            for split, metrics in t["metrics"].items() for name, m in metrics.items()
        ]  # fmt: skip
        return {"unit": t["metric"], "points": points, "better": "lower" if t["metric"] == "loss" else "higher"}
    if not rows or not all("perplexity" in r and "model" in r for r in rows):
        return None
    points = [
        {"series": r["model"], "target": r.get("target"), "value": r["perplexity"], "error": r.get("standard_error") or 0.0,
         "label": r["model"] if r.get("target") is None else f"{r['model']} at {r['target']:.0%}"}
        for r in rows
    ]  # fmt: skip
    return {"unit": "perplexity", "points": points, "better": "lower"}


def _paired(found: Found) -> dict[str, Any] | None:
    """Differences with their 95 % intervals."""
    if found.tuned is not None:
        items = [
            {"label": f"{split}, over {name}", **{k: t[k] for k in ("low", "high", "sentence")}, "value": t["difference"],
             "detail": name != "seeds"}
            for split, tests in (found.tuned.get("against") or {}).items()
            for name in ("seeds", "samples") if (t := tests.get(name))
        ]  # fmt: skip
        return {"unit": found.tuned["metric"], "items": items} if items else None
    if found.contest is not None:
        return contest_paired(found.contest)
    items = []
    for r in (found.result or {}).get("rows") or []:
        mean, error = r.get("log_difference"), r.get("log_difference_error")
        if mean is None or error is None:
            continue
        low, high = math.expm1(mean - 1.96 * error) * 100, math.expm1(mean + 1.96 * error) * 100
        label = r["model"] if r.get("target") is None else f"{r['model']} at {r['target']:.0%}"
        items.append({"label": label, "value": math.expm1(mean) * 100, "low": low, "high": high, "sentence": ""})
    return {"unit": "% perplexity", "items": items} if items else None


def _predicted(found: Found) -> dict[str, Any] | None:
    """Pairs of predicted and measured damage, where a record has both."""
    pairs = []
    for plan in found.plans.values():
        if isinstance(plan.extra.get("predicted"), (int, float)) and isinstance(plan.extra.get("measured"), (int, float)):
            pairs.append({"label": f"{plan.kind} by {plan.rule}", "x": plan.extra["predicted"], "y": plan.extra["measured"]})
    for r in (found.result or {}).get("rows") or []:
        if isinstance(r.get("predicted"), (int, float)) and isinstance(r.get("measured"), (int, float)):
            pairs.append({"label": str(r.get("model", "")), "x": r["predicted"], "y": r["measured"]})
    return {"pairs": pairs, "unit": "nats per token"} if pairs else None


def versions_of(found: Found) -> dict[str, str]:
    """Versions that the records name."""
    made: dict[str, str] = {}
    for record in (
        found.scores.versions if found.scores is not None else {}, (found.receipt or {}).get("versions") or {},
        ((found.tuned or {}).get("identity") or {}).get("versions") or {}, (found.contest or {}).get("versions") or {},
    ):  # fmt: skip
        made |= record
    return made


EXPONENTS = (0.0, 0.5, 1.0, 2.0)
SPARSITIES = tuple(round(0.05 * i, 2) for i in range(1, 18))
RANKS = (1, 2, 4, 8, 16, 32, 64)
PER_BLOCK = (1, 2, 3, 4, 5, 6, 8, 10)
LARGEST = 400  # blocks; beyond them a grid would make the page heavy


def solved_grid(scores: Scores, kind: str) -> dict[str, Any] | None:
    """Plans for a grid of budgets and exponents.

    Args:
        scores: The scores.
        kind: ``sparsity``, ``ranks`` or ``experts``.

    Returns:
        ``{kind, budgets, exponents, unit, plans: [[{values, cap, uniform, gain}]]}`` by exponent and budget, or None where
        these scores make no such plan.
    """
    if kind not in ("sparsity", "ranks", "experts") or not 1 < len(scores.blocks) <= LARGEST:
        return None
    by_rank = kind == "ranks" and "increments" in scores.extra
    exponents: Sequence[float] = () if by_rank else EXPONENTS
    found: dict[float, list[dict[str, Any]]] = {}
    for budget in {"sparsity": SPARSITIES, "ranks": RANKS, "experts": PER_BLOCK}[kind]:
        row = []
        for exponent in exponents or (None,):
            try:
                row.append(_one(scores, kind, budget, exponent))
            except LayerbudgetError:  # beyond the ranks that were measured, or below the floors: no place on the slider
                break
        if len(row) == len(exponents or (None,)):
            found[budget] = row
    if len(found) < 2:
        return None
    unit = {"sparsity": "sparsity", "ranks": "mean rank", "experts": "experts per block"}[kind]
    plans = [list(column) for column in zip(*found.values(), strict=True)]
    return {"kind": kind, "budgets": list(found), "exponents": list(exponents), "unit": unit, "plans": plans}


def _one(scores: Scores, kind: str, budget: float, exponent: float | None) -> dict[str, Any]:
    given: dict[str, Any] = {} if exponent is None else {"exponent": exponent}
    if kind == "sparsity":
        plan, cap = plan_sparsity(scores, sparsity=budget, **given), default_cap(budget)
        values = plan.values
    else:
        total = int(budget * len(scores.blocks))
        plan = plan_ranks(scores, mean_rank=budget, **given) if kind == "ranks" else plan_experts(scores, total=total, **given)
        values, cap = plan.counts.astype(float), None
    return {
        "values": [float(f"{v:.4g}") for v in values], "cap": cap, "uniform": budget,
        "share": plan.extra.get("uniform_share"), "status": plan.certificate.get("status"),
    }  # fmt: skip
