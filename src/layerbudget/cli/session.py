"""The command that is running: what was asked, what is loaded for it, and where it speaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.files import is_local, parts_of
from ..decisions.files import text_of_plan
from ..errors import BadModel, InvalidInput
from ..plan import Plan
from .display import Display, ending, named_text

#: What a default text costs: SmolLM2 in 3 bits, benchmarks/results/texts.md.
ON_DEFAULT_TEXT = (
    "Nothing names a text, so code of Python's standard library decides. On prose, 3-bit rounding of SmolLM2 that it decided "
    "lost 36 to 44 % more than rounding that prose decided. Give text that the model is for: --data."
)


class Session(Display):
    """One command: its request, what is loaded for it, and how every command ends.

    Attributes:
        facts: What planning learns of the model, and the command that follows depends on.
        usual: Text and its size where none is named; a plan's own text may stand there.
    """

    def __init__(self, request: Any) -> None:
        super().__init__(request)
        self.facts: dict[str, Any] = {}
        self.usual: dict[str, Any] = dict(getattr(request, "usual", {}))

    # --- what is loaded ------------------------------------------------------------------------------------------------------

    def load_model(self, **options: Any) -> Any:
        """Return the model that the request names, in the precision and place that it names."""
        from ..models import loading
        from ..models.machine import keep_freed, quick_products

        keep_freed()
        name, revision = split_revision(self.request.model)
        place = {n: getattr(self.request, n, None) or "auto" for n in ("dtype", "device")}
        if place["dtype"] == "auto" and self.verb != "apply":  # what is written stays in the precision of the checkpoint
            place["dtype"] = "quick"
        stored = {"stream": getattr(self.request, "stream", None), "four_bit": getattr(self.request, "four_bit", False)}
        model = loading.load_model(name, revision=revision, **{**place, **stored, **options})
        if next(model.parameters()).device.type == "cpu":
            quick_products()
        return model

    def configuration(self) -> Any:
        """Return the configuration of the model, of which no weights are read."""
        from ..models.loading import read_configuration

        return read_configuration(*split_revision(self.request.model))

    def load_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        from ..models import loading

        name, revision = split_revision(self.request.model)
        return loading.load_tokenizer(name, revision=revision)

    def written_bytes(self) -> int:
        """Return the bytes of a parameter in the checkpoint that ``apply`` writes, whatever the model computes in."""
        from ..models import loading
        from ..models.precision import held_dtype

        name, revision = split_revision(self.request.model)
        checkpoint = loading.find_checkpoint(name, revision=revision, device="cpu", four_bit=False)
        return held_dtype(checkpoint.config).itemsize

    def load(self, *, data: bool = True, lean: bool = False, **options: Any) -> tuple[Any, Any, Any]:
        """Return model, tokenizer and calibration tokens that the request names.

        What was not given is filled in, so that the command that repeats this one names it. Without ``data`` no text is read,
        and a tokenizer that the model does not have is None. If ``lean``, see :func:`~layerbudget.models.loading.load_model`.
        """
        from ..data.text import calibration

        try:
            tokenizer = self.load_tokenizer()
        except BadModel:
            if data:
                raise
            tokenizer = None
        if not data:
            return self.load_model(lean=lean, **options), tokenizer, None
        request: Any = self.request
        wanted = {**self.usual, **request.given(*self.usual)}
        if request.data is None and wanted["data"] == "stdlib" and request.model != "demo":
            self.announce(ON_DEFAULT_TEXT)
        for name, value in wanted.items():
            setattr(request, name, value)
        tokens = calibration(wanted.pop("data"), tokenizer, **wanted)
        return self.load_model(lean=lean, **options), tokenizer, tokens

    def load_checked(self, count: int) -> tuple[Any, Any, Any, Any]:
        """Return model, tokenizer, the tokens that decide, and ``count`` further sequences that check; None where none do.

        A large model whose layers run one at a time is streamed, so that no copy of it in float32 is made.
        """
        from ..execution.loss import unlabelled
        from ..execution.replay import unwalkable
        from ..models.offload import converting

        if count < 0:
            raise InvalidInput(f"check is {count}.", "It is a number of sequences; 0 checks nothing.", "Leave it out.")
        request: Any = self.request
        samples = self.usual["samples"] if request.samples is None else request.samples
        request.samples, request.dtype = samples + count, request.dtype or "float32"  # damages are below bfloat16's noise
        model, tokenizer, text = self.load(lean=True)
        if request.stream is None and converting(model) and unwalkable(model, (), list(unlabelled(model, text, 1))):
            model = self.load_model(stream=False)
        request.samples = samples  # the command that repeats this one adds those of the check again
        left = min(count, max(2, text.samples // 3))  # of a short text: what decides comes first
        decides = max(1, min(samples, text.samples - left))
        check = text.select(slice(decides, None)) if decides < text.samples else None
        return model, tokenizer, text.select(slice(0, decides)), check

    def batch(self, model: Any = None, data: Any = None, *, most: int = 8) -> int:
        """Return the sequences per forward: what was asked for, else at most ``most``, as many as fit into the memory."""
        if self.request.batch_size is not None:
            return int(self.request.batch_size)
        if model is None or data is None:
            return most
        from ..execution.memory import fitting
        from ..execution.processes import broadcast

        return broadcast(lambda: fitting(model, data.length, most))

    def use_text_of(self, plan: Plan, *, as_drawn: bool = True) -> None:
        """Let :meth:`load` read the text that decided a plan where no other is named.

        Args:
            plan: The plan.
            as_drawn: As much of it, cut and drawn alike; else so only where the scores of the plan do not matter.
        """
        request: Any = self.request
        made, usual = text_of_plan(plan), self.usual["data"]
        name = made.pop("data", usual)
        gone = [part for part in parts_of(name) if is_local(part) and not Path(part).expanduser().exists()]
        gone += [name] if name.startswith("own te") else []
        if gone and request.data is None:
            lost = "which is not here" if gone == [name] else f"of which {', '.join(gone)} cannot be read here"
            self.announce(f"The plan was made on {name}, {lost}: {usual} is read. --data names a text.")
            return
        self.usual |= {**(made if as_drawn else {}), "data": name}

    def load_apart(self, plan: Plan, checked: int, *, lean: bool = False) -> tuple[Any, Any, Any]:
        """Return model, tokenizer and the text without the ``checked`` sequences of it that checked a plan, as :meth:`load`."""
        request, made = self.request, text_of_plan(plan)
        asked = {**self.usual, **request.given(*self.usual)}
        if not checked or asked["data"] != made.get("data"):
            return self.load(lean=lean)
        if any(asked[name] != made.get(name) for name in ("length", "seed")):
            cut = "The text is cut otherwise than for the plan"
            self.announce(f"{cut}: parts of the {checked} sequences that checked it may be read.")
            return self.load(lean=lean)
        first, wanted = made["samples"], asked["samples"]
        if wanted <= first:
            return self.load(lean=lean)
        request.samples = wanted + checked
        model, tokenizer, data = self.load(lean=lean)
        request.samples = wanted
        data = data.select([i for i in range(data.samples) if not first <= i < first + checked])
        self.announce(f"The {checked} sequences that checked the plan are left out: {data.samples} are read.")
        return model, tokenizer, data

    # --- what is said --------------------------------------------------------------------------------------------------------

    def text(self, data: Any) -> str:
        """Return a text in words: ``16 samples of 256 tokens of stdlib``."""
        return f"{data.samples} samples of {data.length} tokens of {named_text(data.source)}"

    def on_text(self, data: Any) -> str:
        """Return the same as it follows what is done; empty without a text."""
        return "" if data is None else f" on {self.text(data)}"

    def size(self, data: Any) -> Any:
        """Return how much text is read, as :mod:`layerbudget.cost` counts it: one token of none."""
        from ..cost.sizes import Text

        if data is None:
            return Text(samples=1, length=1, batch=1)
        return Text(samples=data.samples, length=data.length, batch=min(self.batch(), data.samples))

    def end(
        self, plan: Plan, *sentences: str, more: Sequence[str] = (), options: Sequence[str] = (), other: str = ""
    ) -> dict[str, Any]:
        """See :meth:`layerbudget.session.Session.end`."""
        from ..reporting.verdict import expected as expected_of

        request: Any = self.request
        expected = expected_of(plan)
        self.say(*sentences, expected, *more)
        if other:
            self.say(f"Next: {other}")
            return ending(expected, other)
        name = request.data or text_of_plan(plan).get("data", "stdlib")
        text = [] if name == "stdlib" else ["--perplexity", "TEXT"]
        return ending(expected, self.follow("evaluate", request.out, "--against", request.model, *options, *text))


def split_revision(name: str) -> tuple[str, str | None]:
    """Return a model's name and its revision: ``owner/name@revision``, or a folder.

    >>> split_revision("owner/name@v2"), split_revision("demo")
    (('owner/name', 'v2'), ('demo', None))
    """
    where, at, revision = name.rpartition("@")
    return (where, revision) if at and "/" in where and not Path(name).exists() else (name, None)
