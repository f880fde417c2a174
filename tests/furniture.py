"""A folder in which the commands of README and docs can run: a tiny model, rows and a text by the names that pages use."""

from __future__ import annotations

import json
from pathlib import Path

from tests import zoo
from transformers import AutoTokenizer

from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.models.loading import DEMO_MODEL


def furnish(place: Path, positions: int = 64, heads: int = 4) -> None:
    """A tiny model with the embedded model's tokenizer, rows of chat, a text, scores and tasks, by the names that pages use."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    model = zoo.build("llama", **sizes, max_position_embeddings=positions, **shape)
    model.save_pretrained(place / "MODEL")
    model.config.save_pretrained(place)
    tokenizer.save_pretrained(place / "MODEL")
    save_gguf(model.float(), tokenizer, place / "F16")
    (place / "F16" / "model.gguf").rename(place / "model-f16.gguf")
    mixture = zoo.build("qwen3-moe", vocab_size=len(tokenizer), max_position_embeddings=positions, head_dim=64 // heads)
    mixture.save_pretrained(place / "MIXTURE")
    tokenizer.save_pretrained(place / "MIXTURE")
    rows = [{"prompt": f"Say {i}:", "completion": f" it is {i * i} of {i}"} for i in range(40)]
    for name in ("chat.jsonl", "my.jsonl"):
        (place / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    (place / "my.txt").write_text("\n\n".join(f"def f{i}(x):\n    return x + {i * i}" for i in range(300)))
    (place / "other.txt").write_text("\n\n".join(f"def g{i}(y):\n    return {i} - 3 * y" for i in range(300)))
    (place / "mine.csv").write_text("layer,score\n0,1.5\n1,0.5\n")
