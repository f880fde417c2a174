"""Two evaluations of the same questions and the same text: is one model better? McNemar and paired t.

Per task the exact McNemar test on the logged answers; over all tasks the same test of the difference of their mean accuracy;
for text the paired t-test over windows or rows, of the mean loss per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidInput, ModelMismatch
from .statistics import Comparison, mcnemar, mcnemar_over_tasks, paired_t

Rows = Mapping[str, Mapping[str, Any]]


def mean_accuracy(tasks: Rows) -> dict[str, Any]:
    """Unweighted mean over tasks, with its standard error ``sqrt(sum_t se_t^2) / T`` (questions are the sample, tasks are not).

    >>> mean_accuracy({"a": {"acc": 0.5, "stderr": 0.3}, "b": {"acc": 1.0, "stderr": 0.4}})
    {'acc': 0.75, 'stderr': 0.25, 'tasks': ['a', 'b']}

    Raises:
        InvalidInput: No task.
    """
    if not tasks:
        raise InvalidInput("There is no task to average.", "At least one is needed.", "Name some with --tasks.")
    error = math.sqrt(sum(float(r["stderr"]) ** 2 for r in tasks.values())) / len(tasks)
    return {"acc": sum(float(r["acc"]) for r in tasks.values()) / len(tasks), "stderr": error, "tasks": list(tasks)}


def compare_means(first: Rows, second: Rows) -> Comparison:
    """The exact McNemar test over all tasks, of the difference of mean accuracies."""
    return mcnemar_over_tasks([(row["correct"], second[name]["correct"]) for name, row in first.items()])


def compare_results(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str] = ("A", "B")) -> dict[str, Any]:
    """Compare two results of ``evaluate``.

    Args:
        first: With ``tasks`` (each with ``correct`` and ``digest``) and ``perplexity`` (each with ``nll``, ``counts`` and
            ``digest``).
        second: Another one, of the same questions and text.
        names: How to call them.

    Returns:
        ``{tasks: {name: test}, mean (two tasks and more), perplexity: {source: test}, sentences[]}``; differences are first
        minus second, of accuracies and of nats per token.

    Raises:
        ModelMismatch: They answered other questions, or read other text.
        InvalidInput: They have nothing in common.
    """
    a, b = names
    tasks = [t for t in first["tasks"] if t in second["tasks"]]
    texts = [s for s in first["perplexity"] if s in second["perplexity"]]
    if not tasks and not texts:
        raise InvalidInput(
            "The two evaluations share no task and no text.", "Something must be paired.", "Evaluate both on one."
        )
    for what, chosen in (("tasks", tasks), ("perplexity", texts)):
        for name in chosen:
            _same(first[what][name], second[what][name], name)
    found: dict[str, Any] = {"tasks": {}, "perplexity": {}, "sentences": []}
    for name in tasks:
        test = mcnemar(first["tasks"][name]["correct"], second["tasks"][name]["correct"])
        found["tasks"][name] = vars(test)
        found["sentences"].append(f"{name}: {test.sentence(a, b, 'accuracy')}")
    if len(tasks) > 1:
        means = [mean_accuracy({t: side["tasks"][t] for t in tasks}) for side in (first, second)]
        test = compare_means({t: first["tasks"][t] for t in tasks}, second["tasks"])
        found["mean"] = {"first": means[0], "second": means[1], **vars(test)}
        found["sentences"].append(f"mean of {len(tasks)} tasks: {test.sentence(a, b, 'accuracy')}")
    for name in texts:
        one, other = first["perplexity"][name], second["perplexity"][name]
        test = paired_t(one["nll"], other["nll"], one["counts"])
        found["perplexity"][name] = vars(test)
        found["sentences"].append(f"{name}: {_fewer(test, a, b)}")
    return found


def _fewer(test: Comparison, a: str, b: str) -> str:
    """A sentence about losses, of which less is better."""
    size = f"{test.difference:+.4f} nats per token (95 % {test.low:+.4f} to {test.high:+.4f}, p = {test.p:.2g}, n = {test.n})"
    if test.p >= 0.05:
        return f"{a} cannot be told from {b}: {size}."
    return f"{a} {'is behind' if test.difference > 0 else 'beats'} {b}: {size}."


def _same(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> None:
    values = "correct" if "correct" in first else "nll"
    if values not in first or values not in second or (values == "nll" and "counts" not in first):
        raise InvalidInput(f"An evaluation of {name} holds no single answers.", "", "Evaluate again with this release.")
    if first.get("digest") != second.get("digest") or len(first[values]) != len(second[values]):
        raise ModelMismatch(
            f"The two evaluations of {name} are of other questions or other text.", "They must be the same ones, in order.",
            "Use the same data, --limit, --length and --windows.",
        )  # fmt: skip
