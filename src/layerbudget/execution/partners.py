"""The other processes of a run: each tells when it ends and why, and one that dies is noticed by all.

Every process keeps one connection to the main one. The system closes it when a process dies, however busy the others are, and
finds within half a minute that a machine is gone. What one process says at its end reaches all of them through the main one.
They then end with the same sentence: inside :func:`working` the main thread is interrupted, and where it does not return within
``GRACE`` seconds, the process ends at once. A slow partner is no dead one, and is waited for.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..errors import LayerbudgetError, LostProcess

GRACE = 20.0  # seconds in which the main thread can clean up
_NEWS = 5.0  # seconds in which the reason of a broken connection arrives
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a machine that is gone is noticed in 30 seconds
_KEY = "layerbudget/partners"


class EndedElsewhere(LayerbudgetError):
    """Another process refused: its sentence and its exit code."""

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.code = code


@dataclasses.dataclass(frozen=True)
class _Ending:
    """The exit code that one process says when it ends a command early: 2 is a refusal, whose words are those of all."""

    rank: int
    command: int  # its number among the commands of that process; -1 where it is not known
    code: int
    said: str

    def error(self) -> LayerbudgetError:
        """Return what the other processes end with."""
        if self.code == 1:
            what = f"A process of this run ended (number {self.rank}{f': {self.said}' if self.said else ''})."
            return LostProcess(what, "Finished parts are kept.", "Start it again, with --resume where one was given.")
        return EndedElsewhere(self.said, self.code)


class Partners:
    """The connections of one process: of the main one to all others, of another one to the main one.

    Args:
        rank: Number of this process; 0 is the main one.
        size: How many there are.
        host: Where the main one is reached.
        store: Of torch, in which the main process leaves its port.
        seconds: How long it waits for the others.

    Raises:
        LostProcess: They did not all come.
    """

    def __init__(self, rank: int, size: int, host: str, store: Any, seconds: float) -> None:
        self.rank, self.size = rank, size
        self._command, self._busy, self._closing = 0, False, False
        self._endings = dict[int, _Ending]()  # by the command that they end; -1 is of a process that has died
        self._lock, self._came, self._left = threading.Lock(), threading.Event(), threading.Event()
        self._links = self._accept(store, seconds) if rank == 0 else self._connect(host, store, seconds)
        self._gone: set[int] = set()
        self._signal = _interrupting()
        for link in self._links.values():
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=self._listen, name="partners", daemon=True).start()

    # --- connections ---------------------------------------------------------------------------------------------------------

    def _accept(self, store: Any, seconds: float) -> dict[int, socket.socket]:
        """Wait for the others: who knows the word from the store is one of them."""
        word, until, links = secrets.token_hex(16), time.monotonic() + seconds, dict[int, socket.socket]()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=self.size, dualstack_ipv6=both) as server:
            store.set(_KEY, f"{server.getsockname()[1]} {word}")
            while len(links) < self.size - 1:
                server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    link, _ = server.accept()
                    link.settimeout(max(0.01, until - time.monotonic()))
                    said, number = link.makefile().readline().split()
                except TimeoutError as error:
                    raise missing(len(links) + 1, self.size, seconds) from error
                except ValueError:  # a stranger
                    continue
                if said == word:
                    links[int(number)] = link
        return links

    def _connect(self, host: str, store: Any, seconds: float) -> dict[int, socket.socket]:
        try:
            port, word = store.get(_KEY).decode().split()
            link = socket.create_connection((host, int(port)), timeout=seconds)
            link.sendall(f"{word} {self.rank}\n".encode())
        except (RuntimeError, OSError) as error:  # torch's own errors are the first
            raise missing(1, self.size, seconds) from error
        return {0: link}

    def _listen(self) -> None:
        """Read what the others say, until all are gone."""
        rest, said = dict.fromkeys(self._links, b""), dict.fromkeys(self._links, "")
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank, data = key.data, _received(self._links[key.data])
                    *lines, rest[rank] = (rest[rank] + data).split(b"\n")
                    for ending in (_Ending(**json.loads(line)) for line in lines):
                        self._take(ending)
                        if ending.code == 1 and ending.rank == rank:  # its connection breaks next, for this reason
                            said[rank] = ending.said
                    if not data:
                        selector.unregister(key.fileobj)
                        if rank not in self._gone and not self._closing:
                            self._take(_Ending(rank, -1, 1, said[rank]))

    def _take(self, ending: _Ending) -> None:
        """One process has ended, or a command of it."""
        if ending.code == 0:
            self._gone.add(ending.rank)
            return
        self._send(ending, besides=ending.rank)
        with self._lock:
            over = 0 <= ending.command < self._command + (not self._busy)  # a command that has ended here too
            if over or ending.command in self._endings:
                return
            self._endings[ending.command] = ending
            self._came.set()
            now = self._busy and ending.command in (-1, self._command)
            if now:
                _thread.interrupt_main(self._signal)
        if now and not self._left.wait(GRACE):
            sys.stderr.write(f"layerbudget: {ending.error()}\n")
            sys.stderr.flush()
            os._exit(ending.code)

    def _send(self, ending: _Ending, besides: int = -1) -> None:
        """Tell the others: the main process all of them, another one the main one."""
        if self.rank != 0 and ending.rank != self.rank:
            return
        line = json.dumps(dataclasses.asdict(ending)).encode() + b"\n"
        for rank, link in self._links.items():
            if rank not in (besides, *self._gone):
                with contextlib.suppress(OSError):  # it is gone already, which listening tells
                    link.sendall(line)

    # --- the command that runs -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Inside, this process ends when another one did: with its sentence, as an error."""
        try:  # an interruption may come as soon as the command has begun
            ended = self._begin()
            if ended is not None:
                raise ended.error()
            yield
        except (KeyboardInterrupt, RuntimeError) as error:
            ending = self._reason(error)
            if ending is None:
                raise
            raise ending.error() from error
        finally:
            self._leave()

    def _begin(self) -> _Ending | None:
        """Begin the next command; return what has ended it elsewhere already."""
        with self._lock:
            self._left.clear()
            self._busy, self._command = True, self._command + 1
            for command in [c for c in self._endings if 0 <= c < self._command]:  # of commands before
                del self._endings[command]
            ended = self._present()
            if ended is None:
                self._came.clear()
            return ended

    def _reason(self, error: BaseException) -> _Ending | None:
        """Why a connection broke or the main thread was interrupted; None where no other process did it."""
        try:
            if not isinstance(error, KeyboardInterrupt) and not isinstance(error, LayerbudgetError):
                self._came.wait(_NEWS)
        except KeyboardInterrupt:  # the reason has come
            pass
        return self._present()

    def _present(self) -> _Ending | None:
        """The ending of the present command: the death of a process, or a refusal elsewhere; None while it goes on."""
        return self._endings.get(-1) or self._endings.get(self._command)

    def _leave(self) -> None:
        """End the command; an interruption that is on its way comes to nothing."""
        try:
            with self._lock:
                self._busy = False
            self._left.set()
        except KeyboardInterrupt:
            self._busy = False
            self._left.set()

    def tell(self, code: int, said: str) -> None:
        """Say that this process ends the command early, with this exit code and sentence."""
        self._send(_Ending(self.rank, self._command, code, said))

    def close(self) -> None:
        """Leave: the others go on. Whoever leaves without that has died."""
        self._closing = True
        self._send(_Ending(self.rank, self._command, 0, ""))

    @property
    def lost(self) -> bool:
        """Whether one of the others has ended early."""
        return bool(self._endings)


