"""Smaller models in a fit: what their making costs, the bytes of what is left, and their plans in a plan. No torch.

There are two makers. With *fewer experts* every layer keeps the same number, because a GGUF file and a configuration have one
number for all layers. For every such number there is a table of bytes: fewer copies of the experts' matrices, and fewer rows of
the routers. Rounding is taken to cost what it costs with all experts: a token passes as many of them, in the same types.

With *smaller shapes* (heads and widths of the MLPs) there are whole scores of every model that was cut: its matrices and its
cache have bytes and damages of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ...errors import InvalidInput
from ...plan import Plan, PlanBlock
from ...records import Block
from ...scores import Scores
from ...verdicts import nats
from ..bits.table import Table

_TOLD = ("predicted", "predicted_error", "measured", "measured_error", "measured_here")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Way:
    """One way in which a model may be smaller, or all of it.

    Attributes:
        held: What was measured of all ways, by :mod:`layerbudget.decisions.fit.removal` or ``cutting``.
        place: Which of them this is; the first is the whole model.
    """

    held: Mapping[str, Any]
    place: int

    name: ClassVar[str]  #: of the setting that asks for it, and of its records
    ways: ClassVar[str]  #: words for what was tried
    rows: ClassVar[str]  #: where ``held`` lists them

    @property
    def own(self) -> Mapping[str, Any]:
        """The measured row of this number of experts or set of shapes."""
        row: Mapping[str, Any] = self.held[self.rows][self.place]
        return row

    def block(self, like: Table) -> Table:
        """Return its own damage as a table of one block without matrices, beside a table of formats."""
        return dataclasses.replace(
            like,
            blocks=(Block(name=self.name, modules=()),),
            formats=("as decided",),
            size=np.zeros((1, 1), dtype=np.int64),
            damage=np.array([[self.own["measured"]]]),
            error=np.array([[self.own["measured_error"]]]),
            rest=np.zeros((1, 1, like.rest.shape[-1])),
            fixed=0,
            stored=(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fewer(_Way):
    """One number of experts that all layers keep."""

    name, ways, rows = "experts", "numbers of experts", "numbers"

    @property
    def part(self) -> int:
        """How many stay in every layer."""
        return int(self.own["left"])

    @property
    def experts(self) -> int:
        """How many a layer had."""
        return int(self.held["numbers"][0]["left"])

    @property
    def modules(self) -> set[str]:
        """Full names of the experts' matrices."""
        return {name for layer in self.held["layers"] for name in layer["modules"]}

    def table(self, scores: Scores) -> tuple[Table, Mapping[str, Any]]:
        """Return the table of a model with fewer experts, in the formats and with the damages of the one with all."""
        own, modules, table = self.own, self.modules, Table.of(scores)

        def cut(block: Block) -> Block:
            left = (dataclasses.replace(m, copies=self.part) if m.name in modules else m for m in block.modules)
            return dataclasses.replace(block, modules=tuple(left))

        llama = None if table.llama is None else dataclasses.replace(table.llama, experts=self.part)
        size = np.where(table.has, np.array(own["size"], dtype=np.int64), 0)
        blocks = tuple(cut(b) for b in table.blocks)
        table = dataclasses.replace(table, blocks=blocks, size=size, fixed=own["fixed"], head=own["head"], llama=llama)
        return table, scores.extra["cache"]

    def record(self, weights: Table, chosen: np.ndarray, whole: Table) -> dict[str, Any]:
        """Return what a plan says of its experts; ``bytes`` are those of blocks of experts alone, in a choice of formats."""
        inside = [i for i, b in enumerate(weights.blocks) if {m.name for m in b.modules} <= self.modules]
        numbers = [row["left"] for row in self.held["numbers"]]
        forecast = [
            {"keep": row["left"] / self.experts, "experts": row["left"] * len(self.held["layers"])}
            | {name: row[name] for name in _TOLD[:4]}
            for row in self.held["numbers"][1:]
        ]
        return {
            "left": self.part,
            "of": self.experts,
            "numbers": numbers,
            "bytes": int(weights.size[inside, chosen[inside]].sum()),
            "kept": self.own["kept"],
            "layers": self.held["layers"],
            "crossed": self.held["crossed"],
            "forward_passes": self.held["passes"],
            "forecast": forecast,
            **{name: self.own[name] for name in _TOLD},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaped(_Way):
    """One set of heads and MLP widths."""

    name, ways, rows = "shapes", "sets of shapes", "candidates"

    @property
    def part(self) -> float:
        """The share of the layers' FLOPs that stays."""
        return float(self.own["share"])

    @property
    def plan(self) -> Plan | None:
        """The plan of these shapes; None of the whole model's."""
        return Plan.from_dict(self.own["plan"]) if self.place else None

    def table(self, scores: Scores) -> tuple[Table, Mapping[str, Any]]:
        """Return the table of the model that was cut, with what was measured of it and of its cache."""
        scores = Scores.from_dict(self.own["scores"]) if self.place else scores
        return Table.of(scores), scores.extra["cache"]

    def record(self, weights: Table, chosen: np.ndarray, whole: Table) -> dict[str, Any]:
        """Return what a plan says of its shapes; in the same formats all of them would take ``spared`` bytes more."""
        formats = [weights.formats[j] for j in chosen]
        held = [(i, whole.formats.index(f)) for i, f in enumerate(formats) if f in whole.formats]
        spared = sum(int(whole.size[i, j] - weights.size[i, chosen[i]]) for i, j in held if whole.has[i, j])
        return {
            "share": self.part,
            "tried": [row["share"] for row in self.held["candidates"]],
            "spared": spared,
            "plan": self.own.get("plan"),
            "crossed": self.held["crossed"],
            "samples": self.held["samples"],
            "forward_passes": self.held["passes"],
            **{name: self.own[name] for name in ("sizes", "measured", "measured_error")},
        }


Smaller = Fewer | Shaped
_MAKERS: Mapping[str, type[Fewer] | type[Shaped]] = {maker.name: maker for maker in (Fewer, Shaped)}
ALL = {name: f"all-{name}" for name in _MAKERS}  # rules: the best plan with all of them


def smaller_of(scores: Scores, name: str) -> list[Smaller]:
    """Return the ways to be smaller that were measured, the whole model first.

    Raises:
        InvalidInput: Nothing was measured of them.
    """
    held, maker = scores.extra.get(name), _MAKERS[name]
    if not isinstance(held, Mapping):
        what = f"These scores say nothing of {'fewer' if name == 'experts' else 'smaller'} {name}."
        raise InvalidInput(what, "", f"Measure them: layerbudget plan fit MODEL --set {name}=true --save-scores FILE.")
    return [maker(held=held, place=i) for i in range(len(held[maker.rows]))]


def plans_of(plan: Plan) -> list[Plan]:
    """Return the plan of the experts, or of the shapes, that stay in a fit, as if it had been made alone; none where all do."""
    if (e := plan.extra.get("experts")) and e["left"] < e["of"]:
        return [_plan_of_experts(plan)]
    if (e := plan.extra.get("shapes")) and e["plan"]:
        return [dataclasses.replace(Plan.from_dict(e["plan"]), made_by=plan.made_by)]
    return []


def _plan_of_experts(plan: Plan) -> Plan:
    e = plan.extra["experts"]
    left, of, count = e["left"], e["of"], len(e["layers"])
    own = ("kept", "crossed", "forward_passes", "forecast", *_TOLD)
    blocks = (
        PlanBlock(name=o["name"], value=left / of, count=left, numel=of * o["numel"], modules=tuple(o["modules"]))
        for o in e["layers"]
    )
    return Plan(
        kind="kept-experts",
        rule="directional",
        model=plan.model,
        blocks=tuple(blocks),
        budget={"unit": "experts", "limit": left * count, "spent": left * count},
        hyperparameters={"even": True, "fit": True},
        extra={name: e[name] for name in own},
        made_by=plan.made_by,
    )


def sentences(plan: Plan) -> list[str]:
    """A sentence on the experts or shapes of a fit; none where they were not asked for."""
    if e := plan.extra.get("experts"):
        numbers: Sequence[int] = e["numbers"]
        tried = f"{len(numbers)} numbers from {min(numbers)} to {max(numbers)} were tried"
        held = f", in {e['bytes']:,} of the bytes of the weights" if e["bytes"] else ""
        if e["left"] == e["of"]:
            return [f"Experts: all {e['of']} stay in every layer{held} ({tried})."]
        return [f"Experts: {e['left']} of {e['of']} stay in every layer{held} ({tried}). The removal of the others {_cost(e)}."]
    if not (e := plan.extra.get("shapes")):
        return []
    least = 1 - min(e["tried"])
    tried = f"{len(e['tried'])} sets of shapes were tried, with up to {least:.1%} fewer FLOPs; {e['forward_passes']:.0f} passes"
    sizes = ", ".join(f"{_range(now)}{_of(now, before)} {name}" for name, (before, now) in e["sizes"].items())
    if not e["plan"]:
        return [f"Shapes: all stay, {sizes} ({tried})."]
    return [
        f"Shapes: {sizes} stay in a layer; {1 - e['share']:.1%} of the layers' FLOPs go, and with them {e['spared']:,} bytes "
        f"of weights in these formats ({tried}). The cut {_cost(e)}."
    ]


def of_rule(plan: Plan, rule: str) -> str:
    """Words on what stays in the plan of another rule, to follow its name; empty where all does."""
    e, part = plan.extra, (plan.extra.get("smaller") or {}).get(rule)
    if part is None or rule == plan.rule:
        return ""
    return f" with {part} of {e['experts']['of']} experts" if "experts" in e else f" with {part:.1%} of the FLOPs"


def _cost(e: Mapping[str, Any]) -> str:
    where = "text that did not choose them" if e["crossed"] else "the text that chose them"
    return f"costs {nats(e['measured'], e['measured_error'], '.2g')}, measured on {where}"


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low}" if low == high else f"{low} to {high}"


def _of(now: Sequence[int], before: Sequence[int]) -> str:
    return "" if now == before else f" of {_range(before)}"
