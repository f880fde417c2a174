"""Types of the parts of a plan file that are no fields of their own."""

from __future__ import annotations

from typing_extensions import NotRequired, TypedDict


class PlanBudget(TypedDict):
    """Budget of every plan, as it was written too where it was a text.

    A plan of shapes also has what the layers have without it. One of bits has the bytes of all tensors, and those of the file
    where they are known exactly.
    """

    unit: str
    limit: float
    spent: float
    text: NotRequired[str]
    base: NotRequired[float]
    tensors: NotRequired[int]
    file: NotRequired[int]


class Certificate(TypedDict):
    """Solution of a plan that solved a program, which may say more; ``kkt_residual`` is there in continuous ones."""

    status: str
    message: str
    multiplier: float
    shadow_price: float | None
    gap: float
    at_lower: int
    at_upper: int
    inert: list[str]
    kkt_residual: NotRequired[float]
