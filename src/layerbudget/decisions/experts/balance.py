r"""Load balancing: a loss that is smallest when the experts of a module get equal shares of the tokens.

For a module with E experts, ``loss = E sum_e f_e P_e``: ``f_e`` is the share of the top-k choices that went to expert e,
``P_e`` the mean of its full softmax. It is 1 at perfect balance (Shazeer et al. 2017; Fedus et al. 2021; MoLA).

The loss is attached inside the layer: the layer's output passes through unchanged, and the backward pass adds the loss's own
gradient. So it reaches the router under every trainer, also where a trainer recomputes the loss from the logits
or where checkpointing runs the first pass without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Routing:
    """What all layers of one adapted model share: the padding mask of the batch at work and the scale of the loss.

    Attributes:
        mask: ``(batch, length)``, 1 for real tokens; ``None`` counts all.
        scale: Factor of the balance gradient; ``1 / gradient_accumulation_steps`` under accumulation.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.scale = 1.0

    def observe(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the adapted model: note the batch's padding mask."""
        mask = kwargs.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def tokens(self, shape: torch.Size) -> Tensor | None:
        """Flat boolean mask for an input of leading shape ``shape``; ``None`` where the mask does not fit it (packing)."""
        if self.mask is None or tuple(self.mask.shape) != tuple(shape):
            return None
        return self.mask.reshape(-1).bool()

    def __deepcopy__(self, memo: dict[int, Any]) -> Routing:
        copy = Routing()
        copy.scale = self.scale
        memo[id(self)] = copy
        return copy


def balance_loss(logits: Tensor, gate: Tensor, tokens: Tensor | None = None) -> Tensor:
    """``E sum_e f_e P_e`` of one module, a scalar.

    Args:
        logits: Router logits ``(..., E)``.
        gate: Gate ``(..., E)``, zero for experts that were not chosen.
        tokens: Flat mask of the tokens that count.
    """
    experts = logits.shape[-1]
    probabilities = logits.float().reshape(-1, experts).softmax(-1)
    chosen = (gate.detach().reshape(-1, experts) > 0).float()
    if tokens is not None:
        weight = tokens.float().unsqueeze(-1)
        probabilities, chosen = probabilities * weight, chosen * weight
        mean = probabilities.sum(0) / weight.sum().clamp(min=1)
    else:
        mean = probabilities.mean(0)
    share = chosen.sum(0) / chosen.sum().clamp(min=1)
    return experts * (share * mean).sum()


class _Attach(torch.autograd.Function):
    """Identity on ``output``; in the backward pass ``loss`` receives the gradient one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Pass the gradient on, and one to the loss."""
        return gradient, torch.ones((), dtype=ctx.dtype, device=ctx.device)


def attach(output: Tensor, loss: Tensor) -> Tensor:
    """Return ``output``, with ``loss`` added to whatever is differentiated through it."""
    return _Attach.apply(output, loss)


class BalanceScale(TrainerCallback):
    """Divides the balance gradient by the accumulation steps, which the Trainer does not do for losses inside a model."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Read the accumulation steps."""
        module = getattr(model, "module", model)
        for tuner in (m for m in module.modules() if hasattr(m, "routing") and hasattr(m, "tuner_layer_cls")):
            tuner.routing.scale = 1.0 / max(1, args.gradient_accumulation_steps)
