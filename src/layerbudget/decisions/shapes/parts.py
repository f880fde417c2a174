r"""Parts that can go from a layer - whole heads, MLP channels, zeros of what remains - and what it saves. No torch.

Of a part with ``n`` matrix parameters left, ``z`` of them zero, in values of b bytes:

    2:4       z = n / 2:   FLOPs of the matrices n instead of 2 n (sparse tensor cores), bytes b (n - z) + n / 8
    packed    z = floor(share n):   the same FLOPs (no common runtime is faster), bytes b (n - z) + ceil(n / 8)

The bytes are values and one bit per place: what ``layerbudget export --to packed`` writes, and, for 2:4, what those cores read
(two bits per value that is left).
"""

from __future__ import annotations

import dataclasses

from ...errors import InvalidInput, UnknownUnit

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros:
    """A pattern of zeros with its runtime.

    Attributes:
        name: What users write.
        shares: Levels, increasing, the first one none.
        pattern: ``(zeroed, group)``, or None where any weight may go.
        speed: FLOPs that are left of a matrix that has zeros.
        runtime: Where the saving is real, a phrase.
    """

    name: str
    shares: tuple[float, ...] = (0.0,)
    pattern: tuple[int, int] | None = None
    speed: float = 1.0
    runtime: str = "everywhere"

    def count(self, parameters: int, level: int) -> int:
        """Zeros among so many parameters.

        >>> ZEROS["packed"].count(101, 1)
        25
        """
        return int(self.shares[level] * parameters)


_SPARSE_CORES = "kernels for 2:4 on sparse tensor cores (NVIDIA Ampere and later); elsewhere as slow as dense"
_PACKED = "the file that `layerbudget export --to packed` writes; in memory, and in time, as dense"
ZEROS = {
    "none": Zeros(name="none"),
    "2:4": Zeros(name="2:4", shares=(0.0, 0.5), pattern=(2, 4), speed=0.5, runtime=_SPARSE_CORES),
    "packed": Zeros(name="packed", shares=(0.0, 0.25, 0.375, 0.5, 0.625), runtime=_PACKED),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """The unit in which parts are counted.

    Attributes:
        unit: ``params``, ``bytes`` or ``flops`` (per token, two per multiply-add, matrices only).
        context: Count also the attention scores and the weighted sum of ``flops``: ``4 * context`` per channel of a query head,
            with ``context`` the mean number of tokens attended to.
        bytes_per_parameter: 2 for bf16.

    Raises:
        UnknownUnit: Another unit.
    """

    unit: str
    context: int = 0
    bytes_per_parameter: float = 2.0

    def __post_init__(self) -> None:
        if self.unit not in ("flops", "params", "bytes"):
            raise UnknownUnit(
                f"Heads and MLP units are not priced in {self.unit}.",
                "Units: flops, params, bytes.",
                "Write '25% flops', for example.",
            )

    def left(self, part: Part, units: int = 0, zeros: Zeros = ZEROS["none"], level: int = 0) -> float:
        """Return the size of a part when so many units are gone and what is left holds zeros.

        >>> part = Part(name="a", layer="l", kind="mlp", units=4, unit_parameters=16, parameters=64, flops=128, modules=())
        >>> [Price(unit=u).left(part, 1, ZEROS["2:4"], 1) for u in ("flops", "bytes", "params")]
        [48.0, 54.0, 48.0]
        """
        parameters = part.parameters - units * part.unit_parameters
        some = zeros.shares[level] > 0
        if self.unit == "flops":
            matrices = part.flops - 2 * units * part.unit_parameters
            scores = 4 * self.context * (part.channels - units * part.unit_channels)
            return matrices * (zeros.speed if some else 1.0) + scores
        if self.unit == "params":
            return float(parameters)
        places = -(-parameters // 8) if some else 0
        return (parameters - zeros.count(parameters, level)) * self.bytes_per_parameter + places

    def check(self, zeros: str) -> Zeros:
        """Return a pattern of zeros by name.

        Raises:
            InvalidInput: Another name, or zeros that save nothing in this unit.
        """
        if zeros not in ZEROS:
            raise InvalidInput(f"There are no zeros {zeros!r}.", f"Known are {', '.join(ZEROS)}.", "Use none.")
        if zeros != "none" and (self.unit == "params" or (self.unit == "flops" and ZEROS[zeros].speed == 1.0)):
            raise InvalidInput(
                f"Zeros of kind {zeros} save no {self.unit}.",
                "2:4 saves flops and bytes, packed saves bytes.",
                "Give the budget in bytes, or plan without zeros.",
            )
        return ZEROS[zeros]
