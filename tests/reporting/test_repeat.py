"""What a page says repeats a result does: the printed command, run in another folder, gives the same digest."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil

import pytest

from layerbudget.cli import main
from layerbudget.plan import Plan
from layerbudget.reporting.page import build_page
from layerbudget.scores import Scores

TEXT = ["--samples", "3", "--length", "12"]
SCORE = ["score", "demo", *TEXT, "--seed", "5", "--damping", "0.3", "0.1", "--walk", "layers"]
# Kind of folder: what is run, and the record whose digest decides.
FOLDERS = {
    "scores": ([[*SCORE, "--exclude", "down_proj"]], "scores.json"),
    "plan": ([["score", "demo", "--estimator", "outlier-ratio", *TEXT],
              ["plan", "sparsity", "scores.json", "--sparsity", "0.4", "--exponent", "2", "--fix", "model.layers.1=0.3",
               "--exclude", "layers.2$", "-o", "plan.json"]], "plan.json"),
    "measured": ([["plan", "sparsity", "demo", *TEXT, "--method", "magnitude", "--passes", "9", "--by",
                  "layer", "--trust", "0.1"]],
                 "plan.json"),
    "imported": ([["score", "demo", "--import", "mine.csv", "--orientation", "redundancy"]], "scores.json"),
}  # fmt: skip


def ran(folder, commands, monkeypatch):
    folder.mkdir()
    (folder / "mine.csv").write_text("name,score\n" + "".join(f"model.layers.{i},{i + 1}\n" for i in range(12)))
    monkeypatch.chdir(folder)
    for words in commands:
        assert main([*words, "--quiet"]) == 0, words


def printed(folder):
    """The commands of a page, without the notes."""
    block = re.search(r'<section id="repeat">.*?<code>(.*?)</code>', build_page(folder), re.S)[1]
    return [line for line in html.unescape(block).splitlines() if not line.startswith("#")]


def digest_of(path):
    if path.name == "receipt.json":
        record = json.loads(path.read_text())
        return {k: v for k, v in record.items() if k not in ("seconds", "made_by")}
    return (Plan if path.name.startswith("plan") else Scores).load(path).digest


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_printed_command_makes_the_same_again(kind, tmp_path, monkeypatch):
    commands, name = FOLDERS[kind]
    ran(tmp_path / "first", commands, monkeypatch)
    lines = printed(tmp_path / "first")
    assert len(lines) == len(commands)
    ran(tmp_path / "again", [shlex.split(line)[1:] for line in lines], monkeypatch)
    assert digest_of(tmp_path / "again" / name) == digest_of(tmp_path / "first" / name)
    if kind == "scores":  # a line without its samples would not do
        changed = [line.replace("--samples 3", "--samples 2") for line in lines]
        assert changed != lines
        ran(tmp_path / "other", [shlex.split(line)[1:] for line in changed], monkeypatch)
        assert digest_of(tmp_path / "other" / name) != digest_of(tmp_path / "first" / name)


def test_a_pruned_folder_and_a_quantised_one_are_repeated(tmp_path, monkeypatch):
    """Their plan's command and their own."""
    pytest.importorskip("compressed_tensors")
    commands = [
        ["plan", "sparsity", "config.json", "--rule", "uniform", "--sparsity", "0.5", "-o", "plan.json"],
        ["apply", "demo", "plan.json", *TEXT, "--pattern", "2:4", "--method", "wanda", "-o", "pruned"],
        ["plan", "bits", "demo", *TEXT, "--bits", "4.6", "--check", "0", "--draws", "1", "-o", "bits.json"],
        ["apply", "demo", "bits.json", *TEXT, "--method", "gptq", "-o", "quantised"],
    ]
    from layerbudget.models.loading import load_model

    load_model("demo").config.save_pretrained(tmp_path)
    shutil.move(tmp_path / "config.json", tmp_path / "kept.json")

    def fresh(name):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "kept.json", tmp_path / name / "config.json")
        monkeypatch.chdir(tmp_path / name)

    fresh("first")
    for words in commands:
        assert main([*words, "--quiet"]) == 0, words
    lines = [line for made in ("pruned", "quantised") for line in printed(tmp_path / "first" / made)]
    assert [shlex.split(line)[1] for line in lines] == ["plan", "apply", "plan", "apply"]
    fresh("again")
    for line in lines:
        assert main([*shlex.split(line)[1:], "--quiet"]) == 0, line
    for made in ("pruned", "quantised"):
        again, first = (digest_of(tmp_path / place / made / "receipt.json") for place in ("again", "first"))
        assert again == first
        for file in (tmp_path / "first" / made).glob("*.safetensors"):
            assert file.read_bytes() == (tmp_path / "again" / made / file.name).read_bytes()


