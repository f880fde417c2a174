"""layerbudget: decide which layer of a language model gets how much.

Measure how much loss each layer can still remove, spend (or save) one global budget across the layers by an exactly
solved convex program, apply the decision, and prove what it did. Public names are imported on first use, so that
``import layerbudget`` and ``--help`` are quick and the decision core never needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ imports on first use, so that editors and type checkers know it
    from .data.calibration import CalibrationSet as CalibrationSet
    from .data.text import calibration as calibration
    from .decisions.apply import apply_plan as apply_plan
    from .decisions.bits.apply import write_bits as write_bits
    from .decisions.bits.plan import plan_bits as plan_bits
    from .decisions.experts.method import add_experts as add_experts
    from .decisions.experts.plan import plan_experts as plan_experts
    from .decisions.joint.plan import plan_joint as plan_joint
    from .decisions.ranks.apply import add_ranks as add_ranks
    from .decisions.ranks.apply import fold_scales as fold_scales
    from .decisions.ranks.apply import to_lora_config as to_lora_config
    from .decisions.ranks.plan import plan_ranks as plan_ranks
    from .decisions.shapes.apply import apply_shapes as apply_shapes
    from .decisions.shapes.apply import remove_units as remove_units
    from .decisions.shapes.depth import plan_depth as plan_depth
    from .decisions.shapes.plan import plan_shapes as plan_shapes
    from .decisions.sparsity.apply import prune as prune
    from .decisions.sparsity.plan import plan_sparsity as plan_sparsity
    from .decisions.sparsity.receipt import recount as recount
    from .decisions.sparsity.save import save_pruned as save_pruned
    from .doctor import diagnose as diagnose
    from .evaluation.perplexity import evaluation_set as evaluation_set
    from .evaluation.perplexity import perplexity as perplexity
    from .finetuning.adapters import load_adapter as load_adapter
    from .finetuning.finetune import finetune as finetune
    from .finetuning.tracking import GainTracker as GainTracker
    from .models.blocks import partition as partition
    from .models.configurations import blocks_from_config as blocks_from_config
    from .models.loading import load_model as load_model
    from .models.loading import load_tokenizer as load_tokenizer
    from .plan import Plan as Plan
    from .plans.again import plan_again as plan_again
    from .plans.again import transfer_scores as transfer_scores
    from .plans.compare import diff_plans as diff_plans
    from .plans.compare import sweep as sweep
    from .plans.explain import explain_plan as explain_plan
    from .scores import Scores as Scores
    from .sensitivity.certificate import certify_ranking as certify_ranking
    from .sensitivity.certificate import direct_check as direct_check
    from .sensitivity.gain import score as score
    from .sensitivity.importing import import_scores as import_scores

__version__ = "0.1.0"

_PUBLIC = {
    "load_model": "models.loading",
    "load_tokenizer": "models.loading",
    "partition": "models.blocks",
    "calibration": "data.text",
    "CalibrationSet": "data.calibration",
    "score": "sensitivity.gain",
    "Scores": "scores",
    "Plan": "plan",
    "plan_sparsity": "decisions.sparsity.plan",
    "plan_bits": "decisions.bits.plan",
    "plan_experts": "decisions.experts.plan",
    "plan_ranks": "decisions.ranks.plan",
    "plan_joint": "decisions.joint.plan",
    "plan_again": "plans.again",
    "sweep": "plans.compare",
    "diff_plans": "plans.compare",
    "explain_plan": "plans.explain",
    "transfer_scores": "plans.again",
    "blocks_from_config": "models.configurations",
    "prune": "decisions.sparsity.apply",
    "recount": "decisions.sparsity.receipt",
    "save_pruned": "decisions.sparsity.save",
    "plan_depth": "decisions.shapes.depth",
    "plan_shapes": "decisions.shapes.plan",
    "apply_shapes": "decisions.shapes.apply",
    "apply_plan": "decisions.apply",
    "write_bits": "decisions.bits.apply",
    "remove_units": "decisions.shapes.apply",
    "to_lora_config": "decisions.ranks.apply",
    "add_ranks": "decisions.ranks.apply",
    "fold_scales": "decisions.ranks.apply",
    "add_experts": "decisions.experts.method",
    "perplexity": "evaluation.perplexity",
    "evaluation_set": "evaluation.perplexity",
    "diagnose": "doctor",
    "import_scores": "sensitivity.importing",
    "direct_check": "sensitivity.certificate",
    "certify_ranking": "sensitivity.certificate",
    "GainTracker": "finetuning.tracking",
    "finetune": "finetuning.finetune",
    "load_adapter": "finetuning.adapters",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
