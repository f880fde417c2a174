"""Blocks of a plan of bits: weight matrices, some of them together, and the two ends of the model.

Some matrices no file holds in fewer than 16 bits, which is known before anything is measured.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import find_quantiser
from ...compressors.formats import GGUF, PACKED, RUNTIMES, TYPES, Format, Runtime, find_format, find_runtime
from ...errors import BadModel, InvalidInput, UnknownBlock
from ...gguf.architectures import layer_configs
from ...gguf.names import ACROSS, LATENT, ROUTERS, check_computed, find_architecture, find_names, split_stacks
from ...llama_cpp.mixes import LlamaModel
from ...llama_cpp.writer import check_even, in_file
from ...models.blocks import config_of, end_modules, layers, partition, pretrained, text_config, weight_of
from ...models.memory import cache_of
from ...plan import Plan, payload_of
from ...records import Block, Module, natural_key, stacks
from ..formats.payload import WeightsPayload
from ..formats.request import UNWRITTEN
from ..formats.table import FormatTable, signature_at
from .counted import terms_beside
from .saved_names import experts_of


def formats_table(
    model: nn.Module,
    *,
    formats: Sequence[str] | None = None,
    family: str = PACKED,
    runtime: str | None = None,
    by: str = "linear",
    group: int | None = None,
    method: str = "rtn",
    unwritten: str = "refuse",
) -> FormatTable:
    """Bytes of every block in every format, all damages zero: what is known before anything is measured.

    Args:
        model: Any transformers model with one list of layers.
        formats: Names of formats; by default those of the family that the runtime reads. Sixteen bits are always among them.
        family: ``compressed-tensors`` or ``gguf``.
        runtime: ``transformers``, ``vllm`` or ``llama.cpp``: which matrices must agree, and which formats run.
        by: One format per ``linear`` or per ``layer``.
        group: Group size of compressed-tensors.
        method: The quantiser that will write the file: ``rtn``, ``weighted``, ``gptq`` or ``descent``.
        unwritten: What becomes of matrices that no file holds: ``refuse``, ``16-bit`` (they stay so, and count) or ``plan``
            (they are planned like all others, for a tool that writes them).
    """
    target = find_runtime(runtime, family)
    if any(hasattr(module, "adapter_layer_names") for module in model.modules()):
        raise BadModel(
            "The model has an adapter.", "Files of weights have no place for it.", "Merge it: load_adapter(..., merge=True)."
        )
    if target.family == GGUF:
        check_even(model)
        if unwritten != "plan":
            check_computed(text_config(config_of(model)))
    blocks, reasons = _split(model, blocks_of(model, target, by), target, unwritten)
    none, terms = np.zeros((len(blocks), 0)), terms_beside(model, [m.name for b in blocks for m in b.modules], family)
    table = FormatTable(
        blocks=blocks,
        formats=(),
        size=none.astype(np.int64),
        damage=none,
        error=none,
        rest=none[..., None],
        fixed=sum(terms.values()),
        fixed_terms=terms,
        family=family,
        runtime=target.name,
        method=method,
        unwritten=reasons,
        signature=_signature(model) if target.family == GGUF else (),
        cache=cache_of(text_config(config_of(model))),
        **_llama(model, blocks, target, method),
    )
    return in_formats(table, formats, group)


def in_formats(table: FormatTable, formats: Sequence[str] | None = None, group: int | None = None) -> FormatTable:
    """Return the table of the same blocks in some formats, all damages zero; arguments and errors as of :func:`formats_table`.

    No model is read: what depends on it is in the table.
    """
    target = find_runtime(table.runtime, table.family)
    kept = np.array([all(m.name in table.unwritten for m in b.modules) for b in table.blocks])
    widths = sorted({m.d_in for b, stays in zip(table.blocks, kept, strict=True) if not stays for m in b.modules})
    reads = find_quantiser(table.method).statistic != "none"
    chosen = target.formats(widths, formats, group, inputs=reads)
    blind = [f.name for f in chosen if f.needs_inputs and not reads]
    if blind:
        raise InvalidInput(
            f"{blind[0]} needs to know the inputs of a matrix, and {table.method} does not read them.",
            "Types that need them: " + ", ".join(f.name for f in TYPES if f.needs_inputs) + ".",
            "Use --method weighted, gptq or descent, or leave the type out.",
        )
    size = np.array([[_bytes(b, f, target) for f in chosen] for b in table.blocks], dtype=np.int64)
    has = (size > 0) & (np.array([f.plain for f in chosen]) | ~kept[:, None])
    return dataclasses.replace(
        table,
        formats=tuple(f.name for f in chosen),
        size=np.where(has, size, 0),
        damage=np.where(has, 0.0, np.inf),
        error=np.zeros(has.shape),
        rest=np.zeros((*has.shape, 0)),
    )


def _signature(model: nn.Module) -> tuple[float, ...]:
    """Values of the embedding in four digits, see :func:`layerbudget.decisions.formats.table.signature_at`; none on meta."""
    embedding: Any = pretrained(model).get_input_embeddings()
    weight = embedding.weight.detach()
    at = () if weight.is_meta else signature_at(*weight.shape)
    return tuple(float(f"{float(weight[i, j]):.4g}") for i, j in at)


def _llama(model: nn.Module, blocks: Sequence[Block], target: Runtime, method: str) -> dict[str, Any]:
    """The numbers that llama.cpp's mixes depend on, and the names in the file; nothing for other files and models."""
    if target.family != GGUF:
        return {}
    config = text_config(config_of(model))
    planned = {m.name: m for b in blocks for m in b.modules}
    latent = [m for b in partition(model, "linear") for m in b.modules if m.name.endswith(LATENT) and m.name not in planned]
    try:
        arch, known = find_architecture([*planned, *(m.name for m in latent)], config.model_type)
    except InvalidInput:
        return {}
    first = layer_configs(config)[0]  # its heads decide
    heads = getattr(first, "num_attention_heads", None) or 1  # models of states alone have none
    keys = 1 if getattr(config, "kv_lora_rank", None) else getattr(first, "num_key_value_heads", None) or heads
    counts = (getattr(config, n, None) for n in ("num_local_experts", "num_experts", "n_routed_experts"))
    rules = LlamaModel(
        architecture=arch,
        layers=config.num_hidden_layers,
        heads=heads // keys,
        experts=next((n for n in counts if n), 0),
        imatrix=find_quantiser(method).statistic != "none",
        beside=[row for m in latent if len(known[m.name]) > 1 for row in _keys_and_values(m, known[m.name], config)],
    )
    stored = {m: f"{tensors[0]}.weight" for m, tensors in known.items()}  # the rules give gate and up the same
    return {"llama": rules, "stored": tuple(tuple(stored[m.name] for m in b.modules) for b in blocks)}


