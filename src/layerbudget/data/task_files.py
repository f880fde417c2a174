"""Readers of the original files of each task, and of a table of one's own."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CorruptFile, InvalidInput, NotFound
from .examples import Example, Task

HEADER = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
LETTERS = "ABCDEFGHIJ"
SentenceRow = tuple[str, str | None, int]  # text, pair, label
ChoiceRow = tuple[str, list[str], int, str]  # question, options, index of the answer, context


def instruct(instruction: str) -> str:
    """Return Alpaca's prompt for an instruction without input."""
    return f"{HEADER}### Instruction:\n{instruction}\n\n### Response:\n"


def _open(folder: Path, *names: str) -> Path:
    """First of several file names that exists (the releases differ in them)."""
    for name in names:
        found = sorted(folder.glob(name))
        if found:
            return found[0]
    raise NotFound(f"{folder} has no {' or '.join(names)}.", "", "Point --data-dir to the folder of the original release.")


def _table(path: Path, columns: int, header: bool) -> list[list[str]]:
    """Rows of a tab-separated file without quoting."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    rows = []
    for number, line in enumerate(lines[1:] if header else lines, start=2 if header else 1):
        if not line.strip():
            continue
        fields = line.rstrip("\r").split("\t")
        if len(fields) < columns:
            raise CorruptFile(f"{path}, line {number} has {len(fields)} columns.", f"{columns} are needed.", "Repair the file.")
        rows.append(fields)
    return rows


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise CorruptFile(f"{path}, line {number} is not JSON ({error}).", "", "Repair the file.") from error
    return rows


def known_label(value: object, known: Mapping[Any, int], where: str) -> int:
    """Index of a label value; text is compared as it is written, without regard to case and spaces around it.

    Raises:
        CorruptFile: A value that the task does not have. Guessing would turn every row into one class.

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


BINARY: Mapping[Any, int] = {"0": 0, "1": 1, 0: 0, 1: 1}


def _sentence_task(
    name: str, metric: str, labels: Sequence[str], question: Callable[[str, str | None], str],
    rows: Mapping[str, Iterable[SentenceRow]],
) -> Task:  # fmt: skip
    """Build a task whose rows are ``(text, pair, label)``."""

    def example(row: SentenceRow) -> Example:
        text, pair, label = row
        return Example(text=text, pair=pair, label=label, prompt=instruct(question(text, pair)), choices=len(labels))

    splits = {split: tuple(example(row) for row in part) for split, part in rows.items()}
    answers = tuple(f"Answer: {label}" for label in labels)
    return Task(
        name=name, labels=tuple(labels), answers=answers, metric=metric, train=splits.pop("train"), evaluation=splits
    )  # fmt: skip


def _cola(folder: Path) -> Task:
    def rows(pattern: str) -> list[SentenceRow]:
        path = _open(folder, pattern, f"raw/{pattern}")
        table = enumerate(_table(path, 4, header=False), 1)
        return [(r[3], None, known_label(r[1], BINARY, f"{path}, row {i}")) for i, r in table]

    files = {"train": "in_domain_train.tsv", "in_domain": "in_domain_dev.tsv", "out_of_domain": "out_of_domain_dev.tsv"}
    return _sentence_task(
        "cola", "matthews", ("unacceptable", "acceptable"),
        lambda text, _: f"Decide whether the sentence is grammatically acceptable or unacceptable.\nSentence: {text}",
        {split: rows(file) for split, file in files.items()},
    )  # fmt: skip


def _mrpc(folder: Path) -> Task:
    def rows(name: str) -> list[SentenceRow]:
        path = _open(folder, name)
        return [
            (r[3], r[4], known_label(r[0], BINARY, f"{path}, row {i}")) for i, r in enumerate(_table(path, 5, header=True), 1)
        ]

    return _sentence_task(
        "mrpc", "f1", ("not equivalent", "equivalent"),
        lambda a, b: f"Decide whether two sentences are equivalent or not equivalent.\nSentence 1: {a}\nSentence 2: {b}",
        {"train": rows("train.tsv"), "dev": rows("dev.tsv")},
    )  # fmt: skip


def _rte(folder: Path) -> Task:
    index = {"not_entailment": 0, "entailment": 1}

    def rows(name: str) -> list[SentenceRow]:
        path = _open(folder, name)
        return [
            (r[1], r[2], known_label(r[3], index, f"{path}, row {i}")) for i, r in enumerate(_table(path, 4, header=True), 1)
        ]

    return _sentence_task(
        "rte", "accuracy", ("not entailment", "entailment"),
        lambda a, b: f"Decide between entailment and not entailment of a hypothesis.\nPremise: {a}\nHypothesis: {b}",
        {"train": rows("train.tsv"), "dev": rows("dev.tsv")},
    )  # fmt: skip


