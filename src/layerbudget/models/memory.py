"""Memory beside the weights, from the configuration alone: the cache of a context and the buffers of a forward. No torch.

The cache holds keys and values in 16 bits, for one sequence. As llama.cpp allocates it, a layer with a sliding window holds the
window and one batch, in steps of 256 tokens; latent attention holds one vector per token. The buffers are an estimate for
llama-server with flash attention. It reads 512 tokens at a time: 32 bits for eight hidden states and for gate and up of an MLP,
or, where that is more, for five states and three widths of the MLP; 16 for the mask; logits are those of one token of every
sequence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InvalidInput
from ..gguf.architectures import layer_configs

_BATCH, _STEP = 512, 256  # tokens of a forward; of an allocation
# Fields of the configuration with the window of a kind of layer.
_WINDOWS = {
    "full_attention": "",
    "attention": "",
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
_CONTEXT = re.compile(r"(\d+)(k|M)?i?", re.IGNORECASE)
_THOUSANDS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """The numbers that memory beside the weights depends on.

    Attributes:
        layers: Bytes per token and sliding window of every layer with a cache; a window of 0 is none.
        state: Bytes of layers that hold a state of fixed size.
        vocabulary: Tokens that are predicted.
        hidden: Width of the residual stream, or of all heads where that is more.
        inner: Width of an MLP; of all experts that a token passes, where there are experts.
        positions: Tokens that the model was made for; 0 where it does not say.
    """

    layers: Sequence[Sequence[int]]
    state: int
    vocabulary: int
    hidden: int
    inner: int
    positions: int

    def held(self, context: int) -> int:
        """Return the bytes of keys and values in 16 bits at a context of so many tokens."""
        cells = _up(context)
        return sum(each * (min(cells, _up(window + _BATCH)) if window else cells) for each, window in self.layers)

    def buffers(self, context: int, batch: int = 1, more: int = 0) -> int:
        """Return the bytes of the buffers of a forward, of so many sequences, with so many more hidden states."""
        cells = _up(context)
        wide = max(8 * self.hidden + 2 * self.inner, (5 + more) * self.hidden + 3 * self.inner)
        each = 4 * wide + 2 * cells
        return min(_BATCH, cells * batch) * each + 4 * self.vocabulary * batch

    def bytes(self, context: int) -> int:
        """Return the bytes of cache, states and buffers at a context."""
        return self.held(context) + self.state + self.buffers(context)

    def longest(self, fits: Callable[[int], bool], step: int = _STEP) -> int:
        """Return the longest context that fits, a multiple of what a runtime allocates at a time; 0 where none does."""
        low, high = 0, (self.positions or 1 << 24) // step
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
        return low * step


def _up(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


def cache_of(config: Any) -> MemoryModel | None:
    """Return what the cache of a model depends on, by its configuration; None for layers that are not known here."""
    configs = layer_configs(config)
    if not configs or not all(getattr(c, "num_attention_heads", None) for c in configs):
        return None
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * len(configs))
    kinds = kinds[: len(configs) - (getattr(config, "num_kv_shared_layers", None) or 0)]
    heads = [_heads(c) for c in configs]
    state = _state(config) if "linear_attention" in kinds else 0
    if (
        state is None
        or not {*kinds} <= {*_WINDOWS, "linear_attention"}
        or not all(isinstance(n, int) for h in heads for n in h)
    ):
        return None
    return MemoryModel(
        layers=[(_token(c), _window(c, kind)) for c, kind in zip(configs, kinds, strict=False) if kind in _WINDOWS],
        state=kinds.count("linear_attention") * state,
        vocabulary=config.vocab_size,
        hidden=max(config.hidden_size, *(queries * width for queries, _, width in heads)),
        inner=max(map(_inner, configs)),
        positions=getattr(config, "max_position_embeddings", None) or 0,
    )


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads and key-value heads of a layer, and the channels of one."""
    queries = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    return queries, getattr(config, "num_key_value_heads", None) or queries, width


def _token(config: Any) -> int:
    """Bytes that a layer keeps of a token, in 16 bits: keys and values, or one latent vector."""
    if latent := getattr(config, "kv_lora_rank", None):
        return int(2 * (latent + config.qk_rope_head_dim))
    _, keys, width = _heads(config)
    return 4 * keys * width


def _window(config: Any, kind: str) -> int:
    """Tokens that a kind of layer reads; 0 for all."""
    return (_WINDOWS[kind] and getattr(config, _WINDOWS[kind], None)) or 0


def _inner(config: Any) -> int:
    """The width of an MLP, or of all experts that a token passes."""
    sizes = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    dense = max(sizes) if isinstance(sizes, (list, tuple)) else sizes
    count = getattr(config, "num_experts_per_tok", None)
    if not isinstance(count, int):
        return int(dense)
    each = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or each * (getattr(config, "n_shared_experts", None) or 0)
    return int(max(count * each + shared, dense if getattr(config, "first_k_dense_replace", None) else 0))


def _state(config: Any) -> int | None:
    """Bytes that a layer of Mamba or of linear attention holds, in 32 bits; None of one that is not known here.

    It is a matrix per head, and the last inputs of its convolution: as many as the kernel is long, as transformers keeps them.
    llama.cpp and vLLM keep one less.
    """
    if size := getattr(config, "mamba_d_state", None):
        inner = config.mamba_expand * config.hidden_size
        groups = getattr(config, "mamba_n_groups", 0)  # of Mamba 2
        return 4 * (inner * size + (inner + 2 * groups * size) * config.mamba_d_conv)
    if not (heads := getattr(config, "linear_num_value_heads", None)):
        return None
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key + heads * value
    return 4 * (heads * key * value + channels * config.linear_conv_kernel_dim)


def read_context(text: str | int) -> int:
    """Return a number of tokens: ``32k`` is 32,768, ``1M`` 1,048,576.

    Raises:
        InvalidInput: Anything else than a whole number above zero, with or without k or M.
    """
    match = _CONTEXT.fullmatch(str(text).strip())
    tokens = int(match.group(1)) * _THOUSANDS[(match.group(2) or "").lower()] if match else 0
    if not tokens:
        raise InvalidInput(f"The context {text!r} is no number of tokens.", "It is a whole number.", "Write 8192 or 32k.")
    return tokens


def check_positions(tokens: int, most: int) -> None:
    """Refuse a context beyond the tokens that a model was made for; 0 where they are not known."""
    if most and tokens > most:
        what = f"A context of {tokens:,} tokens is too long."
        feasible = f"The model reads at most {most:,} tokens."
        raise InvalidInput(what, feasible, f"Give the same command --context {most}, or less.")
