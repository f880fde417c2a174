"""Several processes, each with its shard of the sequences: sums and counts add up, the main process writes.

Processes are those of the launcher that started them (``torchrun --nproc-per-node N -m layerbudget ...``, ``accelerate launch
-m layerbudget ...``). Every process walks all layers on its own batches; when a layer is through, what the accumulators hold of
it is reduced in one flat sum per type, and each matrix is settled (factorised, decomposed) by one *owner*, chosen so that
owners have the same work. What settling gave is added up at the end. Random labels are drawn from the content of a sequence,
so the numbers do not depend on the number of processes beyond the order of sums. :mod:`layerbudget.execution.partners` says
what happens when one of them ends early.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..records import Block
from . import partners
from .loss import FeatureSet
from .panels import panels

_ALONE, _WATCHED = 30.0, 600.0  # seconds in which all processes come: without a launcher that watches them, and with one
_PATIENCE = datetime.timedelta(days=7)  # of one sum: work is unequal, and who dies is noticed otherwise
ALIKE = 4  #: Processes that can share the batches of one where a plan is to be equal to the bit.
T = TypeVar("T")
Some = TypeVar("Some", bound=CalibrationSet | FeatureSet)


class Exchanged:
    """Count of the bytes that this process gave to sums over all processes, or sent to them, since it began."""

    bytes = 0

    def add(self, count: int) -> None:
        """Count what one exchange takes."""
        self.bytes += count


EXCHANGED = Exchanged()  #: What ``machines.py`` expects, as it happened.


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run: the number of this one, and how many there are. One by itself has nothing to exchange.

    ``handle`` is torch's own group where it is a part of them (:func:`among`).
    """

    rank: int = 0
    size: int = 1
    handle: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be sent."""
        return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")

    def everywhere(self, rank: int) -> int:
        """The number in the whole run of one of these processes."""
        return rank if self.handle is None else int(dist.get_global_rank(self.handle, rank))

    def reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add tensors up over all processes, in place; one flat sum per type and device."""
        if self.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for members in kinds.values():
            flat = torch.cat([t.reshape(-1) for t in members])
            dist.all_reduce(flat, group=self.handle)
            EXCHANGED.add(flat.numel() * flat.element_size())
            for t, part in zip(members, flat.split([t.numel() for t in members]), strict=True):
                t.copy_(part.view_as(t))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of an array over all processes, a new array: ``values`` stay this process's own on every device."""
        if self.size == 1:
            return np.array(values)
        tensor = torch.tensor(np.asarray(values, dtype=np.float64)).to(self.device)
        dist.all_reduce(tensor, group=self.handle)
        EXCHANGED.add(tensor.numel() * tensor.element_size())
        return tensor.cpu().numpy()

    def give(self, tensor: torch.Tensor, owner: int) -> None:
        """Write what one process has in a tensor into that of all others."""
        if self.size == 1:
            return
        sent = tensor.to(self.device).contiguous()
        dist.broadcast(sent, self.everywhere(owner), group=self.handle)
        EXCHANGED.add(sent.numel() * sent.element_size())
        if owner != self.rank:
            tensor.copy_(sent)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in their order."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
            EXCHANGED.add(len(pickle.dumps(value)))
        return values

    def bring(self, value: T, owner: int) -> list[T]:
        """The values of all processes, in their order, to one of them; the others get none."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == owner else []
        dist.gather_object(value, values or None, dst=self.everywhere(owner), group=self.handle)
        EXCHANGED.add(len(pickle.dumps(value)))
        return values

    def swap(self, given: Sequence[torch.Tensor], coming: Sequence[int]) -> list[torch.Tensor]:
        """Give every process the tensor at its number, and return what each gave to this one.

        Args:
            given: Flat tensors of one type, one for each process.
            coming: How many numbers each process gives to this one.
        """
        if self.size == 1:
            return list(given)
        going = [0 if r == self.rank else t.numel() for r, t in enumerate(given)]
        coming = [0 if r == self.rank else count for r, count in enumerate(coming)]
        sent = torch.cat([t[:count] for t, count in zip(given, going, strict=True)]).to(self.device)
        came = sent.new_empty(sum(coming))
        dist.all_to_all_single(came, sent, coming, going, group=self.handle)
        EXCHANGED.add(sent.numel() * sent.element_size())
        parts = came.to(given[0].device).split(coming)
        return [own if r == self.rank else part for r, (own, part) in enumerate(zip(given, parts, strict=True))]

    def owners(self, blocks: Sequence[Block]) -> list[int]:
        """Owner of every block: the largest first, each to the process that has least so far."""
        load, owner = [0] * self.size, [0] * len(blocks)
        for k in sorted(range(len(blocks)), key=lambda i: -blocks[i].numel):
            owner[k] = load.index(min(load))
            load[owner[k]] += blocks[k].numel
        return owner

    def shard(self, runs: Sequence[T]) -> list[T]:
        """Every n-th batch or sequence, beginning with this process's number."""
        self.check_shares([len(runs)])
        return list(runs[self.rank :: self.size])

    def check_shares(self, parts: Sequence[int], what: str = "", teams: int = 1, option: str = "--samples") -> None:
        """Refuse parts of a text, of so many sequences each, that have none for some process; ``what`` is what they are.

        With several ``teams`` of this many processes, a part is worked on by one of them. ``option`` gives more sequences.

        Raises:
            InvalidInput: The smallest part has fewer sequences than there are processes.
        """
        least, each = min(parts), f" in the smallest of {len(parts)} {what}" if len(parts) > 1 else ""
        if least < self.size:
            raise InvalidInput(
                f"{least} sequence{'s' * (least != 1)}{each} cannot be shared between {self.size} processes.",
                "Every process needs one.",
                f"Give more text ({option} {self.size * len(parts)} or more), or start at most {max(1, least * teams)}.",
            )

    def batch(self, samples: int, size: int) -> int:
        """Sequences of a batch: ``size``, or fewer where the processes would not have equally many batches."""
        batches = -(-samples // size)
        if batches % self.size == 0:
            return size
        fewer = -(-samples // (-(-batches // self.size) * self.size))
        return fewer if -(-samples // fewer) >= self.size else max(1, samples // self.size)

    def batch_alike(self, samples: int, most: int) -> int:
        """The same, and up to :data:`ALIKE` processes have the same batches as one: what one gives is the same to the bit."""
        most = min(most, -(-samples // ALIKE))
        if -(-samples // most) < min(samples, ALIKE):
            most = max(1, samples // ALIKE)
        return most if -(-samples // most) >= self.size else self.batch(samples, most)

    def places(self, samples: int, size: int = 1) -> list[int]:
        """The sequences of this process: every n-th batch of ``size`` of them, beginning with this process's number."""
        runs = self.shard([range(start, min(start + size, samples)) for start in range(0, samples, size)])
        return [place for run in runs for place in run]

    def collect(self, values: np.ndarray, samples: int, size: int = 1) -> np.ndarray:
        """Values of all sequences, ``(samples, ...)``, of which every process has those of its :meth:`places`."""
        together = np.zeros((samples, *values.shape[1:]))
        together[self.places(samples, size)] = values
        return self.sum(together)

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier(group=self.handle)


_AMONG: list[ProcessGroup] = []  # parts of the processes that work together now, the innermost last


def process_group() -> ProcessGroup:
    """The processes that work together: those of this run, or inside :func:`among` some of them."""
    return _AMONG[-1] if _AMONG else everyone()


def everyone() -> ProcessGroup:
    """All processes of this run, also inside :func:`among`."""
    joined = dist.is_available() and dist.is_initialized()
    return ProcessGroup(dist.get_rank(), dist.get_world_size()) if joined else ProcessGroup()


def join(device: str | None = None) -> ProcessGroup:
    """Join the processes that a launcher started, as it says in the environment.

    Raises:
        InvalidInput: The environment does not say which of them this is, or where the main one is.
        LostProcess: They did not all come: within 10 minutes where a launcher watches them, else within 30 seconds.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_available() and not dist.is_initialized():
        accelerated = torch.cuda.is_available() and device != "cpu"
        if accelerated:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        seconds = _WATCHED if os.environ.keys() & {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"} else _ALONE
        store, rank, size = _meet(seconds)
        partners.meet(rank, size, os.environ["MASTER_ADDR"], store, seconds)
        backend = "nccl" if accelerated else "gloo"
        group = dist.PrefixStore("group", store)
        with partners.working():  # one may die here too
            dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=_PATIENCE)
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else transformers reads weights in process 0 alone
        atexit.register(shutdown)
    return process_group()


def _meet(seconds: float) -> tuple[Any, int, int]:
    """Wait for the other processes where the environment says; return torch's store, the number of this one, and how many."""
    size = int(os.environ["WORLD_SIZE"])
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise InvalidInput(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set.",
            "A launcher sets them.",
            "Start it with torchrun, accelerate launch or srun, or unset WORLD_SIZE.",
        )
    if os.environ["RANK"] != "0":
        _wait_for(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), seconds, size)
    try:
        return next(iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=seconds))))
    except dist.DistNetworkError as error:
        if "listen" not in str(error):
            raise partners.missing(1, size, seconds) from error
        where = f"port {os.environ['MASTER_PORT']}"
        raise InvalidInput(f"{where.capitalize()} of this machine is taken.", "", "Choose another MASTER_PORT.") from error
    except dist.DistError as error:
        raise partners.missing(1, size, seconds) from error


def _wait_for(host: str, port: int, seconds: float, size: int) -> None:
    """Wait until the main process is there; torch would say at length that it is not."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise partners.missing(1, size, seconds) from error
            time.sleep(0.2)


def shutdown() -> None:
    """Leave the group, so that no process warns and none takes this one for dead."""
    well = partners.part()
    if dist.is_initialized() and well:  # with one that is gone there is nothing to agree on
        dist.destroy_process_group()


def is_main() -> bool:
    """Whether this process writes: the only one, or number 0."""
    return process_group().is_main


def one_process(what: str) -> None:
    """Refuse several processes for what is done in one.

    Raises:
        InvalidInput: A launcher started several.
    """
    if process_group().size > 1:
        raise InvalidInput(f"{what} in one process.", "A launcher started several.", "Leave torchrun out.")


def broadcast(make: Callable[[], T]) -> T:
    """Return what the main process makes, in all of them."""
    group = process_group()
    values: list[Any] = [make() if group.is_main else None]
    if group.size > 1:
        dist.broadcast_object_list(values, src=group.everywhere(0), group=group.handle)
        EXCHANGED.add(len(pickle.dumps(values)))
    return values[0]


def in_turn(parts: Sequence[Sequence[T]]) -> list[T]:
    """Undo :meth:`ProcessGroup.shard`: what every process has of all, in one list.

    >>> in_turn([["a", "c", "e"], ["b", "d"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    return [part[i] for i in range(len(parts[0])) for part in parts if i < len(part)]


def rounds(parts: Sequence[T]) -> list[tuple[T, bool]]:
    """Every n-th of the parts, as many for each process: one that has none left gets the last again, marked False.

    A model whose weights are shared runs in all processes at once.
    """
    group = process_group()
    dealt = [(part, True) for part in parts[group.rank :: group.size]]
    return dealt + [(part, False) for part in parts[-1:]] * (-(-len(parts) // group.size) - len(dealt))


@contextlib.contextmanager
def among(team: ProcessGroup) -> Iterator[None]:
    """Inside, this process shares its work with a team alone, as :meth:`Teams.of` gives it."""
    _AMONG.append(team)
    try:
        yield
    finally:
        _AMONG.pop()


def alone() -> contextlib.AbstractContextManager[None]:
    """A context in which this process does all of its work itself."""
    return among(ProcessGroup())


@dataclasses.dataclass(frozen=True)
class Teams:
    """Parts of a text, each of which one team of processes works on: with no more processes than parts, each is a team.

    What a team of one makes of a part is what one process makes of it, to the bit.

    Attributes:
        parts: How many there are.
        mine: Those of this process's team.
        team: Its processes.
        first: The first process of every part's team.
    """

    parts: int
    mine: tuple[int, ...]
    team: ProcessGroup
    first: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], what: str) -> Teams:
        """Divide parts of so many sequences each; ``what`` they are stands in a refusal.

        Raises:
            InvalidInput: A part has fewer sequences than its team has processes.
        """
        cls.check(sizes, what)
        group, parts = process_group(), len(sizes)
        count = min(parts, group.size)
        teams = [list(range(number, group.size, count)) for number in range(count)]
        number = group.rank % count
        handles = [None if len(t) == 1 or count == 1 else dist.new_group(t, timeout=_PATIENCE) for t in teams]
        team = ProcessGroup(teams[number].index(group.rank), len(teams[number]), handles[number] or group.handle)
        return cls(parts, tuple(range(number, parts, count)), team, tuple(p % count for p in range(parts)))

    @staticmethod
    def check(sizes: Sequence[int], what: str) -> None:
        """Raise what :meth:`of` raises, before anything is computed."""
        size, count = process_group().size, min(len(sizes), process_group().size)
        ProcessGroup(0, -(-size // count)).check_shares(sizes, what, teams=count)

    def spread(self, made: Mapping[int, T]) -> list[T]:
        """Return the value of every part, on every process: each comes from the part's own team."""
        everywhere = process_group().gather(dict(made))
        return [everywhere[first][part] for part, first in enumerate(self.first)]

    def squares(self, made: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the same of large sums by panels, which all have one shape; panels alone are sent."""
        group = process_group()
        if group.size == 1:
            return [made[part] for part in range(self.parts)]
        like = next(iter(made.values()))
        values = [made[part] if part in made else torch.zeros_like(like) for part in range(self.parts)]
        for value, first in zip(values, self.first, strict=True):
            for panel in panels(value):
                group.give(panel, first)
        return values


def shard(data: Some, size: int = 1) -> Some:
    """The sequences of this process: every n-th batch of ``size`` of them."""
    group = process_group()
    mine: Any = data if group.size == 1 else data.select(group.places(data.samples, size))
    return mine
