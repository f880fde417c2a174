"""``layerbudget report``."""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    """Add the parser of ``report``."""
    parser = subparsers.add_parser("report")
    parser.add_argument("folder", metavar="DIR", help="folder with scores.json, plan.json, result.json, figures")
    parser.add_argument("-o", "--out", default="report.html")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the page and say where it is."""
    from ..report.page import write_page

    path = write_page(arguments.folder, arguments.out, overwrite=arguments.overwrite)
    arguments.console.print(f"written to {path}")
    return {"output": str(path)}
