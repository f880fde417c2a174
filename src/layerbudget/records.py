"""Blocks, and what every record of this package shares: it is frozen, reads and writes JSON, and shows itself in few lines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import msgspec
import numpy as np

from .arguments import checked
from .canonical import digest, dumps, to_jsonable
from .errors import CorruptFile, InvalidInput, MissingDependency, NotFound, UnknownBlock
from .frozen import Frozen, freeze
from .storage import reading
from .storage.writing import write_text

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One weight matrix of a block: ``y = W x`` with ``W`` of shape ``(d_out, d_in)``.

    ``copies`` counts identical matrices held in one tensor (the experts of a fused mixture), ``active`` how many of
    them one token passes through.
    """

    name: reading.Name
    d_in: reading.Size
    d_out: reading.Size
    copies: reading.Size = 1
    active: reading.Size = 1

    @property
    def numel(self) -> int:
        """Parameters of the matrix (all copies)."""
        return self.d_in * self.d_out * self.copies

    @property
    def flops_per_token(self) -> int:
        """FLOPs per token, two per multiply-add (active copies only)."""
        return 2 * self.d_in * self.d_out * self.active


_STACKS = tuple(f".experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj"))


def stacks(names: Iterable[str]) -> list[str]:
    """Those names that are of stacks of experts, each a parameter of three dimensions and no module.

    >>> stacks(["layers.0.mlp.experts.down_proj", "layers.0.mlp.experts.3.down_proj", "layers.0.mlp.shared_experts.down_proj"])
    ['layers.0.mlp.experts.down_proj']
    """
    return [n for n in names if n.endswith(_STACKS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A unit of decision: one decoder layer, one Linear, or any group of weight matrices."""

    name: reading.Name
    modules: Annotated[tuple[Module, ...], msgspec.Meta(min_length=1)]

    @property
    def numel(self) -> int:
        """Prunable parameters of the block."""
        return sum(m.numel for m in self.modules)

    @property
    def flops_per_token(self) -> int:
        """FLOPs per token of the block's matrices, two per multiply-add."""
        return sum(m.flops_per_token for m in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "numel": self.numel,
            "flops_per_token": self.flops_per_token,
            "modules": [dict(m.__dict__) for m in self.modules],
        }


def natural_key(name: str) -> tuple[Any, ...]:
    """Sort key under which ``layers.10`` follows ``layers.9``.

    >>> sorted(["h.10", "h.9", "h.1"], key=natural_key)
    ['h.1', 'h.9', 'h.10']
    """
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name))


def read_json(
    path: Path | str,
    kind: str,
    command: str | None = None,
    *,
    as_type: Any = dict[str, Any],
    known: Collection[str] | None = None,
) -> Any:
    """Content of one of this package's JSON files: a ``kind`` that ``command`` makes (the same word where it is None).

    Raises:
        NotFound: No such file.
        CorruptFile: Not JSON, of another shape, a schema version that this release does not read, a key that is there twice,
            or one that is not among those that are ``known``.
    """
    if not Path(path).is_file():
        remedy = f"Check the path, or make one first (layerbudget {command or kind})."
        raise NotFound(f"There is no {kind} file at {path}.", "", remedy)
    content = reading.read_bytes(path, kind)
    head = reading.parse(content, str(path), kind, as_type=_Head)
    if kind == "scores" and head.rule is not None and head.estimator is None:
        raise CorruptFile(f"{path} is not a scores file: it is a plan.", "", "Give the file of scores that it was made from.")
    if kind == "plan" and head.estimator is not None and head.rule is None:
        raise CorruptFile(
            f"{path} is not a plan file: it holds scores.",
            "",
            f"Plan from them first: layerbudget plan {'bits' if head.estimator == 'rounding' else 'sparsity'} FILE.",
        )
    if head.schema_version != SCHEMA_VERSION:
        message = f"{path} has schema version {str(head.schema_version)[:40]}."
        raise CorruptFile(message, f"This release reads version {SCHEMA_VERSION}.", f"Make the {kind} again.")
    keys = reading.keys_of(content, str(path), kind)
    unknown = [] if known is None else [key for key in keys if key not in known and key not in _PRINTED]
    if unknown:
        what = f"{path} has the key {unknown[0]}, which is not read."
        raise CorruptFile(what, f"A {kind} file has {', '.join(known or ())}.", "Take it out.")
    return reading.parse(content, str(path), kind, as_type=as_type)


