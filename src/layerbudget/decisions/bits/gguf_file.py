"""Write a GGUF file with a type per tensor: quantised by the package ``gguf``, read by llama.cpp and transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.formats import find_format
from ...compressors.rounding import Rounded
from ...compressors.rounding_packages import need_gguf
from ...errors import CoverageError, InvalidInput
from ...models.blocks import config_of, layers
from ...models.offload import mapped
from .gguf_names import add_numbers, add_vocabulary
from .storing import Piece
from .written import PERMUTED, architecture, tensor_names

Turn = Callable[[torch.Tensor, int], torch.Tensor]


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as llama.cpp's rotary embedding reads them: halves of a head become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The other way round.

    >>> w = torch.arange(24).reshape(12, 2)
    >>> torch.equal(unpermute(permute(w, 3), 3), w)
    True
    """
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


class GgufWriter:
    """A GGUF file, tensor after tensor: what lies outside the layers first, then layer after layer.

    Args:
        model: Its weights are read when their piece is asked for.
        tokenizer: Its vocabulary goes into the file; None leaves it out.
        formats: Format of every planned matrix.
        file: Does not exist.

    Attributes:
        stored: Name in the file by full name of the parameter.

    Raises:
        InvalidInput: An architecture that is not written here, or a model held in another precision than float32.
        MissingDependency: Without the package gguf.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, formats: Mapping[str, str], file: Path) -> None:
        self.gguf, self.config, self.model, self.formats = need_gguf(), config_of(model), model, dict(formats)
        lies = mapped(model)
        held = next(model.parameters()).dtype if lies is None else lies.dtype
        if held != torch.float32:
            raise InvalidInput(
                f"The model is held in {str(held).removeprefix('torch.')}.", "The grids of GGUF are finer than that.",
                "Load it in float32 before it is rounded.",
            )  # fmt: skip
        self.arch = architecture(self.config)
        self.parameters = dict(model.named_parameters())  # each once: a tied head is the embedding
        self.stored = tensor_names(self.gguf, self.arch, self.config.num_hidden_layers, list(self.parameters))
        self.layers = [f"{name}." for name, _ in layers(model)]
        self.writer = self.gguf.GGUFWriter(file, self.arch)
        self.notes = self._head(tokenizer, file)

    def _head(self, tokenizer: Any, file: Path) -> list[str]:
        """Write what stands before the tensors; returns notes."""
        config, writer = self.config, self.writer
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_name(Path(str(getattr(config, "_name_or_path", "") or "model")).name)
        add_numbers(writer, config, head_dim)
        notes = add_vocabulary(writer, tokenizer, config.vocab_size)
        outside = [n for n in self.parameters if not any(n.startswith(layer) for layer in self.layers)]
        inside = [n for layer in self.layers for n in self.parameters if n.startswith(layer)]
        for name in (*outside, *inside):
            kind, shape = self._kind(name), self.parameters[name].shape
            kind_of = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
            per, size = self.gguf.GGML_QUANT_SIZES[kind]
            stored = tuple(shape) if kind_of is not np.uint8 else (*shape[:-1], shape[-1] // per * size)
            count = int(np.prod(stored)) * np.dtype(kind_of).itemsize
            writer.add_tensor_info(self.stored[name], stored, np.dtype(kind_of), count, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return notes

    def _kind(self, name: str) -> Any:
        """Type in the file: of planned matrices their format, of others 16 bits, of vectors 32."""
        kinds = self.gguf.GGMLQuantizationType
        if self.parameters[name].ndim < 2:
            return kinds.F32
        form = self.formats.get(name.rpartition(".")[0], "F16") if name.endswith(".weight") else "F16"
        return kinds[find_format(form).name]

    def tensors(self, piece: Piece, rounded: Mapping[str, Sequence[Rounded]]) -> dict[str, torch.Tensor]:
        """What the file holds of a piece whose weights are at hand, by name in the file.

        Raises:
            CoverageError: A tensor that reads back as other weights.
        """
        inside = (f"{piece.name}.",) if piece.name else ()
        mine = [n for n in self.parameters if (n.startswith(inside) if inside else not n.startswith(tuple(self.layers)))]
        return {self.stored[n]: torch.from_numpy(self._data(n)) for n in mine}

    def _data(self, name: str) -> np.ndarray:
        kind, tensor = self._kind(name), self._turned(name, self.parameters[name].detach(), permute)
        values = tensor.to(torch.float32).cpu().contiguous().numpy()
        if kind.name == "F32":
            return values
        data: np.ndarray = self.gguf.quantize(values, kind)
        if name.rpartition(".")[0] in self.formats and not np.array_equal(self.gguf.dequantize(data, kind), values):
            raise CoverageError(f"{name} reads back as other weights than were planned.", "", "Report this; nothing is kept.")
        return data

    def _turned(self, name: str, tensor: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Rows of q and k in the order of the file, or back."""
        if self.arch not in PERMUTED or ".self_attn." not in name:
            return tensor
        if ".q_proj." in name:
            return turn(tensor, self.config.num_attention_heads)
        return turn(tensor, self.config.num_key_value_heads) if ".k_proj." in name else tensor

    def back(self, piece: Piece, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a finished piece's matrices into the model again, as they were when they were written."""
        for job in piece.jobs:
            name = f"{job.module.name}.weight"
            values = self.gguf.dequantize(tensors[self.stored[name]].numpy(), self._kind(name))
            self.parameters[name].data.copy_(self._turned(name, torch.from_numpy(values), unpermute))

    def names(self) -> dict[str, list[str]]:
        """Names in the file of every planned matrix's weights."""
        return {n: [self.stored[f"{n}.weight"]] for n in self.formats}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a piece."""
        for tensor in tensors.values():
            self.writer.write_tensor_data(tensor.numpy())

    def close(self) -> list[str]:
        """Finish the file; returns notes."""
        self.writer.flush()
        self.writer.close()
        return self.notes
