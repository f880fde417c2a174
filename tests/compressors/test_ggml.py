"""ggml's types: bytes beside the package ``gguf``, codes found by trying, error feedback inside the grids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gguf
from layerbudget.compressors import ggml, ggml_scales
from layerbudget.compressors.base import Level, find_quantiser
from layerbudget.compressors.descent import descend
from layerbudget.compressors.feedback import Factors, feed_back, feed_back_each
from layerbudget.compressors.formats import TYPES, find_format
from layerbudget.errors import InvalidInput

pytest.importorskip("xllamacpp")

NAMES = [f.name for f in TYPES if not f.plain and not f.name.startswith("IQ1")]  # ggml takes seconds for a row of IQ1
SLOW = ("IQ2_XXS", "IQ2_XS", "IQ2_S")  # ggml prepares their lattices for seconds in every process
MOST = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NAMES]
LATTICES = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}


def kind(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)


@pytest.fixture(scope="module")
def moments() -> np.ndarray:
    random = np.random.default_rng(1)
    x = random.standard_normal((600, 80)) @ random.standard_normal((80, 512)) + 3 * random.standard_normal((600, 512))
    return x.T @ x / len(x)


def test_sizes_are_those_of_the_package() -> None:
    assert {f.name: (f.group, f.block_bytes) for f in TYPES} == {f.name: gguf.GGML_QUANT_SIZES[kind(f.name)] for f in TYPES}


@pytest.mark.parametrize("name", MOST)
def test_bytes_read_back_as_the_package_reads_them(name: str, weight: np.ndarray, moments: np.ndarray) -> None:
    importance = np.diag(moments)
    data = ggml.quantise(weight, name, importance)
    assert data.nbytes == len(weight) * find_format(name).bytes(32, weight.shape[1]) // 32
    assert np.array_equal(ggml.dequantise(data, name), gguf.dequantize(data, kind(name)))
    assert np.array_equal(ggml.quantise(weight, name, importance, threads=4), data)
    if not ggml.needs_importance(name) and kind(name) in gguf.quants._type_traits:
        try:
            theirs = gguf.quantize(weight, kind(name))
        except NotImplementedError:
            return
        assert np.array_equal(ggml.quantise(weight, name), theirs)


@pytest.mark.parametrize("name", [n for n in MOST if n not in ("MXFP4", "NVFP4")])  # whose scales have no such end
def test_a_scale_that_is_too_large_is_seen(name: str, weight: np.ndarray) -> None:
    importance = np.ones(weight.shape[1], dtype=np.float32)
    assert ggml.is_finite(ggml.quantise(weight, name, importance), name)
    weight = np.where(np.arange(weight.shape[1]) == 300, np.float32(1e11), weight)
    assert not ggml.is_finite(ggml.quantise(weight, name, importance), name)


@pytest.mark.parametrize("name", MOST)
def test_codes_are_found_and_put_back(name: str, weight: np.ndarray) -> None:
    places = ggml.code_bits(name)
    assert (places is None) == (name in LATTICES)
    if places is None:
        with pytest.raises(InvalidInput, match="lattice"):
            ggml.grid(np.zeros((1, find_format(name).block_bytes), np.uint8), name)
        return
    assert places.shape[1] == find_format(name).bits and len(np.unique(places)) == places.size
    data = ggml.quantise(weight, name)
    codes = np.random.default_rng(2).integers(0, 1 << places.shape[1], weight.shape, dtype=np.uint8)
    base, step = ggml.grid(data, name)
    values = gguf.dequantize(ggml.with_codes(data, name, codes), kind(name))
    np.testing.assert_allclose(values, base + step * ggml.levels(name)[codes], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MOST)
def test_feedback_lowers_the_error_of_the_output(name: str, weight: np.ndarray, moments: np.ndarray) -> None:
    factor = Factors(torch.tensor(moments, dtype=torch.float32).triu())
    data, better = (feed_back(torch.from_numpy(weight), factor, name, words=words) for words in (False, True))

    def loss(found: np.ndarray) -> float:
        error = gguf.dequantize(found, kind(name)) - weight
        return float(np.einsum("ij,jk,ik", error, moments, error))

    assert loss(data) < (0.75 if name in LATTICES else 0.5) * loss(ggml.quantise(weight, name, np.diag(moments)))
    assert loss(better) < 0.95 * loss(data) if name in LATTICES else np.array_equal(better, data)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q6_K", "IQ4_XS", "Q4_0", "Q8_0", "NVFP4", "IQ3_S"])
def test_feedback_is_the_plainest_version(name: str, weight: np.ndarray, moments: np.ndarray) -> None:
    """One column at a time, the inverse Hessian of the rest by a dense inverse; a lattice goes block by block.

    Its blocks are improved for the inverse of what is left of them in the inverse.
    """
    weight, form = weight.copy(), find_format(name)
    weight[1], weight[2, 32:64], weight[3, :40] = 0, 0, 1e-6  # scales of zero
    size, heavy = form.group, np.diag(moments)
    blocks = sorted((range(k, k + size) for k in range(0, len(moments), size)), key=lambda own: -heavy[list(own)].sum())
    order = np.array([j for own in blocks for j in sorted(own, key=lambda j: -heavy[j])])  # the heaviest first, blocks whole
    hessian = (moments + 0.01 * heavy.mean() * np.eye(len(moments)))[order][:, order]
    work, lattice = weight[:, order].astype(np.float64), name in LATTICES
    table, done = None if lattice else ggml.levels(name), np.empty_like(weight)
    inverse = [np.linalg.inv(hessian)]
    for _ in hessian[1:]:  # a column is done: the inverse of what is left
        last = inverse[-1]
        inverse.append(last[1:, 1:] - np.outer(last[1:, 0], last[0, 1:]) / last[0, 0])
    for start in range(0, len(hessian), size):
        part = slice(start, start + size)
        back, counts = order[part].argsort(), np.array([1 / inverse[j][0, 0] for j in range(start, start + size)])
        data, out = ggml.quantise(work[:, part][:, back], name, counts[back]), back.argsort()
        if lattice:
            inside, rest = inverse[start][:size, :size], inverse[start][:size]
            codes, layout = ggml_scales.read_codes(data, name), ggml_scales.layout_of(name)
            moment = torch.from_numpy(np.linalg.inv(inside)[back][:, back]).float()
            descend(torch.from_numpy(work[:, part][:, back].T.copy()).float(), moment, codes, layout)
            done[:, part] = codes.weight(layout).T.numpy()[:, out]
            work[:, start:] -= np.linalg.solve(inside, (work[:, part] - done[:, part]).T).T @ rest
            continue
        base, step = (g[:, out] for g in ggml.grid(data, name))
        for j in range(size):
            points = base[:, j, None] + step[:, j, None] * table
            nearest = np.abs(points - work[:, start + j, None]).argmin(1)
            done[:, start + j] = np.take_along_axis(points, nearest[:, None], 1)[:, 0]
            first = inverse[start + j][0]
            work[:, start + j :] -= np.outer((work[:, start + j] - done[:, start + j]) / first[0], first)
    done, hessian = done[:, order.argsort()], hessian[order.argsort()][:, order.argsort()]
    factor = Factors(torch.tensor(moments, dtype=torch.float32).triu())
    found = gguf.dequantize(feed_back(torch.from_numpy(weight), factor, name, words=True), kind(name))
    same = np.isclose(found, done, rtol=1e-4, atol=1e-5).mean(1)
    loss, theirs = (((e @ hessian) * e).sum() for e in (found - weight, done - weight))
    assert np.median(same) > 0.99 and loss == pytest.approx(theirs, rel=0.03)  # a tie may fall otherwise, and change its row


def test_rows_do_not_depend_on_each_other(weight: np.ndarray, moments: np.ndarray) -> None:
    factor = Factors(torch.tensor(moments, dtype=torch.float32).triu())
    whole, some = (feed_back(torch.from_numpy(w), factor, "Q4_K") for w in (weight, weight[[1, 4]]))
    read = [ggml.dequantise(d, "Q4_K") for d in (whole[[1, 4]], some)]
    assert np.isclose(*read, rtol=1e-4).mean() > 0.98  # products of other shapes add up in another order


@pytest.mark.parametrize("left_out", [SLOW, pytest.param((), marks=pytest.mark.slow)])
def test_several_types_at_once_are_those_of_each_alone(
    left_out: tuple[str, ...], weight: np.ndarray, moments: np.ndarray
) -> None:
    """Products of other shapes add up in another order, which may change a row from a tie on, and its error hardly."""
    factor = Factors(torch.tensor(moments, dtype=torch.float32).triu())
    names = ["IQ3_S", *(n for n in NAMES if n not in left_out), "Q4_K"]
    matrix = torch.from_numpy(np.concatenate([weight, weight[:, ::-1], 0.5 * weight])[:16].copy())

    def loss(error: torch.Tensor) -> float:
        return float(find_quantiser("gptq").weigh(error, factor).sum())

    found = feed_back_each(matrix, factor, names)
    assert set(found) == set(names)
    for name in names:
        read, alone = (torch.from_numpy(ggml.dequantise(d, name)) for d in (found[name], feed_back(matrix, factor, name)))
        assert loss(read - matrix) == pytest.approx(loss(alone - matrix), rel=0.05)
        assert np.isclose(read, alone, rtol=1e-4).mean() > 0.7
    quantiser, levels = find_quantiser("gptq"), [Level(format=name) for name in ("Q4_K", "F16", "Q5_0", "Q4_K")]
    for level, each in zip(levels, quantiser.quantise_each(matrix, factor, levels), strict=True):
        alone = quantiser.quantise(matrix, factor, level)
        assert (each.data is None) == (alone.data is None) == (level.format == "F16")
        assert loss(each.weight - matrix) == pytest.approx(loss(alone.weight - matrix), rel=0.05)


def test_refusals_name_the_remedy(weight: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="only with an importance matrix"):
        ggml.quantise(weight, "IQ2_XS")
    with pytest.raises(InvalidInput, match="cannot store"):
        ggml.quantise(weight[:, :96], "Q4_K")
    with pytest.raises(InvalidInput, match="512 columns"):
        ggml.quantise(weight, "Q4_K", np.ones(3))
