"""What a run at small and at full scale uses: the same code with other numbers. Paper: section 3.3 and Table 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from layerbudget.data.tasks import NAMES
from layerbudget.errors import NotFound
from layerbudget.evaluation.harness import LOCAL
from layerbudget.finetuning.protocol import PRESETS, Protocol

TASKS: Mapping[str, str] = {
    "cola": "CoLA", "mrpc": "MRPC", "commonsenseqa": "CommonsenseQA", "openbookqa": "OpenBookQA", "scienceqa": "ScienceQA",
}  # fmt: skip
METHODS: Mapping[str, str] = {"magnitude": "Magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT"}
CAPS: Mapping[str, float] = {"mistral": 0.51, "gemma": 0.55}
PER_LAYER = 5  # experts per layer of uniform MoLA: 160 for the 32 layers of Mistral-7B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Numbers of a run.

    Attributes:
        influence_train, influence_validation: Rows of a task for LayerIF's scores (the released notebook prints 300 and 50).
        cutoff: Tokens of such a row.
        samples, length: Calibration text of the pruners.
        limit: Questions per zero-shot task; None for all.
        calibrations: Tasks whose scores make the pruning plans; swept: those of the kappa study.
        tuned: Tasks that are fine-tuned.
        train_rows, test_rows: Of a fine-tuning; None for all.
        protocol: Of a fine-tuning.
        seeds: Of a fine-tuning (the paper has one run per cell).
        dtype: Of the model.
    """

    influence_train: int = 48
    influence_validation: int = 12
    cutoff: int = 192
    samples: int = 16
    length: int = 128
    limit: int | None = 30
    calibrations: tuple[str, ...] = ("cola", "mrpc")
    swept: tuple[str, ...] = ("cola",)
    tuned: tuple[str, ...] = ("cola", "commonsenseqa")
    train_rows: int | None = 64
    test_rows: int | None = 80
    protocol: Protocol = dataclasses.field(default_factory=lambda: Protocol(lr=1e-3, epochs=1, batch=16, warmup=2, cutoff=224))
    seeds: tuple[int, ...] = (0,)
    dtype: str = "float32"


SETTINGS: Mapping[str, Setting] = {
    "small": Setting(),
    "full": Setting(
        influence_train=300, influence_validation=50, cutoff=128, samples=128, length=2048, limit=None,
        calibrations=tuple(TASKS), swept=tuple(TASKS), tuned=tuple(TASKS), train_rows=None, test_rows=None,
        protocol=PRESETS["paper"], dtype="bfloat16",
    ),
}  # fmt: skip


def text_source(data_dir: Path | str | None, scale: str) -> str:
    """Calibration text of the pruners: C4 (a local sample at small scale, where there is one)."""
    local = None if data_dir is None else Path(data_dir) / "c4" / "c4-sample.jsonl"
    if scale == "full":
        return "c4"
    return str(local) if local is not None and local.is_file() else "stdlib"


def need_data(data_dir: Path | str | None) -> Path:
    """The folder of the tasks' files.

    Raises:
        NotFound: None was named, or it is not there.
    """
    if data_dir is None or not Path(data_dir).is_dir():
        raise NotFound(
            "The tasks' files are needed.",
            f"Folders below --data-dir hold them as they were published: {', '.join(sorted({*NAMES, *LOCAL}))}.",
            "Name that folder with --data-dir; those of the tasks that the experiment asks for are enough.",
        )
    return Path(data_dir)
