"""Removed heads, MLP units and layers: the smaller model computes what the whole one does without them, and loads again."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import transformers
from tests import zoo

from layerbudget.decisions.shapes.apply import drop_layers, remove_units
from layerbudget.decisions.shapes.layouts import channels, find_attention
from layerbudget.decisions.shapes.save import check_exportable, save_smaller, undescribed
from layerbudget.decisions.shapes.units import find_parts, group_cost, removal_order, stays
from layerbudget.errors import InfeasibleBudget, InvalidInput, UnknownBlock, UnknownStructure
from layerbudget.models.blocks import is_conv1d, layers

EXPLICIT = ["llama", "phi3", "mistral-sliding", "gemma", "gemma2", "gemma3", "qwen2", "qwen3", "starcoder2", "mixtral"]
DERIVED = ["opt", "gpt2", "gpt-neox", "bert", "roberta-classifier"]

XGLM = {"vocab_size": 97, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4, "max_position_embeddings": 64}
BESIDE = {  # configurations whose attention splits and joins heads in a way of its own
    "xglm": ("XGLMConfig", XGLM),
    "bigcode": ("GPTBigCodeConfig", zoo.GPT2),
    "bigcode-heads": ("GPTBigCodeConfig", {**zoo.GPT2, "multi_query": False}),
}


def beside(name):
    """A random model of one of them."""
    kind, sizes = BESIDE[name]
    config = getattr(transformers, kind)(**sizes, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.2)
    return model


def attentions(model):
    return [find_attention(layer, name) for name, layer in layers(model)]


def masked_logits(model, kept, batch):
    """The whole model with the contributions of the other heads set to zero in front of the output projection."""
    hooks = []
    for a, heads in kept:
        mask = torch.zeros(a.heads * a.head_dim)
        mask[channels(torch.as_tensor(heads), a.head_dim)] = 1

        def hook(module, arguments, mask=mask):
            return (arguments[0] * mask,)

        hooks.append(model.get_submodule(a.consumer).register_forward_pre_hook(hook))
    with torch.no_grad():
        logits = model(**batch).logits
    for h in hooks:
        h.remove()
    return logits


def output_weight(model, attention):
    module = model.get_submodule(attention.consumer)
    return module.weight.data.T if is_conv1d(module) else module.weight.data


@pytest.mark.parametrize("name", [*EXPLICIT, *DERIVED, *BESIDE])
def test_removed_heads_equal_masked_heads(name):
    """Different heads in every layer: a whole group, a query head of each group, nothing."""
    model = beside(name) if name in BESIDE else zoo.build(name)
    batch = next(zoo.tokens(padded=True).batches(6))
    grouped = attentions(model)[0].per_group == 2
    wanted = [[2, 3], [0, 3] if grouped else [0, 2, 3], [0, 1, 2, 3]]
    kept = list(zip(attentions(model), wanted, strict=True))
    expected = masked_logits(model, kept, batch)
    for a, heads in kept:
        new = a.cut(model, torch.tensor(heads))
        assert (new.heads, new.head_dim) == (len(heads), a.head_dim)
    found = attentions(model)
    assert [a.heads for a in found] == [len(h) for h in wanted]
    assert [a.groups for a in found] == [len({h // a.per_group for h in heads}) for a, heads in kept]
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "gemma"])
def test_removing_nothing_changes_nothing(name):
    model, data = zoo.build(name), zoo.tokens()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = model.config.to_dict()
    assert set(remove_units(model, data, 0.0).values()) == {4}
    assert model.config.to_dict() == config
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_heads_that_nobody_reads_go_without_any_change(name):
    model, data = zoo.build(name), zoo.tokens()
    batch = next(data.batches(len(data)))
    for layer, a in enumerate(attentions(model)):
        idle = torch.arange(a.per_group) + a.per_group * (layer % a.groups)
        with torch.no_grad():
            output_weight(model, a)[:, channels(idle, a.head_dim)] = 0
    with torch.no_grad():
        before = model(**batch).logits
    by_groups = 0.5 if attentions(model)[0].groups == 2 else 0.25
    left = remove_units(model, data, by_groups, by="groups")
    assert set(left.values()) == {2 if by_groups == 0.5 else 3}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-5, atol=1e-5)


def test_refit_is_the_least_squares_optimum_and_copies_cost_nothing():
    """One of two query heads that repeat each other can go: the other one takes over."""
    model, data = zoo.build("llama"), zoo.tokens(samples=12)
    batch = next(data.batches(len(data)))
    for a in attentions(model):
        q = model.get_submodule(a.producers[0]).weight.data
        q[8:16], q[24:32] = q[:8], q[16:24]
    with torch.no_grad():
        before = model(**batch).logits
    assert set(remove_units(model, data, 0.5, by="queries", damping=1e-7).values()) == {2}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-3, atol=1e-3)


def test_the_cost_of_a_head_is_the_change_of_the_output():
    a = dataclasses.replace(attentions(zoo.build("opt"))[0], heads=4, groups=4, head_dim=3)
    torch.manual_seed(1)
    x, w = torch.randn(200, 12).double() @ torch.randn(12, 12).double(), torch.randn(5, 12).double()
    h, costs = x.T @ x, []
    for g in torch.arange(12).split(3):
        rest = torch.tensor([j for j in range(12) if j not in g.tolist()])
        best = torch.linalg.lstsq(x[:, rest], x @ w.T).solution
        costs.append((x @ w.T - x[:, rest] @ best).square().sum())
        torch.testing.assert_close(group_cost(w, torch.linalg.inv(h), g), costs[-1])
    worst = int(torch.stack(costs).argmin())
    assert stays(a, w, h, [1], "groups")[1].tolist() == [i for i in range(4) if i != worst]


def test_channels_go_in_the_order_of_costs_that_are_solved_afresh_after_every_removal():
    torch.manual_seed(2)
    x, w = torch.randn(300, 150).double() @ torch.randn(150, 150).double(), torch.randn(7, 150).double()
    h, left = x.T @ x, list(range(150))
    order = removal_order(w, h, 140).tolist()
    for gone in order:
        inverse, cross = torch.linalg.inv(h[left][:, left]), w @ h[:, left]
        costs = (cross @ inverse).square().sum(0) / inverse.diagonal()
        assert left[int(costs.argmin())] == gone
        left.remove(gone)
    assert len(order) == 140


@pytest.mark.parametrize(("name", "by"), [*((n, "groups") for n in EXPLICIT), ("llama", "queries"), ("phi3", "queries")])
def test_fewer_heads_and_narrower_mlps_load_in_plain_transformers(name, by, tmp_path):
    model, data = zoo.build(name), zoo.tokens(samples=12)
    assert set(remove_units(model, data, 0.5, by=by).values()) == {2}
    if name != "mixtral":
        assert len(set(remove_units(model, data, 0.25, kind="mlp", multiple=4).values())) == 1
    batch = next(data.batches(2))
    save_smaller(model, None, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    config = loaded.config
    assert (config.num_attention_heads, config.num_key_value_heads) == ((2, 1) if by == "groups" else (2, 2))
    assert loaded.get_submodule(attentions(loaded)[0].consumer).in_features == 16
    fast = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        wanted = model(**batch).logits
        torch.testing.assert_close(loaded(**batch).logits, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fast(**batch).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DERIVED)
def test_families_that_derive_the_head_size_are_not_exported_and_the_reason_is_said(name, tmp_path):
    model, data = zoo.build(name), zoo.tokens()
    assert not undescribed(model, *attentions(model)[:1] * 2)
    remove_units(model, data, 0.5)
    with torch.no_grad():
        assert torch.isfinite(model(**next(data.batches(2))).logits).all()
    with pytest.raises(UnknownStructure, match="hidden_size / num_attention_heads.*works in memory.*Remove MLP units"):
        save_smaller(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["olmo2", "opt", "gpt2", "gpt-neox", "bert"])
def test_narrower_mlps_load_where_heads_cannot_go(name, tmp_path):
    model, data = zoo.build(name), zoo.tokens(samples=12)
    widths = remove_units(model, data, 0.25, kind="mlp", multiple=4)
    assert len(set(widths.values())) == 1
    batch = next(data.batches(2))
    save_smaller(model, None, tmp_path / "out")
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)


def test_units_that_are_copies_cost_nothing():
    """An MLP whose second half repeats its first half can lose half of its units without any change."""
    model, data = zoo.build("llama"), zoo.tokens(samples=12)
    with torch.no_grad():
        for layer in model.model.layers:
            for w in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
                w[24:] = w[:24]
        before = model(data.input_ids).logits
    remove_units(model, data, 0.5, kind="mlp", damping=1e-6)
    assert model.config.intermediate_size == 24
    with torch.no_grad():
        torch.testing.assert_close(model(data.input_ids).logits, before, rtol=2e-2, atol=2e-2)


def test_the_other_kind_is_advised_where_it_is_there():
    model = zoo.build("llama")
    model.model.layers[1].self_attn.o_proj = torch.nn.Identity()
    with pytest.raises(UnknownStructure, match="--parts mlp"):
        find_parts(model)
    model.model.layers[0].mlp.down_proj = torch.nn.Identity()
    for kind in ("heads", "mlp"):
        with pytest.raises(UnknownStructure, match="Prune its weights instead: layerbudget plan sparsity") as refused:
            find_parts(model, kinds=[kind])
        assert "--parts" not in str(refused.value)


def test_refusals():
    data = zoo.tokens()
    with pytest.raises(UnknownStructure, match="normalises over all heads"):
        remove_units(zoo.build("olmo2"), data, 0.5)
    sizes = {**zoo.GROUPED, "num_key_value_heads": 4, "qk_layernorm": True}
    with pytest.raises(UnknownStructure, match=r"has a norm for every head \(q_layernorm\).*Remove MLP units"):
        remove_units(transformers.AutoModelForCausalLM.from_config(transformers.StableLmConfig(**sizes)), data, 0.5)
    bitnet = transformers.AutoModelForCausalLM.from_config(transformers.BitNetConfig(**zoo.GROUPED))
    for kind, norm in (("heads", "attn_sub_norm"), ("mlp", "ffn_sub_norm")):
        with pytest.raises(UnknownStructure, match=rf"normalises over all .*\({norm}\)"):
            remove_units(bitnet, data, 0.5, kind=kind)
    odd = zoo.build("llama")
    odd.model.layers[1].self_attn.o_proj = torch.nn.Identity()
    with pytest.raises(UnknownStructure, match="layers.1 .LlamaDecoderLayer. has no attention of a known layout"):
        remove_units(odd, data, 0.5)
    model = zoo.build("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidInput, match=r"\[0, 1\)"):
        remove_units(model, data, 1.0)
    with pytest.raises(InvalidInput, match="groups, queries"):
        remove_units(model, data, 0.5, by="magic")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    remove_units(model, data, {"model.layers.1": 0.5}, by="queries")
    with pytest.raises(UnknownStructure, match="one number of heads for all layers"):
        check_exportable(model)


def test_three_heads_that_llama_refuses_are_refused_before_saving(tmp_path):
    """Llama's own config demands that the hidden size is a multiple of the number of heads, even with an explicit head size."""
    model = zoo.build("llama", num_key_value_heads=4)
    remove_units(model, zoo.tokens(), 0.25)
    with pytest.raises(UnknownStructure, match="not a multiple of the number of attention heads"):
        save_smaller(model, None, tmp_path / "out")
    mistral = zoo.build("mistral", num_key_value_heads=4)
    remove_units(mistral, zoo.tokens(), 0.25)
    save_smaller(mistral, None, tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").num_attention_heads == 3


def test_generation_with_a_cache_works_after_uneven_removal():
    model, data = zoo.build("llama"), zoo.tokens()
    remove_units(model, data, {"model.layers.0": 0.5}, by="groups")
    ids = data.input_ids[:2]
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None)
        again = model(made[:, :-1]).logits[:, ids.shape[1] - 1 :].argmax(-1)
    assert torch.equal(made[:, ids.shape[1] :], again)


