"""What may be removed of attention: by which units, and how many of them a plain config can describe."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from ...errors import InvalidInput, UnknownStructure
from ...models.blocks import layers
from .attention import describable, find_attention
from .heads import unit_of
from .mlp import find_mlp, undescribed
from .parts import Part
from .removable import find_parts


def head_units(model: nn.Module, kinds: Sequence[str], by: str, curves: Any, even: bool = False) -> tuple[str, ...]:
    """Units of heads to plan with: both, where ``auto`` leaves the choice and grouped queries offer one."""
    if by != "auto" or "heads" not in kinds:
        return (by,)
    find_parts(model, kinds=kinds, even=even)
    a = find_attention(layers(model)[0][1], layers(model)[0][0])
    return ("groups", "queries") if curves is None and a.groups > 1 and a.per_group > 1 else (unit_of(a, by),)


def allowed_units(model: nn.Module, parts: Sequence[Part], kinds: Sequence[str], depth: int = 0) -> dict[str, Collection[int]]:
    """Numbers of units, equal in all layers, that a plain config can describe.

    Args:
        model: The model.
        parts: From :func:`find_parts`.
        kinds: What may go.
        depth: So many whole layers may go; those may be the ones that differ.

    Returns:
        Numbers by kind; a kind without an entry may lose any number.

    Raises:
        InvalidInput: The layers differ.
        UnknownStructure: Nothing of these kinds can be described.
    """
    for kind in kinds if not depth else ():
        if _shapes(parts, kind) > 1:
            raise InvalidInput(
                f"The layers differ in their {'MLPs' if kind == 'mlp' else kind}, so equal removal would not make them equal.",
                "What an ordinary checkpoint can hold is equal in all layers.",
                _instead(model, parts, kind, "plan without --even, and use the model in memory"),
            )
    found = {kind: _described(model, parts, kind) for kind in kinds}
    if any(fits is None or fits for fits, _ in found.values()):
        return {kind: fits for kind, (fits, _) in found.items() if fits is not None}
    what = {"heads": "smaller number of heads", "mlp": "smaller width of the MLPs"}
    raise UnknownStructure(
        "; ".join(f"No {what[kind]} can be written into a plain config: {why}" for kind, (_, why) in found.items()) + ".",
        "What an ordinary checkpoint can hold is planned.",
        _instead(model, parts, kinds[0], "plan without --even, and use the model in memory"),
    )


def _shapes(parts: Sequence[Part], kind: str) -> int:
    """How many shapes the parts of a kind have."""
    return len({(p.units, p.by, p.unit_parameters, p.parameters) for p in parts if p.kind == kind})


def _described(model: nn.Module, parts: Sequence[Part], kind: str) -> tuple[Collection[int] | None, str]:
    """Numbers of units of a kind that a plain config can describe, None for all, and why not where there are none."""
    first = next((p for p in parts if p.kind == kind), None)
    if first is None:
        return None, ""
    layer = model.get_submodule(first.layer)
    if kind == "heads":
        return describable(model, find_attention(layer, first.layer), first.by)
    width = find_mlp(layer, first.layer).width
    why = undescribed(model, width, width - int(first.by.split()[0]))
    return (None, "") if why is None else (set(), why)


def _instead(model: nn.Module, parts: Sequence[Part], kind: str, other: str) -> str:
    """The other kind of part where all layers have one that a config can describe; and another way."""
    else_ = "mlp" if kind == "heads" else "heads"
    there = sum(p.kind == else_ for p in parts) == len(layers(model)) and _shapes(parts, else_) == 1
    fits = _described(model, parts, else_)[0] if there else ()
    if fits is None or fits:
        words = "Remove MLP units (--kinds mlp)" if else_ == "mlp" else "Remove heads (--kinds heads)"
        return f"{words}, or {other}."
    return f"{other[0].upper()}{other[1:]}; or prune its weights instead: layerbudget measure, then prune."
