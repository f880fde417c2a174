"""The embedded corpus: source code of the Python standard library, which every Python carries, so that nothing is downloaded.

Three groups of top-level modules, disjoint and fixed by name, serve three purposes:

- ``training``: what the embedded model was trained on (every other pure-Python module plus the ``test`` package,
  without the tests of held-out modules), read once by ``scripts/train_demo_model.py``;
- ``calibration``: what scores and pruning statistics are computed on;
- ``evaluation``: what perplexity is reported on.

A module that another Python version lacks is skipped, and the caller is told which.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from ..errors import InvalidInput

CALIBRATION = tuple("asyncio configparser csv email enum gettext logging selectors shutil statistics tarfile urllib".split())
EVALUATION = tuple(
    "argparse ast dataclasses difflib fractions heapq http ipaddress pickle subprocess tempfile textwrap".split()
)
# Tables and generated text teach a language model little; machine-specific files would leak the builder's paths.
_NEVER = ("encodings", "pydoc_data", "site-packages", "__pycache__", "lib2to3", "idlelib", "_sysconfigdata", "this")
_TABLES = {"__pycache__", "encoded_modules", "cjkencodings", "tokenizedata"}


def root() -> Path:
    """Folder of the standard library of the running Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def _sources(name: str, base: Path) -> list[Path]:
    single, package = base / f"{name}.py", base / name
    if single.is_file():
        return [single]
    skipped = {*_TABLES, "tests", "test", "idle_test"}
    return [f for f in sorted(package.rglob("*.py")) if not skipped & set(f.relative_to(package).parts[:-1])]


def training_names() -> tuple[str, ...]:
    """Names of the top-level modules of the training group present in this Python, sorted."""
    held_out = set(CALIBRATION) | set(EVALUATION)
    names = {p.stem if p.is_file() else p.name for p in root().iterdir() if p.suffix == ".py" or p.is_dir()}
    return tuple(sorted(n for n in names if n not in held_out and not n.startswith(_NEVER) and _sources(n, root())))


def _test_sources(base: Path) -> list[Path]:
    held_out = tuple(f"test_{n}" for n in CALIBRATION + EVALUATION)
    candidates = [(f, f.relative_to(base / "test").parts) for f in sorted((base / "test").rglob("*.py"))]
    return [f for f, parts in candidates if not parts[0].removesuffix(".py").startswith(held_out) and not _TABLES & set(parts)]


def read(group: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Documents of a group, ``[(name, text), ...]``, and its modules that this Python does not have.

    Documents come in a fixed order, one per source file, named by its path inside the library.
    """
    groups = {"calibration": CALIBRATION, "evaluation": EVALUATION}
    if group not in (*groups, "training"):
        raise InvalidInput(
            f"stdlib has no group {group!r}.", "It has calibration, evaluation and training.", "Name one of them."
        )
    base = root()
    sources = {name: _sources(name, base) for name in groups.get(group) or training_names()}
    files = [f for paths in sources.values() for f in paths] + (_test_sources(base) if group == "training" else [])
    texts = [(f.relative_to(base).as_posix(), f.read_bytes().decode("utf-8", errors="ignore")) for f in files]
    documents = [(name, text.replace("\r\n", "\n")) for name, text in texts if text.strip()]
    return documents, [name for name, paths in sources.items() if not paths]
