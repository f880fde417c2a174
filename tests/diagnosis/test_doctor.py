"""The doctor names each ailment of a model that has it, and none of a healthy one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tests import zoo
from torch import nn

from layerbudget.diagnosis import Finding, diagnose
from layerbudget.diagnosis.diagnosis import refusals
from layerbudget.execution.modes import twice_differentiable


def found(diagnosis, check, severity):
    return [f for f in diagnosis.findings if f.check == check and f.severity == severity]


def state(model):
    return {
        "mode": [m.training for m in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "attention": model.config._attn_implementation,
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


@pytest.mark.parametrize("family", ["mistral", "gpt2", "bert"])
def test_healthy_models_have_no_warning(request, family, data):
    model = request.getfixturevalue(family)
    before = state(model)
    diagnosis = diagnose(model, None, data)
    assert not [f for f in diagnosis.findings if f.severity in ("warning", "problem")], str(diagnosis)
    assert {f.check for f in diagnosis.findings} >= {
        "weights",
        "ties",
        "coverage",
        "padding",
        "determinism",
        "attention",
    }
    assert state(model) == before and diagnosis.ok


def test_nan_weights(mistral, data):
    with torch.no_grad():
        mistral.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    diagnosis = diagnose(mistral, None, data)
    assert "up_proj" in found(diagnosis, "weights", "problem")[0].what and not diagnosis.ok


def test_half_precision_is_named(mistral, data):
    assert "bfloat16" in found(diagnose(mistral.bfloat16(), None, data), "weights", "note")[0].what


def test_active_dropout(gpt2, data):
    diagnosis = diagnose(gpt2.train(), None, data)  # the checks run in evaluation mode, and leave the model as it was
    assert gpt2.training and not found(diagnosis, "determinism", "warning")


def test_randomness_that_evaluation_mode_leaves_on(mistral, data):
    norm = mistral.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x + 0.1 * torch.randn_like(x))
    assert found(diagnose(mistral, None, data), "determinism", "warning")


def test_sensitivity_to_padding(mistral, data):
    """A layer that averages over positions, padding included."""
    layer = mistral.model.layers[0]
    layer.forward = lambda h, **k: type(layer).forward(layer, h, **k) + h.mean(1, keepdim=True)
    warning = found(diagnose(mistral, None, data), "padding", "warning")[0]
    assert "equal length" in warning.remedy


def test_absolute_positions_with_left_padding_are_fine_when_positions_are_given(gpt2, data):
    assert found(diagnose(gpt2, None, data), "padding", "ok")


def test_fused_attention_is_switched_and_restored(data):
    model = zoo.mistral()
    assert "math kernel" in found(diagnose(model, None, data), "attention", "note")[0].remedy
    assert found(diagnose(zoo.mistral(attn_implementation="eager"), None, data), "attention", "ok")

    def second_derivative():
        p = model.model.layers[0].self_attn.q_proj.weight
        loss = model(data.input_ids, labels=data.input_ids).loss
        (g,) = torch.autograd.grad(loss, p, create_graph=True)
        return torch.autograd.grad(g.square().sum(), p)

    with pytest.raises(RuntimeError):
        second_derivative()
    with twice_differentiable(model):
        second_derivative()
    with pytest.raises(RuntimeError):
        second_derivative()


def test_other_attention_becomes_eager_and_comes_back_after_an_exception(mistral, data):
    mistral.set_attn_implementation("flex_attention")
    with pytest.raises(KeyError), twice_differentiable(mistral):
        assert mistral.config._attn_implementation == "eager"
        raise KeyError
    assert mistral.config._attn_implementation == "flex_attention"


def test_tied_layers_and_tied_head(data):
    model = zoo.mistral(tie_word_embeddings=True)
    assert "lm_head" in found(diagnose(model, None, data), "ties", "note")[0].what
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert found(diagnose(model, None, data), "ties", "warning")


def test_matrices_outside_every_block(mistral, data):
    mistral.model.layers[0].extra = nn.Parameter(torch.zeros(5, 5))
    warning = found(diagnose(mistral, None, data), "coverage", "warning")[0]
    assert "extra" in warning.what and "%" in warning.what


def test_layer_that_does_not_run(mistral, data):
    mistral.model.layers[1].forward = lambda h, **k: h
    assert any("did not run" in f.what for f in found(diagnose(mistral, None, data), "coverage", "warning"))


class Words:
    """A tokenizer as transformers' are called, one id per letter."""

    def __init__(self, bos=1, adds=True, pad=0):
        self.bos_token_id, self.bos_token, self.adds, self.pad_token_id = bos, "^", adds, pad

    def __call__(self, text, **options):
        ids = [self.bos_token_id if c == "^" else 3 + ord(c) % 50 for c in text]
        return {"input_ids": [self.bos_token_id, *ids] if self.adds else ids}


