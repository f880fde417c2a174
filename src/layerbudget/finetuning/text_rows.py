"""Rows of text as batches for a language model: padded, or packed without one row seeing another.

Packed rows stand one behind another in a sequence of at most ``cutoff`` tokens, positions starting anew with each; transformers
masks attention by those positions. First-fit by falling length wastes little; whether the model keeps rows apart is tried on
two of them before anything is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from ..data.encoding import IGNORE, Encoded, pad_of, padded
from ..data.tasks import Task
from ..data.text import Texts
from ..errors import InvalidInput
from ..execution.divergence import next_tokens, sequence_losses
from ..execution.processes import rounds, total
from .protocol import Protocol
from .rows import Rows, is_causal

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def pack(rows: Sequence[Encoded], limit: int) -> list[list[int]]:
    """Indices of the rows that share a sequence of at most ``limit`` tokens (first fit, longest first).

    >>> pack([Encoded((1,) * n, (1,) * n) for n in (5, 3, 2, 6)], 8)
    [[3, 2], [0, 1]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i].input_ids), i)):
        size = len(rows[i].input_ids)
        place = next((b for b, left in enumerate(room) if left >= size), None)
        if place is None:
            bins.append([i])
            room.append(limit - size)
        else:
            bins[place].append(i)
            room[place] -= size
    return bins


class TextRows:
    """Batches of text for one model.

    Args:
        task: The rows.
        tokenizer: The model's tokenizer.
        cutoff: Longest sequence in tokens.
        packing: Several rows in one sequence.
    """

    causal = True

    def __init__(self, task: Texts, tokenizer: Any, *, cutoff: int, packing: bool = False) -> None:
        self.task, self.cutoff, self.packing = task, cutoff, packing
        self.tokenizer, self.pad = tokenizer, pad_of(tokenizer)

    def encoded(self, examples: Sequence[Encoded]) -> list[dict[str, Any]]:
        """One entry per row."""
        return [{"input_ids": r.input_ids, "labels": r.labels} for r in examples]

    def training(self) -> list[dict[str, Any]]:
        """What the trainer reads: rows, or packs of them."""
        examples = self.task.train
        if not self.packing:
            return self.encoded(examples)
        return [self._packed([examples[i] for i in group]) for group in pack(examples, self.cutoff)]

    def _packed(self, rows: Sequence[Encoded]) -> dict[str, Any]:
        ids = [i for r in rows for i in r.input_ids]
        labels = [v for r in rows for v in (IGNORE, *r.labels[1:])]  # nothing before it predicts a row's first token
        return {"input_ids": ids, "labels": labels, "position_ids": [p for r in rows for p in range(len(r.input_ids))]}

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Pad rows or packs to a batch; a pack has positions instead of a mask."""
        batch = padded([Encoded(tuple(r["input_ids"]), tuple(r["labels"])) for r in rows], self.pad)
        if "position_ids" not in rows[0]:
            return batch
        del batch["attention_mask"]
        length = batch["input_ids"].shape[1]
        places = [[*r["position_ids"], *range(length - len(r["position_ids"]))] for r in rows]
        return {**batch, "position_ids": torch.tensor(places)}

    @torch.no_grad()
    def check(self, model: PreTrainedModel) -> None:
        """Refuse packing for a model whose packed rows see one another.

        Raises:
            InvalidInput: The loss of two packed rows differs from that of the two alone.
        """
        if not self.packing:
            return
        model.config.use_cache = False  # with a cache transformers does not look at where positions start anew
        device, some = next(model.parameters()).device, [Encoded(r.input_ids[:32], r.labels[:32]) for r in self.task.train[:2]]
        model.eval()
        inputs = {k: v.to(device) for k, v in self.collate([self._packed(some)]).items() if k != "labels"}
        together = model(**inputs).logits[0, -1].float()
        alone = model(input_ids=torch.tensor([some[-1].input_ids], device=device)).logits[0, -1].float()
        if float((together - alone).abs().max()) > 0.02 * float(alone.abs().max()) + 1e-4:
            raise InvalidInput(
                f"{type(model).__name__} lets packed rows see one another.",
                "Packing needs attention that starts anew where positions do.", "Leave packing out: rows are then padded.",
            )  # fmt: skip

    @torch.no_grad()
    def losses(self, model: nn.Module, examples: Sequence[Encoded], batch: int = 16) -> np.ndarray:
        """Loss of every row, nats per learned token, shape ``(n,)``; several processes share the batches and all call it."""
        model.eval()
        device, found = next(model.parameters()).device, np.zeros(len(examples))
        order = np.argsort([len(r.input_ids) for r in examples], kind="stable")
        for start, counts in rounds(range(0, len(order), batch)):
            part = order[start : start + batch]
            inputs = {k: v.to(device) for k, v in padded([examples[i] for i in part], self.pad).items()}
            targets = next_tokens(inputs.pop("labels"), None)
            sums = sequence_losses(model(**inputs).logits[:, :-1].float(), targets)
            if counts:
                found[part] = (sums / (targets != IGNORE).sum(1)).cpu().numpy()
        return total(found)

    def judge(self, model: nn.Module) -> dict[str, Any]:
        """Held-out loss with the adapter and, where it can be put aside, without it; losses by row for paired tests."""
        metrics: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        for split, examples in self.task.evaluation.items():
            each, weight = self.losses(model, examples), self.learned(examples)
            metrics[split] = {"loss": float(each @ weight / weight.sum())}
            if hasattr(model, "disable_adapter"):
                with cast("PeftModel", model).disable_adapter():
                    before = self.losses(model, examples)
                metrics[split]["loss_before"] = float(before @ weight / weight.sum())
            rows[split] = each.tolist()
        return {"metrics": metrics, "losses": rows, "one_class": {}}

    @staticmethod
    def learned(examples: Sequence[Encoded]) -> np.ndarray:
        """Learned tokens of every row."""
        return np.array([sum(v != IGNORE for v in r.labels[1:]) for r in examples], dtype=float)


def rows_of(task: Task | Texts, tokenizer: Any, model: nn.Module, protocol: Protocol) -> Rows | TextRows:
    """The batches of a task for a model.

    Raises:
        InvalidInput: Text for a model with a classification head, packed rows of labels, or packing that the model ignores.
    """
    if isinstance(task, Task):
        if protocol.packing:
            raise InvalidInput("A labelled task does not read packing.", "It packs rows of text.", "Leave it out.")
        if protocol.trainer != "own":
            raise InvalidInput("A labelled task does not read trainer.", "TRL's trains on rows of text.", "Leave it out.")
        return Rows(task, tokenizer, causal=is_causal(model), cutoff=protocol.cutoff, on_prompt=protocol.on_prompt)
    if not is_causal(model):
        raise InvalidInput(
            f"{type(model).__name__} is no language model: it cannot learn text.", "Text trains causal language models.",
            "Name a labelled task with --task.",
        )  # fmt: skip
    rows = TextRows(task, tokenizer, cutoff=protocol.cutoff, packing=protocol.packing)
    rows.check(cast("PreTrainedModel", model))
    return rows


def answers_of(task: Task | Texts) -> dict[str, list[int]]:
    """What is kept beside the results, by split: the label of every held-out row, or its number of learned tokens."""
    if isinstance(task, Task):
        return {split: [e.label for e in rows] for split, rows in task.evaluation.items()}
    return {split: [int(n) for n in TextRows.learned(rows)] for split, rows in task.evaluation.items()}
