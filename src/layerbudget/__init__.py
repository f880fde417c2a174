"""layerbudget: decide which layer of a language model gets how much.

Measure how much loss each layer can still remove, spend (or save) one global budget across the layers by an exactly
solved convex program, apply the decision, and prove what it did. Public names are imported on first use, so that
``import layerbudget`` and ``--help`` are quick and the decision core never needs torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ imports on first use, so that editors and type checkers know it
    from .blocks import partition as partition
    from .configurations import blocks_from_config as blocks_from_config
    from .damage.by_curves import plan_by_curves as plan_by_curves
    from .damage.directional import fisher_along as fisher_along
    from .damage.measure import damage_curves as damage_curves
    from .damage.sequential import plan_directional as plan_directional
    from .data.calibration import CalibrationSet as CalibrationSet
    from .data.text import calibration as calibration
    from .doctor import diagnose as diagnose
    from .evaluation.perplexity import evaluation_set as evaluation_set
    from .evaluation.perplexity import perplexity as perplexity
    from .kinds import apply_plan as apply_plan
    from .loading import load_model as load_model
    from .loading import load_tokenizer as load_tokenizer
    from .lora.mixtures import add_experts as add_experts
    from .lora.ranks import add_ranks as add_ranks
    from .lora.ranks import to_lora_config as to_lora_config
    from .plan import Plan as Plan
    from .planning import diff_plans as diff_plans
    from .planning import explain_plan as explain_plan
    from .planning import plan_again as plan_again
    from .planning import plan_experts as plan_experts
    from .planning import plan_joint as plan_joint
    from .planning import plan_ranks as plan_ranks
    from .planning import plan_sparsity as plan_sparsity
    from .planning import sweep as sweep
    from .planning import transfer_scores as transfer_scores
    from .pruning.apply import prune as prune
    from .pruning.receipt import recount as recount
    from .pruning.recovery import recover as recover
    from .pruning.save import save_pruned as save_pruned
    from .scores.certificate import certify_ranking as certify_ranking
    from .scores.certificate import direct_check as direct_check
    from .scores.gain import score as score
    from .scores.importing import import_scores as import_scores
    from .scores.record import Scores as Scores
    from .shrinking.depth import plan_depth as plan_depth
    from .shrinking.heads import remove_heads as remove_heads
    from .shrinking.shapes import plan_structured as plan_structured
    from .shrinking.shrink import apply_structured as apply_structured
    from .tracker import GainTracker as GainTracker

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
    "plan_directional": "damage.sequential",
    "fisher_along": "damage.directional",
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
