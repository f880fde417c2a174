"""Formats of a weight matrix, how many bytes each takes exactly, and the runtimes that read them. No torch.

Every format stores groups of consecutive inputs of a row under scales of their own:

* **GGUF** (llama.cpp), blocks of 32, 64 or 256: ``Q4_0`` to ``Q8_0`` are the old types, ``Q2_K`` to ``Q6_K`` and ``IQ`` those
  of most files, ``MXFP4`` and ``NVFP4`` floating point. ggml rounds to them (:mod:`layerbudget.compressors.ggml`). A tensor is
  padded to 32 bytes in the file. ``F16`` is what remains where no block divides.
* **compressed-tensors**, ``pack-quantized``: ``w3-g32`` is 3 bits in groups of 32, symmetric; ``w3-g32-asym`` adds a zero
  point of 3 bits per group; ``w3-channel`` has one group per row. Integers are packed without a gap into words of 32 bits
  per row (zero points per group, down the rows), scales take 16 bits, the shape 16 bytes. ``bf16`` is what is left out.
  Integers lie on an even grid, ``base + d q`` with ``q = 0 .. levels - 1``.
* **compressed-tensors**, floating point: ``mxfp4`` is e2m1 in groups of 32, each with a power of two in one byte (e8m0);
  ``nvfp4`` is e2m1 in groups of 16, each with a scale in e4m3, all under one number in float32; ``fp8`` is e4m3, one scale of
  16 bits per row; ``mxfp8`` is e4m3 in groups of 32, each with a power of two in one byte. Weights alone are rounded, inputs
  are not. All that is asked of such a format is one row of this file (:class:`Floats`).

>>> find_format("Q4_0").bytes(64, 96), find_format("w3-g32").bytes(64, 96)
(3456, 2704)
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InvalidInput, need_package

BY_MOMENTS = ("gptq", "descent")  # methods that choose codes by the second moments of all inputs together
FED_BACK = ("IQ1_S", "IQ1_M", "MXFP4", "NVFP4")  # descent leaves as gptq does
TOKENS = 4  # per column of the widest matrix: fewer, and these learn the text rather than the inputs
ROWS = 4096  # of a matrix, along whose errors its damage is measured
HEAD_ROWS = 1 << 14  # of a head: with more of them its damage comes from the rows of the labels that are drawn
GGUF, PACKED, NEMOTRON = "gguf", "compressed-tensors", "nemotron-nas"  # the last one: shapes alone
FAMILIES = (GGUF, PACKED)
ALIGNMENT = 32
PACKED_GROUPS = (128, 64, 32)
_PACKED_BITS = (2, 3, 4, 5, 6, 7, 8)
_PACKED_NAME = re.compile(rf"w([{''.join(map(str, _PACKED_BITS))}])-(?:g([1-9]\d*)|(channel))(-asym)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floats:
    """Floating-point codes of compressed-tensors, and how a file holds them.

    Attributes:
        packing: The name that compressed-tensors has for this way of storing.
        mantissa: Bits behind the point of a code.
        least: Exponent of the smallest code that is no fraction of others (a normal number).
        top: Largest code.
        scale: What the scales are stored as, by torch's names: ``bfloat16`` (powers of two), ``float8_e4m3fn``, or ``uint8``
            (e8m0: exponents of powers of two).
        united: Whether one number in float32 lies over all scales of a matrix, and of what vLLM fuses it with.
        experts: Whether vLLM has experts of which the weights alone are in it.
        kernel: What vLLM computes with, in words.
    """

    packing: str
    mantissa: int
    least: int
    top: int
    scale: str
    united: bool = False
    experts: bool = True
    kernel: str


_SCALE_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One way of storing a matrix.

    Attributes:
        name: What plans and users write.
        family: ``gguf`` or ``compressed-tensors``.
        bits: Of one integer; 16 for plain numbers.
        group: Inputs that share a scale; None for a whole row.
        symmetric: Whether the grid is bound to zero (no minimum, no zero point).
        block_bytes: Bytes of one group (GGUF).
        floats: What the codes are where they are floating-point numbers (compressed-tensors); None for integers.
    """

    name: str
    family: str
    bits: int
    group: int | None
    symmetric: bool = True
    block_bytes: int = 0
    floats: Floats | None = None

    @property
    def plain(self) -> bool:
        """Numbers in 16 bits, no grid."""
        return self.bits == 16

    @property
    def levels(self) -> int:
        """Points of the grid."""
        return 1 << self.bits

    @property
    def floating(self) -> bool:
        """Whether the codes are floating-point numbers (compressed-tensors)."""
        return self.floats is not None

    @property
    def united(self) -> bool:
        """Whether one number lies over all scales of a matrix, which then depends on the largest weight."""
        return self.floats is not None and self.floats.united

    @property
    def packing(self) -> str:
        """The name that compressed-tensors has for this way of storing."""
        return "pack-quantized" if self.floats is None else self.floats.packing

    @property
    def needs_inputs(self) -> bool:
        """Whether only a quantiser that reads inputs rounds to it."""
        return self.name in _NEED_INPUTS

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of compressed-tensors for such weights (its ``QuantizationArgs``)."""
        shape: dict[str, Any] = (
            {"strategy": "channel"} if self.group is None else {"strategy": "group", "group_size": self.group}
        )
        if self.united:
            shape |= {"strategy": "tensor_group"}
        if self.floats is not None and self.floats.scale != "bfloat16":
            shape |= {"scale_dtype": f"torch.{self.floats.scale}"}
        kind = "float" if self.floating else "int"
        return {"num_bits": self.bits, "type": kind, "symmetric": self.symmetric, "dynamic": False, **shape}

    def fits(self, d_in: int) -> bool:
        """Whether rows of so many inputs can be stored."""
        return self.group is None or d_in % self.group == 0

    def groups(self, d_in: int) -> int:
        """Groups of a row."""
        return 1 if self.group is None else d_in // self.group

    def check(self, name: str, d_in: int) -> None:
        """Refuse a matrix whose rows are no whole number of groups."""
        if not self.fits(d_in):
            raise InvalidInput(
                f"{name} has {d_in} inputs, which {self.name} cannot store.",
                f"Its groups are of {self.group}, and {d_in} is no multiple of it.",
                f"Keep it in {PLAIN[self.family].name}, or use another group size.",
            )

    def bytes(self, d_out: int, d_in: int, copies: int = 1) -> int:
        """Bytes of a matrix ``(d_out, d_in)`` in the file: integers, scales, minima or zero points, padding, shape.

        Raises:
            InvalidInput: See :meth:`check`.
        """
        self.check("A matrix", d_in)
        groups = self.groups(d_in)
        if self.family == GGUF:
            return -(-copies * d_out * groups * self.block_bytes // ALIGNMENT) * ALIGNMENT
        if self.plain:
            return 2 * copies * d_out * d_in
        if self.floats is not None:
            scales = _SCALE_BYTES[self.floats.scale] * d_out * groups
            return copies * (d_out * d_in * self.bits // 8 + scales + 4 * self.united)
        zeros = 0 if self.symmetric else 4 * -(-d_out * self.bits // 32) * groups
        return copies * (4 * d_out * -(-d_in * self.bits // 32) + 2 * d_out * groups + zeros + 16)

    def can_take(self, size: int, numel: int, tensors: int) -> bool:
        """Return whether so many weights in so many tensors can be ``size`` bytes; less is known where shapes decide it."""
        if self.family == GGUF:
            exact = numel * self.block_bytes / (self.group or 1)
            return exact <= size < exact + ALIGNMENT * tensors
        return size >= numel * self.bits / 8


_GGUF = (  # name, bits of a code, inputs of a block, its bytes; the smallest first
    ("IQ1_S", 1, 256, 50),
    ("IQ1_M", 1, 256, 56),
    ("IQ2_XXS", 2, 256, 66),
    ("IQ2_XS", 2, 256, 74),
    ("IQ2_S", 2, 256, 82),
    ("Q2_K", 2, 256, 84),
    ("IQ3_XXS", 3, 256, 98),
    ("IQ3_S", 3, 256, 110),
    ("Q3_K", 3, 256, 110),
    ("MXFP4", 4, 32, 17),
    ("IQ4_XS", 4, 256, 136),
    ("Q4_0", 4, 32, 18),
    ("IQ4_NL", 4, 32, 18),
    ("NVFP4", 4, 64, 36),
    ("Q4_K", 4, 256, 144),
    ("Q4_1", 4, 32, 20),
    ("Q5_0", 5, 32, 22),
    ("Q5_K", 5, 256, 176),
    ("Q5_1", 5, 32, 24),
    ("Q6_K", 6, 256, 210),
    ("Q8_0", 8, 32, 34),
    ("F16", 16, 1, 2),
)
_NEED_INPUTS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")  # which ggml, or llama-quantize, rounds by an importance matrix only
# Not in the menu unless named: IQ1 ruins what it rounds and takes ggml longest, NVFP4 loses to IQ4_NL in the same bytes.
_BY_NAME = ("IQ1_S", "IQ1_M", "NVFP4")
# Types that a processor computes with slowly. On a core with AVX-512, ggml's products read 1.9 to 3.2 GB/s of these lattices,
# and 4.7 GB/s or more of all other types (Q4_K 8.2). On NVIDIA cards, prompts have no kernel for IQ1_M (mmq.cu, November 2026).
SLOW = {
    "slow-cpu": ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    "slow-gpu": ("IQ1_M",),
}
TYPES = tuple(Format(name=name, family=GGUF, bits=bits, group=group, block_bytes=size) for name, bits, group, size in _GGUF)
# As the sources of vLLM 0.32 (mxfp4) and 0.33 (mxfp8) have it: these cards take a kernel that rounds inputs too, whatever the
# file asks for. At 9.0 Humming goes before Marlin; its rules leave the inputs of mxfp8 in 16 bits below 12.0.
_BLACKWELL = "from compute capability 10 on one that rounds inputs too"
_E2M1: dict[str, Any] = {"mantissa": 1, "least": 0, "top": 6}
_E4M3: dict[str, Any] = {"mantissa": 3, "least": -6, "top": 448}
_FLOATS = (  # name, bits, group, and all else that is asked of a floating-point format of compressed-tensors
    ("mxfp4", 4, 32, Floats(packing="mxfp4-pack-quantized", **_E2M1, scale="uint8", kernel=f"Marlin FP4; {_BLACKWELL}")),
    ("nvfp4", 4, 16, Floats(packing="nvfp4-pack-quantized", **_E2M1, scale="float8_e4m3fn", united=True, kernel="Marlin FP4")),
    ("fp8", 8, None, Floats(packing="float-quantized", **_E4M3, scale="bfloat16", experts=False, kernel="Marlin FP8")),
    ("mxfp8", 8, 32, Floats(packing="mxfp8-quantized", **_E4M3, scale="uint8", kernel=f"Marlin FP8; {_BLACKWELL}")),
)
FLOATING = tuple(
    Format(name=name, family=PACKED, bits=bits, group=group, floats=floats) for name, bits, group, floats in _FLOATS
)
PLAIN = {GGUF: TYPES[-1], PACKED: Format(name="bf16", family=PACKED, bits=16, group=1)}


def named() -> tuple[Format, ...]:
    """Return every format that has a name of its own; the others are integers, whose names say bits and group."""
    return (*TYPES, *FLOATING, PLAIN[PACKED])


def spoken_formats() -> str:
    """Return the names of all formats in a sentence's part, those of llama.cpp first."""
    ours = ", ".join(f.name for f in named() if f.family == PACKED)
    integers = f"w{_PACKED_BITS[0]} to w{_PACKED_BITS[-1]} as in w3-g32, w4-g128-asym, w8-channel"
    return f"{', '.join(f.name for f in TYPES)} (llama.cpp); {ours}, {integers} (compressed-tensors)"


