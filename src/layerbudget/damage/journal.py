"""The course of a descent, and its finished steps on disk, so that an interrupted one continues where it was."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ModelMismatch
from ..program.solution import Solution
from ..records import SCHEMA_VERSION, digest, dumps, read_json, write_text
from ..running.inputs import Statistic
from ..treatments.treating import Found


@dataclasses.dataclass(kw_only=True, eq=False)
class Course:
    """Where a descent went.

    Attributes:
        counts: Accepted plans, the first included, shape ``(K,)`` each.
        log: One record per accepted step: ``step, length, trust, moved, predicted, measured, divergence, passes`` and
            ``held_out`` where there was a judge; the first has only the last of these.
        solution: Of the last program.
        goal: Where the last point's model wants to go, not visited; None where it wants nothing.
        promise: What that would change, by the model.
    """

    counts: list[np.ndarray]
    log: list[dict[str, Any]]
    solution: Solution | None = None
    goal: np.ndarray | None = None
    promise: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What a journal holds: the course, the statistics of its last point, and how far was looked and is trusted there."""

    path: Course
    found: Found
    reach: float
    trust: float


class Journal:
    """A folder with the last finished step of a descent.

    Args:
        folder: Where; None keeps nothing.
        key: What must be equal for a continued descent.
        name: Tells several descents in one folder apart.

    Raises:
        ModelMismatch: The folder belongs to another descent.
    """

    def __init__(self, folder: Path | str | None, key: Mapping[str, Any], name: str = "path") -> None:
        self.folder = None if folder is None else Path(folder)
        self.name, self.key = name.replace(":", "-"), digest(dict(key))
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._log.exists() and read_json(self._log, "journal").get("key") != self.key:
            raise ModelMismatch(
                f"{self.folder} holds steps with another model, text, target, method or version.",
                "They continue only with the same ones.", "Choose another folder, or remove it.",
            )  # fmt: skip

    @property
    def _log(self) -> Path:
        return Path(self.folder or "") / f"{self.name}.json"

    def _state(self, step: int) -> Path:
        return Path(self.folder or "") / f"{self.name}-{step}.safetensors"

    def keep(self, path: Course, found: Found, reach: float, trust: float) -> None:
        """Write the accepted steps, and the statistics with which the last one was treated."""
        if self.folder is None:
            return
        from safetensors.torch import save_file

        step = len(path.log) - 1
        tensors = {f"counts.{i}": torch.from_numpy(np.ascontiguousarray(c)) for i, c in enumerate(path.counts)}
        for name, statistics in found.items():
            tensors |= {f"{i}@{name}": s.value.clone() for i, s in enumerate(statistics) if s.value is not None}
        temporary = self._state(step).with_suffix(".part")
        save_file(tensors, temporary)
        os.replace(temporary, self._state(step))
        copies = {name: len(statistics) for name, statistics in found.items()}
        record = {"key": self.key, "log": path.log, "reach": reach, "trust": trust, "copies": copies}
        write_text(self._log, dumps({"schema_version": SCHEMA_VERSION, **record}), overwrite=True)
        if step:
            self._state(step - 1).unlink(missing_ok=True)

    def resume(self, kind: str) -> Held | None:
        """What was kept; None where nothing was.

        Args:
            kind: Of the statistics.
        """
        if self.folder is None or not self._log.exists():
            return None
        from safetensors.torch import load_file

        record = read_json(self._log, "journal")
        held = load_file(self._state(len(record["log"]) - 1))
        path = Course(counts=[held[f"counts.{i}"].numpy() for i in range(len(record["log"]))], log=record["log"])
        found = {
            name: [Statistic(kind, value=held.get(f"{i}@{name}")) for i in range(copies)]
            for name, copies in record["copies"].items()
        }
        return Held(path=path, found=found, reach=record["reach"], trust=record["trust"])
