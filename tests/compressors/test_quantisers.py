"""Quantisers against the packages whose formats they fill, and GPTQ against its own objective."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from layerbudget.compressors import base
from layerbudget.compressors.base import QUANTISERS, TREATMENTS, Level, find_quantiser, find_treatment
from layerbudget.compressors.formats import FLOATING, TYPES, VLLM, find_format, find_runtime, need_packing
from layerbudget.compressors.quantisers import Quantiser, grid_of, grouped, rows_together, sign_of_largest
from layerbudget.decisions.bits.packed import _pack, _unpack
from layerbudget.errors import InvalidInput

gguf = pytest.importorskip("gguf")
packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
GGML = [t.name for t in TYPES if not t.plain and not t.name.startswith("IQ1")]  # ggml takes seconds for a row of IQ1
OLD = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
FLOATS = [f.name for f in FLOATING]
PACKED = [f"w{b}-{g}{a}" for b in (2, 3, 4, 5, 6, 7, 8) for g in ("g32", "channel") for a in ("", "-asym")] + ["w6-g6"]


def weight(rows=24, columns=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=g) * torch.rand(rows, 1, generator=g) * 0.1
    w[3, 32:64] = 0
    w[4] = w[4].abs()
    return w


def inputs(columns=96, tokens=300, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 20, generator=g) @ torch.randn(20, columns, generator=g)
    x = x + 0.3 * torch.randn(tokens, columns, generator=g)
    return x * torch.rand(columns, generator=g) * 3


def prepared_for(quantiser, x):
    moment = {"none": None, "diagonal": (x**2).sum(0), "gram": x.T @ x}[quantiser.statistic]
    return None if moment is None else quantiser.prepare(moment)


def scheme(form):
    return need_packing(form.packing)[1](targets=["Linear"], weights=form.arguments())


def pack(rounded, form):
    tensors = {"weight": rounded.weight, "weight_scale": rounded.scale, "weight_zero_point": rounded.zero}
    return packed.PackedQuantizationCompressor.compress(tensors, scheme(form))


@pytest.mark.parametrize("method", QUANTISERS.names())
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n.startswith("IQ2") else n for n in GGML])
def test_the_bytes_of_a_type_read_back_as_the_weights(method, name):
    """What is planned is what is written, and what knows the inputs knows them."""
    quantiser, x, w = find_quantiser(method), inputs(256), weight(columns=256)
    got = quantiser.quantise(w, prepared_for(quantiser, x), Level(format=name))
    back = gguf.dequantize(got.data, gguf.GGMLQuantizationType[name])
    assert np.array_equal(back, got.weight.numpy()) and -(-got.data.nbytes // 32) * 32 == find_format(name).bytes(24, 256)


@pytest.mark.parametrize("name", OLD)
def test_round_to_nearest_is_what_the_package_gguf_does(name):
    kind, w = gguf.GGMLQuantizationType[name], weight()
    stored = gguf.quantize(w.numpy(), kind)
    got = find_quantiser("rtn").apply(w, None, Level(format=name))
    assert torch.equal(got, torch.from_numpy(gguf.dequantize(stored, kind)))
    assert find_format(name).bytes(24, 96) == -(-stored.nbytes // 32) * 32


@pytest.mark.parametrize("name", PACKED)
def test_round_to_nearest_is_what_compressed_tensors_does(name):
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    form, w = find_format(name), weight()
    got = find_quantiser("rtn").quantise(w, None, Level(format=name))
    groups = grouped(w, form)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme(form).weights)
    some = (groups != 0).any(-1)  # in a group of zeros the package divides zero by zero
    assert torch.equal(got.scale, scale.to(torch.bfloat16)) and torch.equal(got.zero[some], zero[some])
    theirs = fake_quantize(w, got.scale.float(), got.zero, scheme(form).weights)
    assert torch.allclose(got.weight, theirs, atol=0, rtol=1e-6) or (got.weight != theirs).float().mean() < 1e-3


@pytest.mark.parametrize("method", QUANTISERS.names())
@pytest.mark.parametrize("name", PACKED)
def test_what_compressed_tensors_unpacks_is_what_was_planned(method, name):
    form, quantiser, x = find_format(name), find_quantiser(method), inputs()
    rounded = quantiser.quantise(weight(), prepared_for(quantiser, x), Level(format=name))
    stored = pack(rounded, form)
    assert sum(t.nbytes for t in stored.values()) == form.bytes(24, 96)
    stored["weight_scale"] = stored["weight_scale"].float()  # products in float32, as transformers computes them on loading
    back = packed.PackedQuantizationCompressor.decompress(stored, scheme(form))["weight"]
    assert torch.equal(back, rounded.weight)


def numbers_of(form):
    """Every number of a floating-point code, from the row of its format: zero, fractions of the smallest, all up to the top."""
    floats, step = form.floats, 2**form.floats.mantissa
    powers = range(floats.least, floats.top.bit_length())
    whole = {(step + k) * 2.0 ** (e - floats.mantissa) for e in powers for k in range(step)}
    small = {k * 2.0 ** (floats.least - floats.mantissa) for k in range(step)}
    return torch.tensor(sorted(n for n in small | whole if n <= floats.top))


def test_the_row_of_a_format_says_its_numbers():
    assert numbers_of(find_format("nvfp4")).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert all(torch.equal(numbers_of(find_format(name)), e4m3) for name in ("fp8", "mxfp8"))


@pytest.mark.parametrize("method", QUANTISERS.names())
@pytest.mark.parametrize("name", FLOATS)
def test_floating_point_grids_are_those_of_compressed_tensors(method, name):
    """Every weight is the nearest number of its scale (all are tried), what the package rounds to, and one of bfloat16."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    form, quantiser, x, w = find_format(name), find_quantiser(method), inputs(), weight()
    w[5, :16] *= 1e-6  # a scale below the smallest
    got = quantiser.quantise(w, prepared_for(quantiser, x), Level(format=name, peak=3.0))
    assert torch.equal(got.weight, got.weight.bfloat16().float())
    assert got.unit == (512.0 if form.united else None)  # the power of two below 448 x 6 / 3
    numbers = numbers_of(form)
    d = got.scale.float().reshape(24, -1, 1, 1) / (got.unit or 1.0)
    points, groups = torch.cat([-numbers, numbers]) * d, grouped(got.weight, form)
    assert (points == groups[..., None]).any(-1).all()
    if method in ("gptq", "descent"):
        return
    nearest = (points - grouped(w, form)[..., None]).abs().amin(-1)
    assert torch.equal((groups - grouped(w, form)).abs(), nearest)
    unit = None if got.unit is None else torch.tensor([got.unit])
    assert torch.equal(fake_quantize(w, got.scale.float(), None, scheme(form).weights, global_scale=unit), got.weight)


