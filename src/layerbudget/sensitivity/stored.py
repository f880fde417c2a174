"""Parts that a run of scores keeps under ``resume=DIR``, all in one folder of :class:`layerbudget.storage.parts.Parts`.

Finished records of every estimator are found again by the digest of everything that a score depends on. K-FAC, EK-FAC and
rank-gain keep every block that is settled until the record is there: a walk by layers settles one layer after the other, and
what a killed run had settled is neither summed nor decomposed again (its gradients are still passed on). fisher-gram keeps the
gradient rows of every sequence, exact or sketched, by the content of the sequence: more samples cost only themselves, folders
of several machines merge by copying, and Gram matrices are read two batches at a time. Numbers come back bit by bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInput
from ..execution.loss import Data, FeatureSet
from ..models import blocks as model_blocks
from ..models.machine import computation, versions
from ..progress import Progress, Steps
from ..records import Block, digest, dumps
from ..scores import Scores
from ..storage.parts import Parts
from .curvature.gram import collect_rows, inner


class Finished:
    """Blocks that were settled, by number in ``found``, and the record, of one request."""

    def __init__(self, folder: Path | str, request: Mapping[str, Any], blocks: Sequence[Block]) -> None:
        self.key = digest(request)
        self.parts = Parts(folder, request, shared=True)
        files = {k: self.parts.find(f"block-{self.key}-{k}") for k in range(len(blocks))}
        self.found = {k: json.loads(f.read_text(encoding="utf-8")) for k, f in files.items() if f is not None}

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


def sequence_keys(data: Data) -> list[str]:
    """Content hash of every sequence (tokens, mask, labels): what a stored row belongs to."""
    parts = [data.inputs, data.labels] if isinstance(data, FeatureSet) else [data.input_ids, data.attention_mask, data.labels]
    keys = []
    for i in range(data.samples):
        h = hashlib.sha256()
        for part in parts:
            h.update(b"-" if part is None else part[i].cpu().numpy().tobytes())
        keys.append(h.hexdigest()[:16])
    return keys


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

    Raises:
        InvalidInput: Two sequences of the data are the same.
    """
    keys = sequence_keys(data)
    if len(set(keys)) < len(keys):
        raise InvalidInput(
            f"{len(keys) - len(set(keys))} of the {len(keys)} sequences are duplicates.", "Each must occur once.", "Drop them."
        )
    request = {**_identity(model, blocks), "sketch": sketch, "seed": seed if sketch else None}
    parts, prefix = Parts(folder, request, shared=True), f"rows-{digest(request)}-"
    files = [parts.find(name) for name in parts.names() if name.startswith(prefix)]
    have = {key for file in files if file is not None for key in _keys(file)}
    missing = [i for i, key in enumerate(keys) if key not in have]
    tick = Steps(progress, len(missing))
    for start in range(0, len(missing), batch_size):
        some = missing[start : start + batch_size]
        rows = collect_rows(
            model, data.select(some), blocks, batch_size=batch_size, sketch=sketch, seed=seed, walk=walk, tick=tick
        )
        own = [keys[i] for i in some]
        held = {"keys": np.array(own), **{str(k): values.cpu().numpy() for k, values in enumerate(rows)}}
        parts.put(prefix + digest(own), "npz", lambda path, held=held: _save(path, held))  # type: ignore[misc]
        files.append(parts.find(prefix + digest(own)))
    places: dict[str, tuple[Path, int]] = {}
    for file in (f for f in files if f is not None):
        for row, key in enumerate(_keys(file)):
            places.setdefault(key, (file, row))
    batches: dict[Path, list[tuple[int, int]]] = {}
    for i, key in enumerate(keys):
        batches.setdefault(places[key][0], []).append((i, places[key][1]))
    return np.stack([_gram(len(keys), batches, k) for k in range(len(blocks))])


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def _keys(file: Path) -> list[str]:
    with np.load(file, allow_pickle=False) as held:
        return [str(key) for key in held["keys"]]


def _rows(file: Path, block: int, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    with np.load(file, allow_pickle=False) as held:
        return torch.from_numpy(held[str(block)][[row for _, row in places]])


def _gram(n: int, batches: Mapping[Path, Sequence[tuple[int, int]]], block: int) -> np.ndarray:
    """``(n, n)`` inner products of one block, two batches in memory at a time."""
    out, files = np.zeros((n, n)), sorted(batches)
    for s, first in enumerate(files):
        a = _rows(first, block, batches[first])
        for second in files[s:]:
            b = a if second == first else _rows(second, block, batches[second])
            tile = inner(a, b)
            rows, columns = [i for i, _ in batches[first]], [i for i, _ in batches[second]]
            out[np.ix_(rows, columns)] = tile
            out[np.ix_(columns, rows)] = tile.T
    return out
