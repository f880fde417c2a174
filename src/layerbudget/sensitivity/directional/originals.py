"""The way back from a trial: copies of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...errors import CoverageError
from ...models.blocks import weight_of
from ...models.offload import mapped
from ...records import Block


class Originals:
    """Copies of the weights of some blocks, to go back to.

    Raises:
        CoverageError: Layers come to the device one at a time.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self.model = model
        lies, names = mapped(model), [m.name for b in blocks for m in b.modules]
        if lies is not None and any(lies.comes(weight_of(model, name)[1]) for name in names):
            raise CoverageError(
                "What is tried on a layer would be lost when the next one takes its place on the device.",
                "Trials need weights that stay: in memory, or mapped in the checkpoint's own precision.",
                "Use --dtype auto on the processor, or load without --stream.",
            )
        self.held = {name: self._copy(weight_of(model, name)[1]) for name in names}

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy; where weights are mapped, the file is one."""
        lies = mapped(self.model)
        found = None if lies is None else lies.again(parameter)
        same = found is not None and (found.dtype, found.device) == (parameter.dtype, parameter.device)
        return found if found is not None and same else parameter.detach().clone()

    def restore(self, names: Sequence[str] | None = None) -> None:
        """Put weights back; all of them by default."""
        for name in self.held if names is None else names:
            weight_of(self.model, name)[1].data.copy_(self.held[name])
