"""Checkpoints whose matrices are packed already: they become plain numbers when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..errors import BadModel, CorruptFile, InvalidInput
from ..gguf.folder import on_rounded
from ..storage import reading

ZERO_POINTS = "transformers 5.23 does not load packed zero points (compressed-tensors 0.20); vLLM reads them."
EXPERTS = "transformers 5.23 takes all experts for one format and misreads these; vLLM reads each layer's own."
UNREAD = frozenset({ZERO_POINTS, EXPERTS})  # notes in the receipt of a folder for vLLM alone


def unpacked(model: nn.Module) -> nn.Module:
    """The same model with its packed matrices as plain ``nn.Linear``: every verb finds weights, and no forward rounds again.

    transformers makes the numbers at the first forward. They are made here, so that nothing depends on who runs it; those of
    floating point in 4 bits are in bfloat16 whatever was asked, in which they are exact.
    """
    names = packed_matrices(model)
    if not names:
        return model
    with torch.no_grad():
        cast(Any, model).hf_quantizer.compressor.decompress_model(model)
    for name in names:
        packed = cast(nn.Linear, model.get_submodule(name))
        plain = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(packed.weight.detach().to(cast(Any, model).dtype)), packed.bias
        model.set_submodule(name, plain.train(packed.training))
    cast(Any, model).hf_quantizer.remove_quantization_config(model)
    return model


def packed_matrices(model: nn.Module) -> list[str]:
    """Return the names of the modules of a model whose weights compressed-tensors holds."""
    return [name for name, module in model.named_modules() if _rounds_weights_alone(module)]


def _rounds_weights_alone(module: nn.Module) -> bool:
    """Whether compressed-tensors holds a module's weights, and its inputs stay as they are."""
    scheme = getattr(module, "quantization_scheme", None)
    return "weight_packed" in module._parameters or (scheme is not None and scheme.input_activations is None)


def packed_before(config: Any) -> str:
    """Return a sentence on a checkpoint whose matrices were stored in few bits; empty where they were not."""
    packed = getattr(config, "quantization_config", None)
    if not packed:
        return ""
    fields = packed if isinstance(packed, dict) else packed.to_dict()
    method = str(fields.get("quant_method"))
    return on_rounded(method, fine="fp8" in method)


def check_unread(folder: Path) -> None:
    """Refuse a folder that was written here for vLLM alone; its receipt says so.

    Raises:
        BadModel: transformers does not load it, or misreads it.
    """
    receipt = folder / "receipt.json"
    try:
        record = reading.read(receipt, "receipt", limit=1 << 26, as_type=dict[str, Any]) if receipt.is_file() else {}
    except CorruptFile:  # or another tool's: the weights may be read all the same
        record = {}
    if isinstance(notes := record.get("notes"), list) and (why := [note for note in notes if note in UNREAD]):
        raise BadModel(
            f"{folder} is a folder for vLLM alone.",
            why[0],
            f"Evaluate it in vLLM (vllm serve {folder}). What the plan cost when it was made is in {folder}/README.md.",
        )


def as_numbers(config: Any) -> dict[str, Any]:
    """Return options of ``from_pretrained`` that make plain numbers of a checkpoint's floats of few bits (fp8, mxfp4).

    Where the device computes with them, transformers would leave them as they are, and there would be no matrices to look at.
    """
    quantization = getattr(config, "quantization_config", None)
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in ("fp8", "mxfp4"):
        return {}
    config.quantization_config = {**quantization, "dequantize": True}
    return {"config": config}


def in_one_precision(model: Any, config: Any) -> None:
    """Give a model whose packed matrices became numbers one precision, and let it be saved as these.

    transformers converts these matrices to the precision that was asked for and leaves all others as they are stored.
    """
    if getattr(config, "quantization_config", None) is None or getattr(model, "hf_quantizer", None) is not None:
        return
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in strict):
            parameter.data = parameter.data.to(model.config.dtype)
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions  # they would pack what is saved again


def _methods() -> list[str]:
    """The ways to quantise that transformers reads, by the names in ``config.json``."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return sorted(map(str, AUTO_QUANTIZATION_CONFIG_MAPPING))


def check_quantised(name: str, config: Any, stream: bool | None, four_bit: bool) -> None:
    """Refuse to stream, or to hold in 4 bits, a checkpoint whose matrices are packed; and any of an unknown method."""
    packed = getattr(config, "quantization_config", None)
    if isinstance(packed, dict) and not (packed.get("load_in_4bit") or packed.get("load_in_8bit")):  # flags of bitsandbytes
        method, known = packed.get("quant_method"), _methods()
        if method not in known:
            said = "does not say by which quant_method, as MLX leaves it out" if method is None else f"names {method}"
            raise BadModel(
                f"The weights of {name} are quantised, and quantization_config in config.json {said}.",
                f"transformers reads {', '.join(known)}.",
                "Take the model that was quantised. If its weights are plain numbers, delete that entry from config.json.",
            )
    if packed and (stream or four_bit):
        raise InvalidInput(
            f"The files of {name} hold packed integers.",
            "They become numbers when the model is loaded, all of them at once.",
            f"Leave {'--stream' if stream else '--four-bit'} out.",
        )
