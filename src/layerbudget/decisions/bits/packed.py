"""A compressed-tensors folder: numbers packed by the package itself, an ordinary transformers checkpoint around them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ...compressors.formats import Format, find_format, need_packing
from ...compressors.quantisers import Rounded
from ...compressors.treating import matrices
from ...errors import BadModel, CoverageError
from ...models.blocks import config_of, layers, pretrained, weight_of
from ...models.loading import check_packed, silent
from ...models.machine import SHARE, free_bytes
from ...models.packed import EXPERTS, ZERO_POINTS
from ...storage.checkpoint import broken
from ...storage.source import save_weights
from .saved_names import CheckpointSlice, as_saved, experts_of, halved, names_of, pattern

SHARD = 1 << 29  # bytes of one file; one tensor may be larger
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape")


class PackedWriter:
    """Writes an ordinary transformers checkpoint into an empty folder, layer after layer, in files of limited size.

    Weights are read when their layer is asked for. What is no plain Linear has 16 bits, but for stacks of experts in a folder
    for vLLM: it reads every expert by itself (:func:`~layerbudget.decisions.bits.blocks.check_writable` refuses the rest); and
    but for what :func:`~layerbudget.decisions.bits.saved_names.halved` names.
    """

    def __init__(self, model: nn.Module, formats: Mapping[str, str], folder: Path, runtime: str = "transformers") -> None:
        need_packing()
        self.model, self.formats, self.folder = model, {n: find_format(f) for n, f in formats.items()}, folder
        self.modules = dict(model.named_modules())
        self.others = [n for n, m in self.modules.items() if isinstance(m, nn.Linear) and n not in self.formats]
        self.experts: dict[str, tuple[CheckpointSlice, ...]] = {}
        self.saved, self.fused = dict[str, str](), dict[str, str]()
        if runtime == "vllm":  # it reads the names of the first checkpoints, as transformers saves them
            self.experts = experts_of(model, list(formats))
            self.saved = names_of(model, [n for n in (*formats, *self.others) if n not in self.experts])
        else:
            # Stacks of experts keep the names that they have in the model: beside packed layers transformers 5.23 does not find
            # the experts one by one, which is how it would save them. So do all other matrices that stay in 16 bits.
            full = {id(p): n for n, p in model.named_parameters()}
            kept = (n for n in formats if self.formats[n].plain or n not in self.modules)
            self.fused = {n: full[id(weight_of(model, n)[1])] for n in kept}
        self.layers = tuple(f"{name}." for name, _ in layers(model))
        self.pending: dict[str, torch.Tensor] = {}
        self.shards: list[list[str]] = []
        self.total = 0
        self.config = json.loads(config_of(model).to_json_string(use_diff=False))  # infinite numbers in words that are JSON
        with silent():
            save_weights(model, folder, state_dict={})  # what belongs to a model beside its weights
        for file in folder.glob("*.safetensors*"):
            file.unlink()

    def tensors(self, piece: str, rounded: Mapping[str, Sequence[Rounded]]) -> dict[str, torch.Tensor]:
        """Return what the file holds of a layer (outside the layers: of ``""``) whose weights are at hand."""

        def inside(name: str) -> bool:
            return name.startswith(f"{piece}.") if piece else not name.startswith(self.layers)

        packed = {n: f for n, f in self.formats.items() if not f.plain and inside(n)}
        left, fused = {f"{n}.weight" if n in self.modules else n for n in packed}, set(self.fused.values())
        state = {n: t for n, t in pretrained(self.model).state_dict().items() if n not in left and inside(n)}
        contents = as_saved(self.model, {n: t for n, t in state.items() if n not in fused})
        contents |= {n: t.detach().clone() for n, t in state.items() if n in fused}
        contents = {n: t.to(torch.bfloat16) if halved(self.model, n, t) else t for n, t in contents.items()}
        for name, form in packed.items():
            weights = matrices(*weight_of(self.model, name))
            for part in self._parts(name):
                stored = _pack(part.take(weights[part.copy]), _rows(rounded[name][part.copy], part), form, part.name)
                contents |= {f"{part.name}.{key}": t for key, t in stored.items()}
        return contents

    def _parts(self, name: str) -> tuple[CheckpointSlice, ...]:
        """Parts of a matrix in the file: itself, or the experts of a stack."""
        return self.experts.get(name, (CheckpointSlice(name=self.saved.get(name, name)),))

    def restore(self, names: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put matrices that were written before into the model again."""
        for name in names:
            weights, form = matrices(*weight_of(self.model, name)), self.formats[name]
            for part in self._parts(name):
                rows = part.take(weights[part.copy])
                rows.copy_(rows.to(torch.bfloat16) if form.plain else _unpack(tensors, form, part.name))

    def names(self) -> dict[str, list[str]]:
        """Return the names in the file of every planned matrix's weights; those that are not there count nothing."""
        kinds = ("weight", *PARTS)
        each = {n: [part.name for part in self._parts(n)] for n in self.formats}
        apart = {n: [*parts, *(f"{part}.{kind}" for part in parts for kind in kinds)] for n, parts in each.items()}
        return apart | {n: [stored] for n, stored in self.fused.items()}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors of a piece; full files are written and no longer held."""
        for name, tensor in tensors.items():
            if self.pending and sum(t.nbytes for t in self.pending.values()) + tensor.nbytes > SHARD:
                self._write()
            self.pending[name] = tensor.contiguous()
            self.total += tensor.nbytes

    def _write(self) -> None:
        from safetensors.torch import save_file

        self.shards.append(list(self.pending))
        save_file(self.pending, self._shard(len(self.shards)), metadata={"format": "pt"})
        self.pending = {}

    def _shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.safetensors"

    def close(self) -> list[str]:
        """Finish the files, name them as transformers does, and write the configuration; returns notes."""
        if self.pending or not self.shards:
            self._write()
        count, where = len(self.shards), dict[str, str]()
        for number, names in enumerate(self.shards, 1):
            file = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._shard(number).rename(self.folder / file)
            where |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        record = self.config | {"quantization_config": self._quantization_config(), "dtype": "bfloat16"}
        record["architectures"] = [type(self.model).__name__]
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        (self.folder / "config.json").write_text(text, encoding="utf-8")
        kinds = {self.formats[n] for n in self.experts}
        alike = len(kinds) < 2 and all(f.packing == "pack-quantized" for f in kinds)
        notes = [] if all(f.symmetric for f in self.formats.values()) else [ZERO_POINTS]
        return notes if alike else [*notes, EXPERTS]

    def _quantization_config(self) -> dict[str, Any]:
        """The entry ``quantization_config`` of ``config.json``: one group per format, matrices by their names in the file.

        Those that have another name in transformers have both.
        """
        groups: dict[Format, list[str]] = {}
        for name, form in self.formats.items():
            model_names = [name] if name in self.saved else []
            groups.setdefault(form, []).extend(
                dict.fromkeys(pattern(n) for n in (*model_names, *(p.name for p in self._parts(name))))
            )
        plain = [p for form, patterns in groups.items() if form.plain for p in patterns if r"\d+" in p]
        groups = {form: patterns for form, patterns in groups.items() if not form.plain}
        idle = {"input_activations": None, "output_activations": None}
        config_groups = {
            f"group_{i}": {"targets": patterns, "weights": form.arguments(), **idle, "format": form.packing}
            for i, (form, patterns) in enumerate(groups.items())
        }
        packings = {form.packing for form in groups} or {"pack-quantized"}
        whole = [*self.others, *(n for n, f in self.formats.items() if f.plain and n not in self.experts)]
        whole += [self.saved[n] for n in whole if n in self.saved]
        return {
            "quant_method": "compressed-tensors",
            "format": packings.pop() if len(packings) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": sorted({*whole, *plain}),
            "config_groups": config_groups,
        }


def _rows(rounded: Rounded, part: CheckpointSlice) -> Rounded:
    """Tensors that go with some rows of a rounded matrix."""
    scale, zero = (None if t is None else part.take(t) for t in (rounded.scale, rounded.zero))
    return dataclasses.replace(rounded, scale=scale, zero=zero)


def _pack(weight: torch.Tensor, rounded: Rounded, form: Format, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one matrix ``(d_out, d_in)``; read back, they are the rounded weights."""
    packer, scheme = need_packing(form.packing)
    unpacked = {"weight": weight.float(), "weight_scale": rounded.scale, "weight_zero_point": rounded.zero}
    if form.floating:
        unpacked["weight_scale"] = cast(torch.Tensor, rounded.scale).float()
    if rounded.unit is not None:
        unpacked["weight_global_scale"] = torch.tensor([rounded.unit])
    how = scheme(targets=["Linear"], weights=form.arguments())
    stored = {k: v.contiguous() for k, v in packer.compress(unpacked, how).items() if v is not None}
    if form.floats is not None and form.floats.scale == "bfloat16":
        stored["weight_scale"] = stored["weight_scale"].to(torch.bfloat16)
    back = _unpack({f"{name}.{k}": v for k, v in stored.items()}, form, name)
    if not torch.equal(back.to(weight.dtype), weight):
        raise CoverageError(f"{name} reads back as other weights than were planned.", "", "Report this; nothing is kept.")
    return stored


