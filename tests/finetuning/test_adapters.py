"""Saved adapters on a fresh base: ranks and mixtures, and what does not fit."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.experts.method import add_experts
from layerbudget.decisions.ranks.apply import add_ranks
from layerbudget.errors import BadModel, NotFound
from layerbudget.finetuning.adapters import adapt, classifier_loader, load_adapter
from layerbudget.finetuning.protocol import Protocol
from layerbudget.models.experts import cut_experts, find_experts


def ids():
    return torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def saved(tmp_path):
    """Logits of an adapted model and the folder of its adapter, for ranks and for experts."""
    found = {}
    for kind in ("ranks", "experts"):
        base = zoo.adaptable().double()
        if kind == "ranks":
            model = add_ranks(base, zoo.linears(base, lambda n: 3 if "proj" in n else 0))
        else:
            model = add_experts(base, zoo.layers(base, [2] * base.config.num_hidden_layers))
        model = model.double().eval()
        zoo.perturb(model)
        with torch.no_grad():
            found[kind] = model(input_ids=ids()).logits
        model.save_pretrained(tmp_path / kind)
    return tmp_path, found


def test_a_saved_adapter_computes_the_same_and_ranks_merge(saved):
    folder, expected = saved
    for kind, logits in expected.items():
        for merge in (False, True) if kind == "ranks" else (False,):
            model = load_adapter(zoo.adaptable().double(), folder / kind, merge=merge).double()
            assert not model.training
            with torch.no_grad():
                assert torch.allclose(model(input_ids=ids()).logits, logits, atol=1e-12), (kind, merge)
            assert hasattr(model, "peft_config") != merge
    with pytest.raises(BadModel, match="cannot be merged"):
        load_adapter(zoo.adaptable(), folder / "experts", merge=True)


def test_a_trained_head_is_loaded_onto_a_base_in_half_precision(tmp_path):
    zoo.classifier(2).save_pretrained(tmp_path / "bert")
    load = classifier_loader(str(tmp_path / "bert"), 2)
    model = adapt(load(0), zoo.linears(zoo.classifier(2), lambda n: 2 if "attention" in n else 0), Protocol())
    zoo.perturb(model)
    model.save_pretrained(tmp_path / "adapter")
    half = load_adapter(classifier_loader(str(tmp_path / "bert"), 2, dtype="bfloat16")(1), tmp_path / "adapter")
    whole = load_adapter(load(1), tmp_path / "adapter")
    with torch.no_grad():
        expected = model.eval()(input_ids=ids()).logits
        assert torch.allclose(whole(input_ids=ids()).logits, expected, atol=1e-6)
        assert torch.allclose(half(input_ids=ids()).logits.float(), expected, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("head", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_a_base_whose_layers_keep_different_experts_is_loaded_with_its_weights(head, tmp_path):
    """It got a fresh head, and experts of random numbers where a layer had fewer than another."""
    config = zoo.tiny("qwen3-moe").config
    model = getattr(transformers, head).from_config(config).eval()
    cut_experts(model, {e.name: list(range(8 - i)) for i, e in enumerate(find_experts(model))})
    model.save_pretrained(tmp_path / "uneven")
    loaded = dict(classifier_loader(str(tmp_path / "uneven"), 2)(0).named_parameters())
    own = dict(model.named_parameters())
    assert list(loaded) == list(own)
    assert all(torch.equal(loaded[name], p) for name, p in own.items())


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
def test_what_does_not_fit_is_refused(saved, tmp_path):
    folder, _ = saved
    for base in (zoo.adaptable(1), zoo.adaptable(hidden_size=48, head_dim=12), zoo.classifier(2)):
        with pytest.raises(BadModel, match="does not fit|no place"):
            load_adapter(base, folder / "ranks")
    (tmp_path / "run" / "seed-0").mkdir(parents=True)
    (folder / "ranks").rename(tmp_path / "run" / "seed-0" / "adapter")
    with pytest.raises(NotFound, match=r"Point to .*seed-0"):
        load_adapter(zoo.adaptable(), tmp_path / "run")
    place = tmp_path / "run" / "seed-0" / "adapter"
    tensors = load_file(place / "adapter_model.safetensors")
    save_file(
        {**tensors, "base_model.model.model.layers.7.q_proj.lora_A.weight": torch.ones(3, 4)},
        place / "adapter_model.safetensors",
    )
    with pytest.raises(BadModel, match="have no place"):
        load_adapter(zoo.adaptable(), place)
    (place / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(BadModel, match="does not fit"):
        load_adapter(zoo.adaptable(), place)


def test_perplexity_with_an_adapter(tmp_path, capsys):
    from layerbudget.decisions.ranks.plan import plan_ranks
    from layerbudget.models.blocks import partition
    from layerbudget.models.loading import load_model

    model = load_model("demo")
    plan = plan_ranks(partition(model, "linear", exclude="lm_head"), mean_rank=2, rule="uniform")
    adapted = add_ranks(model, plan, task_type="CAUSAL_LM", validate=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapter")
    words = ["evaluate", "demo", "--perplexity", "stdlib", "--windows", "2", "--length", "32", "--json", "--quiet"]
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--adapter", str(tmp_path / "adapter")]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert plain["adapter"] is None and changed["adapter"].endswith("adapter")
    assert plain["perplexity"]["stdlib"]["value"] != changed["perplexity"]["stdlib"]["value"]
    assert main([*words, "--adapter", str(tmp_path)]) == 2
    assert "adapter_config.json" in capsys.readouterr().err
