"""Bits of the weights that fit a memory at a context beside caches of several formats, from the configuration alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..compressors.formats import GGUF, PACKED, find_format
from ..decisions.bits import formats_table
from ..decisions.formats.baselines import mix_of
from ..decisions.formats.table import FormatTable
from ..decisions.memory import share_of
from ..errors import InvalidInput
from ..gguf.architectures import computes_windows
from ..models.blocks import text_config
from ..models.loading import from_config
from ..models.memory import cache_of, check_positions

CACHES = (("F16", GGUF), ("Q8_0", GGUF), ("Q4_0", GGUF), ("fp8", PACKED))  # of llama.cpp, and vLLM's


def what_fits(config: Any, memory: int, context: int) -> list[dict[str, Any]]:
    """Rows of what a memory leaves for the weights at a context, one for every format of the cache; nothing is loaded.

    A row has the ``runtime`` and the ``cache`` with its ``cache_bytes``, the bytes that are ``left`` for weights, their mean
    ``bits`` (16 at most; 0 where the smallest formats of the runtime do not fit), the ``method`` that this needs (``rtn``, or
    ``weighted``, which reads the inputs of matrices), and the largest ``mix`` of llama.cpp that fits. A file's tensors are
    counted, its metadata and vocabulary, some MB, are not. With an fp8 cache, vLLM's, embedding and head stay in 16 bits, and
    of the memory counts the ``share`` that vLLM takes.

    Raises:
        InvalidInput: A model without a cache that is counted here, or a context beyond its positions.
    """
    known = cache_of(text_config(config))
    if known is None:
        raise InvalidInput("The cache of this model is not counted here.", "", "Leave --context out.")
    check_positions(context, known.positions)
    with torch.device("meta"):
        model = from_config(config)
    tables = {
        GGUF: formats_table(model, family=GGUF, method="weighted", unwritten="plan"),
        PACKED: formats_table(model, family=PACKED, runtime="vllm", unwritten="plan"),
    }
    plain = formats_table(model, family=GGUF, unwritten="plan")
    llama, rows = tables[GGUF], []
    whole = dataclasses.replace(known, layers=[(each, 0) for each, _ in known.layers])
    caches = {PACKED: known, GGUF: known if computes_windows(text_config(config)) else whole}
    mixes = {} if llama.llama is None else {mix: mix_of(llama, mix)[0] for mix in llama.llama.mixes}
    for name, family in CACHES:
        form, table, sizes = find_format(name, family), tables[family], mixes if family == GGUF else {}
        block, numbers = (form.block_bytes, form.group or 1) if family == GGUF else (1, 1)  # fp8: a byte for a number
        cache_bytes = caches[family].held(context) * block // (2 * numbers)
        share = share_of(str(table.runtime), None)
        left = int(share * memory) - cache_bytes - known.state - known.buffers(context) - table.fixed
        inside = [mix for mix, size in sizes.items() if size <= left]
        method = "weighted" if family == GGUF and not _bits(plain, left) else "rtn"
        row = {"cache": name, "cache_bytes": cache_bytes, "left": max(left, 0), "bits": _bits(table, left)}
        row |= {"runtime": table.runtime, "method": method, "share": share}
        rows.append({**row, "mix": max(inside, key=lambda mix: sizes[mix], default=None)})
    return rows


def _bits(table: FormatTable, left: int) -> float:
    """Mean bits per weight of so many bytes; 0 where the smallest formats do not fit."""
    return 0.0 if left < int(table.smallest.sum()) else min(16.0, 8 * left / table.numel)
