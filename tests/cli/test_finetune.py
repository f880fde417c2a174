"""``layerbudget finetune`` as a user calls it: one JSON document on stdout, one sentence on a mistake."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from tests import zoo
from tests.cli.helpers import parsed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerbudget.cli import main
from layerbudget.cli.finetune import _say_what_follows, _verdict
from layerbudget.cli.session import Session
from layerbudget.decisions.ranks.apply import adapter_parameters, add_ranks
from layerbudget.finetuning.request import FinetuneRequest
from layerbudget.models.blocks import describe


@pytest.fixture
def setting(tmp_path):
    """A saved encoder with its tokenizer, a plan of ranks for it, and a file of labelled rows."""
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<unk>", "good", "bad", "film"])}
    tok = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    model = zoo.classifier(2)
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", unk_token="<unk>").save_pretrained(tmp_path / "model")
    zoo.linears(model, lambda n: 2 if "attention" in n else 0).save(tmp_path / "plan.json")
    rows = [{"text": f"film {('bad', 'good')[i % 2]} {i}", "label": i % 2} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def command(folder, *more, plan="plan.json", out="out"):
    return [
        "finetune", str(folder / "model"), str(folder / plan), "--task", str(folder / "rows.jsonl"), "-o", str(folder / out),
        "--epochs", "1", "--batch", "16", "--quiet", *more,
    ]  # fmt: skip


def test_trains_reports_and_compares(setting, capsys):
    assert main(command(setting, "--seeds", "0", "1", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["seeds"] == [0, 1] and result["kind"] == "ranks"
    assert set(result["metrics"]["held_out"]) == {"accuracy", "matthews", "f1"}
    assert main(command(setting, "--start", "gradients", "--overwrite", "--json")) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["seeds"] == [0] and again["identity"]["protocol"]["start"] == "gradients"
    assert main(command(setting, "--seeds", "0", "1", "--overwrite")) == 0
    assert main(command(setting, "--seeds", "0", "1", "--against", str(setting / "out"), out="second")) == 0
    assert "is level with" in capsys.readouterr().out.replace("\n", " ")


def test_the_words_behind_a_training(capsys):
    """A uniform plan is not told to be compared with uniform; the next command names the user's own text."""
    model = zoo.mistral()
    uneven, even = zoo.linears(model, lambda n: 3 if "q_proj" in n else 5), zoo.linears(model, lambda n: 4)
    result = {"seeds": [2], "metric": "loss", "metrics": {"held_out": {"loss": {"value": 2.0}, "loss_before": {"value": 2.5}}}}
    said = {name: _verdict(result, {}, plan) for name, plan in (("uneven", uneven), ("even", even))}
    assert all("held-out loss 2.0000 (before: 2.5000)" in words for words in said.values())
    assert "train a plan of --rule uniform" in said["uneven"] and "This plan is uniform" in said["even"]
    assert "Nothing was compared" not in said["even"]
    changed = {**result, "change": {"held_out": {"difference": -0.5, "stderr": 0.12, "rows": 4}}}
    assert "(before: 2.5000; change -0.5000 +- 0.2400 over 4 rows)" in _verdict(changed, {}, even)
    for given, words in (
        ({"data": "my.jsonl", "held_out": "held.jsonl"}, ["--perplexity", "held.jsonl"]),
        ({"data": "my.jsonl"}, ["report", "out", "-o", "out/report.html"]),
        ({"task": "rte"}, ["report", "out", "-o", "out/report.html"]),
    ):
        _say_what_follows(Session(FinetuneRequest(model="demo", plan="plan.json", out="out", **given)), result)
        line = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("Next: layerbudget "))
        assert line[-len(words) :] == words and parsed(line)


