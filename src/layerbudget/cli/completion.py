"""Completion of a shell, by cyclopts, from the requests of all commands."""

from __future__ import annotations

from collections.abc import Sequence

import cyclopts
from cyclopts.completion import ShellDetectionError, detect_shell

from ..errors import InvalidInput
from .commands import requests_of_all
from .parser import app_of

SHELLS = ("bash", "zsh", "fish")


def whole_app() -> cyclopts.App:
    """Return the app of all commands with all their options."""
    whole = cyclopts.App(name="layerbudget", version_flags=["--version"], help_flags=["--help"])
    for words, request in requests_of_all().items():
        verb, _, kind = words.partition(" ")
        below = app_of(request, {}, request.command, everything=True, asked=False, optional=False)
        if not kind:
            whole.command(below, name=verb)
            continue
        if verb not in whole:
            whole.command(cyclopts.App(name=verb, version_flags=[]))
        whole[verb].command(below, name=kind)
    return whole


def install(words: Sequence[str]) -> str:
    """Write the completion of a shell where it reads it, and return a sentence that says so.

    Args:
        words: The name of the shell; none of the one that runs. zsh finds the file by a line that is added to ``.zshrc``.

    Raises:
        InvalidInput: Another shell, or none that can be found out.
    """
    known = f"There are {', '.join(SHELLS)}."
    try:
        shell = words[0] if words else detect_shell()
    except ShellDetectionError as error:
        remedy = f"Name it: layerbudget --install-completion {SHELLS[0]}."
        raise InvalidInput("The shell that runs is not known.", known, remedy) from error
    if shell not in SHELLS or len(words) > 1:
        what = f"{' '.join(words) or shell} is no shell that can complete layerbudget."
        raise InvalidInput(what, known, "Name one of those.")
    path = whole_app().install_completion(shell=shell, add_to_startup=shell == "zsh")  # type: ignore[arg-type]
    return f"Written to {path}. It works in the next shell that you start.\n"
