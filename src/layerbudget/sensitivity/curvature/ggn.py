"""Gain under the exact generalised Gauss-Newton matrix, with a certified bracket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from ...errors import InvalidInput
from ...execution.loss import Data
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .krylov import Tridiagonal, lanczos
from .products import BlockProducts, check_finite


def absolute_damping(values: Sequence[float], unit: str, run: Tridiagonal) -> np.ndarray:
    """Dampings of a block in loss/parameter^2, ``max`` taken from the largest Ritz value in size."""
    scale = float(np.abs(run.ritz()[0]).max()) if unit == "max" else 1.0
    return np.asarray(values, dtype=np.float64) * (scale if scale > 0 else 1.0)


def lanczos_values(damping: Any, unit: str) -> tuple[float, ...]:
    """Dampings of the Krylov estimators; they know no trace and no other block, so ``mean`` and ``median`` are refused.

    Raises:
        InvalidInput: The unit is ``mean`` or ``median``, or ``absolute`` without values.
    """
    values = common.check_damping(damping, unit)
    if unit in ("mean", "median") or (unit == "absolute" and values is None):
        raise InvalidInput(
            f"damping_unit={unit!r} with damping={damping} needs what Lanczos on one block does not know: the trace of the "
            "curvature, or the other blocks.",
            "Use 'max', or 'absolute' with values.",
            "Leave damping_unit at 'max'.",
        )
    return common.SWEEPS[unit] if values is None else values


def score_ggn(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    steps: int = 60,
    tolerance: float = 0.01,
    floor: bool = False,
) -> Scores:
    """``zeta^2 = g'(GGN + tau I)^-1 g`` by Lanczos started at g; stops when the bracket is narrower than ``tolerance``.

    Args:
        model: The model.
        data: The calibration set.
        blocks: K blocks.
        damping: One or several; ``None`` for the default sweep.
        damping_unit: ``max`` or ``absolute``.
        batch_size: Sequences per pass.
        progress: Called with blocks done and in total.
        steps: Largest number of products per block (about ``0.8 sqrt(1/damping)`` are needed).
        tolerance: Relative width of the bracket at which to stop.
        floor: Estimate the noise floor by a second run, started at the half difference of the gradients of even and odd
            batches: ``E d'(C + tau I)^-1 d`` is what noise alone adds to the gain.

    Returns:
        The Gauss (lower) values as gains; ``extra`` has ``lower``, ``upper``, ``products`` and the Ritz extremes. The status is
        ``bracket 3 %`` where the tolerance was not met.

    Raises:
        CurvatureFailure: A product is not finite.
        InvalidInput: A damping, unit or batch size outside its domain.
    """
    common.check_inputs(data, batch_size)
    values = lanczos_values(damping, damping_unit)
    d, count = len(values), len(blocks)
    lower, upper, tau, floors = (np.zeros((d, count)) for _ in range(4))
    status = [["ok"] * count for _ in values]
    products, largest = [], []
    tick = Steps(progress, count)

    for k, block in enumerate(blocks):
        with BlockProducts(model, data, block, batch_size) as p:
            g = p.gradient()
            check_finite(float(g.double().square().sum()), block, "squared gradient")
            run = lanczos(p.ggn, g, steps, _narrow(values, damping_unit, tolerance))
            tau[:, k] = absolute_damping(values, damping_unit, run)
            lower[:, k], upper[:, k] = run.gauss(tau[:, k]), run.radau(tau[:, k])
            if floor:
                floors[:, k] = lanczos(p.ggn, half_difference(p, g), run.steps).gauss(tau[:, k])
            products.append(p.count)
        largest.append(run.largest)
        for i in range(d):
            status[i][k] = _status(run, lower[i, k], upper[i, k], tolerance)
        tick(1)
    extra = {
        "curvature": "GGN, Lanczos",
        "lower": lower.tolist(),
        "upper": upper.tolist(),
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": largest,
        "products": products,
    }
    return common.record(
        model, data, blocks, "ggn", gain=lower.tolist(), damping=values, damping_unit=damping_unit, status=status,
        noise_floor=floors.tolist() if floor else None, extra=extra,
    )  # fmt: skip


_SETTLED = 0.01


def _narrow(values: Sequence[float], unit: str, tolerance: float) -> Callable[[Tridiagonal], bool]:
    def stop(run: Tridiagonal) -> bool:
        if unit == "max" and run.largest_error > _SETTLED * abs(run.largest):
            return False  # the damping itself is measured in this eigenvalue
        t = absolute_damping(values, unit, run)
        low, high = run.gauss(t), run.radau(t)
        return bool((high - low <= tolerance * high).all())

    return stop


def _status(run: Tridiagonal, lower: float, upper: float, tolerance: float) -> str:
    if run.square <= 0:
        return "zero gradient"
    width = (upper - lower) / upper if upper > 0 else 0.0
    return f"bracket {width:.1%}" if width > tolerance else "ok"


def half_difference(p: BlockProducts, g: Any) -> Any:
    """Half the difference of the gradients of even and odd batches: a sample of the noise in g.

    Raises:
        InvalidInput: There is one batch only.
    """
    if len(p.batches) < 2:
        raise InvalidInput("A noise floor needs two batches and the data makes one.", "", "Use a smaller batch_size.")
    even = sum(p.gradient(i) for i in range(0, len(p.batches), 2))
    return 2 * even - g
