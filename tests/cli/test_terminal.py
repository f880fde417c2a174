"""What a terminal shows: whole words, plans as pictures, the first second of a long run; and the hub, at once."""

import argparse
import io
import json
import re

from rich.console import Console
from tests import zoo

from layerbudget.cli import main
from layerbudget.cli.display import Display
from layerbudget.reporting.tables import plan_grid


def test_a_plan_of_matrices_is_a_picture_with_the_parameters_of_every_layer(mistral):
    plan = zoo.linears(mistral, lambda n: 3 if "q_proj" in n else 1)
    price = [10.0] * len(plan.blocks)
    out = io.StringIO()
    Console(file=out, width=80).print(plan_grid(plan, "ranks", price=price))
    lines = out.getvalue().splitlines()
    layers = [line for line in lines if re.match(r" *\d+ ", line)]
    assert len(layers) == len(mistral.model.layers) and all(len(line) <= 80 for line in lines)
    assert {"q", "k", "gate", "parameters"} <= set(next(line for line in lines if "layer" in line).split())
    assert all(line.split()[-1] == "90" for line in layers), "six matrices of rank 1 and one of rank 3, at 10 each"
    assert plan_grid(zoo.plan(mistral)) is None, "whole layers are rows already"


def test_ranks_are_shown_as_a_picture(saved_model, tmp_path, capsys):
    from layerbudget.models.loading import blocks_from_config

    config = json.loads((saved_model("llama") / "config.json").read_text())
    count = len(blocks_from_config(config, by="linear"))
    assert count > 10
    words = ["plan", "ranks", str(tmp_path / "llama"), "--mean-rank", "4", "--rule", "uniform"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 20


def test_a_narrow_table_cuts_nothing():
    head = ("plan", "nats per token", "against uniform", "interval", "Holm p", "places", "first")
    row = ("mdl(fisher-gram, permuted)", "13.7487", "+0.1451", "[-0.1028, +0.2425]", "0.109", "10-11", "92%")
    for width in (40, 80, 200):
        shown = Display(argparse.Namespace(command="compare", json=False, table=False))
        shown.console = Console(file=io.StringIO(), width=width, soft_wrap=True)
        shown.show("sparsity 0.5", head, [row])
        said = shown.console.file.getvalue()
        assert "\u2026" not in said
        for word in " ".join((*head, *row)).split():
            assert word in said, (width, word)
        assert width < 80 or max(map(len, said.splitlines())) <= width
