"""The decision core: numpy and scipy only, no model needed."""

from .allocation import allocate
from .calibrated import CalibratedPenalty
from .counts import round_parameters, round_pattern
from .increments import allocate_increments
from .joint import JointSolution, solve_joint
from .rounding import Rounded, round_capacity
from .solution import Solution
from .sparsity import sparsify
from .transfer import Transfer, transfer_allocation, transfer_sparsity

__all__ = [
    "CalibratedPenalty",
    "JointSolution",
    "Rounded",
    "Solution",
    "Transfer",
    "allocate",
    "allocate_increments",
    "round_capacity",
    "round_parameters",
    "round_pattern",
    "solve_joint",
    "sparsify",
    "transfer_allocation",
    "transfer_sparsity",
]
