"""Costs come from shapes and one timed forward; nothing is loaded, and the shapes are those of the model."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from tests import zoo
from transformers import LlamaConfig, Qwen2Config

from layerbudget.cli import main
from layerbudget.cost import timing
from layerbudget.cost.price import pace_of_shape, place_of, price
from layerbudget.cost.sizes import Text, shape_in_memory, shape_of, shape_of_config
from layerbudget.cost.timing import Pace
from layerbudget.cost.verbs import comparing
from layerbudget.cost.work import WorkItem, scoring, treating
from layerbudget.decisions.bits import choosing
from layerbudget.decisions.shapes import forecast as shapes
from layerbudget.diagnosis.fits import what_fits
from layerbudget.diagnosis.verbs import long_verbs
from layerbudget.execution.tied import tied_columns
from layerbudget.models.blocks import partition

SEVEN = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, architectures=["LlamaForCausalLM"],
)  # fmt: skip
TOKEN = 3e-3
PACE = Pace(forward=TOKEN, backward=2 * TOKEN, head=0.0, head_backward=0.0)
CARD = dataclasses.replace(PACE, device="cuda")
SMALL = ("--samples", "4", "--length", "16")
LONG = {"score fisher-gram", "score ggn", "plan sparsity", "plan bits", "apply, wanda", "apply, gptq", "finetune", "evaluate"}


def test_shapes_are_those_of_the_model():
    model = zoo.tiny("mistral")
    model.config.architectures = ["MistralForCausalLM"]
    shape = shape_of_config(model.config, torch.float32)
    assert shape == shape_in_memory(model)
    assert shape.weights == sum(p.numel() * 4 for p in model.parameters()) and shape.layers == 3
    assert shape.numel == partition(model, "layer")[0].numel
    assert sorted(shape.inputs) == [32, 32, 32, 48]  # q/k/v, o, gate/up, down
    assert 0 < pace_of_shape(shape, torch.float32).forward < 1


def test_a_model_of_seven_billion_fits_where_its_layers_do():
    shape = shape_of_config(SEVEN, torch.bfloat16)
    assert 13e9 < shape.weights < 15e9
    verbs = long_verbs(samples=4, batch=4)
    small, card = ({v: price(v, parts, shape, p, m << 30) for v, parts in verbs.items()} for p, m in ((PACE, 4), (CARD, 256)))
    streamed = ("score fisher-gram", "score rank-gain", "plan sparsity", "apply, wanda", "evaluate")
    assert all(small[v].how == "streamed" and small[v].fits for v in streamed), small
    assert not small["finetune"].fits and not small["score hessian"].fits
    assert all(card[v].fits and card[v].how == "whole" for v in (*streamed, "finetune"))
    longer = long_verbs(samples=16, batch=4)
    assert all(price(v, longer[v], shape, PACE, 4 << 30).seconds > small[v].seconds for v in streamed)


def test_a_matrix_of_two_uses_is_priced():
    """One forward and backward more for the methods that round it for both, and nothing for others."""
    alone, both = (long_verbs(samples=4, tied=columns) for columns in (0, 64))
    more = {verb for verb, parts in alone.items() if len(both[verb]) != len(parts)}
    assert more == {"plan bits --method gptq", "apply, gptq"}
    assert all(sum(part.kind == "gradient-norm" for part in both[verb]) == 1 for verb in more)
    for kind in ("mistral", "gemma2"):
        model = zoo.tiny(kind)
        assert shape_in_memory(model).tied == tied_columns(model)


def test_seven_billion_fit_into_sixteen_gigabytes_at_the_default_sizes():
    shape = shape_of_config(SEVEN, torch.bfloat16)
    found, small = ({v: price(v, parts, shape, PACE, m << 30) for v, parts in long_verbs().items()} for m in (16, 8))
    for verb in (
        "score fisher-gram",
        "score adapter",
        "score layerif",
        "plan sparsity",
        "plan bits",
        "apply, sparsegpt",
        "evaluate",
    ):
        assert found[verb].fits and small[verb].fits, (verb, found[verb], small[verb])
    assert found["score rank-gain"].fits and not small["score rank-gain"].fits
    assert not found["score kfac"].fits and not found["score ekfac"].fits  # the eigenbasis of a factor 14336 wide


def test_prices_add_up():
    shape, text = shape_in_memory(zoo.tiny("llama")), Text(samples=8, length=32)
    one = price("one", [WorkItem("norms", text)], shape, PACE, 1 << 34)
    parts = [WorkItem("norms", text, times=2.0), WorkItem("forward", text, 3.0)]
    both = price("both", parts, shape, PACE, 1 << 34)
    assert both.seconds == pytest.approx(2 * one.seconds + 3 * TOKEN * text.tokens) and both.forwards == 7.0
    assert scoring("nobody's", text) == []
    layers, linears = (price("s", scoring("ablation", text, n), shape, PACE, 1 << 34) for n in (None, 7 * shape.layers))
    assert linears.forwards - 1 == 7 * (layers.forwards - 1) > 0  # every block is removed once
    grids = (comparing(text, text, ["kfac"], "wanda", seeds=n, plans=3 * n) for n in (1, 3))
    few, many = (price("c", grid, shape, PACE, 1 << 34) for grid in grids)
    assert many.seconds == pytest.approx(3 * few.seconds)
    search = price("s", [WorkItem("directional", text)], shape, PACE, 1 << 34)
    assert search.seconds > one.seconds and "demo" in long_verbs(demo=True)
    small = price("c", comparing(text, text, ["kfac"], "wanda", seeds=1, plans=3), shape, PACE, 1000)
    assert small.how == "layers" and not small.fits and small.memory > shape.weights  # a comparison holds the model


def test_forwards_are_those_of_all_the_text_also_where_the_first_part_reads_half_of_it():
    shape = shape_in_memory(zoo.tiny("llama"))
    parts = choosing(Text(samples=8), None, method="gptq")
    assert parts[0].text.samples == 4 and parts[0].text.whole == 8
    assert price("plan bits", parts, shape, PACE, 1 << 34).forwards == 0.5 * (17 + 2)  # a plan says the same of itself


def test_logits_are_priced_as_they_are_made_and_mapped_weights_as_far_as_there_is_room():
    shape = dataclasses.replace(shape_of_config(SEVEN, torch.bfloat16), vocabulary=152_000)
    part = [WorkItem("forward", Text(samples=96, length=512, batch=16))]
    whole = price("evaluate", part, shape, PACE, 64 << 30)
    assert whole.how == "whole" and whole.memory < shape.weights + (3 << 30), "all logits take 15 GiB"
    large, small = (price("evaluate", part, shape, PACE, m << 30, streamed=True) for m in (64, 4))
    assert large.memory > shape.weights and small.memory == 4 << 30 and small.fits


def test_rounding_is_priced_by_the_formats_that_matrices_of_a_name_have(monkeypatch):
    shape = shape_in_memory(zoo.tiny("llama", intermediate_size=64))
    monkeypatch.setattr(timing, "treating_seconds", lambda find, method, form, rows, columns: 1.0 if form == "Q8_0" else 0.0)
    formats = {m.name: "Q8_0" if "down" in m.name else "F16" for m in shape.matrices}
    written = []
    (part,) = treating("rtn", Text(samples=1), formats=formats, more=lambda s, t, weights: written.append(weights) or 5.0)
    assert part.job(shape, part.text) == pytest.approx(5.0 + shape.layers)
    (down,) = (m.numel for m in shape.matrices if "down" in m.name)
    assert written == [{"Q8_0": shape.layers * down, "F16": shape.layers * (shape.numel - down)}]


def test_refits_of_smaller_shapes_are_priced_and_take_no_logits(monkeypatch):
    """Refits were not counted, and logits of a whole batch were, which nothing makes."""
    shape = dataclasses.replace(shape_in_memory(zoo.tiny("llama")), vocabulary=262_144)
    seconds = []
    for each in (0.0, 1.0):
        monkeypatch.setattr(shapes, "refitting_seconds", lambda rows, columns, each=each: each)
        cost = price("plan shapes", shapes.shaping(Text(samples=8, length=128), 41.0), shape, PACE, 20 << 30)
        seconds.append(cost.seconds)
    assert seconds[1] - seconds[0] == pytest.approx(5 * 4 * shape.layers)  # points, parts of the text, layers
    assert cost.memory < 2 << 30, "the logits of a batch take 3 GiB"


def test_refits_of_wider_matrices_take_longer():
    narrow, wide, long = (shapes.refitting_seconds(*size) for size in ((64, 1024), (64, 2048), (2048, 2048)))
    assert 0 < 4 * narrow <= wide <= long


def test_timing_leaves_the_random_numbers_alone():
    model = zoo.tiny("llama")
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    _, pace, *_ = place_of(model, Text(samples=4, length=16))
    assert 0 < min(pace.forward, pace.backward, pace.head, pace.head_backward) and pace.forward < 1
    assert torch.equal(torch.rand(4), wanted)


def test_only_a_model_with_experts_has_a_price_for_keeping_some():
    for name, has in (("llama", False), ("qwen3-moe", True)):
        shape = shape_in_memory(zoo.tiny(name))
        assert ("plan expert-pruning" in long_verbs(experts=shape.experts)) is has
    parts = long_verbs(samples=4, batch=4, experts=True)["plan expert-pruning"]
    assert price("plan expert-pruning", parts, shape, PACE, 16 << 30).forwards == 45.0  # 1 + 2 x 4 draws, and 36 with masks


def test_the_doctor_prices_every_long_verb(saved_model, capsys):
    assert main(["doctor", str(saved_model("llama")), *SMALL, "--json"]) == 0
    found = {f["verb"]: f for f in json.loads(capsys.readouterr().out)["forecast"]}
    assert set(found) >= LONG and "demo" not in found
    assert all(f["seconds"] > 0 and f["memory"] > 0 and f["fits"] for f in found.values())
    assert found["score ggn"]["seconds"] > found["score fisher-gram"]["seconds"] > found["evaluate"]["seconds"]


def test_the_doctor_prices_a_configuration_alone(tmp_path, capsys):
    LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=80, num_attention_heads=4,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    for name in (tmp_path, tmp_path / "config.json"):
        assert main(["doctor", str(name), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["layers"] == 80 and {f["verb"] for f in record["forecast"]} >= LONG
        assert {f["samples"] for f in record["forecast"]} > {16, 128}  # every verb at its own defaults
    assert main(["doctor", str(tmp_path), "--card", "4 GiB", "--json"]) == 0
    assert "score kfac" in [f["verb"] for f in json.loads(capsys.readouterr().out)["forecast"]]
    for wrong in (
        ["--data", "stdlib"], ["--card", "plenty"], ["--card", "3% flops"],
        ["--card", "4 GiB", "--data", "stdlib"],
    ):  # fmt: skip
        assert main(["doctor", str(tmp_path), *wrong]) == 2
    (tmp_path / "other.json").write_text("[1]")
    assert main(["doctor", str(tmp_path / "other.json")]) == 2


def test_the_doctor_says_what_fits_before_anything_is_loaded(tmp_path, capsys):
    """Bits of the weights from the parameters that a model of these sizes has, counted by hand."""
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768}
    LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), "--card", "8GiB", "--context", "32k", "--json"]) == 0
    rows = {r["cache"]: r for r in json.loads(capsys.readouterr().out)["fits"]}
    ends, layers = 2 * 32000 * 4096, 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    buffers = 512 * (4 * (5 * 4096 + 3 * 14336) + 2 * 32768) + 4 * 32000
    for name, share in (("F16", 1), ("Q8_0", 8.5 / 16), ("Q4_0", 4.5 / 16), ("fp8", 0.5)):
        held = int(2 * 2 * 32 * 1024 * 32768 * share)
        left, weights = 8 * 2**30 - held - buffers - 4 * 4096 * 65, ends + layers
        if name == "fp8":  # vLLM: embedding, head and norms in two bytes
            left, weights = left + 2 * 4096 * 65 - 2 * ends, layers
            left -= 8 * 2**30 - int(0.9 * 8 * 2**30)  # vLLM takes .9 of a card
        assert rows[name]["cache_bytes"] == held and rows[name]["left"] == left
        assert rows[name]["bits"] == pytest.approx(8 * left / weights)
    assert (rows["F16"]["mix"], rows["Q4_0"]["mix"], rows["fp8"]["mix"]) == ("IQ4_NL", "Q6_K", None)
    assert main(["doctor", str(tmp_path), "--card", "6GiB", "--context", "32k"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), "--card", "2GiB", "--context", "32k"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "none" in said and "chooses both together" not in said and "Nothing fits 2GiB" in said and "its GiB" in said
    assert main(["doctor", str(tmp_path), "--card", "40MiB", "--context", "256"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "vllm takes 90% of a memory" in said
    assert "its MiB" in said and "MiB for weights" in said and "32.00" in said, "256 tokens of 128 KiB"
    for wrong in (["--context", "32k"], ["--card", "8GiB", "--context", "64k"], ["--card", "8GiB", "--context", "x"]):
        assert main(["doctor", str(tmp_path), *wrong]) == 2
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), "--card", "8GiB", "--context", "1M"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "A context of 1,048,576 tokens is too long. The model reads at most 32,768 tokens." in said
    given = said[said.index("--context ") :].replace(",", "").split()[:2]
    assert main(["doctor", str(tmp_path), "--card", "8GiB", *given]) == 0, "the remedy works"


def test_the_doctor_names_the_method_that_fits(tmp_path, capsys):
    """The smallest types of llama.cpp need the inputs of matrices: the command without them was refused."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=8, architectures=["LlamaForCausalLM"], dtype="float32")
    config.save_pretrained(tmp_path)
    cards = range(2900 << 10, 4400 << 10, 20 << 10)
    card = next(card for card in cards if any(r["bits"] for r in what_fits(config, card, 32)))
    assert {r["method"] for r in what_fits(config, card, 32) if r["bits"]} == {"weighted"}
    assert main(["doctor", str(tmp_path), "--card", f"{card} bytes", "--context", "32"]) == 0
    assert "--context 32 --method weighted chooses both together" in " ".join(capsys.readouterr().out.split())


