"""The rules: importing this package registers them. A new rule is a file here and a name in this line."""

from . import by_rank, capacity, experts, maps, sparsity

__all__ = ["by_rank", "capacity", "experts", "maps", "sparsity"]
