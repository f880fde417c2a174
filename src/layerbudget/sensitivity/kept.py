"""Blocks that an estimator has finished, kept while it goes on, so that a run that was stopped settles only the others.

A walk by layers settles one layer after the other: what a killed run had settled is read from ``parts/`` of the stage folder,
and that layer's matrices are neither summed nor decomposed again (its gradients are still passed on). In the whole graph the
passes are made again, the decompositions are not. Numbers come back bit by bit, so the record is that of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..records import Block
from ..storage.parts import Parts


class Kept:
    """Finished blocks of one request.

    Args:
        stage: The stage folder.
        key: Digest of the request: everything that changes a number.
        blocks: The blocks.
    """

    def __init__(self, stage: Path | str, key: str, blocks: Sequence[Block]) -> None:
        self.parts, self.key, self.blocks = Parts(Path(stage) / "parts", key, shared=True), key, blocks

    def found(self) -> dict[int, Any]:
        """What was kept, by number of the block; a broken part is not there."""
        files = {k: self.parts.find(self._name(k)) for k in range(len(self.blocks))}
        return {k: json.loads(f.read_text(encoding="utf-8")) for k, f in files.items() if f is not None}

    def put(self, k: int, record: Any) -> None:
        """Keep a block."""
        text = json.dumps(record)
        self.parts.put(self._name(k), "json", lambda path: path.write_text(text, encoding="utf-8"))

    def clear(self) -> None:
        """Remove the parts: the whole record is kept now."""
        self.parts.drop(f"{self.key}-")

    def _name(self, k: int) -> str:
        return f"{self.key}-{k}"


def matrices_of(blocks: Sequence[Block], done: Sequence[int]) -> frozenset[str]:
    """Names of the matrices of some blocks."""
    return frozenset(m.name for k in done for m in blocks[k].modules)
