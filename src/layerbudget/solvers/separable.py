r"""The class of both programs of the paper, its exact solution and its certificate.

    minimise   sum_k  s (h_k f(x_k) - p0 a_k x_k)     subject to one budget on  sum_k a_k x_k  and  l_k <= x_k <= u_k

with ``s = -1``, f concave for allocation and ``s = +1``, f convex for sparsity. For a price ``p = p0 + lambda`` every block
is alone: ``x_k(p) = clip(f'^-1(p a_k / h_k), l_k, u_k)``. One price makes the budget fit (:mod:`layerbudget.solvers.dual`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import numpy as np

from .dual import monotone_root, piecewise_root
from .inputs import Vector, spoken_amount

NOTHING_LEFT = "Every floor equals its cap, so nothing is left to decide. Raise the caps, or lower the floors."
_SATURATED = "Every block is at its cap: only larger caps can change the decision. Raise the cap, or lower the budget."
_CONSTANTS = "Every block sits at the same bound: the constants decide, the scores do not."


class Function(Protocol):
    """A function phi or psi of a program; a ``modulus`` is only read by transfer bounds."""

    name: str

    def value(self, x: Vector) -> Vector:
        """Return the value at x, zero at zero."""

    def derivative(self, x: Vector) -> Vector:
        """Return the positive derivative: decreasing for a utility, increasing for a penalty."""

    def inverse(self, p: Vector) -> Vector:
        """Return the x with ``derivative(x) = p``; clipped by the caller."""

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """Return the smallest ``|second derivative|`` on ``[low, high]``."""


class Program(NamedTuple):
    """A separable program.

    - ``sign``: -1 allocation, +1 sparsity.
    - ``function``: phi or psi.
    - ``scale``: ``h_k``, the weights in the objective's unit, positive, shape ``(K,)``.
    - ``amount``: ``a_k``, budget per unit of ``x_k``, shape ``(K,)``.
    - ``price``: ``p0`` (alpha or b, per unit of budget).
    - ``low``, ``high``: Bounds of ``x``, shape ``(K,)``.
    - ``base``: What is added to x to give the decision (and is paid from the budget), shape ``(K,)``.
    - ``budget``: Right-hand side for ``x + base``; ``target`` for ``x`` alone.
    - ``exact_budget``: True for ``spend='exactly'``.
    - ``names``: Names of the parameters that cancel when the budget binds.
    """

    sign: int
    function: Function
    scale: Vector
    amount: Vector
    price: float
    low: Vector
    high: Vector
    base: Vector
    budget: float
    target: float
    exact_budget: bool
    names: tuple[str, ...] = ()

    def at_price(self, p: float) -> Vector:
        """Return every block's own optimum at price ``p``, shape ``(K,)``."""
        x = self.function.inverse(self.amount * p / self.scale)
        return np.minimum(np.maximum(x, self.low), self.high)

    def cannot_bind(self) -> bool:
        """Return whether the caps leave a part of the budget, or the floors alone prune more than is asked for."""
        if self.sign < 0:
            return self.target > float(np.dot(self.amount, self.high)) * (1.0 + 1e-12)
        return self.target < float(np.dot(self.amount, self.low)) * (1.0 - 1e-12)

    def terms(self, x: Vector) -> Vector:
        """Return ``s h_k f(x_k)`` per block, shape ``(K,)``."""
        return self.sign * (self.function.value(x) * self.scale)

    def stationarity(self, x: Vector, p: float) -> tuple[float, bool, bool]:
        """Return the relative stationarity residual at price ``p``, and whether all blocks are at their floor or cap."""
        f, price = self.function, self.amount * p
        if hasattr(f, "subgradient"):  # at a kink, the subgradient nearest to the price
            left, right = f.subgradient(x)
            marginal = np.minimum(np.maximum(price, self.scale * left), self.scale * right)
        else:
            marginal = self.scale * f.derivative(x)
        wish = np.where(marginal == price, 0.0, (marginal - price) / (np.abs(marginal) + np.abs(price)))
        above, below = x > self.low, x < self.high
        worst = max(float((-self.sign * wish * below).max()), float((self.sign * wish * above).max())) + 0.0
        return (worst if worst == worst else math.inf), not above.any(), not below.any()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Solution:
    r"""A certified decision (frozen).

    Attributes:
        value: The decision, shape ``(K,)``: capacity (base included) or sparsity.
        status: ``binding``, ``slack``, ``saturated`` or ``degenerate``; :attr:`message` says it in a sentence. An infeasible
            program never yields a solution: it raises :class:`layerbudget.errors.InfeasibleBudget`.
        multiplier: lambda, by which the minimum of the whole objective falls (allocation) or rises (sparsity) with one more
            unit of budget; zero where the budget does not bind. Under ``spend='exactly'`` it is negative where the last unit
            earns less than its price ``alpha`` (or hurts less than ``b``).
        multiplier_interval: All lambda that certify the same decision; one point unless it lies on a plateau.
        shadow_price: ``alpha + lambda`` or ``b + lambda``: by which the utility ``gamma sum w phi`` or the penalty
            ``eta sum w psi`` alone rises with one more unit of budget; zero where the budget does not bind.
            With ``units='relative'`` the weights are scaled to mean 1 here, and alpha and b are per mean cost or size:
            :doc:`/notation` has an example.
        primal, dual: Objective at the decision, and the dual function at lambda, computed from lambda alone.
        gap: ``|primal - dual|`` relative to the sum of the absolute values of the objective's terms (and the price of a
            millionth of one unit everywhere).
        kkt_residual: Largest violation of stationarity (relative), bounds, complementary slackness and budget (relative to it,
            or to a millionth of one unit everywhere where that is more).
        spent, budget, slack: Budget used, budget given, and what is left (allocation) or overshot (sparsity).
        inert: Names of the parameters that had no influence on the decision.
        program: The program that was solved, in the form that rounding and transfer use.

    >>> from layerbudget.solvers import allocate
    >>> allocate([2.0, 1.0], cost=[1.0, 1.0], budget=4, spend="exactly").value
    array([3., 1.])
    """

    value: Vector
    status: str
    multiplier: float
    multiplier_interval: tuple[float, float]
    shadow_price: float
    primal: float
    dual: float
    gap: float
    kkt_residual: float
    spent: float
    budget: float
    slack: float
    inert: tuple[str, ...]
    program: Any

    def __post_init__(self) -> None:
        self.value.flags.writeable = False

    @property
    def lower(self) -> Vector:
        """Floors of the decision, shape ``(K,)``."""
        return self.program.low + self.program.base

    @property
    def upper(self) -> Vector:
        """Caps of the decision, shape ``(K,)``."""
        return self.program.high + self.program.base

    @property
    def message(self) -> str:
        """The status in a sentence, with the cheapest remedy where there is something to remedy."""
        p: Program = self.program
        if (p.low == p.high).all():
            return NOTHING_LEFT
        if self.status == "binding":
            what = "utility" if p.sign < 0 else "penalty"
            return f"The budget binds: one more unit of it raises the {what} by {self.shadow_price:.3g} (the shadow price)."
        if self.status == "saturated":
            return _SATURATED
        return self._on_allocation(p) if p.sign < 0 else self._on_sparsity(p)

    def _on_allocation(self, p: Program) -> str:
        """What prices decide, or floors that leave nothing of the budget."""
        spent, budget, slack = (spoken_amount(v) for v in (self.spent, self.budget, self.slack))
        if p.target <= float(np.dot(p.amount, p.low)) * (1.0 + 1e-12):
            return "The budget pays for base and floors alone. Raise the budget, or lower the floors."
        most = spoken_amount(p.budget - p.target + float(np.dot(p.amount, p.high)))
        exactly = f"spend='exactly' with a budget of {most}" if p.cannot_bind() else "spend='exactly'"
        if self.status == "degenerate":
            return (
                f"{_CONSTANTS} No block earns more than its base. Use {exactly} to spend it, or units='relative' so that "
                "costs and weights are compared on one scale."
            )
        if p.cannot_bind():
            caps = f"The caps take at most {most}, so a budget of {budget} does not bind: the price per unit alone decides"
            return f"{caps}, and {spent} is spent. Raise the caps, or use {exactly}."
        why = "The budget does not bind: the price per unit alone decides, and part of the budget is left."
        return f"{why} {slack} of {budget} is left; spend='exactly' spends it."

    def _on_sparsity(self, p: Program) -> str:
        """What the saved bits decide, or floors that prune more than is asked for."""
        spent, budget, slack = (spoken_amount(v) for v in (self.spent, self.budget, self.slack))
        if p.cannot_bind():
            least = spoken_amount(float(np.dot(p.amount, p.low)))
            more = f", and the bits saved bring it to {spent}" if least != spent else ""
            return f"The floors alone prune {least} where {budget} was asked for{more}. Lower min_sparsity."
        if self.status == "degenerate":
            return (
                f"{_CONSTANTS} The bits saved outweigh the penalty everywhere, so {spent} parameters go instead of the "
                f"{budget} asked for. Use spend='exactly' to prune what was asked for."
            )
        why = "The budget does not bind: the bits saved alone decide, and more goes than was asked for."
        return f"{why} {slack} more than the {budget} asked for is pruned; spend='exactly' stops there."

    def certificate(self) -> dict[str, Any]:
        """Return everything but the decision, as plain JSON values."""
        names = ("status", "multiplier", "shadow_price", "gap", "kkt_residual", "primal", "dual", "budget", "spent", "slack")
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        record["multiplier_interval"] = [m if np.isfinite(m) else None for m in self.multiplier_interval]
        record |= {"inert": list(self.inert), "message": self.message}
        at_lower, at_upper = self.value <= self.lower, self.value >= self.upper
        return record | {"at_lower": int(at_lower.sum()), "at_upper": int(at_upper.sum())}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.status}, K={self.value.size}, spent={self.spent:.6g} of {self.budget:.6g}, "
            f"multiplier={self.multiplier:.4g}, gap={self.gap:.1e}, kkt={self.kkt_residual:.1e})"
        )


