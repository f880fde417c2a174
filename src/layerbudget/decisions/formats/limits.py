"""Limits of a plan of formats: its budget, in one of several ways to say it, and the formats that it may use. No torch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...budget import parse_bytes
from ...canonical import to_jsonable
from ...compressors.formats import GGUF, SLOW, find_format, find_runtime
from ...errors import InfeasibleBudget, InvalidInput
from ...llama_cpp.mixes import find_mix
from ...plan import Plan
from .baselines import mix_of
from .table import CACHE, FormatTable

_LARGEST = 16.0  # bits per weight: sixteen bits are always among the formats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The budget of a plan, in one of several ways to say it, and the formats that it may use.

    Attributes:
        bits: Mean bits per weight.
        budget: Bytes of the file.
        like: A mix of llama.cpp, whose bytes are the budget.
        forbid: Formats, or classes of them (``SLOW``), that are not used.
        keep: The format of matrices, by a regular expression that is searched in their names here or in the file.
    """

    bits: float | None = None
    budget: str | float | None = None
    like: str | None = None
    forbid: Sequence[str] = ()
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> Limits:
        """Return the limits that a plan was made with."""
        names = (f.name for f in dataclasses.fields(cls))
        return cls(**{name: plan.hyperparameters[name] for name in names if name in plan.hyperparameters})

    def check(self, ways: Sequence[str] = ("bits", "budget", "like")) -> None:
        """Refuse what no model can make possible; ``ways`` are those to say a budget, of which one is given."""
        budgets = [name for name in ways if getattr(self, name) is not None]
        if len(budgets) != 1:
            what = f"{' and '.join(budgets)} were given together" if budgets else "No budget was given"
            one = f"Give one of {', '.join(ways[:-1])} and {ways[-1]}."
            raise InvalidInput(f"{what}.", one, "For example bits=3.5, or budget='1.2 GiB'.")
        self.check_formats()

    def check_formats(self) -> None:
        """Refuse bits, sizes, mixes and formats that there are not."""
        _check_bits(self.bits)
        if self.budget is not None:
            parse_bytes(str(self.budget), "A budget", "1.2 GiB")
        if self.like is not None:
            find_mix(self.like)
        for name in (*self.forbid, *self.keep.values()):
            if name not in SLOW or name in self.keep.values():
                find_format(name)

    def record(self) -> dict[str, Any]:
        """Return what was given, for the plan."""
        return {"bits": self.bits, "budget": self.budget} | {
            name: to_jsonable(value) for name in ("like", "forbid", "keep") if (value := getattr(self, name))
        }

    def restrict(self, table: FormatTable) -> FormatTable:
        """Return the table without the formats that may not be used."""
        gone = {find_format(f, table.family).name for name in self.forbid for f in SLOW.get(name, (name,))}
        has = table.has & np.array([f not in gone for f in table.formats])
        for pattern, kind in self.keep.items():
            has[_matching(table, pattern)] &= np.array([f == find_format(kind, table.family).name for f in table.formats])
        if (empty := np.flatnonzero(~has.any(axis=1))).size:
            wanted = [find_format(kind, table.family).name for kind in self.keep.values()]
            if lost := [name for name in wanted if name not in table.formats]:
                menu = ",".join((lost[0], *table.formats[:-1]))
                raise InvalidInput(
                    f"{table.blocks[empty[0]].name} is to be kept in {lost[0]}, which is not among the formats to choose from.",
                    f"These are {', '.join(table.formats)}.",
                    f"Measure it too (plan bits MODEL --formats {menu}), or keep it in one of those.",
                )
            raise InvalidInput(
                f"{table.blocks[empty[0]].name} may not have any format that it can have.",
                f"It can have {', '.join(f for f, h in zip(table.formats, table.has[empty[0]], strict=True) if h)}.",
                "Forbid fewer, or keep it in one of those.",
            )
        return dataclasses.replace(table, damage=np.where(has, table.damage, np.inf), size=np.where(has, table.size, 0))

    def bytes(self, table: FormatTable) -> int:
        """Return the bytes that the blocks may take; a budget below the smallest plan is refused."""
        what, per = ("cache", "number") if table.family == CACHE else ("plan", "weight")
        if self.bits is not None:
            limit = int(self.bits * table.numel // 8)
        elif self.like is not None:
            limit = mix_of(table, find_mix(self.like))[0]
        else:
            limit = parse_bytes(str(self.budget), "A budget", "1.2 GiB") - table.beside
        least, available = int(table.smallest.sum()), max(limit, 0)
        if limit < least:
            measured = "measure the model with smaller ones (--formats)"
            if table.family == GGUF:
                measured = _smaller(table, available)
            if table.runtime == "vllm":
                measured = "plan for a runtime that reads smaller ones (--runtime transformers or llama.cpp)"
            others = "forbid and keep less" if self.forbid or self.keep else measured
            others = "plan for a shorter context" if table.family == CACHE else others
            whole = [] if self.forbid or self.keep else _in_one_format(table)
            least_of = f"The smallest {what} takes {least:,} bytes ({8 * least / table.numel:.4f} bits per {per})"
            whole_size = f", {least + table.beside:,} with what stays as it is" if table.beside else ""
            asked = f"{available:,} bytes for {len(table.blocks)} blocks ({8 * available / table.numel:.3f} bits per {per})"
            if self.budget is not None and table.beside:
                asked = f"{max(0, limit + table.beside):,} bytes for {len(table.blocks)} blocks and what stays as it is"
            raise InfeasibleBudget(
                f"{asked} are too few.",
                f"{least_of}{whole_size}.{_on_whole(table, whole)}",
                f"Raise the budget to that (--bits {_bits_up(least, table.numel):g}, or --budget {least + table.beside})"
                f"{f', or {others}' * bool(others)}.",
            )
        return limit


def _smaller(table: FormatTable, available: int) -> str:
    """What measures types of llama.cpp that are small enough; empty where none are."""
    runtime = find_runtime(table.runtime, GGUF)
    for inputs, how in ((table.method not in ("", "rtn"), "--formats"), (True, "--formats, --method weighted")):
        least = 0
        for block in table.blocks:
            widths = [m.d_in for m in block.modules]
            menu = [f for f in runtime.formats(widths, inputs=inputs) if all(map(f.fits, widths))]
            least += min(sum(f.bytes(m.d_out, m.d_in, m.copies) for m in block.modules) for f in menu)
        if least <= available:
            return f"measure the model with smaller ones ({how})"
    return ""


def _in_one_format(table: FormatTable) -> list[int]:
    """Blocks that have no other format than sixteen bits: no other of the menu takes rows of their length."""
    alone: list[int] = np.flatnonzero(table.has.sum(axis=1) == 1).tolist()
    if len(table.formats) > 1:
        return alone
    if table.family == CACHE:
        return []
    runtime = find_runtime(table.runtime, table.family)  # no menu, or one that names sixteen bits alone
    return [k for k in alone if len(runtime.formats([table.blocks[k].modules[0].d_in])) == 1]


def _on_whole(table: FormatTable, whole: Sequence[int]) -> str:
    """A sentence on such blocks; empty where there are none."""
    if not whole:
        return ""
    name, width = table.blocks[whole[0]].name, table.blocks[whole[0]].modules[0].d_in
    if table.family == CACHE:
        return f" {len(whole)} of the blocks stay in {table.formats[-1]}, first {name}: transformers packs no sliding window."
    return (
        f" {len(whole)} of the blocks stay in {table.formats[-1]}, first {name}: "
        f"its rows of {width:,} inputs are no whole number of groups of another format."
    )


def _matching(table: FormatTable, pattern: str) -> list[int]:
    """Blocks with a matrix whose name, here or in the file, a regular expression finds."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InvalidInput(f"keep has {pattern!r}, no regular expression ({error}).", "", "Correct it.") from error
    stored = table.stored or [()] * len(table.blocks)
    names = [[*(m.name for m in b.modules), *in_file] for b, in_file in zip(table.blocks, stored, strict=True)]
    matches = [i for i, of_block in enumerate(names) if any(wanted.search(name) for name in of_block)]
    if not matches:
        some = ", ".join(dict.fromkeys(names[i][-1] for i in (0, -1)))
        raise InvalidInput(f"keep has {pattern!r}, which no matrix matches.", f"There are {some}, ...", "Correct it.")
    return matches


def _bits_up(size: int, numel: int) -> float:
    """Bits per weight in four digits, rounded up."""
    return math.ceil(8e4 * size / numel) / 1e4


def _check_bits(bits: float | None) -> None:
    """Refuse mean bits per weight that no plan can have."""
    if bits is not None and not 0 < bits <= _LARGEST:
        why = f"Bits per weight are above 0 and at most {_LARGEST:g}, the largest format."
        raise InvalidInput(f"bits is {bits:g}.", why, "Use for example 5.5.")
