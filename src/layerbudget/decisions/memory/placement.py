r"""Two memories for llama.cpp: a card, and the processor's memory for the experts of the first layers. No torch.

llama-server keeps the experts of the first ``n`` decoder layers in the processor's memory with ``--n-cpu-moe n``. The embedding
of tokens always lies there; one that is the head too lies in both. All other tensors, the cache and the buffers of a forward
lie on the card. For a given ``n``, and a format ``h`` of a head that lies in both, the plan is two separate programs:

    minimise sum_{i in P} R_i(f_i)                     subject to  sum_{i in P} s_i(f_i) + s_h    <= RAM
    minimise sum_{i not in P} R_i(f_i) + sum_k C_k(g_k) subject to  F + the bytes of the card       <= GPU,

``P`` the tensors that lie with the processor alone. No variable is in both, so that the sum of the two optima is the optimum of
``(n, h)``, and the least of these sums that of all plans. Of equal sums the smaller ``n`` is taken: it reads less from the
slower memory. The second program is that of one memory, with the formats of ``P`` fixed and their bytes added to the limit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...errors import InfeasibleBudget, InvalidInput
from ...records import rounded_up, unit_of
from ...solvers.choices import choose
from .payload import Placement
from .program import Fit

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_exps\.weight")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """Rows of the weights that lie with the processor alone, for a number of layers; ``tied`` is a head that is in both."""

    layers: int
    rows: np.ndarray
    tied: int | None

    def heads(self, fit: Fit) -> Sequence[int | None]:
        """Formats of a head that is in both; None where there is none."""
        return [None] if self.tied is None else [int(j) for j in np.flatnonzero(fit.weights.has[self.tied])]

    def least(self, fit: Fit) -> tuple[int, int]:
        """Bytes of the smallest plan on the card and with the processor."""
        smallest = fit.weights.smallest
        alone = int(smallest[self.rows].sum())
        return fit.least - alone, alone + (0 if self.tied is None else int(smallest[self.tied]))

    def whole(self, fit: Fit) -> tuple[int, int]:
        """Bytes of everything in 16 bits on the card and with the processor."""
        size = fit.weights.size[:, -1]
        alone = int(size[self.rows].sum())
        card = int(size.sum() + fit.cache.size[:, -1].sum()) + fit.beside - alone
        return card, alone + (0 if self.tied is None else int(size[self.tied]))


def sides_of(fit: Fit) -> list[Side]:
    """Return what may lie with the processor, by the number of layers whose experts do.

    Raises:
        InvalidInput: A model without experts, another runtime, or blocks that hold experts and other matrices together.
    """
    if fit.weights.runtime != "llama.cpp":
        what = f"{fit.weights.runtime} does not share a model between a card and the processor."
        raise InvalidInput(what, "--gpu and --ram are for llama.cpp.", "Give the card alone: --memory SIZE.")
    layer_of, apart = dict[int, int](), list[int]()
    names = [set(each) for each in fit.weights.stored]
    head = any(_HEAD in each for each in names)
    tied = None
    for row, stored in enumerate(names):
        matches = [_EXPERTS.fullmatch(name) for name in stored]
        if any(matches):
            numbers = {int(m.group(1)) for m in matches if m}
            if not all(matches) or len(numbers) > 1:
                what = f"{fit.weights.blocks[row].name} gives experts and other matrices one format."
                raise InvalidInput(what, "Two memories need the experts of every layer by themselves.", "Leave --by out.")
            layer_of[row] = numbers.pop()
        elif _EMBEDDING in stored:
            apart, tied = ([row], None) if head else ([], row)
    if not layer_of:
        what = "This model has no experts that could lie in the processor's memory."
        raise InvalidInput(what, "--gpu and --ram are for mixtures of experts.", "Give the card alone: --memory SIZE.")
    counts = [0, *(layer + 1 for layer in sorted(set(layer_of.values())))]
    sides = ((n, [*apart, *(row for row, layer in layer_of.items() if layer < n)]) for n in counts)
    return [Side(layers=n, rows=np.array(sorted(rows), dtype=np.int64), tied=tied) for n, rows in sides]


def check_memories(fit: Fit, gpu: int, ram: int) -> None:
    """Refuse two memories that no number of layers fits.

    Raises:
        InfeasibleBudget: It names the smallest card beside this memory, and the smallest memory beside this card.
    """
    least = [side.least(fit) for side in sides_of(fit)]
    if any(on_card <= gpu and at_processor <= ram for on_card, at_processor in least):
        return
    tokens, batch, (card, beside) = fit.space.context, fit.space.batch, least[-1]
    cards = [on_card for on_card, at_processor in least if at_processor <= ram]
    rams = [at_processor for on_card, at_processor in least if on_card <= gpu]
    ways = [f"Raise --gpu to {_shown(min(cards))}"] if cards else []
    ways += [f"{'raise' if ways else 'Raise'} --ram to {_shown(min(rams))}"] if rams else []
    raise InfeasibleBudget(
        f"{gpu:,} bytes of the card and {ram:,} of the processor's memory are too few at {tokens} tokens x {batch}.",
        f"With all experts at the processor the smallest plan takes {card:,} bytes of the card and {beside:,} beside it.",
        f"{', or '.join(ways) or f'Give --gpu {_shown(card)} --ram {_shown(beside)}'}, or a shorter context.",
    )


def _shown(size: int) -> str:
    unit, name = unit_of(size)
    return f"'{rounded_up(size / unit)} {name}'"


def place(fit: Fit, gpu: int, ram: int) -> tuple[Fit, int, Placement]:
    """Return the program of the card, its bytes in all, and what lies with the processor, for the least damage.

    The program has the formats of the processor's tensors fixed, and their bytes are within those that are returned.

    Raises:
        InvalidInput, InfeasibleBudget: See :func:`sides_of` and :func:`check_memories`.
    """
    check_memories(fit, gpu, ram)
    best: list[tuple[float, Fit, int, Placement]] = []
    for side in sides_of(fit):
        found = min(_plans(fit, side, gpu, ram), key=lambda plan: plan[0], default=None)
        if found is not None:
            best.append(found)
    _, placed, memory, placement = min(best, key=lambda plan: plan[0])  # the first of equals: the fewest layers
    others = [
        {"layers": p.layers, "gpu_bytes": p.gpu_bytes, "ram_bytes": p.ram_bytes, "predicted": float(damage)}
        for damage, _, _, p in best
    ]
    return placed, memory, dataclasses.replace(placement, others=others)


def _plans(fit: Fit, side: Side, gpu: int, ram: int) -> Iterator[tuple[float, Fit, int, Placement]]:
    """The best plan of a number of layers, for every format of a head that is in both."""
    table, rows = fit.weights, side.rows
    for head in side.heads(fit):
        size, fixed = 0, {}
        if side.tied is not None and head is not None:
            size, fixed = int(table.size[side.tied, head]), {side.tied: head}
        if int(table.smallest[rows].sum()) > ram - size:
            continue
        chosen = choose(table.damage[rows], table.size[rows], ram - size).chosen if rows.size else rows
        fixed |= dict(zip(rows.tolist(), chosen.tolist(), strict=True))
        alone = int(table.size[rows, chosen].sum())
        placed, memory = _fixed(fit, fixed), gpu + alone
        if placed.least <= memory:
            totals = placed.table.totals(placed.best(memory).chosen)
            yield (
                totals["predicted"],
                placed,
                memory,
                Placement(
                    gpu=gpu,
                    ram=ram,
                    layers=side.layers,
                    gpu_bytes=int(totals["spent"]) + placed.beside - alone,
                    ram_bytes=alone + size,
                ),
            )


def _fixed(fit: Fit, formats: Mapping[int, int]) -> Fit:
    """The same with one format only for some of the weights, by row."""
    has = fit.weights.has.copy()
    for row, j in formats.items():
        has[row] = np.arange(has.shape[1]) == j
    damage, size = np.where(has, fit.weights.damage, np.inf), np.where(has, fit.weights.size, 0)
    return dataclasses.replace(fit, weights=dataclasses.replace(fit.weights, damage=damage, size=size))
