"""The command lines of README and docs, in the order in which they stand, and the small sizes in which tests run them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
TOOLS = ("layerbudget", "make", "pip", "torchrun", "accelerate", "vllm", "lm_eval", "python")
ALONE = ("layerbudget --version",)  # whole commands of one word more


def lines_of(page: str) -> list[str]:
    """Indented command lines, and commands inside sentences; names of verbs, and fragments without a program, are none."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    found = []
    for match in re.finditer(r"^ {4}(\S.*)$|(?<!\{py:mod\})`([^`\n]+)`", text, re.M):
        line = (match.group(1) or match.group(2)).split("  #")[0].split(" # ")[0].strip()
        words = line.split()
        if words[0] not in TOOLS or len(words) < 2 or (match.group(2) and len(words) == 2 and words[0] == "layerbudget"
                                                        and line not in ALONE):  # fmt: skip
            continue
        found.append(line)
    return found


def words_of(line: str) -> list[str]:
    """A command of layerbudget as its words."""
    return shlex.split(line)[1:]


def shrink() -> Callable[[], None]:
    """Let every text that is read have at most four sequences of 32 tokens, and a training one epoch; what undoes that."""
    from layerbudget.data import text
    from layerbudget.finetuning import protocol

    whole = text.calibration

    def few(source, tokenizer, *, samples=128, length=256, **options):
        return whole(source, tokenizer, samples=min(samples or 4, 4), length=min(length, 32), **options)

    def put(old, new, default):
        for module in [m for n, m in list(sys.modules.items()) if n.startswith("layerbudget") and m is not None]:
            if vars(module).get("calibration") is old:
                module.calibration = new
        protocol.PRESETS["default"] = default

    usual = protocol.PRESETS["default"]
    put(whole, few, usual.changed({"epochs": 1.0}))
    return lambda: put(few, whole, usual)


def part() -> int:
    """What ``python -m layerbudget`` does in a part of a run, in small sizes."""
    shrink()
    from layerbudget.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(part())
