"""Values that nobody can change, and what of them stands in a file. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("A record cannot be changed. dataclasses.replace gives another one.")


class Frozen(dict[str, Any]):
    """A dictionary that refuses changes; what it holds is frozen likewise (:func:`freeze`)."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return Frozen, (dict(self),)


class FrozenList(list[Any]):
    """A list that refuses changes."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # type: ignore[assignment]
    append = extend = insert = remove = reverse = sort = clear = pop = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __reduce__(self) -> Any:
        return FrozenList, (list(self),)


def freeze(value: Any) -> Any:
    """Return a value that nobody can change: frozen dictionaries and lists, tuples, read-only arrays."""
    if isinstance(value, (Frozen, FrozenList)):
        return value
    if isinstance(value, Mapping):
        return Frozen({name: freeze(item) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else FrozenList)(freeze(item) for item in value)
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to_dict"):
        return freeze_fields(value)
    return value


def freeze_fields(value: Any) -> Any:
    """Return a frozen dataclass with frozen values of its fields."""
    return dataclasses.replace(value, **{f.name: freeze(getattr(value, f.name)) for f in dataclasses.fields(value)})


def fields_in_file(value: Any) -> Any:
    """Return a dataclass of settings or results as it stands in a file: what has its default, or is empty, is left out.

    A field without a default is always there, one whose default is None where it is something else. A class that has
    ``to_dict`` says itself what is there.
    """
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: fields_in_file(v) for f in dataclasses.fields(value) if not _is_default(f, v := getattr(value, f.name))}
    if isinstance(value, Mapping):
        return {name: fields_in_file(item) for name, item in value.items()}
    return [fields_in_file(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a field has its default: the one value, or nothing in a collection."""
    if field.default_factory is not dataclasses.MISSING:
        return not value
    return field.default is not dataclasses.MISSING and (value is field.default or (field.default == () and not value))
