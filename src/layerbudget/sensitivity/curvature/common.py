"""Shared by all curvatures: types of the shared options, dampings, checks, and the record with its provenance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ...errors import InvalidInput
from ...execution.loss import IGNORE, Data, targets_of
from ...records import Block
from ...scores import Scores

Damping = float | Sequence[float] | None
Unit = Literal["max", "median", "mean", "absolute"]
SWEEPS = {
    "max": (1e-3, 1e-2, 1e-1, 1.0, 10.0),
    "median": (1e-2, 1e-1, 1.0, 10.0, 100.0),
    "mean": (1e-1, 1.0, 10.0, 100.0, 1000.0),
    "absolute": (1e-3, 1e-2, 1e-1, 1.0, 10.0),
}


def check_damping(damping: Damping, unit: str) -> tuple[float, ...] | None:
    """Dampings as a tuple; ``None`` stays ``None`` (the default sweep)."""
    if unit not in SWEEPS:
        raise InvalidInput(f"damping_unit is {unit!r}.", f"It is one of {', '.join(SWEEPS)}.", "Use 'max'.")
    if damping is None:
        return None
    values = tuple(float(d) for d in np.atleast_1d(np.asarray(damping, dtype=np.float64)))
    if not values or len(set(values)) != len(values) or any(not np.isfinite(d) or d <= 0 for d in values):
        raise InvalidInput(
            f"damping is {damping}.", "Dampings are positive, finite and distinct.", "Leave damping out for the default sweep."
        )
    return values


@dataclasses.dataclass(frozen=True, eq=False)
class Dampings:
    """Dampings of K blocks, as they are recorded and in loss/parameter^2.

    Attributes:
        values: ``(D,)`` as recorded, in ``unit``.
        unit: ``max`` or ``mean`` (times the largest or mean eigenvalue of each block's own curvature), ``median`` (one damping
            for all blocks: times the median over blocks of their largest eigenvalues), or ``absolute``.
        tau: ``(D, K)``, absolute.
        largest: ``(K,)`` largest eigenvalues.
        mean: ``(K,)`` mean eigenvalues, where they are known.
    """

    values: tuple[float, ...]
    unit: str
    tau: np.ndarray
    largest: np.ndarray
    mean: np.ndarray | None = None

    @classmethod
    def of(cls, damping: Damping, unit: str, largest: np.ndarray, mean: np.ndarray) -> Dampings:
        """Dampings that were given, or the default sweep."""
        values, positive = check_damping(damping, unit), largest[largest > 0]
        median = float(np.median(positive)) if positive.size else 1.0
        if values is None:
            values = tuple(v * median for v in SWEEPS[unit]) if unit == "absolute" else SWEEPS[unit]
        scale = {"max": largest, "mean": mean}.get(unit, np.full(len(largest), median if unit == "median" else 1.0))
        tau = np.asarray(values)[:, None] * scale[None, :]
        return cls(values, unit, np.where(tau > 0, tau, 1.0), largest, mean)

    def record(
        self, blocks: Sequence[Block], estimator: str, gain: Any, curvature: str, *, extra: Mapping[str, Any], **fields: Any
    ) -> Scores:
        """Scores of gains ``(D, K)``, with dampings and eigenvalues among the extras."""
        curvature_fields = {"curvature": curvature, "absolute_damping": self.tau, "largest_eigenvalue": self.largest}
        curvature_fields |= {} if self.mean is None else {"mean_eigenvalue": self.mean}
        fields |= {"gain": gain, "damping": self.values, "damping_unit": self.unit}
        return record(blocks, estimator, **fields, extra={**curvature_fields, **extra})


def is_local(damping: Damping, unit: str) -> bool:
    """Whether the damping of a block refers to no other block."""
    return unit in ("max", "mean") or (unit == "absolute" and damping is not None)


def record(blocks: Sequence[Block], estimator: str, *, extra: Mapping[str, Any] | None = None, **fields: Any) -> Scores:
    """Scores without provenance, which :func:`layerbudget.sensitivity.gain.score` adds; arrays become lists."""
    fields, more = (
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in part.items()}
        for part in (fields, extra or {})
    )
    return Scores(estimator=estimator, blocks=tuple(blocks), extra=more, **fields)


def check_inputs(batch_size: int) -> None:
    """Refuse batch sizes below one."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidInput(f"batch_size is {batch_size}.", "It is a positive integer.", "Use 8.")


def real_type(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """In what gradients are kept, at least float32, and where."""
    parameter = next(model.parameters())
    return parameter.dtype if parameter.dtype == torch.float64 else torch.float32, parameter.device


def token_counts(model: nn.Module, data: Data) -> np.ndarray:
    """Target tokens of every sequence, shape ``(n,)``."""
    return (targets_of(model, data).reshape(data.samples, -1) != IGNORE).sum(1).cpu().numpy().astype(np.float64)


def over_sequences(blocks: Sequence[Block], estimator: str, values: np.ndarray, counts: np.ndarray, *, unit: str) -> Scores:
    """Scores ``sum_i v_ki / sum_i n_i`` of values ``(K, n)`` and tokens ``(n,)``, with standard errors over sequences."""
    total, n = float(counts.sum()), len(counts)
    ratios = [float(row.sum()) / total for row in values]
    spread = [float(np.square(row - r * counts).sum()) for row, r in zip(values, ratios, strict=True)]
    error = tuple(None if n < 2 else float(np.sqrt(s * n / (n - 1))) / total for s in spread)
    return record(blocks, estimator, gain=(tuple(ratios),), standard_error=(error,), unit=unit, orientation="gain")
