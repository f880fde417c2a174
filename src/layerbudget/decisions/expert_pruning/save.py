"""The files of a model that lost experts: an ordinary transformers checkpoint beside its plan, its receipt and a card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ...canonical import dumps
from ...models.blocks import pretrained
from ...models.card import loading, model_card
from ...models.machine import versions
from ...plan import Plan
from ...records import SCHEMA_VERSION
from ...storage.folders import write_model
from ...storage.writing import write_text
from .apply import ExpertReceipt


def save_experts_kept(
    model: nn.Module, tokenizer: Any, plan: Plan, receipt: ExpertReceipt, out_dir: Path | str, *, overwrite: bool = False
) -> Path:
    """Write checkpoint, tokenizer, plan, receipt and a model card (README.md); return the folder.

    The folder appears complete or not at all.

    Args:
        model: The smaller model.
        tokenizer: Saved beside it where it is not None.
        plan: Written as ``plan.json``.
        receipt: Written as ``receipt.json``.
        out_dir: Must not exist, or be empty.
        overwrite: Replace what an earlier call wrote: the files that the folder's ``manifest.json`` names, and no others.

    Raises:
        AlreadyExists: The folder exists and is not empty (with ``overwrite``: and is none of ours).
    """
    name = type(pretrained(model)).__name__
    card = card_of(plan, receipt, loading(name, alike=receipt.even), architecture=name, tags=("pruned", "moe"))
    side_files: dict[str, Callable[[Path], object]] = {
        "plan.json": plan.save,
        "receipt.json": partial(write_text, text=record_of(receipt)),
        "README.md": partial(write_text, text=card),
    }
    return write_model(pretrained(model), tokenizer, out_dir, side_files, overwrite=overwrite)


def record_of(receipt: ExpertReceipt) -> str:
    """Return the content of ``receipt.json``."""
    content = {"schema_version": SCHEMA_VERSION, "plan_digest": receipt.plan_digest, **receipt.counted()}
    return dumps({**content, "versions": versions()})


def card_of(plan: Plan, receipt: ExpertReceipt, use: str, **options: Any) -> str:
    """Return the model card of a model that lost experts; ``use`` and the options are those of ``model_card``."""
    rows = {
        "experts": f"{receipt.experts['after']} of {receipt.experts['before']}",
        "parameters": f"{receipt.parameters['before']:,} before, {receipt.parameters['after']:,} now",
        "of a token": f"{receipt.active['after']:,} parameters",
    }
    what = "with fewer experts and the same routing among them. `plan.json` says which stay, `receipt.json` what was counted."
    return model_card(plan, "finetune", "left with fewer experts", what, rows, use, **options)
