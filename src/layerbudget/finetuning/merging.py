"""An adapter in the weights of its base, compared with the adapter beside the base before it is handed out."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import BadModel
from ..models.loading import silent

logger = logging.getLogger(__name__)

REMEDY = "Serve the adapter beside its base."
_TOKENS = 24  # of the comparison
_SPARSE = 0.01  # share of zeros in the changed matrices from which on their loss is said


@silent()
def merge_adapter(adapted: Any) -> nn.Module:
    """Return the base of a ``PeftModel`` with its adapter added to the weights, in evaluation mode; the logits are the same.

    A weight that two modules share (embedding and head, or repeated layers) is copied first where the adapter changes it, since
    the update of one would act on both. An embedding and a head that still agree after the merge share their weight again;
    otherwise ``config.tie_word_embeddings`` becomes false, so that the saved folder is read with both. Zeros of the base that
    are lost are counted in a warning.

    Raises:
        BadModel: PEFT cannot merge this adapter, or the logits of the merged model are others. The base is then changed.
    """
    base = adapted.get_base_model()
    ids = probe(base)
    expected, plain = _logits(adapted.eval(), ids), _logits(adapted, ids, disabled=True)
    shared = [c for c in {id(c): c for c in (base.config, base.config.get_text_config())}.values() if _says_tied(c)]
    copied = _copy_shared(adapted)
    zeros = _zeros(base)
    try:
        merged: nn.Module = adapted.merge_and_unload().eval()
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadModel(f"PEFT cannot merge this adapter: {first[:300]}.", "", REMEDY) from error
    _say_shared(merged, shared, copied)
    _check_logits(merged, ids, expected, plain)
    _say_zeros(merged, zeros)
    return merged


def probe(model: nn.Module) -> Tensor:
    """Return token ids ``(1, length)`` from the whole vocabulary, without those that stand for an end, an image or padding."""
    config: Any = model.config
    record = config.to_dict()
    records = [record, *(part for part in record.values() if isinstance(part, dict))]
    special = {v for r in records for k, v in r.items() if str(k).endswith(("token_id", "token_index")) and isinstance(v, int)}
    embedding = cast(Any, model).get_input_embeddings()
    rows = int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or 2 * _TOKENS
    ids = [i for i in torch.linspace(0, rows - 1, min(_TOKENS, max(2, most // 2))).long().tolist() if i not in special]
    return torch.tensor([ids or [0, 0]], device=next(model.parameters()).device)


@torch.no_grad()
def _logits(model: Any, ids: Tensor, *, disabled: bool = False) -> Tensor:
    """Logits of a model, in float32; of its base alone where the adapter is put aside."""
    if disabled:
        with model.disable_adapter():
            return _logits(model, ids)
    return cast(Tensor, model(input_ids=ids)[0].float().clone())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _precision(model: nn.Module) -> float:
    """Relative precision of the coarsest weights; that of 4 bits where they are integers."""
    return max(torch.finfo(p.dtype).eps if p.is_floating_point() else 2.0**-5 for p in model.parameters())


def _check_logits(merged: nn.Module, ids: Tensor, expected: Tensor, plain: Tensor) -> None:
    """Refuse a merged model that is another one than the adapter beside its base, beyond rounding."""
    off, precision = _rms(_logits(merged, ids) - expected), _precision(merged)
    size, effect = _rms(expected), _rms(expected - plain)
    if not off <= max(1e-4, 8 * precision) * size:
        raise BadModel(
            f"The merged model is another one than the adapter beside its base: logits differ by {off:.2g}, "
            f"and the adapter itself changes them by {effect:.2g}.",
            "Both should be equal up to rounding.",
            f"{REMEDY} Load the base again: this one is changed.",
        )
    if precision > 1e-5 and off > 0.1 * effect > 0:
        logger.warning(
            "The merged weights are rounded to the precision of the base: logits differ by %.0f %% of what the adapter "
            "changes. A base in float32 keeps more.",
            100 * off / effect,
        )


# --- shared weights ---------------------------------------------------------------------------------------------------------


def _embeddings(model: Any) -> tuple[Any, Any]:
    """Embedding and head of a model; None for what it lacks."""
    sides = (model.get_input_embeddings(), model.get_output_embeddings())
    return cast(tuple[Any, Any], tuple(getattr(m, "base_layer", m) for m in sides))


def _says_tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _copy_shared(adapted: Any) -> bool:
    """Give every module that shares an adapted weight a copy of its own; return whether layers are repeated."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = adapted.get_base_model()
    repeated = any(getattr(config, "layer_replication", None) for config in adapted.peft_config.values())
    changed = {id(m.get_base_layer()) for m in base.modules() if isinstance(m, BaseTunerLayer)}
    tables = {id(m) for m in _embeddings(base)}
    owners: dict[int, list[tuple[Any, str]]] = {}
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    for sharing in owners.values():
        modules = {id(module) for module, _ in sharing}
        if modules & changed or (repeated and not modules & tables):
            for module, name in sharing[1:]:
                module._parameters[name] = nn.Parameter(module._parameters[name].detach().clone(), requires_grad=False)
    return repeated


def _say_shared(merged: Any, tied: list[Any], repeated: bool) -> None:
    """Let embedding and head share their weight again where it stayed one; the configurations that said so say what is true."""
    if repeated:
        logger.warning("The adapter repeats layers: the merged model has %d of its own.", merged.config.num_hidden_layers)
    table, head = (getattr(m, "weight", None) for m in _embeddings(merged))
    if not tied or head is None or table is None:
        return
    near = 4 * torch.finfo(head.dtype).eps * float(head.detach().abs().max())
    one = table is head or torch.allclose(table, head, rtol=0, atol=near)
    for config in tied:
        config.tie_word_embeddings = one  # PEFT may have written the other
    if one:
        merged.get_output_embeddings().weight = table
        return
    logger.warning(
        "The adapter changes one of two matrices that the base shares: the merged model has a head of its own, %s bytes more, "
        "and its config.json says tie_word_embeddings false.",
        f"{head.numel() * head.element_size():,}",
    )


# --- zeros ------------------------------------------------------------------------------------------------------------------


def _zeros(base: nn.Module) -> dict[str, int]:
    """Zeros of every matrix of a base, by its name without adapters."""
    matrices = ((n.replace(".base_layer", "").replace(".original_module", ""), p) for n, p in base.named_parameters())
    return {n: zeros_of(p) for n, p in matrices if p.ndim > 1 and "lora_" not in n}


def zeros_of(weight: Tensor) -> int:
    """How many numbers of a weight are zero; none of one that is packed or not there."""
    return int((weight == 0).sum()) if weight.is_floating_point() and not weight.is_meta else 0


def sparse(zeros: int, total: int) -> bool:
    """Whether so many zeros of a base are no accident."""
    return zeros > _SPARSE * total


def _say_zeros(merged: nn.Module, before: dict[str, int]) -> None:
    after, sizes = _zeros(merged), {n: p.numel() for n, p in merged.named_parameters()}
    lost = {n: count - after[n] for n, count in before.items() if after.get(n, count) != count}
    zeros, total = sum(lost.values()), sum(sizes[n] for n in lost)
    if sparse(zeros, total):
        logger.warning(
            "The merge filled %s zeros of the base, %.3g %% of the weights that the adapter changes: the merged model is not "
            "sparse there. To keep the zeros, serve the adapter beside its base, or prune the merged model again.",
            f"{zeros:,}",
            100 * zeros / total,
        )
