"""Tiny models, data and the plainest possible versions of what is tested."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from layerbudget.data.calibration import CalibrationSet

VOCABULARY = 61


def make_mistral(seed: int = 0, layers: int = 3, **options) -> MistralForCausalLM:
    """A tiny Mistral whose weights are large enough that layers matter."""
    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=None, initializer_range=0.12, pad_token_id=0,
        **options,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.fixture
def mistral():
    return make_mistral()


@pytest.fixture
def gpt2():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=3, n_head=4, initializer_range=0.12)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def gemma():
    torch.manual_seed(4)
    config = GemmaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.12, pad_token_id=0,
    )  # fmt: skip
    return GemmaForCausalLM(config).eval()


@pytest.fixture
def bert():
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=32, num_labels=3, initializer_range=0.12,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def make_data(samples: int = 6, length: int = 10, seed: int = 3, padded: bool = False) -> CalibrationSet:
    """Random tokens; with ``padded`` the rows have different lengths (padding on the right)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (samples, length), generator=generator)
    mask = None
    if padded:
        real = torch.randint(length // 2, length + 1, (samples,), generator=generator)
        mask = (torch.arange(length) < real[:, None]).long()
        ids = ids * mask
    return CalibrationSet(input_ids=ids, attention_mask=mask)


@pytest.fixture
def data():
    return make_data()


@pytest.fixture
def padded():
    return make_data(padded=True)


@pytest.fixture
def build():
    """``build.mistral(...)`` and ``build.data(...)`` for tests that need variants."""
    import types

    return types.SimpleNamespace(mistral=make_mistral, data=make_data)
