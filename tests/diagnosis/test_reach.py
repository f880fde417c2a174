"""What of a model every verb reaches, against what the verbs themselves do."""

from __future__ import annotations

import pytest
import transformers
from tests import zoo

from layerbudget.diagnosis.diagnosis import sample_of
from layerbudget.diagnosis.reach import reached
from layerbudget.models.blocks import partition, share_held

VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def shares(model):
    found = reached(model, sample_of(model, zoo.tokens(2, 12)))
    return {r.verb: r.share for r in found}, {r.verb: r.left for r in found}


def test_a_plain_decoder_is_reached_whole_but_for_experts_that_it_lacks():
    share, left = shares(zoo.tiny("llama"))
    assert share.pop("plan expert-pruning") == 0.0 and "no routed experts" in left.pop("plan expert-pruning")
    assert set(share.values()) == {1.0} and not any(left.values())


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "llama4"])
def test_stacks_of_experts_are_in_no_packed_file_and_are_what_can_go(name):
    model = zoo.tiny(name)
    held = share_held(model, partition(model))  # routers that are no matrix of a Linear aside
    whole = sum(b.numel for b in partition(model)) / held
    stacks = sum(m.numel for b in partition(model) for m in b.modules if m.copies > 1)
    share, left = shares(model)
    assert share["score, plan sparsity, apply"] == pytest.approx(held)
    assert share["plan expert-pruning"] == pytest.approx(stacks / whole)
    if name == "qwen3-moe":
        assert share["plan bits"] == pytest.approx(held - stacks / whole) and "stack of experts" in left["plan bits"]
        assert share["plan bits --format gguf"] == pytest.approx(held)
    if name == "llama4":
        assert share["plan bits"] == 0.0, "transformers reads its experts one by one"
        assert share["plan shapes"] < held
    if name == "gpt-oss":
        assert share["plan shapes"] == 0.0 and "sinks" in left["plan shapes"]
    if name == "qwen3-moe":
        assert 0 < share["plan shapes"] < held and "--parts heads alone" in left["plan shapes"]


def test_of_a_model_that_sees_the_language_model_is_reached():
    text = transformers.LlamaConfig(**zoo.GROUPED)
    vision = transformers.CLIPVisionConfig(**VISION)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    share, left = shares(model)
    held = share_held(model, partition(model))
    assert 0.5 < held < 0.7
    for verb in ("score, plan sparsity, apply", "plan bits", "plan bits --format gguf", "plan ranks, finetune"):
        assert share[verb] == pytest.approx(held) and "vision_tower" in left[verb]
