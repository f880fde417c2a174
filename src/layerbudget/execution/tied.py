r"""Second moments of a matrix that is embedding and head at once.

Rounding changes row i of it by e. As the head's row that moves the logit of token i by ``e x_t`` everywhere, as the embedding's
row it moves the stream by e where token i stands. To second order the KL is

    1/2 sum_t  b_ti^2 (e x_t)^2   +   1/2 sum_{t reads i} (e g_t)^2

where b are the derivatives of the loss with labels drawn from the model by its logits, and g those by the rows looked up. All
rows share one matrix, so what is gathered is the sum over rows: ``sum_t |b_t|^2 x_t x_t' + sum_t g_t g_t'``. A token that is
often predicted is often read, so one row is taken to have the same share of both. Of a long text a part is read: a forward and
backward through the head is the dearest there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..models.blocks import end_modules, reader_of, weight_of
from ..progress import Progress, Steps
from ..records import Block, Module
from .backward import Accumulator, SampledLoss, feed
from .inputs import InputMoments, share_statistics
from .loss import unlabelled
from .processes import process_group, shard
from .sites import Site

TOKENS = 16  # for each column, at most, that are read; SmolLM2 lost most of what this gains with 8
BITS = 6  # types of as many bits or more lose too little for the pass: Q8_0 of SmolLM2 1e-4 nats, Q6_K was not measured


def is_tied(model: nn.Module, name: str) -> bool:
    """Whether a matrix is the embedding and the head."""
    return isinstance(weight_of(model, name)[0], nn.Embedding) and reader_of(model, name) is not None


class _TiedMoments(Accumulator):
    losses = (SampledLoss(0),)
    by_position = True

    def __init__(self) -> None:
        self.found: dict[str, list[InputMoments]] = {}

    def update(self, site: Site) -> None:
        """See :meth:`Accumulator.update`: inputs as they count for the logits, or gradients of the rows looked up."""
        for name, b in site.b.items():
            (moments,) = self.found.setdefault(name, [InputMoments("gram")])
            looked_up = not site.a.is_floating_point()
            counted = b if looked_up else site.a * torch.linalg.vector_norm(b.float(), dim=-1, keepdim=True)
            for sequence in counted:
                moments.add(sequence)


def tied_columns(model: nn.Module) -> int:
    """The columns of the matrix that is embedding and head; 0 where these are two."""
    return max((m.d_in for m in end_modules(model) if is_tied(model, m.name)), default=0)


def wanted(columns: int, length: int) -> int:
    """How many sequences of so many tokens are read."""
    return -(-TOKENS * columns // length)


def tied_moments(
    model: nn.Module, modules: Sequence[Module], data: CalibrationSet, batch_size: int, progress: Progress | None = None
) -> dict[str, list[InputMoments]]:
    """Return the moments of matrices that are embedding and head, by name, from a forward and backward of part of a text.

    Args:
        model: The model as it is.
        modules: Those matrices.
        data: The text, of which every process takes its share.
        batch_size: Sequences per pass.
        progress: Called with sequences done and in total.
    """
    data = data.select(slice(0, wanted(max(m.d_in for m in modules), data.length)))
    size, moments = process_group().batch(data.samples, batch_size), _TiedMoments()
    mine = shard(data, size)
    tick = Steps(progress, mine.samples, "embedding and head")
    blocks = [Block(name=m.name, modules=(m,)) for m in modules]
    feed(model, list(unlabelled(model, mine, size)), blocks, moments, tick=tick, alone=True)
    share_statistics(moments.found)
    return moments.found
