"""One file or folder, whole or not at all: a temporary name beside its place, fsync, one rename, fsync of the folder around it.

What is being written lies in a folder ``.NAME.XXXXXXXX.layerbudget``, which is locked meanwhile. The system drops the lock when
the process dies, however it dies. What has no lock any more is removed by the next run that writes to the same place.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from ..errors import AlreadyExists, InvalidInput

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # no such locks on this system: what killed runs leave is not removed
    fcntl = None

SUFFIX = ".layerbudget"
_PROBE, _SCRATCH = "tried", "temporary"
_LEFT = re.compile(r"\.(.*)\.[a-z0-9_]{8}\.layerbudget")
_NAME = 100  # characters of a name that go into a temporary one: names end at 255 bytes
_LOST = (5, 28, 122)  # EIO, ENOSPC, EDQUOT: the data are not there; others say that this system syncs no folders
_WRITERS = ("PytorchStreamWriter", "iostream error", "inline_container", "No space left", "File too large")


def sync(path: Path) -> None:
    """Have the system write a file or folder to its disk; where it cannot do so for folders, the rename must do."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # systems that do not open folders
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if path.is_file() and error.errno in _LOST:
            raise
    finally:
        os.close(handle)


def real(path: Path | str) -> Path:
    """The place that a path leads to, links followed."""
    try:
        if not str(path):
            raise ValueError("it is empty")
        resolved = Path(os.path.realpath(path, strict=False))
        resolved.exists()
        os.fsencode(resolved)
        if "\0" in str(resolved) or resolved.is_symlink():
            raise ValueError("a link that leads to itself" if resolved.is_symlink() else "embedded null byte")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{str(path)!r} is no place to write to: {error}.", "", "Choose another output.") from error
    return resolved


def _above(path: Path) -> Path:
    """The nearest folder that exists: a path itself, or one above it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_writable(path: Path) -> None:
    """Refuse a path in whose folder, or in the nearest one that exists above it, nothing can be made. It is tried."""
    folder = _above(path.absolute().parent)
    try:
        shutil.rmtree(tempfile.mkdtemp(dir=folder, prefix=f".{_PROBE}.", suffix=SUFFIX), ignore_errors=True)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be written: no file can be made in {folder} ({error.strerror}).", "", "Choose another output."
        ) from error


def check_output(path: Path | str, *, overwrite: bool = False) -> Path:
    """Refuse an output file that could not be written, before any work is done; what killed runs left of it is removed."""
    path, named = real(path), path
    _check_place(path, named, allowed=overwrite)
    check_writable(path)
    sweep(path.parent, path.name)
    return path


def check_apart(path: Path | str, *sources: Path | str) -> None:
    """Refuse an output that is a file or folder which is read, under this name or another: a link, a relative path."""
    for source in sources:
        try:
            same = os.path.samefile(path, source)
        except (OSError, ValueError):  # one of them is not there, or is no path
            continue
        if same:
            raise InvalidInput(
                f"{source} is read, and the output {path} is the same.", "It would be lost.", "Choose another output."
            )


def _check_place(path: Path, named: Path | str, *, allowed: bool) -> None:
    """Refuse pipes and devices, which a rename would replace, folders, and files that may not be overwritten."""
    if path.exists() and not (path.is_dir() or stat.S_ISREG(path.stat().st_mode)):
        raise InvalidInput(f"{path} is no ordinary file.", "Results are files.", "Choose another output.")
    if path.is_dir() or (path.exists() and not allowed):
        raise AlreadyExists(f"{named} exists already.", "", "Choose another output, or pass overwrite=True.")


def write_text(path: Path | str, text: str, *, overwrite: bool = False) -> Path:
    """Write a text file atomically; see :func:`write_bytes`."""
    return write_bytes(path, text.encode("utf-8"), overwrite=overwrite)


def write_bytes(path: Path | str, content: bytes, *, overwrite: bool = False) -> Path:
    """Write a file atomically."""
    path, named = real(path), Path(path)
    same = path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
    _check_place(path, named, allowed=overwrite or same)
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    with new_file(path.parent, path.name, lambda _: path) as temporary:
        temporary.write_bytes(content)
    return named


@contextlib.contextmanager
def new_file(parent: Path, stem: str, place: Callable[[Path], Path]) -> Iterator[Path]:
    """A temporary file that is synced and gets the path ``place(it)`` when all went well, and vanishes when not."""
    folder, lock = new_temporary(parent, stem)
    temporary = folder / "new"
    try:
        yield temporary
        os.chmod(temporary, usual_mode(folder))
        sync(temporary)
        os.replace(temporary, place(temporary))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        release(lock)
    sync(parent)


def usual_mode(folder: Path) -> int:
    """The mode that a new file gets in a folder, by the umask. Temporary files, and those of safetensors, have less."""
    descriptor, probe = -1, folder / ".mode"
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL, 0o666)
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
            probe.unlink()


def new_temporary(parent: Path, name: str) -> tuple[Path, int]:
    """A locked temporary folder; pass the second to :func:`release` when it has its own name."""
    while True:
        made = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name[:_NAME]}.", suffix=SUFFIX))
        lock = _lock(made)
        if lock is not None:
            return made, lock


def _lock(path: Path, *, wait: bool = True) -> int | None:
    """A descriptor that holds a lock on a path; ``None`` where it is gone, or somebody holds it and this does not wait."""
    if fcntl is None:
        return -1 if wait else None
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        if wait and not isinstance(error, FileNotFoundError):
            raise
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except FileNotFoundError:  # another process cleaned it away in between
        pass
    except OSError:
        if wait:  # a file system without locks
            return handle
    os.close(handle)
    return None


def release(handle: int | None) -> None:
    """Drop a lock."""
    if handle is not None and handle >= 0:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other runs of this package out of a folder for a moment."""
    handle = _lock(path)
    try:
        yield
    finally:
        release(handle)


