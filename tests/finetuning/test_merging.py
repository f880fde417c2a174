"""Merged adapters compute what the adapter beside its base does, in memory and as a folder that is read again."""

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests import zoo

from layerbudget.errors import BadModel
from layerbudget.finetuning.adapters import load_adapter

QV = ["q_proj", "v_proj"]


def tied(**changes):
    return zoo.tiny("llama", num_hidden_layers=2, tie_word_embeddings=True, **changes)


def gpt2():
    return zoo.tiny("gpt2")


def ids():
    return torch.arange(3, 40)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=ids()).logits


def save(make, config, folder):
    """An adapter that is not at its start, on a base that is saved beside it; its logits, by PEFT."""
    base = make()
    base.save_pretrained(folder / "base")
    adapted = get_peft_model(base, config)
    zoo.perturb(adapted, scale=0.1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    adapted.save_pretrained(folder / "adapter")
    return logits(PeftModel.from_pretrained(type(base).from_pretrained(folder / "base"), str(folder / "adapter")))


def merged_and_read_again(make, config, folder):
    """Differences of the logits of the merged model and of its folder; the model that was read."""
    truth, kind = save(make, config, folder), type(make())
    merged = load_adapter(kind.from_pretrained(folder / "base"), folder / "adapter", merge=True)
    merged.save_pretrained(folder / "merged")
    again = kind.from_pretrained(folder / "merged")
    assert not hasattr(merged, "peft_config") and not merged.training
    assert float((truth - logits(make())).abs().max()) > 1e-3
    return [float((logits(model) - truth).abs().max()) for model in (merged, again)], again


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:.*save_embedding_layers", "ignore:.*fan_in_fan_out")
@pytest.mark.parametrize(
    ("make", "own_head", "options"),
    [
        (tied, False, {"target_modules": QV}),
        (tied, True, {"target_modules": [*QV, "lm_head"]}),
        (tied, True, {"target_modules": [*QV, "embed_tokens"]}),
        (tied, True, {"target_modules": [*QV, "embed_tokens", "lm_head"]}),
        (tied, False, {"target_modules": [*QV, "embed_tokens"], "ensure_weight_tying": True}),
        (tied, True, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
        (tied, True, {"target_modules": QV, "modules_to_save": ["embed_tokens"]}),
        (tied, False, {"target_modules": QV, "trainable_token_indices": [5, 6]}),
        (tied, True, {"target_modules": [*QV, "lm_head"], "use_dora": True}),
        (tied, False, {"target_modules": QV, "layer_replication": [[0, 2], [1, 2]]}),
        (gpt2, True, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
        (lambda: tied(attention_bias=True), False, {"target_modules": QV, "lora_bias": True, "use_rslora": True}),
    ],
)
def test_weights_that_are_shared_are_merged_as_they_were_beside(tmp_path, make, own_head, options):
    differences, again = merged_and_read_again(make, LoraConfig(r=2, **options), tmp_path)
    assert max(differences) < 1e-4
    assert again.config.tie_word_embeddings is not own_head


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "VeraConfig", "LNTuningConfig"])
def test_other_types_that_change_weights_are_merged_too(tmp_path, kind):
    options = {"target_modules": ["input_layernorm" if kind == "LNTuningConfig" else "v_proj"]}
    options |= {"feedforward_modules": []} if kind == "IA3Config" else {}
    differences, _ = merged_and_read_again(tied, getattr(peft, kind)(**options), tmp_path)
    assert max(differences) < 1e-4


def test_what_peft_cannot_merge_and_what_computes_something_else_are_refused(tmp_path, monkeypatch):
    save(tied, LoraConfig(r=2, target_modules=QV, lora_bias=True), tmp_path)
    with pytest.raises(BadModel, match=r"cannot merge .*no bias\. Serve the adapter beside its base"):
        load_adapter(tied(), tmp_path / "adapter", merge=True)
    save(tied, LoraConfig(r=2, target_modules=QV), tmp_path / "plain")
    monkeypatch.setattr("layerbudget.finetuning.merging._copy_shared", lambda adapted: adapted.delete_adapter("default"))
    with pytest.raises(BadModel, match=r"another one than the adapter beside its base.*Load the base again"):
        load_adapter(tied(), tmp_path / "plain" / "adapter", merge=True)


def test_a_merge_in_bfloat16_says_what_rounding_costs(tmp_path, caplog):
    save(tied, LoraConfig(r=2, lora_alpha=0.02, target_modules=QV), tmp_path)
    load_adapter(tied().bfloat16(), tmp_path / "adapter", merge=True)
    assert "of what the adapter changes. A base in float32 keeps more." in caplog.text


def test_zeros_that_a_merge_fills_are_counted(tmp_path, caplog):
    def pruned():
        model = tied()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "_proj" in name:
                    parameter[:, ::2] = 0
        return model

    save(pruned, LoraConfig(r=2, target_modules=QV), tmp_path)
    count = sum(int((p == 0).sum()) for n, p in pruned().named_parameters() if "q_proj" in n or "v_proj" in n)
    load_adapter(pruned(), tmp_path / "adapter", merge=True)
    assert f"filled {count:,} zeros of the base, 50 %" in caplog.text
    caplog.clear()
    load_adapter(pruned(), tmp_path / "adapter")
    assert "zeros" not in caplog.text
