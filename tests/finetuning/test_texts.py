"""Language models fine-tuned on conversations: the loss that is reported, pairs, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.data.text import read_texts
from layerbudget.errors import InvalidInput, NotEnoughText
from layerbudget.finetuning.adapters import NamedLoader, load_adapter
from layerbudget.finetuning.finetune import finetune
from layerbudget.finetuning.protocol import Protocol
from layerbudget.finetuning.rows import TextRows, rows_of


@pytest.fixture
def rows(tmp_path):
    """Questions whose answer repeats the question's letter."""
    path = tmp_path / "rows.jsonl"
    said = [{"prompt": f"say {chr(97 + i % 20)}{i}:", "completion": f" {chr(97 + i % 20) * 3}"} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, said)))
    return str(path)


def plan_for(model, rank=4):
    return zoo.linears(model, lambda n: rank if "_proj" in n else 0)


def test_a_tenth_is_held_out_by_content_and_nothing_leaks(tokenizer, rows, tmp_path):
    texts = read_texts(rows, tokenizer, limit=64)
    assert (len(texts.train), len(texts.evaluation["held_out"])) == (54, 6)
    assert not set(texts.train) & set(texts.evaluation["held_out"])
    lines = open(rows).read().splitlines()
    (tmp_path / "turned.jsonl").write_text("\n".join(lines[::-1] + lines))  # every row twice, in another order
    again = read_texts(str(tmp_path / "turned.jsonl"), tokenizer, limit=64)
    assert set(again.evaluation["held_out"]) == set(texts.evaluation["held_out"])
    assert not set(again.train) & set(again.evaluation["held_out"])
    named = read_texts(rows, tokenizer, limit=64, held_out=rows)
    assert len(named.train) == len(named.evaluation["held_out"]) == 60
    assert len(texts.limited(7).train) == 7
    with pytest.raises(NotEnoughText):
        (tmp_path / "one.jsonl").write_text(lines[0])
        read_texts(str(tmp_path / "one.jsonl"), tokenizer, limit=64)


def test_a_language_model_learns_and_its_held_out_loss_is_what_the_saved_adapter_has(tokenizer, rows, tmp_path):
    model = zoo.speaker("llama")
    texts, plan = read_texts(rows, tokenizer, limit=64), plan_for(model)
    loader = NamedLoader(lambda seed: zoo.speaker("llama"), {})
    protocol = Protocol(lr=1e-2, epochs=4, batch=8, warmup=2, cutoff=64)
    result = finetune(loader, plan, texts, tmp_path / "out", tokenizer=tokenizer, protocol=protocol)
    loss = result["metrics"]["held_out"]
    assert loss["loss"]["value"] < loss["loss_before"]["value"] - 0.2
    rows, held, change = TextRows(texts, tokenizer), texts.evaluation["held_out"], result["change"]["held_out"]
    assert change["difference"] == pytest.approx(loss["loss"]["value"] - loss["loss_before"]["value"]) and change["rows"] == 6
    weight, adapted = np.array(rows.kept(held)), load_adapter(zoo.speaker("llama"), tmp_path / "out" / "seed-0" / "adapter")
    assert rows.losses(adapted, held) @ weight / weight.sum() == pytest.approx(loss["loss"]["value"], rel=1e-5)
    assert rows.losses(model, held) @ weight / weight.sum() == pytest.approx(loss["loss_before"]["value"], rel=1e-5)
    d = rows.losses(adapted, held) - rows.losses(model, held)
    without = [np.average(np.delete(d, i), weights=np.delete(weight, i)) for i in range(6)]
    assert change["stderr"] == pytest.approx(np.sqrt(5 * np.var(without)), rel=1e-4)


def test_a_model_and_rows_by_their_names(saved_model, rows, tmp_path):
    folder, plan = saved_model("llama"), plan_for(zoo.speaker("llama"))
    found = lb.finetune(Path(folder), plan, Path(rows), tmp_path / "out", protocol=Protocol(epochs=1, batch=18, cutoff=64))
    assert found["rows"] == {"train": 54, "held_out": 6} and found["metric"] == "loss"
    assert lb.load_adapter(zoo.speaker("llama"), tmp_path / "out" / "seed-0" / "adapter")


