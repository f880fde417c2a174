r"""Error feedback inside ggml's grids: a file of an ordinary type whose codes are chosen for the output of the layer.

GPTQ (arXiv 2210.17323) on llama.cpp's types. ggml chooses the scales of a block, and codes are chosen under them column by
column (:mod:`layerbudget.compressors.ggml` knows where they lie).
"""

from __future__ import annotations

import numpy as np
import torch

from .formats import find_format
from .ggml import code_bits, dequantise, grid, levels, quantise, span, with_codes

COLUMNS = 256  # later columns than these get their feedback in one product
_NO_STEP = 1e-20  # of weights whose scale is zero: all codes say the same, and the error is that of the base


def feed_back(weight: torch.Tensor, upper: torch.Tensor, name: str, *, threads: int = 1) -> np.ndarray:
    r"""Return the bytes of a matrix whose later columns make up for the rounding of earlier ones, ``(rows, bytes of a row)``.

    With ``U' U = (X X' + damping)^-1``, every block of columns is taken as the columns before it have left it, ``W_b``. ggml
    chooses its scales, for columns that count ``1 / U_jj^2`` each: what an error costs after the later columns have made up for
    it. Then codes are chosen column by column, and ``(w_j - q_j) / U_jj`` is taken from the later columns in proportion to
    ``U_j,:``. Codes of a lattice stay as ggml chose them, and the error of the whole block is fed back, ``E U_bb^-1 U_b,:``
    with ``E = W_b - Q_b``, which is the same step for all its columns together. Rows do not depend on each other.

    Args:
        weight: ``(rows, columns)``.
        upper: ``U``, ``(columns, columns)``.
        name: A type of ``layerbudget.compressors.formats.TYPES`` that divides the columns.
        threads: Of ggml.
    """
    work = torch.empty(weight.shape[::-1], dtype=torch.float32).copy_(weight.detach().T)
    upper, size, found = upper.to(work), int(find_format(name).group or 1), []
    importance = upper.diagonal().square().reciprocal().numpy()
    for start in range(0, len(work), COLUMNS):
        block = work[start : start + COLUMNS]
        stop = start + len(block)
        errors, inside = torch.empty_like(block), upper[start:stop, start:stop]
        for low in range(0, len(block), size):
            part = slice(low, low + size)
            data = quantise(block[part].T.numpy(), name, importance[start + low : start + low + size], threads=threads)
            if code_bits(name) is None:
                change = block[part] - torch.from_numpy(dequantise(data, name).T)
                errors[part] = torch.linalg.solve_triangular(inside[part, part].T, change, upper=False)
            else:
                data = _choose_codes(block[part], inside[part, part], data, name, errors[part])
            block[low + size :].addmm_(inside[part, low + size :].T, errors[part], alpha=-1)
            found.append(data)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return np.concatenate(found, 1)


def _choose_codes(block: torch.Tensor, upper: torch.Tensor, data: np.ndarray, name: str, errors: torch.Tensor) -> np.ndarray:
    """The bytes of a block with codes chosen column after column: its rows, used up; ``errors`` gets those divided by ``U_jj``.

    Weights that share a scale are counted in its steps, so that a column is rounded and fed back in few operations.
    """
    order, width = levels(name).argsort(kind="stable"), span(name)
    table = torch.from_numpy(levels(name)[order]).to(block)
    least, most, between = float(table[0]), float(table[-1]), (table[1:] + table[:-1]) / 2
    even = bool((table.diff() == 1).all())
    base, step = (torch.from_numpy(g[:, ::width].T.copy()) for g in grid(data, name))
    step[step == 0] = _NO_STEP
    codes, diagonal = torch.empty(block.shape, dtype=torch.uint8), upper.diagonal()
    share = upper / diagonal[:, None]
    place = torch.empty(block.shape[1], dtype=torch.int32)
    for k, low in enumerate(range(0, len(block), width)):
        high = low + width
        steps = block[low:high].sub_(base[k]).div_(step[k])
        chosen = torch.empty_like(steps)
        for j in range(width):
            if even:
                torch.round(steps[j], out=chosen[j]).clamp_(least, most)
            else:
                torch.bucketize(steps[j], between, out_int32=True, out=place)
                codes[low + j] = place
                torch.index_select(table, 0, place, out=chosen[j])
            torch.sub(steps[j], chosen[j], out=errors[low + j])
            steps[j + 1 :].addr_(share[low + j, low + j + 1 : high], errors[low + j], alpha=-1)
        if even:
            codes[low:high] = chosen.sub_(least)
        errors[low:high].mul_(step[k]).div_(diagonal[low:high, None])
        block[high:].addmm_(upper[low:high, high:].T, errors[low:high], alpha=-1)
    return with_codes(data, name, order.astype(np.uint8)[codes.T.numpy()])
