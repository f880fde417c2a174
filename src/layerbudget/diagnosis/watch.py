"""Measured cost of a run: its clock, and the largest memory while it ran."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path


def held_memory() -> int:
    """Bytes that this process holds for itself, without mapped weights; its largest resident size where that is not known."""
    status = Path("/proc/self/status")
    rows = status.read_text().splitlines() if status.is_file() else []
    anonymous = next((row for row in rows if row.startswith("RssAnon")), None)
    if anonymous is not None:
        return int(anonymous.split()[1]) * 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


class MemoryMonitor(threading.Thread):
    """A clock, and the largest memory of the process, from its start to :meth:`end`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.largest, self._began = held_memory(), time.perf_counter()
        self.start()

    def run(self) -> None:
        """Look twenty times a second."""
        while not self._ended.wait(0.05):
            self.largest = max(self.largest, held_memory())

    def end(self) -> tuple[float, int]:
        """Seconds and bytes."""
        self._ended.set()
        return time.perf_counter() - self._began, max(self.largest, held_memory())
