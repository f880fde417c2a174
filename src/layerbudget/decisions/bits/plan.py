"""From the damage of every format to a plan of bits: the exact program, and what people do without one. No torch.

A record of the estimator ``rounding`` holds, for every block and format, the exact bytes and the damage with its standard error
(:mod:`layerbudget.decisions.bits.sensitivity`). A plan gives every block one format: ``value`` is its bits per weight,
everything counted,
``count`` its bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput, UnknownUnit
from ...plan import Plan, PlanBlock
from ...planning.costs import parse_budget
from ...records import Block
from ...scores import Scores
from ...solvers.choices import Choice, choose, near_ties
from .by_format import ends, mix, uniform

ESTIMATOR = "rounding"
_TIES = 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """What is known of K blocks in m formats.

    Attributes:
        blocks: The blocks.
        formats: Names, the smallest first.
        size: Bytes, ``(K, m)``; where a block does not have a format its damage is infinite.
        damage, error: Nats per token, ``(K, m)``.
        rest: What every sequence adds to a damage beside its share, ``(K, m, sequences)``, of norm ``error``; None in records
            of earlier releases.
        fixed: Bytes of what no plan changes.
        family, runtime, method: Of the formats, of the groups, and the quantiser that was measured.
    """

    blocks: Sequence[Block]
    formats: tuple[str, ...]
    size: np.ndarray
    damage: np.ndarray
    error: np.ndarray
    fixed: int
    family: str
    runtime: str
    method: str
    rest: np.ndarray | None = None

    @classmethod
    def of(cls, scores: Scores) -> Table:
        """The table in a record.

        Raises:
            InvalidInput: The record holds none.
        """
        held = scores.extra.get("choices") if isinstance(scores, Scores) else None
        if not isinstance(held, Mapping):
            raise InvalidInput(
                "These scores say nothing of formats.",
                "A plan of bits needs the damage of every format.",
                "Measure it: layerbudget plan bits MODEL --scores FILE.",
            )
        arrays = {k: np.array(held[k], dtype=np.float64) for k in ("size", "damage", "error")}
        none = np.isnan(arrays["damage"])
        return cls(
            blocks=scores.blocks, formats=tuple(held["formats"]), size=np.where(none, 0, arrays["size"]).astype(np.int64),
            damage=np.where(none, np.inf, arrays["damage"]), error=np.where(none, 0.0, arrays["error"]),
            fixed=int(held["fixed"]), family=held["family"], runtime=held["runtime"], method=held["method"],
            rest=np.array(held["rest"], dtype=np.float64) if "rest" in held else None,
        )  # fmt: skip

    def error_of(self, chosen: np.ndarray) -> float:
        """Standard error of the summed damages of a choice, ``(K,)``.

        Blocks share sequences, so errors are summed per sequence first; where sequences were not kept, it is the largest that
        the errors of the blocks allow.
        """
        k = np.arange(len(self.blocks))
        if self.rest is None:
            return float(self.error[k, chosen].sum())
        return float(np.linalg.norm(self.rest[k, chosen].sum(0)))

    @property
    def numel(self) -> int:
        """Weights that are decided about."""
        return sum(b.numel for b in self.blocks)

    def limit(self, bits: float | None, budget: str | None) -> int:
        """Bytes that the blocks may take.

        Raises:
            InvalidInput: Both or none given, or no number.
            UnknownUnit: A budget that is not in bytes.
        """
        if (bits is None) == (budget is None):
            raise InvalidInput("Give either bits or a budget.", "", "For example bits=3.5, or budget='1.2 GiB'.")
        if bits is not None:
            check_bits(bits)
            return int(bits * self.numel // 8)
        wanted = parse_budget(str(budget), default="bytes")
        if wanted.unit != "bytes" or wanted.relative:
            raise UnknownUnit(f"A budget of {budget} is not in bytes.", "The file's size is planned.", "Write '1.2 GiB'.")
        return int(wanted.amount) - self.fixed


LARGEST = 16.0  # bits per weight: what stays as it is is always among the formats


def check_bits(bits: float | None) -> None:
    """Refuse mean bits per weight that no plan can have; a budget below the smallest format is found with the table.

    Raises:
        InvalidInput: Not above 0, or above the largest format.
    """
    if bits is not None and not 0 < bits <= LARGEST:
        raise InvalidInput(
            f"bits is {bits:g}.", f"Bits per weight are above 0 and at most {LARGEST:g}, the largest format.",
            "Use for example 5.5.",
        )  # fmt: skip


Rule = Callable[[Table, int], np.ndarray]
BASELINES: Mapping[str, Rule] = {
    "uniform": lambda t, limit: uniform(t.size, np.isfinite(t.damage), limit),
    "mix": lambda t, limit: mix(t.blocks, t.size, np.isfinite(t.damage), limit),
    "ends": lambda t, limit: ends(t.blocks, t.size, np.isfinite(t.damage), limit),
}
RULES = ("choices", *BASELINES)


def plan_bits(
    scores: Scores,
    *,
    bits: float | None = None,
    budget: str | None = None,
    rule: str = "choices",
    exponent: float | None = None,
    damping: float | None = None,
    smoothing: float | None = None,
) -> Plan:
    """Give every block a format, with the least total damage within a budget of bytes.

    Args:
        scores: A record of the damage of every format.
        bits: Mean bits per weight of the blocks, scales and padding counted.
        budget: Bytes of all tensors of the file instead, such as ``"1.2 GiB"``.
        rule: ``choices`` (the exact program), ``uniform`` (one format for all, what is left spread evenly), ``mix`` (as
            llama.cpp's mixes: a better format for head, embedding, values and some down projections) or ``ends`` (for the
            first and last layers).
        exponent: Refused: damages are measured.
        damping: Refused.
        smoothing: Refused.

    Returns:
        The plan. ``extra`` has the format of every matrix, the predicted damage with its error, near-ties, and what the
        rules without a program would have given at the same budget.

    Raises:
        InfeasibleBudget: The smallest plan is larger.
        InvalidInput: Scores that say nothing of formats, an unknown rule, or an option without meaning.
    """
    for name, value in {"exponent": exponent, "damping": damping, "smoothing": smoothing}.items():
        if value is not None and value is not False:
            raise InvalidInput(f"plan_bits does not read {name}.", "Damages are measured in nats.", "Leave it out.")
    if rule not in RULES:
        raise InvalidInput(f"There is no rule {rule!r} for bits.", f"There are {', '.join(RULES)}.", "Choose one of those.")
    table = Table.of(scores)
    limit = table.limit(bits, budget)
    check_limit(table, limit)
    found = choose(table.damage, table.size, limit)
    chosen = found.chosen if rule == "choices" else BASELINES[rule](table, limit)
    given = {"bits": bits, "budget": budget, "rule": rule, "method": table.method, "runtime": table.runtime}
    return _plan(scores, table, chosen, limit, rule, found, given)


def check_limit(table: Table, limit: int) -> None:
    """Refuse a budget below the smallest plan, in the units that were given.

    Raises:
        InfeasibleBudget: It is.
    """
    least = int(np.where(np.isfinite(table.damage), table.size, np.iinfo(np.int64).max).min(axis=1).sum())
    given = max(limit, 0)
    if limit < least:
        raise InfeasibleBudget(
            f"{given} bytes for {len(table.blocks)} blocks ({8 * given / table.numel:.3f} bits per weight) are too few.",
            f"The smallest plan takes {least} bytes ({8 * least / table.numel:.4f} bits per weight), {least + table.fixed} "
            "with what stays as it is.",
            f"Raise the budget to that (--bits {math.ceil(8e4 * least / table.numel) / 1e4:g}, or "
            f"--budget {least + table.fixed}), or allow smaller formats.",
        )


def _plan(
    scores: Scores, table: Table, chosen: np.ndarray, limit: int, rule: str, found: Choice, given: Mapping[str, Any]
) -> Plan:
    k = np.arange(len(table.blocks))
    size, spent = table.size[k, chosen], int(table.size[k, chosen].sum())
    blocks = tuple(PlanBlock.of(b, 8 * s / b.numel, s) for b, s in zip(table.blocks, size, strict=True))
    formats = {m.name: table.formats[j] for b, j in zip(table.blocks, chosen, strict=True) for m in b.modules}
    others = {name: make(table, limit) for name, make in BASELINES.items()}
    extra = {
        "formats": formats, "family": table.family, "runtime": table.runtime, "method": table.method,
        "fixed_bytes": table.fixed, "bits": 8 * spent / table.numel, "predicted": float(table.damage[k, chosen].sum()),
        "predicted_error": table.error_of(chosen),
        "baselines": {
            n: {"predicted": float(table.damage[k, c].sum()), "spent": int(table.size[k, c].sum())} for n, c in others.items()
        },
        "near_ties": _ties(table, found) if rule == "choices" else [], **unwritten_of(scores),
    }  # fmt: skip
    extra |= _nothing_to_decide(table, limit)
    return Plan(
        kind="bits", rule=rule, model=scores.model, blocks=blocks, hyperparameters=dict(given),
        budget={"unit": "bytes", "limit": limit, "spent": spent, "file": spent + table.fixed},
        certificate=_certificate(found) if rule == "choices" else {}, scores_digest=scores.digest, extra=extra,
    )  # fmt: skip


def _nothing_to_decide(table: Table, limit: int) -> dict[str, Any]:
    """``{"forced": ...}`` where a budget allows one plan alone: which, and from where to where there is a choice."""
    known = np.isfinite(table.damage)
    low = np.where(known, table.size, np.iinfo(np.int64).max).min(axis=1)
    high = np.where(known, table.size, 0).max(axis=1)
    larger = np.where(known & (table.size > low[:, None]), table.size - low[:, None], np.iinfo(np.int64).max)
    first, most = int(low.sum()) + int(larger.min()), int(high.sum())
    if first <= limit < most or most == low.sum():
        return {}
    bits = [math.ceil(8e4 * size / table.numel) / 1e4 for size in (first, most)]
    which = "smallest" if limit < first else "largest"
    return {"forced": {"format": which, "from_bits": bits[0], "to_bits": bits[1], "from_bytes": first + table.fixed}}


def unwritten_of(scores: Scores) -> dict[str, Any]:
    """``{"unwritten": {matrix: reason}}`` of what stays in 16 bits, as no file holds it in fewer; else empty."""
    found = scores.extra["choices"].get("unwritten")
    return {"unwritten": dict(found)} if found else {}


def _certificate(found: Choice) -> dict[str, Any]:
    """As the certificates of other plans, with what is the program's own."""
    held = found.certificate()
    return {**held, "shadow_price": held["price"], "multiplier": held["price"], "inert": [], "at_lower": 0, "at_upper": 0}


