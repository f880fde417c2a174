"""Tiny models and plain dense oracles for the adapter tests."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, MistralConfig, MistralForCausalLM

from layerbudget.plan import Plan, PlanBlock


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)


def tiny_mistral(layers: int = 4, **changes) -> MistralForCausalLM:
    torch.manual_seed(1)
    config = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": None,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return MistralForCausalLM(MistralConfig(**config)).eval()


def tiny_bert(layers: int = 4, **changes) -> BertForSequenceClassification:
    torch.manual_seed(1)
    config = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2,
        **changes,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**config)).eval()


def layer_plan(model: torch.nn.Module, counts: list[int], kind: str = "experts") -> Plan:
    """A plan by hand: one block per layer, in the order of the layers."""
    from layerbudget.blocks import describe, partition

    blocks = partition(model, "layer")
    return Plan(
        kind=kind,
        rule="by-hand",
        model=describe(model),
        blocks=tuple(
            PlanBlock(name=b.name, value=float(c), count=c, numel=b.numel, modules=tuple(m.name for m in b.modules))
            for b, c in zip(blocks, counts, strict=True)
        ),
        budget={"unit": "count", "limit": sum(counts), "spent": sum(counts)},
    )


def linear_plan(model: torch.nn.Module, counts, kind: str = "ranks") -> Plan:
    """A plan by hand: one block per Linear; ``counts`` is a function of the name or a number."""
    from layerbudget.blocks import describe, partition

    blocks = partition(model, "linear")
    chosen = {b.name: counts(b.name) if callable(counts) else counts for b in blocks}
    return Plan(
        kind=kind,
        rule="by-hand",
        model=describe(model),
        blocks=tuple(
            PlanBlock(name=b.name, value=float(chosen[b.name]), count=chosen[b.name], numel=b.numel, modules=(b.name,))
            for b in blocks
        ),
        budget={"unit": "count", "limit": sum(chosen.values()), "spent": sum(chosen.values())},
    )


def perturb(model: torch.nn.Module, needle: str = "lora_", scale: float = 0.3, seed: int = 5) -> None:
    """Move adapters away from their zero start, the same way for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if needle in name:
                parameter.copy_(
                    scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
                )


def token_by_token(x, a, b, router, rank, top_k, scale):
    """The definition, one token and one chosen expert at a time (the oracle of all three forms)."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        p = torch.softmax(router @ token, 0)
        best = torch.topk(p, min(top_k, len(p))).indices.tolist()
        total = sum(p[e] for e in best)
        y = torch.zeros(b.shape[0], dtype=x.dtype)
        for e in best:
            part = slice(e * rank, (e + 1) * rank)
            y = y + p[e] / total * scale * (b[:, part] @ (a[part] @ token))
        rows.append(y)
    return torch.stack(rows).reshape(*x.shape[:-1], b.shape[0])


@pytest.fixture
def make():
    """The helpers above, by name (tests have no package to import them from)."""

    class Helpers:
        mistral = staticmethod(tiny_mistral)
        bert = staticmethod(tiny_bert)
        layers = staticmethod(layer_plan)
        linears = staticmethod(linear_plan)
        perturb = staticmethod(perturb)
        oracle = staticmethod(token_by_token)

    return Helpers
