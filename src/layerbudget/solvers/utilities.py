r"""Utilities of capacity (concave phi) and penalties of pruning (convex psi), each with its inverse derivative.

One object has ``value(x)``, ``derivative(x)`` and ``inverse(p)`` (the x at which the derivative is p), all vectorised, and
``modulus(low, high)``, the smallest ``|second derivative|`` on an interval, from which transfer bounds are made.
``linear(scale, amount)`` is given by the two functions of the paper, log and quadratic, for which capacity (or pruned
parameters) is linear in one dual variable, so that the exact search of :mod:`layerbudget.solvers.dual` applies.
Your own function needs the three methods only: :class:`Custom`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..errors import InvalidInput
from .inputs import Vector, filled, number


class Function(Protocol):
    """What a program asks of phi or psi."""

    name: str

    def value(self, x: Vector) -> Vector:
        """Value at x, zero at zero."""
        ...

    def derivative(self, x: Vector) -> Vector:
        """Positive derivative: decreasing for a utility, increasing for a penalty."""
        ...

    def inverse(self, p: Vector) -> Vector:
        """The x with ``derivative(x) = p``; clipped by the caller."""
        ...

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """Smallest ``|second derivative|`` on ``[low, high]``: how strongly concave or convex the function is there."""
        ...


class Log:
    """``phi(e) = log(1 + e)``, the paper's utility (section 4)."""

    name, concave, exact = "log", True, True

    def value(self, x: Vector) -> Vector:
        """``log(1 + x)``."""
        return np.log1p(x)

    def derivative(self, x: Vector) -> Vector:
        """``1 / (1 + x)``."""
        return 1.0 / (1.0 + x)

    def inverse(self, p: Vector) -> Vector:
        """``1 / p - 1``."""
        return 1.0 / p - 1.0

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """``1 / (1 + high)^2``."""
        return (1.0 + high) ** -2.0

    def linear(self, scale: Vector, amount: Vector) -> tuple[Vector, Vector]:
        """``amount * x = t scale - amount`` with ``t = 1 / price``."""
        return scale, -amount


class Power:
    """``phi(e) = ((1 + e)^r - 1) / r`` for ``r < 1``, ``r != 0`` (r near 0 is the log; smaller r is more equal)."""

    concave, exact = True, False

    def __init__(self, power: float = 0.5) -> None:
        if not (np.isfinite(power) and power < 1 and power != 0):
            raise InvalidInput(f"The utility's power is {power}.", "It must be below 1 and not 0.", "Use 0.5, or the log.")
        self.power, self.name = float(power), f"power({power:g})"

    def value(self, x: Vector) -> Vector:
        """``((1 + x)^r - 1) / r``."""
        return np.expm1(self.power * np.log1p(x)) / self.power

    def derivative(self, x: Vector) -> Vector:
        """``(1 + x)^(r - 1)``."""
        return np.exp((self.power - 1.0) * np.log1p(x))

    def inverse(self, p: Vector) -> Vector:
        """``p^(1 / (r - 1)) - 1``."""
        return np.expm1(np.log(p) / (self.power - 1.0))

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """``(1 - r) (1 + high)^(r - 2)``."""
        return (1.0 - self.power) * (1.0 + high) ** (self.power - 2.0)


class Saturating:
    """``phi(e) = 1 - exp(-e / s)``: nothing is gained far beyond ``s`` units."""

    concave, exact = True, False

    def __init__(self, scale: float = 4.0) -> None:
        self.scale = number(scale, "scale of the saturating utility", positive=True)
        self.name = f"saturating({scale:g})"

    def value(self, x: Vector) -> Vector:
        """``1 - exp(-x / s)``."""
        return -np.expm1(-x / self.scale)

    def derivative(self, x: Vector) -> Vector:
        """``exp(-x / s) / s``."""
        return np.exp(-x / self.scale) / self.scale

    def inverse(self, p: Vector) -> Vector:
        """``-s log(s p)``."""
        return -self.scale * np.log(self.scale * p)

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """``exp(-high / s) / s^2``."""
        return np.exp(-high / self.scale) / self.scale**2


class Quadratic:
    """``psi(rho) = rho^2``, the paper's penalty (section 5)."""

    name, concave, exact = "quadratic", False, True

    def value(self, x: Vector) -> Vector:
        """``x^2``."""
        return x * x

    def derivative(self, x: Vector) -> Vector:
        """``2 x``."""
        return 2.0 * x

    def inverse(self, p: Vector) -> Vector:
        """``p / 2``."""
        return 0.5 * p

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """2 everywhere."""
        return np.full(np.shape(high), 2.0)

    def linear(self, scale: Vector, amount: Vector) -> tuple[Vector, Vector]:
        """``amount * x = t amount^2 / (2 scale)`` with ``t = price``."""
        return amount / scale * amount * 0.5, filled(amount.size, 0.0)


class LogBarrier:
    """``psi(rho) = -log(1 - rho)``: pruning a block to nothing costs infinitely much."""

    name, concave, exact = "log-barrier", False, False

    def value(self, x: Vector) -> Vector:
        """``-log(1 - x)``."""
        return -np.log1p(-x)

    def derivative(self, x: Vector) -> Vector:
        """``1 / (1 - x)``."""
        return 1.0 / (1.0 - x)

    def inverse(self, p: Vector) -> Vector:
        """``1 - 1 / p``."""
        return 1.0 - 1.0 / p

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """``1 / (1 - low)^2``."""
        return (1.0 - low) ** -2.0