def left_behind(folder: Path, name: str | None = None) -> list[Path]:
    """Temporary folders of a name (of any) in a folder, whether or not somebody is still at work on them."""
    matches = [(entry, _LEFT.fullmatch(entry.name)) for entry in folder.iterdir()] if folder.is_dir() else []
    return [entry for entry, match in matches if match and (name is None or match[1] in (name[:_NAME], _PROBE))]


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what killed runs left: temporary folders that nobody holds a lock on."""
    for entry in left_behind(folder, name):
        lock = _lock(entry, wait=False)
        if lock is not None:
            shutil.rmtree(entry, ignore_errors=True)  # a link is left alone
            release(lock)


class Scratch:
    """A temporary folder of this run, which goes with it; those that killed runs left beside it go first.

    Attributes:
        path: The folder, below the one that was given or the system's own for temporary files.
    """

    def __init__(self, parent: Path | str | None = None) -> None:
        where = Path(parent or tempfile.gettempdir())
        sweep(where, _SCRATCH)
        self.path, lock = new_temporary(where, _SCRATCH)
        self.close = weakref.finalize(self, _end, self.path, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.close()


def _end(path: Path, lock: int) -> None:
    """Remove a temporary folder, and give its lock back."""
    shutil.rmtree(path, ignore_errors=True)
    release(lock)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[None]:
    """Turn what safetensors and torch say of a disk that is full, or was taken away, into :class:`InvalidInput`."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in _WRITERS):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"{path} could not be written ({first[:160]}).", "", "Free some space, or choose another output."
        ) from error


def check_space(needs: Mapping[Path | str, float]) -> None:
    """Refuse results that the disk has no room for; ``{place: about how many bytes}``, added up on each file system."""
    disks: dict[int, list[Path | str]] = {}
    for path in needs:
        disks.setdefault(_above(real(path)).stat().st_dev, []).append(path)
    for paths in disks.values():
        folder, needed = _above(real(paths[0])), sum(needs[path] for path in paths)
        free = shutil.disk_usage(folder).free
        if needed > free:
            temporary = all(str(path) == tempfile.gettempdir() for path in paths)
            remedy = "TMPDIR=FOLDER names another folder for temporary files." if temporary else "Choose another output."
            raise InvalidInput(
                f"{' and '.join(map(str, paths))} will take about {_size(needed)}, and {_size(free)} are free in {folder}.",
                "The result is not computed where it could not be kept.",
                f"Free some space. {remedy}",
            )


def _size(count: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 2**10:,.1f} KiB"
