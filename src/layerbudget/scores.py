"""The score record: one vector per damping, with errors, floor and provenance. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .errors import DegenerateScores, InvalidInput
from .records import Block, BlockRecord, values_by_name
from .storage import reading

Table = tuple[tuple[float | None, ...], ...]


def _table(rows: Any, shape: tuple[int, int], name: str) -> Table:
    """Rows of plain numbers, none where a value is not known."""
    if rows is None or rows == ():
        return ((None,) * shape[1],) * shape[0]
    table = tuple(tuple(None if v is None or v != v else float(v) for v in row) for row in rows)
    if len(table) != shape[0] or any(len(row) != shape[1] for row in table):
        problem = f"{name} has {len(table)} rows of {sorted({len(r) for r in table})} values."
        raise InvalidInput(problem, f"It needs {shape[0]} dampings x {shape[1]} blocks.", "Give one value for each.")
    return table


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Scores(BlockRecord):
    """Layer scores for D dampings and K blocks. They cannot be changed, and ``scores[name]`` is that of a block."""

    what: ClassVar[str] = "scores"
    command: ClassVar[str] = "score"

    estimator: str  #: Name of the estimator (``fisher-gram``, ``gradient-norm``, ...).
    blocks: tuple[Block, ...]  #: The K blocks, in natural order; values below are in this order.
    gain: Table  #: ``D x K`` values. In nats of average loss for gains; otherwise what ``unit`` says.
    damping: tuple[float, ...] = (0.0,)  #: The D dampings (one entry, 0.0, where the estimator has none).
    #: ``absolute`` (loss/parameter^2), ``max`` or ``mean`` (relative to the largest or mean eigenvalue of each block's
    #: curvature), ``median`` (relative to the median over blocks of the largest one), ``none``.
    damping_unit: str = "none"
    standard_error: Table = ()  #: ``D x K``, null where the estimator has none.
    noise_floor: Table = ()  #: ``D x K``: the value expected from noise alone, null where not known.
    status: tuple[tuple[str, ...], ...] = ()  #: ``D x K`` words: ``ok``, or what is wrong with that entry.
    unit: str = "nats of average loss"
    orientation: str = "gain"  #: ``gain`` (larger = deserves more capacity) or ``redundancy`` (larger = prune more).
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)  #: ``{id, revision, digest}``.
    #: ``{source, samples, length, digest}``; of padded text also ``tokens``, those that are no padding.
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: reading.Count = 0  #: Seed of whatever was random.
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  #: Estimator-specific results.
    made_by: str = ""  #: The command that made it; empty where Python did.

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(b.numel for b in self.blocks) >= reading.WHOLE:
            raise InvalidInput("The blocks have more than 2^62 parameters.", "", "Check their shapes.")
        if self.orientation not in ("gain", "redundancy"):
            raise InvalidInput(f"orientation is {self.orientation!r}.", "It is 'gain' or 'redundancy'.", "")
        shape = (len(self.damping), len(self.blocks))
        status = tuple(tuple(row) for row in self.status) or (("ok",) * shape[1],) * shape[0]
        if len(status) != shape[0] or any(len(row) != shape[1] for row in status):
            raise InvalidInput("status has another shape than the gains.", f"It needs {shape[0]} x {shape[1]} words.", "")
        tables = {name: _table(getattr(self, name), shape, name) for name in ("gain", "standard_error", "noise_floor")}
        for name, value in {**tables, "status": status, "damping": tuple(float(d) for d in self.damping)}.items():
            object.__setattr__(self, name, value)

    def index(self, damping: float | None = None) -> int:
        """Return the row of a damping; the middle row when none is named.

        Raises:
            InvalidInput: The record has no such damping.
        """
        if damping is None:
            return len(self.damping) // 2
        rows = np.flatnonzero(np.isclose(self.damping, damping, rtol=1e-9, atol=0))
        if not len(rows):
            known = f"They have {list(self.damping)}."
            raise InvalidInput(f"The scores have no damping {damping}.", known, "Choose one of those.")
        return int(rows[0])

    def whole(self) -> list[float]:
        """Return the dampings at which every block has a score."""
        return [damping for damping, gains in zip(self.damping, self.gain, strict=True) if None not in gains]

    def values(self, damping: float | None = None) -> np.ndarray:
        """Return the scores of one damping, shape ``(K,)``.

        Raises:
            InvalidInput: No such damping, or an entry without a usable value (the status says why).
        """
        row = self.index(damping)
        if None in self.gain[row]:
            bad = [s for v, s in zip(self.gain[row], self.status[row], strict=True) if v is None]
            whole = [f"{d:.10g}" for d in self.whole()]
            raise InvalidInput(
                f"{len(bad)} of {len(self.blocks)} blocks have no score at damping {self.damping[row]:g} ({bad[0]}).",
                f"Dampings with a score for every block: {', '.join(whole) or 'none in this record'}.",
                f"Choose damping {whole[0]}." if whole else "Score again with a larger damping or another estimator.",
            )
        return np.array(self.gain[row], dtype=np.float64)

    def weights(self, damping: float | None = None, *, smoothing: float = 0.0) -> np.ndarray:
        """Return normalised weights ``q_k = (s_k + eps) / sum_j (s_j + eps)``, ``eps = smoothing * mean(s)``; paper eq. (qk).

        Negative values (an excess over a noise floor, say) count as zero. A redundancy score enters as ``max(s) - s``.

        Raises:
            DegenerateScores: Nothing positive is left.
        """
        s = self.values(damping)
        if self.orientation == "redundancy":
            s = s.max() - s
        s = np.maximum(s, 0.0)
        if not s.sum() > 0:
            remedy = "Use more samples, another damping or another estimator."
            if "file" in self.extra or self.estimator == "imported":
                remedy = "Add a constant to all. Of sparsity, --rule owl reads only how scores differ."
            raise DegenerateScores(
                f"All {len(s)} scores of {self.estimator} are zero or negative.", "At least one must be positive.", remedy
            )
        s = s / s.max()
        s = s + smoothing * s.mean()
        return s / s.sum()

    def __getitem__(self, name: str) -> float:
        return float(self.values()[self.index_of(name)])

    def _shown(self) -> tuple[str, list[str]]:
        row = self.index()
        title = f"Scores by {self.estimator}: {len(self)} blocks, in {self.unit}"
        if len(self.damping) > 1:
            title += f", damping {self.damping[row]:g} of {', '.join(f'{d:g}' for d in self.damping)}"
        cells = zip(self.gain[row], self.status[row], strict=True)
        return title, [status if value is None else f"{value:.4g}" for value, status in cells]

    def to_pandas(self, damping: float | None = None) -> Any:
        """Return a data frame with a row per block, for one damping (needs pandas).

        Raises:
            InvalidInput: No such damping.
        """
        row = self.index(damping)
        numbers = {n: np.array(getattr(self, n)[row], dtype=np.float64) for n in ("gain", "standard_error", "noise_floor")}
        return self._frame(**numbers, status=self.status[row], numel=self.numel)

    @classmethod
    def from_values(cls, blocks: Sequence[Block], values: Mapping[str, float] | Sequence[float], **fields: Any) -> Scores:
        """Return a record of one's own scores: a finite value by block name, or in the order of the blocks.

        Other fields of the record are keywords: ``estimator``, ``unit``, ``orientation``, ...

        Raises:
            InvalidInput: A block without a value, a value without a block, or a value that is not finite.
        """
        fields = {"estimator": "imported", "unit": "arbitrary", **fields}
        return cls(blocks=tuple(blocks), gain=(tuple(values_by_name(blocks, values)),), **fields)


def tokens_of(scores: Scores) -> int:
    """Return the tokens that the loss of the scored text counts: of conversations the answers, without prompts and padding.

    Raises:
        InvalidInput: The record does not say it.
    """
    if "tokens" in scores.extra:
        return _count(scores.extra["tokens"], "tokens")
    if {"samples", "length"} <= set(scores.data):
        return _count(scores.data["samples"], "samples") * (_count(scores.data["length"], "length") - 1)
    raise InvalidInput("The scores do not say how many tokens they are over.", "", "Give it: --tokens, or tokens=.")


def _count(value: Any, name: str) -> int:
    """A count as a file of scores has it."""
    if isinstance(value, int | float) and value >= 1 and value % 1 == 0:
        return int(value)
    raise InvalidInput(
        f"The scores have {name} {value!r}.", "It is a whole number of one or more.", "Give it: --tokens, or tokens=."
    )
