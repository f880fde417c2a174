r"""Formats by any score: what a plan of bits costs on held-out text, and how a score of layers becomes a table of damages.

A score says how much a block matters, not what a format does to it. Beside the damages that are measured or predicted (the
score ``rounding``) every other score decides formats as sensitivity times relative rounding error, which needs no data:

    d_kj = s_k |Q_j(W_k) - W_k|^2 / |W_k|^2,

with s_k the score of block k; the exact program then chooses as it does for measured damages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..compressors.formats import PACKED
from ..data.calibration import CalibrationSet
from ..decisions.bits.items import items_of
from ..decisions.bits.plan import ESTIMATOR
from ..decisions.bits.runtimes import find_runtime
from ..decisions.bits.sensitivity import rounding_damage
from ..errors import InvalidInput
from ..scores import Scores
from .bench import TextBench


@dataclasses.dataclass(kw_only=True)
class FormatBench(TextBench):
    """A :class:`~layerbudget.comparison.bench.TextBench` of plans of bits; embedding and head stay in 16 bits.

    Attributes:
        method: The quantiser: ``rtn``, ``weighted`` or ``gptq``.
        runtime: ``transformers`` or ``vllm`` (q/k/v and gate/up agree): formats of compressed-tensors.
    """

    method: str = "rtn"
    runtime: str = "transformers"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._errors: dict[tuple[str, ...] | None, dict[str, Any]] = {}
        target = find_runtime(self.runtime, PACKED)
        if target.ends:
            raise InvalidInput(
                f"{target.name} decides about embedding and head too.", "No score covers them.", "Use transformers."
            )
        self.blocks = items_of(self.model, target, self.by)

    @property
    def identity(self) -> dict[str, Any]:
        """What a measurement depends on beside plan and seed."""
        return {**super().identity, "runtime": self.runtime}

    def score(self, given: str, data: CalibrationSet | None, options: Mapping[str, Any]) -> Scores:
        """A score record; ``rounding`` is the damage of every format (``damage="measured"`` among its options: measured)."""
        if given != ESTIMATOR:
            return super().score(given, data, options)
        return rounding_damage(
            self.model, self.data(0) if data is None else data, runtime=self.runtime, by=self.by, method=self.method,
            batch_size=self.batch_size, unwritten="plan", **options,
        )  # fmt: skip

    def weighed(self, scores: Scores) -> Scores:
        """The record with a table of damages: its own, or its values times relative rounding errors.

        A permuted table has the damage per relative rounding error of another block, times the block's own rounding errors.

        Raises:
            InvalidInput: A score below zero.
        """
        if "choices" in scores.extra:
            return scores
        if "order" in scores.extra:
            return dataclasses.replace(scores, extra={"choices": self._rebuilt(**scores.extra)})
        gain, table = scores.values(), self._relative()
        if gain.min() < 0:
            low = scores.names[int(gain.argmin())]
            raise InvalidInput(
                f"The score of {low} is {gain.min():g}.", "A sensitivity is zero or more.", "Shift the scores, or clip them."
            )
        damage = [[None if d is None else float(g) * d for d in row] for g, row in zip(gain, table["damage"], strict=True)]
        choices = {**table, "damage": damage, "measure": "score x relative rounding error"}
        return dataclasses.replace(scores, extra={**scores.extra, "choices": choices})

    def _rebuilt(self, table: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
        """A table of damages whose sensitivities, the damages per relative rounding error, are those of other blocks."""
        error = np.array(self._relative(tuple(table["formats"]))["damage"], dtype=np.float64)
        damage = np.array(table["damage"], dtype=np.float64)
        there = np.isfinite(damage) & (error > 0)
        sensitivity = np.divide(damage, error, out=np.zeros_like(damage), where=there)
        usual = sensitivity.sum(1) / np.maximum(there.sum(1), 1)  # where the other block does not have the format
        moved = np.where(there, sensitivity, usual[:, None])[list(order)] * error
        return {**table, "damage": [[None if np.isnan(d) else float(d) for d in row] for row in moved]}

    def _relative(self, formats: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The table of relative squared rounding errors, to nearest, in the given formats or in all."""
        if formats not in self._errors:
            found = rounding_damage(
                self.model, self.data(0), runtime=self.runtime, by=self.by, damage="relative", formats=formats, unwritten="plan"
            )
            self._errors[formats] = dict(found.extra["choices"])
        return self._errors[formats]
