"""Formats of cached keys and values, their exact bytes, and the runtimes that keep them. No torch.

A key or value of a token is ``heads x channels`` numbers. All formats round groups of channels of one head of one token:

* ``int2`` to ``int8`` (transformers): whole numbers over the range of a group, which keeps its step and minimum in 16 bits.
  ``int4-g32`` has groups of 32, which cost half a bit more than those of 64. :mod:`layerbudget.decisions.cache.hqq` packs them.
* ``Q4_0`` ... ``Q8_0``, ``IQ4_NL`` (llama.cpp): blocks of 32, rotated and rounded as llama.cpp does
  (:mod:`layerbudget.decisions.cache.llama`).
* ``fp8`` (vLLM): e4m3 without a scale.

What a runtime may tell apart is what is decided: transformers layers, and keys from values; vLLM layers; llama.cpp keys from
values. Bytes are those that it allocates: vLLM in blocks of 16 tokens, llama.cpp in steps of 256. Beside a sliding window both
keep the tokens that are computed at a time, which are taken to be 512 (for vLLM ``--max-num-batched-tokens 512``); vLLM also
one block more, because the window may begin inside a block. Of models whose windows it does not compute (Mistral, Phi-3)
llama.cpp keeps all tokens. The packed caches of transformers have no sliding window: such layers stay in sixteen bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ...compressors.formats import find_format
from ...errors import CorruptFile, InvalidInput
from .llama import rotates

RULES = ("exact", "uniform", "protect-ends")
PARTS = ("keys", "values")
_GROUPS = (64, 32, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """One way of keeping keys or values.

    Attributes:
        name: What plans and users write.
        bits: Of one number, without its scale.
        group: Channels that share a scale.
        bytes: Of a group.
        rotated: Whether the runtime rotates keys and values before it rounds them (:mod:`layerbudget.decisions.cache.llama`).
        interleaved: Whether its keys have the halves of a head as neighbours.
    """

    name: str
    bits: int
    group: int
    bytes: int
    rotated: bool = False
    interleaved: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is sixteen bits, as the model computes them."""
        return self.bits == 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedTensor:
    """Keys or values that one layer keeps.

    Attributes:
        layer: Index in the cache; ``name`` is the layer's.
        part: 0 for keys, 1 for values.
        heads, channels: Of a token.
        window: Most tokens that are read; None for all.
        interleaved: Whether the runtime has the halves of a head of keys as neighbours, as its file has them.
    """

    layer: int
    name: str
    part: int
    heads: int
    channels: int
    window: int | None
    interleaved: bool = False

    @property
    def module(self) -> str:
        """The name in plans."""
        return f"{self.name}.{PARTS[self.part]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheRuntime:
    """A runtime: its formats, the smallest first, and what it tells apart.

    Attributes:
        name: What users write.
        names: Formats; sixteen bits come last. Smaller groups (``-g32``) are a choice where they are smaller than those of
            the other formats and no format has more bits for the same bytes, or where they are named.
        layers, parts: Whether layers may differ, and keys from values.
        step: Tokens that are allocated at a time.
        ahead: Tokens beside a sliding window that are kept while they are computed.
        spare: Further tokens of a sliding window.
        windows: Whether layers with a sliding window may have fewer than sixteen bits.
        share: Of a card's memory, what it takes by default.
    """

    name: str
    names: tuple[str, ...]
    layers: bool = True
    parts: bool = True
    step: int = 1
    ahead: int = 0
    spare: int = 0
    windows: bool = True
    share: float = 1.0

    def tokens(self, context: int, window: int | None) -> int:
        """Return the tokens of a context that a layer has room for."""
        kept = context if window is None else min(context, window + self.ahead)
        return -(-kept // self.step) * self.step + (0 if window is None else self.spare)

    def formats(
        self,
        widths: Sequence[int],
        names: Sequence[str] | None = None,
        group: int | None = None,
        rotated: bool | None = None,
    ) -> list[CacheFormat]:
        """Formats to choose among, the smallest first and sixteen bits last.

        Args:
            widths: Channels of the heads.
            names: Some of those of the runtime.
            group: Channels of a group of ``int2`` to ``int8``; by default the largest of 64, 32 and 16 that divides all widths.
            rotated: Whether llama.cpp rotates what it rounds; by default as the installed one does.

        Raises:
            InvalidInput: A format that the runtime has not, or a group that does not divide the channels of a head.
        """
        unknown = [n for n in names or () if n not in self.names]
        if unknown:
            raise InvalidInput(
                f"{self.name} keeps no {unknown[0]}.", f"It has {', '.join(self.names)}.", "Choose some of those."
            )
        if group is not None and self.name != "transformers":
            raise InvalidInput(f"{self.name} has groups of its own; a group size has no meaning.", "", "Leave it out.")
        if group is not None and group < 1:
            raise InvalidInput(f"group is {group}.", "A group has 1 channel or more.", "Leave group out, or give 32.")
        size = group or next((g for g in _GROUPS if all(w % g == 0 for w in widths)), _GROUPS[-1])
        price = {n: 8 * f.bytes / f.group for n in self.names for f in (_format(n, size),)}
        plain = {price[n] for n in self.names if not _group(n, 0)}
        finer = [n for n in self.names if not _group(n, 0) or (_group(n, 0) < size and price[n] not in plain)]
        wanted = finer if names is None else [*names, self.names[-1]]
        chosen = [_format(name, size) for name in self.names if name in wanted]
        for form in chosen:
            short = [w for w in widths if w % form.group]
            if short:
                whole = f"plan in 16 bits (--formats {self.names[-1]} --bits 16; plan memory: --cache {self.names[-1]})"
                smaller = f"choose another group size (plan cache: --group {math.gcd(*widths, _GROUPS[-1])}), or "
                ways = smaller + whole if form.name.startswith("int") and not _group(form.name, 0) else whole
                raise InvalidInput(
                    f"Heads have {short[0]} channels, which {form.name} cannot keep in groups of {form.group}.",
                    "",
                    f"{ways[0].upper()}{ways[1:]}.",
                )
        rotated = self.name == "llama.cpp" and (rotates() if rotated is None else rotated)
        return [dataclasses.replace(f, rotated=rotated and not f.plain) for f in chosen]


def _group(name: str, group: int) -> int:
    """Channels of a group: those that a name says, or else ``group``."""
    return int(name.partition("-g")[2] or group)


def _format(name: str, group: int) -> CacheFormat:
    if name.startswith("int"):
        bits, group = int(name[3]), _group(name, group)
        return CacheFormat(name=name, bits=bits, group=group, bytes=-(-bits * group // 8) + 4)
    if name == "fp8":
        return CacheFormat(name=name, bits=8, group=1, bytes=1)
    if name in ("bf16", "F16"):
        return CacheFormat(name=name, bits=16, group=1, bytes=2)
    form = find_format(name, "gguf")
    return CacheFormat(name=name, bits=form.bits, group=form.group or 1, bytes=form.block_bytes)


CACHES = {
    "transformers": CacheRuntime(
        name="transformers",
        names=(
            *("int2", "int2-g32", "int3", "int3-g32", "int4", "int4-g32", "int5", "int4-g16", "int6", "int8"),
            "bf16",
        ),
        windows=False,
    ),
    "vllm": CacheRuntime(name="vllm", names=("fp8", "bf16"), parts=False, step=16, ahead=511, spare=16, share=0.9),
    "llama.cpp": CacheRuntime(
        name="llama.cpp",
        names=("Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16"),
        layers=False,
        step=256,
        ahead=512,
    ),
}


def find_cache(name: str) -> CacheRuntime:
    """Return a runtime by name."""
    if name not in CACHES:
        raise InvalidInput(f"There is no runtime {name!r}.", f"There are {', '.join(CACHES)}.", "Choose one of those.")
    return CACHES[name]


def check_cached(formats: Mapping[str, str], runtime: str) -> None:
    """Refuse the formats of a plan, by what they are of, that a runtime does not keep.

    Raises:
        CorruptFile: One of them, or there is no such runtime.
    """
    known = CACHES[runtime].names if runtime in CACHES else ()
    for name, form in formats.items():
        if form not in known:
            what = f"This plan gives {name} the format {form}, which {runtime} does not keep."
            raise CorruptFile(what, f"It keeps {', '.join(known) or 'none'}.", "Make the plan again.")
