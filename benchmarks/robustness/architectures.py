"""Tiny random models of many architectures through every verb: what works, what is refused with a remedy, what fails.

Every cell is one command line, run in this process on a saved model of two layers with the embedded model's tokenizer.
A cell is one of

    works      exit code 0
    refused    exit code 2 before any work, and the flag that the message names works (it was tried)
    cannot     exit code 2 before any work; the message names no flag of this verb
    late       exit code 2 after the model had run on the text
    FAILED     a traceback, a remedy that does not work, or more than ``LIMIT`` seconds
    -          what it builds on was not made, or was made for another tool

A remedy may lead to another refusal with a remedy of its own: up to three are followed, each added to those before it. A remedy
for the verb that a cell builds on ("plan again with ...") is tried too: the cell stays "cannot" if it works.

and each row says which share of the layers' weights the blocks hold. Families are kept under ``results/rows``; ``--add`` runs what is
missing there.

    python -m benchmarks.robustness architectures [--families llama qwen3_moe] [--title "All families"] [--add]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import logging
import re
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.stamp import RESULTS, keep_row, read_rows, write_section

from layerbudget.cli import main as layerbudget
from layerbudget.errors import LayerbudgetError
from layerbudget.models.blocks import partition, share_held
from layerbudget.models.loading import DEMO_MODEL

BASE = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# What models with experts call the same things: a family is given those that its configuration has.
EXPERTS = {
    **BASE, **HEAD, **LATENT, **MOE, **LOCAL, "num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "num_shared_experts": 1,
    "sliding_window": 16, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "num_dense_layers": 1,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "top_k_experts": 2, "moe_topk": 2, "zero_expert_num": 0,
}  # fmt: skip
STATES = {"state_size": 8, "conv_kernel": 4}
SSM2 = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16, "expand": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "image_size": 28,
    "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROTATED = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}}
PARTLY_ROTATED = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4, "partial_rotary_factor": 0.25}
}
VIDEO = {"video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
CLASSES, PAIRS, IMAGES = "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText"
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", CAUSAL, BASE),
    "mistral": ("MistralConfig", CAUSAL, BASE),
    "qwen2": ("Qwen2Config", CAUSAL, BASE),
    "qwen2_moe": ("Qwen2MoeConfig", CAUSAL, {**BASE, **MOE, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3Config", CAUSAL, {**BASE, **HEAD}),
    "qwen3_moe": ("Qwen3MoeConfig", CAUSAL, {**BASE, **HEAD, **MOE, "norm_topk_prob": True}),
    "qwen3_next": ("Qwen3NextConfig", CAUSAL, {
        **BASE, **HEAD, **MOE, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}),
    "mixtral": ("MixtralConfig", CAUSAL, {**BASE, **LOCAL}),
    "olmo": ("OlmoConfig", CAUSAL, BASE),
    "olmo2": ("Olmo2Config", CAUSAL, BASE),
    "olmoe": ("OlmoeConfig", CAUSAL, {**BASE, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "phi": ("PhiConfig", CAUSAL, BASE),
    "phi3": ("Phi3Config", CAUSAL, BASE),
    "phimoe": ("PhimoeConfig", CAUSAL, {**BASE, **LOCAL}),
    "gemma": ("GemmaConfig", CAUSAL, {**BASE, **HEAD}),
    "gemma2": ("Gemma2Config", CAUSAL, {**BASE, **HEAD, "sliding_window": 16}),
    "gemma3_text": ("Gemma3TextConfig", CAUSAL, {**BASE, **HEAD, "sliding_window": 16}),
    "gemma3n_text": ("Gemma3nTextConfig", CAUSAL, {
        **BASE, **HEAD, "intermediate_size": [128, 128], "vocab_size_per_layer_input": 2048, "hidden_size_per_layer_input": 16,
        "laurel_rank": 8, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0], "sliding_window": 16}),
    "gpt2": ("GPT2Config", CAUSAL, {**BASE, **GPT}),
    "gpt_neo": ("GPTNeoConfig", CAUSAL, {
        **{k: v for k, v in BASE.items() if k != "num_hidden_layers"}, "num_layers": 2, "num_heads": 4, "window_size": 16,
        "attention_types": [[["global", "local"], 1]]}),
    "gptj": ("GPTJConfig", CAUSAL, {**BASE, **GPT, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", CAUSAL, BASE),
    "codegen": ("CodeGenConfig", CAUSAL, {**BASE, **GPT, "rotary_dim": 8}),
    "opt": ("OPTConfig", CAUSAL, {**BASE, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("BloomConfig", CAUSAL, {**BASE, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", CAUSAL, {**BASE, "ffn_hidden_size": 128}),
    "falcon_h1": ("FalconH1Config", CAUSAL, {
        **BASE, **HEAD, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 16}),
    "mpt": ("MptConfig", CAUSAL, {**BASE, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128, "expansion_ratio": 2}),
    "stablelm": ("StableLmConfig", CAUSAL, BASE),
    "starcoder2": ("Starcoder2Config", CAUSAL, BASE),
    "cohere": ("CohereConfig", CAUSAL, BASE),
    "cohere2": ("Cohere2Config", CAUSAL, {**BASE, "sliding_window": 16}),
    "granite": ("GraniteConfig", CAUSAL, BASE),
    "granitemoe": ("GraniteMoeConfig", CAUSAL, {**BASE, **LOCAL}),
    "deepseek_v2": ("DeepseekV2Config", CAUSAL, {**BASE, **LATENT}),
    "deepseek_v3": ("DeepseekV3Config", CAUSAL, {**BASE, **LATENT}),
    "glm": ("GlmConfig", CAUSAL, {**BASE, **HEAD}),
    "glm4": ("Glm4Config", CAUSAL, {**BASE, **HEAD}),
    "glm4_moe": ("Glm4MoeConfig", CAUSAL, {**BASE, **HEAD, **LATENT, "num_key_value_heads": 2}),
    "gpt_oss": ("GptOssConfig", CAUSAL, {**BASE, **HEAD, **LOCAL, "intermediate_size": 32, "sliding_window": 16}),
    "llama4_text": ("Llama4TextConfig", CAUSAL, {
        **BASE, **HEAD, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32,
        "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2, "attention_chunk_size": 64}),
    **{name: (config, CAUSAL, {"experts": own}) for name, (config, own) in {
        "afmoe": ("AfmoeConfig", {}), "aria_text": ("AriaTextConfig", {}), "axk1": ("AXK1Config", {"num_key_value_heads": 4}),
        "cohere2_moe": ("Cohere2MoeConfig", {}), "deepseek_v32": ("DeepseekV32Config", {"num_key_value_heads": 4}),
        "deepseek_v4": ("DeepseekV4Config", {
            "o_groups": 2, "o_lora_rank": 16, "moe_intermediate_size": 32, "mlp_layer_types": ["hash_moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}), "dots1": ("Dots1Config", {}), "ernie4_5_moe": ("Ernie4_5_MoeConfig", {}),
        "exaone_moe": ("ExaoneMoeConfig", {}), "flex_olmo": ("FlexOlmoConfig", {}),
        "gemma4_text": ("Gemma4TextConfig", {
            "enable_moe_block": True, "vocab_size_per_layer_input": 2048, "hidden_size_per_layer_input": 16,
            "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
        "glm4_moe_lite": ("Glm4MoeLiteConfig", {"num_key_value_heads": 4}),
        "granitemoehybrid": ("GraniteMoeHybridConfig", {
            "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
            "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 16}),
        "granitemoeshared": ("GraniteMoeSharedConfig", {}), "hunyuan_v1_moe": ("HunYuanMoEV1Config", {}),
        "hy_v3": ("HYV3Config", {}), "jetmoe": ("JetMoeConfig", {}),
        "kimi_linear": ("KimiLinearConfig", {
            "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"]}),
        "lfm2_moe": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"]}), "mellum": ("MellumConfig", {}),
        "mimo_v2_flash": ("MiMoV2FlashConfig", {}), "minimax": ("MiniMaxConfig", {}), "minimax_m2": ("MiniMaxM2Config", {}),
        "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"]}),
        "solar_open": ("SolarOpenConfig", {}), "zaya": ("ZayaConfig", {"num_experts_per_tok": 1}),
    }.items()},
    "mamba": ("MambaConfig", CAUSAL, {**BASE, **STATES}),
    "mamba2": ("Mamba2Config", CAUSAL, {**BASE, **STATES, **SSM2}),
    "nemotron": ("NemotronConfig", CAUSAL, {**BASE, **HEAD}),
    "nemotron_h": ("NemotronHConfig", CAUSAL, {
        **BASE, **HEAD, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}),
    "jamba": ("JambaConfig", CAUSAL, {
        **BASE, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    "bert": ("BertConfig", MASKED, BASE),
    "bert-classifier": ("BertConfig", CLASSES, BASE),
    "roberta": ("RobertaConfig", MASKED, BASE),
    "modernbert": ("ModernBertConfig", MASKED, {**BASE, "local_attention": 16, "cls_token_id": 0, "sep_token_id": 1}),
    "vit": ("ViTConfig", "AutoModelForImageClassification", {**VISION, "num_channels": 3}),
    "t5": ("T5Config", PAIRS, {
        "vocab_size": 2048, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2,
        "pad_token_id": 2, "eos_token_id": 1}),
    "bart": ("BartConfig", PAIRS, {
        "vocab_size": 2048, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 128}),
    **{f"{name} (images)": (config, IMAGES, {
        "text_config": {**BASE, **HEAD, **text}, "vision_config": vision, "image_token_id": 5, **more,
    }) for name, (config, text, vision, more) in {
        "gemma3": ("Gemma3Config", {"sliding_window": 16}, VISION, {
            "mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}),
        "gemma4": ("Gemma4Config", {
            "sliding_window": 16, "vocab_size_per_layer_input": 2048, "hidden_size_per_layer_input": 16, "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"]},
            {**VISION, **HEAD, "num_key_value_heads": 2}, {"audio_config": None}),
        "glm4v": ("Glm4vConfig", ROTATED, PATCHES, {}),
        "glm4v_moe": ("Glm4vMoeConfig", {
            **LATENT, "num_key_value_heads": 2,
            "rope_parameters": {**ROTATED["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
            PATCHES, {}),
        "internvl": ("InternVLConfig", {"model_type": "qwen2"}, {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}, {}),
        "llama4": ("Llama4Config", {
            "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32, "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 64},
            {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}, {"image_token_index": 5}),
        "llava": ("LlavaConfig", {"model_type": "llama"}, {"model_type": "clip_vision_model", **VISION}, {"image_token_index": 5}),
        "mistral3": ("Mistral3Config", {"model_type": "mistral"}, {"model_type": "pixtral", **VISION}, {"image_token_index": 5}),
        "qwen2_5_vl": ("Qwen2_5_VLConfig", ROTATED, {**PATCHES, "fullatt_block_indexes": [1], "window_size": 28}, VIDEO),
        "qwen3_vl": ("Qwen3VLConfig", ROTATED, PATCHES, VIDEO),
        "qwen3_vl_moe": ("Qwen3VLMoeConfig", {**MOE, **ROTATED}, PATCHES, VIDEO),
        "qwen3_5": ("Qwen3_5Config", {**LINEAR, **PARTLY_ROTATED}, PATCHES, VIDEO),
        "qwen3_5_moe": ("Qwen3_5MoeConfig", {
            **LINEAR, **MOE, **PARTLY_ROTATED, "shared_expert_intermediate_size": 32}, PATCHES, VIDEO),
        "smolvlm": ("SmolVLMConfig", {"model_type": "llama"}, VISION, {}),
    }.items()},
}  # fmt: skip

LIMIT = 180  # seconds of one command line
TEXT = ["--samples", "4", "--length", "32", "--batch-size", "4"]
# column: (what it builds on, the command line); {m}: the model, {d}: the text, {w}: the folder of the family
CELLS: dict[str, tuple[str | None, str]] = {
    "doctor": (None, "doctor {m} --data {d} TEXT"),
    "score": (None, "score {m} --data {d} TEXT -o {w}/score.json"),
    "score kfac": (None, "score {m} --estimator kfac --data {d} TEXT -o {w}/kfac.json"),
    "score rank-gain": (None, "score {m} --estimator rank-gain --by linear --data {d} TEXT -o {w}/gain.json"),
    "measure": (None, "plan sparsity {m} --passes 8 --data {d} TEXT -o {w}/measured.json"),
    "plan sparsity": ("score", "plan sparsity {w}/score.json --sparsity 0.5 -o {w}/sparsity.json"),
    "prune wanda": ("plan sparsity", "apply {m} {w}/sparsity.json --data {d} TEXT -o {w}/wanda"),
    "prune sparsegpt": ("plan sparsity", "apply {m} {w}/sparsity.json --method sparsegpt --data {d} TEXT -o {w}/sparsegpt"),
    "prune magnitude": ("plan sparsity", "apply {m} {w}/sparsity.json --method magnitude -o {w}/magnitude"),
    "plan expert-pruning": (None, "plan expert-pruning {m} --keep 0.75 --data {d} TEXT -o {w}/kept.json"),
    "fewer experts": ("plan expert-pruning", "apply {m} {w}/kept.json -o {w}/fewer"),
    "plan shapes": (None, "plan shapes {m} --save 2%params --even --data {d} TEXT -o {w}/structured.json"),
    "prune smaller": ("plan shapes", "apply {m} {w}/structured.json --data {d} TEXT -o {w}/smaller"),
    "plan ranks": ("score rank-gain", "plan ranks {w}/gain.json --mean-rank 2 -o {w}/ranks.json"),
    "finetune": ("plan ranks", "finetune {m} {w}/ranks.json --data {r} --train-rows 8 --epochs 1 --batch 4 -o {w}/tuned"),
    "score linear": (None, "score {m} --by linear --data {d} TEXT -o {w}/linear.json"),
    "plan all ranks": ("score linear", "plan ranks {w}/linear.json --mean-rank 2 --min-rank 0 -o {w}/all.json"),
    "finetune all": ("plan all ranks", "finetune {m} {w}/all.json --data {r} --train-rows 8 --epochs 1 --batch 4 -o {w}/whole"),
    "plan bits": (None, "plan bits {m} --bits 6 --check 0 --data {d} TEXT -o {w}/bits.json"),
    "packed": ("plan bits", "apply {m} {w}/bits.json -o {w}/packed"),
    "plan vllm": (None, "plan bits {m} --bits 6 --runtime vllm --check 0 --data {d} TEXT -o {w}/vllm.json"),
    "vllm": ("plan vllm", "apply {m} {w}/vllm.json -o {w}/vllm"),
    "plan gguf": (None, "plan bits {m} --bits 6 --format gguf --check 0 --data {d} TEXT -o {w}/gguf.json"),
    "gguf": ("plan gguf", "apply {m} {w}/gguf.json -o {w}/gguf"),
    "evaluate": (None, "evaluate {m} --perplexity {d} --length 32 --windows 4"),
    "evaluate pruned": ("prune wanda", "evaluate {w}/wanda --perplexity {d} --length 32 --windows 4"),
    "evaluate fewer": ("fewer experts", "evaluate {w}/fewer --perplexity {d} --length 32 --windows 4"),
    "evaluate packed": ("packed", "evaluate {w}/packed --perplexity {d} --length 32 --windows 4"),
}  # fmt: skip


def mixtures() -> list[str]:
    """Families whose models have routed experts."""
    return [name for name, (_, _, given) in FAMILIES.items() if {"experts", *COUNTS} & {*given, *given.get("text_config", {})}]


def tiny(name: str, experts: int | None = None) -> Any:
    """A random model of a family, with so many experts in a layer where that is given."""
    config_name, auto, given = FAMILIES[name]
    fields = dict(given)
    torch.manual_seed(0)
    kind = getattr(transformers, config_name)
    if "experts" in fields:
        names = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map)
        fields = {k: v for k, v in EXPERTS.items() if k in names} | fields["experts"]
    if experts is not None:
        text = {**fields.get("text_config", fields)}
        text |= {k: experts for k in COUNTS if k in text}
        fields = fields | {"text_config": text} if "text_config" in fields else text
    model = getattr(transformers, auto).from_config(kind(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.05)
    return model


class Forwards:
    """Counts forwards of whole models: whether work was done before a refusal."""

    def __init__(self) -> None:
        self.seen = 0
        torch.nn.modules.module.register_module_forward_pre_hook(self._count)

    def _count(self, module: Any, arguments: Any) -> None:
        if isinstance(module, transformers.PreTrainedModel) and module.base_model is not module:  # with its head: a whole model
            self.seen += 1


class TooLong(BaseException):
    """A command line took more than its seconds; no handler of ordinary errors stops it."""


def _stop(number: int, frame: Any) -> None:
    """End a command line at the signal of its clock."""
    raise TooLong


def run(argv: list[str]) -> tuple[int | None, str, str]:
    """Exit code (None: a traceback), what was said, and the last lines of the traceback."""
    said = io.StringIO()
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(LIMIT)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = layerbudget([*argv, "--quiet"])
    except SystemExit as end:
        code = int(end.code or 0)
    except TooLong:
        return None, said.getvalue(), f"It took more than {LIMIT} seconds."
    except Exception:
        return None, said.getvalue(), "".join(traceback.format_exc().splitlines(keepends=True)[-3:])
    finally:
        signal.alarm(0)
    return code, said.getvalue(), ""


def complaint(said: str) -> str:
    """The sentence of a refusal, on one line."""
    found = " ".join(said.split())
    return found[found.rfind("layerbudget: ") :].removeprefix("layerbudget: ") if "layerbudget: " in found else found[-300:]


def plain(text: str) -> str:
    """A text without the folders of this machine."""
    return re.sub(r"(?<!\w)/\S*/", "", text)


def remedies(sentence: str) -> list[list[str]]:
    """The flags that a message names, as words of a command line."""
    found = re.findall(r"(?:(--[a-z][a-z-]*)[ =]|\b([a-z_]+)=)('[^']*'|\w[\w:.,/|%-]*\w|\w)", sentence)
    named = [[flag or f"--{name.replace('_', '-')}", value.strip("'")] for flag, name, value in found]
    return [[flag] if value == "True" else [flag, value] for flag, value in named]


@functools.cache
def options(*verb: str) -> str:
    """The help page of a verb, which names every option that it knows."""
    return run([*verb, "--help-all"])[1]


def knows(argv: list[str], flag: str) -> bool:
    """Whether the verb of a command line has an option."""
    return re.search(rf"{flag}\b(?!-)", options(*argv[: 2 if argv[0] == "plan" else 1])) is not None


def cell(argv: list[str], counter: Forwards, base: list[list[str]] | None = None, steps: int = 3) -> dict[str, Any]:
    """Run one command line and what its refusals advise, at most ``steps`` remedies one after the other.

    Args:
        argv: The command line.
        counter: Of forwards.
        base: The command lines that made what it builds on, the first one first.
        steps: How many remedies more are followed.

    Returns:
        ``{state, said, seconds}``; ``remedy`` where one works, ``exit`` where the command does.
    """
    began, counter.seen = time.perf_counter(), 0
    code, said, trace = run(argv)
    seconds = round(time.perf_counter() - began, 2)
    if code in (0, 1):  # doctor says 1 where something will fail
        return {"state": "works", "exit": code, "said": "", "seconds": seconds}
    if code is None:
        return {"state": "FAILED", "said": plain(trace), "seconds": seconds}
    sentence, late = complaint(said), counter.seen > 3  # a look at a piece of one sequence is no work
    found: dict[str, Any] = {"state": "late" if late else "cannot", "said": sentence, "seconds": seconds}
    own = [flags for flags in remedies(sentence) if knows(argv, flags[0])]
    made, named = base or [], [flags for flags in remedies(sentence) if flags not in own]
    others = [(i, flags) for flags in named for i in range(len(made))[::-1] if knows(made[i], flags[0])]
    failed = ""
    no_data = argv[: argv.index("--data")] + argv[argv.index("--data") + 2 + len(TEXT) :] if "--data" in argv else argv
    for flags in own if steps else []:
        line = no_data if f"{' '.join(flags)} without --data" in sentence else argv
        after = cell([*line, *flags], counter, base, steps - 1)
        if after["state"] in ("works", "refused"):
            remedy = " ".join([*flags, *after.get("remedy", "").split()])
            return found | {
                "state": "late" if late else "refused",
                "remedy": remedy,
                "steps": [sentence, *after.get("steps", [])],
            }
        failed += f" With {' '.join(flags)}: {after['said']}"
    if failed:
        return found | {"state": "FAILED", "said": sentence + failed}
    for first, flags in others[:1] if steps else []:
        for line in ([*made[first], *flags], *made[first + 1 :], argv):
            after = cell([*line, "--overwrite"], counter, None, steps - 1)
            if after["state"] not in ("works", "refused"):
                return found | {
                    "state": "FAILED",
                    "said": f"{sentence} With {made[first][0]} {' '.join(flags)}: {after['said']}",
                }
        return found | {
            "state": "late" if late else "refused",
            "remedy": f"{made[first][0]} {' '.join(flags)}",
            "steps": [sentence],
        }
    return found


def _held(model: Any) -> float | None:
    """Which share the blocks hold; None where there are none."""
    try:
        return share_held(model, partition(model))
    except LayerbudgetError:
        return None


def missing(held: dict[str, Any]) -> set[str]:
    """Columns that a family's record lacks, and those that they build on."""
    found, wanted = set[str](), [c for c in CELLS if c not in held.get("cells", {})]
    while wanted:
        found.add(column := wanted.pop())
        wanted += [base] if (base := CELLS[column][0]) is not None else []
    return found


