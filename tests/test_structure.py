"""The house rules that a machine can check."""

import ast
import functools
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

from tests import zoo

import layerbudget

SRC = Path(layerbudget.__file__).parent


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


CORE = """
import importlib, sys
from layerbudget.cli import main
for name in sys.argv[1:]:
    importlib.import_module(f"layerbudget.{name}")
scores = ("sparsity s.json --sparsity .5", "ranks s.json --mean-rank 4", "lora-experts s.json --total 10")
damages = ("bits d.json --bits 6", "memory d.json --memory 3MiB --context 64")
for words in (*scores, *damages):
    assert main(["plan", *words.split(), "--quiet"]) == 0, words
try:
    main(["--help"])
except SystemExit:
    pass
loaded = {m.split(".")[0] for m in sys.modules} & {"torch", "transformers", "scipy", "matplotlib"}
sys.exit(f"imported: {loaded}" if loaded else 0)
"""


def test_what_says_no_torch_and_plans_from_scores_and_the_help_never_import_it(tmp_path):
    """The rooms before ``gguf``; behind them every program, and every file whose first line says so."""
    zoo.scores([3.0, 1.0]).save(tmp_path / "s.json")
    small = {"formats": ["Q4_0", "Q8_0"], "cache": ["Q8_0"], "draws": 1, "save_scores": tmp_path / "d.json"}
    wide = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads that Q8_0 can keep
    layerbudget.plan_memory(zoo.build("llama", **wide), zoo.tokens(2, 8), memory="3 MiB", context=64, **small)
    core, names = ROOMS[: ROOMS.index("gguf")], []
    for name in names_and_imports():
        first = (ast.get_docstring(tree_of(file_of(name))) or "").partition("\n")[0]
        if name.split("/")[0] in core or name.endswith("/program") or "No torch" in first:
            names.append(name.replace("/", "."))
    done = subprocess.run([sys.executable, "-c", CORE, *names], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(names) > 70


def file_of(name: str) -> Path:
    file = SRC / f"{name}.py"
    return file if file.is_file() else SRC / name / "__init__.py"


def test_no_plan_imports_torch_of_its_own():
    """Models are seen in signatures alone; what measures them lies in files beside the plan."""
    for file in SRC.glob("decisions/*/plan.py"):
        tree = tree_of(file)
        typed = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        inside = {id(inner) for block in typed for inner in ast.walk(block)}
        names = [name for n in ast.walk(tree) if id(n) not in inside for name in imported(n)]
        assert "torch" not in {name.split(".")[0] for name in names}, file


def imported(node: ast.AST) -> list[str]:
    """Names of the modules that a statement imports, but for relative ones."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_every_public_name_resolves():
    for name in layerbudget.__all__:
        assert getattr(layerbudget, name) is not None


def test_editors_and_type_checkers_see_every_public_name():
    tree = ast.parse((SRC / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = [(n.level, n.module, a.name, a.asname) for n in block.body for a in n.names]
    assert sorted(seen) == sorted((1, module, name, name) for name, module in layerbudget._PUBLIC.items())


def test_full_names_in_docstrings_lead_to_where_the_reference_has_them():
    """A module's own page has what is defined in it, and what its ``__all__`` names; the top package has no page."""
    role = re.compile(r":(func|class|mod|meth):`~?(layerbudget\.[\w.]+)`")
    found = {(file.name, *match.groups()) for file in SRC.rglob("*.py") for match in role.finditer(file.read_text())}
    lost = [(file, name) for file, kind, name in sorted(found) if not documented(kind, name)]
    assert not lost and len(found) > 50
    assert not documented("func", "layerbudget.perplexity")


def documented(kind: str, name: str) -> bool:
    module, _, own = name.rpartition(".")
    if kind == "mod":
        return importlib.util.find_spec(name) is not None
    if kind == "meth":
        return documented("class", module) and hasattr(pkgutil.resolve_name(module), own)
    if module == "layerbudget":
        return False
    place = importlib.import_module(module)
    made = getattr(place, own, None)
    return made is not None and (own in getattr(place, "__all__", ()) or getattr(made, "__module__", module) == module)


def test_no_print_no_bare_except_no_assert():
    for file in SRC.rglob("*.py"):
        for node in ast.walk(tree_of(file)):
            where = file, getattr(node, "lineno", 0)
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), where
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), where
            assert not isinstance(node, ast.Assert), where


def test_the_formatter_is_never_switched_off():
    for file in SRC.rglob("*.py"):
        assert "# fmt:" not in file.read_text(), file


ROOMS = (
    "errors",
    "arguments",
    "progress",
    "canonical",
    "storage",
    "frozen",
    "records",
    "registry",
    "requests",
    "session",
    "decision",
    "plan",
    "scores",
    "verdicts",
    "solvers",
    "budget",
    "gguf",
    "models",
    "data",
    "execution",
    "compressors",
    "llama_cpp",
    "sensitivity",
    "evaluation",
    "cost",
    "decisions/files",
    "decisions/written",
    "decisions/describe",
    "decisions/charts",
    "decisions/rules",
    "decisions/making",
    "decisions/capacity",
    "decisions/adapters",
    "decisions/formats",
    "decisions/sparsity",
    "decisions/bits",
    "decisions/cache",
    "decisions/ranks",
    "decisions/lora_experts",
    "decisions/expert_pruning",
    "decisions/shapes",
    "decisions/memory",
    "decisions/joint",
    "decisions",
    "reporting",
    "exports",
    "finetuning",
    "comparison",
    "diagnosis",
    "demo",
    "cli",
)


def imports_of(file: Path) -> set[str]:
    """Modules of this package that a file imports, also inside functions; what serves type checkers only is left out."""
    tree, parts = tree_of(file), file.relative_to(SRC).with_suffix("").parts
    found: set[str] = set()

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*parts[: len(parts) - node.level], *(node.module or "").split(".")]
            base = [p for p in base if p]
            for name in node.names:
                whole = [*base, name.name]
                found.add("/".join(whole if is_module(tuple(whole)) else base))
        for child in ast.iter_child_nodes(node):
            look(child)

    look(tree)
    return found


@functools.cache
def is_module(parts: tuple[str, ...]) -> bool:
    return SRC.joinpath(*parts).with_suffix(".py").is_file() or SRC.joinpath(*parts, "__init__.py").is_file()


@functools.cache
def names_and_imports() -> dict[str, set[str]]:
    files = {"/".join(f.relative_to(SRC).with_suffix("").parts).removesuffix("/__init__"): f for f in SRC.rglob("*.py")}
    return {name: imports_of(file) for name, file in files.items() if name not in ("__init__", "__main__")}


def room_of(name: str) -> int:
    """Place of a file's room in :data:`ROOMS`; every decision is a room of its own."""
    parts = name.split("/")
    return ROOMS.index("/".join(parts[:2]) if "/".join(parts[:2]) in ROOMS else parts[0])


def test_imports_flow_one_way():
    """A file imports only from rooms before its own, in the order of :data:`ROOMS`, and from its own."""
    for name, imported in names_and_imports().items():
        for other in imported - {""}:
            assert room_of(other) <= room_of(name), f"{name} imports {other}"


def test_no_circle_between_files():
    graph, done, path = names_and_imports(), set(), []

    def visit(name: str) -> None:
        assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name in done or name not in graph:
            return
        path.append(name)
        for other in graph[name]:
            visit(other)
        done.add(path.pop())

    for name in graph:
        visit(name)
