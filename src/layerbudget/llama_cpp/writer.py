"""A GGUF file with a type per tensor: rounded by ggml, written by the package ``gguf``, read by llama.cpp and transformers."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..compressors.formats import find_format
from ..compressors.quantisers import Rounded
from ..errors import CoverageError, InvalidInput
from ..gguf.architectures import Architecture
from ..gguf.names import ROUTERS, Sizes, add_numbers, architecture, need_gguf, rope_factors, sizes_of
from ..gguf.reader import read_gguf
from ..gguf.tensors import Stored, stored_tensors
from ..models.blocks import config_of, layers, name_of, text_config, text_parameters
from ..models.experts import EXPERTS_KEPT
from ..models.offload import mapped
from ..storage.checkpoint import GGUF_FILE
from .vocabulary import add_vocabulary, name_in_file

_READ = 1 << 22  # weights that are read back together
_WORDS_ALONE = (
    "The file holds the language model. For images and sound llama.cpp wants a file beside it: "
    "convert_hf_to_gguf.py MODEL --mmproj writes it, from the model as it was."
)


def check_even(model: nn.Module) -> None:
    """Refuse a model whose layers keep different numbers of experts, before anything is measured for a file of it."""
    if hasattr(config_of(model), EXPERTS_KEPT):
        raise InvalidInput(
            "The layers of this model keep different numbers of experts.",
            "A GGUF file has one number for all.",
            "Plan the experts that stay with --even.",
        )


def in_file(model: nn.Module) -> tuple[Architecture, Sizes | None, dict[str, tuple[Stored, ...]]]:
    """Return a model in llama.cpp's words, sizes of layers that differ, and its tensors by full parameter name.

    Raises:
        InvalidInput: It is not written as GGUF.
    """
    config, shapes = text_config(config_of(model)), {n: p.shape for n, p in text_parameters(model).items()}
    check_even(model)
    sizes = sizes_of(config, shapes)
    arch = architecture(config, uneven=sizes is not None)
    return arch, sizes, stored_tensors(config, shapes, arch)


class GgufHead:
    """The head of a model's file, before its tensors: numbers, vocabulary, and the name, type and shape of every tensor.

    Args:
        model: Only its configuration and the shapes of its parameters are read.
        tokenizer: Its vocabulary goes into the file; None leaves it out.
        formats: Format of every planned matrix.
        file: Does not exist; nothing is written before :meth:`write`.
        name: Of the model, which may be its path; by default where it was loaded from.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, formats: Mapping[str, str], file: Path, name: str | None = None
    ) -> None:
        self.gguf, self.config, self.formats = need_gguf(), text_config(config_of(model)), dict(formats)
        self.parameters = text_parameters(model)  # each once: a tied head is the embedding
        self.arch, sizes, self.stored = in_file(model)
        inside = {p: [n for n in self.parameters if n.startswith(f"{p}.")] for p, _ in layers(model)}
        known = {n for names in inside.values() for n in names}
        self.pieces = {"": [n for n in self.parameters if n not in known], **inside}
        self.writer = self.gguf.GGUFWriter(file, self.arch.name)
        name = name or name_of(model)
        self.writer.add_name("model" if name == type(model).__name__ else name_in_file(Path(name).name, tokenizer))
        self.writer.add_file_type(file_type(self.gguf, self.formats.values()))
        self.writer.add_quantization_version(self.gguf.GGML_QUANT_VERSION)
        add_numbers(self.writer, self.config, self.arch, sizes)
        configs, generation = (config_of(model), self.config), getattr(model, "generation_config", None)
        self.notes = add_vocabulary(self.writer, tokenizer, self.config.vocab_size, configs, generation)
        self.has_vocabulary = "tokenizer.ggml.tokens" in self.writer.kv_data[0]
        self.notes += [_WORDS_ALONE] if self.config is not config_of(model) else []
        factors = rope_factors(self.config)
        self.extra = {} if factors is None else {"rope_freqs.weight": torch.from_numpy(factors)}
        for name, tensor in self.extra.items():
            self._add_tensor(name, self.gguf.GGMLQuantizationType.F32, tensor.shape)
        for name in (n for names in self.pieces.values() for n in names):
            shape = self.parameters[name].shape
            for each in self.stored[name]:
                kept = shape if len(shape) < 2 else (*shape[:-2], shape[-2] // each.parts, shape[-1])
                self._add_tensor(each.name, self.kind(name), _squeezed(each.name, kept))

    def _add_tensor(self, name: str, kind: Any, shape: Sequence[int]) -> None:
        number = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
        per, size = self.gguf.GGML_QUANT_SIZES[kind]
        stored = tuple(shape) if number is not np.uint8 else (*shape[:-1], shape[-1] // per * size)
        count = math.prod(shape) // per * size
        self.writer.add_tensor_info(name, stored, np.dtype(number), count, raw_dtype=kind)

    def kind(self, name: str) -> Any:
        """Return the type of a parameter in the file: of planned matrices their format, of others 16 bits, of vectors 32."""
        kinds = self.gguf.GGMLQuantizationType
        form = self.formats.get(name.removesuffix(".weight"))
        if form is not None:
            return kinds[find_format(form).name]
        exact = self.parameters[name].ndim < 2 or ROUTERS.search(self.stored[name][0].name.removesuffix(".weight"))
        return kinds.F32 if exact else kinds.F16

    def write(self) -> None:
        """Write all of it; tensors come next."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a parameter's tensors, padding included."""
        infos, pad = self.writer.tensors[0], self.writer.data_alignment
        return sum(-(-infos[t.name].nbytes // pad) * pad for t in self.stored[name])


def _squeezed(name: str, shape: Sequence[int]) -> Sequence[int]:
    """Shape in the file: a router with one output is a vector."""
    return shape[1:] if name.endswith("_shexp.weight") and len(shape) == 2 and shape[0] == 1 else shape


def file_type(gguf: Any, formats: Collection[str]) -> Any:
    """Return llama.cpp's number for a whole file: that of the type which most matrices have."""
    names = {t.name: t for t in gguf.LlamaFileType}
    most = find_format(statistics.mode(formats)).name if formats else "F16"
    close = (f"MOSTLY_{most}", f"MOSTLY_{most}_M", *(n for n in names if n.startswith(f"MOSTLY_{most}_")))
    return names[next((n for n in close if n in names), "GUESSED")]


def head_bytes(model: nn.Module, tokenizer: Any = None, name: str | None = None) -> int:
    """Return the bytes of what is not tensors in a GGUF file of a ``name`` (see :class:`GgufHead`).

    With ``plan.budget["tensors"]`` they are the size of the whole file, which is known before it is written. Formats do not
    change them.

    Args:
        model: Only its configuration and the shapes of its parameters are read; it may be streamed, or have no values.
        tokenizer: The one that goes into the file.
        name: Of the model.

    Raises:
        InvalidInput: An architecture that is not written.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / GGUF_FILE
        head = GgufHead(model, tokenizer, {}, file, name)
        head.write()
        head.writer.close()
        pad = head.writer.data_alignment
        return -(-file.stat().st_size // pad) * pad


def fixed_terms(model: nn.Module, planned: Collection[str]) -> dict[str, int]:
    """Return the bytes of the tensors that are no planned matrices, padding included, by what they are.

    Raises:
        InvalidInput: An architecture that is not written.
    """
    head, names, terms = GgufHead(model, None, {}, Path(GGUF_FILE)), set(planned), dict[str, int]()
    for name in (n for n in head.parameters if n not in names and n.removesuffix(".weight") not in names):
        vector = head.parameters[name].ndim < 2
        term = "norms and biases in F32" if vector else f"matrices that no plan changes, in {head.kind(name).name}"
        terms[term] = terms.get(term, 0) + head.bytes_of(name)
    for name, tensor in head.extra.items():
        terms[f"{name} in F32"] = -(-tensor.nbytes // 32) * 32
    return terms


class GgufWriter:
    """Writes a GGUF file, tensor after tensor: what lies outside the layers first, then layer after layer.

    Args:
        model: In float32. Its weights are read when their layer is asked for.
        tokenizer: Its vocabulary goes into the file; None leaves it out.
        formats: Format of every planned matrix.
        folder: Holds no such file.
        name: Of the model; see :class:`GgufHead`.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, formats: Mapping[str, str], folder: Path, name: str | None = None
    ) -> None:
        offloaded = mapped(model)
        dtype = next(model.parameters()).dtype if offloaded is None else offloaded.dtype
        if dtype != torch.float32:
            raise InvalidInput(
                f"The model is held in {str(dtype).removeprefix('torch.')}.",
                "The grids of GGUF are finer than that.",
                "Load it in float32 before it is rounded.",
            )
        self.head = GgufHead(model, tokenizer, formats, folder / GGUF_FILE, name)
        self.head.write()

    def tensors(self, piece: str, rounded: Mapping[str, Sequence[Rounded]]) -> dict[str, torch.Tensor]:
        """Return what the file holds of a layer (outside the layers: of ``""``) whose weights are at hand."""
        tensors = dict(self.head.extra) if not piece else {}
        for name in self.head.pieces[piece]:
            made, values = self._made(name, rounded), self.head.parameters[name].detach()
            tensors |= {t.name: torch.from_numpy(self._data(name, t, values, made)) for t in self.head.stored[name]}
        return tensors

    def _made(self, name: str, rounded: Mapping[str, Sequence[Rounded]]) -> torch.Tensor | None:
        """The bytes that the quantiser made of a parameter, of all its copies; None where it is written as numbers."""
        data = [r.data for r in rounded.get(name.removesuffix(".weight"), ()) if r.data is not None]
        if not data:
            return None
        return torch.from_numpy(data[0] if self.head.parameters[name].ndim < 3 else np.stack(data))

    def _data(self, name: str, stored: Stored, tensor: torch.Tensor, made: torch.Tensor | None) -> np.ndarray:
        """Content of a tensor in the file: the bytes that the quantiser made, or plain numbers."""
        kind, arch = self.head.kind(name), self.head.arch
        values = stored.take(tensor.to(torch.float32).cpu()).contiguous().numpy()
        if kind.name == "F32":
            values = values + np.float32(arch.norm) if name.endswith("norm.weight") else values
            return values.reshape(_squeezed(stored.name, values.shape))
        gguf = self.head.gguf
        data: np.ndarray = gguf.quantize(values, kind) if made is None else stored.take(made).contiguous().numpy()
        planned = name.removesuffix(".weight") in self.head.formats
        if planned and not self._reads_back(data, kind, values):
            raise CoverageError(f"{name} reads back as other weights than were planned.", "", "Report this; nothing is kept.")
        return data

    def _reads_back(self, data: np.ndarray, kind: Any, values: np.ndarray) -> bool:
        """Whether bytes stand for some weights; of a head they are read some rows at a time."""
        step = max(1, _READ // values[0].size)
        starts = range(0, len(values), step)
        return all(np.array_equal(self.head.gguf.dequantize(data[i : i + step], kind), values[i : i + step]) for i in starts)

    def restore(self, names: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put matrices that were written before into the model again."""
        for name in (n if n in self.head.parameters else f"{n}.weight" for n in names):
            for each in self.head.stored[name]:
                values = self.head.gguf.dequantize(tensors[each.name].numpy(), self.head.kind(name))
                each.put(self.head.parameters[name].data, torch.from_numpy(values))

    def names(self) -> dict[str, list[str]]:
        """Return the names in the file of every planned matrix's weights."""
        known = self.head.parameters
        return {n: [t.name for t in self.head.stored[n if n in known else f"{n}.weight"]] for n in self.head.formats}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a piece."""
        for tensor in tensors.values():
            self.head.writer.write_tensor_data(tensor.numpy())

    def close(self) -> list[str]:
        """Finish the file; returns notes."""
        self.head.writer.flush()
        self.head.writer.close()
        return self.head.notes


def recount_gguf(file: Path) -> dict[str, int]:
    """Return the bytes of every tensor of a file, padding included: from one tensor's place to the next one's."""
    tensors = sorted(read_gguf(file).tensors, key=lambda t: t.data_offset)
    stops = [t.data_offset for t in tensors[1:]] + [file.stat().st_size]
    return {t.name: int(stop - t.data_offset) for t, stop in zip(tensors, stops, strict=True)}
