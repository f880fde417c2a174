"""On an accelerator: the numbers of the processor, streamed and whole. Skipped where there is none."""

import dataclasses

import numpy as np
import pytest
import torch
from tests import zoo
from tests.execution.test_backward import ESTIMATORS, numbers

from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.cache.plan import plan_cache
from layerbudget.decisions.expert_pruning.plan import plan_expert_pruning
from layerbudget.decisions.memory.plan import plan_memory
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model
from layerbudget.sensitivity.gain import score

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ("llama-tied", "gemma2", "gpt2"))
def test_scores_are_those_of_the_processor(name):
    model, data = zoo.build(name), zoo.tokens(padded=True)
    blocks = partition(model, "layer")
    here = {label: numbers(score(model, data, blocks, label.split()[0], **o)) for label, o in ESTIMATORS.items()}
    model = model.to("cuda")
    for label, options in ESTIMATORS.items():
        for walk in ("whole", "layers"):
            there = numbers(score(model, data, blocks, label.split()[0], walk=walk, **options))
            assert np.allclose(here[label], there, rtol=1e-2, atol=1e-3 * np.nanmax(np.abs(here[label])), equal_nan=True), label


def test_streaming_to_the_device(tmp_path):
    zoo.build("mistral").save_pretrained(tmp_path, max_shard_size="20KB")
    here = load_model(str(tmp_path))
    data, blocks = zoo.tokens(), partition(here, "layer")
    plan = plan_sparsity(score(here, data, blocks, "fisher-trace"), sparsity=0.5)
    plan = dataclasses.replace(plan, model={})
    there = load_model(str(tmp_path), stream=True, device="cuda")
    assert perplexity(there, data).value == pytest.approx(perplexity(here, data).value, rel=1e-4)
    for method in ("magnitude", "wanda", "sparsegpt"):
        a, b = (load_model(str(tmp_path), **o) for o in ({}, {"stream": True, "device": "cuda"}))
        for model in (a, b):
            prune(model, plan, None if method == "magnitude" else data, method)
        wrong = sum(int(((p == 0) != (q.cpu() == 0)).sum()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
        assert wrong <= 0.02 * sum(p.numel() for p in a.parameters()), method


WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32, for caches of llama.cpp
PLANS = {
    "bits, rtn": ("llama", lambda m, d, c: plan_bits(m, d, c, bits=6.0, family="gguf", draws=2)),
    "bits, weighted": ("llama", lambda m, d, c: plan_bits(m, d, c, bits=6.0, family="gguf", method="weighted", draws=2)),
    "bits, gptq": ("llama", lambda m, d, c: plan_bits(m, d, c, bits=6.0, family="gguf", method="gptq", draws=2)),
    "bits, packed": ("llama", lambda m, d, c: plan_bits(m, d, c, bits=9.0, runtime="vllm", group=32, draws=2)),
    "bits, packed, gptq": (
        "llama",
        lambda m, d, c: plan_bits(m, d, c, bits=9.0, runtime="vllm", method="gptq", draws=2),
    ),
    "cache": ("llama", lambda m, d, c: plan_cache(m, d, c, context=24, bits=6.0, draws=2)),
    "cache of llama.cpp": ("llama", lambda m, d, c: plan_cache(m, d, c, context=24, bits=9.0, runtime="llama.cpp", draws=2)),
    "memory": ("llama", lambda m, d, c: plan_memory(m, d, c, memory="860 KB", context=32, draws=2)),
    "shapes": ("llama", lambda m, d, c: plan_shapes(m, d, "20% flops", multiple=4, passes=20.0, strides=1, draws=1)),
    "expert pruning": ("qwen3-moe", lambda m, d, c: plan_expert_pruning(m, d, 0.5, draws=2)),
    "sparsity": ("llama", lambda m, d, c: plan_sparsity(m, d, sparsity=0.5)),
}


def damages(stored, inside=False):
    """All numbers of a plan that are damages, in the order of its JSON."""
    if isinstance(stored, dict):
        return [n for key, value in sorted(stored.items()) for n in damages(value, inside or "damage" in key or "kl" in key)]
    if isinstance(stored, (list, tuple)):
        return [n for value in stored for n in damages(value, inside)]
    return [float(stored)] if inside and isinstance(stored, float) else []


@pytest.mark.parametrize("what", PLANS)
def test_plans_are_those_of_the_processor(what):
    """The same decision, and damages that differ by what other sums of the same numbers explain."""
    name, make = PLANS[what]
    own = WIDE if name == "llama" else {}
    data, check = zoo.tokens(4, 16), zoo.tokens(3, 16, seed=7)
    here, there = (make(zoo.build(name, **own).to(device), data, check) for device in ("cpu", "cuda"))
    assert here.budget["spent"] == pytest.approx(there.budget["spent"], rel=0.02)
    a, b = (np.array([*plan.values, *damages(plan.to_dict())]) for plan in (here, there))
    assert np.allclose(a, b, rtol=0.05, atol=1e-3 * abs(a).max())
