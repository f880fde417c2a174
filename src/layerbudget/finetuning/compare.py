"""Compare two fine-tuned plans on the same task, paired over seeds and over questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptFile, InvalidInput, NotFound
from ..evaluation import statistics
from ..records import read_json

_ONE = (
    "One training each: whether another would do the same cannot be said. Train both with two seeds or more "
    "(--seeds 0 1 2 --resume)."
)


def read_result(folder: Path | str) -> dict[str, Any]:
    """Summary of a fine-tuning folder.

    Raises:
        NotFound: It holds none.
        CorruptFile: Its ``result.json`` is of something else.
    """
    path = Path(folder) / "result.json"
    if not path.is_file():
        raise NotFound(f"{folder} has no result.json.", "", "Point to a folder that `layerbudget finetune` wrote.")
    record = read_json(path, "finetune") if path.stat().st_size else {}
    lacking = [k for k in ("seeds", "identity", "task", "metric", "rule") if k not in record]
    if lacking:
        raise CorruptFile(
            f"{path} holds no fine-tuning ({', '.join(lacking)} missing).",
            "",
            "Point to a folder that `layerbudget finetune` wrote.",
        )
    return record


def compare(first: Path | str, second: Path | str) -> dict[str, Any]:
    """Compare two result folders of the same task, paired.

    Args:
        first: Folder that :func:`layerbudget.finetuning.finetune.finetune` wrote.
        second: Another one, for example of a uniform plan.

    Returns:
        By split: ``seeds`` (paired t over shared seeds, the task's metric; null below two), ``samples`` (McNemar over all
        questions of the first shared seed; for text a paired t over its held-out rows), each with a sentence, and ``verdict``:
        whether another training would do the same, which only seeds can say.

    Raises:
        NotFound, CorruptFile: A folder without results of fine-tuning.
        InvalidInput: Different tasks, or no shared seed.
    """
    folders = [Path(first), Path(second)]
    a, b = (read_result(folder) for folder in folders)
    shared = [s for s in a["seeds"] if s in b["seeds"]]
    if a["identity"]["task"] != b["identity"]["task"] or not shared:
        raise InvalidInput(
            f"{first} holds {a['task']} with seeds {a['seeds']}, {second} holds {b['task']} with seeds {b['seeds']}.",
            "The same task and at least one shared seed are needed.",
            "Run both with the same --task and --seeds.",
        )
    labels = json.loads((folders[0] / "labels.json").read_text(encoding="utf-8"))
    runs = [[json.loads((f / f"seed-{s}" / "result.json").read_text(encoding="utf-8")) for s in shared] for f in folders]
    outcome: dict[str, Any] = {}
    one, other = (a["rule"], b["rule"]) if a["rule"] != b["rule"] else (folders[0].name, folders[1].name)
    for split, truth in labels.items():
        values = [[r["metrics"][split][a["metric"]] for r in side] for side in runs]
        over_seeds = statistics.paired_t(*values) if len(shared) > 1 else None
        lower = a["metric"] == "loss"
        if lower:
            mine, theirs = (side[0]["losses"][split] for side in runs)
            over_samples = statistics.paired_t(mine, theirs, truth)
        else:
            right = [np.asarray(side[0]["predictions"][split]) == np.asarray(truth) for side in runs]
            over_samples = statistics.mcnemar(*right)
        size = over_samples.size(one, other, "nats per token" if lower else "accuracy")
        samples = f"The trainings of seed {shared[0]} alone, over held-out rows: {size}. That says nothing of another training."
        seeds = over_seeds and over_seeds.sentence(one, other, a["metric"], lower_is_better=lower)
        outcome[split] = {
            "metric": a["metric"], "verdict": f"Over {len(shared)} trainings each: {seeds}" if seeds else _ONE,
            "seeds": {**vars(over_seeds), "sentence": seeds} if over_seeds else None,
            "samples": {**vars(over_samples), "sentence": samples},
        }  # fmt: skip
    return outcome
