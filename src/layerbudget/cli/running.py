"""Work that every command does while it runs: processes, the warnings of libraries, and what ends it early."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import InvalidInput, LayerbudgetError

#: These can run in several processes.
PROCESSES = ("score", "plan sparsity", "plan bits", "plan cache", "plan memory", "apply", "finetune", "evaluate")


def carried(asked: Any, run: Callable[[], dict[str, Any]], line: Callable[[], str]) -> int:
    """Run a command, turn what ends it early into a sentence, and return the exit code."""
    from ..records import dumps, running
    from .display import DryRun, conclude, nothing_written, terminal

    errors = terminal()
    try:
        writes = _join(asked)
        with running(line):
            with nothing_written(asked):
                result = conclude(asked, run())
    except DryRun as dry_run:
        result, writes = dry_run.result, True
    except LayerbudgetError as error:
        errors.print(f"layerbudget: {error}", style="red")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # no space, no permission, a folder in its place
        where = error.filename or error.filename2
        said = f"{error.strerror or error}{f': {where}' if where else ''}. Free the path or choose another one."
        errors.print(f"layerbudget: {said}", style="red")
        return 2
    except KeyboardInterrupt:
        errors.print("layerbudget: interrupted; finished stages are kept.")
        return 130
    if asked.json and writes:
        sys.stdout.write(dumps(result))
    return int(result.get("exit_code", 0))


def _join(arguments: Any) -> bool:
    """Join the processes of a launcher, and return whether this one writes and prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return True
    from ..execution.processes import join

    words = arguments.request.command if hasattr(arguments, "request") else arguments.verb
    words = f"plan {arguments.kind}" if words == "plan" else words
    if words not in PROCESSES:
        raise InvalidInput(
            f"{words} runs in one process, and the launcher started {os.environ['WORLD_SIZE']}.",
            f"Work is shared by {', '.join(PROCESSES)}.",
            "Start it without torchrun.",
        )
    if join(getattr(arguments, "device", None)).is_main:
        return True
    arguments.quiet = arguments.console.quiet = True
    return False


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
