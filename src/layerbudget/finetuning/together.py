r"""Fine-tuning in several processes: every step learns the rows that one process would have learnt.

A step of B rows in P passes (accumulation) has passes of ``b = B / P`` rows, in the order that one process draws; process r
of N takes every N-th row of a pass. With ``l_i`` the loss of a learned token (of a row, under a head) and n their number in the
whole step, over all processes and passes, each process differentiates ``N / n sum_i l_i`` over its own, and the mean over
processes that DDP takes is the gradient of ``1 / n sum_i l_i``: that of one process, up to the order of sums. Where the last
pass of an epoch has fewer rows than processes, those without one run a row of which nothing is learned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer

from ..data.encoding import IGNORE
from ..errors import InvalidInput
from ..execution.processes import ProcessGroup, process_group
from .base import Loader, NamedLoader
from .protocol import Protocol

_ENGINES = {  # of accelerate, by the variable that it sets for the processes it starts
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}  # fmt: skip


def check(protocol: Protocol, load: Loader, moved: Sequence[Any], *, bf16: bool) -> None:
    """Refuse what several processes cannot share, before anything is written; nothing where there is one.

    Args:
        protocol: Numbers of the run.
        load: The model's loader.
        moved: Callbacks that change numbers.
        bf16: Whether bfloat16 autocast was asked for.

    Raises:
        InvalidInput: Processes that did not join; a batch that does not divide; a balance loss, a start in gradients, a
            re-plan, a base in 4 bits; engines of accelerate other than DDP and FSDP, and its mixed precision.
    """
    started, found = int(os.environ.get("WORLD_SIZE", "1")), process_group()
    if started < 2 and found is None:
        return
    if found is None:
        raise InvalidInput(
            f"This is one of {started} processes, which have not joined.", "They find one another before the model is loaded.",
            "Start `torchrun -m layerbudget finetune ...`, or call layerbudget.execution.processes.join() first.",
        )  # fmt: skip
    parts = protocol.accumulation * found.size
    if protocol.batch % parts:
        passes = f" in {protocol.accumulation} passes" if protocol.accumulation > 1 else ""
        raise InvalidInput(
            f"A batch of {protocol.batch} rows{passes} does not divide between {found.size} processes.",
            f"It is a multiple of {parts}: the batch of all processes together stays what it is with one.",
            f"Use --batch {max(parts, protocol.batch // parts * parts)}, or another number of processes.",
        )
    named = isinstance(load, NamedLoader) and load.settings.get("quantised")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    for refused, what, remedy in (
        (protocol.balance, "The balance loss (--balance)", "Leave it out: it is a product of shares of a whole batch."),
        (protocol.start != "default", "A start in the task's gradients (--start)", "Leave it out: PEFT's own start is shared."),
        (moved, "A re-plan (--replan)", "Plan before, and leave --replan out: parameters take other shapes."),
        (named, "A base in 4 bits (--four-bit)", "Use --dtype bfloat16."),
        (precision != "no" and not (precision == "bf16" and bf16), f"Accelerate's mixed precision {precision}", "Say --bf16."),
        *((os.environ.get(v, "").lower() in ("1", "true"), e, "Launch plain DDP, or FSDP.") for v, e in _ENGINES.items()),
    ):
        if refused:
            raise InvalidInput(f"{what} is not shared between processes.", f"There are {found.size}.", remedy)


class Shares(Sampler[list[int]]):
    """This process's rows of every forward pass, as indices; the index behind the last row is the row that teaches nothing.

    Args:
        rows: Number of rows.
        batch: Rows of one pass over all processes.
        seed: Seed of the order, as the Trainer seeds it.
        rank: Number of this process.
        size: Number of processes.
    """

    def __init__(self, rows: int, batch: int, seed: int, rank: int, size: int) -> None:
        self.rows, self.batch, self.rank, self.size = rows, batch, rank, size
        self.order = SeedableRandomSampler(range(rows), data_seed=seed)

    def __len__(self) -> int:
        """Passes in an epoch."""
        return math.ceil(self.rows / self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Pass by pass."""
        order = list(self.order)
        for start in range(0, self.rows, self.batch):
            yield order[start : start + self.batch][self.rank :: self.size] or [self.rows]


class _Loader(DataLoader):  # type: ignore[type-arg]
    """A loader whose order the Trainer moves on with the epochs."""

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.batch_sampler.order.set_epoch(epoch)  # type: ignore[union-attr]


def _head_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Sum over this process's rows, divided by the rows of all."""
    total = nn.functional.cross_entropy(outputs.logits, labels, reduction="sum", ignore_index=IGNORE)
    return total / (labels != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else total / num_items_in_batch


class SharedTrainer(Trainer):
    """A Trainer whose processes share every forward pass.

    Args:
        together: The processes.
        rows: Training rows, the same in every process.
        batch: Rows of one pass over all processes.
        causal: Whether a language model is trained (else a head).
        options: The Trainer's.
    """

    def __init__(
        self, together: ProcessGroup, rows: Sequence[Mapping[str, Any]], batch: int, *, causal: bool, **options: Any
    ) -> None:
        labels = rows[0]["labels"]
        blank = {**rows[0], "labels": [IGNORE] * len(labels) if causal else IGNORE}
        self.share = Shares(len(rows), batch, options["args"].seed, together.rank, together.size)
        super().__init__(train_dataset=[*rows, blank], compute_loss_func=None if causal else _head_loss, **options)  # type: ignore[arg-type]
        torch.manual_seed(options["args"].seed + 1_000_003 * together.rank)  # dropout differs between processes

    def get_train_dataloader(self) -> DataLoader:  # type: ignore[type-arg]
        """This process's passes."""
        return _Loader(self.train_dataset, batch_sampler=self.share, collate_fn=self.data_collator)  # type: ignore[arg-type]
