"""What each of several processes does, on paper, is what the code then counts: operations, bytes read and bytes exchanged."""

import dataclasses
import json
import re

import pytest
import torch
from tests import zoo
from torch.utils.flop_counter import FlopCounterMode

from layerbudget.cli import main
from layerbudget.cost.machines import share_of
from layerbudget.cost.sizes import Text, shape_in_memory
from layerbudget.cost.timing import Pace
from layerbudget.cost.work import WorkItem, scoring, treating
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.execution import processes
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model
from layerbudget.models.offload import mapped
from layerbudget.sensitivity.gain import score

PACE = Pace(forward=1e-3, backward=2e-3, head=0.0, head_backward=0.0)
TEXT = Text(samples=8, length=32, batch=8)


def on_paper(verb, parts, model, machines=1, **more):
    return share_of(verb, parts, shape_in_memory(model), PACE, 64 << 30, machines, **more)


@pytest.fixture
def first_of_two(monkeypatch):
    """This process is the first of two that have the same, and sums come back as they went."""

    def gather(values, value, group):
        values[:] = [value] * len(values)

    for name, stand_in in {
        "is_initialized": lambda: True,
        "get_rank": lambda: 0,
        "get_world_size": lambda: 2,
        "get_backend": lambda: "gloo",
        "all_reduce": lambda tensor, group: None,
        "all_to_all_single": lambda came, sent, coming, going, group: came.zero_(),
        "all_gather_object": gather,
        "broadcast_object_list": lambda values, src, group: None,
        "barrier": lambda group: None,
    }.items():
        monkeypatch.setattr(processes.dist, name, stand_in)
    monkeypatch.setattr(
        processes.ProcessGroup, "owners", lambda self, blocks: [0] * len(blocks)
    )  # nothing is settled elsewhere
    monkeypatch.setattr(processes.EXCHANGED, "bytes", 0)
    return processes.EXCHANGED


SCORES = ("gradient-norm", "fisher-diagonal", "fisher-gram", "fisher-mc", "adapter", "rank-gain", "kfac", "ekfac")


@pytest.mark.parametrize("length", [TEXT.length, 4])
@pytest.mark.parametrize("name", SCORES)
def test_scores_exchange_what_the_paper_says(first_of_two, name, length):
    """With short text, gradients of sequences go as their factors."""
    model, text = zoo.build("llama-tied"), dataclasses.replace(TEXT, length=length)
    data = zoo.tokens(text.samples, length=length)
    score(model, data, partition(model), name, batch_size=2)
    assert on_paper("score", scoring(name, text), model, 2).sent == pytest.approx(first_of_two.bytes, rel=0.25)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_pruning_exchanges_the_moments_of_the_inputs(first_of_two, method):
    model = zoo.build("llama-tied")
    data = zoo.tokens(TEXT.samples, length=TEXT.length)
    plan = plan_sparsity(score(model, data, partition(model), "spectral-tail"), sparsity=0.5)
    first_of_two.bytes = 0
    prune(model, plan, data, method)
    parts = treating(method, TEXT)
    assert on_paper("apply", parts, model, 2).sent == pytest.approx(first_of_two.bytes, rel=0.3)


def test_operations_are_those_that_torch_counts():
    model = zoo.build("llama-tied")
    data = zoo.tokens(TEXT.samples, length=TEXT.length)
    with FlopCounterMode(display=False) as counted:
        perplexity(model, data)
    read = on_paper("evaluate", [WorkItem("forward", TEXT)], model)
    assert read.operations == pytest.approx(counted.get_total_flops(), rel=0.3)
    with FlopCounterMode(display=False) as counted:
        score(model, data, partition(model), "gradient-norm", batch_size=8, walk="whole")
    scored = on_paper("score", scoring("gradient-norm", TEXT), model)
    assert scored.operations == pytest.approx(counted.get_total_flops(), rel=0.3)


def test_a_token_meets_some_of_the_experts():
    dense, mixture = shape_in_memory(zoo.tiny("llama")), shape_in_memory(zoo.tiny("qwen3-moe"))
    assert dense.met == dense.numel and 0 < mixture.routed < 1
    routed = sum(m.numel for m in mixture.matrices if m.copies > 1)
    assert mixture.met == pytest.approx(mixture.numel - (1 - mixture.routed) * routed)


def test_weights_that_stay_in_files_are_read_by_every_walk(tmp_path):
    zoo.build("llama-tied").to(torch.bfloat16).save_pretrained(tmp_path)
    data = zoo.tokens(TEXT.samples, length=TEXT.length)
    model = load_model(str(tmp_path), dtype="float32", stream=True)
    files = mapped(model)
    count = on_paper("score", scoring("gradient-norm", TEXT), model, streamed=True).read / shape_in_memory(model).weights
    score(model, data, partition(model), "gradient-norm", batch_size=4)
    walks = files.arrived / len(files.layers)  # the head comes too, once in a walk
    assert count == 4.0 and walks == pytest.approx(count * (1 + 1 / len(files.layers)), rel=0.1)


def test_a_dry_run_says_what_each_process_would_do(tmp_path, capsys):
    words = ["score", "demo", "--samples", "8", "--length", "32", "-o", str(tmp_path / "s.json"), "--device", "cpu"]
    assert main([*words, "--dry-run", "--machines", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["share"]["machines"] == 4 and document["share"]["sequences"] == 2 and document["share"]["sent"] > 0
    assert main([*words, "--dry-run", "--machines", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"]["limit"] == "text"
    assert main([*words, "--machines", "4"]) == 2 and "Add --dry-run" in capsys.readouterr().err
    assert main([*words, "--dry-run", "--machines", "0"]) == 2 and "from 1 to" in capsys.readouterr().err


def test_the_doctor_prices_a_configuration_for_several_cards(tmp_path, capsys):
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 2}
    config |= {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["doctor", str(tmp_path / "config.json"), "--card", "8 GiB", "--json", "--machines"]
    found = {}
    for n in (1, 8, 64):
        assert main([*words, str(n)]) == 0
        found[n] = {row["verb"]: row["share"] for row in json.loads(capsys.readouterr().out)["forecast"]}
    one, eight, many = (found[n]["score fisher-gram"] for n in found)
    assert one["sent"] == 0 and eight["operations"] == pytest.approx(one["operations"] / 8) and one["read"] % eight["read"] == 0
    assert many["sent"] < eight["sent"] / 4 and found[8]["plan bits --method gptq"]["limit"] == "exchange"
    assert eight["sequences"] == 16 and found[64]["plan sparsity"]["limit"] == "text"
    assert found[8]["finetune"] is None  # torch's own sums
    assert main([*words[:-2], "--machines", "32", "--samples", "32"]) == 0
    (samples,) = re.findall(r"--samples (\d+) gives each", " ".join(capsys.readouterr().out.split()))
    assert main([*words, "32", "--samples", samples]) == 0  # one kind of plan reads half of the text at a time
    rows = json.loads(capsys.readouterr().out)["forecast"]
    assert not [row["verb"] for row in rows if row["share"] and row["share"]["limit"] == "text"]
    assert {row["samples"] for row in rows if "rtn" not in row["verb"]} == {int(samples)} == {64}
