"""Canonical JSON: one text and one digest for one content. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .storage.columns import Fields, Numbers, written


def to_jsonable(value: Any) -> Any:
    """Turn numpy scalars and arrays, tuples and dataclasses into plain JSON values; NaN and infinities become null."""
    kind = type(value)  # the plain kinds first: a large plan has millions of them
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is dict:
        return {k if type(k) is str else str(k): to_jsonable(v) for k, v in value.items()}
    if kind is list or kind is tuple:
        return [to_jsonable(v) for v in value]
    if kind is Fields or kind is Numbers:
        return value
    if isinstance(value, Mapping):
        return {str(k): to_jsonable(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_jsonable(value.to_dict() if hasattr(value, "to_dict") else dataclasses.asdict(value))
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
    """Canonical JSON text: keys in the order given, one-space indent (columns on one line), ends with a newline."""
    plain = to_jsonable(record)
    if not isinstance(plain, dict) or not any(isinstance(v, (Fields, Numbers)) for v in plain.values()):
        return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_line(value)}" for name, value in plain.items()) + "\n}\n"


def _line(value: Any) -> str:
    if isinstance(value, (Fields, Numbers)):
        return written(value)
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).replace("\n", "\n ")


def digest(record: Any) -> str:
    """Return a short content hash of a JSON-able record (sorted keys); of columns their own digest counts."""
    if isinstance(record, Mapping):
        record = {k: {"digest": _own(v)} if isinstance(v, (Fields, Numbers)) else v for k, v in record.items()}
    text = json.dumps(to_jsonable(record), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _own(value: Fields | Numbers) -> str:
    return str(value["digest"]) if isinstance(value, Fields) else value.digest
