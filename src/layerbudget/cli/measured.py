"""``layerbudget plan sparsity|bits|shapes MODEL``: plans by directional damage, which is measured on the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..compressors.base import QUANTISERS, TREATMENTS
from ..compressors.formats import FAMILIES, PACKED, RUNTIMES, find_format, find_runtime
from ..decisions.bits.program import RULES
from ..errors import InvalidInput
from ..plan import Plan
from ..records import check_output, to_jsonable
from .display import announce, expect, progress_bar, say, say_share, show_table, text_of, words_of
from .files import need_scores
from .options import DATA, PLACE, add_data, add_model, add_resume, add_set, add_verb, batch_of, given, load, own_of, refuse

_MEASURING = ("family", "runtime", "formats", "by", "method", "unwritten", "save_scores", "resume", "set")


def is_model(a: argparse.Namespace) -> bool:
    """Return whether the source is a model to be measured: it is no file, and no rule is named that needs its shapes alone."""
    return not Path(a.source).is_file() and not a.source.endswith((".json", ".csv")) and a.rule is None


# --- sparsity ---------------------------------------------------------------------------------------------------------------


def add_sparsity(p: argparse.ArgumentParser) -> None:
    """Add the options of ``plan sparsity MODEL``."""
    group = p.add_argument_group("from a model")
    group.add_argument("--by", help="units: linear (default), layer, rows:G or a regular expression")
    group.add_argument("--method", choices=TREATMENTS.names(), help="the pruner (default: wanda)")
    group.add_argument("--passes", type=float, help="forward equivalents to spend, a backward counts two (default: 24)")
    add_resume(group, "finished steps")


def run_sparsity(a: argparse.Namespace) -> dict[str, Any]:
    """Plan, write, show."""
    from ..decisions.sparsity.directional import plan_by_damage
    from ..records import check_fraction
    from ..report.tables import path_table, plan_table

    a.model, a.out, a.by, a.method = a.source, a.out or "plan.json", a.by or "linear", a.method or "wanda"
    check_output(a.out, overwrite=a.overwrite)
    check_fraction(a.sparsity, "sparsity")
    own = own_of(a, plan_by_damage, taken=("progress",))
    model, _, data = load(a)
    _expect_pruning(a, model, data)
    with progress_bar(a, f"stepping down, {a.method}") as progress:
        plan = plan_by_damage(
            model,
            data,
            sparsity=a.sparsity,
            by=a.by,
            method=a.method,
            batch_size=batch_of(a, model, data),
            progress=progress,
            **given(a, "passes", "resume", "max_sparsity"),
            **own,
        )
    _save(a, plan)
    a.console.print(plan_table(plan))
    a.console.print(path_table(plan))
    figures = {k: plan.extra.get(k) for k in ("forward_passes", "predicted", "measured")}
    uniform = plan.extra["path"][0]["divergence"]  # where the steps begin
    a.console.print(against_uniform(plan.extra["predicted"], uniform, plan.extra["measured"]))
    a.console.print(f"written to {a.out}")
    against = {"predicted": plan.extra["predicted"], "uniform": uniform, "measured": plan.extra["measured"]}
    return {**plan.to_dict(), **figures, "against_uniform": against}


def against_uniform(predicted: float, uniform: float, measured: float) -> str:
    """Return what a plan is predicted to cost beside uniform, and what it cost.

    >>> against_uniform(0.2, 0.25, 0.21)
    'Predicted damage 0.2000 nats per token, uniform 0.2500: 20 % less. Measured: 0.2100.'
    """
    less = 100.0 * (1.0 - predicted / uniform) if uniform > 0 else 0.0
    word = f"{less:.0f} % less" if less >= 0.5 else "take uniform" if less < -0.5 else "no difference: take uniform"
    return f"Predicted damage {predicted:.4f} nats per token, uniform {uniform:.4f}: {word}. Measured: {measured:.4f}."


def _known(by: str) -> bool:
    return by in ("layer", "linear") or by.startswith("rows:")


def _expect_pruning(a: argparse.Namespace, model: Any, data: Any) -> None:
    from ..doctor.cost import searching
    from ..models.blocks import partition

    say_share(a, model, partition(model, "linear" if _known(a.by) else a.by))
    text = text_of(data, a)
    expect(a, f"{a.method} on {words_of(data)}", model, lambda _: searching(text, a.passes))


def _save(a: argparse.Namespace, plan: Plan) -> None:
    """Write the plan, in one process, and forget the parts that led to it."""
    from ..execution.processes import is_main
    from ..storage.parts import clear

    if is_main():
        plan.save(a.out, overwrite=a.overwrite)
        if a.resume:
            clear(a.resume)


# --- bits -------------------------------------------------------------------------------------------------------------------


def add_bits(kinds: Any) -> argparse.ArgumentParser:
    """Return the parser of ``plan bits``."""
    p = add_verb(kinds, "bits", run_bits, "a format for every weight matrix: bits where they matter, within a budget of bytes")
    p.add_argument("source", metavar="MODEL|SCORES", help="a model, or what --save-scores wrote before")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--bits", type=float, help="mean bits per weight, scales and padding counted: 3.5")
    budget.add_argument("--budget", help="bytes of all tensors of the file: '1.2 GiB'")
    p.add_argument("--format", dest="family", choices=FAMILIES, help=f"what is written (default: {PACKED})")
    p.add_argument("--runtime", choices=tuple(RUNTIMES), help="vllm: q/k/v, gate/up and experts agree, 4 and 8 bits only")
    p.add_argument("--formats", metavar="LIST", help="choose among these: Q4_0,Q5_1,Q8_0 or w3-g32,w4-g32-asym,w8-channel")
    p.add_argument("--by", choices=("linear", "layer"), help="one format per matrix or per layer (default: linear)")
    p.add_argument("--method", choices=QUANTISERS.names(), help="quantiser that will write the file (default: rtn)")
    p.add_argument(
        "--unwritten",
        choices=("refuse", "16-bit", "plan"),
        help="what becomes of matrices that no file holds in fewer bits (experts, Conv1D, ...): refuse (default); 16-bit: they "
        "stay so, and count; plan: they are planned all the same, for a tool that writes them",
    )
    p.add_argument("--rule", choices=RULES, default="choices", help="choices: the exact program (default); others need none")
    p.add_argument("--save-scores", metavar="FILE", help="also write what was measured, to plan other budgets and sweeps from")
    advanced = p.add_argument_group("advanced")
    add_set(advanced, "group (size), draws (of labels), or check (sequences, 0: none)")
    add_resume(advanced, "damages and checks")
    add_data(p, samples=32, dtype="float32")
    return p


def run_bits(a: argparse.Namespace) -> dict[str, Any]:
    """Measure what formats cost, decide, check the plan as a whole."""
    from ..decisions.bits.plan import plan_bits

    a.model = a.source
    for path in filter(None, (a.out, a.save_scores)):
        check_output(path, overwrite=a.overwrite)
    if a.source.endswith(".json"):
        refuse(a, (*_MEASURING, *DATA, *PLACE), "scores that were measured before")
        plan = plan_bits(need_scores(a.source), bits=a.bits, budget=a.budget, rule=a.rule)
        if a.out:
            plan.save(a.out, overwrite=a.overwrite)
    else:
        a.out = a.out or "plan.json"
        check_output(a.out, overwrite=a.overwrite)
        plan = _measure_formats(a)
        _save(a, plan)
    _show_bits(a, plan)
    return to_jsonable(plan.to_dict())


def _measure_formats(a: argparse.Namespace) -> Plan:
    from ..decisions.bits.plan import plan_bits
    from ..decisions.bits.program import check_bits
    from ..decisions.bits.sensitivity import rounding_damage
    from ..models.offload import mapped

    check_bits(a.bits)
    own = own_of(a, plan_bits, rounding_damage, taken=("progress", "overwrite"), also={"check": int})
    wanted = own.pop("check", None)
    count = 16 if wanted is None else wanted
    if count < 0:
        raise InvalidInput(f"check is {count}.", "It is a number of sequences; 0 checks nothing.", "Leave it out.")
    chosen = a.formats.split(",") if a.formats else None
    for name in chosen or ():
        find_runtime(a.runtime, a.family or PACKED).check(find_format(name))
    samples = a.data_defaults["samples"] if a.samples is None else a.samples
    a.samples, a.dtype = samples + count, a.dtype or "float32"  # damages of eight bits are below the noise of bfloat16
    model, _, data = load(a)
    if data.samples < samples + count:  # a short text: both parts shrink alike, and one sequence decides unchecked
        samples = max(1, data.samples * samples // (samples + count))
        count = data.samples - samples
    if wanted is None and mapped(model) is not None:
        count = 0
        announce(a, "The weights stay in their files: the plan is not checked as a whole. Check the written file by evaluate.")
    check = data.select(slice(samples, samples + count)) if count else None
    data = data.select(slice(0, samples))
    _expect_formats(a, model, data, check, own, len(chosen or ()))
    with progress_bar(a, "measuring formats") as progress:
        return plan_bits(
            model,
            data,
            check,
            bits=a.bits,
            budget=a.budget,
            rule=a.rule,
            batch_size=batch_of(a, model, data),
            progress=progress,
            family=a.family or PACKED,
            runtime=a.runtime,
            by=a.by or "linear",
            formats=chosen,
            method=a.method or "rtn",
            seed=a.seed or 0,
            resume=a.resume,
            unwritten=a.unwritten or "refuse",
            save_scores=a.save_scores,
            overwrite=a.overwrite,
            **own,
        )


def _expect_formats(a: argparse.Namespace, model: Any, data: Any, check: Any, own: dict[str, Any], formats: int) -> None:
    from ..doctor.cost import choosing

    text, held = text_of(data, a), None if check is None else text_of(check, a)
    options = ({"draws": own["draws"]} if "draws" in own else {}) | ({"formats": formats} if formats else {})
    expect(a, f"damages of formats on {words_of(data)}", model, lambda _: choosing(text, held, **options))


def _show_bits(a: argparse.Namespace, plan: Plan) -> None:
    from ..plans.explain import explain_plan
    from ..report.tables import plan_grid

    formats = plan.extra["formats"]
    names = [formats[b.modules[0]] for b in plan.blocks]
    grid = plan_grid(plan, f"bits by {plan.rule}", said=names)
    if grid is not None:
        a.console.print(grid)
    else:
        rows = [(b.name, name, b.value, b.count, b.numel) for b, name in zip(plan.blocks, names, strict=True)]
        show_table(a, f"bits by {plan.rule}", ("block", "format", "bits", "bytes", "parameters"), rows)
    say(a, [*explain_plan(plan)["sentences"], *([f"Written to {a.out}."] if a.out else [])])


# --- shapes -----------------------------------------------------------------------------------------------------------------


def add_shapes(kinds: Any) -> argparse.ArgumentParser:
    """Return the parser of ``plan shapes``."""
    p = add_verb(kinds, "shapes", run_shapes, "heads, MLP widths and layers to remove: smaller matrices")
    add_model(p)
    p.add_argument(
        "--save", required=True, metavar="BUDGET", help="what is to be saved: '25%% flops', '1.2 GiB', '300M params'"
    )
    p.add_argument("--parts", default="heads,mlp", help="what may go: heads, mlp or both (default: heads,mlp)")
    p.add_argument("--depth", type=int, default=0, help="so many whole layers may go where that is cheaper (default: none)")
    p.add_argument("--even", action="store_true", help="the same in all layers: what an ordinary checkpoint can hold")
    p.add_argument("--passes", type=float, default=46.0, help="most forward equivalents to spend (default: 46)")
    advanced = p.add_argument_group("advanced")
    add_set(advanced, "heads (groups, queries), multiple (of MLP channels), max_removed, compensate, ...")
    add_data(p, samples=16)
    return p


def run_shapes(a: argparse.Namespace) -> dict[str, Any]:
    """Decide heads, widths and layers by the damage to the model."""
    from ..decisions.shapes.plan import plan_shapes
    from ..doctor.cost import searching

    a.out, a.resume = a.out or "plan.json", None
    check_output(a.out, overwrite=a.overwrite)
    parts = tuple(k.strip() for k in a.parts.split(","))
    own = own_of(a, plan_shapes, taken=("progress", "kinds", "by"), also={"heads": str})
    unread = {("heads",): "multiple", ("mlp",): "heads"}.get(parts)
    if unread in own:
        raise InvalidInput(f"{unread} has no meaning for --parts {a.parts}.", "It would be ignored.", "Leave it out.")
    own |= {"by": own.pop("heads")} if "heads" in own else {}
    model, _, data = load(a)
    text = text_of(data, a)
    what = f"heads and widths on {words_of(data)}"
    expect(a, what, model, lambda _: searching(text, a.passes))
    with progress_bar(a, "measuring heads and widths, passes") as progress:
        plan = plan_shapes(
            model,
            data,
            a.save,
            kinds=parts,
            depth=a.depth,
            even=a.even,
            passes=a.passes,
            batch_size=batch_of(a, model, data),
            progress=progress,
            **given(a, "seed"),
            **own,
        )
    _save(a, plan)
    _show_shapes(a, plan)
    return to_jsonable(plan.to_dict())


def _show_shapes(a: argparse.Namespace, plan: Plan) -> None:
    shapes, gone, budget = plan.extra["shapes"], plan.extra["dropped"], plan.budget
    rows = [(n, s["by"], s["units"], "whole layer" if s["layer"] in gone else s["removed"]) for n, s in shapes.items()]
    show_table(a, "units to remove", ("part", "unit", "units", "removed"), rows)
    lines = [
        f"The plan saves {budget['spent']:.6g} {budget['unit']}, {budget['spent'] / budget['base']:.2%} of the layers "
        f"({budget['limit']:.6g} were asked for).",
        f"Measured, cut and refitted: {plan.extra['measured']:.4g} nats per token, after "
        f"{plan.extra['forward_passes']:.0f} forward equivalents.",
    ]
    left = [s for s in shapes.values() if s["layer"] not in gone]
    if any(len({s["removed"] for s in left if s["kind"] == k}) > 1 for k in ("heads", "mlp")):
        lines.append("Layers differ: the model works in memory, a plain config cannot describe it. --even plans one that can.")
    say(a, [*lines, f"Written to {a.out}."])
