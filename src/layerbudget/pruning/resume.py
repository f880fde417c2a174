"""Checkpoints after every pruned block, so that an interrupted run continues."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blocks import weight_of
from ..errors import ModelMismatch
from ..records import SCHEMA_VERSION, digest, dumps, read_json, write_text


class Resume:
    """A folder with the pruned weights of every finished block.

    The files stay until :func:`clear_checkpoints`, so that a run whose result could not be saved is not lost either.

    Args:
        folder: Where; ``None`` switches checkpoints off.
        key: What must be equal for a continued run (plan, model, data, options).

    Raises:
        ModelMismatch: The folder belongs to another run.
    """

    def __init__(self, folder: Path | str | None, key: Mapping[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state, wanted = self.folder / "resume.json", digest(dict(key))
        if state.exists() and read_json(state, "resume").get("key") != wanted:
            raise ModelMismatch(
                f"{self.folder} holds a run with another plan, model, data, method, precision or version.",
                "A run continues only with the same ones.",
                "Choose another folder, or remove it.",
            )
        write_text(state, dumps({"schema_version": SCHEMA_VERSION, "key": wanted}), overwrite=True)

    def load(self, model: nn.Module, index: int, names: Sequence[str]) -> bool:
        """Put back the weights of a finished block; false when it is not finished."""
        if self.folder is None or not _file(self.folder, index).exists():
            return False
        from safetensors.torch import load_file

        held = load_file(_file(self.folder, index))
        for name in names:
            weight_of(model, name)[1].data.copy_(held[name])
        return True

    def save(self, model: nn.Module, index: int, names: Sequence[str]) -> None:
        """Keep the weights of a finished block (one file, renamed into place)."""
        if self.folder is None:
            return
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {n: weight_of(model, n)[1].detach().cpu().contiguous() for n in names}
        temporary = _file(self.folder, index).with_suffix(".part")
        save_file(tensors, temporary)
        os.replace(temporary, _file(self.folder, index))


def _file(folder: Path, index: int) -> Path:
    return folder / f"block-{index}.safetensors"


def clear_checkpoints(folder: Path | str) -> None:
    """Remove the checkpoints of a run whose model has been saved, and the folder where nothing else lies in it."""
    folder = Path(folder)
    for file in (*folder.glob("block-*.safetensors"), *folder.glob("block-*.part"), folder / "resume.json"):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
