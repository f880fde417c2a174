"""Matrices that were rounded with a model's inputs, in the order of a GGUF file that exists.

Error feedback reads the inputs of every matrix, and a GGUF file has none: the model in transformers has them. llama.cpp's
converter moves rows (heads whose halves become neighbours, gate and up of experts), a different way for every architecture, and
keeps every row as it is. So no table of architectures is needed: the place of a row is found by its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.ggml import dequantise
from ...compressors.quantisers import Rounded
from ...compressors.treating import matrices
from ...errors import InvalidInput, ModelMismatch
from ...llama_cpp.imatrix import ENDINGS
from ...models.blocks import weight_of

_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FINE = "Q8_0"  # its rows are those of a model that was read from the same file
ROWS_TOLD = (*_TORCH, _FINE)  #: Types of tensors whose rows are found in a model.


class PlacedRows:
    """Takes the rounded matrices of a model piece after piece, and keeps them as tensors of a file.

    Args:
        model: Its weights are those that the file was converted from, and not yet rounded.
        stored: Tensors of the file that hold a matrix, by its name; several matrices may share one (single experts).
        tensors: All tensors of the file, by name, as the package ``gguf`` reads them.
        source: Path of the file, for messages.
        folder: Keeps what was made.

    Raises:
        ModelMismatch: A row of the file is in no matrix of the model.
        InvalidInput: The file was quantised before.
    """

    def __init__(
        self,
        model: nn.Module,
        stored: Mapping[str, Sequence[str]],
        tensors: Mapping[str, Any],
        source: Path,
        folder: Path,
    ) -> None:
        self.folder, self.made = folder, dict[str, Path]()
        self.sums: Mapping[str, torch.Tensor] = {}  # what matrices' inputs come to, by name
        self.owners: dict[str, list[str]] = {}
        for matrix, names in stored.items():
            for name in names:
                self.owners.setdefault(name, []).append(matrix)
        self.orders: dict[str, list[np.ndarray]] = {}
        for name, owners in self.owners.items():
            tensor = tensors[name]
            kind, orders = tensor.tensor_type.name, list[np.ndarray | None]()
            if kind in ROWS_TOLD:
                copies, dtype = tensor.data.reshape(-1, *tensor.data.shape[-2:]), _TORCH.get(kind, torch.float32)
                copies = [dequantise(rows, kind) for rows in copies] if kind == _FINE else copies
                views = [view for owner in owners for view in matrices(*weight_of(model, owner))]
                orders = [_order(view, rows, dtype) for view, rows in zip(views, copies, strict=True)]
            if kind not in _TORCH and (not orders or any(order is None for order in orders)):
                what = f"{name} of {source} is in {kind}, and its rows cannot be told any more."
                raise InvalidInput(what, "Error feedback takes a file in 16 or 32 bits.", "Convert with --outtype f16.")
            if any(order is None for order in orders):
                what = (
                    f"Rows of {name} in {source} are in no row of {owners[0]}: the converter changed them, or the file is old."
                )
                raise ModelMismatch(what, "", "Convert the model again, or use --method weighted with an importance matrix.")
            self.orders[name] = [order for order in orders if order is not None]

    def tensors(self, piece: str, rounded: Mapping[str, Sequence[Rounded]]) -> dict[str, torch.Tensor]:
        """Return the tensors of a piece whose matrices are all bytes, as :mod:`layerbudget.llama_cpp.writer` does."""
        contents = {}
        for name in dict.fromkeys(n for n, owners in self.owners.items() if rounded.keys() & set(owners)):
            parts = [r.data for owner in self.owners[name] for r in rounded[owner]]
            if any(part is None for part in parts):
                continue  # plain numbers: those of the file
            rows = [part[order] for part, order in zip(parts, self.orders[name], strict=True) if part is not None]
            contents[name] = torch.from_numpy(np.stack(rows))
        return contents

    def names(self) -> dict[str, list[str]]:
        """Return the names of sums of inputs: every matrix has its own, for some may share a tensor."""
        return {matrix: [matrix] for owners in self.owners.values() for matrix in owners}

    def importances(self) -> dict[str, torch.Tensor]:
        """Return the sums of the tensors of the file, as an importance matrix has them."""
        known = {name: owners for name, owners in self.owners.items() if all(o + ENDINGS[0] in self.sums for o in owners)}
        return {
            name + ending: torch.cat([self.sums[owner + ending] for owner in owners])
            for name, owners in known.items()
            for ending in ENDINGS
        }

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the tensors of a piece."""
        for name, data in tensors.items():
            self.made[name] = self.folder / f"{len(self.made)}.npy"
            np.save(self.made[name], data.numpy())


def _order(weight: torch.Tensor, rows: np.ndarray, dtype: torch.dtype) -> np.ndarray | None:
    """Which row of a matrix ``(R, d_in)`` each of some rows of a file is, ``(r,)``; None where one is missing."""
    weight_rows = weight.detach().to(dtype).contiguous().cpu().view(torch.uint8).numpy()
    rows = np.ascontiguousarray(rows).view(np.uint8)
    if rows.shape[1] != weight_rows.shape[1]:
        return None
    if rows.shape == weight_rows.shape and np.array_equal(rows, weight_rows):
        return np.arange(len(rows))
    places = {row.tobytes(): i for i, row in reversed(list(enumerate(weight_rows)))}
    order = [places.get(row.tobytes(), -1) for row in rows]
    return None if min(order) < 0 else np.array(order)
