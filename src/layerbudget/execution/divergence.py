"""How far a model's output is from another's: one KL divergence and one loss, over real tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..data.calibration import CalibrationSet
from ..models.offload import mapped
from .inputs import InputStatistics
from .loss import IGNORE, divergence_mask, pad_right
from .modes import inference, overflowed
from .processes import process_group, shard
from .walk import Walk

_KEEP_BYTES = 256 << 20


def token_divergence(logits: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """``KL(p_t || q_t)`` in nats of every token; ``logits`` ``(..., V)`` are those of q, ``clean`` log-probabilities of p."""
    now = torch.log_softmax(logits.float(), dim=-1)
    return (clean.exp() * (clean - now)).sum(-1)


def kl_sum(logits: torch.Tensor, clean: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[float, float]:
    """``sum_t KL(p_t || q_t)`` in nats over real tokens (samples of a classifier), and how many there are.

    ``logits`` are those of q, ``clean`` the log-probabilities of p, ``(B, T, V)`` or ``(B, C)``; ``mask`` ``(B, T)`` says which
    tokens are real.

    >>> p = torch.tensor([[0.5, 0.5]]).log()
    >>> round(kl_sum(torch.tensor([[0.25, 0.75]]).log(), p)[0], 4)
    0.1438
    """
    nats, tokens = kl_of_sequences(logits, clean, mask)
    return float(nats.sum()), float(tokens.sum())


def kl_of_sequences(
    logits: torch.Tensor, clean: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms of :func:`kl_sum` of every sequence, nats and tokens, ``(B,)`` each."""
    each = token_divergence(logits, clean)
    real = torch.ones_like(each) if mask is None or mask.shape != each.shape else mask.to(each)
    return (each * real).reshape(len(each), -1).sum(1), real.reshape(len(each), -1).sum(1)


def sequence_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the token losses of each sequence in nats, shape ``(B,)``, float64; targets of -100 have none."""
    return token_losses(logits, targets).reshape(len(targets), -1).double().sum(1)


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of every token in nats, shaped as ``targets``; zero where that is -100."""
    flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORE, reduction="none")
    return flat.reshape(targets.shape)


def next_tokens(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Targets of ``logits[:, :-1]``, ``(B, T - 1)``; -100 for padding."""
    return (ids if mask is None else ids.masked_fill(~mask, IGNORE))[:, 1:]


def mean(total: float, tokens: float) -> float:
    """``total / tokens``, of all processes together."""
    both = process_group().sum(np.array([total, tokens]))
    return float(both[0] / both[1])


class Reference:
    """The output of the model as it is now on some text, kept to compare with; several processes share the sequences.

    Padding is moved behind the tokens; where the text has answers, only they are compared. ``listen`` gathers its statistics
    from the same forward. ``walk`` goes over this process's sequences, with the inputs of layer 0.
    """

    def __init__(self, model: nn.Module, data: CalibrationSet, batch_size: int, listen: InputStatistics | None = None) -> None:
        self.data = cast(CalibrationSet, pad_right(data))
        with inference(model):
            self.walk = Walk(model, shard(self.data), batch_size=batch_size)
            self.walk.capture()
            self.final = self.walk.finals() if listen is None else listen.finals(self.walk)
        for hidden in self.final:
            if not bool(torch.isfinite(hidden).all()):
                raise overflowed("The hidden states of the model", hidden.dtype)
        self.counted = (divergence_mask(model, self.walk.data) != IGNORE).to(self.walk.device).split(batch_size)
        self._clean: dict[int, torch.Tensor] = {}

    def clean(self, batch: int) -> torch.Tensor:
        """The dense model's log-probabilities; kept where they are small, made again by the head where they are not."""
        if batch in self._clean:
            return self._clean[batch]
        clean = torch.log_softmax(self.walk.tail(len(self.walk), batch, self.final[batch]).logits.float(), dim=-1)
        if clean.numel() * clean.element_size() * self.walk.batches <= _KEEP_BYTES:
            self._clean[batch] = clean
        return clean

    def reached(self) -> float:
        """Mean divergence at the activations that the walk has stored behind the last layer, nats per token."""
        return self._mean(lambda batch: self.walk.tail(len(self.walk), batch))

    def measure(self) -> float:
        """Mean divergence of the model as it is now, nats per token; one forward."""
        nats, tokens = self.measure_sequences()
        return mean(float(nats.sum()), float(tokens.sum()))

    def measure_sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """Divergence of the model as it is now on each of this process's sequences, in nats, and their tokens; one forward."""
        self.walk.replay.look()  # layers may have gone since
        with inference(self.walk.model):
            if mapped(self.walk.model) is None:
                return self._each(lambda batch: self.walk.model(**self.walk.inputs(batch)))
            self.walk.capture()
            while self.walk.position < len(self.walk):  # every layer comes once, for all batches
                self.walk.advance()
            return self._each(lambda batch: self.walk.tail(len(self.walk), batch))

    def _mean(self, output_of: Callable[[int], Any]) -> float:
        nats, tokens = self._each(output_of)
        return mean(float(nats.sum()), float(tokens.sum()))

    def _each(self, output_of: Callable[[int], Any]) -> tuple[np.ndarray, np.ndarray]:
        parts = [
            kl_of_sequences(output_of(batch).logits, self.clean(batch), self.counted[batch])
            for batch in range(self.walk.batches)
        ]
        nats, tokens = (torch.cat(part).double().cpu().numpy() for part in zip(*parts, strict=True))
        return nats, tokens
