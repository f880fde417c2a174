"""The decision core: numpy and scipy only, no model needed."""

from .allocation import allocate
from .calibrated import CalibratedPenalty
from .solution import Solution
from .sparsity import sparsify

__all__ = ["CalibratedPenalty", "Solution", "allocate", "sparsify"]