def _unpack(tensors: Mapping[str, torch.Tensor], form: Format, name: str) -> torch.Tensor:
    """The rounded weights of one matrix, ``(d_out, d_in)`` float32, from the tensors that :func:`_pack` made."""
    packer, scheme = need_packing(form.packing)
    stored = {k: tensors[f"{name}.{k}"] for k in ("weight", *PARTS) if f"{name}.{k}" in tensors}
    stored["weight_scale"] = stored["weight_scale"].float()
    weight: torch.Tensor = packer.decompress(stored, scheme(targets=["Linear"], weights=form.arguments()))["weight"]
    return weight.float()


def check_loads(folder: Path, runtime: str) -> list[str]:
    """Load what was written, as a user will; returns notes: why it was not loaded, or that only vLLM may read it."""
    size, free = sum(f.stat().st_size for f in folder.glob("*.safetensors")), free_bytes("cpu")
    if size > SHARE * free:
        return [f"It was not loaded again: {size / 2**30:.3g} GiB of {free / 2**30:.3g} free are more than is risked."]
    try:
        with _alone():
            check_packed(folder)
    except BadModel as error:
        said = error.what.split(": ", 1)[-1].rstrip(".")
        if runtime == "vllm":
            return [f"transformers does not load it ({said}); vLLM, which it was planned for, was not tried."]
        raise CoverageError(
            f"transformers does not load what was written: {said}.",
            "Nothing is kept.",
            "Plan again: `plan bits` says before it measures which matrices cannot be packed; or plan with --runtime vllm.",
        ) from error
    return []


def _alone() -> contextlib.AbstractContextManager[None]:
    """A context in which the package loads without the other processes of a run, which do not load."""
    try:
        from compressed_tensors.offload.utils import as_single_threaded
    except ImportError:  # a version that does not share loading
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[None] = as_single_threaded()
    return made


def recount_safetensors(folder: Path) -> dict[str, int]:
    """Return the bytes of every tensor of a folder's safetensors files, from their headers."""
    tensor_bytes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as f:
            try:
                header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
            except ValueError as error:
                raise broken(file, "safetensors", error, "Write it again.") from error
        tensor_bytes |= {n: e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n != "__metadata__"}
    return tensor_bytes
