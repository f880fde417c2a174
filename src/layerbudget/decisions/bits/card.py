"""The model card beside a quantised model: what it was made from, by which plan, and how to load it. No torch."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...plan import Plan
from ...records import made_by

if TYPE_CHECKING:
    from .apply import QuantisationReceipt

_USE = {
    "gguf": "llama-cli -m model.gguf",
    "compressed-tensors": "vllm serve .",
}


def model_card(plan: Plan, receipt: QuantisationReceipt) -> str:
    """Return ``README.md`` for the Hugging Face hub: metadata with the base model, and the plan's figures.

    A model that came from a folder or a file has no name on the hub: ``base_model`` is left out then.
    """
    where = str(plan.model.get("id") or "")
    hub = where.count("/") == 1 and not Path(where).exists() and not where.startswith((".", "/", "~"))
    head: dict[str, Any] = {"base_model": where, "base_model_relation": "quantized"} if hub else {}
    head |= {"quantized_by": "layerbudget", "pipeline_tag": "text-generation"}
    head |= {"tags": ["gguf"]} if receipt.family == "gguf" else {"library_name": "transformers"}
    meta = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items())
    names = collections.Counter(str(row["format"]) for row in receipt.modules.values())
    formats = ", ".join(f"{count} x {name}" for name, count in names.most_common())
    rows = {
        "bits per weight": f"{receipt.bits:.4f} (scales and padding counted)",
        "planned matrices": f"{receipt.bytes:,} bytes in {len(receipt.modules)}: {formats}",
        "files": f"{receipt.file:,} bytes",
        "rounded by": receipt.method,
        "chosen by": f"{plan.rule}, for the least KL divergence from the dense model",
    }
    if (predicted := plan.extra.get("predicted")) is not None:
        error = plan.extra.get("predicted_error") or 0.0
        rows["predicted KL divergence"] = f"{predicted:.4g} +- {error:.1g} nats per token"
    if verdict := (plan.extra.get("check") or {}).get("verdict"):
        rows["measured"] = verdict
    table = "".join(f"| {name} | {text} |\n" for name, text in rows.items())
    command = made_by()
    made = f"\nMade by\n\n    {command}\n" if command else ""
    what = f"[{where}](https://huggingface.co/{where})" if hub else "a model"
    return (
        f"---\n{meta}---\n\n# {Path(where).name or 'Model'}, quantised by a plan\n\nThe weights of {what}, every matrix in a "
        f"format of its own. `plan.json` says which, `receipt.json` what was counted in the file.\n\n| | |\n|---|---|\n{table}"
        f"{made}\nUse it:\n\n    {_USE[receipt.family]}\n{_tensor_types(receipt)}"
    )


def _tensor_types(receipt: QuantisationReceipt) -> str:
    """The use of ``tensor-types.txt``, and the llama.cpp that it needs: the file itself has no room for comments."""
    if receipt.family != "gguf":
        return ""
    return (
        "\n`tensor-types.txt` gives another file of this model the same types:\n\n"
        "    llama-quantize --pure --tensor-type-file tensor-types.txt model-f16.gguf out.gguf Q8_0\n\n"
        "Use a llama.cpp of 16 July 2026 or later: builds before ggml-org/llama.cpp#25716 ignore the types under `--pure`, and "
        "builds before #22572 (May 2026) where a type is the one named last.\n"
    )
