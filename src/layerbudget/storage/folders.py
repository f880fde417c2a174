"""A folder of results: it appears whole, says in ``manifest.json`` what was written, and only that is ever removed.

A folder that does not exist is filled under a temporary name beside its own and renamed. One that exists (empty, a link to a
folder, the working directory, a mount point, an older result) keeps its place: the new files are made in a temporary folder
inside it, a journal names what comes and what goes, and then they are moved in one by one. A run that is killed before the
journal leaves the old result, one that is killed after it leaves a journal that the next run finishes. Files that no manifest
names are the user's: they stay, and where a new file needs their name they are kept as ``NAME.yours``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import AlreadyExists, InvalidInput
from . import reading
from .writing import (
    PROBE,
    SUFFIX,
    check_writable,
    left_behind,
    locked,
    new_temporary,
    real,
    release,
    sweep,
    sync,
    whole,
    write_text,
)

MANIFEST = "manifest.json"
JOURNAL = ".commit" + SUFFIX
_OWN = "new"  # the name of temporary folders inside a result


def checksum(path: Path, key: bytes = b"") -> str:
    """BLAKE2b of a file's content (32 hexadecimal digits), keyed where a key is given."""
    found = hashlib.blake2b(digest_size=16, key=key)
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


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

    Raises:
        AlreadyExists: It holds something; with ``overwrite``: it has no manifest of this package.
        InvalidInput: It cannot be made or written to.
    """
    out = real(out_dir)
    recover(out)
    if _holds_something(out):
        if not overwrite:
            raise AlreadyExists(f"{out_dir} exists already.", "", "Choose another output folder, or pass --overwrite.")
        if not out.is_dir() or manifest(out) is None:
            raise AlreadyExists(
                f"{out_dir} exists and holds no {MANIFEST} of this package.",
                "--overwrite removes what a manifest names.",
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
    temporary, lock = new_temporary(parent, _OWN if exists else out.name)
    try:
        with whole(out):
            yield temporary
        os.chmod(temporary, 0o755)
        seal(temporary)
        placed = _move_in(temporary, out, overwrite) if exists else _rename(temporary, out)
        if not placed:
            os.rename(temporary, kept := _free(parent / f"{out.name}-result"))
        sync(parent)
        if not placed:
            what = f"{out} was filled by somebody else meanwhile; the result is in {kept}."
            raise AlreadyExists(what, "", "Move it.")
    except BaseException:
        if not (out / JOURNAL).is_file():  # from the journal on, the new result counts
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        release(lock)


def _rename(temporary: Path, out: Path) -> bool:
    """Whether a finished folder got its name; somebody may have taken that meanwhile."""
    try:
        os.rename(temporary, out)
    except OSError:
        return False
    return True


def _move_in(temporary: Path, out: Path, overwrite: bool) -> bool:
    """Write the journal - what comes, what goes, and what of the user's is in the way - and do what it says.

    False where the folder was to be empty and is not any more.
    """
    with locked(out):
        if not overwrite and _holds_something(out):
            return False
        come = [_name(f, temporary) for f in sorted(temporary.rglob("*")) if f.is_file()]
        old = {n: row for n, row in (manifest(out) or {}).items() if _unchanged(out / n, row)}
        theirs = [n for n in come if n not in old and n != MANIFEST and os.path.lexists(out / n)]
        record = {"schema_version": 1, "from": temporary.name, "come": come, "go": sorted(set(old) - set(come))}
        record |= {"aside": {n: _name(_free(out / f"{n}.yours"), out) for n in theirs}}
        write_text(out / JOURNAL, reading.dump(record), overwrite=True)
        _finish(out)
    return True


def _finish(out: Path) -> None:
    """Do what the journal says; it may have been done in part."""
    record = reading.read(out / JOURNAL, "journal", limit=1 << 28)
    source = out / str(record["from"])
    if source not in left_behind(out, _OWN) and source.exists():
        raise ValueError(f"{source.name} is no temporary folder")
    for name in (n for n in record["come"] if _inside(n) and (source / n).is_file()):
        target, aside = out / name, record["aside"].get(name, "")
        if _inside(aside) and not os.path.lexists(out / aside) and os.path.lexists(target):
            os.rename(target, out / aside)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target)
    for name in filter(_inside, record["go"]):
        (out / name).unlink(missing_ok=True)
    for inner in {(out / n).parent for n in (*record["come"], *record["go"])}:
        if inner.is_dir():
            sync(inner)
    (out / JOURNAL).unlink()
    shutil.rmtree(source, ignore_errors=True)


def recover(out: Path) -> None:
    """Finish what a killed run had decided (its journal), and remove what it had only begun.

    Raises:
        InvalidInput: The journal cannot be read.
    """
    if (out / JOURNAL).is_file():
        try:
            with locked(out):
                if (out / JOURNAL).is_file():  # nobody else finished it while this run waited
                    _finish(out)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"{out / JOURNAL} is broken ({error}): a killed run was moving its files in.",
                "",
                "Look at that folder, and remove the file.",
            ) from error
    if out.is_dir():
        sweep(out)
    for name in (out.name, PROBE):
        sweep(out.parent, name)
