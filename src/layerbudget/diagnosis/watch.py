"""Measured cost of a run: its clock, and the largest memory while it ran."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

import torch


def held_memory() -> int:
    """Bytes that this process holds for itself, without mapped weights; its largest resident size where that is not known."""
    status = Path("/proc/self/status")
    rows = status.read_text().splitlines() if status.is_file() else []
    anonymous = next((row for row in rows if row.startswith("RssAnon")), None)
    if anonymous is not None:
        return int(anonymous.split()[1]) * 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


class MemoryMonitor(threading.Thread):
    """A clock, and the largest memory of the process and of a model's device, from its start to :meth:`end`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(daemon=True)
        self.device, self._ended = torch.device(device), threading.Event()
        self.largest, self._began = held_memory(), time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.start()

    def run(self) -> None:
        """Look twenty times a second."""
        while not self._ended.wait(0.05):
            self.largest = max(self.largest, held_memory())

    def end(self) -> tuple[float, int]:
        """Seconds and bytes; on an accelerator its own bytes."""
        self._ended.set()
        seconds = time.perf_counter() - self._began
        on_device = self.device.type == "cuda"
        return seconds, int(torch.cuda.max_memory_allocated(self.device)) if on_device else max(self.largest, held_memory())
