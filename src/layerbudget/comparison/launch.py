"""Start the parts of a grid: processes here, or jobs of a cluster through submitit, all of them filling one folder of cells.

A part measures every n-th missing cell (:class:`~layerbudget.comparison.cells.Cells`); scores first, then what is planned from
them, so there are two rounds. What a part that died has left is measured by the next round, or by whoever asks for the result.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import InvalidInput, MissingDependency

logger = logging.getLogger(__name__)
LAUNCHERS = ("local", "slurm", "submitit-local")
ROUNDS = 2


def command_of(words: Sequence[str], part: int, parts: int) -> list[str]:
    """The command of one part.

    >>> command_of(["compare", "demo"], 2, 4)[-5:]
    ['compare', 'demo', '--cells-only', '--part', '2/4']
    """
    return [sys.executable, "-m", "layerbudget", *words, "--cells-only", "--part", f"{part}/{parts}"]


def launch(words: Sequence[str], parts: int, folder: Path | str, how: str = "local", *, minutes: int = 720) -> list[int]:
    """Run a command once per part and round, and wait.

    Args:
        words: The command without ``layerbudget`` and without ``--part``.
        parts: Processes or jobs.
        folder: Logs of the parts go to ``launch`` in it.
        how: ``local``: processes of this machine, its cores shared between them; ``slurm`` or ``submitit-local``: jobs.
        minutes: Of one job.

    Returns:
        Exit statuses of the parts in the last round; a part that failed is named in a warning.

    Raises:
        InvalidInput: Fewer than one part, or an unknown launcher.
        MissingDependency: submitit is not installed.
    """
    if parts < 1 or how not in LAUNCHERS:
        raise InvalidInput(f"{parts} parts by {how}.", f"One or more, by {', '.join(LAUNCHERS)}.", "Use --workers 4.")
    logs = Path(folder) / "launch"
    logs.mkdir(parents=True, exist_ok=True)
    statuses: list[int] = []
    for round_ in range(1, ROUNDS + 1):
        commands = [command_of(words, i, parts) for i in range(1, parts + 1)]
        statuses = _here(commands, logs, round_) if how == "local" else _jobs(commands, logs, how, minutes)
        for i, status in enumerate(statuses, 1):
            if status:
                logger.warning("Part %d of %d ended with status %d (%s); its cells are left to others.", i, parts, status, logs)
    return statuses


def _here(commands: Sequence[Sequence[str]], logs: Path, round_: int) -> list[int]:
    threads = str(max(1, (os.cpu_count() or 1) // len(commands)))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    running = []
    for i, command in enumerate(commands, 1):
        with (logs / f"round-{round_}-part-{i}.log").open("w") as log:
            running.append(subprocess.Popen(list(command), stdout=log, stderr=subprocess.STDOUT, env=environment))
    return [process.wait() for process in running]


def _jobs(commands: Sequence[Sequence[str]], logs: Path, how: str, minutes: int) -> list[int]:
    try:
        import submitit
    except ImportError as error:
        raise MissingDependency("Jobs of a cluster need submitit.", "", "pip install submitit, or --launcher local.") from error
    executor = submitit.AutoExecutor(folder=logs, cluster="slurm" if how == "slurm" else "local")
    executor.update_parameters(timeout_min=minutes, name="layerbudget")
    jobs = [executor.submit(submitit.helpers.CommandFunction(list(command))) for command in commands]
    return [0 if job.exception() is None else 1 for job in jobs]
