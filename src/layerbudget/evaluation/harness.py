"""Task accuracy through lm-evaluation-harness, on a model in memory, from hub or local files.

Prompts, choices and metrics are the harness's own task definitions; with ``data_dir`` only the rows come from local files
(the publishers' original formats), so that the evaluation needs no download.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..arguments import checked
from ..canonical import digest
from ..data.tasks import known_label
from ..errors import CorruptFile, InvalidInput, LayerbudgetError, MissingDependency, NotFound
from ..execution.modes import own_random_numbers
from ..progress import Progress, Steps, say
from ..storage.hub import check_id

Row = dict[str, Any]
_ENTAILMENT = {"entailment": 0, "not_entailment": 1}
_YES_NO = {"false": 0, "true": 1, "0": 0, "1": 1, False: 0, True: 1}  # the numbers 0 and 1 are equal to the last two
_HELLASWAG = ("ind", "activity_label", "ctx_a", "ctx_b", "ctx", "endings", "source_id", "split", "split_type")


def _rte(row: Row, index: int, where: str) -> Row:
    label = known_label(row["label"], _ENTAILMENT, where)
    return {"sentence1": row["sentence1"], "sentence2": row["sentence2"], "label": label, "idx": int(row["index"])}


def _boolq(row: Row, index: int, where: str) -> Row:
    label = known_label(row["label"] if "label" in row else row["answer"], _YES_NO, where)
    return {"question": row["question"], "passage": row["passage"], "label": label, "idx": index}


def _arc(row: Row, index: int, where: str, stem: str = "question") -> Row:
    options = row["question"]["choices"]
    choices = {name: [choice[name] for choice in options] for name in ("text", "label")}
    known_label(row["answerKey"], {k.strip().lower(): j for j, k in enumerate(choices["label"])}, where)
    return {"id": row["id"], stem: row["question"]["stem"], "choices": choices, "answerKey": row["answerKey"]}


def _openbookqa(row: Row, index: int, where: str) -> Row:
    return _arc(row, index, where, "question_stem")


def _hellaswag(row: Row, index: int, where: str) -> Row:
    known = {key: j for j in range(len(row["endings"])) for key in (j, str(j))}
    return {**{k: row.get(k) for k in _HELLASWAG}, "label": str(known_label(row["label"], known, where))}


def _winogrande(row: Row, index: int, where: str) -> Row:
    answer = 1 + known_label(row["answer"], {"1": 0, "2": 1, 1: 0, 2: 1}, where)
    return {**{k: row[k] for k in ("sentence", "option1", "option2")}, "answer": str(answer)}


# task: (a row as the harness wants it, files below data_dir of which the first present is read, split that it asks for)
LOCAL: dict[str, tuple[Callable[[Row, int, str], Row], tuple[str, ...], str]] = {
    "rte": (_rte, ("rte/dev.tsv",), "validation"),
    "boolq": (_boolq, ("boolq/val.jsonl",), "validation"),
    "arc_easy": (_arc, ("arc_easy/ARC-Easy-Test.jsonl", "arc_easy/ARC-Easy-Dev.jsonl"), "test"),
    "arc_challenge": (_arc, ("arc_challenge/ARC-Challenge-Test.jsonl", "arc_challenge/ARC-Challenge-Dev.jsonl"), "test"),
    "openbookqa": (_openbookqa, ("openbookqa/test.jsonl",), "test"),
    "hellaswag": (_hellaswag, ("hellaswag/hellaswag_val_1000.jsonl", "hellaswag/hellaswag_val.jsonl"), "validation"),
    "winogrande": (_winogrande, ("winogrande/dev.jsonl",), "validation"),
}


def local_rows(task: str, data_dir: Path | str) -> list[Row]:
    """Rows of a task from local files, in the column layout that the harness's definition expects."""
    if task not in LOCAL:
        raise InvalidInput(
            f"{task} has no local reader.", f"Local tasks are {', '.join(LOCAL)}.", "Drop --data-dir to ask the hub."
        )
    read, names, _ = LOCAL[task]
    path = next((p for p in (Path(data_dir) / name for name in names) if p.is_file()), None)
    if path is None:
        raise NotFound(f"{data_dir} has none of {', '.join(names)}.", "", f"Put the file of {task} there or drop the task.")
    try:
        return [read(row, i, f"{path}, row {i + 1}") for i, row in enumerate(_rows_of(path))]
    except LayerbudgetError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, csv.Error, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptFile(f"{path} does not parse ({what}).", "", "Compare it with the original release.") from error


