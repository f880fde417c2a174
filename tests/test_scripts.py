"""What docs/scripts.md promises to programs: the fields of every document, and the exit codes."""

import json
import re
import shlex
from pathlib import Path

from tests.cli.helpers import parsed

from layerbudget.cli import main

PAGE = (Path(__file__).parents[1] / "docs/scripts.md").read_text(encoding="utf-8")
TEXT = ["--samples", "2", "--length", "16"]
COMMANDS = (  # row of the page's table, and a command of it; later ones read what earlier ones write
    ("`score`", ["score", "demo", "--estimator", "fisher-trace", *TEXT, "-o", "scores.json"]),
    ("`plan`", ["plan", "sparsity", "scores.json", "-o", "plan.json"]),
    ("`apply` of sparsity", ["apply", "demo", "plan.json", "-o", "pruned", "--method", "magnitude"]),
    ("`explain`", ["explain", "plan.json"]),
    ("`explain diff`", ["explain", "diff", "plan.json", "plan.json"]),
    ("`export`", ["export", "plan.json", "--to", "csv"]),
    ("`plan`", ["plan", "bits", "demo", "--bits", "4", *TEXT, "--draws", "1", "--check", "0", "-o", "bits.json"]),
    ("`apply` of bits", ["apply", "demo", "bits.json", "-o", "small"]),
    ("`evaluate`", ["evaluate", "demo", "--perplexity", "stdlib", "--windows", "1"]),
    ("`doctor`", ["doctor", "demo"]),
    ("`report`", ["report", "."]),
)


def test_every_document_has_the_fields_that_the_page_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    promised = {verb: set(re.findall(r"\w+", said)) for verb, said in re.findall(r"^\| (`[^|]+) \| (`[^|]+) \|$", PAGE, re.M)}
    assert set(promised) == {verb for verb, _ in COMMANDS}
    for verb, words in COMMANDS:
        assert main([*words, "--json", "--quiet"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert set(told) - {"expected", "took"} == promised[verb], words
        file = {"score": "scores.json", "plan": words[-1], "apply": f"{words[-1]}/receipt.json"}.get(words[0])
        if file is not None and "made_by" in told:  # it was empty in what is printed
            held = json.loads(Path(file).read_text(encoding="utf-8"))
            assert {name: told[name] for name in held} == held and held["made_by"].startswith(f"layerbudget {words[0]} ")
        if words[0] in ("plan", "apply"):
            assert told["verdict"].endswith(".") and not told["verdict"].startswith("Verdict") and "verdict" not in held
            assert told["next"].startswith("layerbudget ") and parsed(shlex.split(told["next"])[1:])
    assert main(["plan", "sparsity", "scores.json", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["next"] is None, "nothing was written"


def test_a_mistake_is_exit_code_2_one_sentence_and_nothing_on_stdout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "ranks", "none.json", "--mean-rank", "2", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("layerbudget: ") and not list(tmp_path.iterdir())


def test_the_commands_of_the_short_form_can_be_parsed():
    short = (Path(__file__).parents[1] / "docs/llms.txt").read_text(encoding="utf-8")
    lines = [line for line in re.findall(r"`(layerbudget [^`]+)`", short) if line != "layerbudget VERB"]
    assert len(lines) > 8
    for line in lines:
        assert parsed(shlex.split(line)[1:])
    planned = {line.split()[2] for line in lines if line.startswith("layerbudget plan ")}
    assert planned == {"sparsity", "bits", "memory", "cache", "shapes", "expert-pruning", "ranks"}
    for page in re.findall(r"\((\S+)\.html\)", short):
        assert (Path(__file__).parents[1] / f"docs/{page}.md").is_file()


def test_the_skill_says_when_it_is_for_and_fits_a_page():
    """Front matter as agents read it: name and description in one line each; tests/test_commands.py runs what it says."""
    empty, head, body = (Path(__file__).parents[1] / "docs/skill.md").read_text(encoding="utf-8").split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert not empty and set(fields) == {"name", "description"} and fields["name"] == "layerbudget"
    assert len(fields["description"]) <= 1024 and len(body.split()) < 500
