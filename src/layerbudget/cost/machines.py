"""The share of each of several processes in a verb, on paper: memory, operations, bytes read and bytes exchanged.

The counts are those of the code. Sequences are divided, so a process does its share of the operations. Weights are not: every
process reads all of them, once where they stay in memory, else as often as the walks pass them. What is exchanged are the sums
that :class:`~layerbudget.execution.processes.ProcessGroup` adds up, in bytes of one process; a ring sends nearly twice as much.
Gradients of sequences are not added up but dealt out, and are sent once.

A forward is two operations for every weight that a token meets, and products of inputs with themselves count as they are.
Attention, softmax and the rounding of a matrix are left out: a few per cent at the default lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ..execution.panels import count_numbers
from .price import Cost, price
from .sizes import Shape, Text
from .timing import Pace
from .work import WORK, WorkItem, moments_bytes, norms_bytes

#: Operations in 16 bits, bytes read from a disk and bytes sent over a network that a card of a data centre does in a second.
RATES = {"operations": 4e14, "reading": 3e9, "exchange": 2.5e10}
_TRIED = 2.0  # walks that try whether the layers of a model whose weights stay in files can run one at a time
_PARTS = 4  # of the text of ``plan shapes``, each of which processes refit by the others
_SMALL = 256.0  # bytes of the names and numbers of a layer, beside its sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One of several processes: what it holds and does of a verb, and what would take longest.

    Attributes:
        machines: How many processes there are, each with a card of its own.
        sequences: Of all texts, the largest share of the first one.
        memory: Bytes at the peak, mapped weights not counted.
        operations: Floating-point operations.
        read: Bytes of weights that come from files.
        sent: Bytes that go into sums over all processes, or to others of them.
        limit: ``memory`` where it does not fit, ``text`` where there are fewer sequences than processes, else what takes
            longest at :data:`RATES`: ``operations``, ``reading`` or ``exchange``.
        seconds: Of that work at :data:`RATES`; zero where the verb does not run.
    """

    machines: int
    sequences: int
    memory: int
    operations: float
    read: float
    sent: float
    limit: str
    seconds: float


def _gradients(tables: float) -> Callable[[Shape, Text], float]:
    """So many sums as wide as all matrices, in float32."""
    return lambda shape, text: 4.0 * tables * shape.layers * shape.numel


def _factors(tables: float) -> Callable[[Shape, Text], float]:
    """Both factors of every matrix, and so many sums of its gradients."""

    def sent(shape: Shape, text: Text) -> float:
        squares = sum(copies * count_numbers(d) for d, copies in shape.sites)
        squares += sum(m.copies * count_numbers(m.d_out) for m in shape.matrices)
        return 4.0 * shape.layers * (squares + tables * shape.numel)

    return sent


#: Bytes that one process gives to sums over all of them, by kind of work, in one look at the text.
SENT: dict[str, Callable[[Shape, Text], float]] = {
    "gradient-norm": _gradients(1),
    "fisher-diagonal": _gradients(8),  # two tables in four groups of sequences
    "rank-gain": _factors(2),
    "kfac": _factors(4),
    "ekfac": _factors(6),
    "norms": norms_bytes,
    "gram": moments_bytes,
    "forward": lambda shape, text: 8.0 * text.samples,
}


