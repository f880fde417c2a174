"""What changes a number belongs to the identity of what is kept: another precision is never answered with the old numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import zoo

from layerbudget.cli import main
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import ModelMismatch
from layerbudget.models import loading, machine
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model
from layerbudget.models.machine import computation, versions
from layerbudget.plan import Plan
from layerbudget.scores import Scores
from layerbudget.sensitivity.estimators import ESTIMATORS
from layerbudget.sensitivity.gain import score


@pytest.fixture
def saved(saved_model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(40 + (7 * i * i + 3 * i) % 70) for i in range(900)))
    return str(saved_model("llama")), ["--data", str(text), "--samples", "4", "--length", "12", "--quiet"]


def scored(saved, out, *more):
    model, text = saved
    assert main(["score", model, *text, "-o", str(out), *more]) == 0
    return Scores.load(out)


@pytest.mark.parametrize("estimator", ["gradient-norm", "kfac"])
def test_a_stage_of_bfloat16_does_not_answer_float32(saved, tmp_path, estimator):
    """The files were byte for byte the same."""
    found = {}
    for dtype in ("bfloat16", "float32", "bfloat16"):
        again = scored(
            saved, tmp_path / f"{dtype}-{len(found)}.json", "--dtype", dtype, "--resume", str(tmp_path / "stage"),
            "--estimator", estimator,
        )  # fmt: skip
        alone = scored(saved, tmp_path / f"alone-{dtype}-{len(found)}.json", "--dtype", dtype, "--estimator", estimator)
        assert again.gain == alone.gain and again.model["computation"]["dtype"] == dtype
        found.setdefault(dtype, again.gain)
        assert found[dtype] == again.gain
    assert found["float32"] != found["bfloat16"]


def test_rows_of_another_precision_are_not_used(saved, tmp_path):
    """``fisher-gram`` keeps parts of its work; it never goes on from those of another precision."""
    stage = ["--resume", str(tmp_path / "stage")]
    scored(saved, tmp_path / "a.json", "--dtype", "bfloat16", *stage)
    resumed, alone = scored(saved, tmp_path / "b.json", *stage), scored(saved, tmp_path / "c.json")
    assert np.allclose(resumed.gain, alone.gain, rtol=1e-5)


def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.3
    )
    return LlamaForCausalLM(config).eval(), CalibrationSet(input_ids=torch.randint(3, 61, (6, 9)))


CHANGES = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "attention": lambda model: (setattr(model.config, "_attn_implementation", "eager"), model)[1],
}


@pytest.mark.parametrize("what", [*CHANGES, "autocast", "matmul"])
def test_every_part_of_a_computation_is_part_of_the_request(what, tmp_path):
    model, data = tiny()
    first = computation(model)
    score(model, data, partition(model), "gradient-norm", resume=tmp_path)
    before = torch.get_float32_matmul_precision()
    try:
        if what in CHANGES:
            model = CHANGES[what](model)
        if what == "matmul":
            torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            now = computation(model)
            assert now != first and {k for k in now if now[k] != first[k]} == {what}
            score(model, data, partition(model), "gradient-norm", resume=tmp_path)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(list(tmp_path.glob("scores-*.json"))) == 2


def test_every_estimator_says_how_it_computed():
    model, data = tiny()
    for name in ESTIMATORS.all():
        own = {"steps": 2} if name == "ggn" else {}
        found = score(model, data, partition(model), name, **own)
        assert found.model["computation"] == computation(model), name
        assert {"torch", "transformers", "numpy"} <= set(found.versions)


def test_a_pruning_is_not_resumed_in_another_precision(saved, tmp_path, capsys):
    """4,762 entries of the mask were of the other precision."""
    model, text = saved
    scores = scored(saved, tmp_path / "s.json")
    plan_sparsity(scores, sparsity=0.5).save(tmp_path / "plan.json")
    command = ["apply", model, str(tmp_path / "plan.json"), *text, "--resume", str(tmp_path / "kept")]
    stop = load_model(model)
    plan = plan_sparsity(scores, sparsity=0.5)
    data = CalibrationSet(input_ids=torch.randint(3, 90, (4, 12)))

    def crash(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(stop, plan, data, method="wanda", resume=tmp_path / "kept", progress=crash)
    with pytest.raises(ModelMismatch, match="precision|dtype|computation"):
        prune(load_model(model, dtype="bfloat16"), plan, data, method="wanda", resume=tmp_path / "kept")
    assert main([*command, "--dtype", "bfloat16", "-o", str(tmp_path / "out")]) == 2
    assert "another" in capsys.readouterr().err.lower() and not (tmp_path / "out").exists()
    resumed, whole = load_model(model), load_model(model)
    prune(resumed, plan, data, method="wanda", resume=tmp_path / "kept")
    prune(whole, plan, data, method="wanda")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_versions_are_of_what_is_installed():
    assert versions(["torch", "no-such-package"])["torch"] == torch.__version__.split("+")[0] or "+" in torch.__version__
    assert "no-such-package" not in versions(["no-such-package"])
    json.dumps(versions())


@pytest.mark.parametrize(("dtype", "emulated"), [("auto", False), ("auto", True), ("float32", False)])
def test_bytes_are_those_of_the_checkpoint_that_is_written_whatever_the_model_computes_in(
    dtype, emulated, tokenizer, tmp_path, monkeypatch
):
    """Of a checkpoint in 16 bits, bytes were counted in float32 where that was computed in: twice as much went, or half."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "quick_dtype", lambda held, place: torch.float32 if emulated else held)
    (tmp_path / "text.txt").write_text("some words of text, and more of them. " * 40)
    text = ["--data", "text.txt", "--samples", "3", "--length", "16", "--quiet", "--dtype", dtype]
    kinds = {"qwen3-moe": ["expert-pruning", "--keep", "140 KiB"], "llama": ["shapes", "--save", "8 KiB", "--even"]}
    for name, (kind, *budget) in kinds.items():
        zoo.speaker(name).bfloat16().save_pretrained(name)
        tokenizer.save_pretrained(name)
        assert main(["plan", kind, name, *budget, *text, "-o", f"{kind}.json"]) == 0
        assert main(["apply", name, f"{kind}.json", "-o", kind, "--quiet"]) == 0
        before, after = (sum(t.nbytes for t in load_file(tmp_path / f / "model.safetensors").values()) for f in (name, kind))
        plan = Plan.load(f"{kind}.json")
        assert plan.budget["spent"] == (after if name == "qwen3-moe" else before - after)
    assert 135 << 10 < Plan.load("expert-pruning.json").budget["spent"] <= 140 << 10
    for kind in ("expert-pruning", "shapes"):
        words = ["--keep", "0.5"] if kind == "expert-pruning" else ["--save", "9%"]
        assert main(["plan", kind, "llama", *words, "--bytes-per-parameter", "2", "-o", "other.json"]) == 2


def test_quick_products_are_as_exact_as_float32_and_are_undone(monkeypatch):
    """oneDNN multiplies on AMD's processors alone, and only as long as that is float32."""
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    before, usual, seen = computation(tiny()[0]), getattr(settings, "fp32_precision", ""), []
    if settings is None or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this torch, or this processor, has one way")
    x, y = torch.randn(300, 700), torch.randn(700, 200)
    exact = x.double() @ y.double()
    for amd, limit in ((True, 1e-5), (True, 0.0), (False, 1e-5)):
        monkeypatch.setattr(machine, "_is_amd", lambda amd=amd: amd)
        monkeypatch.setattr(machine, "_EXACT", limit)
        machine.quick_products()
        seen.append(settings.fp32_precision)
        assert float((x @ y - exact).norm() / exact.norm()) < 1e-5 and computation(tiny()[0]) == before
        machine.usual_products()
        assert settings.fp32_precision == usual
    assert seen[1:] == [usual, usual]
