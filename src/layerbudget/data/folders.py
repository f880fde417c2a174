"""Which files of a folder are rows, and of which split.

A folder is read as ``datasets`` reads it: what ``save_to_disk`` wrote, a download from the hub (with the configuration of its
card), or files of texts and tables, also in folders of their own. Every file is read, or is known to be no rows (hidden files
and folders, cards, licences, descriptions), or is refused by name.

Splits are known by the names of files and folders (train, validation, test, and their usual other names). Of a folder with
splits, ``train`` is read to learn and to calibrate, and ``test`` to evaluate, ``validation`` where there is no test.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CorruptFile, InvalidInput, NotFound

logger = logging.getLogger(__name__)

TEXTS = (".txt", ".md", ".py", ".raw", ".tokens")
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ORDER = {"calibration": ("train", "validation", "test"), "evaluation": ("test", "validation", "train")}
_ROLES = {word: role for role, words in _SPLITS.items() for word in words}
_STEMS = tuple("readme license licence copying notice authors contributing changelog citation contributors".split())
_DESCRIPTIONS = tuple(
    "dataset_info.json dataset_infos.json dataset_dict.json state.json _success thumbs.db desktop.ini".split()
)
_BESIDE = (".lock", ".md5", ".sha1", ".sha256", ".sha512", ".crc", ".bib", ".cff")
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}.*")


@functools.cache
def say_once(text: str) -> None:
    """Log a sentence, once in a run: a place may be read several times."""
    logger.warning("%s", text)


def ending(path: Path) -> tuple[str, str]:
    """The ending that says what a file holds, and that of its compression.

    >>> ending(Path("rows.JSONL.gz")), ending(Path("a.txt"))
    (('.jsonl', '.gz'), ('.txt', ''))
    """
    packed = path.suffix.lower()
    if packed not in COMPRESSED:
        return packed, ""
    return Path(path.stem).suffix.lower(), packed


def files_of(folder: Path, group: str) -> list[Path]:
    """The files of a folder that hold the rows of a group: ``calibration`` or ``evaluation``.

    Raises:
        NotFound: No file holds rows.
        InvalidInput: A file that is neither read nor known to be no rows; one of no split beside others that have one.
    """
    splits = splits_of(folder)
    return splits[split_for(folder, splits, group)]


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """All files of a folder that hold rows, by split; under an empty name where it has no splits."""
    if (folder / "dataset_dict.json").is_file():
        names = _described(folder / "dataset_dict.json").get("splits", [])
        return {name: _saved(folder / name) for name in names}
    if (folder / "state.json").is_file():
        return {"": _saved(folder)}
    files = _rows(folder)
    configured = _configured(folder, files)
    return configured or _named(folder, files)


def _described(path: Path) -> Mapping[str, Any]:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptFile(f"{path} does not parse ({error}).", "save_to_disk writes it.", "Save the data set again.") from error
    return description if isinstance(description, dict) else {}


def _saved(folder: Path) -> list[Path]:
    """The files of what ``Dataset.save_to_disk`` wrote, in order."""
    state = folder / "state.json"
    names = [entry["filename"] for entry in _described(state).get("_data_files", [])] if state.is_file() else []
    missing = next((name for name in names or ["state.json"] if not (folder / name).is_file()), None)
    if missing is not None:
        problem = f"{folder} is a saved data set without {missing}."
        raise NotFound(problem, "save_to_disk writes state.json and .arrow files.", "Save the data set again.")
    return [folder / name for name in names]


def _rows(folder: Path) -> list[Path]:
    """All files with rows below a folder; others are known to be none, or refused."""
    seen = sorted(f for f in folder.rglob("*") if f.is_file() and not _hidden(f.relative_to(folder)))
    files = [f for f in seen if not _no_rows(f)]
    tables = [f for f in files if ending(f)[0] in TABLES]
    if tables:  # cards and loading scripts stand beside tables
        files = [f for f in files if ending(f)[0] not in (".md", ".py")]
    strange = [f for f in files if ending(f)[0] not in (*TEXTS, *TABLES)]
    known = f"Known endings are {', '.join((*TEXTS, *TABLES))}, also compressed ({', '.join(COMPRESSED)})."
    if len(strange) < len(files) and strange:
        names = _listed([str(f.relative_to(folder)) for f in strange])
        raise InvalidInput(
            f"{folder} holds files that cannot be read: {names}.", known, "Move them away, or name single files."
        )
    if not files or strange:
        contents = f" (it holds {_listed([str(f.relative_to(folder)) for f in seen])})" if seen else ""
        raise NotFound(f"{folder} holds no text file{contents}.", known, "Check the path.")
    _check_once(folder, tables)
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _no_rows(file: Path) -> bool:
    """Whether a file is a card, a licence, a description or a sum, by its name."""
    name = file.name.lower()
    cached = name.startswith("cache-") and name.endswith(".arrow")  # of datasets, beside what it saved
    return re.split(r"[^a-z]+", name)[0] in _STEMS or name in _DESCRIPTIONS or name.endswith(_BESIDE) or cached


def _check_once(folder: Path, tables: Sequence[Path]) -> None:
    """Refuse two tables of one name: the same rows in two forms."""
    first: dict[str, Path] = {}
    for file in tables:
        stem = str(file.relative_to(folder))[: -len("".join(ending(file)))]
        other = first.setdefault(stem, file)
        if other is not file:
            problem = f"{folder} holds {other.name} and {file.name}, which may be the same rows twice."
            raise InvalidInput(problem, "Tables of one folder have different names.", "Move one away, or name single files.")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# --- splits -----------------------------------------------------------------------------------------------------------------


def _configured(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split as the card of a data set says, where it does."""
    card = next((f for f in folder.iterdir() if f.name.lower() == "readme.md" and f.is_file()), None)
    head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL) if card else None
    if head is None:
        return {}
    import yaml

    try:
        configs = [c for c in (yaml.safe_load(head[1]) or {}).get("configs", []) if c.get("data_files")]
    except (yaml.YAMLError, AttributeError, TypeError):  # a card of something else
        return {}
    chosen = [c for c in configs if c.get("default")] or configs
    if len(chosen) > 1:
        names = _listed([str(c.get("config_name")) for c in chosen])
        problem = f"{folder} holds several configurations of a data set: {names}."
        raise InvalidInput(problem, "One is read.", "Name the folder or the files of one.")
    return _by_pattern(folder, chosen[0]["data_files"], files) if chosen else {}


