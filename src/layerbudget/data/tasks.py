"""Labelled tasks from local files: sentence classification for encoders, instructions and answers for causal LMs.

A task is read from a folder that the user names; nothing is downloaded. Formats are those of the original releases: CoLA 1.0
raw, GLUE's MRPC and RTE (tab separated, no quoting), CommonsenseQA and OpenBookQA as JSON lines, ScienceQA ``problems.json``
(rows without an image), or a file or a folder of rows of one's own (:mod:`layerbudget.data.table`).

Prompts. Header and response marker are Alpaca's form for an instruction without input, as MoLA uses. ScienceQA's instruction is
MoLA's (context, question, options). The wordings for the other tasks are not published; those below are ours. Answers read
``Answer: <label>`` for sentence tasks and ``Answer: The answer is <letter>.`` for questions with options.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CorruptFile, InvalidInput, LayerbudgetError, NotEnoughText, NotFound
from .files import is_local, json_lines, text_of_file
from .table import first_rows, read_table

_HEADER = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
_LETTERS = "ABCDEFGHIJ"
_Sentence = tuple[str, str | None, int]  # text, pair, label
_Question = tuple[str, list[str], int, str]  # question, options, index of the answer, context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One labelled row."""

    text: str  #: what an encoder reads
    pair: str | None  #: second sentence, where the task has two
    label: int  #: index into the task's labels
    prompt: str  #: what a causal LM reads
    choices: int  #: how many of the task's labels are possible answers (a question may have fewer options than another)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A labelled task."""

    name: str  #: name of the task, or the file
    labels: tuple[str, ...]  #: an encoder's head has as many outputs
    answers: tuple[str, ...]  #: what a causal LM must say for each label
    metric: str  #: matthews, f1 or accuracy: the task's own headline
    train: tuple[Example, ...]
    evaluation: dict[str, tuple[Example, ...]]  #: held-out rows by split

    @property
    def digest(self) -> str:
        """Content hash of all rows."""
        h = hashlib.sha256()
        for name, rows in (("train", self.train), *sorted(self.evaluation.items())):
            h.update(name.encode())
            for row in rows:
                h.update(f"{row.prompt}\0{row.pair}\0{row.label}\0".encode())
        return h.hexdigest()[:16]

    def limited(self, train: int | None, evaluation: int | None = None) -> Task:
        """The task with at most so many rows, the first ones of a fixed shuffle."""
        evaluation_rows = {k: first_rows(v, evaluation) for k, v in self.evaluation.items()}
        return dataclasses.replace(self, train=first_rows(self.train, train), evaluation=evaluation_rows)


def known_label(value: object, known: Mapping[Any, int], where: str) -> int:
    """Index of a label value; text is compared as it is written, without regard to case and spaces around it.

    >>> known_label("False", {False: 0, True: 1, "false": 0, "true": 1}, "row 1")
    0
    """
    key = value.strip().lower() if isinstance(value, str) else value
    try:
        return known[key]
    except (KeyError, TypeError) as error:
        names = ", ".join(dict.fromkeys(str(k) for k in known))
        raise CorruptFile(
            f"{where} has the label {value!r}.", f"Known labels are {names}.", "Correct or drop the row."
        ) from error


def load_task(name: str, data_dir: Path | str | None = None) -> Task:
    """A task with its training and evaluation rows: one of ``NAMES``, or a file or folder with texts and labels.

    ``data_dir`` holds the folder of a named task (``DIR/cola/...``) or its files.

    Raises:
        InvalidInput: An unknown name, or a file without the needed columns.
        NotFound: No folder was given, or a file of the release is missing.
        CorruptFile: A row does not parse: a label, a column or a character that the format does not have.
        NotEnoughText: No training or no evaluation row is left.
    """
    if name in NAMES:
        if data_dir is None:
            raise NotFound(f"The files of {name} are needed.", "", "Name their folder with --data-dir.")
        path = Path(data_dir) / name if (Path(data_dir) / name).is_dir() else Path(data_dir)
    elif is_local(name):
        path = Path(name).expanduser()
    else:
        raise InvalidInput(f"There is no task {name!r}.", f"Tasks are {', '.join(NAMES)}, or a .jsonl or .csv file.", "")
    try:
        task = _read(name, path)
    except LayerbudgetError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, csv.Error, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptFile(f"{path} does not parse ({what}).", "", "Compare it with the original release.") from error
    if not task.train or not any(task.evaluation.values()):
        raise NotEnoughText(
            f"{name} has {len(task.train)} training rows and {sum(map(len, task.evaluation.values()))} held-out rows.",
            "Both need one at least.",
            "Check the files.",
        )
    return task


def _read(name: str, path: Path) -> Task:
    if name in _SENTENCES:
        release = _SENTENCES[name]
        rows = {split: release.rows(_find(path, *files)) for split, files in release.files.items()}
        return _sentence_task(name, release.metric, release.labels, release.question.format, rows)
    if name in _OPTIONS:
        return _choice_task(name, {split: _options(_find(path, *files)) for split, files in _OPTIONS[name].items()})
    if name == "scienceqa":
        return _choice_task(name, _scienceqa(path))
    labels, splits = read_table(path)
    asked = f"Answer with one of: {', '.join(labels)}.\n"
    rows = {split: [(row.text, row.pair, row.label) for row in part] for split, part in splits.items()}
    return _sentence_task(path.stem, "accuracy", labels, lambda a, b: asked + a + (f"\n{b}" if b else ""), rows)


