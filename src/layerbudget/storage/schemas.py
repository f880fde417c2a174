"""Types of the parts of a plan file that are no fields of their own. What is not named here may be anything."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

from . import reading


class PlanBudget(TypedDict):
    """Budget of every plan."""

    unit: str
    limit: float
    spent: float


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
    """Further fields of some plans."""

    rounding: _Rounding | None
    uniform_share: float | None
    noise_share: float | None
    scored_rows: reading.Count
    at_measured: dict[str, reading.Count]
    flat_scores: float
    convexified: dict[str, float] | None
    capacity: dict[str, Any]


class _Reasons(TypedDict):
    damage: list[float]
    smaller: list[tuple[str, int, float] | None]
    larger: list[tuple[str, int, float] | None]


class _Measured(TypedDict):
    kl: float


class _Check(TypedDict):
    rows: dict[str, _Measured]
    taken: str
    verdict: str


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
    mix: NotRequired[str]
    reasons: NotRequired[_Reasons]
    few_tokens: NotRequired[dict[str, reading.Count]]
    check: NotRequired[_Check]


class CacheFormats(TypedDict):
    """Further fields of a plan of the cache."""

    formats: dict[str, str]
    runtime: str
    context: reading.Size
    batch: reading.Size
    group: NotRequired[reading.Size | None]
    bits: float
    predicted: float
    predicted_error: float
    baselines: dict[str, dict[str, float]]
    near_ties: list[dict[str, Any]]
    check: NotRequired[_Check]


class _Part(TypedDict):
    bytes: float
    bits: float
    predicted: float


class _Parts(TypedDict):
    weights: _Part
    cache: _Part


class _PartErrors(TypedDict):
    weights: float
    cache: float


class _More(TypedDict):
    bytes: float
    predicted: float


class FitFormats(CacheFormats):
    """Further fields of a plan of weights and cache."""

    family: str
    method: str
    fixed_bytes: reading.Count
    parts: _Parts
    part_errors: _PartErrors
    cache_formats: dict[str, str]
    named: dict[str, str]
    more: _More
    curve: list[dict[str, Any]]


class _Adapter(TypedDict):
    blocks: list[dict[str, Any]]
    bytes: reading.Count
    gain: float
    parameters: reading.Count
    scores: str | None


class RecipeExtra(Formats):
    """Further fields of a recipe."""

    adapter: _Adapter


class _Capacity(TypedDict):
    kind: str
    values: dict[str, float]
    counts: dict[str, reading.Count]
    bytes: float


class JointExtra(TypedDict):
    """Further fields of a plan of zeros and capacity."""

    capacity: _Capacity


class _Shape(TypedDict):
    layer: str
    kind: str
    by: str
    units: reading.Count
    removed: reading.Count


class SmallerShapes(TypedDict):
    """Further fields of a plan of smaller shapes."""

    shapes: dict[str, _Shape]
    dropped: list[str]


class ShapeSettings(TypedDict):
    """Fields of a plan of smaller shapes that applying it reads."""

    by: str
    multiple: reading.Size
    compensate: str
    bytes_per_parameter: float
    damping: NotRequired[float]


class KeptExperts(TypedDict):
    """Further fields of a plan of the experts that stay."""

    kept: dict[str, list[reading.Count]]
    predicted: float
    predicted_error: float
    measured: float
    measured_error: float
    measured_here: float
    crossed: bool
    forecast: list[dict[str, float]]
    forward_passes: float
