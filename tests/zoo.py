"""The zoo: tiny models of many architectures, tokens, plans by hand, and the plainest dense versions of what is tested.

Imported normally: ``from tests import zoo``. Every model is random and made by :func:`tiny`; the other makers only say how
large its weights are, so that what a test looks at (masks, gains, adapters) is not lost in the noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from layerbudget.canonical import to_jsonable
from layerbudget.compressors.formats import find_format
from layerbudget.compressors.select import share
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decision import DECISIONS
from layerbudget.decisions.cache.formats import CachedTensor
from layerbudget.execution import loss as L
from layerbudget.frozen import fields_in_file
from layerbudget.models import blocks as B
from layerbudget.plan import Plan, PlanBlock
from layerbudget.records import Block, Module
from layerbudget.scores import Scores
from layerbudget.storage import reading

# --- models ------------------------------------------------------------------------------------------------------------------

PLAIN = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**PLAIN, "num_key_value_heads": 2}
HEADS, SLIDE = {"head_dim": 8}, {"sliding_window": 8}
EIGHT = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL, MASKED, CLASSES = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", CAUSAL, GROUPED),
    "llama-tied": ("LlamaConfig", CAUSAL, {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", CAUSAL, {**GROUPED, "sliding_window": None}),
    "mistral-sliding": ("MistralConfig", CAUSAL, {**GROUPED, **SLIDE}),
    "gemma": ("GemmaConfig", CAUSAL, {**GROUPED, **HEADS}),
    "gemma2": ("Gemma2Config", CAUSAL, {**GROUPED, **HEADS, **SLIDE}),
    "gemma3": ("Gemma3TextConfig", CAUSAL, {**GROUPED, **HEADS, **SLIDE}),
    "qwen2": ("Qwen2Config", CAUSAL, GROUPED),
    "qwen3": ("Qwen3Config", CAUSAL, {**GROUPED, **HEADS}),
    "phi3": ("Phi3Config", CAUSAL, GROUPED),
    "opt": ("OPTConfig", CAUSAL, {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2Config", CAUSAL, GPT2),
    "gpt-neox": ("GPTNeoXConfig", CAUSAL, PLAIN),
    "olmo2": ("Olmo2Config", CAUSAL, GROUPED),
    "starcoder2": ("Starcoder2Config", CAUSAL, GROUPED),
    "mixtral": ("MixtralConfig", CAUSAL, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", CAUSAL, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOssConfig", CAUSAL, {**GROUPED, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron-h": (
        "NemotronHConfig",
        CAUSAL,
        {
            **GROUPED,
            **HEADS,
            "hybrid_override_pattern": "*EE",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        CAUSAL,
        {
            **GROUPED,
            **HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
        },
    ),
    "qwen2-moe": ("Qwen2MoeConfig", CAUSAL, {**GROUPED, **EIGHT, "shared_expert_intermediate_size": 24, "num_experts": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", CAUSAL, {**GROUPED, **HEADS, **EIGHT, "num_experts": 8, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", CAUSAL, {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2}),
    "granite-moe": ("GraniteMoeConfig", CAUSAL, {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "glm4-moe": ("Glm4MoeConfig", CAUSAL, {**GROUPED, **HEADS, **EIGHT, **SHARED, "n_group": 1, "topk_group": 1}),
    "deepseek-v3": (
        "DeepseekV3Config",
        CAUSAL,
        {
            **PLAIN,
            **EIGHT,
            **SHARED,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "ernie-moe": (
        "Ernie4_5_MoeConfig",
        CAUSAL,
        {
            **GROUPED,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "zaya": (
        "ZayaConfig",
        CAUSAL,
        {**GROUPED, **HEADS, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "router_hidden_size": 16},
    ),
    "bert": ("BertConfig", MASKED, PLAIN),
    "bert-classifier": ("BertConfig", CLASSES, PLAIN),
    "roberta-classifier": ("RobertaConfig", CLASSES, PLAIN),
}


def tiny(name: str, *, seed: int = 0, attention: str = "eager", **changes: Any) -> Any:
    """A random model of an architecture, initialised as transformers does it."""
    config_name, auto, fields = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**fields, "attn_implementation": attention, **changes})
    return getattr(transformers, auto).from_config(config).eval()


def build(name: str, **changes: Any) -> Any:
    """Weights so large that activations differ between inputs: for masks and damage."""
    model = tiny(name, **changes)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0, 0.2)
    return model


_SMALL = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
          "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
_DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {**_SMALL, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 4,
                            "tie_word_embeddings": True}),
    "gemma": ("gemma", {**_SMALL, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None}),
    "bert": ("bert-classifier", {**_SMALL, "num_labels": 3, "pad_token_id": 0}),
    "bert-mlm": ("bert", {**_SMALL, "pad_token_id": 0}),
    "mixtral": ("mixtral", {**_SMALL, "intermediate_size": 12, "num_key_value_heads": 1, "num_local_experts": 3,
                            "experts_implementation": "eager"}),
}  # fmt: skip
DENSE = (*_DENSE, "mlp")


def dense(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model so small that its curvature can be written down, in float64: for oracles."""
    torch.manual_seed(0)
    if name == "mlp":
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))
    else:
        model = tiny(_DENSE[name][0], **_DENSE[name][1])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.15 if p.ndim > 1 else 0.05))
    return model.to(dtype).eval()


