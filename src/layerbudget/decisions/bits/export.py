"""A plan of bits in the words of other tools, which quantise by it themselves: text files, no weights. No torch.

* llama.cpp: ``llama-quantize --tensor-type-file FILE``, lines ``regular expression=type``.
* AutoRound: ``AutoRound(layer_config=...)``, ``{module: {bits, group_size, sym, data_type}}``.
* GPTQModel: ``QuantizeConfig(dynamic=...)``, ``{"+:regex": {bits, group_size, sym}}``, ``"-:regex"`` for what stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...compressors.formats import GGUF, PACKED, Format, find_format
from ...compressors.rounding_packages import need_gguf
from ...errors import InvalidInput
from ...plan import Plan
from .program import formats_of_plan

_FIRST = ("llama", "qwen2", "qwen3")  # architectures whose names are tried first
_GPTQ_BITS = (2, 3, 4, 8)


def llama_cpp(plan: Plan) -> str:
    """Return the text of llama.cpp's ``--tensor-type-file``.

    Raises:
        InvalidInput: Formats of another family, or matrices that no architecture of GGUF has.
        MissingDependency: Without the package gguf.
    """
    found = _formats(formats_of_plan(plan), GGUF)
    names = _gguf_names(list(found))
    return "".join(f"^{re.escape(names[n])}\\.weight={f.name.lower()}\n" for n, f in found.items())


def auto_round(plan: Plan) -> str:
    """Return AutoRound's ``layer_config`` as JSON.

    Raises:
        InvalidInput: Formats of another family.
    """
    return json.dumps(layer_config(formats_of_plan(plan)), indent=1) + "\n"


def gptq_model(plan: Plan) -> str:
    """Return GPTQModel's ``dynamic`` as JSON.

    Raises:
        InvalidInput: Formats of another family, or a width that its kernels do not have.
    """
    return json.dumps(dynamic(formats_of_plan(plan)), indent=1) + "\n"


def layer_config(formats: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return AutoRound's ``layer_config``.

    >>> layer_config({"a.q_proj": "w4-g32", "a.v_proj": "bf16"})
    {'a.q_proj': {'bits': 4, 'group_size': 32, 'sym': True, 'data_type': 'int'}, 'a.v_proj': {'bits': 16, 'data_type': 'float'}}
    """
    return {
        n: {"bits": 16, "data_type": "float"} if f.plain else {**_words(f), "data_type": "int"}
        for n, f in _formats(formats, PACKED).items()
    }


def dynamic(formats: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    r"""Return GPTQModel's ``dynamic``.

    >>> dynamic({"a.q_proj": "w4-g32", "a.v_proj": "bf16"})
    {'+:^a\\.q_proj$': {'bits': 4, 'group_size': 32, 'sym': True}, '-:^a\\.v_proj$': {}}
    """
    out: dict[str, dict[str, Any]] = {}
    for name, form in _formats(formats, PACKED).items():
        if not form.plain and form.bits not in _GPTQ_BITS:
            known = f"It has {', '.join(map(str, _GPTQ_BITS))}."
            raise InvalidInput(f"GPTQModel has no {form.bits} bits.", known, "Plan with --formats of those.")
        out[f"{'-' if form.plain else '+'}:^{re.escape(name)}$"] = {} if form.plain else _words(form)
    return out


def _formats(formats: Mapping[str, str], family: str) -> dict[str, Format]:
    found = {name: find_format(f) for name, f in formats.items()}
    if any(f.family != family for f in found.values()):
        raise InvalidInput(f"This plan holds no {family} formats.", "", f"Plan with --format {family}.")
    return found


def _words(form: Format) -> dict[str, Any]:
    return {"bits": form.bits, "group_size": -1 if form.group is None else form.group, "sym": form.symmetric}


def _gguf_names(modules: list[str]) -> dict[str, str]:
    """Names in a GGUF file, from the names of the matrices alone: the first architecture that has them all."""
    gguf = need_gguf()
    layers = 1 + max((int(n) for m in modules for n in re.findall(r"\.(\d+)\.", m)), default=0)
    for arch in (*_FIRST, *gguf.MODEL_ARCH_NAMES.values()):
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        known = gguf.get_tensor_name_map(kind, layers)
        found = {m: known.get_name(m) for m in modules}
        if all(found.values()):
            return {m: str(name) for m, name in found.items()}
    raise InvalidInput("GGUF has no architecture with all of these matrices.", f"The first is {modules[0]}.", "")
