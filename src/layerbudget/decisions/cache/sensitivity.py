"""Damage of rounding the cache: gradients of keys and values along the change of every format.

They come layer by layer, from the last to the first, as in :mod:`layerbudget.execution.backward`. The graphs of all layers are
kept from the forward where they take less than 1.25 GiB, without the weights of a streamed model: these come again. Else every
layer runs once more when its turn has come, which takes a fifth longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import CoverageError
from ...execution.backward import SampledLoss
from ...execution.loss import IGNORE, Batch, logits_of, unlabelled
from ...execution.memory import GRAPHS, TOGETHER, pieces_of
from ...execution.modes import prepared
from ...execution.processes import process_group, shard
from ...execution.replay import Replay, unwalkable
from ...models.blocks import partition
from ...models.offload import converting, mapped
from ...progress import Progress, Steps
from ...sensitivity.directional.terms import pooled
from ...sensitivity.sequences import deviations
from .cache import caching, read_back
from .formats import CacheFormat
from .space import CacheSpace

States = Mapping[tuple[int, int], torch.Tensor]  # keys (part 0) and values (1) of layers


class _Graph(NamedTuple):
    """One layer on one batch: its output, its input, and its keys and values."""

    output: torch.Tensor
    before: torch.Tensor
    states: States


class _Layers:
    """Gradients of several losses at the keys and values of a model that is walked layer by layer.

    ``run_states`` holds what the layers of a forward keep, once they have run.
    """

    def __init__(
        self, model: nn.Module, run_states: dict[tuple[int, int], torch.Tensor], losses: Sequence[SampledLoss]
    ) -> None:
        self.model, self.run_states, self.losses = model, run_states, losses
        self.replay, self.files = Replay(model), mapped(model)
        self.wide = sum(m.d_out * m.copies for block in partition(model, "layer") for m in block.modules)

    def gradients(self, batches: Sequence[Batch]) -> Iterator[tuple[int, States, list[tuple[torch.Tensor, ...]]]]:
        """Yield number of a batch, keys and values of a layer, and the gradients of every loss there."""
        self.replay.probe(batches[0].kwargs)
        count, number_bytes = len(self.replay.layers), next(self.model.parameters()).element_size()
        number_bytes = number_bytes if self.files is None else self.files.dtype.itemsize
        tokens = sum(batch.size * batch.length for batch in batches)
        keeps = not converting(self.model) or 2 * tokens * self.wide * number_bytes < GRAPHS
        inputs = [[self.replay.first_inputs(batch.kwargs).detach()] for batch in batches]
        graphs: dict[tuple[int, int], _Graph] = {}
        for i in range(count):
            for j, batch in enumerate(batches):
                with torch.set_grad_enabled(keeps):
                    graph = self._run(i, batch, inputs[j][i])
                inputs[j].append(graph.output.detach())
                if keeps:
                    graphs[i, j] = graph
        upstream = [self._head(batch, hidden.pop()) for batch, hidden in zip(batches, inputs, strict=True)]
        for i in reversed(range(count)):
            if self.files is not None:
                self.files.bring(self.replay.layers[i][0])
            for j, batch in enumerate(batches):
                before = inputs[j].pop()
                output, before, states = graphs.pop((i, j)) if keeps else self._run(i, batch, before)
                tensors, last = [*states.values(), *([before] if before.requires_grad else [])], len(self.losses) - 1
                found = [
                    torch.autograd.grad(output, tensors, gradient, retain_graph=n < last, allow_unused=True)
                    for n, gradient in enumerate(upstream[j] if tensors else [])
                ]
                if before.requires_grad:
                    upstream[j] = [each[-1] for each in found]
                yield j, states, [each[: len(states)] for each in found]

    def _run(self, index: int, batch: Batch, before: torch.Tensor) -> _Graph:
        """Run one layer; nothing lies below the first one."""
        self.run_states.clear()
        before = before.detach().requires_grad_(index > 0)
        remembered: AbstractContextManager[Any] = nullcontext() if self.files is None else self.files.remembered()
        with self.replay.begin(index, before), self.replay.end(index), remembered:
            output = self.replay.run(batch.kwargs)
        return _Graph(output, before, dict(self.run_states))

    def _head(self, batch: Batch, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of every loss at the last layer's output; logits are made of some positions at a time."""
        gradients = [torch.zeros_like(hidden) for _ in self.losses]
        for piece, places in pieces_of(self.model, batch):
            part = hidden[:, places].detach().requires_grad_(True)
            with self.replay.begin(len(self.replay.layers), part):
                logits = logits_of(self.model, piece)
            for gradient, loss in zip(gradients, self.losses, strict=True):
                (gradient[:, places],) = torch.autograd.grad(
                    loss(logits, piece), part, retain_graph=loss is not self.losses[-1]
                )
        return gradients


