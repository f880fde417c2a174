"""What is handed over in a walk or a graph, and to whom: losses, and consumers of inputs and output gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..errors import CoverageError
from ..records import Block
from .loss import Batch, sampled_targets, summed_loss
from .processes import ProcessGroup
from .sites import Site

Loss = Callable[[torch.Tensor, Batch], torch.Tensor]


def data_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``sum_i l_i`` with the data's own labels."""
    return summed_loss(logits, batch.targets)


@dataclasses.dataclass(frozen=True)
class SampledLoss:
    """``sum_i l_i`` with labels drawn from the model, ``y ~ p(. | x)``; the same seed draws the same labels."""

    seed: int

    def __call__(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Draw and sum."""
        return summed_loss(logits, sampled_targets(logits.detach(), batch, self.seed))


class Accumulator:
    """What a consumer of :func:`feed` may override; :meth:`update` it must.

    :meth:`start` names the matrices that are about to come: all of them in the whole graph, one layer's in a walk. Then, for
    every batch and every loss that the consumer :meth:`needs`: :meth:`begin`, :meth:`update` for every
    site, :meth:`direct` for every parameter that no Linear owns, :meth:`finish`. When all batches have been there,
    :meth:`finalize` is told so, and may ask for one more pass over the same matrices.
    """

    losses: Sequence[Loss] = (data_loss,)

    def needs(self, loss: int) -> bool:
        """Whether the pass that is about to begin should deliver that loss (an index into ``losses``)."""
        return True

    def start(self, names: Sequence[str]) -> None:
        """These matrices are about to come."""

    def begin(self, batch: Batch, loss: int) -> None:
        """Sites of this batch and loss are about to come. A walk says so once per layer."""

    def update(self, site: Site) -> None:
        """Inputs and output gradients of some matrices."""
        raise NotImplementedError

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Gradient of fused experts, read from autograd: ``(experts, d_out, d_in)``, one sequence per batch."""
        raise CoverageError(
            f"{name} is not a Linear.",
            "Linear and Conv1D matrices are known here.",
            "Leave the experts out: --exclude experts.",
        )

    def finish(self, batch: Batch, loss: int) -> None:
        """All sites of this batch and loss have come (of one layer, in a walk)."""

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Memory that the sums over these blocks take in the whole graph, beside the graph itself."""
        return 0

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Add what is held of these matrices up over the processes, before they are settled.

        Raises:
            CoverageError: What is held cannot be shared.
        """
        raise CoverageError(
            f"{type(self).__name__.strip('_')} cannot share its sequences between {group.size} processes.",
            "",
            "Use one process.",
        )

    def finalize(self, names: Sequence[str]) -> bool:
        """Settle these matrices; True asks for one more pass over them."""
        return False

    def merge(self, group: ProcessGroup) -> None:
        """Bring together what the processes settled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fed:
    """What feeding took.

    Attributes:
        way: ``whole`` or ``layers``.
        loss: Sum of the first loss over all batches.
        passes: Passes over every matrix's batches (1 unless the consumer asked for more).
        reason: Why it was not done in the way that was asked for, or that ``auto`` prefers.
    """

    way: str
    loss: float
    passes: int = 1
    reason: str = ""