def _coordinates(losses: int) -> Callable[[Shape, Text, int], float]:
    """The gradients of a process's sequences, cut among all, or their factors where those are fewer bytes.

    The factor of the shorter side goes to every process that has a part of the matrix. See
    :mod:`layerbudget.sensitivity.curvature.gram`.
    """

    def sent(shape: Shape, text: Text, machines: int) -> float:
        each, activation = 0.0, text.length * shape.width
        for m in shape.matrices:
            low, high = sorted((m.d_out, m.d_in))
            parts = min(machines, 1 + machines * m.numel // shape.numel)
            factors = activation * (parts * low + high) if m.copies == 1 else float("inf")
            each += min(4.0 * m.numel, factors)
        return shape.layers * losses * -(-text.samples // machines) * each * (machines - 1) / machines

    return sent


def _started(shape: Shape, text: Text, machines: int) -> float:
    """Gradients of adapters of rank 8."""
    rows = sum(m.copies * m.d_out for m in shape.matrices)
    return 32.0 * shape.layers * -(-text.samples // machines) * rows * (machines - 1) / machines


def _of_teams(shape: Shape, text: Text, machines: int) -> float:
    """Moments of a part of the text whose sequences several processes share."""
    return moments_bytes(shape, text) if machines > _PARTS else 0.0


#: Bytes that one of so many processes sends to the others beside the sums, by kind of work.
DEALT: dict[str, Callable[[Shape, Text, int], float]] = {
    "fisher-gram": _coordinates(1),
    "fisher-mc": _coordinates(2),
    "layerif": _coordinates(1),
    "adapter": _started,
    "refit": _of_teams,
}


def share_of(
    verb: str, parts: Sequence[WorkItem], shape: Shape, pace: Pace, machine: int, machines: int, streamed: bool | None = None
) -> Share:
    """Return what each of ``machines`` processes holds and does of a verb.

    Args:
        verb: The verb as users type it.
        parts: Its parts.
        shape: Of the model.
        pace: Of the model; its seconds do not matter here.
        machine: Bytes of memory of each process.
        machines: How many processes there are.
        streamed: As for :func:`~layerbudget.cost.price.price`.
    """
    divided = [dataclasses.replace(p, text=dataclasses.replace(p.text, samples=-(-p.text.samples // machines))) for p in parts]
    card = dataclasses.replace(pace, device="cuda")  # it holds no pages of mapped files
    cost: Cost = price(verb, divided, shape, card, machine, streamed)
    operations = sum(part.times * _operations(part, shape) for part in divided)
    tried = _TRIED if any(WORK[part.kind].graph != "none" for part in parts) else 0.0
    walks = tried + sum(part.times * _walks(part) for part in divided) if cost.how == "streamed" else 1.0
    read = walks * shape.weights
    summed = sum(part.times * _looks(part) * _sent(part, shape) for part in parts) if machines > 1 else 0.0
    dealt = sum(part.times * DEALT[part.kind](shape, part.text, machines) for part in parts if part.kind in DEALT)
    seconds = {"operations": operations, "reading": read, "exchange": 2.0 * summed * (machines - 1) / machines + dealt}
    seconds = {name: amount / RATES[name] for name, amount in seconds.items()}
    limit = max(seconds, key=lambda name: seconds[name])
    limit = "text" if any(_is_short(part.text, machines) for part in parts) else limit if cost.fits else "memory"
    return Share(
        machines=machines,
        sequences=divided[0].text.samples,
        memory=cost.memory,
        operations=operations,
        read=read,
        sent=summed + dealt,
        limit=limit,
        seconds=seconds.get(limit, 0.0),
    )


def _is_short(text: Text, machines: int) -> bool:
    """Whether more text would give all processes a sequence: halves have one of each two, and other parts have no more of it.

    A forward of one sequence only opens the layers.
    """
    return 1 < text.samples < machines and text.whole < 2 * machines


def _looks(part: WorkItem) -> float:
    """How often the text is walked backwards, or forwards where nothing is walked backwards."""
    work = WORK[part.kind]
    passes = work.forwards if part.forwards is None else part.forwards
    if part.kind == "directional":
        return passes / (1.0 + 2.0 * max(1, work.losses if part.losses is None else part.losses))
    return max(1.0, passes) if part.kind == "forward" else 1.0


def _walks(part: WorkItem) -> float:
    """How often all weights come from their files: backwards twice in a look, forwards once for every batch."""
    if part.kind == "forward":  # whole plans of a streamed model go through each layer together
        return 1.0 * -(-part.text.samples // part.text.batch)
    return _looks(part) * (2.0 if WORK[part.kind].graph != "none" else 1.0)


def _sent(part: WorkItem, shape: Shape) -> float:
    counted = SENT.get(part.kind)
    sums = 0.0 if counted is None else counted(shape, part.text)
    names = _SMALL * shape.layers if part.kind != "forward" else 0.0
    return names + sums + part.sent(shape, part.text)


def _operations(part: WorkItem, shape: Shape) -> float:
    """Operations of a part on its text."""
    work, text = WORK[part.kind], part.text
    passes = work.forwards + work.each * shape.layers if part.forwards is None else part.forwards
    met = shape.layers * shape.met + shape.hidden * shape.vocabulary * work.head
    each = ((copies * shape.routed if copies > 1 else 1.0) * count_numbers(d) for d, copies in shape.sites)
    moments = sum(each) if part.kind == "gram" else 0.0
    return 2.0 * text.tokens * (passes * met + shape.layers * moments)
