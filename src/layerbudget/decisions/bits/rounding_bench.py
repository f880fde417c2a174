"""Measure what formats cost: a walk over the dense model with one block at a time in one format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.formats import Format
from ...compressors.treating import Found, Job, Treating
from ...data.calibration import CalibrationSet
from ...execution.divergence import Meter
from ...execution.inputs import InputMoments
from ...execution.modes import inference
from ...execution.walk import Walk
from ...models.blocks import weight_of
from ...progress import Progress, Steps
from ...records import Block
from ...sensitivity.directional.originals import Originals
from .items import layer_index
from .storing import need_data, quantiser_of


@dataclasses.dataclass(kw_only=True, eq=False)
class Damages:
    """Damage of K blocks in m formats.

    Attributes:
        damage: Nats per token, ``(K, m)``; infinite where a block does not have a format.
        rest: What every sequence adds to a damage beside its share, ``(K, m, sequences)``, see :func:`mean_and_rest`.
        passes: Forward equivalents of the whole model on the whole text.
        kept: Share of what the formats of a block do not share that pooling left (1 where nothing is pooled).
    """

    damage: np.ndarray
    rest: np.ndarray
    passes: float = 0.0
    kept: float = 1.0

    @classmethod
    def none(cls, blocks: int, formats: int, sequences: int) -> Damages:
        """A table to be filled."""
        return cls(damage=np.full((blocks, formats), np.inf), rest=np.zeros((blocks, formats, sequences)))

    @property
    def error(self) -> np.ndarray:
        """Standard errors, ``(K, m)``."""
        return np.linalg.norm(self.rest, axis=-1)


class Rows(Meter):
    """A meter that keeps sequences apart, and the dense model's log-probabilities, since the head may be what changes."""

    def __init__(self, walk: Walk) -> None:
        super().__init__(walk)
        for batch in self.batches:
            self._held[batch] = torch.log_softmax(walk.head(batch, self.final[batch]).logits.float(), dim=-1)

    def rows(self, index: int, hidden: Callable[[int], torch.Tensor | None] = lambda batch: None) -> np.ndarray:
        """``(sequences, 2)``: summed KL in nats and compared tokens of every sequence, forwards begun at layer ``index``."""
        out = []
        for batch in self.batches:
            clean, mask = self.clean(batch), self.counted(batch)
            now = torch.log_softmax(self.walk.tail(index, batch, hidden(batch)).logits.float(), dim=-1)
            each = (clean.exp() * (clean - now)).sum(-1)
            real = torch.ones_like(each) if mask is None or mask.shape != each.shape else mask.to(each)
            flat = (each * real).reshape(len(each), -1).double().sum(1), real.reshape(len(each), -1).double().sum(1)
            out.append(torch.stack(flat, 1).cpu().numpy())
        return np.concatenate(out)


def mean_and_rest(rows: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean per token of ``(sums, tokens)`` by sequence, and what every sequence adds beside its share, ``(sequences,)``.

    The norm of the rest is the standard error over sequences (ratio estimator); of a sum of means it is the norm of the sum.
    """
    total, tokens = rows.sum(0)
    n = len(rows)
    rest = (rows[:, 0] - total / tokens * rows[:, 1]) * np.sqrt(n / max(n - 1, 1))
    return float(total / tokens), rest / tokens


def mean_and_error(rows: np.ndarray) -> tuple[float, float]:
    """Mean per token of ``(sums, tokens)`` by sequence, and its standard error over sequences."""
    mean, rest = mean_and_rest(rows)
    return mean, float(np.linalg.norm(rest))


def has(block: Block, form: Format) -> bool:
    """Whether every matrix of a block can be stored in a format."""
    return all(form.fits(m.d_in) for m in block.modules)


def measured(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block],
    formats: Sequence[Format],
    *,
    method: str = "rtn",
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Damages:
    """Measure every block in every format, one after the other, everything else dense."""
    bench = Bench(model, data, formats, method, batch_size)
    found = Damages.none(len(blocks), len(formats), data.samples)
    place = {i: layer_index(model, b) for i, b in enumerate(blocks)}
    with inference(model), bench:
        for i in (i for i, p in place.items() if p is None):
            found.damage[i], found.rest[i] = bench.end(blocks[i])
        tick = Steps(progress, len(bench.walk), "layers in every format")
        for layer in range(len(bench.walk)):
            inside = [i for i, p in place.items() if p == layer]
            statistics = bench.statistics(layer, [blocks[i] for i in inside])
            for i in inside:
                found.damage[i], found.rest[i] = bench.block(layer, blocks[i], statistics)
            bench.walk.advance()
            tick()
    found.passes = bench.passes
    return found


class Bench:
    """A walk over the dense model, with one block at a time in one format."""

    def __init__(self, model: nn.Module, data: CalibrationSet, formats: Sequence[Format], method: str, batch_size: int) -> None:
        self.quantiser = quantiser_of(method)
        need_data(self.quantiser, data)
        self.model, self.formats = model, formats
        self.treating = Treating(model, self.quantiser)
        self.walk = Walk(model, data, batch_size=batch_size)
        self.made: dict[InputMoments, object] = {}
        self.forwards, self.samples = 0, data.samples

    def __enter__(self) -> Bench:
        self.walk.capture()
        self.meter = Rows(self.walk)
        return self

    def __exit__(self, *exception: object) -> None:
        self.walk.close()

    @property
    def passes(self) -> float:
        """Forward equivalents so far."""
        return self.walk.forwards / (len(self.walk) * self.walk.batches)

    def statistics(self, layer: int, blocks: Sequence[Block]) -> Found:
        """Inputs of a layer's matrices, as the quantiser wants them."""
        self.walk.position = layer
        self.made.clear()
        found = self.treating.collect(self.walk, [m for b in blocks for m in b.modules])
        return {} if found is None else found.found

    def jobs(self, block: Block, form: Format) -> list[Job]:
        """The block's matrices in a format."""
        return [Job(module=m, level=Level(format=form.name)) for m in block.modules]

    def trials(self, block: Block, statistics: Found) -> Iterator[tuple[int, bool]]:
        """Put the block into every format that it has, one after the other: ``(index, whether anything changed)``."""
        held = Originals(self.model, [block])
        try:
            for j, form in enumerate(self.formats):
                if not has(block, form):
                    continue
                held.restore()
                self.treating.jobs(self.jobs(block, form), statistics, self.made)
                changed = any(not torch.equal(weight_of(self.model, n)[1], w) for n, w in held.held.items())
                yield j, changed
        finally:
            held.restore()

    def block(self, layer: int, block: Block, statistics: Found) -> tuple[np.ndarray, np.ndarray]:
        """Damage of one block of a layer in every format, ``(m,)``, and what sequences add to it, ``(m, sequences)``."""
        return self._measure(block, statistics, lambda: self.meter.rows(layer))

    def end(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """The same of embedding or head: a whole forward, since one of the two may be both."""
        first = self.walk.replay.first_inputs
        return self._measure(block, {}, lambda: self.meter.rows(0, lambda batch: first(self.walk.inputs(batch))))

    def _measure(self, block: Block, statistics: Found, rows: Callable[[], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        damage, rest = np.full(len(self.formats), np.inf), np.zeros((len(self.formats), self.samples))
        for j, changed in self.trials(block, statistics):
            damage[j], rest[j] = mean_and_rest(rows()) if changed else (0.0, 0.0)
        return damage, rest
