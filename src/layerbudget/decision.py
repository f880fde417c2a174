"""A decision: what the blocks of a model can get, as one object in one folder. No torch here.

A decision says how it is asked for, how it is made, what its plan holds beside the blocks, how a model is given it, in which
files of other tools it can be written, and what is said of it. It is registered once; the terminal, JSON, the page and the
model card read what it says of itself, and nothing outside its folder knows its name::

    class Lengths(Decision):
        name, summary, decides, counts = "lengths", "a length for every layer", "length", "tokens"

    DECISIONS.add("lengths", Lengths())

An installed package names its module in an entry point of the group ``layerbudget.decisions``; on the command line
``FILE.py:NAME`` stands in the place of a name.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from . import requests
from .errors import InvalidInput, LayerbudgetError
from .records import Receipt
from .registry import Registry, options_of, resolve_options
from .session import PlanRequest, Session, WriteRequest

if TYPE_CHECKING:
    from torch import nn

    from .data.calibration import CalibrationSet
    from .plan import Plan, PlanBlock
    from .scores import Scores


class Table(NamedTuple):
    """A table that is shown: a title, a header and rows of texts."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Sentences on a plan; the terminal, JSON, the page and the model card read this.

    Attributes:
        title: The decision in a few words, which the name of a model follows: ``50% sparsity for``.
        verdict: One sentence: what one gets, beside uniform, and what it cost to plan.
        expected: One sentence on the damage of a model that was given the plan.
        sentences: What the plan does and what it rests on.
        advice: Sentences that call for something.
        comparison: The damage beside that of other choices; None where nothing else is known.
        figures: Rows of the model card on the damage, by what they are of.
        passes: Forward equivalents that planning took; None of scores that were there before.
        advises_other: Whether the verdict ends in taking another plan, which is then said before this one is trained.
    """

    title: str
    verdict: str
    expected: str = ""
    sentences: Sequence[str] = ()
    advice: Sequence[str] = ()
    comparison: Table | None = None
    figures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    passes: float | None = None
    advises_other: bool = False


class ScoresAdvice(NamedTuple):
    """Sentences on scores that were measured for plans of one decision, before one is made."""

    words: str  #: The end of the verdict on the scores.
    command: tuple[str, ...]  #: Words of the plan that follows, behind ``plan``; the file of the scores comes second.
    only_noise: bool  #: Whether they decide nothing, so that a uniform plan follows.


class OtherBudgets(Protocol):
    """Predictions for other budgets, from the scores of a plan; its fields are shown as JSON."""

    @property
    def recommendation(self) -> str:
        """The budget to take, and why."""

    @property
    def decides(self) -> bool:
        """Whether the recommendation stands in the place of the plan's own verdict."""

    def shown(self, scores: Scores, tokens: int | None) -> tuple[Table, Sequence[str]]:
        """Return a table of the budgets and sentences below it; ``tokens`` are those that the user named."""

    def command(self, plan: Plan, path: str, scores: str) -> list[str]:
        """Return the command that follows the recommendation, of the files of plan and scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """One file of another tool that a plan can be written as."""

    name: str  #: what users write after --to
    call: Callable[..., str]  #: gives the text of a plan; its keyword-only parameters are options
    kinds: tuple[str, ...] = ()  #: names of the decisions whose plans it writes, all where it is empty
    file: str = "plan.txt"  #: name of the file where none is given
    summary: str = ""  #: a line for the help
    use: str = ""  #: how the file is used, a sentence with {file}, {word} (the same, as a word of a shell) and {options}
    options: Callable[[Plan], str] | None = None  #: options of a command that the sentence names

    def sentence(self, plan: Plan, path: object) -> str:
        """Return how the file is used."""
        options = "" if self.options is None else self.options(self._part(plan)).rstrip()
        return self.use.format(file=str(path), word=shlex.quote(str(path)), options=options).strip()

    def text(self, plan: Plan, chosen: Mapping[str, Any]) -> str:
        """Return the content of the file.

        Raises:
            InvalidInput: A kind of plan that it does not write, or an option that it does not read.
        """
        plan = self._part(plan)
        return self.call(plan, **resolve_options(f"The format {self.name}", options_of(self.call), chosen))

    def takes(self, plan: Plan) -> bool:
        """Return whether the plan can be written with no option given."""
        try:
            self.text(plan, {})
        except LayerbudgetError:
            return False
        return True

    def _part(self, plan: Plan) -> Plan:
        """The plan that is written, or its part of the kind that is."""
        parts = decision_of(plan).parts(plan)
        plan = next((part for kind, part in parts.items() if kind in self.kinds), plan)
        if self.kinds and plan.kind not in self.kinds:
            raise InvalidInput(
                f"{self.name} is no format for a plan of kind {plan.kind}.",
                f"It writes {' and '.join(self.kinds)}.",
                f"For this plan there are {', '.join(e.name for e in exports_of(plan))}.",
            )
        return plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPayload:
    """Payload of plans whose decision says nothing beside the blocks."""


class Decision:
    """One kind of decision; a subclass says what is its own, and the rest is as here."""

    name: ClassVar[str]  #: what files and users write
    summary: ClassVar[str] = ""  #: a line for the help
    decides: ClassVar[str]  #: what a block gets, in a sentence ("decides sparsity for 12 blocks")
    counts: ClassVar[str]  #: what the whole number of a block counts
    #: Whether more of it costs quality (sparsity), so that what matters gets less of it, or helps (ranks).
    harms: ClassVar[bool] = False
    whole: ClassVar[bool] = False  #: Whether a block's count is the decision (ranks), and not its value (sparsity).
    #: Whether the verdict has another damage than the comparison, which is then shown by ``--table`` only.
    told_by_verdict: ClassVar[bool] = False
    shown_in: ClassVar[str] = ""  #: The unit of :meth:`word` in a picture ("in percent").
    writes: ClassVar[bool] = False  #: Whether ``apply`` changes a model's weights by such a plan.
    predicts: ClassVar[bool] = False  #: Whether plans say the damage that they expect, in nats per token.
    #: Whether the scores that it is made from are gains, which are worth bits of code; else they are damages.
    from_gains: ClassVar[bool] = True
    swept: ClassVar[bool] = False  #: Whether plans at many budgets can be made from one measurement, see :meth:`planner`.
    command: ClassVar[str] = "export"  #: The command that such a plan is for.
    bytes_of: ClassVar[str] = ""  #: Of what its bytes are, where its budget is bytes ("the planned matrices").
    budget: ClassVar[str] = "budget"  #: Name of the budget of :meth:`planner`.
    budget_type: ClassVar[type[int] | type[float]] = float  #: Makes that budget of a number.
    asked: ClassVar[str] = "{}"  #: That budget in a sentence ("mean rank {}").
    priced: ClassVar[str] = ""  #: What :meth:`price_of` counts, in words ("adapter parameters").
    trains: ClassVar[bool] = False  #: Whether ``finetune`` trains such a plan, see :meth:`adapt`.
    #: Numbers of a training protocol that only the adapters of some decisions read, and of this one.
    protocol_options: ClassVar[tuple[str, ...]] = ()
    adapter_type: ClassVar[str] = ""  #: PEFT's name of the type of its adapters, where PEFT alone does not know it.
    merges: ClassVar[bool] = True  #: Whether what was trained can be added to the weights of a model.
    Payload: ClassVar[type] = NoPayload  #: Frozen dataclass of what only such plans say; its fields are the keys in the file.
    Settings: ClassVar[Any] = None  #: Type of those hyperparameters that applying it reads.
    Request: ClassVar[type[requests.Request]] = PlanRequest  #: All that ``plan`` can be asked.
    Write: ClassVar[type[requests.Request]] = WriteRequest  #: All that ``apply`` can be asked.
    exports: ClassVar[tuple[Export, ...]] = ()  #: Files of other tools, the usual one first.

    def check(self, plan: Plan) -> None:
        """Refuse a plan whose blocks cannot be such a decision.

        Raises:
            CorruptFile: Something in it cannot be.
        """

    def plan(self, session: Session) -> Plan:
        """Return the plan that a command asks for."""
        raise InvalidInput(f"A plan of {self.name} is made in Python.", "", f"Look for plan_{self.name} in the reference.")

    def planner(self) -> Callable[..., Plan] | None:
        """Return ``(scores, **{budget: ...}, **options) -> Plan``; None where a plan is not made from scores by one call."""
        return None

    def apply(self, model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
        """Give a model in memory what a plan says; the receipt has the model, and a cache where one is planned.

        Args:
            model: The model that the plan was made for; most decisions change it in place.
            plan: A plan of this decision.
            data: Calibration tokens, where inputs are read.
            **options: Those of the function that a decision applies its plans by.

        Raises:
            InvalidInput: Such a plan is not applied by one call.
        """
        raise InvalidInput(f"A plan of kind {self.name} cannot be applied by one call.", "", self.summary)

    def write(self, session: Session, plan: Plan) -> dict[str, Any]:
        """Apply a plan, write the model, and return what the command prints as JSON."""
        what = f"A plan of {self.name} does not change a model's weights."
        raise InvalidInput(what, "", f"It is for layerbudget {self.command}.")

    def describe(self, plan: Plan) -> Summary:
        """Return what is said of a plan; here only what it spends, and between which values."""
        low, high, budget = plan.values.min(), plan.values.max(), plan.budget
        spread = (
            f"{self.decides} from {low:.3g} to {high:.3g} over {len(plan.blocks)} blocks. Nothing was compared with uniform."
        )
        return Summary(
            title=f"A {plan.kind} plan for",
            verdict=f"{spread}. Nothing was compared with uniform."
            if low < high
            else f"every block gets {low:.4g}: this is uniform.",
            sentences=[f"The rule {plan.rule} spends {budget['spent']:g} of {budget['limit']:g} {budget['unit']}."],
        )

    def verdict_of(self, session: Session, plan: Plan) -> str:
        """Return the verdict on a plan that was just made, where what it was made from says more than the plan itself."""
        return self.describe(plan).verdict

    def show(self, session: Session, plan: Plan) -> bool:
        """Show a plan in a way of its own, and return whether that was done; else it is drawn as every plan."""
        return False

    def follow(self, session: Session, plan: Plan) -> str | None:
        """Say and return the command that follows a plan that was written; None where there is none."""
        model = str(plan.model.get("id") or "MODEL")
        if self.trains:
            return session.follow("finetune", model, session.request.out, "--data", "FILE", "-o", "DIR")
        if self.writes:
            return session.follow("apply", model, session.request.out, "-o", "DIR")
        return session.follow("export", session.request.out)

    def word(self, block: PlanBlock) -> str:
        """Return what one block gets, as a cell of a picture holds it."""
        return f"{block.count}" if self.whole else f"{block.value:.3g}"

    def labels(self, plan: Plan) -> list[str] | None:
        """Return what every block gets in words, such as its format; None where numbers say it."""
        return None

    def matrices(self, plan: Plan, scores: Scores | None = None) -> Sequence[Mapping[str, Any]]:
        """Return a row by block of what it gets and why; none where its numbers say it all.

        A row has ``name``, ``format``, ``bits`` and ``bytes``, and where it is known ``damage`` (nats per token), and
        ``smaller`` and ``larger``: the next format, each ``{format, bytes, damage}`` or None.

        Args:
            plan: The plan.
            scores: Damages that it was made from, which also give the standard ``error`` of each damage.

        Raises:
            InvalidInput: Scores of which such a plan has no use.
        """
        if scores is not None:
            raise InvalidInput(f"A plan of {self.name} needs no scores here.", "", "Leave out --scores (in Python: scores).")
        return ()

    def show_matrices(self, session: Session, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show what :meth:`matrices` returned."""
        head = ("format", "bits", "bytes")
        session.show("formats", ("block", *head), [(row["name"], *(row[name] for name in head)) for row in rows])

    def budgets(self, scores: Scores) -> Sequence[float | str]:
        """Return the budgets of a sweep where none are named.

        Raises:
            InvalidInput: There are none.
        """
        raise InvalidInput(f"A sweep of {self.name} needs budgets.", "Only sizes of mixes are known without.", "Name some.")

    def budget_option(self, budget: float | str) -> dict[str, Any]:
        """Return the keyword of :meth:`planner` that is a budget of a sweep.

        Raises:
            InvalidInput: No such budget.
        """
        if isinstance(budget, str):
            raise InvalidInput(f"The budget {budget!r} is no number.", f"Those of {self.name} are.", "Correct it.")
        return {self.budget: budget}

    def swept_row(self, plan: Plan) -> dict[str, Any]:
        """Return what the row of a plan in a sweep says beside what all rows say."""
        return {}

    def parts(self, plan: Plan) -> dict[str, Plan]:
        """Return the plans in a plan, by kind: itself alone, but for decisions that are made of others."""
        return {self.name: plan}

    def column(self, plan: Plan) -> tuple[str, Sequence[Any]] | None:
        """Return header and cells of a further column of the plan's table; None where it has none."""
        return None

    def price_of(self, session: Session, plan: Plan) -> Sequence[float] | None:
        """Return the price of one unit of every block, which the plan is shown with; see :attr:`priced`."""
        return None

    def measured_by(self, scores: Scores) -> bool:
        """Return whether scores were measured for such plans above all."""
        return False

    def on_scores(self, scores: Scores) -> ScoresAdvice | None:
        """Return what is said of scores that were measured for such plans; None where nothing is."""
        return None

    def worth_of(self, plan: Plan, scores: Scores, damping: float | None) -> dict[str, Any] | None:
        """Return ``value``, ``status`` and ``shadow_price`` of a plan in a sweep, where its scores price every unit of it.

        Further fields stand in the row as they are. None where the objective of the program is the value.
        """
        return None

    def on_sweep(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return sentences on the solved rows of a sweep."""
        return []

    def show_sweep(
        self, session: Session, rows: Sequence[Mapping[str, Any]], unsolved: Sequence[str], options: Mapping[str, Any]
    ) -> bool:
        """Show a sweep in a way of its own, and return whether that was done; else it is a row a budget.

        Args:
            session: It shows and says.
            rows: One of each budget that was solved.
            unsolved: Sentences on the others.
            options: Of the planner.
        """
        return False

    def other_budgets(self, plan: Plan, scores: Scores, tokens: int | None = None) -> OtherBudgets | None:
        """Return what the scores of a plan say of other budgets, for a training on so many ``tokens``; None where nothing."""
        return None

    # --- training, of a decision that trains ----------------------------------------------------------------------------------

    def register(self) -> None:
        """Make the type of its adapters known to PEFT."""

    def before_training(self, plan: Plan, model: Any, tokens: int | None) -> Sequence[str]:
        """Return what is to be known before a plan is trained on text with so many learned ``tokens``; None of labels."""
        return ()

    def adapt(self, model: Any, plan: Plan, protocol: Any, start: Any = None, **options: Any) -> Any:
        """Return the model with the adapters of a plan.

        Args:
            model: The plain model; its modules are those of the plan.
            plan: The plan.
            protocol: The training protocol, :class:`layerbudget.finetuning.protocol.Protocol`.
            start: Gradients of the mean loss by module and the rows that they are of, where the protocol starts from them.
            **options: Fields of the configuration of PEFT that every kind of adapter has.
        """
        raise NotImplementedError

    def callbacks(self, protocol: Any) -> Sequence[Any]:
        """Return callbacks of the Trainer that such adapters need."""
        return ()

    def before_saving(self, model: Any, protocol: Any) -> None:
        """Bring a trained model into the form in which its adapters are saved."""

    # --- the page -----------------------------------------------------------------------------------------------------------

    def on_evaluation(self, plan: Plan) -> Sequence[str]:
        """Return sentences on figures of a model in whose folder the plan lies, where they leave out what it decides."""
        return ()

    def charts(self, plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
        """Return data of the page's charts, by the chart's name.

        Args:
            plan: The plan of the page; None where there are scores alone.
            scores: The scores that it was made from, or that plans can be made from; None where there are none.
        """
        return {}

    def runs(self, pattern: str | None = None) -> str:
        """Return a paragraph on what such a model changes in file, memory and time; empty where nothing needs to be said."""
        return ""


DECISIONS: Registry[Decision] = Registry(
    "kind of plan",
    group="layerbudget.decisions",
    home=__package__,
    builtin={
        name: f".decisions.{name.replace('-', '_')}.decision:DECISION"
        for name in (
            "sparsity",
            "bits",
            "cache",
            "memory",
            "shapes",
            "expert-pruning",
            "ranks",
            "lora-experts",
            "joint",
        )
    },
)


class _Exports(Registry[Export]):
    """Every decision's formats, those of every plan, and those that others add."""

    def _load(self) -> None:
        super()._load()
        for decision in DECISIONS.all().values():
            for each in decision.exports:
                self._items.setdefault(each.name, each)


EXPORTS = _Exports("export format", group="layerbudget.exports", summaries=True)  # read it from :mod:`layerbudget.exports`


def exports_of(plan: Plan) -> list[Export]:
    """Return the formats that a plan can be written as with no option given."""
    kinds = {plan.kind, *decision_of(plan).parts(plan)}
    return [e for e in EXPORTS.all().values() if (not e.kinds or kinds & {*e.kinds}) and e.takes(plan)]


def decision_of(plan: Plan) -> Decision:
    """Return the decision that a plan is of."""
    return DECISIONS.find(plan.kind)


def check_no_text(kind: str, data: object) -> None:
    """Refuse calibration tokens where applying a plan reads none.

    Raises:
        InvalidInput: There are some.
    """
    if data is not None:
        raise InvalidInput(f"Calibration tokens were given, and a plan of kind {kind} reads none.", "", "Leave them out.")


def check_kind(kind: str, wanted: Sequence[str], what: str) -> None:
    """Refuse a plan of another kind than ``wanted``, before any work; ``what`` is as in "cannot be pruned".

    Raises:
        InvalidInput: Another kind; the message names the command that it is for.
    """
    if kind in wanted:
        return
    use = f"Use this one with layerbudget {DECISIONS.find(kind).command}, or make" if kind in DECISIONS.names() else "Make"
    raise InvalidInput(
        f"A plan of kind {kind} {what}.",
        f"That takes a plan of kind {', '.join(wanted)}.",
        f"{use} another: layerbudget plan {wanted[0]}.",
    )
