"""Whether a model can read a set of tokens: their ids, and their number per sequence. Asked before anything is computed."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import InvalidInput


def check_fits(model: nn.Module, data: Any) -> None:
    """Refuse tokens that the model has no embedding for, and sequences longer than its positions.

    Args:
        model: The model.
        data: A calibration set; anything without ``input_ids`` fits.

    Raises:
        InvalidInput: Says what does not fit.
    """
    ids, config = getattr(data, "input_ids", None), getattr(model, "config", None)
    if ids is None or config is None:
        return
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
