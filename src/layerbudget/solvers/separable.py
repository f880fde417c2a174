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

from ..errors import NotFinite
from .dual import CHUNK, monotone_root, search
from .inputs import Vector, is_constant

_TINY = 1e-200
_TINIEST = 1e-290  # decisions below this are zero: their marginals underflow
_TRUSTED = 1e-10
_LARGE = 2048
_STATUSES = {
    "binding": "The budget binds: every unit of it is worth the shadow price.",
    "slack": "The budget does not bind: the price per unit alone decides, and part of the budget is left.",
    "saturated": "Every block is at its cap: only larger caps can change the decision.",
    "degenerate": "Every block sits at the same bound: the constants decide, the scores do not.",
}


class Function(Protocol):
    """A function phi or psi of a program."""

    name: str

    def value(self, x: Vector) -> Vector:
        """Return the value at x, zero at zero."""
        ...

    def derivative(self, x: Vector) -> Vector:
        """Return the positive derivative: decreasing for a utility, increasing for a penalty."""
        ...

    def inverse(self, p: Vector) -> Vector:
        """Return the x with ``derivative(x) = p``; clipped by the caller."""
        ...

    def modulus(self, low: Vector, high: Vector) -> Vector:
        """Return the smallest ``|second derivative|`` on ``[low, high]``."""
        ...


class Program(NamedTuple):
    """A separable program.

    Its fields are

    - ``sign``: -1 allocation, +1 sparsity.
    - ``function``: phi or psi.
    - ``scale``: ``h_k``, the weights in the objective's unit, positive, shape ``(K,)``.
    - ``amount``: ``a_k``, budget per unit of ``x_k``, shape ``(K,)``.
    - ``price``: ``p0`` (alpha or b, per unit of budget).
    - ``low``, ``high``: Bounds of ``x``, shape ``(K,)``.
    - ``base``: What is added to x to give the decision (and is paid from the budget), shape ``(K,)``.
    - ``budget``: Right-hand side for ``x + base``.
    - ``target``: Right-hand side for ``x`` alone.
    - ``exact_budget``: True for ``spend='exactly'``.
    - ``names``: Names of the parameters that cancel when the budget binds.
    - ``factor``: Before :func:`solve`, what the weights are still to be multiplied by.
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
    factor: float = 1.0

    def scaled(self, value: float, budget: float) -> Program:
        """Return the program with its objective in units of ``1 / value`` and its budget in units of ``budget``."""
        return self._replace(
            scale=self.scale * (self.factor * value),
            factor=1.0,
            amount=self.amount if budget == 1.0 else self.amount / budget,
            price=self.price * value * budget,
            budget=self.budget / budget,
            target=self.target / budget,
        )

    def cut(self, start: int, stop: int) -> Program:
        """Return the blocks from ``start`` to ``stop``, as views."""
        scale, amount, low, high = (v[start:stop] for v in (self.scale, self.amount, self.low, self.high))
        return self._replace(scale=scale, amount=amount, low=low, high=high)

    def at_price(self, p: float) -> Vector:
        """Return every block's own optimum at price ``p``, shape ``(K,)``."""
        x = self.function.inverse(self.amount * p / self.scale)
        return np.minimum(np.maximum(x, self.low), self.high)

    def terms(self, x: Vector) -> Vector:
        """Return ``s h_k f(x_k)`` per block, shape ``(K,)``."""
        v = self.function.value(x)
        v *= self.scale
        return -v if self.sign < 0 else v


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Solution:
    r"""A certified decision (frozen).

    Attributes:
        value: The decision, shape ``(K,)``: capacity (base included) or sparsity.
        status: ``binding``, ``slack``, ``saturated`` or ``degenerate``; :attr:`message` says it in a sentence. An infeasible
            program never yields a solution: it raises :class:`layerbudget.errors.InfeasibleBudget`.
        multiplier: lambda, utility (or penalty) per unit of budget; zero where the budget does not bind, and possibly
            negative under ``spend='exactly'``.
        multiplier_interval: All lambda that certify the same decision; one point unless it lies on a plateau.
        shadow_price: ``alpha + lambda`` or ``b + lambda``: utility per unit of budget at the margin.
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
    def at_lower(self) -> np.ndarray:
        """Mask of the blocks at their floor, shape ``(K,)``."""
        return self.value <= self.lower

    @property
    def at_upper(self) -> np.ndarray:
        """Mask of the blocks at their cap, shape ``(K,)``."""
        return self.value >= self.upper

    @property
    def message(self) -> str:
        """The status in a sentence, with the cheapest remedy where there is something to remedy."""
        spent, budget, slack = (f"{v:.6g}" for v in (self.spent, self.budget, self.slack))
        allocates, remedy = self.program.sign < 0, ""
        if self.status == "saturated":
            remedy = " Raise the cap, or lower the budget to leave a choice."
        elif self.status == "degenerate" and allocates:
            remedy = (
                " No block earns more than its base. Use spend='exactly' to spend the budget, or units='relative' so that "
                "costs and weights are compared on one scale."
            )
        elif self.status == "degenerate":
            remedy = (
                f" The bits saved outweigh the penalty everywhere, so {spent} parameters go instead of the {budget} asked for. "
                "Use spend='exactly' to prune what was asked for."
            )
        elif self.status == "slack" and allocates:
            remedy = f" {slack} of {budget} is left; spend='exactly' spends it."
        elif self.status == "slack":
            remedy = f" {slack} more than the {budget} asked for is pruned; spend='exactly' stops there."
        return _STATUSES[self.status] + remedy

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate and the decision as plain JSON values."""
        return {"value": self.value.tolist(), **self.certificate()}

    def certificate(self) -> dict[str, Any]:
        """Return everything but the decision, as plain JSON values."""
        names = ("status", "multiplier", "shadow_price", "gap", "kkt_residual", "primal", "dual", "budget", "spent", "slack")
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        record["multiplier_interval"] = [m if np.isfinite(m) else None for m in self.multiplier_interval]
        record |= {"inert": list(self.inert), "message": self.message}
        return record | {"at_lower": int(self.at_lower.sum()), "at_upper": int(self.at_upper.sum())}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.status}, K={self.value.size}, spent={self.spent:.6g} of {self.budget:.6g}, "
            f"multiplier={self.multiplier:.4g}, gap={self.gap:.1e}, kkt={self.kkt_residual:.1e})"
        )


