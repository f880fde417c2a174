r"""Error feedback inside ggml's grids: a file of an ordinary type whose codes are chosen for the output of the layer.

GPTQ (arXiv 2210.17323) on llama.cpp's types. ggml chooses the scales of a block, and codes are chosen under them column by
column (:mod:`layerbudget.compressors.ggml` knows where they lie).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .descent import descend
from .formats import find_format
from .ggml import code_bits, dequantise, grid, levels, quantise, with_codes
from .ggml_scales import FIELDS, layout_of, read_codes, write_codes
from .sparsegpt import INNER, inverse_factor

COLUMNS = 256  # later columns than these get their feedback in one product
_NO_STEP = 1e-20  # of weights whose scale is zero: all codes say the same, and the error is that of the base


@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """The factors ``U`` with ``U' U = (X X' + damping)^-1`` of one input, for blocks of any size, each made once.

    What comes first is made up for by all that follows. So the blocks of columns go by what their inputs weigh, the heaviest
    first, and so do the columns of a block; blocks stay whole, and a file looks as in any other order.

    Attributes:
        moment: ``X X'``, ``(columns, columns)``, upper triangle.
        damping: Relative to the mean of its diagonal.
    """

    moment: torch.Tensor
    damping: float = 0.01
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def of(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order ``(columns,)`` and ``U`` of the columns in that order, for blocks of ``size``."""
        if size not in self.made:
            heavy = self.moment.diagonal().reshape(-1, size)
            blocks = heavy.sum(1).argsort(dim=0, descending=True, stable=True)
            order = (blocks[:, None] * size + heavy.argsort(dim=1, descending=True, stable=True)[blocks]).flatten()
            self.made[size] = order, inverse_factor(self.moment, self.damping, order)[0]
        return self.made[size]

    @functools.cached_property
    def whole(self) -> torch.Tensor:
        """The damped moment itself, both triangles, float32."""
        upper = self.moment.to(torch.float32).triu()
        out = upper + upper.T
        diagonal = upper.diagonal()
        diagonal = torch.where(diagonal == 0, 1.0, diagonal)
        out.diagonal().copy_(diagonal + self.damping * diagonal.mean())
        return out


def feed_back(weight: torch.Tensor, factors: Factors, name: str, *, threads: int = 1, words: bool = False) -> np.ndarray:
    r"""Return the bytes of a matrix whose later columns make up for the rounding of earlier ones, ``(rows, bytes of a row)``.

    Every block of columns is taken as the columns before it have left it, ``W_b``. ggml chooses its scales, for columns that
    count ``1 / U_jj^2`` each: what an error costs after the later columns have made up for it. Then codes are chosen column by
    column, and ``(w_j - q_j) / U_jj`` is taken from the later columns in proportion to ``U_j,:``. Codes of a lattice stay as
    ggml chose them, and the error of the whole block is fed back, ``E U_bb^-1 U_b,:`` with ``E = W_b - Q_b``, which is the same
    step for all its columns together. Rows do not depend on each other.

    Args:
        weight: ``(rows, columns)``.
        factors: Of the matrix's input.
        name: A type of ``layerbudget.compressors.formats.TYPES`` that divides the columns.
        threads: Of ggml.
        words: Improve the words and scales of a block of a lattice by one sweep of
            :func:`~layerbudget.compressors.descent.descend`, for what its error costs: ``|E U_bb^-1|^2``. Takes twice as long.
    """
    return feed_back_each(weight, factors, [name], threads=threads, words=words)[name]


def feed_back_each(
    weight: torch.Tensor, factors: Factors, names: Sequence[str], *, threads: int = 1, words: bool = False
) -> dict[str, np.ndarray]:
    """Return the bytes of :func:`feed_back` in several types, by name.

    Few rows take as long as their columns take steps. So types whose blocks are equally large lie beside each other, as if they
    were other rows, and even ones share the steps.
    """
    by_size: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        by_size.setdefault(int(find_format(name).group or 1), []).append(name)
    return {
        name: data for size, some in by_size.items() for name, data in _in_blocks(weight, factors, size, some, threads, words)
    }


