"""The scripts in ``benchmarks/``: what is named, what is stamped, and parts that fail in ways of their own."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import stamp

ROOT = Path(__file__).parents[1]
FOLDER, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"
SCRIPTS = sorted(
    [f.parent.name for f in FOLDER.glob("*/__main__.py")] + [f.stem for f in FOLDER.glob("*.py") if f.name != "stamp.py"]
)
README = (FOLDER / "README.md").read_text()
ROWS = {name: row for row in README.splitlines() if row.startswith("| `") for name in [row.split("`")[1]]}
# Commit, date, command, processor, versions, seconds, memory.
FIELDS = (r"commit `[0-9a-f]{8}`.*", r"20\d\d-\d\d-\d\d", ".*`.+`.*", ".+", ".+", r"\d.* s\b.*|.*seconds.*", "memory .+")


def parts_of(script: str) -> list[str]:
    """Names of a folder's parts; none of a script that is one file."""
    main = FOLDER / script / "__main__.py"
    found = [n for n in ast.walk(ast.parse(main.read_text())) if isinstance(n, ast.Dict)] if main.is_file() else []
    return [key.value for key in found[0].keys] if found else []


def test_the_readme_names_every_script_with_its_parts_and_its_page():
    assert sorted(ROWS) == SCRIPTS
    for script, row in ROWS.items():
        assert re.findall(r"`(\w+)`", row.split("|")[1])[1:] == parts_of(script), script
    named = set(re.findall(r"\(results/(\w+\.md)\)", README))
    assert named == {f.name for f in RESULTS.glob("*.md")}


def test_every_part_is_a_module_that_can_be_run():
    for script in SCRIPTS:
        for file in [FOLDER / script / f"{part}.py" for part in parts_of(script)] or [FOLDER / f"{script}.py"]:
            functions = [n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
            assert "main" in functions, file


def test_every_section_of_results_has_a_stamp():
    for page in RESULTS.glob("*.md"):
        sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
        titles = [section.splitlines()[0] for section in sections]
        assert sections and len(set(titles)) == len(titles), page.name
        for section in sections:
            line = section.splitlines()[2]
            fields = line.removeprefix("> ").split(" · ")
            assert line.startswith("> ") and len(fields) == len(FIELDS), (page.name, section[:200])
            assert all(re.fullmatch(pattern, field) for pattern, field in zip(FIELDS, fields, strict=True)), line


def test_results_hold_pages_and_rows_that_scripts_read_and_nothing_else():
    assert {f.suffix for f in RESULTS.iterdir() if f.is_file()} == {".md"}
    assert [f.name for f in RESULTS.iterdir() if f.is_dir()] == ["rows"]
    assert {f.suffix for f in (RESULTS / "rows").iterdir()} == {".jsonl"}


def test_what_the_docs_cite_is_there():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    for page in pages:
        text = page.read_text()
        for cited in re.findall(r"benchmarks/results/[\w*.-]+|benchmarks/\w+\.(?:py|sh)", text):
            assert (ROOT / cited.rstrip(".")).exists(), f"{page.name} cites {cited}"
        for script, part in re.findall(r"python -m benchmarks\.(\w+)(?: (\w+))?", text):
            assert script in SCRIPTS and part in (parts_of(script) or [part]), f"{page.name} cites {script} {part}"


HELP = """
import contextlib, io, json, runpy, sys
said = {}
for name in sys.argv[1:]:
    sys.argv, out = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    said[name] = out.getvalue()
    assert "torch" not in sys.modules, f"{name} imports torch before it knows what to do"
print(json.dumps(said))
"""


def test_every_script_says_its_help_at_once():
    names = [*SCRIPTS, "stamp", "gpu.train"]
    done = subprocess.run([sys.executable, "-c", HELP, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    for name, text in json.loads(done.stdout).items():
        assert text.startswith("usage: ") and all(part in text for part in parts_of(name)), (name, text)


def test_a_section_takes_the_place_of_the_one_with_its_title(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks.bits groups", "--model", "/home/me/model"])
    page = stamp.write_section("bits", "One", "# Top\n\ntext", out=tmp_path)
    page.write_text(page.read_text().replace("# bits", "# Bits\n\nA head that stays."))
    stamp.write_section("bits", "Two", ["more"], out=tmp_path)
    stamp.write_section("bits", "One", "new", out=tmp_path)
    text = page.read_text()
    assert re.findall(r"^## .*", text, re.MULTILINE) == ["## One", "## Two"] and "text" not in text and "\nnew\n" in text
    assert text.startswith("# Bits\n\nA head that stays.\n\n## One\n\n> commit `")
    assert "`python -m benchmarks.bits groups --model model`" in text and "/home" not in text
    fields = text.splitlines()[6].removeprefix("> ").split(" · ")
    assert all(re.fullmatch(pattern, field) for pattern, field in zip(FIELDS, fields, strict=True)), fields
    assert "## Two" in capsys.readouterr().out


def test_rows_are_kept_in_order(tmp_path):
    assert stamp.read_rows("a", tmp_path) == []
    for i in range(3):
        stamp.keep_row("a", {"i": i}, tmp_path)
    assert [row["i"] for row in stamp.read_rows("a", tmp_path)] == [0, 1, 2]


def test_incomplete_output_of_llama_perplexity_is_said_with_its_last_lines():
    """Its standard output was cut sometimes: nothing was found in it, and the error was one of types."""
    pytest.importorskip("gguf")
    from benchmarks.bits.ggml_types import kld_of

    assert kld_of("a\nMean    KLD:   0.012345 ±   0.000678\nb") == (0.012345, 0.000678)
    cut = "\n".join(f"line {n}" for n in range(20)) + "\nMean    KLD:   0.01"
    with pytest.raises(SystemExit, match="printed no mean KLD: its output is incomplete") as said:
        kld_of(cut)
    assert "line 13" in str(said.value) and "line 12" not in str(said.value) and str(said.value).endswith("KLD:   0.01")


def test_searches_of_codes_beside_all_codes_and_the_bound_of_any_rule():
    """All codes of a few columns are tried: a wide beam finds the best, sweeps never raise, no mean is below the bound."""
    torch = pytest.importorskip("torch")
    limits = pytest.importorskip("benchmarks.bits.limits")
    generator = torch.Generator().manual_seed(3)
    for columns in (2, 4):
        inputs = torch.randn(64, columns, generator=generator, dtype=torch.float64)
        inputs[:, 1] += inputs[:, 0]
        moment = inputs.T @ inputs
        upper = torch.linalg.cholesky(torch.linalg.inv(moment), upper=True)
        weight = 4 * torch.rand(400, columns, generator=generator, dtype=torch.float64) - 2
        problem = limits.Problem(weight, torch.full_like(weight, 0.5), moment, upper)
        every = torch.cartesian_prod(*[torch.arange(limits.LEAST, limits.MOST + 1.0)] * columns).double()
        errors = weight[:, None, :] - every * 0.5
        best = float(((errors @ moment) * errors).sum(-1).amin(1).sum())
        fed, wide = problem.beam(1), problem.beam(2**columns)
        least, expected = problem.bound()
        assert best == pytest.approx(problem.form(wide), rel=0.02) and problem.form(wide) >= best * (1 - 1e-9)
        assert problem.form(fed) >= problem.form(problem.sweeps(fed)) >= best * (1 - 1e-9)
        assert least < best and problem.form(fed) == pytest.approx(expected, rel=0.1)
