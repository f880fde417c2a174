"""Validation of what the programs are given: every refusal says what, the feasible range and the remedy."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DegenerateScores, InvalidCost, InvalidInput, LengthMismatch, NegativeValue, NotFinite

Vector = NDArray[np.float64]
P = ParamSpec("P")
T = TypeVar("T")
LARGE = 2048


def weight_vector(weights: ArrayLike, name: str = "weights") -> tuple[Vector, float, float]:
    """Return the weights as a vector with their smallest and largest value.

    Raises:
        NotFinite: A NaN or infinite weight.
        NegativeValue: A negative weight.
        DegenerateScores: No weight is positive.
        LengthMismatch: Not a non-empty vector.
    """
    w = _vector(weights, name)
    low, high = float(np.minimum.reduce(w)), float(np.maximum.reduce(w))
    if low >= 0.0 and 0.0 < high < math.inf:
        return w, low, high
    bad = ~np.isfinite(w)
    if bad.any():
        k = int(np.argmax(bad))
        raise NotFinite(f"{name}[{k}] is {w[k]}.", "Every value must be finite.", f"Drop block {k} or score it again.")
    if low < 0:
        k = int(np.argmin(w))
        raise NegativeValue(
            f"{name}[{k}] is {w[k]:g}.", "Values must be zero or more.", "Use max(value, 0), or a value's square."
        )
    raise DegenerateScores(
        f"All {w.size} {name} are zero: nothing can be ranked.",
        "At least one must be positive.",
        "Use more samples, another damping or another estimator.",
    )


def cost_vector(cost: ArrayLike, size: int, name: str = "cost") -> Vector:
    """Return positive costs of ``size`` blocks; a scalar is repeated.

    Raises:
        InvalidCost: A cost of zero or less.
        NotFinite: A NaN or infinite cost.
        LengthMismatch: Another number of values than blocks.
    """
    c = _vector(cost, name, size)
    low, high = np.minimum.reduce(c), np.maximum.reduce(c)
    if 0.0 < low and high < math.inf:
        return c
    bad = ~np.isfinite(c)
    if bad.any():
        k = int(np.argmax(bad))
        raise NotFinite(f"{name}[{k}] is {c[k]}.", "Every value must be finite.", f"Correct the {name} of block {k}.")
    k = int(np.argmin(c))
    raise InvalidCost(
        f"{name}[{k}] is {c[k]:g}.", "Every value must be positive.", f"Leave block {k} out, or price it by its parameters."
    )


def bound_vector(bound: ArrayLike | None, size: int, name: str, default: float) -> Vector | float:
    """Return a bound as a scalar or a vector of ``size`` values; ``None`` is the default.

    Raises:
        NotFinite: A NaN.
        NegativeValue: A negative bound.
        LengthMismatch: Another number of values than blocks.
    """
    if bound is None:
        return default
    if isinstance(bound, (int, float)):
        value = float(bound)
        if value >= 0.0:
            return value
        if value != value:
            raise NotFinite(f"{name} is NaN.", "It must be a number.", f"Leave {name} out for its default.")
        raise NegativeValue(f"{name} is {value:g}.", "It must be zero or more.", f"Leave {name} out for its default.")
    v = _vector(bound, name, size)
    if np.minimum.reduce(v) >= 0.0:
        return v
    k = int(np.argmax(~(v >= 0.0)))
    kind = NotFinite if np.isnan(v[k]) else NegativeValue
    raise kind(f"{name}[{k}] is {v[k]}.", "Values must be zero or more.", f"Correct {name} of block {k}.")


@functools.lru_cache(maxsize=256)
def filled(size: int, value: float) -> Vector:
    """A constant vector: a read-only view of one number, which costs no memory traffic."""
    return np.broadcast_to(np.float64(value), (size,))


def is_constant(v: Vector, value: float) -> bool:
    """Whether a vector is known (by its zero stride) to hold ``value`` everywhere."""
    return v.strides == (0,) and float(v[0]) == value


def number(value: Any, name: str, *, positive: bool = False) -> float:
    """Return a finite number, zero or more (or positive).

    Raises:
        NotFinite: NaN, infinite or not a number.
        NegativeValue: Below zero, or zero where ``positive``.
    """
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


def choice(value: str, name: str, options: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the options.

    Raises:
        InvalidInput: It is not.
    """
    if value in options:
        return value
    raise InvalidInput(f"{name} is {value!r}.", f"It is one of {', '.join(options)}.", f"Use {name}={options[0]!r}.")


def _vector(values: ArrayLike, name: str, size: int | None = None) -> Vector:
    try:
        v = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} is not a vector of numbers ({error}).", "", "Give one number per block.") from error
    if v.ndim == 0 and size is not None:
        return filled(size, float(v))
    if v.ndim != 1 or v.size == 0 or (size is not None and v.size != size):
        wanted = "a non-empty vector" if size is None else f"{size} values, one per block"
        raise LengthMismatch(f"{name} has shape {v.shape}.", f"It needs {wanted}.", "Give one value per block, in block order.")
    return v


def renamed(old: str, new: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Take a keyword under its old name too, with a warning, for one release."""

    def around(function: Callable[P, T]) -> Callable[P, T]:
        """The function, which now takes both names."""

        @functools.wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            if old in keywords:
                warnings.warn(f"{function.__name__}({old}=) is {new}= now.", DeprecationWarning, stacklevel=2)
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return call

    return around
