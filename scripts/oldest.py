"""Print the oldest versions of libraries that pyproject.toml allows, as pip takes them: ``oldest.py transformers peft``."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def oldest(text: str, names: list[str]) -> list[str]:
    """Return ``name==version`` for every name, from the lower bounds ``name>=version`` of a pyproject.toml.

    Raises:
        SystemExit: A name has no lower bound there.

    >>> oldest('dependencies = ["numpy>=1.26", "peft>=0.21 ; extra"]', ["peft"])
    ['peft==0.21']
    """
    bounds = dict(re.findall(r'"([\w.-]+)>=([\w.]+)', text))
    missing = [name for name in names if name not in bounds]
    if missing:
        raise SystemExit(f"pyproject.toml has no lower bound for {', '.join(missing)}. Write one: name>=version.")
    return [f"{name}=={bounds[name]}" for name in names]


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    sys.stdout.write(" ".join(oldest(text, sys.argv[1:])) + "\n")
