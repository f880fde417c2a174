"""The way back from a trial: copies of weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..blocks import weight_of
from ..records import Block


class Originals:
    """Copies of the weights of some blocks, to go back to."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self.model = model
        self.held = {m.name: weight_of(model, m.name)[1].detach().clone() for b in blocks for m in b.modules}

    def restore(self, names: Sequence[str] | None = None) -> None:
        """Put weights back; all of them by default."""
        for name in self.held if names is None else names:
            weight_of(self.model, name)[1].data.copy_(self.held[name])
