"""Every format says what the plan says: read back by the tool it is for, or counted."""

import csv
import dataclasses
import io
import itertools
import json
import re
import shlex

import numpy as np
import pytest
import yaml
from benchmarks.peers import exports
from tests import zoo

from layerbudget.cli import main
from layerbudget.decision import DECISIONS, Decision, Export
from layerbudget.decisions.ranks.apply import adapted_ranks
from layerbudget.decisions.sparsity.export import llm_compressor, with_levels
from layerbudget.errors import InvalidInput
from layerbudget.exports import EXPORTS, export, format_for
from layerbudget.plan import Plan, PlanBlock
from layerbudget.records import Block, Module
from layerbudget.solvers.rounding import few_levels


@pytest.fixture
def sparsity(mistral, tmp_path):
    plan = zoo.plan(mistral)
    plan.save(tmp_path / "plan.json")
    return plan


def test_a_lora_config_gives_every_module_its_rank(mistral, tmp_path, capsys):
    import peft

    plan = zoo.linears(mistral, lambda n: 3 if "q_proj" in n else 5 if "down" in n else 0)
    plan.save(tmp_path / "ranks.json")
    out = tmp_path / "adapter_config.json"
    assert main(["export", str(tmp_path / "ranks.json"), "--dropout", "0.1", "-o", str(out)]) == 0
    assert "The plan of ranks (rule by-hand) is written to" in capsys.readouterr().out
    for config in (peft.LoraConfig(**json.loads(out.read_text())), peft.LoraConfig.from_pretrained(str(tmp_path))):
        assert config.lora_dropout == 0.1
        found = adapted_ranks(peft.get_peft_model(zoo.mistral(), config))
        assert found == {m: b.count for m, b in plan.by_module().items() if b.count}


def test_axolotl_gets_the_ranks_that_peft_gets(mistral, tmp_path):
    """The lines that axolotl hands to PEFT's LoraConfig (its `_build_peft_lora_config`) adapt as the plan says."""
    import peft

    plan = zoo.linears(mistral, lambda n: 3 if "q_proj" in n else 5 if "down" in n else 0)
    plan.save(tmp_path / "ranks.json")
    out = tmp_path / "ranks.yaml"
    words = ["export", str(tmp_path / "ranks.json"), "--to", "axolotl", "-o", str(out)]
    assert main(words) == 0
    assert out.read_text().startswith("# lora_r and lora_alpha are a fallback")
    read = yaml.safe_load(out.read_text())
    patterns = {"rank_pattern": read["lora_rank_pattern"], "alpha_pattern": read["lora_alpha_pattern"]}
    assert all(isinstance(v, int) and v > 0 for p in patterns.values() for v in p.values())
    own = {"r": read["lora_r"], "lora_alpha": read["lora_alpha"], "target_modules": read["lora_target_modules"]}
    adapted = peft.get_peft_model(zoo.mistral(), peft.LoraConfig(**own, **patterns))
    assert adapted_ranks(adapted) == {m: b.count for m, b in plan.by_module().items() if b.count}
    assert {m.scaling["default"] for m in adapted.modules() if hasattr(m, "lora_A")} == {2.0}
    assert main([*words, "--overwrite", "--alpha-policy", "constant-alpha"]) == 0  # the mean is whole here: 4
    plan = zoo.linears(mistral, lambda n: 3 if "q_proj" in n else 6 if "down" in n else 4 if "up" in n else 0)
    with pytest.raises(InvalidInput, match="whole alphas"):
        EXPORTS.find("axolotl").text(plan, {"alpha_policy": "constant-alpha"})


