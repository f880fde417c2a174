"""Bytes and damage of blocks in formats: what every plan of formats decides from. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CorruptFile, InvalidInput
from ...llama_cpp.mixes import LlamaModel
from ...models.memory import MemoryModel
from ...records import Block
from ...scores import Scores
from ...solvers.choices import Choice, near_ties
from .payload import Reasons, Step

ESTIMATOR, CACHE = "rounding", "cache"
HUGE = np.iinfo(np.int64).max
_TIES = 20
_MEASURE = "Measure it: layerbudget plan bits MODEL --save-scores FILE."


def record_of(scores: Scores) -> Mapping[str, Any]:
    """Return what scores say of the damage of formats.

    Raises:
        InvalidInput: Nothing.
    """
    record = scores.extra.get("formats") if isinstance(scores, Scores) else None
    if not isinstance(record, Mapping):
        raise InvalidInput("These scores say nothing of formats.", "A plan of bits needs the damage of every format.", _MEASURE)
    return record


def signature_at(tokens: int, width: int) -> list[tuple[int, int]]:
    """Return rows and columns of an embedding, ``(tokens, width)``, whose values tell models apart: 32 of the first tokens.

    >>> signature_at(50_000, 576)[:3]
    [(0, 0), (8, 18), (16, 37)]
    """
    rows, columns = (np.linspace(0, n - 1, 32).astype(int).tolist() for n in (min(tokens, 256), width))
    return list(zip(rows, columns, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FormatTable:
    """Bytes and damage of K blocks in m formats.

    Attributes:
        formats: Names, in the order of :meth:`layerbudget.compressors.formats.Runtime.formats`.
        size: Bytes, ``(K, m)``; where a block does not have a format its damage is infinite.
        damage: Nats per token, ``(K, m)``, with the standard errors ``error``.
        rest: What every sequence adds to a damage beside its share, ``(K, m, sequences)``, of norm ``error``.
        fixed: Bytes of tensors that no plan changes; those that are copied from the checkpoint unread are among them.
        fixed_terms: The same by what they are; empty where that is not known.
        head: Bytes of the files that are no tensors (metadata, vocabulary; headers of safetensors: at most); 0: not counted.
        signature: Some values of the embedding, for GGUF: a file of another model is known by them.
        cache: What the memory of a context depends on; None where that is not known.
        unwritten: Matrices that stay in 16 bits because no file holds them in fewer, with the reason.
        llama: What the rules of llama.cpp's mixes read of the model; None where it has none, as for other files than GGUF.
        stored: Names of every block's matrices in the GGUF file.
    """

    blocks: Sequence[Block]
    formats: tuple[str, ...]
    size: np.ndarray
    damage: np.ndarray
    error: np.ndarray
    rest: np.ndarray
    fixed: int
    family: str
    runtime: str
    method: str
    unwritten: Mapping[str, str] = dataclasses.field(default_factory=dict)
    llama: LlamaModel | None = None
    stored: Sequence[Sequence[str]] = ()
    head: int = 0
    fixed_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    signature: Sequence[float] = ()
    cache: MemoryModel | None = None

    @classmethod
    def of(cls, scores: Scores) -> FormatTable:
        """Return the table in a record."""
        record = record_of(scores)
        try:
            table = cls._read(scores.blocks, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFile(f"The formats of these scores do not read ({error}).", "", _MEASURE) from error
        shape = len(table.blocks), len(table.formats)
        if any(values.shape[:2] != shape for values in (table.size, table.damage, table.error, table.rest)):
            what = f"The formats of these scores are not of {shape[0]} blocks and {shape[1]} formats each."
            raise CorruptFile(what, "", _MEASURE)
        return table

    @classmethod
    def _read(cls, blocks: Sequence[Block], record: Mapping[str, Any]) -> FormatTable:
        """The table of blocks in what a record of scores says of their formats."""
        size, damage, error = (np.array(record[k], dtype=np.float64) for k in ("size", "damage", "error"))
        none = np.isnan(damage)
        if size.shape != none.shape or not np.isfinite(size[~none]).all():
            raise ValueError("not every damage has its bytes")
        return cls(
            blocks=blocks,
            formats=tuple(record["formats"]),
            size=np.where(none, 0, size).astype(np.int64),
            damage=np.where(none, np.inf, damage),
            error=np.where(none, 0.0, error),
            rest=np.array(record["rest"], dtype=np.float64),
            unwritten=record.get("unwritten", {}),
            llama=LlamaModel(**record["llama"]) if record.get("llama") else None,
            stored=record.get("stored", ()),
            head=record.get("head", 0),
            fixed_terms=record.get("fixed_terms", {}),
            signature=record.get("signature", ()),
            cache=MemoryModel(**record["cache"]) if record.get("cache") else None,
            **{k: record[k] for k in ("fixed", "family", "runtime", "method")},
        )

    def record(self) -> dict[str, Any]:
        """Return what a score record holds of the table; None where a block does not have a format."""

        def rows(values: np.ndarray) -> list[list[float | None]]:
            shown = np.where(np.isfinite(self.damage), values, np.nan)
            return [[None if np.isnan(v) else float(v) for v in row] for row in shown]

        rest = [[[float(f"{v:.4g}") for v in each] for each in row] for row in self.rest]
        fields = {k: getattr(self, k) for k in ("fixed", "head", "family", "runtime", "method")}
        values = {"size": rows(self.size), "damage": rows(self.damage), "error": rows(self.error)}
        content = {"formats": list(self.formats), **values, **fields, "rest": rest, **self.kept}
        if self.cache is not None:
            content["cache"] = dataclasses.asdict(self.cache)
        if self.llama is not None:
            content |= {"llama": dataclasses.asdict(self.llama), "stored": [list(names) for names in self.stored]}
        return content

    def error_of(self, chosen: np.ndarray) -> float:
        """Standard error of the summed damages of a choice, ``(K,)``; blocks share sequences, so these are summed first.

        What of an error the sequences do not have is that of a sample of rows, which no two blocks share.
        """
        rest, rows = self._noise(chosen)
        return float(np.sqrt((rest.sum(0) ** 2).sum() + rows.sum()))

    def error_between(self, chosen: np.ndarray, others: np.ndarray) -> float:
        """Standard error of the difference of two choices.

        The sequences are the same, so what they add is paired. A block with the same format in both has no error of its rows.
        """
        (rest, rows), (theirs, more) = self._noise(chosen), self._noise(others)
        apart = chosen != others
        spread = (rows * apart).sum() + (more * apart).sum()
        return float(np.sqrt(((rest.sum(0) - theirs.sum(0)) ** 2).sum() + spread))

    def _noise(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Noise of the sequences in the damage of every block, ``(K, S)``, and the variance that is not theirs, ``(K,)``."""
        k = np.arange(len(self.blocks))
        rest = self.rest[k, chosen]
        return rest, np.maximum(self.error[k, chosen] ** 2 - (rest**2).sum(-1), 0.0)

    def totals(self, chosen: np.ndarray) -> dict[str, Any]:
        """Return the summed damage and bytes of a choice, ``(K,)``."""
        k = np.arange(len(self.blocks))
        return {"predicted": float(self.damage[k, chosen].sum()), "spent": int(self.size[k, chosen].sum())}

    def ties(self, choice: Choice) -> list[dict[str, Any]]:
        """Return single changes that noise cannot tell from a choice, the closest first; ``bytes`` is what each would add."""
        names, taken, size = self.formats, choice.chosen, self.size
        return [
            {
                "block": self.blocks[i].name,
                "chosen": names[taken[i]],
                "instead": names[j],
                "bytes": int(size[i, j] - size[i, taken[i]]),
                "excess": e,
                "noise": n,
            }
            for i, j, e, n in near_ties(choice, self.error)[:_TIES]
        ]

    def reasons(self, chosen: np.ndarray) -> Reasons:
        """Return what speaks for the formats of a choice, ``(K,)``.

        ``smaller`` is the format of fewer bytes with the least damage, ``larger`` that of the fewest bytes among those with
        less damage.
        """
        k = np.arange(len(self.blocks))
        size, damage = (values[k, chosen][:, None] for values in (self.size, self.damage))
        below = np.where(self.has & (self.size < size), self.damage, np.inf)
        above = np.where(self.has & (self.size > size) & (self.damage < damage), self.size, HUGE)
        near = np.where(above == above.min(axis=1, keepdims=True), self.damage, np.inf)

        def steps(places: np.ndarray, known: np.ndarray) -> list[Step | None]:
            """Format, bytes and damage at these places."""
            return [
                (self.formats[j], int(self.size[i, j]), _short(self.damage[i, j])) if is_known else None
                for i, (j, is_known) in enumerate(zip(places.tolist(), known.tolist(), strict=True))
            ]

        return Reasons(
            damage=[_short(d) for d in damage[:, 0]],
            smaller=steps(below.argmin(axis=1), np.isfinite(below.min(axis=1))),
            larger=steps(near.argmin(axis=1), above.min(axis=1) < HUGE),
        )

    def formats_of(self, chosen: np.ndarray) -> dict[str, str]:
        """Return the format of every matrix in a choice."""
        return {m.name: self.formats[j] for b, j in zip(self.blocks, chosen, strict=True) for m in b.modules}

    def stacked(self, other: FormatTable) -> FormatTable:
        """Return the table of the blocks of both, each with formats of its own; bytes beside the blocks add up."""
        rows, columns = len(self.blocks), len(self.formats)
        shape = rows + len(other.blocks), columns + len(other.formats)

        def both(mine: np.ndarray, theirs: np.ndarray, empty: float) -> np.ndarray:
            joined = np.full((*shape, *mine.shape[2:]), empty, dtype=mine.dtype)
            joined[:rows, :columns], joined[rows:, columns:] = mine, theirs
            return joined

        return dataclasses.replace(
            self,
            blocks=(*self.blocks, *other.blocks),
            formats=(*self.formats, *other.formats),
            size=both(self.size, other.size, 0),
            damage=both(self.damage, other.damage, np.inf),
            error=both(self.error, other.error, 0.0),
            rest=both(self.rest, other.rest, 0.0),
            fixed=self.fixed + other.fixed,
            stored=(*self.stored, *([()] * len(other.blocks))) if self.stored else (),
        )

    @property
    def has(self) -> np.ndarray:
        """Whether a block has a format, ``(K, m)``."""
        return np.isfinite(self.damage)

    @property
    def kept(self) -> dict[str, Any]:
        """Matrices that stay in 16 bits, terms of other tensors, and the signature of the model; each where it is known."""
        named = {"unwritten": self.unwritten, "fixed_terms": self.fixed_terms}
        known: dict[str, Any] = {name: dict(value) for name, value in named.items() if value}
        return known | ({"signature": list(self.signature)} if self.signature else {})

    @property
    def numel(self) -> int:
        """Weights that are decided about."""
        return sum(b.numel for b in self.blocks)

    @property
    def beside(self) -> int:
        """Bytes of the file beside the blocks."""
        return self.fixed + self.head

    @property
    def smallest(self) -> np.ndarray:
        """Bytes of every block in its smallest format, ``(K,)``."""
        return np.where(self.has, self.size, HUGE).min(axis=1)


def _short(value: float) -> float:
    """A damage in five digits, which is more than is known of it."""
    return float(f"{value:.5g}")
