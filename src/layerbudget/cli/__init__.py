"""The command line: one thin command per verb.

Results go to the terminal as tables, or as one JSON document on stdout with ``--json`` (everything else then goes to stderr).
A user's mistake ends with one sentence and exit code 2. Files are written atomically and never overwritten silently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import LayerbudgetError
from .commands import Asked, UnknownCommand, find_command, overview, run_plugins


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: the entry point of the console script."""
    # Waiting threads that sleep instead of spinning halve the time on a machine that others use too (read when torch loads).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if argv is None else argv)
    if (text := overview(words)) is not None:
        sys.stdout.write(text)
        return 0
    if words[:1] == ["--version"]:
        from .. import __version__

        sys.stdout.write(f"layerbudget {__version__}\n")
        return 0
    if words[:1] == ["--install-completion"]:
        return _install_completion(words[1:])
    try:
        run_plugins(words)
        asked = find_command(words)
    except LayerbudgetError as error:
        wrong = "layerbudget: error: " if isinstance(error, UnknownCommand) else "layerbudget: "
        sys.stderr.write(f"{wrong}{error}\n")
        return 2
    return _run(asked)


def _install_completion(words: Sequence[str]) -> int:
    """Write the completion of the shell that is named, or that runs, where that shell reads it."""
    from .completion import install

    try:
        message = install(words)
    except LayerbudgetError as error:
        sys.stderr.write(f"layerbudget: {error}\n")
        return 2
    sys.stdout.write(message)
    return 0


def _run(asked: Asked) -> int:
    """Parse the request of a command, run it and return the exit code."""
    from .parser import WrongCommand, parse

    command = asked.request.command
    try:
        request = parse(asked.request, asked.words, " ".join((asked.request.__doc__ or "").split()))
    except WrongCommand as error:
        sys.stderr.write(f"layerbudget {command}: error: {error}\nlayerbudget {command} --help says what there is.\n")
        return 2
    except LayerbudgetError as error:
        sys.stderr.write(f"layerbudget: {error}\n")
        return 2
    if request is None:
        return 0
    from ..requests import line_of
    from .running import carried, quiet_libraries
    from .session import Session

    quiet_libraries()
    session = Session(request)

    def handle() -> dict[str, Any]:
        request.check()
        return asked.handler(session)

    return carried(session, handle, lambda: line_of(request))
