"""Options that several rules share, as a table from which flags are made. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..solvers.rounding import METHODS
from ..solvers.utilities import PENALTIES, UTILITIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option that several rules share.

    Attributes:
        default: Where neither user nor rule says otherwise.
        help: A line for the command line, whose flags are made from this table.
        value: ``number``, ``whole`` (number), ``word`` or ``flag``.
        choices: Its values, where they are words.
    """

    default: Any
    help: str
    value: str = "number"
    choices: tuple[str, ...] = ()


# A rule's own options come with the rule.
OPTIONS: Mapping[str, Option] = {
    "exponent": Option(default=1.0, help="exponent of the weights (paper: beta, kappa)"),
    "exponent_on": Option(
        default="density", choices=("density", "block"), value="word", help="what the exponent is applied to"
    ),
    "penalty": Option(default="quadratic", choices=tuple(PENALTIES), value="word", help="penalty of a sparsity"),
    "utility": Option(default="log", choices=tuple(UTILITIES), value="word", help="utility of capacity"),
    "spend": Option(
        default="exactly",
        choices=("exactly", "at_most", "at_least"),
        value="word",
        help="how much of the budget is spent: at_most for capacity, at_least for sparsity (the theorems), or exactly",
    ),
    "alpha": Option(default=None, help="price of capacity; inert where the budget binds (0.5)"),
    "gamma": Option(default=None, help="weight of the utility; inert where the budget binds (0.9)"),
    "bits": Option(default=None, help="b, bits saved per pruned parameter; inert where the target binds (16)"),
    "eta": Option(default=None, help="weight of the penalty; inert where the target binds (2)"),
    "units": Option(
        default=None,
        choices=("relative", "literal"),
        value="word",
        help="literal: costs, sizes and weights as they are, as the paper's text has it (relative)",
    ),
    "method": Option(default="auto", choices=METHODS, value="word", help="how counts are rounded"),
    "damping": Option(default=None, help="row of the scores; the middle one"),
    "smoothing": Option(default=0.0, help="added to every score, in units of the mean score"),
    "seed": Option(default=0, value="whole", help="of the controls"),
    "width": Option(default=None, help="width of the published maps"),
    "parity": Option(default=False, value="flag", help="published rules exactly as published"),
}
DEFAULTS: Mapping[str, Any] = {name: option.default for name, option in OPTIONS.items()}
# Constants of the programs, with defaults of their own: recorded where they were given.
CONSTANTS = ("alpha", "gamma", "bits", "eta", "units")


def constants_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The constants of a program that were given."""
    return {name: options[name] for name in CONSTANTS if options.get(name) is not None}
