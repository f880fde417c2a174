"""Rows of a labelled task as tensors: pairs of sentences for an encoder's head, prompt and answer for a causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.tasks import Example, Task
from ..evaluation import statistics
from ..execution.processes import rounds, total

IGNORE = -100


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts next tokens (else it carries a classification head)."""
    return "SequenceClassification" not in type(model).__name__


def _collate(rows: Sequence[dict[str, Any]], pad: int) -> dict[str, torch.Tensor]:
    longest = max(len(r["input_ids"]) for r in rows)

    def padded(values: Sequence[int], fill: int) -> list[int]:
        return [*values, *[fill] * (longest - len(values))]

    batch = {
        "input_ids": torch.tensor([padded(r["input_ids"], pad) for r in rows]),
        "attention_mask": torch.tensor([padded([1] * len(r["input_ids"]), 0) for r in rows]),
    }
    if "token_type_ids" in rows[0]:
        batch["token_type_ids"] = torch.tensor([padded(r["token_type_ids"], 0) for r in rows])
    if isinstance(rows[0]["labels"], list):
        batch["labels"] = torch.tensor([padded(r["labels"], IGNORE) for r in rows])
    else:
        batch["labels"] = torch.tensor([r["labels"] for r in rows])
    return batch


def metrics_of(labels: Sequence[int], predicted: statistics.Labels, classes: int) -> dict[str, float]:
    """Accuracy and Matthews correlation, and F1 of the second label where there are two."""
    values = {"accuracy": statistics.accuracy(labels, predicted), "matthews": statistics.matthews(labels, predicted)}
    return {**values, "f1": statistics.f1(labels, predicted)} if classes == 2 else values


class Rows:
    """Encodes examples for one model and one tokenizer.

    Args:
        task: The task.
        tokenizer: The model's tokenizer.
        causal: Prompt and answer (causal LM) instead of text and label (head).
        cutoff: Longest sequence in tokens; a long prompt loses its beginning, never its answer.
        on_prompt: Take the loss on the prompt as well.
    """

    def __init__(self, task: Task, tokenizer: Any, *, causal: bool, cutoff: int, on_prompt: bool = False) -> None:
        self.task, self.tokenizer, self.causal = task, tokenizer, causal
        self.cutoff, self.on_prompt = cutoff, on_prompt
        pad = tokenizer.pad_token_id
        self.pad = pad if pad is not None else (tokenizer.eos_token_id or 0)

    def encode(self, example: Example) -> dict[str, Any]:
        """Token ids and labels of one example."""
        if self.causal:
            return self._answered(example, example.label)
        coded = self.tokenizer(example.text, example.pair, truncation=True, max_length=self.cutoff)
        kept = {k: v for k, v in coded.items() if k in ("input_ids", "token_type_ids")}
        return {**kept, "labels": example.label}

    def _answered(self, example: Example, answer: int) -> dict[str, Any]:
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        said = self.tokenizer(self.task.answers[answer], add_special_tokens=False)["input_ids"] + end
        prompt = self.tokenizer(example.prompt)["input_ids"]
        if end and prompt[-1:] == end:
            prompt = prompt[:-1]
        prompt = prompt[max(0, len(prompt) - max(0, self.cutoff - len(said))) :]
        labels = [*(prompt if self.on_prompt else [IGNORE] * len(prompt)), *said]
        return {"input_ids": prompt + said, "labels": labels}

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Pad rows to a batch."""
        return _collate(rows, self.pad)

    def encoded(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """All examples, encoded once."""
        return [self.encode(e) for e in examples]

    def training(self) -> list[dict[str, Any]]:
        """What the trainer reads."""
        return self.encoded(self.task.train)

    def judge(self, model: nn.Module) -> dict[str, Any]:
        """Predictions for every held-out row, what they are worth, and the label where all got the same."""
        metrics, predictions, one = {}, {}, {}
        for split, examples in self.task.evaluation.items():
            predicted = self.predict(model, examples)
            predictions[split] = predicted.tolist()
            metrics[split] = metrics_of([e.label for e in examples], predicted, len(self.task.labels))
            same = len(examples) > 1 and len(set(predicted.tolist())) == 1
            one[split] = self.task.labels[int(predicted[0])] if same else None
        return {"metrics": metrics, "predictions": predictions, "one_class": one}

    @torch.no_grad()
    def predict(self, model: nn.Module, examples: Sequence[Example], batch: int = 32) -> np.ndarray:
        """Predicted label of every example, shape ``(n,)``.

        A head's largest logit; for a causal LM the possible answer with the largest likelihood given the prompt (summed
        over its tokens, the end of sequence included), so that no free text has to be parsed. Several processes share the
        batches, and all call it.
        """
        model.eval()
        device = next(model.parameters()).device
        if not self.causal:
            rows = self.encoded(examples)
            order = np.argsort([len(r["input_ids"]) for r in rows], kind="stable")
            result = np.zeros(len(rows), dtype=np.int64)
            for start, counts in rounds(range(0, len(rows), batch)):
                part = order[start : start + batch]
                inputs = {k: v.to(device) for k, v in self.collate([rows[i] for i in part]).items() if k != "labels"}
                predicted = model(**inputs).logits.float().argmax(-1).cpu().numpy()
                if counts:
                    result[part] = predicted
            return total(result).astype(np.int64)
        scored = Rows(self.task, self.tokenizer, causal=True, cutoff=self.cutoff)
        owners = [(i, answer) for i, e in enumerate(examples) for answer in range(e.choices)]
        rows = [scored._answered(examples[i], answer) for i, answer in owners]
        sums = np.zeros(len(rows))
        order = np.argsort([len(r["input_ids"]) for r in rows], kind="stable")
        for start, counts in rounds(range(0, len(rows), batch)):
            part = order[start : start + batch]
            inputs = {k: v.to(device) for k, v in self.collate([rows[i] for i in part]).items()}
            labels = inputs.pop("labels")[:, 1:]
            chances = model(**inputs).logits[:, :-1].float().log_softmax(-1)
            taken = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels != IGNORE)
            if counts:
                sums[part] = taken.sum(-1).cpu().numpy()
        table = np.full((len(examples), len(self.task.answers)), -np.inf)
        for owner, value in zip(owners, total(sums), strict=True):
            table[owner] = value
        return table.argmax(-1)
