"""What ``training`` trains on: a classification head on an encoder, and a causal LM that is moved from code to prose."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from layerbudget.data.calibration import CalibrationSet
from layerbudget.data.tasks import load_task
from layerbudget.evaluation import statistics

BOOKS = ("moby.txt", "war.txt", "sheppard.txt")
HEAD_STEPS = 40


class Classification:
    """CoLA or MRPC on an encoder with a fresh head."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.options = options
        self.task = load_task(options.task, options.data_dir).limited(options.train_limit)
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.extra = {"task_type": "SEQ_CLS", "modules_to_save": ["pooler"]}
        self.train = self._encode(self.task.train)
        self.held = {k: self._encode(v) for k, v in self.task.evaluation.items()}
        self.exclude = "pooler|classifier"

    def _encode(self, rows):
        pairs = [r.pair for r in rows] if rows[0].pair else None
        coded = self.tokenizer([r.text for r in rows], pairs, truncation=True, max_length=self.options.length)["input_ids"]
        return [(torch.tensor(c), r.label) for c, r in zip(coded, rows, strict=True)]

    def model(self, seed: int) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.options.model, num_labels=len(self.task.labels), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            attn_implementation=self.options.attention,
        )  # fmt: skip
        return model.eval()

    def batch(self, rows):
        longest = max(len(c) for c, _ in rows)
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
        for i, (c, _) in enumerate(rows):
            ids[i, : len(c)] = c
        labels = torch.tensor([label for _, label in rows])
        return {"input_ids": ids, "attention_mask": (ids != self.tokenizer.pad_token_id).long(), "labels": labels}

    def batches(self, seed: int, epoch: int):
        """Rows of similar length together, batches in a seeded order."""
        generator = np.random.default_rng([seed, epoch])
        noise = generator.random(len(self.train)) * 4
        order = np.argsort([len(c) for c, _ in self.train] + noise)
        starts = generator.permutation(np.arange(0, len(order), self.options.batch))
        for start in starts:
            yield self.batch([self.train[i] for i in order[start : start + self.options.batch]])

    def calibration(self, samples: int = 128) -> CalibrationSet:
        rows = [self.train[i] for i in np.random.default_rng(0).permutation(len(self.train))[:samples]]
        batch = self.batch(rows)
        return CalibrationSet(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"], source=self.task.name
        )

    def warm(self, model: torch.nn.Module) -> None:
        """Give the fresh head a direction before gradients are measured through it (pooler and classifier only)."""
        head = [p for n, p in model.named_parameters() if "pooler" in n or "classifier" in n]
        optimizer = torch.optim.AdamW(head, lr=1e-3)
        for step, batch in enumerate(self.batches(1234, 0)):
            if step == HEAD_STEPS:
                break
            with torch.no_grad():
                mask = batch["attention_mask"]
                hidden = model.base_model.encoder(
                    model.base_model.embeddings(batch["input_ids"]), attention_mask=_additive(mask)
                ).last_hidden_state
            logits = model.classifier(model.base_model.pooler(hidden))
            torch.nn.functional.cross_entropy(logits, batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> dict:
        result: dict = {"predictions": {}, "labels": {}}
        losses, scores = [], []
        for split, rows in self.held.items():
            order = np.argsort([len(c) for c, _ in rows])
            predicted = np.zeros(len(rows), dtype=int)
            for start in range(0, len(rows), 64):
                part = order[start : start + 64]
                batch = self.batch([rows[i] for i in part])
                with torch.autocast("cpu", torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
                    output = model(**batch)
                losses += [float(output.loss)] * len(part)
                predicted[part] = output.logits.float().argmax(-1).numpy()
            labels = [label for _, label in rows]
            metric = statistics.matthews if self.task.metric == "matthews" else statistics.accuracy
            scores.append(metric(labels, predicted))
            result[f"{split}_accuracy"] = statistics.accuracy(labels, predicted)
            result[f"{split}_f1"] = statistics.f1(labels, predicted)
            result[f"{split}_matthews"] = statistics.matthews(labels, predicted)
            result["predictions"][split] = "".join(map(str, predicted))
            result["labels"][split] = "".join(map(str, labels))
        return {**result, "loss": float(np.mean(losses)), "score": float(np.mean(scores))}


def _additive(mask: torch.Tensor) -> torch.Tensor:
    return (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min


class Prose:
    """A causal LM of code, adapted to books."""

    def __init__(self, options: argparse.Namespace) -> None:
        from layerbudget.models.loading import load_model, load_tokenizer

        self.options, self.load = options, load_model
        self.tokenizer = load_tokenizer(options.model)
        self.extra = {"task_type": "CAUSAL_LM"}
        self.exclude = "lm_head|embed"
        books = Path(options.data_dir) / "books"
        self.train = torch.cat([self._rows(books / name, options.train_limit or 1024) for name in BOOKS])
        self.held = self._rows(books / "pride.txt", 64)

    def _rows(self, path: Path, count: int) -> torch.Tensor:
        text = path.read_text(encoding="utf-8-sig")[20000 : 20000 + count * self.options.length * 8]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        first = self.tokenizer("")["input_ids"] if self.options.first else []
        length = self.options.length - len(first)
        count = min(count, len(ids) // length)
        rows = torch.tensor(ids[: count * length]).view(count, length)
        return torch.cat((torch.tensor(first, dtype=rows.dtype).expand(count, -1), rows), dim=1)

    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = self.load(self.options.model)
        model.set_attn_implementation(self.options.attention)
        return model

    def batches(self, seed: int, epoch: int):
        order = np.random.default_rng([seed, epoch]).permutation(len(self.train))
        for start in range(0, len(order) - self.options.batch + 1, self.options.batch):
            ids = self.train[order[start : start + self.options.batch]]
            yield {"input_ids": ids, "labels": ids}

    def calibration(self, samples: int = 64) -> CalibrationSet:
        rows = np.random.default_rng(0).permutation(len(self.train))[:samples]
        return CalibrationSet(input_ids=self.train[rows], source="books")

    def warm(self, model: torch.nn.Module) -> None:
        """Nothing to do: the model has its head."""

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> dict:
        losses = []
        for ids in self.held.split(16):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
                logits = model(input_ids=ids).logits
            each = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none"
            ).mean(-1)  # fmt: skip
            losses += each.tolist()
        return {"losses": [round(v, 5) for v in losses], "loss": float(np.mean(losses)), "score": -float(np.mean(losses))}


class Code(Prose):
    """A causal LM of books (``benchmarks.train_second_model``), adapted to the standard library: modules for training, others held out."""

    def __init__(self, options: argparse.Namespace) -> None:
        from layerbudget import calibration, evaluation_set
        from layerbudget.models.loading import load_model, load_tokenizer

        self.options, self.load = options, load_model
        self.tokenizer = load_tokenizer(options.model)
        self.extra = {"task_type": "CAUSAL_LM"}
        self.exclude = "lm_head|embed"
        count = 3 * (options.train_limit or 1024)
        self.train = calibration("stdlib", self.tokenizer, samples=count, length=options.length).input_ids
        self.held = evaluation_set("stdlib", self.tokenizer, windows=64, length=options.length).input_ids
