"""The price of capacity, from shapes alone: LoRA ranks and experts, budget strings. No torch.

Conventions: a multiply-add is two FLOPs; one LoRA rank of a matrix of shape ``(d_out, d_in)`` has ``d_in + d_out`` parameters
and costs ``2 (d_in + d_out)`` FLOPs per token; one LoRA expert of a block is one adapter of rank r in every matrix of it.
Attention scores, norms, embeddings and the head are not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import InvalidInput, UnknownUnit
from .records import Block
from .solvers.inputs import Vector

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
UNITS = ("experts", "ranks", "params", "bytes", "flops", "latency")
OWN_UNITS = {"lora-experts": "experts", "ranks": "ranks"}  # of a kind of plan: what it counts, each of which costs 1
_WORDS = {**{word: word for word in UNITS}, "param": "params", "parameter": "params", "parameters": "params"}
_WORDS |= {"flop": "flops", "flops/token": "flops", "expert": "experts", "rank": "ranks", "byte": "bytes"}
# "64M params", "64Mparams", "3 flops", "1.2 GiB", "0.5 ms"
_UNITS = {scale + gap + word: (_SCALES[scale], unit) for scale in _SCALES for gap in ("", " ") for word, unit in _WORDS.items()}
_UNITS |= {"b": (1.0, "bytes"), "us": (1e-6, "latency"), "ms": (1e-3, "latency"), "s": (1.0, "latency")}
_UNITS |= {f"{scale}b": (_SCALES[scale], "bytes") for scale in "kmgt"}
_UNITS |= {f"{scale}ib": (2.0 ** (10 * power), "bytes") for power, scale in enumerate("kmgt", 1)}
_TEXT = re.compile(r"\s*([-+]?[\d_.,]*\d(?:e[-+]?\d+)?)\s*(%?)\s*([a-z/]*)\s*([a-z/]*)\s*")
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|[\d_]*)(\.\d+)?(e[-+]?\d+)?")  # "1,5" may mean 1.5 or 15: it is refused
LARGEST = 1 << 53  # beyond it, whole numbers and the arithmetic of budgets part
_EXAMPLES = "'160 experts', '512 ranks', '64M params', '1.2 GiB', '400M flops', '3% flops', '3% params', '0.5 ms'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """An amount in one of ``UNITS`` (latency in seconds), or a fraction of the base model's; ``text`` as it was written."""

    amount: float
    unit: str
    relative: bool = False
    text: str = ""


def parse_budget(text: str | float | int, *, default: str = "params") -> Budget:
    """Return the budget of a text such as ``"64M params"``, ``"1.2 GiB"``, ``"-2GiB"``, ``"3% flops"``, in base units.

    A number, or a text with no unit, is in the ``default`` unit.

    >>> parse_budget("64M params").amount, parse_budget("1.5 GiB").amount, parse_budget("3% flops").relative
    (64000000.0, 1610612736.0, True)
    """
    if not isinstance(text, str):
        return Budget(amount=_checked(text, text), unit=default, text=str(text))
    match = _TEXT.fullmatch(text.lower())
    if match and _NUMBER.fullmatch(match[1]):
        amount, percent, words = float(re.sub("[_,]", "", match[1])), match[2], f"{match[3]} {match[4]}".strip()
        if percent:
            scale, unit = 0.01, _WORDS.get(words or default)
        elif words in _SCALES and not (words == "b" and default == "bytes"):
            scale, unit = _SCALES[words], default
        else:
            scale, unit = _UNITS.get(words, (0.0, None))
        if unit is not None:
            amount = amount / 100.0 if percent else amount * scale
            return Budget(amount=_checked(amount, text), unit=unit, relative=bool(percent), text=text)
    raise UnknownUnit(
        f"The budget {text!r} is in no known unit.", f"Known units: {', '.join(UNITS)}.", f"Write it like {_EXAMPLES}."
    )


def _checked(amount: float, text: str | float) -> float:
    """Return an amount, refused where it is not finite, or so large that single units are not counted any more."""
    if math.isnan(amount):
        raise InvalidInput(f"An amount of {text} is no number.", "It is a finite number.", "Correct it.")
    if not abs(amount) <= LARGEST:
        raise InvalidInput(
            f"An amount of {text} is too large to be counted.", f"It is at most {LARGEST:,}, in units of one.", "Correct it."
        )
    return float(amount)


