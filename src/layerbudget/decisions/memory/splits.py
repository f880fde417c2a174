"""The parts of a model that may lie in the processor's memory beside a card, by the number of layers; bytes of both. No torch.

The rules are those of llama.cpp, see :mod:`layerbudget.decisions.memory.placement`.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from ...budget import rounded_up, unit_of
from ...errors import InfeasibleBudget, InvalidInput
from ...gguf.names import split_stacks
from .payload import Placement, Side
from .program import Fit

_LAYER = re.compile(r"blk\.(\d+)\..+")
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_exps\.weight")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_INPUTS = 1 << 15  # bytes of a forward's ids, positions and places in the cache


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """The parts that lie with the processor, for a number of layers.

    Attributes:
        fit: What is decided.
        layers, of: Layers at the processor, whole or by their experts, and all layers.
        whole: Whether layers are whole.
        rows: Weights that lie with the processor alone.
        tied: A head that lies in both.
    """

    fit: Fit
    layers: int
    of: int
    whole: bool
    rows: np.ndarray
    tied: int | None

    @functools.cached_property
    def cached(self) -> list[np.ndarray]:
        """Bytes of the cache of every layer at the processor, by block and format, ``(K, m)``."""
        return [size for layer, size in self.fit.space.size_by_layer().items() if self.whole and layer < self.layers]

    @functools.cached_property
    def tensor(self) -> np.ndarray:
        """Bytes of the largest tensor that a card may have to read of each of the ``rows``, by format: none of an embedding."""
        weights, sizes = self.fit.weights, list[np.ndarray]()
        for row in self.rows.tolist():
            block = weights.blocks[row]
            share = max(m.numel / split_stacks(m.name, m.copies) for m in block.modules) / block.numel
            looked_up = _EMBEDDING in weights.stored[row]
            sizes.append(np.zeros_like(weights.size[row]) if looked_up else np.ceil(weights.size[row] * share).astype(np.int64))
        return np.array(sizes, dtype=np.int64).reshape(len(sizes), len(weights.formats))

    def sides(self, weights: np.ndarray, cache: np.ndarray) -> tuple[Side, Side]:
        """Return the bytes of the card and of the processor's memory in formats of the weights and of the cache.

        Other tensors and states of whole layers are counted on both sides, in full: they are small.
        """
        fit, places = self.fit, np.arange(len(self.fit.cache.blocks))
        size = fit.weights.size[np.arange(len(weights)), weights]
        alone = int(size[self.rows].sum())
        by_layer = [int(each[places, cache].sum()) for each in self.cached]
        matrix = int(self.tensor[np.arange(len(self.rows)), weights[self.rows]].max(initial=0))
        apart = self.whole and self.layers > 0
        context, batch = fit.space.context, fit.space.batch
        card = Side(
            weights=int(size.sum()) - alone + fit.weights.fixed,
            cache=int(fit.cache.size[places, cache].sum()) - sum(by_layer) + fit.state,
            buffers=fit.known.buffers(context, batch, more=1 if apart else 0) + matrix + max(by_layer, default=0),
        )
        tied = 0 if self.tied is None else int(size[self.tied])
        processor = Side(
            weights=alone + tied + fit.weights.head + (fit.weights.fixed if apart else 0),
            cache=sum(by_layer) + (fit.state if apart else 0),
            buffers=fit.buffers + _INPUTS,
        )
        return card, processor

    @property
    def least(self) -> tuple[int, int]:
        """Bytes of the smallest plan on the card and with the processor."""
        smallest = (np.where(t.has, t.size, np.iinfo(np.int64).max).argmin(axis=1) for t in (self.fit.weights, self.fit.cache))
        card, processor = self.sides(*smallest)
        return card.bytes, processor.bytes

    @property
    def most(self) -> tuple[int, int]:
        """Bytes of everything in 16 bits on the card and with the processor."""
        card, processor = self.sides(*(np.full(len(t.blocks), len(t.formats) - 1) for t in (self.fit.weights, self.fit.cache)))
        return card.bytes, processor.bytes

    def placement(self, gpu: int, ram: int, chosen: np.ndarray) -> Placement:
        """Return what a plan says of a choice of all formats."""
        card, processor = self.sides(*self.fit.apart(chosen))
        terms = {"gpu": gpu, "ram": ram, "layers": self.layers, "of": self.of}
        return Placement(whole=self.whole, card=card, processor=processor, others=(), **terms)


def splits_of(fit: Fit) -> list[Split]:
    """Return what may lie with the processor, by the number of layers that do, or whose experts do.

    Raises:
        InvalidInput: Another runtime, or blocks that hold experts and other matrices together.
    """
    if fit.weights.runtime != "llama.cpp":
        what = f"{fit.weights.runtime} does not share a model between a card and the processor."
        raise InvalidInput(what, "--gpu and --ram are for llama.cpp.", "Give the card alone: --memory SIZE.")
    names = [set(each) for each in fit.weights.stored]
    whole = not any(_EXPERTS.fullmatch(name) for each in names for name in each)
    head = any(_HEAD in each for each in names)
    layer_of, apart, tied = dict[int, int](), list[int](), None
    for row, stored in enumerate(names):
        matches = [(_LAYER if whole else _EXPERTS).fullmatch(name) for name in stored]
        if any(matches):
            numbers = {int(m.group(1)) for m in matches if m}
            if not all(matches) or len(numbers) > 1:
                what = f"{fit.weights.blocks[row].name} gives experts and other matrices one format."
                raise InvalidInput(what, "Two memories need the experts of every layer by themselves.", "Leave --by out.")
            layer_of[row] = numbers.pop()
        elif _EMBEDDING in stored:
            apart, tied = ([row], None) if head else ([], row)
    of = fit.weights.llama.layers if fit.weights.llama is not None else max(layer_of.values()) + 1
    counts = [0, *(layer + 1 for layer in sorted(set(layer_of.values())))]
    rows = ([*apart, *(row for row, layer in layer_of.items() if layer < n)] for n in counts)
    return [
        Split(fit=fit, layers=n, of=of, whole=whole, rows=np.array(sorted(each), dtype=np.int64), tied=tied)
        for n, each in zip(counts, rows, strict=True)
    ]


def check_memories(fit: Fit, gpu: int, ram: int) -> None:
    """Refuse two memories that no number of layers fits.

    Raises:
        InfeasibleBudget: It names the smallest card beside this memory, and the smallest memory beside this card.
    """
    splits = splits_of(fit)
    least = [split.least for split in splits]
    if any(on_card <= gpu and at_processor <= ram for on_card, at_processor in least):
        return
    tokens, batch, (card, beside) = fit.space.context, fit.space.batch, min(least)
    cards = [on_card for on_card, at_processor in least if at_processor <= ram]
    rams = [at_processor for on_card, at_processor in least if on_card <= gpu]
    ways = [f"Raise --gpu to {_shown(min(cards))}"] if cards else []
    ways += [f"{'raise' if ways else 'Raise'} --ram to {_shown(min(rams))}"] if rams else []
    raise InfeasibleBudget(
        f"{gpu:,} bytes of the card and {ram:,} of the processor's memory are too few at {tokens} tokens x {batch}.",
        f"The plan that takes least of the card takes {card:,} bytes of it and {beside:,} beside it.",
        f"{', or '.join(ways) or f'Give --gpu {_shown(card)} --ram {_shown(beside)}'}, or a shorter context.",
    )


def _shown(size: int) -> str:
    unit, name = unit_of(size)
    return f"'{rounded_up(size / unit)} {name}'"