def mistral(layers: int = 3, *, seed: int = 0, **changes: Any) -> Any:
    """A Mistral whose layers matter."""
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": layers}
    return tiny("mistral", seed=seed, attention="sdpa", **{**sizes, "initializer_range": 0.12, **changes})


def adaptable(layers: int = 4, **changes: Any) -> Any:
    """A Mistral for adapters."""
    sizes = {"vocab_size": 61, "num_hidden_layers": layers, "head_dim": 8}
    return tiny("mistral", seed=1, attention="sdpa", **{**sizes, **changes})


def classifier(layers: int = 4, **changes: Any) -> Any:
    """A BERT with a head of two classes, without dropout."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
    return tiny(
        "bert-classifier", seed=1, attention="sdpa", **{"vocab_size": 61, "num_hidden_layers": layers, **quiet, **changes}
    )


# --- data --------------------------------------------------------------------------------------------------------------------


def tokens(samples: int = 6, length: int = 16, seed: int = 0, padded: bool = False, vocabulary: int = 97) -> CalibrationSet:
    """Random tokens; padded: rows of different lengths, padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (samples, length), generator=generator)
    mask = None
    if padded:
        mask = (torch.arange(length)[None] < torch.arange(length // 2, length // 2 + samples)[:, None]).long()
        ids = ids * mask
    return CalibrationSet(input_ids=ids, attention_mask=mask)


def half_answered(samples: int, length: int) -> CalibrationSet:
    """Tokens whose every second sequence has no answers, as in chats that are cut before one."""
    data = tokens(samples, length)
    labels = data.input_ids.masked_fill((torch.arange(samples) % 2 == 1)[:, None], -100)
    return dataclasses.replace(data, labels=labels)


def labelled(name: str, samples: int = 6, length: int = 9, *, padded: bool = True) -> Any:
    """Data for a model of :func:`dense`."""
    g = torch.Generator().manual_seed(1)
    if name == "mlp":
        return L.FeatureSet(
            inputs=torch.randn(samples, 6, generator=g, dtype=torch.float64),
            labels=torch.randint(0, 5, (samples,), generator=g),
        )
    ids = torch.randint(3, 37, (samples, length), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        for i in range(samples):
            mask[i, length - i % 4 :] = 0
        ids = torch.where(mask.bool(), ids, 0)
    labels = torch.randint(0, 3, (samples,), generator=g) if name == "bert" else None
    data = CalibrationSet(input_ids=ids, attention_mask=mask if padded else None, labels=labels)
    return L.mask_tokens(data, 1, fraction=0.4) if name == "bert-mlm" else data


# --- oracles -----------------------------------------------------------------------------------------------------------------


def partition(model: nn.Module, name: str) -> tuple[Block, ...]:
    """Blocks of a model of :func:`dense`."""
    return B.partition(model, by="linear" if name == "mlp" else "layer")


def rows(model: nn.Module, data: Any, blocks: Sequence[Block], targets: Any = None) -> list[torch.Tensor]:
    """Per block: ``(n, p)`` gradients of the summed sequence loss, one sequence at a time, by plain autograd."""
    parameters = [[B.weight_of(model, m.name)[1] for m in b.modules] for b in blocks]
    out: list[list[torch.Tensor]] = [[] for _ in blocks]
    for i, batch in enumerate(L.batches(model, data, 1)):
        wanted = batch.targets if targets is None else targets[i : i + 1]
        loss = L.summed_loss(L.logits_of(model, batch), wanted)
        grads = iter(torch.autograd.grad(loss, [p for group in parameters for p in group], allow_unused=True))
        for k, group in enumerate(parameters):
            parts = [next(grads) for _ in group]
            flat = [(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(parts, group, strict=True)]
            out[k].append(torch.cat(flat))
    return [torch.stack(each).double() for each in out]


def gain(g: torch.Tensor, c: torch.Tensor, tau: float) -> float:
    """``g'(C + tau I)^-1 g`` by a dense solve."""
    return float(g @ torch.linalg.solve(c + tau * torch.eye(len(g), dtype=c.dtype), g))


def relative(a: Any, b: Any) -> float:
    """Largest relative difference."""
    return float(np.max(np.abs(np.asarray(a) - np.asarray(b)) / np.maximum(np.abs(np.asarray(b)), 1e-300)))


def mixture(x, a, b, router, rank, top_k, scale):
    """A mixture of LoRA experts by its definition, one token and one chosen expert at a time."""
    found = []
    for token in x.reshape(-1, x.shape[-1]):
        p = torch.softmax(router @ token, 0)
        best = torch.topk(p, min(top_k, len(p))).indices.tolist()
        total = sum(p[e] for e in best)
        y = torch.zeros(b.shape[0], dtype=x.dtype)
        for e in best:
            part = slice(e * rank, (e + 1) * rank)
            y = y + p[e] / total * scale * (b[:, part] @ (a[part] @ token))
        found.append(y)
    return torch.stack(found).reshape(*x.shape[:-1], b.shape[0])


def checkpoint_activations(model: Any, *, reentrant: bool) -> None:
    """Let the backward compute activations again; later releases of transformers renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def perturb(model: nn.Module, needle: str = "lora_", scale: float = 0.3, seed: int = 5) -> None:
    """Move adapters away from their zero start, the same way for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if needle in name:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(scale * drawn.to(parameter.dtype))


# --- plans and scores by hand ------------------------------------------------------------------------------------------------


def plan(model: nn.Module, sparsity: float = 0.5, by: str = "layer", spread: float = 0.2, **filters: Any) -> Plan:
    """A sparsity plan with ratios that differ between blocks and an exact total."""
    blocks = B.partition(model, by, **filters)
    tilt = [sparsity + spread * ((i % 3) - 1) for i in range(len(blocks))]
    counts = [min(b.numel, round(t * b.numel)) for b, t in zip(blocks, tilt, strict=True)]
    if spread == 0:
        counts = share(round(sparsity * sum(b.numel for b in blocks)), [b.numel for b in blocks])
    chosen = tuple(PlanBlock.of(b, c / b.numel, c) for b, c in zip(blocks, counts, strict=True))
    return _by_hand(model, "sparsity", chosen, "parameters")


def layers(model: nn.Module, counts: Sequence[int], kind: str = "lora-experts") -> Plan:
    """A plan with one block per layer, in the order of the layers."""
    chosen = tuple(PlanBlock.of(b, c, c) for b, c in zip(B.partition(model, "layer"), counts, strict=True))
    return _by_hand(model, kind, chosen)


def linears(model: nn.Module, counts: int | Callable[[str], int], kind: str = "ranks") -> Plan:
    """A plan with one block per Linear; ``counts`` is a function of the name or a number."""
    blocks = B.partition(model, "linear")
    chosen = [counts(b.name) if callable(counts) else counts for b in blocks]
    return _by_hand(model, kind, tuple(PlanBlock.of(b, c, c) for b, c in zip(blocks, chosen, strict=True)))


def _by_hand(model: nn.Module, kind: str, blocks: tuple[PlanBlock, ...], unit: str = "count") -> Plan:
    spent = sum(b.count for b in blocks)
    budget = {"unit": unit, "limit": spent, "spent": spent}
    return Plan(kind=kind, rule="by-hand", model=B.describe(model), blocks=blocks, budget=budget)


def saying(plan: Plan, kind: str | None = None, **fields: Any) -> Plan:
    """The plan with other values, as they stand in a file, of fields of its payload; of a check, what is missing is made up."""
    kind = kind or plan.kind
    if fields.get("check"):
        row = {"kl_error": 0.0, "perplexity": 2.0, "perplexity_error": 0.0, "bytes": 1, "same": False}
        check = fields["check"] if isinstance(fields["check"], dict) else fields_in_file(fields["check"])
        rows = {name: {**row, **each} for name, each in check["rows"].items()}
        fields["check"] = {"data": {}, "dense_perplexity": 1.0, **check, "rows": rows}
    stored = to_jsonable({**fields_in_file(plan.payload), **{name: fields_in_file(value) for name, value in fields.items()}})
    return dataclasses.replace(plan, kind=kind, payload=reading.converted(stored, DECISIONS.find(kind).Payload))


def scores(values: Sequence[float], sizes: Sequence[int] | None = None, **fields: Any) -> Scores:
    """A score record over invented layers, one matrix each."""
    sizes = sizes if sizes is not None else [64] * len(values)
    blocks = [
        Block(name=f"model.layers.{i}", modules=(Module(name=f"model.layers.{i}.mlp", d_in=64, d_out=int(d)),))
        for i, d in enumerate(sizes)
    ]
    return Scores.from_values(blocks, {b.name: float(v) for b, v in zip(blocks, values, strict=True)}, **fields)


def fit_scores(seed: int = 0, layers: int = 2) -> Scores:
    """What might have been measured of weights and cache: four matrices and four parts, three formats each."""
    weights, cached = ["w2-g32", "w4-g32", "bf16"], ["int2", "int4", "bf16"]
    rng = np.random.default_rng(seed)
    modules = [Module(name=f"model.layers.{i}.mlp.{n}", d_out=64, d_in=64) for i in range(layers) for n in ("up", "down")]
    held = [Block(name=m.name, modules=(m,)) for m in modules]
    kept = [
        CachedTensor(layer=i, name=f"model.layers.{i}", part=p, heads=1, channels=32, window=None)
        for i in range(layers)
        for p in (0, 1)
    ]
    rows = {}
    for name, count in (("weights", len(held)), ("cache", len(kept))):
        damage = np.exp(rng.normal(size=(count, 1))) * np.array([1.0, 0.06, 0.0]) * np.exp(0.3 * rng.normal(size=(count, 3)))
        rest = damage[..., None] * 0.1 * rng.normal(size=(*damage.shape, 4))
        rows[name] = {"damage": damage.tolist(), "rest": rest.tolist()}
    memory = {"layers": [[128, 0]] * layers, "state": 0, "vocabulary": 96, "hidden": 64, "inner": 128, "positions": 4096}
    own = {"fixed": 1000, "head": 24, "family": "compressed-tensors", "runtime": "transformers", "method": "rtn"}
    size = [[find_format(n).bytes(64, 64) for n in weights] for _ in held]
    error = np.linalg.norm(rows["weights"]["rest"], axis=-1).tolist()
    choices = {"formats": weights, "size": size, "error": error, "cache": memory, **own, **rows["weights"]}
    cache = {"runtime": "transformers", "formats": cached, "group": 32, "kept": [dataclasses.asdict(k) for k in kept]}
    extra = {"formats": choices, "cache": {**cache, **rows["cache"], "passes": 9.0}}
    return Scores.from_values(held, {b.name: 1.0 for b in held}, estimator="rounding", extra=extra)


def buffers(context: int = 64, batch: int = 1, inner: int = 128, vocabulary: int = 96, hidden: int = 64) -> int:
    """Bytes of a forward that :func:`fit_scores` leaves: eight hidden states, gate and up, the mask, logits of one token."""
    cells = -(-context // 256) * 256
    rows = [8 * 4 * hidden + 2 * 4 * inner + 2 * cells] * min(512, batch * cells)
    return sum(rows) + batch * 4 * vocabulary


def text(samples: int = 6, length: int = 10, seed: int = 3, padded: bool = False) -> CalibrationSet:
    """Tokens of :func:`mistral`."""
    return tokens(samples, length, seed, padded, vocabulary=61)


def speaker(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model whose tokens are those of the ``tokenizer`` fixture."""
    own = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, **changes}
    return tiny(name, seed=seed, attention="sdpa", **own, **({} if name == "gpt2" else {"pad_token_id": 2}))


def factors(model, data, blocks, *, tokens, batch_size=8, **options):
    """Factors of every matrix by name, kept as tokens or as sums."""
    from layerbudget.execution.backward import feed
    from layerbudget.sensitivity.curvature.kronecker import Factors

    found = {}

    class Kept(Factors):
        def by_tokens(self, module):
            return tokens

        def settle(self, name, factors):
            found[name] = factors

    feed(model, data, blocks, Kept(model, data, blocks, **options), batch_size=batch_size)
    return found
