"""Shared by ranks and LoRA experts: their bounds, their rules, and the way from scores to a plan. No torch."""

from .bounds import CapacityBounds, check_expert_rank, check_ranks, smallest_sides
from .options import ALPHA_POLICIES, FIX, LATENCY, Rounding, check_budgets, counted_options, one_budget
from .plan import decide
from .rules import in_proportion

__all__ = [
    "ALPHA_POLICIES",
    "FIX",
    "LATENCY",
    "CapacityBounds",
    "Rounding",
    "check_budgets",
    "check_expert_rank",
    "check_ranks",
    "counted_options",
    "decide",
    "in_proportion",
    "one_budget",
    "smallest_sides",
]
