r"""LayerIF: layer scores from influence functions with DataInf's inverse, in one pass over all layers.

For a weight tensor with training gradients ``g_k`` (k = 1..n), validation gradients ``v_j`` (j = 1..m) and
``lambda = mean over k and entries of g_k^2 / 10`` DataInf averages n rank-one inverses,

    I[j,k] = - <h_j, g_k>,    h_j = 1/(n lambda) sum_l [ v_j - <v_j, g_l> / (lambda + |g_l|^2) g_l ].

Only inner products enter: with ``A = V G'`` (m x n), ``K = G G'`` (n x n) and ``D = lambda + diag K``

    I = -(1/lambda) ( A - (A / D) K / n ),

so no ``h_j`` is ever formed and every layer is served by the same forward and backward passes. Negative entries are
helpful: upweighting sample k lowers the loss of sample j. It is an influence heuristic, not the gain: an average of
inverses exceeds the inverse of the average by factors up to thousands.

Sources: DataInf (Kwon et al. 2024), LayerIF (Askari et al. 2025).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..execution.backward import feed
from ..execution.divergence import sequence_losses
from ..execution.loss import IGNORE, Batch, batches
from ..execution.sites import tracked
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .curvature.common import real_type, record
from .curvature.gram import InnerProducts, activation_bytes

AGGREGATIONS = ("all", "positive")
MEMORY = 4 << 30  # bytes of gradients of one pass


def influence_table(train: np.ndarray, cross: np.ndarray, numel: int) -> tuple[np.ndarray, float]:
    """DataInf's influence ``(m, n)`` of one weight tensor of ``numel`` entries, and ``lambda``; zeros without any gradient.

    ``train`` is ``K = G G'``, ``(n, n)``, and ``cross`` ``A = V G'``, ``(m, n)``.

    >>> g, v = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[1.0, 1.0]])
    >>> table, lam = influence_table(g @ g.T, v @ g.T, 2)
    >>> h = sum(np.linalg.solve(np.outer(x, x) + lam * np.eye(2), v[0]) for x in g) / 2
    >>> bool(np.allclose(table, -(h @ g.T)))
    True
    """
    norms = np.diagonal(train)
    lam = float(norms.mean()) / numel / 10.0
    if not lam > 0:
        return np.zeros_like(cross), 0.0
    return -(cross - (cross / (lam + norms)) @ train / len(norms)) / lam, lam


def aggregate(table: np.ndarray, aggregation: str = "all") -> float:
    """Layer score: minus the sum of helpful influence, so that larger means more useful.

    ``all``: ``-sum I``.  ``positive``: with ``t_k = sum_j I[j,k]``, minus the sum of the ``t_k <= 0`` (positively influential,
    that is *helpful*, training samples; the released helper that keeps ``t_k > 0`` has the sign wrong).

    >>> aggregate(np.array([[-3.0, 1.0]])), aggregate(np.array([[-3.0, 1.0]]), "positive")
    (2.0, 3.0)
    """
    columns = table.sum(axis=0)
    return float(-(columns if aggregation == "all" else columns[columns <= 0]).sum())


def _mean_losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``sum_i l_i`` of the batch, each ``l_i`` the mean token loss of its own sequence."""
    counts = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).clamp_min(1)
    return (sequence_losses(logits, batch.targets) / counts).sum()


def influence(
    model: nn.Module,
    train: CalibrationSet,
    validation: CalibrationSet,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    walk: str = "auto",
    progress: Progress | None = None,
) -> dict[str, tuple[np.ndarray, dict[str, float]]]:
    """Influence of every training on every validation sample through each block, and ``lambda`` of its weight tensors.

    The table ``(m, n)`` is the sum of :func:`influence_table` over the weight tensors; negative is helpful. Its unit is
    parameters: the loss cancels, ``lambda`` being proportional to its square.

    The loss of a sample is its mean over real tokens.

    Args:
        model: The model.
        train: Training samples, n.
        validation: Validation samples, m.
        blocks: Blocks of the model.
        batch_size: Sequences per pass.
        walk: ``whole``, ``layers`` or ``auto``, as in :func:`layerbudget.execution.backward.feed`.
        progress: Called with sequences done and in total.
    """
    modules = [Block(name=m.name, modules=(m,)) for b in blocks for m in b.modules]
    n, sets = train.samples, (train, validation)
    total = sum(s.samples for s in sets)
    dtype, device = real_type(model)
    each = max(activation_bytes(model, texts) for texts in sets)
    products = InnerProducts(modules, total, (_mean_losses,), dtype=dtype, device=device, max_bytes=MEMORY, activation=each)
    runs, offset, size = [], 0, 1 if tracked(model, modules)[1] else batch_size
    for data in sets:
        for batch in batches(model, data, size):
            rows = slice(offset + batch.rows.start, offset + batch.rows.stop)
            runs.append(dataclasses.replace(batch, rows=rows))
        offset += data.samples
    feed(model, runs, modules, products, walk=walk, tick=Steps(progress, total))
    by_name = dict(zip([m.name for m in modules], products.grams, strict=True))
    influences: dict[str, tuple[np.ndarray, dict[str, float]]] = {}
    for block in blocks:
        table, damping = np.zeros((validation.samples, n)), {}
        for module in block.modules:
            gram = by_name[module.name]
            part, damping[module.name] = influence_table(gram[:n, :n], gram[n:, :n], module.numel)
            table += part
        influences[block.name] = table, damping
    return influences


def score_layerif(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block],
    *,
    validation: CalibrationSet | None = None,
    aggregation: Literal["all", "positive"] = "all",
    batch_size: int = 8,
    walk: str = "auto",
    progress: Progress | None = None,
) -> Scores:
    """Aggregated training-to-validation influence of every block; orientation ``gain``.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``validation``: validation samples; without them the last seventh of the data is held out (the paper's 300 : 50).
    - ``aggregation``: ``all`` or ``positive``, see :func:`aggregate`.

    Returns:
        A record; the standard error (for ``all``) is that of a sum over independent validation samples, the training
        samples taken as given. ``extra`` holds both aggregations (:func:`aggregate`) and every ``lambda``.
    """
    train = data
    if validation is None:
        kept = data.samples - max(1, round(data.samples / 7))
        if kept < 1:
            raise InvalidInput(
                f"LayerIF needs training and validation samples, and there is {data.samples} in all.",
                "At least two.",
                "Give more samples, or validation=.",
            )
        train, validation = data.select(slice(0, kept)), data.select(slice(kept, None))
    influences = influence(model, train, validation, blocks, batch_size=batch_size, walk=walk, progress=progress)
    gain = {way: tuple(aggregate(influences[b.name][0], way) for b in blocks) for way in AGGREGATIONS}
    m = validation.samples
    errors = tuple(
        float(influences[b.name][0].sum(1).std(ddof=1) * math.sqrt(m)) if aggregation == "all" and m > 1 else None
        for b in blocks
    )
    extra = {
        "aggregation": aggregation,
        "validation": validation.describe(),
        "train_samples": train.samples,
        "lambda": {name: value for b in blocks for name, value in influences[b.name][1].items()},
        **{way: dict(zip([b.name for b in blocks], gain[way], strict=True)) for way in AGGREGATIONS},
    }
    return record(
        blocks,
        "layerif",
        gain=(gain[aggregation],),
        standard_error=(errors,),
        unit="parameters",
        orientation="gain",
        extra=extra,
    )
