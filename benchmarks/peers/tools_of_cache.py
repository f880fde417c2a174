"""Runtimes that keep a cache by a plan: the format that each layer got from an exported plan."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.peers.exported import SIZES, Found, Tool, stand_in, text

import layerbudget as lb
from layerbudget.decisions.cache import vllm_options
from layerbudget.exports import EXPORTS
from layerbudget.plan import Plan

# Packages that vLLM imports for its server and for grammars, and that nothing here calls.
UNUSED = (
    "sniffio", "uvloop", "xgrammar", "xgrammar.structural_tag", "xgrammar.openai_tool_call_schema", "opentelemetry",
    "opentelemetry._logs", "opentelemetry.context", "opentelemetry.metrics", "opentelemetry.trace",
    "opentelemetry.propagators", "opentelemetry.propagators.textmap", "partial_json_parser", "partial_json_parser.core",
    "partial_json_parser.core.options", "llguidance",
)  # fmt: skip


def make_plan(model: Any) -> Plan:
    """A plan of the cache that keeps some layers in 16 bits."""
    return lb.plan_cache(model, text(), context=32, bits=11.0, runtime="vllm", draws=1)


def vllm(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """Options of `vllm serve` go through vLLM's own parser, and the attention layers that it builds say their format.

    This is on its platform of processors, with a stand-in for the kernels: nothing was computed, for want of a GPU.
    """
    stand_in(*UNUSED)
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = EngineArgs.from_cli_args(parser.parse_args(["--model", str(folder), *shlex.split(vllm_options(plan))]))
    same = json.loads(EXPORTS.find("vllm-cache").text(plan, {}))
    assert same == {name: getattr(given, name) for name in same}, "the file and the options differ"
    cache = CacheConfig(cache_dtype=given.kv_cache_dtype, kv_cache_dtype_skip_layers=given.kv_cache_dtype_skip_layers)
    found: Found = {}
    with set_current_vllm_config(VllmConfig(cache_config=cache)):
        for layer in range(SIZES["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            attention = Attention(
                SIZES["num_attention_heads"], SIZES["head_dim"], 1.0, num_kv_heads=SIZES["num_key_value_heads"],
                cache_config=cache, prefix=f"{name}.self_attn.attn",
                attn_backend=mock.MagicMock(get_name=lambda: "CUSTOM"),
            )  # fmt: skip
            found[name] = {"auto": "bf16"}.get(attention.kv_cache_dtype, attention.kv_cache_dtype)
    return {block.name: plan.payload.formats[block.modules[0]] for block in plan.blocks}, found


TOOLS = {"vllm-cache": Tool(vllm, "vllm", "parsed", make_plan, "format of the cache")}
