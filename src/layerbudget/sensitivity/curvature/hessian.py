"""Gain under the exact Hessian: a diagnostic, because blocks of transformers are strongly indefinite.

The gain is twice the largest decrease of the damped quadratic model ``g'd + d'(H + tau I)d / 2``. Where ``H + tau I`` has a
negative eigenvalue the model falls without end, and there is no gain: ``g'(H + tau I)^-1 g`` then belongs to a saddle, may be
negative, and grows without bound as tau nears any eigenvalue of ``-H``. A Ritz value at or below ``-tau`` proves this. The
entry is then null, and its status names the damping to take. ``absolute=True`` uses ``|H|`` instead, which always exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import nn

from ...execution.loss import Data
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .ggn import absolute_damping, lanczos_values
from .krylov import Tridiagonal, lanczos
from .products import BlockProducts, check_finite

MARGIN = 1.5


def score_hessian(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    steps: int = 30,
    tolerance: float = 1e-3,
    absolute: bool = False,
) -> Scores:
    """``zeta^2 = g'(H + tau I)^-1 g`` by Lanczos started at g, refusing dampings at which ``H + tau I`` is indefinite.

    Args:
        model: The model.
        data: The calibration set.
        blocks: K blocks.
        damping: One or several; ``None`` for the default sweep.
        damping_unit: ``max`` (times the largest ``|Ritz value|``) or ``absolute``.
        batch_size: Sequences per pass.
        progress: Called with blocks done and in total.
        steps: Largest number of products per block; with fewer than 10 a negative eigenvalue may be missed.
        tolerance: Relative change of the gains over the last two products at which to stop (after 10).
        absolute: Use ``|H|``.

    Returns:
        Gains. Null where a Ritz value shows that there is none, with a status such as ``negative curvature -0.4 in
        model.layers.0: absolute damping above 0.6 is safe``: 1.5 times the most negative Ritz value, because an eigenvalue may
        lie below it. Between the two the status begins with ``near`` and the value is twice the decrease within the Krylov
        space that was searched: a lower bound of the gain, where that exists. ``extra`` has ``smallest_eigenvalue``
        (the smallest Ritz value) and ``safe_damping`` (absolute) per block.

    Raises:
        CurvatureFailure: A product is not finite.
        InvalidInput: A damping, unit or batch size outside its domain.
    """
    common.check_inputs(data, batch_size)
    values = lanczos_values(damping, damping_unit)
    gain: list[list[float | None]] = [[None] * len(blocks) for _ in values]
    status = [["ok"] * len(blocks) for _ in values]
    tau = np.zeros((len(values), len(blocks)))
    smallest, largest, safe, products = [], [], [], []
    tick = Steps(progress, len(blocks))
    for k, block in enumerate(blocks):
        with BlockProducts(model, data, block, batch_size) as p:
            g = p.gradient()
            check_finite(float(g.double().square().sum()), block, "squared gradient")
            run = lanczos(p.hessian, g, steps, _settled(values, damping_unit, tolerance, absolute))
            products.append(p.count)
        tau[:, k] = absolute_damping(values, damping_unit, run)
        smallest.append(run.smallest)
        largest.append(run.largest)
        safe.append(max(0.0, -MARGIN * run.smallest))
        found = run.gauss(tau[:, k], absolute=absolute)
        for i, t in enumerate(tau[:, k]):
            status[i][k] = "ok" if absolute else _status(block.name, run.smallest, t)
            if not status[i][k].startswith("negative"):
                gain[i][k] = float(found[i])
        tick(1)
    extra = {
        "curvature": "|Hessian|, Lanczos" if absolute else "Hessian, Lanczos",
        "absolute_damping": tau.tolist(),
        "smallest_eigenvalue": smallest,
        "largest_eigenvalue": largest,
        "safe_damping": safe,
        "products": products,
    }
    return common.record(
        model,
        data,
        blocks,
        "hessian",
        gain=gain,
        damping=values,
        damping_unit=damping_unit,
        status=status,
        extra=extra,
    )


def _status(name: str, smallest: float, tau: float) -> str:
    if smallest <= -tau:
        return f"negative curvature {smallest:.3g} in {name}: absolute damping above {-MARGIN * smallest:.3g} is safe"
    if tau < -MARGIN * smallest:
        return f"near negative curvature {smallest:.3g} in {name}: absolute damping above {-MARGIN * smallest:.3g} is safe"
    return "ok"


def _settled(values: Sequence[float], unit: str, tolerance: float, absolute: bool) -> Callable[[Tridiagonal], bool]:
    last: list[np.ndarray] = []

    def stop(run: Tridiagonal) -> bool:
        t = absolute_damping(values, unit, run)
        now = run.gauss(t, absolute=absolute)
        usable = np.ones(len(t), bool) if absolute else t > -MARGIN * run.smallest
        done = run.steps >= 10 and len(last) > 0
        done = done and bool((np.abs(now[usable] - last[-1][usable]) <= tolerance * np.abs(now[usable])).all())
        last.append(now)
        return done

    return stop
