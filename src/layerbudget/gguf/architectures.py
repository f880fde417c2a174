"""Fields that the file of every architecture can say, by the fields of a configuration. No torch.

A field is one of four: no forward reads it; its value goes into the file; llama.cpp computes one value of it only; or nobody
here knows what it does. The last two are refused where they are set to something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

CONVERT = (
    "Convert it by llama.cpp's convert_hf_to_gguf.py with --outtype f16, then give that file its types: "
    "layerbudget apply model-f16.gguf PLAN -o planned.gguf."
)
_OTHERWISE = (
    "Plan for compressed-tensors (--format compressed-tensors; plan memory: --runtime vllm). A file of convert_hf_to_gguf.py "
    "would not compute it either."
)
# Tokens of the tokenizer, training, outputs beside the logits, and what says itself through other fields.
HARMLESS = frozenset(
    (
        "pad_token_id bos_token_id eos_token_id initializer_range use_cache pretraining_tp attention_dropout resid_pdrop "
        "embd_pdrop residual_dropout embedding_dropout hidden_dropout output_router_logits router_aux_loss_coef "
        "router_jitter_noise max_window_layers use_sliding_window no_rope_layer_interval original_max_position_embeddings "
        "transformers_version architectures output_hidden_states return_dict dtype chunk_size_feed_forward "
        "is_encoder_decoder id2label label2id problem_type ignore_keys_at_rope_validation default_theta"
    ).split()
)
# Numbers of the file's head, sizes that the shapes of its tensors say, and fields that have checks of their own below.
WRITTEN = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps layer_norm_eps norm_epsilon num_local_experts num_experts num_experts_per_tok "
    "moe_intermediate_size shared_expert_intermediate_size rope_parameters sliding_window layer_types "
    "tie_word_embeddings".split()
)
ROPES = ("default", "linear", "llama3", None)
_SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}  # names of one function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd:
    """Something that a file cannot say.

    Attributes:
        what: As ``field = value``.
        remedy: What can be done.
        computed: llama.cpp computes it, and its converter writes it.
    """

    what: str
    remedy: str = _OTHERWISE
    computed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture that llama.cpp computes as transformers does.

    Attributes:
        name: llama.cpp's name.
        permuted: It rotates neighbours, not halves of a head: rows of q and k change places.
        norm: Is added to the weights of norms.
        windows: It computes sliding windows, and some layer has to have one.
        square: All heads together are as wide as the model.
        untied: The head has weights of its own.
        factors: It reads factors of the rotary embedding's frequencies (Llama 3).
        partial: It rotates a part of a head where the configuration says so.
        takes: Further fields of the configuration whose every value a file holds.
        expects: The one value of a field of the configuration that it computes, or a function of the configuration that gives
            it; a field that is missing has it.
        converted: Fields of which llama.cpp computes other values too, by files of its converter.
    """

    name: str
    permuted: bool = False
    norm: float = 0.0
    windows: bool = False
    square: bool = False
    untied: bool = False
    factors: bool = False
    partial: bool = False
    takes: frozenset[str] = frozenset()
    expects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    converted: tuple[str, ...] = ()

    def against(self, config: Any) -> list[Odd]:
        """Return what a configuration has that is computed otherwise."""
        if getattr(config, "is_heterogeneous", False):
            return [Odd(what=f"per_layer_config ({', '.join(sorted(config.per_layer_attributes))})")]
        odd = [self._odd(config, name) for name, value in self._wanted(config).items() if _is_other(config, name, value)]
        return [*odd, *self._ropes(config), *self._attention(config), *self._unknown(config)]

    def _odd(self, config: Any, name: str) -> Odd:
        what = f"{name} = {getattr(config, name)}"
        return Odd(what=what, remedy=CONVERT, computed=True) if name in self.converted else Odd(what=what)

    def _wanted(self, config: Any) -> dict[str, Any]:
        both = {"hidden_act": "silu", "is_causal": True, "use_bidirectional_attention": None, **self.expects}
        return {name: value(config) if callable(value) else value for name, value in both.items()}

    def _ropes(self, config: Any) -> list[Odd]:
        """Rotary embeddings that it does not compute."""
        odd, ropes = [], rope_of(config)
        for where, rope in ropes.items():
            kind, part = rope.get("rope_type"), rope.get("partial_rotary_factor")
            if kind not in ROPES:
                odd.append(Odd(what=f"rope_type = {kind}", remedy=CONVERT, computed=kind in ("yarn", "longrope")))
            elif kind == "llama3" and not self.factors:
                odd.append(Odd(what=f"rope_type = {kind}"))
            elif where == "sliding" and kind not in ("default", None):
                odd.append(Odd(what=f"rope_type = {kind} of layers with sliding_attention"))
            if part not in (None, 1.0) and not self.partial:
                odd.append(Odd(what=f"partial_rotary_factor = {part}"))
        return odd

    def _attention(self, config: Any) -> list[Odd]:
        """Heads, windows and embeddings that its tensors and graph have no place for."""
        odd, window = [], window_of(config)
        if window and not self.windows:
            remedy = f"Where no text is longer than {window} tokens, the whole is the same: set sliding_window to null in its "
            remedy += f"config.json. {_OTHERWISE}"
            odd.append(Odd(what=f"sliding_window = {window}", remedy=remedy))
        if self.windows and not window:
            odd.append(Odd(what="no layer with sliding_attention"))
        if self.square and not is_square(config):
            heads, width = config.num_attention_heads, head_width(config)
            odd.append(Odd(what=f"head_dim = {width} ({heads} heads of a model of {config.hidden_size})"))
        if self.untied and getattr(config, "tie_word_embeddings", False):
            remedy = "llama.cpp wants weights of the head: set tie_word_embeddings to False, make lm_head.weight a copy of the "
            odd.append(Odd(what="tie_word_embeddings = True", remedy=f"{remedy}embedding, and save it. {_OTHERWISE}"))
        return odd

    def _unknown(self, config: Any) -> list[Odd]:
        """Fields that the class of the configuration declares and this table lacks, where they have not the class's value."""
        if not dataclasses.is_dataclass(config):
            return []
        known = HARMLESS | WRITTEN | self.takes | self._wanted(config).keys()
        odd = []
        for field in (f for f in dataclasses.fields(config) if f.name not in known):
            usual = None if field.default is dataclasses.MISSING else field.default
            if (getattr(config, field.name, usual) or None) != (usual or None):
                odd.append(self._odd(config, field.name))
        return odd


