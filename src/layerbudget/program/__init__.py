"""The decision core: numpy and scipy only, no model needed."""

from .allocation import allocate
from .solution import Solution
from .sparsity import sparsify

__all__ = ["Solution", "allocate", "sparsify"]
