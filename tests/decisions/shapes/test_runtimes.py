"""Shapes for one runtime: what vLLM's folder says, read back by independent code, and plans of what a runtime can load."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.shapes.apply import apply_shapes, remove_units
from layerbudget.decisions.shapes.layouts import find_mlp
from layerbudget.decisions.shapes.nemotron import check_nemotron, save_nemotron
from layerbudget.decisions.shapes.plan import _alike, plan_shapes
from layerbudget.decisions.shapes.program import layers_differ
from layerbudget.decisions.shapes.save import check_exportable
from layerbudget.errors import BadModel, InvalidInput
from layerbudget.models.blocks import layers
from layerbudget.models.loading import load_model, load_tokenizer

QUICK = {"multiple": 4, "passes": 24.0, "strides": 1, "draws": 1, "batch_size": 4}
KINDS = ["llama", "llama-tied", "mistral", "qwen2"]
ALL = ("heads", "mlp")


def plain_logits(folder, ids):
    """Logits of a folder by the words of its config alone, in double precision: ``(tokens, vocabulary)``."""
    c = json.loads((folder / "config.json").read_text())
    w = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    d, heads = c["head_dim"], c["num_attention_heads"]
    angle = np.arange(len(ids))[:, None] / c["rope_parameters"]["rope_theta"] ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[name]

    def dense(x, name, bias=False):
        assert (f"{name}.bias" in w) == bias
        return x @ w[f"{name}.weight"].T + (w[f"{name}.bias"] if bias else 0)

    def turned(x):
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    x = w["model.embed_tokens.weight"][ids]
    for i, block in enumerate(c["block_configs"]):
        at, biased = f"model.layers.{i}", c["qkv_bias"]
        groups = heads // block["attention"]["n_heads_in_group"]
        h = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (dense(h, f"{at}.self_attn.{p}_proj", biased).reshape(len(ids), -1, d) for p in "qkv")
        assert q.shape[1] == heads and k.shape[1] == groups
        q, k, v = turned(q), np.repeat(turned(k), heads // groups, 1), np.repeat(v, heads // groups, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d) + np.triu(np.full((len(ids),) * 2, -np.inf), 1)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(len(ids), -1)
        x = x + dense(mixed, f"{at}.self_attn.o_proj", c["attention_bias"])
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (dense(h, f"{at}.mlp.{p}_proj", c["mlp_bias"]) for p in ("gate", "up"))
        assert gate.shape[1] == block["ffn"]["intermediate_size"]
        x = x + dense(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj", c["mlp_bias"])
    head = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm.weight") @ w[f"{head}.weight"].T


def check_folder(model, folder):
    """What transformers' loader and plain code read from a folder is the model."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    widths = [find_mlp(m, n).width for n, m in layers(model)]
    assert [b.ffn.intermediate_size for b in config.block_configs] == widths
    assert config.num_hidden_layers == len(widths) and config.intermediate_size == max(widths)
    assert not any(hasattr(b.ffn, "ffn_mult") or b.ffn.no_op or b.attention.no_op for b in config.block_configs)
    assert json.loads(config.to_json_string())["block_configs"] == config.block_configs
    ids = torch.arange(1, 20)
    with torch.no_grad():
        wanted = model.double()(ids[None]).logits[0].numpy()
    np.testing.assert_allclose(plain_logits(folder, ids.numpy()), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_plain_code_reads_a_folder_for_vllm_as_the_model(name, tmp_path):
    model, data = zoo.build(name), zoo.tokens(4, 12)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith(".bias"):
                p.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(n)))
    names = [n for n, _ in layers(model)]
    remove_units(model, data, {names[0]: 0.5, names[2]: 0.25}, kind="mlp", multiple=4)
    remove_units(model, data, 0.5, kind="heads", by="queries")
    save_nemotron(model, None, tmp_path / "out")
    check_folder(model, tmp_path / "out")


