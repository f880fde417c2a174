"""How far a model's output is from what it was, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..blocks import weight_of
from ..records import Block
from .walk import Walk

_KEEP_BYTES = 256 << 20


class Originals:
    """Copies of weights, to go back to."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self.model = model
        self.held = {m.name: weight_of(model, m.name)[1].detach().clone() for b in blocks for m in b.modules}

    def restore(self, names: Sequence[str]) -> None:
        """Put weights back."""
        for name in names:
            weight_of(self.model, name)[1].data.copy_(self.held[name])


class Meter:
    """Damage of the model's output against the dense model's."""

    def __init__(self, walk: Walk, metric: str, batches: int | None) -> None:
        self.walk, self.metric = walk, metric
        self.batches = range(min(batches or walk.batches, walk.batches))
        self.final: list[torch.Tensor] = []
        self._held: dict[int, torch.Tensor] = {}
        for batch in self.batches:
            hidden = walk.store.get(batch)
            for i in range(len(walk)):
                hidden = walk.forward(i, batch, hidden)
            self.final.append(hidden)
        self.dense = [self._loss(walk.head(b, h).logits, b) for b, h in zip(self.batches, self.final, strict=True)]

    def damage(self, index: int) -> float:
        """Damage with the model as it is now, forwards restarted at block ``index`` from the stored activations."""
        return self._compare(lambda batch: self.walk.tail(index, batch).logits)

    def reached(self) -> float:
        """Damage at the activations that the walk has stored behind the last block."""
        return self._compare(lambda batch: self.walk.head(batch, self.walk.store.get(batch)).logits)

    def _compare(self, logits_of: Callable[[int], torch.Tensor]) -> float:
        total = tokens = 0.0
        for batch in self.batches:
            logits = logits_of(batch)
            if self.metric == "loss":
                (now, count), (dense, _) = self._loss(logits, batch), self.dense[batch]
                total, tokens = total + now - dense, tokens + count
            else:
                clean, mask = self._clean(batch), self._mask(batch, logits)
                now = torch.log_softmax(logits.float(), dim=-1)
                total += float(((clean.exp() * (clean - now)).sum(-1) * mask).sum())
                tokens += float(mask.sum())
        return total / tokens

    def _clean(self, batch: int) -> torch.Tensor:
        """The dense model's log-probabilities; kept where they are small, made again by the head where they are not."""
        if batch in self._held:
            return self._held[batch]
        clean = torch.log_softmax(self.walk.head(batch, self.final[batch]).logits.float(), dim=-1)
        if clean.numel() * clean.element_size() * len(self.batches) <= _KEEP_BYTES:
            self._held[batch] = clean
        return clean

    def _mask(self, batch: int, logits: torch.Tensor) -> torch.Tensor:
        mask = self.walk.token_mask(batch)
        if mask is None or logits.ndim == 2:
            return torch.ones(logits.shape[:-1], device=logits.device)
        return mask.to(logits.device).float()

    def _loss(self, logits: torch.Tensor, batch: int) -> tuple[float, int]:
        """Summed loss in nats, and how many tokens were predicted."""
        if self.metric != "loss":
            return 0.0, 0
        ids = self.walk.inputs(batch)["input_ids"]
        mask = self.walk.token_mask(batch)
        target = ids if mask is None else ids.masked_fill(~mask, -100)
        target = target[:, 1:]
        total = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), target.flatten(), reduction="sum")
        return float(total), int((target != -100).sum())
