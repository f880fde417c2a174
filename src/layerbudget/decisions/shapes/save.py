"""Smaller models that a plain config can describe, and writing one as an ordinary checkpoint.

A plain config has one width and one number of heads for all layers, so uneven shapes cannot be written as a checkpoint: they
work in memory, in llama.cpp (:func:`save_gguf`) and, with equal heads, in vLLM (:mod:`.nemotron`). Families that derive the
size of a head from the number of heads (GPT-2, OPT, GPT-NeoX, BERT) cannot be written with fewer. What a config can say is
asked of a model that is built from the changed config, without values: the answer is that of the installed transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ...canonical import dumps
from ...errors import UnknownStructure
from ...gguf.names import architecture
from ...llama_cpp.check import check_file
from ...llama_cpp.writer import GgufWriter
from ...models.blocks import config_of, describe, layers, pretrained, text_config
from ...models.card import loading, model_card
from ...models.experts import EXPERTS_KEPT
from ...models.machine import versions
from ...plan import Plan, payload_of
from ...records import SCHEMA_VERSION, Receipt
from ...storage.checkpoint import GGUF_FILE
from ...storage.folders import new_folder, write_model
from ...storage.unread import named_unread
from ...storage.writing import write_text
from .layouts import FIND, Attention, Where
from .payload import ShapesPayload
from .program import NEITHER, OTHER_KIND, PrunablePart, layers_differ
from .units import find_parts, other_kind, where_is


def _built(model: nn.Module, change: Callable[[Any], None] = lambda config: None) -> nn.Module | str:
    """The model that would be loaded after a change of its configuration, without values, or why there is none."""
    config = copy.deepcopy(config_of(model))
    try:
        change(text_config(config))
        with torch.device("meta"):
            made: nn.Module = type(model)(type(config).from_dict(config.to_dict()))
        layers(made)
        return made
    except UnknownStructure as error:
        return error.what.rstrip(".")
    except (StrictDataclassError, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[-1].strip()


def undescribed(model: nn.Module, now: Where, wanted: Where) -> str:
    """Why a config that says ``now`` cannot say that all layers have such heads, or such an MLP; empty where it can."""
    kind, name = "heads" if isinstance(wanted, Attention) else "mlp", type(config_of(model)).__name__
    made = _built(model, lambda config: wanted.write(config, now))
    part = made if isinstance(made, str) else _found(layers(made)[0][1], kind)
    if isinstance(made, str) or isinstance(part, str):
        return f"{name} refuses {wanted.words} ({part})"
    if part.shape == wanted.shape:
        changed = sorted(_others(layers(model)) ^ _others(layers(made)))
        return f"{name} cannot say {wanted.words} without another shape of {changed[0][0]}" if changed else ""
    if kind == "heads":
        derived = "derives the size of a head from hidden_size / num_attention_heads"
        return f"{name} {derived}: {wanted.words} cannot be written"
    return f"{name} makes MLPs of {part.words}, not {wanted.words}"


def _found(layer: nn.Module, kind: str) -> Where | str:
    """Heads or MLP of a layer, or why there are none."""
    try:
        return FIND[kind](layer, "layer")
    except UnknownStructure as error:
        return error.what.rstrip(".")


def _others(stack: Sequence[tuple[str, nn.Module]]) -> set[tuple[str, torch.Size]]:
    """Names and shapes of the parameters of layers that belong neither to their heads nor to their MLPs."""
    sizes = set[tuple[str, torch.Size]]()
    for name, layer in stack:
        parts = [part for kind in FIND if not isinstance(part := _found(layer, kind), str)]
        matrices = {matrix.removeprefix("layer.") for part in parts for matrix in (*part.producers, part.consumer)}
        sizes |= {(f"{name}.{n}", p.shape) for n, p in layer.named_parameters() if n.rpartition(".")[0] not in matrices}
    return sizes


def follow(model: nn.Module, before: Sequence[Where], after: Sequence[Where]) -> None:
    """Write shapes into the config where they changed, all layers have the same and the config can say so."""
    old, new = ([w.shape for w in parts] for parts in (before, after))
    if old == new or len(set(new)) != 1 or undescribed(model, before[0], after[0]):
        return
    config = text_config(config_of(model))
    after[0].write(config, before[0])
    for where in after:
        owner: Any = model.get_submodule(where.owner)
        if isinstance(where, Attention) and type(getattr(owner, "config", None)) is type(config):
            owner.config = config


def shorten(config: Any, kept: Sequence[int], count: int) -> None:
    """Let a configuration of ``count`` layers speak of those that are kept, with every list that has a value for each."""
    lists = {n: v for n, v in config.__dict__.items() if isinstance(v, list | tuple) and len(v) == count and "token" not in n}
    config.num_hidden_layers = len(kept)
    for name, values in lists.items():
        setattr(config, name, [values[i] for i in kept])
    if hasattr(config, "attention_types"):  # GPT-Neo makes its list from this
        config.attention_types = [[config.attention_layers, 1]]


def check_depth(model: nn.Module) -> None:
    """Refuse a model whose other layers would be made otherwise without its first layer, or without its last."""
    count, unchanged = len(layers(model)), _built(model)
    for gone in (0, count - 1) if count > 1 else ():  # one moves every pattern of layers, the other ends it
        kept = [i for i in range(count) if i != gone]
        made = _built(model, partial(shorten, kept=kept, count=count))
        why = next((m for m in (unchanged, made) if isinstance(m, str)), "")
        if not isinstance(unchanged, str) and not isinstance(made, str):
            why = _changed(unchanged, made, kept)
        if why:
            raise UnknownStructure(
                f"{type(config_of(model)).__name__} cannot say that a layer of this model is gone ({why}).",
                "Heads and widths can go.",
                "Plan without depth (leave --depth out).",
            )


def _changed(whole: nn.Module, made: nn.Module, kept: Sequence[int]) -> str:
    """Differences of a model that was made without some layers of another one; empty where nothing is."""
    all_before, stack = layers(whole), layers(whole)[0][0].rpartition(".")[0] + "."
    outside = [{(n, p.shape) for n, p in m.named_parameters() if not n.startswith(stack)} for m in (whole, made)]
    changed = sorted(name for name, _ in outside[0] ^ outside[1])
    for new, (old, (name, layer)) in enumerate(zip(kept, layers(made), strict=True)):
        before, after = _nature(all_before[old][1]), _nature(layer)
        differ = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
        changed += sorted(f"{name}.{k}".strip(".") for k in differ if (before.get(k), after.get(k)) != (old, new))  # its place
    return f"{changed[0]} would be another" if changed else ""


def _nature(layer: nn.Module) -> dict[str, Any]:
    """Types of a layer's modules, their plain attributes and the shapes of their parameters, by name."""
    properties = dict[str, Any]()
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if v is None or isinstance(v, bool | int | float | str)}
        sizes = {k: p.shape for k, p in module._parameters.items() if p is not None}
        properties |= {f"{name}.{k}".strip("."): v for k, v in {"": type(module), **plain, **sizes}.items()}
    return properties


