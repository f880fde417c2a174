"""The commands that make a record again, from what the record says of itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ..plan import Plan
from ..scores.record import Scores

_BUDGETS = {"experts": "--total", "ranks": "--mean-rank", "sparsity": "--sparsity"}


def _line(*words: Any) -> str:
    return " ".join(shlex.quote(str(w)) for w in words)


def _data(data: Mapping[str, Any]) -> list[Any]:
    named = {"data": data["source"], "samples": data["samples"], "length": data["length"], "seed": data.get("seed", 0)}
    return [word for name, value in named.items() for word in (f"--{name}", value)]


def score_command(scores: Scores) -> str:
    """``layerbudget score`` with the data, the estimator and the damping of a record."""
    data = scores.data
    words: list[Any] = ["layerbudget", "score", scores.model.get("id", "MODEL")]
    if data.get("source"):
        words += _data(data)
    words += ["--estimator", scores.estimator]
    if any("." in b.name.rpartition(".")[2] or len(b.modules) == 1 for b in scores.blocks) and len(scores.blocks) > 1:
        words += ["--by", "linear"] if all(len(b.modules) == 1 for b in scores.blocks) else []
    if scores.damping_unit != "none":
        words += ["--damping", *(f"{d:g}" for d in scores.damping), "--damping-unit", scores.damping_unit]
    return _line(*words, "-o", "scores.json")


def plan_command(plan: Plan) -> str:
    """``layerbudget plan`` (or ``measure``) with a plan's budget and what differs from the defaults."""
    held, words = plan.hyperparameters, list[Any]()
    if plan.kind == "sparsity" and plan.rule in ("calibrated", "directional"):
        words = ["layerbudget", "measure", plan.model.get("id", "MODEL"), "--sparsity", held.get("sparsity", "S")]
        if plan.rule == "calibrated":
            return _line(*words, "--search", "curves", "-o", "plan.json")
        for option in ("method", "by", "passes", "max_sparsity", "seed"):
            if held.get(option) is not None:
                words += [f"--{option.replace('_', '-')}", held[option]]
        return _line(*words, "-o", "plan.json")
    if plan.kind == "bits":
        own = ["--format", plan.extra["family"], "--runtime", plan.extra["runtime"], "--method", plan.extra["method"]]
        amount = ["--budget", held["budget"]] if held.get("budget") else ["--bits", f"{held.get('bits', plan.extra['bits']):g}"]
        return _line("layerbudget", "plan", "bits", plan.model.get("id", "MODEL"), *amount, *own, "-o", "bits.json")
    if plan.kind not in _BUDGETS:
        return _line("layerbudget", "plan", plan.kind, "--help")
    words = ["layerbudget", "plan", plan.kind, "scores.json", "--rule", plan.rule]
    name = _BUDGETS[plan.kind]
    if plan.kind == "sparsity":
        words += [name, held.get("sparsity"), "--max-sparsity", held.get("max_sparsity")]
    elif plan.kind == "experts" and plan.budget.get("unit") == "experts":
        words += [name, f"{plan.budget['limit']:g}"]
    elif held.get("mean_rank") is not None:
        words += [name, f"{held['mean_rank']:g}"]
    else:
        words += ["--budget", plan.budget.get("text") or f"{plan.budget['limit']:g}"]
    for option in ("exponent", "damping", "seed"):
        if held.get(option) is not None:
            words += [f"--{option}", f"{held[option]:g}"]
    return _line(*words, "-o", "plan.json")


def finetune_command(record: Mapping[str, Any], plan: Plan | None) -> str:
    """``layerbudget finetune`` with the numbers of a run."""
    protocol, of = record["identity"].get("protocol") or {}, plan.model.get("id", "MODEL") if plan is not None else "MODEL"
    text = record["metric"] == "loss"
    words: list[Any] = ["layerbudget", "finetune", of, "plan.json", "--data" if text else "--task", record["task"]]
    words += ["--seeds", *record["seeds"]]
    for name in ("epochs", "lr", "batch"):
        words += [f"--{name}", f"{protocol[name]:g}"] if name in protocol else []
    words += ["--set", f"cutoff={protocol['cutoff']}"] if "cutoff" in protocol else []
    words += ["--packing"] if protocol.get("packing") else []
    return _line(*words, "-o", "adapters")


def prune_command(receipt: Mapping[str, Any]) -> str:
    """``layerbudget prune`` with the method and the data of a receipt."""
    data = receipt.get("data") or {}
    words: list[Any] = ["layerbudget", "prune", receipt["model"].get("id", "MODEL"), "plan.json", "--method", receipt["method"]]
    if data.get("source"):
        words += _data(data)
    pattern = (receipt.get("settings") or {}).get("pattern")
    words += ["--pattern", pattern] if pattern else []
    return _line(*words, "-o", "pruned")