def _in_blocks(
    weight: torch.Tensor, factors: Factors, size: int, names: Sequence[str], threads: int, words: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Types whose blocks have as many columns, and their bytes."""
    groups = _groups(names)
    names = [name for group in groups for name in group]
    order, upper = (t.cpu() for t in factors.of(size))
    work, data_by_column = weight.detach().to("cpu", torch.float32).T[order], dict[int, list[np.ndarray]]()
    rows, work = work.shape[1], work if len(names) == 1 else work.repeat(1, len(names))
    importance = upper.diagonal().square().reciprocal()
    for start in range(0, len(work), COLUMNS):
        block = work[start : start + COLUMNS]
        stop = start + len(block)
        errors, inside = torch.empty_like(block), upper[start:stop, start:stop]
        for low in range(0, len(block), size):
            part, place = slice(low, low + size), order[start + low : start + low + size]
            back, made, first = place.argsort(), list[np.ndarray](), 0
            for group in groups:
                each = slice(first, first := first + rows * len(group))
                counts = importance[start:stop][part][back].numpy()
                data = [
                    quantise(values.T.numpy(), name, counts, threads=threads)
                    for name, values in zip(group, block[part][back][:, each].split(rows, 1), strict=True)
                ]
                if words and group[0] in FIELDS and code_bits(group[0]) is None:
                    data = [_choose_words(block[part][back][:, each], inside[part, part], data[0], group[0], back)]
                if code_bits(group[0]) is None:
                    change = block[part][:, each] - torch.from_numpy(dequantise(data[0], group[0])).T[back.argsort()]
                    errors[part][:, each] = torch.linalg.solve_triangular(inside[part, part].T, change, upper=False)
                else:
                    data = _choose_codes(block[part][:, each], inside[part, part], data, group, back, errors[part][:, each])
                made += data
            block[low + size :].addmm_(inside[part, low + size :].T, errors[part], alpha=-1)
            data_by_column[int(place.min())] = made
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    for k, name in enumerate(names):
        yield name, np.concatenate([data_by_column[first][k] for first in sorted(data_by_column)], 1)


def _choose_words(values: torch.Tensor, upper: torch.Tensor, data: np.ndarray, name: str, back: torch.Tensor) -> np.ndarray:
    """The bytes of a block of a lattice, improved for what its errors cost after the later columns have made up for them."""
    inverse = torch.linalg.solve_triangular(upper, torch.eye(len(upper)), upper=True)[back]
    codes, layout = read_codes(data, name), layout_of(name)
    descend(values.contiguous(), inverse @ inverse.T, codes, layout)
    return write_codes(data, name, codes)


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Types that share their steps: the even ones, and every other one by itself."""
    even = [name for name in names if code_bits(name) is not None and _is_even(name)]
    return [*([even] if even else []), *([name] for name in names if name not in even)]


@functools.cache
def _is_even(name: str) -> bool:
    """Whether the levels of a type are one step apart."""
    return bool((np.diff(np.sort(levels(name))) == 1).all())


def _choose_codes(
    block: torch.Tensor,
    upper: torch.Tensor,
    data: Sequence[np.ndarray],
    names: Sequence[str],
    back: torch.Tensor,
    errors: torch.Tensor,
) -> list[np.ndarray]:
    """The bytes of a block with codes chosen column after column: its rows, used up; ``errors`` gets those divided by ``U_jj``.

    Rows of several even types lie beside each other. ``back`` puts the columns into the order of the file.
    """
    rows = block.shape[1] // len(names)
    orders = [levels(name).argsort(kind="stable") for name in names]
    tables = [torch.from_numpy(levels(name)[order]).to(block) for name, order in zip(names, orders, strict=True)]
    least, most = (torch.stack([table[end] for table in tables]).repeat_interleave(rows) for end in (0, -1))
    table, even = tables[0], _is_even(names[0])
    between = (table[1:] + table[:-1]) / 2
    grids = [grid(each, name) for each, name in zip(data, names, strict=True)]
    base, step = (torch.from_numpy(np.concatenate(g)).T[back.argsort()] for g in zip(*grids, strict=True))
    step[step == 0] = _NO_STEP
    scaled, chosen = step / upper.diagonal()[:, None], torch.empty_like(block)
    place = torch.empty(block.shape, dtype=torch.int32)
    for low in range(0, len(block), INNER):
        high = min(low + INNER, len(block))
        for j in range(low, high):
            column = block[j].sub_(base[j]).div_(step[j])
            if even:
                torch.round(column, out=chosen[j]).clamp_(least, most)
            else:
                torch.bucketize(column, between, out_int32=True, out=place[j])
                torch.index_select(table, 0, place[j], out=chosen[j])
            torch.sub(column, chosen[j], out=errors[j]).mul_(scaled[j])
            block[j + 1 : high].addr_(upper[j, j + 1 : high], errors[j], alpha=-1)
        block[high:].addmm_(upper[low:high, high:].T, errors[low:high], alpha=-1)
    place = chosen.sub_(least).to(torch.int32) if even else place
    codes = [
        torch.from_numpy(order.astype(np.uint8)).take(each.long())
        for order, each in zip(orders, place.split(rows, 1), strict=True)
    ]
    return [with_codes(each, name, c[back].T.numpy()) for each, name, c in zip(data, names, codes, strict=True)]
