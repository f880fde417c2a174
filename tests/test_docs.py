"""The Python that the documentation shows runs as it stands."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerbudget as lb
from layerbudget.comparison.run import ScoreComparison, flat
from layerbudget.compressors import TREATMENTS
from layerbudget.compressors.base import QUANTISERS
from layerbudget.decision import DECISIONS
from layerbudget.decisions.ranks.apply import adapted_ranks
from layerbudget.decisions.rules import RULES, rules_of
from layerbudget.sensitivity.curvature.common import SWEEPS
from layerbudget.sensitivity.estimators import ESTIMATORS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def registries():
    """Tables that are afterwards as they were."""
    with contextlib.ExitStack() as stack:
        for kind in ("sparsity", "ranks"):
            assert rules_of(kind)
            stack.enter_context(RULES[kind].kept())
        for table in (ESTIMATORS, TREATMENTS, DECISIONS, QUANTISERS):
            stack.enter_context(table.kept())
        yield


def blocks_of(page: str) -> list[str]:
    """Python fences of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_fine_tuning_page_adapts_a_model_by_its_plan():
    space: dict = {}
    (block,) = blocks_of("docs/fine-tuning.md")
    exec(compile(block, "docs/fine-tuning.md", "exec"), space)
    trained = sum(p.numel() for p in space["peft"].parameters() if p.requires_grad)
    assert trained == space["plan"].budget["spent"] <= space["plan"].budget["limit"]


