"""Partition a model into blocks: by decoder layer, by Linear, or by regular expression.

Only weight matrices inside the repeated layers count (embeddings, the output head and norms are neither pruned nor
counted; ``check_sparsity`` of the Wanda reference does the same). Matrices are ``nn.Linear``, transformers' ``Conv1D``
(GPT-2) and three-dimensional parameters of fused experts (Mixtral). Order is natural: 0, 1, ..., 10.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..arguments import checked
from ..errors import BadModel, CoverageError, InvalidInput, UnknownBlock, UnknownStructure
from ..records import Block, Module, natural_key
from ..storage.unread import predicting

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D


def is_conv1d(module: nn.Module) -> TypeGuard[Conv1D]:
    """Whether a module is transformers' ``Conv1D`` (a Linear with a transposed weight)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution, whose kernel has three dimensions and is no stack of experts."""
    return isinstance(module, _ConvNd)


def matrix_of(module: nn.Module) -> torch.Tensor:
    """Weight of a Linear or ``Conv1D`` as a ``(d_out, d_in)`` view, outside autograd."""
    weight = cast(nn.Parameter, module.weight)
    return weight.data.T if is_conv1d(module) else weight.data


def transposed(owner: nn.Module) -> bool:
    """Whether fused experts are kept as ``(experts, inputs, outputs)``: what their class says, else what their shapes say."""
    said = getattr(owner, "is_transposed", None)
    first, last = getattr(owner, "gate_up_proj", None), getattr(owner, "down_proj", None)
    if said is not None or not (isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor)):
        return bool(said)
    if first.ndim != 3 or last.ndim != 3:
        return False
    return first.shape[2] == 2 * last.shape[1] and first.shape[1] == last.shape[2]


def _active(root: nn.Module, name: str, copies: int) -> int:
    """How many experts of the module of that name one token passes through: what its routing or a configuration says."""
    around = root.get_submodule(name.rpartition(".")[0])
    said = [getattr(m, "top_k", None) for m in (root.get_submodule(name), around, *around.children())]
    said += [getattr(m.config, "num_experts_per_tok", None) for m in root.modules() if hasattr(m, "config")]
    return min(next((n for n in said if isinstance(n, int) and n > 0), copies), copies)


def config_of(model: nn.Module) -> Any:
    """A model's configuration, whose fields differ by family."""
    return model.config


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model: all of it, where a model reads nothing but text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def configs_of(model: nn.Module) -> list[Any]:
    """Every configuration that a module of the model holds, once."""
    configs = [config_of(m) for m in model.modules() if hasattr(m, "config")]
    return list({id(config): config for config in configs}.values())


def pretrained(model: nn.Module) -> PreTrainedModel:
    """The same model, as the type whose methods transformers gives to all of them."""
    return cast("PreTrainedModel", model)


def layer_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Every outermost ``ModuleList`` of two-or-more-level modules that hold weight matrices."""
    stacks: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f + ".") for f, _ in stacks):
            if any(True for _ in _weights(module[0], "")) and not isinstance(module[0], nn.Linear):
                stacks.append((name, module))
    return stacks


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every decoder (or encoder) layer, in natural order.

    Where a model that also sees images has several lists, they are those of its language model.
    """
    lists = layer_lists(model)
    two_texts = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    decoder: Any = None
    if len(lists) > 1 and not two_texts and hasattr(model, "get_decoder"):
        decoder = pretrained(model).get_decoder()
    if decoder is not None:
        inside = set(decoder.modules())
        lists = [(name, stack) for name, stack in lists if stack in inside] or lists
    if len(lists) != 1:
        children = [f"{n} ({type(m).__name__})" for n, m in model.named_children()]
        what = "no list of layers" if not lists else f"{len(lists)} lists of layers ({', '.join(n for n, _ in lists)})"
        raise UnknownStructure(
            f"{type(model).__name__} has {what}; its children are {', '.join(children) or 'none'}.",
            "Exactly one nn.ModuleList of layers is needed to partition by layer.",
            "Partition with by='linear' or with a regular expression.",
        )
    name, stack = lists[0]
    return [(f"{name}.{i}", layer) for i, layer in enumerate(stack)]


