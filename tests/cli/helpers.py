"""A command without its process and without the catching of its errors."""

from __future__ import annotations

import io
import json

from rich.console import Console

from layerbudget.cli import parser
from layerbudget.cli.commands import find_command
from layerbudget.cli.session import Session


def parsed(words):
    """The request of a command; what cannot be parsed is raised."""
    asked = find_command(words)
    return parser.parse(asked.request, asked.words, "")


def command_result(*words):
    """What a command returns, and what it prints; a mistake is raised."""
    words, console = [str(w) for w in words], Console(file=io.StringIO(), width=160, soft_wrap=True, markup=False)
    asked = find_command(words)
    request = parser.parse(asked.request, asked.words, "")
    request.quiet = True
    session = Session(request)
    session.console = console
    request.check()
    result = asked.handler(session)
    json.dumps(result, allow_nan=False)
    return result, console.file.getvalue()
