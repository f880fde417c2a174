"""Memory beside the weights, against the caches that transformers fills."""

import pytest
import torch
import transformers
from tests import zoo

from layerbudget.decisions.bits.blocks import formats_table
from layerbudget.decisions.cache.cache import kept
from layerbudget.models.memory import cache_of

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
STATES = {
    "GraniteMoeHybridConfig": {
        "layer_types": ["mamba", "attention", "mamba"],
        **MAMBA2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "BambaConfig": {"attn_layer_indices": [1], **MAMBA2},
    "JambaConfig": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
    },
    "Qwen3NextConfig": {**LINEAR, **EXPERTS, "num_experts": 4, "head_dim": 8},
}


def _tiny(config, **fields):
    made = getattr(transformers, config)(**{**zoo.GROUPED, **fields}, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(made).eval()


@pytest.mark.parametrize("config", STATES)
def test_states_are_those_of_a_cache_that_was_filled(config):
    """They were counted as 0 bytes: a memory that was planned for many sequences was exceeded."""
    model = _tiny(config, **STATES[config])
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(zoo.tokens(1, 8).input_ids, past_key_values=cache)
    states = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    held = [x for layer in states for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    assert cache_of(model.config).state == sum(4 * x.numel() for x in held) > 0


def test_states_of_other_layers_are_not_counted():
    """Kimi's linear attention has other fields."""
    assert cache_of(transformers.KimiLinearConfig(**{**zoo.GROUPED, "num_key_value_heads": 4})) is None


@pytest.mark.parametrize("keys", [None, 1])
def test_layers_of_gemma_4_have_heads_of_their_own(keys):
    """Its global layers have wider heads, and fewer of them where keys are values: the configuration has no one number."""
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"attention_k_eq_v": keys is not None, "num_global_key_value_heads": keys, "num_kv_shared_layers": 1}
    fields = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8, "head_dim": 8, "global_head_dim": 16, **own}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    model = _tiny("Gemma4TextConfig", **fields, **inputs)
    wide = 4 * 16 * (keys or 2)
    found = cache_of(model.config)
    assert [list(layer) for layer in found.layers] == [[64, 8], [wide, 0], [64, 8]] and found.hidden == 64
    for layer, (each, _) in zip(kept(model)[::2], found.layers, strict=True):
        assert 4 * layer.heads * layer.channels == each
    assert formats_table(model, family="gguf", unwritten="plan").cache == found