def family(name: str, folder: Path, counter: Forwards, held: dict[str, Any]) -> dict[str, Any]:
    """All cells of a family; those that it has already are taken over."""
    model = tiny(name)
    model.save_pretrained(folder / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, folder / "model" / file)
    if FAMILIES[name][1] == MASKED:
        settings = json.loads((folder / "model" / "tokenizer_config.json").read_text())
        (folder / "model" / "tokenizer_config.json").write_text(json.dumps({**settings, "mask_token": "!"}))
    record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "held": _held(model), "cells": {}}
    words = {"m": folder / "model", "w": folder, "d": folder.parent / "text.txt", "r": folder.parent / "rows.jsonl"}
    lines, wanted = dict[str, list[str]](), missing(held)
    for column, (base, line) in CELLS.items():
        before = record["cells"][base] if base is not None else {"state": "works"}
        argv = [part.format(**words) for word in line.split() for part in (TEXT if word == "TEXT" else [word])]
        lines[column] = [a.replace("%params", "% params") for a in argv]
        if column not in wanted:
            record["cells"][column] = held["cells"][column]
            continue
        if before["state"] not in ("works", "refused", "late"):
            record["cells"][column] = {"state": "-", "said": f"no {base}"}
        elif column in ("packed", "vllm") and "--unwritten plan" in before.get("remedy", ""):
            record["cells"][column] = {"state": "-", "said": "the plan is for other tools"}
        else:
            chain: list[list[str]] = []
            while base is not None:
                chain.insert(0, [*lines[base], *record["cells"][base].get("remedy", "").split()])
                base = CELLS[base][0]
            record["cells"][column] = cell(lines[column], counter, chain)
    return record