def test_the_doctor_counts_windows_where_they_are_computed():
    """llama.cpp keeps all tokens of Qwen 2, vLLM the window of its upper layers."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, use_sliding_window=True, sliding_window=256, max_window_layers=1)
    rows = {row["cache"]: row["cache_bytes"] for row in what_fits(config, 1 << 30, 8192)}
    assert rows["F16"] == 2 * 8192 * 4 * 64 and rows["fp8"] == (8192 + 768) * 2 * 64


@pytest.mark.parametrize("name", ["demo", "config.json", "nested"])
def test_a_context_that_is_too_long_is_refused_before_torch_is_loaded(tmp_path, name):
    config = {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "config.json").write_text(json.dumps({"text_config": config}))
    words = (
        f"import sys; from layerbudget.cli import main; code = main(['doctor', {name!r}, '--card', '8GiB', '--context', '2k'])"
    )
    words += "; sys.exit(1 if 'torch' in sys.modules else code)"
    found = subprocess.run([sys.executable, "-c", words], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 2 and "The model reads at most 512 tokens." in " ".join(found.stderr.split())


def test_quiet_says_nothing_and_a_record_has_no_figures_of_the_clock(saved_model, tmp_path, capsys):
    scores = tmp_path / "s.json"
    assert main(["score", str(saved_model("llama")), *SMALL, "--quiet", "-o", str(scores)]) == 0
    said = capsys.readouterr().err
    assert "took" not in said and "parameters in" not in said and "took" not in json.loads(scores.read_text())


def test_less_text_never_takes_longer(monkeypatch):
    """Rounding took its time from that of the named text, whose few tokens spend theirs on starting operations."""
    monkeypatch.setattr(timing, "pace_of", lambda *given: PACE)
    model = zoo.build("llama")
    seconds = []
    for samples, length in ((1, 16), (4, 16), (64, 64)):
        text = Text(samples=samples, length=length, batch=min(samples, 8))
        place = place_of(model, text)
        seconds.append(price("plan bits", choosing(text, text), *place).seconds)
    assert seconds == sorted(seconds)


def test_the_check_of_error_feedback_collects_inputs_for_every_plan():
    shape, text = shape_of(zoo.build("llama")), Text(samples=16, length=32)
    methods = ("rtn", "gptq", "descent")
    ways = [price("plan bits", choosing(text, text, method=name), shape, PACE, 1 << 40) for name in methods]
    assert ways[1].forwards > ways[0].forwards + 5 and ways[2].seconds > ways[1].seconds > ways[0].seconds
