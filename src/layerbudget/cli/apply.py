"""``layerbudget apply``: give a model what a plan of any kind says, write it, and recount."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..compressors.base import QUANTISERS, TREATMENTS
from ..compressors.formats import GGUF, NEMOTRON
from ..errors import InvalidInput
from ..registry import options_of
from . import kept
from .display import announce, ending, expect, progress_bar, say, say_next, say_share, text_of, words_of
from .files import on_text, text_of_plan
from .options import DATA, add, add_data, add_out, add_set, add_verb, batch_of, given, load, one_process, refuse, settings


def register(subparsers: Any) -> None:
    """Add the parser of ``apply``."""
    p = add_verb(subparsers, "apply", handler)
    add(p, "model", help="demo, a local folder, a hub id (owner/name[@revision]), or a .gguf file that gets a plan's types")
    p.add_argument("plan", metavar="PLAN", help="plan.json of weights, experts that stay or a recipe, made for this model")
    add_out(p, "folder of the written model, or planned.gguf", required=True, metavar="DIR")
    names = tuple(dict.fromkeys((*TREATMENTS.names(), *QUANTISERS.names())))
    p.add_argument("--method", choices=names, help="pruner or quantiser (default: what the plan was measured with; else wanda)")
    p.add_argument("--pattern", metavar="N:M", help="zero n of every m inputs; n:8 with a literal n lets each block differ")
    p.add_argument(
        "--format",
        dest="family",
        choices=(GGUF, NEMOTRON),
        help="of shapes that differ by layer: a GGUF file in 16 bits for llama.cpp, or a folder for vLLM (equal heads)",
    )
    add_data(p)
    advanced = p.add_argument_group("advanced")
    add_set(
        advanced,
        "an option of the method, as in damping=0.1; of pruning true_sequential, parity, autocast (precision of forwards) or "
        "store (where activations live: device, cpu, disk)",
    )
    add(advanced, "--resume")


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Apply a plan of weights; name the command of any other."""
    from ..kinds import check_kind
    from ..plan import Plan
    from ..storage.folders import check_folder
    from ..storage.parts import clear
    from ..storage.writing import check_output

    plan = Plan.load(a.plan)
    check_kind(plan.kind, tuple(_WRITERS), "does not change a model's weights")
    if plan.kind != "shapes":
        refuse(a, ("family",), f"a plan of kind {plan.kind}")
    single = a.out.endswith(".gguf")
    if single and not a.model.endswith(".gguf"):
        what = f"{a.out} is the name of a file, and {a.model} becomes a folder."
        raise InvalidInput(what, "A GGUF file that gets a plan's types becomes one file.", "Give -o the name of a folder.")
    (check_output if single else check_folder)(a.out, overwrite=a.overwrite)
    result = _WRITERS[plan.kind](a, plan)
    if a.resume:
        clear(a.resume)
    return result


def _read_its_text(a: argparse.Namespace, plan: Any) -> None:
    """Read the text that decided the plan, as much of it, and drawn alike, where nothing else is asked for."""
    from ..data.files import is_local

    made, usual = text_of_plan(plan), a.data_defaults["data"]
    name = made.pop("data", usual)
    missing = (is_local(name) and not Path(name).expanduser().exists()) or name.startswith("own te")
    if missing and a.data is None:
        announce(a, f"The plan was made on {name}, which is not here: {usual} is read. --data names a text.")
        return
    if plan.kind == "sparsity" or (plan.kind != "shapes" and a.data not in (None, name)):
        made = {}  # of its scores, which may be of other forwards than the pruner's; or of another text
    a.data_defaults = {**a.data_defaults, **made, "data": name}


def _load_apart(a: argparse.Namespace, plan: Any) -> tuple[Any, Any, Any]:
    """Load model, tokenizer and the text, without the sequences of it that checked the plan."""
    checked, made = plan.extra.get("check", {}).get("data", {}).get("samples", 0), text_of_plan(plan)
    asked = {**a.data_defaults, **given(a, *a.data_defaults)}
    if not checked or asked["data"] != made.get("data"):
        return load(a)
    if any(asked[name] != made.get(name) for name in ("length", "seed")):
        announce(
            a,
            f"The text is cut otherwise than for the plan: parts of the {checked} sequences that checked it may be read.",
        )
        return load(a)
    first, wanted = made["samples"], asked["samples"]
    if wanted <= first:
        return load(a)
    a.samples = wanted + checked
    model, tokenizer, data = load(a)
    a.samples = a.read["samples"] = wanted
    data = data.select([i for i in range(data.samples) if not first <= i < first + checked])
    announce(a, f"The {checked} sequences that checked the plan are left out: {data.samples} are read.")
    return model, tokenizer, data


