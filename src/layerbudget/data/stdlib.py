"""The embedded corpus: source code of the Python standard library.

Every Python carries it, so no download is needed. Three groups of top-level modules, disjoint and fixed by
name, serve three purposes:

- ``TRAINING``: what the embedded model was trained on (every other pure-Python module plus the ``test`` package,
  without the tests of held-out modules), read once by ``scripts/train_demo_model.py``;
- ``CALIBRATION``: what scores and pruning statistics are computed on;
- ``EVALUATION``: what perplexity is reported on.

A module that another Python version lacks is skipped, and the caller is told which.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

CALIBRATION: tuple[str, ...] = (
    "asyncio", "configparser", "csv", "email", "enum", "gettext", "logging", "selectors", "shutil", "statistics",
    "tarfile", "urllib",
)  # fmt: skip

EVALUATION: tuple[str, ...] = (
    "argparse", "ast", "dataclasses", "difflib", "fractions", "heapq", "http", "ipaddress", "pickle", "subprocess",
    "tempfile", "textwrap",
)  # fmt: skip

# Tables and generated text teach a language model little; machine-specific files would leak the builder's paths.
_NEVER = ("encodings", "pydoc_data", "site-packages", "__pycache__", "lib2to3", "idlelib", "_sysconfigdata", "this")
_SKIPPED_PARTS = {"__pycache__", "tests", "test", "idle_test", "encoded_modules", "cjkencodings", "tokenizedata"}


def root() -> Path:
    """Folder of the standard library of the running Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def _sources(name: str, base: Path) -> list[Path]:
    single, package = base / f"{name}.py", base / name
    if single.is_file():
        return [single]
    if package.is_dir():
        files = sorted(package.rglob("*.py"))
        return [f for f in files if not _SKIPPED_PARTS & set(f.relative_to(package).parts[:-1])]
    return []


def training_names() -> tuple[str, ...]:
    """Names of the top-level modules of the training group present in this Python, sorted."""
    held_out = set(CALIBRATION) | set(EVALUATION)
    names = {p.stem if p.is_file() else p.name for p in root().iterdir() if p.suffix == ".py" or p.is_dir()}
    return tuple(sorted(n for n in names if n not in held_out and not n.startswith(_NEVER) and _sources(n, root())))


def _test_sources(base: Path) -> list[Path]:
    held_out = tuple(f"test_{n}" for n in CALIBRATION + EVALUATION)
    files = sorted((base / "test").rglob("*.py")) if (base / "test").is_dir() else []
    kept = []
    for f in files:
        parts = f.relative_to(base / "test").parts
        if parts[0].removesuffix(".py").startswith(held_out):
            continue
        if not {"__pycache__", "encoded_modules", "cjkencodings", "tokenizedata"} & set(parts):
            kept.append(f)
    return kept


def read(group: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Read one group: ``([(name, text), ...], missing)``.

    Args:
        group: ``"training"``, ``"calibration"`` or ``"evaluation"``.

    Returns:
        Documents in a fixed order (one per source file, named by its path inside the library) and the names of the
        group's modules that this Python does not have.

    Raises:
        ValueError: The group is not one of the three.
    """
    groups = {"calibration": CALIBRATION, "evaluation": EVALUATION}
    if group not in (*groups, "training"):
        raise ValueError(f"stdlib has no group {group!r}. It has calibration, evaluation and training. Name one of them.")
    base = root()
    names = groups.get(group) or training_names()
    files, missing = [], []
    for name in names:
        found = _sources(name, base)
        files += found
        if not found:
            missing.append(name)
    if group == "training":
        files += _test_sources(base)
    documents = []
    for f in files:
        text = f.read_bytes().decode("utf-8", errors="ignore").replace("\r\n", "\n")
        if text.strip():
            documents.append((f.relative_to(base).as_posix(), text))
    return documents, missing