def solve(raw: Program) -> Solution:
    """Solve and certify. The caller has checked that the program is feasible."""
    with np.errstate(all="ignore"):
        program = raw.scaled(1.0, 1.0)
        if _TINY < float(np.minimum.reduce(program.scale)) < 1.0 / _TINY:
            return _solve(program)
        return _solve_extreme(raw, program)


def _solve_extreme(raw: Program, program: Program) -> Solution:
    """Weights that span hundreds of decades: solve in units in which none of them underflows, then convert back."""
    low, high = (math.log2(float(f.reduce(raw.scale))) + math.log2(raw.factor) for f in (np.minimum, np.maximum))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NotFinite(
            "Weights and constants are together beyond what floating point counts.",
            "Products lie within 1e-300 and 1e300.",
            "Leave the constants (eta, gamma) at their defaults, or scale the scores.",
        )
    budget = 2.0 ** round(math.log2(float(np.add.reduce(raw.amount)) / raw.amount.size))
    value = 2.0 ** max(min(-round((low + high) / 2.0), 1000 - round(high), 1000), -1000)
    s = _solve(raw.scaled(value, budget))
    return dataclasses.replace(
        s,
        spent=s.spent * budget,
        slack=s.slack * budget,
        primal=s.primal / value,
        dual=s.dual / value,
        multiplier=s.multiplier / value / budget,
        shadow_price=s.shadow_price / value / budget,
        multiplier_interval=tuple(m / value / budget for m in s.multiplier_interval),  # type: ignore[arg-type]
        budget=raw.budget,
        program=program,
    )


def _solve(program: Program) -> Solution:
    """Find the price, take every block's own optimum at it, certify."""
    fill = getattr(program.function, "fill", None)
    x, p, p_low, p_high = fill(program) if fill else (None, *_root(program))
    slack = not program.exact_budget and p_high < program.price
    if not program.exact_budget:
        p, p_low, p_high = max(p, program.price), max(p_low, program.price), max(p_high, program.price)
    if x is None or slack:
        return _certify(program, *_decide(program, p), p, (p_low, p_high), slack=slack)
    return _certify(program, x, _tally(program, x, p), p, (p_low, p_high), slack=slack, best=program.at_price(p))


def _root(program: Program) -> tuple[float, float, float]:
    """Price at which the budget is met exactly, and the interval of all such prices."""
    f = program.function
    if hasattr(f, "linear"):
        slope, offset = f.linear(program.scale, program.amount)
        low, high = program.low, program.high
        low = low if is_constant(low, 0.0) else program.amount * low
        high = high if is_constant(high, math.inf) else program.amount * high
        t, t_low, t_high = search(slope, offset, low, high, program.target)
        if program.sign > 0:
            return t, max(t_low, 0.0), t_high
        return reciprocal(t), reciprocal(t_high), reciprocal(t_low)
    limits = np.concatenate((f.derivative(program.low), f.derivative(program.high)))
    knots = np.tile(program.scale / program.amount, 2) * limits

    def spend(p: float) -> float:
        return float(np.dot(program.amount, program.at_price(p if program.sign > 0 else 1.0 / p)))

    if program.sign > 0:
        return monotone_root(spend, knots, program.target)
    t, t_low, t_high = monotone_root(spend, 1.0 / knots, program.target)
    return 1.0 / t, reciprocal(t_high), reciprocal(t_low)


