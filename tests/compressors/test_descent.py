"""Coordinate descent against its own form: it never rises, tiny cases against every choice, scales as llama.cpp reads them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from layerbudget.compressors import descent, formats, ggml, ggml_scales, quantisers
from layerbudget.compressors.base import Level, find_quantiser
from layerbudget.compressors.descent import Codes, Layout, descend
from layerbudget.errors import InvalidInput

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

SLOW = ("IQ2_XXS", "IQ2_XS", "IQ2_S")  # ggml prepares their lattices for seconds in every process
TYPES = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in ggml_scales.FIELDS]


def case(rows=12, columns=256, seed=0):
    """Weights, and a damped moment of inputs with few directions."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=g) * 0.05
    x = torch.randn(4 * columns, columns // 8, generator=g) @ torch.randn(columns // 8, columns, generator=g)
    x += torch.randn(x.shape, generator=g)
    moment = x.T @ x / len(x)
    moment.diagonal().add_(0.01 * moment.diagonal().mean())
    return weight, moment


def form_of(error, moment):
    """tr(E H E') of the transposed error, in double precision."""
    error, moment = error.double(), moment.double()
    return float((error * (moment @ error)).sum())


def packed(bits, columns, *, tied=False, group=32):
    least = -(1 << (bits - 1))
    levels = torch.arange(least, -least, dtype=torch.float32)
    return Layout(
        block=group, sub=group, levels=levels, half=torch.bfloat16, minima=(least + 1, -least) if tied else None, tied=tied
    )


def begin(weight, layout):
    """Nearest codes under scales by the largest weight, in a layout with one scale per group."""
    w = weight.T.contiguous()
    groups = w.reshape(-1, layout.block, w.shape[1])
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]
    d = layout.to_half(largest / layout.levels[0] if layout.signed else largest.abs() / layout.levels.abs().max())
    level = layout.nearest(w / d.repeat_interleave(layout.block, 0))
    zero = torch.zeros_like(d)
    return w, Codes(level=level, d=d, c=d.clone() if layout.tied else zero, s=torch.ones_like(d), m=zero.clone())


def start(name, weight, moment):
    """Where descent begins in a type of llama.cpp, or a format of compressed-tensors."""
    if name in ggml_scales.FIELDS:
        data = ggml.quantise(weight.numpy(), name, moment.diagonal().numpy().copy())
        return ggml_scales.layout_of(name), weight.T.contiguous(), ggml_scales.read_codes(data, name)
    layout = packed(int(name[1]), weight.shape[1], tied=name.endswith("asym"))
    return layout, *begin(weight, layout)


@pytest.mark.parametrize("name", [*TYPES, "w2", "w3-asym", "w4"])
def test_no_step_raises_the_form(name, monkeypatch):
    """Every step is looked at in double precision, from the codes and scales alone; the error that is carried stays theirs."""
    weight, moment = case()
    layout, w, codes = start(name, weight, moment)
    seen = [form_of(w - codes.weight(layout), moment)]
    first, steps = seen[0], set()

    def watched(step):
        whole = getattr(descent._State, step)

        def run(self, panel, pull, where):
            change = whole(self, panel, pull, where)
            error = self.error.clone()
            if change is not None:
                columns = where if isinstance(where, slice) else slice(where, where + layout.block)
                error[columns] -= change
            assert torch.allclose(error, w - codes.weight(layout), atol=1e-6)
            seen.append(form_of(w - codes.weight(layout), moment))
            assert seen[-1] <= seen[-2] * (1 + 1e-6), step
            steps.add(step)
            return change

        monkeypatch.setattr(descent._State, step, run)

    lattice = layout.words is not None
    for step in ("_solve_block", "_solve_sub", "_choose_words" if lattice else "_choose_codes"):
        watched(step)
    descend(w, moment, codes, layout, sweeps=2)
    assert len(steps) == (3 if layout.sub < layout.block else 2)
    assert seen[-1] < (0.7 if lattice else 0.5) * first


def best_of_row(row, moment, layout):
    """The least form of one row over all codes and all scales that bfloat16 can hold."""
    codes = torch.tensor(list(itertools.product(layout.levels.tolist(), repeat=len(row))), dtype=torch.float64)
    h, w = moment.double(), row.double()
    d = (codes @ h @ w) / (codes * (codes @ h)).sum(1).clamp(min=1e-30)
    least = float("inf")
    for factor in (1 - 2**-8, 1.0, 1 + 2**-8):  # the numbers of bfloat16 on both sides of the best step
        error = w - codes * layout.to_half((d * factor).float()).double()[:, None]
        least = min(least, float((error * (error @ h)).sum(1).min()))
    return least


