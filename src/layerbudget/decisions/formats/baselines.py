"""Formats without a program: one for all, first and last layers protected, llama.cpp's mixes. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...compressors.formats import GGUF, find_format
from ...errors import InvalidInput
from ...gguf.names import split_stacks
from ...llama_cpp.mixes import Tensor, find_mix, needs_matrix, types_of
from ...records import Block
from .table import HUGE, FormatTable

_LAYER = re.compile(r"\.(\d+)\.")


def uniform(table: FormatTable, limit: int) -> np.ndarray:
    """Return the largest format that fits for all blocks; what is left buys the next one for blocks spread evenly."""
    return _protect(table, np.zeros(len(table.blocks), dtype=bool), limit)


def mix_of(table: FormatTable, mix: str) -> tuple[int, np.ndarray | None]:
    """Return the bytes that the blocks take in a mix of llama.cpp, and the choice of formats, ``(K,)``.

    What it rounds beside them and no plan does, it saves: that is taken off.
    There is no choice where llama.cpp refuses the mix for want of an importance matrix, or where the table does not have its
    types. A block that can have one format only has that, where the menu has the mix's.
    """
    refused, types = types_in_mix(table, mix)
    named_blocks = zip(table.blocks, table.stored, strict=True)
    parts = [(name, m) for block, names in named_blocks for name, m in zip(names, block.modules, strict=True)]
    apart = [(types[name], m, split_stacks(m.name, m.copies)) for name, m in parts]  # gate and up are two tensors
    size = sum(n * find_format(kind, GGUF).bytes(m.d_out // n, m.d_in, m.copies) for kind, m, n in apart)
    size -= bytes_saved_elsewhere(table, mix)
    chosen, has = np.zeros(len(table.blocks), dtype=np.int64), table.has
    for i, names in enumerate(table.stored):
        kinds = {types[name] for name in names}
        only = has[i].sum() == 1 and kinds <= set(table.formats)
        allowed = [j for j in np.flatnonzero(has[i]) if {table.formats[j]} == kinds or only]
        if not allowed:
            return size, None
        chosen[i] = allowed[0]
    return size, None if refused else chosen


def check_mixes(rule: str, like: str | None, family: str) -> None:
    """Refuse what mixes of llama.cpp decide, for files that are not GGUF.

    Raises:
        InvalidInput: The rule or the budget names them.
    """
    if family != GGUF and (rule == "mix" or like is not None):
        what = "The budget is that of a mix of llama.cpp" if like is not None else "The rule mix takes the types of llama.cpp"
        raise InvalidInput(
            f"{what}, and this plan is for {family}.",
            "Both are for GGUF files.",
            "Plan for family='gguf' (without another runtime), or give another budget or rule.",
        )


def types_in_mix(table: FormatTable, mix: str) -> tuple[bool, dict[str, str]]:
    """Return whether llama.cpp refuses a mix for want of an importance matrix, and all types of tensors (then as with one)."""
    if table.llama is None:
        why = f"This table is for {table.family}." if table.family != GGUF else "llama.cpp's name of the model is not known."
        raise InvalidInput(f"The bytes of {mix} cannot be counted.", why, "Plan for --format gguf, or give --budget.")
    tensors: dict[str, Tensor] = {}
    for block, names in zip(table.blocks, table.stored, strict=True):
        for name, m in zip(names, block.modules, strict=True):
            copies = m.copies + (tensors[name].copies if name in tensors else 0)
            tensors[name] = Tensor(name=name, d_out=m.d_out, d_in=m.d_in, copies=copies)
    whole = [*tensors.values(), *table.llama.tensors]
    types = types_of(mix, table.llama, whole)
    refused = not table.llama.imatrix and needs_matrix(mix, whole, types)
    if refused:
        types = types_of(mix, dataclasses.replace(table.llama, imatrix=True), whole)
    return refused, {t.name: kind for t, kind in zip(whole, types, strict=True)}


def bytes_saved_elsewhere(table: FormatTable, mix: str) -> int:
    """Bytes that a mix saves of the tensors that plans leave in 16 bits."""
    tensors = [] if table.llama is None else table.llama.tensors
    types = types_in_mix(table, mix)[1] if tensors else {}
    forms = ((find_format("F16", GGUF), find_format(types[t.name], GGUF), t) for t in tensors)
    return sum(plain.bytes(t.d_out, t.d_in, t.copies) - form.bytes(t.d_out, t.d_in, t.copies) for plain, form, t in forms)


def types_like(table: FormatTable, mix: str) -> list[str]:
    """Return the formats of a table and those of a mix, where the table's quantiser can round to them."""
    if table.llama is None:
        return list(table.formats)
    kinds, stored_names = types_in_mix(table, find_mix(mix))[1], {name for names in table.stored for name in names}
    types = [find_format(kind, GGUF) for name, kind in kinds.items() if name in stored_names]
    known = (f.name for f in types if table.llama.imatrix or not f.needs_inputs)
    return list(dict.fromkeys((*table.formats, *known)))