@pytest.mark.parametrize("method", QUANTISERS.names())
@pytest.mark.parametrize("name", FLOATS)
def test_what_compressed_tensors_reads_of_floating_point_is_what_was_planned(method, name):
    """Over all magnitudes of bfloat16 that a scale has, to the bit, in the planned bytes."""
    form, quantiser, w = find_format(name), find_quantiser(method), weight(96, 64)
    w *= 2.0 ** torch.linspace(-100, 100, 96)[:, None] if not form.united else 1.0
    got = quantiser.quantise(w, prepared_for(quantiser, inputs(64)), Level(format=name))
    stored = _pack(got.weight, got, form, "some")  # reads it back itself
    assert torch.equal(_unpack({f"some.{k}": t for k, t in stored.items()}, form, "some"), got.weight)
    assert sum(t.nbytes for t in stored.values()) == form.bytes(96, 64)


@pytest.mark.parametrize(("name", "largest"), [("mxfp4", 4), ("mxfp8", 256)])
def test_powers_of_two_are_those_of_compressed_tensors(name, largest):
    """Over many magnitudes, and beside the place where the power changes."""
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    form, w = find_format(name), weight(96, 64)
    w *= 2.0 ** torch.linspace(-100, 120, 96)[:, None]
    w[7, :32], w[8, :32] = torch.linspace(-1.75, 1.75, 32), torch.linspace(-1.7499999, 1.7499999, 32)
    groups = grouped(w, form)
    got, some = grid_of(groups, form, None).scale[..., 0], (groups != 0).any(-1)
    theirs, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme(form).weights)
    assert torch.equal(got.float()[some], theirs.float()[some]) and got[7:9, 0].tolist() == [2 / largest, 1 / largest]