def test_tools_of_one_rank_take_any_choice_of_modules(mistral, tmp_path, capsys):
    plan = zoo.linears(mistral, lambda n: 4 if "q_proj" in n or "down" in n else 0)
    adapted = [m for m, b in plan.by_module().items() if b.count]
    read = yaml.safe_load(EXPORTS.find("llama-factory").text(plan, {"dropout": 0.1}))
    assert read == {
        "finetuning_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1, "lora_target": ",".join(adapted)
    }  # fmt: skip
    read = yaml.safe_load(EXPORTS.find("mlx-lora").text(plan, {}))
    assert read.pop("lora_parameters") == {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": adapted}
    assert read == {"fine_tune_type": "lora", "num_layers": -1}
    zoo.linears(mistral, lambda n: 2 if "q_proj" in n else 5).save(tmp_path / "ranks.json")
    for name, remedy in (("llama-factory", "adapter_name_or_path"), ("mlx-lora", "layerbudget finetune")):
        assert main(["export", str(tmp_path / "ranks.json"), "--to", name, "-o", str(tmp_path / "x")]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "one rank for all modules, and this plan has ranks from 2 to 5" in said
        assert "--min-rank 0 --max-rank 5 --multiple 5" in said and remedy in said


def test_a_recipe_names_every_module_once_and_says_how_it_is_run(sparsity, tmp_path, capsys):
    out = tmp_path / "recipe.yaml"
    assert main(["export", str(tmp_path), "--method", "sparsegpt", "--levels", "2", "-o", str(out)]) == 0
    stages = [m for s in yaml.safe_load(out.read_text()).values() for g in s.values() for m in g.values()]
    assert len(stages) == 2
    ratios = {module: m["sparsity"] for m in stages for module in m["targets"]}
    assert set(ratios) == set(sparsity.by_module())
    spent = sum(ratios[b.modules[0]] * b.numel for b in sparsity.blocks)
    assert spent == pytest.approx(sparsity.counts.sum(), abs=1e-4 * sum(b.numel for b in sparsity.blocks))
    assert 'pipeline="sequential"' in out.read_text() and "levels: no block" in out.read_text()
    assert "pipeline='sequential'" in " ".join(capsys.readouterr().out.split())


def test_levels_are_the_nearest_and_keep_the_total(rng):
    values, weights = rng.random(7), rng.integers(1, 9, 7).astype(float)
    for count in (1, 2, 3, 7):
        found = few_levels(values, weights, count)
        assert len(np.unique(found)) <= count and found @ weights == pytest.approx(values @ weights)
        order, best = np.argsort(values), np.inf
        for cuts in itertools.combinations(range(1, 7), count - 1):  # brute force over all intervals
            groups = np.split(order, cuts)
            best = min(best, sum(weights[g] @ (values[g] - np.average(values[g], weights=weights[g])) ** 2 for g in groups))
        assert weights @ (values - found) ** 2 == pytest.approx(best, abs=1e-12)
    with pytest.raises(InvalidInput):
        few_levels(values, weights, 0)


def test_the_plan_with_levels_spends_the_same_to_the_weight(sparsity):
    fewer, change = with_levels(sparsity, 2)
    assert fewer.counts.sum() == sparsity.counts.sum() and 0 < change < 1
    assert len({round(b.value, 9) for b in fewer.blocks}) == 2


def test_a_recipe_has_as_many_ratios_as_levels_where_counts_differ_by_one_weight():
    """Whole weights of small matrices make ratios of one level differ in the fourth digit: the level is what is written."""
    numel, ratios = [613, 1009, 757, 887, 911, 523], [0.31, 0.33, 0.52, 0.54, 0.71, 0.72]
    blocks = [
        PlanBlock.of(Block(name=f"m{i}", modules=(Module(name=f"m{i}", d_in=n, d_out=1),)), r, round(n * r))
        for i, (n, r) in enumerate(zip(numel, ratios))
    ]
    plan = Plan(kind="sparsity", rule="by hand", model={}, blocks=tuple(blocks), budget={})
    for levels in (1, 3, 6):
        fewer, _ = with_levels(plan, levels)
        text = llm_compressor(plan, levels=levels)
        stages = [m for s in yaml.safe_load(text).values() for g in s.values() for m in g.values()]
        found = {module: m["sparsity"] for m in stages for module in m["targets"]}
        assert len(set(found.values())) == len(stages) == levels
        assert f"at most {levels} levels" in text and f" {levels} distinct ratios" in text
        assert sum(found[f"m{i}"] * n for i, n in enumerate(numel)) == pytest.approx(plan.counts.sum(), abs=5e-5 * sum(numel))
        assert fewer.counts.sum() == plan.counts.sum()


def test_tables_hold_the_plan(sparsity, tmp_path):
    assert main(["export", str(tmp_path / "plan.json"), "--to", "csv", "-o", str(tmp_path / "p.csv")]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    assert [(r["block"], float(r["value"]), int(r["count"])) for r in rows] == [
        (b.name, b.value, b.count) for b in sparsity.blocks
    ]
    assert main(["export", str(tmp_path / "plan.json"), "--to", "layers", "-o", str(tmp_path / "l.json")]) == 0
    assert json.loads((tmp_path / "l.json").read_text()) == {m: b.value for m, b in sparsity.by_module().items()}


@pytest.mark.parametrize("name", [name for name, e in EXPORTS.all().items() if "{file" in e.use or "{word" in e.use])
def test_a_command_names_the_file_as_a_shell_or_python_reads_it(name, sparsity):
    """Also where a folder has a blank or an apostrophe in its name: the command is copied as it stands."""
    path, export = "my plans/it's.txt", dataclasses.replace(EXPORTS.find(name), options=None)
    sentence = export.sentence(sparsity, path)
    words = re.sub(r"\$\(cat (.*?)\)", r"\1", sentence)
    if sentence.startswith(("llama-", "python -m", "mlx_lm.lora")):
        assert path in shlex.split(words)
    elif "(" in sentence:
        assert f'"{path}"' in sentence  # Python
    else:
        assert path in sentence


def test_what_a_format_does_not_write_or_read_is_refused(sparsity, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    for words, said in (
        (["--to", "lora"], "no format for a plan of kind sparsity"),
        (["--to", "csv", "--levels", "2"], "Unknown option: --levels"),
        (["--to", "gguf"], "export format"),
        (["--to", "peft"], "recipe (llm-compressor's recipe). Choose"),
        (["--method", "magnitude"], "cannot be written"),
    ):  # fmt: skip
        assert main(["export", plan, *words, "-o", str(tmp_path / "x")]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert main(["export", str(tmp_path / "none")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["export", str(tmp_path / "empty")]) == 2
    assert not (tmp_path / "x").exists()
    assert main(["export", plan, "-o", plan]) == 2 and "is the same" in capsys.readouterr().err


def test_stacks_of_experts_go_to_tools_that_take_them_and_no_others():
    """axolotl and PEFT know parameters; llm-compressor's recipe would match nothing."""
    names = ["layers.0.mlp.experts.gate_up_proj", "layers.0.self_attn.q_proj"]
    blocks = tuple(PlanBlock(name=n, value=2, count=2, numel=64, modules=(n,)) for n in names)
    ranks = Plan(kind="ranks", rule="by-hand", model={}, blocks=blocks, budget={})
    found = yaml.safe_load(EXPORTS.find("axolotl").text(ranks, {}))
    assert (found["lora_target_modules"], found["lora_target_parameters"]) == (names[1:], names[:1])
    for name in ("llama-factory", "mlx-lora"):
        with pytest.raises(InvalidInput, match=r"gate_up_proj is a stack of experts.*--exclude experts"):
            EXPORTS.find(name).text(ranks, {})
    halves = tuple(dataclasses.replace(b, value=0.5, count=32) for b in blocks)
    with pytest.raises(InvalidInput, match=r"gate_up_proj is a stack of experts.*layerbudget apply MODEL PLAN"):
        EXPORTS.find("recipe").text(dataclasses.replace(ranks, kind="sparsity", blocks=halves, payload=None), {})


def test_a_format_of_ones_own(sparsity, tmp_path):
    with EXPORTS.kept():

        @export("names", kinds=("sparsity",), summary="names of the blocks")
        def names(plan, *, separator="\n"):
            return separator.join(plan.names)

        words = ["export", str(tmp_path), "--to", "names", "--separator", ";", "-o", str(tmp_path / "n.txt")]
        assert main(words) == 0
    assert (tmp_path / "n.txt").read_text() == ";".join(sparsity.names)


def test_a_decision_brings_its_formats(mistral):
    """Also one that comes after the table of formats was read; what a user added under the same name stays."""

    class Lengths(Decision):
        name, decides, counts = "lengths", "length", "tokens"
        exports = (Export(name="lengths", call=lambda plan: "its own", kinds=("lengths",)),)

    with DECISIONS.kept(), EXPORTS.kept():
        assert "lengths" not in EXPORTS.names()
        DECISIONS.add("lengths", Lengths())
        plan = dataclasses.replace(zoo.plan(mistral), kind="lengths", payload=None)
        assert format_for(plan) == "lengths" and EXPORTS.find("lengths").text(plan, {}) == "its own"
        with pytest.raises(InvalidInput, match="For this plan there are .*lengths"):
            EXPORTS.find("recipe").text(plan, {})
        EXPORTS.add("lengths", Export(name="lengths", call=lambda plan: "another"))
        assert EXPORTS.find("lengths").text(plan, {}) == "another"


@pytest.mark.slow
@pytest.mark.parametrize("kind", exports.MODELS)
@pytest.mark.parametrize("tool", exports.TOOLS)
def test_the_tool_gives_every_planned_module_what_the_plan_says(tool, kind):
    """By the released package of the tool itself; LAYERBUDGET_TOOLS names folders of packages, see CONTRIBUTING."""
    if kind in exports.TOOLS[tool].refused:
        pytest.skip(f"refused: {exports.TOOLS[tool].refused[kind]}")
    if exports.version(tool) is None:
        pytest.skip(f"{exports.TOOLS[tool].package} is not installed")
    found = exports.row(tool, kind)
    assert found["same"] == found["planned"] > 0 and not found["beside"], found