def _choice_task(name: str, splits: dict[str, list[ChoiceRow]]) -> Task:
    """Build a task whose rows are ``(question, options, index of the answer, context)``."""
    most = max((len(options) for rows in splits.values() for _, options, _, _ in rows), default=0)

    def example(question: str, options: list[str], answer: int, context: str) -> Example:
        listed = " ".join(f"({LETTERS[i]}) {option}" for i, option in enumerate(options))
        text = f"Context: {context or 'N/A'}\nQuestion: {question}\nOptions: {listed}\n"
        return Example(text=text, pair=None, label=answer, prompt=instruct(text), choices=len(options))

    made = {split: tuple(example(*row) for row in rows) for split, rows in splits.items()}
    letters = tuple(LETTERS[:most])
    answers = tuple(f"Answer: The answer is {letter}." for letter in letters)
    return Task(name=name, labels=letters, answers=answers, metric="accuracy", train=made.pop("train"), evaluation=made)


def _options(path: Path) -> list[ChoiceRow]:
    rows = []
    for number, row in enumerate(_lines(path), 1):
        if "answerKey" not in row:
            continue
        question = row["question"]
        index = {choice["label"].strip().lower(): i for i, choice in enumerate(question["choices"])}
        texts = [choice["text"] for choice in question["choices"]]
        rows.append((question["stem"], texts, known_label(row["answerKey"], index, f"{path}, row {number}"), ""))
    return rows


def _commonsenseqa(folder: Path) -> Task:
    return _choice_task(
        "commonsenseqa",
        {"train": _options(_open(folder, "train_rand_split.jsonl")), "dev": _options(_open(folder, "dev_rand_split.jsonl"))},
    )


def _openbookqa(folder: Path) -> Task:
    files = {
        s: _options(_open(folder, f"{s}.jsonl", f"Main/{s}.jsonl", f"Data/Main/{s}.jsonl")) for s in ("train", "dev", "test")
    }
    return _choice_task("openbookqa", files)


def _scienceqa(folder: Path) -> Task:
    path = _open(folder, "problems.json", "problems*.json")
    try:
        problems = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not JSON ({error}).", "", "Repair the file.") from error
    splits: dict[str, list[ChoiceRow]] = {"train": [], "val": [], "test": []}
    for name, problem in problems.items():
        if problem.get("image") is None:
            answer = known_label(problem["answer"], {i: i for i in range(len(problem["choices"]))}, f"{path}, problem {name}")
            splits[problem["split"]].append((problem["question"], problem["choices"], answer, problem.get("hint", "")))
    return _choice_task("scienceqa", splits)


READERS: dict[str, Callable[[Path], Task]] = {
    "cola": _cola, "mrpc": _mrpc, "rte": _rte,
    "commonsenseqa": _commonsenseqa, "openbookqa": _openbookqa, "scienceqa": _scienceqa,
}  # fmt: skip


def from_file(path: Path) -> Task:
    """Read a table of one's own; every tenth row (by a hash of its text) is held out."""
    if not path.is_file():
        raise NotFound(f"There is no file {path}.", "", "Check the path.")
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as f:
            rows = list(csv.DictReader(f))
    else:
        rows = _lines(path) if path.suffix == ".jsonl" else json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise CorruptFile(f"{path} does not hold a list of rows with names.", "", "Write one object per row.")
    columns = set(rows[0]) if rows else set()
    text = next((c for c in ("text", "sentence", "sentence1", "prompt", "instruction") if c in columns), None)
    label = next((c for c in ("label", "answer", "output", "completion") if c in columns), None)
    if text is None or label is None:
        raise InvalidInput(
            f"{path} has the columns {', '.join(sorted(columns)) or 'none'}.",
            "It needs text (or sentence, sentence1, prompt, instruction) and label (or answer, output, completion).",
            "Rename the columns; a second sentence goes into pair or sentence2.",
        )
    holes = [i for i, r in enumerate(rows, 1) if r.get(text) is None or r.get(label) is None]
    if holes:
        raise CorruptFile(
            f"{path}, row {holes[0]} has no {text} or no {label}.", "Every row needs both.", "Complete or drop it."
        )
    values = sorted({str(r[label]) for r in rows})
    if not 2 <= len(values) <= 50:
        raise InvalidInput(f"{path} has {len(values)} distinct labels.", "Between 2 and 50 can be told apart.", "Group them.")
    pair = next((c for c in ("pair", "sentence2") if c in columns), None)
    splits: dict[str, list[SentenceRow]] = {"train": [], "held_out": []}
    for r in rows:
        held = int(hashlib.sha256(str(r[text]).encode()).hexdigest(), 16) % 10 == 0
        row = (str(r[text]), str(r[pair]) if pair and r.get(pair) is not None else None, values.index(str(r[label])))
        splits["held_out" if held else "train"].append(row)
    asked = f"Answer with one of: {', '.join(values)}.\n"
    return _sentence_task(
        path.stem, "accuracy", values, lambda a, b: asked + a + (f"\n{b}" if b else ""), splits
    )  # fmt: skip
