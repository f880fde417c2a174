"""Errors that a user can act on.

Every message has three parts: what is wrong with the user's numbers, the feasible range, the cheapest remedy. Every class
also subclasses a builtin, so ``except ValueError`` keeps working. The command line turns each into one sentence and
exit code 2; a lost process ends with 1.
"""

from __future__ import annotations

import importlib
from typing import Any


class LayerbudgetError(Exception):
    """Base of all errors of this package: what is wrong, what would have been accepted, what to do about it."""

    def __init__(self, what: str, feasible: str = "", remedy: str = "") -> None:
        self.what, self.feasible, self.remedy = what, feasible, remedy
        super().__init__(" ".join(part for part in (what, feasible, remedy) if part))

    def __str__(self) -> str:  # that of a KeyError is in quotes
        return str(self.args[0])


class InvalidInput(LayerbudgetError, ValueError):
    """A number, a length or an option outside its domain (NaN, negative cost, sparsity 1.2, ...)."""


class NotFinite(InvalidInput):
    """A NaN or an infinity where a number is needed."""


class NegativeValue(InvalidInput):
    """A negative number where none makes sense."""


class LengthMismatch(InvalidInput):
    """Vectors that should describe the same blocks and have different lengths."""


class InvalidCost(InvalidInput):
    """A cost or size of zero or less: that block would be free."""


class InfeasibleBudget(LayerbudgetError, ValueError):
    """No decision satisfies the budget together with the floors and caps."""


class DegenerateScores(LayerbudgetError, ValueError):
    """The scores cannot rank anything: all zero, or all equal where a spread is needed."""


class UnknownUnit(LayerbudgetError, ValueError):
    """A budget in a unit that is not known or not priced for these blocks."""


class UnknownBlock(LayerbudgetError, KeyError):
    """A block or module name that the model or the record does not have."""


class UnknownStructure(LayerbudgetError, TypeError):
    """A model in which no list of layers could be found."""


class ModelMismatch(LayerbudgetError, ValueError):
    """A scores or plan file that was made for another model."""


class BadModel(LayerbudgetError, ValueError):
    """A model that cannot be loaded, or whose weights are not finite."""


class NotEnoughText(LayerbudgetError, ValueError):
    """Less text than the requested samples need."""


class CurvatureFailure(LayerbudgetError, ArithmeticError):
    """A curvature that is not positive definite at the requested damping, or did not converge."""


class CoverageError(LayerbudgetError, RuntimeError):
    """Parameters of a block that the estimator cannot see, or a recount that differs from the plan."""


class LostProcess(LayerbudgetError, RuntimeError):
    """Another process of the same run ended before its work was done: killed, out of memory, or not started at all."""


class MissingDependency(LayerbudgetError, ImportError):
    """An optional package that this call needs."""


class NotFound(LayerbudgetError, FileNotFoundError):
    """A file or folder that does not exist."""


class AlreadyExists(LayerbudgetError, FileExistsError):
    """An output that exists and would be overwritten."""


class CorruptFile(LayerbudgetError, ValueError):
    """A file of this package that does not parse or has another schema version."""


def need_package(module: str, what: str, other: str) -> Any:
    """Return a module of a package that is optional; ``other`` is what to do without it.

    Raises:
        MissingDependency: It is not installed; ``what`` says what needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(what, "", f"pip install '.[bits]' in the clone, or {other}.") from error
