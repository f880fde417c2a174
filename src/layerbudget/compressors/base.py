"""Treatments of one weight matrix: the statistics of its inputs that they need, and what they make at a level. No torch.

A treatment of one's own is a class with :meth:`Treatment.apply` (see CONTRIBUTING.md). The decorator :func:`treatment`
registers it; so does an entry point of the group ``layerbudget.compressors`` that names its module.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from typing_extensions import Self

from ..errors import InvalidInput
from ..registry import Registry, options_of, resolve_options

if TYPE_CHECKING:
    import torch

STATISTICS = ("none", "diagonal", "gram")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """How far a treatment goes on one matrix.

    Attributes:
        zeros: Entries that become zero, exactly (of a pruner).
        format: Name of the format in which the matrix is stored (of a quantiser; :mod:`layerbudget.compressors.formats`).
        pattern: ``(zeroed, group)``: so many of every group of consecutive inputs.
        rows: ``(size, zeros)``: entries that become zero in every group of so many rows; they sum to ``zeros``.
        peak: Largest magnitude of the matrices under one number over all scales (``nvfp4``); by default of this one.
    """

    zeros: int = 0
    pattern: tuple[int, int] | None = None
    format: str | None = None
    rows: tuple[int, np.ndarray] | None = None
    peak: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is to do."""
        return self.zeros == 0 and self.format is None


class Treatment(abc.ABC):
    """A way to change one weight matrix. Options are the keyword-only parameters of ``__init__``.

    Attributes:
        name: What users write (set by the registry).
        summary: A line for the help.
        statistic: What it must know of the inputs ``x`` of a matrix: ``none``, ``diagonal`` (``sum x_j^2``) or ``gram``
            (``sum x x'``, upper triangle).
        equal_tokens: Whether every token counts the same in that, however large its input is.
        modifier: Name of the modifier of llm-compressor that does the same, where there is one.
        changes: What a level of it says: ``zeros`` (pruners) or the ``format`` (quantisers). It decides which table it joins.
        unseen: What happens to a matrix that no token reached, in a sentence.
        nested: Whether :meth:`order` tells the entries apart: what goes at one level goes at every higher one.
        by_row: Whether entries compete within their row (whose counts are then equal to within one), or within the matrix.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    statistic: ClassVar[str] = "none"
    equal_tokens: bool = False
    modifier: ClassVar[str | None] = None
    changes: ClassVar[str] = "zeros"
    nested: ClassVar[bool] = False
    unseen: ClassVar[str] = "its weights were ranked by magnitude"
    by_row: ClassVar[bool] = True

    def prepare(self, moment: torch.Tensor) -> Any:
        """Return what :meth:`apply` needs of the statistic, made once for all matrices that read the same input.

        Args:
            moment: ``(d_in,)`` or ``(d_in, d_in)``, see ``statistic``.
        """
        return moment

    @abc.abstractmethod
    def apply(self, weight: torch.Tensor, prepared: Any, level: Level) -> torch.Tensor:
        """The matrix after the treatment, ``(d_out, d_in)``, finite; :mod:`layerbudget.compressors.treating` checks it.

        Args:
            weight: ``(d_out, d_in)``; not changed.
            prepared: From :meth:`prepare`; None where no token reached the matrix, or none is needed.
            level: How far: exactly ``level.zeros`` entries, and where it has a ``pattern`` so many of every group.
        """

    def apply_rows(self, weight: torch.Tensor, prepared: Any, size: int, zeros: np.ndarray) -> torch.Tensor:
        """The matrix after the treatment of every group of ``size`` rows by itself (the last one may be smaller).

        Args:
            weight: ``(d_out, d_in)``; not changed.
            prepared: See :meth:`apply`.
            size: Rows of a group.
            zeros: Entries that become zero in every group.
        """
        out = weight.clone()
        for start, count in zip(range(0, weight.shape[0], size), zeros.tolist(), strict=True):
            if count:
                part = slice(start, start + size)
                out[part] = self.apply(weight[part], prepared, Level(zeros=count)).to(out.dtype)
        return out

    def order(self, weight: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Scores of the entries, ``(d_out, d_in)``: the smallest of a row (or matrix) go first. For nested treatments."""
        raise NotImplementedError(f"{self.name} does not rank entries")

    @classmethod
    def resolve_options(cls, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """All options, see :func:`layerbudget.registry.resolve_options`."""
        return resolve_options(f"The method {cls.name}", options_of(cls), chosen)

    def with_options(self, chosen: Mapping[str, Any]) -> Self:
        """The same treatment with other options; itself where none are given."""
        return type(self)(**self.resolve_options(chosen)) if chosen else self


TREATMENTS: Registry[type[Treatment]] = Registry(
    "pruning method",
    group="layerbudget.compressors",
    home=__package__,
    builtin={"magnitude": ".pruners:Magnitude", "wanda": ".pruners:Wanda", "sparsegpt": ".sparsegpt:SparseGPT"},
)
QUANTISERS: Registry[type[Treatment]] = Registry(
    "quantiser",
    group="layerbudget.compressors",
    home=__package__,
    builtin={
        "rtn": ".quantisers:Nearest",
        "weighted": ".quantisers:Weighted",
        "gptq": ".quantisers:GPTQ",
        "descent": ".quantisers:Descent",
    },
)
Some = TypeVar("Some", bound=type[Treatment])


def treatment(name: str, *, summary: str = "") -> Callable[[Some], Some]:
    """Register a class as a treatment; a name that is taken is replaced.

    Raises:
        InvalidInput: A class that names no known statistic.
    """

    def add(made: Some) -> Some:
        if made.statistic not in STATISTICS:
            known = f"Statistics are {', '.join(STATISTICS)}."
            raise InvalidInput(f"{name} needs the statistic {made.statistic!r}.", known, "Use one of those.")
        made.name, made.summary = name, summary or made.summary
        (QUANTISERS if made.changes == "format" else TREATMENTS).add(name, made)
        return made

    return add


def find_treatment(name: str) -> Treatment:
    """Return a pruner by name, with its default options; an unknown one is refused."""
    return TREATMENTS.find(name)()


def find_quantiser(name: str) -> Treatment:
    """Return a quantiser by name, with its default options; an unknown one is refused."""
    return QUANTISERS.find(name)()
