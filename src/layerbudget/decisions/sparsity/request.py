"""Options of ``plan sparsity``, and of ``apply`` with such a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...errors import InvalidInput
from ...registry import Option, options_of
from ...requests import ADVANCED, PLACING, READING, option, share
from ...session import PlanRequest, WriteRequest
from ..rules import find_rule, rules_of

_SCORES, _MODEL = "from scores", "from a model"


def _rules() -> str:
    known = "; ".join(f"{name}: {rule.summary}" for name, rule in rules_of("sparsity").items())
    return f"{known} (default: mdl)"


@dataclasses.dataclass(kw_only=True)
class SparsityRequest(PlanRequest):
    """A sparsity for every layer, matrix or group of rows, of a model that is measured or from scores."""

    command: ClassVar[str] = "plan sparsity"
    usual: ClassVar[Mapping[str, Any]] = {**PlanRequest.usual, "samples": 16}

    sparsity: float = option(0.5, read=share, help="pruned share of all weights (default: 0.5)")
    max_sparsity: float | None = option(
        None, help="cap of every block (default: 0.95; from scores 0.7, or --sparsity + 0.2 if that is more)"
    )
    samples: int | None = option(None, group="text", help="number of calibration sequences (default: 16)")
    by: str | None = option(None, group=_MODEL, help="units: linear (default), layer, rows:G or a regular expression")
    method: str | None = option(
        None, group=_MODEL, metavar="PRUNER", help="magnitude, wanda (default), sparsegpt, or FILE.py:NAME"
    )
    passes: float | None = option(None, group=_MODEL, help="forward equivalents to spend, a backward counts two (default: 24)")
    trust: float | None = option(
        None, group=ADVANCED, help="largest change of one unit's sparsity in the first step (default: 0.06)"
    )
    rule: str | None = option(None, group=_SCORES, help=_rules)
    min_sparsity: float | None = option(None, group=ADVANCED, help="floor of every block, from scores (default: 0)")
    curves: str | None = option(
        None,
        group=_SCORES,
        metavar="FILE",
        role="reads",
        help="measured damage in place of a penalty: {block: [ratios, losses]}",
    )
    exclude: str | None = option(None, group=_SCORES, metavar="REGEX", help="blocks that stay dense")
    fix: tuple[str, ...] = option(
        (),
        group=_SCORES,
        metavar="BLOCK=SPARSITY",
        help="what blocks of this name or regular expression get in any case, as in 'layers.0.*=0' (repeatable)",
    )

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of the rule, or of the pruner, that is named."""
        known = cls.options()
        if "rule" in typed or Path(str(typed.get("", ""))).suffix in (".json", ".csv"):
            options = find_rule("sparsity", typed.get("rule", "mdl")).options
        else:
            from ...compressors.base import TREATMENTS

            options = options_of(TREATMENTS.find(typed.get("method", "wanda")))
        return {name: option for name, option in options.items() if name not in known}

    @property
    def measures(self) -> bool:
        """Whether the source is a model, and no rule is named that needs its shapes alone."""
        return super().measures and self.rule is None

    def check(self) -> None:
        """Refuse options of the other source.

        Raises:
            InvalidInput: An option that would be ignored.
        """
        super().check()
        if self.measures:
            what = "a model, whose damage is measured: it belongs to scores"
            self.refuse(("curves", "exclude", "fix", "min_sparsity"), what)
            return
        what = "scores" if self.source.endswith((".json", ".csv")) else f"--rule {self.rule}, which measures no model"
        unread = (name for name in (*READING, *PLACING) if name != "seed")
        names = ("by", "method", "passes", "trust", "resume", "dry_run", *unread)
        self.refuse(names, f"{what}: it belongs to a model that is measured")
        if self.curves and self.more.get("penalty") is not None:
            raise InvalidInput("--curves and a penalty were given together.", "Curves are the penalty.", "Leave one out.")


@dataclasses.dataclass(kw_only=True)
class SparsityWrite(WriteRequest):
    """Options of ``apply`` for a plan of sparsity."""

    method: str | None = option(None, metavar="METHOD", help="pruner (default: what the plan was measured with; else wanda)")
    pattern: str | None = option(
        None, metavar="N:M", help="zero n of every m inputs; n:8 with a literal n lets each block differ"
    )
    true_sequential: bool = option(
        False, group=ADVANCED, help="collect inputs anew for every group of matrices that share one (q/k/v, o, gate/up, down)"
    )
    autocast: str | None = option(None, group=ADVANCED, help="precision of the forwards: bfloat16 or float16")
    store: str | None = option(None, group=ADVANCED, help="where activations live: device (default), cpu or disk")

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of the pruner that is named, or of all: the plan may name its own."""
        from ...compressors.base import TREATMENTS

        known, method = cls.options(), typed.get("method")
        names = TREATMENTS.names() if method is None else (method,) if method in TREATMENTS.names() else ()
        options = {n: option for name in names for n, option in options_of(TREATMENTS.find(name)).items()}
        return {name: option for name, option in options.items() if name not in known}
