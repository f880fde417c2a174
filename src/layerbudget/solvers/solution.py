"""What a program returns: the decision together with everything that qualifies it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .inputs import Vector

STATUSES = {
    "binding": "The budget binds: every unit of it is worth the shadow price.",
    "slack": "The budget does not bind: the price per unit alone decides, and part of the budget is left.",
    "saturated": "Every block is at its cap: only larger caps can change the decision.",
    "degenerate": "Every block sits at the same bound: the constants decide, the scores do not.",
}


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

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.value.flags.writeable = False

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Solution is frozen; {name} cannot be set")

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
        """The status in a sentence, with the remedy where there is something to remedy."""
        return explain_status(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate and the decision as plain JSON values."""
        return {"value": self.value.tolist(), **self.certificate()}

    def certificate(self) -> dict[str, Any]:
        """Return everything but the decision, as plain JSON values."""
        names = ("status", "multiplier", "shadow_price", "gap", "kkt_residual", "primal", "dual", "budget", "spent", "slack")
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        record["multiplier_interval"] = [m if np.isfinite(m) else None for m in self.multiplier_interval]
        record |= {"inert": list(self.inert), "message": self.message}
        record |= {"at_lower": int(self.at_lower.sum()), "at_upper": int(self.at_upper.sum())}
        return record

    def __repr__(self) -> str:
        return (
            f"Solution({self.status}, K={self.value.size}, spent={self.spent:.6g} of {self.budget:.6g}, "
            f"multiplier={self.multiplier:.4g}, gap={self.gap:.1e}, kkt={self.kkt_residual:.1e})"
        )


def explain_status(s: Solution) -> str:
    """Sentence for a status, with the cheapest remedy."""
    text = STATUSES[s.status]
    if s.status == "degenerate" and s.program.sign < 0:
        text += (
            " No block earns more than its base. Use spend='exactly' to spend the budget, or units='relative' "
            "so that costs and weights are compared on one scale."
        )
    elif s.status == "degenerate":
        text += (
            f" The bits saved outweigh the penalty everywhere, so {s.spent:.6g} parameters go instead of the {s.budget:.6g} "
            "asked for. Use spend='exactly' to prune what was asked for."
        )
    elif s.status == "slack" and s.program.sign < 0:
        text += f" {s.slack:.6g} of {s.budget:.6g} is left; spend='exactly' spends it."
    elif s.status == "slack":
        text += f" {s.slack:.6g} more than the {s.budget:.6g} asked for is pruned; spend='exactly' stops there."
    elif s.status == "saturated":
        text += " Raise the cap, or lower the budget to leave a choice."
    return text


def frozen(v: Vector) -> Vector:
    """Mark an array read-only."""
    v.flags.writeable = False
    return v
