"""Payload of plans of the cache: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses

from ..formats.payload import CachedPayload


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePayload(CachedPayload):
    """Fields of ``extra`` in the file of a plan of the cache.

    Attributes:
        placed: Options of llama.cpp's server that place the layers, of a plan that was made for a card beside the processor.
    """

    placed: str | None = None
