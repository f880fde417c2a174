"""The loss that gains are measured in: summed over the tokens of each sequence, divided by all tokens at the end.

``L(theta) = (1/N) sum_i l_i``, ``l_i`` the *summed* token loss of sequence i and N the number of target tokens: the mean
token loss. Per-sequence means would rescale every damping by the sequence length.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..data.calibration import CalibrationSet, check_labels, check_reads_text
from ..errors import InvalidInput, UnknownStructure

IGNORE = -100


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSet:
    """Feature vectors with class labels: what a :class:`CalibrationSet` is for a plain classifier.

    Attributes:
        inputs: ``(samples, d)`` features, floating point.
        labels: ``(samples,)`` class labels, int64.
        source: What the user named.
        seed: Seed of the sampling.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    source: str = "own tensors"
    seed: int = 0

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.inputs.shape[0])

    @property
    def length(self) -> int:
        """Tokens of a sample, which is one."""
        return 1

    @property
    def digest(self) -> str:
        """Content hash of features and labels."""
        h = hashlib.sha256(self.inputs.detach().double().cpu().numpy().tobytes())
        h.update(self.labels.cpu().numpy().tobytes())
        return h.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """``{source, samples, length, digest, seed}``, as the files carry it."""
        return {"source": self.source, "samples": self.samples, "length": 1, "digest": self.digest, "seed": self.seed}

    def select(self, rows: slice | torch.Tensor | list[int]) -> FeatureSet:
        """Return the same set restricted to some rows."""
        return dataclasses.replace(self, inputs=self.inputs[rows], labels=self.labels[rows])


Data = CalibrationSet | FeatureSet


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Some sequences on the model's device.

    Attributes:
        rows: Their place in the data.
        args, kwargs: Positional and keyword arguments of the model.
        targets: ``(B, T)`` next-token or token labels (-100: no loss), or ``(B,)`` class labels.
        keys: One content hash per sequence; random labels are drawn from it, so order and batch size do not matter.
        piece: Of a batch that is some positions of another one: how many of its targets in every sequence come before these,
            and how many there are in all, ``(B,)`` each.
        places: Which positions of that other one they are; all of them by default.
    """

    rows: slice
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    targets: torch.Tensor
    keys: tuple[int, ...]
    piece: tuple[torch.Tensor, torch.Tensor] | None = None
    places: slice = dataclasses.field(default_factory=lambda: slice(None))

    def at(self, places: slice) -> Batch:
        """Return the batch that is some positions of all sequences, for heads that look at every position by itself."""
        counts = self.targets != IGNORE
        return dataclasses.replace(
            self,
            kwargs={name: value[:, places] for name, value in self.kwargs.items()},
            targets=self.targets[:, places],
            piece=(counts[:, : places.start].sum(1), counts.sum(1)),
            places=places,
        )

    @property
    def size(self) -> int:
        """Number of sequences."""
        return self.rows.stop - self.rows.start

    @property
    def length(self) -> int:
        """Positions of a sequence."""
        if self.targets.ndim == 2:
            return int(self.targets.shape[1])
        return int(next(iter(self.kwargs.values())).shape[1]) if self.kwargs else 1


def head_of(model: nn.Module) -> str:
    """``causal`` (next token), ``token`` (labels at their own place) or ``classes`` (one label per sequence)."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None:
        return "classes"
    check_reads_text(model)
    if getattr(config, "return_dict", True) is False:  # most models of transformers then fail inside of themselves
        problem = "The configuration of the model has return_dict=False."
        raise InvalidInput(problem, "Its outputs are read by their names.", "Set model.config.return_dict = True.")
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownStructure(
            f"{name} is an encoder-decoder.",
            "Gains are defined here for decoders and encoders with one input.",
            "Take one of those: no option makes this one work.",
        )
    if "SequenceClassification" in name and getattr(config, "num_labels", 2) == 1:
        raise InvalidInput(
            f"{name} has one label, a regression.", "Gains need two or more classes.", "Load it with num_labels=2."
        )
    if "MaskedLM" in name or "TokenClassification" in name or "ForPreTraining" in name:
        return "token"
    if "SequenceClassification" in name:
        return "classes"
    if getattr(model, "get_output_embeddings", lambda: None)() is None and "LM" not in name:
        raise UnknownStructure(
            f"{name} has no head, so it has no loss to take a gradient of.",
            "Gains need a causal LM, a masked LM or a classification head.",
            "Take a checkpoint whose config.json names a class with a head, for example MistralForCausalLM.",
        )
    return "causal"


