"""Every refusal of ``export --to``: the sentence, and what it says to do, done."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import types

import pytest
from tests import zoo

import layerbudget as lb
from layerbudget import decision
from layerbudget.cli import main
from layerbudget.decisions.bits import export as of_bits
from layerbudget.decisions.cache import export as of_cache
from layerbudget.decisions.cache.plan import plan_cache
from layerbudget.decisions.ranks import export as of_ranks
from layerbudget.decisions.sparsity import export as of_sparsity
from layerbudget.decisions.sparsity import save as of_recipes
from layerbudget.errors import InvalidInput, MissingDependency
from layerbudget.exports import EXPORTS
from layerbudget.models.blocks import partition

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1}
PLACES = {  # modules and functions whose refusals are meant: all of the modules of exports, and what these call
    of_bits: None, of_cache: None, of_ranks: None, of_sparsity: None, of_recipes: "recipe", decision: "_part",
}  # fmt: skip
seen: set[tuple[str, int]] = set()  # refusals that a test has met: module and line


@pytest.fixture(scope="module")
def models():
    """A dense model, one with fused matrices, a mixture, and text."""
    dense = zoo.build("llama", **SIZES, **HEADS)
    fused = zoo.build("phi3", **SIZES, **HEADS)
    mixture = zoo.build("qwen3-moe", **SIZES, moe_intermediate_size=64)
    return types.SimpleNamespace(dense=dense, fused=fused, mixture=mixture, text=zoo.tokens(2, 8))


@pytest.fixture(scope="module")
def plan(models):
    """Plans of bits by what they were asked for, each made once."""
    kept = {}

    def make(name, formats="w4-g32", bits=5.0, **options):
        formats = formats.split(",") if isinstance(formats, str) else formats
        key = (name, *(formats or ()), bits, *map(str, options.items()))
        if key not in kept:
            own = {"draws": 1, "rows": 2, "formats": formats, **options}
            kept[key] = lb.plan_bits(getattr(models, name), models.text, bits=bits, **own)
        return kept[key]

    return make


def text(tool, plan, **options):
    return EXPORTS.find(tool).text(plan, options)


def refused(tool, plan, kind=InvalidInput, **options):
    """What is said of a plan that a tool does not take, and what to do; the line of the refusal is kept."""
    with pytest.raises(kind) as caught:
        text(tool, plan, **options)
    seen.update((entry.frame.f_globals["__name__"], entry.lineno + 1) for entry in caught.traceback)
    error = caught.value
    assert error.remedy and str(error).startswith(error.what)
    return error.remedy


def word(remedy, flag):
    """What a remedy gives an option."""
    found = re.search(rf"{flag} ([\w./,=-]*\w)", remedy)
    assert found, (flag, remedy)
    return found.group(1)


def applied(models, name, plan, remedy):
    """The plan, applied here as the remedy says."""
    assert "layerbudget apply MODEL PLAN" in remedy
    model = copy.deepcopy(getattr(models, name))
    receipt = lb.apply_plan(model, plan, models.text)
    assert receipt.plan_digest == plan.digest
    return receipt


@pytest.mark.parametrize("tool", ["auto-round", "gptqmodel", "exllamav3", "onnx"])
def test_a_format_that_a_tool_does_not_take(models, plan, tool):
    first = plan("dense", "nvfp4")
    remedy = refused(tool, first)
    other = plan("dense", word(remedy, "--formats"), bits=6.0)
    assert len(set(other.payload.formats.values())) > 1 and text(tool, other)
    applied(models, "dense", first, remedy)


@pytest.mark.parametrize(
    ("tool", "wrong"),
    [("torchao", "nvfp4"), ("modelopt", "w4-g32-asym"), ("mlx", "w4-channel"), ("mlx", "fp8"), ("onnx", "w4-g32,w8-g64")],
)
def test_a_format_or_a_mix_of_them_for_which_others_are_named(plan, tool, wrong):
    bits = 9.0 if wrong == "fp8" else 6.0
    remedy = refused(tool, plan("dense", wrong, bits=bits))
    assert text(tool, plan("dense", word(remedy, "--formats"), bits=6.0))


def test_a_plan_of_sixteen_bits_alone(plan):
    remedy = refused("gptqmodel", plan("dense", bits=16.0))
    assert text("gptqmodel", plan("dense", "w3-g32", bits=float(word(remedy, "--bits"))))


def test_formats_of_another_family(plan):
    for tool, first in (("auto-round", plan("dense", "Q4_0", family="gguf")), ("tensor-types", plan("dense"))):
        family = word(refused(tool, first), "--format")
        assert text(tool, plan("dense", {"gguf": "Q4_0"}.get(family, "w4-g32"), family=family))


def test_a_method_that_llm_compressor_has_not(plan):
    planned = plan("dense")
    for method in ("autoround", "wanda"):
        remedy = refused("llm-compressor", planned, method=method)
        assert text("llm-compressor", planned, method=word(remedy, "--method"))
        if method == "autoround":
            assert text(word(remedy, "--to"), planned)


def test_experts_for_which_a_tool_has_no_format(models, plan):
    mixed = plan("mixture", unwritten="plan")  # for a tool that writes them
    for tool in ("torchao", "onnx", "mlx"):
        remedy = refused(tool, mixed)
        pattern, _, form = word(remedy, "--keep").partition("=")
        kept = plan("mixture", bits=15.5, keep={pattern: form}, unwritten="plan")
        assert {f for n, f in kept.payload.formats.items() if "experts" in n} == {"bf16"}
        assert "w4-g32" in kept.payload.formats.values() and text(tool, kept)
        if tool == "torchao":
            ways = {"vllm": ("w4-g32", "compressed-tensors", "llm-compressor"), "llama.cpp": ("Q8_0", "gguf", "tensor-types")}
            for runtime in re.search(r"--runtime (\S+) or (\S+)\.$", remedy).groups():
                formats, family, other = ways[runtime]
                assert text(other, plan("mixture", formats, bits=8.7, runtime=runtime, family=family))
        if tool == "mlx":
            assert "--model-type, as config.json has it" in remedy
            assert "switch_mlp" in text(tool, mixed, model_type=models.mixture.config.model_type)
        if tool == "onnx":
            applied(models, "mixture", mixed, remedy)


def test_fused_matrices_that_a_graph_has_not(models, plan):
    first = plan("fused")
    applied(models, "fused", first, refused("onnx", first))


@pytest.mark.parametrize("tool", ["vllm-cache", "modelopt-cache", "llama-cache"])
def test_a_cache_of_another_runtime(models, tool):
    first = plan_cache(models.dense, models.text, context=64, bits=8.5, draws=1, runtime="transformers")
    runtime = word(refused(tool, first), "--runtime")
    assert text(tool, plan_cache(models.dense, models.text, context=64, bits=12.5, draws=1, runtime=runtime))


def ranks_of(model, **options):
    return lb.plan_ranks(partition(model, "linear", **options), mean_rank=4, rule="size")


def test_ranks_that_differ_and_experts_for_tools_of_one_rank(models, tmp_path):
    model = zoo.adaptable()
    planned = ranks_of(model)
    for tool, otherwise in (("llama-factory", "add_ranks(model, plan) with save_pretrained"), ("mlx-lora", "--to lora")):
        remedy = refused(tool, planned)
        least, largest, multiple = (int(word(remedy, flag)) for flag in ("--min-rank", "--max-rank", "--multiple"))
        fewer = {"mean_rank": 4, "rule": "size", "min_rank": least, "max_rank": largest, "multiple": multiple}
        other = lb.plan_ranks(partition(model, "linear"), **fewer)
        assert set(other.counts) == {0, largest} and text(tool, other)
        assert otherwise in remedy and text("lora", planned)
    lb.add_ranks(copy.deepcopy(model), planned).save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    for tool in ("llama-factory", "mlx-lora"):
        excluded = word(refused(tool, ranks_of(models.mixture)), "--exclude")
        even = lb.plan_ranks(partition(models.mixture, "linear", exclude=excluded), mean_rank=4, rule="uniform")
        assert text(tool, even)


def test_alphas_that_axolotl_does_not_read(models):
    planned = ranks_of(zoo.adaptable())
    remedy = refused("axolotl", planned, alpha_policy="constant-alpha")
    assert text(word(remedy, "--to"), planned, alpha_policy="constant-alpha")
    with pytest.raises(InvalidInput, match="--alpha-policy constant-ratio"):
        text("axolotl", planned, alpha_policy="constant-alpha")
    assert text("axolotl", planned, alpha_policy="constant-ratio")


def test_no_peft(models, monkeypatch):
    """What is installed is the remedy; here it is there again."""
    planned = ranks_of(zoo.adaptable())
    with monkeypatch.context() as gone:
        gone.setitem(__import__("sys").modules, "layerbudget.decisions.ranks.apply", None)
        assert "pip install" in refused("lora", planned, kind=MissingDependency)
    assert text("lora", planned)


def test_recipes_of_another_method_of_rows_and_of_experts(models):
    model = zoo.mistral()
    planned = lb.plan_sparsity(partition(model, "linear"), sparsity=0.5, rule="uniform")
    remedy = refused("recipe", planned, method="magnitude")
    assert text("recipe", planned, method=word(remedy, "--method"))
    by_rows = lb.plan_sparsity(model, zoo.text(), sparsity=0.5, by="rows:8")
    by = word(refused("recipe", by_rows), "--by")
    assert text("recipe", lb.plan_sparsity(partition(model, by), sparsity=0.5, rule="uniform"))
    mixed = lb.plan_sparsity(partition(models.mixture, "linear"), sparsity=0.5, rule="uniform")
    assert "layerbudget apply MODEL PLAN" in refused("recipe", mixed)
    assert lb.prune(copy.deepcopy(models.mixture), mixed, method="magnitude").sparsity == pytest.approx(0.5, abs=1e-3)


def test_a_plan_of_another_kind_goes_to_every_format_that_is_named(models, plan):
    plans = ranks_of(zoo.adaptable()), plan("dense"), plan("dense", "Q4_0", family="gguf")
    for tool, planned in zip(("onnx", "lora", "lora"), plans, strict=True):
        names = refused(tool, planned).removeprefix("For this plan there are ").rstrip(".").split(", ")
        assert len(names) > 2 and all(text(name, planned) for name in names)
    assert "auto-round" not in names


def test_every_refusal_was_met():
    """Of the modules of exports; the tests above ran, as a refusal that none of them meets has a remedy that was not tried."""
    for module, only in PLACES.items():
        tree = ast.parse(inspect.getsource(module))
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and only in (None, n.name)]
        raised = {n for f in functions for n in ast.walk(f) if isinstance(n, ast.Raise)}
        met = {line for name, line in seen if name == module.__name__}
        assert raised or module is of_sparsity, module
        missed = [ast.unparse(n)[:120] for n in raised if not met & set(range(n.lineno, n.end_lineno + 1))]
        assert not missed, (module.__name__, missed)


def test_an_unknown_format_is_answered_with_those_of_the_plan(tmp_path, capsys):
    lb.plan_lora_experts(zoo.scores([3.0, 1.0]), total=4).save(tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "mola"]) == 2
    said = capsys.readouterr().err
    assert "There is no export format 'mola'. For a plan of lora-experts there are layers (" in said
    assert "csv (" in said and "gptqmodel" not in said
