"""README, pages, gallery and notebook are executed: commands parse, scripts and cells run as they stand."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from tests.cli.helpers import parsed

from layerbudget.cli.commands import VERBS
from layerbudget.cli.parser import WrongCommand
from layerbudget.decision import DECISIONS, EXPORTS
from layerbudget.decisions.rules import RULES, rules_of
from layerbudget.errors import LayerbudgetError
from layerbudget.sensitivity.estimators import ESTIMATORS

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
SCRIPTS = sorted(p.name for p in (ROOT / "examples").glob("*.py") if p.name not in ("chat_rows.py", "water_filling.py"))


def commands_of(page: str) -> list[list[str]]:
    """Whole commands of a page, as words without comments; lines with placeholders such as A|B are no commands."""
    lines = re.findall(r"^ {4}(layerbudget .+)$", (ROOT / page).read_text(encoding="utf-8"), re.M)
    return [shlex.split(line, comments=True) for line in lines if not re.search(r"\||\[|\.\.\.|  +\w", line.split("#")[0])]


def test_every_command_that_is_shown_has_the_flags_that_it_shows():
    count = 0
    for page in PAGES:
        for _, verb, *words in commands_of(page):
            assert verb in VERBS, f"{page}: {verb}"
            try:
                parsed([verb, *words])
            except (SystemExit, WrongCommand, LayerbudgetError):
                pytest.fail(f"{page} shows a command that does not parse: {verb} {' '.join(words)}")
            count += 1
    assert count > 30


def test_the_readme_fits_two_screens_and_says_first_when_it_will_not_help():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 700
    assert (
        text.index("make demo") < text.index("overview.png") < text.index("When this will not help") < text.index("## Results")
    )
    assert "| uniform |" in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def test_the_notebook_stores_what_it_prints_and_a_figure_for_every_step(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    book = json.loads((ROOT / "examples" / "teaching.ipynb").read_text(encoding="utf-8"))
    again = runpy.run_path(str(ROOT / "scripts" / "run_notebook.py"))["run"](json.loads(json.dumps(book)))

    def printed(notebook):
        """What is printed, without the last digits of numbers: processors differ in them."""
        lines = [["".join(o["text"]) for o in cell.get("outputs", ()) if "text" in o] for cell in notebook["cells"]]
        return [[re.sub(r"\d\.\d{10,}", lambda found: f"{float(found.group()):.10g}", text) for text in cell] for cell in lines]

    assert printed(book) == printed(again) and "uniform has" in str(printed(book))
    drawn = sum("image/png" in o.get("data", ()) for cell in book["cells"] for o in cell.get("outputs", ()))
    assert drawn == sum("draw(" in "".join(cell["source"]) for cell in book["cells"]) == 8


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_gallery_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert rules_of("ranks")
    with ESTIMATORS.kept(), DECISIONS.kept(), EXPORTS.kept(), RULES["ranks"].kept():
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert f"examples/{name}" in (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


def test_the_rows_and_the_water_of_the_gallery(tmp_path, monkeypatch):
    for name, out in (("chat_rows.py", "rows.jsonl"), ("water_filling.py", "water.png")):
        words = [str(tmp_path / out)] if name == "chat_rows.py" else ["--budget", "24", "--out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 300 and (tmp_path / "water.png").stat().st_size > 1000
