"""The seven zero-shot tasks, prepared once and asked of many models: the harness's own requests and scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from layerbudget.evaluation.harness import LOCAL, local_tasks
from layerbudget.evaluation.statistics import mean_accuracy


class ZeroShot:
    """Tasks with their requests.

    Args:
        data_dir: Folder of the tasks' files.
        limit: Questions per task; None for all.
        tasks: Names.
        batch_size: Requests per forward.

    Raises:
        MissingDependency: lm-eval is not installed.
        InvalidInput, NotFound: A task without a local reader, or whose files are not there.
    """

    def __init__(
        self, data_dir: Path | str, limit: int | None, tasks: Sequence[str] = tuple(LOCAL), batch_size: int = 32
    ) -> None:
        self.tasks, self.batch_size = local_tasks(tasks, data_dir), batch_size
        for task in self.tasks.values():
            task.build_all_requests(limit=limit, rank=0, world_size=1)

    @property
    def identity(self) -> dict[str, int]:
        """Requests per task."""
        return {name: len(task.instances) for name, task in self.tasks.items()}

    def ask(self, model: nn.Module, tokenizer: Any) -> dict[str, dict[str, Any]]:
        """``{task: {acc, stderr, correct}}`` of one model."""
        from lm_eval.api.metrics import mean, mean_stderr
        from lm_eval.models.huggingface import HFLM

        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.batch_size)
        found = {}
        for name, task in self.tasks.items():
            answers = wrapped.loglikelihood(task.instances, disable_tqdm=True)
            by_doc: dict[int, list[tuple[int, Any]]] = {}
            docs = {}
            for request, answer in zip(task.instances, answers, strict=True):
                by_doc.setdefault(request.doc_id, []).append((request.idx, answer))
                docs[request.doc_id] = request.doc
            sorted_answers = {i: [a for _, a in sorted(pairs, key=lambda p: p[0])] for i, pairs in by_doc.items()}
            correct = [float(task.process_results(docs[i], sorted_answers[i])["acc"]) for i in sorted(by_doc)]
            found[name] = {"acc": float(mean(correct)), "stderr": float(mean_stderr(correct)), "correct": correct}
        return found


def percent(tasks: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Mean accuracy over tasks and its standard error, in percent."""
    found = mean_accuracy(tasks)
    return 100.0 * found["acc"], 100.0 * found["stderr"]
