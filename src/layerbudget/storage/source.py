"""Parts of a written model folder that come from its source: all that no decision touched.

:func:`complete` makes a folder that transformers wrote like its source again: fields of ``config.json`` under the names that it
has for them, the tokenizer's files and all others beside the weights, the precision of tensors whose values are those of
the source, and tensors that transformers does not load.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from .checkpoint import INDEX, Stored, weight_files
from .configuration import CONFIG, restore_config, without_ahead
from .unread import added, ahead, origin, source_of, unread
from .writing import Scratch

GENERATION = "generation_config.json"

# Weights under any name, and the files that say what other programs made of them.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".gguf",
    ".npz",
    ".pkl",
    ".index.json",
)
_STALE = ("adapter_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "params.json")
# What this package writes beside a model: a folder that was written from another has its own.
_OURS: tuple[str, ...] = (
    "manifest.json",
    "plan.json",
    "receipt.json",
    "README.md",
    "tensor-types.txt",
    "autoround-layer_config.json",
)
_OURS += ("cache.json", "cache.txt", "experts.json", "shapes.json")
# What turns images, sound and templates into a model's inputs, beside the tokenizer's own files.
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")
_FIELDS_OF_TOKENIZERS = ("name_or_path", "tokenizer_file", "is_local", "local_files_only", "transformers_version")


# --- files -------------------------------------------------------------------------------------------------------------------


def _side_files(source: Path) -> Iterator[str]:
    """Names of the source's files that are neither weights nor this package's, with those of folders that hold no weights."""
    modules = source / "modules.json"  # of sentence-transformers: the folders of its further layers belong to the model
    parts = {str(row.get("path")) for row in json.loads(modules.read_bytes())} if modules.is_file() else set()
    for path in sorted(source.iterdir()):
        if path.name.startswith((".", "checkpoint-")) or path.name in (*_OURS, *_STALE, CONFIG):
            continue
        if path.is_dir():
            inside = [f for f in sorted(path.rglob("*")) if f.is_file()]
            if path.name in parts or not any(f.name.endswith(_WEIGHTS) for f in inside):
                yield from (f.relative_to(source).as_posix() for f in inside if "__pycache__" not in f.parts)
        elif not path.name.endswith(_WEIGHTS) and not path.name.startswith(("adapter_model", "events.out.")):
            yield path.name


def save_weights(model: Any, folder: Path, **options: Any) -> None:
    """Write weights and configuration of a model as ``save_pretrained`` does, which refuses some settings of generation.

    Those of the source are copied as they are, and a model without source has no others than its configuration has.
    """
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None and source_of(model) is not None:
        model.generation_config = type(generation_config)()
    try:
        model.save_pretrained(folder, **options)
    finally:
        if generation_config is not None:
            model.generation_config = generation_config


def write_readers(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what makes a model's inputs: its tokenizer (where there is one), and processors as files of where it came from."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    source = source_of(model)
    for name in PROCESSORS:
        file = _origin(model.config, name) if source is None or not (source / name).is_file() else source / name
        if file is not None and not (folder / name).exists():
            shutil.copyfile(file, folder / name)


def _origin(config: Any, name: str) -> Path | None:
    """A file of the hub repository that a model was loaded from; None where it has none."""
    source = str(getattr(config, "_name_or_path", ""))
    if source.count("/") != 1 or Path(source).is_dir() or config.get_text_config() is config:  # that of texts has no processor
        return None
    from transformers.utils import cached_file

    file = cached_file(
        source,
        name,
        revision=getattr(config, "_commit_hash", None),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)


def copy_files(source: Path, folder: Path, *, skip: Collection[str] = ()) -> None:
    """Copy what lies beside the weights of a source and is not in the folder yet."""
    for name in _side_files(source):
        target = folder / name
        if name not in skip and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)


def write_tokenizer(tokenizer: Any, folder: Path, source: Path | None) -> set[str]:
    """Write a tokenizer (where there is one); return names that the source's own files are not copied under.

    One that is as it was read from the source is left to the source's files, which older programs read too.
    """
    if tokenizer is None:
        return set()
    before = {f.name for f in folder.iterdir()}
    tokenizer.save_pretrained(folder)
    made = {f.name for f in folder.iterdir()} - before
    if source is not None and _as_read(tokenizer, folder, made, source):
        for name in made:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return set()
    names = {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt"}
    return (
        names | {"tokenizer.json", "tokenizer.model", "vocab.json"} | set(getattr(tokenizer, "vocab_files_names", {}).values())
    )


def _as_read(tokenizer: Any, folder: Path, made: Collection[str], source: Path) -> bool:
    """Whether a tokenizer, saved under these names, is the one that the source's files make."""
    from transformers import AutoTokenizer

    try:
        again = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the source has none that transformers reads
        return False
    with Scratch() as place:
        again.save_pretrained(place)
        files = {f.name for f in place.iterdir()}
        return type(again) is type(tokenizer) and files == set(made) and all(_same(folder / n, place / n) for n in files)


