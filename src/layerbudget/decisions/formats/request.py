"""Options of commands that choose formats of weights, and what these do alike. No torch here."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from ...compressors.base import QUANTISERS
from ...compressors.formats import BY_MOMENTS, RUNTIMES, TOKENS, find_format, find_runtime, spoken_formats
from ...errors import InvalidInput, LayerbudgetError
from ...requests import ADVANCED, PLACING, READING, flag_of, names, option
from ...session import PlanRequest
from .table import record_of

if TYPE_CHECKING:
    from ...scores import Scores
    from ...session import Session

_FORMATS = "formats of the weights"
UNWRITTEN = ("refuse", "16-bit", "plan")
#: Options of the measurement, which scores that were measured before have behind them.
MEASURING = ("formats", "by", "group", "unwritten", "draws", "rows", "whole", "imatrix", "checked", "save_scores", "resume")


def checked_option(count: int) -> Any:
    """Return the option ``--check``, of so many sequences where it is not given."""
    words = f"further sequences that check the plan, 0: none (default: {count})"
    return option(None, flag="--check", metavar="SEQUENCES", group=ADVANCED, help=words)


@dataclasses.dataclass(kw_only=True)
class FormatsRequest(PlanRequest):
    """Formats of the weights of a model that is measured, or from what was measured before."""

    runtime: str | None = option(None, choices=lambda: tuple(RUNTIMES), help="who runs it")
    formats: tuple[str, ...] | None = option(
        None,
        group=_FORMATS,
        metavar="LIST",
        read=names,
        help=lambda: f"choose among these, as in Q4_0,Q8_0 or w3-g32,nvfp4; there are {spoken_formats()}",
    )
    forbid: tuple[str, ...] = option(
        (), group=_FORMATS, metavar="LIST", read=names, help="formats not to use: IQ3_S,slow-cpu (lattices) or slow-gpu"
    )
    keep: tuple[str, ...] = option(
        (), group=_FORMATS, metavar="REGEX=FORMAT", help="format of matrices: 'lm_head=Q8_0' (repeatable)"
    )
    by: str | None = option(
        None, group=_FORMATS, choices=lambda: ("linear", "layer"), help="one format per matrix or per layer (default: linear)"
    )
    method: str | None = option(
        None, group=_FORMATS, choices=QUANTISERS.names, help="quantiser that will write the weights (default: rtn)"
    )
    unwritten: str | None = option(
        None,
        group=_FORMATS,
        choices=lambda: UNWRITTEN,
        help="what becomes of matrices that no file holds in fewer bits (experts, Conv1D, ...): refuse (default); 16-bit: they "
        "stay so, and count; plan: they are planned all the same, for a tool that writes them",
    )
    save_scores: str | None = option(
        None, metavar="FILE", role="writes", help="also write what was measured, to plan other budgets from"
    )
    group: int | None = option(None, group=ADVANCED, help="weights that share a scale, of compressed-tensors")
    draws: int | None = option(None, group=ADVANCED, help="how often labels are drawn for every token (default: 4)")
    rows: int | None = option(None, group=ADVANCED, help="rows of every matrix that are rounded to every format (default: 16)")
    whole: bool | None = option(
        None, group=ADVANCED, help="round all rows to all formats, and measure each format by itself (default: False)"
    )
    imatrix: str | None = option(
        None,
        metavar="FILE",
        group=ADVANCED,
        role="reads",
        help="llama.cpp's importance matrix that the file will be made with, for --method weighted",
    )
    checked: int | None = checked_option(16)

    @property
    def kept(self) -> dict[str, str]:
        """Formats of some matrices, by regular expressions.

        Raises:
            InvalidInput: One of them names no format.
        """
        pairs = [words.rpartition("=")[::2] for words in self.keep]
        for words, (pattern, _) in zip(self.keep, pairs, strict=True):
            if not pattern:
                raise InvalidInput(
                    f"--keep {words} names no format.", "It is REGEX=FORMAT.", "Write for example 'lm_head=Q8_0'."
                )
        return dict(pairs)

    def check(self) -> None:
        """Refuse options of a measurement where there is none.

        Raises:
            InvalidInput: An option that would be ignored.
        """
        super().check()
        if not self.measures:
            self.refuse((*MEASURING, "dry_run", *READING, *PLACING), "scores that were measured before")

    def check_measured(self, scores: Scores) -> None:
        """Refuse another format, runtime or method than that which scores of formats were measured for.

        Those that are named rightly are left out of the command that repeats this one: scores say them.

        Raises:
            InvalidInput: Another one, or scores that say nothing of formats.
        """
        stored = record_of(scores)
        for name in ("family", "runtime", "method"):
            asked, measured = getattr(self, name, None), stored.get(name)
            if asked is None or measured is None:
                continue
            if asked != measured:
                flag = flag_of(self, name)
                raise InvalidInput(
                    f"{self.source} was measured with {flag} {measured}, not {asked}.",
                    "Damages hold for what they were measured with.",
                    f"Leave {flag} out, or measure again: layerbudget {self.command} MODEL {flag} {asked} --save-scores FILE.",
                )
            setattr(self, name, None)

    def check_formats(self, runtime: str | None, family: str) -> None:
        """Refuse formats that a runtime does not run, before the model is loaded.

        Raises:
            InvalidInput: One of them.
        """
        target = find_runtime(runtime, family)
        for name in self.formats or ():
            target.check(find_format(name, family))


def need_samples(session: Session, method: str | None) -> None:
    """Ask for as many samples as the widest matrix wants where a method learns inputs and nobody named a number of them."""
    request: Any = session.request
    if method not in BY_MOMENTS or request.samples is not None:
        return
    import torch

    from ...cost.sizes import shape_of_config

    columns = 0
    with contextlib.suppress(LayerbudgetError):  # what cannot be loaded is refused when it is
        columns = max(shape_of_config(session.configuration(), torch.bfloat16).inputs)
    usual, length = session.usual["samples"], session.usual["length"] if request.length is None else request.length
    wanted = -(-TOKENS * columns // max(length, 1))
    if wanted > usual:
        request.samples = wanted
        why = f"{method} wants {TOKENS} tokens for each of the {columns:,} columns of the widest matrix"
        session.announce(f"{why}: {wanted} samples of {length} tokens are taken, not {usual} (--samples).")


def on_check(check: Any) -> str:
    """Return how many further samples check a plan, in words that follow what is measured; empty where none do."""
    return "" if check is None else f", checked on {check.samples} more"
