"""Five users by task, each in one sitting in an empty folder: every command and all that it prints, nothing skipped.

    python benchmarks/transcripts.py [gguf fine-tuning serving research teaching] [--model FOLDER --gguf FILE] [--out FOLDER]

Each user has read README and docs/start.md, and types the commands of one section of start.md as they stand there. Three things are
filled in: ``MODEL`` is the embedded model (of the first user a folder and its GGUF file in 16 bits, where they are named),
``--samples 16 --length 128`` spares time, and the text and the rows are made from this checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
# Section of docs/start.md, and what was still awkward in this sitting.
USERS = {
    "gguf": ("I have a GGUF", "Two models are named, the folder of transformers for the plan and the GGUF file for its types: "
             "nothing checks before the plan is made that they are the same model, apply does."),
    "fine-tuning": ("I fine-tune", "Whether uneven ranks are worth it is known after two trainings only."),
    "serving": ("I serve with vLLM", "Whether vLLM starts with the folder is not shown here: no vLLM is installed with the package."),
    "research": ("I do research", "Which of the many numbers to quote is left to the reader; the page has them all."),
    "teaching": ("I teach", "Of a model that was never scored the plan by uniform says only that it is uniform, not what a rank is worth."),
}  # fmt: skip
MEASURE = ("score", "plan bits", "compare")  # these read text


def commands_of(page: str, title: str) -> list[str]:
    """Return the commands of a section of a page."""
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^    (layerbudget .+)$", section, re.M)


def filled(command: str, model: str) -> str:
    """Return a command as this user types it."""
    short = " --samples 16 --length 128" if command.removeprefix("layerbudget ").startswith(MEASURE) else ""
    few = {"compare": " --samples 16 --windows 32"}.get(command.split()[1], short)
    return command.replace("MODEL", model) + few


def furnish(folder: Path, model: str, gguf: Path | None) -> None:
    """Put what every user has into the folder: text, rows of chat, the configuration of a model, a GGUF file."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    (folder / "my.txt").write_text("\n".join(page.read_text() for page in pages))
    run(f"{sys.executable} {ROOT / 'examples' / 'chat_rows.py'} my.jsonl", folder)
    rows = sorted((folder / "my.jsonl").read_text().splitlines(), key=len)[:60]
    (folder / "my.jsonl").write_text("\n".join(rows) + "\n")
    config = Path(model) / "config.json" if Path(model).is_dir() else ROOT / "src/layerbudget/demo/model/config.json"
    shutil.copy(config, folder / "config.json")
    if gguf is not None:
        (folder / "model-f16.gguf").symlink_to(gguf.resolve())


def sit(name: str, out: Path, model: str, gguf: Path | None) -> None:
    """Run one user's commands and write what was typed and printed."""
    title, awkward = USERS[name]
    page = (ROOT / "docs" / "start.md").read_text()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        furnish(folder, model, gguf)
        lines, minutes = [f"# {title}", ""], 0.0
        for command in commands_of(page, title):
            if "model-f16.gguf" in command and gguf is None:
                continue
            typed = filled(command, model)
            text, took, status = run(typed, folder)
            minutes += took / 60
            lines += [f"    $ {plain(typed, folder)}", *(f"    {line}".rstrip() for line in plain(text, folder).splitlines())]
            lines += [f"    [{took:.0f} s of processor{'' if status == 0 else f', exit status {status}'}]", ""]
            print(f"{name}: {took:.0f} s, status {status}: {typed[:90]}", flush=True)
        lines += [f"In all {minutes:.1f} minutes of one processor.", "", f"Still awkward: {awkward}"]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(command: str, folder: Path) -> tuple[str, float, int]:
    """Return what a command prints, its seconds of processor and its exit status."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "COLUMNS": "110", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, text=True, **pipes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def plain(text: str, folder: Path) -> str:
    """Return a text without paths of this machine, and without what progress overwrote."""
    for path, name in ((folder, "."), (ROOT, ".")):
        text = text.replace(str(path), name)
    text = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+(?=[\w.-])", "", text)
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.splitlines())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *USERS])
    parser.add_argument("--model", default="demo", help="of the first user: a folder")
    parser.add_argument("--gguf", type=Path, help="the same model in a GGUF file of 16 or 32 bits")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "transcripts")
    a = parser.parse_args()
    started = time.monotonic()
    for name in a.names or USERS:
        own = name == "gguf"
        sit(name, a.out, a.model if own else "demo", a.gguf if own else None)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
