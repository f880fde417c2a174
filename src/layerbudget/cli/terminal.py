"""The terminal that commands print to: tables fit its width, sentences stay whole."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Terminal(Console):
    """A console that prints sentences as they are, so that a path in one can be copied, and is no markup.

    Args:
        stderr: Write to stderr.
    """

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a plain string is neither wrapped nor read as markup."""
        if all(isinstance(o, str) for o in objects):
            options = {"soft_wrap": True, "markup": False, **options}
        super().print(*objects, **options)
