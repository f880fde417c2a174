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
    """Let every text that is read have at most four sequences of 32 tokens, and a training one epoch; what undoes that.

    A memory that holds the small model in 16 bits, which pages give for large ones, is planned for all the same.
    """
    from layerbudget.data import text
    from layerbudget.decisions.memory import plan as fit
    from layerbudget.finetuning import protocol

    whole, needed = text.calibration, fit.check_needed

    def few(source, tokenizer, *, samples=128, length=256, **options):
        return whole(source, tokenizer, samples=min(samples or 4, 4), length=min(length, 32), **options)

    def planned(unmeasured, terms):
        """Refuse no memory."""

    def put(old, new):
        for module in [m for n, m in list(sys.modules.items()) if n.startswith("layerbudget") and m is not None]:
            if vars(module).get(old.__name__) is old:
                setattr(module, old.__name__, new)

    usual = protocol.PRESETS["default"]
    few.__name__, planned.__name__ = whole.__name__, needed.__name__
    put(whole, few)
    put(needed, planned)
    protocol.PRESETS["default"] = usual.changed({"epochs": 1.0})

    def undo():
        put(few, whole)
        put(planned, needed)
        protocol.PRESETS["default"] = usual

    return undo


def part() -> int:
    """What ``python -m layerbudget`` does in a part of a run, in small sizes."""
    shrink()
    from layerbudget.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(part())
