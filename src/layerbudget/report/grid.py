"""Blocks as a picture of the network: layers downwards, kinds of matrices across."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ..plan import PlanBlock
from ..records import Block, natural_key

_PLACE = re.compile(r"^(?P<stack>.*?)\.(?P<layer>\d+)(?:\.(?P<rest>.*))?$")


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where every matrix stands.

    Attributes:
        rows: Labels of the layers, in the model's order.
        columns: Labels of the matrices, in the order in which they first come.
        cells: ``(row, column) -> index of the block`` that the matrix belongs to.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, int], int]

    @property
    def whole(self) -> bool:
        """Whether every row is one block, so that one column says it all."""
        owners: dict[int, int] = {}
        return all(owners.setdefault(row, k) == k for (row, _), k in self.cells.items()) and len(owners) == len(self.rows)


def grid_of(blocks: Sequence[Block | PlanBlock]) -> Grid:
    """Lay blocks out by layer and matrix; what stands in no layer gets a row of its own.

    Args:
        blocks: Blocks of scores or of a plan.
    """
    places: list[tuple[str, str, int]] = []
    for k, block in enumerate(blocks):
        for module in block.modules or ():
            name = module if isinstance(module, str) else module.name
            found = _PLACE.match(name)
            row = f"{found['stack']}.{found['layer']}" if found else name
            rest = (found["rest"] or "all") if found else "all"
            places.append((row, rest, k))
        if not block.modules:
            places.append((block.name, "all", k))
    rows = sorted({p[0] for p in places}, key=natural_key)
    columns = list(dict.fromkeys(p[1] for p in places))
    across, down = ({label: i for i, label in enumerate(labels)} for labels in (columns, rows))
    cells = {(down[r], across[c]): k for r, c, k in places}
    stacks = {r.rpartition(".")[0] for r in rows if _PLACE.match(r)}
    short = [r.rpartition(".")[2] if len(stacks) == 1 and _PLACE.match(r) else r for r in rows]
    return Grid(tuple(short), tuple(c.rpartition(".")[2] for c in columns), cells)
