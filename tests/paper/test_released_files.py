"""Scores recovered from files as the paper's repository has them, made here from the packaged scores."""

import json

import numpy as np
import pytest
from paper.released_files import BITS, ETA, NAMES, read_released

from layerbudget.errors import CorruptFile, NotFound
from paper import released as r

RECORD = r.released()
ORDER = np.array(RECORD["file_order"])
N = float(RECORD["numel_per_block"])
SIZE = RECORD["blocks"]


def ratios_of(top, q, caps, *, mean=0.5):
    """Ratios and the multiplier at which they have the mean: ``min(cap, max(0, (top + x) / (2 eta q)))`` by bisection."""
    low, high = -1e30, 1e30
    for _ in range(400):
        x = (low + high) / 2
        rho = np.clip((top + x) / (2 * ETA * q), 0, caps)
        low, high = (x, high) if rho.mean() < mean else (low, x)
    return rho, x


def write(folder, task, *, caps51=0.51, kappa2=True, depth=(4, -4), hidden=()):
    name, q = NAMES[task], np.array(RECORD["tasks"][task]["influence_scores"])[ORDER]
    data, prior = folder / "mdl" / "data", folder / "mdl" / "data_dp"

    def leave(path, rho, x, caps):
        path.parent.mkdir(parents=True, exist_ok=True)
        rho, caps = rho.copy(), np.broadcast_to(caps, rho.shape).copy()
        for i in hidden:
            rho[i] = caps[i] = 0.3
        path.write_text(json.dumps({"lambda": x, "rho_l": rho.tolist(), "minmax": caps.tolist()}))

    rho, x = ratios_of(0.0, q / N, caps51)
    leave(data / f"rho_l_M_{name}_mdl_minmax_0.51.json", rho, BITS - x, caps51)
    if kappa2:
        rho, x = ratios_of(0.0, q**2 / N, 0.55)
        leave(data / f"rho_l_M_{name}_mdl_minmax_0.55[0:1]_0_3.json", rho, BITS - x, 0.55)
    place = -np.arange(1, SIZE + 1) / (SIZE - 1)
    for tau in depth:
        rho, x = ratios_of(tau * (place - place.mean()), (q / q.mean()) ** 2, 0.9)
        leave(prior / f"rho_l_M_{name}_mdl_tau_{tau}_mean_minmax_0.9.json", rho, x - BITS, 0.9)
    for variant, where in (("all", "all-if-values"), ("neg", "negative-if")):
        e = RECORD["tasks"][task]["experts"][variant]
        path = data / "max-1" / where / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"number_experts": e["counts_file_order"], "lambda_avg": e["multiplier"], "rho": e["sigma"]})
        )
    return folder


@pytest.mark.parametrize("task", ["cola", "mrpc", "openbookqa"])
def test_scores_come_back_and_lists_are_recomputed(tmp_path, task):
    found = read_released(write(tmp_path, task), RECORD)["tasks"][task]
    assert found["influence_scores"] == pytest.approx(RECORD["tasks"][task]["influence_scores"], rel=1e-9)
    assert found["experts"] == RECORD["tasks"][task]["experts"]
    outcome = r.run_released(files=tmp_path)
    assert [row["equal"] for row in outcome.rows if "equal" in row] == [32, 32] and outcome.setting["tasks"] == [task]


@pytest.mark.parametrize("hidden", [(7,), (0, 16)])
def test_positions_that_every_file_caps_follow_from_the_sum_and_the_experts(tmp_path, hidden):
    found = read_released(write(tmp_path, "openbookqa", hidden=hidden) / "mdl", RECORD)["tasks"]["openbookqa"]
    assert found["influence_scores"] == pytest.approx(RECORD["tasks"]["openbookqa"]["influence_scores"], rel=1e-6)


def test_what_the_files_do_not_say_is_refused(tmp_path):
    with pytest.raises(CorruptFile, match=r"cap the positions 1, 2, 3"):
        read_released(write(tmp_path / "a", "mrpc", hidden=(1, 2, 3)), RECORD)
    with pytest.raises(CorruptFile, match=r"cap the positions 0, 16"):  # both have three experts: no telling which is which
        read_released(write(tmp_path / "c", "mrpc", hidden=(0, 16)), RECORD)
    with pytest.raises(CorruptFile, match="data_dp"):
        read_released(write(tmp_path / "b", "mrpc", kappa2=False, depth=()), RECORD)
    with pytest.raises(NotFound, match=r"rho_l_"):
        read_released(tmp_path, RECORD)
    (tmp_path / "b/mdl/data/rho_l_M_mrpc_mdl_minmax_0.51.json").write_text('{"lambda": 1, "rho_l": [0.5], "minmax": [0.5]}')
    with pytest.raises(CorruptFile, match="1 ratios"):
        read_released(tmp_path / "b", RECORD)
    (tmp_path / "b/mdl/data/rho_l_M_mrpc_mdl_minmax_0.51.json").write_text('{"rho_l": "x"}')
    with pytest.raises(CorruptFile, match="does not parse"):
        read_released(tmp_path / "b", RECORD)
