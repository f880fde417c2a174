"""On an accelerator: the numbers of the processor, streamed and whole. Skipped where there is none."""

import dataclasses

import numpy as np
import pytest
import torch
from tests import zoo
from tests.execution.test_backward import ESTIMATORS, numbers

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
