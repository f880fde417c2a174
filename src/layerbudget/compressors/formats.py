"""Formats of a weight matrix: what runtimes store, and how many bytes exactly. No torch.

Every format stores groups of consecutive inputs of a row on an even grid ``base + d q``, ``q = 0 .. levels - 1``:

* **GGUF** (llama.cpp), blocks of 32: ``Q4_0``, ``Q5_0``, ``Q8_0`` have a scale in 16 bits, ``Q4_1``, ``Q5_1`` a scale and
  a minimum. A tensor is padded to 32 bytes in the file. ``F16`` is what llama.cpp falls back to where 32 does not divide.
* **compressed-tensors**, ``pack-quantized``: ``w3-g32`` is 3 bits in groups of 32, symmetric; ``w3-g32-asym`` adds a zero
  point of 3 bits per group; ``w3-channel`` has one group per row. Integers are packed without a gap into words of 32 bits
  per row (zero points per group, down the rows), scales take 16 bits, the shape 16 bytes. ``bf16`` is what is left out.

>>> find_format("Q4_0").bytes(64, 96), find_format("w3-g32").bytes(64, 96)
(3456, 2704)
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidInput, MissingDependency

GGUF, PACKED = "gguf", "compressed-tensors"
FAMILIES = (GGUF, PACKED)
ALIGNMENT = 32
BLOCK = 32
_GROUPS = (128, 64, 32)
_NAME = re.compile(r"w([2-8])-(?:g(\d+)|(channel))(-asym)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One way of storing a matrix.

    Attributes:
        name: What plans and users write.
        family: ``gguf`` or ``compressed-tensors``.
        bits: Of one integer; 16 for plain numbers.
        group: Inputs that share a scale; None for a whole row; 0 for plain numbers.
        symmetric: Whether the grid is bound to zero (no minimum, no zero point).
        block_bytes: Bytes of one block (GGUF).
    """

    name: str
    family: str
    bits: int
    group: int | None
    symmetric: bool = True
    block_bytes: int = 0

    @property
    def plain(self) -> bool:
        """Numbers in 16 bits, no grid."""
        return self.bits == 16

    @property
    def levels(self) -> int:
        """Points of the grid."""
        return 255 if self.name == "Q8_0" else 1 << self.bits

    def fits(self, d_in: int) -> bool:
        """Whether rows of so many inputs can be stored."""
        return not self.group or d_in % self.group == 0

    def groups(self, d_in: int) -> int:
        """Groups of a row."""
        return 1 if self.group is None else d_in // self.group

    def check(self, name: str, d_in: int) -> None:
        """Refuse a matrix whose rows are no whole number of groups.

        Raises:
            InvalidInput: Names the matrix.
        """
        if not self.fits(d_in):
            raise InvalidInput(
                f"{name} has {d_in} inputs, which {self.name} cannot store.",
                f"Its groups are of {self.group}, and {d_in} is no multiple of it.",
                f"Keep it in {plain_of(self.family).name}, or use another group size.",
            )

    def bytes(self, d_out: int, d_in: int, copies: int = 1) -> int:
        """Bytes of a matrix ``(d_out, d_in)`` in the file: integers, scales, minima or zero points, padding, shape.

        Raises:
            InvalidInput: See :meth:`check`.
        """
        self.check("A matrix", d_in)
        if self.family == GGUF:
            exact = copies * d_out * (2 * d_in if self.plain else d_in // BLOCK * self.block_bytes)
            return -(-exact // ALIGNMENT) * ALIGNMENT
        if self.plain:
            return 2 * copies * d_out * d_in
        groups = self.groups(d_in)
        zeros = 0 if self.symmetric else 4 * -(-d_out * self.bits // 32) * groups
        return copies * (4 * d_out * -(-d_in * self.bits // 32) + 2 * d_out * groups + zeros + 16)


def _gguf(name: str, bits: int, block_bytes: int) -> Format:
    return Format(name=name, family=GGUF, bits=bits, group=BLOCK, symmetric=name.endswith("_0"), block_bytes=block_bytes)


PLAIN = (Format(name="F16", family=GGUF, bits=16, group=0), Format(name="bf16", family=PACKED, bits=16, group=0))
TYPES = (_gguf("Q4_0", 4, 18), _gguf("Q4_1", 4, 20), _gguf("Q5_0", 5, 22), _gguf("Q5_1", 5, 24), _gguf("Q8_0", 8, 34))
_NAMED = {f.name.lower(): f for f in (*TYPES, *PLAIN)}


def find_format(name: str) -> Format:
    """A format by name.

    Raises:
        InvalidInput: There is none of that name.
    """
    if name.lower() in _NAMED:
        return _NAMED[name.lower()]
    found = _NAME.fullmatch(name.lower())
    if not found or found.group(2) == "0":
        raise InvalidInput(
            f"There is no format {name!r}.",
            f"There are {', '.join(f.name for f in (*TYPES, *PLAIN))}, and w2 to w8 as in w3-g32, w4-g128-asym, w8-channel.",
            "Choose some of those.",
        )
    bits, group, _, asym = found.groups()
    return Format(name=name.lower(), family=PACKED, bits=int(bits), group=int(group) if group else None, symmetric=asym is None)


def plain_of(family: str) -> Format:
    """Sixteen bits, as a family stores what it does not quantise.

    Raises:
        InvalidInput: An unknown family.
    """
    if family not in FAMILIES:
        raise InvalidInput(f"There is no format {family!r}.", f"There are {' and '.join(FAMILIES)}.", "Use one of those.")
    return PLAIN[FAMILIES.index(family)]


def formats_of(family: str, widths: Sequence[int] = (), *, group: int | None = None) -> tuple[Format, ...]:
    """The formats that a plan chooses among by default, the smallest first.

    Args:
        family: ``gguf`` or ``compressed-tensors``.
        widths: Rows that they should be able to store: the largest group of 128, 64 and 32 that divides them is taken.
        group: Group size of compressed-tensors instead.

    Raises:
        InvalidInput: An unknown family, or a group size where blocks are fixed.
    """
    plain = plain_of(family)
    if family == GGUF:
        if group is not None:
            raise InvalidInput(f"GGUF has blocks of {BLOCK}; a group size has no meaning.", "", "Leave it out.")
        return (*TYPES, plain)
    size = group if group is not None else next((g for g in _GROUPS if all(w % g == 0 for w in widths)), _GROUPS[-1])
    return (*(find_format(f"w{b}-g{size}") for b in (2, 3, 4, 5, 6, 8)), plain)


def need_gguf() -> Any:
    """Return the package ``gguf``.

    Raises:
        MissingDependency: It is not installed.
    """
    return _need("gguf", "GGUF formats need the package gguf.", "use compressed-tensors")


def need_packing() -> tuple[Any, Any]:
    """Return the packer of compressed-tensors and its scheme.

    Raises:
        MissingDependency: It is not installed.
    """
    what, other = "Writing these formats needs the package compressed-tensors.", "plan for gguf"
    packer = _need("compressed_tensors.compressors.pack_quantized.base", what, other)
    return packer.PackedQuantizationCompressor, _need("compressed_tensors.quantization", what, other).QuantizationScheme


def _need(module: str, what: str, other: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(what, "", f"Install layerbudget[bits], or {other}.") from error
