"""The programs, solved exactly and certified, and their rounding: numpy and scipy only, no model needed."""

from .choices import Choice, choose, near_ties
from .counted import choose_few
from .joint import JointSolution, solve_joint
from .programs import allocate, sparsify
from .rounding import RoundedCapacity, allocate_increments, few_levels, round_capacity, round_parameters
from .separable import Solution
from .transfer import Transfer, transfer_allocation, transfer_sparsity
from .utilities import CalibratedPenalty

__all__ = [
    "CalibratedPenalty",
    "Choice",
    "JointSolution",
    "RoundedCapacity",
    "Solution",
    "Transfer",
    "allocate",
    "allocate_increments",
    "choose",
    "choose_few",
    "few_levels",
    "near_ties",
    "round_capacity",
    "round_parameters",
    "solve_joint",
    "sparsify",
    "transfer_allocation",
    "transfer_sparsity",
]
