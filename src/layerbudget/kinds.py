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
from collections.abc import Callable, Sequence
from typing import Any

from .errors import InvalidInput
from .registry import Registry

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
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
        command: The command that such a plan is for.
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
_PRUNED, _REMOVED = "pruned parameters", "removed parameters"
for _kind in (
    Kind("sparsity", "sparsity", _PRUNED, "a sparsity for every block", harms=True, budget="sparsity", command="apply"),
    Kind(
        "shapes",
        "removed parameters",
        _REMOVED,
        "heads, MLP widths and layers to remove: smaller matrices",
        harms=True,
        command="apply",
    ),
    Kind("experts", "experts", "experts of every matrix", "LoRA experts for every block", budget="total", command="finetune"),
    Kind("ranks", "rank", "rank of every matrix", "a LoRA rank for every block", budget="mean_rank", command="finetune"),
    Kind(
        "bits",
        "bits per weight",
        "bytes",
        "a format for every weight matrix, in whole bytes",
        budget="bits",
        predicts=True,
        command="apply",
    ),
    Kind(
        "recipe",
        "bits per weight",
        "bytes",
        "a format for every matrix and a LoRA rank for every adapter, in whole bytes; "
        "apply writes its base, finetune trains its ranks on that, split_recipe gives the two plans",
        predicts=True,
        command="finetune",
    ),
    Kind("joint", "sparsity", _PRUNED, "one byte budget for pruning and adapting; split_joint gives the two plans", harms=True),
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
    use = f"Use this one with layerbudget {command}, or make" if command else "Make"
    raise InvalidInput(
        f"A plan of kind {kind} {what}.",
        f"That takes a plan of kind {', '.join(wanted)}.",
        f"{use} another: layerbudget plan {wanted[0]}.",
    )