def targets_of(model: nn.Module, data: Data) -> torch.Tensor:
    """Labels aligned with the logits, ``(samples, length)`` int64, or ``(samples,)`` for class labels.

    Entry t is what logit t predicts, -100 where no loss is taken.
    """
    head = head_of(model)
    if isinstance(data, FeatureSet):
        return data.labels
    labels, mask = data.labels, data.attention_mask
    if labels is not None:
        wanted, each = ((data.samples,), "sample") if head == "classes" else ((data.samples, data.length), "token")
        if tuple(labels.shape) != wanted:
            problem = f"The labels have shape {tuple(labels.shape)}."
            raise InvalidInput(problem, f"{type(model).__name__} learns one per {each}.", f"Give them in shape {wanted}.")
        check_labels(model, labels)
    if head == "causal":
        labels = data.input_ids if labels is None else labels
        targets = torch.full_like(data.input_ids, IGNORE)
        targets[:, :-1] = labels[:, 1:]
        if mask is not None:
            real = mask.bool()
            targets[:, :-1][~(real[:, 1:] & real[:, :-1])] = IGNORE
    elif labels is None:
        raise InvalidInput(
            f"{type(model).__name__} needs labels and the data has none.",
            "One class per sequence for a classification head; masked tokens for a masked LM.",
            "Use --estimator outlier-ratio, which reads no labels; in Python give labels, or "
            "layerbudget.execution.loss.mask_tokens for a masked LM.",
        )
    else:
        targets = labels
    if not bool((targets != IGNORE).any()):
        raise InvalidInput("No token has a loss: every label is -100 or padding.", "", "Give longer sequences or other labels.")
    return targets


def pad_right(data: Data) -> Data:
    """The data with padding behind the tokens of every sequence, so that positions start at 0 and no row attends to nothing."""
    if isinstance(data, FeatureSet):
        return data
    mask, labels = data.attention_mask, data.labels
    if mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return data
    order = torch.argsort(mask, dim=1, descending=True, stable=True)
    return dataclasses.replace(
        data,
        input_ids=data.input_ids.gather(1, order),
        attention_mask=mask.gather(1, order),
        labels=labels.gather(1, order) if labels is not None and labels.ndim == 2 else labels,
    )


def mask_tokens(data: CalibrationSet, mask_token_id: int, *, fraction: float = 0.15, seed: int = 0) -> CalibrationSet:
    """The data with a fraction of its real tokens hidden, which are the labels of a masked LM (deterministic)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(data.input_ids.shape, generator=generator) < fraction
    if data.attention_mask is not None:
        hidden &= data.attention_mask.bool()
    labels = torch.where(hidden, data.input_ids, IGNORE)
    return dataclasses.replace(data, input_ids=torch.where(hidden, mask_token_id, data.input_ids), labels=labels)


def batches(model: nn.Module, data: Data, size: int) -> Iterator[Batch]:
    """Batches of the data on the model's device, targets included; padding moves behind the tokens."""
    data = pad_right(data)
    yield from _cut(model, data, targets_of(model, data), size)


def divergence_mask(model: nn.Module, data: Data) -> torch.Tensor:
    """Where the output's distribution counts: 0 there, else -100, shaped as the targets.

    It counts at all real tokens; where a causal LM's data has token labels (answers), at those that predict one.
    """
    if isinstance(data, FeatureSet) or head_of(model) == "classes":
        return torch.zeros(data.samples, dtype=torch.long)
    counts = torch.ones_like(data.input_ids) if data.attention_mask is None else data.attention_mask
    if data.labels is not None and data.labels.ndim == 2 and head_of(model) == "causal":
        counts = F.pad(data.labels[:, 1:] != IGNORE, (0, 1))
    return torch.zeros_like(data.input_ids).masked_fill(counts == 0, IGNORE)


def count_scored_tokens(model: nn.Module, data: Data) -> np.ndarray:
    """Tokens of every sequence at which the output's distribution counts, ``(samples,)``."""
    return (divergence_mask(model, pad_right(data)) != IGNORE).reshape(data.samples, -1).sum(1).cpu().numpy()


