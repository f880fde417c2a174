"""The model card beside a quantised model. No torch."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from ...compressors.formats import find_runtime
from ...llama_cpp.mixes import NEED_MATRIX
from ...models import card
from ...plan import Plan, payload_of
from .payload import BitsPayload

if TYPE_CHECKING:
    from .receipt import QuantisationReceipt

_USE = {
    "llama.cpp": "llama-cli -m model.gguf",
    "vllm": "vllm serve .",
    "transformers": card.loading("ForCausalLM"),
}


def model_card(plan: Plan, receipt: QuantisationReceipt) -> str:
    """:func:`layerbudget.models.card.model_card` of a quantised model."""
    names = collections.Counter(str(row["format"]) for row in receipt.modules.values())
    formats = ", ".join(f"{count} x {name}" for name, count in names.most_common())
    rows = {
        "bits per weight": f"{receipt.bits:.4f} (scales and padding counted)",
        "planned matrices": f"{receipt.bytes:,} bytes in {len(receipt.modules)}: {formats}",
        "whole file": f"{receipt.file:,} bytes",
        "rounded by": ". ".join(filter(None, (receipt.method, on_method(plan, receipt.method)))),
    }
    gguf = receipt.family == "gguf"
    return card.model_card(
        plan,
        "quantized",
        "quantised",
        "every matrix in a format of its own. `plan.json` says which, `receipt.json` what was counted in the file.",
        rows,
        _use(plan, receipt),
        architecture="ForCausalLM",
        library=None if gguf else "transformers",
        tags=("gguf",) if gguf else (),
        more=_tensor_types(receipt),
    )


def on_method(plan: Plan, method: str) -> str:
    """A sentence where a file is rounded by another method than the one that was measured; none where it is that one."""
    measured = payload_of(plan, BitsPayload).method
    if method == measured:
        return ""
    return f"Damage and KL that the plan names are of {measured}: what {method} costs was not measured."


def _use(plan: Plan, receipt: QuantisationReceipt) -> str:
    """How the planned runtime loads it; others may not read its formats. With the options of the cache planned with it."""
    runtime = find_runtime(payload_of(plan, BitsPayload).runtime, receipt.family).name
    options = " $(cat cache.txt)" if plan.hyperparameters.get("part") and runtime != "transformers" else ""
    return f"{_USE[runtime]}{options}"


def _tensor_types(receipt: QuantisationReceipt) -> str:
    """The use of ``tensor-types.txt``, and the llama.cpp that it needs: the file itself has no room for comments."""
    if receipt.family != "gguf":
        return ""
    weighted = receipt.method == "weighted"
    asking = sorted({str(row["format"]) for row in receipt.modules.values()} & set(NEED_MATRIX))
    without = (
        f"For {', '.join(asking)} llama-quantize asks for an importance matrix, and this file was rounded without one. Add "
        "`--imatrix FILE`; the rounding is then another one. "
    )
    return (
        "\n`tensor-types.txt` gives another file of this model the same types:\n\n"
        f"    llama-quantize --pure --tensor-type-file tensor-types.txt{' --imatrix imatrix.gguf' * weighted} model-f16.gguf "
        f"out.gguf Q8_0\n\n{'' if weighted or not asking else without}"
        "Use a llama.cpp of 16 July 2026 or later: builds before ggml-org/llama.cpp#25716 ignore the types under `--pure`, and "
        "builds before #22572 (May 2026) where a type is the one named last.\n"
    )
