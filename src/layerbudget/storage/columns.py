"""Many blocks as columns: one array per number and one list of names in the place of an object per block.

Records of more than ``LARGE`` blocks hold them so, and so do their files: ``{"length", "digest", "name": [...], ...}``.
Blocks are made when somebody asks for one. The digest is SHA-256 over the names and the little-endian bytes of the numbers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, overload

import msgspec
import numpy as np

from ..errors import CorruptFile
from . import reading

LARGE = 20_000
_AT_ONCE = 1 << 14
T = TypeVar("T")


class Fields(dict[str, Any]):
    """An object of long lists, plain and finite already: written on one line, known by its digest."""


class Numbers(list[Any]):
    """Long lists of finite numbers, null where there is none: written on one line, known by their bytes."""

    @property
    def digest(self) -> str:
        """Content hash."""
        return hashed(*(np.asarray(row, dtype=np.float64) for row in self))


def written(value: Fields | Numbers) -> str:
    """JSON text without a line break."""
    return msgspec.json.encode(dict(value) if isinstance(value, Fields) else list(value)).decode()


def hashed(*columns: Any) -> str:
    """Content hash of arrays and of lists of names (16 hexadecimal digits)."""
    h = hashlib.sha256()
    for column in columns:
        if isinstance(column, np.ndarray):
            h.update(f"{column.dtype.kind}{column.shape}".encode())
            h.update(np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<")).data)
        else:
            h.update(np.fromiter(map(len, column), dtype="<i8", count=len(column)).data)
            h.update("".join(column).encode("utf-8", "surrogatepass"))
    return h.hexdigest()[:16]


class Table(Sequence[T], Generic[T]):
    """Blocks as columns.

    Args:
        name: Names of the K blocks.
        module: Names of all matrices, block by block; ``None`` where every block is one matrix of its own name.
        sizes: Matrices of every block, shape ``(K,)``; ``None`` where each has one.
        columns: The numbers, by name.
    """

    file: ClassVar[Any]  # the columns as msgspec reads them
    row: ClassVar[Any]  # one block as msgspec reads it

    def __init__(
        self, name: list[str], module: list[str] | None, sizes: np.ndarray | None, columns: Mapping[str, np.ndarray]
    ) -> None:
        self.names, self.module, self.sizes, self.columns = name, module, sizes, dict(columns)
        self.starts = np.arange(len(name) + 1) if sizes is None else np.concatenate([[0], np.cumsum(sizes)])

    def item(self, k: int) -> T:
        """One block."""
        raise NotImplementedError

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> Table[T]:
        """The columns of blocks that come some at a time."""
        raise NotImplementedError

    @classmethod
    def of_file(cls, found: Any) -> Table[T]:
        """The columns of a file, checked for their lengths and against their digest.

        Raises:
            CorruptFile: They contradict each other.
        """
        raise NotImplementedError

    @classmethod
    def read(cls, content: bytes | memoryview, where: str, kind: str) -> Table[T]:
        """Columns, or a list of blocks, from their JSON text.

        Raises:
            CorruptFile: It is neither.
        """
        if bytes(content[:1]) == b"{":
            return cls.of_file(reading.parse(content, where, kind, as_type=cls.file))
        pieces = reading.parse(content, where, kind, as_type=list[msgspec.Raw])
        chunks = (pieces[i : i + _AT_ONCE] for i in range(0, len(pieces), _AT_ONCE))
        decoded = (reading.parse(b"[" + b",".join(c) + b"]", where, kind, as_type=list[cls.row]) for c in chunks)  # type: ignore[name-defined]
        return cls.of_rows(decoded)

    def modules_of(self, k: int) -> tuple[str, ...]:
        """Names of the matrices of one block."""
        return (self.names[k],) if self.module is None else tuple(self.module[self.starts[k] : self.starts[k + 1]])

    @property
    def matrices(self) -> np.ndarray:
        """Matrices of every block, shape ``(K,)``."""
        return np.diff(self.starts)

    @functools.cached_property
    def digest(self) -> str:
        """Content hash."""
        return hashed(self.names, self.module or [], self.matrices, *self.columns.values())

    def to_dict(self) -> Fields:
        """What the file says."""
        sizes = None if self.sizes is None else self.sizes.tolist()
        numbers = {name: column.tolist() for name, column in self.columns.items()}
        return Fields(
            length=len(self), digest=self.digest, name=self.names, module=self.module, sizes=sizes, **numbers
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, k: int) -> T: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[T]: ...
    def __getitem__(self, k: int | slice) -> T | Sequence[T]:
        places = range(len(self))[k]
        return self.item(places) if isinstance(places, int) else tuple(self.item(i) for i in places)

    def __iter__(self) -> Iterator[T]:
        return map(self.item, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return type(other) is type(self) and self.digest == other.digest
        return isinstance(other, Sequence) and len(other) == len(self) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class ColumnsFile(msgspec.Struct, kw_only=True):
    """What every table of blocks says in its file."""

    length: reading.Size
    digest: str
    name: list[reading.Name]
    module: list[reading.Name] | None = None
    sizes: list[reading.Size] | None = None


def parts_of(found: ColumnsFile, numbers: Mapping[str, Any], *, each: bool) -> tuple[Any, Any, Any, dict[str, np.ndarray]]:
    """Arguments of a table from its file.

    Args:
        found: The file.
        numbers: Its columns of numbers by name, with their types.
        each: Whether numbers are given per matrix, and not per block.

    Raises:
        CorruptFile: Columns of different lengths.
    """
    sizes = None if found.sizes is None else np.array(found.sizes, dtype=np.int64)
    matrices = found.length if sizes is None else int(sizes.sum())
    columns = {name: np.array(getattr(found, name), dtype=dtype) for name, dtype in numbers.items()}
    lengths = {"name": (len(found.name), found.length), "sizes": (found.length if sizes is None else sizes.size, found.length)}
    lengths |= {"module": (matrices if found.module is None else len(found.module), matrices)}
    lengths |= {name: (column.size, matrices if each else found.length) for name, column in columns.items()}
    wrong = next((name for name, (has, wants) in lengths.items() if has != wants), None)
    if found.module is None and sizes is not None:
        wrong, lengths["module"] = "module", (0, matrices)
    if wrong is not None:
        name = wrong
        raise CorruptFile(
            f"The column {name} of the blocks has {lengths[name][0]} entries for {lengths[name][1]}.",
            "",
            "Make the file again.",
        )
    return found.name, found.module, sizes, columns


def checked(table: Table[T], digest: str) -> Table[T]:
    """The table, if its content is what its file says.

    Raises:
        CorruptFile: It is not.
    """
    if table.digest != digest:
        raise CorruptFile(f"The blocks have the digest {table.digest}, the file says {digest}.", "", "Make the file again.")
    return table


def single(names: list[str], module: list[str], sizes: list[int]) -> tuple[list[str], list[str] | None, np.ndarray | None]:
    """Arguments of a table, without the columns that say nothing where every block is one matrix.

    Raises:
        CorruptFile: A block without matrices.
    """
    if min(sizes, default=0) < 1:
        raise CorruptFile("A block has no matrix.", "Every block has at least one.", "Make the file again.")
    if max(sizes) > 1:
        return names, module, np.array(sizes, dtype=np.int64)
    return names, None if module == names else module, None


def names_of(blocks: Sequence[Any]) -> list[str]:
    """Names of blocks."""
    return blocks.names if isinstance(blocks, Table) else [b.name for b in blocks]


def matrices_of(blocks: Sequence[Any]) -> np.ndarray:
    """Matrices of every block, shape ``(K,)``."""
    return blocks.matrices if isinstance(blocks, Table) else np.array([len(b.modules) for b in blocks], dtype=np.int64)
