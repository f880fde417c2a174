"""Write a pruned model as an ordinary transformers checkpoint that carries its plan."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..blocks import pretrained
from ..errors import AlreadyExists, CorruptFile
from ..plan import Plan
from ..records import check_writable
from .receipt import Receipt


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
        receipt: What :func:`layerbudget.pruning.apply.prune` returned.
        out_dir: Must not exist, or be empty.
        overwrite: Replace a folder that an earlier call wrote (it holds a ``receipt.json``).

    Returns:
        The folder.

    Raises:
        AlreadyExists: The folder exists and is not empty (with ``overwrite``: and is none of ours).
    """
    with new_folder(out_dir, overwrite=overwrite) as temporary:
        pretrained(model).save_pretrained(temporary)
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


@contextlib.contextmanager
def new_folder(out_dir: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into that takes the place of ``out_dir`` when all went well, and vanishes when not.

    Raises:
        AlreadyExists: See :func:`check_output`.
    """
    out = check_output(out_dir, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        _swap(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_output(out_dir: Path | str, *, overwrite: bool = False) -> Path:
    """Refuse an output folder that holds something or cannot be made, before any work is done.

    Raises:
        AlreadyExists: It does.
        InvalidInput: It cannot.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not overwrite:
            raise AlreadyExists(f"{out} exists already.", "", "Choose another output folder, or pass --overwrite.")
        if not (out / "receipt.json").is_file():
            raise AlreadyExists(f"{out} exists and holds no receipt of this package.", "", "Choose another output folder.")
    check_writable(out)
    return out


def _swap(new: Path, out: Path) -> None:
    """Put a complete folder in the place of another one."""
    if not out.exists():
        os.replace(new, out)
        return
    old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.old."))
    os.replace(out, old)
    os.replace(new, out)
    shutil.rmtree(old, ignore_errors=True)


def read_metadata(file: Path | str) -> dict[str, str]:
    """Metadata of a safetensors file."""
    with open(file, "rb") as f:
        return _header(f, file)[0].get("__metadata__", {})


def _header(f: Any, file: Path | str) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(f.read(8), "little")
    try:
        return json.loads(f.read(size)), size
    except ValueError as error:
        raise CorruptFile(f"{file} is not a safetensors file ({error}).", "", "Save the model again.") from error


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
