"""The command line end to end, on folders holding tiny models of several architectures."""

import contextlib
import json
import subprocess
import sys

import pytest
import torch
from tests import zoo
from tests.cli.helpers import parsed

from layerbudget.cli import main
from layerbudget.cli.commands import QUESTIONS, VERBS, requests_of_all
from layerbudget.decision import DECISIONS
from layerbudget.decisions.rules import RULES, rules_of
from layerbudget.errors import InvalidInput
from layerbudget.records import Block, Module
from layerbudget.registry import run_file
from layerbudget.requests import EVERY
from layerbudget.scores import Scores
from layerbudget.solvers.utilities import PENALTIES, UTILITIES

SMALL = ("--samples", "6", "--length", "24", "--quiet")


def answer(capsys, *argv, code=0):
    """What a command prints with ``--json``, or its one sentence, without a process of its own."""
    assert main([str(a) for a in argv]) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    return " ".join(err.split()) if code else json.loads(out)


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "gemma", "qwen2", "opt"))]
)
def test_score_plan_prune_evaluate_on_other_architectures(saved_model, tmp_path, capsys, kind):
    folder = saved_model(kind)
    scores = answer(capsys, "score", folder, *SMALL, "--json", "-o", tmp_path / "s.json")
    assert scores["estimator"] == "fisher-gram" and len(scores["blocks"]) == 3
    plan = answer(capsys, "plan", "sparsity", tmp_path / "s.json", "--json", "-o", tmp_path / "p.json")
    assert plan["kind"] == "sparsity" and plan["certificate"]["status"]
    pruned = answer(capsys, "apply", folder, tmp_path / "p.json", *SMALL, "--json", "-o", tmp_path / "out")
    total = sum(b["numel"] for b in plan["blocks"])
    assert pruned["sparsity"] == pytest.approx(sum(b["count"] for b in plan["blocks"]) / total, abs=1e-12)
    for block in plan["blocks"]:
        assert pruned["blocks"][block["name"]] == pytest.approx(block["count"] / block["numel"], abs=1e-12)
    found = answer(capsys, "evaluate", tmp_path / "out", "--length", "16", "--windows", "4", "--quiet", "--json")
    assert found["perplexity"]["stdlib"]["tokens"] == 60


def test_another_process_writes_the_same_bytes_and_one_document(saved_model, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a few words of text " * 60)
    words = ["score", str(saved_model("llama")), "--data", str(tmp_path / "text.txt"), *SMALL[:4], "-o", "s.json", "--json"]
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(words) == 0
    start = "import runpy, sys; sys.modules['hqq'] = None; runpy.run_module('layerbudget', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", start, *words]  # without hqq, which brings torch's compilers, for seconds
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "there", check=True)
    assert json.loads(done.stdout)["estimator"] == "fisher-gram" and "took " in done.stderr
    assert (tmp_path / "here" / "s.json").read_bytes() == (tmp_path / "there" / "s.json").read_bytes()


