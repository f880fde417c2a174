"""What lies under ``resume=DIR``: resumed, extended, copied together and reused gives what one run gives."""

import shutil

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.data.calibration import CalibrationSet
from layerbudget.errors import InvalidInput
from layerbudget.scores import Scores
from layerbudget.sensitivity.gain import score
from layerbudget.sensitivity.stored import Finished, request_of


@pytest.fixture
def case():
    model = zoo.dense("mistral")
    return model, zoo.labelled("mistral", samples=9), zoo.partition(model, "mistral")


@pytest.mark.parametrize("sketch", (None, 6))
def test_more_samples_later_give_the_result_of_all_at_once(case, tmp_path, sketch):
    model, data, blocks = case
    options = {"sketch": sketch, "replicates": 5, "batch_size": 2}
    score(model, data.select(slice(0, 5)), blocks, resume=tmp_path, **options)
    counts = []
    later = score(model, data, blocks, resume=tmp_path, progress=lambda done, total: counts.append(total), **options)
    at_once = score(model, data, blocks, **options)
    assert set(counts) == {4}
    for field in ("gain", "standard_error", "noise_floor"):
        assert np.allclose(getattr(later, field), getattr(at_once, field), rtol=1e-9)


def test_folders_of_two_machines_merge_by_copying(case, tmp_path):
    model, data, blocks = case
    for name, rows in (("a", slice(0, 4)), ("b", slice(3, 9))):
        score(model, data.select(rows), blocks, resume=tmp_path / name, batch_size=2)
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
    computed = []
    merged = score(model, data, blocks, resume=tmp_path / "a", progress=lambda done, total: computed.append(total))
    assert not any(computed) and np.allclose(merged.gain, score(model, data, blocks).gain, rtol=1e-9)


def test_a_crash_costs_one_batch(case, tmp_path):
    model, data, blocks = case

    def crash(n, total):
        if n >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(model, data, blocks, resume=tmp_path, batch_size=2, progress=crash)
    left = []
    score(model, data, blocks, resume=tmp_path, batch_size=2, progress=lambda n, total: left.append(total))
    assert left[-1] == 9 - 4


@pytest.mark.parametrize(
    "estimator, options",
    [
        ("kfac", {"walk": "layers"}),
        ("kfac", {"damping": 0.1, "damping_unit": "absolute", "walk": "whole"}),
        ("ekfac", {"walk": "layers"}),
        ("rank-gain", {"walk": "layers"}),
    ],
)
def test_a_stopped_run_settles_only_what_is_left(case, tmp_path, monkeypatch, estimator, options):
    model, data, blocks = case
    options = {"batch_size": 4, **options}
    undisturbed, put, done = score(model, data, blocks, estimator, **options), Finished.put, []

    def crash(self, k, record):
        put(self, k, record)
        done.append(k)
        if len(done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Finished, "put", crash)
    with pytest.raises(KeyboardInterrupt):
        score(model, data, blocks, estimator, resume=tmp_path, **options)
    broken = next(tmp_path.glob(f"block-*-{done[0]}.*"))
    broken.write_bytes(broken.read_bytes()[:-3])  # it fails its checksum and is made again
    monkeypatch.setattr(Finished, "put", lambda self, k, record: put(self, k, record) or done.append(k))
    resumed = score(model, data, blocks, estimator, resume=tmp_path, **options)
    assert sorted(done[2:]) == sorted({*range(len(blocks))} - {done[1]})
    assert resumed.digest == undisturbed.digest and not list(tmp_path.glob("block-*"))


def test_an_unchanged_request_is_read_and_a_changed_one_is_not(case, tmp_path):
    model, data, blocks = case
    first = score(model, data, blocks, "kfac", resume=tmp_path)
    ran = []
    again = score(model, data, blocks, "kfac", resume=tmp_path, progress=lambda *a: ran.append(a))
    assert again.to_dict() == Scores.from_dict(first.to_dict()).to_dict() and not ran
    score(model, data, blocks, "kfac", seed=1, resume=tmp_path, progress=lambda *a: ran.append(a))
    assert ran
    gram = score(model, data, blocks, resume=tmp_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    other = score(model, data, blocks, "kfac", resume=tmp_path)
    assert other.gain != first.gain
    changed = score(model, data, blocks, resume=tmp_path)
    assert np.allclose(changed.gain, score(model, data, blocks).gain, rtol=1e-9) and changed.gain != gram.gain


def test_a_sequence_may_occur_twice_and_batches_of_nothing_are_refused(case, tmp_path):
    model, data, blocks = case
    twice = data.select([0, 1, 1])
    assert np.allclose(score(model, twice, blocks, resume=tmp_path).gain, score(model, twice, blocks).gain, rtol=1e-9)
    with pytest.raises(InvalidInput, match="batch_size"):
        score(model, data, blocks, resume=tmp_path, batch_size=0)


def test_two_validation_sets_that_print_alike_are_two_requests(case):
    model, _, blocks = case
    ids = torch.arange(4000).reshape(100, 40) % 37
    other = ids.clone()
    other[50, 20] += 1
    first, second = CalibrationSet(input_ids=ids), CalibrationSet(input_ids=other)
    assert repr(first) == repr(second)
    one, two = (request_of(model, first, blocks, "layerif", {"validation": v}) for v in (first, second))
    assert one != two


@pytest.mark.parametrize("harm", ["truncate", "empty", "flip"])
def test_a_broken_file_is_made_again_and_changes_no_score(case, tmp_path, harm):
    model, data, blocks = case
    options = {"batch_size": 4, "replicates": 5}
    first = score(model, data, blocks, resume=tmp_path, **options)
    result, rows = next(tmp_path.glob("scores-*")), sorted(tmp_path.glob("rows-*"))[0]
    result.write_text(result.read_text().replace("1", "2", 1))
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 64
    rows.write_bytes({"flip": content, "truncate": content[:-10], "empty": b""}[harm])
    computed = []
    again = score(model, data, blocks, resume=tmp_path, progress=lambda done, total: computed.append(total), **options)
    assert again.digest == first.digest and computed[-1] in (1, 4)
