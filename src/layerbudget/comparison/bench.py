"""Effect of a plan on a model: the held-out loss of the pruned one, or the mistakes of the fine-tuned one, item by item.

Two benches with the same three doors: ``data(seed)`` for scores and treatment, ``blocks``, and ``measure(plan, seed)``, which
returns one number per item, smaller is better, and what it cost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..compressors.formats import PACKED
from ..data.calibration import CalibrationSet
from ..data.tasks import Task
from ..data.text import calibration
from ..decisions.apply import applier
from ..decisions.bits.blocks import blocks_of
from ..decisions.bits.program import ESTIMATOR
from ..decisions.bits.runtimes import find_runtime
from ..decisions.bits.sensitivity import rounding_damage
from ..errors import CoverageError, InvalidInput
from ..evaluation.perplexity import perplexity, predicted
from ..finetuning.adapters import Loader
from ..finetuning.finetune import finetune
from ..finetuning.protocol import Protocol
from ..finetuning.rows import Rows, is_causal
from ..models.blocks import describe, layers, partition, weight_of
from ..plan import Plan
from ..records import Block
from ..scores import Scores
from ..sensitivity.gain import score


class Bench:
    """Base of measurements of plans: data for scores and treatment, blocks, and a measurement of a plan."""

    model: nn.Module
    blocks: tuple[Block, ...]
    unit: str

    @property
    def identity(self) -> dict[str, Any]:
        """Everything beside plan and seed that a measurement depends on."""
        raise NotImplementedError

    @property
    def weights(self) -> np.ndarray | None:
        """Tokens of every item; None where all count the same."""
        return None

    def data(self, seed: int) -> CalibrationSet:
        """Calibration data of a seed."""
        raise NotImplementedError

    def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
        """``{values, spent, passes}``: one number per item, smaller is better, and what the plan cost."""
        raise NotImplementedError

    def score(self, given: str, data: CalibrationSet | None, options: Mapping[str, Any]) -> Scores:
        """The record of an estimator."""
        return score(self.model, data, self.blocks, given, **options)

    def weighed(self, scores: Scores) -> Scores:
        """Return the scores that rules plan from."""
        return scores


@dataclasses.dataclass(kw_only=True)
class TextBench(Bench):
    """Treat a language model by a plan and measure the loss on held-out windows.

    Attributes:
        model: The model; its weights are put back after every plan.
        tokenizer: Its tokenizer.
        source: Calibration text.
        windows: Held-out windows.
        method: Treatment of sparsity plans.
        samples, length: Of the calibration set.
        by: Partition.
        batch_size: Sequences per forward.
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
        """Everything beside plan and seed that a measurement depends on."""
        return {"model": describe(self.model)["digest"], "windows": self.windows.digest, "method": self.method}

    @property
    def weights(self) -> np.ndarray:
        """Predicted tokens of every window, by which it counts."""
        return predicted(self.windows)

    def data(self, seed: int) -> CalibrationSet:
        """The calibration set of a seed."""
        if seed not in self._sets:
            self._sets[seed] = calibration(
                self.source, self.tokenizer, samples=self.samples, length=self.length, seed=seed
            )  # fmt: skip
        return self._sets[seed]

    def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
        """``{values[windows], spent, passes}`` of the model that the plan makes.

        Raises:
            CoverageError: The recount differs from the plan.
        """
        kept = {m.name: weight_of(self.model, m.name)[1].detach().clone() for b in self.blocks for m in b.modules}
        try:
            with counted(self.model) as passes:
                if plan.kind == "sparsity":
                    receipt = applier("sparsity")(self.model, plan, self.data(seed), self.method, self.batch_size)
                    spent = round(receipt.sparsity * sum(b.numel for b in self.blocks))
                    if abs(spent - int(plan.counts.sum())) > len(self.blocks):
                        raise CoverageError(f"{spent} zeros were recounted, {plan.counts.sum()} planned.", "", "")
                else:
                    applier(plan.kind)(self.model, plan, self.data(seed))
                    spent = plan.budget["spent"]
            found = perplexity(self.model, self.windows, batch_size=self.batch_size)
        finally:
            with torch.no_grad():
                for name, weight in kept.items():
                    weight_of(self.model, name)[1].copy_(weight)
        return {"values": list(found.nll), "spent": spent, "passes": passes.to_dict()}


