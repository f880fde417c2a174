"""Labelled tasks from local files: sentence classification for encoders, instructions and answers for causal LMs.

A task is read from a folder that the user names; nothing is downloaded. Formats are those of the original releases: CoLA 1.0
raw, GLUE's MRPC and RTE (tab separated, no quoting), CommonsenseQA and OpenBookQA as JSON lines, ScienceQA ``problems.json``
(rows without an image), or any .jsonl, .json or .csv file with a text and a label column.

Prompts. Header and response marker are Alpaca's form for an instruction without input, as MoLA uses. ScienceQA's instruction is
MoLA's (context, question, options). The wordings for the other tasks are not published; those below are ours. Answers read
``Answer: <label>`` for sentence tasks and ``Answer: The answer is <letter>.`` for questions with options.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from ..errors import CorruptFile, InvalidInput, LayerbudgetError, NotEnoughText, NotFound
from .examples import Task
from .task_files import READERS, from_file

NAMES = ("cola", "mrpc", "rte", "commonsenseqa", "openbookqa", "scienceqa")


def load_task(name: str, data_dir: Path | str | None = None) -> Task:
    """Read a task.

    Args:
        name: One of ``cola``, ``mrpc``, ``rte``, ``commonsenseqa``, ``openbookqa``, ``scienceqa``, or a .jsonl, .json or
            .csv file.
        data_dir: Folder that holds the task's folder (``DIR/cola/...``) or its files; not used for a file.

    Returns:
        The task, with its training and evaluation rows.

    Raises:
        InvalidInput: An unknown name, or a file without the needed columns.
        NotFound: No folder was given, or a file of the release is missing.
        CorruptFile: A row does not parse.
        NotEnoughText: No training or no evaluation row is left.
    """
    if name in NAMES:
        if data_dir is None:
            raise NotFound(f"The files of {name} are needed.", "", "Name their folder with --data-dir.")
        folder = Path(data_dir) / name if (Path(data_dir) / name).is_dir() else Path(data_dir)
        task = _parsed(READERS[name], folder)
    elif Path(name).suffix in (".jsonl", ".json", ".csv"):
        task = _parsed(from_file, Path(name))
    else:
        raise InvalidInput(f"There is no task {name!r}.", f"Tasks are {', '.join(NAMES)}, or a .jsonl or .csv file.", "")
    if not task.train or not any(task.evaluation.values()):
        raise NotEnoughText(
            f"{name} has {len(task.train)} training rows and {sum(map(len, task.evaluation.values()))} held-out rows.",
            "Both need one at least.",
            "Check the files.",
        )
    return task


def _parsed(reader: Callable[[Path], Task], path: Path) -> Task:
    """What a reader makes of its files, with whatever does not parse as one kind of error.

    Raises:
        CorruptFile: A label, a column or a character that the format does not have.
    """
    try:
        return reader(path)
    except LayerbudgetError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, csv.Error, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptFile(f"{path} does not parse ({what}).", "", "Compare it with the original release.") from error
