"""Costs from shapes, against the tables for Mistral-7B and Gemma-7B, and budget strings."""

import json

import pytest
from tests import zoo

from layerbudget import budget as costs
from layerbudget.errors import BadModel, CorruptFile, InvalidInput, NotFound, UnknownStructure, UnknownUnit
from layerbudget.models.blocks import partition
from layerbudget.models.loading import blocks_from_config
from layerbudget.records import Block, Module

MISTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8}  # fmt: skip
GEMMA = {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 16, "head_dim": 256}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "numel", "flops", "expert", "parameters"),
    [
        (MISTRAL, 218_103_808, 13_958_643_712, 1_310_720, 655_360),
        (GEMMA, 276_824_064, 15_502_147_584, 1_785_856, 892_928),
    ],
)
def test_published_tables(config, numel, flops, expert, parameters):
    blocks = blocks_from_config(config)
    assert {b.numel for b in blocks} == {numel}
    assert costs.base_amount(blocks, "flops") == flops
    assert set(costs.unit_cost(blocks, "flops", capacity="lora-experts")) == {expert}
    assert set(costs.unit_cost(blocks, "params", capacity="lora-experts")) == {parameters}


@pytest.mark.parametrize("amount", ["1e30", "1e400", "1e300 GiB", "9999999 TiB", float("inf")])
def test_amounts_that_are_too_large_to_be_counted_are_refused(amount):
    with pytest.raises(InvalidInput, match="too large to be counted"):
        costs.parse_budget(amount)


def test_published_budgets():
    budget = costs.parse_budget("2.76% flops")
    assert costs.amount_of(budget, blocks_from_config(MISTRAL)) == pytest.approx(385_258_566.4512, rel=1e-12)
    assert costs.amount_of(costs.parse_budget("2% flops"), blocks_from_config(GEMMA)) == pytest.approx(310_042_951.68)


@pytest.mark.parametrize(
    ("text", "amount", "unit", "relative"),
    [
        ("64M params", 64e6, "params", False), ("64Mparams", 64e6, "params", False),
        ("1.2 GiB", 1.2 * 2**30, "bytes", False), ("-2GiB", -(2.0**31), "bytes", False),
        ("3% flops", 0.03, "flops", True), ("160 experts", 160, "experts", False),
        ("512 ranks", 512, "ranks", False), ("0.5 ms", 5e-4, "latency", False), ("1e6 flops", 1e6, "flops", False),
        ("20M", 20e6, "params", False), (20, 20, "params", False), ("3%", 0.03, "params", True),
        ("12 bytes", 12, "bytes", False),
        ("1_000 params", 1000, "params", False), ("400M flops/token", 4e8, "flops", False),
    ],
)  # fmt: skip
def test_budget_strings(text, amount, unit, relative):
    found = costs.parse_budget(text)
    assert (found.amount, found.unit, found.relative) == (pytest.approx(amount), unit, relative)


@pytest.mark.parametrize("text", ["", "lots", "3 apples", "4 % M params", "GiB", "5 Q params"])
def test_unknown_units_say_what_is_known(text):
    with pytest.raises(UnknownUnit) as caught:
        costs.parse_budget(text)
    assert "Known units" in str(caught.value) and "3% flops" in str(caught.value)


def test_units_that_are_not_priced():
    blocks = blocks_from_config(MISTRAL)
    with pytest.raises(UnknownUnit, match="no latency"):
        costs.unit_cost(blocks, "latency", latency={"model.layers.0": 1e-3})
    with pytest.raises(UnknownUnit, match="not priced"):
        costs.unit_cost(blocks, "experts", capacity="ranks")
    with pytest.raises(UnknownUnit, match="percentage"):
        costs.base_amount(blocks, "experts")
    assert costs.unit_cost(blocks, "latency", latency={b.name: 2e-3 for b in blocks}).sum() == pytest.approx(0.064)


def test_linear_blocks_and_bytes():
    blocks = blocks_from_config(MISTRAL, by="linear")
    query = [b for b in blocks if b.name == "model.layers.0.self_attn.q_proj"]
    assert len(blocks) == 224 and costs.unit_cost(query, "bytes").tolist() == [2 * 8192]
    assert costs.unit_cost(query, "params", capacity="lora-experts").tolist() == [8 * 8192]


def test_fused_experts_count_all_copies_and_active_flops():
    config = {**MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    block = blocks_from_config(config)[0]
    dense = blocks_from_config({**MISTRAL, "num_hidden_layers": 1})[0]
    attention = 41_943_040
    assert block.numel == attention + 8 * (dense.numel - attention)
    assert block.flops_per_token == 2 * (attention + 2 * (dense.numel - attention))
    fused = Block(name="x", modules=(Module(name="x", d_in=2, d_out=3, copies=4, active=2),))
    assert costs.unit_cost([fused], "flops").tolist() == [20]


def test_configuration_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": GEMMA}))
    assert [b.numel for b in blocks_from_config(tmp_path)] == [b.numel for b in blocks_from_config(GEMMA)]
    with pytest.raises(NotFound):
        blocks_from_config(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CorruptFile):
        blocks_from_config(tmp_path / "bad.json")
    assert blocks_from_config({"model_type": "gpt2", "n_embd": 8, "n_head": 2})[0].numel == 12 * 8 * 8
    with pytest.raises(UnknownStructure, match="encoder-decoder"):
        blocks_from_config({"model_type": "t5"})
    with pytest.raises(BadModel, match="no-such-kind"):
        blocks_from_config({"model_type": "no-such-kind"})


@pytest.mark.parametrize("text", ["1,5 GiB", "12,34M", "1.2.3M params", "1,50 params"])
def test_an_ambiguous_number_is_refused_rather_than_guessed(text):
    with pytest.raises(UnknownUnit):
        costs.parse_budget(text)


def test_commas_between_thousands_are_read():
    assert costs.parse_budget("1,500 params").amount == 1500
    assert costs.parse_budget("12,345,678.5 bytes").amount == 12_345_678.5


def test_a_configuration_has_the_blocks_of_the_model_that_is_made_of_it():
    for kind in ("llama", "gpt2", "mixtral", "bert"):
        model = zoo.build(kind)
        config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        for by in ("layer", "linear", r"\.(\d+)\."):
            assert blocks_from_config(config, by=by) == partition(model, by), (kind, by)


def test_an_amount_that_is_no_number_is_called_so():
    with pytest.raises(InvalidInput, match="nan is no number"):
        costs.parse_budget(float("nan"))
