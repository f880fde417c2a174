r"""The form that both programs share, its solution and its certificate.

    minimise   sum_k  s (h_k f(x_k) - p0 a_k x_k)     subject to one budget on  sum_k a_k x_k  and  l_k <= x_k <= u_k

with ``s = -1``, f concave for allocation and ``s = +1``, f convex for sparsity. For a price ``p = p0 + lambda`` every block
is alone: ``x_k(p) = clip(f'^-1(p a_k / h_k), l_k, u_k)``. One price makes the budget fit (:mod:`layerbudget.solvers.dual`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..errors import NotFinite
from .dual import CHUNK, monotone_root, search
from .inputs import LARGE, Vector, is_constant
from .solution import Solution
from .utilities import Function

_TINY = 1e-200
_TINIEST = 1e-290  # decisions below this are zero: their marginals underflow
_TRUSTED = 1e-10


class Program:
    """A separable program.

    Attributes:
        sign: -1 allocation, +1 sparsity.
        function: phi or psi.
        scale: ``h_k``, the weights in the objective's unit, positive, shape ``(K,)``.
        factor: Before :func:`solve`, what the weights are still to be multiplied by.
        amount: ``a_k``, budget per unit of ``x_k``, shape ``(K,)``.
        price: ``p0`` (alpha or b, per unit of budget).
        low, high: Bounds of ``x``, shape ``(K,)``.
        base: What is added to x to give the decision (and is paid from the budget), shape ``(K,)`` or 0.0.
        budget: Right-hand side for ``x + base``.
        target: Right-hand side for ``x`` alone.
        exact_budget: True for ``spend='exactly'``.
        names: Names of the parameters that cancel when the budget binds.
        weights: The weights as given, before exponents.
        settings: Everything else that the record should keep.
    """

    sign: int
    function: Function
    scale: Vector
    factor: float
    amount: Vector
    price: float
    low: Vector
    high: Vector
    base: Vector | float
    budget: float
    target: float
    exact_budget: bool
    names: tuple[str, ...]
    weights: Vector
    settings: tuple[Any, ...]

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def scaled(self, value: float, budget: float) -> Program:
        """The same program with its objective measured in units of ``1 / value`` and its budget in units of ``budget``."""
        fields = dict(self.__dict__)
        fields |= {"scale": self.scale * (self.factor * value), "factor": 1.0}
        fields["amount"] = self.amount if budget == 1.0 else self.amount / budget
        fields |= {"price": self.price * value * budget, "budget": self.budget / budget, "target": self.target / budget}
        return Program(**fields)

    def cut(self, start: int, stop: int) -> Program:
        """The blocks from ``start`` to ``stop``, as views."""
        fields = dict(self.__dict__)
        for name in ("scale", "amount", "low", "high"):
            fields[name] = fields[name][start:stop]
        return Program(**fields)

    def at_price(self, p: float) -> Vector:
        """Every block's own optimum at price ``p``, shape ``(K,)``."""
        x = self.function.inverse(self.amount * p / self.scale)
        return np.minimum(np.maximum(x, self.low), self.high)

    def terms(self, x: Vector) -> Vector:
        """``s h_k f(x_k)`` per block, shape ``(K,)``."""
        v = self.function.value(x)
        v *= self.scale
        return -v if self.sign < 0 else v

    def objective(self, x: Vector) -> float:
        """The objective at ``x`` (without the base), constant terms left out."""
        return float(np.add.reduce(self.terms(x))) - self.sign * self.price * float(np.dot(self.amount, x))


