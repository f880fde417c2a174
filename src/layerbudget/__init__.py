"""layerbudget: decide which layer of a language model gets how much.

Measure how much loss each layer can still remove, spend (or save) one global budget across the layers by an exactly
solved convex program, apply the decision, and prove what it did. Public names are imported on first use, so that
``import layerbudget`` and ``--help`` are quick and the decision core never needs torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "load_model": "loading",
    "load_tokenizer": "loading",
    "partition": "blocks",
    "calibration": "data.text",
    "CalibrationSet": "data.calibration",
    "score": "scores.gain",
    "Scores": "scores.record",
    "Plan": "plan",
    "plan_sparsity": "planning",
    "plan_experts": "planning",
    "plan_ranks": "planning",
    "plan_joint": "planning",
    "plan_again": "planning",
    "sweep": "planning",
    "diff_plans": "planning",
    "explain_plan": "planning",
    "transfer_scores": "planning",
    "blocks_from_config": "configurations",
    "prune": "pruning.apply",
    "recount": "pruning.receipt",
    "save_pruned": "pruning.save",
    "damage_curves": "damage.measure",
    "plan_by_curves": "damage.by_curves",
    "plan_depth": "shrinking.depth",
    "plan_structured": "shrinking.shapes",
    "apply_structured": "shrinking.shrink",
    "apply_plan": "kinds",
    "remove_heads": "shrinking.heads",
    "recover": "pruning.recovery",
    "to_lora_config": "lora.ranks",
    "add_ranks": "lora.ranks",
    "add_experts": "lora.mixtures",
    "perplexity": "evaluation.perplexity",
    "evaluation_set": "evaluation.perplexity",
    "diagnose": "doctor",
    "import_scores": "scores.importing",
    "direct_check": "scores.certificate",
    "certify_ranking": "scores.certificate",
    "GainTracker": "tracker",
}

_RENAMED = {"calibrate": "plan_by_curves", "examine": "diagnose"}  # for one release

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"layerbudget.{name} is {_RENAMED[name]} now.", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
