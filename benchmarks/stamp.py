"""How a page of results is written: sections of one table or a few, each under a stamp that says where its figures come from.

A page is ``results/NAME.md``. A script writes one section of it with :func:`write_section`; other sections stay. The stamp has the
commit, the date, the command, the processor, the versions, the seconds and the largest memory of the process that wrote it.

    python -m benchmarks.stamp robustness "A title" < text.md      # a section from elsewhere, under a stamp of now
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROWS = RESULTS / "rows"
PACKAGES = ("torch", "transformers", "numpy")
_STARTED = time.perf_counter()


def run_parts(name: str, about: str, parts: Mapping[str, str]) -> None:
    """Run one part of ``python -m benchmarks.NAME PART ...``; the other words are the part's own.

    Args:
        name: Of the folder.
        about: Its docstring.
        parts: What every module of the folder measures, by name. Nothing of them is imported before one is chosen.
    """
    width = max(map(len, parts))
    listed = "\n".join(f"  {part:<{width}}  {what}" for part, what in parts.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=f"{about}\n\nparts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False,
    )  # fmt: skip
    parser.add_argument("part", choices=parts, help="what to measure; PART --help has its options")
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        parser.print_help()
        return
    part = parser.parse_args(sys.argv[1:2]).part
    sys.argv = [f"python -m benchmarks.{name} {part}", *sys.argv[2:]]
    importlib.import_module(f"benchmarks.{name}.{part}").main()


def commit() -> str:
    """Short hash of the commit, and whether tracked files differ from it; pages of results do not count."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"commit `{git('rev-parse', '--short=8', 'HEAD') or 'unknown'}` ({'with changes' if changed else 'clean tree'})"


def command() -> str:
    """The command line of this process, without folders of this machine."""
    words = [word if word.startswith("-") or "/" not in word else Path(word).name for word in sys.argv[1:]]
    first = sys.argv[0] if sys.argv[0].startswith("python") else f"python -m benchmarks.{Path(sys.argv[0]).stem}"
    return " ".join([first, *(f"'{word}'" if " " in word else word for word in words)])


def processor() -> str:
    """Name of the processor, where the system says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> str:
    """Versions of Python and of packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def peak_gib() -> float:
    """Largest resident memory of this process or of one that it started, GiB."""
    used = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(used) / (2**30 if sys.platform == "darwin" else 2**20)


def stamp(peers: Iterable[str] = ()) -> str:
    """The stamp as one line of Markdown.

    Args:
        peers: Packages that the figures compare with, or that made them; their versions stand beside ours.
    """
    here, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    used = sum(part.ru_utime + part.ru_stime for part in (here, children))
    fields = (
        commit(), f"{datetime.date.today():%Y-%m-%d}", f"`{command()}`",
        f"{processor()}, {os.cpu_count()} cores, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}",
        versions((*PACKAGES, *peers)),
        f"{time.perf_counter() - _STARTED:.0f} s, {used:.0f} s of the processor", f"memory {peak_gib():.1f} GiB",
    )  # fmt: skip
    return "> " + " · ".join(fields)


def write_section(page: str, title: str, text: str | Iterable[str], *, out: Path = RESULTS, peers: Iterable[str] = ()) -> Path:
    """Write one section of a page under a stamp of now, in the place of the one with its title, and print it.

    Args:
        page: Name of the page, without ``.md``.
        title: Heading of the section.
        text: Its Markdown, or the lines of it. Its headings stand below the section's: from ``###`` on.
        out: Folder of the page; it is made where it is missing.
        peers: As in :func:`stamp`.

    Returns:
        The page's path.
    """
    from layerbudget.storage.writing import write_text

    whole = text if isinstance(text, str) else "\n".join(text)
    body = re.sub(r"^(#+)(?= )", lambda m: "#" * max(3, len(m[1])), whole, flags=re.MULTILINE).strip("\n")
    section = f"## {title}\n\n{stamp(peers)}\n\n{body}\n"
    path = out / f"{page}.md"
    out.mkdir(parents=True, exist_ok=True)
    head, *sections = re.split(r"^(?=## )", path.read_text() if path.is_file() else f"# {page}\n\n", flags=re.MULTILINE)
    titles = [part.splitlines()[0].removeprefix("## ") for part in sections]
    parts = [part.strip("\n") + "\n" for part in sections]
    if title in titles:
        parts[titles.index(title)] = section
    else:
        parts.append(section)
    write_text(path, "\n".join([head.strip("\n") + "\n", *parts]), overwrite=True)
    print(section)
    return path


def read_rows(name: str, out: Path = RESULTS) -> list[dict[str, Any]]:
    """Rows that earlier runs kept under a name; none where there are none."""
    path = out / "rows" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def keep_row(name: str, row: Mapping[str, Any], out: Path = RESULTS) -> None:
    """Add a row to those of a name as soon as it is measured, so that a run that was cut goes on where it stopped."""
    path = out / "rows" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    """Write a section from standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("title")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    write_section(a.page, a.title, sys.stdin.read(), out=a.out)


if __name__ == "__main__":
    main()