_PRINTED = ("made_by", "verdict", "next", "output", "expected", "took")  # beside a record, in a file or by --json


class _Head(msgspec.Struct):
    schema_version: Any = None
    estimator: Any = None
    rule: Any = None


_RUNNING: list[Callable[[], str]] = []


@contextlib.contextmanager
def running(command: Callable[[], str]) -> Iterator[None]:
    """Inside, records that are saved name the command that made them."""
    _RUNNING.append(command)
    try:
        yield
    finally:
        _RUNNING.pop()


def made_by() -> str:
    """Return the command that is running; what Python makes has none."""
    return _RUNNING[-1]() if _RUNNING else ""


class Record:
    """Base of the dataclasses that are this package's JSON files; their fields are the file's keys, but for :attr:`keys`."""

    what: ClassVar[str] = "record"  # the word for such a file
    command: ClassVar[str | None] = None  # the command that makes one, where it is another word
    keys: ClassVar[Mapping[str, str]] = {}  # keys in the file of fields that have another name here
    unwritten: ClassVar[tuple[str, ...]] = ()  # fields that are in memory alone

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in self.unwritten]  # type: ignore[arg-type]
        fields = {self.keys.get(name, name): getattr(self, name) for name in names}
        fields = {name: to_jsonable(value) if isinstance(value, Frozen) else value for name, value in fields.items()}
        if isinstance(fields.get("blocks"), tuple):
            fields["blocks"] = [b.to_dict() for b in fields["blocks"]]
        return {"schema_version": SCHEMA_VERSION, **fields}

    def written(self) -> dict[str, Any]:
        """Return what a file of it holds: the content, and the command that is running where none made it."""
        record = self.to_dict()
        return {**record, "made_by": record.get("made_by") or made_by()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild the record from :meth:`to_dict`; keys that this release does not know are left out.

        Raises:
            InvalidInput: A key is missing, or a value has another type or range than the field.
        """
        try:
            rebuilt = cls._from_file(reading.converted(to_jsonable(record), _file_type(cls)))  # type: ignore[arg-type]
        except msgspec.MsgspecError as error:
            raise InvalidInput(
                f"This is no {cls.what} record: {error}.", "", "Take the JSON form as it was written."
            ) from error
        rebuilt._check()
        return rebuilt

    @classmethod
    def _from_file(cls, stored: Any) -> Self:
        """Return the record of what was read of a file: a record already, or its values by field."""
        return stored if isinstance(stored, cls) else cls(**{n: getattr(stored, n) for n in stored.__struct_fields__})

    def _check(self) -> None:
        """Refuse what is too deep or holds too large numbers."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            reading.check_loose(getattr(self, field.name), self.what, field.name)

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write the file, atomically.

        Raises:
            AlreadyExists: The file exists with another content and ``overwrite`` is false.
        """
        return write_text(path, dumps(self.written()), overwrite=overwrite)

    @classmethod
    @checked
    def load(cls, path: Path | str) -> Self:
        """Read the file.

        Raises:
            NotFound: No such file.
            CorruptFile: Not such a file, one with a key that it cannot have or has twice, or values that contradict each other.
            InvalidInput: Values that contradict each other.
        """
        names = (f.name for f in dataclasses.fields(cls) if f.name not in cls.unwritten)  # type: ignore[arg-type]
        known = dict.fromkeys(("schema_version", *(cls.keys.get(name, name) for name in names)))
        loaded = cls._from_file(
            read_json(path, cls.what, cls.command, as_type=_file_type(cls), known=known)  # type: ignore[arg-type]
        )
        loaded._check()
        return loaded


@functools.cache
def _file_type(record: Any) -> Any:
    """The type that a file of records is read as: the record itself, or its fields by the keys of the file."""
    if not record.keys and not record.unwritten:
        return record
    hints, fields = get_type_hints(record, include_extras=True), list[Any]()
    for field in dataclasses.fields(record):
        default = msgspec.NODEFAULT if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = msgspec.field(default_factory=field.default_factory)
        if field.name not in record.unwritten:
            fields.append((field.name, hints[field.name], default))
    return msgspec.defstruct(record.__name__, fields, rename=dict(record.keys), kw_only=True)


class BlockRecord(Record):
    """A frozen record with one entry per block; it is indexed by the names of the blocks."""

    blocks: tuple[Any, ...]
    aside: ClassVar[tuple[str, ...]] = ("versions", "made_by")  # fields that say where a record is from: no part of its digest

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if isinstance(getattr(self, field.name), Mapping):
                object.__setattr__(self, field.name, freeze(getattr(self, field.name)))
        names = self.names
        if not names or len(set(names)) != len(names):
            raise InvalidInput(
                f"The {self.what} names {len(names)} blocks, {len(set(names))} of them distinct.", "", "Name each once."
            )

    @property
    def names(self) -> list[str]:
        """Block names, in order."""
        return [b.name for b in self.blocks]

    @property
    def numel(self) -> np.ndarray:
        """Prunable parameters per block, shape ``(K,)``."""
        return self._column("numel", np.int64)

    @property
    def digest(self) -> str:
        """Content hash of the record, without what says where it is from (versions and command, and the text of a plan)."""
        return digest({k: v for k, v in self.to_dict().items() if k not in self.aside})

    def _column(self, name: str, dtype: Any) -> np.ndarray:
        return freeze(np.array([getattr(b, name) for b in self.blocks], dtype=dtype))  # type: ignore[no-any-return]

    def _shown(self) -> tuple[str, list[str]]:
        """The record in a line, and what it says of every block."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def index_of(self, name: str) -> int:
        """Return the place of a block.

        Raises:
            UnknownBlock: There is no block of that name.
        """
        names = self.names
        if name not in names:
            raise UnknownBlock(
                f"No block is called {name!r}.", f"The blocks are {', '.join(names[:3])}, ...", "Correct the name."
            )
        return names.index(name)

    def __repr__(self) -> str:
        title, cells = self._shown()
        width = max(len(name) for name in self.names)
        rows = [f"  {name:<{width}}  {cell}" for name, cell in zip(self.names, cells, strict=True)]
        if len(rows) > _ROWS:
            rows = [*rows[: _ROWS - 2], "  ...", rows[-1]]
        return "\n".join([title, *rows])

    def _repr_html_(self) -> str:
        """A small table for notebooks: layers downwards, matrices across."""
        title, cells = self._shown()
        places = [_PLACE.match(name) for name in self.names]
        at = [(p["layer"], p["rest"] or "") if p else (n, "") for p, n in zip(places, self.names, strict=True)]
        rows, columns = (tuple(dict.fromkeys(x)) for x in zip(*at, strict=True))
        text = dict(zip(at, cells, strict=True))
        head = "".join(f"<th>{html.escape(c)}</th>" for c in ("", *columns))
        body = "".join(
            f"<tr><th>{html.escape(r)}</th>" + "".join(f"<td>{text.get((r, c), '')}</td>" for c in columns) + "</tr>"
            for r in rows
        )
        return f"<table><caption>{html.escape(title)}</caption><tr>{head}</tr>{body}</table>"

    def _frame(self, **columns: Any) -> Any:
        try:
            import pandas
        except ImportError as error:
            raise MissingDependency("A table needs pandas.", "", "pip install pandas.") from error
        return pandas.DataFrame(columns, index=pandas.Index(self.names, name="block"))


_ROWS = 6
_PLACE = re.compile(r"(?P<layer>.*?\.\d+)(?:\.(?P<rest>.*))?$")


def _few(names: Sequence[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def values_by_name(blocks: Sequence[Block], values: Mapping[str, float] | Sequence[float]) -> list[float]:
    """Return one finite number per block, in order; a column of pandas that is labelled by block is read by its labels.

    Raises:
        InvalidInput: Too few, too many, unknown names, no order, or not finite numbers.
    """
    names, values = [b.name for b in blocks], _by_label(values)
    if isinstance(values, Set) or not isinstance(values, Iterable):
        what = f"The values are of type {type(values).__name__}, which has no order."
        raise InvalidInput(what, "One value per block.", "Give them by block name.")
    if not isinstance(values, Mapping):
        given = list(values)
        if len(given) != len(names):
            raise InvalidInput(f"There are {len(given)} values for {len(names)} blocks.", "One each.", "Give one per block.")
        values = dict(zip(names, given, strict=True))
    known = set(names)
    missing, unknown = [n for n in names if n not in values], [n for n in values if n not in known]
    if missing or unknown:
        said = [f"missing for {_few(missing)}"] if missing else []
        said += [f"given for unknown blocks: {_few(unknown)}"] if unknown else []
        raise InvalidInput(
            f"Values are {' and '.join(said)}.", f"The {len(names)} blocks are {_few(names)}.", "Give one value per block."
        )
    return [_finite(name, values[name]) for name in names]


def _by_label(values: Any) -> Any:
    """A column of pandas as a dictionary, where its labels are words; anything else as it is."""
    if isinstance(values, Mapping) or not hasattr(values, "items"):
        return values
    if not any(isinstance(label, str) for label in values.keys()):
        return values
    if len(labelled := dict(values.items())) < len(values):
        raise InvalidInput("The values have a label twice.", "One value per block.", "Drop the others.")
    return labelled


def _finite(name: str, value: Any) -> float:
    """A value as a finite number."""
    try:
        number = math.nan if isinstance(value, str) or np.iscomplexobj(value) else float(value)
    except (TypeError, ValueError):  # None, or several numbers
        number = math.nan
    if not math.isfinite(number):
        shown = repr(value) if isinstance(value, str) else str(value)
        raise InvalidInput(f"The value of {name} is {shown[:40]}.", "It must be a finite number.", "Correct it.")
    return number


class Result(Mapping[str, Any]):
    """Base of dataclasses that are read like the dictionary of their fields too: ``result.moved`` is ``result["moved"]``."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dict__:
            raise KeyError(name)
        return self.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt(Record):
    """The result of a plan that was applied: which plan to which model, the model, and what a subclass has counted.

    Attributes:
        plan_digest: Digest of the plan.
        identity: What :func:`layerbudget.models.blocks.describe` says of the model before; ``model`` in a file.
        notes: Sentences on what was met on the way.
        model: The model that has what the plan says; not in a file.
        cache: An empty cache that keeps keys and values as the plan says, where it decides a cache; not in a file.
    """

    what: ClassVar[str] = "receipt"
    command: ClassVar[str | None] = "apply"
    keys: ClassVar[Mapping[str, str]] = {"identity": "model"}
    unwritten: ClassVar[tuple[str, ...]] = ("model", "cache")

    plan_digest: str
    identity: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    model: Any = dataclasses.field(default=None, repr=False, compare=False)
    cache: Any = dataclasses.field(default=None, repr=False, compare=False)

    def counted(self) -> dict[str, Any]:
        """Return what was counted, by field: that which is not said of every receipt."""
        common = {field.name for field in dataclasses.fields(Receipt)}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in common}


def check_fraction(value: float, name: str, *, low: float = 0.0) -> float:
    """Return ``value`` if it is a finite number in ``[low, 1]``.

    Raises:
        InvalidInput: It is not.
    """
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or not low <= value <= 1.0:
        example = 0.5 if low <= 0.5 else (1.0 + low) / 2.0
        raise InvalidInput(
            f"{name} is {value}.", f"It must lie in [{low:g}, 1].", f"Give {name} as a fraction, for example {example:g}."
        )
    return float(value)
