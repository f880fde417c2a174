"""How far a long run is: steps done of a total, which is said before the first one is.

A callback is any function of ``(done, total)``. One that also has a method ``say(phase)`` is told what is being done, and of a
second pass over the same data, where a plain function stays at the total.
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]


def say(progress: Progress | None, phase: str) -> None:
    """Name what is being done, where the callback listens."""
    listening = getattr(progress, "say", None)
    if listening is not None:
        listening(phase)


class Steps:
    """Counts steps for a callback of ``(done, total)``, which is called with zero at once; ``total`` is that of one pass.

    >>> calls = []
    >>> tick = Steps(lambda done, total: calls.append((done, total)), 3)
    >>> tick(2), tick(), tick()
    (None, None, None)
    >>> calls
    [(0, 3), (2, 3), (3, 3), (3, 3)]
    """

    def __init__(self, progress: Progress | None, total: int, phase: str = "") -> None:
        self.progress, self.total, self.phase, self.done = progress, total, phase, 0
        if phase:
            say(progress, phase)
        self._tell(0)

    def __call__(self, n: int = 1) -> None:
        """Advance by ``n``; beyond the total another pass begins."""
        self.done += n
        passes, within = divmod(max(self.done - 1, 0), max(self.total, 1))
        if passes and hasattr(self.progress, "say"):
            say(self.progress, ", ".join(filter(None, (self.phase, f"pass {passes + 1}"))))
            self._tell(within + 1)
        else:
            self._tell(min(self.done, self.total))

    def _tell(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, self.total)
