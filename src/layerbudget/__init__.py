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
    from .decisions.cache.plan import plan_cache as plan_cache
    from .decisions.experts.method import add_experts as add_experts
    from .decisions.experts.plan import plan_experts as plan_experts
    from .decisions.fit.plan import plan_fit as plan_fit
    from .decisions.fit.plan import write_fit as write_fit
    from .decisions.joint.plan import plan_joint as plan_joint
    from .decisions.kept_experts.apply import keep_experts as keep_experts
    from .decisions.kept_experts.plan import plan_kept_experts as plan_kept_experts
    from .decisions.ranks.apply import add_ranks as add_ranks
    from .decisions.ranks.apply import fold_scales as fold_scales
    from .decisions.ranks.apply import pad_ranks as pad_ranks
    from .decisions.ranks.apply import to_lora_config as to_lora_config
    from .decisions.ranks.plan import plan_ranks as plan_ranks
    from .decisions.shapes.apply import apply_shapes as apply_shapes
    from .decisions.shapes.apply import remove_units as remove_units
    from .decisions.shapes.plan import plan_shapes as plan_shapes
    from .decisions.shapes.speed import Speed as Speed
    from .decisions.shapes.speed import measure_speed as measure_speed
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
    from .plans.compare import diff_plans as diff_plans
    from .plans.compare import sweep as sweep
    from .plans.compare import transfer_scores as transfer_scores
    from .plans.explain import explain_plan as explain_plan
    from .report.page import write_report as write_report
    from .scores import Scores as Scores
    from .sensitivity.certificate import certify_ranking as certify_ranking
    from .sensitivity.certificate import direct_check as direct_check
    from .sensitivity.gain import score as score
    from .sensitivity.importing import import_scores as import_scores

__version__ = "0.1.0"

_HOMES = {
    "models.loading": "load_model load_tokenizer blocks_from_config",
    "models.blocks": "partition",
    "data.text": "calibration",
    "data.calibration": "CalibrationSet",
    "doctor": "diagnose",
    "sensitivity.gain": "score",
    "sensitivity.importing": "import_scores",
    "scores": "Scores",
    "sensitivity.certificate": "certify_ranking direct_check",
    "decisions.sparsity.plan": "plan_sparsity",
    "decisions.bits.plan": "plan_bits",
    "decisions.cache.plan": "plan_cache",
    "decisions.fit.plan": "plan_fit write_fit",
    "decisions.shapes.plan": "plan_shapes",
    "decisions.shapes.speed": "Speed measure_speed",
    "decisions.kept_experts.plan": "plan_kept_experts",
    "decisions.ranks.plan": "plan_ranks",
    "decisions.experts.plan": "plan_experts",
    "decisions.joint.plan": "plan_joint",
    "plan": "Plan",
    "plans.explain": "explain_plan",
    "plans.compare": "diff_plans sweep transfer_scores",
    "decisions.apply": "apply_plan",
    "decisions.sparsity.apply": "prune",
    "decisions.sparsity.receipt": "recount",
    "decisions.sparsity.save": "save_pruned",
    "decisions.bits.apply": "write_bits",
    "decisions.shapes.apply": "apply_shapes remove_units",
    "decisions.ranks.apply": "add_ranks fold_scales pad_ranks to_lora_config",
    "decisions.kept_experts.apply": "keep_experts",
    "decisions.experts.method": "add_experts",
    "finetuning.finetune": "finetune",
    "finetuning.adapters": "load_adapter",
    "finetuning.tracking": "GainTracker",
    "evaluation.perplexity": "perplexity evaluation_set",
    "evaluation.harness": "evaluate_tasks",
    "evaluation.statistics": "compare_results",
    "comparison.run": "compare_scores",
    "comparison.bench": "TextBench TaskBench",
    "report.page": "write_report",
}
_PUBLIC = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
