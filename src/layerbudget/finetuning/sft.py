"""Training by TRL's ``SFTTrainer``: the plan's adapters, and the rows, tokens and mask of the trainer of this package.

Rows come tokenised, with ``labels`` of -100 where nothing is learned, so that TRL prepares nothing: it draws them in the order
of the seed, pads them by its own collator (packs, which have positions of their own, by that of
:mod:`layerbudget.finetuning.text_rows`), and takes its own loss. Numbers of the run are the protocol's; TRL's own defaults
(bfloat16,
checkpointing, truncation) do not apply.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import InvalidInput, MissingDependency
from ..execution.processes import process_group
from .base import Loader, NamedLoader

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import Trainer, TrainingArguments

    from .protocol import Protocol
    from .text_rows import TextRows


def check(protocol: Protocol, load: Loader, moved: Sequence[Any] = ()) -> None:
    """Refuse what SFTTrainer is not given here, before anything is loaded; nothing for another trainer.

    Raises:
        MissingDependency: TRL is not installed.
        InvalidInput: Several processes, a base in 4 bits (TRL trains its adapters in bfloat16), a re-plan.
    """
    if protocol.trainer != "trl":
        return
    if importlib.util.find_spec("trl") is None:
        raise MissingDependency(
            "The trainer trl needs TRL, which is not installed.", "", "pip install 'layerbudget[trl]', or leave --trainer out."
        )
    settings = load.settings if isinstance(load, NamedLoader) else {}
    for given, what in (
        (process_group() is not None, "several processes"), (settings.get("quantised"), "a base in 4 bits"),
        (bool(moved), "a re-plan in mid-training"),
    ):  # fmt: skip
        if given:
            raise InvalidInput(
                f"The trainer trl does not take {what}.", "It trains ranks on rows of text in one process.",
                "Leave --trainer out: the trainer of this package does.",
            )  # fmt: skip


def packages(protocol: Protocol) -> tuple[str, ...]:
    """Packages whose version the result depends on."""
    return ("trl",) if protocol.trainer == "trl" else ()


def sft_trainer(
    model: nn.Module, arguments: TrainingArguments, read: Sequence[dict[str, Any]], rows: TextRows, callbacks: Sequence[Any]
) -> Trainer:  # fmt: skip
    """The SFTTrainer of one seed.

    Args:
        model: The base with the plan's adapters.
        arguments: Numbers of the run.
        read: Rows or packs: ``input_ids`` and ``labels``.
        rows: Their encoder.
        callbacks: Of the Trainer.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    own = {name: value for name, value in arguments.to_dict().items() if not str(value).startswith("<")}  # hidden tokens
    config = SFTConfig(**own, max_length=None, packing=False, dataset_kwargs={"skip_prepare_dataset": True})
    config._n_gpu = min(config.n_gpu, 1)
    return SFTTrainer(
        model=cast("PeftModel", model), args=config, train_dataset=Dataset.from_list(list(read)),
        processing_class=rows.tokenizer, data_collator=rows.collate if rows.packing else None, callbacks=list(callbacks),
    )  # fmt: skip
