"""Measured cost of a run: its clock, and the largest memory while it ran."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
EVERY = 0.05  # seconds between two looks


def held_memory() -> int:
    """Bytes that this process holds for itself: mapped weights, which the system may drop, are not among them.

    Where the system does not say (it is not Linux) the largest resident size so far stands in.
    """
    if _STATUS.is_file():
        row = next((line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon")), None)
        if row is not None:
            return int(row.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


class MemoryMonitor(threading.Thread):
    """A clock and the largest memory from its start to :meth:`end`: of the process, and of its accelerator if it has one.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(daemon=True)
        self.device, self._ended = torch.device(device), threading.Event()
        self.largest, self._began = held_memory(), time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.start()

    def run(self) -> None:
        """Look now and then."""
        while not self._ended.wait(EVERY):
            self.largest = max(self.largest, held_memory())

    def end(self) -> tuple[float, int]:
        """Seconds and bytes; on an accelerator its own bytes."""
        self._ended.set()
        if self.device.type == "cuda":
            return time.perf_counter() - self._began, int(torch.cuda.max_memory_allocated(self.device))
        return time.perf_counter() - self._began, max(self.largest, held_memory())
