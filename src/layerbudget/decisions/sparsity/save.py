"""The files of a pruned model: an ordinary transformers checkpoint that carries its plan, a packed copy, and a recipe."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compressors.base import TREATMENTS, find_treatment
from ...errors import AlreadyExists, CorruptFile, InvalidInput, NotFound
from ...models.blocks import pretrained
from ...models.offload import mapped
from ...plan import Plan
from ...storage import reading
from ...storage.folders import new_folder
from ...storage.writing import check_space
from .receipt import Receipt

BESIDE = 1 << 22  # bytes of tokenizer, plan and receipt
_SHARD = 1e9  # bytes of the largest file of a streamed model; otherwise the model may be one file
_HEADER = 100_000_000  # bytes of a safetensors header: the format's own bound
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def check_room(model: nn.Module, out: Path | str, *, resume: Path | str | None = None, plan: Plan | None = None) -> None:
    """Refuse to make a checkpoint as large as this model where it could not be saved.

    A file is written twice while its metadata are added. A folder of parts holds the weights that the plan changes.

    Args:
        model: The model.
        out: Where its checkpoint will lie.
        resume: Where finished layers are kept meanwhile.
        plan: The plan, whose matrices those layers are.

    Raises:
        InvalidInput: Says what is needed and what is free.
    """
    held = {id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    size = sum(held.values())
    needs: dict[Path | str, float] = {out: size + min(size, _SHARD if mapped(model) is not None else size) + BESIDE}
    if resume is not None and plan is not None:
        parameters = next(iter(model.parameters()))
        kept = sum(f.stat().st_size for f in Path(resume).iterdir() if f.is_file()) if Path(resume).is_dir() else 0
        needs[resume] = max(0, int(plan.numel.sum()) * parameters.element_size() - kept)
    check_space(needs)


def save_pruned(
    model: nn.Module, tokenizer: Any, plan: Plan, receipt: Receipt, out_dir: Path | str, *, overwrite: bool = False
) -> Path:
    """Write checkpoint, tokenizer, ``plan.json`` and ``receipt.json``, and return the folder.

    The folder appears complete or not at all. The weights are stored densely, zeros included, so that every runtime reads
    them; no ``sparsity_config`` is written (runtimes without sparse kernels refuse such models). The plan's digest, the
    method and the recounted sparsity are in the metadata of every safetensors file.

    Args:
        model: The pruned model.
        tokenizer: Saved beside it where it is not None.
        plan: The plan that was applied.
        receipt: What :func:`layerbudget.decisions.sparsity.apply.prune` returned.
        out_dir: Must not exist, or be empty.
        overwrite: Replace what an earlier call wrote: the files that the folder's ``manifest.json`` names, and no others.

    Raises:
        AlreadyExists: The folder exists and is not empty (with ``overwrite``: and is none of ours).
    """
    with new_folder(out_dir, overwrite=overwrite) as temporary:
        limits: dict[str, Any] = {} if mapped(model) is None else {"max_shard_size": "1GB"}
        pretrained(model).save_pretrained(temporary, **limits)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        plan.save(temporary / "plan.json")
        receipt.save(temporary / "receipt.json")
        metadata = {
            "layerbudget_plan": plan.digest,
            "layerbudget_method": receipt.method,
            "layerbudget_sparsity": f"{receipt.sparsity:.6f}",
        }
        for file in temporary.glob("*.safetensors"):
            add_metadata(file, metadata)
    return Path(out_dir)


def read_metadata(file: Path | str) -> dict[str, str]:
    """Metadata of a safetensors file."""
    with open(file, "rb") as f:
        return _header(f, file)[0].get("__metadata__", {})


def _header(f: Any, file: Path | str) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(f.read(8), "little")
    if size > _HEADER:
        raise CorruptFile(f"{file} is not a safetensors file (a header of {size} bytes).", "", "Save the model again.")
    found = reading.parse(f.read(size), str(file), "safetensors", as_type=dict[str, Any], remedy="Save the model again.")
    return found, size


def add_metadata(file: Path | str, metadata: Mapping[str, str]) -> None:
    """Add metadata to a safetensors file: the header is rewritten, the tensors are copied as bytes."""
    file = Path(file)
    temporary = file.with_suffix(".part")
    with open(file, "rb") as source, open(temporary, "wb") as target:
        header, _ = _header(source, file)
        header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, target, 1 << 24)
    os.replace(temporary, file)


def recipe(plan: Plan, method: str = "wanda", *, pattern: str | None = None, digits: int = 4) -> str:
    """An llm-compressor recipe (YAML) with one modifier per distinct ratio.

    Every modifier is a stage of its own (two modifiers of one kind in one stage are one YAML key, and the second would win).

    Args:
        plan: A sparsity plan.
        method: ``wanda`` or ``sparsegpt``.
        pattern: ``n:m``, for all blocks.
        digits: The blocks' planned sparsities are rounded to so many digits; equal ones share a modifier.

    Raises:
        InvalidInput: Another kind of plan, or ``magnitude`` (that modifier needs a training schedule).
    """
    modifier = find_treatment(method).modifier
    if plan.kind != "sparsity" or modifier is None:
        known = " and ".join(name for name, t in TREATMENTS.all().items() if t.modifier)
        raise InvalidInput(
            f"A recipe for method {method!r} and a plan of kind {plan.kind} cannot be written.",
            f"Methods are {known}, the kind is sparsity.",
            f"Prune with layerbudget instead, or say --method {known.split()[0]}.",
        )
    groups: dict[float, list[str]] = {}
    if plan.rows is not None:
        raise InvalidInput(
            f"The plan decides groups of {plan.rows.size} rows.", "A recipe has one sparsity per matrix.", "Plan by linear."
        )
    for block in plan.blocks:
        if block.count:
            groups.setdefault(round(block.value, digits), []).extend(block.modules)
    lines = [f"# {plan.rule} plan {plan.digest}: {len(groups)} distinct ratios, total sparsity {plan.sparsity:.6f}"]
    for i, (ratio, modules) in enumerate(groups.items()):
        lines += [
            f"prune_{i}_stage:",
            f"  prune_{i}_modifiers:",
            f"    {modifier}:",
            f"      sparsity: {ratio}",
            f"      mask_structure: {json.dumps(pattern or '0:0')}",
            f"      targets: {json.dumps(modules)}",
        ]
    return "\n".join(lines) + "\n"


def pack(folder: Path | str, out: Path | str, *, minimum: float = 0.1) -> dict[str, int]:
    """Pack a pruned checkpoint: per tensor a bit mask and the values that are not zero.

    No runtime reads the file: compressed-tensors dropped its sparse compressors with vLLM's sparse kernels, and no other
    maintained format for unstructured zeros is left. It is for storage and transport; :func:`unpack` gives back every byte.

    Args:
        folder: Checkpoint folder with safetensors files.
        out: File to write; must not exist.
        minimum: Tensors with a smaller share of zeros are kept as they are.

    Returns:
        ``{"dense": bytes, "packed": bytes}``.

    Raises:
        NotFound: No safetensors file in the folder.
        AlreadyExists: The output exists.
    """
    from safetensors.torch import load_file, save_file

    files, out = sorted(Path(folder).glob("*.safetensors")), Path(out)
    if not files:
        raise NotFound(f"{folder} holds no safetensors file.", "", "Give the folder that prune wrote.")
    if out.exists():
        raise AlreadyExists(f"{out} exists already.", "", "Choose another file.")
    packed: dict[str, torch.Tensor] = {}
    shapes: dict[str, Any] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            flat = tensor.reshape(-1)
            keep = flat.view(_BITS[flat.element_size()]) != 0
            if float(keep.float().mean()) > 1 - minimum:
                packed[name] = tensor
                continue
            shapes[name] = list(tensor.shape)
            packed[f"{name}.values"] = flat[keep].contiguous()
            packed[f"{name}.mask"] = _to_bits(keep)
    temporary = out.with_name(f".{out.name}.part")
    try:
        save_file(packed, temporary, metadata={"format": "layerbudget-bitmask", "shapes": json.dumps(shapes)})
        os.replace(temporary, out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return {"dense": sum(f.stat().st_size for f in files), "packed": out.stat().st_size}


def _to_bits(mask: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).reshape(-1, 8)
    return (padded * _POWERS).sum(1, dtype=torch.uint8)


def _from_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    return ((bits[:, None] & _POWERS) != 0).reshape(-1)[:count]


def unpack(file: Path | str) -> Mapping[str, torch.Tensor]:
    """Tensors of a packed checkpoint, as they were.

    Raises:
        NotFound: No such file.
    """
    from safetensors import safe_open

    if not Path(file).is_file():
        raise NotFound(f"There is no file {file}.", "", "Check the path.")
    out: dict[str, torch.Tensor] = {}
    with safe_open(file, framework="pt") as f:
        shapes = json.loads(f.metadata()["shapes"])
        plain = [k for k in f.keys() if k.rsplit(".", 1)[0] not in shapes or k in shapes]
        for name in plain:
            out[name] = f.get_tensor(name)
        for name, shape in shapes.items():
            values = f.get_tensor(f"{name}.values")
            flat = torch.zeros(int(torch.tensor(shape).prod()), dtype=values.dtype)
            flat[_from_bits(f.get_tensor(f"{name}.mask"), len(flat))] = values
            out[name] = flat.reshape(shape)
    return out
