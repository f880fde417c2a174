"""A calibration set: a token matrix with its provenance, and whether a model can read it."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import InvalidInput, UnknownStructure


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationSet:
    """``samples x length`` tokens, and what a loss needs beside them."""

    input_ids: torch.Tensor  #: ``(samples, length)`` token ids, int64.
    attention_mask: torch.Tensor | None = None  #: ``(samples, length)``, 1 for real tokens; ``None`` when there is no padding.
    #: ``(samples,)`` class labels for a head; ``(samples, length)`` token labels with -100 where no loss is taken; ``None`` for
    #: plain language modelling (labels are the inputs, padding excluded).
    labels: torch.Tensor | None = None
    source: str = "own tensors"  #: What the user named (``stdlib``, a file, a hub dataset).
    seed: int = 0  #: Seed of the sampling.
    #: Content hash of the whole text of the source, whichever samples are drawn of it: whether two sets are of one text.
    text: str | None = None
    rows: int | None = None  #: Rows of the source, of which samples were drawn; ``None`` where it has no rows of its own.
    completion_tokens: int | None = (
        None  #: Tokens of all these rows that training learns, each row cut as ``finetune`` cuts it.
    )

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 2 or not self.input_ids.numel():
            told = f"The calibration set has shape {tuple(self.input_ids.shape)}."
            raise InvalidInput(told, "It must be samples x length with at least one token.", "Give more text.")
        for name in ("attention_mask", "labels"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.input_ids):
                told = f"{name} has {len(value)} rows for {len(self.input_ids)} samples."
                raise InvalidInput(told, "", "Give one per sample.")

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def samples(self) -> int:
        """Number of sequences."""
        return int(self.input_ids.shape[0])

    @property
    def length(self) -> int:
        """Tokens per sequence, padding included."""
        return int(self.input_ids.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return int(self.input_ids.numel() if self.attention_mask is None else self.attention_mask.sum())

    @property
    def digest(self) -> str:
        """Content hash of the tokens, the mask and the labels."""
        h = hashlib.sha256()
        for tensor in (self.input_ids, self.attention_mask, self.labels):
            if tensor is not None:
                h.update(str(tuple(tensor.shape)).encode())
                h.update(tensor.to(torch.int64).cpu().numpy().tobytes())
        return h.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """``{source, samples, length, digest, seed}``, as the files carry it; ``text`` where it is known, ``tokens`` of padded text."""
        found = {name: getattr(self, name) for name in ("source", "samples", "length", "digest", "seed")}
        found |= {} if self.text is None else {"text": self.text}
        return found if self.tokens == self.input_ids.numel() else {**found, "tokens": self.tokens}

    def of_rows(self) -> dict[str, int]:
        """``{rows, completion_tokens}`` of the source, where it has rows."""
        named = {name: getattr(self, name) for name in ("rows", "completion_tokens")}
        return {name: value for name, value in named.items() if value is not None}

    def select(self, rows: slice | torch.Tensor | list[int]) -> CalibrationSet:
        """Return the same set restricted to some rows."""
        mask, labels = (None if v is None else v[rows] for v in (self.attention_mask, self.labels))
        return dataclasses.replace(self, input_ids=self.input_ids[rows], attention_mask=mask, labels=labels)

    def batches(self, size: int, device: torch.device | str = "cpu") -> Iterator[dict[str, torch.Tensor]]:
        """Yield keyword arguments for ``model(**batch)`` (without labels), ``size`` sequences at a time."""
        for start in range(0, self.samples, size):
            rows = slice(start, start + size)
            batch = {"input_ids": self.input_ids[rows].to(device)}
            if self.attention_mask is not None:
                batch["attention_mask"] = self.attention_mask[rows].to(device)
            yield batch


def check_reads_text(model: nn.Module) -> None:
    """Refuse a model that takes no tokens: of images, of sound. A plain module, which says nothing of its inputs, passes."""
    wants = getattr(model, "main_input_name", "input_ids")
    if wants != "input_ids" and "input_ids" not in inspect.signature(model.forward).parameters:
        told, reason = (
            f"{type(model).__name__} reads {wants}, no tokens.",
            "Scores, damages and perplexity are measured on text.",
        )
        raise UnknownStructure(told, reason, "Use a language model or a text encoder.")


def check_fits(model: nn.Module, data: Any) -> None:
    """Refuse tokens that the model has no embedding for, and sequences longer than its positions.

    Anything without ``input_ids`` fits.
    """
    ids, config = getattr(data, "input_ids", None), getattr(model, "config", None)
    if ids is None or config is None:
        return
    check_reads_text(model)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < ids.shape[1]:
        told = f"The sequences have {ids.shape[1]} tokens."
        raise InvalidInput(told, f"The model has positions for {positions}.", f"Use --length {positions} or less.")
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(getattr(embedding, "weight", None), "shape", (None,))[0]
    if rows is not None and int(ids.max()) >= rows:
        told, known = f"The text has the token {int(ids.max())}.", f"The model has embeddings for tokens below {rows}."
        raise InvalidInput(told, known, "Use the tokenizer that belongs to the model.")
