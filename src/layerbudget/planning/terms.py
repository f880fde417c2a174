"""What binds a plan of capacity whatever the rule: floors, caps, multiples, fixed blocks, and what a unit costs. Frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from ..plan import Plan
from ..records import Block
from ..scores import Scores
from ..solvers.inputs import Vector, bound_vector, number
from .common import blocks_of, matching, record_of
from .costs import Budget, amount_of, unit_cost
from .rule import Problem

# Options of the price, and the units of budgets that read them.
_PRICING: Mapping[str, tuple[str, ...]] = {
    "latency": ("latency",), "bytes_per_parameter": ("bytes",), "router": ("params", "bytes", "flops"),
}  # fmt: skip
# Names under which users give the fields, and plans record them.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "experts": {"base": "min_experts", "floor": "lower", "cap": "max_experts", "expert_rank": "expert_rank"},
    "ranks": {"multiple": "multiple", "floor": "min_rank", "cap": "max_rank"},
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """The terms of one plan.

    Attributes:
        kind: ``experts`` or ``ranks``.
        floor: Smallest count, a scalar or shape ``(K,)``.
        cap: Largest count; None for none.
        base: Experts that every block has anyway and that earn nothing.
        multiple: Counts are multiples of this.
        fixed: Counts of some blocks, by name or regular expression.
        expert_rank: Rank of one expert.
        router: Whether router outputs are counted in the price.
        bytes_per_parameter: For prices in bytes; 2 where it is None.
        latency: Seconds per unit by block.
    """

    kind: str
    floor: ArrayLike = 0.0
    cap: ArrayLike | None = None
    base: ArrayLike = 0.0
    multiple: int = 1
    fixed: Mapping[str, int] | None = None
    expert_rank: int = 8
    router: bool = False
    bytes_per_parameter: float | None = None
    latency: Mapping[str, float] | None = None

    @classmethod
    def of(cls, plan: Plan) -> Terms:
        """The terms that a plan records."""
        held = plan.hyperparameters
        names = {**_NAMES[plan.kind], **{name: name for name in ("fixed", *_PRICING)}}
        return cls(kind=plan.kind, **{field: held[name] for field, name in names.items() if held.get(name) is not None})

    def record(self) -> dict[str, Any]:
        """The terms as a plan records them."""
        named = {name: getattr(self, field) for field, name in _NAMES[self.kind].items()}
        return {**named, **self._pricing(), "fixed": dict(self.fixed or {})}

    def _pricing(self) -> dict[str, Any]:
        """Options of the price that were given."""
        given = {name: getattr(self, name) for name in _PRICING}
        return {name: value for name, value in given.items() if value is not None and value is not False}

    def priced(self, blocks: Sequence[Block], wanted: Budget) -> tuple[Vector, float]:
        """Cost per unit of every block, and the budget, in its unit.

        Raises:
            InvalidInput: An option that budgets in this unit do not read.
        """
        given = self._pricing()
        for name in given:
            if wanted.unit not in _PRICING[name]:
                raise InvalidInput(
                    f"{name} has no meaning for a budget in {wanted.unit}.",
                    f"Budgets in {' or '.join(_PRICING[name])} read it.",
                    f"Leave {name} out, or state the budget in another unit.",
                )
        size: dict[str, Any] = {"capacity": "experts", "expert_rank": self.expert_rank} if self.kind == "experts" else {}
        cost = unit_cost(blocks, wanted.unit, **size, **given)
        own = "bytes_per_parameter" in given and wanted.relative
        scale = {"bytes_per_parameter": given["bytes_per_parameter"]} if own else {}
        return cost, number(amount_of(wanted, blocks, **scale), "budget")

    def problem(self, scores: Scores | Sequence[Block], wanted: Budget) -> Problem:
        """What a rule is to decide.

        Raises:
            InvalidInput: A price that the unit does not read, or a fixed count that is none.
            UnknownBlock: ``fixed`` matches nothing.
        """
        blocks = blocks_of(scores)
        k = len(blocks)
        cost, limit = self.priced(blocks, wanted)
        sides = smallest_sides(blocks) if self.kind == "ranks" else np.full(k, np.inf)
        words = _NAMES[self.kind]
        base = np.full(k, 1.0) * bound_vector(self.base, k, words.get("base", "base"), 0.0)
        floor = np.maximum(base, bound_vector(self.floor, k, words["floor"], 0.0))
        low = np.minimum(sides, floor)
        high = np.minimum(sides, np.full(k, 1.0) * bound_vector(self.cap, k, words["cap"], np.inf))
        held = _pin(blocks, low, high, self.fixed, sides)
        base[held] = np.minimum(base, low)[held]
        return Problem(
            kind=self.kind, blocks=blocks, scores=record_of(scores), amount=cost, target=limit, low=low, high=high,
            held=held, base=base if self.kind == "experts" else None, multiple=self.multiple,
        )  # fmt: skip


def smallest_sides(blocks: Sequence[Block]) -> Vector:
    """Largest rank that makes sense per block: the smallest side of its matrices, shape ``(K,)``."""
    return np.array([min(min(m.d_in, m.d_out) for m in b.modules) for b in blocks], dtype=np.float64)


def _pin(blocks: Sequence[Block], low: Vector, high: Vector, fixed: Mapping[str, int] | None, sides: Vector) -> np.ndarray:
    """Pin fixed blocks between equal bounds, in place; return the mask of them.

    Raises:
        InvalidInput: A count that is no whole number of zero or more, or a rank above the smallest side of its block.
    """
    held = np.zeros(len(blocks), dtype=bool)
    for pattern, value in (fixed or {}).items():
        found = matching(blocks, pattern)
        if number(value, f"the fixed count of {pattern}") != int(value):
            raise InvalidInput(f"{pattern} is fixed at {value}.", "Ranks and experts are counted.", "Give a whole number.")
        if (sides[found] < value).any():
            k = found[int(np.argmin(sides[found]))]
            raise InvalidInput(
                f"{blocks[k].name} is fixed at rank {value}; its smallest side is {sides[k]:g}.", "", "Fix a smaller rank."
            )
        low[found] = high[found] = float(value)
        held[found] = True
    return held
