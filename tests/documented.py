"""The command lines of README and docs, in the order in which they stand, and the small sizes in which tests run them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from layerbudget.cli.commands import QUESTIONS
from layerbudget.decision import DECISIONS

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
TOOLS = ("layerbudget", "make", "pip", "torchrun", "accelerate", "vllm", "lm_eval", "python")
ALONE = ("layerbudget --version",)  # whole commands of one word more
NAMED = {"plan": DECISIONS.names(), "explain": QUESTIONS}  # with a word behind them, still the name of a command


def lines_of(page: str) -> list[str]:
    """Indented command lines, and commands inside sentences; names of commands, and fragments without a program, are none."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    found = []
    for match in re.finditer(r"^ {4}(\S.*)$|(?<!\{py:mod\})`([^`\n]+)`", text, re.M):
        line = (match.group(1) or match.group(2)).split("  #")[0].split(" # ")[0].strip()
        words = line.split()
        named = words[1:2] if words[2:] and words[2] not in NAMED.get(words[1], ()) else words[1:3]
        name = match.group(2) and words[0] == "layerbudget" and words[1:] == named and line not in ALONE
        if words[0] in TOOLS and len(words) > 1 and not name:
            found.append(line)
    return found


def words_of(line: str) -> list[str]:
    """A command of layerbudget as its words."""
    return shlex.split(line)[1:]


def shrink() -> Callable[[], None]:
    """Let every text that is read have at most four sequences of 32 tokens, and a training one epoch; what undoes that.

    A memory that holds the small model in 16 bits, which pages give for large ones, is planned for all the same. Times in
    llama.cpp are those of a table: of a small model on a machine that does other work too, they say nothing of its layers.
    """
    from layerbudget.data import text
    from layerbudget.decisions.memory import plan as fit
    from layerbudget.decisions.shapes import speed
    from layerbudget.finetuning import protocol

    whole, needed, timed = text.calibration, fit.check_needed, speed.measure_speed

    def few(source, tokenizer, *, samples=128, length=256, **options):
        return whole(source, tokenizer, samples=min(samples or 4, 4), length=min(length, 32), **options)

    def planned(unmeasured, terms):
        """Refuse no memory."""

    def steady(model, *, threads=1, rounds=9):
        rates = {"beside": 3e-6, "layer": 5e-7, "attention": 2e-7, "channel": 4e-8}
        return speed.Speed(read=rates, written=rates, threads=threads)

    def put(old, new):
        for module in [m for n, m in list(sys.modules.items()) if n.startswith("layerbudget") and m is not None]:
            if vars(module).get(old.__name__) is old:
                setattr(module, old.__name__, new)

    usual = protocol.PRESETS["default"]
    pairs = ((whole, few), (needed, planned), (timed, steady))
    for old, new in pairs:
        new.__name__ = old.__name__
        put(old, new)
    protocol.PRESETS["default"] = usual.changed({"epochs": 1.0})

    def undo():
        for old, new in pairs:
            put(new, old)
        protocol.PRESETS["default"] = usual

    return undo


def part() -> int:
    """What ``python -m layerbudget`` does in a part of a run, in small sizes."""
    shrink()
    from layerbudget.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(part())