@pytest.mark.parametrize(
    ("filled", "follows"), [([1.0, 2.0, 3.0], "plan sparsity s.json --sparsity 0.5 --damping 10 "), (None, "fisher-gram.json ")]
)
def test_scores_without_a_value_are_written_and_say_what_to_use(tmp_path, monkeypatch, capsys, filled, follows):
    monkeypatch.chdir(tmp_path)
    gain = ((None, None, 1.0), (None, 1.0, 2.0), filled or (None, None, None))
    status = tuple(tuple("ok" if v is not None else "negative curvature" for v in row) for row in gain)
    names = ("model.layers.0.a_proj", "model.layers.0.b_proj", "model.layers.1.a_proj")
    blocks = tuple(Block(name=name, modules=(Module(name=name, d_in=4, d_out=4),)) for name in names)
    made = Scores(blocks=blocks, gain=gain, status=status, damping=(0.1, 1.0, 10.0), damping_unit="max", estimator="hessian")
    monkeypatch.setattr("layerbudget.cli.score._measured", lambda session: made)
    words = ["score", "demo", "--estimator", "hessian", "-o", "s.json"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Written to s.json. Verdict: 1 of 3 blocks have no score at damping 1 (negative curvature)." in said
    assert follows in said.partition("Next: ")[2] and "–" in said.partition("Written")[0]
    assert answer(capsys, *words, "--overwrite", "--json")["gain"][0] == [None, None, 1.0]
    if filled:
        assert main(["plan", "sparsity", "s.json", "--sparsity", "0.5", "--damping", "10", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("apply demo p.json -o run --resume run", "--resume and --out are both run."),
        ("finetune demo p.json --data d -o run --resume ./run/", "--resume and --out are both run."),
        ("apply demo p.json -o run --resume run/parts", "--resume, run/parts, lies in --out, run."),
        ("score demo -o s.json --resume s.json", "--resume and --out are both s.json."),
        ("plan bits demo --bits 5 -o d --save-scores d/s.json", "--save-scores, d/s.json, lies in --out, d."),
        ("plan bits demo --bits 5 -o x/p.json --save-scores x", "--out, x/p.json, lies in --save-scores, x."),
        ("plan bits demo --bits 5 -o x --save-scores x", "--save-scores and --out are both x."),
        ("score demo -o kept/s.json --resume kept", ""),
        ("apply demo p.json -o kept/out --resume kept", ""),
        ("plan bits demo --bits 5 -o x/p.json --save-scores x/s.json --resume x/parts", ""),
        ("apply demo p.json -o run --resume run-parts", ""),
    ],
)
def test_outputs_and_the_parts_of_a_run_are_apart_before_any_work(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    request = parsed(words.split())
    with pytest.raises(InvalidInput) if said else contextlib.nullcontext() as refused:
        request.check()
    assert not said or str(refused.value).startswith(f"{said} What is written to one")


def test_encoder_is_scored(saved_model, tmp_path, capsys):
    scores = answer(capsys, "score", saved_model("bert"), *SMALL, "--json", "-o", tmp_path / "s.json")
    assert [b["name"] for b in scores["blocks"]] == [f"bert.encoder.layer.{i}" for i in range(3)]


def test_mistakes_are_one_sentence_and_leave_nothing(saved_model, tmp_path, capsys, monkeypatch):
    folder, other, work, (s, p) = (
        saved_model("llama"),
        saved_model("gemma"),
        tmp_path / "work",
        (tmp_path / "s", tmp_path / "p"),
    )
    zoo.plan(zoo.speaker("llama")).save(p)
    zoo.scores([3.0, 1.0]).save(s)
    model = zoo.speaker("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    model.save_pretrained(folder / "nan")
    for file in folder.glob("token*"):
        (folder / "nan" / file.name).write_bytes(file.read_bytes())
    for name, text in (("empty.txt", ""), ("file", ""), ("m.gguf", ""), ("old.json", "{}")):
        (tmp_path / name).write_text(text)
    work.mkdir()
    monkeypatch.chdir(work)
    for words, said in (
        (["score", "./nowhere"], "There is no model folder"),
        (["plan", "bits", tmp_path / "m.gguf", "--bits", "4"], "m.gguf does not read as GGUF: it is empty."),
        (["score", folder, "--data", tmp_path / "empty.txt"], "holds no text"),
        (["score", folder, "--length", "10000000"], "tokens, one sample needs 10000000"),
        (["score", folder, *SMALL, "--estimator", "magic"], "There is no estimator"),
        (["score", folder, *SMALL, "--drawz", "2"], "Unknown option: --drawz"),
        (["score", folder, "--import", s, "--excess"], "--excess has no meaning"),
        (["score", folder / "nan", *SMALL], "model.layers.1.mlp.up_proj.weight holds 1 values that are not finite"),
        (["score", folder, *SMALL, "-o", s], "exists already"),
        (["score", folder, *SMALL, "-o", tmp_path / "file" / "s.json"], "cannot be written"),
        (["evaluate", folder, "--quiet", "-o", tmp_path / "old.json"], "Choose another output, or pass --overwrite."),
        (["apply", folder, p, "-o", tmp_path], "exists already. Choose another output, or pass --overwrite."),
        (["score", folder, *SMALL, "-o", ""], "--out is empty. It names a file or folder."),
        (["score", folder, *SMALL, "--resume", ""], "--resume is empty."),
        (["plan", "sparsity", s, "--sparsity", "1.2"], "1.2"),
        (["plan", "sparsity", s, "-o", tmp_path / "file" / "p.json"], "cannot be written"),
        (["plan", "sparsity", folder, *SMALL, "--passes", "2"], "needs 6 forward equivalents. Use --passes 6."),
        (["score", folder, *SMALL, "--data", "-"], "No command here reads or writes these: name a file."),
        (["plan", "sparsity", folder, *SMALL, "--by", "rows:x"], "rows:G"),
        (["apply", other, p, *SMALL, "-o", "out"], "was made for"),
        (["apply", folder, s, *SMALL, "-o", "out"], "not a plan file"),
    ):
        assert said in answer(capsys, *words, code=2), words
    assert list(work.iterdir()) == []


def test_a_long_path_is_printed_whole_and_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = tmp_path / "a folder [bold] with a name" / "that is longer than the terminal is wide" / "page.html"
    path.parent.mkdir(parents=True)
    zoo.scores([3.0, 1.0]).save(tmp_path / "scores.json")
    assert main(["report", str(tmp_path), "-o", str(path)]) == 0
    assert f"Written to {path}." in capsys.readouterr().out.splitlines()


def test_ranks_by_the_gain_of_every_further_rank(saved_model, tmp_path, capsys):
    model, scores, plan = saved_model("llama"), str(tmp_path / "s.json"), str(tmp_path / "p.json")
    words = ["score", str(model), "--estimator", "rank-gain", "--by", "linear", "--exclude", "lm_head", *SMALL, "-o", scores]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["plan", "ranks", scores, "--mean-rank", "4", "-o", plan]) == 0
    assert "scored rows do not tell ranks apart" in " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["rule"] == "by-rank" and written["extra"]["rounding"]["price"] > 0
    assert len({b["count"] for b in written["blocks"]}) > 1
    capsys.readouterr()
    assert main(["explain", "sweep", scores, "--kind", "ranks", "--budgets", "2", "4", "--rule", "by-rank", "--json"]) == 0
    swept = json.loads(capsys.readouterr().out)["rows"]
    assert swept[1]["value"] == pytest.approx(written["extra"]["rounding"]["value"])
    assert swept[1]["value"] > swept[0]["value"] and {row["status"] for row in swept} == {"binding"}
    assert main(["score", str(model), "--by", "linear", *SMALL, "-o", scores, "--overwrite"]) == 0
    assert main(["plan", "ranks", scores, "--mean-rank", "4", "--rule", "by-rank"]) == 2
    assert "--estimator rank-gain --by linear" in capsys.readouterr().err


def test_measure_steps_down_and_says_what_it_spent(saved_model, tmp_path, capsys):
    folder = saved_model("llama")
    options = ("plan", "sparsity", folder, *SMALL, "--sparsity", "0.6", "--json")
    plan = answer(capsys, *options, "--passes", "12", "-o", tmp_path / "p.json", "--resume", tmp_path / "kept")
    found = plan["extra"]
    assert plan["rule"] == "directional" and found["forward_passes"] <= 14
    assert max(found["predicted"], found["measured"]) < found["path"][0]["divergence"]
    assert not (tmp_path / "kept").exists() and {len(b["modules"]) for b in plan["blocks"]} == {1}
    plan = answer(capsys, *options, "--by", "rows:2", "--passes", "12", "-o", tmp_path / "s.json")
    assert (tmp_path / "s.rows.safetensors").exists() and plan["extra"]["rows"]["size"] == 2
    done = answer(capsys, "apply", folder, tmp_path / "s.json", *SMALL, "--json", "-o", tmp_path / "out")
    assert abs(done["sparsity"] - 0.6) < 1e-3
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["rows"]["exact"] == receipt["rows"]["groups"] and (tmp_path / "out" / "plan.rows.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["score", "nowhere", "--damping=-1"], "--damping is -1.0. It is above 0."),
        (["score", "nowhere", "--include", "("], "--include '(' is not a regular expression"),
        (["plan", "sparsity", "nowhere", "--exclude", "*"], "--exclude '*' is not a regular expression"),
        (["score", "nowhere", "--dtype", "int8"], 'Choose from: "auto", "float32"'),
    ],
)
def test_what_an_option_cannot_mean_is_refused_before_a_model_is_looked_for(words, says, capsys):
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["plan", "bits", "demo", "--bits", "4", "--runtimes=vllm"], "--runtime"),
        (["apply", "demo", "p.json", "--metod", "wanda", "-o", "out"], "--method"),
        (
            ["plan", "ranks", "s.json", "--mean-rank", "8", "--exclude", "head"],
            "--fix 'BLOCK=0', which leaves out the blocks of a name or regular expression",
        ),
        (["score", "demo", "--zzz"], None),
        (["score", "demo", "--estimater", "kfac"], "--estimator"),
        (["scor", "demo"], "score"),
        (["plan", "sparsty", "s.json"], "plan sparsity"),
        (["explain", "dif", "a.json", "b.json"], "explain diff"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_right_one(words, meant, capsys):
    try:
        code = main(words)
    except SystemExit as stop:  # a command that argparse reads
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2 and (f"Did you mean {meant}?" in said if meant else "Did you mean" not in said)
    assert said.splitlines()[-1].startswith("layerbudget ") and "--help " in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("score demo --estimator kfac", ["--labels", "--damping-unit"]),
        ("score demo --import own.csv", ["--orientation", "default: gain"]),
        ("compare demo --ranks 4 --rules by-rank", ["--no-controls", "--max-rank", "--damping"]),
        ("explain sweep s.json --kind ranks --rule by-rank", ["--multiple", "--min-rank", "--damping"]),
        ("explain sweep s.json --rule owl", ["--width", "OWL's lambda", "--max-sparsity"]),
        ("export ranks.json", ["--alpha-policy", "constant-ratio", "--dropout"]),
        ("export ranks.json --to csv", ["--to"]),
        ("plan sparsity scores.json --rule owl", ["--width", "OWL's lambda"]),
        ("plan sparsity scores.json --rule mdl", ["--penalty", "--spend", "default: exactly"]),
    ],
)
def test_help_all_lists_the_options_of_what_is_named(words, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    zoo.linears(zoo.speaker("llama"), 2).save("ranks.json")
    assert main([*words.split(), "--help-all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in [*shown, "--dry-run"]) and "--progress" not in said
    assert [f.name for f in tmp_path.iterdir()] == ["ranks.json"]


OWN_RULE = """
from layerbudget.decisions.rules import rule

@rule("ranks", "flat-top")
def flat_top(problem, *, plateau: float = 2.0):
    return problem.weights() ** (1 / plateau)
"""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("plan ranks s.json --rule rule.py:flat-top", "--plateau"), ("plan ranks s.json --rule mdl", "--exponent-on"),
        ("plan sparsity s.json --rule owl", "--width"), ("score demo --estimator outlier-ratio", "--multiple"),
        ("explain sweep s.json --kind ranks --rule rule.py:flat-top", "--plateau"),
        ("export r.json --to lora", "--alpha-policy"),
        ("compare demo --ranks 4 --rules rule.py:flat-top", "--plateau"), ("apply demo p.json --method sparsegpt", "--damping"),
    ],
)  # fmt: skip
def test_help_lists_the_options_of_what_is_named(words, shown, tmp_path, monkeypatch, capsys):
    """Only --help-all and --plugin did."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rule.py").write_text(OWN_RULE)
    run_file.cache_clear()
    with contextlib.ExitStack() as stack:
        rules_of("ranks")
        stack.enter_context(RULES["ranks"].kept())
        assert main([*words.split(), "--help"]) == 0
        said = capsys.readouterr().out
        assert shown in said and "--dry-run" not in said and "Request(" not in said
        assert main([*words.split()[:2], "--help"]) == 0
        assert shown not in capsys.readouterr().out, "without a name the help stays short"


def test_help_offers_the_functions_that_there_are(capsys):
    """The help of transfer offered a utility sqrt, which no program has."""
    assert main(["explain", "transfer", "--help-all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "sqrt" not in said and all(name in said for name in (*UTILITIES, *PENALTIES))
    assert main(["explain", "transfer", "a.json", "b.json", "--utility", "sqrt"]) == 2
    refused = capsys.readouterr().err
    assert all(name in refused for name in UTILITIES)


@pytest.mark.parametrize(("words", "listed"), [("", VERBS), ("plan", DECISIONS.names()), ("explain", QUESTIONS)])
def test_lists_of_commands_fit_a_screen(words, listed, capsys):
    assert main([*words.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) <= 24 and max(map(len, lines)) <= 96 and all(any(f"  {name} " in line for line in lines) for name in listed)
    )
    assert main([*words.split(), "--help-all"]) == 0
    assert "--dry-run" in capsys.readouterr().out


def test_every_option_has_a_sentence_with_its_default():
    for command, request in requests_of_all().items():
        assert request.command == command and request.__doc__
        for name, field in request.options().items():
            said = field.metadata["help"]
            said = said() if callable(said) else said
            assert said and (not said.endswith(".") or said.endswith("...")), (command, name)
            if isinstance(field.default, (int, float, str)) and not isinstance(field.default, bool):
                assert "(default: " in said or "(default)" in said, (command, name)


def test_options_of_every_command_stand_anywhere_or_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    zoo.linears(zoo.speaker("llama"), 2).save("ranks.json")
    for words in ("--json export ranks.json --to csv", "export --to csv ranks.json --json --overwrite"):
        assert json.loads(answer_text(capsys, words))["format"] == "csv"
    every = {name for name, field in DECISIONS.find("sparsity").Request.options().items() if field.metadata["group"] == EVERY}
    assert every == {"json", "quiet", "overwrite", "table", "dry_run", "machines", "plugin"}
    for command, request in requests_of_all().items():
        for name in request.unread:
            flag = f"--{name.replace('_', '-')}"
            places = {n: "x" for n, f in request.options().items() if not isinstance(f.default, (bool, int, float, str, tuple))}
            asked = request(**{n: v for n, v in places.items() if request.options()[n].default is not None}, **{name: True})
            with pytest.raises(InvalidInput, match=f"{flag} has no meaning for {command}: it belongs to commands that"):
                asked.check()


def answer_text(capsys, words):
    """What a command prints."""
    assert main(words.split()) == 0
    return capsys.readouterr().out
