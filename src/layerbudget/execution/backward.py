r"""Every weight matrix's inputs and output gradients, from the whole graph or by walking the layers from the last to the first.

Whatever is measured about ``y_t = W a_t`` follows from its inputs a and the gradients ``b = dl/dy``. :func:`feed` hands both to
an :class:`Accumulator`, for one or several losses of every batch, in one of two ways:

    whole    for every batch: forward, then one backward per loss through all layers
    layers   forward:   keep every layer's inputs (on the device, in memory or on disk)
             head:      gradient of every loss at the last layer's output
             backward:  for every layer from the last: run it again with gradients on its *input* only, hand over (a, b) of its
                        matrices, pass the input's gradient on

Weights need no gradients of their own, so walking costs forward 1 + again 1 + input gradient 1: the 3 units of an ordinary
forward and backward. Only one layer's graph exists at a time, an accumulator that settles its sums when a layer is done
needs no more memory than one layer does, and weights may come from disk layer by layer. Both ways give the same numbers up to
rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from ..errors import CoverageError, CurvatureFailure, InvalidInput
from ..models.blocks import transposed, weight_of
from ..models.offload import converting
from ..records import Block
from .loss import Batch, Data, batches, logits_of, sampled_targets, summed_loss
from .memory import Store, fits_whole, fitting, room_for
from .processes import ProcessGroup, process_group
from .replay import Replay, unwalkable
from .sites import Collector, Site

logger = logging.getLogger(__name__)
_WALKS = ("auto", "whole", "layers")
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
    """A consumer of :func:`feed`. It must override :meth:`update`.

    :meth:`start` names the matrices that are about to come: all of them in the whole graph, one layer's in a walk. Then, for
    every batch and every loss that the accumulator :meth:`needs`: :meth:`begin`, :meth:`update` for every site, :meth:`direct`
    for every parameter that no Linear owns, :meth:`finish`. When all batches have been there, :meth:`finalize` is told so, and
    may ask for one more pass over the same matrices.
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
    """Cost of feeding.

    Attributes:
        way: ``whole`` or ``layers``.
        loss: Sum of the first loss over all batches.
        passes: Passes over every matrix's batches (1 unless the accumulator asked for more).
        reason: Why it was not done in the way that was asked for, or that ``auto`` prefers.
    """

    way: str
    loss: float
    passes: int = 1
    reason: str = ""


