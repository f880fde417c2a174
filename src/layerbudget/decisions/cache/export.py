"""A plan of the cache in the words of runtimes: text. No torch."""

from __future__ import annotations

import json
import re

from ...decision import Export
from ...errors import InvalidInput
from ...plan import Plan, PlanBlock, payload_of
from .formats import find_cache
from .llama import LEAST, SWITCH
from .payload import CachePayload

_LAYER = re.compile(r"\.(\d+)$")


def vllm_cache(plan: Plan) -> str:
    """Return ``kv_cache_dtype`` and ``kv_cache_dtype_skip_layers`` as JSON, for vLLM's options of these names."""
    skipped = [_LAYER.findall(b.name)[-1] for b in _blocks(plan, "vllm") if _format(plan, b.modules[0]) == "bf16"]
    return json.dumps({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": skipped}, indent=1) + "\n"


def vllm_options(plan: Plan) -> str:
    """Return the options of ``vllm serve`` for the cache: its type, the layers that keep 16 bits, context and sequences.

    The tokens of a forward are those that a sliding window was counted with, and the buffers of a plan of memory.
    """
    kinds = {b.name: _format(plan, b.modules[0]) for b in _blocks(plan, "vllm")}
    skipped = [_LAYER.findall(name)[-1] for name, kind in kinds.items() if kind == "bf16"]
    apart = ["--kv-cache-dtype-skip-layers", *skipped] if skipped else []
    types = ["--kv-cache-dtype", "fp8", *apart] if len(skipped) < len(kinds) else []
    payload = payload_of(plan, CachePayload)
    batch = payload.batch
    size = ["--max-model-len", str(payload.context), "--max-num-seqs", str(batch)]
    forward = ["--max-num-batched-tokens", str(max(find_cache("vllm").ahead + 1, batch))]
    share = payload.utilization
    memory = ["--gpu-memory-utilization", f"{share:g}"] if share else []
    return " ".join([*types, *size, *forward, *memory]) + "\n"


def modelopt_cache(plan: Plan) -> str:
    """Return ModelOpt's ``kv_cache_quantized_layers`` as JSON: the attention modules whose cache has 8 bits."""
    modules = {
        f"{b.name}.self_attn": {"quant_algo": "FP8"} for b in _blocks(plan, "vllm") if _format(plan, b.modules[0]) == "fp8"
    }
    record = {"kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": modules, "kv_cache_schema_version": 1}
    return json.dumps({"quantization": record}, indent=1) + "\n"


def llama_cache(plan: Plan) -> str:
    """Return llama.cpp's options of the types of keys and values, the context, the sequences, and the places of layers."""
    formats = {b.name: _format(plan, b.modules[0]).lower() for b in _blocks(plan, "llama.cpp")}
    payload = payload_of(plan, CachePayload)
    types = f"--cache-type-k {formats['keys']} --cache-type-v {formats['values']} --flash-attn on"
    placed = f"{payload.placed}\n" if payload.placed else ""
    return f"{types} --ctx-size {payload.context * payload.batch} --parallel {payload.batch}\n{placed}"


def llama_build(plan: Plan) -> str:
    """Return which llama.cpp a plan of the cache was measured for: one that rotates keys and values, or one that does not."""
    forms = {_format(plan, m) for b in plan.blocks for m in b.modules}
    if forms == {"F16"}:
        return ""
    if payload_of(plan, CachePayload).rotated:
        return f" Damages are those of llama.cpp {LEAST}, which rotates keys and values before it rounds them."
    return f" Damages are those of llama.cpp without rotated keys and values: set {SWITCH}=1."


EXPORT_OF = {"vllm": "vllm-cache", "llama.cpp": "llama-cache"}  # by runtime; transformers takes a plan in Python


def _blocks(plan: Plan, runtime: str) -> tuple[PlanBlock, ...]:
    planned = payload_of(plan, CachePayload).runtime
    if planned != runtime:
        what = f"This plan is for {planned}, whose formats {runtime} does not keep."
        own = "In Python, layerbudget.apply_plan(model, layerbudget.Plan.load(FILE)).cache is a cache for generate"
        own = own if planned == "transformers" else f"Add --to {EXPORT_OF[planned]}"
        raise InvalidInput(what, "", f"{own}; or plan with --runtime {runtime}.")
    return plan.blocks


def _format(plan: Plan, module: str) -> str:
    return payload_of(plan, CachePayload).formats[module]


EXPORTS = (
    Export(
        name="vllm-cache",
        call=vllm_cache,
        kinds=("cache",),
        file="vllm-cache.json",
        summary="vLLM's layers without an fp8 cache",
        use="Serve so: vllm serve MODEL {options}",
        options=vllm_options,
    ),
    Export(
        name="modelopt-cache",
        call=modelopt_cache,
        kinds=("cache",),
        file="hf_quant_config.json",
        summary="ModelOpt's kv_cache_quantized_layers",
        use="Runtimes that read ModelOpt's {file} beside a checkpoint find the layers whose cache has 8 bits.",
    ),
    Export(
        name="llama-cache",
        call=llama_cache,
        kinds=("cache",),
        file="cache.txt",
        summary="llama.cpp's types of keys and values",
        use="llama-server -m MODEL.gguf $(cat {word}) keeps them so.{options}",
        options=llama_build,
    ),
)
