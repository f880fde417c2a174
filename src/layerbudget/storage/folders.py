"""A folder of results: it appears whole, says in ``manifest.json`` what was written, and only that is ever removed.

A folder that does not exist is filled under a temporary name beside its own and renamed. One that exists (empty, a link to a
folder, the working directory, a mount point, an older result) keeps its place: the new files are made in a temporary folder
inside it, which is renamed to ``.commit.layerbudget`` when it is whole; then they are moved in one by one, the manifest last. A
run that is killed before that rename leaves the old result, one that is killed after it leaves a folder that the next run
finishes. Files that no manifest names are the user's: they stay, and where a new file needs their name they are kept as
``NAME.yours``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..arguments import checked
from ..errors import AlreadyExists
from . import reading
from .source import complete, save_weights
from .writing import (
    SUFFIX,
    check_writable,
    left_behind,
    locked,
    new_temporary,
    real,
    release,
    sweep,
    sync,
    usual_mode,
    whole,
    write_text,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMMIT = ".commit" + SUFFIX


def checksum(path: Path, key: bytes = b"") -> str:
    """BLAKE2b of a file's content (32 hexadecimal digits), keyed where a key is given."""
    hasher = hashlib.blake2b(digest_size=16, key=key)
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            hasher.update(chunk)
    return hasher.hexdigest()


def seal(folder: Path, names: Iterable[str] = ("",)) -> None:
    """Sync the files of a folder, or those of the given names and below them, and write a manifest of these."""
    roots = [folder / name for name in names]
    files = sorted({f for root in roots for f in (root.rglob("*") if root.is_dir() else [root]) if f.is_file()})
    for path in (*files, *{f.parent for f in files}):
        sync(path)
    record = {_name(f, folder): {"bytes": f.stat().st_size, "checksum": checksum(f)} for f in files if f.name != MANIFEST}
    write_text(folder / MANIFEST, reading.dump({"schema_version": 1, "files": record}), overwrite=True)


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def manifest(folder: Path) -> dict[str, Any] | None:
    """``{file: {bytes, checksum}}`` of what was written into a folder; ``None`` where that is not known."""
    try:
        files = reading.read(folder / MANIFEST, "manifest", limit=1 << 28, as_type=dict[str, Any]).get("files")
    except (OSError, ValueError):
        return None
    if not isinstance(files, dict) or not all(_inside(name) and isinstance(row, dict) for name, row in files.items()):
        return None
    return files


def _inside(name: str) -> bool:
    return bool(name) and not name.startswith("/") and not {"\0", "\\"} & set(name) and ".." not in name.split("/")


def _unchanged(file: Path, row: dict[str, Any]) -> bool:
    """Whether a file is still what its manifest says."""
    if not file.is_file() or file.is_symlink():
        return False
    return file.stat().st_size == row.get("bytes") and checksum(file) == row.get("checksum")


def broken(folder: Path) -> list[str] | None:
    """Files that differ from the manifest; ``None`` where there is no manifest."""
    files = manifest(folder)
    return None if files is None else [name for name, row in files.items() if not _unchanged(folder / name, row)]


def _free(path: Path) -> Path:
    """That name followed by nothing, 1, 2, ...: the first that nothing has."""
    return next(p for i in range(1 << 20) if not os.path.lexists(p := path.with_name(f"{path.name}{i or ''}")))


def check_folder(out_dir: Path | str, *, overwrite: bool = False) -> Path:
    """Refuse an output folder that holds something or cannot be made, before any work is done; finish or clean what a killed
    run left there.
    """
    out = real(out_dir)
    recover(out)
    if _holds_something(out):
        if not overwrite:
            raise AlreadyExists(f"{out_dir} exists already.", "", "Choose another output, or pass overwrite=True.")
        if not out.is_dir() or manifest(out) is None:
            raise AlreadyExists(
                f"{out_dir} exists and holds no {MANIFEST} of this package.",
                "Only what a manifest names is replaced.",
                "Choose another output folder, or empty this one yourself.",
            )
    check_writable(out / "probe" if out.is_dir() else out)
    return out


def _holds_something(out: Path) -> bool:
    return out.exists() and (not out.is_dir() or bool(set(out.iterdir()) - set(left_behind(out))))