def text_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the language model and its head, each once, by full name: all, where a model reads nothing but text."""
    parameters, config = dict(model.named_parameters()), getattr(model, "config", None)
    decoder: Any = None
    if config is not None and text_config(config) is not config and hasattr(model, "get_decoder"):
        decoder = pretrained(model).get_decoder()
    if decoder is None or decoder is model:
        return parameters
    head = pretrained(model).get_output_embeddings()
    inside = {id(p) for part in (decoder, head) if part is not None for p in part.parameters()}
    return {name: p for name, p in parameters.items() if id(p) in inside}


def _weights(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, torch.Tensor, Module]]:
    """Weight matrices below ``root``, without what PEFT put beside them: (full name, owner, parameter, shape record)."""
    beside = tuple[str, ...]()
    for name, module in root.named_modules():
        full = ".".join(part for part in (prefix, name) if part)
        beside += tuple(f"{name}.{part}.".lstrip(".") for part in getattr(module, "adapter_layer_names", ()))
        if f"{name}.".startswith(beside):
            continue
        if name.endswith("mixer.dt_proj") or name.endswith("mamba.dt_proj"):
            continue  # the scan of Mamba multiplies by it itself: its inputs and outputs are never seen
        if ".indexer." in f".{name}.":
            continue  # it says which keys are seen (DeepSeek's sparse attention): no gradient comes through
        if isinstance(module, nn.Linear) and isinstance(getattr(module, "n_groups", None), int):
            continue  # every group of its inputs meets rows of its own (DeepSeek V4): no product of a matrix and a vector
        if isinstance(module, nn.Linear):
            yield full, module, module.weight, Module(name=full, d_in=module.in_features, d_out=module.out_features)
        elif is_conv1d(module):
            d_in, d_out = module.weight.shape
            yield full, module, module.weight, Module(name=full, d_in=d_in, d_out=d_out)
        elif not is_convolution(module):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    copies, d_out, d_in = parameter.shape
                    if transposed(module):
                        d_in, d_out = d_out, d_in
                    active = _active(root, name, copies)
                    record = Module(name=f"{full}.{key}", d_in=d_in, d_out=d_out, copies=copies, active=active)
                    yield record.name, module, parameter, record


def weight_of(model: nn.Module, name: str, *, packed: bool = False) -> tuple[nn.Module, nn.Parameter]:
    """Owner module and parameter of a weight matrix named as in a :class:`~layerbudget.records.Module`.

    Raises:
        UnknownBlock: The model has no such matrix.
        CoverageError: It is quantised, and ``packed`` (for callers that need only the owner) is false.
    """
    for candidate, key in ((name, "weight"), name.rpartition(".")[::2]):
        try:
            owner = model.get_submodule(candidate)
        except AttributeError:
            continue
        parameter = getattr(owner, key, None)
        if isinstance(parameter, nn.Parameter):
            if not (packed or parameter.is_floating_point()):
                raise CoverageError(
                    f"{name} is quantised ({type(owner).__name__}): its values cannot be read or changed.",
                    "Estimators that read activations and gradients can score it: fisher-gram, kfac, adapter, rank-gain.",
                    "Use one of those, or load the model in bfloat16.",
                )
            return owner, parameter
    raise UnknownBlock(f"The model has no weight matrix {name!r}.", "", "Partition this model to list its names.")


@checked
def partition(
    model: nn.Module, by: str = "layer", *, include: str | None = None, exclude: str | None = None
) -> tuple[Block, ...]:
    """Blocks of a model, in natural order.

    A tied weight is counted once, in the first block that holds it; a matrix tied to the input embedding is left out.

    Args:
        model: Any transformers causal LM or encoder, or any module when ``by`` is ``linear`` or a pattern.
        by: ``layer`` (one block per decoder layer), ``linear`` (one per weight matrix inside the layers; inside the whole
            model where it has no layers), or a regular expression: matrices are grouped by the text that it matches
            (its first group where it has one).
        include: Keep only matrices whose full name matches this regular expression (``re.search``).
        exclude: Drop matrices whose full name matches.

    Raises:
        UnknownStructure: No layers were found (the message lists what was).
        UnknownBlock: The expressions leave no matrix.
        InvalidInput: An expression does not compile.
    """
    wanted, unwanted = _compile(include or "", "include"), _compile(exclude or "(?!)", "exclude")
    pattern = None if by in ("layer", "linear") else _compile(by, "by")
    groups: dict[str, list[Module]] = {}
    seen = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for block_name, root in _roots(model, by):
        for name, _, parameter, record in _weights(root, block_name):
            if id(parameter) in seen or not wanted.search(name) or unwanted.search(name):
                continue
            match = pattern.search(name) if pattern else None
            if pattern and not match:
                continue
            seen.add(id(parameter))
            key = _text_of(match) if match else block_name if by == "layer" else name
            groups.setdefault(key, []).append(record)
    if not groups:
        raise UnknownBlock(
            f"No weight matrix is left with by={by!r}, include={include!r}, exclude={exclude!r}.",
            "",
            "Loosen the expressions; they are searched in full names such as model.layers.0.mlp.down_proj.",
        )
    return tuple(Block(name=k, modules=tuple(groups[k])) for k in sorted(groups, key=natural_key))


def end_modules(model: nn.Module) -> list[Module]:
    """Return embedding and head as matrices; a head that is tied to the embedding is no matrix of its own."""
    ends: dict[int, Module] = {}
    names = {id(m): name for name, m in model.named_modules()}
    for read in ("get_input_embeddings", "get_output_embeddings"):
        owner = getattr(pretrained(model), read)() if hasattr(model, read) else None
        weight = getattr(owner, "weight", None)
        if weight is not None and weight.ndim == 2:
            ends.setdefault(id(weight), Module(name=names[id(owner)], d_in=weight.shape[1], d_out=weight.shape[0]))
    return list(ends.values())


def reader_of(model: nn.Module, name: str) -> nn.Module | None:
    """The module that multiplies a matrix with vectors: of an embedding the head that is tied to it, None where none is."""
    owner, parameter = weight_of(model, name)
    if not isinstance(owner, nn.Embedding):
        return owner
    known = pretrained(model)
    head = known.get_output_embeddings() if hasattr(known, "get_output_embeddings") else None
    return head if getattr(head, "weight", None) is parameter else None


def left_out(model: nn.Module, blocks: Sequence[Any]) -> dict[str, int]:
    """Matrices that no block of a model or plan holds, embeddings and the output head aside: weights by full name, in order."""
    covered = {m if isinstance(m, str) else m.name for b in blocks for m in b.modules}
    seen = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    seen |= {id(p) for p in (head.parameters() if head is not None else ())}
    seen |= {id(p) for n, p in model.named_parameters() if n in covered or n.rpartition(".")[0] in covered}
    numel: dict[str, int] = {}
    for name, p in model.named_parameters():
        if p.ndim >= 2 and p.is_floating_point() and id(p) not in seen and not name.endswith("bias"):
            numel[name] = p.numel()
    return numel


# Mixers of state space models use these weights inside a fused kernel, where an adapter's output would be lost: PEFT refuses.
_MIXERS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_FUSED = ("out_proj", "conv1d")


def adaptable(model: nn.Module, blocks: Sequence[Block]) -> tuple[list[Block], list[str]]:
    """The blocks that are left without the matrices on which no adapter can go, and the names of those matrices."""
    names = [m.name for b in blocks for m in b.modules]
    lost = _renamed(model, names)
    if getattr(getattr(model, "config", None), "model_type", None) in _MIXERS:
        lost |= {n for n in names if n.split(".")[-1] in _FUSED}
    kept = [dataclasses.replace(b, modules=tuple(m for m in b.modules if m.name not in lost)) for b in blocks]
    return [b for b in kept if b.modules], [n for n in names if n in lost]


def _renamed(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Linear layers that PEFT takes for single experts of a stack, asked of PEFT itself: these get no adapter."""
    if not any(p.ndim == 3 for p in model.parameters()):
        return set()
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # without PEFT, or with one that does not rename: nothing is lost
        return set()
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    config = LoraConfig(target_modules=sorted(linear))
    convert_peft_config_for_transformers(config, model, None)
    return (set(names) & linear) - set(config.target_modules or ())


