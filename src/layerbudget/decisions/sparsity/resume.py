"""Checkpoints after every pruned block, so that an interrupted run continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...execution.processes import process_group
from ...models.blocks import weight_of
from ...models.offload import mapped
from ...storage.parts import Parts
from ...storage.parts import clear as clear_checkpoints

__all__ = ["Resume", "clear_checkpoints"]


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
        self.group = process_group()
        own = folder if self.group is None or self.group.is_main else None
        self.parts = Parts(own, key)

    def _find(self, index: int) -> Path | None:
        """The file of a finished block, as process 0 sees it."""
        if self.group is None:
            return self.parts.find(f"block-{index}")
        return self.group.broadcast(lambda: self.parts.find(f"block-{index}"))

    def load(self, model: nn.Module, index: int, names: Sequence[str]) -> bool:
        """Put back the weights of a finished block; false when it is not finished, or broken."""
        file = self._find(index)
        if file is None:
            return False
        from safetensors.torch import load_file

        if self.settle(model, index, names):
            return True
        held = load_file(file)
        for name in names:
            weight_of(model, name)[1].data.copy_(held[name])
        return True

    def settle(self, model: nn.Module, index: int, names: Sequence[str]) -> bool:
        """Let the weights of a finished block lie in its file, where the model's weights lie in files; whether they do."""
        lies = mapped(model)
        file = None if lies is None else self._find(index)
        if lies is None or file is None:
            return False
        lies.remap({name: weight_of(model, name)[1] for name in names}, file)
        return True

    def save(self, model: nn.Module, index: int, names: Sequence[str]) -> None:
        """Keep the weights of a finished block."""
        if self.parts.folder is None:
            return
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {n: weight_of(model, n)[1].detach().cpu().contiguous() for n in names}
        self.parts.put(f"block-{index}", "safetensors", lambda path: save_file(tensors, path))
