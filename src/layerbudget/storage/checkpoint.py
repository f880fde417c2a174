"""The tensors of a checkpoint as its files have them: names, precisions, and one tensor at a time."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from ..errors import CorruptFile

INDEX = "model.safetensors.index.json"
GGUF_FILE = "model.gguf"  # in a folder


def gguf_of(name: str) -> Path | None:
    """The GGUF file that a path names: itself, or that of a folder without ``config.json``; None of other models."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        path = path / GGUF_FILE
    return path if path.suffix == ".gguf" and path.is_file() else None


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads the weights of a folder from, in their order."""
    for name in ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"):
        file = folder / name
        if file.is_file() and name.endswith(".index.json"):
            return [folder / part for part in sorted(set(json.loads(file.read_bytes())["weight_map"].values()))]
        if file.is_file():
            return [file]
    return []


class Stored:
    """Tensors of a folder by name. Nothing but the headers of safetensors files is read before a tensor is asked for.

    Attributes:
        names: Of all tensors, with the file of each.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.names: dict[str, Path] = {}
        self._sizes: dict[str, tuple[str, int]] = {}
        self._loaded: dict[Path, dict[str, Any]] = {}
        for file in weight_files(folder):
            if file.suffix != ".safetensors":
                self.names |= dict.fromkeys(self._pickled(file), file)
                continue
            try:
                with safe_open(file, "pt"):
                    self._sizes |= _header(file)
            except (SafetensorError, OSError) as error:
                raise CorruptFile(f"{file} is not a safetensors file ({error}).", "", "Download or save it again.") from error
            self.names |= dict.fromkeys(_header(file), file)

    def _pickled(self, file: Path) -> dict[str, Any]:
        """The tensors of a file that ``torch.save`` wrote, mapped."""
        import torch

        if file not in self._loaded:
            self._loaded[file] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return self._loaded[file]

    def dtype(self, name: str) -> Any:
        """The precision of a tensor, where it is one that a model computes in; else None."""
        import torch

        kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if name in self._sizes:
            return kinds.get(self._sizes[name][0])
        kind = self._pickled(self.names[name])[name].dtype
        return kind if kind in kinds.values() else None

    def bytes(self, name: str) -> int:
        """The bytes of a tensor."""
        return self._sizes[name][1] if name in self._sizes else int(self._pickled(self.names[name])[name].nbytes)

    @functools.cached_property
    def most(self) -> Any:
        """The precision that most bytes are in."""
        sizes: dict[Any, int] = {}
        for name in self.names:
            sizes[self.dtype(name)] = sizes.get(self.dtype(name), 0) + self.bytes(name)
        return max(sizes, key=lambda kind: sizes[kind], default=None)

    def tensor(self, name: str) -> Any:
        """A tensor."""
        from safetensors import safe_open

        if name not in self._sizes:
            return self._pickled(self.names[name])[name]
        with safe_open(self.names[name], "pt") as handle:
            return handle.get_tensor(name)


def _header(file: Path) -> dict[str, tuple[str, int]]:
    """``{name: (precision, bytes)}`` of a safetensors file."""
    with open(file, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return {n: (e["dtype"], e["data_offsets"][1] - e["data_offsets"][0]) for n, e in header.items() if n != "__metadata__"}
