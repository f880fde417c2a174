"""From scores to plans: the ``plan_*`` functions, and comparing plans. No torch."""

from .again import plan_again
from .capacity import plan_experts, plan_ranks
from .compare import diff_plans, sweep
from .explain import explain_plan
from .joint import plan_joint, split_joint
from .recipe import plan_recipe, split_recipe
from .sparsity import plan_sparsity
from .transfer import transfer_scores

__all__ = [
    "diff_plans",
    "explain_plan",
    "plan_again",
    "plan_experts",
    "plan_joint",
    "plan_ranks",
    "plan_recipe",
    "plan_sparsity",
    "split_joint",
    "split_recipe",
    "sweep",
    "transfer_scores",
]
