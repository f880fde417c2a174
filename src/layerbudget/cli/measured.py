"""``layerbudget plan sparsity|bits|shapes MODEL``: plans by directional damage, which is measured on the model."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from ..compressors.base import QUANTISERS, TREATMENTS
from ..compressors.formats import FAMILIES, GGUF, NEMOTRON, PACKED, RUNTIMES, find_format, find_runtime
from ..decisions.bits.program import RULES, TOKENS, Limits
from ..decisions.fit.parts import parts_of
from ..errors import InvalidInput, LayerbudgetError
from ..plan import Plan
from ..records import check_fraction, check_output
from ..registry import Option, options_of
from .display import announce, expect, on_check, progress_bar, say, say_share, show_table, text_of, words_of
from .options import add, add_data, add_set, add_verb, batch_of, given, load, options_for, written_bytes


def is_model(a: argparse.Namespace) -> bool:
    """Return whether the source is a model to be measured: it is no file, and no rule is named that needs its shapes alone."""
    return not Path(a.source).is_file() and not a.source.endswith((".json", ".csv")) and a.rule is None


def _begin(a: argparse.Namespace) -> None:
    a.model, a.out = a.source, a.out or "plan.json"
    check_output(a.out, overwrite=a.overwrite)


def save(a: argparse.Namespace, plan: Plan) -> Plan:
    """Write the plan, in one process, and forget the parts that led to it."""
    from ..execution.processes import is_main
    from ..storage.parts import clear

    if is_main():
        plan.save(a.out, overwrite=a.overwrite)
        if getattr(a, "resume", None):
            clear(a.resume)
    return plan


# --- sparsity ---------------------------------------------------------------------------------------------------------------


def add_sparsity(p: argparse.ArgumentParser) -> None:
    """Add the options of ``plan sparsity MODEL``."""
    group = p.add_argument_group("from a model")
    group.add_argument("--by", help="units: linear (default), layer, rows:G or a regular expression")
    group.add_argument("--method", choices=TREATMENTS.names(), help="the pruner (default: wanda)")
    group.add_argument("--passes", type=float, help="forward equivalents to spend, a backward counts two (default: 24)")
    add(group, "--resume")


def plan_sparsity(a: argparse.Namespace) -> Plan:
    """Return the plan by the damage to a model, written."""
    from ..decisions.sparsity.directional import plan_by_damage
    from ..doctor.cost import Part
    from ..models.blocks import partition

    _begin(a)
    check_fraction(a.sparsity, "sparsity")
    a.by, a.method = a.by or "linear", a.method or "wanda"
    own = options_for(a, plan_by_damage, {n: o for n, o in options_of(TREATMENTS.find(a.method)).items() if n != "method"})
    model, _, data = load(a)
    say_share(a, model, partition(model, "linear" if a.by.startswith("rows:") else a.by))
    expect(a, words_of(a.method, data), model, [Part("directional", text_of(data, a), a.passes or 24.0)])
    with progress_bar(a, f"stepping down, {a.method}") as progress:
        plan = plan_by_damage(model, data, batch_size=batch_of(a, model, data), progress=progress, **own)
    return save(a, plan)


# --- bits -------------------------------------------------------------------------------------------------------------------


def add_bits(kinds: Any, handler: Any) -> argparse.ArgumentParser:
    """Return the parser of ``plan bits``."""
    p = add_verb(kinds, "bits", handler, "a format for every weight matrix: bits where they matter, within a budget of bytes")
    p.add_argument("source", metavar="MODEL|SCORES", help="a model, or what --save-scores wrote before")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--bits", type=float, help="mean bits per weight, scales and padding counted: 3.5")
    budget.add_argument("--budget", help="bytes of the whole GGUF file, else of all tensors: '1.2 GiB'")
    budget.add_argument("--like", metavar="MIX", help="the bytes of a mix of llama.cpp: Q4_K_M, IQ3_XS, ... (GGUF)")
    p.add_argument("--format", dest="family", choices=FAMILIES, help=f"what is written (default: {PACKED})")
    p.add_argument("--runtime", choices=tuple(RUNTIMES), help="vllm: q/k/v, gate/up and experts agree, 4 and 8 bits only")
    p.add_argument("--formats", metavar="LIST", help="choose among these: Q4_0,Q5_1,Q8_0 or w3-g32,w4-g32-asym,w8-channel")
    p.add_argument("--forbid", metavar="LIST", help="formats not to use: IQ3_S,slow-cpu (lattices) or slow-gpu")
    p.add_argument("--keep", action="append", metavar="REGEX=FORMAT", help="format of matrices: 'lm_head=Q8_0' (repeatable)")
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
    add(advanced, "--resume")
    add_data(p, samples=32, dtype="float32", check=16)
    return p


def limits_of(a: argparse.Namespace) -> dict[str, Any]:
    """Return the budget and the constraints that a command names, for ``plan_bits``."""
    pairs = [words.rpartition("=")[::2] for words in a.keep or ()]
    if broken := next((words for words, (pattern, _) in zip(a.keep or (), pairs, strict=True) if not pattern), None):
        raise InvalidInput(f"--keep {broken} names no format.", "It is REGEX=FORMAT.", "Write for example 'lm_head=Q8_0'.")
    return given(a, "bits", "budget", "like") | {
        "forbid": a.forbid.split(",") if a.forbid else [],
        "keep": dict(pairs),
    }


def plan_bits(a: argparse.Namespace) -> Plan:
    """Return the plan by the damage of formats to a model, checked as a whole and written."""
    from ..decisions.bits.blocks import formats_table, narrow_rows
    from ..decisions.bits.plan import plan_bits
    from ..decisions.bits.sensitivity import rounding_damage
    from ..doctor.cost import choosing
    from ..models.offload import mapped

    _begin(a)
    a.formats = a.formats.split(",") if a.formats else None
    if a.family is None:
        a.family = RUNTIMES[a.runtime].family if a.runtime else PACKED if a.like is None else GGUF
    limits, beside = limits_of(a), {"check": Option(name="check", type=int, default=16)}
    own = options_for(a, plan_bits, rounding_damage, formats_table, beside) | limits
    Limits(**limits).check()
    runtime = find_runtime(a.runtime, a.family)
    for name in a.formats or ():
        runtime.check(find_format(name, a.family))
    model, tokenizer, data, check = load_parted(a, own.pop("check", 16))
    if check is not None and mapped(model) is not None and not any(word.startswith("check=") for word in a.set):
        check = None
        announce(a, "The weights stay in their files: the plan is not checked as a whole. Check the written file by evaluate.")
    if a.family == GGUF and (narrow := narrow_rows(model)):
        announce(a, narrow)
    parts = choosing(
        text_of(data, a),
        None if check is None else text_of(check, a),
        draws=own.get("draws", 4),
        ggml=a.family == GGUF,
        method=a.method or "rtn",
    )
    expect(a, words_of("measuring what every format costs", data) + on_check(check), model, parts)
    with progress_bar(a, "measuring formats") as progress:
        batch = batch_of(a, model, data)
        plan = plan_bits(
            model, data, check, tokenizer=tokenizer, batch_size=batch, progress=progress, overwrite=a.overwrite, **own
        )
    a.no_file = own.get("unwritten") == "plan" and has_no_file(model, plan)
    return save(a, plan)


def has_no_file(model: Any, plan: Plan) -> bool:
    """Return whether a plan gives few bits to matrices which no file of its runtime holds so."""
    from ..decisions.bits.blocks import unwritable

    weights = parts_of(plan)["bits"].extra
    small = [name for name, form in weights["formats"].items() if not find_format(form).plain]
    return bool(unwritable(model, small, find_runtime(weights["runtime"], weights["family"])))


def load_parted(a: argparse.Namespace, count: int) -> tuple[Any, Any, Any, Any]:
    """Return model, tokenizer, the tokens that decide, and the sequences that check, so many of them; None where none do."""
    if count < 0:
        raise InvalidInput(f"check is {count}.", "It is a number of sequences; 0 checks nothing.", "Leave it out.")
    samples = _enough(a, a.data_defaults["samples"]) if a.samples is None else a.samples
    a.samples, a.dtype = samples + count, a.dtype or "float32"  # damages of eight bits are below the noise of bfloat16
    model, tokenizer, text = load(a)
    a.read["samples"] = samples  # the command that repeats this one adds those of the check again
    decides = max(1, text.samples * samples // (samples + count))  # of a short text both parts shrink alike
    data, check = text.select(slice(0, decides)), text.select(slice(decides, None)) if decides < text.samples else None
    return model, tokenizer, data, check


def _enough(a: argparse.Namespace, samples: int) -> int:
    """Return the samples of a text that nobody named the size of: for error feedback as many as the widest matrix wants."""
    if getattr(a, "method", None) != "gptq":
        return samples
    import torch

    from ..doctor.cost import shape_of_config
    from .doctor import configuration

    columns = 0
    with contextlib.suppress(LayerbudgetError):  # what cannot be loaded is refused when it is
        columns = max(shape_of_config(configuration(a), torch.bfloat16).inputs)
    length = a.data_defaults["length"] if a.length is None else a.length
    wanted = max(samples, -(-TOKENS * columns // max(length, 1)))
    if wanted > samples:
        why = f"gptq wants {TOKENS} tokens for each of the {columns:,} columns of the widest matrix"
        announce(a, f"{why}: {wanted} samples of {length} tokens are taken, not {samples} (--samples).")
    return wanted


# --- shapes -----------------------------------------------------------------------------------------------------------------


def add_shapes(kinds: Any, handler: Any) -> argparse.ArgumentParser:
    """Return the parser of ``plan shapes``."""
    p = add_verb(kinds, "shapes", handler, "heads, MLP widths and layers to remove: smaller matrices")
    p.add_argument("source", metavar="MODEL", help="a model")
    p.add_argument(
        "--save",
        required=True,
        metavar="BUDGET",
        help="what is to be saved: '25%% flops', '1.2 GiB', '300M params', '25%% latency'",
    )
    p.add_argument("--parts", default="heads,mlp", help="what may go: heads, mlp or both (default: heads,mlp)")
    p.add_argument("--depth", type=int, default=0, help="so many whole layers may go where that is cheaper (default: none)")
    p.add_argument("--even", action="store_true", help="the same in all layers: what an ordinary checkpoint can hold")
    p.add_argument("--passes", type=float, default=46.0, help="most forward equivalents to spend (default: 46)")
    advanced = p.add_argument_group("advanced")
    add_set(advanced, "runtime (llama.cpp, vllm, transformers: plan only what it loads), by (groups or queries), multiple, ...")
    add(advanced, "--resume")
    add_data(p, samples=16)
    return p


def plan_shapes(a: argparse.Namespace) -> Plan:
    """Return the plan of heads, widths and layers by the damage to a model, written."""
    from ..decisions.shapes.plan import plan_shapes
    from ..doctor.cost import shaping

    _begin(a)
    known = {name: option for name, option in options_of(plan_shapes).items() if name != "bytes_per_parameter"}
    own, parts = options_for(a, known), tuple(k.strip() for k in a.parts.split(","))
    unread = {("heads",): "multiple", ("mlp",): "by"}.get(parts)
    if unread in own:
        raise InvalidInput(f"{unread} has no meaning for --parts {a.parts}.", "It would be ignored.", "Leave it out.")
    model, _, data = load(a)
    expect(a, words_of("heads and widths", data), model, shaping(text_of(data, a), a.passes))
    with progress_bar(a, "measuring heads and widths, passes") as progress:
        own |= {"kinds": parts, "batch_size": batch_of(a, model, data), "progress": progress}
        own["bytes_per_parameter"] = 2 if own.get("runtime") == "llama.cpp" else written_bytes(a)
        plan = plan_shapes(model, data, a.save, **own)
    a.written_as = _written_as(model, plan)
    return save(a, plan)


def _written_as(model: Any, plan: Plan) -> str | None:
    """Return the ``--format`` by which ``apply`` writes a plan of shapes, empty where it needs none; None where none can."""
    from ..decisions.shapes.nemotron import check_nemotron
    from ..decisions.shapes.save import check_exportable, check_gguf

    if plan.hyperparameters.get("runtime"):
        return ""
    for name, check in (("", check_exportable), (GGUF, check_gguf), (NEMOTRON, check_nemotron)):
        with contextlib.suppress(LayerbudgetError):
            check(model, plan)
            return name
    return None


def show_shapes(a: argparse.Namespace, plan: Plan) -> None:
    """Show which units go: a row for every layer, one row where all are alike."""
    from ..decisions.shapes.program import layers_differ

    gone, kinds = plan.extra["dropped"], dict[str, None]()
    layers: dict[str, dict[str, str]] = {}
    for part in plan.extra["shapes"].values():
        kind = f"{part['kind']} ({part['by']})"
        kinds[kind] = None
        said = "whole layer" if part["layer"] in gone else f"{part['removed']} of {part['units']}"
        layers.setdefault(str(part["layer"]), {})[kind] = said
    rows = [(layer.rpartition(".")[2], *(cells.get(kind, "") for kind in kinds)) for layer, cells in layers.items()]
    rows = rows if a.table or layers_differ(plan) or gone else [("every", *rows[0][1:])]
    show_table(a, "removed", ("layer", *kinds), rows)
    budget = plan.budget
    share = f"{budget['spent'] / budget['base']:.2%} of what the layers have ({budget['limit']:,.0f} were asked for)"
    say(a, f"The plan saves {budget['spent']:,.0f} {budget['unit']}, {share}.")
    for name, rate in plan.extra.get("tokens_per_second", {}).items():
        say(a, f"Tokens {name} per second in llama.cpp: {rate['before']:.4g} before, {rate['after']:.4g} predicted.")
