"""Which long verbs would refuse a model for what it is made of: known from its modules, without running it."""

from __future__ import annotations

from torch import nn

from ..decisions.shapes.removable import find_parts
from ..errors import LayerbudgetError, UnknownStructure
from ..execution.loss import head_of
from ..execution.sites import owners_of, tracked
from ..models.blocks import partition
from ..sensitivity.estimators import estimators


def refusals(model: nn.Module) -> dict[str, str]:
    """One sentence for every verb that would refuse, by the verb as users type it; empty where none would."""
    found: dict[str, str] = {}
    fused = list(tracked(model, partition(model))[1])
    if fused:
        why = f"It knows no fused experts. Leave them out: --exclude '{owners_of(fused)}'."
        found |= {f"score {e.name}": why for e in estimators().values() if e.linear}
    try:
        find_parts(model)
    except UnknownStructure as error:
        found |= dict.fromkeys(("plan structured", "plan structured --search directional"), str(error))
    try:
        if head_of(model) != "causal":
            found["evaluate"] = "Perplexity needs a causal language model."
    except LayerbudgetError as error:
        found["evaluate"] = str(error)
    return found
