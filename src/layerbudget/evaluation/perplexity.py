"""Perplexity, one definition.

The text is tokenised once, document after document; the stream is cut into non-overlapping windows of
``length`` tokens, the remainder is dropped; each window predicts its tokens 2..length from those before::

    perplexity = exp( (1/N) sum of the negative log-likelihoods in nats ),   N = windows x (length - 1)

Of the names ``wikitext2`` and ``c4`` this is the figure of the Wanda, SparseGPT and GPTQ references, in float32: the rows of
the split are joined and tokenised once (:class:`layerbudget.data.text.Reference`). Of the same rows under another name, as a
local file or ``Salesforce/wikitext:...``, every row is a document, and the figure is another one. It depends on ``length``
(papers use 2048): figures of different lengths cannot be compared, so the length travels with them.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..arguments import checked
from ..data.calibration import CalibrationSet, check_fits
from ..data.encoding import IGNORE
from ..data.text import calibration
from ..errors import BadModel, InvalidInput
from ..execution.divergence import next_tokens, token_losses
from ..execution.loss import Batch, head_of
from ..execution.modes import inference, overflowed
from ..execution.outputs import Outputs
from ..execution.processes import process_group, shard
from ..progress import Progress, Steps
from ..sensitivity.sequences import need_predictions, per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A perplexity with everything that it depends on; its standard error is over windows (delta method).

    ``digest`` is that of the windows, ``text`` that of the whole source: a plan made on it has the same in its ``data``.
    ``nll`` has the mean negative log-likelihood of each window, nats per token, which pairs with another model's on the same
    text, and ``counts`` the predicted tokens of each, its weight in a comparison.
    """

    value: float
    standard_error: float
    tokens: int
    length: int
    windows: int
    source: str
    digest: str
    text: str | None
    nll: tuple[float, ...]
    counts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the per-window values."""
        record = dataclasses.asdict(self)
        del record["nll"], record["counts"]
        return record


@checked
def evaluation_set(source: Path | str, tokenizer: Any, *, length: int = 256, windows: int | None = None) -> CalibrationSet:
    """The windows that :func:`perplexity` reads, in order; all of them when ``windows`` is ``None``.

    Conversations and answers are rows of their own, of at most ``length`` tokens, read on the answers only.

    Raises:
        NotEnoughText: Less than one window.
    """
    return calibration(source, tokenizer, samples=windows, length=length, group="evaluation", shuffle=False)


def _targets(data: CalibrationSet) -> torch.Tensor:
    """Tokens that the model is to predict, ``(samples, length - 1)``; -100 where it is not asked."""
    return next_tokens(data.input_ids if data.labels is None else data.labels, None)


def predicted(data: CalibrationSet) -> np.ndarray:
    """Predicted tokens of every window, ``(samples,)``."""
    return (_targets(data) != IGNORE).sum(1).numpy()


def _runs(data: CalibrationSet, size: int, device: torch.device) -> list[Batch]:
    """Batches whose targets are next tokens, ``(B, T)``; the last position has none."""
    targets = F.pad(_targets(data), (0, 1), value=IGNORE).to(device)
    starts = range(0, data.samples, size)
    return [
        Batch(rows=slice(i, i + len(targets[i : i + size])), args=(), kwargs=inputs, targets=targets[i : i + size], keys=())
        for i, inputs in zip(starts, data.batches(size, device), strict=True)
    ]


def _sequence_losses(model: nn.Module, batch: Batch, outputs: Outputs) -> torch.Tensor:
    """Summed token losses of every sequence in nats, ``(B,)`` float64."""
    losses = []
    for places, logits in outputs.of(batch):
        if logits is None or logits.ndim != 3:
            raise BadModel(f"{type(model).__name__} gives no token logits.", "", "Perplexity needs a causal language model.")
        losses.append(token_losses(logits, batch.targets[:, places]))
    return torch.cat(losses, 1)[:, :-1].double().sum(1)


@checked
def perplexity(
    model: nn.Module,
    data: CalibrationSet,
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity of a causal language model on the windows of ``data``; with labels, on the labelled tokens.

    Raises:
        BadModel: The model gives no token logits, or logits that are not finite.
        InvalidInput: Windows with padding and no labels.
    """
    if data.labels is None and data.attention_mask is not None and not bool(data.attention_mask.all()):
        raise InvalidInput(
            "The windows hold padding, whose predictions would count.",
            "Perplexity is defined on whole windows.",
            "Cut the text with evaluation_set, or drop the padded rows.",
        )
    if head_of(model) != "causal":
        raise BadModel(f"{type(model).__name__} predicts no next token.", "", "Perplexity needs a causal language model.")
    check_fits(model, data)
    group, counts = process_group(), predicted(data)
    group.check_shares([data.samples], option="--windows")
    need_predictions(counts)
    mine = shard(data)
    runs = _runs(mine, batch_size, next(model.parameters()).device)
    losses: list[np.ndarray] = []
    with inference(model):
        tick, outputs = Steps(progress, mine.samples), Outputs(model, runs)
        for batch in runs:
            losses.append(_sequence_losses(model, batch, outputs).cpu().numpy())
            tick(batch.size)
    sums = group.collect(np.concatenate(losses), data.samples)
    rows = sums / np.maximum(counts, 1)
    if not np.isfinite(rows).all():
        raise overflowed("The model's losses on this text", next(model.parameters()).dtype)
    mean, spread = per_token(sums, counts)
    value = math.exp(min(mean, 700.0))
    return Evaluation(
        value=value,
        standard_error=value * spread,
        tokens=int(counts.sum()),
        length=data.length,
        windows=data.samples,
        source=data.source,
        digest=data.digest,
        text=data.text,
        nll=tuple(float(v) for v in rows),
        counts=tuple(int(v) for v in counts),
    )