def solve(program: Program) -> Solution:
    """Find the price, take every block's own optimum at it, certify. The caller has checked that the program is feasible."""
    with np.errstate(all="ignore"):
        fill = getattr(program.function, "fill", None)
        filled, p, p_low, p_high = fill(program) if fill else (None, *_root(program))
        slack = not program.exact_budget and p_high < program.price
        if not program.exact_budget:
            p, p_low, p_high = (max(v, program.price) for v in (p, p_low, p_high))
            if program.cannot_bind():  # of all prices that hold every block at its bound, the budget that is left allows one
                slack, p, p_low, p_high = True, program.price, program.price, program.price
        best = program.at_price(p)
        x = best if filled is None or slack else filled
        return _certified(program, x, best, p, (p_low, p_high), slack=slack)


def _root(program: Program) -> tuple[float, float, float]:
    """Price at which the budget is met exactly, and the interval of all such prices."""
    f, a = program.function, program.amount
    if hasattr(f, "linear"):
        slope, offset = f.linear(program.scale, a)
        t, t_low, t_high = piecewise_root(slope, offset, a * program.low, a * program.high, program.target)
        if program.sign > 0:
            return t, max(t_low, 0.0), t_high
        return reciprocal(t), reciprocal(t_high), reciprocal(t_low)
    knots = np.tile(program.scale / a, 2) * np.concatenate((f.derivative(program.low), f.derivative(program.high)))
    if program.sign > 0:
        return monotone_root(lambda p: float(np.dot(a, program.at_price(p))), knots, program.target)
    t, t_low, t_high = monotone_root(lambda t: float(np.dot(a, program.at_price(1.0 / t))), 1.0 / knots, program.target)
    return 1.0 / t, reciprocal(t_high), reciprocal(t_low)


