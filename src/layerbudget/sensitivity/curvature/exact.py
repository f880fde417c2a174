"""Gain under the exact Gauss-Newton matrix, in a certified bracket, and under the exact Hessian, a diagnostic.

Both come from one Lanczos run per block, started at the gradient (:mod:`.products`).

Blocks of transformers have strongly indefinite Hessians. The gain is twice the largest decrease of the damped quadratic model
``g'd + d'(H + tau I)d / 2``. Where ``H + tau I`` has a negative eigenvalue the model falls without end, and there is no gain:
``g'(H + tau I)^-1 g`` then belongs to a saddle, may be negative, and grows without bound as tau nears any eigenvalue of ``-H``.
A Ritz value at or below ``-tau`` proves this. The entry is then null, and its status names the damping to take.
``absolute=True`` uses ``|H|`` instead, which always exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import nn

from ...errors import InvalidInput
from ...execution.loss import Data
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .common import Damping, Dampings, Unit
from .products import BlockProducts, Tridiagonal, lanczos

MARGIN = 1.5  # an eigenvalue may lie so far below the smallest Ritz value
_SETTLED = 0.01


def _absolute(values: Sequence[float], unit: str, run: Tridiagonal) -> np.ndarray:
    """Dampings of a block in loss/parameter^2, ``max`` taken from the largest Ritz value in size."""
    scale = float(np.abs(run.ritz()).max()) if unit == "max" else 1.0
    return np.asarray(values, dtype=np.float64) * (scale if scale > 0 else 1.0)


def _dampings(damping: Damping, unit: str) -> tuple[float, ...]:
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
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    steps: int = 60,
    tolerance: float = 0.01,
) -> Scores:
    """``zeta^2 = g'(GGN + tau I)^-1 g``; stops when the bracket is narrower than ``tolerance`` (relative).

    About ``0.8 sqrt(1/damping)`` products per block are needed, ``steps`` at most. Gains are the Gauss (lower) values;
    ``extra`` has ``lower``, ``upper``, ``products`` and the largest Ritz values. The status is ``bracket 3 %`` where the
    tolerance was not met.

    Raises:
        CurvatureFailure: A gradient is not finite.
        InvalidInput: A damping or unit outside its domain.
    """
    values = _dampings(damping, damping_unit)

    def narrow(run: Tridiagonal) -> bool:
        if damping_unit == "max" and run.largest_error > _SETTLED * abs(run.ritz()[-1]):
            return False  # the damping itself is measured in this eigenvalue
        t = _absolute(values, damping_unit, run)
        low, high = run.gauss(t), run.radau(t)
        return bool((high - low <= tolerance * high).all())

    lower, upper, tau = (np.zeros((len(values), len(blocks))) for _ in range(3))
    status, largest, products = [["ok"] * len(blocks) for _ in values], np.zeros(len(blocks)), []
    tick = Steps(progress, len(blocks))
    for k, block in enumerate(blocks):
        with BlockProducts(model, data, block, batch_size) as p:
            run = lanczos(p.ggn, p.gradient(), steps, narrow)
        products.append(p.count)
        largest[k] = run.ritz()[-1]
        tau[:, k] = t = _absolute(values, damping_unit, run)
        lower[:, k], upper[:, k] = run.gauss(t), run.radau(t)
        for i, (low, high) in enumerate(zip(lower[:, k], upper[:, k], strict=True)):
            width = (high - low) / high if high > 0 else 0.0
            status[i][k] = "zero gradient" if run.square <= 0 else f"bracket {width:.1%}" if width > tolerance else "ok"
        tick(1)
    extra = {"lower": lower, "upper": upper, "products": products}
    damped = Dampings(values, damping_unit, tau, largest)
    return damped.record(blocks, "ggn", lower, "GGN, Lanczos", status=status, extra=extra)


def score_hessian(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    steps: int = 30,
    tolerance: float = 1e-3,
    absolute: bool = False,
) -> Scores:
    """``zeta^2 = g'(H + tau I)^-1 g``, null where ``H + tau I`` is indefinite.

    ``damping_unit`` is ``max`` (times the largest ``|Ritz value|``) or ``absolute``; ``absolute=True`` uses ``|H|``. At
    most ``steps`` products per block are taken (with fewer than 10 a negative eigenvalue may be missed), until the gains
    change by less than ``tolerance`` (relative) over the last two, after 10.

    Returns:
        Gains. Null where a Ritz value shows that there is none, with a status such as ``negative curvature -0.4 in
        model.layers.0: absolute damping above 0.6 is safe``: 1.5 times the most negative Ritz value, because an eigenvalue may
        lie below it. Between the two the status begins with ``near`` and the value is twice the decrease within the Krylov
        space that was searched: a lower bound of the gain, where that exists. ``extra`` has ``smallest_eigenvalue``
        (the smallest Ritz value) and ``safe_damping`` (absolute) per block.

    Raises:
        CurvatureFailure: A gradient is not finite.
        InvalidInput: A damping or unit outside its domain.
    """
    values = _dampings(damping, damping_unit)
    gain: list[list[float | None]] = [[None] * len(blocks) for _ in values]
    status = [["ok"] * len(blocks) for _ in values]
    tau, products = np.zeros((len(values), len(blocks))), []
    smallest, largest = np.zeros((2, len(blocks)))
    tick = Steps(progress, len(blocks))
    for k, block in enumerate(blocks):
        with BlockProducts(model, data, block, batch_size) as p:
            run = lanczos(p.hessian, p.gradient(), steps, _settled(values, damping_unit, tolerance, absolute))
        products.append(p.count)
        smallest[k], largest[k] = run.ritz()[[0, -1]]
        tau[:, k] = _absolute(values, damping_unit, run)
        for i, (t, found) in enumerate(zip(tau[:, k], run.gauss(tau[:, k], absolute=absolute), strict=True)):
            status[i][k] = "ok" if absolute else _status(block.name, smallest[k], t)
            if not status[i][k].startswith("negative"):
                gain[i][k] = float(found)
        tick(1)
    safe = [max(0.0, -MARGIN * low) for low in smallest.tolist()]
    extra = {"smallest_eigenvalue": smallest, "safe_damping": safe, "products": products}
    name = "|Hessian|, Lanczos" if absolute else "Hessian, Lanczos"
    return Dampings(values, damping_unit, tau, largest).record(blocks, "hessian", gain, name, status=status, extra=extra)


def _status(name: str, smallest: float, tau: float) -> str:
    if tau >= -MARGIN * smallest:
        return "ok"
    word = "negative" if smallest <= -tau else "near negative"
    return f"{word} curvature {smallest:.3g} in {name}: absolute damping above {-MARGIN * smallest:.3g} is safe"


def _settled(values: Sequence[float], unit: str, tolerance: float, absolute: bool) -> Callable[[Tridiagonal], bool]:
    last: list[np.ndarray] = []

    def stop(run: Tridiagonal) -> bool:
        t = _absolute(values, unit, run)
        now = run.gauss(t, absolute=absolute)
        usable = np.ones(len(t), bool) if absolute else t > -MARGIN * run.ritz()[0]
        done = run.steps >= 10 and len(last) > 0
        done = done and bool((np.abs(now[usable] - last[-1][usable]) <= tolerance * np.abs(now[usable])).all())
        last.append(now)
        return done

    return stop
