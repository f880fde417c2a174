"""Tiny random models of many architectures, a tiny tokenizer, and the folder of benchmark data."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from layerbudget.records import Block, Module
from layerbudget.scores.record import Scores

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

SHARED = Path(os.environ.get("LAYERBUDGET_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not (SHARED / "data").is_dir():
        pytest.skip("the folder of benchmark data (shared/data beside the checkout, or LAYERBUDGET_SHARED) is absent")
    return SHARED / "data"


_COMMON = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
    bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip


def tiny_config(kind: str):
    import transformers as t

    grouped = {**_COMMON, "num_key_value_heads": 2}
    makers = {
        "llama": lambda: t.LlamaConfig(**grouped),
        "mistral": lambda: t.MistralConfig(**grouped, sliding_window=None),
        "mistral-sliding": lambda: t.MistralConfig(**grouped, sliding_window=8),
        "gemma": lambda: t.GemmaConfig(**grouped, head_dim=8),
        "qwen2": lambda: t.Qwen2Config(**grouped),
        "opt": lambda: t.OPTConfig(**{**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
        ),
        "mixtral": lambda: t.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2),
        "bert": lambda: t.BertConfig(**_COMMON),
    }
    return makers[kind]()


def tiny_model(kind: str, seed: int = 0):
    import transformers as t

    torch.manual_seed(seed)
    config = tiny_config(kind)
    if kind == "bert":
        return t.BertForMaskedLM(config).eval()
    return t.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def make_model():
    return tiny_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer of 96 tokens with a beginning-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<pad>", "<unk>"]
    letters = [chr(c) for c in range(32, 124)]
    tok = Tokenizer(models.WordLevel({s: i for i, s in enumerate(specials + letters)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tok.decoder = decoders.Fuse()
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<unk>"
    )


@pytest.fixture
def saved_model(tmp_path, tokenizer):
    def save(kind: str) -> Path:
        folder = tmp_path / kind
        tiny_model(kind).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


def make_scores(values, sizes=None, **fields) -> Scores:
    """A score record over invented layers, one matrix each."""
    sizes = sizes if sizes is not None else [64] * len(values)
    blocks = [
        Block(name=f"model.layers.{i}", modules=(Module(name=f"model.layers.{i}.mlp", d_in=64, d_out=int(d)),))
        for i, d in enumerate(sizes)
    ]
    return Scores.from_values({b.name: float(v) for b, v in zip(blocks, values, strict=True)}, blocks, **fields)


@pytest.fixture
def scores_of():
    """The function above."""
    return make_scores


@pytest.fixture
def rng():
    """A seeded generator."""
    return np.random.default_rng(20240501)