def _prune(a: argparse.Namespace, plan: Any) -> dict[str, Any]:
    from ..decisions.sparsity.apply import method_of, other_pruner, prune
    from ..decisions.sparsity.save import check_room, save_pruned
    from ..doctor.cost import treating
    from ..execution.processes import is_main
    from ..report.page import runtime_box

    treatment = TREATMENTS.find(method_of(plan, a.method, {})[0])
    a.method, own = method_of(plan, a.method, settings(a, prune, options_of(treatment)))
    blind = treatment.statistic == "none"
    if blind:
        refuse(a, (*DATA, "resume"), a.method)
    else:
        _read_its_text(a, plan)
    model, tokenizer, data = load(a, data=not blind)
    check_room(model, a.out, resume=a.resume, plan=plan)
    parts = treating(a.method, text_of(data, a), again=5.0 if own.get("true_sequential") else 1.0)
    expect(a, words_of(f"{a.method} to {plan.budget['spent']:,} zeros", data), model, parts)
    say_share(a, model, plan.blocks)
    said, own = other_pruner(plan, a.method), own | given(a, "pattern", "resume")
    say(a, *said)
    with progress_bar(a, f"prune by {a.method}") as progress:
        receipt = prune(model, plan, data, a.method, batch_of(a, model, data), progress=progress, **own)
    out = save_pruned(model, tokenizer, plan, receipt, a.out, overwrite=a.overwrite) if is_main() else a.out
    counted = f"Recounted sparsity {receipt.sparsity:.6f} (planned {receipt.planned:.6f}) in {receipt.seconds:.1f} s"
    say(a, f"{counted}; saved to {out}.", *receipt.notes[: len(receipt.notes) - len(said)])
    end = _say_end(a, plan, runtime_box(pattern=a.pattern))
    blocks = {name: record["sparsity"] for name, record in receipt.blocks.items()}
    return {"sparsity": receipt.sparsity, "blocks": blocks, "output": str(out), **end}


def _shrink(a: argparse.Namespace, plan: Any) -> dict[str, Any]:
    """Remove what the plan says, refit, recount, and save an ordinary smaller checkpoint."""
    from ..decisions.shapes.apply import apply_shapes
    from ..decisions.shapes.nemotron import check_nemotron, save_nemotron
    from ..decisions.shapes.program import layers_differ
    from ..decisions.shapes.save import check_exportable, check_gguf, save_gguf, save_smaller
    from ..decisions.sparsity.save import check_room
    from ..doctor.cost import Part, treating
    from ..execution.processes import is_main
    from ..report.page import runtime_box

    refuse(a, ("method", "pattern", "set", "resume"), f"a plan of kind {plan.kind}")
    usual = {"llama.cpp": GGUF, "vllm": NEMOTRON if layers_differ(plan) else None}
    a.family = a.family or usual.get(plan.hyperparameters.get("runtime"))
    ways = {GGUF: (check_gguf, save_gguf), NEMOTRON: (check_nemotron, save_nemotron)}
    check, save = ways.get(a.family, (check_exportable, save_smaller))
    _read_its_text(a, plan)
    a.dtype = a.dtype or ("float32" if a.family == GGUF else None)  # the sixteen bits of GGUF are not bfloat16
    model, tokenizer, data = load(a)
    check_room(model, a.out, plan=plan)
    check(model, plan)
    text = text_of(data, a)
    expect(a, words_of("smaller shapes", data), model, [*treating("sparsegpt", text), Part("refit", text, times=0.5)])
    before = sum(p.numel() for p in model.parameters())
    with progress_bar(a, "remove heads and widths, layers") as progress:
        done = dict(apply_shapes(model, plan, data, batch_size=batch_of(a, model, data), progress=progress))
    out = save(model, tokenizer, a.out, plan=plan, record=done, overwrite=a.overwrite) if is_main() else a.out
    after = sum(p.numel() for p in model.parameters())
    say(
        a,
        f"Removed {done['saved']:,.0f} {done['unit']} (planned {done['planned']:,.0f}); parameters {before:,} -> {after:,} "
        f"({after / before:.3f}x, embeddings included); saved to {out}.",
    )
    end = _say_end(a, plan, runtime_box(plan.kind))
    return {**done, "parameters_before": before, "parameters_after": after, "output": str(out), **end}


