"""What ranks and LoRA experts share: their bounds, their rules, and the way from scores to a plan. No torch."""

from .bounds import CapacityBounds, smallest_sides
from .decide import decide
from .options import ALPHA_POLICIES, FIX, LATENCY, Rounding, check_budgets, counted_options, one_budget
from .rules import in_proportion

__all__ = [
    "ALPHA_POLICIES",
    "FIX",
    "LATENCY",
    "CapacityBounds",
    "Rounding",
    "check_budgets",
    "counted_options",
    "decide",
    "in_proportion",
    "one_budget",
    "smallest_sides",
]
