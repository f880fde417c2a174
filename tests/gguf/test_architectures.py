"""Every field of every written configuration, one changed at a time: llama.cpp computes the same, or nothing is measured."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.llama_cpp.test_writer import MODELS, SIZE, planned

from layerbudget.compressors.ggml import library_file
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.errors import InvalidInput
from layerbudget.gguf.architectures import ARCHITECTURES, HARMLESS, WRITTEN
from layerbudget.gguf.names import architecture
from layerbudget.llama_cpp.runtime import LlamaError, ask

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

TOKENS = 24
CLEAR = 0.01  # between the last expert that a token takes and the next, in logits: sixteen bits change that by less
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
ROPES = (
    PLAIN,
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0,
     "original_max_position_embeddings": 16},
    {**PLAIN, "partial_rotary_factor": 0.5},
)  # fmt: skip
LAYERWISE = ("gemma3_text", "olmo3")  # a rotary embedding for each kind of layer
KINDS = ["sliding_attention", "full_attention"]
# By name, where the type says too little; each is the fields that change together.
CHANGES = {
    "head_dim": [{"head_dim": 24}, {"head_dim": 8}, {"head_dim": 32}],
    "sliding_window": [{"sliding_window": 8}, {"sliding_window": 8, "use_sliding_window": True}],
    "use_sliding_window": [{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}],
    "max_window_layers": [{"max_window_layers": 1}],
    "num_attention_heads": [{"num_attention_heads": 2}, {"num_attention_heads": 8}],
    "num_key_value_heads": [{"num_key_value_heads": n} for n in (1, 4)],
    "hidden_size": [{"hidden_size": 96}],
    "num_hidden_layers": [{"num_hidden_layers": 4}],
    "layer_types": [{"layer_types": list(kinds)} for kinds in (KINDS[:1] * 3, KINDS[1:] * 3, [*KINDS, KINDS[0]])],
    "hidden_act": [{"hidden_act": name} for name in ("silu", "gelu", "relu", "gelu_pytorch_tanh")],
    "hidden_activation": [{"hidden_activation": name} for name in ("silu", "gelu")],
    "mlp_only_layers": [{"mlp_only_layers": [1]}],
    "decoder_sparse_step": [{"decoder_sparse_step": 2}],
    "no_rope_layers": [{"no_rope_layers": [1, 0, 1]}, {"no_rope_layers": [1, 1, 1]}],
    "no_rope_layer_interval": [{"no_rope_layer_interval": 2}],
    "query_pre_attn_scalar": [{"query_pre_attn_scalar": n} for n in (7, 16)],
    "clip_qkv": [{"clip_qkv": 0.5}],
    "is_causal": [{"is_causal": False}],
    "use_bidirectional_attention": [{"use_bidirectional_attention": True}],
    "num_experts_per_tok": [{"num_experts_per_tok": 1}],
    "num_local_experts": [{"num_local_experts": 8, "num_experts": 8}],
    "original_max_position_embeddings": [{"original_max_position_embeddings": 16}],
    "max_position_embeddings": [{"max_position_embeddings": 32}],
    "attn_logit_softcapping": [{"attn_logit_softcapping": n} for n in (1.5, None)],
    "final_logit_softcapping": [{"final_logit_softcapping": n} for n in (1.5, None)],
    "pad_token_id": [{"pad_token_id": 1}],
    "bos_token_id": [{"bos_token_id": 2}],
    "eos_token_id": [{"eos_token_id": 2}, {"eos_token_id": [1, 2]}],
    "per_layer_config": [{"per_layer_config": {0: {"intermediate_size": 64}}}],
}  # fmt: skip
# Read by code that many models of transformers share, whether or not a class of configurations declares them.
SHARED = ("is_causal", "head_dim", "sliding_window", "use_bidirectional_attention", "layer_types", "per_layer_config")


def fields_of(kind):
    """Names of the fields that a class of configurations declares beside those of every model, and those that are shared."""
    general = {f.name for f in dataclasses.fields(transformers.PretrainedConfig)}
    declared = [f.name for f in dataclasses.fields(getattr(transformers, MODELS[kind][0])) if f.name not in general]
    return [*dict.fromkeys([*declared, *SHARED])]


def changes_of(kind, name):
    """Other values of a field: by its name, else by the type of the one that it has."""
    if name == "rope_parameters" and kind in LAYERWISE:
        both = {"full_attention": PLAIN, "sliding_attention": PLAIN}
        return [{name: {**both, which: rope}} for which in both for rope in ROPES]
    if name == "rope_parameters":
        return [{name: rope} for rope in ROPES]
    if name in CHANGES:
        return CHANGES[name]
    value = getattr(config_of(kind), name, None)
    if isinstance(value, bool):
        return [{name: not value}]
    if isinstance(value, int):
        return [{name: value // 2 or 1}]
    if isinstance(value, float):
        return [{name: value * 1.7 if value else 0.1}]
    return []


def config_of(kind, **changes):
    name, own = MODELS[kind]
    both = {**SIZE, "attn_implementation": "eager", **copy.deepcopy(own), **copy.deepcopy(changes)}
    return getattr(transformers, name)(**both)


def random_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.randn_like(p) * 0.2 if p.ndim > 1 else p + 0.2 * torch.randn_like(p)).half())
    return model


def clear_text(model):
    """Tokens, ``(1, TOKENS)``, for which no router is near a tie: else rounding alone sends a token to another expert."""
    taken = getattr(model.config, "num_experts_per_tok", None)
    for seed in range(1, 200):
        ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            out = model(input_ids=ids, **({"output_router_logits": True} if taken else {}))
        ranked = [each.float().log_softmax(-1).sort(-1, descending=True).values for each in out.get("router_logits") or ()]
        if all(float((r[:, taken - 1] - r[:, taken]).min()) > CLEAR for r in ranked if r.shape[1] > taken):
            return ids, torch.log_softmax(out.logits[0].float(), -1)
    raise AssertionError("every text has a token between two experts")


def outcome(kind, changes, folder):
    """``equal``, ``refused`` with the reason, ``no model`` that transformers makes, or what is wrong."""
    try:
        model = random_model(config_of(kind, **changes))
        ids, ours = clear_text(model)
    except AssertionError:
        raise
    except Exception as error:
        return f"no model: {type(error).__name__} {str(error).strip().splitlines()[-1][:80]}"
    try:
        plan = planned(model, ["F16"])
    except InvalidInput as error:
        return f"refused: {error}"
    try:
        write_bits(model, plan, folder, check=False)
    except InvalidInput as error:
        return f"refused when written: {error}"
    try:
        raw = ask(library_file(), folder / "model.gguf", ids=tuple(ids[0].tolist()))[1]
    except LlamaError as error:
        return f"WRONG: not loaded: {error}"
    theirs = torch.log_softmax(torch.from_numpy(np.frombuffer(raw, np.float32).copy().reshape(TOKENS, -1)), -1)
    apart = float((theirs - ours).abs().max())
    return "equal" if apart < 0.1 else f"WRONG: log-probabilities differ by {apart:.2f}"


def table(kinds, folder):
    """Rows of (kind, changes, outcome)."""
    for kind in kinds:
        for name in fields_of(kind):
            for number, changes in enumerate(changes_of(kind, name)):
                yield kind, changes, outcome(kind, changes, Path(folder) / f"{kind}-{name}-{number}")


def is_right(said):
    """Whether an outcome is one of those that may be; a refusal after measuring names the converter, whose file is right."""
    late = said.startswith("refused when written")
    return said.startswith(("equal", "refused: ", "no model: ")) or (late and "convert_hf_to_gguf.py with" in said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_whatever_a_field_says_llama_cpp_computes_it_or_nothing_is_measured(kind, tmp_path):
    rows = list(table([kind], tmp_path))
    for _, changes, said in rows:
        print(kind, changes, "|", said)
    assert [row for row in rows if not is_right(row[2])] == []
    assert sum(said == "equal" for _, _, said in rows) > 10


LLAMA3 = ROPES[4]
SLIDING = {"full_attention": PLAIN, "sliding_attention": ROPES[1]}
SOME = [
    ("llama", {}, "equal"),
    ("llama", {"rope_parameters": ROPES[5]}, "partial_rotary_factor = 0.5"),
    ("llama", {"is_causal": False}, "is_causal = False"),
    ("mistral", {"sliding_window": 8}, "set sliding_window to null"),
    ("qwen2", {"head_dim": 24}, "equal"),
    ("qwen2", {"rope_parameters": LLAMA3}, "equal"),
    ("qwen2_moe", {"tie_word_embeddings": True}, "make lm_head.weight a copy of the embedding"),
    ("qwen2_moe", {"qkv_bias": False}, "equal"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    ("smollm3", {"mlp_bias": True}, "mlp_bias = True"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma2", {"layer_types": [KINDS[1]] * 3}, "no layer with sliding_attention"),
    ("gemma3_text", {"rope_parameters": SLIDING}, "linear of layers with sliding_attention"),
    ("olmo2", {"rope_parameters": LLAMA3}, "rope_type = llama3"),
    ("olmo3", {"head_dim": 24}, "head_dim = 24"),
    ("starcoder2", {"use_bias": False}, "use_bias = False"),
]


@pytest.mark.parametrize(("kind", "changes", "wanted"), SOME)
def test_some_fields_are_computed_or_refused_before_measuring(kind, changes, wanted, tmp_path):
    said = outcome(kind, changes, tmp_path / "out")
    assert is_right(said) and wanted in said


def test_a_field_that_nobody_here_knows_is_refused_where_it_is_set():
    """As a later version of transformers may bring one."""

    @dataclasses.dataclass
    class Later(transformers.LlamaConfig):
        gate_everything: bool = False

    Later.model_type = "llama"
    size = {k: v for k, v in SIZE.items() if k != "attn_implementation"}
    architecture(Later(**size))
    with pytest.raises(InvalidInput, match="gate_everything = True"):
        architecture(Later(**size, gate_everything=True))


def test_every_field_of_every_configuration_is_named(tmp_path):
    """None is left to the rule for those that nobody knows."""
    for kind, arch in ARCHITECTURES.items():
        known = HARMLESS | WRITTEN | arch.takes | arch.expects.keys() | {"hidden_act", "hidden_activation"} | set(SHARED)
        declared = {f.name for f in dataclasses.fields(getattr(transformers, MODELS[kind][0]))}
        assert declared - known <= {"attention_bias", "mlp_bias"}, kind


def test_fields_that_the_model_does_not_read_stay_out_of_the_file(tmp_path):
    assert outcome("granitemoe", {"shared_expert_intermediate_size": 32}, tmp_path / "out") == "equal"