@functools.cache
def find_format(name: str, family: str | None = None) -> Format:
    """A format by name; a family decides first, then whether letters are small.

    ``MXFP4`` and ``NVFP4`` are types of llama.cpp, ``mxfp4`` and ``nvfp4`` formats of compressed-tensors.

    Raises:
        InvalidInput: There is none of that name.
    """
    alike = [f for f in named() if f.name.lower() == name.lower()]
    if alike:
        return max(alike, key=lambda f: (f.family == family, f.name == name))
    match = _PACKED_NAME.fullmatch(name.lower())
    if not match:
        raise InvalidInput(
            f"There is no format {name!r}.",
            f"There are {spoken_formats()}. Groups of any size are for transformers.",
            "Choose some of those.",
        )
    bits, group, _, asym = match.groups()
    return Format(name=name.lower(), family=PACKED, bits=int(bits), group=int(group) if group else None, symmetric=asym is None)


# What vLLM fuses into one matrix of its own, and so wants in one format (vllm#47473).
_FUSED = (
    (re.compile(r"(.*\.experts)\..*"), r"\1"),
    (re.compile(r"(.*)\.(?:q_proj|k_proj|v_proj)"), r"\1.qkv"),
    (re.compile(r"(.*)\.(?:q_a_proj|kv_a_proj_with_mqa)"), r"\1.qkv_a"),
    (re.compile(r"(.*)\.(?:gate_proj|up_proj|w1|w3)"), r"\1.gate_up"),
    (re.compile(r"(.*)\.(?:in_proj_qkv|in_proj_z)"), r"\1.in_proj_qkvz"),
    (re.compile(r"(.*)\.(?:in_proj_b|in_proj_a)"), r"\1.in_proj_ba"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Integers that a runtime computes with.

    Attributes:
        bits: Of one integer.
        zeros: False for symmetric grids, True for those with zero points.
        groups: Inputs that share a scale, in matrices; None for a whole row.
        experts: The same in the experts of a mixture.
        since: The least version for matrices; empty where every version that is in use has it.
        experts_since: The least version for experts.
        cards: Graphics cards that it is for.
    """

    bits: tuple[int, ...]
    zeros: tuple[bool, ...]
    groups: tuple[int | None, ...]
    experts: tuple[int | None, ...]
    since: str = ""
    experts_since: str = ""
    cards: str = "NVIDIA from SM75, AMD"

    def has(self, form: Format, experts: bool = False) -> bool:
        """Return whether it computes with a format, in matrices or in experts."""
        groups = self.experts if experts else self.groups
        return not form.floating and form.bits in self.bits and (not form.symmetric) in self.zeros and form.group in groups


_MARLIN, _HUMMING = (32, 64, 128), (16, 32, 64, 128, 256)
_NEW: dict[str, Any] = {"since": "0.25", "experts_since": "0.29", "cards": "NVIDIA from SM75 (bfloat16 from SM80)"}
# What the rules of vLLM 0.33 give a kernel on every card from SM75 on; `benchmarks.runtimes vllm_kernels` executes them.
VLLM = (
    Kernel(bits=(4,), zeros=(False, True), groups=(*_MARLIN, None), experts=_MARLIN),
    Kernel(bits=(8,), zeros=(False,), groups=(*_MARLIN, None), experts=_MARLIN),
    Kernel(bits=(4,), zeros=(True,), groups=(), experts=(None,), experts_since="0.33", cards=_NEW["cards"]),
    Kernel(bits=(4,), zeros=(False, True), groups=(16, 256), experts=(16, 256), **_NEW),
    Kernel(bits=(8,), zeros=(False,), groups=(16, 256), experts=(16, 256), **_NEW),
    Kernel(bits=(8,), zeros=(True,), groups=(*_HUMMING, None), experts=(), **_NEW),
    Kernel(bits=(2, 3, 5, 6, 7), zeros=(False, True), groups=(*_HUMMING, None), experts=_HUMMING, **_NEW),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime: the formats that it runs, and the matrices that it wants in one format.

    Attributes:
        name: What users write.
        family: The family of formats that it reads.
        fused: Whether q/k/v, gate/up and the experts of a layer must agree.
        ends: Whether embedding and head may be quantised.
        kernels: Integers that it computes with; all where it is empty.
    """

    name: str
    family: str
    fused: bool = False
    ends: bool = False
    kernels: tuple[Kernel, ...] = ()

    def together(self, module: str) -> str:
        """Name of the block that a matrix is decided in: its own, or that of the matrices that it must agree with."""
        matches = ((pattern.fullmatch(module), name) for pattern, name in _FUSED if self.fused)
        return next((match.expand(name) for match, name in matches if match), module)

    def fits(self, names: Sequence[str], form: Format) -> bool:
        """Return whether it computes with matrices of those names in a format: fewer are for experts."""
        if form.plain or not self.kernels or not any(".experts." in name for name in names):
            return True
        return (
            form.floats.experts if form.floats is not None else any(kernel.has(form, experts=True) for kernel in self.kernels)
        )

    def least(self, formats: Mapping[str, str]) -> str:
        """Return the least version that computes with matrices in formats, by name; empty where every one does."""
        versions = {""}
        for name, form in ((n, find_format(f)) for n, f in formats.items()):
            experts = ".experts." in name
            kernels = [k for k in self.kernels if k.has(form, experts)]
            versions |= {k.experts_since if experts else k.since for k in kernels}
        return max(versions, key=lambda version: [int(part) for part in version.split(".") if part])

    def needs(self, formats: Mapping[str, str]) -> str:
        """Return a sentence on the least version and the cards that matrices in formats need; empty where all do."""
        version = self.least(formats)
        return f"It needs {self.name} {version} or later, on NVIDIA cards from SM75 (in bfloat16 from SM80)." if version else ""

    def _runs(self, form: Format) -> bool:
        integers = not self.kernels or any(kernel.has(form) for kernel in self.kernels)
        return form.family == self.family and (form.plain or form.floating or integers)

    def check(self, form: Format) -> Format:
        """Return a format that it can run, refuse others."""
        if self._runs(form):
            return form
        bits = sorted({b for kernel in self.kernels for b in kernel.bits})
        groups = sorted({g for kernel in self.kernels for g in kernel.groups if g})
        integers = f" of {bits[0]} to {bits[-1]} bits in groups of {', '.join(map(str, groups))} or a row" if bits else ""
        floats = f", and {', '.join(f.name for f in FLOATING)}" if bits else ""
        raise InvalidInput(
            f"{self.name} has no kernel for {form.name}.",
            f"It reads {self.family} formats{integers}{floats}.",
            "Choose one of those.",
        )

    def _fitting(self, widths: Sequence[int]) -> str:
        """The name of a format that rows of some of these widths can have."""
        if self.family == GGUF:
            return "Q4_0" if any(find_format("Q4_0").fits(w) for w in widths) else PLAIN[GGUF].name
        return next((f"w4-g{g}" for g in PACKED_GROUPS if any(w % g == 0 for w in widths)), "w4-channel")

    def formats(
        self, widths: Sequence[int], names: Sequence[str] | None = None, group: int | None = None, *, inputs: bool = False
    ) -> list[Format]:
        """Formats to choose among, sixteen bits last.

        Types of llama.cpp come by bytes per weight, the smallest first. Formats of compressed-tensors come by bits and then by
        the size of groups, rows first: of equal bits neither the bytes nor the damages need rise in this order.

        Args:
            widths: Inputs of the matrices.
            names: Formats to choose among; by default those of the family that it can run and some matrix can have.
            group: Group size of compressed-tensors; by default the largest of 128, 64 and 32 that divides all widths.
            inputs: Whether the quantiser reads inputs; by default types that need them are left out without it.

        Raises:
            InvalidInput: A format that it cannot run, or that no matrix can have; a group size that divides no width, where
                blocks are fixed, or beside names, which say it.
        """
        if self.family == GGUF and group is not None:
            raise InvalidInput("GGUF has blocks of its own; a group size has no meaning.", "", "Leave it out.")
        if isinstance(names, str) or not isinstance(names, Iterable | None):
            what = f"formats is {names!r}, of type {type(names).__name__}."
            raise InvalidInput(what, "It should be a list of strings.", "For example ['Q4_0', 'Q8_0'].")
        if names is not None and group is not None:
            what = f"A group size of {group} has no meaning beside formats that are named."
            raise InvalidInput(what, "Their names say it: w4-g32 has groups of 32.", "Leave group out, or leave formats out.")
        if names is not None and not (names := list(names)):
            raise InvalidInput("formats names none.", "", "Name some, such as w4-g64 or Q4_K, or leave formats out.")
        if names is not None:
            chosen = [self.check(find_format(n, self.family)) for n in dict.fromkeys(names)]
            for form in chosen:
                if not any(form.fits(w) for w in widths):
                    raise InvalidInput(
                        f"No matrix can be stored in {form.name}.",
                        f"Its groups are of {form.group}, and the matrices have {_each(widths)} inputs.",
                        f"Name others, such as {self._fitting(widths)}.",
                    )
            small = sorted(
                (f for f in chosen if not f.plain), key=lambda f: (f.block_bytes / (f.group or 1), f.bits, f.group or 0)
            )
            return [*small, PLAIN[self.family]]
        if self.family == GGUF:
            open_to = (f for f in TYPES if f.name not in _BY_NAME and (inputs or not f.needs_inputs))
            return [f for f in open_to if f.plain or any(f.fits(w) for w in widths)]
        if group is None:
            group = next((g for g in PACKED_GROUPS if all(w % g == 0 for w in widths)), PACKED_GROUPS[-1])
        elif group < 1 or not any(w % group == 0 for w in widths):
            dividing = [g for g in PACKED_GROUPS if any(w % g == 0 for w in widths)]
            remedy = f"Use group={dividing[0]}, or leave it out." if dividing else "Leave it out."
            raise InvalidInput(
                f"group is {group}.", f"It divides the inputs of some matrix, which are {_each(widths)}.", remedy
            )
        menu = (find_format(f"w{b}-g{group}") for b in _PACKED_BITS if b != 7)  # by name only: transformers alone reads 7 bits
        return [f for f in (*menu, PLAIN[PACKED]) if self._runs(f)]


def _each(widths: Sequence[int]) -> str:
    return ", ".join(f"{w:,}" for w in widths)


RUNTIMES = {
    "llama.cpp": Runtime(name="llama.cpp", family=GGUF, ends=True),
    "transformers": Runtime(name="transformers", family=PACKED),
    "vllm": Runtime(name="vllm", family=PACKED, fused=True, kernels=VLLM),
}


def find_runtime(name: str | None, family: str = PACKED) -> Runtime:
    """Return a runtime by name, or the usual one of a family."""
    if family not in FAMILIES:
        raise InvalidInput(f"There is no format {family!r}.", f"There are {' and '.join(FAMILIES)}.", "Use one of those.")
    runtime = RUNTIMES.get(name or ("llama.cpp" if family == GGUF else "transformers"))
    if runtime is None:
        raise InvalidInput(f"There is no runtime {name!r}.", f"There are {', '.join(RUNTIMES)}.", "Choose one of those.")
    if runtime.family != family:
        raise InvalidInput(f"{name} does not read {family}.", f"It reads {runtime.family}.", "Leave one of the two out.")
    return runtime


def need_packing(packing: str = "pack-quantized") -> tuple[Any, Any]:
    """Return a packer of compressed-tensors and its scheme, or say that they are missing."""
    what, other = "Writing these formats needs the package compressed-tensors.", "plan for gguf"
    packer = need_package("compressed_tensors.compressors", what, other).BaseCompressor.get_value_from_registry(packing)
    return packer, need_package("compressed_tensors.quantization", what, other).QuantizationScheme
