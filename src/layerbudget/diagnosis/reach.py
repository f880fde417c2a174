"""Shares of a model that every verb reaches, of the matrices' weights, and why the rest is left as it is.

Statistics of inputs (Wanda, SparseGPT, importance matrices) are tried by a forward of one sample, on one layer of each kind,
and routed experts by a few tokens. PEFT and the formats' own rules are asked for all matrices, without running anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..compressors.formats import RUNTIMES
from ..decisions.bits import unwritable
from ..decisions.shapes import find_parts
from ..errors import LayerbudgetError
from ..execution.inputs import InputStatistics
from ..execution.loss import Batch, logits_of
from ..execution.modes import inference
from ..models.blocks import adaptable, layers, left_out, partition
from ..models.experts import check_experts, find_experts
from ..records import Block, Module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """Share of a model that a verb reaches.

    Attributes:
        verb: As users write it.
        share: Of the weights of all matrices, embeddings and output head aside; 0 where it refuses the model.
        left: What it leaves as it is, or why it refuses, in a sentence; empty where that is nothing.
    """

    verb: str
    share: float
    left: str = ""


def reached(model: nn.Module, batch: Batch) -> list[Reach]:
    """Shares of a model that every verb reaches, tried with one batch; a verb that refuses the model has a share of 0.

    Args:
        model: Is afterwards as it was.
        batch: A short one.
    """
    blocks = partition(model)
    modules = [m for b in blocks for m in b.modules]
    whole = sum(m.numel for m in modules) + sum(left_out(model, blocks).values())
    first = next(iter(left_out(model, blocks)), "")
    outside = f"Left as they are: tensors in no block, first {first}." if first else ""
    ways: dict[str, Callable[[], tuple[int, str]]] = {
        "score, plan sparsity, apply": lambda: _of_inputs(model, batch, blocks, outside),
        "plan bits": lambda: _of_files(model, modules, "transformers", outside),
        "plan bits --format gguf": lambda: _of_files(model, modules, "llama.cpp", outside),
        "plan ranks, finetune": lambda: _of_adapters(model, blocks, outside),
        "plan shapes": lambda: _of_shapes(model),
        "plan expert-pruning": lambda: _of_experts(model),
    }
    reaches = []
    for verb, way in ways.items():
        try:
            numel, left = way()
        except LayerbudgetError as error:
            numel, left = 0, error.what
        reaches.append(Reach(verb=verb, share=numel / whole, left=left))
    return reaches


def _of_inputs(model: nn.Module, batch: Batch, blocks: Sequence[Block], outside: str) -> tuple[int, str]:
    """Weights whose inputs are seen, tried on one layer of each kind."""
    kinds: dict[Any, str] = {}
    for name, layer in layers(model):
        kinds.setdefault((type(layer), tuple(sorted({type(m).__name__ for m in layer.modules()}))), name)
    tried = [m for b in blocks if b.name in kinds.values() for m in b.modules]
    statistics = InputStatistics(model, tried, "diagonal")
    with inference(model), statistics.listening(None):
        logits_of(model, batch)
    blind = [m.name for m in tried if m.copies == 1 and not any(s.rows for s in statistics.found.get(m.name, ()))]
    numel = sum(b.numel for b in blocks)
    if not blind:
        return numel, outside
    return numel - sum(
        m.numel for m in tried if m.name in blind
    ), f"No input was seen of {len(blind)} matrices, first {blind[0]}."


def _of_files(model: nn.Module, modules: Sequence[Module], runtime: str, outside: str) -> tuple[int, str]:
    """Weights that a file for a runtime holds in fewer than 16 bits."""
    kept = unwritable(model, [m.name for m in modules], RUNTIMES[runtime])
    numel = sum(m.numel for m in modules if m.name not in kept)
    first = next(iter(kept.items()), None)
    return numel, outside if first is None else f"In 16 bits stay {len(kept)} matrices, first {first[0]}: {first[1]}."


def _of_adapters(model: nn.Module, blocks: Sequence[Block], outside: str) -> tuple[int, str]:
    """Weights beside which an adapter can go, as PEFT says."""
    able, lost = adaptable(model, blocks)
    return sum(b.numel for b in able), f"No adapter goes on {len(lost)} matrices, first {lost[0]}." if lost else outside


def _of_shapes(model: nn.Module) -> tuple[int, str]:
    """Weights of heads and MLPs that can be cut, of one kind where layers lack the other."""
    try:
        return sum(p.parameters for p in find_parts(model) if p.units), ""
    except LayerbudgetError as error:
        for kind in ("heads", "mlp"):
            try:
                parts = find_parts(model, kinds=(kind,))
            except LayerbudgetError:
                continue
            return sum(p.parameters for p in parts if p.units), f"--parts {kind} alone: {error.what}"
        raise


def _of_experts(model: nn.Module) -> tuple[int, str]:
    """Weights of routed experts, whose layers were tried."""
    expert_layers = find_experts(model)
    with torch.no_grad():
        check_experts(expert_layers)
    return sum(p.numel() for e in expert_layers for p in e.experts.parameters() if p.ndim == 3), ""
