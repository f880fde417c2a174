"""The course of a descent, and its finished steps on disk, so that an interrupted one continues where it was."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...compressors.treating import Found
from ...execution.inputs import InputMoments
from ...execution.processes import broadcast
from ...records import digest
from ...solvers.separable import Solution
from ...storage.parts import Parts


@dataclasses.dataclass(kw_only=True, eq=False)
class Trajectory:
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

    path: Trajectory
    found: Found
    reach: float
    trust: float


class Journal:
    """The last finished step of a descent, as a part of a run.

    Args:
        parts: Where the run keeps its parts; None keeps nothing.
        name: Tells the descents of a run apart.
    """

    def __init__(self, parts: Parts | None, name: str) -> None:
        self.parts = parts if parts is not None and parts.folder is not None else None
        self.name = f"path-{digest(name)}"

    def keep(self, path: Trajectory, found: Found, reach: float, trust: float) -> None:
        """Write the accepted steps, and the statistics with which the last one was treated."""
        if self.parts is None:
            return
        from safetensors.torch import save_file

        step = len(path.log) - 1
        tensors = {f"counts.{i}": torch.from_numpy(np.ascontiguousarray(c)) for i, c in enumerate(path.counts)}
        for name, statistics in found.items():
            tensors |= {f"{i}@{name}": s.value.clone() for i, s in enumerate(statistics) if s.value is not None}
        copies = {name: len(statistics) for name, statistics in found.items()}
        record = json.dumps({"log": path.log, "reach": reach, "trust": trust, "copies": copies})
        self.parts.put(f"{self.name}-{step}", "safetensors", lambda file: save_file(tensors, file, {"record": record}))
        before = self.parts.find(f"{self.name}-{step - 1}") if step else None
        if before is not None:
            before.unlink()

    def resume(self, kind: str) -> Held | None:
        """What was kept; None where nothing was. Of several processes the first one reads, and writes.

        Args:
            kind: Of the statistics.
        """
        return broadcast(lambda: self._read(kind))

    def _read(self, kind: str) -> Held | None:
        file = None if self.parts is None else self._last(self.parts)
        if file is None:
            return None
        from safetensors import safe_open
        from safetensors.torch import load_file

        held = load_file(file)
        with safe_open(file, framework="pt") as opened_file:
            record = json.loads(opened_file.metadata()["record"])
        path = Trajectory(counts=[held[f"counts.{i}"].numpy() for i in range(len(record["log"]))], log=record["log"])
        found = {
            name: [InputMoments(kind, value=held.get(f"{i}@{name}")) for i in range(copies)]
            for name, copies in record["copies"].items()
        }
        return Held(path=path, found=found, reach=record["reach"], trust=record["trust"])

    def _last(self, parts: Parts) -> Path | None:
        steps = [re.match(rf"{self.name}-(\d+)\.", f.name) for f in parts.folder.iterdir()] if parts.folder else []
        for step in sorted({int(m[1]) for m in steps if m}, reverse=True):
            file = parts.find(f"{self.name}-{step}")
            if file is not None:
                return file
        return None
