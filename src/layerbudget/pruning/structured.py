"""Removal that runs faster today: whole blocks (depth), and inner units of the MLPs (width).

The result is an ordinary smaller dense checkpoint. A plain config has one width for all MLPs, so uneven widths work in
memory but cannot be exported; :func:`check_exportable` says so with the nearest even width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ..blocks import layers
from ..errors import UnknownStructure
from .depth import apply_depth, drop_damage, drop_layers, plan_depth
from .mlp import find_mlp
from .save import check_output
from .width import narrow

__all__ = [
    "apply_depth", "check_exportable", "drop_damage", "drop_layers", "narrow", "plan_depth", "save_smaller",
]  # fmt: skip


def check_exportable(model: nn.Module) -> None:
    """Refuse a model whose widths differ between layers.

    Raises:
        UnknownStructure: A plain config has one field for the width of all MLPs.
    """
    widths = []
    for name, layer in layers(model):
        try:
            widths.append(find_mlp(layer, name).width)
        except UnknownStructure:
            return
    if len(set(widths)) > 1:
        mean = round(sum(widths) / len(widths))
        raise UnknownStructure(
            f"The MLPs have widths {min(widths)} to {max(widths)}.",
            f"{type(model.config).__name__} has one width for all layers, so transformers could not load the checkpoint.",
            f"Narrow all layers to the same width (about {mean} costs the same).",
        )


def save_smaller(model: nn.Module, tokenizer: Any, out_dir: Path | str) -> Path:
    """Write a depth- or width-pruned model as an ordinary smaller checkpoint.

    Raises:
        UnknownStructure: Uneven widths.
        AlreadyExists: The folder holds something.
    """
    check_exportable(model)
    out = check_output(out_dir)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    return out
