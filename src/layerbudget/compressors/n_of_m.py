"""n:m: in every group of m consecutive inputs the same number of weights goes, by the order of another treatment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from .base import Level, Treatment, find_treatment
from .conforming import treated
from .select import check_group


class NofM(Treatment):
    """Groups of ``group`` inputs, each losing equally many by the treatment ``base``; levels are n of m."""

    name, summary = "n:m", "n of every m consecutive inputs, by the order of another method"
    options: ClassVar[Mapping[str, Any]] = {"base": "wanda", "group": 4}

    def __init__(self) -> None:
        self._settle(**self.options)

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`Treatment.resolve_options`; its base and its group are those from then on."""
        options = super().resolve_options(given)
        self._settle(**options)
        return options

    def _settle(self, base: str, group: int) -> None:
        if group < 1 or base == self.name:
            raise InvalidInput(f"Groups of {group} by {base}.", "Groups have one input or more.", "Use group=4, base='wanda'.")
        self.base, self.group = find_treatment(base), group
        self.statistic = self.base.statistic  # type: ignore[misc]
        self.price = self.base.price  # type: ignore[misc]

    def begin(self, model: nn.Module, data: CalibrationSet, *, batch_size: int = 8, **options: Any) -> None:
        """As the base does it."""
        self.base.begin(model, data, batch_size=batch_size)

    def of(self, name: str, copy: int, prepared: Any) -> Any:
        """As the base does it."""
        return self.base.of(name, copy, prepared)

    def prepare(self, moment: torch.Tensor, *, parity: bool = False, **options: Any) -> Any:
        """As the base does it."""
        return self.base.prepare(moment, parity=parity)

    def apply(self, weight: torch.Tensor, prepared: Any, level: Level, **options: Any) -> torch.Tensor:
        """See :meth:`Treatment.apply`.

        Raises:
            InvalidInput: A level that is no n of m, or rows that do not split into groups.
        """
        check_group(weight.shape[1], self.group, "The matrix")
        zeroed, odd = divmod(level.zeros * self.group, weight.numel())
        if odd:
            raise InvalidInput(
                f"{level.zeros} of {weight.numel()} weights are not so many of every {self.group}.",
                f"Levels are n/{self.group} of the matrix.",
                f"Use {zeroed * weight.numel() // self.group}.",
            )
        return treated(self.base, weight, prepared, Level(zeros=level.zeros, pattern=(zeroed, self.group)))

    def size(self, numel: int, level: Level, *, itemsize: int = 2) -> int:
        """Values that are left, and ``ceil(log2 C(m, n))`` bits per group for their places, whole bytes in all."""
        from math import ceil, comb, log2

        zeroed = level.zeros * self.group // numel
        places = ceil(log2(comb(self.group, zeroed))) if 0 < zeroed < self.group else 0
        return (numel - level.zeros) * itemsize + -(-(numel // self.group) * places // 8)
