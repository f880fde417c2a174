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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ..errors import CoverageError, CurvatureFailure, InvalidInput
from ..models.blocks import transposed, weight_of
from ..models.machine import give_back
from ..models.offload import converting
from ..records import Block
from .draws import Drawn, HeadDraws
from .kept import KeptLayers
from .loss import Batch, Data, batches, logits_of, sampled_targets, summed_loss
from .memory import Store, fits_whole, fitting, hidden_bytes, pieces_of, room_for
from .processes import ProcessGroup, process_group
from .replay import Replay, unwalkable
from .sites import Collector, Site

logger = logging.getLogger(__name__)
_WALKS = ("auto", "whole", "layers")
Loss = Callable[[torch.Tensor, Batch], torch.Tensor]


def data_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``sum_i l_i`` with the data's own labels."""
    return summed_loss(logits, batch.targets)


data_loss.by_position = True  # type: ignore[attr-defined]  # some positions of a batch after the other add up to it


@dataclasses.dataclass(frozen=True)
class SampledLoss:
    """``sum_i l_i`` with labels drawn from the model, ``y ~ p(. | x)``; the same seed draws the same labels."""

    seed: int
    by_position: ClassVar[bool] = True

    def __call__(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Draw and sum."""
        return summed_loss(logits, sampled_targets(logits.detach(), batch, self.seed))


class Accumulator:
    """A consumer of :func:`feed`. It must override :meth:`update`.

    :meth:`start` names the matrices that are about to come: all of them in the whole graph, one layer's in a walk. One that is
    :meth:`watching` sees them run on all batches first. Then, for every batch and every loss that the accumulator
    :meth:`needs`: :meth:`begin`, :meth:`update` for every site, :meth:`direct` for every parameter that no Linear owns,
    :meth:`finish`. When all batches have been there, :meth:`finalize` is told so, and may ask for one more pass over the same
    matrices.
    """

    losses: Sequence[Loss] = (data_loss,)
    by_position = False  #: Whether sites of the head may come some positions of a batch at a time, each as a batch of its own.

    def needs(self, loss: int) -> bool:
        """Whether the pass that is about to begin should deliver that loss (an index into ``losses``)."""
        return True

    def start(self, names: Sequence[str]) -> None:
        """These matrices are about to come."""

    def watching(self, batch: Batch) -> contextlib.AbstractContextManager[Any] | None:
        """A context for a forward without gradients of these matrices, before any loss; None where nobody looks."""
        return None

    def looked(self, names: Sequence[str]) -> None:
        """All forwards of :meth:`watching` have been there; no graph exists yet."""

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

    def takes_labels(self, name: str) -> bool:
        """Whether :meth:`labelled` takes what is drawn at a head, in the place of :meth:`update` for every draw."""
        return False

    def labelled(self, name: str, batch: Batch, drawn: Drawn) -> None:
        """All draws of a batch at a head, where the losses are nothing but draws."""
        raise NotImplementedError

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

    def record(self, names: Sequence[str]) -> Any:
        """Return what was settled of these matrices as plain values, for a walk that is kept."""
        raise NotImplementedError

    def restore(self, names: Sequence[str], recorded: Any) -> None:
        """Take what :meth:`record` returned of these matrices in an earlier run, which come no more."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fed:
    """How it went: the way, ``whole`` or ``layers``, and the sum of the first loss over all batches."""

    way: str
    loss: float


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
    watched: Sequence[Batch] = (),
    kept: KeptLayers | None = None,
) -> Fed:
    """Hand the inputs and output gradients of the blocks' matrices to an accumulator.

    Args:
        model: The model.
        data: The calibration set, or batches.
        blocks: Blocks whose matrices are seen.
        consumer: What gets inputs and output gradients.
        batch_size: Sequences of a forward, halved until a layer's graph fits; one where parameters are read from autograd.
        walk: ``whole``, ``layers``, or ``auto``: the whole graph where it fits in half of the free memory.
        tick: Called with the sequences of every batch in every pass.
        alone: Every one of several processes runs all of the data.
        watched: Batches without losses: an accumulator that is watching sees them run, and them alone.
        kept: Keeps every layer that a walk of one process has finished, and has those of an earlier run.

    Raises:
        CoverageError: A weight matrix was never seen, sequences cannot be told apart; or ``layers`` for a model or blocks that
            cannot be walked.
        CurvatureFailure: A loss that is not finite.
        InvalidInput: An unknown way.
    """
    if walk not in _WALKS:
        raise InvalidInput(f"walk is {walk!r}.", f"It is one of {', '.join(_WALKS)}.", "")
    with Collector(model, blocks, consumer.update) as collector:
        group = ProcessGroup() if alone else process_group()
        if isinstance(data, Sequence):
            runs = list(data)
        else:
            fits = group.gather(fitting(model, data.length, batch_size))  # all processes share the same batches
            most = group.batch(data.samples, min(fits))
            runs = list(batches(model, data, 1 if collector.direct else most))
        runs = group.shard(runs)
        inside = [name for name in collector.names if name not in collector.ends]
        way = _chosen_way(model, inside, runs, walk, consumer.bytes(blocks))
        ways = set(process_group().gather(way))
        if len(ways) > 1:
            way = "layers"  # memory differs between the processes, the order of layers must not
        kind, tick = _Whole if way == "whole" else _Layers, tick or (lambda n: None)
        kept = kept if process_group().size == 1 else None  # others have other sequences
        feeding = kind(model, runs, collector, consumer, tick, group, list(watched), kept)
        loss = float(group.sum(np.array([feeding.run()]))[0])
        collector.seen = set().union(*group.gather(collector.seen))
        consumer.merge(group)
        collector.check_coverage()
    return Fed(way=way, loss=loss)


