"""The rules: importing this package registers them. A new rule is a file here and a name in this line."""

from ...decisions.ranks import rule as by_rank
from . import capacity, maps
from ...decisions.experts import rule as experts
from ...decisions.sparsity import rule as sparsity

__all__ = ["by_rank", "capacity", "experts", "maps", "sparsity"]
