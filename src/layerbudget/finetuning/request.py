"""Options of ``finetune``: the numbers of a training protocol, and what is trained on what. No torch."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, ClassVar

from ..errors import InvalidInput
from ..requests import ADVANCED, PLACE, Request, option, out_option, resume_option
from .protocol import DEVICES, PRESETS, Protocol


def _words(value: Any) -> str:
    """A default as it is typed."""
    return "no" if value is False else f"{value:g}" if isinstance(value, float) else str(value)


def _numbers() -> list[tuple[str, Any, Any]]:
    """The numbers of a protocol as options, each None where it is not given."""
    types_of, made = typing.get_type_hints(Protocol), list[tuple[str, Any, Any]]()
    for field in dataclasses.fields(Protocol):
        help = field.metadata["help"]
        help += "" if "(default: " in help else f" (default: {_words(field.default)}, or the preset's)"
        known = {**field.metadata, "help": help}
        made.append((field.name, types_of[field.name] | None, dataclasses.field(default=None, metadata=known)))
    return made


NUMBERS = tuple(field.name for field in dataclasses.fields(Protocol))  #: Options of the protocol, by name.
_ProtocolRequest: Any = dataclasses.make_dataclass("ProtocolRequest", _numbers(), bases=(Request,), kw_only=True)


@dataclasses.dataclass(kw_only=True)
class FinetuneRequest(_ProtocolRequest):  # type: ignore[misc]  # its fields are those of the protocol
    """Train the adapters of a plan, and say whether another plan learned more."""

    command: ClassVar[str] = "finetune"

    model: str = option(
        metavar="MODEL", role="reads", help="demo, a local folder, a hub id, or a GGUF file: a causal LM or an encoder"
    )
    plan: str = option(metavar="PLAN", role="reads", help="plan.json of adapters, made for this model, or a folder with one")
    out: str = out_option("folder of the adapters and results", metavar="DIR", default=dataclasses.MISSING)
    data: str | None = option(
        None,
        metavar="DATA",
        role="reads",
        help="text for a language model: rows of messages, conversations, prompt and completion, instruction and output (loss "
        "on the answers), or text; a .jsonl, .json or .parquet file, a folder, a hub dataset",
    )
    task: str | None = option(
        None, role="reads", help="labels: cola, mrpc, rte, commonsenseqa, openbookqa, scienceqa, or a file of rows"
    )
    held_out: str | None = option(
        None, metavar="DATA", role="reads", help="with --data: held-out text (default: a tenth of the rows)"
    )
    data_dir: str | None = option(None, metavar="DIR", role="reads", help="with --task: folder with the task's original files")
    train_rows: int | None = option(None, group=ADVANCED, help="train on so many rows at most")
    seeds: tuple[int, ...] = option((0,), help="one training per seed (default: 0)")
    against: str | None = option(
        None, metavar="DIR", role="reads", help="paired tests against another result folder (of a uniform plan, say)"
    )
    device: str = option("auto", group=PLACE, choices=lambda: DEVICES, help="where it is trained (default: auto)")
    dtype: str = option(
        "auto",
        group=PLACE,
        choices=lambda: ("auto", "float32", "bfloat16"),
        help="precision of the base's weights; auto (default): what the checkpoint holds, bfloat16 for float16, if the CPU can",
    )
    four_bit: bool = option(False, group=PLACE, help="hold the model's matrices in 4 bits (NF4, needs bitsandbytes)")
    gradient_checkpointing: bool = option(False, group=PLACE, help="compute activations again, to keep fewer")
    bf16: bool = option(False, group=PLACE, help="autocast in bfloat16, as always with --dtype bfloat16")
    preset: str = option("default", group=ADVANCED, choices=lambda: tuple(PRESETS), help="training protocol (default: default)")
    report_to: str = option("", group=ADVANCED, help="trackers that get the loss: wandb, trackio, ... (default: none)")
    resume: str | None = resume_option()

    def check(self) -> None:
        """Refuse no rows to learn from, or two kinds of them.

        Raises:
            InvalidInput: Neither text nor a task, or both, or an option that this command would ignore.
        """
        super().check()
        self.refuse(("table",), "finetune, whose table is short")
        if (self.data is None) == (self.task is None):
            what = "Nothing to learn was named." if self.data is None else "--data and --task were given together."
            raise InvalidInput(what, "--data names text, --task labelled rows.", "Give one of the two.")
        if self.task:
            self.refuse(("held_out",), "a labelled task")

    def protocol(self, longest: int) -> Protocol:
        """Return the preset with the numbers that were given, and ``longest`` tokens of a row where none was."""
        return PRESETS[self.preset].changed({"cutoff": longest, **self.given(*NUMBERS)})