def _by_pattern(folder: Path, patterns: Any, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split, from the ``data_files`` of a card: a pattern, several, or those of every split."""
    if isinstance(patterns, dict):
        patterns = [{"split": name, "path": path} for name, path in patterns.items()]
    listed = patterns if isinstance(patterns, list) else [patterns]
    splits: dict[str, list[Path]] = {}
    for entry in listed:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        matched = {f for p in ([paths] if isinstance(paths, str) else paths) for f in folder.glob(p)}
        splits.setdefault(str(split), []).extend(f for f in files if f in matched)
    return {name: split_files for name, split_files in splits.items() if split_files}


def _named(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split, from their names and those of their folders."""
    names = {f: _split_of(f.relative_to(folder)) for f in files}
    without = [str(f.relative_to(folder)) for f, name in names.items() if not name]
    if without and len(without) < len(files):
        mixed = next(str(f.relative_to(folder)) for f, name in names.items() if name)
        if all(ending(f)[0] in TEXTS for f in files):
            say_once(f"{folder} is read as a whole: {mixed} is named like a split, {_listed(without)} not.")
            return {"": list(files)}
        problem = f"{folder} holds files of a split ({mixed}) and of none: {_listed(without)}."
        raise InvalidInput(
            problem, "All files of a folder belong to splits, or none does.", "Rename them, or name single files."
        )
    splits: dict[str, list[Path]] = {}
    for file, name in names.items():
        splits.setdefault(name, []).append(file)
    return splits


def _split_of(path: Path) -> str:
    """The split that a file belongs to by its name or that of its nearest folder that has one; empty where none has.

    >>> [_split_of(Path(p)) for p in ("data/train_sft-00000-of-00002.parquet", "wiki.valid.raw", "dev/a.jsonl", "a.jsonl")]
    ['train_sft', 'validation', 'validation', '']
    """
    if ending(path)[0] == ".py":
        return ""
    shard = _SHARD.fullmatch(path.stem)
    if shard and role_of(shard[1]):
        return shard[1]
    return next((role for part in (path.stem, *reversed(path.parts[:-1])) if (role := role_of(part))), "")


def role_of(name: str) -> str:
    """Return the role of a split: train, validation or test; empty where its name does not say, or says two.

    >>> role_of("train_sft"), role_of("Dev"), role_of("unsupervised")
    ('train', 'validation', '')
    """
    roles = {_ROLES[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _ROLES}
    return roles.pop() if len(roles) == 1 else ""


def split_for(folder: Path, splits: Mapping[str, list[Path]], group: str) -> str:
    """The split of a folder that is read for a group, ``calibration`` or ``evaluation``; which one is said."""
    order = _ORDER["evaluation" if group == "evaluation" else "calibration"]
    for role in order:
        named = [role] if role in splits else [name for name in splits if role_of(name) == role]
        if len(named) > 1:
            problem = f"{folder} holds several splits of {role}: {_listed(named)}."
            raise InvalidInput(problem, "One is read.", "Name its folder or its files.")
        if named:
            _say_split(folder, list(splits), named[0], order[0])
            return named[0]
    if len(splits) == 1:
        return next(iter(splits))
    raise InvalidInput(f"{folder} holds the splits {_listed(list(splits))}.", "One is read.", "Name its folder or its files.")


def _say_split(folder: Path, names: Sequence[str], name: str, wanted: str) -> None:
    purpose = "to evaluate" if wanted == "test" else "to learn and to calibrate"
    if role_of(name) != wanted:
        say_once(f"{folder} has no split {wanted}: {name} is read {purpose}.")
    elif len(names) > 1:
        say_once(f"{folder} has the splits {', '.join(names)}: {name} is read {purpose}.")