def test_a_grid_under_one_number_over_all_scales_is_made_for_a_magnitude():
    form = find_format("nvfp4")
    with pytest.raises(ValueError, match="the largest magnitude"):
        grid_of(grouped(weight(), form), form, None)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "IQ4_NL", "w3-g32", "w3-g32-asym", "w2-g32", "w4-channel", *FLOATS])
def test_knowing_the_inputs_helps(name):
    """On the objective of each: the weighted error falls by weighted ranges, the output error by GPTQ."""
    x, w, level = inputs(), weight(), Level(format=name)
    got = {m: (q := find_quantiser(m)).apply(w, prepared_for(q, x), level) for m in QUANTISERS.names()}
    error = {m: ((g - w) ** 2 * (x**2).sum(0)).sum() for m, g in got.items()}
    output = {m: ((x @ (g - w).T) ** 2).sum() for m, g in got.items()}
    assert error["weighted"] <= error["rtn"] * 1.0001
    assert output["gptq"] < 0.8 * output["rtn"]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_signed_scale_gives_the_largest_weight_the_code_without_an_opposite(bits):
    """The step is 2^(bits - 1) to the largest weight, of either sign, and nothing lies beyond the codes on that side."""
    form, groups = find_format(f"w{bits}-g32"), torch.randn(50, 3, 32, generator=torch.Generator().manual_seed(bits))
    grid, usual = grid_of(groups, form, None, sign=sign_of_largest(groups)), grid_of(groups, form, None)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    assert torch.allclose(grid.d, -largest / 2 ** (bits - 1), rtol=2**-8) and (usual.d > 0).all()
    assert (grid.d < 0).any() and (grid.d > 0).any() and not grid.zero.any()
    codes = grid.nearest(groups) - 2 ** (bits - 1)
    assert (codes.gather(-1, groups.abs().argmax(-1, keepdim=True)) == -(2 ** (bits - 1))).all()
    assert torch.allclose(grid.round(groups), codes * grid.d, atol=1e-6)
    assert ((grid.round(groups) - groups) ** 2).sum() < ((usual.round(groups) - groups) ** 2).sum() * (1 if bits == 8 else 0.95)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_sign_of_a_scale_is_the_one_with_which_the_codes_err_less(bits):
    """Beside a search of steps of either sign by themselves; the largest weight alone is not always right."""
    form, g = find_format(f"w{bits}-g32"), torch.Generator().manual_seed(bits)
    w, importance = torch.randn(200, 32, generator=g), torch.rand(32, generator=g) ** 3
    made = find_quantiser("weighted").quantise(w, importance, Level(format=form.name))
    errors = []
    for sign in (1, -1):
        largest = w.abs().amax(1, keepdim=True)
        at_end = (w * sign).gather(1, w.abs().argmax(1, keepdim=True)) < 0  # of the longer side
        top = torch.where(at_end, 2 ** (bits - 1), 2 ** (bits - 1) - 1)
        steps = [(sign * largest / top * share).bfloat16().float() for share in torch.linspace(1, 0.5, 26)]
        codes = [(w / d).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for d in steps]
        errors.append(torch.stack([((c * d - w) ** 2 * importance).sum(1) for c, d in zip(codes, steps)]).amin(0))
    plus, minus = errors
    error = ((made.weight - w) ** 2 * importance).sum(1)
    assert torch.allclose(error, torch.minimum(plus, minus), rtol=1e-3)
    below = torch.where((w.amax(1) > -w.amin(1)), minus, plus)
    assert 0.1 < (error < below * 0.999).float().mean() < 0.5 and error.sum() < below.sum() * 0.98


