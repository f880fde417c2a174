"""JSON within bounds: an ordinary file, not too large, not too deep, with the types and ranges that were promised.

Types are checked by msgspec while it parses, so that a file of a million blocks never exists as dictionaries.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..errors import CorruptFile, LayerbudgetError, NotFound

_LIMIT = 1 << 32  # bytes
_DEPTH = 100
WHOLE = 1 << 62  # no whole number in a file is larger: sums of a few fit into 64 bits

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


def read(path: Path | str, kind: str, *, limit: int = _LIMIT, as_type: Any = Any, remedy: str = "Make it again.") -> Any:
    """Content of a JSON file of at most ``limit`` bytes, with the type that msgspec is to find in it.

    Messages say that it should be a ``kind`` of file, and the ``remedy`` for a broken one.

    Raises:
        NotFound: No such file.
        CorruptFile: No ordinary file, too large, not JSON, too deep, or of another shape.
    """
    return parse(read_bytes(path, kind, limit=limit), str(path), kind, as_type=as_type, remedy=remedy)


def check_ordinary(path: Path | str, kind: str, *, limit: int = _LIMIT) -> Path:
    """Refuse what is no ordinary file, or too large; see :func:`read`."""
    path = Path(path)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise NotFound(f"There is no {kind} file at {path}.", "", "Check the path.") from error
    if not stat.S_ISREG(status.st_mode):
        raise NotFound(f"{path} is no ordinary file.", f"A {kind} is one.", "Check the path.")
    if status.st_size > limit:
        raise CorruptFile(
            f"{path} has {status.st_size:,} bytes.", f"A {kind} has at most {limit:,}.", "Check that it is the right file."
        )
    return path


def read_bytes(path: Path | str, kind: str, *, limit: int = _LIMIT) -> bytes:
    """Content of an ordinary file that is not too large; see :func:`read`."""
    return check_ordinary(path, kind, limit=limit).read_bytes()


def parse(
    content: bytes | memoryview | str, where: str, kind: str, *, as_type: Any = Any, remedy: str = "Make it again."
) -> Any:
    """Value of a JSON text; see :func:`read`."""
    try:
        value = _decoder(as_type).decode(content.encode() if isinstance(content, str) else content)
    except RecursionError as error:
        raise CorruptFile(f"{where} is not a {kind} file: it is nested too deeply.", "", remedy) from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        if isinstance(error.__cause__, LayerbudgetError):  # what the type itself refuses
            raise error.__cause__ from None
        raise CorruptFile(f"{where} is not a {kind} file: it does not parse ({error}).", "", remedy) from error
    if as_type is Any:
        _check_bounds(value, where, kind, remedy)
    return value


class DoubledKey(ValueError):
    """An object of a JSON text has a ``key`` twice."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"it has the key {key} twice")


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON text, as ``object_pairs_hook`` of ``json.loads``.

    Raises:
        DoubledKey: It has a key twice, of which the last one would be taken.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DoubledKey(next(key for key in keys if keys.count(key) > 1))
    return found


def keys_of(content: bytes, where: str, kind: str) -> Sequence[str]:
    """Return the keys of the object that a JSON text is; those of the objects in it are not kept.

    Raises:
        CorruptFile: An object has a key twice, or the text does not parse.
    """
    try:
        keys: Sequence[str] = json.loads(content, object_pairs_hook=lambda pairs: tuple(once(pairs)))
    except DoubledKey as error:
        raise CorruptFile(f"{where} has the key {error.key} twice.", "", "Keep one of the two.") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{where} is not a {kind} file: it does not parse ({error}).", "", "Make it again.") from error
    return keys


@functools.lru_cache(maxsize=64)
def _decoder(as_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(as_type)


def _check_bounds(value: Any, where: str, kind: str, remedy: str = "Make it again.") -> None:
    """Refuse what is nested more than ``_DEPTH`` levels deep, and whole numbers that do not fit into 64 bits."""
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                deeper.extend(item.values())
            elif isinstance(item, (list, tuple)):
                deeper.extend(item)
            elif type(item) is int and not -WHOLE < item < WHOLE:
                raise CorruptFile(f"{where} is not a {kind} file: a number in it has {len(str(abs(item)))} digits.", "", remedy)
        if not deeper:
            return
        level = deeper
    raise CorruptFile(f"{where} is not a {kind} file: it is nested too deeply.", f"At most {_DEPTH} levels.", remedy)


def check_loose(value: Any, kind: str, name: str) -> None:
    """Refuse a field of any content that is too deep or holds too large numbers; what is typed has its bounds already."""
    if isinstance(value, Mapping):
        _check_bounds(value, name, kind)


def converted(value: Any, as_type: Any) -> Any:
    """A parsed value with its types checked.

    Raises:
        ValueError: Another shape; says where.
    """
    try:
        return msgspec.convert(value, as_type)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, LayerbudgetError):
            raise error.__cause__ from None
        raise


def converted_whole(value: Any, as_type: Any) -> Any:
    """A parsed value with its types checked, of which every key was read.

    Raises:
        ValueError: Another shape, or a key that the type does not have; says where.
    """
    typed = converted(value, as_type)
    for unread in _unread(value, typed):
        raise ValueError(f"the key {unread} is not read")
    return typed


def _unread(value: Any, typed: Any, where: str = "") -> Iterator[str]:
    """Yield where ``value`` has a key that its converted form ``typed`` left out."""
    if isinstance(value, Mapping):
        if dataclasses.is_dataclass(typed):
            kept = {field.name: getattr(typed, field.name) for field in dataclasses.fields(typed)}
        else:
            kept = {str(key): item for key, item in typed.items()} if isinstance(typed, Mapping) else {}
        for key, item in value.items():
            if str(key) in kept:
                yield from _unread(item, kept[str(key)], f"{where}{key}.")
            else:
                yield f"{where}{key}"
    elif isinstance(value, (list, tuple)) and isinstance(typed, (list, tuple)):
        for item, kept_item in zip(value, typed, strict=False):
            yield from _unread(item, kept_item, where)


def dump(value: Any) -> str:
    """JSON text of plain values, one line each; what :func:`read` reads."""
    return json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