def _ties(table: Table, found: Choice) -> list[dict[str, Any]]:
    return [
        {
            "block": table.blocks[i].name, "chosen": table.formats[found.chosen[i]], "instead": table.formats[j],
            "excess": excess, "noise": noise,
        }
        for i, j, excess, noise in near_ties(found, table.error)[:_TIES]
    ]  # fmt: skip


def plan_of_formats(plan: Plan, scores: Scores, rule: str) -> Plan:
    """The plan that another rule makes of the same budget: what a check puts in the place of one that lost."""
    table = Table.of(scores)
    limit = int(plan.budget["limit"])
    found = choose(table.damage, table.size, limit)
    chosen = found.chosen if rule == "choices" else BASELINES[rule](table, limit)
    return _plan(scores, table, chosen, limit, rule, found, {**plan.hyperparameters, "rule": rule})


def sizes_of(blocks: Sequence[Block], formats: Mapping[str, Callable[[int, int, int], int] | None]) -> np.ndarray:
    """Bytes of every block in every format, ``(K, m)``; -1 where it has none. ``formats`` counts one matrix."""
    out = np.full((len(blocks), len(formats)), -1, dtype=np.int64)
    for j, count in enumerate(formats.values()):
        for i, block in enumerate(blocks):
            if count is not None:
                out[i, j] = sum(count(m.d_out, m.d_in, m.copies) for m in block.modules)
    return out