def test_tiny_cases_beside_the_best_of_all_choices():
    """3 x 4 weights of 2 bits, 20 times: descent is never below the optimum, and its gap is as small as it was seen to be."""
    layout, gaps, nearest = packed(2, 4, group=4), [], []
    for seed in range(20):
        weight, moment = case(3, 4, seed)
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) @ torch.randn(
            4, 4, generator=torch.Generator().manual_seed(seed + 100)
        )
        moment = x.T @ x / 16 + 0.01 * torch.eye(4)
        w, codes = begin(weight, layout)
        before = w - codes.weight(layout)
        descend(w, moment, codes, layout, sweeps=4)
        after = w - codes.weight(layout)
        for i in range(3):
            least = best_of_row(weight[i], moment, layout)
            gaps.append(form_of(after[:, i : i + 1], moment) / least)
            nearest.append(form_of(before[:, i : i + 1], moment) / least)
    assert min(gaps) >= 1 - 1e-4
    reached = np.mean(np.array(gaps) < 1.001)
    assert reached > 0.3 and np.median(gaps) < 1.3 < np.median(nearest) / 2


def all_octets(layout):
    """Every choice of signs of eight weights of a lattice, ``(signs, 8)``."""
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=descent.OCTET)))
    return signs[signs.prod(1) > 0] if layout.even_signs else signs


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_S"])
def test_words_of_a_lattice_beside_all_of_them(name):
    """40 octets beside every word under every choice of signs: the best one where inputs do not depend on each other."""
    layout, g = ggml_scales.layout_of(name), torch.Generator().manual_seed(4)
    aim = torch.randn(descent.OCTET, 40, generator=g) * 20
    x = torch.randn(64, descent.OCTET, generator=g) @ torch.randn(descent.OCTET, descent.OCTET, generator=g)
    for moment, found, most in ((torch.rand(8, generator=g).diag() + torch.eye(8), 1.0, 1.0), (x.T @ x / 64, 0.2, 2.0)):
        made, gaps = descent._nearest_octet(aim.clone(), moment, layout), []
        for row, own in zip(aim.T, made.T, strict=True):
            values = (all_octets(layout)[:, None] * layout.words).flatten(0, 1)
            assert (values == own).all(1).any()
            forms = (((values - row) @ moment) * (values - row)).sum(1)
            gaps.append(float(((own - row) @ moment @ (own - row)) / forms.min()))
        gaps = np.array(gaps)
        assert gaps.min() > 1 - 1e-4 and np.median(gaps) < most * (1 + 1e-4)
        assert (gaps < 1 + 1e-4).mean() >= found - (0.1 if layout.even_signs else 0)


