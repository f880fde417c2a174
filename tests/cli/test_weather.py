"""Broken files and odd flags on the command line: one sentence and exit code 2, nothing left behind."""

import json
import shutil

import pytest
from tests import zoo

from layerbudget.cli import main
from layerbudget.errors import ModelMismatch
from layerbudget.models.loading import load_model

CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def refused(capsys, *arguments):
    """What a refused command says."""
    assert main([str(a) for a in arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"num_local_experts": "x"}, {"head_dim": 1.5}, {"hidden_size": 10**40}, {"num_hidden_layers": 2**63}, {"architectures": 3},
     {"num_key_value_heads": []}, {"hidden_size": 2**31, "intermediate_size": 2**31}],
)  # fmt: skip
def test_a_configuration_with_odd_sizes(tmp_path, capsys, change):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert "layerbudget:" in refused(capsys, "plan", "sparsity", tmp_path, "--rule", "uniform", "-o", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_model_of_endless_layers_is_refused_at_once(folder, capsys):
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2**60}))
    assert "layers" in refused(capsys, "evaluate", folder / "model", "--perplexity", folder / "text.txt")


@pytest.mark.parametrize(
    "file, text",
    [("tokenizer.json", '{"version": "1.0"}'), ("tokenizer.json", "[1"), ("config.json", "[" * 3000),
     ("tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": {}}))],
)  # fmt: skip
def test_a_broken_model_folder(folder, capsys, file, text):
    (folder / "model" / file).write_text(text)
    assert "layerbudget:" in refused(capsys, "evaluate", folder / "model", "--perplexity", folder / "text.txt", "--length", 16)


@pytest.mark.parametrize(
    "flags, word",
    [(["--seed", "-1"], "seed"), (["--device", "meta"], "meta"), (["--length", "100"], "positions"),
     (["--samples", str(10**30)], "samples"), (["--batch-size", "-1"], "batch")],
)  # fmt: skip
def test_odd_flags(folder, capsys, flags, word):
    given = {"--data": folder / "text.txt", "--samples": 2, "--length": 8, flags[0]: flags[1]}
    words = [w for pair in given.items() for w in pair]
    assert word in refused(capsys, "score", folder / "model", *words, "-o", folder / "o")
    assert not (folder / "o").exists()


@pytest.mark.parametrize("budget", ["nan", "inf"])
def test_budgets_are_finite(tmp_path, capsys, budget):
    zoo.scores([1.0, 2.0], [10, 20]).save(tmp_path / "scores.json")
    assert "finite" in refused(capsys, "explain", "sweep", tmp_path / "scores.json", "--budgets", budget)


@pytest.mark.parametrize("field", ["budget", "certificate"])
@pytest.mark.parametrize("content", [{}, {"unit": 3}, {"message": "x"}, None, []])
def test_a_plan_without_its_budget_or_half_a_certificate(folder, capsys, field, content):
    zoo.plan(load_model(str(folder / "model"))).save(folder / "plan.json")
    record = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**record, field: content}))
    if field == "certificate" and content == {}:
        assert main(["explain", str(folder / "plan.json")]) == 0
    else:
        assert "layerbudget:" in refused(capsys, "explain", folder / "plan.json")


def test_an_evaluation_goes_on_with_the_texts_that_were_done(folder, capsys, monkeypatch):
    import layerbudget.evaluation.perplexity as measuring

    other = folder / "other.txt"
    other.write_text((folder / "text.txt").read_text()[40:])
    texts = ["--perplexity", str(folder / "text.txt"), str(other), "--length", "16", "--json", "--quiet"]
    command = ["evaluate", str(folder / "model"), *texts]

    def printed():
        found = json.loads(capsys.readouterr().out)
        return {k: v for k, v in found.items() if k not in ("expected", "took")}  # of the machine's mood

    assert main(command) == 0
    whole, plain, done = printed(), measuring.perplexity, []

    def once(model, data, **options):
        if done:
            raise KeyboardInterrupt
        done.append(data.digest)
        return plain(model, data, **options)

    monkeypatch.setattr(measuring, "perplexity", once)
    assert main([*command, "--resume", str(folder / "parts")]) == 130
    assert f"what was finished is kept in {folder / 'parts'}," in " ".join(capsys.readouterr().err.split())
    assert main(command) == 130 and "interrupted. --resume DIR keeps" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(measuring, "perplexity", lambda model, data, **o: done.append(data.digest) or plain(model, data, **o))
    assert main([*command, "--resume", str(folder / "parts")]) == 0
    capsys.readouterr()
    assert len(set(done)) == len(done) == 2 and not (folder / "parts").exists()
    assert main(command) == 0
    assert printed() == whole


