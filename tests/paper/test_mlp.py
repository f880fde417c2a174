"""The MLP experiment in a small size, and its direct gains against a dense solve."""

import pytest
import torch

from paper import mlp

pytest.importorskip("sklearn")

SMALL = mlp.Setting(width=12, layers=4, epochs=6, rate=1e-2, calibration=64, proxy_samples=32, steps=200)


def test_tables_have_every_cell_and_the_proxies_behave():
    result = mlp.tables(seeds=(0, 1), dampings=(1e-2, 1e4), setting=SMALL)
    assert all(a > 0.3 for a in result["accuracy"])
    # at a large damping the gain is |g|^2/tau, so the gradient norm ranks layers exactly
    assert result["tables"]["ggn"]["10000.0"]["grad_norm"]["spearman"] == pytest.approx([1.0, 0.0])
    assert result["tables"]["hessian"]["10000.0"]["grad_norm"]["kendall"] == pytest.approx([1.0, 0.0])
    text = mlp.render(result)
    assert text.count("\n") == 6 + 9 + 2 * 3
    assert "not a reproduction" in text and all(point in text for point in mlp.DIFFERENCES) and len(mlp.DIFFERENCES) == 6


def test_direct_gain_of_the_last_layer_equals_the_dense_one():
    one = mlp.one_seed(0, SMALL, (0.05, 1.0))
    fit, _ = mlp.digits(0)
    model, data = mlp.train(fit, SMALL, 0).double(), fit.select(slice(0, 64))
    x, w = data.inputs.double(), model[-1].weight
    logits = model(x)
    g = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, data.labels), w)[0].reshape(-1)
    with torch.no_grad():
        a, p = model[:-1](x), logits.softmax(-1)
        c = sum(torch.kron(torch.diag(q) - torch.outer(q, q), torch.outer(v, v)) for q, v in zip(p, a, strict=True)) / 64
        truth = float(g @ torch.linalg.solve(c + 0.05 * torch.eye(len(c)), g))
    assert one["ggn"][0][-1] == pytest.approx(truth, rel=2e-3)
