"""Bounds of a plan of capacity under every rule, and budgets that they do not allow. No torch."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...budget import OWN_UNITS, Budget, amount_of, rank_parameters, unit_cost
from ...errors import CorruptFile, InfeasibleBudget, InvalidInput
from ...plan import PlanBlock
from ...records import Block
from ...scores import Scores
from ...solvers.inputs import Vector, bound_vector, number, spoken_amount, whole_number
from ..making import blocks_of, matching, record_of
from ..rules import Problem

# Options of the price, and the units of budgets that read them.
_PRICING: Mapping[str, tuple[str, ...]] = {
    "latency": ("latency",),
    "bytes_per_parameter": ("bytes",),
}
# Names under which users give the fields of the terms, and plans record them.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "lora-experts": {"base": "min_experts", "floor": "lower", "cap": "max_experts", "expert_rank": "expert_rank"},
    "ranks": {"multiple": "multiple", "floor": "min_rank", "cap": "max_rank"},
}
# Units of budgets in words.
_SPOKEN = {"params": "parameters", "bytes": "bytes", "flops": "FLOPs per token", "latency": "seconds"}
_SPOKEN |= {"experts": "experts", "ranks": "ranks"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CapacityBounds:
    """Bounds of a plan of capacity under every rule: floors, caps, multiples, fixed blocks, and what a unit costs.

    ``kind`` is ``lora-experts`` or ``ranks``. Counts are multiples of ``multiple`` between ``floor`` and ``cap``, scalars or of
    shape ``(K,)``; ``base`` are experts that every block has anyway and that earn nothing, ``fixed`` the counts of some blocks
    by name or regular expression. The rest prices a unit; ``latency`` is in seconds by block.
    """

    kind: str
    floor: ArrayLike = 0.0
    cap: ArrayLike | None = None
    base: ArrayLike = 0.0
    multiple: int = 1
    fixed: Mapping[str, int] | None = None
    expert_rank: int = 8
    bytes_per_parameter: float | None = None
    latency: Mapping[str, float] | None = None

    def record(self) -> dict[str, Any]:
        """Return the terms as a plan records them."""
        named = {name: getattr(self, field) for field, name in _NAMES[self.kind].items()}
        return {**named, **self._pricing(), "fixed": dict(self.fixed or {})}

    def _pricing(self) -> dict[str, Any]:
        """Options of the price that were given."""
        prices = {name: getattr(self, name) for name in _PRICING}
        return {name: value for name, value in prices.items() if value is not None}

    def _priced(self, blocks: Sequence[Block], wanted: Budget) -> tuple[Vector, float]:
        """Cost per unit of every block, and the budget, in its unit."""
        pricing = self._pricing()
        for name in pricing:
            if wanted.unit not in _PRICING[name]:
                raise InvalidInput(
                    f"{name} has no meaning for a budget in {wanted.unit}.",
                    f"Budgets in {' or '.join(_PRICING[name])} read it.",
                    f"Leave {name} out, or state the budget in another unit.",
                )
        scale = {name: value for name, value in pricing.items() if name == "bytes_per_parameter"}
        cost = unit_cost(blocks, wanted.unit, capacity=self.kind, expert_rank=self.expert_rank, **pricing)
        return cost, number(amount_of(wanted, blocks, **scale), "budget")

    def problem(self, scores: Scores | Sequence[Block], wanted: Budget) -> Problem:
        """Return what a rule is to decide."""
        blocks, words = blocks_of(scores), _NAMES[self.kind]
        k = len(blocks)
        whole_number(self.multiple, "multiple")
        if self.kind == "lora-experts":
            check_expert_rank(self.expert_rank, blocks)
        cost, limit = self._priced(blocks, wanted)
        sides = smallest_sides(blocks) if self.kind == "ranks" else np.full(k, np.inf)
        base = np.array(bound_vector(self.base, k, words.get("base", "base"), 0.0))
        low = np.minimum(sides, np.maximum(base, bound_vector(self.floor, k, words["floor"], 0.0)))
        high = np.minimum(sides, bound_vector(self.cap, k, words["cap"], np.inf))
        pinned = _pin(blocks, low, high, self.fixed, sides)
        base[pinned] = np.minimum(base, low)[pinned]
        _check_bounds(blocks, low, high, pinned, self.multiple, words)
        return Problem(
            kind=self.kind,
            blocks=blocks,
            scores=record_of(scores),
            amount=cost,
            target=limit,
            low=low,
            high=high,
            held=pinned,
            base=base if self.kind == "lora-experts" else None,
            multiple=self.multiple,
        )


def smallest_sides(blocks: Sequence[Block]) -> Vector:
    """Return the largest rank that makes sense per block: the smallest side of its matrices, shape ``(K,)``."""
    return np.array([min(min(m.d_in, m.d_out) for m in b.modules) for b in blocks], dtype=np.float64)


def check_expert_rank(rank: int, blocks: Sequence[Block]) -> None:
    """Refuse a rank of experts that is none, or that no matrix has the sides for.

    Raises:
        InvalidInput: It is one of these.
    """
    most = max(min(m.d_in, m.d_out) for block in blocks for m in block.modules)
    if not isinstance(rank, numbers.Integral) or not 1 <= rank <= most:
        feasible = f"It is a whole number from 1 to {most}, the largest rank that a matrix can have."
        raise InvalidInput(f"expert_rank is {rank}.", feasible, f"Use expert_rank={min(8, most)}.")


def check_ranks(blocks: Sequence[PlanBlock], counts: Sequence[int]) -> None:
    """Refuse ranks that no matrices of so many weights allow; which side of a matrix is the smaller one is not known here.

    Raises:
        CorruptFile: One of them.
    """
    for block, count in zip(blocks, counts, strict=True):
        if len(block.modules) * count**2 > block.numel:
            most = math.isqrt(block.numel // max(len(block.modules), 1))
            what = f"{block.name} has the rank {count:,} in this plan, and {block.numel:,} weights"
            raise CorruptFile(
                f"{what} in {len(block.modules)} matrices.", f"No rank of theirs is above {most:,}.", "Make the plan again."
            )


def _pin(blocks: Sequence[Block], low: Vector, high: Vector, fixed: Mapping[str, int] | None, sides: Vector) -> np.ndarray:
    """Pin fixed blocks between equal bounds, in place; return the mask of them."""
    pinned = np.zeros(len(blocks), dtype=bool)
    for pattern, value in (fixed or {}).items():
        indices = matching(blocks, pattern)
        if number(value, f"the fixed count of {pattern}") != int(value):
            raise InvalidInput(f"{pattern} is fixed at {value}.", "Ranks and experts are counted.", "Give a whole number.")
        if (sides[indices] < value).any():
            k = indices[int(np.argmin(sides[indices]))]
            raise InvalidInput(
                f"{blocks[k].name} is fixed at rank {value}; its smallest side is {sides[k]:g}.", "", "Fix a smaller rank."
            )
        low[indices] = high[indices] = float(value)
        pinned[indices] = True
    return pinned


def _check_bounds(
    blocks: Sequence[Block], low: Vector, high: Vector, pinned: np.ndarray, step: int, words: Mapping[str, str]
) -> None:
    """Refuse bounds that leave a block nothing, by the name of the block and of what was asked for."""
    whole = np.ceil(low / step - 1e-9) * step
    if not (wrong := (whole > high)).any():
        return
    k = int(np.argmax(wrong))
    name, least, most = blocks[k].name, spoken_amount(low[k]), spoken_amount(high[k])
    lower = " or ".join(words[bound] for bound in ("base", "floor") if bound in words)
    if pinned[k]:
        what, remedy = f"{name} is fixed at {least}, which is no multiple of {step}.", f"Fix a multiple of {step}."
    elif low[k] > high[k]:
        what, remedy = f"{name} needs at least {least} and may have at most {most}.", f"Lower {lower}, or raise {words['cap']}."
    else:
        what = f"{name} may have {least} to {most}, and no multiple of {step} lies there."
        remedy = f"Lower {lower}, or raise {words['cap']}."
    raise InfeasibleBudget(what, f"multiple is {step}." if step > 1 else "", remedy)


def check_floors(problem: Problem, terms: CapacityBounds, wanted: Budget, record: Mapping[str, Any]) -> None:
    """Refuse a budget that the floors do not leave anything of, with the smallest one that works, as it is typed."""
    step, cost, limit = problem.multiple, problem.amount, problem.target
    whole = np.ceil(problem.low / step - 1e-9) * step
    least = float(cost @ (whole if (whole <= problem.high).all() else problem.low))
    if limit >= least * (1 - 1e-12):
        return
    ranks, unit = terms.kind == "ranks", wanted.unit
    if ranks and record.get("mean_rank") is not None:
        smallest = f"--mean-rank {math.ceil(least / float(rank_parameters(problem.blocks).sum()) * 1e4 - 1e-6) / 1e4:g}"
    elif unit == "experts":
        smallest = f"--total {math.ceil(least)}"
    else:
        smallest = f"--budget '{least!r} s'" if unit == "latency" else f"--budget '{math.ceil(least)} {unit}'"
    fixed, free = float(cost[problem.held] @ problem.low[problem.held]), cost[~problem.held]
    words = "Give that much or more"
    if limit < fixed:
        words += f", or fix less: the blocks of --fix alone take {spoken_amount(fixed)}"
    elif free.size and limit - fixed >= float(free.min()) * step and np.max(terms.floor if ranks else terms.base) > 0:
        words += f", or let blocks go without any: --{_NAMES[terms.kind]['floor' if ranks else 'base'].replace('_', '-')} 0"
    raise InfeasibleBudget(
        f"The budget {wanted.text} is {spoken_amount(limit)} {_SPOKEN[unit]}, and the smallest {OWN_UNITS[terms.kind]} that "
        f"every block must have take {spoken_amount(least)}.",
        f"The smallest budget is {smallest}.",
        f"{words}.",
    )


def check_caps(problem: Problem) -> None:
    """Refuse a budget that blocks cannot take under their caps."""
    most = float(problem.amount @ problem.high)
    if problem.target > most * (1 + 1e-12):
        sides = smallest_sides(problem.blocks) if problem.kind == "ranks" else np.inf
        raised = f", or raise {_NAMES[problem.kind]['cap']}" if ((problem.high < sides) & ~problem.held).any() else ""
        raise InfeasibleBudget(
            f"The caps can take {spoken_amount(most)} and the budget is {spoken_amount(problem.target)}.",
            f"All of it is to be spent, so it is at most {spoken_amount(most)}.",
            f"Lower the budget to {spoken_amount(most)}{raised}.",
        )
