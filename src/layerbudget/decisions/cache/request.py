"""Options of ``plan cache``. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ...models.memory import read_context
from ...requests import ADVANCED, TEXT, names, option
from ...session import PlanRequest
from ..files import refuse_long
from ..formats.limits import Limits
from ..formats.request import checked_option
from .formats import CACHES, RULES


@dataclasses.dataclass(kw_only=True)
class CacheRequest(PlanRequest):
    """A format for the keys and values of every layer, within a budget of bytes; the weights stay as they are."""

    command: ClassVar[str] = "plan cache"
    usual: ClassVar[Mapping[str, Any]] = {**PlanRequest.usual, "samples": 16, "length": 512}
    resume: ClassVar[None] = None  # type: ignore[misc]  # there are no parts to keep

    source: str = option(metavar="MODEL", role="reads", help="a decoder")
    bits: float | None = option(None, help="mean bits per cached number, scales counted: 3.5")
    budget: str | None = option(None, help="bytes of the whole cache: '1.5 GiB'")
    context: str = option(flag="--context", metavar="TOKENS", help="of a sequence, prompt and answer: 8192 or 32k")
    batch: int = option(1, help="sequences at a time (default: 1)")
    runtime: str | None = option(None, choices=lambda: tuple(CACHES), help="who runs it (default: transformers)")
    formats: tuple[str, ...] | None = option(
        None, metavar="LIST", read=names, help="choose among these: int4,int8 (transformers), Q4_0,Q8_0 (llama.cpp)"
    )
    rule: str = option(
        "exact",
        choices=lambda: RULES,
        help="exact: the least damage (default); others are to compare with",
    )
    samples: int | None = option(None, group=TEXT, help="number of calibration sequences (default: 16)")
    length: int | None = option(None, group=TEXT, help="tokens per sequence (default: 512)")
    group: int | None = option(None, group=ADVANCED, help="channels that share a scale (default: 64, 32 or 16)")
    draws: int | None = option(None, group=ADVANCED, help="how often labels are drawn for every token (default: 4)")
    checked: int | None = checked_option(8)

    @property
    def measures(self) -> bool:
        """Whether the source is a model, which it always is."""
        return True

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return read_context(self.context)

    def check(self) -> None:
        """Refuse no budget and two of them, and a context that the model does not read, before anything is loaded.

        Raises:
            InvalidInput: One of these.
        """
        super().check()
        self.need_one(("bits", "budget"), "budget", "--bits 3.5, or --budget '1.5 GiB'")
        Limits(bits=self.bits, budget=self.budget).check(("bits", "budget"))
        refuse_long(self.source, self.tokens)
