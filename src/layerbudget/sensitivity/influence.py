r"""LayerIF: layer scores from influence functions with DataInf's inverse, in one pass over all layers.

Per-sample gradients of every weight tensor come from one forward and backward pass per batch; their inner products are
all that the influence needs (:mod:`layerbudget.sensitivity.datainf`).

Sources: DataInf (Kwon et al. 2024), LayerIF (Askari et al. 2025); the paper's ``compute_IF.py`` for the parity mode.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..execution.backward import feed
from ..execution.loss import IGNORE, Batch, batches
from ..execution.sites import tracked
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .curvature.common import check_inputs, record
from .curvature.gram import Sketch, real_type
from .curvature.inner import InnerProducts
from .datainf import AGGREGATIONS, Influence, aggregate, influence_table

MODES = ("parity", "clean")
_ATTENTION = re.compile(r"self_attn|attn|attention")


def _parity_batches(model: nn.Module, data: CalibrationSet, size: int) -> Iterator[Batch]:
    """As the paper's code feeds them: the mask is passed, but padding counts in the loss and positions run on."""
    device = next(model.parameters()).device
    targets = torch.full_like(data.input_ids, IGNORE)
    targets[:, :-1] = data.input_ids[:, 1:]
    for i, kwargs in enumerate(data.batches(size, device)):
        rows = slice(i * size, i * size + len(kwargs["input_ids"]))
        yield Batch(rows=rows, args=(), kwargs=kwargs, targets=targets[rows].to(device), keys=())


