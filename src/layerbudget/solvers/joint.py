r"""One byte budget for adapting and pruning (:doc:`/theory`, section 5).

    minimise   sum_k  alpha a_k e_k - gamma w_k phi(e_k) + eta v_k psi(rho_k)
    subject to sum_k a_k e_k - sum_k s_k rho_k <= M,    0 <= e_k <= u_k,   0 <= rho_k <= rho_max_k

Experts cost bytes, pruning frees bytes, M may be negative ("shrink by 2 GB and adapt"). One constraint couples everything, so
one multiplier decides: ``e_k`` answers the price ``alpha + lambda``, ``rho_k`` the reward ``lambda``.
"""

from __future__ import annotations

import math
import numbers

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget, InvalidInput, NotFinite
from .dual import monotone_root
from .inputs import Vector, choice, cost_vector, number, spoken_amount, weight_vector
from .programs import capacity_bounds, sparsity_bounds, weigh
from .separable import NOTHING_LEFT, Function, Program, Solution, reciprocal
from .utilities import CalibratedPenalty, resolve

_ROUNDING = 1e-12


class JointSolution(Solution):
    """A :class:`Solution` whose value holds capacities and then sparsities, shape ``(2K,)``.

    Its ``shadow_price`` is lambda: a unit of the net budget goes to both halves, and with one more of them the objective is
    lower by that.
    """

    @property
    def message(self) -> str:
        """The status in a sentence, with the cheapest remedy where there is something to remedy."""
        p: JointProgram = self.program
        budget, slack = spoken_amount(self.budget), spoken_amount(self.slack)
        if (p.low == p.high).all():
            return NOTHING_LEFT
        if self.status == "binding":
            change = f"{'lowers' if self.multiplier >= 0 else 'raises'} the objective by {abs(self.multiplier):.3g}"
            return f"The budget binds: one more unit of it {change} (the shadow price)."
        if self.status == "saturated" and (self.capacity <= p.adapt.low).all():
            return (
                f"{budget} is the least that can be reached: every block is pruned to its cap, and none has more than its "
                "floor. Raise the budget, or max_sparsity."
            )
        if self.status == "saturated":
            return "Every block is at both of its caps: only larger ones can change it. Raise them, or lower the budget."
        most = p.net(p.adapt.high, p.prune.low)
        exactly = "spend='exactly'" + ("" if self.budget <= most else f" with a budget of {spoken_amount(most)}")
        if self.status == "degenerate":
            return f"Nothing is adapted beyond the floors and nothing is pruned: prices decide. Use {exactly} to spend it."
        return f"The budget does not bind: prices alone decide, and {slack} of {budget} is left. Use {exactly} to spend it."

    @property
    def capacity(self) -> Vector:
        """Capacities ``e``, shape ``(K,)``."""
        return self.value[: self.value.size // 2]

    @property
    def sparsity(self) -> Vector:
        """Sparsities ``rho``, shape ``(K,)``."""
        return self.value[self.value.size // 2 :]


class JointProgram:
    """The two halves of a joint program."""

    sign, base = -1, 0.0

    def __init__(self, adapt: Program, prune: Program, budget: float) -> None:
        self.adapt, self.prune, self.budget = adapt, prune, budget
        self.low, self.high = np.concatenate((adapt.low, prune.low)), np.concatenate((adapt.high, prune.high))

    def at_multiplier(self, multiplier: float) -> tuple[Vector, Vector]:
        """Both decisions when a unit of budget is worth ``lambda``."""
        return self.adapt.at_price(self.adapt.price + multiplier), self.prune.at_price(max(multiplier, 0.0))

    def net(self, e: Vector, rho: Vector) -> float:
        """Budget used: what capacity takes minus what pruning frees."""
        return float(np.dot(self.adapt.amount, e)) - float(np.dot(self.prune.amount, rho))


def solve_joint(
    weights: ArrayLike,
    cost: ArrayLike,
    savings: ArrayLike,
    budget: float,
    *,
    exponent: float = 1.0,
    exponent_on: str = "density",
    alpha: float = 0.5,
    gamma: float = 0.9,
    eta: float = 2.0,
    lower: ArrayLike = 0.0,
    upper: ArrayLike | None = None,
    max_sparsity: ArrayLike = 0.55,
    utility: str | Function = "log",
    penalty: str | Function = "quadratic",
    spend: str = "at_most",
) -> JointSolution:
    """Decide capacities and sparsities under one budget.

    Only adapting weights have an exponent, and both weight vectors are taken relative to their mean. Here gamma and eta do not
    cancel.

    Args:
        weights: Of both, adapting and pruning: ``w_k >= 0``, shape ``(K,)``.
        cost: Budget per unit of capacity, ``a_k > 0``.
        savings: What pruning block k entirely frees, ``s_k > 0``.
        budget: The net budget M, negative to shrink.
        exponent: Of the adapting weights.
        exponent_on: ``density`` or ``block``.
        alpha: Price per unit of the budget.
        gamma: Weight of the utility; ``gamma / eta`` is what adapting a block is worth against pruning it.
        eta: Weight of the penalty.
        lower: Smallest capacity.
        upper: Largest capacity (none by default).
        max_sparsity: Cap of every block.
        utility: As in :func:`~layerbudget.solvers.allocate`.
        penalty: As in :func:`~layerbudget.solvers.sparsify`.
        spend: ``at_most`` or ``exactly``.

    Raises:
        InfeasibleBudget: Even full pruning does not free enough, or (``exactly``) the caps cannot use the budget.
        InvalidInput, DegenerateScores: An input outside its domain; all weights are zero.

    >>> s = solve_joint([1.0, 3.0], 10.0, 100.0, -20.0, spend="exactly")
    >>> bool(abs(10 * s.capacity.sum() - 100 * s.sparsity.sum() + 20) < 1e-9)
    True
    """
    choice(spend, "spend", ("at_most", "exactly"))
    q = weight_vector(weights)
    k, exactly = q.size, spend == "exactly"
    a, s = cost_vector(cost, k), cost_vector(savings, k, "savings")
    w = _relative(weigh(q, a, exponent, exponent_on), number(gamma, "gamma", positive=True))
    v = np.where(q > 0, q, q.max() * 1e-30)
    v = _relative(weigh(v, s, 1.0, exponent_on), number(eta, "eta", positive=True))
    price = number(alpha, "alpha") * k / float(np.add.reduce(a))
    phi, psi = resolve(utility, concave=True), resolve(penalty, concave=False)
    if isinstance(psi, CalibratedPenalty):
        raise InvalidInput("The joint program has no measured curves.", "Its penalty is smooth.", "Use penalty='quadratic'.")
    base, low, high = capacity_bounds(0.0, lower, upper, k)
    rho_low, rho_high = sparsity_bounds(0.0, max_sparsity, k, psi)
    if not (isinstance(budget, numbers.Real) and math.isfinite(budget)):
        raise NotFinite(f"budget is {budget!r}.", "It must be a finite number; negative to shrink.", "Give a plain number.")
    total = float(budget)
    adapt = Program(-1, phi, w, a, price, low, high, base, total, total, exactly)
    prune = Program(1, psi, v, s, 0.0, rho_low, rho_high, base, total, total, exactly)
    program = JointProgram(adapt, prune, total)
    _check(program, exactly=exactly)
    with np.errstate(all="ignore"):
        return _solve(program, exactly=exactly)


def _relative(w: Vector, factor: float) -> Vector:
    """Weights with mean ``factor``."""
    return w * (factor * w.size / float(np.add.reduce(w)))


def _check(program: JointProgram, *, exactly: bool) -> None:
    adapt, prune, total = program.adapt, program.prune, program.budget
    least, most = program.net(adapt.low, prune.high), program.net(adapt.high, prune.low)
    room = _ROUNDING * (abs(least) + abs(total))
    if total < least - room:
        raise InfeasibleBudget(
            f"The net budget {total:g} cannot be reached: pruning to the caps without adapting gives {least:.15g}.",
            f"It must be at least {least:.15g}.",
            "Raise max_sparsity, or ask for less shrinking.",
        )
    if exactly and total > most + room:
        raise InfeasibleBudget(
            f"The net budget {total:g} cannot be used up: full capacity without pruning takes {most:.15g}.",
            f"Under spend='exactly' it must lie in [{least:.15g}, {most:.15g}].",
            "Raise the caps, or use spend='at_most'.",
        )


def _solve(program: JointProgram, *, exactly: bool) -> JointSolution:
    """Search lambda itself above zero (it may be tiny beside alpha), and the price below (pruning then stays at its floor)."""
    adapt, prune = program.adapt, program.prune
    ends = np.concatenate([adapt.scale / adapt.amount * adapt.function.derivative(x) for x in (adapt.low, adapt.high)])
    at_zero = program.net(*program.at_multiplier(0.0))
    if at_zero > program.budget:
        rewards = [prune.scale / prune.amount * prune.function.derivative(x) for x in (prune.low, prune.high)]
        knots = 1.0 / np.concatenate((ends - adapt.price, *rewards))
        t, t_low, t_high = monotone_root(lambda t: program.net(*program.at_multiplier(1.0 / t)), knots, program.budget)
        interval = (reciprocal(t_high), reciprocal(t_low))
        return _certified(program, adapt.price + 1.0 / t, 1.0 / t, interval, slack=False, exactly=exactly)
    if not exactly or at_zero == program.budget:
        return _certified(program, adapt.price, 0.0, (0.0, 0.0), slack=at_zero < program.budget, exactly=exactly)
    rho = prune.at_price(0.0)
    t, t_low, t_high = monotone_root(lambda t: program.net(adapt.at_price(1.0 / t), rho), 1.0 / ends, program.budget)
    interval = (reciprocal(t_high) - adapt.price, reciprocal(t_low) - adapt.price)
    return _certified(program, 1.0 / t, 1.0 / t - adapt.price, interval, slack=False, exactly=True)


def _certified(
    program: JointProgram, p: float, multiplier: float, interval: tuple[float, float], *, slack: bool, exactly: bool
) -> JointSolution:
    """Bind both halves at a price; each minimises its Lagrangian there, so the dual function is the primal less the price."""
    adapt, prune = program.adapt, program.prune
    e, rho = adapt.at_price(p), prune.at_price(max(multiplier, 0.0))
    over = program.net(e, rho) - program.budget
    parts = (float(adapt.terms(e).sum()), adapt.price * float(np.dot(adapt.amount, e)), float(prune.terms(rho).sum()))
    primal = sum(parts)
    gross = float(np.dot(adapt.amount, e)) + float(np.dot(prune.amount, rho))
    size = sum(map(abs, parts)) + abs(multiplier) * max(abs(program.budget), gross)
    dual = primal + multiplier * over
    worst_e, low_e, high_e = adapt.stationarity(e, p)
    worst_r, low_r, high_r = prune.stationarity(rho, max(multiplier, 0.0))
    infeasible = (abs(over) if exactly else max(over, 0.0)) / max(abs(program.budget), gross, 1e-300)
    if slack and low_e and low_r:
        status = "degenerate"
    elif high_r and (low_e or high_e):
        status = "saturated"
    else:
        status = "slack" if slack else "binding"
    return JointSolution(
        value=np.concatenate((e, rho)),
        status=status,
        multiplier=multiplier,
        multiplier_interval=interval,
        shadow_price=multiplier,
        primal=primal,
        dual=dual,
        gap=abs(primal - dual) / size if size > 0 else 0.0,
        kkt_residual=max(worst_e, worst_r, infeasible),
        spent=program.budget + over,
        budget=program.budget,
        slack=-over,
        inert=("budget",) if slack else (),
        program=program,
    )