def _quantise(a: argparse.Namespace, plan: Any) -> dict[str, Any]:
    """Round, write, recount from the file."""
    from ..decisions.bits.apply import write_bits
    from ..decisions.bits.program import formats_of_plan
    from ..decisions.fit.parts import parts_of
    from ..decisions.fit.plan import become_smaller, files_of
    from ..decisions.fit.smaller import sentences
    from ..decisions.joint.recipe import bits_of
    from ..decisions.sparsity.save import BESIDE
    from ..doctor.cost import Part, treating
    from ..storage.writing import check_space

    one_process("Models are quantised")
    refuse(a, ("pattern",), f"a plan of kind {plan.kind}")
    made, parts = plan, parts_of(bits_of(plan))
    plan, cache = parts["bits"], parts.get("cache")
    formats_of_plan(plan)
    if a.model.endswith(".gguf"):
        if gone := [word for kind, word in (("kept-experts", "experts"), ("shapes", "heads or widths")) if kind in parts]:
            what = f"This plan lets {gone[0]} go, and the types of a GGUF file are all that changes here."
            raise InvalidInput(what, "", "Apply it to the checkpoint that it was made for.")
        result = _requantise(a, plan, made if made.kind == "fit" else plan)
        say(a, *([] if cache is None else [f"The cache: layerbudget export {shlex.quote(a.plan)} --to llama-cache"]))
        return result
    a.method = a.method or str(plan.extra["method"])
    quantiser = QUANTISERS.find(a.method)
    own = settings(a, write_bits, options_of(quantiser)) | given(a, "method", "resume", "overwrite")
    blind = quantiser.statistic == "none" or bool(own.get("imatrix"))
    if "shapes" in parts:
        _read_its_text(a, parts["shapes"])
    elif blind:
        refuse(a, DATA, f"the method {a.method}{' with an importance matrix' if own.get('imatrix') else ''}")
    else:
        _read_its_text(a, plan)
    a.dtype = a.dtype or "float32"  # grids of formats are finer than what checkpoints hold
    if not blind and "shapes" not in parts:
        model, tokenizer, data = _load_apart(a, made)
    else:
        model, tokenizer, data = load(a, data="shapes" in parts)
    plan = become_smaller(model, parts, data, 8 if data is None else batch_of(a, model, data))
    rest = max(0, sum(p.numel() for p in model.parameters()) - int(plan.numel.sum()))
    size = BESIDE + int(plan.counts.sum()) + 2 * rest  # what the plan counted, the rest in two bytes each, and a tokenizer
    check_space(dict.fromkeys(filter(None, (a.out, a.resume)), size))
    searched = [Part("ggml", text_of(data, a))] if plan.extra["family"] == GGUF else []
    expect(a, words_of(a.method, data), model, [*treating(a.method, text_of(data, a)), *searched])
    with progress_bar(a, f"quantise by {a.method}") as progress:
        own |= {"tokenizer": tokenizer, "batch_size": batch_of(a, model, data), "progress": progress}
        receipt = write_bits(model, plan, a.out, data, beside=None if cache is None else files_of(parts), **own)
    if "kept-experts" in parts:
        e = made.extra["experts"]
        say(a, f"{e['left']} of {e['of']} experts stay in every layer; experts.json says which.")
    if "shapes" in parts:
        say(a, *sentences(made), "shapes.json is their plan.")
    return _say_receipt(a, made if made.kind == "fit" else plan, receipt)


