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
    from .comparison.run import write_comparison as write_comparison
    from .data.calibration import CalibrationSet as CalibrationSet
    from .data.text import calibration as calibration
    from .decisions.apply import apply_plan as apply_plan
    from .decisions.bits import plan_bits as plan_bits
    from .decisions.bits import write_bits as write_bits
    from .decisions.cache import plan_cache as plan_cache
    from .decisions.expert_pruning import keep_experts as keep_experts
    from .decisions.expert_pruning import plan_expert_pruning as plan_expert_pruning
    from .decisions.joint import plan_joint as plan_joint
    from .decisions.joint import split_joint as split_joint
    from .decisions.lora_experts import add_lora_experts as add_lora_experts
    from .decisions.lora_experts import plan_lora_experts as plan_lora_experts
    from .decisions.memory import plan_memory as plan_memory
    from .decisions.memory import write_memory as write_memory
    from .decisions.ranks import add_ranks as add_ranks
    from .decisions.ranks import fold_scales as fold_scales
    from .decisions.ranks import pad_ranks as pad_ranks
    from .decisions.ranks import plan_ranks as plan_ranks
    from .decisions.ranks import to_lora_config as to_lora_config
    from .decisions.shapes import Speed as Speed
    from .decisions.shapes import apply_shapes as apply_shapes
    from .decisions.shapes import measure_speed as measure_speed
    from .decisions.shapes import plan_shapes as plan_shapes
    from .decisions.shapes import remove_units as remove_units
    from .decisions.sparsity import plan_sparsity as plan_sparsity
    from .decisions.sparsity import prune as prune
    from .decisions.sparsity import recount as recount
    from .decisions.sparsity import save_pruned as save_pruned
    from .diagnosis import diagnose as diagnose
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
    from .reporting.explain import explain_plan as explain_plan
    from .reporting.page import write_report as write_report
    from .reporting.sweep import diff_plans as diff_plans
    from .reporting.sweep import sweep as sweep
    from .reporting.sweep import transfer_scores as transfer_scores
    from .scores import Scores as Scores
    from .sensitivity.certificate import certify_ranking as certify_ranking
    from .sensitivity.certificate import direct_check as direct_check
    from .sensitivity.gain import score as score
    from .sensitivity.importing import import_scores as import_scores
    from .storage.folders import write_model as write_model

__version__ = "0.1.0"

_HOMES = {
    "models.loading": "load_model load_tokenizer blocks_from_config",
    "models.blocks": "partition",
    "data.text": "calibration",
    "data.calibration": "CalibrationSet",
    "diagnosis": "diagnose",
    "sensitivity.gain": "score",
    "sensitivity.importing": "import_scores",
    "scores": "Scores",
    "sensitivity.certificate": "certify_ranking direct_check",
    "decisions.sparsity": "plan_sparsity prune recount save_pruned",
    "decisions.bits": "plan_bits write_bits",
    "decisions.cache": "plan_cache",
    "decisions.memory": "plan_memory write_memory",
    "decisions.shapes": "plan_shapes Speed measure_speed apply_shapes remove_units",
    "decisions.expert_pruning": "plan_expert_pruning keep_experts",
    "decisions.ranks": "plan_ranks add_ranks fold_scales pad_ranks to_lora_config",
    "decisions.lora_experts": "plan_lora_experts add_lora_experts",
    "decisions.joint": "plan_joint split_joint",
    "plan": "Plan",
    "reporting.explain": "explain_plan",
    "reporting.sweep": "diff_plans sweep transfer_scores",
    "decisions.apply": "apply_plan",
    "finetuning.finetune": "finetune",
    "finetuning.adapters": "load_adapter",
    "finetuning.tracking": "GainTracker",
    "evaluation.perplexity": "perplexity evaluation_set",
    "evaluation.harness": "evaluate_tasks",
    "evaluation.statistics": "compare_results",
    "comparison.run": "compare_scores write_comparison",
    "comparison.bench": "TextBench TaskBench",
    "reporting.page": "write_report",
    "storage.folders": "write_model",
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
