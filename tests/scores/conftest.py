"""Tiny models and the plainest dense versions of everything that scores compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from layerbudget import blocks as B
from layerbudget.data.calibration import CalibrationSet
from layerbudget.running import loss as L

VOCAB = 37


_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "attn_implementation": "eager",
}  # fmt: skip


def _mistral():
    from transformers import MistralConfig, MistralForCausalLM

    own = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": None}
    return MistralForCausalLM(MistralConfig(**{**_SIZES, **own, "tie_word_embeddings": True}))


def _gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**_SIZES, num_key_value_heads=1, head_dim=8))


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_implementation="eager")
    )


def _bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_SIZES, num_labels=3))


def _bert_mlm():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    own = {"intermediate_size": 12, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**_SIZES, **own}, experts_implementation="eager"))


def _mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))


FACTORIES = {
    "mistral": _mistral, "gemma": _gemma, "gpt2": _gpt2, "bert": _bert, "bert-mlm": _bert_mlm, "mixtral": _mixtral, "mlp": _mlp,
}  # fmt: skip


def build_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = FACTORIES[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.15 if p.ndim > 1 else 0.05))
    return model.to(dtype).eval()


def build_data(name: str, samples: int = 6, length: int = 9, *, padded: bool = True):
    g = torch.Generator().manual_seed(1)
    if name == "mlp":
        return L.FeatureSet(
            inputs=torch.randn(samples, 6, generator=g, dtype=torch.float64),
            labels=torch.randint(0, 5, (samples,), generator=g),
        )
    ids = torch.randint(3, VOCAB, (samples, length), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        for i in range(samples):
            mask[i, length - i % 4 :] = 0
        ids = torch.where(mask.bool(), ids, 0)
    labels = None
    if name == "bert":
        labels = torch.randint(0, 3, (samples,), generator=g)
    data = CalibrationSet(input_ids=ids, attention_mask=mask if padded else None, labels=labels)
    return L.mask_tokens(data, 1, fraction=0.4) if name == "bert-mlm" else data


def partition(model: nn.Module, name: str):
    return B.partition(model, by="linear" if name == "mlp" else "layer")


def dense_rows(model: nn.Module, data, blocks, targets=None):
    """Per block: ``(n, p)`` gradients of the summed sequence loss, one sequence at a time, by plain autograd."""
    parameters = [[B.weight_of(model, m.name)[1] for m in b.modules] for b in blocks]
    out = [[] for _ in blocks]
    for i, batch in enumerate(L.batches(model, data, 1)):
        wanted = batch.targets if targets is None else targets[i : i + 1]
        loss = L.summed_loss(L.logits_of(model, batch), wanted)
        grads = torch.autograd.grad(loss, [p for group in parameters for p in group], allow_unused=True)
        grads = iter(grads)
        for k, group in enumerate(parameters):
            parts = [next(grads) for _ in group]
            out[k].append(
                torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(parts, group, strict=True)])
            )
    return [torch.stack(rows).double() for rows in out]


def dense_gain(g: torch.Tensor, c: torch.Tensor, tau: float) -> float:
    """``g'(C + tau I)^-1 g`` by a dense solve."""
    return float(g @ torch.linalg.solve(c + tau * torch.eye(len(g), dtype=c.dtype), g))


@pytest.fixture(scope="session")
def zoo():
    """The factories and oracles above, for tests."""
    import types

    return types.SimpleNamespace(
        model=build_model, data=build_data, partition=partition, rows=dense_rows, gain=dense_gain, names=tuple(FACTORIES),
        relative=lambda a, b: float(np.max(np.abs(np.asarray(a) - np.asarray(b)) / np.maximum(np.abs(np.asarray(b)), 1e-300))),
    )  # fmt: skip
