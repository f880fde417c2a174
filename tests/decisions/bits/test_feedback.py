"""Error feedback layer after layer: every matrix by the inputs that the rounded layers below give, experts by their tokens."""

from __future__ import annotations

import pytest
import torch
from tests import zoo
from torch import nn
from transformers import AutoModelForCausalLM

import layerbudget as lb
from layerbudget.compressors import ggml
from layerbudget.compressors.feedback import Factors, feed_back
from layerbudget.decisions.bits.apply import round_matrices, write_bits
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.execution.loss import sampled_targets, unlabelled
from layerbudget.models.blocks import layers

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
TEXT = zoo.tokens(6, 16, vocabulary=96)


def given(model, matrices):
    """Inputs of modules in one forward: the plainest way."""
    seen, handles = {}, []
    for name in matrices:
        hook = model.get_submodule(name).register_forward_pre_hook
        handles.append(hook(lambda m, a, k, name=name: seen.update({name: [*a, *k.values()]}), with_kwargs=True))
    with torch.no_grad():
        model(TEXT.input_ids)
    for handle in handles:
        handle.remove()
    return seen


def by_feedback(weight, x, form):
    """One matrix by the second moments of its inputs; to nearest where there are none."""
    if not len(x):
        return torch.from_numpy(ggml.dequantise(ggml.quantise(weight.numpy(), form), form))
    return torch.from_numpy(ggml.dequantise(feed_back(weight, Factors(x.T @ x), form), form))


def of_both_uses(model):
    """Rows whose second moments count the errors of a tied matrix: the inputs of its logits, and gradients of its lookups."""
    (batch,), rows = unlabelled(model, TEXT, len(TEXT)), []
    handle = model.get_input_embeddings().register_forward_hook(lambda m, a, out: rows.append(out.requires_grad_()))
    with torch.enable_grad():
        hidden = model.model(TEXT.input_ids).last_hidden_state
        logits = model.lm_head(hidden.detach()).requires_grad_()
        labels = sampled_targets(logits.detach(), batch, 0).flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        (by_logits,) = torch.autograd.grad(loss, logits)
        (by_rows,) = torch.autograd.grad(hidden, rows, by_logits @ model.lm_head.weight)
    handle.remove()
    return torch.cat([hidden.detach() * by_logits.norm(dim=-1, keepdim=True), by_rows]).flatten(0, 1)


def agreement(found, model, formats, *, below=True):
    """Share of equal weights in ends and layers, each made the plainest way from the inputs that ``found``'s layers below give.

    A tie that falls otherwise changes what comes behind it in its row, and so all later layers: those are taken from ``found``.
    """
    rounded, inside, shares = dict(found.named_parameters()), dict(model.named_modules()), []
    with torch.no_grad():
        ends, head = [n for n in formats if ".layers." not in n], model.get_output_embeddings()
        last = of_both_uses(model) if ends else []  # the head comes first, by the dense model's inputs
        for name in ends:
            weight = model.get_submodule(name).weight
            weight.copy_(by_feedback(weight, last if weight is head.weight else [], formats[name]))
            shares.append(float((weight == rounded[f"{name}.weight"]).float().mean()))
            weight.copy_(rounded[f"{name}.weight"])
        for place, layer in layers(model):
            own = [n for n in formats if n.startswith(f"{place}.") and isinstance(inside.get(n), nn.Linear)]
            stacks = [n for n, m in layer.named_modules() if hasattr(m, "gate_up_proj")]
            seen, same = given(model, [*own, *(f"{place}.{n}" for n in stacks)]), []
            for name in own:
                weight, x = model.get_submodule(name).weight, seen[name][0].flatten(0, -2)
                same.append(torch.isclose(by_feedback(weight, x, formats[name]), rounded[f"{name}.weight"], atol=1e-5))
            for stack in stacks:
                experts, (hidden, index, *_) = layer.get_submodule(stack), seen[f"{place}.{stack}"]
                for e in range(len(experts.gate_up_proj)):
                    x = hidden.flatten(0, -2)[(index == e).any(-1)]
                    gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, -1)
                    for part, read in (("gate_up_proj", x), ("down_proj", experts.act_fn(gate) * up)):
                        made = by_feedback(getattr(experts, part)[e], read, formats[f"{place}.{stack}.{part}"])
                        same.append(torch.isclose(made, rounded[f"{place}.{stack}.{part}"][e], atol=1e-5))
            shares.append(float(torch.cat([s.flatten() for s in same]).float().mean()))
            if below:
                layer.load_state_dict(found.get_submodule(place).state_dict())
    return shares


def test_a_streamed_file_is_that_of_the_plainest_way(tmp_path):
    model = zoo.build("llama-tied", **WIDE)
    model.save_pretrained(tmp_path / "model")
    plan = plan_bits(rounding_damage(model, TEXT, family="gguf", draws=1, formats=["Q4_0", "IQ4_NL", "Q5_1"]), bits=4.8)
    streamed = lb.load_model(str(tmp_path / "model"), dtype="float32", stream=True)
    write_bits(streamed, plan, tmp_path / "out", TEXT, method="gptq", batch_size=4)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    formats = plan.payload.formats
    assert len(set(formats.values())) > 1
    assert min(agreement(found, model, formats)) > 0.97
    assert agreement(found, AutoModelForCausalLM.from_pretrained(tmp_path / "model"), formats, below=False)[2] < 0.9


def test_experts_are_rounded_by_their_own_tokens():
    model, dense = (zoo.build("mixtral", **WIDE, experts_implementation="eager") for _ in range(2))
    formats = {m.name: "Q4_0" for b in lb.partition(model) for m in b.modules}
    assert any(n.endswith("experts.gate_up_proj") for n in formats)
    round_matrices(model, formats, TEXT, method="gptq", batch_size=2)
    assert min(agreement(model, dense, formats)) > 0.97
