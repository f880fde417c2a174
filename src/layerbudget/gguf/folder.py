"""A GGUF file as a model folder of transformers, which every verb reads; it goes when the process ends.

The folder lies beside other temporary files (``TMPDIR``). It is written one tensor after the other: types of 16 bits stay in 16
bits, and what a finer type stands for is written in 32. A file whose numbers are all exact in a narrower type, such as a model
of bfloat16 that was converted with ``--outtype f16`` or ``f32``, has that type in the folder.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import BadModel
from ..gguf.names import need_gguf
from ..storage.writing import check_space, new_temporary, release, sweep
from .header import PLAIN, READ, GgufFile, Place, configuration, open_gguf, places, state_of
from .tokenizer import tokenizer_of

logger = logging.getLogger(__name__)

_NAME = "gguf"
_ROWS = 1 << 24  # weights that are looked at together
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.json"),
)
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def folder_of(file: Path) -> Path:
    """Return a folder with the configuration, the weights and the tokenizer of a GGUF file.

    Raises:
        BadModel: The file is not read: see :mod:`.header`. Nothing was written.
        InvalidInput: The disk has no room for it.
    """
    return _folder_of(file.absolute(), state_of(file))


@functools.cache
def _folder_of(file: Path, _: tuple[tuple[int, int], ...]) -> Path:
    gguf_file = open_gguf(file)
    config = configuration(gguf_file)
    where, dtype = places(gguf_file, config), precision(gguf_file)
    parent, process = Path(tempfile.gettempdir()), os.getpid()
    sweep(parent, _NAME)
    check_space({parent: sum(_count(place) for place in where.values()) * dtype.itemsize})
    folder, lock = new_temporary(parent, _NAME)

    def remove() -> None:
        if os.getpid() == process:  # not in a process that this one forked
            shutil.rmtree(folder, ignore_errors=True)
            release(lock)

    atexit.register(remove)
    config.dtype, config.architectures = dtype, [_class_of(config)]
    config.save_pretrained(folder)
    _write_generation(gguf_file, config, folder)
    _write_tokenizer(gguf_file, folder)
    _write_weights(gguf_file, where, config, dtype, folder / "model.safetensors")
    return folder


def _class_of(config: Any) -> str:
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM._model_mapping
    return str(classes[type(config)].__name__)


def rounded_before(file: Path) -> str:
    """Return a sentence on a file whose weights were rounded to types of few bits; empty where they were not."""
    gguf_file, gguf = open_gguf(file), need_gguf()
    kinds = {kind: count for kind, count in gguf_file.types().items() if kind not in PLAIN}
    if not kinds:
        return ""
    each = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in gguf_file.types()}
    bits = sum(8 * n * each[kind][1] / each[kind][0] for kind, n in gguf_file.types().items()) / sum(gguf_file.types().values())
    return on_rounded(f"{', '.join(sorted(kinds))}; {bits:.2g} bits a weight", fine=set(kinds) <= {"Q8_0", "Q8_1", "Q8_K"})


def on_rounded(how: str, *, fine: bool) -> str:
    """The sentence on weights that were rounded before: in which way, and whether that cost little."""
    said = f"Its weights were rounded before ({how}): damage is measured beside"
    if fine:
        return f"{said} these, which cost little."
    return (
        f"{said} the rounded model and not beside the one before it, and errors of a second rounding come on top of the first "
        "ones. Plan on the model in 16 bits, where there is one."
    )


# --- numbers -----------------------------------------------------------------------------------------------------------------


def _count(place: Place) -> int:
    return int(np.prod(place.shape))


def _numbers(tensor: Any) -> torch.Tensor:
    """A tensor of the file as numbers, in its own precision where it is one that torch has."""
    kind, shape = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape))
    data = np.array(tensor.data)
    if kind == "BF16":
        return torch.from_numpy(data.view(np.uint8).reshape(-1)).view(torch.bfloat16).reshape(shape)
    if kind not in ("F16", "F32"):
        data = need_gguf().dequantize(data, tensor.tensor_type).astype(np.float32, copy=False)
    return torch.from_numpy(np.ascontiguousarray(data)).reshape(shape)


def precision(gguf_file: GgufFile) -> torch.dtype:
    """Return the precision of a file's matrices: the narrowest in which all of them are exact."""
    matrices = [t for t in gguf_file.tensors.values() if len(t.shape) > 1]
    if any(t.tensor_type.name not in PLAIN for t in matrices):
        return torch.float32
    half = [t for t in matrices if t.tensor_type.name in ("F16", "BF16")]  # routers may have 32 bits beside them
    for dtype in (torch.bfloat16, torch.float16):
        if all(_is_exact(_numbers(t), dtype) for t in half or matrices):
            return dtype
    return torch.float32


