r"""One function, three ways to compute it: the sum over the chosen experts of a token.

For tokens ``x (T, d_in)``, stacked factors ``A (E r, d_in)`` and ``B (d_out, E r)`` and a gate ``(T, E)`` that is zero for
experts that were not chosen:  ``y_t = scale * sum_e gate_{t,e} B_e A_e x_t``.

- *fused*: two matrix products for all experts with the gate applied in between, in rank space (``T x E r`` numbers). It does
  E/k times the arithmetic that is needed, and is still the fastest for the counts in use, because adapters of rank 8
  are bound by memory traffic, not by arithmetic; shapes do not depend on the data.
- *grouped*: tokens sorted by expert, one pair of products per expert on its own tokens. Less arithmetic, but it copies the
  input k times. For top-k much smaller than E.
- *loop*: every expert on every token, the definition itself. The plain form that tests compare with.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def route(logits: Tensor, top_k: int) -> Tensor:
    """Gate ``(..., E)`` from router logits: softmax over all experts, top-k, renormalised; zero elsewhere.

    Renormalising the k largest of a softmax equals a softmax over the k largest logits. Computed in float32 (float64
    logits stay float64).

    >>> route(torch.tensor([[0.0, 1.0, 1.0]]), 2)
    tensor([[0.0000, 0.5000, 0.5000]])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if top_k >= logits.shape[-1]:
        return logits.softmax(-1)
    values, index = logits.topk(top_k, dim=-1)
    return torch.zeros_like(logits).scatter(-1, index, values.softmax(-1))


def spread(gate: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Repeat every expert's gate over its ranks: ``(..., E) -> (..., E r)``.

    A product with the 0/1 block matrix ``I_E (x) 1_r``: exact, and faster than a broadcast over a last axis of length r.
    """
    gate = gate.to(dtype)
    return gate @ _blocks(gate.shape[-1], rank, gate)


def _blocks(experts: int, rank: int, like: Tensor) -> Tensor:
    """``I_E (x) 1_r`` in the type and on the device of ``like``; made once, for it costs as much as the product with it."""
    if type(like) not in (Tensor, nn.Parameter) or torch.compiler.is_compiling():
        return _made(experts, rank, like.dtype, like.device)  # a traced or wrapped tensor must not outlive its trace
    return _kept(experts, rank, like.dtype, like.device)


def _made(experts: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.eye(experts, dtype=dtype, device=device).repeat_interleave(rank, dim=1)


_kept = functools.lru_cache(maxsize=64)(_made)


class _GatedProduct(torch.autograd.Function):
    """``(hidden * spread(gate)) B'``, keeping rank space and gate for the backward pass; their product is made again there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, gate: Tensor, b: Tensor, rank: int) -> Tensor:
        return F.linear(hidden * spread(gate, rank, hidden.dtype), b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        hidden, gate, b, ctx.rank = inputs
        ctx.save_for_backward(hidden, gate, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of ``hidden``, ``gate`` and ``b`` from that of the product."""
        hidden, gate, b = ctx.saved_tensors
        factor = spread(gate, ctx.rank, hidden.dtype)
        gradient = gradient.to(hidden.dtype)
        inner = gradient @ b.to(hidden.dtype)
        gated = (hidden * factor).reshape(-1, hidden.shape[-1])
        for_b = gradient.reshape(-1, gradient.shape[-1]).T @ gated
        for_gate = (inner * hidden) @ _blocks(gate.shape[-1], ctx.rank, hidden).T
        return inner * factor, for_gate.to(gate.dtype), for_b.to(b.dtype), None


def fused(hidden: Tensor, gate: Tensor, b: Tensor, rank: int, scale: float) -> Tensor:
    """Gate the rank space ``hidden (..., E r)`` and multiply by ``B (d_out, E r)``: ``(..., d_out)``."""
    return _GatedProduct.apply(hidden, (gate * scale).to(hidden.dtype), b, rank)


def grouped(x: Tensor, a: Tensor, b: Tensor, gate: Tensor, top_k: int, scale: float) -> Tensor:
    """Compute the update from tokens sorted by expert; ``(T, d_in) -> (T, d_out)``."""
    experts, rank = gate.shape[-1], a.shape[0] // gate.shape[-1]
    weight, index = gate.topk(min(top_k, experts), dim=-1)
    order = index.flatten().argsort(stable=True)
    token = order.div(index.shape[-1], rounding_mode="floor")
    counts = torch.bincount(index.flatten(), minlength=experts).tolist()
    parts = []
    for expert, rows in enumerate(x[token].split(counts)):
        part = slice(expert * rank, (expert + 1) * rank)
        parts.append(rows @ a[part].T @ b[:, part].T)
    update = torch.cat(parts) * (weight.flatten()[order] * scale).to(x.dtype).unsqueeze(-1)
    return torch.zeros(x.shape[0], b.shape[0], dtype=update.dtype, device=x.device).index_add(0, token, update)


def loop(x: Tensor, a: Tensor, b: Tensor, gate: Tensor, scale: float) -> Tensor:
    """Compute the update as it is defined, expert after expert; ``(T, d_in) -> (T, d_out)``."""
    rank = a.shape[0] // gate.shape[-1]
    total = x.new_zeros(x.shape[0], b.shape[0])
    for expert in range(gate.shape[-1]):
        part = slice(expert * rank, (expert + 1) * rank)
        total = total + gate[:, expert : expert + 1].to(x.dtype) * scale * (x @ a[part].T @ b[:, part].T)
    return total
