"""Compare two fine-tuned plans on the same task, paired over seeds and over questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidInput, NotFound
from ..evaluation import statistics


def compare(first: Path | str, second: Path | str) -> dict[str, Any]:
    """Compare two result folders of the same task, paired.

    Args:
        first: Folder that :func:`layerbudget.lora.finetune.finetune` wrote.
        second: Another one, for example of a uniform plan.

    Returns:
        By split: ``seeds`` (paired t over shared seeds, the task's metric; null below two) and ``samples`` (McNemar over all
        questions of the first shared seed), each with a sentence.

    Raises:
        NotFound: A folder without results.
        InvalidInput: Different tasks, or no shared seed.
    """
    folders = [Path(first), Path(second)]
    for folder in folders:
        if not (folder / "result.json").is_file():
            raise NotFound(f"{folder} has no result.json.", "", "Point to a folder that `layerbudget finetune` wrote.")
    a, b = (json.loads((f / "result.json").read_text(encoding="utf-8")) for f in folders)
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
    names = (a["rule"], b["rule"]) if a["rule"] != b["rule"] else (folders[0].name, folders[1].name)
    for split, truth in labels.items():
        values = [[r["metrics"][split][a["metric"]] for r in side] for side in runs]
        over_seeds = statistics.paired_t(*values) if len(shared) > 1 else None
        right = [np.asarray(side[0]["predictions"][split]) == np.asarray(truth) for side in runs]
        over_samples = statistics.mcnemar(*right)
        outcome[split] = {
            "metric": a["metric"],
            "seeds": {**vars(over_seeds), "sentence": over_seeds.sentence(names[0], names[1], a["metric"])}
            if over_seeds
            else None,
            "samples": {**vars(over_samples), "sentence": over_samples.sentence(names[0], names[1], "accuracy")},
        }
    return outcome
