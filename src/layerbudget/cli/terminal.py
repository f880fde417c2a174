"""The terminal that commands print to: tables fit its width, sentences break between words."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.console import Console


def wrapped(text: str, width: int) -> str:
    """Lines of whole words; a word that is longer than a line keeps its own.

    >>> wrapped("the path is /a/very/long/path indeed", 12).splitlines()
    ['the path is', '/a/very/long/path', 'indeed']
    """
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in text.split("\n"))
    return "\n".join(part for line in lines for part in line)


class Terminal(Console):
    """A console that prints sentences as they are, and is no markup.

    On a terminal they break between words, so that a path without blanks can be copied whole; in a file or a pipe they do not.

    Args:
        stderr: Write to stderr.
    """

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a plain string is not read as markup."""
        if all(isinstance(o, str) for o in objects):
            options = {"soft_wrap": True, "markup": False, **options}
            if self.is_terminal:
                objects = tuple(wrapped(str(o), self.width) for o in objects)
        super().print(*objects, **options)