def test_a_comparison_is_repeated(tmp_path, monkeypatch):
    words = [
        "compare",
        "demo",
        "--scores",
        "gradient-norm",
        "--rules",
        "mdl",
        "--sparsity",
        "0.5",
        "--seeds",
        "1",
        "--samples",
        "2",
        "--length",
        "16",
        "--windows",
        "2",
        "--method",
        "magnitude",
        "--no-controls",
        "-o",
        "out",
    ]
    ran(tmp_path / "first", [words], monkeypatch)
    (line,) = printed(tmp_path / "first" / "out")
    ran(tmp_path / "again", [shlex.split(line)[1:]], monkeypatch)
    first, again = (json.loads((tmp_path / p / "out" / "comparison.json").read_text()) for p in ("first", "again"))
    assert first["budgets"] == again["budgets"] and first["made_by"] == again["made_by"]


@pytest.mark.slow
def test_a_demo_is_repeated(tmp_path, monkeypatch):
    """Its plan, its model and its numbers; only seconds and memory are others."""
    from layerbudget.demo import run as demo

    for name, value in {"SAMPLES": 6, "LENGTH": 24, "WINDOWS": 6, "MEASURED": 3, "PASSES": 6, "TARGETS": (0.5,)}.items():
        monkeypatch.setattr(demo, name, value)
    ran(tmp_path / "first", [["demo", "--seed", "3", "-o", "out"]], monkeypatch)
    (line,) = printed(tmp_path / "first" / "out")
    ran(tmp_path / "again", [shlex.split(line)[1:]], monkeypatch)
    first, again = (tmp_path / place / "out" for place in ("first", "again"))
    assert digest_of(again / "plan.json") == digest_of(first / "plan.json")
    assert (again / "pruned/model.safetensors").read_bytes() == (first / "pruned/model.safetensors").read_bytes()
    rows, same = (json.loads((place / "result.json").read_text())["rows"] for place in (first, again))
    assert rows == same and "--seed 3" in line


@pytest.mark.slow
def test_a_fine_tuning_is_repeated(tmp_path, monkeypatch):
    """The adapter to the bit, and what was measured."""
    rows = "".join(json.dumps({"text": f"row {i} says {i * i} and ends"}) + "\n" for i in range(20))
    uniform = ["plan", "ranks", "scores.json", "--mean-rank", "2", "--rule", "uniform", "-o", "ranks.json"]
    train = [
        "finetune",
        "demo",
        "ranks.json",
        "--data",
        "rows.jsonl",
        "--epochs",
        "1",
        "--batch",
        "4",
        "--seeds",
        "3",
        "-o",
        "out",
    ]
    folders = [tmp_path / name for name in ("first", "again")]
    ran(folders[0], [[*SCORE, "--estimator", "fisher-gram"], uniform], monkeypatch)
    (folders[0] / "rows.jsonl").write_text(rows)
    assert main([*train, "--quiet"]) == 0
    lines = printed(folders[0] / "out")
    assert [shlex.split(line)[1] for line in lines] == ["plan", "finetune"]
    ran(folders[1], [], monkeypatch)
    for name in ("rows.jsonl", "scores.json"):
        shutil.copy(folders[0] / name, folders[1] / name)
    for line in lines:
        assert main([*shlex.split(line)[1:], "--quiet"]) == 0
    first, again = (folder / "out/seed-3/adapter/adapter_model.safetensors" for folder in folders)
    assert again.read_bytes() == first.read_bytes()
    results = [json.loads((folder / "out/result.json").read_text()) for folder in folders]
    assert results[0]["metrics"] == results[1]["metrics"] and "--seeds 3" in lines[1]
