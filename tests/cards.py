"""What the hub's own library reads in the model card of a folder."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

RELATIONS = ("adapter", "finetune", "merge", "quantized")  # that the hub knows


def card_of(folder: Path) -> ModelCard:
    """The card of a folder, checked as far as that goes without the hub: metadata, relation, a table and the use."""
    card = ModelCard((folder / "README.md").read_text(encoding="utf-8"), ignore_metadata_errors=False)
    held = card.data.to_dict()
    assert ("base_model" in held) == ("base_model_relation" in held)
    assert held.get("base_model_relation", "adapter") in RELATIONS and ("library_name" in held or "gguf" in held["tags"])
    assert card.text.strip().startswith("# ") and "| chosen by | " in card.text and "Use it:" in card.text
    assert "More Information Needed" not in card.text
    return card
