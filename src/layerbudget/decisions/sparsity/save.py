"""Write a pruned model as an ordinary transformers checkpoint that carries its plan."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import CorruptFile
from ...models.blocks import pretrained
from ...models.offload import mapped
from ...plan import Plan
from ...storage import reading
from ...storage.folders import check_folder as check_output
from ...storage.folders import new_folder
from .receipt import Receipt

__all__ = ["add_metadata", "check_output", "new_folder", "read_metadata", "save_pruned"]


def save_pruned(
    model: nn.Module, tokenizer: Any, plan: Plan, receipt: Receipt, out_dir: Path | str, *, overwrite: bool = False
) -> Path:
    """Write checkpoint, tokenizer, ``plan.json`` and ``receipt.json``.

    The folder appears complete or not at all. The weights are stored densely, zeros included, so that every runtime reads
    them; no ``sparsity_config`` is written (runtimes without sparse kernels refuse such models). The plan's digest, the
    method and the recounted sparsity are in the metadata of every safetensors file.

    Args:
        model: The pruned model.
        tokenizer: Saved beside it where it is not None.
        plan: The plan that was applied.
        receipt: What :func:`layerbudget.decisions.sparsity.apply.prune` returned.
        out_dir: Must not exist, or be empty.
        overwrite: Replace what an earlier call wrote: the files that the folder's ``manifest.json`` names, and no others.

    Returns:
        The folder.

    Raises:
        AlreadyExists: The folder exists and is not empty (with ``overwrite``: and is none of ours).
    """
    with new_folder(out_dir, overwrite=overwrite) as temporary:
        limits: dict[str, Any] = {} if mapped(model) is None else {"max_shard_size": "1GB"}
        pretrained(model).save_pretrained(temporary, **limits)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        plan.save(temporary / "plan.json")
        receipt.save(temporary / "receipt.json")
        metadata = {
            "layerbudget_plan": plan.digest,
            "layerbudget_method": receipt.method,
            "layerbudget_sparsity": f"{receipt.sparsity:.6f}",
        }
        for file in temporary.glob("*.safetensors"):
            add_metadata(file, metadata)
    return Path(out_dir)


_HEADER = 100_000_000  # bytes: the format's own bound


def read_metadata(file: Path | str) -> dict[str, str]:
    """Metadata of a safetensors file."""
    with open(file, "rb") as f:
        return _header(f, file)[0].get("__metadata__", {})


def _header(f: Any, file: Path | str) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(f.read(8), "little")
    if size > _HEADER:
        raise CorruptFile(f"{file} is not a safetensors file (a header of {size} bytes).", "", "Save the model again.")
    found = reading.parse(f.read(size), str(file), "safetensors", as_type=dict[str, Any], remedy="Save the model again.")
    return found, size


def add_metadata(file: Path | str, metadata: Mapping[str, str]) -> None:
    """Add metadata to a safetensors file: the header is rewritten, the tensors are copied as bytes."""
    file = Path(file)
    temporary = file.with_suffix(".part")
    with open(file, "rb") as source, open(temporary, "wb") as target:
        header, _ = _header(source, file)
        header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, target, 1 << 24)
    os.replace(temporary, file)
