"""The rules of every kind of plan, by name: importing this module registers those of this package. No torch."""

from ..planning.rule import as_rule, find_rule, rules_of
from .experts import plan as _experts  # noqa: F401 - registers its rules
from .ranks import plan as _ranks  # noqa: F401 - registers its rules
from .sparsity import plan as _sparsity  # noqa: F401 - registers its rules

__all__ = ["as_rule", "find_rule", "rules_of"]
