"""K-FAC, EK-FAC, sampled labels and adapter space against plain loops."""

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.errors import CoverageError, InvalidInput
from layerbudget.execution import loss as L
from layerbudget.models.blocks import is_conv1d, partition, weight_of
from layerbudget.sensitivity import adapter_space
from layerbudget.sensitivity.gain import score

NAMES = ("mlp", "mistral", "gemma", "gpt2", "bert")


def sampled(model, data, seed=1):
    parts = [L.sampled_targets(L.logits_of(model, b).detach(), b, seed) for b in L.batches(model, data, 1)]
    return torch.cat(parts)


def plain_factors(model, data, names, targets):
    """A and G of every matrix by saving inputs and output gradients of one sequence at a time."""
    a, g, positions = {}, {}, 0.0
    for i, batch in enumerate(L.batches(model, data, 1)):
        seen, handles = {}, []
        for name in names:
            owner, _ = weight_of(model, name)

            def hook(module, x, y, name=name, seen=seen):
                y.retain_grad()
                seen[name] = (x[0].detach(), y)

            handles.append(owner.register_forward_hook(hook))
        L.summed_loss(L.logits_of(model, batch), targets[i : i + 1]).backward()
        [h.remove() for h in handles]
        mask = batch.kwargs.get("attention_mask")
        for name, (x, y) in seen.items():
            x, b = x.reshape(-1, x.shape[-1]), y.grad.reshape(-1, y.shape[-1])
            keep = mask.reshape(-1).bool() if mask is not None else torch.ones(len(x), dtype=torch.bool)
            a[name] = a.get(name, 0) + x[keep].T @ x[keep]
            g[name] = g.get(name, 0) + b.T @ b
        positions += float(keep.sum())
    n = L.token_count(model, data)
    return {k: v / positions for k, v in a.items()}, {k: v / n for k, v in g.items()}


def matrices(model, data, block, targets=None):
    """Per-sequence gradients ``(n, d_out, d_in)`` of every matrix of a block."""
    rows, offset, out = zoo.rows(model, data, [block], targets)[0], 0, {}
    for m in block.modules:
        part = rows[:, offset : offset + m.numel]
        offset += m.numel
        turned = is_conv1d(weight_of(model, m.name)[0])
        out[m.name] = part.reshape(-1, m.d_in, m.d_out).transpose(1, 2) if turned else part.reshape(-1, m.d_out, m.d_in)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("corrected", (False, True))
def test_gain_equals_the_dense_kronecker_solve(name, corrected):
    model, data = zoo.dense(name), zoo.labelled(name)
    block = zoo.partition(model, name)[1]
    targets, n = sampled(model, data), L.token_count(model, data)
    scores = score(model, data, [block], "ekfac" if corrected else "kfac", batch_size=4, damping=[0.01, 0.5])
    a, g = plain_factors(model, data, [m.name for m in block.modules], targets)
    true, drawn = matrices(model, data, block), matrices(model, data, block, targets)
    for i in range(2):
        tau, total = scores.extra["absolute_damping"][i][0], 0.0
        for m in block.modules:
            gradient = true[m.name].sum(0) / n
            if corrected:
                (_, qa), (_, qg) = torch.linalg.eigh(a[m.name]), torch.linalg.eigh(g[m.name])
                second = (qg.T @ drawn[m.name] @ qa).square().sum(0) / n
                gain = float(((qg.T @ gradient @ qa) ** 2 / (second + tau)).sum())
            else:
                gain = zoo.gain(gradient.reshape(-1), torch.kron(g[m.name], a[m.name]).double(), tau)
            assert scores.extra["by_module"][m.name][i] == pytest.approx(gain, rel=1e-6)
            total += gain
        assert scores.gain[i][0] == pytest.approx(total, rel=1e-6)
        assert scores.noise_floor[i][0] > 0 and scores.standard_error[i][0] > 0


def test_sampled_label_fisher_has_the_trace_of_the_ggn():
    """Traces of the Fisher with sampled labels and of the GGN agree within the error of the draws: the scale is right."""
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks, n = zoo.partition(model, "mistral")[:1], L.token_count(model, data)
    traces = np.array([float(zoo.rows(model, data, blocks, sampled(model, data, s))[0].square().sum()) / n for s in range(30)])
    logits_trace = 0.0
    parameters = [weight_of(model, m.name)[1] for m in blocks[0].modules]
    for batch in L.batches(model, data, 1):
        logits = L.logits_of(model, batch)[0]
        for t in (batch.targets[0] != L.IGNORE).nonzero()[:, 0]:
            p = logits[t].softmax(-1).detach()
            for c in range(len(p)):  # E_y |J'(p - e_y)|^2 = sum_c p_c |J'(p - e_c)|^2
                if p[c] > 1e-5:
                    v = p.clone()
                    v[c] -= 1
                    grads = torch.autograd.grad(logits[t], parameters, v, retain_graph=True)
                    logits_trace += float(p[c] * sum(x.square().sum() for x in grads)) / n
    error = traces.std(ddof=1) / len(traces) ** 0.5
    assert abs(traces.mean() - logits_trace) < 3 * error
    assert abs(traces.mean() / logits_trace - 1) < 0.1
    mc = score(model, data, blocks, "fisher-mc", draws=4)
    assert mc.extra["trace"][0] == pytest.approx(logits_trace, rel=0.25)


