r"""Several draws of labels at the head, from one product with its matrix.

For logits ``f(W a)``, where f works on every number by itself, the loss of a drawn label y has the output gradient
``b_y = f' (p - e_y)``. Those of two draws differ at their labels alone, so that of every further draw

    W' b_y  =  W' b_1 + f'_{y_1} W_{y_1} - f'_y W_y

needs two rows of the head, in the place of a product with all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..models.blocks import pretrained
from ..models.offload import mapped
from .loss import IGNORE, Batch, drawn_targets, summed_loss

_ALIKE = 0.01  # of a gradient: by so little may rows of the head lead elsewhere than a backward, which 16 bits round


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Draws of labels at some positions.

    Attributes:
        a: Inputs of the head, ``(B, T, d_in)``.
        labels: ``(draws, B, T)``; -100 where none is drawn.
        scales: By how much the output gradient of a draw is smaller at its label, f', in the same shape.
        gradients: Of every draw's summed loss at the hidden states, ``(B, T, d)``.
        loss: The summed loss of the first draw.
    """

    a: torch.Tensor
    labels: torch.Tensor
    scales: torch.Tensor
    gradients: list[torch.Tensor]
    loss: torch.Tensor


class HeadDraws:
    """Draws labels at the head of a model, and runs them backwards to the hidden states in front of it.

    The first positions are run backwards as a whole too. Where that leads elsewhere, because more than f and a matrix lies
    between hidden states and logits, there are no draws from then on.

    Args:
        model: The model.
        head: What multiplies with all rows, as :meth:`head_of` finds it.
        seeds: Of the draws.
    """

    def __init__(self, model: nn.Module, head: nn.Linear, seeds: Sequence[int]) -> None:
        self.model, self.head, self.seeds = model, head, list(seeds)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._alike: bool | None = None

    @staticmethod
    def head_of(model: Any) -> nn.Linear | None:
        """The head of a model, where it is a plain matrix."""
        known = pretrained(model)
        head = known.get_output_embeddings() if hasattr(known, "get_output_embeddings") else None
        return head if type(head) is nn.Linear else None

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """See what the head is given and returns, within the forward of some positions."""

        def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._seen.append((inputs[0], output))

        self._seen.clear()
        handle = self.head.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def of(self, hidden: torch.Tensor, logits: torch.Tensor, batch: Batch) -> Drawn | None:
        """Return the draws at the positions of a forward that was seen, from hidden states that the graph begins with.

        None where the head's rows do not lead to them. The graph is kept.
        """
        seen, self._seen = self._seen, []
        if self._alike is False or len(seen) != 1 or logits.ndim != 3 or logits.shape[:2] != batch.targets.shape:
            return None
        source, output = seen[0]
        if output.shape != logits.shape or source.shape[:2] != logits.shape[:2]:
            return None
        labels = torch.stack(drawn_targets(logits.detach(), batch, self.seeds))
        there, safe = batch.targets != IGNORE, labels.clamp_min(0)
        b = logits.detach().softmax(-1).mul_(there[..., None])
        b.scatter_add_(-1, safe[0][..., None], -there[..., None].to(b))
        scales = there.expand(labels.shape).to(logits)
        if output is not logits:
            (slope,) = torch.autograd.grad(logits, output, torch.ones_like(logits), retain_graph=True)
            scales = scales * torch.stack([slope.gather(-1, each[..., None])[..., 0].to(logits) for each in safe])
            (b,) = torch.autograd.grad(logits, output, b, retain_graph=True)
            del slope
        (first,) = torch.autograd.grad(output, source, b, retain_graph=True)
        del b
        gradients = []
        rows = [self._rows(each).to(logits) * scale[..., None] for each, scale in zip(safe, scales, strict=True)]
        for each in rows:
            at_head = (first.to(logits) + rows[0] - each).to(source)
            at_hidden = at_head if source is hidden else torch.autograd.grad(source, hidden, at_head, retain_graph=True)[0]
            gradients.append(at_hidden)
        plain = logits.detach()
        losses = plain.logsumexp(-1) - plain.gather(-1, safe[0][..., None])[..., 0]
        if self._alike is None:
            self._alike = self._leads_there(hidden, logits, labels[-1], gradients[-1])
        if not self._alike:
            return None
        return Drawn(a=source.detach(), labels=labels, scales=scales, gradients=gradients, loss=(losses * there).sum())

    def _rows(self, labels: torch.Tensor) -> torch.Tensor:
        """The head's rows of some labels."""
        files = mapped(self.model)
        parameter = cast(nn.Parameter, self.head.weight)
        weight = parameter.detach() if files is None else files.stored(parameter)
        return weight[labels.to(weight.device)]

    @staticmethod
    def _leads_there(hidden: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether a gradient is that of a backward through everything."""
        (whole,) = torch.autograd.grad(summed_loss(logits, labels), hidden, retain_graph=True)
        return bool((whole - gradient).float().norm() <= _ALIKE * whole.float().norm())