ENOUGH = 0.99  # of the matrices' weights; where blocks hold less, it is said


def share_held(model: nn.Module, blocks: Sequence[Any]) -> float:
    """Share of the matrices' weights that the blocks hold, embeddings and the output head aside."""
    covered = sum(b.numel for b in blocks)
    return covered / (covered + sum(left_out(model, blocks).values()))


def _compile(pattern: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidInput(f"{name}={pattern!r} is not a regular expression ({error}).", "", "Correct it.") from error


def _roots(model: nn.Module, by: str) -> list[tuple[str, nn.Module]]:
    try:
        return layers(model)
    except UnknownStructure:
        if by == "layer":
            raise
        return [("", model)]


def _text_of(match: re.Match[str]) -> str:
    """The first group of a match, where it has one, else all of it."""
    return match.group(1) if match.groups() and match.group(1) is not None else match.group()


def _sample(tensor: torch.Tensor) -> bytes:
    """At most 512 evenly spaced values, rounded to bfloat16, so that a cast changes nothing."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 512)
    return flat[::step][:512].to(torch.float32).to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()


def quantised(model: nn.Module) -> list[str]:
    """Full names of weights that are held as packed integers (bitsandbytes and its like)."""
    linear = [(name, m.weight) for name, m in model.named_modules() if isinstance(m, nn.Linear) and hasattr(m, "weight")]
    return [f"{name}.weight" for name, weight in linear if weight is not None and not weight.is_floating_point()]


def fingerprint(model: nn.Module) -> str:
    """Content hash of a model: names, shapes and a sample of every tensor (of quantised ones only the name)."""
    h, packed = hashlib.sha256(), tuple(quantised(model))
    for name, tensor in sorted(model.state_dict().items()):
        if packed and name.startswith(packed):
            h.update(name.encode() if name in packed else b"")
            continue
        h.update(f"{name}:{tuple(tensor.shape)}".encode())
        h.update(_sample(tensor))
    return h.hexdigest()[:16]


def skeleton(model: nn.Module) -> str:
    """Content hash of what quantisation leaves as it is: all names and shapes, and values outside the ``nn.Linear`` weights."""
    h = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        for key, tensor in sorted(module._parameters.items()):
            if tensor is None:
                continue
            linear = isinstance(module, nn.Linear) and key == "weight"
            shape = (module.out_features, module.in_features) if linear else tuple(tensor.shape)
            h.update(f"{name}.{key}:{shape}".encode())
            h.update(b"" if linear else _sample(tensor))
    return h.hexdigest()[:16]


def name_of(model: nn.Module) -> str:
    """Return where a model was loaded from; of one that was not, the name of its class."""
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__


def describe(model: nn.Module, identifier: str | None = None) -> dict[str, Any]:
    """``{id, revision, digest, skeleton, quantised}`` of a loaded model, as the files carry it.

    Where its checkpoint has layers that predict further tokens, ``further`` has the number of their tensors and their bytes.
    """
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    record = {"id": identifier or name_of(model), "revision": revision, "digest": fingerprint(model)}
    further = None if getattr(model, "config", None) is None else predicting(model)
    beside = {} if further is None else {"further": further}
    return {**record, "skeleton": skeleton(model), "quantised": bool(quantised(model)), **beside}


_FINITE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_PIECE = 1 << 24  # numbers that are looked at together: what is made of them is as large


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor in parts of few rows."""
    return tensor.split(max(1, _PIECE * len(tensor) // max(tensor.numel(), 1))) if tensor.ndim else [tensor]


def check_finite(model: nn.Module, *, once: bool = False) -> None:
    """Refuse a model with NaN or infinite weights; ``once`` spares one whose weights lie on disk further readings of them."""
    if model in _FINITE:
        return
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            what = f"{name} has no values: it is on the device meta."
            raise BadModel(what, "A model is measured with its weights.", "Load it by layerbudget.load_model(NAME).")
        if tensor.is_floating_point() and not all(bool(torch.isfinite(part).all()) for part in _pieces(tensor)):
            bad = int((~torch.isfinite(tensor)).sum())
            raise BadModel(
                f"{name} holds {bad} values that are not finite.", "Weights must be finite.", "Reload or repair the checkpoint."
            )
    if once:
        _FINITE.add(model)
