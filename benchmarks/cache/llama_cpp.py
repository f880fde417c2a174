"""A quantised cache in llama.cpp itself, beside what a plan predicts for it and what our own rounding measures.

    python -m benchmarks.cache llama_cpp MODEL ... [--data FILE] [--windows 4] [--length 256] [--draws 2] [--out FOLDER]

The model is written as a GGUF file of 16 bits. llama.cpp reads the windows with a cache of 16 bits, and then with keys and values
in one type. Measured is the KL divergence between these two runs of llama.cpp, both with flash attention, with and without
``LLAMA_ATTN_ROT_DISABLE=1``. Ours is the KL divergence from the dense model with keys and values rounded as llama.cpp does;
predicted is the sum of the damages that a plan would hold, on the same windows. Where keys have such a type, llama.cpp also
rounds queries to ``Q8_0``, block by block, to multiply whole numbers; ours is measured with and without that.
The page has a section for every model.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import layerbudget as lb
from layerbudget.compressors.ggml import need_ggml
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.cache.cache import caching, read_back, rounding
from layerbudget.decisions.cache.formats import CacheFormat
from layerbudget.decisions.cache.llama import SWITCH
from layerbudget.decisions.cache.plan import cache_space
from layerbudget.decisions.cache.sensitivity import cache_damage
from layerbudget.decisions.cache.space import CacheSpace
from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.sensitivity.sequences import per_token

TYPES = ("Q8_0", "Q4_0", "IQ4_NL")
KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "IQ4_NL": 20}
# Words of llama_context_params: tokens of a context, of a batch and of a micro-batch, flash attention, types of keys and values.
SIZES, FLASH, CACHE = slice(0, 3), 13, (26, 27)
DEFAULTS = {0: 512, 1: 2048, 2: 512, 3: 1, 13: 0xFFFFFFFF, 26: 1, 27: 1}


COLUMNS = (
    "type", "predicted", "ours", "ours, queries too", "llama.cpp", f"llama.cpp, {SWITCH}=1", "predicted over llama.cpp",
    "ours, queries too, over llama.cpp",
)  # fmt: skip
ABOUT = """KL divergence, nats per token, of a cache with keys and values in one type; `+-` is one standard error over windows. llama.cpp
is compared with itself: its cache in the type beside its cache in 16 bits. Where keys are in a type of blocks, llama.cpp also
rounds queries to 8 bits. Plans leave that out; `ours, queries too` has queries rounded as well, and where it is above `ours`,
plans say too little.
"""


class _Options(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * 128)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embedding", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    ]


_HEAR = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class Llama:
    """A GGUF file in the llama.cpp of the wheel of xllamacpp."""

    def __init__(self, file: Path) -> None:
        self.library, pointer, number = need_ggml(), ctypes.c_void_p, ctypes.c_int32
        for name, result, arguments in (
            ("model_default_params", _Options, []),
            ("context_default_params", _Options, []),
            ("model_load_from_file", pointer, [ctypes.c_char_p, _Options]),
            ("init_from_model", pointer, [pointer, _Options]),
            ("model_get_vocab", pointer, [pointer]),
            ("vocab_n_tokens", number, [pointer]),
            ("batch_init", _Batch, [number, number, number]),
            ("batch_free", None, [_Batch]),
            ("decode", number, [pointer, _Batch]),
            ("get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, number]),
            ("free", None, [pointer]),
            ("model_free", None, [pointer]),
        ):
            function = getattr(self.library, f"llama_{name}")
            function.restype, function.argtypes = result, arguments
        self.library.llama_log_set(_HEAR, None)
        self.model = self.library.llama_model_load_from_file(str(file).encode(), self.library.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        self.size = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))

    def close(self) -> None:
        """Give its memory back."""
        self.library.llama_model_free(self.model)

    def logits(self, ids: list[int], keys: str = "F16", values: str = "F16", *, rotate: bool = True) -> np.ndarray:
        """Logits ``(tokens, vocabulary)`` after every token of one sequence, float32, with such a cache."""
        options = self.library.llama_context_default_params()
        if any(options.words[i] != value for i, value in DEFAULTS.items()):
            raise RuntimeError("llama.cpp's options of a context lie otherwise than this script knows")
        options.words[SIZES] = [len(ids)] * 3
        options.words[FLASH] = 1
        for place, kind in zip(CACHE, (keys, values), strict=True):
            options.words[place] = KINDS[kind]
        with _switched(rotate):
            context = self.library.llama_init_from_model(self.model, options)
        batch = self.library.llama_batch_init(len(ids), 0, 1)
        batch.count = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.position[i], batch.sequences[i], batch.wanted[i] = token, i, 1, 1
            batch.sequence[i][0] = 0
        code = self.library.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama.cpp does not compute the tokens ({code})")
        rows = [
            np.ctypeslib.as_array(self.library.llama_get_logits_ith(context, i), (self.size,)).copy() for i in range(len(ids))
        ]
        self.library.llama_batch_free(batch)
        self.library.llama_free(context)
        return np.stack(rows)


@contextlib.contextmanager
def _switched(rotate: bool) -> Iterator[None]:
    before = os.environ.pop(SWITCH, None)
    if not rotate:
        os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before


@contextlib.contextmanager
def queries_rounded(form: CacheFormat) -> Iterator[None]:
    """Attention reads queries that are rotated and rounded as keys of a format are."""
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: torch.nn.Module, query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return plain(module, read_back(query, form, 0), *rest, **more)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def divergence(dense: np.ndarray, now: np.ndarray) -> float:
    """Mean KL divergence of rows of logits, nats; the last token predicts nothing."""
    p, q = (torch.log_softmax(torch.from_numpy(x[:-1]), -1) for x in (dense, now))
    return float((p.exp() * (p - q)).sum(-1).double().mean())


def in_llama(file: Path, windows: list[list[int]]) -> dict[str, tuple[list[float], list[float]]]:
    """KL divergence of every window by type: as it is, and without rotation."""
    llama, found = Llama(file), {kind: (list[float](), list[float]()) for kind in TYPES}
    for ids in windows:
        dense = llama.logits(ids)
        for kind, sides in found.items():
            for rotate, side in zip((True, False), sides, strict=True):
                side.append(divergence(dense, llama.logits(ids, kind, kind, rotate=rotate)))
    llama.close()
    return found


def ours_of(model: Any, text: Any, space: CacheSpace) -> dict[str, list[float]]:
    """KL divergence by type of keys and values that are rounded, and with queries in ``Q8_0`` besides."""
    if model.config._attn_implementation != "sdpa":
        raise RuntimeError("queries are rounded in the attention of torch alone")
    dense, eight = DenseOutput(model, text, 1), next(f for f in space.formats if f.name == "Q8_0")
    found: dict[str, list[float]] = {}
    for j, form in enumerate(space.formats[:-1]):
        for queries in (contextlib.nullcontext(), queries_rounded(eight)):
            with queries, caching(model, rounding(space.by_layer(np.full(len(space.blocks), j)))):
                found.setdefault(form.name, []).append(per_token(*dense.rows(model)[:, :2].T)[0])
    return found


def look(name: str, a: argparse.Namespace) -> str:
    """Its part of the page."""
    tokenizer = lb.load_tokenizer(name)
    model = lb.load_model(name, dtype="float16", stream=False).float()
    text = lb.calibration(a.data, tokenizer, samples=a.windows, length=a.length)
    space = cache_space(model, a.length, 1, "llama.cpp", list(TYPES))
    heads = sorted({k.channels for each in space.members for k in each})
    damage = cache_damage(model, text, space, draws=a.draws)[0].sum(0)
    predicted = dict(zip([f.name for f in space.formats], damage, strict=True))
    ours = ours_of(model, text, space)
    with tempfile.TemporaryDirectory() as folder:
        save_gguf(model, tokenizer, Path(folder) / "file")
        file = next((Path(folder) / "file").glob("*.gguf"))
        theirs = in_llama(file, text.input_ids.tolist())
    lines = [
        ABOUT, "",
        f"{len(space.members[0])} layers, heads of {', '.join(map(str, heads))} channels; {a.windows} windows of {a.length} tokens "
        f"of `{Path(a.data).name}`, {a.draws} draws of labels, one thread.",
        "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}",
    ]  # fmt: skip
    for kind in TYPES:
        measured, off = (np.array(side) for side in theirs[kind])
        error, (alone, queries) = measured.std(ddof=1) / math.sqrt(len(measured)), ours[kind]
        cells = [f"{v:.3g}" for v in (predicted[kind], alone, queries)] + [f"{measured.mean():.3g} +- {error:.1g}"]
        ratios = [f"{v / measured.mean():.2f}" for v in (predicted[kind], queries)]
        lines.append(f"| {' | '.join((kind, *cells, f'{off.mean():.3g}', *ratios))} |")
    return "\n".join(lines)


def main() -> None:
    """Look at the models, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", default="stdlib")
    for name, default in (("windows", 4), ("length", 256), ("draws", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    for name in a.models:
        text = look(name, a)
        write_section("cache", f"A rounded cache in llama.cpp: {Path(name).name}", text, out=a.out, peers=("xllamacpp", "gguf"))


if __name__ == "__main__":
    main()
