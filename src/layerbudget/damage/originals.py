"""The way back from a trial: copies of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..blocks import weight_of
from ..mapped import mapped, need_settled
from ..records import Block


class Originals:
    """Copies of the weights of some blocks, to go back to.

    Raises:
        CoverageError: Layers come to the device one at a time.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self.model = model
        need_settled(model, "a trial")
        self.held = {m.name: self._copy(weight_of(model, m.name)[1]) for b in blocks for m in b.modules}

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy; where weights are mapped, the file is one."""
        lies = mapped(self.model)
        found = None if lies is None else lies.again(parameter)
        return parameter.detach().clone() if found is None else found

    def restore(self, names: Sequence[str] | None = None) -> None:
        """Put weights back; all of them by default."""
        for name in self.held if names is None else names:
            weight_of(self.model, name)[1].data.copy_(self.held[name])
