"""Types of the parts of a plan file that are no fields of their own. What is not named here may be anything."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

from .reading import Count, Size


class PlanBudget(TypedDict):
    unit: str
    limit: float
    spent: float


Certificate = TypedDict(
    "Certificate",
    {
        "status": str,
        "message": str,
        "multiplier": float,
        "shadow_price": float | None,
        "gap": float,
        "at_lower": int,
        "at_upper": int,
        "inert": list[str],
        "kkt_residual": NotRequired[float],  # of continuous programs
    },
)


class _Rounding(TypedDict):
    exact: bool
    gap: float | None
    method: str
    value: float
    optimum: float
    spent: float
    budget: float
    price: NotRequired[float | None]


class Extra(TypedDict, total=False):
    rounding: _Rounding | None
    uniform_share: float | None
    convexified: dict[str, float] | None
    capacity: dict[str, Any]


class Formats(TypedDict):
    formats: dict[str, str]
    family: str
    runtime: str
    method: str
    fixed_bytes: Count
    bits: float
    predicted: float
    predicted_error: float
    baselines: dict[str, dict[str, float]]
    near_ties: list[dict[str, Any]]


class _Adapter(TypedDict):
    blocks: list[dict[str, Any]]
    bytes: Count
    gain: float
    parameters: Count
    scores: str | None


class _Shape(TypedDict):
    layer: str
    kind: str
    by: str
    units: Count
    removed: Count


class SmallerShapes(TypedDict):
    shapes: dict[str, _Shape]
    dropped: list[str]


class ShapeSettings(TypedDict):
    by: str
    multiple: Size
    compensate: str
    bytes_per_parameter: float


class RecipeExtra(Formats):
    """Further fields of a recipe: those of a plan of bits, and its adapter."""

    adapter: _Adapter