def best_mix(
    table: FormatTable, limit: int, like: str | None = None, *, free: bool = True
) -> tuple[str | None, np.ndarray | None]:
    """Return the mix that a plan of so many bytes is compared with, and its formats: the one named, or the best that fits.

    One that is not ``free`` has to fit as a plan, which spares nothing beside its blocks.
    """
    best: tuple[str | None, np.ndarray | None] = (None, None)
    if table.llama is None:
        return best
    least, k = np.inf, np.arange(len(table.blocks))
    for mix in table.llama.mixes if like is None else (find_mix(like), *table.llama.mixes):
        chosen = mix_of(table, mix)[1]
        if chosen is None or table.size[k, chosen].sum() - (bytes_saved_elsewhere(table, mix) if free else 0) > limit:
            continue
        damage = float(table.damage[k, chosen].sum())
        if damage < least:
            best, least = (mix, chosen), damage
        if like is not None and mix == find_mix(like):
            break
    return best


def _ends(table: FormatTable, limit: int) -> np.ndarray:
    """A better format for embedding, head, and the first and last eighth of the layers (one at least)."""
    numbers, depth = _layers(table.blocks)
    edge = max(1, depth // 8)
    return _protect(table, np.array([n is None or n < edge or n >= depth - edge for n in numbers]), limit)


BASELINES: Mapping[str, Callable[[FormatTable, int], np.ndarray]] = {"uniform": uniform, "protect-ends": _ends}
RULES = ("exact", *BASELINES, "mix")
PEER = "llama-quantize"  # beside plans with error feedback: the mix as that writes it, with importances and no feedback


def _layers(blocks: Sequence[Block]) -> tuple[list[int | None], int]:
    """Layer of every block, None for embedding and head, and the number of layers."""
    matches = [_LAYER.search(b.modules[0].name) for b in blocks]
    numbers = [None if f is None else int(f.group(1)) for f in matches]
    return numbers, 1 + max((n for n in numbers if n is not None), default=0)


def _protect(table: FormatTable, protected: np.ndarray, limit: int) -> np.ndarray:
    """The largest format that fits for all; what is left raises the protected blocks by up to two formats, then the others."""
    size, has, k = table.size, table.has, np.arange(len(table.blocks))
    order = np.argsort(np.where(has, size, 0).sum(0) / np.maximum(has.sum(0), 1), kind="stable")
    everywhere = [_nearest(has, order, n) for n in range(len(order))]
    fits = [n for n, chosen in enumerate(everywhere) if size[k, chosen].sum() <= limit]
    base = fits[-1] if fits else 0
    chosen = everywhere[base] if fits else np.argmin(np.where(has, size, HUGE), axis=1)
    for steps, who in ((1, protected), (2, protected), (1, ~protected)):
        higher = everywhere[min(base + steps, len(everywhere) - 1)]
        chosen = _spread(size, chosen, np.where(who, higher, chosen), limit)
    return chosen


def _nearest(has: np.ndarray, order: np.ndarray, place: int) -> np.ndarray:
    """The format at a place of the order for every block, or the next larger (else smaller) one that it has, ``(K,)``."""
    ranked = [*order[place:], *order[:place][::-1]]
    return np.array([next(j for j in ranked if row[j]) for row in has])


def _spread(size: np.ndarray, low: np.ndarray, high: np.ndarray, limit: int) -> np.ndarray:
    """As many blocks as fit get the higher format, in the order of a van der Corput sequence over depth."""
    chosen, left = low.copy(), limit - int(size[np.arange(len(size)), low].sum())
    for i in sorted(range(len(low)), key=lambda i: int(f"{i:016b}"[::-1], 2)):
        more = int(size[i, high[i]] - size[i, low[i]])
        if 0 < more <= left:
            chosen[i], left = high[i], left - more
    return chosen
