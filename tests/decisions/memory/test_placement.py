"""Two memories: the program against all choices, and the bytes of both sides against the tensors of the file."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from tests import zoo

import gguf
from layerbudget.cli import main
from layerbudget.decisions.memory.plan import plan_memory, write_memory
from layerbudget.decisions.memory.program import MemoryLimits, fit_of
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.scores import Scores

WIDE = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
FORMATS = ["Q4_0", "Q8_0"]
BY_LLAMA = r"blk\.(%s)\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # what llama.cpp makes of --n-cpu-moe, by layer
KEEP = {"self_attn": "Q8_0"}  # leaves six blocks of weights to all choices


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def mixture(request, tmp_path_factory):
    """A mixture, its text, and what was measured of it, with a head of its own or one that is the embedding."""
    path = tmp_path_factory.mktemp("two") / "scores.json"
    model = zoo.build("mixtral", **WIDE, **HEADS, tie_word_embeddings=request.param)
    data = zoo.tokens(3, 16, vocabulary=96)
    one = plan_memory(
        model, data, memory="1040000 bytes", context=64, formats=FORMATS, cache=["Q8_0"], draws=1, save_scores=path
    )
    assert one.payload.placement is None
    return model, data, Scores.load(path)


def by_loops(scores: Scores, gpu: int, ram: int) -> list[tuple[float, int]]:
    """Damage and layers of every plan that fits two memories, over all formats and numbers of layers."""
    fit = fit_of(scores, MemoryLimits(memory="1 GiB", context=64, keep=KEEP))
    table, count = fit.table, len(fit.weights.blocks)
    names = [each[0] for each in fit.weights.stored] + [""] * len(fit.cache.blocks)
    tied = "output.weight" not in names
    plans = []
    for chosen in itertools.product(*(np.flatnonzero(row) for row in table.has)):
        size = [int(table.size[i, j]) for i, j in enumerate(chosen)]
        damage = sum(table.damage[i, j] for i, j in enumerate(chosen))
        for layers in range(3):
            ours = "|".join(map(str, range(layers))) or "none"
            experts = {i for i, n in enumerate(names) if re.match(BY_LLAMA % ours, n)}
            embedding = {names.index("token_embd.weight")}
            beside = sum(size[i] for i in experts | embedding)
            card = sum(s for i, s in enumerate(size) if i not in experts | (set() if tied else embedding)) + fit.beside
            if card <= gpu and beside <= ram:
                plans.append((damage, layers))
    assert count + len(fit.cache.blocks) == len(names)
    return plans


def test_one_plan_of_two_memories_is_the_best_of_all_choices(mixture):
    _, _, scores = mixture
    fit = fit_of(scores, MemoryLimits(memory="1 GiB", context=64, keep=KEEP))
    layers = set()
    for card, beside in ((0.2, 0.2), (0.45, 0.5), (0.3, 0.9), (0.8, 0.12), (0.02, 1.0)):
        low, high = fit.least, int(fit.table.size.max(axis=1).sum()) + fit.beside
        gpu = int(fit.beside + card * (high - fit.beside))
        ram = int(beside * (high - fit.beside))
        every = by_loops(scores, gpu, ram)
        terms = {"gpu": f"{gpu} bytes", "ram": f"{ram} bytes", "context": 64, "keep": KEEP}
        if not every:
            with pytest.raises(InfeasibleBudget, match="too few at 64 tokens"):
                plan_memory(scores, **terms)
            continue
        plan = plan_memory(scores, **terms)
        best = min(damage for damage, _ in every)
        assert plan.payload.predicted == pytest.approx(best, rel=1e-9), (card, beside, low)
        here = plan.payload.placement
        assert here.layers == min(n for damage, n in every if damage <= best * (1 + 1e-12))
        assert here.gpu_bytes <= here.gpu == gpu and here.ram_bytes <= here.ram == ram
        layers.add(here.layers)
    assert len(layers) > 1, "the cases are all alike"


def test_too_little_of_either_is_refused_with_a_size_that_works(mixture):
    _, _, scores = mixture
    fit = fit_of(scores, MemoryLimits(memory="1 GiB", context=64))
    for gpu, ram in ((fit.least // 3, 40000), (1 << 20, 10), (1000, 1000)):
        with pytest.raises(InfeasibleBudget) as refused:
            plan_memory(scores, gpu=f"{gpu} bytes", ram=f"{ram} bytes", context=64)
        given = {"gpu": f"{gpu} bytes", "ram": f"{ram} bytes"}
        remedies = re.findall(r"--(gpu|ram)(?: to)? '([^']+)'", refused.value.remedy)
        assert remedies, refused.value.remedy
        given |= dict(remedies if "Give" in refused.value.remedy else remedies[:1])
        assert plan_memory(scores, **given, context=64).payload.placement is not None


def test_the_sides_are_those_of_the_tensors_in_the_file(mixture, tmp_path):
    model, data, scores = mixture
    fit = fit_of(scores, MemoryLimits(memory="1 GiB", context=64))
    gpu = fit.least - 6000
    plan = plan_memory(scores, gpu=f"{gpu} bytes", ram="1 MiB", context=64)
    here = plan.payload.placement
    assert here.layers > 0
    write_memory(model, plan, tmp_path / "out", data)
    pattern = BY_LLAMA % "|".join(map(str, range(here.layers)))
    tensors = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(next((tmp_path / "out").glob("*.gguf"))).tensors}
    experts = sum(size for name, size in tensors.items() if re.match(pattern, name))
    assert here.ram_bytes == experts + tensors["token_embd.weight"]
    alone = experts if "output.weight" not in tensors else here.ram_bytes
    assert here.gpu_bytes == plan.budget["spent"] - alone
    assert f"--n-cpu-moe {here.layers}" in (tmp_path / "out" / "cache.txt").read_text()
    assert Plan.load(plan.save(tmp_path / "plan.json")).payload.placement == here
    said = " ".join(explain_plan(plan)["sentences"])
    assert f"{here.ram_bytes:,} of 1,048,576" in said and here.options in said


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


def test_a_model_without_experts_and_another_runtime_are_refused():
    model, data = zoo.build("llama", **WIDE, **HEADS), zoo.tokens(2, 8, vocabulary=96)
    with pytest.raises(InvalidInput, match="no experts that could lie"):
        plan_memory(model, data, gpu="1 MiB", ram="1 MiB", context=64)
    with pytest.raises(InvalidInput, match="does not share a model"):
        plan_memory(zoo.fit_scores(0), gpu="1 MiB", ram="1 MiB", context=64)
