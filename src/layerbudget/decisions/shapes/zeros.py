r"""Zeros of what remains of a layer, and the runtime in which they save something. No torch.

Of a part with ``n`` matrix parameters left, ``z`` of them zero, in values of b bytes:

    2:4       z = n / 2:   FLOPs of the matrices n instead of 2 n (sparse tensor cores), bytes b (n - z) + n / 8
    packed    z = floor(share n):   the same FLOPs (no common runtime is faster), bytes b (n - z) + ceil(n / 8)

The bytes are values and one bit per place: what ``layerbudget export --to packed`` writes, and, for 2:4, what those cores read
(two bits per value that is left).
"""

from __future__ import annotations

import dataclasses

from ...errors import InvalidInput
from .parts import Part, amount


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
    shares: tuple[float, ...]
    pattern: tuple[int, int] | None
    speed: float
    runtime: str

    def count(self, parameters: int, level: int) -> int:
        """Zeros of so many parameters.

        >>> ZEROS["packed"].count(101, 1)
        25
        """
        return int(self.shares[level] * parameters)


ZEROS = {
    "none": Zeros(name="none", shares=(0.0,), pattern=None, speed=1.0, runtime="everywhere"),
    "2:4": Zeros(
        name="2:4", shares=(0.0, 0.5), pattern=(2, 4), speed=0.5,
        runtime="kernels for 2:4 on sparse tensor cores (NVIDIA Ampere and later); elsewhere as slow as dense",
    ),
    "packed": Zeros(
        name="packed", shares=(0.0, 0.25, 0.375, 0.5, 0.625), pattern=None, speed=1.0,
        runtime="the file that `layerbudget export --to packed` writes; in memory, and in time, as dense",
    ),
}  # fmt: skip


def zeros_of(word: str, unit: str) -> Zeros:
    """A pattern by name, for a budget in some unit.

    Raises:
        InvalidInput: Another name, or zeros that save nothing in this unit.
    """
    if word not in ZEROS:
        raise InvalidInput(f"There are no zeros {word!r}.", f"Known are {', '.join(ZEROS)}.", "Use none.")
    if word != "none" and (unit == "params" or (unit == "flops" and ZEROS[word].speed == 1.0)):
        raise InvalidInput(
            f"Zeros of kind {word} save no {unit}.", "2:4 saves flops and bytes, packed saves bytes.",
            "Give the budget in bytes, or plan without zeros.",
        )  # fmt: skip
    return ZEROS[word]


def left(part: Part, unit: str, units: int, zeros: Zeros, level: int, *, context: int, bytes_per_parameter: float) -> float:
    """What a part amounts to when so many units are gone and what is left holds zeros.

    >>> part = Part(name="a", layer="l", kind="mlp", units=4, unit_parameters=16, parameters=64, flops=128, modules=())
    >>> [left(part, u, 1, ZEROS["2:4"], 1, context=0, bytes_per_parameter=2.0) for u in ("flops", "bytes")]
    [48.0, 54.0]
    """
    each, whole = amount(part, unit, context=context, bytes_per_parameter=bytes_per_parameter)
    dense = whole - units * each
    if not zeros.shares[level]:
        return dense
    parameters = part.parameters - units * part.unit_parameters
    if unit == "bytes":
        return (parameters - zeros.count(parameters, level)) * bytes_per_parameter + -(-parameters // 8)
    matrices = part.flops - 2 * units * part.unit_parameters
    return dense - matrices * (1.0 - zeros.speed)
