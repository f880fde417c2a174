"""Options of ``plan memory``. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ...compressors.formats import RUNTIMES
from ...models.memory import read_context
from ...requests import ADVANCED, TEXT, names, option
from ...session import PlanRequest
from ..cache import CACHES
from ..files import refuse_long
from ..formats.request import FormatsRequest, checked_option
from .program import RULES, MemoryLimits


@dataclasses.dataclass(kw_only=True)
class MemoryRequest(FormatsRequest):
    """Formats of the weights and of the cache under one memory."""

    command: ClassVar[str] = "plan memory"
    usual: ClassVar[Mapping[str, Any]] = {**PlanRequest.usual, "samples": 16, "length": 512}

    memory: str | None = option(None, metavar="SIZE", help="bytes of file, cache and buffers together: '8 GiB'")
    gpu: str | None = option(None, metavar="SIZE", help="for llama.cpp, instead of --memory: bytes of the card")
    ram: str | None = option(None, metavar="SIZE", help="with --gpu: bytes beside it, for the first layers or their experts")
    context: str = option(flag="--context", metavar="TOKENS", help="of a sequence, prompt and answer: 8192 or 32k")
    batch: int = option(1, help="sequences at a time (default: 1)")
    runtime: str | None = option(None, choices=lambda: tuple(CACHES), help="who runs it (default: llama.cpp)")
    cache: tuple[str, ...] | None = option(
        None, metavar="LIST", read=names, help="choose among these, and 16 bits, for the cache: Q8_0,Q4_0 (default: all)"
    )
    rule: str = option(
        "exact", choices=lambda: RULES, help="exact: the exact program (default); others decide one part after the other"
    )
    samples: int | None = option(
        None,
        group=TEXT,
        help="number of calibration sequences (default: 16; for gptq, descent as many as the widest matrix wants)",
    )
    length: int | None = option(None, group=TEXT, help="tokens per sequence (default: 512)")
    utilization: float | None = option(
        None, group=ADVANCED, help="share of the memory that vLLM takes, its --gpu-memory-utilization (default: 0.9)"
    )
    checked: int | None = checked_option(8)

    @property
    def tokens(self) -> int:
        """Tokens of the context."""
        return read_context(self.context)

    @property
    def target(self) -> str:
        """The runtime of a model that is measured."""
        return self.runtime or "llama.cpp"

    @property
    def terms(self) -> dict[str, Any]:
        """Return what has to fit, as :func:`~layerbudget.decisions.memory.plan.plan_memory` takes it."""
        return {
            **self.given("memory", "gpu", "ram", "batch", "cache"),
            "context": self.tokens,
            "forbid": self.forbid,
            "keep": self.kept,
        }

    def check(self) -> None:
        """Refuse formats that there are not, and a context that the model does not read, before anything is loaded.

        Raises:
            InvalidInput: One of these.
        """
        super().check()
        MemoryLimits(**self.terms).check(self.rule)
        if self.measures:
            refuse_long(self.source, self.tokens)
            self.check_formats(self.target, RUNTIMES[self.target].family)
