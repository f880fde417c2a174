"""A model's blocks and a plan's blocks as columns (:mod:`layerbudget.storage.columns`). No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from .errors import InvalidInput
from .records import Block, Module
from .storage import reading
from .storage.columns import ColumnsFile, Table, checked, parts_of, single

_SIDES = {"d_in": np.int64, "d_out": np.int64, "copies": np.int64, "active": np.int64}


class _Matrix(msgspec.Struct, gc=False):
    name: reading.Name
    d_in: reading.Size
    d_out: reading.Size
    copies: reading.Size = 1
    active: reading.Size = 1


class _BlockRow(msgspec.Struct, gc=False):
    name: reading.Name
    modules: tuple[_Matrix, ...]


class _BlockColumns(ColumnsFile, kw_only=True):
    d_in: list[reading.Size]
    d_out: list[reading.Size]
    copies: list[reading.Size]
    active: list[reading.Size]


class BlockTable(Table[Block]):
    """Blocks of a model: ``d_in``, ``d_out``, ``copies`` and ``active`` of all matrices, block by block."""

    file: ClassVar[Any] = _BlockColumns
    row: ClassVar[Any] = _BlockRow

    def item(self, k: int) -> Block:
        """One block."""
        names, first, sides = self.modules_of(k), int(self.starts[k]), self.columns
        modules = (
            Module(name=name, **{side: int(column[first + i]) for side, column in sides.items()})
            for i, name in enumerate(names)
        )
        return Block(name=self.names[k], modules=tuple(modules))

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> BlockTable:
        """The columns of blocks that come some at a time."""
        names: list[str] = []
        module: list[str] = []
        sizes: list[int] = []
        sides: dict[str, list[np.ndarray]] = {side: [] for side in _SIDES}
        for some in rows:
            matrices = [m for b in some for m in b.modules]
            here, inner = [b.name for b in some], [m.name for m in matrices]
            names.extend(here)
            module.extend(here if inner == here else inner)  # one text in memory where both are the same
            sizes.extend(len(b.modules) for b in some)
            for side in _SIDES:
                sides[side].append(np.array([getattr(m, side) for m in matrices], dtype=np.int64))
        columns = {side: np.concatenate(parts) if parts else np.zeros(0, np.int64) for side, parts in sides.items()}
        return cls(*single(names, module, sizes), columns)

    @classmethod
    def of_file(cls, found: Any) -> BlockTable:
        """The columns of a file."""
        table = cls(*parts_of(found, _SIDES, each=True))
        checked(table, found.digest)
        return table

    def per_block(self, of_matrices: np.ndarray) -> np.ndarray:
        """Sums over the matrices of every block, shape ``(K,)``."""
        if self.sizes is None:
            return of_matrices
        return np.diff(np.concatenate([[0], np.cumsum(of_matrices)])[self.starts])

    @functools.cached_property
    def numel(self) -> np.ndarray:
        """Prunable parameters per block, shape ``(K,)``.

        Raises:
            InvalidInput: Shapes whose product no whole number of 64 bits holds.
        """
        c = self.columns
        if float(np.dot(c["d_in"].astype(np.float64) * c["d_out"], c["copies"])) >= reading.WHOLE:
            raise InvalidInput("The blocks have more than 2^62 parameters.", "", "Check their shapes.")
        return self.per_block(c["d_in"] * c["d_out"] * c["copies"])

    @functools.cached_property
    def flops_per_token(self) -> np.ndarray:
        """FLOPs per token of every block, shape ``(K,)``."""
        c = self.columns
        return self.per_block(2 * c["d_in"] * c["d_out"] * c["active"])

    @functools.cached_property
    def smallest_sides(self) -> np.ndarray:
        """The smallest side of any matrix of every block, shape ``(K,)``."""
        least = np.minimum(self.columns["d_in"], self.columns["d_out"])
        return least if self.sizes is None else np.minimum.reduceat(least, self.starts[:-1])


def numbers_of(blocks: Sequence[Block], name: str) -> np.ndarray:
    """``numel`` or ``flops_per_token`` of every block, whole, shape ``(K,)``."""
    if isinstance(blocks, BlockTable):
        return np.asarray(getattr(blocks, name))
    return np.array([getattr(b, name) for b in blocks], dtype=np.int64)