def root(program: Program) -> tuple[float, float, float]:
    """Price at which the budget is met exactly, and the interval of all such prices."""
    f = program.function
    if getattr(f, "exact", False):
        slope, offset = f.linear(program.scale, program.amount)  # type: ignore[attr-defined]
        low, high = program.low, program.high
        low = low if is_constant(low, 0.0) else program.amount * low
        high = high if is_constant(high, math.inf) else program.amount * high
        t, t_low, t_high = search(slope, offset, low, high, program.target)
        if program.sign > 0:
            return t, max(t_low, 0.0), t_high
        return _reciprocal(t), _reciprocal(t_high), _reciprocal(t_low)
    limits = np.concatenate((f.derivative(program.low), f.derivative(program.high)))
    knots = np.tile(program.scale / program.amount, 2) * limits

    def spend(p: float) -> float:
        price = p if program.sign > 0 else 1.0 / p
        return float(np.dot(program.amount, program.at_price(price)))

    if program.sign > 0:
        return monotone_root(spend, knots, program.target)
    t, t_low, t_high = monotone_root(spend, 1.0 / knots, program.target)
    return 1.0 / t, _reciprocal(t_high), _reciprocal(t_low)


def _reciprocal(t: float) -> float:
    return 1.0 / t if t > 0.0 else math.inf


def solve(raw: Program) -> Solution:
    """Solve and certify. The caller has checked that the program is feasible."""
    with np.errstate(all="ignore"):
        program = raw.scaled(1.0, 1.0)
        smallest = float(np.minimum.reduce(program.scale))
        if not _TINY < smallest < 1.0 / _TINY:
            return _solve_extreme(raw, program)
        return _solve(program)


def _solve_extreme(raw: Program, program: Program) -> Solution:
    """Weights that span hundreds of decades: solve in units in which none of them underflows, then convert back."""
    low, high = (math.log2(float(f.reduce(raw.scale))) + math.log2(raw.factor) for f in (np.minimum, np.maximum))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NotFinite(
            "Weights and constants are together beyond what floating point counts.", "Products lie within 1e-300 and 1e300.",
            "Leave the constants (eta, gamma) at their defaults, or scale the scores.",
        )  # fmt: skip
    budget = 2.0 ** round(math.log2(float(np.add.reduce(raw.amount)) / raw.amount.size))
    value = 2.0 ** max(min(-round((low + high) / 2.0), 1000 - round(high), 1000), -1000)
    s = _solve(raw.scaled(value, budget))
    record = dict(s.__dict__)
    for name in ("spent", "slack"):
        record[name] *= budget
    for name in ("primal", "dual"):
        record[name] = record[name] / value
    for name in ("multiplier", "shadow_price"):
        record[name] = record[name] / value / budget
    record["multiplier_interval"] = tuple(m / value / budget for m in s.multiplier_interval)
    return Solution(**{**record, "budget": raw.budget, "program": program})


def _solve(program: Program) -> Solution:
    """Find the price, take every block's own optimum at it, certify."""
    fill = getattr(program.function, "fill", None)
    x, p, p_low, p_high = fill(program) if fill else (None, *root(program))
    slack = not program.exact_budget and p_high < program.price
    if not program.exact_budget:
        p, p_low, p_high = max(p, program.price), max(p_low, program.price), max(p_high, program.price)
    if x is None or slack:
        return certify(program, *_decide(program, p), p, (p_low, p_high), slack=slack)
    return certify(program, x, _tally(program, x, p), p, (p_low, p_high), slack=slack, best=program.at_price(p))


class _Tally(NamedTuple):
    """Sums over blocks that the certificate needs."""

    terms: float
    used: float
    worst: float
    at_low: bool
    at_high: bool


def _tally(program: Program, x: Vector, p: float) -> _Tally:
    worst, at_low, at_high = stationarity(program, x, p)
    return _Tally(float(np.add.reduce(program.terms(x))), float(np.dot(program.amount, x)), worst, at_low, at_high)


def _decide(program: Program, p: float) -> tuple[Vector, _Tally]:
    """Every block's optimum at a price, with its tally; in chunks that stay in the processor's cache."""
    size = program.amount.size
    if size <= LARGE:
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