_ALL: list[Partners] = []  # at most one


def _interrupting() -> signal.Signals:
    """Return a signal that interrupts the main thread: a shell that starts a command behind it has the usual one ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        return signal.SIGINT
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, signal.default_int_handler)
    return signal.SIGUSR2


def missing(came: int, size: int, seconds: float) -> LostProcess:
    """Return the error of processes that did not come."""
    what = f"This run has {size} processes, and after {seconds:.0f} s only {came} had come."
    return LostProcess(what, "All are started within that time.", "Look what ended the others, and start all of them again.")


def meet(rank: int, size: int, host: str, store: Any, seconds: float) -> None:
    """Connect to the other processes; arguments and errors as of :class:`Partners`."""
    _ALL.append(Partners(rank, size, host, store, seconds))


def part() -> bool:
    """Leave the other processes, and return whether all of them were well."""
    well = True
    while _ALL:
        partners = _ALL.pop()
        partners.close()
        well = well and not partners.lost
    return well


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Inside, this process ends when another one of the run did.

    Raises:
        LostProcess: One has died.
        EndedElsewhere: One has refused.
    """
    with _ALL[0].working() if _ALL else contextlib.nullcontext():
        yield


def tell(code: int, said: str) -> None:
    """Say to the other processes that this one ends the command early."""
    for partners in _ALL:
        partners.tell(code, said)


def _received(link: socket.socket) -> bytes:
    """Bytes that came; none where the other side is gone."""
    try:
        return link.recv(1 << 16)
    except OSError:
        return b""
