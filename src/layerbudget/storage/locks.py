"""Who is at work on a temporary file or folder: a lock that the system drops when its process dies, however it dies."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: nothing there is dropped with a process, so age decides
    fcntl = None

_DEAD = 24 * 3600.0  # seconds after which an unlockable leftover counts as dead


def hold(path: Path) -> int | None:
    """Lock a file or folder that was just made.

    Returns:
        A descriptor to pass to :func:`release`; ``None`` where another process cleaned the path away in between (make another
        one), -1 where this system has no such locks.
    """
    if fcntl is None:
        return -1
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except OSError:  # a file system without locks
        return handle
    os.close(handle)
    return None


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other runs of this package out of a folder for a moment."""
    handle = hold(path)
    try:
        yield
    finally:
        release(handle)


def release(handle: int | None) -> None:
    """Drop a lock."""
    if handle is not None and handle >= 0:
        os.close(handle)


def claim(path: Path) -> int | None:
    """Lock a leftover whose owner is dead; ``None`` where it lives, or the thing is gone."""
    try:
        if fcntl is None:
            return -1 if time.time() - path.stat().st_mtime > _DEAD else None
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
