"""What can go from a layer, and what it saves: whole heads, MLP channels. No torch."""

from __future__ import annotations

import dataclasses

from ...errors import UnknownUnit

KINDS = ("heads", "mlp")
WAYS = ("none", "refit", "stream")  # of compensation, see layerbudget.decisions.shapes.compensation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The attention, the MLP, or the other matrices of one layer.

    Attributes:
        name: ``<layer>.heads``, ``<layer>.mlp`` or ``<layer>.rest``.
        layer: Layer as in :func:`layerbudget.models.blocks.layers`.
        kind: ``heads``, ``mlp`` or ``rest`` (which only goes with its layer).
        by: What one unit is: ``groups``, ``queries``, or ``8 channels``.
        units: Units there are; at least one stays unless the whole layer goes.
        unit_parameters: Matrix parameters of one unit.
        unit_channels: Channels of query heads in one unit.
        channels: Channels of all query heads.
        parameters: Matrix parameters of the part.
        flops: FLOPs per token of its matrices.
        modules: Full names of its matrices.
    """

    name: str
    layer: str
    kind: str
    by: str = ""
    units: int = 0
    unit_parameters: int = 0
    unit_channels: int = 0
    channels: int = 0
    parameters: int
    flops: int
    modules: tuple[str, ...]


def amount(part: Part, unit: str, *, context: int = 0, bytes_per_parameter: float = 2.0) -> tuple[float, float]:
    """What one unit of a part, and the whole part, amount to.

    Args:
        part: The part.
        unit: ``params``, ``bytes`` or ``flops`` (per token, two per multiply-add, matrices only).
        context: Count also the attention scores and the weighted sum of ``flops``: ``4 * context`` per channel of a query head,
            with ``context`` the mean number of tokens attended to.
        bytes_per_parameter: 2 for bf16.

    Raises:
        UnknownUnit: Another unit.

    >>> amount(Part(name="a", layer="l", kind="mlp", units=4, unit_parameters=6, parameters=24, flops=48, modules=()), "flops")
    (12.0, 48.0)
    """
    if unit == "flops":
        each, whole = 2 * part.unit_parameters + 4 * context * part.unit_channels, part.flops + 4 * context * part.channels
        return float(each), float(whole)
    if unit in ("params", "bytes"):
        size = bytes_per_parameter if unit == "bytes" else 1.0
        return part.unit_parameters * size, part.parameters * size
    raise UnknownUnit(
        f"Heads and MLP units are not priced in {unit}.", "Units: flops, params, bytes.", "Write '25% flops', for example."
    )