def certify(
    program: Program, x: Vector, tally: _Tally, p: float, interval: tuple[float, float], *, slack: bool,
    best: Vector | None = None,
) -> Solution:  # fmt: skip
    """Bind a decision and a price into a solution with its certificate.

    ``best`` is the minimiser of the Lagrangian at ``p``, whose value is the dual function; ``None`` says that ``x`` is it.
    """
    a, sign, p0 = program.amount, program.sign, program.price
    multiplier = p - p0
    terms, used, worst, at_low, at_high = tally
    primal = terms - sign * p0 * used
    if best is None:
        best_terms, best_used = terms, used
    else:
        best_terms, best_used = float(np.add.reduce(program.terms(best))), float(np.dot(a, best))
    dual = best_terms - sign * (p * best_used - multiplier * program.target)
    floor = max(abs(program.target), unit := 1e-6 * float(np.add.reduce(a)))
    size = abs(terms) + p0 * used + abs(multiplier) * abs(program.target) + abs(p) * unit
    gap = abs(primal - dual) / size if size > 0.0 else 0.0
    over = -sign * (used - program.target)
    feasibility = (abs(over) if program.exact_budget else max(over, 0.0)) / floor
    complementarity = 0.0 if program.exact_budget else multiplier * abs(over) / size if size > 0.0 else 0.0
    status = _status(sign, slack, at_low, at_high)
    value = x if isinstance(program.base, float) else x + program.base
    spent = used + (program.budget - program.target)
    return Solution(
        value=value, status=status, multiplier=multiplier, multiplier_interval=(interval[0] - p0, interval[1] - p0),
        shadow_price=p, primal=primal, dual=dual, gap=gap, kkt_residual=max(worst, feasibility, complementarity),
        spent=spent, budget=program.budget, slack=-over, inert=_inert(program, status), program=program,
    )  # fmt: skip


def _marginal(f: Function, scale: Vector, x: Vector, price: Vector) -> Vector:
    """Marginal utility or penalty; at a kink, the subgradient nearest to the price."""
    if hasattr(f, "subgradient"):
        left, right = f.subgradient(x)
        return np.minimum(np.maximum(price, scale * left), scale * right)
    return scale * f.derivative(x)


def stationarity(program: Program, x: Vector, p: float) -> tuple[float, bool, bool]:
    """Relative stationarity residual at price ``p``, and whether all blocks are at their floor or cap."""
    price = program.amount * p
    marginal = _marginal(program.function, program.scale, x, price)
    r = (marginal - price) / (marginal + price)
    worst, at_low, at_high = _violation(r if program.sign < 0 else -r, x, program)
    if not worst <= _TRUSTED or hasattr(program.function, "subgradient"):  # 0 / 0, underflow, or slopes of both signs
        settled = (marginal == price) | ((x < _TINIEST) & (program.at_price(p) < _TINIEST))
        r = np.where(settled, 0.0, (marginal - price) / (np.abs(marginal) + np.abs(price)))
        worst, at_low, at_high = _violation(r if program.sign < 0 else -r, x, program)
    return (worst if worst == worst else math.inf), at_low, at_high


def _violation(r: Vector, x: Vector, program: Program) -> tuple[float, bool, bool]:
    """Largest wish for more below a cap, or for less above a floor."""
    above, below = x > program.low, x < program.high
    worst = max(float(np.maximum.reduce(r * below)), -float(np.minimum.reduce(r * above))) + 0.0
    return worst, not np.logical_or.reduce(above), not np.logical_or.reduce(below)


def _status(sign: int, slack: bool, at_low: bool, at_high: bool) -> str:
    if at_low and sign < 0:
        return "degenerate"
    if at_high:
        return "degenerate" if slack and sign > 0 else "saturated"
    return "slack" if slack else "binding"


def _inert(program: Program, status: str) -> tuple[str, ...]:
    if status == "binding":
        return program.names
    if status == "slack":
        return ("budget",)
    return (*program.names, "weights", "exponent") if program.sign < 0 else (*program.names, "weights", "exponent", "n")
