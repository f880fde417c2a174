"""Options of ``plan shapes``, and of ``apply`` with such a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from ...budget import parse_budget
from ...compressors.formats import GGUF, NEMOTRON, RUNTIMES
from ...requests import ADVANCED, TEXT, option, out_option
from ...session import PlanRequest, WriteRequest
from .program import DAMPING, PASSES, UNITS, WAYS


@dataclasses.dataclass(kw_only=True)
class ShapesRequest(PlanRequest):
    """Heads, MLP widths and layers to remove: smaller matrices."""

    command: ClassVar[str] = "plan shapes"
    usual: ClassVar[Mapping[str, object]] = {**PlanRequest.usual, "samples": 16}

    source: str = option(metavar="MODEL", role="reads", help="a model")
    budget: str = option(
        flag="--save",
        short="--budget",
        metavar="BUDGET",
        help="what is to be saved: '25% flops', '1.2 GiB', '300M params', '25% latency'",
    )
    kinds: str = option("heads,mlp", flag="--parts", help="what may go: heads, mlp or both (default: heads,mlp)")
    depth: int = option(0, help="so many whole layers may go where that is cheaper (default: none)")
    even: bool = option(False, help="the same in all layers: what an ordinary checkpoint can hold")
    passes: float = option(PASSES, help=f"most forward equivalents to spend (default: {PASSES:g})")
    runtime: str | None = option(
        None, choices=lambda: tuple(RUNTIMES), help="plan only what it loads, and refuse what it does not compute"
    )
    samples: int | None = option(None, group=TEXT, help="number of calibration sequences (default: 16)")
    out: str | None = out_option("write the plan here (default: plan.json)", metavar="PLAN")

    by: str = option(
        "auto", group=ADVANCED, choices=lambda: UNITS, help="units of heads: groups, queries, or the better (default: auto)"
    )
    multiple: int = option(8, group=ADVANCED, help="channels of one MLP unit (default: 8)")
    max_removed: float = option(0.75, group=ADVANCED, help="largest share of the units of one part (default: 0.75)")
    compensate: str = option(
        "auto", group=ADVANCED, choices=lambda: WAYS, help="what the matrices behind removed units become (default: auto)"
    )
    strides: int = option(2, group=ADVANCED, help="equal parts of the budget in which the first plan is made (default: 2)")
    trust: float = option(
        0.12, group=ADVANCED, help="largest change of a part in the first step, as a share of its units (default: 0.12)"
    )
    draws: int = option(2, group=ADVANCED, help="draws of labels (default: 2)")
    damping: float = option(
        DAMPING, group=ADVANCED, help=f"of the refit, relative to the mean of the diagonal of H (default: {DAMPING:g})"
    )
    threads: int = option(1, group=ADVANCED, help="threads of llama.cpp, where latency is measured (default: 1)")

    #: How ``apply`` is told to write the plan, empty where it needs no word; None where it writes no file of it.
    written_as: str | None = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The kinds that may go."""
        return tuple(kind.strip() for kind in self.kinds.split(","))

    def check(self) -> None:
        """Refuse a budget that does not read, and options of parts that stay.

        Raises:
            InvalidInput: An option that would be ignored, or an unknown unit.
        """
        super().check()
        parse_budget(self.budget)
        unread = {"heads": "multiple", "mlp": "by"}
        self.refuse([unread[kind] for kind in self.parts if len(self.parts) == 1 and kind in unread], f"--parts {self.kinds}")


@dataclasses.dataclass(kw_only=True)
class ShapesWrite(WriteRequest):
    """Options of ``apply`` for a plan of smaller shapes."""

    family: str | None = option(
        None,
        flag="--format",
        choices=lambda: (GGUF, NEMOTRON),
        help="of shapes that differ by layer: a GGUF file in 16 bits for llama.cpp, or a folder for vLLM (equal heads)",
    )
