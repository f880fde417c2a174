"""How far a model's output is from another's: one KL divergence and one loss, over real tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..models.offload import mapped
from .inputs import InputStatistics
from .loss import IGNORE, pad_right, unlabelled
from .modes import inference, overflowed
from .outputs import Outputs
from .processes import process_group, shard
from .walk import Walk

_KEEP_BYTES = 256 << 20


def token_divergence(logits: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """``KL(p_t || q_t)`` in nats of every token; ``logits`` ``(..., V)`` are those of q, ``clean`` log-probabilities of p."""
    now = torch.log_softmax(logits.float(), dim=-1)
    return (clean.exp() * (clean - now)).sum(-1)


def kl_of_sequences(
    logits: torch.Tensor, clean: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum_t KL(p_t || q_t)`` of every sequence in nats over its real tokens, and how many these are, ``(B,)`` each.

    ``logits`` are those of q, ``clean`` the log-probabilities of p, ``(B, T, V)``, or ``(B, C)`` of a classifier; ``mask``
    ``(B, T)`` says which tokens are real.

    >>> p = torch.tensor([[0.5, 0.5]]).log()
    >>> nats, tokens = kl_of_sequences(torch.tensor([[0.25, 0.75]]).log(), p)
    >>> round(float(nats), 4), float(tokens)
    (0.1438, 1.0)
    """
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


def losses_of(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return what :func:`token_losses` does, of log-probabilities."""
    flat = log_probabilities.reshape(-1, log_probabilities.shape[-1])
    return F.nll_loss(flat, targets.reshape(-1), ignore_index=IGNORE, reduction="none").reshape(targets.shape)


def next_tokens(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Targets of ``logits[:, :-1]``, ``(B, T - 1)``; -100 for padding."""
    if ids.ndim != 2:
        problem = f"The labels have shape {tuple(ids.shape)}."
        raise InvalidInput(problem, "A language model predicts one per token.", "Give them in the shape of input_ids.")
    return (ids if mask is None else ids.masked_fill(~mask, IGNORE))[:, 1:]


def mean(total: float, tokens: float) -> float:
    """``total / tokens``, of all processes together."""
    both = process_group().sum(np.array([total, tokens]))
    return float(both[0] / both[1])


class Reference:
    """The output of the model as it is now on some text, kept to compare with; several processes share the sequences.

    Padding is moved behind the tokens; where the text has answers, only they are compared. ``listen`` gathers its statistics
    from the same forward. ``walk`` goes over this process's sequences, with the inputs of layer 0. Logits are made of some
    positions at a time, so that a large vocabulary takes little memory; so many ``others`` are held at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        data: CalibrationSet,
        batch_size: int,
        listen: InputStatistics | None = None,
        others: int = 0,
    ) -> None:
        self.others = others
        self.data = cast(CalibrationSet, pad_right(data))
        with inference(model):
            self.walk = Walk(model, shard(self.data), batch_size=batch_size)
            self.walk.capture()
            self.final = self.walk.finals() if listen is None else listen.finals(self.walk)
            self.runs = list(unlabelled(model, self.walk.data, batch_size))
            self.outputs = Outputs(model, self.runs)
        for hidden in self.final:
            if not bool(torch.isfinite(hidden).all()):
                raise overflowed("The hidden states of the model", hidden.dtype)
        self._clean: dict[tuple[int, int], torch.Tensor] = {}

    def clean(self, batch: int, places: slice = slice(None)) -> torch.Tensor:
        """The dense model's log-probabilities at some positions, ``(B, positions, V)``.

        They are kept where those of all the text are small, and made again by the head where they are not.
        """
        run, start = self.runs[batch], places.start or 0
        if (batch, start) in self._clean:
            return self._clean[batch, start]
        hidden = self.final[batch]
        if places != slice(None):
            run, hidden = run.at(places), hidden[:, places]
        with self.walk.replay.begin(len(self.walk), hidden):
            clean = torch.log_softmax(self.walk.model(**run.kwargs).logits.float(), dim=-1)
        if clean.nbytes * self.walk.batches * self.runs[batch].length * (1 + self.others) <= _KEEP_BYTES * run.length:
            self._clean[batch, start] = clean
        return clean

    def reached(self) -> float:
        """Mean divergence at the activations that the walk has stored behind the last layer, nats per token."""
        nats, tokens = self._each(self._behind)
        return mean(float(nats.sum()), float(tokens.sum()))

    def measure(self) -> float:
        """Mean divergence of the model as it is now, nats per token; one forward."""
        nats, tokens = self.measure_sequences()
        return mean(float(nats.sum()), float(tokens.sum()))

    def measure_sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """Divergence of the model as it is now on each of this process's sequences, in nats, and their tokens; one forward."""
        self.walk.replay.look()  # layers may have gone since
        with inference(self.walk.model):
            if mapped(self.walk.model) is None:
                return self._each(lambda batch: self.outputs.of(self.runs[batch]))
            self.walk.capture()
            while self.walk.position < len(self.walk):  # every layer comes once, for all batches
                self.walk.advance()
            return self._each(self._behind)

    def _behind(self, batch: int) -> Iterator[tuple[slice, torch.Tensor]]:
        return self.outputs.behind(self.walk.replay, self.runs[batch], self.walk.store.get(batch))

    def _each(self, outputs_of: Callable[[int], Iterator[tuple[slice, torch.Tensor]]]) -> tuple[np.ndarray, np.ndarray]:
        parts = []
        for batch, run in enumerate(self.runs):
            pieces = []
            for places, logits in outputs_of(batch):
                whole = run.targets.ndim != 2 or places == slice(0, run.length)
                piece, here = (run, slice(None)) if whole else (run.at(places), places)
                pieces.append(kl_of_sequences(logits, self.clean(batch, here), piece.targets != IGNORE))
            parts.append([torch.stack(part).sum(0) for part in zip(*pieces, strict=True)])
        nats, tokens = (torch.cat(part).double().cpu().numpy() for part in zip(*parts, strict=True))
        return nats, tokens
