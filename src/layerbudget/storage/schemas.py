"""What is promised of the parts of a plan file that are no fields of their own; what is not named here may be anything."""

from __future__ import annotations

from typing import Any

from typing_extensions import Required, TypedDict

from . import reading


class PlanBudget(TypedDict):
    """What every plan says of its budget."""

    unit: str
    limit: float
    spent: float


class _Continuous(TypedDict, total=False):
    """What only continuous programs have."""

    kkt_residual: float


class Certificate(_Continuous):
    """What a plan that solved a program says of the solution."""

    status: str
    message: str
    multiplier: float
    shadow_price: float | None
    gap: float
    at_lower: int
    at_upper: int
    inert: list[str]


class Rounding(TypedDict, total=False):
    """How whole numbers were found."""

    exact: Required[bool]
    gap: Required[float | None]
    method: Required[str]
    value: Required[float]
    optimum: Required[float]
    spent: Required[float]
    budget: Required[float]
    price: float | None


class Extra(TypedDict, total=False):
    """What some plans say beside it."""

    rounding: Rounding | None
    uniform_share: float | None
    convexified: dict[str, float] | None
    capacity: dict[str, Any]


class Formats(TypedDict):
    """What a plan of bits says beside it."""

    formats: dict[str, str]
    family: str
    runtime: str
    method: str
    fixed_bytes: reading.Count
    bits: float
    predicted: float
    predicted_error: float
    baselines: dict[str, dict[str, float]]
    near_ties: list[dict[str, Any]]


class Adapter(TypedDict):
    """What a recipe says of its adapter."""

    blocks: list[dict[str, Any]]
    bytes: reading.Count
    gain: float
    parameters: reading.Count
    scores: str | None


class RecipeExtra(Formats):
    """What a recipe says beside it."""

    adapter: Adapter


class Shape(TypedDict):
    """What one part of a layer loses."""

    layer: str
    kind: str
    by: str
    units: reading.Count
    removed: reading.Count


class SmallerShapes(TypedDict):
    """What a plan of smaller shapes says beside it."""

    shapes: dict[str, Shape]
    dropped: list[str]


class ShapeSettings(TypedDict):
    """What applying a plan of smaller shapes reads."""

    by: str
    multiple: reading.Size
    compensate: str
    context: float
    bytes_per_parameter: float