def _same(one: Path, other: Path) -> bool:
    """Whether two files of a tokenizer say the same, up to where they came from and how its last call cut and padded."""
    if one.is_dir() or one.suffix != ".json":
        return one.is_dir() == other.is_dir() and (one.is_dir() or one.read_bytes() == other.read_bytes())
    aside = ("truncation", "padding") if one.name == "tokenizer.json" else _FIELDS_OF_TOKENIZERS
    records = [json.loads(file.read_bytes()) for file in (one, other)]
    if all(isinstance(record, dict) for record in records):
        records = [{k: v for k, v in record.items() if k not in aside} for record in records]
    return bool(records[0] == records[1])


# --- tensors -----------------------------------------------------------------------------------------------------------------


def written_dtype(name: str, tensor: Any, dtype: Any, stored: Stored | None) -> Any:
    """The precision that a tensor has in a folder of 16 bits that is like its source: what :func:`restore_tensors` gives it.

    Args:
        name: In the folder.
        tensor: The tensor of the model; of one without values those of the source are taken.
        dtype: The precision that it is first written in: 16 bits, but where the model wants more.
        stored: The tensors of the source, see :func:`origin`.
    """
    kind = stored.dtype(name) if stored is not None and name in stored.names else None
    if stored is None or kind is None or kind.itemsize == dtype.itemsize or _stays_halved(dtype, kind, stored):
        return dtype
    if tensor.is_meta:
        return kind
    converted = _in_source_precision(name, tensor.to(dtype), stored, halved=True)
    return dtype if converted is None else converted.dtype


def _stays_halved(dtype: Any, kind: Any, stored: Stored) -> bool:
    """Whether a tensor is of a checkpoint of float32 that is written in 16 bits."""
    import torch

    return bool(dtype == torch.bfloat16 and kind == torch.float32 == stored.most)


def _in_source_precision(name: str, made: Any, stored: Stored, *, halved: bool) -> Any:
    """A tensor as the source has it, or in its precision, where nothing is lost by that; None where it stays as it is."""
    import torch

    kind = stored.dtype(name)
    if kind in (None, made.dtype) or not made.is_floating_point():
        return None
    if halved and _stays_halved(made.dtype, kind, stored):
        return None
    tensor = stored.tensor(name)
    if tensor.shape == made.shape and torch.equal(tensor.to(made.dtype), made):
        return tensor
    narrow = made.to(kind)
    return narrow if kind.itemsize <= made.dtype.itemsize and torch.equal(narrow.to(made.dtype), made) else None