@dataclasses.dataclass(kw_only=True)
class TaskBench(Bench):
    """Fine-tune a plan of ranks or experts on a task and count the mistakes on its held-out rows.

    Attributes:
        load: ``seed -> model``.
        tokenizer: Its tokenizer.
        task: The task, with its rows limited as wanted.
        split: Held-out rows that count; the first split by default.
        protocol: Numbers of the training.
        samples: Training rows that scores are made from.
        by: Partition.
    """

    load: Loader
    tokenizer: Any
    task: Task
    split: str | None = None
    protocol: Protocol = dataclasses.field(default_factory=Protocol)
    samples: int = 64
    by: str = "layer"
    unit: str = "mistakes per question"

    def __post_init__(self) -> None:
        self.split = self.split or next(iter(self.task.evaluation))
        self.model = self.load(0)
        self.blocks: tuple[Block, ...] = tuple(partition(self.model, self.by))

    @property
    def identity(self) -> dict[str, Any]:
        """Everything beside plan and seed that a measurement depends on."""
        return {
            "model": describe(self.model)["digest"], "base": dict(getattr(self.load, "settings", {})),
            "task": self.task.digest, "split": self.split, "protocol": dataclasses.asdict(self.protocol),
        }  # fmt: skip

    def data(self, seed: int) -> CalibrationSet:
        """Training rows, with the loss on what is to be learned."""
        order = torch.randperm(len(self.task.train), generator=torch.Generator().manual_seed(seed))[: self.samples]
        rows = Rows(self.task, self.tokenizer, causal=is_causal(self.model), cutoff=self.protocol.cutoff)
        batch = rows.collate(rows.encoded([self.task.train[int(i)] for i in order]))
        return CalibrationSet(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"],
            source=f"{self.task.name}, training rows", seed=seed,
        )  # fmt: skip

    def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
        """``{values[questions] (1 where wrong), spent, passes, parameters}`` of the model that the plan trains."""
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out"
            named: dict[str, Any] = {"tokenizer": self.tokenizer, "protocol": self.protocol, "seeds": (seed,)}
            record = finetune(self.load, plan, self.task, out, **named)
            found = json.loads((out / f"seed-{seed}" / "result.json").read_text(encoding="utf-8"))
        predicted = found["predictions"][str(self.split)]
        truth = [e.label for e in self.task.evaluation[str(self.split)]]
        wrong = [float(p != y) for p, y in zip(predicted, truth, strict=True)]
        steps = self.protocol.epochs * len(self.task.train)
        return {
            "values": wrong, "spent": plan.budget["spent"], "passes": {"forward": steps, "backward": steps},
            "parameters": record["trained_parameters"],
        }  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class FormatBench(TextBench):
    """A :class:`~layerbudget.comparison.bench.TextBench` of plans of bits; embedding and head stay in 16 bits.

    Attributes:
        method: The quantiser: ``rtn``, ``weighted`` or ``gptq``.
        runtime: ``transformers`` or ``vllm`` (q/k/v and gate/up agree): formats of compressed-tensors.
    """

    method: str = "rtn"
    runtime: str = "transformers"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._errors: dict[tuple[str, ...] | None, dict[str, Any]] = {}
        target = find_runtime(self.runtime, PACKED)
        if target.ends:
            raise InvalidInput(
                f"{target.name} decides about embedding and head too.", "No score covers them.", "Use transformers."
            )
        self.blocks = blocks_of(self.model, target, self.by)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything beside plan and seed that a measurement depends on."""
        return {**super().identity, "runtime": self.runtime}

    def score(self, given: str, data: CalibrationSet | None, options: Mapping[str, Any]) -> Scores:
        """A score record; ``rounding`` is the damage of every format."""
        if given != ESTIMATOR:
            return super().score(given, data, options)
        return rounding_damage(
            self.model, self.data(0) if data is None else data, runtime=self.runtime, by=self.by, method=self.method,
            batch_size=self.batch_size, unwritten="plan", **options,
        )  # fmt: skip

    def weighed(self, scores: Scores) -> Scores:
        """The record with a table of damages: its own, or its values times relative rounding errors.

        A permuted table has the damage per relative rounding error of another block, times the block's own rounding errors.

        Raises:
            InvalidInput: A score below zero.
        """
        if "choices" in scores.extra:
            return scores
        if "order" in scores.extra:
            return dataclasses.replace(scores, extra={"choices": self._rebuilt(**scores.extra)})
        gain, table = scores.values(), self._relative()
        if gain.min() < 0:
            low = scores.names[int(gain.argmin())]
            raise InvalidInput(
                f"The score of {low} is {gain.min():g}.", "A sensitivity is zero or more.", "Shift the scores, or clip them."
            )
        damage = [[None if d is None else float(g) * d for d in row] for g, row in zip(gain, table["damage"], strict=True)]
        choices = {**table, "damage": damage, "measure": "score x relative rounding error"}
        return dataclasses.replace(scores, extra={**scores.extra, "choices": choices})

    def _rebuilt(self, table: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
        """A table of damages whose sensitivities, the damages per relative rounding error, are those of other blocks."""
        error = np.array(self._relative(tuple(table["formats"]))["damage"], dtype=np.float64)
        damage = np.array(table["damage"], dtype=np.float64)
        there = np.isfinite(damage) & (error > 0)
        sensitivity = np.divide(damage, error, out=np.zeros_like(damage), where=there)
        usual = sensitivity.sum(1) / np.maximum(there.sum(1), 1)  # where the other block does not have the format
        moved = np.where(there, sensitivity, usual[:, None])[list(order)] * error
        return {**table, "damage": [[None if np.isnan(d) else float(d) for d in row] for row in moved]}

    def _relative(self, formats: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The table of relative squared rounding errors, to nearest, in the given formats or in all."""
        if formats not in self._errors:
            found = rounding_damage(
                self.model, self.data(0), runtime=self.runtime, by=self.by, damage="relative", formats=formats, unwritten="plan"
            )
            self._errors[formats] = dict(found.extra["choices"])
        return self._errors[formats]


@dataclasses.dataclass
class Passes:
    """Sequences through the whole model: layer passes divided by the number of layers.

    Attributes:
        layers: Layers of the model.
        forward: Sequences, summed over layers, that went forward.
        backward: The same backward.
    """

    layers: int
    forward: int = 0
    backward: int = 0

    def to_dict(self) -> dict[str, float]:
        """``{forward, backward}`` in sequences through the whole model."""
        return {"forward": self.forward / self.layers, "backward": self.backward / self.layers}


@contextlib.contextmanager
def counted(model: nn.Module) -> Iterator[Passes]:
    """Count, inside, every call of every layer and every gradient that comes back to its output."""
    found = [layer for _, layer in layers(model)]
    passes = Passes(layers=max(1, len(found)))

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        """Count the rows of one call, and those whose gradient comes back."""
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        rows = int(hidden.shape[0])
        passes.forward += rows

        def back(_: torch.Tensor) -> None:
            passes.backward += rows

        if hidden.requires_grad and hidden.grad_fn is not None:
            hidden.register_hook(back)

    handles = [layer.register_forward_hook(hook) for layer in found]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
