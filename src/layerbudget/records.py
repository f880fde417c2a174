"""What all files of this package share: blocks, canonical JSON, digests, atomic writing. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import AlreadyExists, CorruptFile, InvalidInput, LayerbudgetError, NotFound

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One weight matrix of a block: ``y = W x`` with ``W`` of shape ``(d_out, d_in)``.

    ``copies`` counts identical matrices held in one tensor (the experts of a fused mixture), ``active`` how many of
    them one token passes through.
    """

    name: str
    d_in: int
    d_out: int
    copies: int = 1
    active: int = 1

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

    name: str
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
            "modules": [dataclasses.asdict(m) for m in self.modules],
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


def to_jsonable(value: Any) -> Any:
    """Turn numpy scalars and arrays, tuples and dataclasses into plain JSON values; NaN and infinities become null."""
    if isinstance(value, Result):
        return {k: to_jsonable(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_jsonable(value.to_dict() if hasattr(value, "to_dict") else dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(k): to_jsonable(v) for k, v in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    if isinstance(value, Iterable):
        return [to_jsonable(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def dumps(record: Any) -> str:
    """Canonical JSON text: keys in the order given, one-space indent, ends with a newline."""
    return json.dumps(to_jsonable(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def digest(record: Any) -> str:
    """Return a short content hash of a JSON-able record (sorted keys)."""
    text = json.dumps(to_jsonable(record), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_text(path: Path | str, text: str, *, overwrite: bool = False) -> Path:
    """Write atomically: a temporary file in the same folder, then one rename.

    Raises:
        AlreadyExists: The file exists with another content and ``overwrite`` is false.
    """
    path = Path(path)
    if path.is_dir() or (path.exists() and not overwrite and path.read_bytes() != text.encode("utf-8")):
        raise AlreadyExists(f"{path} exists already.", "", "Choose another output or pass --overwrite (overwrite=True).")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def check_output(path: Path | str, *, overwrite: bool = False) -> Path:
    """Refuse an output file that could not be written, before any work is done.

    Raises:
        AlreadyExists: The file exists and ``overwrite`` is false, or it is a folder.
        InvalidInput: Its folder cannot be written to.
    """
    path = Path(path)
    if path.is_dir() or (path.exists() and not overwrite):
        raise AlreadyExists(f"{path} exists already.", "", "Choose another output or pass --overwrite (overwrite=True).")
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """Refuse a path in whose folder, or in the nearest one that exists above it, nothing can be made.

    Raises:
        InvalidInput: Names that folder.
    """
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(f"{path} cannot be written: no file can be made in {folder}.", "", "Choose another output.")


def read_json(path: Path | str, kind: str, command: str | None = None) -> dict[str, Any]:
    """Read one of this package's JSON files.

    Raises:
        NotFound: No such file.
        CorruptFile: Not JSON, not an object, or a schema version that this release does not read.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFound(
            f"There is no {kind} file at {path}.", "", f"Check the path, or make one first (layerbudget {command or kind})."
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} is not a {kind} file: it does not parse ({error}).", "", "Make it again.") from error
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        version = record.get("schema_version") if isinstance(record, dict) else None
        raise CorruptFile(
            f"{path} has schema version {version}.", f"This release reads version {SCHEMA_VERSION}.", f"Make the {kind} again."
        )
    return record


class Record:
    """What a dataclass needs to be one of this package's JSON files; its fields are the file's keys.

    Attributes:
        what: The word for such a file.
        command: The command that makes one, where it is another word.
    """

    what: ClassVar[str] = "record"
    command: ClassVar[str | None] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, the content of the file."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        parts = {k: [b.to_dict() for b in v] if k == "blocks" and isinstance(v, tuple) else v for k, v in fields.items()}
        return {"schema_version": SCHEMA_VERSION, **parts}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild the record from its JSON form; keys that this release does not know are left out."""
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{k: v for k, v in record.items() if k in known})

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write the file, atomically.

        Raises:
            AlreadyExists: The file exists with another content and ``overwrite`` is false.
        """
        return write_text(path, dumps(self.to_dict()), overwrite=overwrite)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the file.

        Raises:
            NotFound: No such file.
            CorruptFile: Not such a file.
        """
        record = read_json(path, cls.what, cls.command)
        try:
            return cls.from_dict(record)
        except LayerbudgetError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFile(f"{path} is not a {cls.what} file ({error!r}).", "", "Make it again.") from error


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
