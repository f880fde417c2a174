"""Rows as padded batches: labelled ones for a head or as prompt and answer, and text for a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..data.calibration import check_ids
from ..data.encoding import IGNORE, Encoded, pad_of
from ..data.folders import say_once
from ..data.tasks import Example, Task
from ..data.text import Texts
from ..errors import InvalidInput
from ..evaluation import statistics
from ..execution.divergence import sequence_losses
from ..execution.processes import process_group, rounds
from .protocol import Protocol

Row = dict[str, Any]


def is_causal(model: nn.Module) -> bool:
    """Return whether a model predicts next tokens (else it carries a classification head)."""
    return "SequenceClassification" not in type(model).__name__


class _Batches:
    """Rows of one tokenizer as padded batches, and their sorted evaluation, so many rows ``together``."""

    together = 32

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.pad = tokenizer, pad_of(tokenizer)

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return rows padded behind their tokens to a batch."""
        length = max(len(r["input_ids"]) for r in rows)
        fills = {"input_ids": self.pad, "token_type_ids": 0, "labels": IGNORE, "attention_mask": 0}

        def filled(name: str, values: Any) -> Any:
            return values if isinstance(values, int) else [*values, *[fills[name]] * (length - len(values))]

        rows = [{**r, "attention_mask": [1] * len(r["input_ids"])} for r in rows]
        return {name: torch.tensor([filled(name, r[name]) for r in rows]) for name in rows[0]}

    @torch.no_grad()
    def evaluated(self, model: nn.Module, rows: Sequence[Row], measure: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        """Return ``measure(logits, labels)`` of every row, shape ``(n,)``; processes share the batches, and all call it."""
        model.eval()
        device, measures = next(model.parameters()).device, np.zeros(len(rows))
        order = np.argsort([len(r["input_ids"]) for r in rows], kind="stable")
        for start, counts in rounds(range(0, len(order), self.together)):
            part = order[start : start + self.together]
            inputs = {k: v.to(device) for k, v in self.collate([rows[i] for i in part]).items()}
            labels = inputs.pop("labels")
            values = measure(model(**inputs).logits, labels)
            if counts:
                measures[part] = values.cpu().numpy()
        return process_group().sum(measures)


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of every row, summed over its learned tokens."""
    return sequence_losses(logits[:, :-1].float(), labels[:, 1:])


class Rows(_Batches):
    """Labelled examples for one model and one tokenizer: prompt and answer (``causal``), or text and label for a head.

    A sequence has at most ``cutoff`` tokens; a long prompt loses its beginning, never its answer.
    """

    def __init__(self, task: Task, tokenizer: Any, *, causal: bool, cutoff: int, on_prompt: bool = False) -> None:
        super().__init__(tokenizer)
        self.task, self.causal, self.cutoff, self.on_prompt = task, causal, cutoff, on_prompt
        if not causal and tokenizer.pad_token_id is not None:
            self.pad = int(tokenizer.pad_token_id)  # some heads look for it

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

    def predict(self, model: nn.Module, examples: Sequence[Example]) -> np.ndarray:
        """Return the predicted label of every example, shape ``(n,)``.

        A head's largest logit; for a causal LM the possible answer with the largest likelihood given the prompt (summed
        over its tokens, the end of sequence included), so that no free text has to be parsed.
        """
        if not self.causal:
            rows = self.encoded(examples)
            return self.evaluated(model, rows, lambda logits, _: logits.float().argmax(-1)).astype(np.int64)
        owners = [(i, answer) for i, e in enumerate(examples) for answer in range(e.choices)]
        rows = [self._answered(examples[i], answer, False) for i, answer in owners]
        losses = np.full((len(examples), len(self.task.answers)), np.inf)
        for owner, loss in zip(owners, self.evaluated(model, rows, _sums), strict=True):
            losses[owner] = loss
        return losses.argmin(-1)

    @staticmethod
    def kept(examples: Sequence[Example]) -> list[int]:
        """Return what is kept beside the results: the label of every row."""
        return [e.label for e in examples]


class TextRows(_Batches):
    """Rows of text for one language model and its tokenizer."""

    causal, together = True, 16

    def __init__(self, task: Texts, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.task = task

    def encoded(self, examples: Sequence[Encoded]) -> list[Row]:
        """Return one entry per row."""
        return [{"input_ids": r.input_ids, "labels": r.labels} for r in examples]

    def losses(self, model: nn.Module, examples: Sequence[Encoded]) -> np.ndarray:
        """Return the loss of every row, nats per learned token, shape ``(n,)``."""
        return self.evaluated(model, self.encoded(examples), _sums) / self.kept(examples)

    def judge(self, model: nn.Module) -> dict[str, Any]:
        """Return the held-out loss with the adapter and, where it can be put aside, without it; losses by row too."""
        metrics: dict[str, dict[str, float]] = {}
        rows, before = {}, {}
        for split, examples in self.task.evaluation.items():
            each, weight = self.losses(model, examples), np.array(self.kept(examples), dtype=float)
            metrics[split], rows[split] = {"loss": float(each @ weight / weight.sum())}, each.tolist()
            if hasattr(model, "disable_adapter"):
                with cast(Any, model).disable_adapter():
                    dense = self.losses(model, examples)
                metrics[split]["loss_before"] = float(dense @ weight / weight.sum())
                before[split] = dense.tolist()
        return {"metrics": metrics, "losses": rows, "losses_before": before}

    @staticmethod
    def kept(examples: Sequence[Encoded]) -> list[int]:
        """Return what is kept beside the results: the number of learned tokens of every row."""
        return [sum(v != IGNORE for v in r.labels[1:]) for r in examples]


def rows_of(task: Task | Texts, tokenizer: Any, model: nn.Module, protocol: Protocol) -> Rows | TextRows:
    """Return the batches of a task for a model; labelled rows that are longer than the cutoff are said to be.

    Raises:
        InvalidInput: Text for a model that is no language model; tokens or lengths that the model cannot read.
    """
    causal = is_causal(model)
    if isinstance(task, Task):
        labelled = Rows(task, tokenizer, causal=causal, cutoff=protocol.cutoff, on_prompt=protocol.on_prompt)
        _check(labelled, task, model)
        uncut = Rows(task, tokenizer, causal=causal, cutoff=1 << 30)
        lengths = [len(row["input_ids"]) for row in uncut.encoded(task.train)]
        if longer := sum(length > protocol.cutoff for length in lengths):
            end = "beginning" if causal else "end"
            say_once(f"{longer} of {len(lengths)} rows are longer than {protocol.cutoff} tokens and lose their {end}.")
        return labelled
    if not causal:
        raise InvalidInput(
            f"{type(model).__name__} is no language model: it cannot learn text.",
            "Text trains causal language models.",
            "Name a labelled task with --task.",
        )
    rows = TextRows(task, tokenizer)
    _check(rows, task, model)
    return rows


def _check(rows: Rows | TextRows, task: Any, model: nn.Module) -> None:
    """Refuse rows that the model has no positions or no embeddings for, padding included."""
    ids = [row["input_ids"] for part in (task.train, *task.evaluation.values()) for row in rows.encoded(part)]
    check_ids(model, max(map(len, ids)), max(rows.pad, *(max(row) for row in ids if row)), "--cutoff")


def answers_of(task: Task | Texts) -> dict[str, list[int]]:
    """Return what is kept beside the results, by split: see ``kept`` of the rows."""
    kept: Callable[[Any], list[int]] = Rows.kept if isinstance(task, Task) else TextRows.kept
    return {split: kept(rows) for split, rows in task.evaluation.items()}
