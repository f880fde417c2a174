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
from layerbudget.errors import InvalidInput
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
        assert f"layerbudget explain p.json --plugin {EXAMPLE} says what it rests on" in said
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
        receipt = conformance.check_applied(plan, lb.load_model("demo"))
        assert receipt.counted() == {"rounded": 63, "kept": 21}
        assert main(["plan", "kept16", "demo", "--keep", "13", "-o", "q.json"]) == 2
        assert "Use a number from 0 to 12" in capsys.readouterr().err


WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96, "num_hidden_layers": 2}
MEMORY = {"memory": f"{zoo.buffers(inner=48) + 120000} bytes", "context": 64}


def planned(name):
    """A small plan of every decision that is applied by one call: model, plan, data and what is checked of the receipt."""
    text = zoo.tokens(2, 8)
    wide, narrow = zoo.build("llama", **WIDE), zoo.tokens(2, 8, vocabulary=96)
    return {
        "sparsity": lambda: (model := zoo.speaker("llama"), zoo.plan(model), text, {}),
        "bits": lambda: (wide, lb.plan_bits(wide, narrow, bits=6, draws=1), None, {"method": "rtn"}),
        "cache": lambda: (wide, lb.plan_cache(wide, narrow, context=16, bits=6, group=16, draws=1), None, {"cached": True}),
        "memory": lambda: (
            wide,
            lb.plan_memory(wide, narrow, draws=1, method="rtn", **MEMORY),
            None,
            {"cached": True, "method": "rtn"},
        ),
        "shapes": lambda: (
            model := zoo.build("llama"),
            lb.plan_shapes(model, text, "20% flops", even=True, draws=1, strides=1, passes=20),
            text,
            {},
        ),
        "expert-pruning": lambda: (
            model := zoo.build("qwen3-moe"),
            lb.plan_expert_pruning(model, text, 0.5, draws=1),
            None,
            {},
        ),
        "ranks": lambda: (model := zoo.adaptable(), zoo.linears(model, 2), None, {}),
        "lora-experts": lambda: (model := zoo.adaptable(), zoo.layers(model, [2, 1, 2, 1]), None, {"rank": 2}),
    }[name]()


@pytest.mark.parametrize("name", [name for name in OURS if name != "joint"])
def test_applying_a_plan_gives_a_receipt(name):
    model, plan, data, options = planned(name)
    conformance.check_applied(plan, model, data, **options)


def test_what_is_not_applied_by_one_call_and_text_that_is_not_read_are_refused():
    model = zoo.adaptable()
    with pytest.raises(InvalidInput, match="kind ranks reads none"):
        lb.apply_plan(model, zoo.linears(model, 2), zoo.tokens(2, 8))
    with pytest.raises(InvalidInput, match="kind joint cannot be applied by one call"):
        lb.apply_plan(model, lb.plan_joint(zoo.scores([2.0, 1.0, 3.0]), budget="-1 kB"))


# Files outside decisions/ in which the name of a kind stands as a text of its own, with the reason. No other may.
NAMED = {
    "decision": "the table of the decisions that this package brings",
    "budget": "units and prices of ranks and experts, which budgets are written in",
    "cost/machines": "the word memory: a limit of a process, not the decision",
    "plan": "Plan.pruner, which tools of others read",
    "records": "an error names the verb that plans from scores",
    "cli/compare": "its flags are the budgets of the kinds that it compares: --sparsity, --ranks, --lora-experts",
    "cli/display": "the word memory: bytes, not the decision",
    "cli/doctor": "the word memory, and columns of its table of what fits",
    "cli/explain": "the paper's two programs in transfer, the default of sweep, and the field bits",
    "cli/score": "the plan that follows scores which no decision has measured",
    "cli/shown": "the header of a table of formats",
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
    """No plan and no request is asked for its kind outside decisions/, and no text names a kind but where the reason stands."""
    found = {}
    for file in SRC.rglob("*.py"):
        name = "/".join(file.relative_to(SRC).with_suffix("").parts).removesuffix("/__init__")
        if name.startswith("decisions"):
            continue
        if constants_of(file) & set(OURS):
            found[name] = True
        asked = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Compare)]
        asked = [ast.unparse(n) for n in asked if re.match(r"(\w+\.)+kind (==|!=|in|not in) [('\[{]", ast.unparse(n))]
        asked = [words for words in asked if any(f"'{kind}'" in words for kind in OURS)]
        assert not asked or name == "plan", (name, asked)  # Plan.pruner: see NAMED
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
