"""Tensors into safetensors files of limited size, one after the other: what was written is no longer held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

LIMIT = 1 << 29  # bytes of one file; one tensor may be larger


class Shards:
    """The files of one checkpoint, numbered as transformers numbers them.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[str, torch.Tensor] = {}
        self.names: list[list[str]] = []
        self.total = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors, in their order; full files are written."""
        for name, tensor in tensors.items():
            if self.held and sum(t.nbytes for t in self.held.values()) + tensor.nbytes > LIMIT:
                self._write()
            self.held[name] = tensor.contiguous()
            self.total += tensor.nbytes

    def _write(self) -> None:
        from safetensors.torch import save_file

        self.names.append(list(self.held))
        save_file(self.held, self._part(len(self.names)), metadata={"format": "pt"})
        self.held = {}

    def _part(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.safetensors"

    def close(self) -> None:
        """Write the last file, give all their names, and say where every tensor is where there are several."""
        if self.held or not self.names:
            self._write()
        count = len(self.names)
        if count == 1:
            self._part(1).rename(self.folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self.names, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).rename(self.folder / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