def _whole(
    model: nn.Module, run_states: dict[tuple[int, int], torch.Tensor], losses: Sequence[SampledLoss], batches: Sequence[Batch]
) -> Iterator[tuple[int, States, list[tuple[torch.Tensor, ...]]]]:
    """See :meth:`_Layers.gradients`, of a model whose layers do not run alone, from one graph of all of it."""
    for j, batch in enumerate(batches):
        run_states.clear()
        logits, last = logits_of(model, batch), len(losses) - 1
        states = dict(run_states)
        yield (
            j,
            states,
            [
                torch.autograd.grad(loss(logits, batch), [*states.values()], retain_graph=n < last, allow_unused=True)
                for n, loss in enumerate(losses)
            ],
        )


def _together(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Batches of so few tokens that they go through the layers together."""
    group: list[Batch] = []
    for batch in batches:
        if group and sum(b.size * b.length for b in (*group, batch)) > TOGETHER:
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _along(
    state: torch.Tensor, gradients: Sequence[torch.Tensor | None], formats: Sequence[CacheFormat], part: int
) -> tuple[torch.Tensor, np.ndarray]:
    """Derivatives along the changes by all formats, ``(losses, m, B)``, and the squares of these changes, ``(m, B)``."""
    x = state.detach()
    along, squares = torch.zeros(len(gradients), len(formats), len(x), dtype=torch.float64), np.zeros((len(formats), len(x)))
    for k, form in enumerate(formats):
        if form.plain:
            continue
        delta = read_back(x, form, part) - x
        squares[k] = [float(each.square().sum()) for each in delta]
        for draw, gradient in enumerate(gradients):
            if gradient is not None:
                along[draw, k] = (gradient * delta).flatten(1).sum(1).double().cpu()
    return along, squares


def cache_damage(
    model: nn.Module,
    data: CalibrationSet,
    space: CacheSpace,
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Damage of every block in every format, ``(K, m)`` nats per token; sixteen bits cost nothing.

    With it what every sequence adds beside its share, ``(K, m, sequences)``, and the passes. Several processes share the
    sequences, and all have all of it.

    Raises:
        CoverageError: A model whose layers do not run alone, and come one at a time.
    """
    where = {(k.layer, k.part): i for i, each in enumerate(space.members) for k in each}
    group, mine = process_group(), shard(data)
    rows = np.zeros((len(space.members), len(space.formats), data.samples))
    if all(form.plain for form in space.formats):
        return rows[..., 0], rows, 0.0
    places = group.shard(range(data.samples))
    norms, counts = np.zeros((data.samples, *rows.shape[:2])), np.zeros(data.samples)
    tick = Steps(progress, mine.samples, "gradients of keys and values")
    run_states: dict[tuple[int, int], torch.Tensor] = {}

    def listen(layer: int, *states: torch.Tensor) -> Any:
        for part, x in enumerate(states):
            run_states[layer, part] = x if x.requires_grad else x.requires_grad_(True)
        return states

    batches, losses = list(unlabelled(model, mine, batch_size)), [SampledLoss(1009 * seed + draw) for draw in range(draws)]
    with prepared(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        gradients_of = _way(model, run_states, losses, batches)
        for some in _together(batches):
            found = [dict[tuple[int, int], tuple[torch.Tensor, np.ndarray]]() for _ in some]
            with caching(model, listen):
                for j, states, gradients in gradients_of(some):
                    for n, (place, state) in enumerate(states.items()):
                        found[j][place] = _along(state, [each[n] for each in gradients], space.formats, place[1])
            for batch, parts in zip(some, found, strict=True):
                sequences = places[batch.rows]
                along = torch.zeros(draws, len(space.members), len(space.formats), batch.size, dtype=torch.float64)
                for place in sorted(parts):  # whatever the order was in which the layers came
                    along[:, where[place]] += parts[place][0]
                    norms[sequences, where[place]] += parts[place][1].T
                rows[:, :, sequences] = along.square().mean(0).numpy()
                counts[sequences] = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().numpy()
                for _ in range(batch.size):
                    tick()
    rows, counts, norm = group.sum(rows), group.sum(counts), group.sum(norms).sum(0)
    tokens = counts.sum()
    second = rows.sum(-1) / (2 * tokens)
    rest = deviations(rows / 2, counts, second)
    return pooled(second, np.linalg.norm(rest, axis=-1), norm)[0], rest, 1.0 + 2.0 * draws


def _way(
    model: nn.Module, run_states: dict[tuple[int, int], torch.Tensor], losses: Sequence[SampledLoss], batches: Sequence[Batch]
) -> Callable[[Sequence[Batch]], Iterator[tuple[int, States, list[tuple[torch.Tensor, ...]]]]]:
    """Layer by layer where the layers of a model run alone, else from its whole graph."""
    reason = unwalkable(model, (), batches)
    if not reason:
        return _Layers(model, run_states, losses).gradients
    if converting(model):
        what = f"{type(model).__name__} cannot be walked layer by layer ({reason}), and its layers come one at a time."
        raise CoverageError(what, "Gradients of keys and values then need the graph of all layers.", "Use --no-stream.")
    return lambda some: _whole(model, run_states, losses, some)