@pytest.mark.parametrize("method", ["weighted", "gptq", "descent"])
def test_methods_that_read_inputs_give_scales_of_either_sign_and_rtn_does_not(method):
    g = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 64, generator=g), torch.randn(200, 64, generator=g)
    level = Level(format="w3-g32")
    assert (find_quantiser("rtn").quantise(weight, None, level).scale > 0).all()
    quantiser = find_quantiser(method)
    made = quantiser.quantise(weight, quantiser.prepare((x**2).mean(0) if method == "weighted" else x.T @ x), level)
    assert (made.scale < 0).any() and (made.scale > 0).any()
    whole = made.weight.reshape(8, 2, 32) / made.scale.float()[..., None]
    assert torch.allclose(whole, whole.round(), atol=1e-3) and whole.min() >= -4.01 and whole.max() <= 3.01


def test_gptq_is_the_reference_column_by_column():
    """The plainest version: one column at a time, the inverse Hessian of the rest by a dense solve."""
    form, w, x = find_format("w4-channel"), weight(6, 16).double(), inputs(16).double()
    order = (x**2).sum(0).argsort(descending=True)  # a row is one group: the heaviest input first
    w, x = w[:, order], x[:, order]
    hessian = x.T @ x + 0.01 * (x**2).sum(0).mean() * torch.eye(16, dtype=torch.double)
    groups = grouped(w.float(), form)
    grid, work = grid_of(groups, form, None, sign=sign_of_largest(groups)), w.clone()
    for j in range(16):
        rest = torch.linalg.inv(hessian[j:, j:])
        q = grid.round(work[:, j].float()[:, None, None])[:, 0, 0].double()
        work[:, j:] -= ((work[:, j] - q) / rest[0, 0])[:, None] * rest[0][None]
        work[:, j] = q
    quantiser = find_quantiser("gptq")
    x, w = (t[:, order.argsort()].float() for t in (x, w))
    got = quantiser.quantise(w, quantiser.prepare(x.T @ x), Level(format="w4-channel"))
    assert (got.weight[:, order] - work.float()).abs().max() < 1e-5


def test_sixteen_bits_and_unseen_matrices():
    w = weight()
    assert torch.equal(find_quantiser("gptq").apply(w, None, Level(format="F16")), w.half().float())
    assert torch.equal(find_quantiser("rtn").apply(w, None, Level(format="bf16")), w.bfloat16().float())
    nearest = find_quantiser("rtn").apply(w, None, Level(format="w4-g32"))
    assert all(torch.equal(find_quantiser(m).apply(w, None, Level(format="w4-g32")), nearest) for m in ("gptq", "weighted"))


def test_vllm_has_fewer_integers_for_experts_and_says_its_least_version():
    vllm, experts, plain = find_runtime("vllm"), "layers.0.mlp.experts.down_proj", "layers.0.self_attn.q_proj"
    cases = {"w3-g32": True, "w3-channel": False, "w4-channel": False, "w8-g32": True, "w8-g32-asym": False, "fp8": False}
    cases |= {"mxfp8": True}
    for name, fits in {**cases, "nvfp4": True, "bf16": True, "w7-g16-asym": True, "w4-channel-asym": True}.items():
        form = vllm.check(find_format(name))
        assert vllm.fits([plain], form) and vllm.fits([plain, experts], form) == fits, name
    assert vllm.least({plain: "w4-g32", experts: "w8-g128"}) == "" == vllm.needs({plain: "nvfp4"})
    assert vllm.least({plain: "w3-g32", experts: "w8-g128"}) == "0.25" and vllm.least({experts: "w5-g32"}) == "0.29"
    assert vllm.least({experts: "w4-channel-asym"}) == "0.33" and vllm.least({plain: "w4-channel-asym"}) == ""
    assert "vllm 0.29 or later, on NVIDIA cards from SM75" in vllm.needs({experts: "w5-g32", plain: "w8-g32-asym"})
    assert find_runtime(None).needs({plain: "w3-g32"}) == ""


