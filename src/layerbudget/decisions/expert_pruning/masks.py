"""Damage of sets of experts, measured with the others masked; and the folds of a text that judge what the rest chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...execution.divergence import Reference
from ...execution.loss import count_scored_tokens
from ...execution.processes import alone, process_group
from ...models.experts import ExpertLayer, masked
from ...sensitivity.sequences import per_token
from .program import Fold, Kept, KeptProgram
from .sensitivity import folds_of


class Masked:
    """Damage of sets of experts to some of the sequences, measured with the others masked; every set once.

    Several processes share the batches, and all have what was measured.

    Args:
        model: Is left as it was.
        expert_layers: Its layers of experts.
        data: Calibration tokens.
        batch_size: Sequences per forward.
        rows: Which of the sequences; all by default.
    """

    def __init__(
        self,
        model: nn.Module,
        expert_layers: Sequence[ExpertLayer],
        data: CalibrationSet,
        batch_size: int = 8,
        rows: np.ndarray | None = None,
    ) -> None:
        self.expert_layers, self.seen = expert_layers, dict[tuple[tuple[int, ...], ...], tuple[np.ndarray, np.ndarray]]()
        some = data if rows is None else data.select(torch.from_numpy(rows))
        self.samples, self.share, group = some.samples, some.samples / data.samples, process_group()
        size = group.batch_alike(some.samples, batch_size)  # a token's numbers depend on those that go to an expert with it
        mine = [slice(i, min(i + size, some.samples)) for i in group.shard(range(0, some.samples, size))]
        with alone():
            self.references = [(rows, Reference(model, some.select(rows), size)) for rows in mine]

    def judge(self, kept: Kept) -> tuple[np.ndarray, np.ndarray]:
        """Nats and tokens of every sequence."""
        key = tuple(map(tuple, kept.values()))
        if key not in self.seen:
            both = np.zeros((2, self.samples))
            with alone(), masked(self.expert_layers, kept):
                for rows, reference in self.references:
                    both[:, rows] = reference.measure_sequences()
            nats, tokens = process_group().sum(both)
            self.seen[key] = nats, tokens
        return self.seen[key]

    def measure(self, kept: Kept) -> float:
        """Nats per token."""
        return per_token(*self.judge(kept))[0]

    @property
    def passes(self) -> float:
        """Forward equivalents spent, the one of the whole model included."""
        return self.share * (1 + len(self.seen))


def folds_for(
    model: nn.Module,
    expert_layers: Sequence[ExpertLayer],
    data: CalibrationSet,
    batch_size: int,
    programs: Sequence[KeptProgram],
) -> tuple[list[Fold], list[Masked]]:
    """The folds of a text, ``programs`` being what the others choose without each of them; and what measures there."""
    parts = [Masked(model, expert_layers, data, batch_size, rows) for rows in folds_of(count_scored_tokens(model, data))]
    return [Fold(program=p, measure=_without(parts, i), judge=parts[i].judge) for i, p in enumerate(programs)], parts


def _without(parts: Sequence[Masked], fold: int) -> Callable[[Kept], float]:
    """A measurement of sets of experts on all parts but one."""

    def measure(kept: Kept) -> float:
        both = zip(*(p.judge(kept) for i, p in enumerate(parts) if i != fold), strict=True)
        return per_token(*(np.concatenate(part) for part in both))[0]

    return measure
