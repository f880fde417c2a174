"""Scores as named stages on disk: resumed after a crash, extended by more samples, merged, and reused when nothing changed.

A stage folder holds per-sequence gradient rows (exact or sketched), keyed by the content of a sequence: rows of one block of
one batch lie in ``rows/<batch>/<block>.npy``, and ``rows/<batch>/keys.json`` is written last, with a checksum of every file and
of itself, so a batch counts only when it is whole; one that is not is computed again. Scoring more samples computes the new
ones only; folders of several machines merge by copying. Gram matrices are read from disk two batches at a time, so memory is
bounded whatever the number of samples. Finished records of any estimator lie in ``results/``.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CorruptFile, InvalidInput, ModelMismatch, NotFound
from ..execution.loss import Data, FeatureSet
from ..models import blocks as model_blocks
from ..models.provenance import computation, versions
from ..progress import Progress, Steps
from ..records import Block, digest, dumps, read_json, write_text
from ..scores import Scores
from ..storage import reading
from ..storage.folders import checksum
from ..storage.parts import Parts
from ..storage.writing import new_file, sweep
from .curvature import gram
from .curvature.inner import inner

logger = logging.getLogger(__name__)


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
        self._seen: dict[Path, list[str] | None] = {}
        path = self.folder / "stage.json"
        found = _identity(path)
        if found is not None:
            differing = [k for k in identity if identity[k] != found.get(k)]
            if differing:
                key = differing[0]
                raise ModelMismatch(
                    f"{self.folder} was made with another {', '.join(differing)} ({found.get(key)}, now {identity[key]}).",
                    "A stage holds rows of one model, partition, sketch and seed, computed in one precision by one version.",
                    "Use another folder.",
                )
        else:
            write_text(path, dumps({"schema_version": 1, "identity": identity}), overwrite=True)

    def index(self) -> dict[str, tuple[str, int]]:
        """Where the row of every stored sequence lies: ``{key: (batch, row)}``; batches that are not whole do not count."""
        found: dict[str, tuple[str, int]] = {}
        for path in sorted((self.folder / "rows").glob("*/keys.json")):
            for row, key in enumerate(self._whole(path.parent) or ()):
                found.setdefault(key, (path.parent.name, row))
        return found

    def _whole(self, folder: Path) -> list[str] | None:
        """Keys of a batch whose files have the checksums that it was stored with; looked at once per run."""
        if folder not in self._seen:
            keys = _sealed_keys(folder, self.identity)
            if keys is None:
                logger.warning("%s is broken or half written; its sequences are computed again.", folder)
            self._seen[folder] = keys
        return self._seen[folder]

    def add(self, keys: Sequence[str], rows: Sequence[np.ndarray]) -> None:
        """Store the rows ``(batch, width)`` of every block; the keys come last and make them count."""
        folder = self.folder / "rows" / digest(list(keys))
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        sums = {}
        for k, values in enumerate(rows):
            file = folder / f"{k}.npy"
            with new_file(folder, file.name, lambda _, file=file: file) as temporary, open(temporary, "wb") as f:  # type: ignore[misc]
                np.save(f, values)
            sums[file.name] = checksum(file)
        record = {"keys": list(keys), "sums": sums}
        total = digest({**record, "identity": self.identity})
        write_text(folder / "keys.json", reading.dump({**record, "checksum": total}), overwrite=True)
        self._seen[folder] = list(keys)

    def load(self, batch: str, block: int) -> np.ndarray:
        """Rows of one block of one batch, mapped from disk."""
        return np.load(self.folder / "rows" / batch / f"{block}.npy", mmap_mode="r", allow_pickle=False)

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
            if source._whole(path.parent) is None or _sealed_keys(target, self.identity) is not None:
                continue
            shutil.copytree(path.parent, target, ignore=shutil.ignore_patterns(path.name), dirs_exist_ok=True)
            write_text(target / path.name, path.read_text(encoding="utf-8"), overwrite=True)  # last: now the batch counts
            self._seen.pop(target, None)
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


def _identity(path: Path) -> Mapping[str, Any] | None:
    """What a stage was made with; ``None`` where that is not known. Rows of other models fail their checksums then."""
    if not path.exists():
        return None
    try:
        found = read_json(path, "stage").get("identity")
    except CorruptFile:
        logger.warning("%s is broken and is written again.", path)
        return None
    return found if isinstance(found, Mapping) else {}


def _sealed_keys(folder: Path, identity: Mapping[str, Any]) -> list[str] | None:
    """Keys of a stored batch, if its files are what was written for this model."""
    try:
        record = reading.read(folder / "keys.json", "stage", limit=1 << 28)
    except (CorruptFile, NotFound):
        return None
    if not isinstance(record, dict) or "checksum" not in record:
        return None
    if record["checksum"] != digest({**{k: record.get(k) for k in ("keys", "sums")}, "identity": identity}):
        return None
    whole = all((folder / name).is_file() and checksum(folder / name) == value for name, value in record["sums"].items())
    return list(record["keys"]) if whole else None


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
    progress: Progress | None = None,
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
    tick = Steps(progress, len(missing))
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
    """Return the stored record of a request, or ``None``: there is none, or it is broken."""
    results = Path(folder) / "results"
    file = Parts(results, key, shared=True).find(key) if results.is_dir() else None
    return None if file is None else Scores.load(file)


def keep(folder: Path | str, key: str, scores: Scores) -> None:
    """Store the record of a request."""
    text = dumps(scores.to_dict())
    Parts(Path(folder) / "results", key, shared=True).put(key, "json", lambda path: path.write_text(text, encoding="utf-8"))
