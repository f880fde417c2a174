"""Input statistics of a block's weight matrices, gathered in one pass: matrices that read one tensor share one statistic."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from ..errors import CoverageError
from ..models.blocks import reader_of, transposed, weight_of
from ..models.machine import let_go, zeros_in_file
from ..records import Module
from ..storage.writing import check_space
from .loss import Batch
from .modes import overflowed
from .panels import add_products, panels
from .processes import ProcessGroup, process_group
from .replay import StopForward
from .sites import Site
from .walk import Walk

EXACT = 1 << 13  # inputs of a matrix, at most, whose moments are summed in float64: those of more take too much memory


class InputMoments:
    """Second moments of one input.

    Sums of no more than ``EXACT`` inputs are in float64 until they are read: then they do not depend on the order in which
    sequences come, nor on how many processes add them up.

    Attributes:
        kind: ``diagonal`` (sum of squares of each input) or ``gram`` (panels of ``X' X``).
        rows: Tokens seen.
        equal_tokens: Whether every token counts the same: its input is brought to a root mean square of one.
        folder: Where a Gram matrix lies as a file; by default in memory, of more than ``EXACT`` inputs among temporary files.
        sums: What :meth:`add` adds to: ``value``, in float64 where that is not too large.
    """

    def __init__(
        self,
        kind: str,
        value: torch.Tensor | None = None,
        rows: int = 0,
        folder: Path | None = None,
        *,
        equal_tokens: bool = False,
    ) -> None:
        self.kind, self.rows, self.folder, self.equal_tokens = kind, rows, folder, equal_tokens
        self.sums = value

    @property
    def value(self) -> torch.Tensor | None:
        """The moments, ``(d_in,)`` or ``(d_in, d_in)``, float32; a sum over tokens."""
        self.settle()
        return self.sums

    @value.setter
    def value(self, value: torch.Tensor | None) -> None:
        self.sums = value

    def settle(self) -> None:
        """Keep sums in float32 from now on."""
        if self.sums is not None and self.sums.dtype == torch.float64:
            if self.sums.untyped_storage().filename is None:
                self.sums = self.sums.to(torch.float32)
            else:
                self.sums = zeros_in_file(self.sums.shape, self.folder).copy_(self.sums)
            self.rest()

    def rest(self) -> None:
        """Let sums that lie in a file leave the memory until they are read."""
        if self.sums is not None:
            let_go(self.sums)

    def copy(self) -> InputMoments:
        """Return moments of the same tokens that grow apart from these."""
        sums = None if self.sums is None else self.sums.clone()
        return type(self)(self.kind, sums, self.rows, self.folder, equal_tokens=self.equal_tokens)

    def empty(self, width: int, device: torch.device) -> torch.Tensor:
        """Return sums over no tokens."""
        shape = (width,) if self.kind == "diagonal" else (width, width)
        dtype = torch.float64 if width <= EXACT else torch.float32
        if self.kind == "gram" and device.type == "cpu":
            folder = self.folder
            if folder is None and width > EXACT:  # beside it two more as large are held where it is inverted
                folder = Path(tempfile.gettempdir())
                check_space({folder: width**2 * dtype.itemsize})
            return zeros_in_file(shape, folder, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Add tokens, shape ``(tokens, d_in)``."""
        if self.sums is None:
            self.sums = self.empty(x.shape[1], x.device)
        elif self.sums.dtype == torch.float32 and x.shape[1] <= EXACT:
            self.sums = self.sums.double()
        value, kind, x = self.sums, x.dtype, x.detach().to(torch.float32)
        with torch.autocast(x.device.type, enabled=False):  # forwards may run in half precision, sums never
            if self.equal_tokens:
                lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True)
                x = x * torch.where(lengths > 0, x.shape[1] ** 0.5 / lengths, 0.0)
            if self.kind == "diagonal":
                value += torch.linalg.vector_norm(x, dim=0).square_()
            else:
                add_products(value, x)
        if not bool(torch.isfinite(value if self.kind == "diagonal" else value.diagonal()).all()):
            raise overflowed("Inputs of a matrix", kind)
        self.rows += x.shape[0]

    def mean(self) -> torch.Tensor:
        """Return the moments per token, ``value / rows``; of tokens alone."""
        value = cast(torch.Tensor, self.value)
        return value / torch.full_like(value, self.rows)  # by a number, some devices would multiply by what is near its inverse