def _mean_losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``sum_i l_i`` of the batch, each ``l_i`` the mean token loss of its own sequence."""
    targets = batch.targets
    losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORE, reduction="none")
    counts = (targets != IGNORE).reshape(len(targets), -1).sum(1).clamp_min(1)
    return (losses.reshape(len(targets), -1).sum(1) / counts).sum()


def _attention_only(blocks: Sequence[Block]) -> list[Block]:
    kept = []
    for block in blocks:
        modules = [m for m in block.modules if "self_attn" in m.name] or [m for m in block.modules if _ATTENTION.search(m.name)]
        if not modules:
            raise InvalidInput(
                f"{block.name} has no attention weights, and the parity mode reads nothing else.",
                "Its matrices are named self_attn, attn or attention.",
                "Use mode='clean', or partition by layer.",
            )
        kept.append(Block(name=block.name, modules=tuple(modules)))
    return kept


def _products(
    model: nn.Module,
    sets: Sequence[CalibrationSet],
    modules: Sequence[Block],
    *,
    parity: bool,
    batch_size: int,
    memory: int,
    sketch: tuple[int, int] | None,
    seed: int,
    walk: str,
    tick: Steps,
) -> np.ndarray:
    """Inner products of the gradients of every sample of both sets, for each weight tensor (one block each)."""
    dtype, device = real_type(model)
    maps = None if sketch is None else Sketch(sketch, seed)
    total, length = sum(s.samples for s in sets), max(s.length for s in sets)
    consumer = InnerProducts(
        modules, total, length, (_mean_losses,), dtype=dtype, device=device, max_bytes=memory, project=maps,
        sides=None if maps is None else maps.sides,
    )  # fmt: skip
    runs, offset = [], 0
    size = 1 if tracked(model, modules)[1] else batch_size
    for data in sets:
        for batch in (_parity_batches if parity else batches)(model, data, size):
            rows = slice(offset + batch.rows.start, offset + batch.rows.stop)
            runs.append(dataclasses.replace(batch, rows=rows))
        offset += data.samples
    feed(model, runs, modules, consumer, walk=walk, tick=tick)
    return consumer.grams


def influence(
    model: nn.Module,
    train: CalibrationSet,
    validation: CalibrationSet,
    blocks: Sequence[Block],
    *,
    mode: str = "clean",
    divisor: float = 10.0,
    batch_size: int = 8,
    memory: int = 4 << 30,
    sketch: tuple[int, int] | int | None = None,
    seed: int = 0,
    walk: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Influence]:
    """Influence tables of all blocks: sums of :func:`influence_table` over the weight tensors of each.

    Args:
        model: The base model.
        train: n training samples.
        validation: m validation samples.
        blocks: Blocks to score.
        mode: ``clean`` (every matrix of the blocks, padding masked, the loss of a sample is its mean over real tokens) or
            ``parity`` (the paper's code: weights of self-attention only, padding counted in the loss). Batches of one
            sample and batches of many give the same numbers in both.
        divisor: DataInf's 10 in ``lambda``.
        batch_size: Samples per pass.
        memory: Bytes for per-sample gradients. Where they do not fit, matrices are served in groups, one pass each.
        sketch: ``r`` or ``(r_out, r_in)``: Kronecker sketch of every gradient, for models whose gradients do not fit.
        seed: Of the sketch.
        walk: ``whole`` graph, by ``layers``, or ``auto``: whole where it fits.
        progress: Called with sequences done and in total.

    Returns:
        By block name.

    Raises:
        InvalidInput: An unknown mode, a divisor that is not positive, or blocks without attention in parity mode.
        CoverageError: A matrix that was never seen.
    """
    if sketch is not None and min((sketch,) if isinstance(sketch, int) else sketch) < 1:
        raise InvalidInput(f"sketch is {sketch}.", "Its sizes are positive integers.", "Use sketch=32.")
    if mode not in MODES or not divisor > 0:
        raise InvalidInput(f"mode={mode!r}, divisor={divisor}.", f"mode is one of {MODES}, divisor positive.", "Correct it.")
    check_inputs(train, batch_size)
    chosen = _attention_only(blocks) if mode == "parity" else list(blocks)
    pair = (sketch, sketch) if isinstance(sketch, int) else sketch
    n, total = train.samples, train.samples + validation.samples
    modules = [Block(name=m.name, modules=(m,)) for b in chosen for m in b.modules]
    products = _products(
        model, (train, validation), modules, parity=mode == "parity", batch_size=batch_size, memory=int(memory), sketch=pair,
        seed=seed, walk=walk, tick=Steps(progress, total),
    )  # fmt: skip
    by_name = dict(zip([m.name for m in modules], products, strict=True))
    found: dict[str, Influence] = {}
    for block in chosen:
        table, damping = np.zeros((validation.samples, n)), {}
        for module in block.modules:
            own = by_name[module.name]
            part, damping[module.name] = influence_table(own[:n, :n], own[n:, :n], module.numel, divisor=divisor)
            table += part
        found[block.name] = Influence(table=table, damping=damping)
    return found


def _split(data: CalibrationSet, validation: CalibrationSet | None) -> tuple[CalibrationSet, CalibrationSet]:
    if validation is not None:
        return data, validation
    held_out = max(1, round(data.samples / 7))
    if data.samples <= held_out:
        raise InvalidInput(
            f"LayerIF needs training and validation samples, and there is {data.samples} in all.",
            "At least two.",
            "Give more samples, or validation=.",
        )
    return data.select(slice(0, data.samples - held_out)), data.select(slice(data.samples - held_out, None))


def score_layerif(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block],
    *,
    validation: CalibrationSet | None = None,
    mode: str = "clean",
    aggregation: str = "all",
    divisor: float = 10.0,
    memory: int | None = None,
    sketch: tuple[int, int] | int | None = None,
    batch_size: int = 8,
    seed: int | None = None,
    walk: str = "auto",
    progress: Progress | None = None,
) -> Scores:
    """Score blocks by their aggregated training-to-validation influence; orientation ``gain``.

    Args:
        model: The base model.
        data: Training samples; without ``validation`` the last seventh of them is held out (the paper's 300 : 50).
        blocks: Blocks to score.
        validation: Validation samples.
        mode: ``clean`` or ``parity``, see :func:`influence`.
        aggregation: ``all`` or ``positive``, see :func:`aggregate`. The other one is kept in ``extra``.
        divisor: DataInf's 10 in ``lambda``.
        memory: Bytes for per-sample gradients, 4 GiB by default; a sketch bounds them by itself.
        sketch: Kronecker sketch, see :func:`influence`.
        batch_size: Samples per pass; the result does not depend on it.
        seed: Of the sketch, 0 by default.
        walk: ``whole`` graph, by ``layers``, or ``auto``: whole where it fits.
        progress: Called with sequences done and in total.

    Returns:
        A record; the standard error (for ``all``) is that of a sum over independent validation samples, the training
        samples taken as given. ``extra`` holds both aggregations and every ``lambda``.

    Raises:
        InvalidInput: An unknown mode or aggregation, too few samples, or no attention weights in parity mode.
        CoverageError: A matrix that was never seen.
    """
    if aggregation not in AGGREGATIONS:
        raise InvalidInput(f"aggregation={aggregation!r}.", f"It is one of {AGGREGATIONS}.", "Choose one of those.")
    for name, value, read in (("seed", seed, sketch is not None), ("memory", memory, sketch is None)):
        if value is not None and not read:
            raise InvalidInput(
                f"{name} was given {'without' if name == 'seed' else 'with'} a sketch.",
                "It would have no effect.",
                "Leave it out.",
            )
    train, held_out = _split(data, validation)
    found = influence(
        model, train, held_out, blocks, mode=mode, divisor=divisor, batch_size=batch_size,
        memory=memory or (4 << 30), sketch=sketch, seed=seed or 0, walk=walk, progress=progress,
    )  # fmt: skip
    gain = {way: tuple(aggregate(found[b.name].table, way) for b in blocks) for way in AGGREGATIONS}
    m = held_out.samples
    errors = tuple(
        float(found[b.name].table.sum(1).std(ddof=1) * math.sqrt(m)) if aggregation == "all" and m > 1 else None for b in blocks
    )
    return record(
        model,
        data,
        blocks,
        "layerif",
        gain=(gain[aggregation],),
        standard_error=(errors,),
        unit="parameters",
        orientation="gain",
        extra={
            "mode": mode,
            "aggregation": aggregation,
            "divisor": divisor,
            "validation": held_out.describe(),
            "train_samples": train.samples,
            "lambda": {name: value for b in blocks for name, value in found[b.name].damping.items()},
            **{way: dict(zip([b.name for b in blocks], gain[way], strict=True)) for way in AGGREGATIONS},
        },
        seed=seed or 0,
    )