def assign_folds(counts: np.ndarray, folds: int) -> np.ndarray:
    """The fold of every sequence, ``(samples,)``: in turn among those that have answers, whose numbers are given.

    >>> assign_folds(np.array([5, 0, 3, 2]), 2)
    array([0, 0, 1, 0])
    """
    return np.maximum(np.cumsum(counts > 0) - 1, 0) % folds


def unlabelled(model: nn.Module, data: Data, size: int) -> Iterator[Batch]:
    """Batches for those who look at the output's distribution, not at labels: their targets are :func:`divergence_mask`."""
    data = pad_right(data)
    yield from _cut(model, data, divergence_mask(model, data), size)


def _cut(model: nn.Module, data: Data, targets: torch.Tensor, size: int) -> Iterator[Batch]:
    device = next(model.parameters()).device
    for start in range(0, data.samples, size):
        rows = slice(start, min(start + size, data.samples))
        args: tuple[torch.Tensor, ...]
        if isinstance(data, FeatureSet):
            args, kwargs, content = (data.inputs[rows].to(device),), {}, data.inputs[rows]
        else:
            content = data.input_ids[rows]
            args, kwargs = (), {"input_ids": content.to(device)}
            if data.attention_mask is not None:
                kwargs["attention_mask"] = data.attention_mask[rows].to(device)
                content = torch.where(data.attention_mask[rows].bool(), content, -1)
        yield Batch(
            rows=rows, args=args, kwargs=kwargs, targets=targets[rows].to(device), keys=tuple(_key(row) for row in content)
        )


def _key(row: torch.Tensor) -> int:
    row = row[row >= 0] if not row.is_floating_point() else row
    return int.from_bytes(hashlib.sha256(row.cpu().numpy().tobytes()).digest()[:7], "big")


def token_count(model: nn.Module, data: Data) -> int:
    """Number N of target tokens (of samples for class labels)."""
    return int((targets_of(model, data) != IGNORE).sum())


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's logits, ``(B, T, V)`` or ``(B, C)``, at least fp32."""
    out = model(*batch.args, **batch.kwargs)
    logits = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    if logits is None:
        raise UnknownStructure(
            f"{type(model).__name__} returns no logits.", "", "Load it with a language-model or classification head."
        )
    return logits if logits.dtype == torch.float64 else logits.float()


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``sum_i l_i``: cross entropy summed over every target of the batch."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def sampled_targets(logits: torch.Tensor, batch: Batch, seed: int) -> torch.Tensor:
    """Labels drawn from the model's own distribution, ``y ~ p(. | x)``, -100 where the batch has none.

    Each sequence draws from a generator of its own, seeded by its content: batch size, order and padding side do not
    change its labels.
    """
    return drawn_targets(logits, batch, [seed])[0]


@torch.no_grad()
def drawn_targets(logits: torch.Tensor, batch: Batch, seeds: Sequence[int]) -> list[torch.Tensor]:
    """Labels as :func:`sampled_targets` draws them, by each of several seeds."""
    flat_logits, flat = logits.reshape(len(batch.keys), -1, logits.shape[-1]), batch.targets.reshape(len(batch.keys), -1)
    drawn = [torch.full_like(flat, IGNORE) for _ in seeds]
    for i, key in enumerate(batch.keys):
        places = (flat[i] != IGNORE).nonzero()[:, 0]
        if not len(places):
            continue
        first, total = (0, len(places)) if batch.piece is None else (int(counts[i]) for counts in batch.piece)
        cumulative = flat_logits[i, places].softmax(-1).cumsum(-1)
        for labels, seed in zip(drawn, seeds, strict=True):
            generator = torch.Generator().manual_seed((key + 1_000_003 * seed) % (2**63))
            u = torch.rand(total, 1, generator=generator, dtype=torch.float64)[first : first + len(places)].to(
                cumulative.device
            )
            label = torch.searchsorted(cumulative, (u * cumulative[:, -1:]).to(cumulative.dtype))
            labels[i, places] = label[:, 0].clamp_max(logits.shape[-1] - 1)
    return [labels.reshape(batch.targets.shape) for labels in drawn]
