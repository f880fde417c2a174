"""Scores as named stages on disk: resumed after a crash, extended by more samples, merged, and reused when nothing changed.

A stage folder holds per-sequence gradient rows (exact or sketched), keyed by the content of a sequence: rows of one block of
one batch lie in ``rows/<batch>/<block>.npy``, and ``rows/<batch>/keys.json`` is written last, so a batch counts only when it is
whole. Scoring more samples computes the new ones only; folders of several machines merge by copying. Gram matrices are
read from disk two batches at a time, so memory is bounded whatever the number of samples. Finished records of any estimator lie
in ``results/<request>.json``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import blocks as model_blocks
from ..errors import InvalidInput, ModelMismatch, NotFound
from ..provenance import computation, versions
from ..records import Block, digest, dumps, read_json, write_text
from ..running.loss import Data, FeatureSet
from .curvature import common, gram
from .curvature.inner import inner
from .record import Scores


def sequence_keys(data: Data) -> list[str]:
    """Content hash of every sequence (tokens, mask, labels): what a stored row belongs to."""
    if isinstance(data, FeatureSet):
        parts: list[torch.Tensor | None] = [data.inputs, data.labels]
    else:
        parts = [data.input_ids, data.attention_mask, data.labels]
    keys = []
    for i in range(data.samples):
        h = hashlib.sha256()
        for part in parts:
            h.update(b"-" if part is None else part[i].cpu().numpy().tobytes())
        keys.append(h.hexdigest()[:16])
    return keys


def identity(model: nn.Module, blocks: Sequence[Block], sketch: tuple[int, int] | None, seed: int) -> dict[str, Any]:
    """What rows of a stage depend on besides the sequence."""
    return {
        "model": model_blocks.fingerprint(model),
        "blocks": digest([b.to_dict() for b in blocks]),
        "sketch": list(sketch) if sketch else None,
        "seed": seed if sketch else None,
        "computation": computation(model),
        "versions": versions(),
    }


class Stage:
    """A folder of gradient rows of one model, partition and sketch.

    Args:
        folder: The stage folder; made when absent.
        identity: See :func:`identity`; must equal what the folder was made with.

    Raises:
        ModelMismatch: The folder belongs to another model, partition, sketch or seed.
    """

    def __init__(self, folder: Path | str, identity: dict[str, Any]) -> None:
        self.folder, self.identity = Path(folder), identity
        path = self.folder / "stage.json"
        if path.exists():
            found = read_json(path, "stage").get("identity") or {}
            differing = [k for k in identity if identity[k] != found.get(k)]
            if differing:
                key = differing[0]
                raise ModelMismatch(
                    f"{self.folder} was made with another {', '.join(differing)} ({found.get(key)}, now {identity[key]}).",
                    "A stage holds rows of one model, partition, sketch and seed, computed in one precision by one version.",
                    "Use another folder.",
                )
        else:
            write_text(path, dumps({"schema_version": 1, "identity": identity}))

    def index(self) -> dict[str, tuple[str, int]]:
        """Where the row of every stored sequence lies: ``{key: (batch, row)}``."""
        found: dict[str, tuple[str, int]] = {}
        for path in sorted((self.folder / "rows").glob("*/keys.json")):
            for row, key in enumerate(json.loads(path.read_text(encoding="utf-8"))):
                found.setdefault(key, (path.parent.name, row))
        return found

    def add(self, keys: Sequence[str], rows: Sequence[np.ndarray]) -> None:
        """Store the rows ``(batch, width)`` of every block; the keys come last and make them count."""
        name = digest(list(keys))
        folder = self.folder / "rows" / name
        folder.mkdir(parents=True, exist_ok=True)
        for k, values in enumerate(rows):
            np.save(folder / f"{k}.npy", values)
        write_text(folder / "keys.json", json.dumps(list(keys)), overwrite=True)

    def load(self, batch: str, block: int) -> np.ndarray:
        """Rows of one block of one batch, mapped from disk."""
        return np.load(self.folder / "rows" / batch / f"{block}.npy", mmap_mode="r")

    def merge(self, other: Path | str) -> int:
        """Copy the batches of another stage of the same identity; returns how many were new.

        Raises:
            NotFound: There is no stage in that folder.
            ModelMismatch: The other stage belongs to another model, partition, sketch or seed.
        """
        if not (Path(other) / "stage.json").is_file():
            raise NotFound(f"{other} holds no stage.", "", "Give a folder that --stage filled.")
        source, new = Stage(other, self.identity), 0
        for path in sorted((source.folder / "rows").glob("*/keys.json")):
            target = self.folder / "rows" / path.parent.name
            if not (target / path.name).exists():  # keys come last here too: a batch counts when it is whole
                shutil.copytree(path.parent, target, ignore=shutil.ignore_patterns(path.name), dirs_exist_ok=True)
                write_text(target / path.name, path.read_text(encoding="utf-8"), overwrite=True)
                new += 1
        return new

    def gram(self, keys: Sequence[str], block: int, index: dict[str, tuple[str, int]] | None = None) -> np.ndarray:
        """``(n, n)`` Gram matrix of one block over the named sequences, two batches in memory at a time."""
        index = self.index() if index is None else index
        places: dict[str, list[tuple[int, int]]] = {}
        for i, key in enumerate(keys):
            batch, row = index[key]
            places.setdefault(batch, []).append((i, row))
        out = np.zeros((len(keys), len(keys)))
        names = sorted(places)
        for s, first in enumerate(names):
            a = self._pick(first, block, places[first])
            for second in names[s:]:
                b = a if second == first else self._pick(second, block, places[second])
                tile = inner(a, b)
                rows, columns = [i for i, _ in places[first]], [i for i, _ in places[second]]
                out[np.ix_(rows, columns)] = tile
                out[np.ix_(columns, rows)] = tile.T
        return out

    def _pick(self, batch: str, block: int, places: list[tuple[int, int]]) -> torch.Tensor:
        return torch.from_numpy(np.array(self.load(batch, block)[[row for _, row in places]]))


def gram_matrices(
    stage: Stage,
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int,
    sketch: tuple[int, int] | None,
    seed: int,
    walk: str = "auto",
    progress: common.Progress | None = None,
) -> tuple[np.ndarray, int]:
    """Gram matrices of every block from a stage; sequences that it lacks are computed and stored first.

    Returns:
        ``(K, n, n)`` and the number of sequences that had to be computed.

    Raises:
        InvalidInput: Two sequences of the data are the same.
    """
    keys = sequence_keys(data)
    if len(set(keys)) < len(keys):
        raise InvalidInput(
            f"{len(keys) - len(set(keys))} of the {len(keys)} sequences are duplicates.", "Each must occur once.", "Drop them."
        )
    have = stage.index()
    missing = [i for i, key in enumerate(keys) if key not in have]
    tick = common.Ticker(progress, len(missing))
    for start in range(0, len(missing), batch_size):
        part = missing[start : start + batch_size]
        rows = gram.collect_rows(
            model, data.select(part), blocks, batch_size=batch_size, sketch=sketch, seed=seed, walk=walk, tick=tick
        )
        stage.add([keys[i] for i in part], [v.cpu().numpy() for v in rows.values])
    have = stage.index()
    return np.stack([stage.gram(keys, k, have) for k in range(len(blocks))]), len(missing)


def request(model: nn.Module, data: Data | None, blocks: Sequence[Block], estimator: str, arguments: dict[str, Any]) -> str:
    """Content hash of everything that a score depends on."""
    return digest(
        {
            "model": model_blocks.fingerprint(model),
            "data": None if data is None else data.digest,
            "blocks": [b.to_dict() for b in blocks],
            "estimator": estimator,
            # a set of sequences by its content: a repr leaves out the middle of a long tensor
            "arguments": {k: getattr(v, "digest", None) or repr(v) for k, v in sorted(arguments.items())},
            "computation": computation(model),
            "versions": versions(),
        }
    )


def finished(folder: Path | str, key: str) -> Scores | None:
    """Return the stored record of a request, or ``None``."""
    path = Path(folder) / "results" / f"{key}.json"
    return Scores.load(path) if path.is_file() else None


def keep(folder: Path | str, key: str, scores: Scores) -> None:
    """Store the record of a request."""
    scores.save(Path(folder) / "results" / f"{key}.json", overwrite=True)
