"""Types of the parts of a plan file that are no fields of their own. What is not named here may be anything."""

from __future__ import annotations

from typing_extensions import NotRequired, TypedDict


class PlanBudget(TypedDict):
    """Budget of every plan; of bits also the bytes of all tensors, and those of the file where they are known exactly."""

    unit: str
    limit: float
    spent: float
    tensors: NotRequired[int]
    file: NotRequired[int]


class Certificate(TypedDict):
    """Solution of a plan that solved a program; ``kkt_residual`` is there in continuous ones."""

    status: str
    message: str
    multiplier: float
    shadow_price: float | None
    gap: float
    at_lower: int
    at_upper: int
    inert: list[str]
    kkt_residual: NotRequired[float]
