"""Export: an llm-compressor recipe for a plan, and a lossless packed copy of a pruned checkpoint.

No runtime reads the packed copy: compressed-tensors dropped its sparse compressors with vLLM's sparse kernels, and no other
maintained format for unstructured zeros is left. It is for storage and transport; :func:`unpack` gives back every byte
of every tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...compressors.base import TREATMENTS, find_treatment
from ...errors import AlreadyExists, InvalidInput, NotFound
from ...plan import Plan
from ...records import write_text


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


def write_recipe(plan: Plan, path: Path | str, method: str = "wanda", *, pattern: str | None = None, **options: Any) -> Path:
    """Write :func:`recipe` to a file, atomically."""
    return write_text(path, recipe(plan, method, pattern=pattern), **options)


def pack(folder: Path | str, out: Path | str, *, minimum: float = 0.1) -> dict[str, int]:
    """Pack a pruned checkpoint: per tensor a bit mask and the values that are not zero.

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


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


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
