"""A plan of bits in the words of other tools: text files, no weights. No torch.

* llama.cpp: ``llama-quantize --tensor-type-file FILE``, lines ``regular expression=type``.
* AutoRound: ``AutoRound(layer_config=...)``, ``{module: {bits, group_size, sym, data_type}}``.
* GPTQModel: ``QuantizeConfig(dynamic=...)``, ``{"+:regex": {bits, group_size, sym}}``, ``"-:regex"`` for what stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...compressors.formats import GGUF, PACKED, Format, find_format
from ...errors import InvalidInput

GPTQ_BITS = (2, 3, 4, 8)


def _named(formats: Mapping[str, str], family: str) -> dict[str, Format]:
    found = {name: find_format(f) for name, f in formats.items()}
    if any(f.family != family for f in found.values()):
        raise InvalidInput(f"This plan holds no {family} formats.", "", f"Plan with --format {family}.")
    return found


def tensor_types(formats: Mapping[str, str], names: Mapping[str, str]) -> str:
    r"""Text of llama.cpp's ``--tensor-type-file``.

    Args:
        formats: Format of every matrix.
        names: Name of every matrix in the file, without its ending.

    >>> tensor_types({"model.layers.0.mlp.up_proj": "Q5_1"}, {"model.layers.0.mlp.up_proj": "blk.0.ffn_up"})
    '^blk\\.0\\.ffn_up\\.weight=q5_1\n'
    """
    found = _named(formats, GGUF)
    return "".join(f"^{re.escape(names[n])}\\.weight={f.name.lower()}\n" for n, f in found.items())


def _words(form: Format) -> dict[str, Any]:
    return {"bits": form.bits, "group_size": -1 if form.group is None else form.group, "sym": form.symmetric}


def layer_config(formats: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """AutoRound's ``layer_config``.

    >>> layer_config({"a.q_proj": "w4-g32", "a.v_proj": "bf16"})
    {'a.q_proj': {'bits': 4, 'group_size': 32, 'sym': True, 'data_type': 'int'}, 'a.v_proj': {'bits': 16, 'data_type': 'float'}}
    """
    return {
        n: {"bits": 16, "data_type": "float"} if f.plain else {**_words(f), "data_type": "int"}
        for n, f in _named(formats, PACKED).items()
    }


def dynamic(formats: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    r"""GPTQModel's ``dynamic``.

    Raises:
        InvalidInput: A width that its kernels do not have.

    >>> dynamic({"a.q_proj": "w4-g32", "a.v_proj": "bf16"})
    {'+:^a\\.q_proj$': {'bits': 4, 'group_size': 32, 'sym': True}, '-:^a\\.v_proj$': {}}
    """
    out: dict[str, dict[str, Any]] = {}
    for name, form in _named(formats, PACKED).items():
        if not form.plain and form.bits not in GPTQ_BITS:
            raise InvalidInput(
                f"GPTQModel has no {form.bits} bits.",
                f"It has {', '.join(map(str, GPTQ_BITS))}.",
                "Plan with --formats of those.",
            )
        out[f"{'-' if form.plain else '+'}:^{re.escape(name)}$"] = {} if form.plain else _words(form)
    return out
