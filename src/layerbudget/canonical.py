"""Canonical JSON: one text and one digest for one content. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def to_jsonable(value: Any) -> Any:
    """Turn numpy scalars and arrays, tuples and dataclasses into plain JSON values; NaN and infinities become null."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [to_jsonable(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): to_jsonable(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_jsonable(value.to_dict() if hasattr(value, "to_dict") else dataclasses.asdict(value))
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    return [to_jsonable(v) for v in value] if isinstance(value, Iterable) else value


def dumps(record: Any) -> str:
    """Canonical JSON text: keys in the order given, one-space indent, ends with a newline."""
    return json.dumps(to_jsonable(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def digest(record: Any) -> str:
    """Return a short content hash of a JSON-able record (sorted keys)."""
    text = json.dumps(to_jsonable(record), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
