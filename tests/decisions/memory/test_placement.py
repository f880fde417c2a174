"""Two memories: the program against all choices, and the bytes of both sides against the tensors of the file."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from tests import zoo

import gguf
from layerbudget.cli import main
from layerbudget.compressors.ggml import library_file
from layerbudget.decisions.memory.plan import files_of, plan_memory, write_memory
from layerbudget.decisions.memory.program import MemoryLimits, fit_of
from layerbudget.decisions.memory.splits import splits_of
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.exports import EXPORTS
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.verdict import verdict
from layerbudget.scores import Scores

WIDE = {"hidden_size": 256, "vocab_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
FORMATS = ["Q4_0", "Q8_0"]
BY_LLAMA = r"blk\.(%s)\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # what llama.cpp makes of --n-cpu-moe, by layer
KEEP = {"self_attn|gate_proj": "Q8_0"}  # leaves six blocks of weights to all choices
INNER = {"llama": 768, "mixtral": 384}  # a token passes two experts
MODELS = [("mixtral", False), ("mixtral", True), ("llama", False), ("llama", True)]


def build(kind: str, tied: bool) -> Any:
    """A model of two layers with a head of its own, or one that is the embedding."""
    return zoo.build(kind, **WIDE, intermediate_size=INNER[kind], **HEADS, tie_word_embeddings=tied)


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}{'-tied' if p[1] else ''}")
def measured(request, tmp_path_factory):
    """A model, its text, and what was measured of it: experts or none, a head of its own or one that is the embedding."""
    (kind, tied), path = request.param, tmp_path_factory.mktemp("two") / "scores.json"
    model = build(kind, tied)
    data = zoo.tokens(3, 16, vocabulary=96)
    size = f"{zoo.buffers(hidden=256, inner=768) + (2 << 20)} bytes"
    one = plan_memory(model, data, memory=size, context=64, formats=FORMATS, cache=["Q8_0"], draws=1, save_scores=path)
    assert one.payload.placement is None
    return model, data, Scores.load(path)


def by_loops(scores: Scores, gpu: int, ram: int) -> list[tuple[float, int]]:
    """Damage and layers of every plan that fits two memories, over all formats and numbers of layers."""
    fit = fit_of(scores, MemoryLimits(memory="1 GiB", context=64, keep=KEEP))
    weights, cache, table, plans = fit.weights, fit.cache, fit.table, []
    names = [each[0] for each in weights.stored]
    whole = not any("_exps" in name for name in names)
    tied, embedding = "output.weight" not in names, names.index("token_embd.weight")
    forward = zoo.buffers(hidden=256, inner=768)
    for chosen in itertools.product(*(np.flatnonzero(row) for row in table.has)):
        size = [int(table.size[i, j]) for i, j in enumerate(chosen)]
        damage, cached = sum(table.damage[i, j] for i, j in enumerate(chosen)), size[len(names) :]
        for layers in range(3):
            ours = "|".join(map(str, range(layers))) or "none"
            pattern = rf"blk\.({ours})\." if whole else BY_LLAMA % ours
            beside = {i for i, n in enumerate(names) if re.match(pattern, n)}
            halves = [2 if "gate_up" in block.name else 1 for block in weights.blocks]  # two tensors of the file
            copied, split = max((size[i] // halves[i] for i in beside), default=0), whole and layers > 0
            there = sum(cached) * layers // 2 if whole else 0  # two layers whose caches are alike
            card = sum(s for i, s in enumerate(size[: len(names)]) if i not in beside | (set() if tied else {embedding}))
            card += (
                weights.fixed + sum(cached) - there + forward + copied + (there // layers + 4 * 256 * 256 if split else 0)
            )  # a hidden state of 256 tokens
            processor = sum(size[i] for i in beside | {embedding}) + weights.head + there + forward + (1 << 15)
            processor += weights.fixed if split else 0
            if card <= gpu and processor <= ram:
                plans.append((damage, layers))
    assert len(table.blocks) == len(names) + len(cache.blocks) == len(chosen)
    return plans


def test_one_plan_of_two_memories_is_the_best_of_all_choices(measured):
    _, _, scores = measured
    splits = splits_of(fit_of(scores, MemoryLimits(memory="1 GiB", context=64, keep=KEEP)))
    whole = splits[0].whole
    low = [min(side) for side in zip(*(split.least for split in splits), strict=True)]
    high = [max(side) for side in zip(*(split.most for split in splits), strict=True)]
    layers, given = set(), set()
    for shares in ((0.2, 0.2), (0.15, 0.5), (0.3, 0.9), (0.8, 0.12), (0.02, 1.0), (0.1, 0.3)):
        gpu, ram = (int(a + share * (b - a)) for a, b, share in zip(low, high, shares, strict=True))
        every = by_loops(scores, gpu, ram)
        terms = {"gpu": f"{gpu} bytes", "ram": f"{ram} bytes", "context": 64, "keep": KEEP}
        if not every:
            with pytest.raises(InfeasibleBudget, match="too few at 64 tokens"):
                plan_memory(scores, **terms)
            continue
        plan = plan_memory(scores, **terms)
        best = min(damage for damage, _ in every)
        assert plan.payload.predicted == pytest.approx(best, rel=1e-9), shares
        here = plan.payload.placement
        assert here.layers == min(n for damage, n in every if damage <= best * (1 + 1e-12))
        assert here.card.bytes <= here.gpu == gpu and here.processor.bytes <= here.ram == ram
        assert plan.budget["spent"] <= plan.budget["limit"]
        assert "each within its own limit" in plan.certificate["message"]
        for row in here.others:
            own = min(damage for damage, n in every if n == row["layers"])
            assert row["predicted"] == pytest.approx(own, rel=1e-9)
        said = " ".join([verdict(plan), *explain_plan(plan).sentences])
        if fewer := [row for row in here.others if row["layers"] < here.layers]:
            near = max(fewer, key=lambda row: row["layers"])
            again = plan_memory(scores, **{**terms, "ram": f"{near['ram_bytes']} bytes"}).payload.placement
            given.add(gives := again.layers == near["layers"])
            assert gives == ("given" in near) == (f"--ram '{near['ram_bytes']} bytes' gives it." in said)
        assert f"{here.card.bytes:,} bytes of the card and {here.processor.bytes:,} of the processor's memory" in said
        layers.add(here.layers)
    assert len(layers) > 1, "the cases are all alike"
    assert given or whole, "no plan stands beside one of fewer layers"


def test_too_little_of_either_is_refused_with_a_size_that_works(measured):
    _, _, scores = measured
    least = [split.least for split in splits_of(fit_of(scores, MemoryLimits(memory="1 GiB", context=64)))]
    for gpu, ram in ((min(least)[0], 1000), (1000, max(side for _, side in least)), (1000, 1000)):
        with pytest.raises(InfeasibleBudget) as refused:
            plan_memory(scores, gpu=f"{gpu} bytes", ram=f"{ram} bytes", context=64)
        given = {"gpu": f"{gpu} bytes", "ram": f"{ram} bytes"}
        remedies = re.findall(r"--(gpu|ram)(?: to)? '([^']+)'", refused.value.remedy)
        assert remedies, refused.value.remedy
        given |= dict(remedies if "Give" in refused.value.remedy else remedies[:1])
        assert plan_memory(scores, **given, context=64).payload.placement is not None


def planned(scores: Scores, layers: int) -> Plan:
    """A plan with so many layers at the processor: the card is too small for fewer, the other memory for more.

    A layer in Q4_0 is smaller than what a card needs to compute it, so it would not be put there.
    """
    terms = {"context": 512, "forbid": ["Q4_0"]}
    least = {split.layers: split.least for split in splits_of(fit_of(scores, MemoryLimits(memory="1 GiB", **terms)))}
    gpu = min((card for n, (card, _) in least.items() if n < layers), default=1 << 26) - 1
    ram = min((processor for n, (_, processor) in least.items() if n > layers), default=1 << 26) - 1
    plan = plan_memory(scores, gpu=f"{gpu} bytes", ram=f"{ram} bytes", **terms)
    assert plan.payload.placement.layers == layers
    return plan


def test_the_sides_are_those_of_the_tensors_in_the_file(measured, tmp_path):
    model, data, scores = measured
    plan = planned(scores, 2)
    here = plan.payload.placement
    model = build("llama" if here.whole else "mixtral", model.config.tie_word_embeddings)  # it is rounded in place
    write_memory(model, plan, tmp_path / "out", data)
    pattern = r"blk\.[01]\.\w+\.weight" if here.whole else BY_LLAMA % "0|1"
    tensors = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(next((tmp_path / "out").glob("*.gguf"))).tensors}
    beside = {name: size for name, size in tensors.items() if re.match(pattern, name) and "norm" not in name}
    embedding = tensors["token_embd.weight"]
    weights = fit_of(scores, MemoryLimits(memory="1 GiB", context=512)).weights
    assert here.processor.weights == sum(beside.values()) + embedding + weights.head + (weights.fixed if here.whole else 0)
    alone = sum(beside.values()) + (embedding if "output.weight" in tensors else 0)
    assert here.card.weights == sum(tensors.values()) - alone
    assert here.options in (tmp_path / "out" / "cache.txt").read_text()
    assert here.options == ("--n-gpu-layers 1" if here.whole else "--n-gpu-layers 999 --n-cpu-moe 2")
    written = files_of(plan)["cache.txt"]  # a GGUF file that gets the types has no such file beside it: export writes it
    assert EXPORTS.find("llama-cache").text(plan, {}) == written and here.options in written
    assert Plan.load(plan.save(tmp_path / "plan.json")).payload.placement == here
    said = " ".join(explain_plan(plan)["sentences"])
    assert f"{here.processor.bytes:,} of 67,108,863" in said and f"llama-server -m FILE.gguf {here.options}" in said


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_llama_cpp_itself_allocates_what_is_counted(measured, layers, tmp_path):
    """The oracle: llama.cpp with a card that stands for none, and the options of the plan."""
    pytest.importorskip("xllamacpp")
    from benchmarks.memory.card import CARD, PROCESSOR, SHOWN, allocated

    model, data, scores = measured
    plan = planned(scores, layers)
    here, formats = plan.payload.placement, plan.payload.formats
    model = build("llama" if here.whole else "mixtral", model.config.tie_word_embeddings)  # it is rounded in place
    write_memory(model, plan, tmp_path / "out", data)
    types = {b.name: formats[b.modules[0]] for b in plan.blocks if b.name in ("keys", "values")}
    words = dict(zip(*[iter(here.options.split())] * 2, strict=True))
    said = allocated(
        library_file(),
        next((tmp_path / "out").glob("*.gguf")),
        layers=int(words["--n-gpu-layers"]),
        experts=int(words.get("--n-cpu-moe", 0)),
        context=512,
        cache=(types["keys"], types["values"]),
    )
    fixed = fit_of(scores, MemoryLimits(memory="1 GiB", context=512)).weights
    for side, counted, head in ((CARD, here.card, 0), (PROCESSOR, here.processor, fixed.head)):
        of = said[side]
        assert -2 * SHOWN <= counted.weights - head - of.get("model", 0) <= fixed.fixed + 2 * SHOWN, side
        assert abs(counted.cache - of.get("KV", 0)) <= SHOWN, side
        assert of["compute"] + of.get("output", 0) - 2 * SHOWN <= counted.buffers, side
    assert here.card.buffers <= 1.3 * said[CARD]["compute"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--gpu", "1 GiB"], "go together"),
        (["--ram", "1 GiB"], "go together"),
        (["--memory", "1 GiB", "--gpu", "1 GiB", "--ram", "1 GiB"], "go together"),
        ([], "Give --memory SIZE, or --gpu SIZE --ram SIZE"),
        (["--gpu", "1 GiB", "--ram", "much"], "much"),
    ],
)
def test_memories_that_do_not_go_together_are_refused_before_anything_is_read(given, message, capsys):
    assert main(["plan", "memory", "nowhere", *given, "--context", "64"]) == 2
    assert message in capsys.readouterr().err


def test_another_runtime_and_blocks_with_experts_and_others_are_refused():
    with pytest.raises(InvalidInput, match="does not share a model"):
        plan_memory(zoo.fit_scores(0), gpu="1 MiB", ram="1 MiB", context=64)
    model, data = build("mixtral", False), zoo.tokens(2, 8, vocabulary=96)
    with pytest.raises(InvalidInput, match="gives experts and other matrices one format"):
        plan_memory(model, data, gpu="1 MiB", ram="1 MiB", context=64, by="layer")
