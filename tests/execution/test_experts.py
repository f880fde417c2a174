"""Experts and routers of every layout: shapes, gradients and inputs against the model's own modules."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests import zoo
from torch import nn

from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.directional import plan_by_damage
from layerbudget.errors import CoverageError
from layerbudget.execution.backward import Accumulator, feed
from layerbudget.execution.inputs import InputStatistics
from layerbudget.execution.modes import inference
from layerbudget.models.blocks import partition, transposed, weight_of
from layerbudget.sensitivity.ablation import _without
from layerbudget.sensitivity.gain import score

EXPERTS = {"mixtral": 2, "phimoe": 2, "gpt-oss": 2, "llama4": 1, "nemotron-h": 2}


@pytest.mark.parametrize("name", EXPERTS)
def test_shapes_of_experts_are_inputs_and_outputs_and_what_one_token_passes(name):
    model = zoo.tiny(name)
    experts = [m for b in partition(model) for m in b.modules if m.copies > 1]
    assert experts and {m.copies for m in experts} == {4} and {m.active for m in experts} == {EXPERTS[name]}
    for m in experts:  # 32 is the width of the residual stream
        assert (m.d_out if m.name.endswith("down_proj") else m.d_in) == 32, m
        owner, parameter = weight_of(model, m.name)
        assert tuple(parameter.shape[1:]) == ((m.d_in, m.d_out) if transposed(owner) else (m.d_out, m.d_in))


class _Gradients(Accumulator):
    """Summed weight gradients, as they are handed over."""

    def __init__(self):
        self.sums = {}

    def update(self, site):
        for name, b in site.b.items():
            self.direct(name, (b.mT @ site.a).sum(0))

    def direct(self, name, gradient):
        self.sums[name] = self.sums.get(name, 0.0) + gradient


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("walk", ["whole", "layers"])
def test_gradients_of_experts_and_routers_are_those_of_autograd(name, walk):
    model, data = zoo.build(name, experts_implementation="eager").double(), zoo.tokens(3, 12)
    blocks, found = partition(model, "linear"), _Gradients()
    feed(model, data, blocks, found, walk=walk)
    rows = zoo.rows(model, data, blocks)
    for block, expected in zip(blocks, rows, strict=True):
        (m,) = block.modules
        owner, parameter = weight_of(model, m.name)
        wanted = expected.sum(0).reshape(parameter.shape)
        wanted = wanted.mT if transposed(owner) else wanted
        assert found.sums[m.name].shape == wanted.shape, m.name
        torch.testing.assert_close(found.sums[m.name].double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max() + 1e-9))


def _gated(owner, y, width):
    """What the second matrix of an expert reads, from the product of the first."""
    if y.shape[1] == width:
        return owner.act_fn(y)
    if hasattr(owner, "_apply_gate"):
        return owner._apply_gate(y)
    gate, up = y.chunk(2, -1)
    return owner.act_fn(gate) * up


@pytest.mark.parametrize("name", EXPERTS)
def test_inputs_of_experts_explain_their_output(name):
    """Energy of the outputs of every expert's first matrix, from the Gram matrix of its inputs, is that of the model's own."""
    model, data = zoo.build(name), zoo.tokens(3, 12)
    block = next(b for b in partition(model) if any(m.copies > 1 for m in b.modules))
    modules = [m for m in block.modules if m.copies > 1]
    owner, last = weight_of(model, modules[0].name)[0], next(m for m in modules if m.name.endswith("down_proj"))
    statistics, inner = InputStatistics(model, modules, "gram"), {}

    def look(_, arguments, keywords):
        inner["x"] = [*arguments, *keywords.values()]

    handle = owner.register_forward_pre_hook(look, with_kwargs=True)
    with inference(model), statistics.listening(None):
        model(**next(data.batches(3)))
    handle.remove()
    given = inner["x"]
    tokens = given[0].reshape(-1, given[0].shape[-1])
    flip = transposed(owner)
    for m in modules:
        _, parameter = weight_of(model, m.name)
        for e, statistic in enumerate(statistics.found[m.name]):
            mine = tokens.view(4, -1, 32)[e] if len(given) == 1 else tokens[(given[1] == e).any(-1)]
            mine = mine[mine.any(-1)]
            if m is last:
                first = next(weight_of(model, o.name)[1] for o in modules if o is not last)[e]
                bias = getattr(owner, "gate_up_proj_bias", None)
                y = mine @ (first if flip else first.T) + (0 if bias is None else bias[e])
                mine = _gated(owner, y, m.d_in)
            assert statistic.rows == len(mine)
            if len(mine):
                upper = statistic.value
                gram = upper.triu() + upper.triu(1).T
                weight = parameter[e] if flip else parameter[e].T
                torch.testing.assert_close(
                    (mine @ weight).square().sum(), torch.trace(weight.T @ gram @ weight), rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("name", ["llama4", "phimoe"])
def test_a_router_is_silenced_as_if_it_had_no_input(name):
    model, data = zoo.build(name), zoo.tokens(2, 8)
    (router,) = [
        b for b in partition(model, "linear") if b.name.endswith("1.feed_forward.router") or b.name.endswith("1.mlp.router")
    ]
    with inference(model):
        with _without(model, router):
            silenced = model(**next(data.batches(2))).logits
        weight_of(model, router.name)[1].zero_()
        torch.testing.assert_close(silenced, model(**next(data.batches(2))).logits)


class _Other(nn.Linear):
    """Returns something else in the place of its product."""

    def forward(self, x):
        return (super().forward(x) * 2, None)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(6, 6), _Other(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.other(self.first(x))[0])


def test_a_matrix_that_hides_its_product_is_refused_and_the_remedy_works():
    from layerbudget.execution.loss import FeatureSet

    model, data = _Net(), FeatureSet(inputs=torch.randn(4, 6), labels=torch.tensor([0, 1, 2, 0]))
    with pytest.raises(CoverageError, match=r"does not return its product.*--exclude 'other\$'"):
        score(model, data, partition(model, "linear"))
    assert len(score(model, data, partition(model, "linear", exclude="other$")).names) == 2


@pytest.mark.parametrize("estimator", ["kfac", "rank-gain", "adapter"])
def test_estimators_that_know_linears_refuse_experts_before_a_forward_and_the_remedy_works(estimator):
    model, data = zoo.tiny("gpt-oss"), zoo.tokens(4, 8)
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran before the refusal"))
    with pytest.raises(CoverageError, match=r"--exclude 'experts\[.\]'"):
        score(model, data, partition(model, "linear"), estimator)
    handle.remove()
    assert score(model, data, partition(model, "linear", exclude="experts[.]"), estimator).names


def test_experts_of_another_layout_are_refused_before_a_forward_and_the_remedy_works():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_key_value_heads": 2}
    config = transformers.JetMoeConfig(**sizes, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)
    model, data = transformers.JetMoeForCausalLM(config).eval(), zoo.tokens(4, 8)
    plan = zoo.plan(model)
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran before the refusal"))
    with pytest.raises(CoverageError, match=r"inputs are not known.*--method magnitude without --data"):
        prune(model, plan, data, method="wanda")
    with pytest.raises(CoverageError, match=r"inputs are not known.*Use --method magnitude, which reads no inputs"):
        plan_by_damage(model, data, sparsity=0.5, passes=8)
    handle.remove()
    receipt = prune(model, plan, method="magnitude")
    assert receipt.sparsity == pytest.approx(receipt.planned, abs=0.01) and receipt.planned > 0.2
