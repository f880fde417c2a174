"""Effect of a plan on a model: the held-out loss of the pruned one, or the mistakes of the fine-tuned one, item by item.

Two benches with the same doors: ``data(seed)`` for scores and treatment, ``blocks``, ``weights`` of the items, ``identity``
(everything beside plan and seed that a measurement depends on), and ``measure(plan, seed)``, which returns one number per
item, smaller is better, and what the plan cost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from ..arguments import checked_fields
from ..data.calibration import CalibrationSet
from ..data.tasks import Task, load_task
from ..data.text import calibration
from ..decisions.sparsity import prune
from ..errors import CoverageError, InvalidInput
from ..evaluation.perplexity import perplexity, predicted
from ..finetuning.adapters import Loader, classifier_loader
from ..finetuning.finetune import finetune
from ..finetuning.protocol import Protocol
from ..finetuning.rows import Rows, is_causal
from ..models.blocks import describe, layers, partition, weight_of
from ..plan import Plan
from ..records import Block


@checked_fields
@dataclasses.dataclass(kw_only=True)
class TextBench:
    """Prune a language model by a plan and measure the loss on held-out windows; its weights are put back after every plan.

    ``source``, ``samples`` and ``length`` say how text is drawn for scores and pruner.

    Raises:
        InvalidInput: A field of another type.
    """

    model: nn.Module
    tokenizer: Any
    source: str | Sequence[str]
    windows: CalibrationSet
    method: str = "wanda"
    samples: int = 64
    length: int = 256
    by: str = "layer"
    batch_size: int = 8
    unit: str = "nats per token"

    def __post_init__(self) -> None:
        self.blocks: tuple[Block, ...] = tuple(partition(self.model, self.by))
        self._sets: dict[int, CalibrationSet] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """Digests of model and windows, and the pruner."""
        return {"model": describe(self.model)["digest"], "windows": self.windows.digest, "method": self.method}

    @property
    def weights(self) -> np.ndarray:
        """Predicted tokens of every window, by which it counts."""
        return predicted(self.windows)

    def data(self, seed: int) -> CalibrationSet:
        """The calibration set of a seed."""
        if seed not in self._sets:
            size: dict[str, Any] = {"samples": self.samples, "length": self.length}
            self._sets[seed] = calibration(self.source, self.tokenizer, **size, seed=seed)
        return self._sets[seed]

    def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
        """Return ``{values[windows], spent, passes}`` of the model that the plan makes; a recount that differs is refused."""
        kept = {m.name: weight_of(self.model, m.name)[1].detach().clone() for b in self.blocks for m in b.modules}
        try:
            with counted(self.model) as passes:
                receipt = prune(self.model, plan, self.data(seed), self.method, self.batch_size)
            spent = round(receipt.sparsity * sum(b.numel for b in self.blocks))
            if abs(spent - int(plan.counts.sum())) > len(self.blocks):
                raise CoverageError(f"{spent} zeros were recounted, {plan.counts.sum()} planned.", "", "")
            measured = perplexity(self.model, self.windows, batch_size=self.batch_size)
        finally:
            with torch.no_grad():
                for name, weight in kept.items():
                    weight_of(self.model, name)[1].copy_(weight)
        return {"values": list(measured.nll), "spent": spent, "passes": passes}


@checked_fields
@dataclasses.dataclass(kw_only=True)
class TaskBench:
    """Fine-tune a plan of ranks or experts on a task and count the mistakes on its held-out rows (the first split by default).

    ``load`` may be the name of a model, and ``task`` that of a task or the path of its rows. ``samples`` training rows are what
    scores are made from.

    Raises:
        InvalidInput: A field of another type, or a split that the task does not have.
    """

    load: Loader
    tokenizer: Any
    task: Task
    split: str | None = None
    protocol: Protocol = dataclasses.field(default_factory=Protocol)
    samples: int = 64
    by: str = "layer"
    unit: str = "mistakes per question"
    weights: ClassVar[None] = None  # all questions count the same

    def __post_init__(self) -> None:
        load, task = cast(Any, self.load), cast(Any, self.task)
        if isinstance(task, str | Path):
            self.task = load_task(str(task))
        elif not isinstance(task, Task):
            raise InvalidInput(f"task is of type {type(task).__name__}.", "It should be a task.", "Use load_task(PATH).")
        if isinstance(load, str | Path):
            self.load = classifier_loader(str(load), len(self.task.labels))
        elif not callable(load):
            what = f"load is of type {type(load).__name__}."
            raise InvalidInput(what, "It should be a function of a seed, or a model's name.", "For example load='demo'.")
        if self.split is not None and self.split not in self.task.evaluation:
            what = f"{self.task.name} has no split {self.split!r}."
            raise InvalidInput(what, f"It has {', '.join(self.task.evaluation)}.", "Name one of those.")
        self.split = self.split or next(iter(self.task.evaluation))
        self.model = self.load(0)
        self.blocks: tuple[Block, ...] = tuple(partition(self.model, self.by))

    @property
    def identity(self) -> dict[str, Any]:
        """Digests of model and task, the split and the training."""
        return {
            "model": describe(self.model)["digest"],
            "base": dict(getattr(self.load, "settings", {})),
            "task": self.task.digest,
            "split": self.split,
            "protocol": dataclasses.asdict(self.protocol),
        }

    def data(self, seed: int) -> CalibrationSet:
        """Training rows, with the loss on what is to be learned."""
        order = torch.randperm(len(self.task.train), generator=torch.Generator().manual_seed(seed))[: self.samples]
        rows = Rows(self.task, self.tokenizer, causal=is_causal(self.model), cutoff=self.protocol.cutoff)
        batch = rows.collate(rows.encoded([self.task.train[int(i)] for i in order]))
        return CalibrationSet(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
            source=f"{self.task.name}, training rows",
            seed=seed,
        )

    def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
        """``{values[questions] (1 where wrong), spent, passes, parameters}`` of the model that the plan trains."""
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out"
            named: dict[str, Any] = {"tokenizer": self.tokenizer, "protocol": self.protocol, "seeds": (seed,)}
            record = finetune(self.load, plan, self.task, out, **named)
            seed_result = json.loads((out / f"seed-{seed}" / "result.json").read_text(encoding="utf-8"))
        predictions, truth = seed_result["predictions"][str(self.split)], self.task.evaluation[str(self.split)]
        steps = self.protocol.epochs * len(self.task.train)
        return {
            "values": [float(answer != row.label) for answer, row in zip(predictions, truth, strict=True)],
            "spent": plan.budget["spent"],
            "passes": {"forward": steps, "backward": steps},
            "parameters": record["trained_parameters"],
        }


Bench = TextBench | TaskBench


@contextlib.contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, float]]:
    """``{forward, backward}`` sequences through the whole model, complete afterwards: layer passes divided by the layers."""
    stack = [layer for _, layer in layers(model)]
    passes: dict[str, float] = {"forward": 0, "backward": 0}

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        """Count the sequences of a forward."""
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        rows = int(hidden.shape[0])
        passes["forward"] += rows

        def back(_: torch.Tensor) -> None:
            passes["backward"] += rows

        if hidden.requires_grad and hidden.grad_fn is not None:
            hidden.register_hook(back)

    handles = [layer.register_forward_hook(hook) for layer in stack]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
        for way in passes:
            passes[way] /= max(1, len(stack))
