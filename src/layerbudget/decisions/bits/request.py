"""Options of ``plan bits``, and of ``apply`` with a plan that has formats of weights. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ...compressors.base import QUANTISERS
from ...compressors.formats import FAMILIES, GGUF, PACKED, RUNTIMES
from ...registry import Option, options_of
from ...requests import ADVANCED, TEXT, option
from ...session import PlanRequest, WriteRequest
from ..formats.baselines import RULES
from ..formats.limits import Limits
from ..formats.request import FormatsRequest


@dataclasses.dataclass(kw_only=True)
class BitsRequest(FormatsRequest):
    """A format for every weight matrix: bits where they matter, within a budget of bytes."""

    command: ClassVar[str] = "plan bits"
    usual: ClassVar[Mapping[str, Any]] = {**PlanRequest.usual, "samples": 32}

    bits: float | None = option(None, help="mean bits per weight, scales and padding counted: 3.5")
    budget: str | None = option(None, help="bytes of the whole GGUF file, else of all tensors: '1.2 GiB'")
    like: str | None = option(None, metavar="MIX", help="the bytes of a mix of llama.cpp: Q4_K_M, IQ3_XS, ... (GGUF)")
    family: str | None = option(
        None, flag="--format", choices=lambda: FAMILIES, help=f"what is written (default: {PACKED}; with --like {GGUF})"
    )
    runtime: str | None = option(
        None,
        choices=lambda: tuple(RUNTIMES),
        help="who runs it; vllm: q/k/v, gate/up and experts agree",
    )
    rule: str = option(
        "exact",
        choices=lambda: RULES,
        help="exact: the least damage (default); others are to compare with",
    )
    samples: int | None = option(
        None,
        group=TEXT,
        help="number of calibration sequences (default: 32; for gptq, descent as many as the widest matrix wants)",
    )

    @property
    def limits(self) -> dict[str, Any]:
        """The budget and the constraints, as :func:`~layerbudget.decisions.bits.plan.plan_bits` takes them."""
        return {**self.given("bits", "budget", "like"), "forbid": self.forbid, "keep": self.kept}

    def check(self) -> None:
        """Refuse no budget and two of them, formats that there are not, and options that would be ignored.

        Raises:
            InvalidInput: One of these.
        """
        super().check()
        self.need_one(("bits", "budget", "like"), "budget", "--bits 3.5, or --budget '1.2 GiB'")
        Limits(**self.limits).check()


@dataclasses.dataclass(kw_only=True)
class BitsWrite(WriteRequest):
    """Options of ``apply`` for a plan with formats of weights."""

    method: str | None = option(None, metavar="METHOD", help="quantiser (default: what the plan was measured with)")
    imatrix: str | None = option(
        None, metavar="FILE", role="reads", help="llama.cpp's importance matrix, for --method weighted in the place of text"
    )
    inputs: str | None = option(
        None,
        metavar="MODEL",
        role="reads",
        help="of a .gguf file: the model that it was converted from, whose inputs descent, gptq and weighted read",
    )
    verify: bool | None = option(
        None,
        flag="--check",
        group=ADVANCED,
        help="load a written GGUF file by llama.cpp and compare (default where it is there)",
    )

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of the quantiser that is named, else of all: which one the plan was measured with is not known."""
        method = typed.get("method")
        names = [name for name in QUANTISERS.names() if method in (None, name)]
        options = {name: each for n in names for name, each in options_of(QUANTISERS.find(n)).items()}
        return {name: each for name, each in options.items() if name not in cls.options()}
