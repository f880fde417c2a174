"""Configuration of a written model: fields of ``config.json`` under the names that its source has for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import reading
from .writing import Scratch

CONFIG = "config.json"
# Fields that a decision does not set, or that say how weights are stored and not which there are.
STORAGE = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "architectures",
    "transformers_version",
    "_name_or_path",
    "use_cache",
)
AHEAD = re.compile(r"(^|\.)\w*(mtp|nextn)", re.IGNORECASE)  # multi-token prediction, in names of tensors and of fields


def fields_of(source: Path | None) -> dict[str, Any]:
    """Return the configuration of a folder as its file has it."""
    if source is None:
        return {}
    return reading.read(source / CONFIG, "configuration", limit=1 << 26, as_type=dict[str, Any])


def _plain(config: Any) -> dict[str, Any]:
    """All fields of a configuration, as JSON has them."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def _spellings(config: Any, field: str) -> set[str]:
    """The names that a field of a configuration has or had."""
    same = getattr(type(config), "attribute_map", {}) if config is not None else {}
    named = {field, *(old for old, new in same.items() if new == field), *([same[field]] if field in same else [])}
    return named | ({"dtype", "torch_dtype"} if field == "dtype" else set())


def _merged(source: Mapping[str, Any], base: Mapping[str, Any], now: Mapping[str, Any], config: Any) -> tuple[dict, set[str]]:
    """The source's fields with those that are otherwise now than in ``base``, which was read from it; and their names."""
    fields, changed = dict(source), set[str]()
    for field in base.keys() | now.keys():
        if base.get(field) == now.get(field) and (field in base) == (field in now):
            continue
        if all(isinstance(part.get(field), dict) for part in (source, base, now)) and field.endswith("_config"):
            fields[field], below = _merged(source[field], base[field], now[field], getattr(config, field, None))
            changed |= below
            continue
        changed.add(field)
        names = _spellings(config, field) & set(fields)
        if field == "rope_parameters":
            names |= {"rope_theta", "rope_scaling"} & set(fields)
        for name in names:
            fields.pop(name)
        if field in now:
            same = names - {"rope_theta", "rope_scaling"} or {field}
            fields |= dict.fromkeys(same, now[field])
    return fields, changed


def changed_fields(model: Any, source: Path, fields: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields of a model's configuration that are otherwise than in its source."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return _merged(fields, _plain(read), _plain(model.config), read)[1]


def restore_config(folder: Path, source: Path, model: Any, *, narrow: bool) -> tuple[dict[str, Any], set[str]]:
    """Give ``config.json`` the fields of the source; return the fields, and the names of those that a decision changed.

    Where the result does not read as the model's own configuration, it is what transformers wrote, with the fields of the
    source that this lacks. ``narrow`` says that all tensors have the source's precision.
    """
    from transformers import AutoConfig

    source_fields = fields_of(source)
    written = reading.read(folder / CONFIG, "configuration", limit=1 << 26, as_type=dict[str, Any])
    read = AutoConfig.from_pretrained(source, trust_remote_code=False)
    base, now = _plain(read), {**_plain(model.config), **written}
    base["architectures"] = source_fields.get("architectures", now.get("architectures"))
    for name in ("transformers_version", "_name_or_path"):
        base[name] = now[name] = None
    if narrow:
        now = _with_precision(now, base)
    fields, changed = _merged(source_fields, base, now, read)
    alike = written.get("model_type") == source_fields.get("model_type")
    if alike and _reads_as(fields, now):
        return fields, changed
    left = {
        k: v for k, v in source_fields.items() if k not in written and not (k in base and k not in now) and k != "torch_dtype"
    }
    return {**left, **written}, changed


def _with_precision(now: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration with the precision that others have, also those of its parts."""
    fields = {
        n: _with_precision(v, base[n]) if isinstance(v, dict) and isinstance(base.get(n), dict) else v for n, v in now.items()
    }
    return {**fields, **({"dtype": base["dtype"]} if "dtype" in fields and "dtype" in base else {})}


def _reads_as(fields: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether transformers reads the same configuration from the fields."""
    from transformers import AutoConfig

    with Scratch() as place:
        (place / CONFIG).write_text(json.dumps(fields), encoding="utf-8")
        again = _plain(AutoConfig.from_pretrained(place, trust_remote_code=False))
    aside = {*STORAGE, "auto_map"}
    return all(_alike(again.get(n), v) for n, v in now.items() if n not in aside)


def _alike(one: Any, other: Any) -> bool:
    """Whether two fields are equal, up to what says how weights are stored."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_alike(one.get(n), other.get(n)) for n in (one.keys() | other.keys()) - set(STORAGE))
    return bool(one == other)


def without_ahead(fields: Any, gone: list[str]) -> Any:
    """Return fields with a count of zero of layers that predict further on; their names are added to ``gone``."""
    if not isinstance(fields, dict):
        return fields
    made = {}
    for name, value in fields.items():
        counts = isinstance(value, int) and not isinstance(value, bool) and ("num" in name or "layers" in name)
        if counts and value and AHEAD.search(name):
            gone.append(name)
            value = 0
        made[name] = without_ahead(value, gone)
    return made
