"""What all files of this package share: blocks, canonical JSON, digests, atomic writing. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from .canonical import digest as digest
from .canonical import dumps as dumps
from .canonical import to_jsonable as to_jsonable
from .errors import CorruptFile, InvalidInput, NotFound
from .storage import reading
from .storage.writing import check_output as check_output
from .storage.writing import check_writable as check_writable
from .storage.writing import write_text as write_text

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A unit of decision: one decoder layer, one Linear, or any group of weight matrices."""

    name: reading.Name
    modules: tuple[Module, ...]

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

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Block:
        """Rebuild a block from its JSON form."""
        return cls(name=record["name"], modules=tuple(Module(**m) for m in record["modules"]))


def natural_key(name: str) -> tuple[Any, ...]:
    """Sort key under which ``layers.10`` follows ``layers.9``.

    >>> sorted(["h.10", "h.9", "h.1"], key=natural_key)
    ['h.1', 'h.9', 'h.10']
    """
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name))


def read_json(path: Path | str, kind: str, command: str | None = None, *, as_type: Any = None) -> Any:
    """Read one of this package's JSON files.

    Args:
        path: The file.
        kind: What it is, for messages.
        command: What makes one, where that is another word.
        as_type: The type of its content; an object of anything by default.

    Raises:
        NotFound: No such file.
        CorruptFile: Not JSON, of another shape, or a schema version that this release does not read.
    """
    made = f"or make one first (layerbudget {command or kind})."
    if not Path(path).is_file():
        raise NotFound(f"There is no {kind} file at {path}.", "", f"Check the path, {made}")
    content = reading.read_bytes(path, kind)
    head = reading.parse(content, str(path), kind, as_type=_Versioned)
    version, other = head.schema_version, _OTHERS.get((head.estimator is not None, head.rule is not None), {}).get(kind)
    if other:
        raise CorruptFile(f"{path} is not a {kind} file: {other[0]}.", "", other[1])
    if version is not SCHEMA_VERSION and version != SCHEMA_VERSION:
        raise CorruptFile(
            f"{path} has schema version {str(version)[:40]}.", f"This release reads version {SCHEMA_VERSION}.",
            f"Make the {kind} again.",
        )  # fmt: skip
    return reading.parse(content, str(path), kind, as_type=dict[str, Any] if as_type is None else as_type)


class _Versioned(msgspec.Struct):
    schema_version: Any = None
    estimator: Any = None
    rule: Any = None


_OTHERS: dict[tuple[bool, bool], dict[str, tuple[str, str]]] = {  # (has an estimator, has a rule): what a file is mistaken for
    (False, True): {"scores": ("it is a plan", "Give the file of scores that it was made from.")},
    (True, False): {"plan": ("it holds scores", "Plan from them first: layerbudget plan sparsity FILE.")},
}


_RUNNING: list[tuple[str, Callable[[], str]]] = []


@contextlib.contextmanager
def running(verb: str, line: Callable[[], str]) -> Iterator[None]:
    """Inside, records that a verb makes say of themselves how they were made.

    Args:
        verb: Of the command line.
        line: The whole command, asked for when a record is written.
    """
    _RUNNING.append((verb, line))
    try:
        yield
    finally:
        _RUNNING.pop()


def made_by(*verbs: str) -> str:
    """The command that is running, if it is one of these verbs; else nothing: what Python makes has no command."""
    return _RUNNING[-1][1]() if _RUNNING and _RUNNING[-1][0] in verbs else ""


class Record:
    """What a dataclass needs to be one of this package's JSON files; its fields are the file's keys.

    Attributes:
        what: The word for such a file.
        command: The command that makes one, where it is another word.
        makers: Verbs that make one; :meth:`save` writes their command into the field ``made_by``, which no digest counts.
    """

    what: ClassVar[str] = "record"
    command: ClassVar[str | None] = None
    makers: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, the content of the file."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        if isinstance(fields.get("blocks"), tuple):
            fields["blocks"] = [b.to_dict() for b in fields["blocks"]]
        return {"schema_version": SCHEMA_VERSION, **fields}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild the record from its JSON form; keys that this release does not know are left out.

        Raises:
            InvalidInput: A key is missing, or a value has another type or range than the field.
        """
        try:
            return cls._made(reading.converted(to_jsonable(record), _shape(cls)))
        except msgspec.MsgspecError as error:
            raise InvalidInput(
                f"This is no {cls.what} record: {error}.", "", "Take the JSON form as it was written."
            ) from error

    @classmethod
    def _made(cls, shape: Any) -> Self:
        """The record from a shape whose types are checked."""
        fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
        for name, value in fields.items():
            reading.check_loose(value, cls.what, name)
        return cls(**cls._upgraded(fields))

    @classmethod
    def _upgraded(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """What an earlier release wrote in another way, as this one has it."""
        return fields

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write the file, atomically.

        Raises:
            AlreadyExists: The file exists with another content and ``overwrite`` is false.
        """
        record = self.to_dict()
        record["made_by"] = record.get("made_by") or made_by(*self.makers)
        return write_text(path, dumps(record), overwrite=overwrite)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the file.

        Raises:
            NotFound: No such file.
            CorruptFile: Not such a file.
            InvalidInput: Values that contradict each other.
        """
        return cls._made(read_json(path, cls.what, cls.command, as_type=_shape(cls)))


_SHAPES: dict[type, type[msgspec.Struct]] = {}


def _shape(cls: Any) -> type[msgspec.Struct]:
    """The fields of a record as a structure that msgspec fills while it checks types."""
    if cls in _SHAPES:
        return _SHAPES[cls]
    hints = typing.get_type_hints(cls, include_extras=True)
    parts: list[Any] = []
    for field in dataclasses.fields(cls):
        part: tuple[Any, ...] = (field.name, hints[field.name])
        if field.default_factory is not dataclasses.MISSING:
            part += (msgspec.field(default_factory=field.default_factory),)
        elif field.default is not dataclasses.MISSING:
            part += (field.default,)
        parts.append(part)
    return _SHAPES.setdefault(cls, msgspec.defstruct(f"{cls.__name__}File", parts, kw_only=True))


class Result(Mapping[str, Any]):
    """What a dataclass needs to be read like the dictionary of its fields too: ``found.moved`` is ``found["moved"]``."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dict__:
            raise KeyError(name)
        return self.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)


def check_fraction(value: float, name: str, *, low: float = 0.0, high: float = 1.0) -> float:
    """Return ``value`` if it is a finite number in ``[low, high]``.

    Raises:
        InvalidInput: It is not.
    """
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
        raise InvalidInput(
            f"{name} is {value}.", f"It must lie in [{low:g}, {high:g}].", f"Give {name} as a fraction, for example 0.5."
        )
    return float(value)
