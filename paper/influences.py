"""LayerIF's scores of a model on the training rows of a task, in both aggregations: what the paper's plans are made from.

Rows are the prompt with its answer, cut at the right; the loss is that of all real tokens. The released code counts padding in
the loss and reads attention weights only; neither is a part of the method, so neither is done. Wordings of prompts are ours
(:mod:`layerbudget.data.tasks`): those of the paper are not published.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerbudget.data.calibration import CalibrationSet
from layerbudget.data.tasks import Example, Task, load_task
from layerbudget.finetuning.rows import Rows
from layerbudget.models.blocks import describe
from layerbudget.records import Block
from layerbudget.scores import Scores
from layerbudget.sensitivity.gain import score

from .cells import Cells
from .setting import Setting


def text_rows(task: Task, examples: list[Example], tokenizer: Any, cutoff: int) -> CalibrationSet:
    """Prompt and answer of some rows as padded text."""
    rows = Rows(task, tokenizer, causal=True, cutoff=10**6)
    ids = [rows.encode(e)["input_ids"][:cutoff] for e in examples]
    longest = max(map(len, ids))
    mask = torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i in ids])
    padded = torch.tensor([i + [rows.pad] * (longest - len(i)) for i in ids])
    return CalibrationSet(input_ids=padded, attention_mask=mask, source=f"{task.name}, prompts and answers")


def drawn(task: Task, count: int, seed: int) -> list[Example]:
    """Training rows drawn without replacement."""
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(seed))[:count]
    return [task.train[int(i)] for i in order]


def influence_scores(
    model: nn.Module, tokenizer: Any, blocks: tuple[Block, ...], name: str, data_dir: Path, setting: Setting, cells: Cells,
    *, aggregation: str = "all", seed: int = 0,
) -> Scores:  # fmt: skip
    """Scores of one task.

    Args:
        model: The base model.
        tokenizer: Its tokenizer.
        blocks: Layers.
        name: Task.
        data_dir: Folder of the tasks' files.
        setting: Numbers of the run.
        cells: Where finished ones are kept.
        aggregation: ``all`` or ``positive`` (the paper's +ve).
        seed: Of the draw of rows.

    Raises:
        Elsewhere: Another part of the grid makes them.
    """
    task = load_task(name, data_dir)
    n, m = setting.influence_train, setting.influence_validation
    rows = drawn(task, n + m, seed)
    key = {"what": "influence", "task": task.digest, "model": describe(model)["digest"], "rows": [n, m, setting.cutoff, seed]}

    def make() -> dict[str, Any]:
        train, held = (text_rows(task, part, tokenizer, setting.cutoff) for part in (rows[:n], rows[n:]))
        return score(model, train, blocks, "layerif", validation=held).to_dict()

    record = Scores.from_dict(cells.own(key, make))
    values = record.extra["all" if aggregation == "all" else "positive"]
    return dataclasses.replace(record, gain=(tuple(values[b.name] for b in blocks),), standard_error=())
