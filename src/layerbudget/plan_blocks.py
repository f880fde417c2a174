"""What the blocks of a plan get, one by one or as columns. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from .records import Block
from .storage import reading
from .storage.columns import ColumnsFile, Table, checked, parts_of, single
from .tables import BlockTable

_NUMBERS = {"value": np.float64, "count": np.int64, "numel": np.int64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanBlock:
    """What one block gets.

    Attributes:
        name: Block name as in the model (``model.layers.3`` or a Linear's full name).
        value: Sparsity in [0, 1], or the continuous number of experts or ranks.
        count: Pruned parameters (sparsity), experts, or rank of every module of the block.
        numel: Prunable parameters of the block.
        modules: Full names of the block's weight matrices: what applying the plan touches.
    """

    name: reading.Name
    value: float
    count: reading.Count
    numel: reading.Count
    modules: tuple[reading.Name, ...]

    @classmethod
    def of(cls, block: Block, value: float, count: int) -> PlanBlock:
        """What a block of a model gets."""
        names = tuple(m.name for m in block.modules)
        return cls(name=block.name, value=float(value), count=int(count), numel=block.numel, modules=names)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return dict(self.__dict__)


class _Row(msgspec.Struct, gc=False):
    name: reading.Name
    value: float
    count: reading.Count
    numel: reading.Count
    modules: tuple[reading.Name, ...]


class _Columns(ColumnsFile, kw_only=True):
    value: list[float]
    count: list[reading.Count]
    numel: list[reading.Count]


class PlanTable(Table[PlanBlock]):
    """Blocks of a plan: ``value``, ``count`` and ``numel``."""

    file: ClassVar[Any] = _Columns
    row: ClassVar[Any] = _Row

    def item(self, k: int) -> PlanBlock:
        """One block."""
        value, count, numel = (self.columns[name][k].item() for name in _NUMBERS)
        return PlanBlock(name=self.names[k], value=value, count=count, numel=numel, modules=self.modules_of(k))

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> PlanTable:
        """The columns of blocks that come some at a time."""
        names: list[str] = []
        module: list[str] = []
        sizes: list[int] = []
        numbers: dict[str, list[np.ndarray]] = {name: [] for name in _NUMBERS}
        for some in rows:
            here, inner = [b.name for b in some], [m for b in some for m in b.modules]
            names.extend(here)
            module.extend(here if inner == here else inner)
            sizes.extend(len(b.modules) for b in some)
            for name, dtype in _NUMBERS.items():
                numbers[name].append(np.array([getattr(b, name) for b in some], dtype=dtype))
        columns = {name: np.concatenate(parts) for name, parts in numbers.items()}
        return cls(*single(names, module, sizes), columns)

    @classmethod
    def of_file(cls, found: Any) -> PlanTable:
        """The columns of a file."""
        table = cls(*parts_of(found, _NUMBERS, each=False))
        checked(table, found.digest)
        return table

    @classmethod
    def of(cls, blocks: BlockTable, value: np.ndarray, count: np.ndarray) -> PlanTable:
        """What the blocks of a model get."""
        numbers = {"value": value, "count": count, "numel": blocks.numel}
        columns = {name: np.array(numbers[name], dtype=dtype) for name, dtype in _NUMBERS.items()}
        return cls(blocks.names, blocks.module, blocks.sizes, columns)


def planned(blocks: Sequence[Block], value: np.ndarray, count: np.ndarray) -> Sequence[PlanBlock]:
    """What every block gets."""
    if isinstance(blocks, BlockTable):
        return PlanTable.of(blocks, value, count)
    return tuple(PlanBlock.of(b, v, c) for b, v, c in zip(blocks, value, count, strict=True))