def _find(folder: Path, *names: str) -> Path:
    """First of several file names that exists (the releases differ in them)."""
    for name in names:
        matches = sorted(folder.glob(name))
        if matches:
            return matches[0]
    raise NotFound(f"{folder} has no {' or '.join(names)}.", "", "Point --data-dir to the folder of the original release.")


@dataclasses.dataclass(frozen=True)
class _Release:
    """A tab-separated release without quoting: how its question is asked, its files by split, and what their columns hold."""

    metric: str
    labels: tuple[str, ...]
    written: tuple[str, ...]  # the labels as the files write them
    question: str
    files: Mapping[str, tuple[str, ...]]
    places: tuple[int, int | None, int]  # of text, pair and label
    header: int = 1  # lines in front of the rows

    def rows(self, path: Path) -> list[_Sentence]:
        """The sentences of a file, with their labels."""
        text, pair, label = self.places
        known, needed, rows = {word: i for i, word in enumerate(self.written)}, max(text, pair or 0, label) + 1, []
        for number, line in enumerate(text_of_file(path).split("\n")[self.header :], self.header + 1):
            row = line.rstrip("\r").split("\t")
            if not line.strip():
                continue
            if len(row) < needed:
                raise CorruptFile(f"{path}, line {number} has {len(row)} columns.", f"{needed} are needed.", "Repair the file.")
            value = known_label(row[label], known, f"{path}, line {number}")
            rows.append((row[text], None if pair is None else row[pair], value))
        return rows


_COLA = {"train": "in_domain_train.tsv", "in_domain": "in_domain_dev.tsv", "out_of_domain": "out_of_domain_dev.tsv"}
_SENTENCES = {
    "cola": _Release(
        metric="matthews",
        labels=("unacceptable", "acceptable"),
        written=("0", "1"),
        question="Decide whether the sentence is grammatically acceptable or unacceptable.\nSentence: {}",
        files={split: (name, f"raw/{name}") for split, name in _COLA.items()},
        places=(3, None, 1),
        header=0,
    ),
    "mrpc": _Release(
        metric="f1",
        labels=("not equivalent", "equivalent"),
        written=("0", "1"),
        question="Decide whether two sentences are equivalent or not equivalent.\nSentence 1: {}\nSentence 2: {}",
        files={"train": ("train.tsv",), "dev": ("dev.tsv",)},
        places=(3, 4, 0),
    ),
    "rte": _Release(
        metric="accuracy",
        labels=("not entailment", "entailment"),
        written=("not_entailment", "entailment"),
        question="Decide between entailment and not entailment of a hypothesis.\nPremise: {}\nHypothesis: {}",
        files={"train": ("train.tsv",), "dev": ("dev.tsv",)},
        places=(1, 2, 3),
    ),
}
_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "commonsenseqa": {split: (f"{split}_rand_split.jsonl",) for split in ("train", "dev")},
    "openbookqa": {s: (f"{s}.jsonl", f"Main/{s}.jsonl", f"Data/Main/{s}.jsonl") for s in ("train", "dev", "test")},
}
NAMES = (*_SENTENCES, *_OPTIONS, "scienceqa")


def _instruct(instruction: str) -> str:
    return f"{_HEADER}### Instruction:\n{instruction}\n\n### Response:\n"


def _sentence_task(
    name: str, metric: str, labels: tuple[str, ...], question: Callable[..., str], rows: Mapping[str, list[_Sentence]]
) -> Task:
    def example(text: str, pair: str | None, label: int) -> Example:
        return Example(text=text, pair=pair, label=label, prompt=_instruct(question(text, pair)), choices=len(labels))

    made = {split: tuple(example(*row) for row in part) for split, part in rows.items()}
    answers = tuple(f"Answer: {label}" for label in labels)
    return Task(name=name, labels=labels, answers=answers, metric=metric, train=made.pop("train"), evaluation=made)


def _choice_task(name: str, splits: Mapping[str, list[_Question]]) -> Task:
    most = max((len(options) for rows in splits.values() for _, options, _, _ in rows), default=0)

    def example(question: str, options: list[str], answer: int, context: str) -> Example:
        listed = " ".join(f"({_LETTERS[i]}) {option}" for i, option in enumerate(options))
        text = f"Context: {context or 'N/A'}\nQuestion: {question}\nOptions: {listed}\n"
        return Example(text=text, pair=None, label=answer, prompt=_instruct(text), choices=len(options))

    made = {split: tuple(example(*row) for row in rows) for split, rows in splits.items()}
    letters = tuple(_LETTERS[:most])
    answers = tuple(f"Answer: The answer is {letter}." for letter in letters)
    return Task(name=name, labels=letters, answers=answers, metric="accuracy", train=made.pop("train"), evaluation=made)


def _options(path: Path) -> list[_Question]:
    rows = []
    for number, row in enumerate(json_lines(path), 1):
        if "answerKey" in row:
            question = row["question"]
            index = {choice["label"].strip().lower(): i for i, choice in enumerate(question["choices"])}
            texts = [choice["text"] for choice in question["choices"]]
            rows.append((question["stem"], texts, known_label(row["answerKey"], index, f"{path}, row {number}"), ""))
    return rows


def _scienceqa(folder: Path) -> dict[str, list[_Question]]:
    path = _find(folder, "problems.json", "problems*.json")
    splits: dict[str, list[_Question]] = {"train": [], "val": [], "test": []}
    for name, problem in json.loads(text_of_file(path)).items():
        if problem.get("image") is None:
            answer = known_label(problem["answer"], {i: i for i in range(len(problem["choices"]))}, f"{path}, problem {name}")
            splits[problem["split"]].append((problem["question"], problem["choices"], answer, problem.get("hint", "")))
    return splits
