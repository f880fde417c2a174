"""Options of verbs whose work is a grid: parts of it as processes or jobs of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..running.launch import LAUNCHERS, check, launch, without
from .shared import refuse


def add_parts(parser: argparse.ArgumentParser, cell: str = "cell", left: str = "table and figure") -> None:
    """``--part --cells-only --workers --launcher``.

    Args:
        parser: Of the verb.
        cell: What a part makes.
        left: What ``--cells-only`` leaves to a later run; nothing where a part never makes it, and the flag is not there.
    """
    parser.add_argument("--part", default="1/1", metavar="I/N", help=f"make every N-th missing {cell}: N processes share --out")
    if left:
        parser.add_argument("--cells-only", action="store_true", help=f"make and keep {cell}s, leave {left} to a later run")
    parser.add_argument(
        "--workers", type=int, metavar="N", help=f"start so many parts by --launcher first, then put their {cell}s together"
    )
    parser.add_argument(
        "--launcher", choices=LAUNCHERS,
        help="of --workers: processes here (default), jobs through submitit (slurm, submitit-local), tasks of Ray",
    )  # fmt: skip


def asked_for_parts(a: argparse.Namespace) -> bool:
    """Whether parts are to be started.

    Raises:
        InvalidInput: A launcher without ``--workers``, or ``--workers`` of a part.
        MissingDependency: The launcher's package is not installed.
    """
    if a.workers is None:
        refuse(a, ("launcher",), "one process: it starts those of --workers")
        return False
    if a.part != "1/1":
        refuse(a, ("workers",), "one part, which starts no others")
    check(a.workers, a.launcher or "local")
    return True


def launch_parts(
    a: argparse.Namespace, more: Sequence[str] = ("--cells-only",), *, drop: Sequence[str] = (), valued: Sequence[str] = (),
    parts: int | None = None, rounds: int = 2,
) -> None:  # fmt: skip
    """Start the parts of this command and wait for them.

    Args:
        a: The command.
        more: Flags of the parts.
        drop: Flags without a value that they do not get.
        valued: Flags with one.
        parts: How many, where ``--workers`` are more than there is work for.
        rounds: How often every part is started.
    """
    words = without(a.words, "--workers", "--launcher", *valued, bare=(*drop, *more))
    launch([*words, *more], a.workers if parts is None else parts, a.out, a.launcher or "local", rounds=rounds)
