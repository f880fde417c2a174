"""How one choice stands beside another: the one place where numbers become the words of a verdict.

A difference is a win where it is both certain and large enough to matter. It is ``level`` where it is too small to matter or
within the error of a measurement, and ``open`` where a test does not find a difference that would matter. Behind ``+-`` stand
two standard errors, everywhere: about 95 % of the values that a repetition would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LEVEL_OF_TEST = 0.05  # two-sided p-value from which on a difference is chance
SMALL = 0.001  # nats per token, or accuracy: a smaller difference matters to nobody
SAME = 0.005  # of a damage: the share that is small
CONVENTION = "+- two standard errors"
LEVEL_WITH = "level with "

Outcome = Literal["lower", "level", "open", "higher"]


def outcome(effect: float, *, error: float = 0.0, p: float | None = None, small: float = SMALL) -> Outcome:
    """Return how the first of two choices stands beside the second: ``lower``, ``higher``, ``level`` or ``open``.

    Args:
        effect: First minus second, in any unit.
        error: Standard error of the effect; below two of them it is level.
        p: p-value of a test; from .05 on a larger effect is open: few seeds or rows find nothing, whatever is there.
        small: A smaller effect is level, however certain it is.

    >>> outcome(-0.2, error=0.05), outcome(-0.2, error=0.15), outcome(-0.0002, p=1e-9), outcome(-0.5, p=0.5)
    ('lower', 'level', 'level', 'open')
    """
    if abs(effect) <= max(2 * error, small):
        return "level"
    if p is not None and p >= LEVEL_OF_TEST:
        return "open"
    return "lower" if effect < 0 else "higher"


def less_than(damage: float, other: float, name: str, error: float = 0.0) -> str:
    """Return how a damage stands beside that of another choice, in words; ``error`` is that of their difference.

    >>> less_than(0.5, 1.0, "uniform"), less_than(0.999, 1.0, "uniform")
    ('50 % less than uniform', 'level with uniform')
    """
    direction = outcome(damage - other, error=error, small=SAME * other)
    if direction == "level":
        return f"{LEVEL_WITH}{name}"
    share = 100 * abs(1 - max(damage, 0.0) / other) if other > 0 else 100.0
    return f"{share:.{0 if share >= 10 else 1}f} % {'less' if direction == 'lower' else 'more'} than {name}"


def by_chance(controls: Sequence[str]) -> str:
    """Return the words that end a win where controls do as well: then it is not the score that wins. Empty without any.

    >>> by_chance(["owl(gain, permuted)"])
    ', but a shuffled score does as well: owl(gain, permuted)'
    """
    return f", but a shuffled score does as well: {', '.join(controls)}" if controls else ""


def plus_minus(error: float, form: str = ".1g") -> str:
    """Return two standard errors as they follow a number; empty where there are none.

    >>> plus_minus(0.05), plus_minus(0.0123, ".3f"), plus_minus(0.0)
    (' +- 0.1', ' +- 0.025', '')
    """
    return f" +- {2 * error:{form}}" if error else ""


def named(error: float | None) -> str:
    """Return the convention in brackets, to follow a number with its error; empty where there is no error."""
    return f" ({CONVENTION})" if error else ""


def nats(value: float, error: float) -> str:
    """Return a damage with its error as a sentence has it.

    >>> nats(0.0123, 0.001)
    '0.0123 +- 0.002 nats per token (+- two standard errors)'
    """
    return f"{value:.4g}{plus_minus(error)} nats per token{named(error)}"
