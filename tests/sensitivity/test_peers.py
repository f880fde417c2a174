"""Agreement with independent libraries, where they are installed (never needed at run time)."""

import pytest
import torch
from tests import zoo

from layerbudget.execution import loss as L
from layerbudget.sensitivity.curvature.exact import BlockProducts
from layerbudget.sensitivity.gain import score


def test_ekfac_equals_kronfluence(tmp_path):
    """Per-module ``g'(EK-FAC + tau)^-1 g``, empirical labels on both sides, to 1e-5."""
    pytest.importorskip("kronfluence")
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    model, data = zoo.dense("mistral", torch.float32), zoo.labelled("mistral", samples=8, length=12, padded=False)
    blocks, n = zoo.partition(model, "mistral"), 8
    tokens = L.token_count(model, data)
    tau = 1e-3
    ours = score(model, data, blocks, "ekfac", labels="data", damping=tau, damping_unit="absolute", batch_size=4).extra[
        "by_module"
    ]

    class Whole(Task):
        def compute_train_loss(self, batch, model, sample=False):
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
            return torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), batch["input_ids"][:, 1:].reshape(-1), reduction="sum"
            )

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self):
            return list(ours)

    task = Whole()
    rows = [{"input_ids": row} for row in data.input_ids]
    analyzer = Analyzer("peer", prepare_model(model, task), task, cpu=True, disable_tqdm=True, output_dir=str(tmp_path))
    factors = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    analyzer.fit_all_factors("f", rows, per_device_batch_size=4, factor_args=factors)
    arguments = ScoreArguments(
        damping_factor=tau * tokens / n, aggregate_query_gradients=True, aggregate_train_gradients=True,
        compute_per_module_scores=True,
    )  # fmt: skip
    analyzer.compute_pairwise_scores(
        "s", "f", query_dataset=rows, train_dataset=rows, per_device_query_batch_size=4, per_device_train_batch_size=4,
        score_args=arguments,
    )  # fmt: skip
    theirs = analyzer.load_pairwise_scores("s")
    worst = max(abs(float(theirs[name]) / (n * tokens) / value[0] - 1) for name, value in ours.items())
    assert worst < 1e-5, worst


@pytest.mark.parametrize("index", (0, 2))
def test_ggn_products_equal_curvlinops(index):
    curvlinops = pytest.importorskip("curvlinops")
    model, data = zoo.dense("mistral"), zoo.labelled("mistral", samples=3, length=7, padded=False)
    block = zoo.partition(model, "mistral")[index]
    v = torch.randn(block.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with BlockProducts(model, data, block, 3) as p:
        ours = p.ggn(v)
    for q in model.parameters():
        q.requires_grad_(True)
    parameters = [model.get_parameter(m.name + ".weight") for m in block.modules]

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids):
            return self.inner(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).double()

    x = data.input_ids
    operator = curvlinops.GGNLinearOperator(
        Logits(), torch.nn.CrossEntropyLoss(reduction="mean"), parameters, [(x, x[:, 1:].flatten())], check_deterministic=False
    )
    theirs = operator @ v
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7 * float(theirs.abs().max()))
