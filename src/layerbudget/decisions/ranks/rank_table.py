"""How much rank for this data: gain by mean rank uniform and its noise floor, parameters against tokens. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...budget import rank_parameters
from ...decision import Table
from ...errors import InfeasibleBudget, InvalidInput
from ...plan import Plan, payload_of
from ...records import Result
from ...scores import Scores, tokens_of
from ...solvers.inputs import whole_number
from .describe import MOSTLY_NOISE, beside_uniform, share_of_uniform
from .gains import FEW, TAKE_UNIFORM, increments_of
from .payload import RanksPayload
from .plan import plan_ranks

_ENOUGH = 0.05  # of the gain without its noise: what the next row must add
_FAR = 10.0  # parameters per completion token from which on they are far more than one
_TERMS = ("min_rank", "max_rank", "multiple", "fixed", "damping")  # of a plan by-rank


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RankTable(Result):
    """Rows by mean rank: parameters, their number per token, gain of the plan, its noise floor, uniform's share of the gain.

    ``at_measured`` of a row counts the blocks that have all ranks whose gains were measured; ``left_out`` says why mean ranks
    have no row. With ``few_rows`` the scored rows do not tell ranks apart, and a uniform rank is recommended.
    """

    tokens: int
    rows: Sequence[Mapping[str, Any]]
    rank: int  # the recommended mean rank
    uniform: bool  # whether it is recommended everywhere
    recommendation: str
    left_out: Mapping[int, str] = dataclasses.field(default_factory=dict)
    few_rows: bool = False

    @property
    def decides(self) -> bool:
        """Whether the recommendation is the verdict, since few rows do not tell ranks apart."""
        return self.few_rows

    def shown(self, scores: Scores, tokens: int | None) -> tuple[Table, Sequence[str]]:
        """Return what every mean rank is expected to bring, beside uniform, as a table, and sentences below it.

        Args:
            scores: The scores.
            tokens: The completion tokens that the user named.
        """
        most = max(r["gain"] for r in self.rows) or 1.0  # nats are those of steps without a limit: shares are what they say
        head = ("mean rank", "parameters", "per token", "gain", "without noise", "uniform has", "largest rank")
        rows = [
            (
                str(r["rank"]),
                f"{r['parameters']:,}",
                f"{r['parameters_per_token']:.2f}",
                f"{r['gain'] / most:.1%}",
                f"{(r['gain'] - r['floor']) / most:.1%}" if "floor" in r else "-",
                "-" if r["uniform_share"] is None else share_of_uniform(r["uniform_share"]),
                f"{r['largest']}{' (all measured)' if r['at_measured'] else ''}",
            )
            for r in self.rows
        ]
        title = f"how much rank for {self.tokens:,} completion tokens{'' if tokens is None else ' (--tokens)'}"
        return Table(title, head, rows), self._notes(scores, tokens)

    def _notes(self, scores: Scores, tokens: int | None) -> list[str]:
        """Of what text the table is, what it does not hold, and the recommendation where it is not the verdict."""
        notes, data = list[str](), scores.data
        if tokens is None and data.get("completion_tokens"):
            notes.append(f"These are the tokens of all {data['rows']:,} rows, {data['samples']:,} of which were scored.")
        elif tokens is None:
            notes.append("These are the tokens of the scored text: with --tokens N the table is for N completion tokens.")
        if ends := next((r for r in self.rows if r["at_measured"]), None):
            more = "blocks have all ranks that were measured and might earn more with others"
            notes.append(f"From mean rank {ends['rank']} on, {more}.")
        for why in dict.fromkeys(self.left_out.values()):
            missing = ", ".join(str(rank) for rank, reason in self.left_out.items() if reason == why)
            notes.append(f"Not in the table is mean rank {missing}: {why[0].lower()}{why[1:]}")
        return notes if self.decides else [*notes, self.recommendation]

    def command(self, plan: Plan, path: str, scores: str) -> list[str]:
        """Return the command of the recommendation: another plan, or the training of this one where it is recommended.

        Args:
            plan: The plan.
            path: Its file.
            scores: The file of the scores.
        """
        hyperparameters, rank, uniform = plan.hyperparameters, self.rank, self.uniform
        if (plan.rule == "uniform") is uniform and hyperparameters.get("mean_rank") == rank:
            return ["finetune", str(plan.model.get("id") or "MODEL"), path, "--data", "FILE", "-o", "DIR"]
        words = [*(["--rule", "uniform"] if uniform else []), "--mean-rank", str(rank)]
        words += ["--max-rank", str(hyperparameters["max_rank"])] if isinstance(hyperparameters.get("max_rank"), int) else []
        for name, value in (hyperparameters.get("fixed") or {}).items():
            words += ["--fix", f"{name}={value}"]
        for name, usual in (("min_rank", 1), ("multiple", 1), ("damping", None)):
            if (
                isinstance(hyperparameters.get(name), (int, float))
                and hyperparameters[name] != usual
                and not (uniform and name == "damping")
            ):
                words += [f"--{name.replace('_', '-')}", f"{hyperparameters[name]:g}"]
        return ["plan", "ranks", scores, *words, "-o", "uniform.json" if uniform else f"ranks-{rank}.json"]


def how_much_rank(plan: Plan, scores: Any, tokens: int | None = None) -> RankTable | None:
    """Return what every mean rank brings under the plan's caps; None where the scores do not say it, or no rank can be planned.

    Args:
        plan: A plan of ranks.
        scores: Its scores; only those of ``rank-gain`` have the gain of every further rank.
        tokens: Completion tokens of the training rows, by default those of the scored file.
    """
    gains = isinstance(scores, Scores) and {"tokens", "increments"} <= set(scores.extra)
    if not gains or scores.unit != "nats of average loss":
        return None
    with contextlib.suppress(InvalidInput):  # no power of two can be planned under the caps
        return rank_table(scores, tokens or scores.data.get("completion_tokens") or tokens_of(scores), **terms_of(plan))
    return None


def terms_of(plan: Plan) -> dict[str, Any]:
    """Caps, floors, fixed blocks and damping of a plan of ranks, as :func:`rank_table` takes them."""
    known = {name: plan.hyperparameters.get(name) for name in _TERMS}
    return {name: value for name, value in known.items() if value is not None}


def rank_table(
    scores: Scores, tokens: int, *, ranks: Sequence[int] | None = None, damping: float | None = None, **terms: Any
) -> RankTable:
    """Expected gain of every mean rank on the scored text, before anything is trained.

    The gain is that of the quadratic model along the best directions of each matrix (estimator ``rank-gain``). Its floor is
    what noise alone gives the same ranks: the gain of the difference of two halves of the text.

    Args:
        scores: Scores of ``rank-gain``.
        tokens: Completion tokens of the training rows: those that the loss counts.
        ranks: Mean ranks to look at, by default 1, 2, 4, ... up to the ranks that were measured; those that no plan reaches
            are left out, and it is said why.
        damping: Which row of the scores.
        **terms: ``min_rank``, ``max_rank``, ``multiple``, ``fixed`` of the plans, see :func:`terms_of`.

    Raises:
        InvalidInput: Scores without the gain of every further rank, no tokens, or no rank that was measured.
    """
    tokens = whole_number(tokens, "tokens")
    most = max(map(len, increments_of(scores, damping)), default=0)
    ranks = [2**n for n in range(most.bit_length())] if ranks is None else ranks
    options: dict[str, Any] = {**terms, **({} if damping is None else {"damping": damping})}
    price, rows, left_out = rank_parameters(scores.blocks), list[dict[str, Any]](), dict[int, str]()
    for rank in sorted(ranks):
        try:
            plan = plan_ranks(scores, mean_rank=rank, rule="by-rank", **options)
        except InfeasibleBudget as error:
            left_out[rank] = error.what
            continue
        row: dict[str, Any] = {"rank": rank, "parameters": int(price @ plan.counts)}
        if rows and row["parameters"] == rows[-1]["parameters"]:
            left_out[rank] = f"The caps allow no more parameters than mean rank {rows[-1]['rank']}."
            continue
        payload = payload_of(plan, RanksPayload)
        gain = 0.0 if payload.rounding is None else payload.rounding["value"]
        row |= {"parameters_per_token": row["parameters"] / tokens, "gain": gain}
        noise = payload.noise_share
        row |= {} if noise is None else {"floor": noise * row["gain"], "noise_share": noise}
        row |= {"uniform_share": payload.uniform_share, "largest": int(plan.counts.max())}
        rows.append({**row, "at_measured": len(payload.at_measured)})
    if not rows:
        what = f"No mean rank of {', '.join(map(str, ranks))} can be planned: {next(iter(left_out.values()))}"
        raise InvalidInput(what, "", "Score with --largest 64, or allow other ranks.")
    scored = scores.data.get("samples", FEW)
    few = scored < FEW
    covers = next((row for row in rows if row["parameters"] >= tokens), rows[-1])
    recommendation = _smallest(covers, scored, tokens) if few else _recommended(rows, tokens)
    return RankTable(tokens=tokens, rows=rows, left_out=left_out, few_rows=few, **recommendation)


def _smallest(row: Mapping[str, Any], scored: int, tokens: int) -> dict[str, Any]:
    """The smallest rank with a parameter for every token, everywhere: gains of a few rows are of these rows alone."""
    each = f"its {row['parameters']:,} parameters are {_number(row['parameters'] / tokens)} per completion token"
    sentence = f"Use uniform rank {row['rank']}: {scored} scored rows do not tell ranks apart, and {each}."
    more = f"Fewer than {FEW} rows were scored; score more before a larger rank, or ranks that differ."
    return {"rank": int(row["rank"]), "uniform": True, "recommendation": f"{sentence} {more}"}


def _recommended(rows: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """The smallest rank with as many parameters as tokens, or the one from which on the gain hardly grows; why, in words.

    With more than ``_FAR`` parameters per token the gain does not ask for more.

    Gains that are noise do not decide.
    """
    above = [row["gain"] - row.get("floor", 0.0) for row in rows]
    last = len(rows) - 1
    covers = next((i for i, row in enumerate(rows) if row["parameters"] >= tokens), last)
    grows = (i for i in range(last) if above[i + 1] - above[i] <= _ENOUGH * max(above[i], 0.0))
    noise = rows[covers].get("noise_share")
    noisy = noise is not None and noise > MOSTLY_NOISE
    largest = max((i for i, row in enumerate(rows) if row["parameters"] <= _FAR * tokens), default=0)
    at = covers if noisy else max(covers, min(next(grows, last), largest))
    chosen, share, noise = rows[at], rows[at]["uniform_share"], rows[at].get("noise_share")
    uniform = noisy or (share is not None and share >= TAKE_UNIFORM)
    enough = chosen["parameters"] >= tokens
    sentence = f"Use {'uniform' if uniform else 'mean'} rank {chosen['rank']}{'' if enough else ' or more'}: "
    sentence += (
        f"{chosen['parameters']:,} parameters {'cover' if enough else 'are fewer than'} the {tokens:,} completion tokens"
    )
    if not noisy and at < last:
        more = (above[at + 1] - above[at]) / above[at] if above[at] > 0 else 0.0
        without = " without noise" if "floor" in chosen else ""
        sentence += f", and mean rank {rows[at + 1]['rank']} would add {more:.1%} to the gain{without}"
    elif not noisy and last and enough:
        sentence += ", and the gain still grows at the end of the table"
    said = "" if share is None else beside_uniform(share, noise)
    sentence = f"{sentence}.{said and f' {said[0].upper()}{said[1:]}.'}"
    return {"rank": int(chosen["rank"]), "uniform": uniform, "recommendation": sentence}


def by_rule_of_thumb(parameters: int, tokens: int) -> str:
    """A sentence on the size of an adapter beside the rule of thumb of one parameter for every completion token.

    >>> by_rule_of_thumb(270336, 445)
    '607 parameters per completion token are far more than the rule of thumb of one needs: a smaller rank may do as well.'
    """
    each = f"{_number(parameters / max(tokens, 1))} parameters per completion token are"
    if parameters < tokens:
        return f"{each} fewer than the rule of thumb of one: a larger mean rank may learn more."
    if parameters > _FAR * tokens:
        return f"{each} far more than the rule of thumb of one needs: a smaller rank may do as well."
    return f"{each} enough by the rule of thumb of one."


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
