"""layerbudget: decide which layer of a language model gets how much.

Measure how much loss each layer can still remove, spend (or save) one global budget across the layers by an exactly
solved convex program, apply the decision, and prove what it did. Public names are imported on first use, so that
``import layerbudget`` and ``--help`` are quick and the decision core never needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ imports on first use, so that editors and type checkers know it
    from .comparison.bench import TaskBench as TaskBench
    from .comparison.bench import TextBench as TextBench
    from .comparison.run import compare_scores as compare_scores
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
    from .decisions.shapes.plan import plan_shapes as plan_shapes
    from .decisions.sparsity.apply import prune as prune
    from .decisions.sparsity.plan import plan_sparsity as plan_sparsity
    from .decisions.sparsity.receipt import recount as recount
    from .decisions.sparsity.save import save_pruned as save_pruned
    from .doctor import diagnose as diagnose
    from .evaluation.harness import evaluate_tasks as evaluate_tasks
    from .evaluation.perplexity import evaluation_set as evaluation_set
    from .evaluation.perplexity import perplexity as perplexity
    from .evaluation.statistics import compare_results as compare_results
    from .finetuning.adapters import load_adapter as load_adapter
    from .finetuning.finetune import finetune as finetune
    from .finetuning.tracking import GainTracker as GainTracker
    from .models.blocks import partition as partition
    from .models.loading import blocks_from_config as blocks_from_config
    from .models.loading import load_model as load_model
    from .models.loading import load_tokenizer as load_tokenizer
    from .plan import Plan as Plan
    from .plans.again import plan_again as plan_again
    from .plans.again import transfer_scores as transfer_scores
    from .plans.compare import diff_plans as diff_plans
    from .plans.compare import sweep as sweep
    from .plans.explain import explain_plan as explain_plan
    from .report.page import write_report as write_report
    from .scores import Scores as Scores
    from .sensitivity.certificate import certify_ranking as certify_ranking
    from .sensitivity.certificate import direct_check as direct_check
    from .sensitivity.gain import score as score
    from .sensitivity.importing import import_scores as import_scores

__version__ = "0.1.0"

_PUBLIC = {
    # models and text
    "load_model": "models.loading",
    "load_tokenizer": "models.loading",
    "partition": "models.blocks",
    "blocks_from_config": "models.loading",
    "calibration": "data.text",
    "CalibrationSet": "data.calibration",
    "diagnose": "doctor",
    # scores
    "score": "sensitivity.gain",
    "import_scores": "sensitivity.importing",
    "Scores": "scores",
    "certify_ranking": "sensitivity.certificate",
    "direct_check": "sensitivity.certificate",
    # plans
    "plan_sparsity": "decisions.sparsity.plan",
    "plan_bits": "decisions.bits.plan",
    "plan_shapes": "decisions.shapes.plan",
    "plan_ranks": "decisions.ranks.plan",
    "plan_experts": "decisions.experts.plan",
    "plan_joint": "decisions.joint.plan",
    "Plan": "plan",
    # what is done with plans
    "explain_plan": "plans.explain",
    "diff_plans": "plans.compare",
    "sweep": "plans.compare",
    "plan_again": "plans.again",
    "transfer_scores": "plans.again",
    # applied
    "apply_plan": "decisions.apply",
    "prune": "decisions.sparsity.apply",
    "recount": "decisions.sparsity.receipt",
    "save_pruned": "decisions.sparsity.save",
    "write_bits": "decisions.bits.apply",
    "apply_shapes": "decisions.shapes.apply",
    "remove_units": "decisions.shapes.apply",
    "add_ranks": "decisions.ranks.apply",
    "add_experts": "decisions.experts.method",
    "fold_scales": "decisions.ranks.apply",
    "to_lora_config": "decisions.ranks.apply",
    # trained
    "finetune": "finetuning.finetune",
    "load_adapter": "finetuning.adapters",
    "GainTracker": "finetuning.tracking",
    # measured
    "perplexity": "evaluation.perplexity",
    "evaluation_set": "evaluation.perplexity",
    "evaluate_tasks": "evaluation.harness",
    "compare_results": "evaluation.statistics",
    "compare_scores": "comparison.run",
    "TextBench": "comparison.bench",
    "TaskBench": "comparison.bench",
    "write_report": "report.page",
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