def feed(
    model: nn.Module,
    data: Data | Sequence[Batch],
    blocks: Sequence[Block],
    consumer: Accumulator,
    *,
    batch_size: int = 8,
    walk: str = "auto",
    tick: Callable[[int], None] | None = None,
    alone: bool = False,
) -> Fed:
    """Hand the inputs and output gradients of the blocks' matrices to an accumulator.

    Args:
        model: Any transformers model with a head, or a plain classifier.
        data: What to run; or the batches themselves.
        blocks: Whose matrices.
        consumer: Is given the sites.
        batch_size: Sequences per forward (one where parameters are read from autograd); halved until a layer's graph fits.
        walk: ``whole``, ``layers``, or ``auto``: the whole graph where it fits in half of the free memory.
        tick: Called with the sequences of every batch, once per batch and pass.
        alone: Every one of several processes runs all of the data.

    Raises:
        CoverageError: A weight matrix was never seen, sequences cannot be told apart; or ``layers`` for a model or blocks that
            cannot be walked.
        CurvatureFailure: A loss that is not finite.
        InvalidInput: An unknown way.
    """
    if walk not in _WALKS:
        raise InvalidInput(f"walk is {walk!r}.", f"It is one of {', '.join(_WALKS)}.", "")
    with Collector(model, blocks, consumer.update) as collector:
        group = None if alone else process_group()
        if isinstance(data, Sequence):
            runs = list(data)
        else:
            most = fitting(model, data.length, batch_size)
            if group is not None:  # whose processes share the same batches
                most = min(*group.gather(most), -(-data.samples // group.size))
            runs = list(batches(model, data, 1 if collector.direct else most))
        if group is not None:
            runs = group.shard(runs)
        way, reason = _chosen_way(model, collector.names, runs, walk, consumer.bytes(blocks))
        if group is not None and group.gather(way) != [way] * group.size:
            way, reason = "layers", ""  # memory differs between the processes, the order of layers must not
        if way == "whole":
            fed = _whole(model, runs, collector, consumer, tick, group)
        else:
            fed = _Layers(model, runs, collector, consumer, tick, group).run()
        if group is not None:
            collector.seen = set().union(*group.gather(collector.seen))
            consumer.merge(group)
            fed = dataclasses.replace(fed, loss=float(group.sum(np.array([fed.loss]))[0]))
        collector.check_coverage()
    return dataclasses.replace(fed, reason=reason)


def _chosen_way(model: nn.Module, names: Sequence[str], runs: Sequence[Batch], walk: str, state: int) -> tuple[str, str]:
    """``whole`` or ``layers``, and why."""
    if walk == "whole" and converting(model):
        raise CoverageError(
            "Layers come to the device one at a time, so no graph of the whole model exists.",
            "Streamed models are walked.",
            "Use walk='layers', or load without --stream.",
        )
    if walk == "whole" or (walk == "auto" and not converting(model) and fits_whole(model, runs, state)):
        return "whole", ""
    reason = unwalkable(model, names, runs)
    if not reason:
        return "layers", ""
    if walk == "layers" or converting(model):
        raise CoverageError(f"{type(model).__name__} cannot be walked layer by layer: {reason}.", "", "Use walk='whole'.")
    logger.warning("%s cannot be walked layer by layer (%s): the whole graph is used.", type(model).__name__, reason)
    return "whole", reason


def _checked(loss: torch.Tensor, batch: Batch) -> float:
    value = float(loss.detach())
    if not np.isfinite(value):
        raise CurvatureFailure(
            f"The loss of sequences {batch.rows.start} to {batch.rows.stop - 1} is {value}.",
            "It must be finite.",
            "Load the model in float32 or bfloat16, and look at those sequences.",
        )
    return value


def _whole(
    model: nn.Module,
    runs: Sequence[Batch],
    collector: Collector,
    consumer: Accumulator,
    tick: Callable[[int], None] | None,
    group: ProcessGroup | None,
) -> Fed:
    """One forward per batch and one backward per loss, through all layers."""
    total, passes, more = 0.0, 0, True
    consumer.start(collector.names)
    while more:
        wanted = [i for i in range(len(consumer.losses)) if consumer.needs(i)]
        for batch in runs:
            logits = logits_of(model, batch)
            for i in wanted:
                loss = consumer.losses[i](logits, batch)
                value = _checked(loss, batch)
                total += value if i == 0 and not passes else 0.0
                consumer.begin(batch, i)
                collector.backward(loss, size=batch.size, length=batch.length, retain=i != wanted[-1])
                _directly(collector, consumer)
                consumer.finish(batch, i)
            if tick is not None:
                tick(batch.size)
        passes += 1
        if group is not None:
            consumer.share(collector.names, group)
        more = consumer.finalize(collector.names)
    return Fed(way="whole", loss=total, passes=passes)


def _directly(collector: Collector, consumer: Accumulator) -> None:
    for name, parameter in collector.direct.items():
        if parameter.grad is not None:
            flipped = transposed(weight_of(collector.model, name)[0])
            consumer.direct(name, parameter.grad.mT if flipped else parameter.grad)


class _Layers:
    """The walk: forwards once, then backwards with one layer's graph at a time."""

    def __init__(
        self,
        model: nn.Module,
        runs: Sequence[Batch],
        collector: Collector,
        consumer: Accumulator,
        tick: Callable[[int], None] | None,
        group: ProcessGroup | None,
    ) -> None:
        self.model, self.runs, self.collector, self.consumer = model, runs, collector, consumer
        self.tick, self.group, self.done = tick, group, 0
        self.replay = Replay(model)
        self.count, self.losses = len(self.replay.layers), len(consumer.losses)
        place = room_for(model, runs, self.count + 1 + 2 * self.losses)
        self.inputs, self.gradients = Store(place), Store(place)
        self.names = [[n for n in collector.names if n.startswith(f"{layer}.")] for layer, _ in self.replay.layers]
        # nothing below the first layer with a matrix that is asked for is walked backwards
        self.lowest = min((i for i in range(self.count) if self.names[i]), default=0)

    def run(self) -> Fed:
        with contextlib.closing(self.inputs), contextlib.closing(self.gradients):
            with torch.no_grad():
                self._forward()
            total, passes = self._head(), 1
            for index in range(self.count - 1, self.lowest - 1, -1):
                passes = max(passes, self._layer(index, propagate=index > self.lowest))
        return Fed(way="layers", loss=total, passes=passes)

    def _forward(self) -> None:
        self.replay.probe(self.runs[0].kwargs)
        for j, batch in enumerate(self.runs):
            self.inputs.put(j, self.replay.first_inputs(batch.kwargs))
        for i in range(self.count):
            for j, batch in enumerate(self.runs):
                with self.replay.begin(i, self.inputs.get(i * len(self.runs) + j)), self.replay.end(i):
                    self.inputs.put((i + 1) * len(self.runs) + j, self.replay.run(batch.kwargs))
                self._worked(batch.size)

    def _head(self) -> float:
        """Gradients of every loss at the last layer's output; the sum of the first loss."""
        total = 0.0
        for j, batch in enumerate(self.runs):
            hidden = self.inputs.get(self.count * len(self.runs) + j).detach().requires_grad_(True)
            with self.replay.begin(self.count, hidden):
                logits = logits_of(self.model, batch)
            for i, function in enumerate(self.consumer.losses):
                loss = function(logits, batch)
                value = _checked(loss, batch)
                total += value if i == 0 else 0.0
                gradient = torch.autograd.grad(loss, hidden, retain_graph=i < self.losses - 1)[0]
                self.gradients.put(j * self.losses + i, gradient)
            self.inputs.drop(self.count * len(self.runs) + j)
        return total

    def _layer(self, index: int, *, propagate: bool) -> int:
        """One layer's passes; the last thing that its first pass does is to leave the gradients at its input."""
        names, passes, more = self.names[index], 0, True
        if names:
            self.consumer.start(names)
        while more:
            wanted = [bool(names) and self.consumer.needs(i) for i in range(self.losses)]
            for j, batch in enumerate(self.runs):
                self._batch(index, j, batch, wanted, propagate=propagate and not passes)
                self._worked(2 * batch.size if not passes else 0)
            passes += 1
            if names and self.group is not None:
                self.consumer.share(names, self.group)
            more = bool(names) and self.consumer.finalize(names)
        for j in range(len(self.runs)):
            self.inputs.drop(index * len(self.runs) + j)
            for i in range(self.losses) if propagate else ():
                self.gradients.move(self._aside(j, i), j * self.losses + i)
        return passes

    def _worked(self, units: int) -> None:
        """Tell the progress: a layer's forward of one sequence is one unit, its backward two."""
        if self.tick is None:
            return
        sequences = sum(b.size for b in self.runs)
        before, self.done = self.done, self.done + units
        whole = max(self.count + 2 * (self.count - self.lowest), 1)
        self.tick(self.done // whole - before // whole if self.done < whole * sequences else sequences - before // whole)

    def _aside(self, batch: int, loss: int) -> int:
        """Where the gradients at the layer's input wait while its own are still needed."""
        return (len(self.runs) + batch) * self.losses + loss

    def _batch(self, index: int, j: int, batch: Batch, wanted: Sequence[bool], *, propagate: bool) -> None:
        todo = [i for i in range(self.losses) if wanted[i] or propagate]
        device = next(iter(batch.kwargs.values())).device
        hidden = self.inputs.get(index * len(self.runs) + j).detach().to(device).requires_grad_(propagate)
        self.collector.quiet = not any(wanted)
        with self.replay.begin(index, hidden), self.replay.end(index):
            output = self.replay.run(batch.kwargs)
        for i in todo:
            self.collector.quiet = not wanted[i]
            if wanted[i]:
                self.consumer.begin(batch, i)
            hidden.grad = None
            gradient = self.gradients.get(j * self.losses + i).to(output.device, output.dtype)
            self.collector.backward(output, size=batch.size, length=batch.length, retain=i != todo[-1], gradient=gradient)
            if wanted[i]:
                _directly(self.collector, self.consumer)
                self.consumer.finish(batch, i)
            if propagate:
                held = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
                self.gradients.put(self._aside(j, i), held)
        self.collector.quiet = False
