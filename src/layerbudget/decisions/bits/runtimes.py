"""Runtimes: the formats that each one runs, and the matrices that it wants in one format. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ...compressors.formats import GGUF, PACKED, Format, find_format, formats_of
from ...errors import InvalidInput

# What vLLM fuses into one matrix of its own, and so wants in one format (vllm#47473).
_FUSED = (
    (re.compile(r"(.*)\.(?:q_proj|k_proj|v_proj)"), r"\1.qkv"),
    (re.compile(r"(.*)\.(?:gate_proj|up_proj|w1|w3)"), r"\1.gate_up"),
    (re.compile(r"(.*\.experts)\..*"), r"\1"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime.

    Attributes:
        name: What users write.
        family: The family of formats that it reads.
        fused: Whether q/k/v, gate/up and the experts of a layer must agree.
        ends: Whether embedding and head may be quantised.
        bits: Integers that it has kernels for; all where it is empty.
        groups: Group sizes that it has kernels for; all where it is empty.
    """

    name: str
    family: str
    fused: bool = False
    ends: bool = True
    bits: tuple[int, ...] = ()
    groups: tuple[int | None, ...] = ()

    def together(self, module: str) -> str:
        """Name of the block that a matrix is decided in: its own, or that of the matrices that it must agree with."""
        if self.fused:
            for pattern, name in _FUSED:
                if found := pattern.fullmatch(module):
                    return found.expand(name)
        return module

    def reads(self, form: Format) -> bool:
        """Whether it can run a format."""
        if form.family != self.family or form.plain:
            return form.family == self.family
        return (not self.bits or form.bits in self.bits) and (not self.groups or form.group in self.groups)

    def check(self, form: Format) -> Format:
        """Return a format that it can run."""
        if self.reads(form):
            return form
        bits = f" of {' and '.join(map(str, self.bits))} bits" if self.bits else ""
        groups = f" in groups of {', '.join('a row' if g is None else str(g) for g in self.groups)}" if self.groups else ""
        raise InvalidInput(
            f"{self.name} has no kernel for {form.name}.",
            f"It reads {self.family} formats{bits}{groups}.",
            "Choose one of those.",
        )

    def formats(self, widths: Sequence[int], names: Sequence[str] | None = None, group: int | None = None) -> list[Format]:
        """Formats to choose among, the smallest first and sixteen bits last.

        Args:
            widths: Inputs of the matrices.
            names: Formats to choose among; by default those of the family that it can run.
            group: Group size of compressed-tensors.

        Raises:
            InvalidInput: A format that it cannot run, or that no matrix can have.
        """
        usual = formats_of(self.family, widths, group=group)
        if names is None:
            return [f for f in usual if self.reads(f)]
        chosen = [self.check(find_format(n)) for n in dict.fromkeys(names)]
        for form in chosen:
            if not any(form.fits(w) for w in widths):
                form.check("Every matrix", widths[0])
        return [*sorted((f for f in chosen if not f.plain), key=lambda f: (f.bits, f.group or 0)), usual[-1]]


RUNTIMES = {
    r.name: r
    for r in (
        Runtime(name="llama.cpp", family=GGUF),
        Runtime(name="transformers", family=PACKED, ends=False),
        Runtime(name="vllm", family=PACKED, fused=True, ends=False, bits=(4, 8), groups=(32, 64, 128, None)),
    )
}
_USUAL = {GGUF: "llama.cpp", PACKED: "transformers"}


def find_runtime(name: str | None, family: str = PACKED) -> Runtime:
    """Return a runtime by name, or the usual one of a family."""
    if family not in _USUAL:
        raise InvalidInput(f"There is no format {family!r}.", f"There are {' and '.join(_USUAL)}.", "Use one of those.")
    name = name or _USUAL[family]
    if name not in RUNTIMES:
        raise InvalidInput(f"There is no runtime {name!r}.", f"There are {', '.join(RUNTIMES)}.", "Choose one of those.")
    if RUNTIMES[name].family != family:
        raise InvalidInput(f"{name} does not read {family}.", f"It reads {RUNTIMES[name].family}.", "Leave one of the two out.")
    return RUNTIMES[name]
