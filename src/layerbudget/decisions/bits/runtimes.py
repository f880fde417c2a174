"""What a runtime asks of a plan of formats: its family, which matrices must agree, which formats it runs. No torch."""

from __future__ import annotations

import dataclasses
import re

from ...compressors.formats import GGUF, PACKED, Format
from ...errors import InvalidInput

# What vLLM fuses into one matrix of its own, and so wants in one format (vllm#47473).
FUSED = (
    re.compile(r"(.*)\.(?:q_proj|k_proj|v_proj)"),
    re.compile(r"(.*)\.(?:gate_proj|up_proj|w1|w3)"),
    re.compile(r"(.*\.experts)\..*"),
)
_WORDS = ("qkv", "gate_up", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime.

    Attributes:
        name: What users write.
        family: Of formats that it reads.
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
        for pattern, word in zip(FUSED, _WORDS, strict=True):
            found = pattern.fullmatch(module)
            if self.fused and found:
                return ".".join(filter(None, (found.group(1), word)))
        return module

    def reads(self, form: Format) -> bool:
        """Whether it can run a format."""
        if form.family != self.family or form.plain:
            return form.family == self.family
        return (not self.bits or form.bits in self.bits) and (not self.groups or form.group in self.groups)

    def check(self, form: Format) -> Format:
        """Refuse a format that it cannot run.

        Raises:
            InvalidInput: Says what it can.
        """
        if self.reads(form):
            return form
        bits = f" of {' and '.join(map(str, self.bits))} bits" if self.bits else ""
        groups = f" in groups of {', '.join('a row' if g is None else str(g) for g in self.groups)}" if self.groups else ""
        raise InvalidInput(
            f"{self.name} has no kernel for {form.name}.",
            f"It reads {self.family} formats{bits}{groups}.",
            "Choose one of those.",
        )


RUNTIMES = {
    r.name: r
    for r in (
        Runtime(name="llama.cpp", family=GGUF),
        Runtime(name="transformers", family=PACKED, ends=False),
        Runtime(name="vllm", family=PACKED, fused=True, ends=False, bits=(4, 8), groups=(32, 64, 128, None)),
    )
}
DEFAULT = {GGUF: "llama.cpp", PACKED: "transformers"}


def find_runtime(name: str | None, family: str = PACKED) -> Runtime:
    """A runtime by name, or the usual one of a family.

    Raises:
        InvalidInput: There is none of that name, or it reads another family.
    """
    if family not in DEFAULT:
        raise InvalidInput(f"There is no format {family!r}.", f"There are {' and '.join(DEFAULT)}.", "Use one of those.")
    name = name or DEFAULT[family]
    if name not in RUNTIMES:
        raise InvalidInput(f"There is no runtime {name!r}.", f"There are {', '.join(RUNTIMES)}.", "Choose one of those.")
    if RUNTIMES[name].family != family:
        raise InvalidInput(f"{name} does not read {family}.", f"It reads {RUNTIMES[name].family}.", "Leave one of the two out.")
    return RUNTIMES[name]