class PowerPenalty:
    """``psi(rho) = rho^p``, ``p > 1``."""

    concave, exact = False, False

    def __init__(self, power: float = 3.0) -> None:
        if not (np.isfinite(power) and power > 1):
            raise InvalidInput(f"The penalty's power is {power}.", "It must be above 1.", "Use 2 (quadratic) or 3.")
        self.power, self.name = float(power), f"power({power:g})"

    def value(self, x: Vector) -> Vector:
        """``x^p``."""
        return x**self.power

    def derivative(self, x: Vector) -> Vector:
        """``p x^(p - 1)``."""
        return self.power * x ** (self.power - 1.0)

    def inverse(self, p: Vector) -> Vector:
        """``(q / p)^(1 / (p - 1))``."""
        return (p / self.power) ** (1.0 / (self.power - 1.0))

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """``p (p - 1) x^(p - 2)`` at ``low`` for ``p >= 2`` (zero at a floor of zero for ``p > 2``), at ``high`` below."""
        return self.power * (self.power - 1.0) * (low if self.power >= 2.0 else high) ** (self.power - 2.0)


class Exponential:
    """``psi(rho) = exp(a rho) - 1``: damage that grows by a constant factor per point of sparsity."""

    concave, exact = False, False

    def __init__(self, rate: float = 5.0) -> None:
        self.rate = number(rate, "rate of the exponential penalty", positive=True)
        self.name = f"exponential({rate:g})"

    def value(self, x: Vector) -> Vector:
        """``exp(a x) - 1``."""
        return np.expm1(self.rate * x)

    def derivative(self, x: Vector) -> Vector:
        """``a exp(a x)``."""
        return self.rate * np.exp(self.rate * x)

    def inverse(self, p: Vector) -> Vector:
        """``log(p / a) / a``."""
        return np.log(p / self.rate) / self.rate

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """``a^2 exp(a low)``."""
        return self.rate**2 * np.exp(self.rate * low)


class Custom:
    """Your own phi or psi: value, derivative and inverse derivative, vectorised, ``value(0) = 0``, derivative positive.

    Args:
        value: Concave (utility) or convex (penalty) function of capacity or sparsity.
        derivative: Its derivative.
        inverse: Inverse of the derivative.
        modulus: ``(low, high) -> `` smallest ``|second derivative|`` between them; needed for transfer bounds only.
        name: Name for the record.
    """

    exact = False

    def __init__(
        self,
        value: Callable[[Vector], Vector],
        derivative: Callable[[Vector], Vector],
        inverse: Callable[[Vector], Vector],
        *,
        modulus: Callable[[Vector, Vector], Vector] | None = None,
        name: str = "custom",
    ) -> None:
        self.value, self.derivative, self.inverse, self.name = value, derivative, inverse, name
        self._modulus = modulus
        probe = np.linspace(0.05, 0.45, 5)
        with np.errstate(all="ignore"):
            back = np.asarray(inverse(derivative(probe)))
        if back.shape != probe.shape or not np.allclose(back, probe, rtol=1e-6):
            raise InvalidInput(
                f"inverse(derivative(x)) of {name} is {back.tolist()} at {probe.tolist()}.",
                "It must give x back.",
                "Correct the inverse derivative.",
            )
        slopes = np.asarray(derivative(probe))
        self.concave = bool(slopes[-1] < slopes[0])

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """The modulus that was given.

        Raises:
            InvalidInput: None was.
        """
        if self._modulus is None:
            raise InvalidInput(
                f"{self.name} has no modulus, so no transfer bound can be computed for it.",
                "A bound needs the smallest |second derivative| between two points.",
                "Give it: Custom(..., modulus=lambda low, high: ...).",
            )
        return np.asarray(self._modulus(low, high), dtype=np.float64)


UTILITIES: dict[str, Callable[[], Function]] = {"log": Log, "power": Power, "saturating": Saturating}
PENALTIES: dict[str, Callable[[], Function]] = {
    "quadratic": Quadratic,
    "log-barrier": LogBarrier,
    "power": PowerPenalty,
    "exponential": Exponential,
}


_DEFAULTS: dict[tuple[str, bool], Function] = {}


def resolve(function: str | Function, *, concave: bool) -> Function:
    """Turn a name into a function, or check an object.

    Raises:
        InvalidInput: An unknown name, or a convex function where a concave one is needed (or the reverse).
    """
    known = UTILITIES if concave else PENALTIES
    if isinstance(function, str):
        found = _DEFAULTS.get((function, concave))
        if found is None:
            if function not in known:
                kind = "utility" if concave else "penalty"
                raise InvalidInput(
                    f"There is no {kind} {function!r}.", f"Known: {', '.join(known)}.", f"Use {next(iter(known))!r}."
                )
            found = _DEFAULTS[function, concave] = known[function]()
        return found
    if getattr(function, "concave", concave) != concave:
        wanted = "concave (a utility)" if concave else "convex (a penalty)"
        raise InvalidInput(f"{getattr(function, 'name', function)} has the wrong curvature.", f"It must be {wanted}.", "")
    return function