def test_uneven_widths_work_in_memory_and_unknown_layers_are_refused(tmp_path):
    model, data = zoo.build("llama"), zoo.tokens()
    with pytest.raises(UnknownStructure, match="no plain MLP"):
        remove_units(zoo.build("mixtral"), data, 0.5, kind="mlp")
    for kind in ("heads", "mlp"):
        with pytest.raises(UnknownBlock, match="layers.99"):
            remove_units(model, data, {"model.layers.99": 0.5}, kind=kind)
    remove_units(model, data, {"model.layers.0": 0.5}, kind="mlp")
    with torch.no_grad():
        assert torch.isfinite(model(data.input_ids).logits).all()
    with pytest.raises(UnknownStructure, match="one width for all layers"):
        save_smaller(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def skip_reference(model, index, batch):
    """Logits with one layer skipped, by a forward hook that puts the layer's input back."""
    held = {}
    layer = layers(model)[index][1]

    def before(m, a, k):
        held["x"] = a[0] if a else k["hidden_states"]

    def after(m, a, out):
        return (held["x"], *out[1:]) if isinstance(out, tuple) else held["x"]

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    with torch.no_grad():
        logits = model(**batch).logits
    for h in hooks:
        h.remove()
    return logits


@pytest.mark.parametrize(
    "name", ["llama", "mistral-sliding", "gemma2", "gemma3", "phi3", "gpt-neox", "gpt2", "mixtral", "bert"]
)
def test_dropped_layer_equals_skipped_layer_and_loads_again(name, tmp_path):
    model, data = zoo.build(name), zoo.tokens()
    batch = next(data.batches(len(data)))
    wanted = skip_reference(model, 1, batch)
    smaller = drop_layers(copy.deepcopy(model), [layers(model)[1][0]])
    with torch.no_grad():
        torch.testing.assert_close(smaller(**batch).logits, wanted, rtol=1e-4, atol=1e-4)
    save_smaller(smaller, None, tmp_path / "out")
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert loaded.config.num_hidden_layers == 2
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_there_and_all_of_them_are_refused():
    model = zoo.build("llama")
    with pytest.raises(UnknownBlock, match="model.layers.9"):
        drop_layers(model, ["model.layers.9"])
    with pytest.raises(InfeasibleBudget, match="Remove fewer"):
        drop_layers(model, [name for name, _ in layers(model)])
