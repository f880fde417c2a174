"""What every curvature shares: damping, provenance, the walk over the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from ...errors import InvalidInput
from ...execution.loss import Data
from ...models import blocks as model_blocks
from ...models.provenance import computation, versions
from ...records import Block
from ...scores import Scores

SWEEPS = {
    "max": (1e-3, 1e-2, 1e-1, 1.0, 10.0),
    "median": (1e-2, 1e-1, 1.0, 10.0, 100.0),
    "mean": (1e-1, 1.0, 10.0, 100.0, 1000.0),
    "absolute": (1e-3, 1e-2, 1e-1, 1.0, 10.0),
}


def check_damping(damping: float | Sequence[float] | None, unit: str) -> tuple[float, ...] | None:
    """Validate a damping argument; ``None`` stays ``None`` (the default sweep).

    Raises:
        InvalidInput: An unknown unit, or a damping that is not positive and finite.
    """
    if unit not in SWEEPS:
        raise InvalidInput(f"damping_unit is {unit!r}.", f"It is one of {', '.join(SWEEPS)}.", "Use 'max'.")
    if damping is None:
        return None
    values = tuple(float(d) for d in np.atleast_1d(np.asarray(damping, dtype=np.float64)))
    bad = [d for d in values if not np.isfinite(d) or d <= 0]
    if bad or not values or len(set(values)) != len(values):
        raise InvalidInput(
            f"damping is {damping}.", "Dampings are positive, finite and distinct.", "Leave damping out for the default sweep."
        )
    return values


def resolve_damping(
    damping: float | Sequence[float] | None, unit: str, largest: np.ndarray, mean: np.ndarray
) -> tuple[tuple[float, ...], np.ndarray]:
    """Turn a damping argument into absolute values per block.

    Args:
        damping: Value or values in ``unit``; ``None`` for the default sweep.
        unit: ``max`` or ``mean`` (times the largest or mean eigenvalue of each block's own curvature), ``median`` (one damping
            for all blocks: times the median over blocks of their largest eigenvalues), or ``absolute``.
        largest: ``(K,)`` largest eigenvalues.
        mean: ``(K,)`` mean eigenvalues.

    Returns:
        The dampings as recorded, shape ``(D,)``, and the absolute ones, ``(D, K)`` in loss/parameter^2.

    Raises:
        InvalidInput: See :func:`check_damping`.
    """
    values = check_damping(damping, unit)
    if values is None:
        values = SWEEPS[unit]
        if unit == "absolute":
            values = tuple(v * _median(largest) for v in values)
    common = {"median": _median(largest), "absolute": 1.0}
    scale = {"max": largest, "mean": mean}.get(unit, np.full(len(largest), common.get(unit, 1.0)))
    tau = np.asarray(values)[:, None] * scale[None, :]
    return values, np.where(tau > 0, tau, 1.0)


def _median(largest: np.ndarray) -> float:
    positive = largest[largest > 0]
    return float(np.median(positive)) if positive.size else 1.0


def record(model: nn.Module, data: Data, blocks: Sequence[Block], estimator: str, **fields: Any) -> Scores:
    """Make a :class:`Scores` with the provenance of a model and its data."""
    return Scores(
        estimator=estimator,
        blocks=tuple(blocks),
        model={**model_blocks.describe(model), "computation": computation(model)},
        data=data.describe(),
        versions=versions(),
        **fields,
    )


def check_arguments(damping: float | Sequence[float] | None, unit: str, data: Data, batch_size: int) -> None:
    """Refuse dampings and batch sizes outside their domain, before the model runs.

    Raises:
        InvalidInput: See :func:`check_damping` and :func:`check_inputs`.
    """
    check_damping(damping, unit)
    check_inputs(data, batch_size)


def check_inputs(data: Data, batch_size: int) -> None:
    """Refuse batch sizes below one.

    Raises:
        InvalidInput: It is not a positive integer.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidInput(f"batch_size is {batch_size}.", "It is a positive integer.", "Use 8.")


def per_block(blocks: Sequence[Block], values: np.ndarray) -> dict[str, Any]:
    """``{block name: value}`` of a ``(K, ...)`` array."""
    return {b.name: v for b, v in zip(blocks, np.asarray(values).tolist(), strict=True)}
