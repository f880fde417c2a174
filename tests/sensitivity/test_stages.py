"""Stages on disk: resumed, extended, merged and reused give what one run gives."""

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.data.calibration import CalibrationSet
from layerbudget.errors import InvalidInput, ModelMismatch, NotFound
from layerbudget.sensitivity import stages
from layerbudget.sensitivity.curvature import gram
from layerbudget.sensitivity.gain import score
from layerbudget.sensitivity.kept import Kept


@pytest.fixture
def case():
    model = zoo.dense("mistral")
    return model, zoo.labelled("mistral", samples=9), zoo.partition(model, "mistral")


@pytest.mark.parametrize("sketch", (None, 6))
def test_more_samples_later_give_the_result_of_all_at_once(case, tmp_path, sketch):
    model, data, blocks = case
    options = {"sketch": sketch, "replicates": 5, "batch_size": 2}
    score(model, data.select(slice(0, 5)), blocks, stage=tmp_path, **options)
    counts = []
    later = score(model, data, blocks, stage=tmp_path, progress=lambda done, total: counts.append(total), **options)
    at_once = score(model, data, blocks, **options)
    assert set(counts) == {4}
    for field in ("gain", "standard_error", "noise_floor"):
        assert np.allclose(getattr(later, field), getattr(at_once, field), rtol=1e-9)


def test_stages_of_two_machines_merge(case, tmp_path):
    model, data, blocks = case
    who = stages.identity(model, blocks, None, 0)
    for name, rows in (("a", slice(0, 4)), ("b", slice(3, 9))):
        score(model, data.select(rows), blocks, stage=tmp_path / name, batch_size=2)
    assert stages.Stage(tmp_path / "a", who).merge(tmp_path / "b") == 3
    merged, computed = stages.gram_matrices(
        stages.Stage(tmp_path / "a", who), model, data, blocks, batch_size=2, sketch=None, seed=0
    )
    assert computed == 0
    assert np.allclose(merged, gram.gram_matrices(model, data, blocks)[0], rtol=1e-9)


def test_a_crash_costs_one_batch(case, tmp_path):
    model, data, blocks = case
    done = []

    def crash(n, total):
        done.append(n)
        if n >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(model, data, blocks, stage=tmp_path, batch_size=2, progress=crash)
    left = []
    score(model, data, blocks, stage=tmp_path, batch_size=2, progress=lambda n, total: left.append(total))
    assert left[-1] == 9 - 4


@pytest.mark.parametrize("walk", ["layers", "whole"])
@pytest.mark.parametrize(
    "estimator, options",
    [("kfac", {}), ("kfac", {"damping": 0.1, "damping_unit": "absolute"}), ("ekfac", {}), ("rank-gain", {}),
     ("rank-gain", {"curvature": "none"})],
)  # fmt: skip
def test_a_stopped_run_settles_only_what_is_left(case, tmp_path, monkeypatch, estimator, options, walk):
    model, data, blocks = case
    options = {"batch_size": 4, "walk": walk, **options}
    undisturbed, put, kept = score(model, data, blocks, estimator, **options), Kept.put, []

    def crash(self, k, record):
        put(self, k, record)
        kept.append(k)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Kept, "put", crash)
    with pytest.raises(KeyboardInterrupt):
        score(model, data, blocks, estimator, stage=tmp_path, **options)
    broken = next((tmp_path / "parts").glob(f"*-{kept[0]}.*"))
    broken.write_bytes(broken.read_bytes()[:-3])  # it fails its checksum and is made again
    monkeypatch.setattr(Kept, "put", lambda self, k, record: put(self, k, record) or kept.append(k))
    resumed = score(model, data, blocks, estimator, stage=tmp_path, **options)
    assert sorted(kept[2:]) == sorted({*range(len(blocks))} - {kept[1]})
    assert resumed.digest == undisturbed.digest and not (tmp_path / "parts").exists()


def test_an_unchanged_request_is_read_and_a_changed_one_is_not(case, tmp_path, monkeypatch):
    model, data, blocks = case
    first = score(model, data, blocks, "kfac", stage=tmp_path)
    ran = []
    again = score(model, data, blocks, "kfac", stage=tmp_path, progress=lambda *a: ran.append(a))
    assert again.to_dict() == stages.Scores.from_dict(first.to_dict()).to_dict() and not ran
    score(model, data, blocks, "kfac", seed=1, stage=tmp_path, progress=lambda *a: ran.append(a))
    assert ran
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    other = score(model, data, blocks, "kfac", stage=tmp_path)
    assert other.gain != first.gain


