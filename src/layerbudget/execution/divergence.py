"""How far a model's output is from another's: one KL divergence and one loss, over real tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import InvalidInput
from .loss import IGNORE, head_of
from .processes import total
from .walk import Walk

METRICS = ("kl", "loss")
_KEEP_BYTES = 256 << 20


def kl_sum(logits: torch.Tensor, clean: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[float, float]:
    """``sum_t KL(p_t || q_t)`` in nats over real tokens (samples of a classifier), and how many there are.

    Args:
        logits: Of ``q``, ``(B, T, V)`` or ``(B, C)``.
        clean: Log-probabilities of ``p``, the same shape.
        mask: Which tokens are real, ``(B, T)``; all where it is None or there are no tokens.

    >>> p = torch.tensor([[0.5, 0.5]]).log()
    >>> round(kl_sum(torch.tensor([[0.25, 0.75]]).log(), p)[0], 4)
    0.1438
    """
    now = torch.log_softmax(logits.float(), dim=-1)
    each = (clean.exp() * (clean - now)).sum(-1)
    real = torch.ones_like(each) if mask is None or mask.shape != each.shape else mask.to(each)
    return float((each * real).sum()), float(real.sum())


def sequence_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the token losses of each sequence in nats, shape ``(B,)``, float64; targets of -100 have none."""
    flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORE, reduction="none")
    return flat.reshape(len(targets), -1).double().sum(1)


def next_tokens(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Targets of ``logits[:, :-1]``, ``(B, T - 1)``; -100 for padding."""
    return (ids if mask is None else ids.masked_fill(~mask, IGNORE))[:, 1:]


def mean(found: float, tokens: float) -> float:
    """``found / tokens``, of all processes together."""
    both = total(np.array([found, tokens]))
    return float(both[0] / both[1])


class Meter:
    """Damage of a model's output against what it was when the meter was made; of several processes' sequences together.

    Args:
        walk: A walk that has captured the inputs of layer 0.
        metric: ``kl`` (mean KL divergence per real token, nats) or ``loss`` (difference of the mean next-token loss).
        during: A context to be in while a batch runs through the layers (for statistics of the same forward).

    Raises:
        InvalidInput: An unknown metric.
    """

    def __init__(
        self, walk: Walk, metric: str = "kl", during: Callable[[int], AbstractContextManager[None]] | None = None
    ) -> None:
        if metric not in METRICS:
            raise InvalidInput(f"There is no metric {metric!r}.", f"Metrics are {', '.join(METRICS)}.", "Use kl.")
        self.walk, self.metric = walk, metric
        self.batches = range(walk.batches)
        self.final = walk.finals(during)
        self._held: dict[int, torch.Tensor] = {}
        self._dense: dict[int, tuple[float, float]] = {}
        if metric == "loss":
            self._dense = {b: self._loss(walk.head(b, self.final[b]).logits, b) for b in self.batches}

    def damage(self, index: int) -> float:
        """Damage with the model as it is now, forwards begun at layer ``index`` from the stored activations."""
        return self._compare(lambda batch: self.walk.tail(index, batch).logits)

    def reached(self) -> float:
        """Damage at the activations that the walk has stored behind the last layer."""
        return self.damage(len(self.walk))

    def _compare(self, logits_of: Callable[[int], torch.Tensor]) -> float:
        found = tokens = 0.0
        for batch in self.batches:
            logits = logits_of(batch)
            if self.metric == "loss":
                (now, count), (dense, _) = self._loss(logits, batch), self._dense[batch]
                found, tokens = found + now - dense, tokens + count
            else:
                each, count = kl_sum(logits, self.clean(batch), self.counted(batch))
                found, tokens = found + each, tokens + count
        return mean(found, tokens)

    def counted(self, batch: int) -> torch.Tensor | None:
        """Which tokens of a batch are compared, ``(B, T)``; None when all are."""
        learned = self._answers(batch)
        return self.walk.token_mask(batch) if learned is None else F.pad(learned[:, 1:] != IGNORE, (0, 1))

    def _answers(self, batch: int) -> torch.Tensor | None:
        """Token labels of a batch, where the data has them for a causal LM: then only the answers are compared."""
        labels, start = self.walk.data.labels, batch * self.walk.batch_size
        if labels is None or labels.ndim != 2 or head_of(self.walk.model) != "causal":
            return None
        return labels[start : start + self.walk.sizes[batch]].to(self.walk.device)

    def clean(self, batch: int) -> torch.Tensor:
        """The dense model's log-probabilities; kept where they are small, made again by the head where they are not."""
        if batch in self._held:
            return self._held[batch]
        clean = torch.log_softmax(self.walk.head(batch, self.final[batch]).logits.float(), dim=-1)
        if clean.numel() * clean.element_size() * len(self.batches) <= _KEEP_BYTES:
            self._held[batch] = clean
        return clean

    def _loss(self, logits: torch.Tensor, batch: int) -> tuple[float, float]:
        """Summed loss in nats, and how many tokens were predicted."""
        learned = self._answers(batch)
        if learned is None:
            target = next_tokens(self.walk.inputs(batch)["input_ids"], self.walk.token_mask(batch))
        else:
            target = next_tokens(learned, None)
        return float(sequence_losses(logits[:, :-1].float(), target).sum()), float((target != IGNORE).sum())