def reciprocal(t: float) -> float:
    """Return ``1 / t``, infinite from zero down."""
    return 1.0 / t if t > 0.0 else math.inf


def _certified(program: Program, x: Vector, best: Vector, p: float, interval: tuple[float, float], *, slack: bool) -> Solution:
    """Bind a decision and a price; ``best`` minimises the Lagrangian at ``p``, which is the dual function."""
    a, sign, p0, multiplier = program.amount, program.sign, program.price, p - program.price
    (terms, used), (best_terms, best_used) = ((float(np.add.reduce(program.terms(v))), float(np.dot(a, v))) for v in (x, best))
    worst, at_low, at_high = program.stationarity(x, p)
    primal = terms - sign * p0 * used
    dual = best_terms - sign * (p * best_used - multiplier * program.target)
    floor = max(abs(program.target), unit := 1e-6 * float(np.add.reduce(a)))
    size = abs(terms) + p0 * used + abs(multiplier) * abs(program.target) + abs(p) * unit
    over = -sign * (used - program.target)
    feasibility = (abs(over) if program.exact_budget else max(over, 0.0)) / floor
    complementarity = 0.0 if program.exact_budget or size <= 0.0 else multiplier * abs(over) / size
    if (at_low and sign < 0) or (at_high and slack and sign > 0):
        status = "degenerate"
    elif at_high:
        status = "saturated"
    else:
        status = "slack" if slack else "binding"
    inert = (*program.names, "weights", "exponent", *(("n",) if sign > 0 else ()))
    return Solution(
        value=x + program.base,
        status=status,
        multiplier=multiplier,
        multiplier_interval=(interval[0] - p0, interval[1] - p0),
        shadow_price=0.0 if slack else p,
        primal=primal,
        dual=dual,
        gap=abs(primal - dual) / size if size > 0.0 else 0.0,
        kkt_residual=max(worst, feasibility, complementarity),
        spent=used + (program.budget - program.target),
        budget=program.budget,
        slack=-over,
        inert={"binding": program.names, "slack": ("budget",)}.get(status, inert),
        program=program,
    )
