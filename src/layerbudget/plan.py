"""The plan: a decision keyed by module name, with its budget, its certificate and its provenance. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
import numpy as np
from typing_extensions import Self

from .canonical import to_jsonable
from .decision import DECISIONS
from .errors import CorruptFile, InvalidInput, ModelMismatch, NotFound
from .frozen import fields_in_file, freeze_fields
from .records import Block, BlockRecord
from .storage import reading
from .storage.schemas import Certificate, PlanBudget
from .storage.writing import new_file

if TYPE_CHECKING:
    from .scores import Scores

P = TypeVar("P")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanBlock:
    """Share of one block."""

    name: reading.Name  #: Block name as in the model (``model.layers.3`` or a Linear's full name).
    value: float  #: Sparsity in [0, 1], or the continuous number of experts or ranks.
    count: reading.Count  #: Pruned parameters (sparsity), experts, or rank of every module of the block.
    numel: reading.Count  #: Prunable parameters of the block.
    modules: tuple[reading.Name, ...]  #: Full names of the weight matrices of the block, which applying the plan touches.

    @classmethod
    def of(cls, block: Block, value: float, count: int) -> PlanBlock:
        """Return what a block of a model gets."""
        names = tuple(m.name for m in block.modules)
        return cls(name=block.name, value=float(value), count=int(count), numel=block.numel, modules=names)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return dict(self.__dict__)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan(BlockRecord):
    """A decision for every block. It cannot be changed, and ``plan[name]`` is what a block gets."""

    what: ClassVar[str] = "plan"
    aside: ClassVar[tuple[str, ...]] = (*BlockRecord.aside, "data")
    keys: ClassVar[Mapping[str, str]] = {"payload": "extra"}

    kind: str  #: ``sparsity``, ``bits``, ``ranks``, ... (:mod:`layerbudget.decision`).
    rule: str  #: Name of the rule that made it (``mdl``, ``uniform``, ``owl``, ...).
    model: Mapping[str, Any]  #: ``{id, revision, digest}`` of the model that it belongs to.
    blocks: tuple[PlanBlock, ...]  #: What each block gets, in natural order.
    #: ``{unit, limit, spent}`` of what is decided. A plan of bits also has the bytes of all ``tensors`` of the file that it
    #: makes, and those of the whole ``file`` where they are known exactly.
    budget: Mapping[str, Any]
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)  #: Everything that the rule was given.
    #: ``{status, multiplier, gap, kkt_residual, inert[], ...}``; empty for rules without a program.
    certificate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scores_digest: str | None = None  #: Content hash of the scores file, null for rules that use none.
    #: The ``Payload`` of the decision. It has what only its plans say, and is ``extra`` in the file. See :func:`payload_of`.
    payload: Any = None
    #: ``{source, samples, length, digest, seed}`` of the text that decided; empty where no text did.
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    made_by: str = ""  #: The command that made it; empty where Python did.

    def __post_init__(self) -> None:
        payload = DECISIONS.find(self.kind).Payload
        if self.payload is None and not any(_is_required(field) for field in dataclasses.fields(payload)):
            object.__setattr__(self, "payload", payload())
        if not isinstance(self.payload, payload):
            what = f"A plan of kind {self.kind} was given {'nothing' if self.payload is None else type(self.payload).__name__}."
            raise InvalidInput(what, f"Its payload is a {payload.__name__}.", "Make one, and give it as payload.")
        object.__setattr__(self, "payload", freeze_fields(self.payload))
        super().__post_init__()

    @property
    def values(self) -> np.ndarray:
        """The decision as a vector, shape ``(K,)``."""
        return self._column("value", np.float64)

    @property
    def counts(self) -> np.ndarray:
        """The integer decision as a vector, shape ``(K,)``."""
        return self._column("count", np.int64)

    @property
    def pruner(self) -> tuple[str | None, dict[str, Any]]:
        """Method and options of the pruner whose damage decided a plan of sparsities; None where no pruner was measured."""
        if self.kind != "sparsity" or "method" not in self.hyperparameters:
            return None, {}
        return str(self.hyperparameters["method"]), dict(
            self.hyperparameters.get("own") or getattr(self.payload, "own", None) or {}
        )

    @property
    def sparsity(self) -> float:
        """Pruned parameters over prunable parameters (sparsity plans)."""
        return int(self.counts.sum()) / int(self.numel.sum())

    def with_payload(self, **changes: Any) -> Self:
        """Return the plan with other values of some fields of its payload."""
        return dataclasses.replace(self, payload=dataclasses.replace(self.payload, **changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        record = super().to_dict()
        return {**record, "extra": to_jsonable(fields_in_file(self.payload))}

    @property
    def rows(self) -> RowGroups | None:
        """Zeros of every group of rows, where the plan decides groups of rows; ``count`` is then the sum of a matrix.

        Raises:
            NotFound: Only the JSON of such a plan was read, not the file of its counts.
        """
        rows: Any = getattr(self.payload, "rows", None)
        if isinstance(rows, Mapping):
            raise NotFound("The plan decides groups of rows, and their counts are not at hand.", "", "Use Plan.load(path).")
        return rows  # type: ignore[no-any-return]

    def __getitem__(self, name: str) -> PlanBlock:
        return self.blocks[self.index_of(name)]

    def _shown(self) -> tuple[str, list[str]]:
        spent, limit, unit = (self.budget.get(name) for name in ("spent", "limit", "unit"))
        title = f"Plan of {self.kind}, rule {self.rule}: {len(self)} blocks, {spent:,.10g} of {limit:,.10g} {unit}"
        return title, [f"{b.value:.4g}" for b in self.blocks]

    def to_pandas(self) -> Any:
        """Return a data frame with a row per block: value, count and parameters (needs pandas)."""
        return self._frame(value=self.values, count=self.counts, numel=self.numel)

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write the file, atomically, and the counts of its groups of rows beside it; errors as of :meth:`Record.save`."""
        rows = self.rows
        written = super().save(path, overwrite=overwrite)
        if rows is not None:
            rows.save(path)
        return written

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the file, and the counts of its groups of rows; errors as of :meth:`Record.load`."""
        plan = super().load(path)
        record = getattr(plan.payload, "rows", None)
        return plan if record is None else plan.with_payload(rows=RowGroups.load(path, record))

    @classmethod
    def _from_file(cls, stored: Any) -> Self:
        payload = DECISIONS.find(stored.kind).Payload
        reading.check_loose(stored.payload, cls.what, "extra")
        try:
            typed = reading.converted_whole(stored.payload or {}, payload)
        except ValueError as error:
            raise _unreadable("extra", error) from error
        return super()._from_file(msgspec.structs.replace(stored, payload=typed))

    def by_module(self) -> dict[str, PlanBlock]:
        """Map every module's full name to its block's decision."""
        return {m: b for b in self.blocks for m in b.modules}

    def validate(self, model: Mapping[str, Any]) -> None:
        """Refuse a model, by what :func:`layerbudget.models.blocks.describe` says of it, that the plan was not made for.

        Where one of the two is quantised, skeletons are compared: a plan made in bfloat16 serves the model in 4 bits and back.

        Raises:
            ModelMismatch: The content digests differ.
        """
        key = "skeleton" if self.model.get("quantised") or model.get("quantised") else "digest"
        mine, theirs = self.model.get(key), model.get(key)
        if mine and theirs and mine != theirs:
            feasible = "Names, shapes and weights must be the same."
            remedy = "Score this model and plan again, or use the model that the plan names."
            if key == "digest" and any(model.get(name) and self.model.get(name) == model[name] for name in ("id", "skeleton")):
                feasible += " Another precision rounds the weights."
                remedy = (
                    "If these weights were changed since, score this model and plan again. If they are the same weights in "
                )
                remedy += "another precision, give the --dtype (dtype= in Python) that the scores were made with."
            raise ModelMismatch(
                f"The plan was made for {self.model.get('id')} ({mine}); this model is {model.get('id')} ({theirs}).",
                feasible,
                remedy,
            )

    def check_scores(self, scores: Scores) -> None:
        """Refuse scores, or damages, that the plan was not made from.

        Raises:
            ModelMismatch: Other blocks, or another content.
        """
        if scores.names != self.names or self.scores_digest not in (None, scores.digest):
            what = "The plan was made from other scores."
            raise ModelMismatch(what, f"Its scores have the digest {self.scores_digest}.", "Name that file.")

    def _check(self) -> None:
        super()._check()
        decision = DECISIONS.find(self.kind)
        shapes: dict[str, tuple[Any, Any]] = {"budget": (PlanBudget, reading.converted_whole)}
        if self.certificate:  # a program may say more of its solution, and a rule has options of its own
            shapes["certificate"] = (Certificate, reading.converted)
        if decision.Settings is not None:
            shapes["hyperparameters"] = (decision.Settings, reading.converted)
        for name, (shape, convert) in shapes.items():
            try:
                convert(getattr(self, name), shape)
            except ValueError as error:
                raise _unreadable(name, error) from error
        decision.check(self)


def _unreadable(name: str, error: ValueError) -> CorruptFile:
    return CorruptFile(f"The part {name} of this plan does not read: {error}.", "", "Mend it, or make the plan again.")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def payload_of(plan: Plan, kind: type[P]) -> P:
    """Return what only plans of a decision say; the plan is of that decision.

    Raises:
        InvalidInput: It is of another one.
    """
    if not isinstance(plan.payload, kind):
        raise InvalidInput(f"A plan of kind {plan.kind} has no {kind.__name__}.", "", "Use a plan of the other kind.")
    return plan.payload


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowGroups:
    """Pruned entries per group of rows: the part of a plan that is too large for its JSON file, which holds its digest."""

    size: int  #: Rows of a group; the last group of a matrix may be smaller.
    counts: Mapping[str, np.ndarray]  #: By full name of the matrix, shape ``(groups,)`` each, int64.

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidInput(f"A group has {self.size} rows.", "It has at least one.", "Use rows:1 or more.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowGroups) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """Content hash of size, names and counts."""
        h = hashlib.sha256(f"{self.size}".encode())
        for name in sorted(self.counts):
            h.update(name.encode() + b"\0" + np.ascontiguousarray(self.counts[name], dtype="<i8").tobytes())
        return h.hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return what the plan's JSON says."""
        return {"size": self.size, "groups": sum(len(c) for c in self.counts.values()), "digest": self.digest}

    def save(self, plan: Path | str) -> Path:
        """Write the counts beside a plan's file, atomically."""
        from safetensors.numpy import save_file

        path = row_groups_file(plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path.parent, path.name, lambda _: path) as temporary:
            save_file({n: np.ascontiguousarray(c, dtype=np.int64) for n, c in self.counts.items()}, temporary)
        return path

    @classmethod
    def load(cls, plan: Path | str, record: Mapping[str, Any]) -> RowGroups:
        """Read the counts beside a plan's file.

        Raises:
            NotFound: They are not there.
            CorruptFile: They are not those that the plan means.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = row_groups_file(plan)
        if not path.is_file():
            raise NotFound(f"{plan} decides groups of rows and {path} is missing.", "", "Copy both files, or plan again.")
        try:
            groups = cls(size=int(record["size"]), counts=load_file(path))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CorruptFile(f"{path} holds no counts ({error}).", "", "Plan again.") from error
        if groups.digest != record.get("digest"):
            raise CorruptFile(
                f"{path} holds other counts ({groups.digest}) than {plan} means ({record.get('digest')}).",
                "",
                "Copy the two files that were written together, or plan again.",
            )
        return groups


def row_groups_file(plan: Path | str) -> Path:
    """Return where the counts of a plan's file lie: ``plan.rows.safetensors`` for ``plan.json``."""
    return Path(plan).with_suffix(".rows.safetensors")


def members(rows: int, size: int) -> np.ndarray:
    """Return the rows of every group of a matrix.

    >>> members(10, 4).tolist()
    [4, 4, 2]
    """
    sizes = np.full(-(-rows // size), size, dtype=np.int64)
    sizes[-1] = rows - size * (sizes.size - 1)
    return sizes
