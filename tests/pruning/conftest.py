"""Tiny random models of every architecture, plans by hand, calibration tokens."""

from __future__ import annotations

import pytest
import torch
import transformers

from layerbudget.blocks import describe, partition
from layerbudget.data.calibration import CalibrationSet
from layerbudget.plan import Plan, PlanBlock
from layerbudget.treatments.select import share

COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 8}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
OPT = {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}
SLIDE = {"sliding_window": 8}

CONFIGS: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaConfig", "AutoModelForCausalLM", COMMON),
    "llama-tied": ("LlamaConfig", "AutoModelForCausalLM", {**COMMON, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "AutoModelForCausalLM", {**COMMON, "sliding_window": None}),
    "mistral-sliding": ("MistralConfig", "AutoModelForCausalLM", {**COMMON, **SLIDE}),
    "gemma": ("GemmaConfig", "AutoModelForCausalLM", {**COMMON, **HEADS}),
    "gemma2": ("Gemma2Config", "AutoModelForCausalLM", {**COMMON, **HEADS, **SLIDE}),
    "gemma3": ("Gemma3TextConfig", "AutoModelForCausalLM", {**COMMON, **HEADS, **SLIDE}),
    "qwen2": ("Qwen2Config", "AutoModelForCausalLM", COMMON),
    "qwen3": ("Qwen3Config", "AutoModelForCausalLM", {**COMMON, **HEADS}),
    "phi3": ("Phi3Config", "AutoModelForCausalLM", COMMON),
    "opt": ("OPTConfig", "AutoModelForCausalLM", OPT),
    "gpt2": ("GPT2Config", "AutoModelForCausalLM", GPT2),
    "gpt-neox": ("GPTNeoXConfig", "AutoModelForCausalLM", PLAIN),
    "olmo2": ("Olmo2Config", "AutoModelForCausalLM", COMMON),
    "starcoder2": ("Starcoder2Config", "AutoModelForCausalLM", COMMON),
    "mixtral": ("MixtralConfig", "AutoModelForCausalLM", {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "bert": ("BertConfig", "AutoModelForMaskedLM", PLAIN),
    "roberta-classifier": ("RobertaConfig", "AutoModelForSequenceClassification", PLAIN),
}


def build(name: str, **changes) -> torch.nn.Module:
    """A tiny random model; weights large enough that activations differ between inputs."""
    config_name, auto, fields = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**fields, **changes}, attn_implementation="eager")
    model = getattr(transformers, auto).from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0, 0.2)
    return model.eval()


def tokens(samples: int = 6, length: int = 16, seed: int = 0, padded: bool = False) -> CalibrationSet:
    """Random tokens, on demand with right padding of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (samples, length), generator=generator)
    mask = None
    if padded:
        mask = (torch.arange(length)[None] < torch.arange(length // 2, length // 2 + samples)[:, None]).long()
        ids = ids * mask
    return CalibrationSet(input_ids=ids, attention_mask=mask)


def make_plan(model, sparsity=0.5, by: str = "layer", spread: float = 0.2, **filters) -> Plan:
    """A plan with ratios that differ between blocks and an exact total."""
    blocks = partition(model, by, **filters)
    tilt = [sparsity + spread * ((i % 3) - 1) for i in range(len(blocks))]
    counts = [min(b.numel, round(t * b.numel)) for b, t in zip(blocks, tilt, strict=True)]
    if spread == 0:
        counts = share(round(sparsity * sum(b.numel for b in blocks)), [b.numel for b in blocks])
    chosen = tuple(
        PlanBlock(name=b.name, value=c / b.numel, count=c, numel=b.numel, modules=tuple(m.name for m in b.modules))
        for b, c in zip(blocks, counts, strict=True)
    )
    spent = sum(counts)
    return Plan(
        kind="sparsity", rule="by hand", model=describe(model), blocks=chosen,
        budget={"unit": "parameters", "limit": spent, "spent": spent},
    )  # fmt: skip


@pytest.fixture
def kit():
    """The helpers of this file."""

    class Kit:
        configs = CONFIGS
        build = staticmethod(build)
        tokens = staticmethod(tokens)
        plan = staticmethod(make_plan)

    return Kit


@pytest.fixture
def folder(kit, tmp_path):
    """A folder with a saved tiny Llama, its tokenizer and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kit.build("llama").save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{(7 * i * i + 3 * i) % 97}" for i in range(400)))
    return tmp_path