@contextlib.contextmanager
def new_folder(out_dir: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into whose files take their places in ``out_dir`` when all went well, and vanish when not.

    Raises:
        AlreadyExists: See :func:`check_folder`; or somebody filled ``out_dir`` meanwhile (it says where the result is).
        InvalidInput: See :func:`check_folder`; or the disk is full.
    """
    out = check_folder(out_dir, overwrite=overwrite)
    exists = out.is_dir()
    parent = out if exists else out.parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary, lock = new_temporary(parent, "new" if exists else out.name)
    try:
        with whole(out):
            yield temporary
        _open_up(temporary)
        seal(temporary)
        placed = _move_in(temporary, out, overwrite) if exists else _rename(temporary, out)
        if not placed:
            os.rename(temporary, kept := _free(parent / f"{out.name}-result"))
        sync(parent)
        if not placed:
            what = f"{out} was filled by somebody else meanwhile; the result is in {kept}."
            raise AlreadyExists(what, "", "Move it.")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # where it was committed it has another name
        raise
    finally:
        release(lock)


def _open_up(folder: Path) -> None:
    """Give a temporary folder and all in it the modes that new folders and files have."""
    mode = usual_mode(folder)
    for path in (p for p in (folder, *folder.rglob("*")) if not p.is_symlink()):
        os.chmod(path, mode | (mode & 0o444) >> 2 if path.is_dir() else mode)


@checked
def write_model(
    model: Any,
    tokenizer: Any,
    out_dir: Path | str,
    writers: Mapping[str, Callable[[Path], object]] | None = None,
    *,
    overwrite: bool = False,
    fits: bool = True,
    **options: Any,
) -> Path:
    """Write the weights of a model and all that its checkpoint has beside them, its tokenizer, and other files.

    What no decision touched is as it came: see :func:`~layerbudget.storage.source.complete`.

    ``writers`` has by name what writes such a file; ``fits`` is that of ``complete``, and ``options`` go to the model's
    ``save_pretrained``. The folder is that of :func:`new_folder`, and is returned.
    """
    with new_folder(out_dir, overwrite=overwrite) as folder:
        save_weights(model, folder, **options)
        for note in complete(model, tokenizer, folder, fits=fits):
            logger.warning(note)
        for name, write in (writers or {}).items():
            write(folder / name)
    return Path(out_dir)


def _rename(temporary: Path, out: Path) -> bool:
    """Whether a finished folder got its name; somebody may have taken that meanwhile."""
    try:
        os.rename(temporary, out)
    except OSError:
        return False
    return True


def _move_in(temporary: Path, out: Path, overwrite: bool) -> bool:
    """Commit a finished folder inside the old result, and move its files in; False where that was to be empty and is not."""
    with locked(out):
        if (out / COMMIT).is_dir():  # of a run that was killed meanwhile
            _finish(out)
        if not overwrite and _holds_something(out):
            return False
        os.rename(temporary, out / COMMIT)
        sync(out)
        _finish(out)
    return True


def _finish(out: Path) -> None:
    """Put the files of a committed folder in the place of those of the old manifest; it may have been done in part."""
    source = out / COMMIT
    old = {name: row for name, row in (manifest(out) or {}).items() if _unchanged(out / name, row)}
    for name in set(old) - set(manifest(source) or old):
        (out / name).unlink(missing_ok=True)
    come = sorted((f for f in source.rglob("*") if f.is_file()), key=lambda f: f.name == MANIFEST)  # the old one goes last
    for file in come:
        name = _name(file, source)
        target = out / name
        if name != MANIFEST and name not in old and os.path.lexists(target):
            os.rename(target, _free(target.with_name(f"{target.name}.yours")))
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
    for folder in {out, *((out / _name(file, source)).parent for file in come)}:
        sync(folder)
    shutil.rmtree(source)


def recover(out: Path) -> None:
    """Finish what a killed run had committed, and remove what it had only begun."""
    if (out / COMMIT).is_dir():
        with locked(out):
            if (out / COMMIT).is_dir():  # nobody else finished it while this run waited
                _finish(out)
    if out.is_dir():
        sweep(out)
    sweep(out.parent, out.name)
