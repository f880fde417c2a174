"""The house rules that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

import layerbudget

SRC = Path(layerbudget.__file__).parent


def test_the_decision_core_never_imports_torch():
    code = (
        "import sys; import layerbudget.plan, layerbudget.planning, layerbudget.costs, layerbudget.scores.record;"
        "import pkgutil, importlib, layerbudget.program as p;"
        "[importlib.import_module(f'layerbudget.program.{m.name}') for m in pkgutil.iter_modules(p.__path__)];"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers')]; sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_is_quick_because_it_imports_neither_torch_nor_scipy():
    code = (
        "import sys, layerbudget.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'scipy', 'matplotlib')]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves():
    for name in layerbudget.__all__:
        assert getattr(layerbudget, name) is not None


def test_editors_and_type_checkers_see_every_public_name():
    tree = ast.parse((SRC / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = [(n.level, n.module, a.name, a.asname) for n in block.body for a in n.names]
    assert sorted(seen) == sorted((1, module, name, name) for name, module in layerbudget._PUBLIC.items())


def test_no_print_no_bare_except_no_assert():
    for file in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(SRC)}:{getattr(node, 'lineno', 0)}"
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), where
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), where
            assert not isinstance(node, ast.Assert), where


def test_imports_flow_one_way():
    """When it loads, a file imports only from files to its left; doors forward (Plan.to_lora_config) open inside functions."""
    forbidden = {
        "errors.py": {"records", "blocks", "scores", "program", "plan", "pruning", "lora", "evaluation", "report", "cli"},
        "records.py": {"blocks", "scores", "program", "plan", "pruning", "lora", "evaluation", "report", "cli"},
        "blocks.py": {"scores", "program", "plan", "planning", "pruning", "lora", "evaluation", "report", "cli"},
        "plan.py": {"blocks", "pruning", "lora", "evaluation", "report", "cli", "loading"},
    }
    folders = {
        "data": {"scores", "program", "plan", "planning", "pruning", "lora", "report", "cli"},
        "program": {
            "blocks",
            "scores",
            "plan",
            "planning",
            "pruning",
            "lora",
            "evaluation",
            "report",
            "cli",
            "data",
            "loading",
        },
        "scores": {"plan", "planning", "pruning", "lora", "evaluation", "report", "cli"},
        "pruning": {"report", "cli"},
        "lora": {"report", "cli"},
        "report": {"cli"},
    }
    for file in SRC.rglob("*.py"):
        relative = file.relative_to(SRC)
        bad = forbidden.get(str(relative)) or folders.get(relative.parts[0], set())
        depth = len(relative.parts)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
                assert node.module.split(".")[0] not in bad, f"{relative}:{node.lineno} imports {node.module}"