def _is_other(config: Any, name: str, wanted: Any) -> bool:
    """Whether a field is set to another value; None, False and no entries are one."""
    value = getattr(config, name, wanted)
    value, wanted = (_SAME.get(v, v) if isinstance(v, str) else v for v in (value, wanted))
    return bool((value or None) != (wanted or None))


def _scale(wide: int) -> Callable[[Any], Any]:
    """Gemma's divisor of attention scores: the width of a head, but for the model of so many layers."""
    return lambda c: c.hidden_size // c.num_attention_heads if c.num_hidden_layers == wide else c.head_dim


_TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_CAPS = {
    "attn_logit_softcapping": lambda c: c.attn_logit_softcapping or 50.0,
    "final_logit_softcapping": lambda c: c.final_logit_softcapping or 30.0,
}
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_BIASES = frozenset(("attention_bias", "mlp_bias"))
_SCALES = frozenset(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"))
# transformers' model types. What is not said in the file is what llama.cpp always does.
ARCHITECTURES = {
    "llama": Architecture(name="llama", permuted=True, factors=True, takes=_BIASES),
    "mistral": Architecture(name="llama", permuted=True, factors=True),
    "mixtral": Architecture(name="llama", permuted=True, factors=True),
    "smollm3": Architecture(
        name="smollm3",
        permuted=True,
        expects={"no_rope_layers": lambda c: [int((i + 1) % 4 != 0) for i in range(c.num_hidden_layers)]},
    ),
    "granite": Architecture(name="granite", permuted=True, factors=True, takes=_BIASES | _SCALES),
    "granitemoe": Architecture(name="granitemoe", permuted=True, factors=True, takes=_BIASES | _SCALES),
    "qwen2": Architecture(name="qwen2", square=True),
    "qwen3": Architecture(name="qwen3"),
    "qwen2_moe": Architecture(
        name="qwen2moe",
        square=True,
        untied=True,
        takes=frozenset(("qkv_bias",)),
        expects={**_EVERY_LAYER, "norm_topk_prob": False},
    ),
    "qwen3_moe": Architecture(name="qwen3moe", expects={**_EVERY_LAYER, "norm_topk_prob": True}),
    "olmo2": Architecture(name="olmo2", square=True, untied=True),
    "olmo3": Architecture(name="olmo2", square=True, untied=True, windows=True),
    "olmoe": Architecture(
        name="olmoe",
        square=True,
        untied=True,
        expects={"norm_topk_prob": False, "clip_qkv": None, "num_key_value_heads": lambda c: c.num_attention_heads},
    ),
    "gemma": Architecture(name="gemma", norm=1.0, expects=_TANH),
    "gemma2": Architecture(
        name="gemma2", norm=1.0, windows=True, expects={**_TANH, **_CAPS, "query_pre_attn_scalar": _scale(46)}
    ),
    "gemma3_text": Architecture(
        name="gemma3",
        norm=1.0,
        windows=True,
        takes=frozenset(("final_logit_softcapping",)),
        expects={**_TANH, "attn_logit_softcapping": None, "query_pre_attn_scalar": _scale(62)},
    ),
    "phi3": Architecture(name="phi3", square=True, partial=True),
    "starcoder2": Architecture(name="starcoder2", square=True, expects={"hidden_act": "gelu_pytorch_tanh", "use_bias": True}),
    "stablelm": Architecture(
        name="stablelm",
        square=True,
        untied=True,
        partial=True,
        takes=frozenset(("use_qkv_bias",)),
        expects={"qk_layernorm": False, "use_parallel_residual": False},
        converted=("qk_layernorm", "use_parallel_residual"),
    ),
}
# Of what is not written here: model types whose windows llama.cpp computes.
_WINDOWED = ("cohere2", "exaone4", "gemma3n_text", "gemma4_text", "gpt_oss", "llama4_text")
# What llama.cpp computes with layers that differ in heads and widths, and the model types that are computed so.
UNEVEN, UNEVEN_TYPES = Architecture(name="deci", permuted=True, factors=True, takes=_BIASES), ("llama", "mistral", "qwen2")


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of every layer: those of Gemma 4 differ, in most models all are one."""
    return list(getattr(config, "per_layer_config", None) or [config] * (getattr(config, "num_hidden_layers", None) or 0))


def head_width(config: Any) -> int:
    """Return the channels of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def is_square(config: Any) -> bool:
    """Return whether all heads together are as wide as the model."""
    return head_width(config) * int(config.num_attention_heads) == int(config.hidden_size)


def rope_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return the rotary embeddings of a model: ``full``, and ``sliding`` where layers with windows have their own."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if isinstance(parameters.get("full_attention"), Mapping):
        return {"full": dict(parameters["full_attention"]), "sliding": dict(parameters.get("sliding_attention") or {})}
    return {"full": parameters}


def window_of(config: Any) -> int | None:
    """Return the window of attention that a configuration asks for; None where it sees everything."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    if not window or (kinds and "sliding_attention" not in kinds):
        return None
    return int(window)


def computes_windows(config: Any) -> bool:
    """Return whether llama.cpp computes the sliding windows of a model; where that is not known, it keeps the whole context."""
    kind = str(getattr(config, "model_type", ""))
    return kind in _WINDOWED or (kind in ARCHITECTURES and ARCHITECTURES[kind].windows)
