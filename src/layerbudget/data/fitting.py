"""Whether a model can read a set of tokens: their ids, and their number per sequence. Asked before anything is computed."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..errors import InvalidInput, UnknownStructure


def check_reads_text(model: nn.Module) -> None:
    """Refuse a model that takes no tokens: of images, of sound.

    Args:
        model: The model; a plain module, which says nothing of its inputs, passes.

    Raises:
        UnknownStructure: Says what it reads.
    """
    wants = getattr(model, "main_input_name", "input_ids")
    if wants != "input_ids" and "input_ids" not in inspect.signature(model.forward).parameters:
        raise UnknownStructure(
            f"{type(model).__name__} reads {wants}, no tokens.", "Scores, damages and perplexity are measured on text.",
            "Use a language model or a text encoder.",
        )  # fmt: skip


def check_fits(model: nn.Module, data: Any) -> None:
    """Refuse tokens that the model has no embedding for, and sequences longer than its positions.

    Args:
        model: The model.
        data: A calibration set; anything without ``input_ids`` fits.

    Raises:
        InvalidInput: Says what does not fit.
        UnknownStructure: The model takes no tokens.
    """
    ids, config = getattr(data, "input_ids", None), getattr(model, "config", None)
    if ids is None or config is None:
        return
    check_reads_text(model)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0 and ids.shape[1] > positions:
        raise InvalidInput(
            f"The sequences have {ids.shape[1]} tokens.", f"The model has positions for {positions}.",
            f"Use --length {positions} or less.",
        )  # fmt: skip
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(getattr(embedding, "weight", None), "shape", (None,))[0]
    if rows is not None and int(ids.max()) >= rows:
        raise InvalidInput(
            f"The text has the token {int(ids.max())}.", f"The model has embeddings for tokens below {rows}.",
            "Use the tokenizer that belongs to the model.",
        )  # fmt: skip
