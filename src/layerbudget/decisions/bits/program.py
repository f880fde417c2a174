"""From the damage of every format to a plan of bits: the exact program, and what people do without one. No torch.

A plan gives every block one format: ``value`` is its bits per weight, everything counted, ``count`` its bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput, UnknownUnit
from ...kinds import check_kind
from ...plan import Plan, PlanBlock
from ...planning.costs import parse_budget
from ...records import Block
from ...scores import Scores
from ...solvers.choices import Choice, choose, near_ties

ESTIMATOR = "rounding"
_LARGEST = 16.0  # bits per weight: sixteen bits are always among the formats
_TIES = 20
_LAYER = re.compile(r"\.(\d+)\.")
_VALUES = re.compile(r"\.(v_proj|down_proj|w2|c_proj|fc2|output\.dense)$")
_HUGE = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Bytes and damage of K blocks in m formats.

    Attributes:
        formats: Names, the smallest first.
        size: Bytes, ``(K, m)``; where a block does not have a format its damage is infinite.
        damage: Nats per token, ``(K, m)``, with the standard errors ``error``.
        rest: What every sequence adds to a damage beside its share, ``(K, m, sequences)``, of norm ``error``.
        fixed: Bytes of what no plan changes.
        unwritten: Matrices that stay in 16 bits because no file holds them in fewer, with the reason.
    """

    blocks: Sequence[Block]
    formats: tuple[str, ...]
    size: np.ndarray
    damage: np.ndarray
    error: np.ndarray
    rest: np.ndarray
    fixed: int
    family: str
    runtime: str
    method: str
    unwritten: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, scores: Scores) -> Table:
        """Return the table in a record."""
        held = scores.extra.get("choices") if isinstance(scores, Scores) else None
        if not isinstance(held, Mapping):
            raise InvalidInput(
                "These scores say nothing of formats.",
                "A plan of bits needs the damage of every format.",
                "Measure it: layerbudget plan bits MODEL --save-scores FILE.",
            )
        size, damage, error = (np.array(held[k], dtype=np.float64) for k in ("size", "damage", "error"))
        none = np.isnan(damage)
        return cls(
            blocks=scores.blocks,
            formats=tuple(held["formats"]),
            size=np.where(none, 0, size).astype(np.int64),
            damage=np.where(none, np.inf, damage),
            error=np.where(none, 0.0, error),
            rest=np.array(held["rest"], dtype=np.float64),
            unwritten=held.get("unwritten", {}),
            **{k: held[k] for k in ("fixed", "family", "runtime", "method")},
        )

    def record(self) -> dict[str, Any]:
        """Return what a score record holds of the table; None where a block does not have a format."""

        def rows(values: np.ndarray) -> list[list[float | None]]:
            shown = np.where(np.isfinite(self.damage), values, np.nan)
            return [[None if np.isnan(v) else float(v) for v in row] for row in shown]

        rest = [[[float(f"{v:.4g}") for v in each] for each in row] for row in self.rest]
        own = {k: getattr(self, k) for k in ("fixed", "family", "runtime", "method")}
        values = {"size": rows(self.size), "damage": rows(self.damage), "error": rows(self.error)}
        return {"formats": list(self.formats), **values, **own, "rest": rest, **_unwritten(self)}

    def error_of(self, chosen: np.ndarray) -> float:
        """Standard error of the summed damages of a choice, ``(K,)``; blocks share sequences, so these are summed first."""
        return float(np.linalg.norm(self.rest[np.arange(len(self.blocks)), chosen].sum(0)))

    @property
    def has(self) -> np.ndarray:
        """Whether a block has a format, ``(K, m)``."""
        return np.isfinite(self.damage)

    @property
    def numel(self) -> int:
        """Weights that are decided about."""
        return sum(b.numel for b in self.blocks)

    @property
    def smallest(self) -> np.ndarray:
        """Bytes of every block in its smallest format, ``(K,)``."""
        return np.where(self.has, self.size, _HUGE).min(axis=1)

    def limit(self, bits: float | None, budget: str | None) -> int:
        """Return the bytes that the blocks may take; a budget below the smallest plan is refused."""
        if (bits is None) == (budget is None):
            raise InvalidInput("Give either bits or a budget.", "", "For example bits=3.5, or budget='1.2 GiB'.")
        if bits is not None:
            check_bits(bits)
            limit = int(bits * self.numel // 8)
        else:
            wanted = parse_budget(str(budget), default="bytes")
            if wanted.unit != "bytes" or wanted.relative:
                raise UnknownUnit(f"A budget of {budget} is not in bytes.", "The file's size is planned.", "Write '1.2 GiB'.")
            limit = int(wanted.amount) - self.fixed
        least, given = int(self.smallest.sum()), max(limit, 0)
        if limit < least:
            raise InfeasibleBudget(
                f"{given} bytes for {len(self.blocks)} blocks ({8 * given / self.numel:.3f} bits per weight) are too few.",
                f"The smallest plan takes {least} bytes ({8 * least / self.numel:.4f} bits per weight), {least + self.fixed} "
                "with what stays as it is.",
                f"Raise the budget to that (--bits {_bits_up(least, self.numel):g}, or --budget {least + self.fixed}), "
                "or allow smaller formats.",
            )
        return limit


def _bits_up(size: int, numel: int) -> float:
    """Bits per weight in four digits, rounded up."""
    return math.ceil(8e4 * size / numel) / 1e4


def check_bits(bits: float | None) -> None:
    """Refuse mean bits per weight that no plan can have."""
    if bits is not None and not 0 < bits <= _LARGEST:
        why = f"Bits per weight are above 0 and at most {_LARGEST:g}, the largest format."
        raise InvalidInput(f"bits is {bits:g}.", why, "Use for example 5.5.")


def plan_from_table(scores: Scores, *, bits: float | None = None, budget: str | None = None, rule: str = "choices") -> Plan:
    """Return a plan from damages that are known: :func:`~layerbudget.decisions.bits.plan.plan_bits` of scores."""
    if rule not in RULES:
        raise InvalidInput(f"There is no rule {rule!r} for bits.", f"There are {', '.join(RULES)}.", "Choose one of those.")
    table = Table.of(scores)
    given = {"bits": bits, "budget": budget, "rule": rule, "method": table.method, "runtime": table.runtime}
    return _plan(scores, table, table.limit(bits, budget), given)


def other_plan(plan: Plan, scores: Scores, rule: str) -> Plan:
    """Return the plan that another rule makes of the same budget."""
    return _plan(scores, Table.of(scores), int(plan.budget["limit"]), {**plan.hyperparameters, "rule": rule})


def _plan(scores: Scores, table: Table, limit: int, given: Mapping[str, Any]) -> Plan:
    rule, k = given["rule"], np.arange(len(table.blocks))
    found = choose(table.damage, table.size, limit)
    baselines = {name: make(table, limit) for name, make in BASELINES.items()}
    chosen = baselines.get(rule, found.chosen)

    def totals(choice: np.ndarray) -> dict[str, Any]:
        return {"predicted": float(table.damage[k, choice].sum()), "spent": int(table.size[k, choice].sum())}

    predicted, spent = totals(chosen).values()
    extra = {
        **extra_of(table, chosen),
        "bits": 8 * spent / table.numel,
        "predicted": predicted,
        "baselines": {n: totals(c) for n, c in baselines.items()},
        "near_ties": _ties(table, found) if rule == "choices" else [],
    }
    return Plan(
        kind="bits",
        rule=rule,
        model=scores.model,
        blocks=plan_blocks(table, chosen),
        hyperparameters=dict(given),
        budget={"unit": "bytes", "limit": limit, "spent": spent, "file": spent + table.fixed},
        certificate=found.certificate() if rule == "choices" else {},
        scores_digest=scores.digest,
        extra=extra,
    )


def plan_blocks(table: Table, chosen: np.ndarray) -> tuple[PlanBlock, ...]:
    """Return the blocks of a plan: bits per weight and bytes."""
    size = table.size[np.arange(len(table.blocks)), chosen]
    return tuple(PlanBlock.of(b, 8 * s / b.numel, s) for b, s in zip(table.blocks, size, strict=True))


def extra_of(table: Table, chosen: np.ndarray) -> dict[str, Any]:
    """Return what every plan with formats carries beside its blocks."""
    formats = {m.name: table.formats[j] for b, j in zip(table.blocks, chosen, strict=True) for m in b.modules}
    own = {k: getattr(table, k) for k in ("family", "runtime", "method")}
    error = {"fixed_bytes": table.fixed, "predicted_error": table.error_of(chosen)}
    return {"formats": formats, **own, **error, **_unwritten(table)}


def _unwritten(table: Table) -> dict[str, Any]:
    return {"unwritten": dict(table.unwritten)} if table.unwritten else {}


def _ties(table: Table, found: Choice) -> list[dict[str, Any]]:
    formats = table.formats
    return [
        {"block": table.blocks[i].name, "chosen": formats[found.chosen[i]], "instead": formats[j], "excess": e, "noise": n}
        for i, j, e, n in near_ties(found, table.error)[:_TIES]
    ]


def formats_of_plan(plan: Plan) -> Mapping[str, str]:
    """Return the format of every matrix."""
    formats = plan.extra.get("formats")
    check_kind(plan.kind, ("bits",), "gives no formats")
    if not isinstance(formats, Mapping) or set(formats) != set(plan.by_module()):
        raise InvalidInput(
            "The plan of bits does not name the format of every matrix.", "", "Make it again: layerbudget plan bits."
        )
    return {str(k): str(v) for k, v in formats.items()}


# ---- formats without a program: one for all, llama.cpp's mixes, first and last layers protected


def uniform(table: Table, limit: int) -> np.ndarray:
    """Return the largest format that fits for all blocks; what is left buys the next one for blocks spread evenly."""
    return _protect(table, np.zeros(len(table.blocks), dtype=bool), limit)


def _mix(table: Table, limit: int) -> np.ndarray:
    """As llama.cpp's ``_M`` mixes: a better format for the ends, and values and down projections of some layers.

    These are the layers of its ``use_more_bits``: the first and last eighth, and every third between.
    """
    numbers, depth = _layers(table.blocks)

    def more(block: Block, i: int | None) -> bool:
        if i is None:
            return True
        chosen = i < depth // 8 or i >= 7 * depth // 8 or (i - depth // 8) % 3 == 2
        return chosen and any(_VALUES.search(m.name) for m in block.modules)

    return _protect(table, np.array([more(b, i) for b, i in zip(table.blocks, numbers, strict=True)]), limit)


def _ends(table: Table, limit: int) -> np.ndarray:
    """A better format for embedding, head, and the first and last eighth of the layers (one at least)."""
    numbers, depth = _layers(table.blocks)
    edge = max(1, depth // 8)
    return _protect(table, np.array([n is None or n < edge or n >= depth - edge for n in numbers]), limit)


BASELINES: Mapping[str, Callable[[Table, int], np.ndarray]] = {"uniform": uniform, "mix": _mix, "ends": _ends}
RULES = ("choices", *BASELINES)


def _layers(blocks: Sequence[Block]) -> tuple[list[int | None], int]:
    """Layer of every block, None for embedding and head, and the number of layers."""
    found = [_LAYER.search(b.modules[0].name) for b in blocks]
    numbers = [None if f is None else int(f.group(1)) for f in found]
    return numbers, 1 + max((n for n in numbers if n is not None), default=0)


def _protect(table: Table, protected: np.ndarray, limit: int) -> np.ndarray:
    """The largest format that fits for all; what is left raises the protected blocks by up to two formats, then the others."""
    size, has, k = table.size, table.has, np.arange(len(table.blocks))
    order = np.argsort(np.where(has, size, 0).sum(0) / np.maximum(has.sum(0), 1), kind="stable")
    everywhere = [_nearest(has, order, n) for n in range(len(order))]
    fits = [n for n, chosen in enumerate(everywhere) if size[k, chosen].sum() <= limit]
    base = fits[-1] if fits else 0
    chosen = everywhere[base] if fits else np.argmin(np.where(has, size, _HUGE), axis=1)
    for steps, who in ((1, protected), (2, protected), (1, ~protected)):
        higher = everywhere[min(base + steps, len(everywhere) - 1)]
        chosen = _spread(size, chosen, np.where(who, higher, chosen), limit)
    return chosen


def _nearest(has: np.ndarray, order: np.ndarray, place: int) -> np.ndarray:
    """The format at a place of the order for every block, or the next larger (else smaller) one that it has, ``(K,)``."""
    ranked = [*order[place:], *order[:place][::-1]]
    return np.array([next(j for j in ranked if row[j]) for row in has])


def _spread(size: np.ndarray, low: np.ndarray, high: np.ndarray, limit: int) -> np.ndarray:
    """As many blocks as fit get the higher format, in the order of a van der Corput sequence over depth."""
    chosen, left = low.copy(), limit - int(size[np.arange(len(size)), low].sum())
    for i in sorted(range(len(low)), key=lambda i: int(f"{i:016b}"[::-1], 2)):
        more = int(size[i, high[i]] - size[i, low[i]])
        if 0 < more <= left:
            chosen[i], left = high[i], left - more
    return chosen
