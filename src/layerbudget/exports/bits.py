"""A plan of bits in the words of llama.cpp, AutoRound and GPTQModel, which quantise by it themselves."""

from __future__ import annotations

import json

from ..compressors.rounding_packages import need_gguf
from ..decisions.bits.export_recipes import dynamic, layer_config, tensor_types
from ..decisions.bits.gguf_names import names_by_map
from ..decisions.bits.plans import formats_of_plan
from ..plan import Plan


def llama_cpp(plan: Plan) -> str:
    """Lines ``regular expression=type`` for ``llama-quantize --tensor-type-file``."""
    formats = formats_of_plan(plan)
    return tensor_types(formats, names_by_map(need_gguf(), list(formats)))


def auto_round(plan: Plan) -> str:
    """``{module: {bits, group_size, sym, data_type}}``."""
    return json.dumps(layer_config(formats_of_plan(plan)), indent=1) + "\n"


def gptq_model(plan: Plan) -> str:
    """``{"+:regex": {bits, group_size, sym}}``, and ``"-:regex"`` for what stays."""
    return json.dumps(dynamic(formats_of_plan(plan)), indent=1) + "\n"
