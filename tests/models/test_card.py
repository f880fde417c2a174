"""The model card that every written folder has: what the hub reads in it."""

import dataclasses

import pytest
from tests import zoo
from tests.cards import card_of

from layerbudget.models.card import loading, model_card


@pytest.mark.parametrize("relation", ["adapter", "finetune", "quantized"])
@pytest.mark.parametrize("name", ["someone/model-1b", "/models/mine", "mine"])
def test_only_a_model_of_the_hub_is_named_as_the_base(tmp_path, name, relation):
    plan = zoo.plan(zoo.tiny("llama"))
    plan = dataclasses.replace(plan, model={**plan.model, "id": name})
    plan = plan.with_payload(predicted=0.0123, measured=0.02, path=[{"divergence": 0.03}])
    text = model_card(
        plan, relation, "pruned", "with zeros.", {"zeros": "50 %"}, "one\ntwo", architecture="XForCausalLM", tags="a"
    )
    (tmp_path / "README.md").write_text(text)
    card = card_of(tmp_path)
    on_hub = {"base_model": name, "base_model_relation": relation} if name.count("/") == 1 else {}
    by = {"quantized_by": "layerbudget"} if relation == "quantized" else {}
    own = {"pipeline_tag": "text-generation", "library_name": "transformers", "tags": ["a"]}
    assert card.data.to_dict() == {**on_hub, **by, **own}
    assert "| zeros | 50 % |" in text and "| predicted KL divergence | 0.0123 nats per token |" in text
    assert "| measured when planned | 0.02 nats per token, on the text that decided |" in text
    assert "    one\n    two\n" in text and f"# {name.rpartition('/')[2]}, pruned by a plan" in text


def test_the_lines_that_load_a_checkpoint_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = zoo.tiny("bert-classifier")
    model.save_pretrained(".")
    found = {}
    exec(loading(type(model).__name__), found)
    assert type(found["model"]) is type(model)


def test_an_adapter_for_labels_is_loaded_with_their_number_and_names(tmp_path, monkeypatch):
    """The base was loaded with its own number of labels, and the block of the card ended in a size mismatch."""
    monkeypatch.chdir(tmp_path)
    zoo.tiny("bert-classifier", num_labels=2).save_pretrained(".")
    found = {}
    exec(loading("BertForSequenceClassification", labels=("bad", "it's", "good")), found)
    assert found["model"].config.id2label == {0: "bad", 1: "it's", 2: "good"} and found["model"].num_labels == 3
    assert "label" not in loading("LlamaForCausalLM", labels=("yes", "no"))
