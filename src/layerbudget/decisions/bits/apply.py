"""Put a model's matrices into the formats of a plan, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...data.calibration import CalibrationSet
from ...models.blocks import check_finite, describe
from ...plan import Plan
from .plans import formats_of_plan
from .storing import Stored, store

Progress = Callable[[int, int], None]


def apply_bits(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet | None = None,
    *,
    method: str | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
    **own: Any,
) -> Stored:
    """Round a model by a plan of bits, in place: afterwards it computes what a runtime computes from the written file.

    Args:
        model: Changed in place.
        plan: Of kind ``bits`` or ``recipe``, made for this model.
        data: Calibration tokens, for quantisers that look at inputs.
        method: ``rtn``, ``weighted`` or ``gptq``; by default the one that was measured when the plan was made.
        batch_size: Sequences per forward.
        progress: Called with (layers done, layers).
        **own: Options of the quantiser.

    Returns:
        What the writers need, and notes.

    Raises:
        ModelMismatch: The plan belongs to another model.
        InvalidInput: A plan of another kind, an unknown method, or missing data.
        BadModel: Weights that are not finite.
    """
    formats = formats_of_plan(plan)
    plan.validate(describe(model))
    check_finite(model)
    chosen = method or str(plan.extra["method"])
    return store(model, formats, data, method=chosen, batch_size=batch_size, progress=progress, **own)