def real_tokens(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Rows ``(tokens, d)`` of inputs ``(..., d)``, without those of padding where the mask ``(B, T)`` says so."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if mask is None or mask.numel() != len(flat) else flat[mask.reshape(-1).to(flat.device).bool()]


def add_sequences(moments: InputMoments, x: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Add inputs ``(B, T, d)`` sequence by sequence, so that it does not matter which ones come together."""
    if x.ndim != 3 or (mask is not None and mask.shape != x.shape[:2]):
        moments.add(real_tokens(x, mask))
    else:
        for i in range(len(x)):
            moments.add(real_tokens(x[i], None if mask is None else mask[i]))
    moments.rest()


def moments_of_sites(
    moments: dict[str, list[InputMoments]], kind: str, folder: Path | None = None
) -> Callable[[Site, Batch], None]:
    """A listener that adds what matrices are given to their moments; matrices of one site share theirs."""

    def listen(site: Site, batch: Batch) -> None:
        shared = moments.get(site.names[0]) or [InputMoments(kind, folder=folder)]
        for name in site.names:
            moments.setdefault(name, shared)
        add_sequences(shared[0], site.a, batch.kwargs.get("attention_mask"))

    return listen


def share_statistics(moments: Mapping[str, Sequence[InputMoments]]) -> None:
    """Add up what several processes saw, each of its own sequences, by matrix; sums are in float32 after that."""
    together = process_group()
    if together.size > 1:
        _add_up(moments, together)
    for statistic in {id(s): s for each in moments.values() for s in each}.values():
        statistic.settle()


def _add_up(moments: Mapping[str, Sequence[InputMoments]], together: ProcessGroup) -> None:
    """Add up what several processes saw."""
    names = sorted(moments)
    if together.gather(names) != [names] * together.size:
        raise CoverageError("Some matrices ran in some processes only.", "", "Use one process.")
    statistics = list({id(s): s for n in names for s in moments[n]}.values())
    widths = together.gather([0 if s.sums is None else len(s.sums) for s in statistics])
    for s, width in zip(statistics, [max(w) for w in zip(*widths, strict=True)], strict=True):
        if s.sums is None and width:
            s.sums = s.empty(width, together.device)
    for s in statistics:
        together.reduce([] if s.sums is None else panels(s.sums) if s.kind == "gram" else [s.sums])
    rows = together.sum(np.array([s.rows for s in statistics], dtype=np.float64))
    for s, count in zip(statistics, rows.tolist(), strict=True):
        s.rows = int(count)


class InputStatistics:
    """Input moments of some matrices; :class:`InputMoments` says what ``kind``, ``equal_tokens`` and ``folder`` are.

    Attributes:
        found: Moments by matrix name, one per copy (a fused mixture has one per expert). Matrices that share an input share
            the object.
    """

    moments: ClassVar[type[InputMoments]] = InputMoments  #: What adds up the inputs of one matrix.

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[Module],
        kind: str,
        *,
        equal_tokens: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.kind, self.equal_tokens, self.folder = kind, equal_tokens, folder
        self.found: dict[str, list[InputMoments]] = {}
        self.owners: dict[str, nn.Module] = {}
        self.fused: dict[nn.Module, dict[str, Module]] = {}
        for module in modules:
            owner, parameter = weight_of(model, module.name)
            if parameter.ndim == 3:
                self.fused.setdefault(owner, {})[module.name.rsplit(".", 1)[1]] = module
            elif (reader := reader_of(model, module.name)) is not None:  # lookups read no vectors
                self.owners[module.name] = reader
        self._leader: dict[str, str] = {}
        self._current: dict[str, torch.Tensor] = {}
        self._mask: torch.Tensor | None = None
        self._waiting: set[Any] = set()
        self._ends = True

    def _unseen(self) -> InputMoments:
        return self.moments(self.kind, folder=self.folder, equal_tokens=self.equal_tokens)

    def groups(self) -> list[list[str]]:
        """Matrices by shared input, in the order in which the block reads them (after :meth:`run`)."""
        groups: dict[str, list[str]] = {}
        for name, leader in self._leader.items():
            groups.setdefault(leader, []).append(name)
        fused = [[m.name] for members in self.fused.values() for m in members.values()]
        return list(groups.values()) + fused

    def run(self, walk: Walk) -> None:
        """Run the walk's current block on all batches, ending each forward when the last matrix has been reached."""
        for batch in range(walk.batches):
            self._mask = walk.token_mask(batch)
            self._waiting, self._ends = {*self.owners, *self.fused}, True
            with self._hooks():
                walk.forward(walk.position, batch)
            self._current.clear()
        share_statistics(self.found)

    def finals(self, walk: Walk) -> list[torch.Tensor]:
        """Gather from one forward of all layers; return the hidden states behind the last, by batch."""
        hidden = walk.finals(lambda batch: self.listening(walk.token_mask(batch)))
        share_statistics(self.found)
        return hidden

    @staticmethod
    def of_model(walk: Walk, statistics: Sequence[InputStatistics]) -> None:
        """Gather several statistics from one forward of the whole model, its head included."""

        @contextlib.contextmanager
        def during(batch: int) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for each in statistics:
                    stack.enter_context(each.listening(walk.token_mask(batch)))
                yield

        walk.capture()
        for batch, hidden in enumerate(walk.finals(during)):
            with during(batch):
                walk.meet_head(batch, hidden)
        for each in statistics:
            share_statistics(each.found)

    @contextlib.contextmanager
    def listening(self, mask: torch.Tensor | None) -> Iterator[None]:
        """Gather from the forward of one batch that somebody else runs; the mask ``(B, T)`` says which tokens are real."""
        self._mask, self._waiting, self._ends = mask, {*self.owners, *self.fused}, False
        with self._hooks():
            yield
        self._current.clear()

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = [o.register_forward_pre_hook(self._see(n), with_kwargs=True) for n, o in self.owners.items()]
        handles += [o.register_forward_pre_hook(self._see_experts(o), with_kwargs=True) for o in self.fused]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _done(self, key: Any) -> None:
        self._waiting.discard(key)
        if not self._waiting and self._ends:
            raise StopForward

    def _see(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
            """Add what the matrix is given."""
            x = arguments[0] if arguments else next(iter(keywords.values()))
            if name not in self._leader:
                self._leader[name] = next((n for n, seen in self._current.items() if seen is x), name)
            leader = self._leader[name]
            if leader != name and self._current.get(leader) is not x and name not in self._waiting:  # called a second time
                (shared,) = self.found[leader]
                self.found[name] = [shared.copy()]
                self._leader[name] = leader = name
            if leader == name:
                (moments,) = self.found.setdefault(name, [self._unseen()])
                add_sequences(moments, x, self._mask)
                self._current[name] = x
            elif self._current.get(leader) is not x:
                raise CoverageError(f"{name} shares its input with {leader} in some forwards only.", "", "Report the model.")
            else:
                self.found[name] = self.found[leader]
            self._done(name)

        return hook

    def _see_experts(self, owner: nn.Module) -> Callable[..., None]:
        wanted = self.fused[owner]
        _check_experts(owner, wanted)

        def hook(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
            """Add what every expert is given."""
            values = [*arguments, *keywords.values()]
            hidden = values[0].reshape(-1, values[0].shape[-1])
            if len(values) == 1:  # every expert is given all tokens, zeros for those that are another's
                several = hidden.view(next(iter(wanted.values())).copies, -1, hidden.shape[-1])
                index = torch.where(several.any(dim=-1), torch.arange(len(several), device=hidden.device)[:, None], -1).T
            else:
                several, index = hidden[None], values[1]
            if self._mask is not None and several.shape[1] == self._mask.numel():
                keep = self._mask.reshape(-1).to(hidden.device)
                several, index = several[:, keep], index[keep]
            for key, record in wanted.items():
                statistics = self.found.setdefault(record.name, [self._unseen() for _ in range(record.copies)])
                for expert in range(record.copies):
                    x = several[expert % len(several)][(index == expert).any(dim=-1)]
                    if x.shape[0]:
                        statistics[expert].add(_expert_inner(owner, x, expert) if key == "down_proj" else x)
            self._done(owner)

        return hook


def check_experts(model: nn.Module, names: Iterable[str], remedy: str = "") -> None:
    """Refuse stacks of experts whose inputs are not known, before any forward; ``remedy`` says what to do instead."""
    stacks: dict[nn.Module, set[str]] = {}
    for name in names:
        owner, parameter = weight_of(model, name)
        if parameter.ndim == 3:
            stacks.setdefault(owner, set()).add(name.rsplit(".", 1)[1])
    for owner, wanted in stacks.items():
        _check_experts(owner, wanted, remedy)


def _check_experts(owner: nn.Module, wanted: Collection[str], remedy: str = "") -> None:
    known, first = {"gate_up_proj", "up_proj", "down_proj"}, _first(owner)
    if set(wanted) - known or first is None:
        raise CoverageError(
            f"{type(owner).__name__} keeps its experts in {', '.join(sorted(wanted))}, a layout whose inputs are not known.",
            "Known are down_proj and one of gate_up_proj and up_proj, three-dimensional and in one module.",
            remedy or "Use --method magnitude, which reads no inputs.",
        )


def _first(owner: nn.Module) -> str | None:
    """The name of the matrices that read the experts' input, where their layout is known."""
    names = [n for n in ("gate_up_proj", "up_proj") if getattr(getattr(owner, n, None), "ndim", 0) == 3]
    return names[0] if len(names) == 1 and hasattr(owner, "down_proj") else None


def _expert_inner(owner: Any, x: torch.Tensor, expert: int) -> torch.Tensor:
    """Input of one expert's down projection, for the tokens routed to it."""
    first = str(_first(owner))
    weight, bias = getattr(owner, first)[expert], getattr(owner, f"{first}_bias", None)
    inner = nn.functional.linear(x, weight.mT if transposed(owner) else weight, None if bias is None else bias[expert])
    if first == "up_proj":
        return owner.act_fn(inner)
    if hasattr(owner, "_apply_gate"):
        return owner._apply_gate(inner)
    gate, up = inner.chunk(2, dim=-1)
    return owner.act_fn(gate) * up


def gram_of(model: nn.Module, walk: Walk, consumer: str, width: int) -> torch.Tensor:
    """``sum x x'`` over the calibration tokens at one matrix of the walk's current layer (upper triangle)."""
    module = Module(name=consumer, d_in=width, d_out=weight_of(model, consumer)[1].numel() // width)
    statistics = InputStatistics(model, [module], "gram")
    statistics.run(walk)
    return cast(torch.Tensor, statistics.found[consumer][0].value)  # only an expert can have seen no token
