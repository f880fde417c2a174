"""Types of the parts of a plan file that are no fields of their own. What is not named here may be anything."""

from __future__ import annotations

from typing import Any

from typing_extensions import Required, TypedDict

from . import reading


class PlanBudget(TypedDict):
    """Budget of every plan."""

    unit: str
    limit: float
    spent: float


class _Continuous(TypedDict, total=False):
    """Fields of continuous programs only."""

    kkt_residual: float


class Certificate(_Continuous):
    """Solution of a plan that solved a program."""

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
    """Further fields of some plans."""

    rounding: Rounding | None
    uniform_share: float | None
    convexified: dict[str, float] | None
    capacity: dict[str, Any]


class Formats(TypedDict):
    """Further fields of a plan of bits."""

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
    """Adapter of a recipe."""

    blocks: list[dict[str, Any]]
    bytes: reading.Count
    gain: float
    parameters: reading.Count
    scores: str | None


class RecipeExtra(Formats):
    """Further fields of a recipe."""

    adapter: Adapter


class Shape(TypedDict):
    """Removal from one part of a layer."""

    layer: str
    kind: str
    by: str
    units: reading.Count
    removed: reading.Count


class SmallerShapes(TypedDict):
    """Further fields of a plan of smaller shapes."""

    shapes: dict[str, Shape]
    dropped: list[str]


class ShapeSettings(TypedDict):
    """Fields of a plan of smaller shapes that applying it reads."""

    by: str
    multiple: reading.Size
    compensate: str
    bytes_per_parameter: float
