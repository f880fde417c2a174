"""Validation of what the programs are given: every refusal says what is wrong, the feasible range and the remedy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DegenerateScores, InvalidCost, InvalidInput, LengthMismatch, NegativeValue, NotFinite

Vector = NDArray[np.float64]


def weight_vector(weights: ArrayLike, name: str = "weights") -> Vector:
    """Return the weights as a vector."""
    w = _finite(_vector(weights, name), name)
    if w.min() < 0:
        raise NegativeValue(
            f"{name}[{int(np.argmin(w))}] is {w.min():g}.",
            "Values must be zero or more.",
            "Use max(value, 0), or a value's square.",
        )
    if w.max() > 0:
        return w
    raise DegenerateScores(
        f"All {w.size} {name} are zero: nothing can be ranked.",
        "At least one must be positive.",
        "Use more samples, another damping or another estimator.",
    )


def cost_vector(cost: ArrayLike, size: int, name: str = "cost") -> Vector:
    """Return positive costs of ``size`` blocks; a scalar is repeated."""
    c = _finite(_vector(cost, name, size), name)
    k = int(np.argmin(c))
    if c[k] > 0.0:
        return c
    raise InvalidCost(
        f"{name}[{k}] is {c[k]:g}.", "Every value must be positive.", f"Leave block {k} out, or price it by its parameters."
    )


def bound_vector(bound: ArrayLike | None, size: int, name: str, default: float) -> Vector:
    """Return a bound of ``size`` blocks, zero or more; a scalar is repeated, ``None`` is the default."""
    v = _vector(default if bound is None else bound, name, size)
    if v.min() >= 0.0:
        return v
    k = int(np.argmax(~(v >= 0.0)))
    kind = NotFinite if np.isnan(v[k]) else NegativeValue
    raise kind(f"{name}[{k}] is {v[k]}.", "Values must be zero or more.", f"Correct {name} of block {k}.")


def number(value: Any, name: str, *, positive: bool = False) -> float:
    """Return a finite number, zero or more (or positive); anything else is refused."""
    try:
        x = float(value)
    except (TypeError, ValueError):
        x = math.nan
    if not math.isfinite(x):
        raise NotFinite(f"{name} is {value!r}.", "It must be a finite number.", f"Give {name} as a plain number.")
    if x < 0.0 or (positive and x == 0.0):
        wanted = "positive" if positive else "zero or more"
        raise NegativeValue(f"{name} is {x:g}.", f"It must be {wanted}.", f"Give a {name} that is {wanted}.")
    return x


def whole_number(value: Any, name: str) -> int:
    """Return a whole number of one or more; anything else is refused."""
    whole = int(number(value, name, positive=True))
    if whole == value:
        return whole
    raise InvalidInput(f"{name} is {value}.", "It is a whole number of one or more.", "Use 1 or 8, for example.")


def choice(value: str, name: str, options: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the options; anything else is refused."""
    if value in options:
        return value
    raise InvalidInput(f"{name} is {value!r}.", f"It is one of {', '.join(options)}.", f"Use {name}={options[0]!r}.")


def spoken_amount(value: float) -> str:
    """A whole or a large number with its thousands, another one in six digits.

    >>> spoken_amount(33792.0), spoken_amount(1695743.7), spoken_amount(0.25)
    ('33,792', '1,695,744', '0.25')
    """
    return f"{value:,.0f}" if abs(value) < 1e15 and (value == round(value) or abs(value) >= 1e5) else f"{value:.6g}"


def in_a_line(counts: np.ndarray) -> str:
    """Whole numbers, the middle left out where they are many.

    >>> in_a_line(np.arange(10, 30))
    '[10 11 12 ... 27 28 29]'
    """
    return np.array2string(counts, threshold=12, max_line_width=1000)


def _finite(v: Vector, name: str) -> Vector:
    bad = ~np.isfinite(v)
    if bad.any():
        k = int(np.argmax(bad))
        raise NotFinite(f"{name}[{k}] is {v[k]}.", "Every value must be finite.", f"Correct or drop block {k}.")
    return v


def _vector(values: ArrayLike, name: str, size: int | None = None) -> Vector:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise NotFinite(f"{name} has masked values.", "Every value must be known.", "Fill or drop them.")
    try:
        v = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor with a graph
        raise InvalidInput(f"{name} is not a vector of numbers ({error}).", "", "Give one number per block.") from error
    if v.ndim == 0 and size is not None:
        return np.full(size, float(v))
    if v.ndim != 1 or v.size == 0 or (size is not None and v.size != size):
        wanted = "a non-empty vector" if size is None else f"{size} values, one per block"
        raise LengthMismatch(f"{name} has shape {v.shape}.", f"It needs {wanted}.", "Give one value per block, in block order.")
    return v
