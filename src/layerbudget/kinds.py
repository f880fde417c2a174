"""Kinds of plan as data: what a block gets, what its count counts, and which way it cuts. No torch here.

How plans of this package's kinds are made and applied is in :mod:`layerbudget.decisions.apply`. A kind of one's own is one
object, with its functions in it::

    from layerbudget.kinds import KINDS, Kind

    KINDS.add("windows", Kind(
        name="windows", decides="attention window", counts="tokens", apply=give_windows,
        summary="a sliding window for every layer",
    ))

or comes with a package that names its module in the entry-point group ``layerbudget.kinds``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import InvalidInput
from .records import Block
from .registry import Registry

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of plan.

    Attributes:
        name: What files and users write.
        decides: What a block gets, in a sentence ("decides sparsity for 12 blocks").
        counts: What the whole number of a block counts.
        summary: A line for the help.
        harms: Whether more of it costs quality, so that what matters gets less of it (sparsity), or helps (ranks).
        make: ``(scores, **{budget: ...}, **options) -> Plan``, for sweeps.
        budget: Name of that function's budget.
        predicts: Whether its plans say the damage that they expect, in nats (``extra["predicted"]``): what a sweep compares.
        apply: ``(model, plan, ...)``: how a model gets what the plan says.
        command: What a user does with such a plan, for messages.
    """

    name: str
    decides: str
    counts: str
    summary: str = ""
    harms: bool = False
    make: Call | None = None
    budget: str = "budget"
    predicts: bool = False
    apply: Call | None = None
    command: str = ""


KINDS: Registry[Kind] = Registry("kind of plan", group="layerbudget.kinds")
for _kind in (
    Kind(
        name="sparsity",
        decides="sparsity",
        counts="pruned parameters",
        harms=True,
        budget="sparsity",
        summary="a sparsity for every block",
        command="layerbudget prune",
    ),
    Kind(
        name="structured",
        decides="removed parameters",
        counts="removed parameters",
        harms=True,
        summary="heads, MLP widths and layers to remove: smaller matrices",
        command="layerbudget prune",
    ),
    Kind(
        name="depth",
        decides="removal",
        counts="removed parameters",
        harms=True,
        summary="whole layers to remove",
        command="layerbudget prune",
    ),
    Kind(
        name="experts",
        decides="experts",
        counts="experts of every matrix",
        budget="total",
        summary="LoRA experts for every block",
        command="layerbudget finetune",
    ),
    Kind(
        name="ranks",
        decides="rank",
        counts="rank of every matrix",
        budget="mean_rank",
        summary="a LoRA rank for every block",
        command="layerbudget finetune",
    ),
    Kind(
        name="bits",
        decides="bits per weight",
        counts="bytes",
        budget="bits",
        predicts=True,
        summary="a format for every weight matrix, in whole bytes",
        command="layerbudget quantize",
    ),
    Kind(
        name="recipe",
        decides="bits per weight",
        counts="bytes",
        predicts=True,
        summary="a format for every matrix and a LoRA rank for every adapter, in whole bytes; quantize writes its base, "
        "finetune trains its ranks on that, split_recipe gives the two plans",
        command="layerbudget finetune",
    ),
    Kind(
        name="joint",
        decides="sparsity",
        counts="pruned parameters",
        harms=True,
        summary="one byte budget for pruning and adapting; split_joint gives the two plans that are applied",
        command="split_joint",
    ),
):
    KINDS.add(_kind.name, _kind)


def check_kind(kind: str, wanted: Sequence[str], what: str) -> None:
    """Refuse a plan of another kind, before any work.

    Args:
        kind: The plan's.
        wanted: Kinds that will do.
        what: What was to be done, as in "cannot be pruned".

    Raises:
        InvalidInput: Another kind; the message names the command that it is for.
    """
    if kind in wanted:
        return
    command = KINDS.all()[kind].command if kind in KINDS.all() else ""
    raise InvalidInput(
        f"A plan of kind {kind} {what}.", f"That takes a plan of kind {', '.join(wanted)}.",
        f"{f'Use this one with {command}, or make' if command else 'Make'} another: layerbudget plan {wanted[0]}.",
    )  # fmt: skip


def by_name(blocks: Sequence[Block], values: Mapping[str, float] | Sequence[float]) -> list[float]:
    """One finite number per block, in order.

    Raises:
        InvalidInput: Too few, too many, unknown names, or not finite.
    """
    names = [b.name for b in blocks]
    if not isinstance(values, Mapping):
        given = [float(v) for v in values]
        if len(given) != len(names):
            raise InvalidInput(f"There are {len(given)} values for {len(names)} blocks.", "One each.", "Give one per block.")
        values = dict(zip(names, given, strict=True))
    known = set(names)
    wrong = [n for n in names if n not in values] + [n for n in values if n not in known]
    if wrong:
        raise InvalidInput(
            f"Values and blocks differ in {', '.join(wrong[:4])}.", f"The blocks are {', '.join(names[:3])}, ...", "Name each."
        )
    numbers = [float(values[n]) for n in names]
    bad = next((n for n, v in zip(names, numbers, strict=True) if not math.isfinite(v)), None)
    if bad is not None:
        raise InvalidInput(f"The value of {bad} is {values[bad]}.", "It must be finite.", "Correct it.")
    return numbers


def count_of(kind: str, block: Block, value: float) -> int:
    """Whole count of a value.

    Raises:
        InvalidInput: A sparsity outside [0, 1], or capacity that is no whole number of zero or more.
    """
    if kind == "sparsity":
        if not 0.0 <= value <= 1.0:
            raise InvalidInput(f"{block.name} is to have sparsity {value:g}.", "It lies in [0, 1].", "Give a fraction.")
        return int(round(value * block.numel))
    if value < 0 or value != int(value):
        raise InvalidInput(f"{block.name} is to have {value:g} {kind}.", "They are counted.", "Give a whole number.")
    return int(value)
