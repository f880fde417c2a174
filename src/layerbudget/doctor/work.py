"""What the long verbs do to every layer, counted: runs, backwards, products of float32 and float64, bytes that are held.

What is compared, sorted, moved or written of every weight is counted in the float32 products that take as long.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .layer import Shape

_MASK, _RANK, _WRITE, _COPY = 300.0, 1100.0, 200.0, 60.0  # float32 products that take as long, per weight (written: per byte)
_SWEEP = 1500.0  # of SparseGPT's column by column, per weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a verb does to every layer, and holds beside the model.

    Attributes:
        forwards: Forward equivalents, as verbs count them: forward 1, backward 2.
        runs: Forwards of a layer that are run.
        backs: Backwards to its input.
        gradients: Products of all weight gradients.
        head: Runs of the head, a backward counted as one more.
        losses: Upstream gradients; none where nothing goes backwards.
        state: Bytes of one layer, all of whose matrices are held at once.
        beside: Bytes that are held for all layers.
        single: Products of float32 per layer.
        double: Products of float64 per layer.
    """

    forwards: float
    runs: float
    backs: float = 0.0
    gradients: float = 0.0
    head: float = 1.0
    losses: int = 0
    state: float = 0.0
    beside: float = 0.0
    single: float = 0.0
    double: float = 0.0


def _gram(shape: Shape, tokens: int, samples: int) -> Work:
    """fisher-gram: rows, or tokens, of the matrices of one layer."""
    single = state = 0.0
    for m in shape.matrices:
        by_tokens, by_rows = 2.0 * tokens**2 * (m.d_in + m.d_out), 2.0 * tokens * m.numel + 2.0 * samples**2 * m.numel
        single += min(by_tokens, by_rows)
        state += 4 * (tokens * (m.d_in + m.d_out) if by_tokens < by_rows else samples * m.numel)
    return Work(forwards=3.0, runs=2, backs=1, head=2, losses=1, state=min(state, 2.0 * 2**30), single=single)


def _factors(groups: int, whitened: bool) -> Any:
    """Work of kfac and rank-gain."""

    def work(shape: Shape, tokens: int, samples: int) -> Work:
        """Two losses, the damping's unit from a few sequences, and what is settled of every matrix."""
        single = double = state = largest = 0.0
        seen: set[str] = set()
        for m in shape.matrices:
            kept = tokens * (m.d_in + 2 * m.d_out)
            if kept < m.d_in**2 + m.d_out**2 and tokens <= max(m.d_in, m.d_out):
                new = shape.group(m) not in seen
                seen.add(shape.group(m))
                single += tokens**2 * ((1.6 * m.d_in if new else 0.0) + (2.5 if m.d_out < tokens else 5.0) * m.d_out)
                double += _settling(tokens, m.d_out, new=new) if whitened else 40.0 * tokens**3
                state += 4.0 * (tokens * ((m.d_in if new else 0) + 2 * m.d_out))
                largest = max(largest, 2 * 8.0 * 14 * tokens**2)  # two side by side
            else:
                single += tokens * (m.d_in**2 + m.d_out**2) + 2.0 * tokens * m.numel
                cube = (m.d_in**3 + m.d_out**3) / 3 if whitened else 12.0 * (m.d_in**3 + m.d_out**3)
                double += cube + 2.0 * groups * m.numel * (m.d_in + m.d_out)
                new = shape.group(m) not in seen
                seen.add(shape.group(m))
                state += 4.0 * ((m.d_in**2 if new else 0) + m.d_out**2 + groups * m.numel)
                copies, halves = (2, groups + 3) if whitened else (3, groups + 2)
                largest = max(largest, 8.0 * (copies * (m.d_in**2 + m.d_out**2) + halves * m.numel))
        few = max(1, min(8, samples // 4)) / samples if whitened else 0.0
        return Work(
            forwards=5.0 + 3.0 * few, runs=2 + 2 * few, backs=2 + few, head=3 + 2 * few, losses=2,
            state=state + largest, single=single, double=double,
        )  # fmt: skip

    return work


def _settling(tokens: int, outputs: int, *, new: bool) -> float:
    """Products of float64 of one whitened matrix: two spectra (tridiagonal: as long as 4.4 n^3), products, factors, a root."""
    small = min(tokens, outputs)
    spectra = 2 * 4.4 * small**3
    root = 7.0 * tokens**3 if new else 0.0
    return spectra + root + (8.5 * tokens**3 if small == tokens else 4.0 * small * tokens**2)


def _pruner(solves: bool) -> Any:
    """Work of Wanda and SparseGPT: two forwards, statistics of inputs, masks or the solve, and the writing of what changed."""

    def work(shape: Shape, tokens: int, samples: int) -> Work:
        """No head is run."""
        numel, largest = sum(m.numel for m in shape.matrices), max(m.numel for m in shape.matrices)
        written = numel * (_WRITE * shape.width + 2 * _COPY)
        if not solves:
            return Work(forwards=2.0, runs=1.9, head=0, state=8.0 * largest, single=written + _MASK * numel)
        widths = list({shape.group(m): m.d_in for m in shape.matrices}.values())
        single = sum(tokens * d**2 + 4.0 / 3.0 * d**3 for d in widths) + sum(
            m.numel * (m.d_in + _SWEEP) for m in shape.matrices
        )
        state = 4.0 * (sum(d**2 for d in widths) + 3 * max(widths) ** 2 + 3 * largest)
        return Work(forwards=2.0, runs=1.9, head=0, state=state, single=single + written)

    return work


def _measure(shape: Shape, tokens: int, samples: int) -> Work:
    """The dense model once, the points that twenty passes allow, the plan applied in two; masks are made when a layer comes."""
    points = (20.0 - 3.0) / 3.0
    numel = sum(m.numel for m in shape.matrices)
    return Work(
        forwards=20.0, runs=3 + 2 * points, backs=points, gradients=points, head=2 + 2 * points, losses=1,
        state=6.0 * numel, beside=4.0 * tokens * shape.vocabulary,
        single=numel * ((2 * points + 1) * (_MASK + _COPY) + points * _RANK),
    )  # fmt: skip


def _evaluate(shape: Shape, tokens: int, samples: int) -> Work:
    """One forward."""
    return Work(forwards=1.0, runs=1)


def _finetune(shape: Shape, tokens: int, samples: int) -> Work:
    """One forward and backward."""
    return Work(forwards=3.0, runs=1, backs=1, head=2)


WORK: dict[str, Any] = {
    "fisher-gram": _gram, "rank-gain": _factors(2, True), "kfac": _factors(4, False), "wanda": _pruner(False),
    "sparsegpt": _pruner(True), "evaluate": _evaluate, "measure": _measure, "finetune": _finetune,
}  # fmt: skip