def test_the_size_of_an_adapter_is_that_of_its_factors():
    """Every expert of a stack has factors of its own; the rule of thumb was told of those of one."""
    model = zoo.tiny("mixtral")
    plan = zoo.linears(model, lambda n: 2 if "experts" in n or "q_proj" in n else 0)
    counted = adapter_parameters(plan, model)
    adapted = add_ranks(model, plan)
    assert counted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_rows_that_do_not_read_are_refused_before_anything_is_loaded(tmp_path):
    """Neither torch nor transformers comes in for a broken file or a missing plan."""
    zoo.scores([1.0, 2.0]).save(tmp_path / "scores.json")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "contents": "hi"}]}))
    code = (
        "import sys\nfrom layerbudget.cli import main\n"
        "words = ['finetune', 'demo', 'p.json', '-o', 'out', '--data', 'rows.jsonl']\n"
        "codes = [main(['plan', 'ranks', 'scores.json', '--mean-rank', '1', '-o', 'p.json', '--quiet']), main(words)]\n"
        "codes.append(main([*words[:-1], 'none.jsonl']))\n"
        "print(codes, 'torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[0, 2, 2] False", run.stderr
    assert "Message 1 in line 1 of rows.jsonl has no content" in run.stderr and "no text file none.jsonl" in run.stderr


def test_a_progress_bar_lasts_for_all_seeds(setting, capsys):
    words = [word for word in command(setting, "--seeds", "0", "1") if word != "--quiet"]
    assert main(words) == 0
    assert "accuracy" in capsys.readouterr().out


def test_numbers_of_the_protocol_and_the_base(setting, capsys):
    words = ["--dropout", "0.1", "--ratio", "1", "--alpha-policy", "rslora", "--dtype", "bfloat16"]
    words += ["--gradient-checkpointing"]
    assert main(command(setting, *words, "--device", "cpu", "--json")) == 0
    protocol = json.loads(capsys.readouterr().out)["identity"]["protocol"]
    assert (protocol["dropout"], protocol["ratio"], protocol["alpha_policy"], protocol["epochs"]) == (0.1, 1, "rslora", 1.0)
    saved = json.loads((setting / "out" / "seed-0" / "adapter" / "adapter_config.json").read_text())
    assert saved["lora_dropout"] == 0.1 and not saved["use_rslora"]
    ratios = {saved["alpha_pattern"][key] / rank for key, rank in saved["rank_pattern"].items()}
    assert ratios == {1.0} and saved["lora_alpha"] == saved["r"]
    for wrong, said in ((("--droput", "0.1"), "Did you mean --dropout?"), (("--dropout", "2"), "lies in")):
        assert main(command(setting, *wrong, out="x")) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
    assert not (setting / "x").exists()


def test_mistakes_end_in_one_sentence(setting, capsys):
    other = zoo.classifier(3)
    zoo.linears(other, 2).save(setting / "other.json")
    sparsity = json.loads((setting / "plan.json").read_text()) | {"kind": "sparsity"}
    for block in sparsity["blocks"]:
        block |= {"value": 0.5, "count": block["numel"] // 2}
    sparsity["budget"]["spent"] = sum(block["count"] for block in sparsity["blocks"])
    (setting / "sparsity.json").write_text(json.dumps(sparsity))
    stranger = json.loads((setting / "plan.json").read_text())
    stranger["blocks"][0] |= {"name": "bert.encoder.layer.0.attention.self.querry"}
    stranger["blocks"][0]["modules"] = ["bert.encoder.layer.0.attention.self.querry"]
    stranger["blocks"][0]["count"] = 2
    stranger["model"] = describe(zoo.classifier(2))
    (setting / "stranger.json").write_text(json.dumps(stranger))
    for plan, said in (
        ("other.json", "was made for"), ("sparsity.json", "cannot be trained"), ("none.json", "There is no plan file"),
        ("stranger.json", "querry"),
    ):  # fmt: skip
        assert main(command(setting, plan=plan, out=f"out-{plan}")) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
    assert main([*command(setting, out="y")[:3], "--task", "glue", "-o", str(setting / "y")]) == 2
    assert "Tasks are cola" in capsys.readouterr().err.replace("\n", " ")
    assert not (setting / "y").exists()