def test_the_table_of_vllm_in_the_docs_is_that_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "bits.md").read_text().split("### Which integers does vLLM compute?")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")][
        1 : 1 + len(VLLM)
    ]

    def groups(found):
        return ", ".join("row" if g is None else str(g) for g in found) or "none"

    for row, k in zip(rows, VLLM, strict=True):
        zeros = ", ".join("yes" if z else "no" for z in k.zeros)
        since = ((k.since or "any") if k.groups else "none", (k.experts_since or "any") if k.experts else "none")
        assert row == [", ".join(map(str, k.bits)), zeros, groups(k.groups), groups(k.experts), *since, k.cards]


def test_formats_know_their_bytes_and_refuse_what_they_cannot_store():
    gguf, packed, vllm = find_runtime("llama.cpp", "gguf"), find_runtime(None), find_runtime("vllm")
    assert [f.name for f in gguf.formats([64])] == ["MXFP4", "Q4_0", "IQ4_NL", *OLD[1:], "F16"]
    without, all_of_them = ({f.name for f in gguf.formats([64, 512], inputs=reads)} for reads in (False, True))
    assert all_of_them - without == {"IQ2_XXS", "IQ2_XS"} and len(without) == 17
    assert not {"IQ1_S", "IQ1_M", "NVFP4"} & all_of_them, "only by their names"
    assert [f.name for f in gguf.formats([64, 512], ["Q5_0", "Q4_K", "IQ3_S"])] == ["IQ3_S", "Q4_K", "Q5_0", "F16"]
    assert packed.formats([192, 320])[1].name == "w3-g64" and packed.formats([256], group=32)[0].name == "w2-g32"
    assert [f.name for f in vllm.formats([256], ["w8-g64", "w4-channel", "bf16"])] == ["w4-channel", "w8-g64", "bf16"]
    assert [f.name for f in vllm.formats([256])] == [*(f"w{b}-g128" for b in (2, 3, 4, 5, 6, 8)), "bf16"]
    assert find_format("w3-g32").bytes(1024, 1024) * 8 == pytest.approx(3.5 * 1024**2, rel=1e-3)
    assert find_format("q8_0").bytes(64, 64) * 8 == 8.5 * 64 * 64
    assert [f.name for f in vllm.formats([64], ["fp8", "w8-g32", "NVFP4"])] == ["nvfp4", "fp8", "w8-g32", "bf16"]
    assert [f.name for f in gguf.formats([64], ["nvfp4", "mxfp4"])] == ["MXFP4", "NVFP4", "F16"]  # the types of llama.cpp
    assert [find_format(n).family for n in ("MXFP4", "mxfp4", "NVFP4", "nvfp4")] == ["gguf", "compressed-tensors"] * 2
    assert find_format("mxfp4").bytes(96, 64) == 96 * 64 // 32 * 17 and find_format("mxfp8").bytes(96, 64) == 96 * 64 // 32 * 33
    with pytest.raises(InvalidInput, match="no kernel for w6-g6.*of 2 to 8 bits in groups of 16, .*mxfp4, nvfp4, fp8, mxfp8"):
        vllm.formats([64], ["w6-g6"])
    assert find_format("nvfp4").bytes(64, 96) == 64 * 96 // 2 + 64 * 6 + 4 and find_format("fp8").bytes(64, 90) == 64 * 92
    with pytest.raises(InvalidInput, match="40 inputs, which nvfp4 cannot store"):
        find_format("nvfp4").check("lm_head", 40)
    with pytest.raises(InvalidInput, match="48 inputs, which Q4_0 cannot store"):
        find_format("Q4_0").check("lm_head", 48)
    for wrong in ("w9-g32", "w1-g32", "w4-g0", "w4-g032"):
        with pytest.raises(InvalidInput, match=f"no format '{wrong}'.*Groups of any size are for transformers"):
            find_format(wrong)
    assert [f.bits for f in packed.formats([64])] == [2, 3, 4, 5, 6, 8, 16]
    named = ["w4-g128", "mxfp4", "w4-g32", "nvfp4", "w4-channel", "w3-g32"]  # by bits and groups, whatever their bytes are
    ordered = ["w3-g32", "w4-channel", "nvfp4", "mxfp4", "w4-g32", "w4-g128", "bf16"]
    assert [f.name for f in packed.formats([128], named)] == ordered
    with pytest.raises(InvalidInput, match="blocks of its own"):
        gguf.formats([64], group=64)
    with pytest.raises(InvalidInput, match="group size of 32 has no meaning beside formats that are named"):
        packed.formats([256], ["w4-g64"], 32)
    for group in (7, 0):  # nothing but 16 bits would be left of the menu
        with pytest.raises(InvalidInput, match=f"group is {group}. .* which are 192, 320. Use group=64"):
            packed.formats([192, 320], group=group)
    with pytest.raises(InvalidInput, match="formats names none"):
        packed.formats([192, 320], ())
    with pytest.raises(InvalidInput, match="no format 'awq'"):
        find_runtime(None, "awq")
    with pytest.raises(InvalidInput, match="removes nothing"):
        find_quantiser("rtn").apply(weight(), None, Level(zeros=3))


