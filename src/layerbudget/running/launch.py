"""Start the parts of a grid: processes here, or jobs of a cluster through submitit or Ray, all of them filling one folder.

A part makes every n-th missing cell (:class:`~layerbudget.running.cells.Cells`, or a seed of a fine-tuning). Where cells are
made from other cells (scores first, then what is planned from them) there are two rounds. What a part that died has left is
made by the next round, or by whoever asks for the result.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import InvalidInput, MissingDependency

logger = logging.getLogger(__name__)
LAUNCHERS = ("local", "slurm", "submitit-local", "ray")
ROUNDS = 2


def command_of(words: Sequence[str], part: int, parts: int) -> list[str]:
    """The command of one part.

    >>> command_of(["compare", "demo", "--cells-only"], 2, 4)[-5:]
    ['compare', 'demo', '--cells-only', '--part', '2/4']
    """
    return [sys.executable, "-m", "layerbudget", *words, "--part", f"{part}/{parts}"]


def without(words: Sequence[str], *flags: str, bare: Sequence[str] = ()) -> list[str]:
    """A command line without some flags and their values, and without some that have none.

    >>> without(["compare", "demo", "--workers", "2", "--seeds", "0", "--launcher=local"], "--workers", "--launcher")
    ['compare', 'demo', '--seeds', '0']
    >>> without(["finetune", "--overwrite", "demo"], bare=["--overwrite"])
    ['finetune', 'demo']
    """
    kept: list[str] = []
    skip = False
    for word in words:
        name = word.split("=")[0]
        if not skip and name not in flags and word not in bare:
            kept.append(word)
        skip = not skip and name in flags and "=" not in word
    return kept


def check(parts: int, how: str = "local") -> None:
    """Refuse what cannot be started, before anything is.

    Raises:
        InvalidInput: Fewer than one part, or an unknown launcher.
        MissingDependency: The launcher's package is not installed.
    """
    if parts < 1 or how not in LAUNCHERS:
        raise InvalidInput(f"{parts} parts by {how}.", f"One or more, by {', '.join(LAUNCHERS)}.", "Use --workers 4.")
    package = {"local": None, "ray": "ray"}.get(how, "submitit")
    if package is not None:
        _imported(package)


def launch(
    words: Sequence[str], parts: int, folder: Path | str, how: str = "local", *, minutes: int = 720, rounds: int = ROUNDS
) -> list[int]:
    """Run a command once per part and round, and wait.

    Args:
        words: The command without ``layerbudget`` and without ``--part``.
        parts: Processes or jobs.
        folder: Logs of the parts go to ``launch`` in it.
        how: ``local``: processes of this machine, its cores shared between them; ``slurm`` or ``submitit-local``: jobs of
            submitit; ``ray``: tasks of the Ray cluster that ``RAY_ADDRESS`` names, or of one on this machine.
        minutes: Of one job.
        rounds: How often every part is started.

    Returns:
        Exit statuses of the parts in the last round; a part that failed is named in a warning.

    Raises:
        InvalidInput: Fewer than one part, or an unknown launcher.
        MissingDependency: submitit or Ray is not installed.
    """
    check(parts, how)
    logs = Path(folder).absolute() / "launch"
    logs.mkdir(parents=True, exist_ok=True)
    statuses: list[int] = []
    for round_ in range(1, rounds + 1):
        commands = [command_of(words, i, parts) for i in range(1, parts + 1)]
        if how in ("local", "ray"):
            statuses = (_here if how == "local" else _on_ray)(commands, logs, round_)
        else:
            statuses = _jobs(commands, logs, how, minutes)
        for i, status in enumerate(statuses, 1):
            if status:
                logger.warning("Part %d of %d ended with status %d (%s); its cells are left to others.", i, parts, status, logs)
    return statuses


def _imported(package: str) -> object:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependency(
            f"Parts of a grid through {package} need it.", "", f"pip install {package}, or --launcher local."
        ) from error


def _here(commands: Sequence[Sequence[str]], logs: Path, round_: int) -> list[int]:
    threads = str(max(1, (os.cpu_count() or 1) // len(commands)))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    running = []
    for i, command in enumerate(commands, 1):
        with _log(logs, round_, i).open("w") as log:
            running.append(subprocess.Popen(list(command), stdout=log, stderr=subprocess.STDOUT, env=environment))
    return [process.wait() for process in running]


def _log(logs: Path, round_: int, part: int) -> Path:
    return logs / f"round-{round_}-part-{part}.log"


def _jobs(commands: Sequence[Sequence[str]], logs: Path, how: str, minutes: int) -> list[int]:
    import submitit

    executor = submitit.AutoExecutor(folder=logs, cluster="slurm" if how == "slurm" else "local")
    executor.update_parameters(timeout_min=minutes, name="layerbudget")
    jobs = [executor.submit(submitit.helpers.CommandFunction(list(command))) for command in commands]
    return [0 if job.exception() is None else 1 for job in jobs]


def _on_ray(commands: Sequence[Sequence[str]], logs: Path, round_: int) -> list[int]:
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    task = ray.remote(max_retries=0)(_worker())
    where = str(Path.cwd())
    waiting = [task.remote(list(c), str(_log(logs, round_, i)), where) for i, c in enumerate(commands, 1)]
    return [int(status) for status in ray.get(waiting)]


def _worker() -> Callable[[list[str], str, str], int]:
    """A function that is sent as it is: a worker does not import this package for it."""

    def run(command: list[str], log: str, where: str) -> int:
        """Run one part in the folder where the launch was; what it says goes to its log."""
        import subprocess
        from pathlib import Path

        with Path(log).open("w") as out:
            return subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=where, check=False).returncode

    return run
