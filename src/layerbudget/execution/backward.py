r"""Every weight matrix's inputs and output gradients, from the whole graph or by walking the layers from the last to the first.

Whatever is measured about ``y_t = W a_t`` follows from its inputs a and the gradients ``b = dl/dy``. :func:`feed` hands both to
a consumer, for one or several losses of every batch, in one of two ways:

    whole    for every batch: forward, then one backward per loss through all layers
    layers   forward:   keep every layer's inputs (on the device, in memory or on disk)
             head:      gradient of every loss at the last layer's output
             backward:  for every layer from the last: run it again with gradients on its *input* only, hand over (a, b) of its
                        matrices, pass the input's gradient on

Weights need no gradients of their own, so walking costs forward 1 + again 1 + input gradient 1: the 3 units of an ordinary
forward and backward. Only one layer's graph exists at a time, a consumer that settles its sums when a layer is done needs no
more memory than one layer does, and weights may come from disk layer by layer. Both ways give the same numbers up to rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..errors import CurvatureFailure, InvalidInput
from ..models.blocks import transposed, weight_of
from ..records import Block
from .feeding import Accumulator, Fed, Loss, SampledLoss, data_loss
from .loss import Batch, Data, batches, logits_of
from .memory import fitting, room_for
from .processes import ProcessGroup, process_group
from .replay import Replay
from .sites import Collector
from .store import STORES, Store
from .walkable import chosen_way

WALKS = ("auto", "whole", "layers")


def feed(
    model: nn.Module,
    data: Data | Sequence[Batch],
    blocks: Sequence[Block],
    consumer: Accumulator,
    *,
    batch_size: int = 8,
    walk: str = "auto",
    store: str | None = None,
    folder: Path | str | None = None,
    tick: Callable[[int], None] | None = None,
    alone: bool = False,
) -> Fed:
    """Hand the inputs and output gradients of the blocks' matrices to a consumer.

    Args:
        model: Any transformers model with a head, or a plain classifier.
        data: What to run; or the batches themselves.
        blocks: Whose matrices.
        consumer: Takes the sites.
        batch_size: Sequences per forward (one where parameters are read from autograd); halved until a layer's graph fits.
        walk: ``whole``, ``layers``, or ``auto``: the whole graph where it fits in half of the free memory.
        store: Where a walk keeps the layers' inputs: ``device``, ``cpu`` or ``disk``; the first that has room by default.
        folder: Parent of the temporary folder for ``disk``.
        tick: Called with the sequences of every batch, once per batch and pass.
        alone: Every one of several processes runs all of the data.

    Raises:
        CoverageError: A weight matrix was never seen, sequences cannot be told apart; or ``layers`` for a model or blocks that
            cannot be walked.
        CurvatureFailure: A loss that is not finite.
        InvalidInput: An unknown way or store.
    """
    if walk not in WALKS or store not in (None, *STORES):
        raise InvalidInput(
            f"walk={walk!r}, store={store!r}.", f"walk is one of {', '.join(WALKS)}; store one of {', '.join(STORES)}.", ""
        )
    with Collector(model, blocks, consumer.update) as collector:
        together = None if alone else process_group()
        if isinstance(data, Sequence):
            runs = list(data)
        else:
            most = fitting(model, data.length, batch_size)
            if together is not None:  # which share the same batches
                most = min(*together.gather(most), -(-data.samples // together.size))
            runs = list(batches(model, data, 1 if collector.single else most))
        if together is not None:
            runs = together.shard(runs)
        way, reason = chosen_way(model, [*collector.hooked.values(), *collector.direct], runs, walk, consumer.bytes(blocks))
        if together is not None and together.gather(way) != [way] * together.size:
            way, reason = "layers", ""  # memory differs between the processes, the order of layers must not
        if way == "whole":
            fed = _whole(model, runs, collector, consumer, tick, together)
        else:
            fed = _Layers(model, runs, collector, consumer, store, folder, tick, together).run()
        if together is not None:
            collector.seen = set().union(*together.gather(collector.seen))
            consumer.merge(together)
            fed = dataclasses.replace(fed, loss=float(together.sum(np.array([fed.loss]))[0]))
        collector.check_coverage()
    return dataclasses.replace(fed, reason=reason)


def _check(loss: torch.Tensor, batch: Batch) -> float:
    value = float(loss.detach())
    if not bool(torch.isfinite(loss.detach())):
        raise CurvatureFailure(
            f"The loss of sequences {batch.rows.start} to {batch.rows.stop - 1} is {value}.",
            "It must be finite.",
            "Load the model in float32 or bfloat16, and look at those sequences.",
        )
    return value


def length_of(batch: Batch) -> int:
    """Positions of a sequence in a batch."""
    if batch.targets.ndim == 2:
        return int(batch.targets.shape[1])
    return int(next(iter(batch.kwargs.values()), batch.targets[:, None]).shape[1])


def _whole(
    model: nn.Module, runs: Sequence[Batch], collector: Collector, consumer: Accumulator, tick: Callable[[int], None] | None,
    together: ProcessGroup | None,
) -> Fed:  # fmt: skip
    """One forward per batch and one backward per loss, through all layers."""
    names = [*dict.fromkeys(collector.hooked.values()), *collector.direct]
    total, passes, more = 0.0, 0, True
    consumer.start(names)
    while more:
        wanted = [i for i in range(len(consumer.losses)) if consumer.needs(i)]
        for batch in runs:
            logits = logits_of(model, batch)
            for i in wanted:
                loss = consumer.losses[i](logits, batch)
                value = _check(loss, batch)
                total += value if i == 0 and not passes else 0.0
                consumer.begin(batch, i)
                collector.backward(loss, size=batch.size, length=length_of(batch), retain=i != wanted[-1])
                _directly(collector, consumer)
                consumer.finish(batch, i)
            if tick is not None:
                tick(batch.size)
        passes += 1
        if together is not None:
            consumer.share(names, together)
        more = consumer.finalize(names)
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
        place: str | None,
        folder: Path | str | None,
        tick: Callable[[int], None] | None,
        together: ProcessGroup | None,
    ) -> None:
        self.together = together
        self.model, self.runs, self.collector, self.consumer, self.tick = model, runs, collector, consumer, tick
        self.replay = Replay(model)
        self.count = len(self.replay.layers)
        self.losses = len(consumer.losses)
        place = place or room_for(model, runs, self.losses, self.count, folder)
        self.inputs, self.gradients = Store(place, folder), Store(place, folder)
        self.first = self._lowest()
        self._done = 0

    def run(self) -> Fed:
        """Walk both ways.

        Raises:
            CurvatureFailure: A loss that is not finite.
        """
        with contextlib.closing(self.inputs), contextlib.closing(self.gradients):
            with torch.no_grad():
                self._forward()
            total = self._head()
            passes = 1
            for index in range(self.count - 1, self.first - 1, -1):
                passes = max(passes, self._layer(index, propagate=index > self.first))
        return Fed(way="layers", loss=total, passes=passes)

    def _names(self, index: int) -> list[str]:
        prefix = f"{self.replay.layers[index][0]}."
        return [n for n in [*dict.fromkeys(self.collector.hooked.values()), *self.collector.direct] if n.startswith(prefix)]

    def _lowest(self) -> int:
        """The first layer with a matrix that is asked for: nothing below it is walked backwards."""
        return min((i for i in range(self.count) if self._names(i)), default=0)

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
        """Gradients of every loss at the last layer's output."""
        total = 0.0
        for j, batch in enumerate(self.runs):
            hidden = self.inputs.get(self.count * len(self.runs) + j).detach().requires_grad_(True)
            with self.replay.begin(self.count, hidden):
                logits = logits_of(self.model, batch)
            for i, function in enumerate(self.consumer.losses):
                loss = function(logits, batch)
                value = _check(loss, batch)
                total += value if i == 0 else 0.0
                gradient = torch.autograd.grad(loss, hidden, retain_graph=i < self.losses - 1)[0]
                self.gradients.put(j * self.losses + i, gradient)
            self.inputs.drop(self.count * len(self.runs) + j)
        return total

    def _layer(self, index: int, *, propagate: bool) -> int:
        """One layer's passes; the last thing that its first pass does is to leave the gradients at its input."""
        names, passes, more = self._names(index), 0, True
        if names:
            self.consumer.start(names)
        while more:
            wanted = [bool(names) and self.consumer.needs(i) for i in range(self.losses)]
            for j, batch in enumerate(self.runs):
                self._batch(index, j, batch, wanted, propagate=propagate and not passes)
                self._worked(2 * batch.size if not passes else 0)
            passes += 1
            if names and self.together is not None:
                self.consumer.share(names, self.together)
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
        before, self._done = self._done, self._done + units
        whole = max(self.count + 2 * (self.count - self.first), 1)
        self.tick(self._done // whole - before // whole if self._done < whole * sequences else sequences - before // whole)

    def _aside(self, batch: int, loss: int) -> int:
        """Where the gradients at the layer's input wait while its own are still needed."""
        return (len(self.runs) + batch) * self.losses + loss

    def _batch(self, index: int, j: int, batch: Batch, wanted: Sequence[bool], *, propagate: bool) -> None:
        todo = [i for i in range(self.losses) if wanted[i] or propagate]
        hidden = self.inputs.get(index * len(self.runs) + j).detach().to(self._device(batch)).requires_grad_(propagate)
        self.collector.quiet = not any(wanted)
        with self.replay.begin(index, hidden), self.replay.end(index):
            output = self.replay.run(batch.kwargs)
        for i in todo:
            self.collector.quiet = not wanted[i]
            if wanted[i]:
                self.consumer.begin(batch, i)
            hidden.grad = None
            gradient = self.gradients.get(j * self.losses + i).to(output.device, output.dtype)
            self.collector.backward(output, size=batch.size, length=length_of(batch), retain=i != todo[-1], gradient=gradient)
            if wanted[i]:
                _directly(self.collector, self.consumer)
                self.consumer.finish(batch, i)
            if propagate:
                held = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
                self.gradients.put(self._aside(j, i), held)
        self.collector.quiet = False

    @staticmethod
    def _device(batch: Batch) -> torch.device:
        return next(iter(batch.kwargs.values())).device


__all__ = ["WALKS", "Accumulator", "Fed", "Loss", "SampledLoss", "data_loss", "feed", "length_of"]