def test_monte_carlo_gain_equals_the_dense_solve():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks, n = zoo.partition(model, "mistral")[:2], L.token_count(model, data)
    scores = score(model, data, blocks, "fisher-mc", draws=2, damping=[0.05])
    true = zoo.rows(model, data, blocks)
    drawn = [zoo.rows(model, data, blocks, sampled(model, data, s)) for s in (1, 2)]
    for k in range(2):
        rows = torch.cat([d[k] for d in drawn])
        truth = zoo.gain(true[k].sum(0) / n, rows.T @ rows / (2 * n), scores.extra["absolute_damping"][0][k])
        assert scores.gain[0][k] == pytest.approx(truth, rel=1e-5)


def test_fused_experts_are_refused_by_name():
    model, data = zoo.dense("mixtral"), zoo.labelled("mixtral")
    with pytest.raises(CoverageError, match="experts"):
        score(model, data, zoo.partition(model, "mixtral"), "kfac")


def test_floor_is_zero_when_all_groups_agree():
    data = zoo.labelled("mlp", samples=2)
    same = data.select([0, 0, 0, 0])
    model = zoo.dense("mlp")
    scores = score(model, same, zoo.partition(model, "mlp"), "kfac", batch_size=1)
    assert np.max(scores.noise_floor) < 1e-16 * np.max(scores.gain)  # rounding
    assert np.max(scores.standard_error) < 1e-10 * np.max(scores.gain) and np.min(scores.gain) > 0


def test_factors_share_inputs():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    built = zoo.factors(model, data, zoo.partition(model, "mistral"), tokens=False)
    layer = "model.layers.0"
    assert built[f"{layer}.self_attn.q_proj"].a is built[f"{layer}.self_attn.v_proj"].a
    assert built[f"{layer}.mlp.gate_proj"].cache is built[f"{layer}.mlp.up_proj"].cache


@pytest.mark.parametrize("name", ("mistral", "gpt2"))
def test_adapter_gain_is_the_gain_of_b_in_a_model_with_adapters(name):
    model, data = zoo.dense(name), zoo.labelled(name)
    block, rank = zoo.partition(model, name)[1], 3
    scores = score(model, data, [block], "adapter", rank=rank, damping=[0.1], seed=5)
    b, handles = [], []
    for m in block.modules:  # a real adapter: y + B A x with B = 0
        a = adapter_space.start_matrix(m.name, m.d_in, rank, 5)
        b.append(torch.zeros(m.d_out, rank, dtype=torch.float64, requires_grad=True))
        hook = lambda mod, x, y, a=a, b=b[-1]: y + x[0] @ a.T @ b.T  # noqa: E731
        handles.append(weight_of(model, m.name)[0].register_forward_hook(hook))
    rows = []
    for batch in L.batches(model, data, 1):
        grads = torch.autograd.grad(L.summed_loss(L.logits_of(model, batch), batch.targets), b)
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    [h.remove() for h in handles]
    s, n = torch.stack(rows), L.token_count(model, data)
    truth = zoo.gain(s.sum(0) / n, s.T @ s / n, scores.extra["absolute_damping"][0][0])
    assert scores.gain[0][0] == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("name", ("mistral", "gpt2", "bert"))
def test_accumulated_gradients_are_those_of_autograd(name):
    model, data = zoo.dense(name), zoo.labelled(name)
    block = zoo.partition(model, name)[0]
    got = adapter_space.accumulated_gradients(model, data, [m.name for m in block.modules], batch_size=4)
    truth, n = matrices(model, data, block), L.token_count(model, data)
    for m in block.modules:
        assert torch.allclose(got[m.name], truth[m.name].sum(0) / n, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("estimator", ["adapter", "fisher-gram", "fisher-diagonal", "kfac"])
def test_median_damping_is_one_damping_for_all_blocks(estimator):
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks = zoo.partition(model, "mistral")
    relative = score(model, data, blocks, estimator, damping=[1.0], damping_unit="median")
    tau = float(np.median(relative.extra["largest_eigenvalue"]))
    assert np.allclose(relative.extra["absolute_damping"][0], tau, rtol=1e-12)
    absolute = score(model, data, blocks, estimator, damping=[tau], damping_unit="absolute")
    assert np.allclose(relative.values(), absolute.values(), rtol=1e-9)


@pytest.mark.parametrize("unit", ["max", "median"])
def test_a_matrix_whose_output_nothing_reads_is_named(unit):
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    mlp, width = model.model.layers[1].mlp, model.config.hidden_size
    mlp.spare_proj, whole = torch.nn.Linear(width, width).to(next(model.parameters())), mlp.forward
    mlp.forward = lambda x: (mlp.spare_proj(x), whole(x))[1]
    with pytest.raises(CoverageError, match=r"No gradient reached 1 weight matrices, first model\.layers\.1\.mlp\.spare_proj"):
        score(model, data, partition(model), "kfac", damping_unit=unit)


def test_adapter_gains_take_one_damping_unless_told_otherwise():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks = zoo.partition(model, "mistral")
    default = score(model, data, blocks, "adapter")
    assert default.damping_unit == "median" and default.damping[default.index(None)] == 1.0
    assert score(model, data, blocks, "adapter", damping_unit="max").damping_unit == "max"
    assert score(model, data, blocks).damping_unit == "max"
    with pytest.raises(InvalidInput, match="other blocks"):
        score(model, data, blocks, "ggn", damping_unit="median")