def test_doubled_beginning(mistral, data):
    doubled = dataclasses.replace(data, input_ids=data.input_ids.clone())
    doubled.input_ids[2, :2] = 1
    diagnosis = diagnose(mistral, Words(), doubled)
    assert "1 of 6" in found(diagnosis, "tokens", "warning")[0].what
    assert found(diagnosis, "tokens", "note")
    assert not found(diagnose(mistral, Words(), data), "tokens", "warning")
    assert "does not add" in found(diagnose(mistral, Words(adds=False), data), "tokens", "note")[0].what
    assert any("padding" in f.what for f in found(diagnose(mistral, Words(pad=None), data), "tokens", "note"))


def test_foreign_token_ids_and_long_samples(mistral, data):
    foreign = dataclasses.replace(data, input_ids=data.input_ids + 60)
    assert "embeddings" in found(diagnose(mistral, None, foreign), "tokens", "problem")[0].what
    assert "64" in found(diagnose(mistral, None, zoo.text(length=80)), "tokens", "warning")[0].what


def test_a_model_that_is_no_language_model_gets_findings_not_a_crash():
    diagnosis = diagnose(nn.Sequential(nn.Linear(3, 3)))
    assert all(isinstance(f, Finding) for f in diagnosis.findings)
    assert found(diagnosis, "coverage", "warning")


def test_padding_on_the_wrong_side_of_the_data_is_a_warning(bert, data):
    """The pooler of an encoder reads the first position."""
    assert found(diagnose(bert, None, data), "padding", "note")
    mask = torch.ones_like(data.input_ids)
    mask[0, :3] = 0
    assert found(diagnose(bert, None, dataclasses.replace(data, attention_mask=mask)), "padding", "warning")


@pytest.fixture
def folder(tmp_path):
    """A model and a byte-level tokenizer as save_pretrained leaves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained(tmp_path)
    config = MistralConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("a few words " * 40)
    return tmp_path


def test_command(folder, capsys):
    from layerbudget.cli import main

    options = ["--data", str(folder / "text.txt"), "--samples", "4", "--length", "16"]
    assert main(["doctor", str(folder), *options, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] and len(record["forecast"]) > 10
    assert any("does not add" in f["what"] for f in record["findings"])


def test_matrices_outside_the_layers_are_named_with_their_share(mistral, data):
    mistral.model.mixer = nn.Linear(64, 64)
    (note,) = found(diagnose(mistral, None, data), "coverage", "note")
    assert "model.mixer.weight" in note.what and "1 of them outside the layers" in note.what and "%" in note.what


def test_a_model_that_does_not_run_is_a_problem_and_nothing_is_priced(mistral, data):
    mistral.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: 1 / 0)
    diagnosis = diagnose(mistral, None, data)
    assert not diagnosis.ok and found(diagnosis, "run", "problem")


def test_chat_rows_whose_answers_come_late_have_a_loss(mistral, data):
    labels = torch.full_like(data.input_ids, -100)
    labels[1:, -2:] = data.input_ids[1:, -2:]  # no answer in the first row, and a late one in the others
    diagnosis = diagnose(mistral, None, dataclasses.replace(data, labels=labels))
    assert diagnosis.ok and "No token has a loss" not in str(diagnosis), str(diagnosis)


@pytest.mark.parametrize(("name", "refused"), [("gpt-oss", "kfac"), ("mistral", None), ("bert", "evaluate")])
def test_verbs_that_refuse_a_model_are_known_without_running_it(name, refused):
    found = refusals(zoo.tiny(name))
    assert bool(found) == (refused is not None) and (refused is None or any(refused in verb for verb in found)), found
    if name == "gpt-oss":
        assert "--exclude 'experts[.]'" in found["score kfac"] and "score fisher-gram" not in found


def test_experts_are_tried_on_one_layer_of_each_kind():
    (seen,) = found(diagnose(zoo.build("glm4-moe")), "experts", "ok")
    assert seen.what.startswith("2 layers give a token 2 of 8 experts") and "expert-pruning" in seen.remedy
    model = zoo.build("qwen3-moe")
    model.model.layers[0].mlp.experts.forward = lambda x, index, weights: x * index.shape[1]
    (seen,) = found(diagnose(model), "experts", "note")
    assert "layers.0.mlp (Qwen3MoeSparseMoeBlock) do not add up by the weights of its router" in seen.what
    assert not [f for f in diagnose(zoo.build("llama")).findings if f.check == "experts"]