def restore_tensors(
    folder: Path, stored: Stored, *, keep: Collection[str] = (), more: Collection[str] = (), halved: bool = False
) -> bool:
    """Give tensors of a folder the precision that the source has them in, and add ``more`` of its tensors.

    Return whether all tensors have that precision now. Tensors in ``keep`` stay as they are; with ``halved`` so do those of
    16 bits where most of the source has 32.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    files, alike = weight_files(folder), True
    for file in files:
        changed = {}
        with safe_open(file, "pt") as handle:
            names = list(handle.keys())
            for name in names:
                if name in stored.names and name not in keep:
                    made = handle.get_tensor(name)
                    if (converted := _in_source_precision(name, made, stored, halved=halved)) is not None:
                        changed[name] = converted.contiguous()
                    alike = alike and (converted is not None or stored.dtype(name) in (None, made.dtype))
            if len(files) == 1 and more:
                changed |= {name: stored.tensor(name).contiguous() for name in more}
            if changed:
                whole = {name: changed[name] if name in changed else handle.get_tensor(name) for name in {*names, *changed}}
                save_file(whole, new := file.with_suffix(".new"), metadata=handle.metadata() or {"format": "pt"})
        if changed:
            os.replace(new, file)
    if len(files) > 1 and more:
        save_file({n: stored.tensor(n).contiguous() for n in more}, folder / "model-not-loaded.safetensors", {"format": "pt"})
    if len(files) > 1:
        _count_again(folder, more)
    return alike


def _count_again(folder: Path, more: Collection[str]) -> None:
    """Bring an index up to date."""
    index = json.loads((folder / INDEX).read_bytes())
    index["weight_map"] = dict(sorted({**index["weight_map"], **dict.fromkeys(more, "model-not-loaded.safetensors")}.items()))
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    stored = Stored(folder)
    index.setdefault("metadata", {})["total_size"] = sum(stored.bytes(name) for name in index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


# --- all of it ---------------------------------------------------------------------------------------------------------------


def complete(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    keep: Collection[str] = (),
    halved: bool = False,
    precision: bool = True,
    fits: bool = True,
) -> list[str]:
    """Make a folder with configuration and weights like the source of its model in all that no decision touched; return notes.

    Args:
        model: What was written, as it was loaded and then changed.
        tokenizer: Written too, where it is not None.
        folder: Holds ``config.json`` and safetensors files.
        keep: Names of tensors that stay as they were written.
        halved: See :func:`restore_tensors`.
        precision: Whether ``config.json`` says the source's precision again where all tensors have it.
        fits: Whether tensors that transformers does not load fit what is written, where the configuration is as it was.
    """
    source, stored = source_of(model), origin(model)
    if source is None or stored is None:
        write_tokenizer(tokenizer, folder, source)
        return []
    alike = restore_tensors(folder, stored, keep=keep, halved=halved)
    fields, changed = restore_config(folder, source, model, narrow=alike and precision)
    further, more, notes = ahead(unread(model), model), added(model, changed) if fits else (), list[str]()
    if not set(further) & set(more):
        gone = list[str]()
        fields = without_ahead(fields, gone)
        if gone or further:
            notes.append(
                "The layer that predicts a token further on (multi-token prediction, MTP) is not in the folder: "
                + (f"its {len(further)} tensors do not fit what was planned." if further else "the checkpoint has none of it.")
                + (f" {' and '.join(dict.fromkeys(gone))} of config.json is 0." if gone else "")
            )
    if more:
        restore_tensors(folder, stored, keep=stored.names, more=more)
        _ignored(fields, more)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if (folder / GENERATION).is_file():  # of the source it is copied as it is
        (folder / GENERATION).unlink()
    skip = write_tokenizer(tokenizer, folder, source)
    copy_files(source, folder, skip=skip)
    write_readers(model, None, folder)
    return notes


def _ignored(fields: dict[str, Any], more: Collection[str]) -> None:
    """Have a reader of packed weights take the added tensors for what they are: plain numbers."""
    packed = fields.get("quantization_config")
    if packed is None:
        return
    names = {n.removesuffix(".weight") for n in more}
    names |= {
        f"re:^{re.escape(m[0])}.*" for n in more if (m := re.match(r"(.*?\w*(?:mtp|nextn)\w*\.)|(.*?\blayers\.\d+\.)", n))
    }
    packed["ignore"] = sorted({*packed.get("ignore", ()), *names})