def reciprocal(t: float) -> float:
    """Return ``1 / t``, infinite from zero down."""
    return 1.0 / t if t > 0.0 else math.inf


class _Tally(NamedTuple):
    """Sums over blocks that the certificate needs."""

    terms: float
    used: float
    worst: float
    at_low: bool
    at_high: bool


def _tally(program: Program, x: Vector, p: float) -> _Tally:
    return _Tally(float(np.add.reduce(program.terms(x))), float(np.dot(program.amount, x)), *stationarity(program, x, p))


def _decide(program: Program, p: float) -> tuple[Vector, _Tally]:
    """Every block's optimum at a price, with its tally; in chunks that stay in the processor's cache."""
    size = program.amount.size
    if size <= _LARGE:
        x = program.at_price(p)
        return x, _tally(program, x, p)
    x = np.empty(size)
    tallies = []
    for i in range(0, size, CHUNK):
        part = program.cut(i, i + CHUNK)
        x[i : i + CHUNK] = piece = part.at_price(p)
        tallies.append(_tally(part, piece, p))
    terms, used, worst, low, high = zip(*tallies, strict=True)
    return x, _Tally(math.fsum(terms), math.fsum(used), max(worst), all(low), all(high))


def _certify(
    program: Program,
    x: Vector,
    tally: _Tally,
    p: float,
    interval: tuple[float, float],
    *,
    slack: bool,
    best: Vector | None = None,
) -> Solution:
    """Bind a decision and a price; ``best`` minimises the Lagrangian at ``p``, which is the dual function (x by default)."""
    a, sign, p0, multiplier = program.amount, program.sign, program.price, p - program.price
    terms, used, worst, at_low, at_high = tally
    primal = terms - sign * p0 * used
    if best is None:
        best_terms, best_used = terms, used
    else:
        best_terms, best_used = float(np.add.reduce(program.terms(best))), float(np.dot(a, best))
    dual = best_terms - sign * (p * best_used - multiplier * program.target)
    floor = max(abs(program.target), unit := 1e-6 * float(np.add.reduce(a)))
    size = abs(terms) + p0 * used + abs(multiplier) * abs(program.target) + abs(p) * unit
    over = -sign * (used - program.target)
    feasibility = (abs(over) if program.exact_budget else max(over, 0.0)) / floor
    complementarity = 0.0 if program.exact_budget or size <= 0.0 else multiplier * abs(over) / size
    if at_low and sign < 0:
        status = "degenerate"
    elif at_high:
        status = "degenerate" if slack and sign > 0 else "saturated"
    else:
        status = "slack" if slack else "binding"
    inert = (*program.names, "weights", "exponent", *(("n",) if sign > 0 else ()))
    return Solution(
        value=x if is_constant(program.base, 0.0) else x + program.base,
        status=status,
        multiplier=multiplier,
        multiplier_interval=(interval[0] - p0, interval[1] - p0),
        shadow_price=p,
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


def stationarity(program: Program, x: Vector, p: float) -> tuple[float, bool, bool]:
    """Return the relative stationarity residual at price ``p``, and whether all blocks are at their floor or cap."""
    f, price = program.function, program.amount * p
    if hasattr(f, "subgradient"):  # at a kink, the subgradient nearest to the price
        left, right = f.subgradient(x)
        marginal = np.minimum(np.maximum(price, program.scale * left), program.scale * right)
    else:
        marginal = program.scale * f.derivative(x)
    worst, at_low, at_high = _violation((marginal - price) / (marginal + price), x, program)
    if not worst <= _TRUSTED or hasattr(f, "subgradient"):  # 0 / 0, underflow, or slopes of both signs
        settled = (marginal == price) | ((x < _TINIEST) & (program.at_price(p) < _TINIEST))
        r = np.where(settled, 0.0, (marginal - price) / (np.abs(marginal) + np.abs(price)))
        worst, at_low, at_high = _violation(r, x, program)
    return (worst if worst == worst else math.inf), at_low, at_high


def _violation(r: Vector, x: Vector, program: Program) -> tuple[float, bool, bool]:
    """Largest wish for more below a cap, or for less above a floor."""
    r = r if program.sign < 0 else -r
    above, below = x > program.low, x < program.high
    worst = max(float(np.maximum.reduce(r * below)), -float(np.minimum.reduce(r * above))) + 0.0
    return worst, not np.logical_or.reduce(above), not np.logical_or.reduce(below)