def _rows_of(path: Path) -> list[Row]:
    """Rows of tab-separated values, JSON lines or a JSON list."""
    if path.suffix == ".tsv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def one_class(answers: Sequence[int], options: Sequence[int]) -> int | None:
    """The one answer that a model gave to every question, where all had the same number of options; else ``None``.

    >>> one_class([1, 1, 1], [2, 2, 2]), one_class([1, 0], [2, 2])
    (1, None)
    """
    same = len(answers) > 1 and len(set(answers)) == 1 and len(set(options)) == 1 and options[0] > 1
    return int(answers[0]) if same else None


def _task_manager(tasks: Sequence[str]) -> Any:
    """The harness's index of tasks: where all have local rows, of their own folders; else of all, which are thousands."""
    if set(tasks) <= set(LOCAL):
        index = _index(tuple(sorted({task.partition("_")[0] for task in tasks})))
        if set(tasks) <= set(index.all_subtasks):
            return index
    return _index(())


@functools.cache
def _index(folders: tuple[str, ...]) -> Any:
    """The harness's index of the tasks in folders of these names, of all without any; it is read once."""
    try:
        import lm_eval.tasks as stock
    except ImportError as error:
        raise MissingDependency("Tasks need lm-eval.", "", "pip install '.[eval]' in the clone.") from error
    if not folders:
        return stock.TaskManager()
    home = Path(stock.__file__).parent
    paths = [path for name in folders for pattern in (name, f"*/{name}") for path in home.glob(pattern) if path.is_dir()]
    return stock.TaskManager(include_path=paths, include_defaults=False)


def _definition(task: str, data_dir: Path | str | None, index: Any) -> str | dict[str, Any]:
    if data_dir is None:
        return task
    from datasets import Dataset
    from lm_eval.tasks._yaml_loader import load_yaml

    rows = local_rows(task, data_dir)
    split = LOCAL[task][2]
    definition = load_yaml(index[task].yaml_path, resolve_func=True)
    splits = {f"{s}_split": s if s == split else None for s in ("training", "validation", "test")}
    return {**definition, **splits, "custom_dataset": lambda **_: {split: Dataset.from_list(rows)}, "dataset_kwargs": None}


def local_tasks(tasks: Sequence[str], data_dir: Path | str) -> dict[str, Any]:
    """The harness's own task objects, built from its own definitions, with their rows from local files."""
    manager = _task_manager(tasks)
    return {t: manager.load([_definition(t, data_dir, manager.task_index)])["tasks"][t] for t in tasks}


def _remedy(task: str) -> str:
    """Where the rows of a task may come from instead."""
    if task in LOCAL:
        return f"Put {LOCAL[task][1][0]} into a folder and give it as --data-dir, or download it where there is a network."
    return f"Download it where there is a network; read from --data-dir are {', '.join(LOCAL)}."


def _check_hub(tasks: Sequence[str], index: Any) -> bool:
    """Try the hub once; whether it is out of reach, and all rows lie in the cache."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        check_id("owner/name", "dataset")
        return False
    except NotFound:
        for task in tasks:
            task_config = load_yaml(index[task].yaml_path, resolve_func=False)
            path = task_config.get("dataset_path")
            if path is None:  # a task that makes its own rows
                continue
            with _cached_only():
                try:
                    datasets.load_dataset_builder(path, task_config.get("dataset_name"))
                except (OSError, ValueError) as missing:
                    raise NotFound(
                        f"The rows of {task} ({path}) are not in the cache, and the hub cannot be reached.", "", _remedy(task)
                    ) from missing
        return True


@contextlib.contextmanager
def _cached_only() -> Iterator[None]:
    """The hub is not asked: libraries would try for minutes."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@checked
