"""The tensors of a checkpoint as its files have them: names, precisions, and one tensor at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadModel, CorruptFile, NotFound
from . import reading

INDEX = "model.safetensors.index.json"
GGUF_FILE = "model.gguf"  # in a folder


@dataclasses.dataclass(frozen=True)
class _Index:
    """Which file of a folder holds which tensor."""

    weight_map: dict[str, str]


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
            index = reading.read(file, "weight index", limit=1 << 28, as_type=_Index, remedy="Download it again.")
            return [folder / part for part in sorted(set(index.weight_map.values()))]
        if file.is_file():
            return [file]
    return []


def check_files(folder: Path) -> None:
    """Refuse a local folder whose weights lie in parts of which one is not there, or the index that names them.

    Raises:
        NotFound: A part or the index is missing.
        CorruptFile: The index does not read.
    """
    files = weight_files(folder)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise NotFound(
            f"{folder} lacks {len(missing)} of the {len(files)} files of its weights, first {missing[0].name}.",
            "Its index names them.",
            "Download or save the whole checkpoint.",
        )
    for kind in ("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin") if not files else ():
        if parts := sorted(folder.glob(kind)):
            index = f"{kind.partition('-')[0]}{parts[0].suffix}.index.json"
            raise NotFound(
                f"{folder} has {parts[0].name} and no {index}.", "That says which part has what.", "Download it too."
            )


def broken(file: Path, kind: str, error: Exception | str, remedy: str = "Download or save it again.") -> CorruptFile:
    """Return the error of a file of weights that is not of its kind: a pointer of Git LFS, or anything else."""
    with contextlib.suppress(OSError), open(file, "rb") as opened:
        if opened.read(40).startswith(b"version https://git-lfs"):
            return CorruptFile(f"{file} is a pointer of Git LFS, not the weights.", "", "Fetch them: git lfs pull.")
    return CorruptFile(f"{file} does not read as {kind}: {str(error).rstrip('.') or type(error).__name__}.", "", remedy)


def need_all(name: str, where: str, report: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a checkpoint that lacks tensors, has other ones, or packed ones, by what transformers reports of its loading.

    Only tensors whose names begin with the ``prefix`` count.

    Raises:
        BadModel: It does.
    """
    stored = Stored(Path(where))
    others = sorted(each for each in report["mismatched_keys"] if each[0].startswith(prefix))
    if others:
        tensor, has, made = others[0]
        file = stored.names.get(tensor, f"the checkpoint of {name}")
        more = f" {len(others)} tensors differ so." if len(others) > 1 else ""
        raise BadModel(
            f"{tensor} in {file} has the shape {tuple(has)}, and by config.json it has {tuple(made)}.{more}",
            "Weights and configuration are of one model.",
            "Download or save both again.",
        )
    within = (k for k in report["missing_keys"] if k.startswith(prefix))
    missing = sorted(k for k in within if "pooler" not in k)  # of the pooler nothing here depends
    if missing:
        wrapped = next((k.removesuffix(missing[0]) for k in stored.names if k.endswith(f".{missing[0]}")), "")
        if wrapped and all(wrapped + k in stored.names for k in missing):
            raise BadModel(
                f"The names of tensors in the checkpoint of {name} begin with {wrapped!r}, such as {wrapped}{missing[0]}.",
                "It was saved from a model in a wrapper (torch.compile, DataParallel).",
                "Save the model within the wrapper.",
            )
        raise BadModel(
            f"The checkpoint of {name} lacks {len(missing)} tensors, first {missing[0]}.",
            "transformers would fill them with random numbers.",
            "Download or save the whole checkpoint.",
        )
    file = Path(where) / "config.json"
    if file.is_file() and not json.loads(file.read_bytes()).get("quantization_config"):
        _need_numbers(name, stored, report["unexpected_keys"])


def _need_numbers(name: str, stored: Stored, unread: Collection[str]) -> None:
    """Refuse weights that are stored as codes, with scales elsewhere, where no configuration says how they are read."""
    for tensor in sorted(n for n in stored.names.keys() - set(unread) if n.endswith(("weight", "bias"))):
        kind = stored.kind(tensor)
        whole, few = kind.startswith(("I", "U", "BOOL", "int", "uint", "bool")), kind.lower().startswith(("f8", "float8"))
        of_it = [n for n in unread if n.startswith(tensor.removesuffix("weight")) and "scale" in n] if few else []
        if not whole and not of_it:
            continue
        beside = "no model computes with whole numbers" if whole else f"{min(of_it)} beside it is not read"
        raise BadModel(
            f"{tensor} in the checkpoint of {name} is stored as {kind}, and {beside}.",
            "config.json has no quantization_config, which says how codes become weights.",
            "Copy that entry from where the model was quantised, or take the model that was not.",
        )


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
                raise broken(file, "safetensors", error) from error
            self.names |= dict.fromkeys(_header(file), file)

    def _pickled(self, file: Path) -> dict[str, Any]:
        """The tensors of a file that ``torch.save`` wrote, mapped where they can be."""
        import torch

        if file not in self._loaded:
            mapped = zipfile.is_zipfile(file)  # the older form of torch.save cannot be
            self._loaded[file] = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        return self._loaded[file]

    def dtype(self, name: str) -> Any:
        """The precision of a tensor, where it is one that a model computes in; else None."""
        import torch

        kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if name in self._sizes:
            return kinds.get(self._sizes[name][0])
        kind = self._pickled(self.names[name])[name].dtype
        return kind if kind in kinds.values() else None

    def kind(self, name: str) -> str:
        """The precision of a tensor as its file names it: ``BF16``, ``I8``."""
        return self._sizes[name][0] if name in self._sizes else str(self._pickled(self.names[name])[name].dtype)[6:]

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
