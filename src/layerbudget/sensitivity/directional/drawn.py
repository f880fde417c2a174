r"""The Fisher form of a head of many rows, from the rows of the labels that were drawn.

A head adds ``u_y = Delta_y' a`` to the logit of token y at an input ``a``, and the Fisher form of a position is the variance of
``u_y`` over labels drawn from the model. The derivatives ``b'Delta a`` that every other matrix has need all rows, for
``b = p - e_y``. But the output gradients of two draws differ in the rows of their labels alone, so that

    E_y [ (b' Delta a)^2 ]  =  E [ 1/(n-1) sum_d (u_d - mean u)^2 ],    u_d = Delta_{y_d}' a,

needs the rows of n drawn labels, and is as large on average as with all of them. Where the head's outputs are scaled before
the softmax, or go through an element-wise function, the same differences say by how much every label's row counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .directions import Directions


class DrawnLabels:
    """Inputs of a head with the labels of several draws, position by position, until the errors of their rows are made."""

    def __init__(self) -> None:
        self._inputs, self._sequences = list[torch.Tensor](), list[torch.Tensor]()
        self._labels, self._scales = list[torch.Tensor](), list[torch.Tensor]()
        self._first: torch.Tensor | None = None
        self._moves: list[tuple[torch.Tensor, ...]] = []

    def add(self, a: torch.Tensor, b: torch.Tensor, sequences: Sequence[int], *, last: bool) -> None:
        """Take one draw of some positions: inputs ``(B, T, d_in)`` and output gradients ``(B, T, d_out)``.

        The draws of the same positions follow each other; ``last`` says that they are complete.
        """
        if self._first is None:
            self._first = b
        else:
            least, label = (change := b - self._first).min(-1)
            most, first_label = change.max(-1)
            self._moves.append((-least, label, most, first_label))
        if last:
            self._end(a, sequences)

    def _end(self, a: torch.Tensor, sequences: Sequence[int]) -> None:
        """See which labels were drawn, by where output gradients differ."""
        least, label, most, first_label = (torch.stack(each) for each in zip(*self._moves, strict=True))
        moved = (most > 0) & (least > 0)
        pick = moved.to(torch.int8).argmax(0, keepdim=True)  # any draw of another label shows the first one
        first, scale = first_label.gather(0, pick), most.gather(0, pick)
        labels = torch.cat((first, torch.where(moved, label, first)))
        self.keep(a, labels, torch.cat((scale, torch.where(moved, least, scale))), sequences)
        self._first, self._moves = None, []

    def keep(self, a: torch.Tensor, labels: torch.Tensor, scales: torch.Tensor, sequences: Sequence[int]) -> None:
        """Keep all draws of some positions: inputs ``(B, T, d_in)``, labels and by how much each counts, ``(draws, B, T)``.

        Positions whose draws are all of one label have no variance, and are left out.
        """
        kept = (labels != labels[0]).any(0)
        self._inputs.append(a[kept])
        self._sequences.append(torch.as_tensor(sequences)[:, None].expand(kept.shape)[kept.cpu()])
        self._labels.append(labels[:, kept])
        self._scales.append(scales[:, kept])

    def squares(self, make: Callable[[torch.Tensor], Directions]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequences of positions, ``(n,)``, and their variances along all candidates, ``(n, levels)`` float64.

        ``make`` gives the directions of the rows of some labels, which are asked for by their places in the whole matrix.
        """
        labels, scales = torch.cat(self._labels, 1), torch.cat(self._scales, 1)
        inputs, sequences = torch.cat(self._inputs), torch.cat(self._sequences)
        if not len(inputs):
            return sequences, torch.zeros(0, 0, dtype=torch.float64)
        directions = make(labels.unique().cpu())
        along = [
            directions.looked_up(label[:, None], (inputs * scale[:, None].to(inputs))[:, None])[:, 0]
            for label, scale in zip(labels, scales, strict=True)
        ]
        return sequences, torch.stack(along).var(0).cpu()
