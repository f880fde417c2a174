"""A GGUF file with a type per tensor: rounded by ggml, written by the package ``gguf``, read by llama.cpp and transformers."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.formats import find_format, need_gguf
from ...compressors.quantisers import Rounded
from ...errors import CoverageError, InvalidInput
from ...models.blocks import config_of, layers
from ...models.offload import mapped

GGUF_FILE = "model.gguf"
# transformers' model types, and the architecture of llama.cpp that computes the same.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_PERMUTED = ("llama",)  # rotary embeddings of neighbours: rows of q and k change places
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
# What splits a text before the merges, by the regular expression that tokenizers.json holds.
_SPLITS = {"{1,3}| ?[^\\s": "llama-bpe", "\\p{N}| ?[^\\s": "qwen2"}


def architecture(config: Any) -> str:
    """Return llama.cpp's name of a model's architecture; one that is not written here or computed otherwise is refused."""
    kind = str(config.model_type)
    rope = dict(getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    odd = [f" with rope_type = {rope}"] if rope not in ("default", None) else []
    odd += [f" with sliding_window = {window}"] if window is not None else []
    if kind not in ARCHITECTURES or odd:
        raise InvalidInput(
            f"A {kind} model{odd[0] if odd else ''} is not written as GGUF here.",
            f"Written are {', '.join(ARCHITECTURES)}, with plain rotary embeddings and whole attention.",
            "Plan with --unwritten plan and export it (--to tensor-types): llama.cpp converts and quantises by that; or "
            "plan for compressed-tensors.",
        )
    return ARCHITECTURES[kind]


def tensor_names(gguf: Any, arch: str, layers: int, names: Sequence[str]) -> dict[str, str]:
    """Return the names in the file by full parameter name."""
    known = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], layers)
    found: dict[str, str] = {}
    for name in names:
        stem, _, ending = name.rpartition(".")
        other = known.get_name(stem)
        if other is None:
            raise InvalidInput(f"GGUF's {arch} has no tensor for {name}.", "", "Plan for compressed-tensors.")
        found[name] = f"{other}.{ending}"
    return found


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of q or k as llama.cpp's rotary embedding reads them: halves of a head become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return them the other way round."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


class GgufHead:
    """What stands in front of the tensors of a model's file: numbers, vocabulary, and the name, type and shape of every tensor.

    Args:
        model: Only its configuration and the shapes of its parameters are read.
        tokenizer: Its vocabulary goes into the file; None leaves it out.
        formats: Format of every planned matrix.
        file: Does not exist; nothing is written before :meth:`write`.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, formats: Mapping[str, str], file: Path) -> None:
        self.gguf, self.config, self.formats = need_gguf(), config_of(model), dict(formats)
        self.arch = architecture(self.config)
        self.parameters = dict(model.named_parameters())  # each once: a tied head is the embedding
        self.stored = tensor_names(self.gguf, self.arch, self.config.num_hidden_layers, list(self.parameters))
        inside = {p: [n for n in self.parameters if n.startswith(f"{p}.")] for p, _ in layers(model)}
        known = {n for names in inside.values() for n in names}
        self.pieces = {"": [n for n in self.parameters if n not in known], **inside}
        self.writer = self.gguf.GGUFWriter(file, self.arch)
        self.writer.add_name(Path(str(getattr(self.config, "_name_or_path", "") or "model")).name)
        self.writer.add_file_type(file_type(self.gguf, self.formats.values()))
        self.writer.add_quantization_version(self.gguf.GGML_QUANT_VERSION)
        _add_numbers(self.writer, self.config)
        self.notes = _add_vocabulary(self.writer, tokenizer, self.config.vocab_size)
        for name in (n for names in self.pieces.values() for n in names):
            self._add_tensor(name)

    def _add_tensor(self, name: str) -> None:
        kind, shape = self.kind(name), self.parameters[name].shape
        number = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
        per, size = self.gguf.GGML_QUANT_SIZES[kind]
        stored = tuple(shape) if number is not np.uint8 else (*shape[:-1], shape[-1] // per * size)
        count = math.prod(shape) // per * size
        self.writer.add_tensor_info(self.stored[name], stored, np.dtype(number), count, raw_dtype=kind)

    def kind(self, name: str) -> Any:
        """Return the type of a parameter in the file: of planned matrices their format, of others 16 bits, of vectors 32."""
        kinds = self.gguf.GGMLQuantizationType
        if self.parameters[name].ndim < 2:
            return kinds.F32
        form = self.formats.get(name.rpartition(".")[0], "F16") if name.endswith(".weight") else "F16"
        return kinds[find_format(form).name]

    def write(self) -> None:
        """Write all of it; tensors come next."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, padding included."""
        pad = self.writer.data_alignment
        return sum(-(-info.nbytes // pad) * pad for info in self.writer.tensors[0].values())


def file_type(gguf: Any, formats: Collection[str]) -> Any:
    """Return llama.cpp's number for a whole file: that of the type which most matrices have."""
    names = {t.name: t for t in gguf.LlamaFileType}
    most = find_format(statistics.mode(formats)).name if formats else "F16"
    close = (f"MOSTLY_{most}", f"MOSTLY_{most}_M", *(n for n in names if n.startswith(f"MOSTLY_{most}_")))
    return names[next((n for n in close if n in names), "GUESSED")]


def file_bytes(model: nn.Module, formats: Mapping[str, str], tokenizer: Any = None) -> int:
    """Return the bytes of the whole GGUF file that :func:`~layerbudget.decisions.bits.apply.write_bits` writes, before it does.

    Metadata, vocabulary, names and shapes of tensors, padding and all tensors count: equal to the size of the file. What is not
    tensors does not depend on the formats. So the file of any plan takes ``file_bytes(model, {}, tokenizer)`` less the bytes of
    its tensors in 16 bits, and the ``budget["file"]`` of the plan: see :func:`head_bytes`.

    Args:
        model: Only its configuration and the shapes of its parameters are read; it may be streamed, or have no values.
        formats: Format of every planned matrix; those of ``formats_of_plan(plan)``.
        tokenizer: The one that goes into the file.

    Raises:
        InvalidInput: An architecture that is not written.
    """
    return sum(_sizes(model, formats, tokenizer))


def head_bytes(model: nn.Module, tokenizer: Any = None) -> int:
    """Return the bytes of what is not tensors in a GGUF file; with ``plan.budget["file"]`` they are :func:`file_bytes`."""
    return _sizes(model, {}, tokenizer)[0]


def _sizes(model: nn.Module, formats: Mapping[str, str], tokenizer: Any) -> tuple[int, int]:
    """Bytes in front of the tensors, and of the tensors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / GGUF_FILE
        head = GgufHead(model, tokenizer, formats, file)
        head.write()
        head.writer.close()
        pad = head.writer.data_alignment
        return -(-file.stat().st_size // pad) * pad, head.tensor_bytes


class GgufWriter:
    """Writes a GGUF file, tensor after tensor: what lies outside the layers first, then layer after layer.

    Args:
        model: In float32. Its weights are read when their layer is asked for.
        tokenizer: Its vocabulary goes into the file; None leaves it out.
        formats: Format of every planned matrix.
        folder: Holds no such file.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, formats: Mapping[str, str], folder: Path) -> None:
        offloaded = mapped(model)
        dtype = next(model.parameters()).dtype if offloaded is None else offloaded.dtype
        if dtype != torch.float32:
            raise InvalidInput(
                f"The model is held in {str(dtype).removeprefix('torch.')}.",
                "The grids of GGUF are finer than that.",
                "Load it in float32 before it is rounded.",
            )
        self.head = GgufHead(model, tokenizer, formats, folder / GGUF_FILE)
        self.head.write()

    def tensors(self, piece: str, rounded: Mapping[str, Sequence[Rounded]]) -> dict[str, torch.Tensor]:
        """Return what the file holds of a layer (outside the layers: of ``""``) whose weights are at hand."""
        made = {f"{n}.weight": torch.from_numpy(r[0].data) for n, r in rounded.items() if r[0].data is not None}
        return {self.head.stored[n]: torch.from_numpy(self._data(n, made.get(n))) for n in self.head.pieces[piece]}

    def _data(self, name: str, made: torch.Tensor | None) -> np.ndarray:
        """Content of a tensor in the file: the bytes that the quantiser made, or plain numbers."""
        kind, tensor = self.head.kind(name), self._turned(name, self.head.parameters[name].detach(), permute)
        values = tensor.to(torch.float32).cpu().contiguous().numpy()
        if kind.name == "F32":
            return values
        data: np.ndarray = self.head.gguf.quantize(values, kind) if made is None else self._turned(name, made, permute).numpy()
        if name.rpartition(".")[0] in self.head.formats and not np.array_equal(self.head.gguf.dequantize(data, kind), values):
            raise CoverageError(f"{name} reads back as other weights than were planned.", "", "Report this; nothing is kept.")
        return data

    def _turned(self, name: str, tensor: torch.Tensor, turn: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Rows of q and k in the order of the file, or back."""
        if self.head.arch not in _PERMUTED or ".self_attn." not in name:
            return tensor
        if ".q_proj." in name:
            return turn(tensor, self.head.config.num_attention_heads)
        return turn(tensor, self.head.config.num_key_value_heads) if ".k_proj." in name else tensor

    def restore(self, names: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put matrices that were written before into the model again."""
        for name in (f"{n}.weight" for n in names):
            values = self.head.gguf.dequantize(tensors[self.head.stored[name]].numpy(), self.head.kind(name))
            self.head.parameters[name].data.copy_(self._turned(name, torch.from_numpy(values), unpermute))

    def names(self) -> dict[str, list[str]]:
        """Return the names in the file of every planned matrix's weights."""
        return {n: [self.head.stored[f"{n}.weight"]] for n in self.head.formats}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a piece."""
        for tensor in tensors.values():
            self.head.writer.write_tensor_data(tensor.numpy())

    def close(self) -> list[str]:
        """Finish the file; returns notes."""
        self.head.writer.flush()
        self.head.writer.close()
        return self.head.notes


_NUMBERS = {  # field of the file: of the configuration
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
}


def _add_numbers(writer: Any, config: Any) -> None:
    for field, name in _NUMBERS.items():
        getattr(writer, f"add_{field}")(getattr(config, name))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for field in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{field}")(head_dim)
    writer.add_rope_freq_base(float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_vocabulary(writer: Any, tokenizer: Any, size: int) -> list[str]:
    """Vocabulary and merges of a byte-level BPE tokenizer; others are left out. Returns notes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    held: Mapping[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model, splits = held.get("model") or {}, json.dumps(held.get("pre_tokenizer"), ensure_ascii=False)
    if model.get("type") != "BPE" or "ByteLevel" not in splits:
        writer.add_tokenizer_model("no_vocab")
        return ["The tokenizer is no byte-level BPE; the file holds no vocabulary, and llama.cpp is to be given token numbers."]
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    special = {t["id"] for t in held.get("added_tokens", []) if t.get("special")}
    for token, i in {**model["vocab"], **{t["content"]: t["id"] for t in held.get("added_tokens", [])}}.items():
        if i < size:
            tokens[i], kinds[i] = token, _CONTROL if i in special else _NORMAL
    splits = splits.replace("\\\\", "\\")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(next((name for part, name in _SPLITS.items() if part in splits), "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (number := getattr(tokenizer, name, None)) is not None:
            getattr(writer, f"add_{name}")(number)
    writer.add_add_bos_token(bool(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]))
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)
    return []


def recount_gguf(file: Path) -> dict[str, int]:
    """Return the bytes of every tensor of a file, padding included: from one tensor's place to the next one's."""
    tensors = sorted(need_gguf().GGUFReader(file).tensors, key=lambda t: t.data_offset)
    stops = [t.data_offset for t in tensors[1:]] + [file.stat().st_size]
    return {t.name: int(stop - t.data_offset) for t, stop in zip(tensors, stops, strict=True)}
