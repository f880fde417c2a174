"""A plan of bits in the words of other tools, which quantise by it themselves: text, no weights. No torch."""

from __future__ import annotations

import json
import re
from typing import Any

from ...compressors.formats import GGUF, PACKED, Format, find_format
from ...decision import Export
from ...errors import InvalidInput
from ...gguf.names import find_names
from ...plan import Plan
from ...records import stacks
from ..formats.program import formats_of_plan

_MLX_BITS, _MLX_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def llama_cpp(plan: Plan) -> str:
    """Return lines ``regular expression=type``, for ``llama-quantize --tensor-type-file``."""
    found = _formats(plan, GGUF)
    names = find_names(found)
    lines = {t: f.name.lower() for n, f in found.items() for t in names[n]}
    latent = "attn_[kv]_b\\.weight=f16\n" * any(n.endswith(".kv_a_proj_with_mqa") for n in found)  # no plan changes these
    return latent + "".join(f"^{re.escape(t)}\\.weight={kind}\n" for t, kind in lines.items())


def auto_round(plan: Plan) -> str:
    """Return ``{module: {bits, group_size, sym, data_type}}`` as JSON, for ``AutoRound(layer_config=...)``."""
    found: dict[str, dict[str, Any]] = {}
    formats = _formats(plan, PACKED)
    if stacked := stacks(formats):
        told = f"{stacked[0]} is a stack of experts, and AutoRound takes each expert for a module."
        raise InvalidInput(told, "Its table would match nothing.", "Plan for llama.cpp (--format gguf).")
    for name, form in formats.items():
        if form.floating:
            what = f"{name} gets {form.name}, and AutoRound's table is written for integers alone."
            raise InvalidInput(what, "", "Apply the plan here, or plan with integers (w4-g32, ...).")
        whole = {"bits": form.bits, "group_size": -1 if form.group is None else form.group, "sym": form.symmetric}
        found[name] = {"bits": 16, "data_type": "float"} if form.plain else {**whole, "data_type": "int"}
    return json.dumps(found, indent=1) + "\n"


def mlx(plan: Plan) -> str:
    """Return the entry ``quantization`` of ``config.json`` as mlx_lm keeps it: ``{module: {group_size, bits}}``, 16 bits false.

    MLX's own grids have a minimum in 16 bits for every group: a matrix takes 16 bits per group more than planned.
    """
    forms = _formats(plan, PACKED)
    for name, form in forms.items():
        if not form.plain and (form.floating or form.bits not in _MLX_BITS or form.group not in _MLX_GROUPS):
            raise InvalidInput(
                f"MLX has no {form.name}, which {name} gets.",
                "It has 2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128.",
                "Plan with --formats w2-g64,w3-g64,w4-g64,w6-g64,w8-g64.",
            )
        if ".experts." in name:
            raise InvalidInput(f"{name} is a stack of experts, which MLX names otherwise.", "", "Keep experts in 16 bits.")
    held = {n: False if f.plain else {"group_size": f.group, "bits": f.bits} for n, f in forms.items()}
    rounded = [f for f in forms.values() if not f.plain]
    least = {"group_size": min((f.group or 0 for f in rounded), default=64), "bits": min((f.bits for f in rounded), default=4)}
    return json.dumps({"quantization": {**least, **held}}, indent=1) + "\n"


def _formats(plan: Plan, family: str) -> dict[str, Format]:
    found = {name: find_format(f) for name, f in formats_of_plan(plan).items()}
    if any(f.family != family for f in found.values()):
        raise InvalidInput(f"This plan holds no {family} formats.", "", f"Plan with --format {family}.")
    return found


EXPORTS = (
    Export(
        name="tensor-types",
        call=llama_cpp,
        kinds=("bits",),
        file="tensor-types.txt",
        summary="llama.cpp's types of tensors",
        use="llama-quantize --tensor-type-file {file} quantises by it.",
    ),
    Export(
        name="auto-round",
        call=auto_round,
        kinds=("bits",),
        file="layer_config.json",
        summary="AutoRound's layer_config",
        use="AutoRound(model, layer_config=json.load(open('{file}'))) quantises by it.",
    ),
    Export(
        name="mlx",
        call=mlx,
        kinds=("bits",),
        file="quantization.json",
        summary="mlx_lm's entry quantization",
        use="q = json.load(open('{file}'))['quantization']; mlx_lm.convert(MODEL, quantize=True, q_group_size=q['group_size'], "
        "quant_predicate=lambda path, _: q.get(path, False)) quantises by it.",
    ),
)
