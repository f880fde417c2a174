"""What a plan of formats decides about: weight matrices, some of them together, and the two ends of the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ...compressors.formats import ALIGNMENT, GGUF
from ...errors import InvalidInput, UnknownBlock
from ...models.blocks import layers, partition, pretrained, weight_of
from ...records import Block, Module, natural_key
from .runtimes import Runtime


def end_modules(model: nn.Module) -> list[Module]:
    """Embedding and head as matrices, in that order; a head that is tied to the embedding is no matrix of its own."""
    found: list[Module] = []
    seen: set[int] = set()
    owners = {id(m): name for name, m in model.named_modules()}
    for read in ("get_input_embeddings", "get_output_embeddings"):
        owner = getattr(pretrained(model), read)() if hasattr(model, read) else None
        weight = getattr(owner, "weight", None)
        if owner is None or weight is None or weight.ndim != 2 or id(weight) in seen:
            continue
        seen.add(id(weight))
        d_out, d_in = weight.shape
        found.append(Module(name=owners[id(owner)], d_in=d_in, d_out=d_out))
    return found


def items_of(model: nn.Module, runtime: Runtime, by: str = "linear") -> tuple[Block, ...]:
    """Blocks that get one format each.

    Args:
        model: Any transformers model with one list of layers.
        runtime: Which matrices must agree, and whether embedding and head are decided about.
        by: ``linear`` or ``layer``.

    Raises:
        InvalidInput: Another partition.
        UnknownStructure: The model has no list of layers.
    """
    if by not in ("linear", "layer"):
        raise InvalidInput(f"by is {by!r}.", "Formats are planned by linear or by layer.", "Use linear.")
    groups: dict[str, list[Module]] = {}
    for block in partition(model, by):
        for module in block.modules:
            groups.setdefault(block.name if by == "layer" else runtime.together(module.name), []).append(module)
    if runtime.ends:
        groups |= {m.name: [m] for m in end_modules(model)}
    return tuple(Block(name=k, modules=tuple(groups[k])) for k in sorted(groups, key=natural_key))


def modules_by_name(model: nn.Module, names: Iterable[str]) -> dict[str, Module]:
    """The matrices of some names, with their shapes.

    Raises:
        UnknownBlock: The model has none of that name.
    """
    known = {m.name: m for b in partition(model, "linear") for m in b.modules} | {m.name: m for m in end_modules(model)}
    for name in names:
        if name not in known:
            raise UnknownBlock(f"The model has no weight matrix {name!r}.", "", "Plan for this model.")
    return {name: known[name] for name in names}


def fixed_bytes(model: nn.Module, blocks: Iterable[Block], family: str) -> int:
    """Bytes of the tensors that are no item of a plan: 16 bits per number, vectors of GGUF 32, with its padding."""
    mine = {id(weight_of(model, m.name)[1]) for b in blocks for m in b.modules}
    total, seen = 0, set(mine)
    for parameter in model.parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            exact = parameter.numel() * (4 if family == GGUF and parameter.ndim == 1 else 2)
            total += -(-exact // ALIGNMENT) * ALIGNMENT if family == GGUF else exact
    return total


def layer_index(model: nn.Module, block: Block) -> int | None:
    """The layer that a block lies in; None for embedding and head.

    Raises:
        InvalidInput: It spans layers.
    """
    for i, (name, _) in enumerate(layers(model)):
        inside = [m.name.startswith(f"{name}.") for m in block.modules]
        if all(inside):
            return i
        if any(inside):
            raise InvalidInput(f"{block.name} spans layers.", "A block lies in one layer.", "Partition by linear or by layer.")
    return None
