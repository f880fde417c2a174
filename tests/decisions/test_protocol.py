"""Every decision keeps the protocol; one from a file outside the package as well, by one registration."""

import ast
import json
import re
from pathlib import Path

import pytest
from tests import conformance, zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.decision import DECISIONS, EXPORTS
from layerbudget.registry import run_file

SRC = Path(lb.__file__).parent
EXAMPLE = SRC.parents[1] / "examples" / "own_decision.py"
OURS = tuple(DECISIONS.names())


@pytest.mark.parametrize("name", OURS)
def test_a_decision_declares_itself(name):
    conformance.check_declared(DECISIONS.find(name))


@pytest.mark.parametrize("name", OURS)
def test_its_help_names_its_options(name, capsys):
    conformance.check_help(DECISIONS.find(name), capsys)


def test_a_decision_from_a_file_keeps_the_same_protocol(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with DECISIONS.kept(), EXPORTS.kept():
        run_file.cache_clear()
        assert main(["plan", f"{EXAMPLE}:kept16", "demo", "--keep", "3", "-o", "p.json"]) == 0
        said = capsys.readouterr().out
        assert f"apply demo p.json -o DIR --plugin {EXAMPLE}" in said
        decision, plan = DECISIONS.find("kept16"), lb.Plan.load("p.json")
        assert plan.made_by.endswith(f"plan kept16 demo --keep 3 --out p.json --plugin {EXAMPLE}") or plan.made_by
        conformance.check_declared(decision)
        conformance.check_help(decision, capsys)
        (tmp_path / "folder").mkdir()
        conformance.check_plan(plan, tmp_path / "folder", capsys)
        assert main(["export", "p.json", "-o", "skip.json"]) == 0
        assert len(json.loads(Path("skip.json").read_text())["llm_int8_skip_modules"]) == 3 * 7
        capsys.readouterr()
        assert main(["apply", "demo", "p.json", "-o", "out", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kept"] == 21 and Path("out/plan.json").is_file()
        model = lb.load_model("demo")
        assert lb.apply_plan(model, plan).rounded == 63
        assert main(["plan", "kept16", "demo", "--keep", "13", "-o", "q.json"]) == 2
        assert "Use a number from 0 to 12" in capsys.readouterr().err


# Files outside decisions/ in which the name of a kind stands as a text of its own, with the reason. No other may.
NAMED = {
    "decision": "the table of the decisions that this package brings",
    "budget": "units and prices of ranks and experts, which budgets are written in",
    "plan": "Plan.pruner, which tools of others read",
    "records": "an error names the verb that plans from scores",
    "cli/compare": "its flags are the budgets of the kinds that it compares: --sparsity, --ranks, --lora-experts",
    "cli/display": "the word memory: bytes, not the decision",
    "cli/doctor": "the word memory, and columns of its table of what fits",
    "cli/explain": "the paper's two programs in transfer, the default of sweep, and the field bits",
    "cli/score": "the plan that follows scores which no decision has measured",
    "cli/shown": "the header of a table of formats",
    "comparison/bench": "the bench that prunes and reads text",
    "comparison/grid": "directional plans are measured for sparsity alone",
    "comparison/run": "the default kind",
    "demo/run": "the demo's own job",
    "diagnosis/fits": "fields of a record",
    "reporting/explain": "the field bits: codelengths",
    "reporting/page": "the chart of a memory",
    "reporting/records": "fields of receipts",
    "reporting/sweep": "the paper's two programs in transfer, and the default",
    "reporting/tables": "fields of rows, and the demo's table",
    "sensitivity/rank_gain": "fields of scores",
    "solvers/programs": "arguments of the program",
}


def constants_of(file):
    """Texts of a file, without docstrings."""
    return {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}


def test_no_file_outside_its_folder_knows_a_decision():
    """No plan is asked for its kind outside decisions/, and no text names a kind but where the reason stands."""
    found = {}
    for file in SRC.rglob("*.py"):
        name = "/".join(file.relative_to(SRC).with_suffix("").parts).removesuffix("/__init__")
        if name.startswith("decisions"):
            continue
        if constants_of(file) & set(OURS):
            found[name] = True
        asked = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Compare)]
        asked = [ast.unparse(n) for n in asked if re.match(r"(\w+\.)?plan\.kind (==|!=|in|not in) [('\[{]", ast.unparse(n))]
        assert not asked, (name, asked)
    assert set(found) == set(NAMED)


def test_a_folder_is_entered_by_its_door():
    """Outside of it, names of a decision are imported from its ``__init__`` and from nowhere below."""
    folders = {file.parent.name for file in SRC.glob("decisions/*/decision.py")}
    for file in SRC.rglob("*.py"):
        parts = file.relative_to(SRC).parts
        mine = parts[1] if parts[0] == "decisions" and len(parts) > 2 else ""
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level:
                for folder in folders - {mine}:
                    entered = re.match(rf"(decisions\.)?{folder}\.\w", node.module)
                    inside = "decisions" in node.module or parts[0] == "decisions"
                    assert not (entered and inside), f"{file.relative_to(SRC)} imports from {node.module}"


def test_a_zoo_plan_is_described(tmp_path, capsys):
    plan = zoo.plan(zoo.speaker("llama"))
    conformance.check_plan(plan, tmp_path, capsys)