def any_levels(layout, shape, random):
    """Levels that a type can hold together."""
    if layout.words is None:
        return layout.levels[torch.from_numpy(random.integers(0, len(layout.levels), shape))]
    words = layout.words[torch.from_numpy(random.integers(0, len(layout.words), (shape[0] // layout.words.shape[1], shape[1])))]
    signs = all_octets(layout)
    signs = signs[torch.from_numpy(random.integers(0, len(signs), (shape[0] // descent.OCTET, shape[1])))]
    return words.transpose(1, 2).reshape(shape) * signs.transpose(1, 2).reshape(shape)


@pytest.mark.parametrize("name", TYPES)
def test_scales_stand_where_llama_cpp_reads_them(name):
    """Any scales under any codes: the bytes are read by the package gguf as ``d s t + c m``."""
    random, layout = np.random.default_rng(3), ggml_scales.layout_of(name)
    data = ggml.quantise(random.standard_normal((3, 512)).astype(np.float32), name, np.ones(512, dtype=np.float32))
    read = ggml_scales.read_codes(data, name)
    assert np.array_equal(ggml_scales.write_codes(data, name, read), data)
    half = lambda: torch.from_numpy(random.standard_normal(read.d.shape).astype(np.float16).astype(np.float32))  # noqa: E731
    whole = lambda span: torch.from_numpy(random.integers(span[0], span[1] + 1, read.s.shape).astype(np.float32))  # noqa: E731
    s = read.s if layout.scales is None else whole(layout.scales)
    other = Codes(
        level=any_levels(layout, read.level.shape, random),
        d=half() / layout.unit,
        c=read.c if layout.minima is None else half(),
        s=s if layout.words is None else s - 1 + s % 2,
        m=read.m if layout.minima in (None, (1, 1)) else whole(layout.minima),
    )
    stored = ggml_scales.write_codes(data, name, other)
    back = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
    assert np.allclose(back, other.weight(layout).T.numpy(), rtol=1e-5, atol=1e-5)
    again = ggml_scales.read_codes(stored, name)
    assert all(torch.equal(getattr(again, k), getattr(other, k)) for k in ("level", "d", "c", "s", "m"))


@pytest.mark.parametrize(
    "name",
    ["w2-g32", "w4-g32-asym", "nvfp4", "fp8", "w3-channel", "Q4_0", "Q5_1", "IQ4_NL", "Q2_K", "Q4_K", "IQ3_XXS", "IQ3_S"],
)
def test_the_output_changes_less_than_by_error_feedback(name):
    weight, moment = case(24, 512)
    output = {}
    for method, options in {"gptq": {}, "descent": {}, "more": {"sweeps": 4}}.items():
        quantiser = find_quantiser(method.replace("more", "descent")).with_options(options)
        made = quantiser.quantise(weight, quantiser.prepare(moment), Level(format=name))
        output[method] = form_of((weight - made.weight).T, moment)
    assert output["more"] < output["descent"] < output["gptq"]


@pytest.mark.parametrize("name", ["Q4_K", "w4-g32"])
def test_the_codes_do_not_depend_on_threads(name, monkeypatch):
    """With one piece of rows, and with several that are improved side by side."""
    weight, moment = case(40, 512)
    quantiser, threads, found = find_quantiser("descent"), torch.get_num_threads(), []
    try:
        for count, rows in ((1, 64), (2, 64), (1, 16), (2, 16)):
            monkeypatch.setattr(quantisers, "_ROWS", rows)
            torch.set_num_threads(count)
            found.append(quantiser.quantise(weight, quantiser.prepare(moment), Level(format=name)).weight)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])


@pytest.mark.parametrize("options", [{"shrinkage": 1.0}, {"shrinkage": -0.1}, {"sweeps": -1}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(InvalidInput, match="Try"):
        find_quantiser("descent").with_options(options)


def test_rows_of_zeros_and_inputs_that_never_came():
    """Steps of zero stay where they are, and a column without inputs is rounded by what is added to all."""
    weight, moment = case(4, 256)
    weight[1] = 0
    moment[:, 7] = moment[7] = 0
    quantiser = find_quantiser("descent")
    for name in ("w3-g32", "w3-g32-asym", "Q4_0", "Q4_K", "Q3_K", "IQ3_XXS", "IQ3_S"):
        made = quantiser.quantise(weight, quantiser.prepare(moment), Level(format=name))
        assert torch.isfinite(made.weight).all() and not made.weight[1].any()
        assert (made.weight[:, 7] - weight[:, 7]).abs().max() < 0.1
    nothing = quantiser.quantise(weight, quantiser.prepare(torch.zeros(256, 256)), Level(format="w4-g32"))
    assert torch.isfinite(nothing.weight).all()


@pytest.mark.parametrize("name", ["IQ3_XXS", "IQ3_S", "Q4_K"])
def test_one_token_that_outweighs_all_others(name):
    """The first token of many models: its inputs are nearly all of the moments, whose products float32 cannot tell apart."""
    weight, moment = case(8, 512)
    first = torch.randn(512, generator=torch.Generator().manual_seed(5))
    moment += 1e8 * first[:, None] * first
    quantiser = find_quantiser("descent")
    made = quantiser.quantise(weight, quantiser.prepare(moment), Level(format=name)).weight
    plain = find_quantiser("weighted").quantise(weight, moment.diagonal(), Level(format=name)).weight
    assert form_of((weight - made).T, moment) < 0.5 * form_of((weight - plain).T, moment)
    bare = first[:, None] * first  # no factor of it exists
    layout, w, codes = start(name, weight, bare)
    before = form_of(w - codes.weight(layout), bare)
    descend(w, bare, codes, layout)
    assert form_of(w - codes.weight(layout), bare) < 0.5 * before


@pytest.mark.parametrize("name", ["IQ1_S", "MXFP4"])
def test_types_without_codes_of_their_own_are_rounded_by_error_feedback(name):
    """Of the shrunk moments, as all that this method rounds."""
    assert {f.name for f in formats.TYPES if not f.plain} == {*ggml_scales.FIELDS, *formats.FED_BACK}
    weight, moment = case(4)
    gptq, quantiser = find_quantiser("gptq").with_options({"shrinkage": 0.2}), find_quantiser("descent")
    level, shrunk = Level(format=name), quantiser.prepare(moment).moment
    made = [
        q.quantise(weight, p, level).weight for q, p in ((gptq, gptq.prepare(moment)), (quantiser, quantiser.prepare(moment)))
    ]
    assert torch.equal(*made)
    assert torch.equal(shrunk.diagonal(), moment.diagonal()) and torch.allclose(shrunk.triu(1), 0.8 * moment.triu(1))
