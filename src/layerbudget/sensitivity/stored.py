"""Parts that a run of scores keeps under ``resume=DIR``, all in one folder of :class:`layerbudget.storage.parts.Parts`.

Finished records of every estimator are found again by the digest of everything that a score depends on. K-FAC, EK-FAC and
rank-gain keep every block that is settled until the record is there: a walk by layers settles one layer after the other, and
what a killed run had settled is neither summed nor decomposed again (its gradients are still passed on). fisher-gram keeps the
gradients of every sequence, exact or sketched, by the content of the sequence: more samples cost only themselves, and folders
of several machines merge by copying. Numbers come back bit by bit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..canonical import digest, dumps
from ..errors import InvalidInput
from ..execution.loss import Data
from ..execution.processes import alone, broadcast, process_group
from ..models import blocks as model_blocks
from ..models.machine import computation, versions
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from ..storage.parts import Parts
from .curvature.gradients import collect_rows
from .curvature.gram import inner


class Finished:
    """Blocks that were settled, by number in ``records``, and the record, of one request."""

    def __init__(self, folder: Path | str, request: Mapping[str, Any], blocks: Sequence[Block]) -> None:
        self.key = digest(request)
        self.parts = Parts(folder, request, shared=True)
        files = {k: self.parts.find(f"block-{self.key}-{k}") for k in range(len(blocks))}
        self.records = {k: json.loads(f.read_text(encoding="utf-8")) for k, f in files.items() if f is not None}

    def put(self, k: int, record: Any) -> None:
        """Keep a block."""
        text = json.dumps(record)
        self.parts.put(f"block-{self.key}-{k}", "json", lambda path: path.write_text(text, encoding="utf-8"))

    def scores(self) -> Scores | None:
        """The record; ``None`` where there is none that is whole."""
        file = self.parts.find(f"scores-{self.key}")
        return None if file is None else Scores.load(file)

    def finish(self, scores: Scores) -> None:
        """Keep the record in the place of its blocks."""
        text = dumps(scores.to_dict())
        self.parts.put(f"scores-{self.key}", "json", lambda path: path.write_text(text, encoding="utf-8"))
        self.parts.drop(f"block-{self.key}-")


def request_of(
    model: nn.Module, data: Data | None, blocks: Sequence[Block], estimator: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that a score depends on."""
    return {
        **_identity(model, blocks),
        "data": None if data is None else data.digest,
        "estimator": estimator,
        # a set of sequences by its content: a repr leaves out the middle of a long tensor
        "arguments": {k: getattr(v, "digest", None) or repr(v) for k, v in sorted(arguments.items())},
    }


def _identity(model: nn.Module, blocks: Sequence[Block]) -> dict[str, Any]:
    return {
        "model": model_blocks.fingerprint(model),
        "blocks": digest([b.to_dict() for b in blocks]),
        "computation": computation(model),
        "versions": versions(),
    }


def gram_matrices(
    folder: Path | str,
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int,
    sketch: tuple[int, int] | None,
    seed: int,
    walk: str = "auto",
    progress: Progress | None = None,
) -> np.ndarray:
    """Gram matrices ``(K, n, n)`` from stored rows; sequences that the folder lacks are computed and stored first.

    Args:
        folder: Where the rows are kept.
        model: The model.
        data: The calibration set.
        blocks: Blocks of the model.
        batch_size: Sequences per pass.
        sketch: ``(r_out, r_in)`` of a Kronecker sketch, or None.
        seed: Of the sketch.
        walk: ``whole``, ``layers`` or ``auto``, as in :func:`layerbudget.execution.backward.feed`.
        progress: Called with sequences done and in total.

    Several processes share the sequences that are missing, and then the blocks.

    Raises:
        InvalidInput: The processes do not see the same folder.
    """
    request = {**_identity(model, blocks), "sketch": sketch, "seed": seed if sketch else None}
    parts = Parts(folder, request, shared=True)
    names = [f"rows-{digest(request)}-{data.select([i]).digest}" for i in range(data.samples)]
    group = process_group()
    missing = broadcast(lambda: [i for i, name in enumerate(names) if parts.find(name) is None])[group.rank :: group.size]
    tick = Steps(progress, len(missing))
    for start in range(0, len(missing), batch_size):
        some = missing[start : start + batch_size]
        with alone():
            rows = collect_rows(
                model, data.select(some), blocks, batch_size=batch_size, sketch=sketch, seed=seed, walk=walk, tick=tick
            )
        for i, *block_rows in zip(some, *rows, strict=True):
            arrays = {str(k): row.cpu().numpy() for k, row in enumerate(block_rows)}
            parts.put(names[i], "npz", functools.partial(_save, arrays))
    group.barrier()
    files = [file for file in map(parts.find, names) if file is not None]
    if len(files) < len(names):
        raise InvalidInput(
            f"{folder} has {len(files)} of {len(names)} sequences' gradients: it is not one folder for all processes.",
            "Every process keeps its own sequences there.",
            "Choose a folder that all machines share.",
        )
    grams, owners = np.zeros((len(blocks), len(files), len(files))), group.owners(blocks)
    for k in [k for k, owner in enumerate(owners) if owner == group.rank]:
        grams[k] = inner(torch.from_numpy(np.stack([_row(f, k) for f in files])))
    return group.sum(grams)


def _save(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def _row(file: Path, block: int) -> np.ndarray:
    with np.load(file, allow_pickle=False) as arrays:
        return arrays[str(block)]
