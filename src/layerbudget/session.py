"""The command that is running, as a decision sees it: what it was asked, what it loads, and where it speaks. No torch here.

``plan`` and ``apply`` ask every decision for its own request, a subclass of the requests here, and hand it a
:class:`Session`. The command line has the only one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .requests import Request, TextRequest, option, out_option, resume_option

if TYPE_CHECKING:
    from .plan import Plan


class Session(Protocol):
    """The command that is running: what it was asked, what it loads, and where it speaks."""

    request: Any  #: the decision's own :class:`~layerbudget.requests.Request`
    facts: dict[str, Any]  #: what planning learns of the model, and the command that follows depends on
    usual: dict[str, Any]  #: text and its size where none is named

    def load(self, *, data: bool = True, lean: bool = False) -> tuple[Any, Any, Any]:
        """Return model, tokenizer and calibration tokens that the request names; without ``data`` no text is read.

        If ``lean``, a large model that would be copied into another precision is streamed instead.
        """

    def configuration(self) -> Any:
        """Return the configuration of the model, of which no weights are read."""

    def written_bytes(self) -> int:
        """Return the bytes of a parameter in the checkpoint that ``apply`` writes, whatever the model computes in."""

    def load_checked(self, count: int) -> tuple[Any, Any, Any, Any]:
        """Return model, tokenizer, the tokens that decide, and ``count`` further sequences that check; None where none do."""

    def use_text_of(self, plan: Plan, *, as_drawn: bool = True) -> None:
        """Let :meth:`load` read the text that decided a plan where no other is named, by default as it was drawn then."""

    def load_apart(self, plan: Plan, checked: int, *, lean: bool = False) -> tuple[Any, Any, Any]:
        """Return model, tokenizer and the text without the ``checked`` sequences of it that checked a plan, as :meth:`load`."""

    def batch(self, model: Any = None, data: Any = None, *, most: int = 8) -> int:
        """Return the sequences per forward: what was asked for, else as many as fit into the memory."""

    def expect(self, what: str, model: Any, parts: Sequence[Any]) -> None:
        """Say what will be done, for how long and in how much memory; the clock begins."""

    def text(self, data: Any) -> str:
        """Return a text in words: ``16 samples of 256 tokens of stdlib``."""

    def on_text(self, data: Any) -> str:
        """Return the same as it follows what is done; empty without a text."""

    def size(self, data: Any) -> Any:
        """Return how much text is read, as forecasts count it."""

    def share(self, model: Any, blocks: Sequence[Any]) -> None:
        """Say which share of the weights the blocks hold, where that is not nearly all."""

    def end(
        self, plan: Plan, *sentences: str, more: Sequence[str] = (), options: Sequence[str] = (), other: str = ""
    ) -> dict[str, Any]:
        """Say what an applied plan is expected to cost and the command that measures it; return both as fields.

        Args:
            plan: The plan.
            sentences: What is said before.
            more: What is said between both.
            options: Further options of the command ``evaluate``.
            other: A command of another program in its place.
        """

    def progress(self, text: str) -> AbstractContextManager[Any]:
        """Return a context that gives a callback of progress; ``--dry-run`` ends where it is first called."""

    def say(self, *sentences: str) -> None:
        """Print sentences, one a line."""

    def announce(self, sentence: str) -> None:
        """Print on stderr what is about to run."""

    def show(self, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table."""

    def follow(self, *words: str) -> str:
        """Print the command that follows, and return it."""


@dataclasses.dataclass(kw_only=True)
class PlanRequest(TextRequest):
    """Options of every ``plan``."""

    source: str = option(metavar="MODEL|SCORES", role="reads", help="a model, or scores.json that were measured before")
    out: str | None = out_option("write the plan here (default: plan.json from a model, else it is shown)", metavar="PLAN")
    resume: str | None = resume_option()

    @property
    def model(self) -> str:
        """Name of the model that is loaded."""
        return self.source

    @property
    def measures(self) -> bool:
        """Whether the source is a model, which is measured; else it is a file of what was measured before."""
        return not self.source.endswith((".json", ".csv"))


@dataclasses.dataclass(kw_only=True)
class WriteRequest(TextRequest):
    """Options of every ``apply``."""

    command: ClassVar[str] = "apply"

    model: str = option(
        metavar="MODEL",
        role="reads",
        help="demo, a local folder, a hub id (owner/name[@revision]), or a .gguf file that gets types or loses experts",
    )
    plan: str = option(metavar="PLAN", role="reads", help="plan.json, made for this model")
    out: str = out_option("folder of the written model, or planned.gguf", metavar="DIR", default=dataclasses.MISSING)
    resume: str | None = resume_option()


@dataclasses.dataclass(kw_only=True)
class ScoresRequest(Request):
    """Options of a ``plan`` that is made from scores alone."""

    measures: ClassVar[bool] = False
    resume: ClassVar[None] = None

    source: str = option(
        metavar="SCORES",
        role="reads",
        help="scores.json; or a .csv or .json table of name, score, d_in and d_out; for rules without scores a config.json",
    )
    out: str | None = out_option("write the plan here (default: it is shown)", metavar="PLAN")
    scores: Any = dataclasses.field(default=None, repr=False)  #: What was read of the source, once it was.

    def check(self) -> None:
        """Refuse what belongs to commands that run a model."""
        super().check()
        self.refuse(("dry_run",), "scores: planning from them takes seconds")
