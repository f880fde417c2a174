"""Rows as batches: labelled ones for a head or as prompt and answer, text for a language model, padded or packed.

Packed rows stand one behind another in a sequence of at most ``cutoff`` tokens, positions starting anew with each; transformers
masks attention by those positions. First-fit by falling length wastes little; whether the model keeps rows apart is tried on
two of them before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..data.encoding import IGNORE, Encoded, pad_of
from ..data.tasks import Example, Task
from ..data.text import Texts
from ..errors import InvalidInput
from ..evaluation import statistics
from ..execution.divergence import sequence_losses
from ..execution.processes import rounds, total
from .protocol import Protocol

Row = dict[str, Any]


def is_causal(model: nn.Module) -> bool:
    """Return whether a model predicts next tokens (else it carries a classification head)."""
    return "SequenceClassification" not in type(model).__name__


class _Batches:
    """Rows of one tokenizer as padded batches, and their sorted evaluation."""

    def __init__(self, tokenizer: Any, cutoff: int) -> None:
        self.tokenizer, self.cutoff, self.pad = tokenizer, cutoff, pad_of(tokenizer)

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return rows padded behind their tokens to a batch; a pack has positions instead of a mask."""
        length = max(len(r["input_ids"]) for r in rows)
        fills = {"input_ids": self.pad, "token_type_ids": 0, "labels": IGNORE, "attention_mask": 0}

        def filled(name: str, values: Any) -> Any:
            if isinstance(values, int):
                return values
            rest = length - len(values)
            return [*values, *(range(rest) if name == "position_ids" else [fills[name]] * rest)]

        batch = {name: torch.tensor([filled(name, r[name]) for r in rows]) for name in rows[0]}
        if "position_ids" not in rows[0]:
            batch["attention_mask"] = torch.tensor([filled("attention_mask", [1] * len(r["input_ids"])) for r in rows])
        return batch

    @torch.no_grad()
    def evaluated(
        self, model: nn.Module, rows: Sequence[Row], measure: Callable[[Tensor, Tensor], Tensor], batch: int
    ) -> np.ndarray:
        """Return ``measure(logits, labels)`` of every row, shape ``(n,)``; processes share the batches, and all call it."""
        model.eval()
        device, found = next(model.parameters()).device, np.zeros(len(rows))
        order = np.argsort([len(r["input_ids"]) for r in rows], kind="stable")
        for start, counts in rounds(range(0, len(order), batch)):
            part = order[start : start + batch]
            inputs = {k: v.to(device) for k, v in self.collate([rows[i] for i in part]).items()}
            labels = inputs.pop("labels")
            values = measure(model(**inputs).logits, labels)
            if counts:
                found[part] = values.cpu().numpy()
        return total(found)


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of every row, summed over its learned tokens."""
    return sequence_losses(logits[:, :-1].float(), labels[:, 1:])


class Rows(_Batches):
    """Labelled examples for one model and one tokenizer.

    Args:
        task: The task.
        tokenizer: The model's tokenizer.
        causal: Prompt and answer (causal LM) instead of text and label (head).
        cutoff: Longest sequence in tokens; a long prompt loses its beginning, never its answer.
        on_prompt: Take the loss on the prompt as well.
    """

    def __init__(self, task: Task, tokenizer: Any, *, causal: bool, cutoff: int, on_prompt: bool = False) -> None:
        super().__init__(tokenizer, cutoff)
        self.task, self.causal, self.on_prompt = task, causal, on_prompt

    def encode(self, example: Example) -> Row:
        """Return token ids and labels of one example."""
        if self.causal:
            return self._answered(example, example.label, self.on_prompt)
        coded = self.tokenizer(example.text, example.pair, truncation=True, max_length=self.cutoff)
        return {**{k: v for k, v in coded.items() if k in ("input_ids", "token_type_ids")}, "labels": example.label}

    def _answered(self, example: Example, answer: int, on_prompt: bool) -> Row:
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        said = self.tokenizer(self.task.answers[answer], add_special_tokens=False)["input_ids"] + end
        prompt = self.tokenizer(example.prompt)["input_ids"]
        if end and prompt[-1:] == end:
            prompt = prompt[:-1]
        prompt = prompt[max(0, len(prompt) - max(0, self.cutoff - len(said))) :]
        return {"input_ids": prompt + said, "labels": [*(prompt if on_prompt else [IGNORE] * len(prompt)), *said]}

    def encoded(self, examples: Sequence[Example]) -> list[Row]:
        """Return all examples, encoded."""
        return [self.encode(e) for e in examples]

    def training(self) -> list[Row]:
        """Return what the trainer reads."""
        return self.encoded(self.task.train)

    def judge(self, model: nn.Module) -> dict[str, Any]:
        """Return predictions for every held-out row, and what they are worth."""
        metrics: dict[str, dict[str, float]] = {}
        predictions = {}
        for split, examples in self.task.evaluation.items():
            predicted, labels = self.predict(model, examples), [e.label for e in examples]
            metrics[split] = {
                "accuracy": statistics.accuracy(labels, predicted),
                "matthews": statistics.matthews(labels, predicted),
            }
            if len(self.task.labels) == 2:
                metrics[split]["f1"] = statistics.f1(labels, predicted)
            predictions[split] = predicted.tolist()
        return {"metrics": metrics, "predictions": predictions}

    def predict(self, model: nn.Module, examples: Sequence[Example], batch: int = 32) -> np.ndarray:
        """Return the predicted label of every example, shape ``(n,)``.

        A head's largest logit; for a causal LM the possible answer with the largest likelihood given the prompt (summed
        over its tokens, the end of sequence included), so that no free text has to be parsed.
        """
        if not self.causal:
            rows = self.encoded(examples)
            return self.evaluated(model, rows, lambda logits, _: logits.float().argmax(-1), batch).astype(np.int64)
        owners = [(i, answer) for i, e in enumerate(examples) for answer in range(e.choices)]
        rows = [self._answered(examples[i], answer, False) for i, answer in owners]
        losses = np.full((len(examples), len(self.task.answers)), np.inf)
        for owner, loss in zip(owners, self.evaluated(model, rows, _sums, batch), strict=True):
            losses[owner] = loss
        return losses.argmin(-1)


def _packs(rows: Sequence[Encoded], limit: int) -> list[list[int]]:
    """Indices of the rows that share a sequence of at most ``limit`` tokens (first fit, longest first)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i].input_ids), i)):
        size = len(rows[i].input_ids)
        place = next((b for b, left in enumerate(room) if left >= size), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(limit)
        bins[place].append(i)
        room[place] -= size
    return bins


class TextRows(_Batches):
    """Rows of text for one language model and its tokenizer.

    Args:
        task: The rows.
        tokenizer: The model's tokenizer.
        cutoff: Longest sequence in tokens.
        packing: Several rows in one sequence.
    """

    causal = True

    def __init__(self, task: Texts, tokenizer: Any, *, cutoff: int, packing: bool = False) -> None:
        super().__init__(tokenizer, cutoff)
        self.task, self.packing = task, packing

    def encoded(self, examples: Sequence[Encoded]) -> list[Row]:
        """Return one entry per row."""
        return [{"input_ids": r.input_ids, "labels": r.labels} for r in examples]

    def training(self) -> list[Row]:
        """Return what the trainer reads: rows, or packs of them."""
        examples = self.task.train
        if not self.packing:
            return self.encoded(examples)
        return [self._pack([examples[i] for i in group]) for group in _packs(examples, self.cutoff)]

    def _pack(self, rows: Sequence[Encoded]) -> Row:
        ids = [i for r in rows for i in r.input_ids]
        labels = [v for r in rows for v in (IGNORE, *r.labels[1:])]  # nothing before it predicts a row's first token
        return {"input_ids": ids, "labels": labels, "position_ids": [p for r in rows for p in range(len(r.input_ids))]}

    @torch.no_grad()
    def check(self, model: nn.Module) -> None:
        """Refuse packing for a model whose packed rows see one another.

        Raises:
            InvalidInput: The second of two packed rows has other logits than alone.
        """
        cast(Any, model).config.use_cache = False  # with a cache transformers does not look at where positions start anew
        device, some = next(model.parameters()).device, [Encoded(r.input_ids[:32], r.labels[:32]) for r in self.task.train[:2]]
        model.eval()
        inputs = {k: v.to(device) for k, v in self.collate([self._pack(some)]).items() if k != "labels"}
        together = model(**inputs).logits[0, -1].float()
        alone = model(input_ids=torch.tensor([some[-1].input_ids], device=device)).logits[0, -1].float()
        if float((together - alone).abs().max()) > 0.02 * float(alone.abs().max()) + 1e-4:
            raise InvalidInput(
                f"{type(model).__name__} lets packed rows see one another.",
                "Packing needs attention that starts anew where positions do.",
                "Leave packing out: rows are then padded.",
            )

    def losses(self, model: nn.Module, examples: Sequence[Encoded], batch: int = 16) -> np.ndarray:
        """Return the loss of every row, nats per learned token, shape ``(n,)``."""
        return self.evaluated(model, self.encoded(examples), _sums, batch) / self.learned(examples)

    def judge(self, model: nn.Module) -> dict[str, Any]:
        """Return the held-out loss with the adapter and, where it can be put aside, without it; losses by row too."""
        metrics: dict[str, dict[str, float]] = {}
        rows = {}
        for split, examples in self.task.evaluation.items():
            each, weight = self.losses(model, examples), self.learned(examples)
            metrics[split], rows[split] = {"loss": float(each @ weight / weight.sum())}, each.tolist()
            if hasattr(model, "disable_adapter"):
                with cast(Any, model).disable_adapter():
                    metrics[split]["loss_before"] = float(self.losses(model, examples) @ weight / weight.sum())
        return {"metrics": metrics, "losses": rows}

    @staticmethod
    def learned(examples: Sequence[Encoded]) -> np.ndarray:
        """Return the number of learned tokens of every row."""
        return np.array([sum(v != IGNORE for v in r.labels[1:]) for r in examples], dtype=float)


def rows_of(task: Task | Texts, tokenizer: Any, model: nn.Module, protocol: Protocol) -> Rows | TextRows:
    """Return the batches of a task for a model.

    Raises:
        InvalidInput: Text for a model with a classification head, packed rows of labels, or packing that the model ignores.
    """
    if isinstance(task, Task):
        if protocol.packing:
            raise InvalidInput("A labelled task does not read packing.", "It is for rows of text.", "Leave it out.")
        return Rows(task, tokenizer, causal=is_causal(model), cutoff=protocol.cutoff, on_prompt=protocol.on_prompt)
    if not is_causal(model):
        raise InvalidInput(
            f"{type(model).__name__} is no language model: it cannot learn text.",
            "Text trains causal language models.",
            "Name a labelled task with --task.",
        )
    rows = TextRows(task, tokenizer, cutoff=protocol.cutoff, packing=protocol.packing)
    if protocol.packing:
        rows.check(model)
    return rows


def answers_of(task: Task | Texts) -> dict[str, list[int]]:
    """Return what is kept beside the results: the label of every held-out row, or its number of learned tokens, by split."""
    if isinstance(task, Task):
        return {split: [e.label for e in rows] for split, rows in task.evaluation.items()}
    return {split: TextRows.learned(rows).astype(int).tolist() for split, rows in task.evaluation.items()}