def test_a_plan_for_vllm_has_equal_heads_and_widths_that_differ(tmp_path):
    model, data = zoo.build("llama"), zoo.tokens(8, 16)
    plan = plan_shapes(model, data, "35% flops", runtime="vllm", depth=1, **QUICK)
    assert plan.hyperparameters["runtime"] == "vllm" and not layers_differ(plan, ("heads",)) and layers_differ(plan)
    check_nemotron(model, plan)
    apply_shapes(model, plan, data)
    save_nemotron(model, None, tmp_path / "out", plan=plan)
    check_folder(model, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text().count("--trust-remote-code") == 1


def test_a_folder_for_vllm_is_refused_at_once_and_says_where_it_is_evaluated(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "wide"
    save_nemotron(zoo.build("llama"), None, folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr("layerbudget.cli.evaluate._measured", lambda *_: pytest.fail("measured"))
    assert main(["evaluate", "demo", "--against", str(folder)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is a folder for vLLM alone" in said and "Evaluate it in vLLM (vllm serve" in said and "plan shapes --even" in said
    for load in (load_model, load_tokenizer):
        with pytest.raises(BadModel, match="folder for vLLM alone"):
            load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "another"}))
    with pytest.raises(BadModel, match="it needs code of its own, which is not run here.*Take another model"):
        load_model(str(folder))


def test_groups_of_key_value_heads_may_differ_where_query_heads_do_not(tmp_path):
    """Two layers with the same query heads, in one and in two groups: no plan makes them, the format says them."""
    model, one = zoo.build("llama"), zoo.build("llama", num_key_value_heads=1)
    model.model.layers[1] = one.model.layers[1]
    save_nemotron(model, None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [b["attention"]["n_heads_in_group"] for b in config["block_configs"]] == [2, 4, 2]
    ids = torch.arange(1, 12)
    with torch.no_grad():
        wanted = model.double()(ids[None]).logits[0].numpy()
    np.testing.assert_allclose(plain_logits(tmp_path / "out", ids.numpy()), wanted, rtol=1e-5, atol=1e-5)


def test_what_a_runtime_does_not_compute_is_refused_by_name_before_anything_is_measured(monkeypatch, tmp_path):
    data = zoo.tokens(4, 12)
    monkeypatch.setattr("layerbudget.decisions.shapes.path.ShapePoint", lambda *a, **k: pytest.fail("it was measured"))
    for name, runtime, said in (
        ("gemma", "vllm", "A gemma model whose layers differ is not written for vLLM.*Plan with --even"),
        ("qwen3", "vllm", "A qwen3 model whose layers differ.*of llama, mistral, qwen2"),
        ("mistral-sliding", "vllm", "mistral model with sliding_window = 8"),
        ("qwen3", "llama.cpp", "qwen3 model whose layers differ is not written as GGUF"),
        ("opt", "llama.cpp", "opt model"),
        ("llama", "ollama", "There is no runtime 'ollama'.*llama.cpp, transformers, vllm"),
    ):
        with pytest.raises(InvalidInput, match=said):
            plan_shapes(zoo.build(name), data, "20% flops", runtime=runtime)
    with pytest.raises(InvalidInput, match="A llama model with hidden_act = gelu"):
        save_nemotron(zoo.build("llama", hidden_act="gelu"), None, tmp_path / "out")


def test_query_heads_that_differ_are_refused(tmp_path):
    model, data = zoo.build("llama"), zoo.tokens(4, 12)
    remove_units(model, data, {layers(model)[1][0]: 0.5}, kind="heads")
    with pytest.raises(InvalidInput, match="The layers have 2 to 4 query heads.*--runtime vllm .*--format gguf"):
        save_nemotron(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_even_plans_are_for_every_runtime():
    model = zoo.build("llama")
    asked = [(False, "transformers"), (True, "vllm"), (True, "llama.cpp"), (True, None)]
    assert all(_alike(model, even, runtime, ALL) is True for even, runtime in asked)
    assert _alike(zoo.build("gemma"), True, "vllm", ALL) is True and _alike(model, False, "llama.cpp", ALL) is False
    plan = plan_shapes(model, zoo.tokens(4, 12), "20% flops", runtime="transformers", **QUICK)
    assert not layers_differ(plan)
    check_exportable(model, plan)


def test_the_command_writes_what_the_runtime_of_a_plan_reads(folder, capsys):
    text = ["--data", str(folder / "text.txt"), "--samples", "4", "--length", "16", "--json"]
    model, plan, out = (str(folder / n) for n in ("model", "vllm.json", "vllm"))
    asked = ["--save", "25% flops", "--runtime", "vllm", "--parts", "mlp", "--multiple", "4", "--passes", "32"]
    assert main(["plan", "shapes", model, *asked, "-o", plan, *text]) == 0
    assert main(["apply", model, plan, "-o", out, *text]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "--format nemotron-nas" in said and f"Next: vllm serve {out} --trust-remote-code" in said
    config = json.loads((folder / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["DeciLMForCausalLM"] and config["model_type"] == "nemotron-nas"
    assert len({b["ffn"]["intermediate_size"] for b in config["block_configs"]}) > 1