def table(found: dict[str, Any]) -> str:
    """The table, the counts and every message, as Markdown."""
    states = [c["state"] for r in found.values() for c in r["cells"].values()]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("works", "refused", "cannot", "late", "FAILED", "-"))
    rows = [f"{len(found)} families, {len(states)} cells: {counts}.", "",
            "*works*: exit code 0. *refused*: one sentence before any work, and the flag that it names works (it was tried). "
            "*cannot*: one sentence before any work that names no flag of the verb. *late*: refused after the model had run on the "
            "text. *FAILED*: a traceback, a remedy that does not work, or minutes. *-*: what it builds on was not made. *held*: the share "
            "of the layers' weights that the blocks hold.", "",
            f"| family | held | {' | '.join(CELLS)} |", f"|{'---|' * (len(CELLS) + 2)}"]  # fmt: skip
    for name, record in found.items():
        held = "" if record["held"] is None else f"{record['held']:.1%}"
        rows.append(f"| {name} | {held} | {' | '.join(record['cells'].get(c, {'state': 'not run'})['state'] for c in CELLS)} |")
    said: dict[tuple[str, str], list[str]] = {}
    for name, record in found.items():
        for column, c in record["cells"].items():
            if c["state"] not in ("works", "-"):
                text = plain(" ".join(c["said"].split())).replace("|", "\\|")
                remedy = f" **With `{c['remedy']}` it works.**" if "remedy" in c else ""
                said.setdefault((column, f"{c['state']}: {text}{remedy}"), []).append(name)
    rows += ["", "What was said:", ""]
    rows += [f"- **{column}** ({', '.join(names)}): {text}" for (column, text), names in said.items()]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Run the families, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--title", default="Every family", help="of the section")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="the cells that the kept families lack")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    kept = read_rows("architectures", arguments.out) if arguments.add else []
    held = {row["family"]: row["record"] for row in kept if row["family"] in arguments.families}
    found: dict[str, Any] = {name: held[name] for name in FAMILIES if name in held}
    counter = Forwards()
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        lines = [f"In the year {i} the river rose to {i % 7} feet and {i % 5} boats were lost." for i in range(400)]
        (base / "text.txt").write_text("\n\n".join(" ".join(lines[i : i + 20]) for i in range(0, 400, 20)))
        (base / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}?", "completion": lines[i]}) for i in range(20)))
        for i, name in enumerate(n for n in arguments.families if missing(held.get(n, {}))):
            began = time.perf_counter()
            (folder := base / str(i)).mkdir()
            found[name] = family(name, folder, counter, held.get(name, {}))
            shutil.rmtree(folder)
            cells = found[name]["cells"]
            print(f"{name} ({time.perf_counter() - began:.0f} s): " + ", ".join(f"{k} {c['state']}" for k, c in cells.items() if c["state"] != "works"), flush=True)  # fmt: skip
            keep_row("architectures", {"family": name, "record": found[name]}, arguments.out)
    write_section("architectures", arguments.title, table(found), out=arguments.out, peers=("peft",))


if __name__ == "__main__":
    main()
