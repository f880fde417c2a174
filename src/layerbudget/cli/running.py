"""Work that every command does while it runs: processes, the warnings of libraries, and what ends it early."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput, LayerbudgetError, LostProcess

if TYPE_CHECKING:
    from ..requests import Request
    from .display import Display

PROCESSES = (  # these can run in several
    "score",
    "plan sparsity",
    "plan bits",
    "plan cache",
    "plan memory",
    "plan expert-pruning",
    "plan shapes",
    "apply",
    "finetune",
    "evaluate",
)


def carried(session: Display, run: Callable[[], dict[str, Any]], line: Callable[[], str]) -> int:
    """Run a command, turn what ends it early into a sentence, and return the exit code.

    What ends it in one process of several ends it in all of them, with the same sentence and code.
    """
    from ..execution.partners import EndedElsewhere, tell
    from .display import terminal

    try:
        return _run(session, run, line)
    except EndedElsewhere as error:
        code, said = error.code, str(error)
    except LostProcess as error:
        code, said = 1, str(error)
    except LayerbudgetError as error:
        code, said = 2, as_typed(error, session.request)
        tell(code, said)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        tell(1, "nobody reads what it prints")
        return 1
    except OSError as error:  # no space, no permission, a folder in its place
        where = error.filename or error.filename2
        code, said = 2, f"{error.strerror or error}{f': {where}' if where else ''}. Free the path or choose another one."
        tell(code, said)
    except KeyboardInterrupt:
        code, said = 130, _interrupted(session.request)
        tell(code, said)
    except Exception as error:
        tell(1, f"{type(error).__name__}: {error}")
        raise
    terminal().print(f"layerbudget: {said}", style=None if code == 130 else "red")
    return code


def _interrupted(request: Any) -> str:
    """The sentence on a command that a person ended: where what it had finished lies, or which option keeps it."""
    kept = request.out if "part" in request.options() else getattr(request, "resume", None)
    if kept:
        return f"interrupted; what was finished is kept in {kept}, and the same command goes on from it."
    return "interrupted. --resume DIR keeps what is finished." if "resume" in request.options() else "interrupted."


def as_typed(error: LayerbudgetError, request: Request) -> str:
    """Return the sentences of an error, whose remedy names options as the command has them: ``--draws 4`` for ``draws=4``."""
    from ..requests import flag_of

    def typed(option: re.Match[str]) -> str:
        name, value = option["name"], option["value"].strip("'")
        if name not in request.options():
            return option[0]
        return flag_of(request, name) if value == "True" else f"{flag_of(request, name)} {value}"

    remedy = re.sub(r"\b(?P<name>[a-z_]+)=(?P<value>'[^']*'|[\w.-]*\w)", typed, error.remedy)
    return " ".join(filter(None, (error.what, error.feasible, remedy)))


def _run(session: Display, run: Callable[[], dict[str, Any]], line: Callable[[], str]) -> int:
    """Run a command that nothing ends early, print its result where that is asked for, and return the exit code."""
    from ..canonical import dumps
    from ..execution.partners import working
    from ..records import running
    from .display import DryRun

    try:
        writes = _join(session)
        with working(), running(line), session.nothing_written():
            result = session.conclude(run())
    except DryRun as dry_run:
        result, writes = dry_run.result, True
    finally:
        if (machine := sys.modules.get("layerbudget.models.machine")) is not None:  # a command that loaded a model
            machine.usual_products()
    if session.request.json and writes:
        sys.stdout.write(dumps(result))
    return int(result.get("exit_code", 0))


def _join(session: Display) -> bool:
    """Join the processes of a launcher, and return whether this one writes and prints."""
    _take_slurms_words()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return True
    from ..execution.processes import join

    request = session.request
    words = request.command
    if words not in PROCESSES:
        raise InvalidInput(
            f"{words} runs in one process, and the launcher started {os.environ['WORLD_SIZE']}.",
            f"Work is shared by {', '.join(PROCESSES)}.",
            "Start it without torchrun.",
        )
    if join(getattr(request, "device", None)).is_main:
        return True
    request.quiet = session.console.quiet = True
    return False


def _take_slurms_words() -> None:
    """Say what ``srun`` says of its tasks in the words of torchrun, where no other launcher has.

    The main process is on the first node of the step. ``MASTER_ADDR`` and ``MASTER_PORT`` that are set stay.
    """
    variables = os.environ
    size = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or "1"
    if (
        variables.keys() & {"RANK", "WORLD_SIZE"}
        or "SLURM_STEP_ID" not in variables
        or "SLURM_PROCID" not in variables
        or int(size) < 2
    ):
        return
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST") or "localhost"
    job, step = (int(variables.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    variables |= {"RANK": variables["SLURM_PROCID"], "WORLD_SIZE": size, "LOCAL_RANK": variables.get("SLURM_LOCALID", "0")}
    variables.setdefault("MASTER_ADDR", first_node(nodes))
    variables.setdefault("MASTER_PORT", str(20000 + (job + 977 * step) % 20000))


def first_node(nodes: str) -> str:
    """Return the first name of a list of Slurm's nodes.

    >>> first_node("gpu[003-005,9],cpu1"), first_node("a1,a2"), first_node("rack[2-3]n[01,04]-ib")
    ('gpu003', 'a1', 'rack2n01-ib')
    """
    first = re.match(r"(?:\[[^]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else nodes)


def quiet_libraries() -> None:
    """Show warnings of this package alone."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):  # read when they load
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if (loaded := sys.modules.get("transformers.utils.logging")) is not None:  # by a program that calls the command line
        loaded.disable_progress_bar()
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes"):  # of their own insides
        for category in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)", category=category)
    for name in ("transformers", "datasets", "huggingface_hub", "httpx", "filelock", "compressed_tensors"):
        logging.getLogger(name).setLevel(logging.ERROR)