def allowed_units(model: nn.Module, parts: Sequence[PrunablePart], kinds: Sequence[str]) -> dict[str, Collection[int]]:
    """Numbers of units, equal in all layers, that a plain config can describe; a kind without an entry may lose any number."""
    allowed, refused = dict[str, Collection[int]](), list[str]()
    for part in (next((p for p in parts if p.kind == kind), None) for kind in kinds):
        if part is None:
            continue
        fits, why = _fitting_units(model, part)
        if not fits:
            refused.append(
                f"No smaller {'number of heads' if part.kind == 'heads' else 'width of the MLPs'} can be written into a "
                f"plain config: {why}"
            )
        if not fits or part.kind == "heads":
            allowed[part.kind] = fits
    if not refused or len(refused) < len(kinds):
        return allowed
    remedy = NEITHER if len(kinds) > 1 else other_kind(model, kinds[0], lambda kind: described_smaller(model, kind))
    raise UnknownStructure(
        "; ".join(refused) + ".",
        "What an ordinary checkpoint can hold is planned.",
        f"{remedy} Or plan without --even, and use the model in memory.",
    )


def _fitting_units(model: nn.Module, part: PrunablePart) -> tuple[list[int], str]:
    """Numbers of units that may go by what a plain config can say (of an MLP: one, if any), and what it says to the least."""
    where = where_is(model, part)
    tried = range(1, part.units if isinstance(where, Attention) else 2)
    why = {units: undescribed(model, where, where.without(units, part.by)) for units in tried}
    return [units for units in tried if not why[units]], next(iter(why.values()), "there is one unit only")


