"""What is decided one by one: layers, matrices, or groups of rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from torch import nn

from ...compressors.base import Level
from ...compressors.select import share
from ...compressors.treating import Job
from ...errors import InvalidInput
from ...models.blocks import partition
from ...plan import PlanBlock, RowGroups, members
from ...records import Block


class Decisions:
    """Units of decision over the matrices of a model.

    Args:
        blocks: Blocks; one matrix each where rows are decided.
        rows: Rows of a group; None where whole blocks are decided.

    Attributes:
        modules: Matrices in order.
        numel: Prunable parameters of every unit, shape ``(K,)``.
        first: First unit of every matrix; a matrix has :attr:`groups` of them.

    Raises:
        InvalidInput: Experts whose rows do not split into groups.
    """

    def __init__(self, blocks: Sequence[Block], rows: int | None = None) -> None:
        self.blocks, self.rows = tuple(blocks), rows
        self.modules = [m for b in self.blocks for m in b.modules]
        self.first: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        sizes: list[np.ndarray] = []
        units = 0
        for block in self.blocks:
            for m in block.modules:
                if rows is not None and m.copies > 1 and m.d_out % rows:
                    raise InvalidInput(
                        f"The experts of {m.name} have {m.d_out} rows, which do not split into groups of {rows}.", "",
                        "Choose a divisor, or decide by linear.",
                    )  # fmt: skip
                own = np.array([block.numel]) if rows is None else np.tile(members(m.d_out, rows) * m.d_in, m.copies)
                self.first[m.name], self.groups[m.name] = units, own.size
                if rows is not None or m is block.modules[0]:
                    sizes.append(own)
                units += own.size if rows is not None else 0
            units += rows is None
        self.numel = np.concatenate(sizes).astype(np.int64)

    @classmethod
    def by(cls, model: nn.Module, by: str) -> Decisions:
        """Units by name: ``layer``, ``linear``, ``rows:G``, or a regular expression over matrices.

        Raises:
            InvalidInput: ``rows:`` without a whole number.
        """
        if not by.startswith("rows"):
            return cls(partition(model, by))
        found = re.fullmatch(r"rows:([1-9]\d*)", by)
        if not found:
            raise InvalidInput(f"by is {by!r}.", "Groups of rows are rows:G with G at least 1.", "Use rows:1 or rows:16.")
        return cls(partition(model, "linear"), int(found.group(1)))

    def __len__(self) -> int:
        return len(self.numel)

    def of(self, name: str) -> slice:
        """Units of a matrix."""
        return slice(self.first[name], self.first[name] + self.groups[name])

    def per_block(self, counts: np.ndarray) -> np.ndarray:
        """Counts of whole blocks."""
        if self.rows is None:
            return counts
        return np.array([int(counts[self.of(b.modules[0].name)].sum()) for b in self.blocks], dtype=np.int64)

    def jobs(self, counts: np.ndarray, within: str = "") -> list[Job]:
        """What matrices become, those below a layer or all."""
        found = []
        for block, count in zip(self.blocks, self.per_block(counts).tolist(), strict=True):
            parts = share(count, [m.numel for m in block.modules])
            for m, zeros in zip(block.modules, parts, strict=True):
                if m.name.startswith(within):
                    rows = None if self.rows is None else (self.rows, counts[self.of(m.name)])
                    found.append(Job(module=m, level=Level(zeros=zeros, rows=rows)))
        return found

    def plan_blocks(self, counts: np.ndarray) -> tuple[PlanBlock, ...]:
        """What a plan says."""
        pairs = zip(self.blocks, self.per_block(counts).tolist(), strict=True)
        return tuple(PlanBlock.of(b, c / b.numel, c) for b, c in pairs)

    def row_groups(self, counts: np.ndarray) -> RowGroups | None:
        """What a plan says of rows."""
        if self.rows is None:
            return None
        return RowGroups(size=self.rows, counts={m.name: counts[self.of(m.name)] for m in self.modules})
