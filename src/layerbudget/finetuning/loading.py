"""Put a saved adapter on a model: LoRA ranks or a mixture of LoRA experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ..errors import BadModel, NotFound
from ..models.loading import foreign
from ..storage import reading


class AdapterFile(msgspec.Struct):
    """What is read of an ``adapter_config.json`` before PEFT reads it."""

    peft_type: str | None = None
    base_model_name_or_path: str | None = None


def load_adapter(model: nn.Module, folder: Path | str, *, merge: bool = False) -> Any:
    """The model with a saved adapter, in evaluation mode; every tensor of the file is in it.

    ``PeftModel.from_pretrained`` knows mixtures of experts only after ``import layerbudget.decisions.experts.method``, and only
    warns where tensors find no place; both are seen to here.

    Args:
        model: The base model.
        folder: What ``save_pretrained`` wrote (``seed-0/adapter`` of a fine-tuning).
        merge: Add the update to the base's weights and return the plain model (ranks only).

    Returns:
        A ``PeftModel``, or the merged model.

    Raises:
        NotFound: No adapter is there.
        BadModel: It does not fit this model, or a mixture should be merged.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    from ..decisions.experts import method  # noqa: F401  (registers the mixture with PEFT)

    folder = Path(folder)
    if not (folder / "adapter_config.json").is_file():
        inside = sorted(str(p.parent) for p in folder.glob("*/adapter/adapter_config.json"))
        raise NotFound(
            f"{folder} holds no adapter_config.json.", "An adapter is a folder that save_pretrained wrote.",
            f"Point to {inside[0]}." if inside else "Check the path.",
        )  # fmt: skip
    kind = reading.read(folder / "adapter_config.json", "adapter", limit=1 << 26, as_type=AdapterFile).peft_type
    if merge and kind == "LORA_EXPERTS":
        raise BadModel("A mixture of experts cannot be merged.", "Its update depends on the token.", "Keep it as an adapter.")
    with foreign(f"The adapter {folder} does not fit this model", "", "Give the base model that it was trained on."):
        adapted = PeftModel.from_pretrained(model, str(folder))
        saved = load_file(folder / "adapter_model.safetensors")
        with torch.inference_mode():  # options that PEFT does not check fail in the first forward
            adapted.eval()(input_ids=torch.tensor([[0, 1]], device=next(model.parameters()).device))
    embeddings = any("embed" in name or "lm_head" in name for name in saved)  # left to itself, PEFT asks the hub about them
    present = get_peft_model_state_dict(adapted, save_embedding_layers=embeddings)
    lost = [k for k, v in saved.items() if k not in present or not torch.equal(present[k].cpu(), v.to(present[k].dtype))]
    if lost:
        raise BadModel(
            f"{len(lost)} of the {len(saved)} tensors of {folder} have no place in this model, first {lost[0]}.", "",
            "Give the base model that it was trained on.",
        )  # fmt: skip
    return (adapted.merge_and_unload() if merge else adapted).eval()
