"""Write a GGUF file with a type per tensor: quantised by the package ``gguf``, read by llama.cpp and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..blocks import config_of
from ..errors import CoverageError, InvalidInput
from ..treatments.formats import find_format
from ..treatments.rounding_packages import need_gguf
from ..treatments.storing import Stored
from .gguf_names import PERMUTED, add_numbers, add_vocabulary, architecture, tensor_names


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as llama.cpp's rotary embedding reads them: halves of a head become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: nn.Module, tokenizer: Any, stored: Stored, file: Path) -> tuple[dict[str, str], list[str]]:
    """Write a model that was rounded.

    Args:
        model: After :func:`~layerbudget.treatments.storing.store`.
        tokenizer: Its vocabulary goes into the file; None leaves it out.
        stored: What that returned.
        file: Does not exist.

    Returns:
        Name in the file (without its ending) by full name of the matrix, and notes.

    Raises:
        InvalidInput: An architecture that is not written here.
        CoverageError: A tensor that reads back as other weights.
        MissingDependency: Without the package gguf.
    """
    gguf, config = need_gguf(), config_of(model)
    held = next(model.parameters()).dtype
    if held != torch.float32:
        raise InvalidInput(
            f"The model is held in {str(held).removeprefix('torch.')}.", "The grids of GGUF are finer than that.",
            "Load it in float32 before it is rounded.",
        )  # fmt: skip
    arch = architecture(config)
    parameters = _parameters(model)
    names = tensor_names(gguf, arch, config.num_hidden_layers, list(parameters))
    writer = gguf.GGUFWriter(file, arch)
    try:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_name(Path(str(getattr(config, "_name_or_path", "") or "model")).name)
        add_numbers(writer, config, head_dim)
        notes = add_vocabulary(writer, tokenizer, config.vocab_size)
        for name, tensor in parameters.items():
            data, kind = _data(gguf, name, _rows(config, arch, name, tensor), stored)
            writer.add_tensor(names[name], data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return {n: names[f"{n}.weight"].rpartition(".")[0] for n in stored.formats}, notes


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once: a tied head is the embedding."""
    return {name: p.detach() for name, p in model.named_parameters()}


def _rows(config: Any, arch: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if arch not in PERMUTED or ".self_attn." not in name:
        return tensor
    if ".q_proj." in name:
        return permute(tensor, config.num_attention_heads)
    return permute(tensor, config.num_key_value_heads) if ".k_proj." in name else tensor


def _data(gguf: Any, name: str, tensor: torch.Tensor, stored: Stored) -> tuple[np.ndarray, Any]:
    """A tensor as the file holds it: planned matrices in their format, others in 16 bits, vectors in 32."""
    kinds = gguf.GGMLQuantizationType
    values = tensor.to(torch.float32).cpu().contiguous().numpy()
    module = name.rpartition(".")[0]
    if tensor.ndim < 2:
        return values, kinds.F32
    form = stored.formats.get(module, "F16") if name.endswith(".weight") else "F16"
    kind = kinds[find_format(form).name]
    data = gguf.quantize(values, kind)
    if module in stored.formats and not np.array_equal(gguf.dequantize(data, kind), values):
        raise CoverageError(f"{name} reads back as other weights than were planned.", "", "Report this; nothing is kept.")
    return data, kind
