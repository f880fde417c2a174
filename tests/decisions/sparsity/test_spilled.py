"""Gram matrices of a streamed model lie in files: the plan is the same, and no layer's but the current one is in memory."""

import gc
from pathlib import Path

import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.compressors.sparsegpt import _inverse
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InvalidInput
from layerbudget.execution.inputs import InputMoments, add_sequences
from layerbudget.models.machine import let_go, zeros_in_file


def test_a_tensor_that_lies_in_a_file_is_a_tensor(tmp_path):
    tensor = zeros_in_file((300, 500), tmp_path)
    assert not list(tmp_path.iterdir()) and bool((tensor == 0).all())  # the file has lost its name
    tensor[5:].addmm_(torch.ones(295, 3), torch.ones(3, 500))
    assert float(tensor.sum()) == 295 * 500 * 3
    assert torch.equal(zeros_in_file((2, 3), None), torch.zeros(2, 3))


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_it_takes_no_memory_of_the_process(tmp_path):
    def own() -> int:
        gc.collect()
        return int(next(r for r in Path("/proc/self/status").read_text().splitlines() if r.startswith("RssAnon")).split()[1])

    before = own()
    held = [zeros_in_file((1024, 4096), tmp_path).fill_(1.0) for _ in range(8)]  # 128 MiB
    assert own() - before < 16 << 10 and float(held[7][-1, -1]) == 1.0


def test_a_streamed_model_gets_the_plan_of_the_one_in_memory(tmp_path, monkeypatch):
    model = zoo.mistral(3)
    model.config.architectures = ["MistralForCausalLM"]
    model.save_pretrained(tmp_path / "model")
    data = zoo.tokens(4, 12, vocabulary=61)
    spilled: list[tuple[int, ...]] = []
    import layerbudget.decisions.sparsity.treated as point
    import layerbudget.execution.inputs as inputs

    for module in (point, inputs):
        monkeypatch.setattr(
            module,
            "zeros_in_file",
            lambda shape, folder, *more: (
                spilled.append(tuple(shape)) if folder is not None else None,
                zeros_in_file(shape, folder, *more),
            )[1],
        )
    plans = []
    for stream in (False, True):
        there = lb.load_model(str(tmp_path / "model"), stream=stream)
        plans.append(plan_sparsity(there, data, sparsity=0.5, by="linear", method="sparsegpt", passes=9))
        assert bool(spilled) == stream
    assert plans[0].counts.tolist() == plans[1].counts.tolist() and plans[0].payload.measured == plans[1].payload.measured
    monkeypatch.setattr("layerbudget.storage.writing.shutil.disk_usage", lambda where: type("Disk", (), {"free": 10})())
    with pytest.raises(InvalidInput, match="will take about"):
        plan_sparsity(there, data, sparsity=0.5, by="linear", method="sparsegpt", passes=9)


@pytest.mark.parametrize("n", [7, 1024, 1500])
def test_a_triangle_is_inverted_by_panels(n):
    gram = torch.randn(n, 2 * n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = torch.linalg.cholesky(gram @ gram.T)
    found = _inverse(factor.clone(), torch.empty(n, n, dtype=factor.dtype)).flip(0, 1)  # it comes in reverse
    assert torch.equal(found, found.tril()) and torch.allclose(found @ factor, torch.eye(n, dtype=factor.dtype), atol=1e-9)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_pages_of_a_file_leave_the_process_and_come_back(tmp_path):
    def resident() -> int:
        return int(next(r for r in Path("/proc/self/status").read_text().splitlines() if r.startswith("VmRSS")).split()[1])

    tensor, other = zeros_in_file((2048, 4096), tmp_path), torch.full((64, 64), 2.0)
    tensor.fill_(1.0)
    before = resident()
    let_go(tensor)
    let_go(other)  # lies in no file
    assert before - resident() > 24 << 10
    assert float(tensor.sum()) == tensor.numel() and bool((other == 2).all())


def test_moments_in_a_file_stay_there_in_float32(tmp_path):
    """They were copied into memory, a layer's after the other's."""
    x = torch.randn(30, 12)
    held, filed = InputMoments("gram"), InputMoments("gram", folder=tmp_path)
    for moments in (held, filed):
        add_sequences(moments, x[None], None)
    assert torch.equal(held.value, filed.value) and filed.value.dtype == torch.float32
    assert filed.value.untyped_storage().filename is not None and held.value.untyped_storage().filename is None
    filed.add(x)  # in float64 again
    filed.rest()
    held.add(x)
    assert torch.equal(held.value, filed.value)
