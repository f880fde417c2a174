"""Tensors of a checkpoint that transformers does not load, such as layers which predict a token further on."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .checkpoint import Stored
from .configuration import AHEAD, CONFIG, STORAGE, changed_fields, fields_of

_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.")
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|position_ids|masked_bias|\.attn\.bias)$")  # older versions stored them


def source_of(model: Any) -> Path | None:
    """The folder that a model was loaded from, of a hub id the one in the cache; None where it is not known."""
    name = str(getattr(model, "_read_from", None) or getattr(model.config, "_name_or_path", ""))
    if Path(name).is_dir():
        return Path(name) if (Path(name) / CONFIG).is_file() else None
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, CONFIG, revision=getattr(model.config, "_commit_hash", None))
    return Path(file).parent if isinstance(file, str) else None


def unread(model: Any) -> tuple[str, ...]:
    """Names of the tensors of a model's checkpoint that transformers does not load, such as layers for tokens further on."""
    source = source_of(model)
    if source is None:
        return ()
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    pattern = re.compile("|".join(f"({p})" for p in ignored)) if ignored else None
    loaded, known = _loaded(model), set(getattr(model, "_unread", ()))
    names = [n for n in Stored(source).names if n not in loaded and not _BUFFERS.search(n)]
    further = set(ahead(names, model))
    return tuple(n for n in names if n in known or n in further or (pattern is not None and pattern.search(n)))


def _loaded(model: Any) -> set[str]:
    return {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


def ahead(names: Collection[str], model: Any) -> list[str]:
    """Those of the names that belong to layers which predict a token further on: their name says so, or their number."""
    loaded, depth = _loaded(model), dict[str, int]()
    for m in filter(None, map(_LAYER.match, loaded)):
        depth[m[1]] = max(depth.get(m[1], 0), int(m[2]) + 1)
    source = source_of(model)  # its layers, of which a plan may have taken some
    fields = fields_of(source)
    count = (fields.get("text_config") or fields).get("num_hidden_layers") or 0
    named = not any(AHEAD.search(n) for n in loaded)  # else the model computes with them

    def beyond(name: str) -> bool:
        m = _LAYER.match(name)
        return m is not None and m[1] in depth and int(m[2]) >= max(depth[m[1]], count)

    return [n for n in names if (named and AHEAD.search(n)) or beyond(n)]


def predicting(model: Any) -> dict[str, int] | None:
    """How many tensors of a model's checkpoint belong to layers which predict a token further on, and their bytes; or None."""
    further = ahead(unread(model), model)
    stored = origin(model) if further else None
    return None if stored is None else {"tensors": len(further), "bytes": sum(stored.bytes(name) for name in further)}


def added(model: Any, changed: Collection[str] | None = None) -> tuple[str, ...]:
    """Names of the tensors that are copied into a folder of the model: no verb reads them, and they still fit.

    Args:
        model: A model that was loaded from a folder; others have none.
        changed: Fields of the configuration that decisions changed; by default those that are otherwise now than in the source.
    """
    source = source_of(model)
    if source is None or origin(model) is None:
        return ()
    fields = fields_of(source)
    if fields.get("quantization_config"):
        return ()
    names = unread(model)
    if names and (changed_fields(model, source, fields) if changed is None else set(changed)) - set(STORAGE):
        further = ahead(names, model)
        layers = tuple(m[1] for n, _ in model.named_parameters() if (m := _LAYER.match(n)))
        names = tuple(n for n in names if n not in further and not n.startswith(layers))
    return names


def origin(model: Any) -> Stored | None:
    """The tensors of the checkpoint that folders of a model are made like; None where it is not known, or of another kind."""
    source = source_of(model)
    if source is None or fields_of(source).get("model_type") != model.config.model_type:  # a part of it, as a model of its own
        return None
    return Stored(source)


def named_unread(model: Any) -> str:
    """Return how many tensors no verb reads, and what they are: the start of a sentence; empty where every tensor is read."""
    names = unread(model)
    if not names:
        return ""
    what = "of layers that predict further tokens (MTP)" if ahead(names, model) else f"such as {names[0]}"
    return f"{len(names)} tensors of the checkpoint that transformers does not load, {what},"


def on_unread(model: Any) -> str:
    """One sentence on the tensors that no verb reads; empty where every tensor is read."""
    names = unread(model)
    if not names:
        return ""
    further = ahead(names, model)
    what = "of a layer that predicts a token further on (multi-token prediction, MTP)" if further else f"such as {names[0]}"
    if further and len(further) < len(names):
        what += f", and others such as {next(n for n in names if n not in further)}"
    follows = "a plan that keeps all shapes copies them as they are"
    follows += ", any other leaves that layer out and sets its number in config.json to 0." if further else "."
    return f"{len(names)} tensors of the checkpoint are not loaded by transformers, {what}: no verb reads them; {follows}"