def test_a_list_of_rows_is_what_a_file_of_them_is(tokenizer, rows):
    listed, read = [json.loads(line) for line in open(rows)], read_texts(rows, tokenizer, limit=64)
    found = read_texts(listed, tokenizer, limit=64)
    assert (
        found
        == dataclasses.replace(read, name="own texts")
        == dataclasses.replace(read_texts(Path(rows), tokenizer, limit=64), name="own texts")
    )

    def untrained(seed):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        finetune(untrained, plan_for(zoo.speaker("llama")), listed, "out", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"model": zoo.speaker("llama")}, "model is of type LlamaForCausalLM. Every seed loads its own.*give the folder"),
        ({"model": 3}, "model is of type int"),
        ({"model": lambda seed: zoo.speaker("llama")}, "is a function, and there is no tokenizer.*Give tokenizer="),
        ({"task": {"text": "a row"}}, "task is of type dict. It is a name or a path of text, a list of rows, or a task"),
        ({"task": [3]}, "Row 1 of your list is of type int"),
        ({"task": []}, "The list of texts is empty"),
        ({"protocol": "default"}, "protocol is of type str"),
        ({"tokenizer": "demo"}, "tokenizer is 'demo', of type str"),
    ],
)
def test_arguments_of_another_type_are_refused_before_any_work(given, match, tmp_path):
    plan = plan_for(zoo.speaker("llama"))
    with pytest.raises((InvalidInput, NotEnoughText), match=match):
        lb.finetune(**{"model": "demo", "plan": plan, "task": "stdlib", "out": tmp_path / "out", **given})
    assert not (tmp_path / "out").exists()


def test_from_the_command_line_with_a_paired_comparison(saved_model, rows, tmp_path, capsys):
    folder = saved_model("llama")
    plan_for(zoo.speaker("llama"), 4).save(tmp_path / "four.json")
    plan_for(zoo.speaker("llama"), 1).save(tmp_path / "one.json")
    words = ["--data", rows, "--epochs", "1", "--batch", "8", "--seeds", "0", "1", "--quiet"]
    assert main(["finetune", str(folder), str(tmp_path / "one.json"), *words, "-o", str(tmp_path / "one")]) == 0
    said = capsys.readouterr()
    assert "6 rows held out" in said.out
    more = ["--against", str(tmp_path / "one"), "--start", "gradients", "--json"]
    assert main(["finetune", str(folder), str(tmp_path / "four.json"), *words, *more, "-o", str(tmp_path / "four")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == {"train": 54, "held_out": 6} and result["metric"] == "loss"
    assert result["identity"]["protocol"]["cutoff"] == zoo.speaker("llama").config.max_position_embeddings
    tests = result["against"]["held_out"]
    assert tests["seeds"]["n"] == 2 and tests["samples"]["n"] == 6 and tests["samples"]["test"].startswith("paired t")
    assert tests["verdict"].startswith("Over 2 trainings each, ") and f"{tests['seeds']['difference']:+.4f}" in tests["verdict"]
    assert tests["seeds"]["sentence"].split(": ")[0] in tests["verdict"]
    assert "seed 0 alone" in tests["samples"]["sentence"] and "beats" not in tests["samples"]["sentence"]
    four, one = (json.loads((tmp_path / n / "seed-0" / "result.json").read_text()) for n in ("four", "one"))
    apart = [r["metrics"]["held_out"]["loss"] for r in (four, one)]  # of one seed, as the tests over seeds have it
    assert tests["samples"]["difference"] == pytest.approx(apart[0] - apart[1])
    better = result["metrics"]["held_out"]["loss"]["value"] < result["metrics"]["held_out"]["loss_before"]["value"]
    assert better and tests["seeds"]["difference"] != 0


def test_a_head_learns_no_text(tokenizer, rows):
    with pytest.raises(InvalidInput, match="no language model"):
        rows_of(read_texts(rows, tokenizer, limit=64), tokenizer, zoo.classifier(2), Protocol())


def test_one_held_out_row_is_refused_before_a_comparison_is_trained_for(tokenizer, rows, tmp_path):
    texts, plan = read_texts(rows, tokenizer, limit=64), plan_for(zoo.speaker("llama"))
    texts = dataclasses.replace(texts, evaluation={"held_out": texts.evaluation["held_out"][:1]})
    other = {"schema_version": 1, "task": rows, "metric": "loss", "rule": "uniform", "seeds": [0]}
    (tmp_path / "result.json").write_text(json.dumps({**other, "identity": {"task": texts.digest}}))
    with pytest.raises(InvalidInput, match="has one row in held_out"):
        finetune(NamedLoader(None, {}), plan, texts, tmp_path / "out", tokenizer=tokenizer, against=tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("held_out", [True, False])
def test_rows_that_train_and_measure_are_counted_before_the_training(tokenizer, rows, tmp_path, caplog, held_out):
    def untrained(seed):
        raise InterruptedError

    texts = read_texts(rows, tokenizer, limit=64, held_out=rows if held_out else None).limited(50)
    with pytest.raises(InterruptedError):
        loader = NamedLoader(untrained, {})
        finetune(loader, plan_for(zoo.speaker("llama")), texts, tmp_path / "out", tokenizer=tokenizer, protocol=Protocol())
    said = [m for m in caplog.messages if "flatters" in m]
    sentence = f"{rows}: 50 of 60 rows of held_out train the adapter too, which flatters it: judge it on other rows."
    assert said == [sentence] * held_out
