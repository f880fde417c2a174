"""``layerbudget plan bits``: measure what formats cost, decide, check the plan as a whole."""

from __future__ import annotations

import argparse
from typing import Any

from ..compressors.base import QUANTISERS
from ..compressors.formats import FAMILIES, PACKED, find_format
from ..decisions.bits.program import RULES
from ..decisions.bits.runtimes import RUNTIMES, find_runtime
from ..plan import Plan
from ..records import to_jsonable
from .files import say, show_table
from .progress import progress_bar
from .shared import DATA, add_data_options, add_out, batch_of, refuse

MEASURING = ("family", "runtime", "formats", "group", "by", "method", "draws", "unwritten", "save_scores")


def register(verbs: Any) -> None:
    """Add the parser of ``plan bits``."""
    p = verbs.add_parser("bits", help="a format for every weight matrix: bits where they matter, within a budget of bytes")
    p.add_argument("model", metavar="MODEL", help="demo, a local folder, a hub id, or what --save-scores wrote before")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--bits", type=float, help="mean bits per weight, scales and padding counted: 3.5")
    budget.add_argument("--budget", help="bytes of all tensors of the file: '1.2 GiB'")
    p.add_argument("--format", dest="family", choices=FAMILIES, help=f"what is written (default: {PACKED})")
    p.add_argument("--runtime", choices=tuple(RUNTIMES), help="vllm: q/k/v, gate/up and experts agree, 4 and 8 bits only")
    p.add_argument("--formats", metavar="LIST", help="choose among these: Q4_0,Q5_1,Q8_0 or w3-g32,w4-g32-asym,w8-channel")
    p.add_argument("--group", type=int, help="group size (default: the largest of 128, 64, 32 that divides all inputs)")
    p.add_argument("--by", choices=("linear", "layer"), help="one format per matrix or per layer (default: linear)")
    p.add_argument("--method", choices=QUANTISERS.names(), help="quantiser that will write the file (default: rtn)")
    p.add_argument("--draws", type=int, help="draws of labels that the damage is averaged over (default: 4)")
    p.add_argument(
        "--unwritten", choices=("refuse", "16-bit", "plan"),
        help="what becomes of matrices that no file holds (experts, Conv1D, ...): refuse (default), 16-bit: they "
        "stay so, and count; plan: they are planned all the same, for a tool that writes them",
    )  # fmt: skip
    p.add_argument("--rule", choices=RULES, default="choices", help="choices: the exact program (default); others need none")
    p.add_argument("--check", type=int, help="further sequences on which the plan is checked as a whole (default 16, 0: none)")
    p.add_argument(
        "--save-scores", metavar="FILE", help="also write what was measured: for other budgets, and plan sweep --kind bits"
    )
    p.add_argument("--resume", metavar="DIR", help="keep damages and checks here as they are finished, until the plan is saved")
    add_data_options(p, samples=32, dtype="float32")
    add_out(p)
    p.set_defaults(handler=run)


def run(a: argparse.Namespace) -> dict[str, Any]:
    """``plan bits``."""
    from ..records import check_output
    from ..storage.parts import clear

    for path in filter(None, (a.out, a.save_scores)):
        check_output(path, overwrite=a.overwrite)
    plan = _again(a) if a.model.endswith(".json") else _measure(a)
    if a.out:
        plan.save(a.out, overwrite=a.overwrite)
        if a.resume:
            clear(a.resume)
    _show(a, plan)
    return to_jsonable(plan.to_dict())


def _again(a: argparse.Namespace) -> Plan:
    """Another plan from what was measured."""
    from ..decisions.bits.program import plan_from_table
    from .files import need_scores

    refuse(
        a, (*MEASURING, "check", "resume", "stream", *DATA, "dtype", "revision", "device"), "scores that were measured before"
    )
    return plan_from_table(need_scores(a.model), bits=a.bits, budget=a.budget, rule=a.rule)


def _measure(a: argparse.Namespace) -> Plan:
    from ..decisions.bits.plan import plan_bits
    from ..decisions.bits.program import check_bits
    from ..errors import InvalidInput
    from ..models.offload import mapped
    from .shared import announce, load

    check_bits(a.bits)
    count = 16 if a.check is None else a.check
    if count < 0:
        raise InvalidInput(f"--check is {count}.", "It is a number of sequences; 0 checks nothing.", "Leave it out.")
    chosen = a.formats.split(",") if a.formats else None
    for name in chosen or ():
        find_runtime(a.runtime, a.family or PACKED).check(find_format(name))
    samples = a.data_defaults["samples"] if a.samples is None else a.samples
    a.samples = samples + count
    a.dtype = a.dtype or "float32"  # damages of eight bits are below the noise of bfloat16
    model, _, data = load(a)
    if data.samples < samples + count:  # a short text: both parts shrink alike, and one sequence decides unchecked
        samples = max(1, data.samples * samples // (samples + count))
        count = data.samples - samples
    if a.check is None and mapped(model) is not None:
        count = 0
        announce(a, "The weights stay in their files: the plan is not checked as a whole. Check the written file by evaluate.")
    check = data.select(slice(samples, samples + count)) if count else None
    _expect(a, model, data.select(slice(0, samples)), check, len(chosen or ()))
    own = {"draws": a.draws} if a.draws is not None else {}
    with progress_bar(a, "measuring formats") as progress:
        return plan_bits(
            model, data.select(slice(0, samples)), check, bits=a.bits, budget=a.budget, rule=a.rule,
            batch_size=batch_of(a, model, data), progress=progress,
            family=a.family or PACKED, runtime=a.runtime, by=a.by or "linear", group=a.group,
            formats=chosen, method=a.method or "rtn",
            seed=a.seed or 0, resume=a.resume, unwritten=a.unwritten or "refuse",
            save_scores=a.save_scores, overwrite=a.overwrite, **own,
        )  # fmt: skip


def _expect(a: argparse.Namespace, model: Any, data: Any, check: Any, formats: int) -> None:
    """Say what the damages and the check will cost."""
    from ..doctor.cost import choosing
    from .outlook import expect, text_of, words_of

    text, held = text_of(data, a), None if check is None else text_of(check, a)
    given = {"draws": a.draws} if a.draws is not None else {}
    given |= {"formats": formats} if formats else {}
    what = f"damages of formats on {words_of(data)}"
    expect(a, what, model, lambda shape: choosing(text, held, **given))


def _show(a: argparse.Namespace, plan: Plan) -> None:
    from ..plans.explain import explain_plan
    from ..report.tables import plan_grid

    formats = plan.extra["formats"]
    rows = [(b.name, formats[b.modules[0]], b.value, b.count, b.numel) for b in plan.blocks]
    grid = plan_grid(plan, f"bits by {plan.rule}", said=[formats[b.modules[0]] for b in plan.blocks])
    if grid is not None and getattr(a, "console", None) is not None:
        a.console.print(grid)
    else:
        show_table(a, f"bits by {plan.rule}", ("block", "format", "bits", "bytes", "parameters"), rows)
    say(a, [*explain_plan(plan)["sentences"], *([f"Written to {a.out}."] if a.out else [])])