def _requantise(a: argparse.Namespace, plan: Any, made: Any) -> dict[str, Any]:
    """Give a GGUF file the types of a plan, which ``made`` may hold; with the inputs of its model, where that is given."""
    from ..decisions.bits.requantise import requantise
    from ..doctor.cost import Part, treating

    own, file = settings(a, requantise) | given(a, "method"), a.model
    refuse(a, ("dtype", "resume"), "a GGUF file")
    if (source := own.pop("inputs", None)) is None:
        told = "Leave it out: what is known of the inputs is in --set imatrix=FILE. (--set inputs=MODEL reads text.)"
        refuse(a, DATA, "a GGUF file", told)
        refuse(a, ("device", "stream"), "a GGUF file")
    else:
        _read_its_text(a, plan)
        a.model, a.dtype = str(source), "float32"
        model, _, data = _load_apart(a, made)
        own |= {"inputs": model, "data": data, "batch_size": batch_of(a, model, data)}
        method = own.get("method") or str(plan.extra["method"])
        expect(a, words_of(method, data), model, [*treating(method, text_of(data, a)), Part("ggml", text_of(data, a))])
        a.model = file
    with progress_bar(a, "requantise, tensors") as progress:
        receipt = requantise(file, plan, a.out, overwrite=a.overwrite, progress=progress, **own)
    return _say_receipt(a, made, receipt)


def _say_receipt(a: argparse.Namespace, plan: Any, receipt: Any) -> dict[str, Any]:
    others, rest = "norms" if receipt.family == GGUF else "the embedding and norms", receipt.file - receipt.tensors
    say(
        a,
        f"Recounted {receipt.bytes:,} bytes of the planned matrices (planned {receipt.planned:,}), {receipt.bits:.4f} bits per "
        f"weight; saved to {a.out}.",
        f"The whole file has {receipt.file:,} bytes: {receipt.tensors - receipt.bytes:,} more for tensors that were not "
        f"planned, such as {others}, and {rest:,} of metadata.",
        *filter(None, (receipt.llama_cpp,)),
        *receipt.notes,
    )
    return {**receipt.written(), "output": str(a.out), **_say_end(a, plan)}


def _say_end(a: argparse.Namespace, plan: Any, *told: str) -> dict[str, Any]:
    """Say what the result is expected to cost, and the command that measures it; both are fields of what is printed."""
    from ..decisions.cache.export import llama_cache
    from ..decisions.fit.parts import parts_of
    from ..models.gguf_file import is_read
    from ..plans.verdict import expected

    cost = expected(plan)
    say(a, *told, cost)
    if a.family == NEMOTRON:
        follows = f"vllm serve {shlex.quote(a.out)} --trust-remote-code"
        say(a, f"Next: {follows}")
        return ending(cost, follows)
    if a.out.endswith(".gguf") or a.family or plan.extra.get("family") == GGUF:
        file = a.out if a.out.endswith(".gguf") else f"{a.out}/model.gguf"
        dense = a.model if a.model.endswith(".gguf") else "model-f16.gguf"
        kept, run = "--kl-divergence-base base.kld", "llama-perplexity -m"
        cache = f" {llama_cache(parts_of(plan)['cache']).partition(' --ctx-size')[0]}" if plan.kind == "fit" else ""
        follows = f"{run} {shlex.quote(dense)} -f TEXT {kept} && {run} {shlex.quote(file)} {kept} --kl-divergence{cache}"
        if is_here := not cache and is_read(Path(file)):
            say(a, f"llama.cpp compares both by {follows}")
        say(a, "llama.cpp rounds activations too: its own figures are higher, for every file.")
        if dense != a.model:
            say(a, "model-f16.gguf is the unrounded model, as llama.cpp's convert_hf_to_gguf.py --outtype f16 writes it.")
        if is_here:
            own = ("--dtype", "float32", *on_text(a, plan))
            return ending(cost, say_next(a, "evaluate", a.out, "--against", a.model, *own))
        say(a, f"Next: {follows}")
        return ending(cost, follows)
    return ending(cost, say_next(a, "evaluate", a.out, "--against", a.model, *on_text(a, plan)))


_WRITERS: dict[str, Callable[[argparse.Namespace, Any], dict[str, Any]]] = {
    "sparsity": _prune,
    "shapes": _shrink,
    "bits": _quantise,
    "recipe": _quantise,
    "fit": _quantise,
    "kept-experts": kept.write,
}
