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
from .encoding import IGNORE


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
    #: Content hash of the whole text of the source, whichever samples are drawn of it. Equal where two sets are of one text.
    text: str | None = None
    rows: int | None = None  #: Rows of the source, of which samples were drawn; ``None`` where it has no rows of its own.
    completion_tokens: int | None = (
        None  #: Tokens of all these rows that training learns, each row cut as ``finetune`` cuts it.
    )

    def __post_init__(self) -> None:
        for name in ("input_ids", "attention_mask", "labels"):
            if name == "input_ids" or getattr(self, name) is not None:
                object.__setattr__(self, name, _whole_numbers(name, getattr(self, name)))
        shape = tuple(self.input_ids.shape)
        if len(shape) != 2 or not self.input_ids.numel():
            problem = f"The calibration set has shape {shape}."
            raise InvalidInput(problem, "It must be samples x length with at least one token.", "Give more text.")
        for name, shapes in (("attention_mask", [shape]), ("labels", [shape, shape[:1]])):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) not in shapes:
                problem = f"{name} has shape {tuple(value.shape)} for input_ids of shape {shape}."
                raise InvalidInput(problem, f"It must have shape {' or '.join(map(str, shapes))}.", "Cut or pad them together.")
        self._check_values()

    def _check_values(self) -> None:
        """Refuse numbers that no model reads, whatever its vocabulary."""
        ids, mask, labels = self.input_ids, self.attention_mask, self.labels
        if ids.min() < 0:
            problem = f"input_ids has the token {int(ids.min())}."
            raise InvalidInput(problem, "Tokens are 0 or more.", "Give padding a token too, and 0 in attention_mask.")
        if mask is not None and (mask.min() < 0 or mask.max() > 1):
            problem = f"attention_mask has values from {int(mask.min())} to {int(mask.max())}."
            raise InvalidInput(problem, "It is 1 for real tokens and 0 for padding.", "Give (mask > 0).long().")
        wrong = None if labels is None else labels[(labels < 0) & (labels != IGNORE)]
        if wrong is not None and wrong.numel():
            problem = f"labels has the value {int(wrong[0])}."
            raise InvalidInput(problem, f"Labels are 0 or more, or {IGNORE} for no loss.", f"Write {IGNORE} there.")

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
        """``{source, samples, length, digest, seed}``, as the files carry it, ``text`` where known, ``tokens`` if padded."""
        description = {name: getattr(self, name) for name in ("source", "samples", "length", "digest", "seed")}
        description |= {} if self.text is None else {"text": self.text}
        return description if self.tokens == self.input_ids.numel() else {**description, "tokens": self.tokens}

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


def _whole_numbers(name: str, value: Any) -> torch.Tensor:
    """The tensor as int64; refused where it is no tensor, or its numbers are no whole ones (a mask may be of 0.0 and 1.0)."""
    if not isinstance(value, torch.Tensor):
        problem = f"{name} is of type {type(value).__name__}."
        raise InvalidInput(problem, "It should be a tensor.", "Give torch.as_tensor of it.")
    whole = not value.is_floating_point() and not value.is_complex()
    if name == "attention_mask" and value.is_floating_point():
        whole = bool((value == value.round()).all())
    if not whole:
        raise InvalidInput(f"{name} is of type {value.dtype}.", "It should hold whole numbers.", "Give it as torch.int64.")
    return value.to(torch.int64)


def check_reads_text(model: nn.Module) -> None:
    """Refuse a model that takes no tokens: of images, of sound. A plain module, which says nothing of its inputs, passes."""
    wants = getattr(model, "main_input_name", "input_ids")
    if wants != "input_ids" and "input_ids" not in inspect.signature(model.forward).parameters:
        problem, reason = (
            f"{type(model).__name__} reads {wants}, no tokens.",
            "Scores, damages and perplexity are measured on text.",
        )
        raise UnknownStructure(problem, reason, "Use a language model or a text encoder.")


def positions_of(model: nn.Module) -> int | None:
    """The longest sequence that a model has positions for; ``None`` where nothing says so.

    RoBERTa and its kin count positions from behind the padding: two of 514 cannot be used.
    """
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and padding is not None:
            return min(limit, module.num_embeddings - padding - 1)
    return limit


def check_ids(model: nn.Module, longest: int, largest: int, option: str) -> None:
    """Refuse sequences that are longer than the positions of a model, and tokens that it has no embedding for.

    Args:
        model: The model that is to read them.
        longest: Tokens of the longest sequence.
        largest: The largest token.
        option: What sets the length, as it is typed: ``--length``.
    """
    positions = positions_of(model)
    if positions is not None and positions < longest:
        problem = f"The sequences have {longest} tokens."
        raise InvalidInput(problem, f"The model has positions for {positions}.", f"Use {option} {positions} or less.")
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(getattr(embedding, "weight", None), "shape", (None,))[0]
    if rows is not None and largest >= rows:
        problem, known = f"The text has the token {largest}.", f"The model has embeddings for tokens below {rows}."
        added = "or, of a token that was added to it, resize the model's embeddings (resize_token_embeddings) and save it"
        raise InvalidInput(problem, known, f"Use the tokenizer that belongs to the model, {added}.")


def check_fits(model: nn.Module, data: Any) -> None:
    """Refuse tokens that the model has no embedding for, and sequences longer than its positions.

    Anything without ``input_ids`` fits.
    """
    ids = getattr(data, "input_ids", None)
    if ids is None or getattr(model, "config", None) is None:
        return
    check_reads_text(model)
    check_ids(model, ids.shape[1], int(ids.max()), "--length")
    if data.labels is not None and "Classification" not in type(model).__name__:
        check_labels(model, data.labels)


def check_labels(model: nn.Module, labels: torch.Tensor) -> None:
    """Refuse labels that the model has no output for: tokens of a language model, classes of another head."""
    if "Classification" in type(model).__name__:
        outputs = getattr(getattr(model, "config", None), "num_labels", None)
    else:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        outputs = getattr(head, "out_features", None)
    largest = int(labels.max())
    if outputs is not None and largest >= outputs:
        known = f"{type(model).__name__} has outputs for labels below {outputs}."
        raise InvalidInput(f"The data has the label {largest}.", known, f"Write {IGNORE} where no loss is to be taken.")