def described_smaller(model: nn.Module, kind: str) -> bool:
    """Whether a plain config can say a smaller number of units of a kind that all layers have."""
    return any(_fitting_units(model, part)[0] for part in find_parts(model, kinds=(kind,)) if part.kind == kind)


def check_exportable(model: nn.Module, plan: Plan | None = None) -> None:
    """Refuse a model whose MLP widths or heads a plain config cannot describe, or what a plan will make of it."""
    gone = set[str]()
    if plan is not None:
        plan.validate(describe(model))
        gone = set(payload_of(plan, ShapesPayload).dropped)
    if gone:
        check_depth(model)
    built = _built(model)
    names = [n for n, _ in layers(model)]
    again = [] if isinstance(built, str) else [(n, layer) for n, (_, layer) in zip(names, layers(built), strict=False)]
    for kind in FIND:
        now, said = _all(layers(model), kind), _all(again, kind)
        left = list(left_parts(model, kind, plan).values())
        if left and left != [w for n, w in said.items() if n not in gone]:
            _check_described(model, next(iter((said or now).values())), left)


def left_parts(model: nn.Module, kind: str, plan: Plan | None = None) -> dict[str, Where]:
    """Return the heads or MLPs of all layers, by layer, as they are or as a plan leaves them."""
    parts = _all(layers(model), kind)
    if plan is None:
        return parts
    payload = payload_of(plan, ShapesPayload)
    left = {n: w for n, w in parts.items() if n not in payload.dropped}
    return {n: w.without(s.removed, s.by) if (s := payload.shapes.get(f"{n}.{kind}")) else w for n, w in left.items()}


def _all(named: Sequence[tuple[str, nn.Module]], kind: str) -> dict[str, Where]:
    """The parts that every layer has; nothing where one of them has none, for then nothing was removed."""
    try:
        return {name: FIND[kind](layer, name) for name, layer in named}
    except UnknownStructure:
        return {}


def _check_described(model: nn.Module, now: Where, wanted: Sequence[Where]) -> None:
    """Refuse what the configuration, which says ``now``, cannot say of the layers."""
    smallest = min(wanted, key=lambda w: w.inputs)
    heads, why = isinstance(smallest, Attention), undescribed(model, now, smallest)
    if why:
        raise UnknownStructure(
            f"The model has {smallest.words} in a layer: {why}.",
            "The model works in memory; transformers could not load the checkpoint.",
            OTHER_KIND["heads" if heads else "mlp"],
        )
    fields = ("heads", "key-value heads") if heads else ("widths",)
    for field, values in zip(fields, zip(*(w.shape for w in wanted), strict=True), strict=False):
        if len(set(values)) > 1:
            raise UnknownStructure(
                f"The {'attentions' if heads else 'MLPs'} have {field} {min(values)} to {max(values)}.",
                f"{type(config_of(model)).__name__} has one {f'number of {field}' if heads else 'width'} for all layers, so "
                "transformers could not load the checkpoint; the model works in memory.",
                f"Give all layers the same (about {round(sum(values) / len(values))} costs the same): plan with --even "
                "(even=True), or write it for llama.cpp (apply --format gguf) or vLLM (apply --format nemotron-nas).",
            )


