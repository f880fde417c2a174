"""The recipe, run by llm-compressor where it is installed, judged by the weights."""

from __future__ import annotations

import pytest
import torch
from tests import zoo

from layerbudget.decisions.sparsity.save import recipe
from layerbudget.models.blocks import weight_of


@pytest.mark.slow
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_every_modifier_of_the_recipe_takes_effect(tmp_path, method):
    pytest.importorskip("llmcompressor")
    datasets = pytest.importorskip("datasets")
    from llmcompressor import oneshot
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model, data = zoo.build("llama"), zoo.tokens()
    plan = zoo.plan(model)
    model.save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    (tmp_path / "recipe.yaml").write_text(recipe(plan, method))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    rows = {"input_ids": data.input_ids.tolist(), "attention_mask": torch.ones_like(data.input_ids).tolist()}
    oneshot(
        model=model,
        processor=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0"),
        dataset=datasets.Dataset.from_dict(rows),
        recipe=str(tmp_path / "recipe.yaml"),
        num_calibration_samples=len(data),
        max_seq_length=data.length,
    )
    for block in plan.blocks:
        zeros = sum(int((weight_of(model, m)[1] == 0).sum()) for m in block.modules)
        # llm-compressor rounds down in every row (Wanda) or block of columns
        assert zeros / block.numel == pytest.approx(block.value, abs=0.03), block.name