def test_quantisers_and_pruners_keep_their_tables():
    assert not set(QUANTISERS.names()) & set(TREATMENTS.names())
    with pytest.raises(InvalidInput, match="no pruning method 'gptq'"):
        find_treatment("gptq")
    with QUANTISERS.kept():

        @base.treatment("sign", summary="one bit")
        class Sign(Quantiser):
            def onto(self, weight, prepared, form, peak):
                return weight

        assert "sign" in QUANTISERS.names() and "sign" not in TREATMENTS.names()
        with pytest.raises(InvalidInput, match="sign does not round to llama.cpp's types"):
            find_quantiser("sign").apply(weight(), None, Level(format="Q4_0"))


def test_few_rows_get_error_feedback_together():
    """Of a head those that lie in a processor's cache, of wide matrices those that fit in memory; on other devices as many."""
    shapes = (4864, 896), (151936, 896), (8960, 8192), (5000, 1 << 14), (3, 1 << 26)
    assert [rows_together(torch.empty(1, 1).expand(shape)) for shape in shapes] == [4864, 5065, 2987, 1667, 1]
    assert rows_together(torch.empty(0, 896)) == 1
    assert rows_together(torch.empty(1 << 16, 896, device="meta")) == 32768


def test_a_missing_package_is_one_sentence(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install '.\[bits\]'"):
        find_quantiser("rtn").apply(weight(), None, Level(format="Q4_0"))


def test_a_weight_beside_the_middle_of_two_steps_goes_to_the_nearer_one():
    form = find_format("w8-g32")
    groups = torch.zeros(1, 1, 32)
    groups[..., 0] = 127.5 * 2.0**-10
    d = float(grid_of(groups, form, None).d)
    groups[..., 1] = 25.499996 * d  # beside 128 steps float32 has no place for the last digits
    assert float(grid_of(groups, form, None).round(groups)[..., 1]) == 25 * d