def _chosen_way(model: nn.Module, names: Sequence[str], runs: Sequence[Batch], walk: str, state: int) -> str:
    if walk == "whole" and converting(model):
        raise CoverageError(
            "Layers come to the device one at a time, so no graph of the whole model exists.",
            "Streamed models are walked.",
            "Use walk='layers', or load without --stream.",
        )
    if walk == "whole" or (walk == "auto" and not converting(model) and fits_whole(model, runs, state)):
        return "whole"
    reason = unwalkable(model, names, runs)
    if not reason:
        return "layers"
    if walk == "layers" or converting(model):
        raise CoverageError(f"{type(model).__name__} cannot be walked layer by layer: {reason}.", "", "Use walk='whole'.")
    logger.warning("%s cannot be walked layer by layer (%s): the whole graph is used.", type(model).__name__, reason)
    return "whole"


def _checked(loss: torch.Tensor, batch: Batch) -> float:
    value = float(loss.detach())
    if not np.isfinite(value):
        raise CurvatureFailure(
            f"The loss of sequences {batch.rows.start} to {batch.rows.stop - 1} is {value}.",
            "It must be finite.",
            "Load the model in float32 or bfloat16, and look at those sequences.",
        )
    return value


@dataclasses.dataclass(eq=False)
class _Whole:
    """One forward per batch and one backward per loss, through all layers."""

    model: nn.Module
    runs: Sequence[Batch]
    collector: Collector
    consumer: Accumulator
    tick: Callable[[int], None]
    group: ProcessGroup
    watched: Sequence[Batch]
    kept: KeptLayers | None

    def run(self) -> float:
        """Feed the accumulator; return the sum of the first loss."""
        total, first = 0.0, True
        for wanted in self.passes(self.collector.names):
            for batch in self.runs:
                logits = logits_of(self.model, batch)
                for i in wanted:
                    loss = self.consumer.losses[i](logits, batch)
                    value = _checked(loss, batch)
                    total += value if i == 0 and first else 0.0
                    self.hand_over(loss, batch, i, retain=i != wanted[-1])
                self.tick(batch.size)
            first = False
        return total

    def passes(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Which losses are wanted of some matrices, for as many passes as the accumulator asks for."""
        more = True
        self.consumer.start(names)
        self.look()
        self.consumer.looked(names)
        while more:
            yield [i for i in range(len(self.consumer.losses)) if self.consumer.needs(i)]
            if self.group.size > 1:
                self.consumer.share(names, self.group)
            more = self.consumer.finalize(names)

    def look(self) -> None:
        """Run what is about to come once without gradients, for an accumulator that is watching."""
        first = len(self.runs) if self.watched else 0
        for j, batch in enumerate(self.watched or self.runs, first):
            context = self.consumer.watching(batch)
            if context is None:
                return
            with torch.no_grad(), context:
                self.forward(j, batch)

    def forward(self, j: int, batch: Batch) -> None:
        """One batch through what is about to come."""
        logits_of(self.model, batch)

    def hand_over(
        self, output: torch.Tensor, batch: Batch, loss: int, *, retain: bool, gradient: torch.Tensor | None = None
    ) -> None:
        """Run backwards, and give the accumulator what it brings of one loss."""
        self.consumer.begin(batch, loss)
        self.collector.backward(output, size=batch.size, length=batch.length, retain=retain, gradient=gradient)
        for name, parameter in self.collector.direct.items():
            if parameter.grad is not None:
                flipped = transposed(weight_of(self.model, name)[0])
                self.consumer.direct(name, parameter.grad.mT if flipped else parameter.grad)
        self.consumer.finish(batch, loss)


class _Layers(_Whole):
    """The walk: forwards once, then backwards with one layer's graph at a time.

    Stored are inputs by (layer, batch), and gradients at a layer's *output* by (layer, batch, loss). The gradients of a head
    that is asked for come with those of the last layer's output, those of an embedding behind the first layer's.
    """

    def run(self) -> float:
        """See :meth:`_Whole.run`."""
        self.replay, self.done = Replay(self.model), 0
        self.count, self.losses = len(self.replay.layers), len(self.consumer.losses)
        names = [[n for n in self.collector.names if n.startswith(f"{layer}.")] for layer, _ in self.replay.layers]
        # nothing below the first layer with a matrix that is asked for is walked backwards
        lookups = [n for n in self.collector.ends if isinstance(weight_of(self.model, n)[0], nn.Embedding)]
        heads = [n for n in self.collector.ends if n not in lookups]
        lowest = 0 if lookups else min((i for i in range(self.count) if names[i]), default=0)
        self.units = max(self.count + 2 * (self.count - lowest), 1)
        self.every = [*self.runs, *self.watched]
        if self.kept is not None:
            self.kept.check_space(hidden_bytes(self.model, self.runs) * self.losses)
        with contextlib.closing(Store(room_for(self.model, self.every, self.count + 1 + 2 * self.losses))) as self.store:
            with torch.no_grad():
                self._forward()
            if self.collector.ends:
                self.index = self.count
                self.consumer.start(self.collector.ends)
                self.look()
            total = self._head()
            if heads:
                self.consumer.finalize(heads)
            for index in range(self._resume(names) - 1, lowest - 1, -1):
                propagate = index > lowest or bool(lookups)
                self._layer(index, names[index], propagate=propagate)
                if propagate and self.kept is not None:
                    self._keep(self.kept, index, names[index])
            if lookups:
                self._lookup()
                self.consumer.finalize(lookups)
        return total

    def forward(self, j: int, batch: Batch) -> None:
        """See :meth:`_Whole.forward`: the layer that comes next, or the head."""
        if self.index == self.count:
            with self.replay.begin(self.index, self.store.get((self.index, j))), self.replay.end_at_head():
                logits_of(self.model, batch)
            return
        with self.replay.begin(self.index, self.store.get((self.index, j))), self.replay.end(self.index):
            self.replay.run(batch.kwargs)

    def _resume(self, names: Sequence[Sequence[str]]) -> int:
        """Take the layers that an earlier run finished; return the lowest of them, or their number where there are none."""
        lowest = self.count if self.kept is None else self.kept.reached(self.count, len(self.runs))
        if self.kept is None or lowest == self.count:
            return self.count
        for index in range(self.count - 1, lowest - 1, -1):
            self.consumer.restore(names[index], self.kept.numbers(index))
            self.collector.seen.update(names[index])
            self._drop(index)
            self._worked(2 * sum(b.size for b in self.runs))
        for j in range(len(self.runs)):
            for i, gradient in enumerate(self.kept.gradients(lowest, j)):
                self.store.put((lowest - 1, j, i), gradient)
        return lowest

    def _keep(self, kept: KeptLayers, index: int, names: Sequence[str]) -> None:
        """Keep a layer that is finished, and the gradients at its input."""
        for j in range(len(self.runs)):
            kept.put_gradients(index, j, [self.store.get((index - 1, j, i)) for i in range(self.losses)])
        kept.put(index, self.consumer.record(names))

    def _lookup(self) -> None:
        """From the gradients at the first layer's input to those of the embedding."""
        for j, batch in enumerate(self.runs):
            hidden = self.replay.first_inputs(batch.kwargs)
            for i in range(self.losses):
                gradient = self.store.get((-1, j, i)).to(hidden.device, hidden.dtype)
                self.hand_over(hidden, batch, i, retain=i < self.losses - 1, gradient=gradient)
                self.store.drop((-1, j, i))

    def _forward(self) -> None:
        self.replay.probe(self.runs[0].kwargs)
        for j, batch in enumerate(self.every):
            self.store.put((0, j), self.replay.first_inputs(batch.kwargs))
        for i in range(self.count):
            for j, batch in enumerate(self.every):
                with self.replay.begin(i, self.store.get((i, j))), self.replay.end(i):
                    self.store.put((i + 1, j), self.replay.run(batch.kwargs))
                self._worked(batch.size if j < len(self.runs) else 0)

    def _head(self) -> float:
        """Gradients of every loss at the last layer's output; the sum of the first loss."""
        total, draws = 0.0, self._draws()
        for j, batch in enumerate(self.runs):
            hidden = self.store.get((self.count, j)).detach()
            gradients = [torch.zeros_like(hidden) for _ in range(self.losses)]
            for part, places in self._parts(batch):
                piece = hidden[:, places].detach().requires_grad_(True)
                with self.replay.begin(self.count, piece), draws.seeing() if draws else contextlib.nullcontext():
                    logits = logits_of(self.model, part)
                if draws is not None and (drawn := self._drawn(draws, piece, logits, part)) is not None:
                    total += _checked(drawn.loss, batch)
                    for gradient, each in zip(gradients, drawn.gradients, strict=True):
                        gradient[:, places] = each
                    del drawn
                else:
                    for i, function in enumerate(self.consumer.losses):
                        loss = function(logits, part)
                        value = _checked(loss, batch)
                        total += value if i == 0 else 0.0
                        retain, piece.grad = i < self.losses - 1, None
                        if self.collector.ends:
                            self.hand_over(loss, part, i, retain=retain)
                        else:
                            torch.autograd.backward(loss, retain_graph=retain, inputs=[piece])
                        if piece.grad is not None:
                            gradients[i][:, places] = piece.grad
                if part is not batch:  # what accumulators keep of a piece lies between freed logits, which nothing fits into
                    del logits
                    give_back()
            for i, gradient in enumerate(gradients):
                self.store.put((self.count - 1, j, i), gradient)
            self.store.drop((self.count, j))
        for j in range(len(self.runs), len(self.every)):
            self.store.drop((self.count, j))
        return total

    def _draws(self) -> HeadDraws | None:
        """A runner of all losses of the head together: where they are draws, and no more is asked of the head than labels."""
        seeds = [loss.seed for loss in self.consumer.losses if isinstance(loss, SampledLoss)]
        head = HeadDraws.head_of(self.model)
        if head is None or not 1 < len(seeds) == self.losses:
            return None
        name = self.collector.hooked.get(head)
        return HeadDraws(self.model, head, seeds) if name is None or self.consumer.takes_labels(name) else None

    def _drawn(self, draws: HeadDraws, piece: torch.Tensor, logits: torch.Tensor, part: Batch) -> Drawn | None:
        """All draws at some positions, where they can come together; the accumulator gets them."""
        with self.collector.aside(part.size, part.length):
            drawn = draws.of(piece, logits, part)
        if drawn is not None:
            self.collector.forget()
            if (name := self.collector.hooked.get(draws.head)) is not None:
                self.consumer.labelled(name, part, drawn)
        return drawn

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, slice]]:
        """The batch in pieces of positions whose logits take little memory, where losses and accumulator add them up."""
        alone = all(getattr(loss, "by_position", False) for loss in self.consumer.losses)
        if not alone or (self.collector.ends and not self.consumer.by_position):
            yield batch, slice(None)
            return
        yield from pieces_of(self.model, batch)

    def _layer(self, index: int, names: Sequence[str], *, propagate: bool) -> None:
        """One layer's passes; the first of them leaves the gradients at its input."""
        self.index = index
        for turn, wanted in enumerate(self.passes(names) if names else [[]]):
            for j, batch in enumerate(self.runs):
                self._batch(index, j, batch, wanted, propagate=propagate and not turn)
                self._worked(0 if turn else 2 * batch.size)
        self._drop(index)

    def _drop(self, index: int) -> None:
        """Forget the inputs of a layer, and the gradients at its output."""
        for j in range(len(self.every)):
            self.store.drop((index, j))
            for i in range(self.losses if j < len(self.runs) else 0):
                self.store.drop((index, j, i))

    def _batch(self, index: int, j: int, batch: Batch, wanted: Sequence[int], *, propagate: bool) -> None:
        todo = range(self.losses) if propagate else wanted
        device = next(iter(batch.kwargs.values())).device
        hidden = self.store.get((index, j)).detach().to(device).requires_grad_(propagate)
        self.collector.quiet = not wanted
        with self.replay.begin(index, hidden), self.replay.end(index):
            output = self.replay.run(batch.kwargs)
        for i in todo:
            hidden.grad = None
            gradient = self.store.get((index, j, i)).to(output.device, output.dtype)
            self.collector.quiet, retain = i not in wanted, i != todo[-1]
            if i in wanted:
                self.hand_over(output, batch, i, retain=retain, gradient=gradient)
            else:
                self.collector.backward(output, size=batch.size, length=batch.length, retain=retain, gradient=gradient)
            if propagate:
                self.store.put((index - 1, j, i), torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
        self.collector.quiet = False

    def _worked(self, units: int) -> None:
        """Tell the progress, in sequences: a layer's forward of one sequence is one unit, its backward two."""
        sequences = sum(b.size for b in self.runs)
        before, self.done = self.done, self.done + units
        now = self.done // self.units if self.done < self.units * sequences else sequences
        self.tick(now - before // self.units)
