"""A command without its process and without the catching of its errors."""

from __future__ import annotations

import io
import json

from rich.console import Console

from layerbudget.cli import parse


def command_result(*words):
    """What a command returns, and what it prints; a mistake is raised."""
    arguments = parse([str(w) for w in words])
    arguments.quiet, arguments.console = True, Console(file=io.StringIO(), width=160, soft_wrap=True, markup=False)
    result = arguments.handler(arguments)
    json.dumps(result, allow_nan=False)
    return result, arguments.console.file.getvalue()