@pytest.mark.parametrize(
    ("partner", "size", "said"),
    [
        ((16, 4), (16, 3), "of other questions or other text"),
        ((16, 4), (12, 4), "of other questions or other text"),
        ((16, 1), (16, 1), "has one window"),
        (None, (16, 1), "has one window"),  # of two models
    ],
)
def test_results_that_cannot_be_paired_are_refused_before_the_work(folder, capsys, monkeypatch, partner, size, said):
    command = ["evaluate", folder / "model", "--perplexity", folder / "text.txt", "--quiet"]
    other = folder / ("model" if partner is None else "other.json")
    if partner is not None:
        assert main([*map(str, command), "--length", str(partner[0]), "--windows", str(partner[1]), "--out", str(other)]) == 0
    monkeypatch.setattr("layerbudget.models.loading.load_model", None)  # nothing is loaded
    more = ["--length", size[0], "--windows", size[1], "--against", other, "--out", folder / "new.json"]
    assert said in refused(capsys, *command, *more, "--resume", folder / "parts")
    assert not (folder / "new.json").exists() and not (folder / "parts").exists()
    if partner is not None:
        other.write_text(json.dumps({**json.loads(other.read_text()), "perplexity": {"text": {"nll": "many"}}}))
        assert "is no evaluation" in refused(capsys, *command, *more)


def test_a_comparison_that_fails_loses_no_evaluation(folder, capsys, monkeypatch):
    def fail(*results):
        raise ModelMismatch("They are of other questions.")

    command = ["evaluate", folder / "model", "--perplexity", folder / "text.txt", "--length", 16, "--windows", 4, "--quiet"]
    assert main([*map(str, command), "--out", str(folder / "other.json")]) == 0
    monkeypatch.setattr("layerbudget.evaluation.statistics.compare_results", fail)
    more = ["--against", folder / "other.json", "--resume", folder / "parts", "--out", folder / "new.json"]
    assert "other questions" in refused(capsys, *command, *more)
    assert json.loads((folder / "new.json").read_text())["perplexity"] and list((folder / "parts").rglob("text-*"))


@pytest.mark.parametrize("damage", [1e308, -1e200])
def test_curves_that_overflow_are_refused(tmp_path, capsys, damage):
    scores = zoo.scores([1.0, 2.0], [10, 20])
    scores.save(tmp_path / "scores.json")
    curves = {name: [[0.3, 0.7], [0.1, damage]] for name in scores.names}
    (tmp_path / "curves.json").write_text(json.dumps(curves))
    said = refused(capsys, "plan", "sparsity", tmp_path / "scores.json", "--curves", tmp_path / "curves.json")
    assert "beyond 1e+100" in said.replace("\n", " ")


@pytest.mark.parametrize("verb", ["apply", "prune --resume", "prune, smaller", "finetune"])
def test_a_model_that_would_not_fit_on_the_disk_is_not_made(folder, capsys, monkeypatch, verb):
    model, out = str(folder / "model"), folder / "out"
    data = ["--data", str(folder / "text.txt"), "--samples", "2", "--length", "8", "--quiet"]
    if verb == "finetune":
        ranks = zoo.linears(load_model(model), 2)
        ranks.save(folder / "plan.json")
        words = (folder / "text.txt").read_text().split()
        (folder / "rows.jsonl").write_text(
            "\n".join(json.dumps({"text": " ".join(words[i : i + 20])}) for i in range(0, 240, 20))
        )
        command = ["finetune", model, folder / "plan.json", "--data", folder / "rows.jsonl", "--epochs", "1", "--quiet"]
        command += ["--resume", folder / "parts"]  # checkpoints are what takes room
    elif verb == "prune, smaller":
        command = ["plan", "shapes", model, *data, "--save", "10% flops", "--even", "-o", str(folder / "plan.json")]
        assert main(command) == 0
        command = ["apply", model, folder / "plan.json", *data]
    else:
        zoo.plan(load_model(model)).save(folder / "plan.json")
        command = ["apply", model, folder / "plan.json", *data]
        command += ["--resume", folder / "parts"] if "resume" in verb else []
    capsys.readouterr()
    sound = shutil.disk_usage
    monkeypatch.setattr("layerbudget.storage.writing.shutil.disk_usage", lambda path: sound(path)._replace(free=20_000))
    said = " ".join(refused(capsys, *command, "-o", out).split())
    assert "are free" in said and "19.5 KiB" in said
    assert not [p for p in out.rglob("*") if p.is_file()]
    assert {p.suffix for p in (folder / "parts").rglob("*") if p.is_file()} <= {".json"}  # whose the folder is, and no weights
    monkeypatch.undo()
    assert main([str(w) for w in [*command, "-o", out]]) == 0