@own_random_numbers()
def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    data_dir: Path | str | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> dict[str, Row]:
    """Zero-shot accuracy of a causal language model.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        tasks: Names of tasks.
        data_dir: Folder with local files of the tasks.
        limit: At most so many questions of each task.
        batch_size: Requests per forward.
        progress: Called with tasks done and in total.

    Returns:
        ``{task: {acc, stderr, samples, correct, digest, one_class}}``: accuracy and standard error as the harness computes
        them, also ``acc_norm`` and ``acc_norm_stderr`` where the task has them (log-likelihoods divided by the characters of
        the options), ``correct`` one 0/1 per example, for paired tests, ``digest`` of the requests in their order,
        ``one_class`` the option that was chosen for every question, if one was: the accuracy is then that option's share.

    Raises:
        MissingDependency: lm-eval is not installed.
        InvalidInput, NotFound: An unknown task, or local files that are not there.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}.", "It is at least 1.", "Leave it out for all examples.")
    if not tasks:
        raise InvalidInput("No task is named.", f"Local tasks are {', '.join(LOCAL)}.", "Name one at least.")
    manager = _task_manager(tasks)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    unknown = [t for t in tasks if t not in manager.all_subtasks]  # before hours are spent on the others
    if unknown:
        raise InvalidInput(
            f"There is no task {unknown[0]!r}.",
            f"Local tasks are {', '.join(LOCAL)}; groups are not taken apart.",
            "Correct it.",
        )
    definitions = [_definition(t, data_dir, manager.task_index) for t in tasks]
    offline = data_dir is None and _check_hub(tasks, manager.task_index)
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    result: dict[str, Row] = {}
    tick = Steps(progress, len(tasks))
    for name, definition in zip(tasks, definitions, strict=True):
        say(progress, name)
        tick(0)
        try:
            with _cached_only() if offline else contextlib.nullcontext():
                output = lm_eval.simple_evaluate(
                    model=wrapped,
                    tasks=[definition],
                    num_fewshot=0,
                    limit=limit,
                    bootstrap_iters=0,
                    log_samples=True,
                    task_manager=manager,
                    random_seed=0,
                    numpy_random_seed=0,
                    torch_random_seed=0,
                )
        except (KeyError, ValueError, ConnectionError, OSError) as error:
            raise NotFound(
                f"The task {name} could not be evaluated: {str(error).splitlines()[0] if str(error) else error!r}",
                "Without --data-dir its rows come from the hub, or from the cache.",
                _remedy(name),
            ) from error
        result[name] = _result(name, output["samples"][name])
        tick()
    return result


def _result(task: str, samples: Sequence[Row]) -> Row:
    """Result of one task for :func:`evaluate_tasks`, from the harness's record of every example."""
    from lm_eval.api.metrics import mean, mean_stderr

    if not samples or "acc" not in samples[0]:
        raise InvalidInput(f"The task {task} has no accuracy.", "Tasks of choices have one.", "Leave it out.")
    result: Row = {}
    for metric, error in (("acc", "stderr"), ("acc_norm", "acc_norm_stderr")):
        if metric in samples[0]:
            values = [float(s[metric]) for s in samples]
            result |= {metric: float(mean(values)), error: float(mean_stderr(values)) if len(values) > 1 else 0.0}
    likely = [[float(r[0] if isinstance(r, (tuple, list)) else r) for r in s["filtered_resps"]] for s in samples]
    chosen = [max(range(len(row)), key=row.__getitem__) for row in likely]
    result |= {"samples": len(samples), "correct": [float(s["acc"]) for s in samples]}
    result["digest"] = digest([s["arguments"] for s in samples])
    return result | {"one_class": one_class(chosen, [len(row) for row in likely])}
