"""Alternatives of a cache, and the bytes of every choice. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...budget import LARGEST
from ...errors import InvalidInput
from ...records import Block, Module
from ..formats.table import CACHE, FormatTable
from .formats import PARTS, CachedTensor, CacheFormat, CacheRuntime, find_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpace:
    """The decisions at a context: blocks of kept keys and values, and formats to choose among."""

    runtime: CacheRuntime
    formats: list[CacheFormat]
    members: list[list[CachedTensor]]
    blocks: list[Block]
    context: int
    batch: int

    @classmethod
    def of(
        cls,
        kept_states: Sequence[CachedTensor],
        context: int,
        batch: int = 1,
        runtime: str = "transformers",
        formats: Sequence[str] | None = None,
        group: int | None = None,
        rotated: bool | None = None,
    ) -> CacheSpace:
        """Return what may be decided about what a model keeps; arguments as of :func:`~.plan.plan_cache`."""
        target, groups = find_cache(runtime), dict[str, list[CachedTensor]]()
        for k in kept_states:
            layer, part = k.name if target.layers else "", PARTS[k.part] if target.parts else ""
            groups.setdefault(".".join(filter(None, (layer, part))), []).append(k)

        def module(k: CachedTensor) -> Module:
            return Module(name=k.module, d_in=batch * target.tokens(context, k.window), d_out=k.heads * k.channels)

        blocks = [Block(name=n, modules=tuple(module(k) for k in each)) for n, each in groups.items()]
        if (numel := sum(b.numel for b in blocks)) > LARGEST:
            what = f"A cache of {batch:,} sequences of {context:,} tokens has {numel:,} numbers, too many to be counted."
            raise InvalidInput(what, f"At most {LARGEST:,} are.", "Give a smaller batch or context.")
        chosen = target.formats(sorted({k.channels for k in kept_states}), formats, group, rotated)
        chosen = [dataclasses.replace(f, interleaved=any(k.interleaved for k in kept_states)) for f in chosen]
        return cls(runtime=target, formats=chosen, members=list(groups.values()), blocks=blocks, context=context, batch=batch)

    def at(self, context: int, batch: int) -> CacheSpace:
        """Return the same decisions at another context."""
        kept_states = [k for each in self.members for k in each]
        names = [f.name for f in self.formats]
        return CacheSpace.of(kept_states, context, batch, self.runtime.name, names, self._group(), self.rotated)

    def table(self, damage: np.ndarray | None = None, rest: np.ndarray | None = None) -> FormatTable:
        """Return bytes and damages of every block in every format; without damages they are zero."""
        size = np.array([[sum(self._bytes(k, f) for k in each) for f in self.formats] for each in self.members], dtype=np.int64)
        can = np.array([[f.plain or self._windows(each) for f in self.formats] for each in self.members])
        size, damage = np.where(can, size, 0), np.where(can, np.zeros(size.shape) if damage is None else damage, np.inf)
        rest = np.zeros((*size.shape, 0)) if rest is None else rest
        return FormatTable(
            blocks=self.blocks,
            formats=tuple(f.name for f in self.formats),
            size=size,
            damage=damage,
            error=np.where(can, np.linalg.norm(rest, axis=-1), 0.0),
            rest=rest,
            fixed=0,
            family=CACHE,
            runtime=self.runtime.name,
            method="",
        )

    def _windows(self, each: Sequence[CachedTensor]) -> bool:
        """Whether the runtime has formats of few bits for all of these."""
        return self.runtime.windows or all(k.window is None for k in each)

    def _bytes(self, k: CachedTensor, form: CacheFormat) -> int:
        tokens = self.batch * self.runtime.tokens(self.context, k.window)
        return tokens * k.heads * (k.channels // form.group) * form.bytes

    def size_by_layer(self) -> dict[int, np.ndarray]:
        """Return the bytes of every layer's part of the blocks in every format, ``(K, m)``, by the layer's index."""
        layers = dict[int, np.ndarray]()
        for block, each in enumerate(self.members):
            for k in each:
                size = layers.setdefault(k.layer, np.zeros((len(self.members), len(self.formats)), dtype=np.int64))
                size[block] += [self._bytes(k, f) for f in self.formats]
        return layers

    def by_layer(self, chosen: np.ndarray) -> dict[int, tuple[CacheFormat, CacheFormat]]:
        """Return the formats of keys and values of every layer of a choice, ``(K,)``."""
        formats = {(k.layer, k.part): self.formats[j] for each, j in zip(self.members, chosen, strict=True) for k in each}
        return {layer: (formats[layer, 0], formats[layer, 1]) for layer, part in formats if part == 0}

    @property
    def rotated(self) -> bool:
        """Whether the runtime rotates what it rounds."""
        return any(f.rotated for f in self.formats)

    def terms(self, group: int | None) -> dict[str, Any]:
        """Return what a plan says of it; ``rotated`` and ``interleaved`` are of llama.cpp alone."""
        llama_terms = (
            {"rotated": self.rotated, "interleaved": self.formats[0].interleaved} if self.runtime.name == "llama.cpp" else {}
        )
        return {"runtime": self.runtime.name, "context": self.context, "batch": self.batch, "group": group, **llama_terms}

    def record(self) -> dict[str, Any]:
        """Return what a score record holds of it, for other contexts."""
        kept_states = [dataclasses.asdict(k) for each in self.members for k in each]
        options = {"runtime": self.runtime.name, "formats": [f.name for f in self.formats], "group": self._group()}
        return {**options, "rotated": self.rotated, "kept": kept_states}

    def _group(self) -> int | None:
        """Channels of a group of formats whose names do not say it."""
        return next((f.group for f in self.formats if f.name.startswith("int") and "-" not in f.name), None)

    @classmethod
    def read(cls, record: Mapping[str, Any], context: int, batch: int) -> CacheSpace:
        """Return the space of a record at a context."""
        options = {**{k: record[k] for k in ("runtime", "formats", "group")}, "rotated": record.get("rotated", False)}
        return cls.of([CachedTensor(**k) for k in record["kept"]], context, batch, **options)
