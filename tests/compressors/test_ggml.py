"""ggml's types: bytes beside the package ``gguf``, codes found by trying, error feedback inside the grids."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from layerbudget.compressors import ggml
from layerbudget.compressors.formats import TYPES, find_format
from layerbudget.compressors.sparsegpt import inverse_factor
from layerbudget.errors import InvalidInput

pytest.importorskip("xllamacpp")

NAMES = [f.name for f in TYPES if not f.plain and not f.name.startswith("IQ1")]  # ggml takes seconds for a row of IQ1
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


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_found_and_put_back(name: str, weight: np.ndarray) -> None:
    places = ggml.code_bits(name)
    assert (places is None) == (name in LATTICES)
    if places is None:
        with pytest.raises(InvalidInput, match="lattice"):
            ggml.grid(np.zeros((1, find_format(name).block_bytes), np.uint8), name)
        return
    assert places.shape[1] == find_format(name).bits and len(np.unique(places)) == places.size
    data = ggml.quantise(weight, name)
    codes = np.random.default_rng(2).integers(0, 1 << places.shape[1], weight.shape)
    base, step = ggml.grid(data, name)
    values = gguf.dequantize(ggml.with_codes(data, name, codes), kind(name))
    np.testing.assert_allclose(values, base + step * ggml.levels(name)[codes], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_feedback_lowers_the_error_of_the_output(name: str, weight: np.ndarray, moments: np.ndarray) -> None:
    factor, _ = inverse_factor(torch.tensor(moments, dtype=torch.float32))
    data = ggml.feed_back(torch.from_numpy(weight), factor, name)

    def loss(found: np.ndarray) -> float:
        error = gguf.dequantize(found, kind(name)) - weight
        return float(np.einsum("ij,jk,ik", error, moments, error))

    assert loss(data) < (0.75 if name in LATTICES else 0.5) * loss(ggml.quantise(weight, name, np.diag(moments)))


def test_refusals_name_the_remedy(weight: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="only with an importance matrix"):
        ggml.quantise(weight, "IQ2_XS")
    with pytest.raises(InvalidInput, match="cannot store"):
        ggml.quantise(weight[:, :96], "Q4_K")
    with pytest.raises(InvalidInput, match="512 columns"):
        ggml.quantise(weight, "Q4_K", np.ones(3))
