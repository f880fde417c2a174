"""What every group of rows of a matrix loses: the part of a plan that is too large for its JSON file. No torch.

The counts lie beside ``plan.json`` in ``plan.rows.safetensors``, one integer vector per matrix; the plan holds their digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CorruptFile, InvalidInput, NotFound


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowGroups:
    """Pruned entries per group of rows.

    Attributes:
        size: Rows of a group; the last group of a matrix may be smaller.
        counts: By full name of the matrix, shape ``(groups,)`` each, int64. Empty where only the plan's JSON is at hand.
        stored: What the plan's JSON says of them, where they are not at hand.
    """

    size: int
    counts: Mapping[str, np.ndarray]
    stored: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidInput(f"A group has {self.size} rows.", "It has at least one.", "Use rows:1 or more.")

    @property
    def digest(self) -> str:
        """Content hash of size, names and counts."""
        if not self.counts:
            return str(self.stored.get("digest"))
        h = hashlib.sha256(f"{self.size}".encode())
        for name in sorted(self.counts):
            h.update(name.encode() + b"\0" + np.ascontiguousarray(self.counts[name], dtype="<i8").tobytes())
        return h.hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """What the plan's JSON says."""
        if not self.counts:
            return dict(self.stored)
        return {"size": self.size, "groups": int(sum(len(c) for c in self.counts.values())), "digest": self.digest}

    def save(self, plan: Path | str) -> Path:
        """Write the counts beside a plan's file, atomically."""
        from safetensors.numpy import save_file

        path = beside(plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file({n: np.ascontiguousarray(c, dtype=np.int64) for n, c in self.counts.items()}, temporary)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    @classmethod
    def load(cls, plan: Path | str, record: Mapping[str, Any]) -> RowGroups:
        """Read the counts beside a plan's file.

        Raises:
            NotFound: They are not there.
            CorruptFile: They are not those that the plan means.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = beside(plan)
        if not path.is_file():
            raise NotFound(f"{plan} decides groups of rows and {path} is missing.", "", "Copy both files, or plan again.")
        try:
            found = cls(size=int(record["size"]), counts=load_file(path))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CorruptFile(f"{path} holds no counts ({error}).", "", "Plan again.") from error
        if found.digest != record.get("digest"):
            raise CorruptFile(
                f"{path} holds other counts ({found.digest}) than {plan} means ({record.get('digest')}).", "",
                "Copy the two files that were written together, or plan again.",
            )  # fmt: skip
        return found

    def require(self) -> RowGroups:
        """The same, refused where the counts are not at hand.

        Raises:
            NotFound: Only the plan's JSON was read.
        """
        if not self.counts:
            raise NotFound("The plan decides groups of rows, and their counts are not at hand.", "", "Use Plan.load(path).")
        return self


def beside(plan: Path | str) -> Path:
    """Where the counts of a plan's file lie.

    >>> beside("out/plan.json").name
    'plan.rows.safetensors'
    """
    return Path(plan).with_suffix(".rows.safetensors")


def members(rows: int, size: int) -> np.ndarray:
    """Rows of every group of a matrix.

    >>> members(10, 4).tolist()
    [4, 4, 2]
    """
    found = np.full(-(-rows // size), size, dtype=np.int64)
    found[-1] = rows - size * (found.size - 1)
    return found