def _keys_and_values(matrix: Module, tensors: Sequence[str], config: Any) -> list[list[Any]]:
    """The two tensors of latent attention as :attr:`LlamaModel.beside` has them: keys lie across, head by head."""
    keys, values = int(config.qk_nope_head_dim), int(config.v_head_dim)
    heads, (first, second) = matrix.d_out // (keys + values), (f"{t}.weight" for t in tensors)
    return [[first, matrix.d_in, keys, heads], [second, values, matrix.d_in, heads]]


def _bytes(block: Block, form: Format, target: Runtime) -> int:
    """Bytes of a block in a format; 0 where one of its matrices cannot be stored in it, or computed with."""
    if not all(form.fits(m.d_in) for m in block.modules) or not target.fits([m.name for m in block.modules], form):
        return 0
    apart = [(m, split_stacks(m.name, m.copies)) for m in block.modules]
    return sum(n * form.bytes(m.d_out // n, m.d_in, m.copies) for m, n in apart)


def blocks_of(model: nn.Module, runtime: Runtime, by: str = "linear") -> tuple[Block, ...]:
    """Return the blocks that get one format each, by ``linear`` or by ``layer``."""
    if by not in ("linear", "layer"):
        raise InvalidInput(f"by is {by!r}.", "Formats are planned by linear or by layer.", "Use linear.")
    groups: dict[str, list[Module]] = {}
    for block in partition(model, by):
        for module in block.modules:
            groups.setdefault(block.name if by == "layer" else runtime.together(module.name), []).append(module)
    if runtime.ends:
        groups |= {m.name: [m] for m in end_modules(model)}
    if runtime.family == GGUF:
        fixed = _undecided(model, [m.name for modules in groups.values() for m in modules])
        left = {k: [m for m in modules if m.name not in fixed] for k, modules in groups.items()}
        groups = {k: modules for k, modules in left.items() if modules}
    return tuple(Block(name=k, modules=tuple(groups[k])) for k in sorted(groups, key=natural_key))


def _undecided(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Matrices that no type of a GGUF file is for: routers, in 32 bits, and keys and values of latent attention, in 16."""
    try:
        gguf_names = find_names(names, text_config(config_of(model)).model_type)
    except InvalidInput:
        return set()
    return {m for m, tensors in gguf_names.items() if ROUTERS.search(tensors[0]) or ACROSS.search(tensors[0])}


def narrow_rows(model: nn.Module) -> str:
    """Return a sentence on rows that the blocks of llama.cpp's K and IQ types do not divide; empty where all are divided."""
    matrices = [m for b in blocks_of(model, find_runtime("llama.cpp", GGUF)) for m in b.modules]
    narrow = [m for m in matrices if m.d_in % 256]
    if not narrow:
        return ""
    widths = sorted({m.d_in for m in narrow})
    left: dict[str, list[str]] = {}
    for width in widths:
        left.setdefault(", ".join(f.name for f in TYPES if f.name != "NVFP4" and f.fits(width)), []).append(str(width))
    types = "; ".join(
        f"types for {'them' if len(left) == 1 else ', '.join(those)} are {names}" for names, those in left.items()
    )
    share = sum(m.numel for m in narrow) / sum(m.numel for m in matrices)
    rows = f"Rows of {', '.join(map(str, widths))} hold no K and IQ types, whose blocks have 256 weights"
    return f"{rows} ({share:.0%} of the weights): {types}."


def modules_by_name(model: nn.Module, names: Iterable[str]) -> dict[str, Module]:
    """Return the matrices of some names, with their shapes."""
    known = {m.name: m for b in partition(model, "linear") for m in b.modules} | {m.name: m for m in end_modules(model)}
    for name in names:
        if name not in known:
            raise UnknownBlock(f"The model has no weight matrix {name!r}.", "", "Plan for this model.")
    return {name: known[name] for name in names}


def layers_of(model: nn.Module, matrices: Iterable[str]) -> dict[str, int | None]:
    """Return the layer that every matrix lies in; None for embedding and head."""
    prefixes = {f"{name}.": i for i, (name, _) in enumerate(layers(model))}
    return {name: next((i for p, i in prefixes.items() if name.startswith(p)), None) for name in matrices}


def peaks(model: nn.Module, wanted: Collection[str]) -> dict[str, float]:
    """Return the largest magnitudes of matrices, each with all that vLLM fuses it with: one number may lie over their scales.

    Of matrices outside the layers (embedding and head) there is none.
    """
    members: dict[str, list[str]] = {}
    for name in modules_by_name(model, [b.name for b in partition(model, "linear")]):
        members.setdefault(RUNTIMES["vllm"].together(name), []).append(name)
    largest: dict[str, float] = {}
    for names in members.values():
        asked = [n for n in names if n in wanted]
        if asked:
            largest |= dict.fromkeys(asked, max(float(weight_of(model, n)[1].detach().abs().max()) for n in names))
    return largest


# ---- matrices that no file holds in fewer than 16 bits


def unwritable(model: nn.Module, names: Sequence[str], target: Runtime) -> dict[str, str]:
    """Return the matrices that no file for a runtime holds in fewer than 16 bits, with the reason."""
    if target.family == GGUF:
        try:
            find_names(names, text_config(config_of(model)).model_type)
        except InvalidInput as error:
            return dict.fromkeys(names, error.what.rstrip("."))
        return {}
    if target.name == "transformers" and (kind := _unrolled(model)):
        return dict.fromkeys(names, f"transformers reads every expert of a packed {kind} by itself, and saves them together")
    reasons, apart = {}, experts_of(model, names) if target.fused else {}
    for name in names:
        owner = weight_of(model, name)[0]
        if name in apart:
            continue
        if not isinstance(owner, nn.Linear):
            stacked = "a stack of experts that is saved whole" if target.fused else "a stack of experts"
            reasons[name] = f"it is {'a Conv1D' if type(owner).__name__ == 'Conv1D' else stacked}, no plain Linear"
        elif not _is_plain(owner):
            reasons[name] = f"it is a {type(owner).__name__}, which gives something else than a plain Linear"
    if target.name == "transformers":
        why = "transformers reads its weight while it loads, and packed it has none"
        reasons |= dict.fromkeys(_read_at_start(model, [n for n in names if n not in reasons]), why)
    return {n: reasons[n] for n in names if n in reasons}


def _split(model: nn.Module, blocks: Sequence[Block], target: Runtime, what: str) -> tuple[tuple[Block, ...], dict[str, str]]:
    """The blocks with every matrix that stays in 16 bits as a block of its own, and the reasons why these do."""
    if what not in UNWRITTEN:
        raise InvalidInput(f"unwritten is {what!r}.", f"It is one of {', '.join(UNWRITTEN)}.", "Use 16-bit.")
    matrices = [m for b in blocks for m in b.modules]
    reasons = {} if what == "plan" else unwritable(model, [m.name for m in matrices], target)
    if not reasons:
        return tuple(blocks), {}
    kept = [Block(name=m.name, modules=(m,)) for m in matrices if m.name in reasons]
    left = [(b, tuple(m for m in b.modules if m.name not in reasons)) for b in blocks]
    free = [dataclasses.replace(b, modules=modules) for b, modules in left if modules]
    if free and what == "16-bit":
        return tuple(sorted((*free, *kept), key=lambda b: natural_key(b.name))), reasons
    share = sum(b.numel for b in kept) / sum(m.numel for m in matrices)
    other = "plan for a tool that writes them (--unwritten plan; then export --to auto-round)"
    other = _for_experts(model, stacks(b.name for b in kept), target) or other
    other = "plan for compressed-tensors (--format compressed-tensors)" if target.family == GGUF else other
    keep = "Keep them so (--unwritten 16-bit)"
    raise InvalidInput(
        f"No file holds {len(kept)} of {len(matrices)} matrices ({share:.0%} of the weights) in fewer than 16 bits, first "
        f"{kept[0].name}: {reasons[kept[0].name]}.",
        f"They alone then take {16 * share:.2f} bits per weight of all that is planned." if free else "None is left to plan.",
        f"{keep}, or {other}." if free else f"{other[0].upper()}{other[1:]}.",
    )


def _for_experts(model: nn.Module, names: Sequence[str], target: Runtime) -> str:
    """Which other runtimes have stacks of experts in few bits, for a remedy; empty without stacks."""
    if not names:
        return ""
    apart = target.name == "transformers" and len(experts_of(model, names)) == len(names)
    return f"plan for {'vLLM (--runtime vllm) or ' * apart}llama.cpp (--runtime llama.cpp)"


def check_writable(model: nn.Module, formats: Mapping[str, str], target: Runtime) -> None:
    """Refuse a plan that gives formats to matrices which no file holds in them."""
    small = [n for n, form in formats.items() if not find_format(form).plain]
    if target.family == GGUF:
        in_file(model)
    reasons = unwritable(model, small, target)
    if reasons:
        first = next(iter(reasons))
        other = "export the plan for a tool that writes them (layerbudget export PLAN --to auto-round)"
        other = _for_experts(model, stacks(reasons), target) or other
        raise InvalidInput(
            f"No file holds {len(reasons)} of {len(small)} matrices in the formats of this plan, first {first}: "
            f"{reasons[first]}.",
            "Nothing was done.",
            f"Plan again with --unwritten 16-bit, or {other}."
            if len(reasons) < len(small)
            else f"{other[0].upper()}{other[1:]}.",
        )


def check_bytes(model: nn.Module, plan: Plan, target: Runtime) -> None:
    """Refuse a plan whose formats do not take the bytes that it counts, before anything is rounded."""
    formats, modules = payload_of(plan, WeightsPayload).formats, modules_by_name(model, plan.by_module())
    for block in plan.blocks:
        forms = [(modules[name], find_format(formats[name], target.family)) for name in block.modules]
        size = sum(_bytes(Block(name=module.name, modules=(module,)), form, target) for module, form in forms)
        if size != block.count:
            what = f"{block.name} takes {size:,} bytes in the formats of this plan, which counts {block.count:,}"
            remedy = "Make the plan again: its --keep REGEX=FORMAT gives matrices a format."
            raise InvalidInput(f"{what}: they contradict each other.", "Nothing was done.", remedy)


def _unrolled(model: nn.Module) -> str:
    """The class of experts that transformers replaces in packed models, whose folders have other tensors; empty without."""
    from transformers.quantizers import base

    replaced = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    return next((name for m in model.modules() if (name := type(m).__name__) in replaced), "")


@torch.no_grad()
def _is_plain(layer: nn.Linear) -> bool:
    """Whether a layer gives what a Linear of its weight gives: packed, it is computed as one."""
    if type(layer).forward is nn.Linear.forward:
        return True
    x = torch.ones(1, layer.in_features).to(layer.weight)
    try:
        output = type(layer).forward(layer, x)
    except RuntimeError:  # its inputs have another shape, such as DeepSeek V4's groups
        return False
    if not isinstance(output, torch.Tensor):
        return False
    return output.is_meta or torch.allclose(output, nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-2, atol=1e-2)


def _read_at_start(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Linear layers whose weight the model's own initialisation reads: it runs at every load, also over packed layers.

    It is tried on the model without values: one layer of each kind loses its weight, and what is above it is initialised.
    """
    if not hasattr(model, "_init_weights"):
        return []
    with torch.device("meta"):
        skeleton: Any = pretrained(type(model)(copy.deepcopy(config_of(model))))
    known: dict[tuple[str, str], bool] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        kind = type(skeleton.get_submodule(parent)).__name__, leaf
        if kind not in known:
            known[kind] = _initialisation_reads(skeleton, name)
    return [n for n in names if known[type(skeleton.get_submodule(n.rpartition(".")[0])).__name__, n.rpartition(".")[2]]]


@torch.no_grad()
def _initialisation_reads(skeleton: Any, name: str) -> bool:
    layer, above, model = skeleton.get_submodule(name), name.split("."), skeleton
    weight = layer._parameters.pop("weight")
    try:
        for depth in range(len(above) + 1):
            module = skeleton.get_submodule(".".join(above[:depth]))
            model = module if hasattr(module, "_init_weights") else model  # a model inside initialises its own modules
            model._init_weights(module)
    except AttributeError as error:
        if "'weight'" not in str(error):
            raise
        return True
    finally:
        layer._parameters["weight"] = weight
    return False
