"""One training: what ends it, what its loss counts, and rows that the model cannot read."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.data.calibration import check_ids, positions_of
from layerbudget.data.encoding import pad_of
from layerbudget.data.text import read_texts
from layerbudget.errors import InvalidInput, NotFinite
from layerbudget.finetuning.adapters import NamedLoader
from layerbudget.finetuning.finetune import finetune, trained_on
from layerbudget.finetuning.protocol import Protocol
from layerbudget.finetuning.training import _token_loss, counts_tokens

WILD = Protocol(lr=1e25, warmup=0, epochs=2, batch=8, cutoff=64)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    said = [{"prompt": f"say {chr(97 + i % 20)}{i}:", "completion": f" {chr(97 + i % 20) * 3}"} for i in range(24)]
    path.write_text("\n".join(map(json.dumps, said)))
    return str(path)


def loader(name="llama", **changes):
    return NamedLoader(lambda seed: zoo.speaker(name, **changes), {})


def plan_of(name="llama", **changes):
    return zoo.linears(zoo.speaker(name, **changes), lambda n: 2 if "_proj" in n or "c_attn" in n else 0)


def test_a_training_that_diverged_is_no_result(tokenizer, rows, tmp_path):
    texts = read_texts(rows, tokenizer, limit=64)
    own = {"tokenizer": tokenizer, "seeds": (0, 1)}
    with pytest.raises(NotFinite, match=r"diverged at step \d of 6.*learning rate is 1e\+25.*--lr 0.001"):
        finetune(loader(), plan_of(), texts, tmp_path / "out", protocol=WILD, resume=tmp_path / "kept", **own)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "kept").rglob("adapter_model.safetensors")), "no checkpoint of weights that are not finite"
    with pytest.raises(NotFinite, match="diverged"):  # a run that goes on does not take it for finished
        finetune(loader(), plan_of(), texts, tmp_path / "out", protocol=WILD, resume=tmp_path / "kept", **own)
    assert not (tmp_path / "out").exists()


def test_a_divergence_is_an_error_of_the_command(saved_model, rows, tmp_path, capsys):
    plan_of().save(tmp_path / "plan.json")
    words = ["finetune", str(saved_model("llama")), str(tmp_path / "plan.json"), "--data", rows, "--lr", "1e25", "--quiet"]
    assert main([*words, "--warmup", "0", "--batch", "8", "-o", str(tmp_path / "out")]) == 2
    assert "Use a smaller one, say --lr 0.001" in " ".join(capsys.readouterr().err.split())


def bart(**changes):
    """A decoder whose own loss is a mean, and that of the same token."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 96}
    config = transformers.BartConfig(**sizes, max_position_embeddings=64, is_decoder=True, is_encoder_decoder=False, **changes)
    return transformers.BartForCausalLM(config)


def test_a_loss_that_ignores_the_item_count_is_known_by_what_it_does():
    ids = list(range(5, 12))
    assert counts_tokens(zoo.speaker("llama"), ids) and counts_tokens(zoo.speaker("gpt2"), ids)
    model = bart()
    model.train()
    assert not counts_tokens(model, ids) and model.training
    count = torch.tensor(10)
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[:, :2] = -100
    out = transformers.modeling_outputs.CausalLMOutput(logits=logits)
    each = torch.log_softmax(logits, -1)[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    assert _token_loss(out, labels, count) == pytest.approx(-float((each * (labels[:, 1:] >= 0)).sum()) / 10)


def test_a_router_that_adds_a_loss_is_refused_in_several_passes():
    model = zoo.speaker("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    assert counts_tokens(model, range(5, 12))
    with pytest.raises(InvalidInput, match="loss of its router"):
        counts_tokens(model, range(5, 12), passes=2)
    assert counts_tokens(zoo.speaker("mixtral"), range(5, 12), passes=2)


def test_a_pad_token_behind_the_embedding_changes_nothing(tokenizer, rows, tmp_path):
    import copy

    padded = copy.deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "<the pad>"})
    assert padded.pad_token_id == 96 and pad_of(padded) < 96 and pad_of(tokenizer) == tokenizer.pad_token_id
    protocol = Protocol(epochs=1, batch=8, cutoff=64)
    losses = []
    for i, own in enumerate((tokenizer, padded)):
        made = finetune(
            loader(), plan_of(), read_texts(rows, own, limit=64), tmp_path / str(i), tokenizer=own, protocol=protocol
        )
        losses.append(made["metrics"]["held_out"]["loss"]["value"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    data = lb.evaluation_set(rows, padded, length=64)
    assert lb.perplexity(zoo.speaker("llama"), data).windows == 24


def test_rows_that_a_model_cannot_read_are_refused_before_the_training(tokenizer, rows, tmp_path):
    protocol = Protocol(epochs=1, batch=8, cutoff=64)
    for changes, words in (
        ({"vocab_size": 60}, "embeddings for tokens below 60.*resize"),
        ({"max_position_embeddings": 8}, "cutoff 8"),
    ):
        texts = read_texts(rows, tokenizer, limit=64)
        with pytest.raises(InvalidInput, match=words):
            finetune(loader(**changes), plan_of(**changes), texts, tmp_path / "out", tokenizer=tokenizer, protocol=protocol)


def test_positions_of_roberta_begin_behind_its_padding():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}
    model = transformers.RobertaModel(transformers.RobertaConfig(**sizes, max_position_embeddings=20, pad_token_id=1)).eval()
    assert positions_of(model) == 18 and positions_of(torch.nn.Linear(2, 2)) is None
    model(torch.full((1, 18), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, 19), 5))
    with pytest.raises(InvalidInput, match="--length 18 or less"):
        check_ids(model, 19, 5, "--length")


def test_an_adapter_says_what_trained_it(saved_model, rows, tmp_path, capsys):
    folder = str(saved_model("llama"))
    lb.finetune(folder, plan_of(), rows, tmp_path / "out", protocol=Protocol(epochs=1, batch=8, cutoff=64))
    adapter = str(tmp_path / "out" / "seed-0" / "adapter")
    known = trained_on(adapter)
    assert known["source"] == rows and known["rows"] == 22 and len(known["text"]) == 16
    assert trained_on(folder) is None
    assert main(["evaluate", folder, "--adapter", adapter, "--perplexity", rows, "--length", "32", "--quiet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"The adapter {adapter} was trained on 22 rows of {rows}." in said
    assert "holds the rows that trained this adapter" in said and "compared with nothing" in said
    assert said.endswith(f"--against {folder}")
    words = ["--perplexity", rows, "--length", "32", "--against", folder, "--quiet"]
    assert main(["evaluate", folder, "--adapter", adapter, *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{folder} with the adapter {adapter}: perplexity on {rows}" in said and f"{folder}: perplexity on {rows}" in said
    assert said.endswith(f"But {rows} holds the rows that trained the adapter: judge it on other rows.")