def check_gguf(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan whose smaller model llama.cpp has no architecture for; said before anything is removed."""
    plan.validate(describe(model))
    fewer = any(part.kind == "heads" and part.removed for part in payload_of(plan, ShapesPayload).shapes.values())
    architecture(text_config(config_of(model)), uneven=layers_differ(plan), fewer=fewer)


def save_gguf(
    model: nn.Module,
    tokenizer: Any,
    out_dir: Path | str,
    *,
    plan: Plan | None = None,
    record: Receipt | None = None,
    overwrite: bool = False,
    check: bool = True,
) -> Path:
    """Write a smaller model as ``model.gguf`` in 16 bits; its layers may differ. The folder appears complete or not at all.

    llama.cpp computes layers that differ as its architecture ``deci``. Arguments are those of :func:`save_smaller`; the model
    is in float32. With ``check`` llama.cpp loads the file, where it is installed, and has to compute the same.

    Raises:
        InvalidInput: llama.cpp has no architecture for it.
        CoverageError: llama.cpp refuses the file, or computes something else.
    """
    with new_folder(out_dir, overwrite=overwrite) as folder:
        writer = GgufWriter(model, tokenizer, {}, folder)
        for piece in writer.head.pieces:
            writer.add(writer.tensors(piece, {}))
        notes = writer.close()
        notes += [f"{named} are not in the file."] if (named := named_unread(model)) else []
        if check:
            known = tokenizer if writer.head.has_vocabulary else None
            notes.append(check_file(folder / GGUF_FILE, model, known, {}))
        use, tags = "llama-cli -m model.gguf", ("gguf", "pruned")
        side_files = beside_model(plan, record, model, use, tags, library=None, notes=notes)
        for name, write in side_files.items():
            write(folder / name)
    return Path(out_dir)


def save_smaller(
    model: nn.Module,
    tokenizer: Any,
    out_dir: Path | str,
    *,
    plan: Plan | None = None,
    record: Receipt | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a smaller model as an ordinary checkpoint; the folder appears complete or not at all.

    Args:
        model: The smaller model.
        tokenizer: Saved beside it where it is not None.
        out_dir: Must not exist, or be empty.
        plan: Written beside it as ``plan.json``.
        record: What :func:`~layerbudget.decisions.shapes.apply.apply_shapes` recounted; written as ``receipt.json``.
        overwrite: Replace what an earlier call wrote: the files that the folder's ``manifest.json`` names, and no others.
    """
    check_exportable(model)
    use = loading(type(pretrained(model)).__name__, alike=not hasattr(config_of(model), EXPERTS_KEPT))
    side_files = beside_model(plan, record, model, use, ("pruned",))
    return write_model(pretrained(model), tokenizer, out_dir, side_files, overwrite=overwrite)


def beside_model(
    plan: Plan | None,
    record: Receipt | None,
    model: nn.Module,
    use: str,
    tags: Sequence[str],
    *,
    library: str | None = "transformers",
    notes: Sequence[str] | None = None,
) -> dict[str, Callable[[Path], object]]:
    """Return what writes each file beside a model, by the name of the file.

    Args:
        plan: Written as ``plan.json``, with a model card; neither is written where it is None.
        record: The recount, written as ``receipt.json``.
        model: The smaller model.
        use: How the model is loaded, for the card.
        tags: Of the card.
        library: Of the card.
        notes: Written into ``receipt.json``.
    """
    side_files: dict[str, Callable[[Path], object]] = {} if plan is None else {"plan.json": plan.save}
    counted = {} if record is None else record.counted()
    if record is not None or notes is not None:
        content = {"schema_version": SCHEMA_VERSION, **({"plan_digest": plan.digest} if plan is not None else {}), **counted}
        content |= {} if notes is None else {"notes": notes}
        side_files["receipt.json"] = partial(write_text, text=dumps({**content, "versions": versions()}))
    if plan is not None:
        name = type(pretrained(model)).__name__
        rows = {"removed": f"{counted['saved']:.6g} {counted['unit']}, recounted"} if counted else {}
        if sizes := counted.get("parameters"):
            rows["parameters of the layers' matrices"] = f"{sizes['before']:,} before, {sizes['after']:,} now"
        what = "with fewer heads, narrower MLPs or fewer layers: `plan.json` says which, `receipt.json` what was counted."
        card = model_card(plan, "finetune", "made smaller", what, rows, use, architecture=name, library=library, tags=tags)
        side_files["README.md"] = partial(write_text, text=card)
    return side_files