def rank_parameters(blocks: Sequence[Block]) -> Vector:
    """Return the parameters of one LoRA rank in every matrix of a block, ``sum (d_in + d_out)``, shape ``(K,)``."""
    return np.array([sum((m.d_in + m.d_out) * m.copies for m in b.modules) for b in blocks], dtype=np.float64)


def unit_cost(
    blocks: Sequence[Block],
    unit: str,
    *,
    capacity: str = "ranks",
    expert_rank: int = 8,
    bytes_per_parameter: float = 2.0,
    latency: Mapping[str, float] | None = None,
) -> Vector:
    """Return the price of one unit of capacity per block, in the unit, shape ``(K,)``.

    In its own unit, ``experts`` or ``ranks``, every block costs 1.

    Args:
        blocks: What is priced.
        unit: ``params``, ``bytes``, ``flops``, ``latency``, or the unit of the capacity itself.
        capacity: The kind of plan, ``ranks`` or ``lora-experts``.
        expert_rank: Rank of one expert.
        bytes_per_parameter: 2 by default (bf16).
        latency: Seconds per unit of capacity, by block name.

    >>> from layerbudget.records import Block, Module
    >>> block = Block(name="q", modules=(Module(name="q", d_in=4096, d_out=4096),))
    >>> unit_cost([block], "flops", capacity="lora-experts").tolist()
    [131072.0]
    """
    size, capacity_unit = expert_rank if capacity == "lora-experts" else 1, OWN_UNITS[capacity]
    if unit == capacity_unit:
        return np.ones(len(blocks))
    if unit in ("params", "bytes"):
        return rank_parameters(blocks) * size * (bytes_per_parameter if unit == "bytes" else 1.0)
    if unit == "flops":
        ranks = [sum(2 * (m.d_in + m.d_out) * m.active for m in b.modules) for b in blocks]
        return np.array(ranks, dtype=np.float64) * size
    if unit != "latency":
        raise UnknownUnit(
            f"{capacity_unit} are not priced in {unit!r}.",
            f"Units: {capacity_unit}, params, bytes, flops, latency.",
            f"Write the budget like {_EXAMPLES}.",
        )
    known = latency or {}
    if missing := [b.name for b in blocks if b.name not in known]:
        raise UnknownUnit(
            f"{len(missing)} blocks have no latency ({', '.join(missing[:3])}, ...).",
            "A latency budget needs seconds per unit of capacity for every block.",
            "Give latency={block name: seconds}, or use params, bytes or flops.",
        )
    return np.array([float(known[b.name]) for b in blocks])


def base_amount(blocks: Sequence[Block], unit: str, *, bytes_per_parameter: float = 2.0) -> float:
    """Return what the base model's blocks themselves amount to: parameters, bytes, or FLOPs per token."""
    if unit in ("params", "bytes"):
        return float(sum(b.numel for b in blocks)) * (bytes_per_parameter if unit == "bytes" else 1.0)
    if unit == "flops":
        return float(sum(b.flops_per_token for b in blocks))
    raise UnknownUnit(
        f"A percentage of {unit} has no meaning.", "Percentages: params, bytes, flops.", "Write '3% flops', or an amount."
    )


def amount_of(budget: Budget, blocks: Sequence[Block], **options: Any) -> float:
    """Return a budget as an absolute amount for these blocks."""
    return budget.amount * base_amount(blocks, budget.unit, **options) if budget.relative else budget.amount


def parse_bytes(text: str | float, what: str, example: str) -> int:
    """Return bytes that a user wrote, such as ``"1.2 GiB"``.

    Raises:
        UnknownUnit: Another unit than bytes, or a share.
    """
    with contextlib.suppress(UnknownUnit):
        wanted = parse_budget(text, default="bytes")
        if wanted.unit == "bytes" and not wanted.relative:
            return int(wanted.amount)
    units = "Units: bytes, kB, MB, GB, TB, KiB, MiB, GiB, TiB."
    raise UnknownUnit(f"{what} of {text} is not in bytes.", units, f"Write '{example}'.")


def unit_of(size: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit in which such a memory is read.

    >>> unit_of(8 << 30), unit_of(24 << 20)
    ((1073741824, 'GiB'), (1048576, 'MiB'))
    """
    return (1 << 30, "GiB") if size >= 1 << 30 else (1 << 20, "MiB")


def rounded_up(size: float) -> str:
    """Return a size in two decimals, never less than it.

    >>> rounded_up(1.231), rounded_up(8.0)
    ('1.24', '8.00')
    """
    return f"{math.ceil(100 * size) / 100:.2f}"