def _is_exact(values: torch.Tensor, dtype: torch.dtype) -> bool:
    if values.dtype == dtype:
        return True
    parts = values.reshape(-1).split(_ROWS)
    return all(bool(torch.equal(part.to(dtype).float(), part.float())) for part in parts)


def _parameter(gguf_file: GgufFile, place: Place, dtype: torch.dtype, norm: float) -> torch.Tensor:
    """A parameter in the precision of the matrices where that loses nothing, else in 32 bits; ``norm`` was added to it."""
    read = [_numbers(gguf_file.tensors[each.name]) for each in place.tensors]
    values = torch.empty(place.shape, dtype=read[0].dtype)
    for each, rows in zip(place.tensors, read, strict=True):
        part = values.chunk(each.parts, max(0, values.ndim - 2))[each.part]
        each.put(values, rows.reshape(part.T.shape if each.turned else part.shape))
    if norm:
        less = values.float() - norm
        return less.to(dtype) if torch.equal(less.to(dtype).float() + norm, values.float()) else less
    return values.to(dtype) if _is_exact(values, dtype) else values.float()


def _write_weights(gguf_file: GgufFile, where: Mapping[str, Place], config: Any, dtype: torch.dtype, file: Path) -> None:
    """Write a safetensors file, one tensor after the other: the header has its place before the tensors are known."""
    norm, kinds = READ[config.model_type].norm, dict[str, torch.dtype]()
    size = -(-(len(_header(where, dict.fromkeys(where, torch.bfloat16))) + 8 * len(where)) // 8) * 8  # offsets may get longer
    with open(file, "wb") as out:
        out.seek(8 + size)
        for name, tensor in _parameters(gguf_file, where, dtype, norm):
            kinds[name] = tensor.dtype
            out.write(tensor.contiguous().view(torch.uint8).numpy().data)
        header = _header(where, kinds).encode()
        out.seek(0)
        out.write(size.to_bytes(8, "little") + header.ljust(size))


def _parameters(
    gguf_file: GgufFile, where: Mapping[str, Place], dtype: torch.dtype, norm: float
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, place in where.items():
        tensor = _parameter(gguf_file, place, dtype, norm if name.endswith("norm.weight") else 0.0)
        if not all(bool(torch.isfinite(part).all()) for part in tensor.reshape(-1).split(_ROWS)):
            raise BadModel(f"{gguf_file.path} holds values of {name} that are not finite.", "", "Convert the model again.")
        yield name, tensor


def _header(where: Mapping[str, Place], kinds: Mapping[str, torch.dtype]) -> str:
    record, offset = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, place in where.items():
        stop = offset + _count(place) * kinds[name].itemsize
        record[name] = {"dtype": _CODES[kinds[name]], "shape": list(place.shape), "data_offsets": [offset, stop]}
        offset = stop
    return json.dumps(record)


# --- what lies beside the weights --------------------------------------------------------------------------------------------


def _write_generation(gguf_file: GgufFile, config: Any, folder: Path) -> None:
    """How texts are sampled, and the tokens at which they end."""
    ends: list[Any] = [gguf_file.fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(i for i in ends if i is not None and i < config.vocab_size))
    fields: dict[str, Any] = {f"{kind}_token_id": getattr(config, f"{kind}_token_id") for kind in ("bos", "pad")}
    fields["eos_token_id"] = ends if len(ends) > 1 else config.eos_token_id
    sampled: dict[str, Any] = {field: gguf_file.fields.get(f"general.sampling.{word}") for word, field in _SAMPLING.items()}
    sampled = {field: float(str(np.float32(v))) if isinstance(v, float) else v for field, v in sampled.items() if v is not None}
    if "temperature" in sampled:
        fields["do_sample"] = sampled["temperature"] > 0
        sampled = sampled if fields["do_sample"] else {k: v for k, v in sampled.items() if k == "repetition_penalty"}
    record = {k: v for k, v in {**fields, **sampled}.items() if v is not None}
    (folder / "generation_config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(gguf_file: GgufFile, folder: Path) -> None:
    """The tokenizer beside the file, where there is one, else that of the file; none where that is not read."""
    source = gguf_file.path.parent
    if (source / "tokenizer.json").is_file():
        for name in (n for n in _TOKENIZER if (source / n).is_file()):
            shutil.copyfile(source / name, folder / name)
        return
    try:
        tokenizer_of(gguf_file).save_pretrained(folder)
    except BadModel as error:
        logger.debug("%s", error)  # said by whoever asks for the tokenizer
