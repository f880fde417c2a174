"""Kinds of plan as data: what a block gets, what its count counts, and which way it cuts. No torch here.

How plans of this package's kinds are made and applied is in :mod:`layerbudget.decisions.apply`. A kind of one's own is one
object with its functions in it, which ``KINDS.add`` registers, also from the entry-point group ``layerbudget.kinds``.
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
    """One kind of plan."""

    name: str  #: what files and users write
    decides: str  #: what a block gets, in a sentence ("decides sparsity for 12 blocks")
    counts: str  #: what the whole number of a block counts
    summary: str = ""  #: a line for the help
    harms: bool = False  #: whether more of it costs quality (sparsity), so that what matters gets less of it, or helps (ranks)
    make: Call | None = None  #: makes a plan from scores and a budget, for sweeps
    budget: str = "budget"  #: name of that function's budget
    predicts: bool = False  #: whether plans say the damage that they expect (``extra["predicted"]``, nats)
    apply: Call | None = None  #: gives a model what a plan of it says
    command: str = ""  #: the command that such a plan is for
    bytes_of: str = ""  #: of what its bytes are, where its budget is bytes ("the planned matrices")


KINDS: Registry[Kind] = Registry("kind of plan", group="layerbudget.kinds")
_PRUNED, _UNITS = "pruned parameters", "heads, MLP widths and layers to remove: smaller matrices"
_RECIPE = (
    "a format for every matrix and a LoRA rank for every adapter, in whole bytes; "
    "apply writes its base, finetune trains its ranks on that, split_recipe gives the two plans"
)
_KEPT = "the experts that stay in every layer: fewer experts, the same routing"
_BITS = "a format for every weight matrix, in whole bytes"
_CACHE = "a format for the keys and values of every layer, in whole bytes; export names it to runtimes"
_FIT = "formats of the weights and of the cache under one memory; apply writes the weights, and the cache's plan beside them"
_MATRICES, _CACHED, _MEMORY = "the planned matrices", "the cache", "file, cache and buffers"
_JOINT = "one byte budget for pruning and adapting; split_joint gives the two plans"
for _kind in (
    Kind("sparsity", "sparsity", _PRUNED, "a sparsity for every block", harms=True, budget="sparsity", command="apply"),
    Kind("shapes", "removed parameters", "removed parameters", _UNITS, harms=True, command="apply"),
    Kind("experts", "experts", "experts of every matrix", "LoRA experts for every block", budget="total", command="finetune"),
    Kind("ranks", "rank", "rank of every matrix", "a LoRA rank for every block", budget="mean_rank", command="finetune"),
    Kind("kept-experts", "the share of experts that stay", "experts that stay", _KEPT, predicts=True, command="apply"),
    Kind("bits", "bits per weight", "bytes", _BITS, budget="bits", predicts=True, command="apply", bytes_of=_MATRICES),
    Kind("cache", "bits per number", "bytes", _CACHE, budget="bits", predicts=True, bytes_of=_CACHED),
    Kind("fit", "bits per number", "bytes", _FIT, budget="memory", predicts=True, command="apply", bytes_of=_MEMORY),
    Kind("recipe", "bits per weight", "bytes", _RECIPE, predicts=True, command="finetune", bytes_of="base and adapter"),
    Kind("joint", "sparsity", _PRUNED, _JOINT, harms=True),
):
    KINDS.add(_kind.name, _kind)


def check_kind(kind: str, wanted: Sequence[str], what: str) -> None:
    """Refuse a plan of another kind than ``wanted``, before any work; ``what`` is as in "cannot be pruned".

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