def test_the_page_on_bits_writes_a_model_that_loads(tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    (block,) = blocks_of("docs/bits.md")
    exec(compile(block, "docs/bits.md", "exec"), space)
    ids = space["held_out"].input_ids
    with torch.no_grad():
        back, mine = space["again"](ids).logits, space["model"](ids).logits
    assert torch.allclose(back, mine, atol=1e-4)  # the embedded model is in bfloat16: nothing else is rounded
    assert space["receipt"].bytes == space["plan"].budget["spent"] <= space["plan"].budget["limit"]


def test_the_page_on_the_cache_generates_by_its_plan():
    space: dict = {}
    block, packed = blocks_of("docs/cache.md")
    exec(compile(block, "docs/cache.md", "exec"), space)
    assert space["answer"].shape == (1, 24) and space["plan"].budget["spent"] <= space["plan"].budget["limit"]
    pytest.importorskip("hqq")
    exec(compile(packed, "docs/cache.md", "exec"), space)
    model, ids = space["model"], space["text"].input_ids[:1, :16]
    assert model.generate(ids, past_key_values=space["cache"], max_new_tokens=8, do_sample=False).shape == (1, 24)


def test_the_page_on_what_fits_writes_a_model(tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    (block,) = blocks_of("docs/memory.md")
    exec(compile(block, "docs/memory.md", "exec"), space)
    plan, longer = space["plan"], space["longer"]
    assert space["receipt"].bytes == plan.payload.parts["weights"]["bytes"] and (tmp_path / "quantised/cache.json").is_file()
    assert plan.budget["spent"] <= plan.budget["limit"] == longer.budget["limit"] == 12 * 2**20


def test_the_four_doors_of_a_contributor(registries):
    """A score, a rule, a treatment and a kind of plan from outside the package, as CONTRIBUTING.md shows them."""
    space: dict = {}
    blocks = blocks_of("CONTRIBUTING.md")
    for block in blocks:
        exec(compile(block, "CONTRIBUTING.md", "exec"), space)
    assert len(blocks) == 6 and all(len(block.splitlines()) <= 40 for block in blocks)
    model, text, padding = space["model"], space["text"], torch.zeros(4, 8, dtype=torch.long)
    mask = torch.cat([torch.ones_like(text.input_ids), padding], 1)
    padded = lb.CalibrationSet(input_ids=torch.cat([text.input_ids, padding], 1), attention_mask=mask)
    plain, same = (lb.score(model, data, lb.partition(model), "input-power") for data in (text, padded))
    assert same.values() == pytest.approx(plain.values(), rel=1e-2), "the example reads the mask"


def test_the_serving_page_merges_an_adapter_and_pads_one():
    space: dict = {}
    for block in blocks_of("docs/serving.md"):
        exec(compile(block, "docs/serving.md", "exec"), space)
    assert set(adapted_ranks(space["adapted"]).values()) == {4}
    assert not any("lora" in name for name, _ in space["merged"].named_parameters())


@pytest.mark.slow
def test_the_page_on_smaller_matrices_saves_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    (block,) = blocks_of("docs/smaller-matrices.md")
    exec(compile(block, "docs/smaller-matrices.md", "exec"), space)
    saved = lb.load_model("smaller-python")
    assert saved.num_parameters() < lb.load_model("demo").num_parameters()


def test_the_page_on_notation_has_the_dampings_that_hold():
    page = (ROOT / "docs/notation.md").read_text(encoding="utf-8")
    for unit, values in SWEEPS.items():
        (found,) = re.findall(rf"^\| `{unit}`.*?\| (.*?) \|", page, re.MULTILINE)
        assert [float(v) for v in found.split(", ")] == list(values), unit


def test_the_page_on_research_names_every_column_of_a_comparison():
    page = (ROOT / "docs/research.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| column \|.*?\n\n", page, re.DOTALL)
    test = dict.fromkeys(("difference", "low", "high", "p", "holm"), 0.0)
    row = {"name": "a", "rule": "mdl", "score": "a", "control": False, "mean": 1.0, "spent": [1], "first": 1.0}
    row |= {"rank_low": 1, "rank_high": 1, "versus_uniform": test, "versus_permuted": test}
    made = ScoreComparison(
        kind="sparsity", unit="", seeds=[0], settings={}, versions={}, budgets=[{"budget": 0.5, "rows": [row]}]
    )
    assert set(flat(made)[0]) == {name for line in table.split("\n|") for name in re.findall("`(.*?)`", line.split("|")[0])}


def test_every_page_with_python_is_run_here():
    pages = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
    shown = {page for page in pages if blocks_of(page)}
    assert shown == {
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{n}.md" for n in ("bits", "cache", "fine-tuning", "memory", "serving", "smaller-matrices")),
    }


@pytest.mark.slow
def test_the_documentation_builds_strictly(tmp_path):
    """A broken reference, an unknown role or a page that no other leads to fails."""
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("_build"))
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(docs), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<math" in (tmp_path / "site" / "theory.html").read_text()


@pytest.mark.slow
def test_the_six_lines_of_the_readme(capsys):
    (block,) = blocks_of("README.md")
    exec(compile(block, "README.md", "exec"), {})
    sparsity, perplexity = map(float, capsys.readouterr().out.split())
    assert sparsity == pytest.approx(0.5, abs=1e-3) and 5 < perplexity < 30


def test_every_public_name_is_shown_on_a_page_or_in_an_example():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    shown = set(re.findall(r"\b(?:lb|layerbudget)\.(\w+)", "".join(p.read_text() for p in pages)))
    assert not set(lb.__all__) - shown - {"__version__"}


def test_the_figures_of_the_readme_stand_on_the_page_that_their_row_names():
    results, page, seen = (ROOT / "README.md").read_text().partition("## Results")[2], "", 0
    for line in results.partition("## More")[0].splitlines():
        page = next(iter(re.findall(r"\((benchmarks/results/\w+\.md)\)", line)), page)
        if not line.startswith("|") or not page:
            continue
        known = [float(n) for n in re.findall(r"(?<![\w.])\d*\.\d+(?![\w.])", (ROOT / page).read_text())]
        for figure in re.findall(r"(?<![\w.])\d*\.\d+", "|".join(line.split("|")[3:])):
            half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
            assert any(abs(n - float(figure)) <= half * (1 + 1e-9) for n in known), (page, figure)
            seen += 1
    assert seen > 20
