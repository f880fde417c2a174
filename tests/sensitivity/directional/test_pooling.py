"""Pooling keeps what is there and drops what is noise."""

from __future__ import annotations

import numpy as np
import pytest

from layerbudget.sensitivity.directional.terms import interpolated, pooled


def table(noise, own, seed=0, shape=(60, 6)):
    rng = np.random.default_rng(seed)
    norm = 4.0 ** -np.arange(shape[1]) * np.exp(rng.normal(size=(shape[0], 1)))
    truth = norm * np.exp(rng.normal(size=(shape[0], 1)) + own * rng.normal(size=shape))
    seen = truth * np.exp(noise * rng.normal(size=shape))
    return truth, seen, noise * seen, norm


def miss(found, truth):
    return float(np.log(found / truth).std())


def test_noise_goes_and_what_is_peculiar_stays():
    truth, seen, error, norm = table(0.3, 0.0)
    found, kept = pooled(seen, error, norm)
    assert kept < 0.2 and miss(found, truth) < 0.55 * miss(seen, truth)
    truth, seen, error, norm = table(0.02, 0.5)
    found, kept = pooled(seen, error, norm)
    assert kept > 0.95 and miss(found, truth) < 1.05 * miss(seen, truth)
    truth, seen, error, norm = table(0.3, 0.3)
    found, kept = pooled(seen, error, norm)
    assert 0.25 < kept < 0.75 and miss(found, truth) < miss(seen, truth)


def test_scale_and_order_do_not_matter_and_gaps_stay_gaps():
    truth, seen, error, norm = table(0.3, 0.1)
    seen[3, 2], seen[5] = np.inf, [np.inf] * 5 + [0.0]
    found, kept = pooled(seen, error, norm)
    assert np.isinf(found[3, 2]) and found[5].tolist() == seen[5].tolist()
    order = np.random.default_rng(1).permutation(60)
    again, same = pooled(1e3 * seen[order], 1e3 * error[order], 7 * norm[order])
    assert same == pytest.approx(kept) and np.allclose(again[again < 1e300], 1e3 * found[order][again < 1e300])


def test_a_table_without_anything_to_share_stays():
    one = np.array([[1.0], [2.0]])
    assert pooled(one, 0.1 * one, one)[0] is one


def test_formats_between_measured_ones_are_interpolated_in_their_squared_error():
    norm, damage = np.array([[8.0, 2.0, 1.0]] * 3), np.array([[16.0, 2.0, np.inf], [np.inf] * 3, [0.0, 4.0, 2.0]])
    wanted = np.array([[8.0, 2.0, 4.0, 80.0, 0.2]] * 3)
    found, shares = interpolated(damage, norm, wanted)
    assert found[0] == pytest.approx([16, 2, 4 * 2**0.5, 160, 0.2]), "half way in the logarithm, constant beyond the ends"
    assert shares[0, 2] == pytest.approx([0.5, 0.5, 0.0]) and not found[1].any()
    assert found[2] == pytest.approx(2 * wanted[2])
