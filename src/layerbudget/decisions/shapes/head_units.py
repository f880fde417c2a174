"""What may be removed of attention: by which units, and how many of them a plain config can describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from ...errors import UnknownStructure
from ...models.blocks import layers
from .attention import expressible, find_attention
from .heads import unit_of
from .parts import Part
from .removable import find_parts


def head_units(model: nn.Module, kinds: Sequence[str], by: str, curves: Any) -> tuple[str, ...]:
    """Units of heads to plan with: both, where ``auto`` leaves the choice and grouped queries offer one."""
    if by != "auto" or "heads" not in kinds:
        return (by,)
    find_parts(model, kinds=kinds)
    a = find_attention(layers(model)[0][1], layers(model)[0][0])
    return ("groups", "queries") if curves is None and a.groups > 1 and a.per_group > 1 else (unit_of(a, by),)


def allowed_units(model: nn.Module, parts: Sequence[Part], kinds: Sequence[str]) -> dict[str, Collection[int]]:
    """Numbers of head units that a plain config can describe.

    Raises:
        UnknownStructure: Heads alone are to go and no number of them can be described.
    """
    first = next((p for p in parts if p.kind == "heads"), None)
    if first is None or "heads" not in kinds:
        return {}
    a = find_attention(layers(model)[0][1], first.layer)
    fits, why = set[int](), None
    for units in range(1, first.units):
        gone = units * (a.per_group if first.by == "groups" else a.groups)
        groups = a.groups - units if first.by == "groups" else a.groups
        reason = expressible(model, dataclasses.replace(a, heads=a.heads - gone, groups=groups))
        why = why or reason
        if reason is None:
            fits.add(units)
    if not fits and "mlp" not in kinds:
        raise UnknownStructure(
            f"No smaller number of heads can be written into a plain config: {why or 'there is one unit only'}.",
            "even=True plans what an ordinary checkpoint can hold.",
            "Remove MLP units or blocks instead, or plan without even and use the model in memory.",
        )
    return {"heads": fits}
