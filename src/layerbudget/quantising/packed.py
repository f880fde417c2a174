"""Write a compressed-tensors folder: integers packed by the package itself, an ordinary transformers checkpoint around them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blocks import config_of, matrix_of, pretrained
from ..errors import CoverageError, InvalidInput, MissingDependency
from ..treatments.formats import Format, find_format
from ..treatments.rounding import Rounded
from ..treatments.storing import Stored


def need_packing() -> tuple[Any, Any]:
    """The packer of compressed-tensors and its scheme.

    Raises:
        MissingDependency: It is not installed.
    """
    try:
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
        from compressed_tensors.quantization import QuantizationScheme
    except ImportError as error:
        raise MissingDependency(
            "Writing these formats needs the package compressed-tensors.", "", "Install layerbudget[bits], or plan for gguf."
        ) from error
    return PackedQuantizationCompressor, QuantizationScheme


def scheme_words(form: Format) -> dict[str, Any]:
    """Arguments of a format as compressed-tensors names them."""
    shape: dict[str, Any] = {"strategy": "channel"} if form.group is None else {"strategy": "group", "group_size": form.group}
    return {"num_bits": form.bits, "type": "int", "symmetric": form.symmetric, "dynamic": False, **shape}


def pack(weight: torch.Tensor, rounded: Rounded, form: Format, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one matrix; read back, they are the rounded weights.

    Args:
        weight: ``(d_out, d_in)``, on the grid of the format (as near as its own precision holds that).
        rounded: Its scales and zero points.
        form: The format.
        name: Full name, for the message.

    Raises:
        CoverageError: Read back they are others.
        MissingDependency: Without the package.
    """
    packer, scheme = need_packing()
    given = {"weight": weight.float(), "weight_scale": rounded.scale, "weight_zero_point": rounded.zero}
    how = scheme(targets=["Linear"], weights=scheme_words(form))
    stored = packer.compress(given, how)
    back = packer.decompress({**stored, "weight_scale": stored["weight_scale"].float()}, how)["weight"]
    if not torch.equal(back.to(weight.dtype), weight):
        raise CoverageError(f"{name} reads back as other weights than were planned.", "", "Report this; nothing is kept.")
    return {k: v.contiguous() for k, v in stored.items()}


def quantization_config(formats: Mapping[str, str], others: list[str]) -> dict[str, Any]:
    """The entry ``quantization_config`` of ``config.json``: one group per format, matrices by their names."""
    groups: dict[str, list[str]] = {}
    for name, form in formats.items():
        if not find_format(form).plain:
            groups.setdefault(form, []).append(name)
    plain = [n for n, f in formats.items() if find_format(f).plain]
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": sorted({*plain, *others}),
        "config_groups": {
            f"group_{i}": {
                "targets": [f"re:^{re.escape(n)}$" for n in names], "weights": scheme_words(find_format(form)),
                "input_activations": None, "output_activations": None, "format": "pack-quantized",
            }
            for i, (form, names) in enumerate(groups.items())
        },
    }  # fmt: skip


def write_packed(model: nn.Module, stored: Stored, folder: Path) -> dict[str, int]:
    """Write config and tensors of a model that was rounded.

    Args:
        model: After :func:`~layerbudget.treatments.storing.store`.
        stored: What that returned.
        folder: An empty folder.

    Returns:
        Bytes of every planned matrix, as they should be found again.

    Raises:
        InvalidInput: A matrix that is no ``nn.Linear``: the format has no place for it.
        MissingDependency: Without compressed-tensors.
    """
    from safetensors.torch import save_file

    need_packing()
    modules = dict(model.named_modules())
    for name, form in stored.formats.items():
        if not isinstance(modules.get(name), nn.Linear) and not find_format(form).plain:
            raise InvalidInput(
                f"{name} is no plain Linear, and compressed-tensors packs nothing else.",
                "Fused experts and Conv1D stay in 16 bits.",
                "Plan with --format gguf, or give it bf16.",
            )
    pretrained(model).save_pretrained(folder)
    tensors = _load(folder)
    for name, form in stored.formats.items():
        if find_format(form).plain:
            continue
        weight = matrix_of(modules[name])
        del tensors[f"{name}.weight"]
        packed = pack(weight, stored.rounded[name][0], find_format(form), name)
        tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    half = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    others = [n for n, m in modules.items() if isinstance(m, nn.Linear) and n not in stored.formats]
    record = config_of(model).to_dict()
    record |= {"quantization_config": quantization_config(stored.formats, others), "dtype": "bfloat16"}
    record["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return {n: sum(t.nbytes for k, t in half.items() if k.rpartition(".")[0] == n) for n in stored.formats}


def _load(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found
