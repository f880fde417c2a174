"""What a folder of fine-tuned seeds holds: finished seeds under a manifest, checkpoints that count when they are whole, and
earlier results that are set aside while new ones are made.

Only what was written here is removed: in a seed's folder the checkpoints, and of all else what a manifest names and nobody
changed. Files of the user's that lie in a seed's folder are set aside with it, and come back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AlreadyExists, CorruptFile
from ..execution.processes import is_main, process_group
from ..records import dumps, write_text
from ..storage import folders, reading
from ..storage.writing import check_writable

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from ..plan import Plan

logger = logging.getLogger(__name__)

IDENTITY, RESULT = "identity.json", "result.json"
_SEALED = ("adapter", IDENTITY, RESULT)
PLAN = "plan.json"
_ABOVE = (RESULT, "labels.json", PLAN, "against.json", folders.MANIFEST)
_HALF = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
ASIDE, UNFINISHED = ".replaced", ".unfinished"


def begin(folder: Path, identity: Mapping[str, Any]) -> None:
    """Say which run a seed's folder belongs to."""
    write_text(folder / IDENTITY, dumps({"schema_version": 1, "identity": identity}), overwrite=True)


def finish(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a seed's result and the manifest that makes it count."""
    write_text(folder / RESULT, dumps(record), overwrite=True)
    folders.seal(folder, _SEALED)


def kept(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Record of a finished seed; ``None`` where there is none, an unfinished one of the same run, or one that is broken.

    Raises:
        AlreadyExists: The folder belongs to another plan, task, protocol, precision or version; says which.
    """
    wanted = json.loads(dumps(identity))
    found = {name: _record(folder / name) for name in (IDENTITY, RESULT)}
    for record in found.values():
        held = record.get("identity") if record else None
        differing = [key for key in wanted if held.get(key) != wanted[key]] if isinstance(held, dict) else []
        if differing:
            raise AlreadyExists(
                f"{folder} holds a run with another {' and '.join(differing)}.",
                "Seeds are continued, and averaged, only with the same plan, task, protocol, base and versions.",
                "Choose another output folder.",
            )
    if not (folder / RESULT).is_file():
        return None
    wrong = folders.broken(folder)
    if found[RESULT] is None or wrong is None or wrong:
        logger.warning("%s is not whole (%s): the seed is trained again.", folder, ", ".join(wrong or [folders.MANIFEST]))
        return None
    return found[RESULT]


def _record(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = reading.read(path, "finetune", as_type=dict[str, Any])
    except CorruptFile:
        logger.warning("%s is broken.", path)
        return None
    return found if isinstance(found, dict) else None


def sealing() -> TrainerCallback:
    """A callback that writes the manifest of every checkpoint when all of its files are there. Let it be the last one."""
    from transformers import TrainerCallback

    class Sealing(TrainerCallback):
        def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            together = process_group()
            if together is not None:
                together.barrier()  # every process has its random state in it
            if is_main():
                folders.seal(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    return Sealing()


def last_whole(folder: Path) -> Path | None:
    """The last checkpoint of a seed whose files are what was written; half written and broken ones are removed."""
    found = [f for f in (folder / "checkpoints").glob("checkpoint-*") if f.is_dir() and f.name[11:].isdigit()]
    for checkpoint in sorted(found, key=lambda f: -int(f.name[11:])):
        if folders.broken(checkpoint) == []:
            return checkpoint
        logger.warning("%s is half written or broken, and removed.", checkpoint)
        shutil.rmtree(checkpoint)
    if found:
        logger.warning("%s has no whole checkpoint: the seed begins anew.", folder)
    return None


def check_free(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder whose results would be in the way, and files of the user's that have the names of ours.

    Raises:
        AlreadyExists: Says what is there, also what a killed run set aside.
    """
    if out.exists() and not out.is_dir():
        raise AlreadyExists(f"{out} is a file.", "Results of seeds are a folder.", "Choose another output.")
    check_writable(out / RESULT)
    aside = f" {out / ASIDE} holds the results that a killed run was replacing." if (out / ASIDE).is_dir() else ""
    if not (resume or overwrite) and (any(out.glob("seed-*")) or aside):
        raise AlreadyExists(
            f"{out} holds results already.{aside}", "",
            "Pass --resume to continue them, --overwrite, or choose another folder.",
        )  # fmt: skip
    summary = _record(out / RESULT)
    if (out / RESULT).exists() and (summary is None or "identity" not in summary) and folders.manifest(out) is None:
        raise AlreadyExists(f"{out / RESULT} was not written by a fine-tuning.", "", "Choose another folder, or move it away.")


def seal_summary(out: Path, plan: Plan | None = None) -> None:
    """Write the plan where none lies there, then the manifest of the files above the seeds, and drop what they replace."""
    held = folders.manifest(out) or {}
    names = [name for name in _ABOVE if name != folders.MANIFEST and (name != PLAN or name in held)]
    if plan is not None and not (out / PLAN).exists():
        plan.save(out / PLAN)
        names.append(PLAN)
    folders.seal(out, names)
    if (out / ASIDE).is_dir():
        drop(out / ASIDE, out)


def ours(out: Path) -> list[Path]:
    """Folders of seeds, and the files above them, that a run has written."""
    seeds = [f for f in out.glob("seed-*") if (f / IDENTITY).is_file()]
    return seeds + [out / name for name in _ABOVE if (out / name).is_file() and _written(out / name, out)]


def move(source: Path, target: Path) -> None:
    """Move what a run has written from one folder to another; where something lies already, it stays there as ``.yours``."""
    found = ours(source)
    if found:
        target.mkdir(exist_ok=True)
    for path in found:
        place = target / path.name
        if os.path.lexists(place):
            place.rename(folders.free(place))
        path.rename(place)


def drop(folder: Path, out: Path) -> None:
    """Remove results that were set aside; before that, what is not ours in them goes back to ``out``."""
    for path in sorted(f for f in folder.rglob("*") if f.is_file() or f.is_symlink()):
        if not _written(path, folder):
            place = out / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place if not os.path.lexists(place) else folders.free(place))
    last = (folders.MANIFEST, IDENTITY)  # they say what the rest is
    for path in sorted(
        (f for f in folder.rglob("*") if f.is_file()), key=lambda f: last.index(f.name) if f.name in last else -1
    ):
        path.unlink()
    folders.remove_empty(folder)


def _written(path: Path, folder: Path) -> bool:
    """Whether a file below a folder of results was written by a run, and is still what it was."""
    parts = path.relative_to(folder).parts
    if parts == (PLAN,):  # one of the user's may lie there
        row = (folders.manifest(folder) or {}).get(PLAN)
        return row is not None and folders.unchanged(path, row)
    if len(parts) == 1:
        return parts[0] in _ABOVE
    name, seed = "/".join(parts[1:]), folder / parts[0]
    if name in (IDENTITY, RESULT, folders.MANIFEST) or (parts[1] == "checkpoints" and parts[2].startswith("checkpoint-")):
        return True
    rows = folders.manifest(seed)
    if rows is None:  # a seed that was never finished
        return name in _HALF
    return name in rows and folders.unchanged(path, rows[name])


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[None]:
    """Set earlier results aside; drop them after success, put them back after a failure (what is new moves to .unfinished).

    What a killed run had set aside already stays the result that is put back; what it had made in its place is dropped.
    """
    aside, unfinished = out / ASIDE, out / UNFINISHED
    if unfinished.is_dir():
        drop(unfinished, out)
    if aside.is_dir():
        move(out, unfinished)
        if unfinished.is_dir():
            drop(unfinished, out)
    else:
        move(out, aside)
    try:
        yield
    except BaseException:
        move(out, unfinished)
        if aside.is_dir():
            move(aside, out)
            folders.remove_empty(aside)
        raise