def test_a_stage_of_another_model_and_duplicates_are_refused(case, tmp_path):
    model, data, blocks = case
    score(model, data, blocks, stage=tmp_path)
    with pytest.raises(InvalidInput, match="duplicates"):
        score(model, data.select([0, 1, 1]), blocks, stage=tmp_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ModelMismatch, match="another folder"):
        score(model, data, blocks, stage=tmp_path)


def test_two_validation_sets_that_print_alike_are_two_requests(case):
    model, _, blocks = case
    ids = torch.arange(4000).reshape(100, 40) % 37
    other = ids.clone()
    other[50, 20] += 1
    first, second = CalibrationSet(input_ids=ids), CalibrationSet(input_ids=other)
    assert repr(first) == repr(second)
    keys = {stages.request(model, first, blocks, "layerif", {"validation": v}) for v in (first, second)}
    assert len(keys) == 2


def test_merging_makes_no_folder_and_completes_a_batch_that_was_cut_short(case, tmp_path):
    model, data, blocks = case
    who = stages.identity(model, blocks, None, 0)
    mine = stages.Stage(tmp_path / "a", who)
    with pytest.raises(NotFound):
        mine.merge(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    score(model, data.select(slice(0, 2)), blocks, stage=tmp_path / "b", batch_size=2)
    (batch,) = (tmp_path / "b" / "rows").iterdir()
    cut = tmp_path / "a" / "rows" / batch.name
    cut.mkdir(parents=True)
    (cut / "0.npy").write_bytes((batch / "0.npy").read_bytes()[:100])
    assert mine.merge(tmp_path / "b") == 1
    assert sorted(mine.index()) == sorted(stages.sequence_keys(data.select(slice(0, 2))))
    assert np.array_equal(mine.load(batch.name, 0), np.load(batch / "0.npy"))


def test_a_staged_run_checks_its_batch_size(case, tmp_path):
    model, data, blocks = case
    with pytest.raises(InvalidInput, match="batch_size"):
        score(model, data, blocks, stage=tmp_path, batch_size=0)


def test_a_stage_without_identity_is_another_stage(case, tmp_path):
    model, _, blocks = case
    (tmp_path / "stage.json").write_text('{"schema_version": 1}')
    with pytest.raises(ModelMismatch):
        stages.Stage(tmp_path, stages.identity(model, blocks, None, 0))


@pytest.mark.parametrize("harm", ["truncate", "empty", "flip", "keys", "foreign"])
def test_a_broken_stage_file_is_made_again_and_changes_no_score(case, tmp_path, harm):
    model, data, blocks = case
    options = {"batch_size": 4, "replicates": 5}
    first = score(model, data, blocks, stage=tmp_path, **options)
    for result in (tmp_path / "results").iterdir():
        result.unlink()
    rows = sorted((tmp_path / "rows").glob("*/1.npy"))[0]
    content = bytearray(rows.read_bytes())
    if harm == "flip":
        content[-9] ^= 64
        rows.write_bytes(content)
    elif harm == "keys":
        (rows.parent / "keys.json").write_text('["a", "b"]')
    elif harm == "foreign":
        (tmp_path / "stage.json").unlink()
        for values in (tmp_path / "rows").glob("*/*.npy"):
            np.save(values, 2 * np.load(values))
    else:
        rows.write_bytes(content[:-10] if harm == "truncate" else b"")
    computed = []
    again = score(model, data, blocks, stage=tmp_path, progress=lambda done, total: computed.append(total), **options)
    assert again.digest == first.digest and computed[-1] in ((9,) if harm == "foreign" else (1, 4))


def test_a_broken_result_is_computed_again(case, tmp_path):
    model, data, blocks = case
    first = score(model, data, blocks, "gradient-norm", stage=tmp_path)
    (file,) = (f for f in (tmp_path / "results").iterdir() if f.suffix == ".json")
    file.write_text(file.read_text().replace("1", "2", 1))
    assert score(model, data, blocks, "gradient-norm", stage=tmp_path).digest == first.digest
