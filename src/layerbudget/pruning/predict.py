r"""Damage curves without extra forwards: the second-order term with Kronecker-factored curvature.

One forward and backward gives, for every matrix, ``A = E[x x']`` of its inputs and ``G = E[g g']`` of the gradients of a
token's loss at its outputs. Pruning ``W`` to ``W + D`` is predicted to cost

    1/2 tr(D A D' G)      nats per token,

the quadratic model of the mean loss with the Fisher matrix ``A (x) G`` (labels drawn from the model's own distribution),
matrices of a block taken as independent. It costs three forwards instead of one per block and ratio; what it
misses are interactions and everything beyond second order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..blocks import is_conv1d, partition, weight_of
from ..data.calibration import CalibrationSet
from ..errors import CoverageError, InvalidInput
from ..records import Block
from .curves import Curves
from .magnitude import magnitude_mask
from .select import share
from .sparsegpt import inverse_factor, sparsegpt_update
from .wanda import wanda_mask


def second_order_curves(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block] | None = None,
    *,
    ratios: Sequence[float] = (0.3, 0.5, 0.7, 0.85),
    method: str = "wanda",
    batch_size: int = 8,
    seed: int = 0,
) -> Curves:
    """Predict, for every block, what pruning it costs; the model is not changed.

    Args:
        model: A causal language model (any model with token logits).
        data: Calibration tokens.
        blocks: From :func:`layerbudget.blocks.partition`; layers by default.
        ratios: Sparsities to predict.
        method: ``magnitude``, ``wanda`` or ``sparsegpt``.
        batch_size: Sequences per forward.
        seed: Of the drawn labels.

    Raises:
        InvalidInput: Unknown method.
        CoverageError: A matrix of fused experts, or one that no token reached.
    """
    if method not in ("magnitude", "wanda", "sparsegpt"):
        raise InvalidInput(
            f"There is no pruning method {method!r}.", "Methods are magnitude, wanda and sparsegpt.", "Use wanda."
        )
    blocks = tuple(blocks) if blocks is not None else partition(model)
    factors = _factors(model, data, [m.name for b in blocks for m in b.modules], batch_size, seed)
    damage = {b.name: tuple(_damage(model, b, r, method, factors) for r in ratios) for b in blocks}
    return Curves(
        ratios={b.name: tuple(ratios) for b in blocks}, damage=damage, metric="second-order", method=method,
        forwards=3 * len(blocks) * -(-data.samples // batch_size),
    )  # fmt: skip


Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _factors(model: nn.Module, data: CalibrationSet, names: Sequence[str], batch_size: int, seed: int) -> Factors:
    a: dict[str, torch.Tensor] = {}
    g: dict[str, torch.Tensor] = {}
    real: dict[str, torch.Tensor | None] = {"mask": None}

    def rows(x: torch.Tensor) -> torch.Tensor:
        flat, mask = x.detach().reshape(-1, x.shape[-1]).float(), real["mask"]
        return flat if mask is None or len(mask) != len(flat) else flat[mask]

    def watch(name: str) -> Any:
        """Forward hook of one matrix that adds ``x x'``, and ``g g'`` on the way back."""

        def hook(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            """Add the inputs now, and the output's gradients when they come."""
            x = rows(arguments[0])
            a[name] = a.get(name, 0) + x.T @ x

            def take(grad: torch.Tensor) -> None:
                y = rows(grad)
                g[name] = g.get(name, 0) + y.T @ y

            output.register_hook(take)

        return hook

    handles, tokens = [], 0
    for name in names:
        owner, parameter = weight_of(model, name)
        if parameter.ndim != 2:
            raise CoverageError(f"{name} holds fused experts.", "The prediction knows plain matrices.", "Use damage_curves.")
        handles.append(owner.register_forward_hook(watch(name)))
    flags, training = {p: p.requires_grad for p in model.parameters()}, model.training
    generator = torch.Generator().manual_seed(seed)
    try:
        model.eval()
        for p in flags:
            p.requires_grad_(False)
        for batch in data.batches(batch_size, next(model.parameters()).device):
            mask = batch.get("attention_mask")
            real["mask"] = None if mask is None else mask.bool().reshape(-1)
            with torch.enable_grad():
                tokens += _backward(model, batch, generator)
    finally:
        for handle in handles:
            handle.remove()
        for p, flag in flags.items():
            p.requires_grad_(flag)
        model.train(training)
    missing = [n for n in names if n not in a or n not in g]
    if missing:
        raise CoverageError(f"No token reached {missing[0]}.", "", "Exclude it, or use more calibration text.")
    return {n: (a[n] / tokens, g[n] / tokens) for n in names}


def _backward(model: nn.Module, batch: dict[str, torch.Tensor], generator: torch.Generator) -> int:
    """Summed loss of labels drawn from the model's distribution; returns the number of tokens."""
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_(True)
    rest = {k: v for k, v in batch.items() if k != "input_ids"}
    logits = model(inputs_embeds=embedded, **rest).logits.float()
    flat = logits.reshape(-1, logits.shape[-1])
    drawn = torch.multinomial(flat.detach().softmax(-1).cpu(), 1, generator=generator).flatten().to(flat.device)
    mask = batch.get("attention_mask")
    if mask is not None and mask.numel() == len(drawn):
        drawn = drawn.masked_fill(mask.reshape(-1) == 0, -100)
    nn.functional.cross_entropy(flat, drawn, reduction="sum").backward()
    return int((drawn != -100).sum())


def _damage(model: nn.Module, block: Block, ratio: float, method: str, factors: Factors) -> float:
    counts = share(round(ratio * block.numel), [m.numel for m in block.modules])
    total = 0.0
    for module, count in zip(block.modules, counts, strict=True):
        owner, parameter = weight_of(model, module.name)
        weight = (parameter.data.T if is_conv1d(owner) else parameter.data).float()
        a, g = factors[module.name]
        if method == "sparsegpt":
            pruned = sparsegpt_update(weight, *inverse_factor(a), count)
        else:
            mask = magnitude_mask(weight, count) if method == "magnitude" else wanda_mask(weight, a.diagonal(), count)
            pruned = weight.masked_fill(mask, 0)
        change = pruned - weight
        total += 0.5 * float(((g @ change) * (change @ a)).sum())
    return total
