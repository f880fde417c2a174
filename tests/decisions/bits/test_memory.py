"""Memory beside the weights, against the caches that transformers fills."""

import pytest
import torch
import transformers
from tests import zoo

from layerbudget.decisions.bits.memory import cache_of

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
