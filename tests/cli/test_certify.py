"""``certify``: counts of certified pairs, and what is not ok."""

import json

from tests import zoo

from layerbudget.cli import main
from layerbudget.cli.explain import summary


def test_certify_on_a_saved_model(folder, capsys):
    words = ["explain", "certify", str(folder / "model"),
             "--data", str(folder / "text.txt"), "--samples", "4", "--length", "16",
             "--damping", "1", "10", "--quiet"]  # fmt: skip
    out = folder / "c.json"
    assert main([*words, "--curvature", "hessian", "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text())["summary"] == record["summary"]
    for row in record["summary"]:
        assert row["ok"] + len(row["not_ok"]) == row["blocks"] and row["pairs"] == row["ok"] * (row["ok"] - 1) // 2
        assert row["paper"] <= row["exact"] <= row["pairs"]  # the paper counts a known term as an error
        assert row["contradicted"] == {"paper": 0, "paper_with_gap": 0, "exact": 0}
    assert main(words) == 0
    assert "read the column with the gap" in capsys.readouterr().out
    assert main([*words, "--steps", "5"]) == 2  # fisher needs no products


def test_unconverged_steps_certify_nothing(folder, capsys):
    words = ["explain", "certify", str(folder / "model"),
             "--data", str(folder / "text.txt"), "--samples", "4", "--length", "16",
             "--quiet", "--curvature", "ggn", "--damping", "0.001", "--steps", "1"]  # fmt: skip
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "not converged" in shown and "certifies nothing" in shown


def test_a_contradiction_is_counted():
    table = [{"relative_damping": 1.0, "block": b, "status": "ok"} for b in "ab"]
    pair = {"relative_damping": 1.0, "certified": True, "sharp": False, "agrees": False}
    row = summary(table, {"paper": [pair], "with_gap": [{**pair, "certified": False}]})[0]
    assert row["contradicted"] == {"paper": 1, "paper_with_gap": 0, "exact": 0} and row["agree"] == 0


def test_losses_are_measured_in_32_bits_and_priced_for_every_block(folder, capsys):
    zoo.build("llama").bfloat16().save_pretrained(folder / "model")
    words = ["explain", "certify", str(folder / "model"), "--data", str(folder / "text.txt"), "--samples", "4"]
    for curvature, forwards in (("fisher", 3 * (4 + 22 * 2)), ("ggn", 3 * (4 + 22 * 2) + 3 * 45 * 3)):
        own = ["--damping", "1", "10", "--curvature", curvature, "--dry-run", "--json"]
        assert main([*words, "--length", "16", *own]) == 0
        told = json.loads(capsys.readouterr().out)
        assert "in float32" in told["reads"][0] and told["expected"]["forwards"] == forwards
