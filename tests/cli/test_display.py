"""What is shown decides nothing: every verb gives the same result and writes the same files with --quiet, --json or neither."""

from __future__ import annotations

import json

import pytest
from tests.documented import shrink
from tests.furniture import furnish

from layerbudget.cli import display, main
from layerbudget.cli.commands import VERBS

VOLATILE = {"seconds", "took", "expected", "started", "created", "elapsed", "words", "command"}
FEW = (
    "score MODEL -o gains.json",
    "plan sparsity gains.json --sparsity 0.5 -o zeros.json",
    "explain zeros.json",
    "apply MODEL zeros.json -o zeroed",
    "evaluate zeroed -o evaluated.json",
    "doctor MODEL",
)
LINES = (
    "score MODEL --estimator rank-gain --by linear -o scores.json",
    "score MODEL -o gains.json",
    "explain certify MODEL -o certificate.json",
    "plan sparsity gains.json --sparsity 0.5 -o zeros.json",
    "plan ranks scores.json --mean-rank 2 -o ranks.json",
    "explain zeros.json",
    "explain transfer gains.json gains.json --sparsity 0.5",
    "plan sparsity MODEL --sparsity 0.5 --passes 6 -o plan.json",
    "apply MODEL plan.json -o pruned",
    "evaluate pruned -o evaluated.json",
    "plan bits MODEL --bits 4.5 --group 32 --draws 1 -o bits.json",
    "apply MODEL bits.json -o OUT",
    "evaluate OUT --against MODEL",
    "plan shapes MODEL --save 20%flops --even -o shapes.json",
    "finetune MODEL ranks.json --data my.jsonl -o adapters",
    "export ranks.json",
    "compare MODEL --scores owl --sparsity 0.5 --no-controls -o grid",
    "doctor MODEL",
    "report pruned -o page.html",
)


def settled(value):
    """A result without its times."""
    if isinstance(value, dict):
        return {k: settled(v) for k, v in value.items() if k not in VOLATILE}
    return [settled(v) for v in value] if isinstance(value, list | tuple) else value


def content(path):
    """What a file says: JSON without its times, weights to the byte."""
    if path.suffix == ".json":
        return settled(json.loads(path.read_text()))
    return path.read_bytes()


def named(path):
    """The name of a file, without the checksum of a cell: a cell says how long it took."""
    return str(path.parent / path.name.split(".")[0]) if "cells" in path.parts else str(path)


SLOW = [pytest.param(LINES, w, marks=pytest.mark.slow) for w in (["--json"], [], ["--quiet", "--json"])]


@pytest.mark.parametrize(("lines", "shown"), [(FEW, ["--json"]), *SLOW])
def test_the_display_changes_no_result(tmp_path, monkeypatch, capsys, lines, shown):
    assert {line.split()[0] for line in LINES} == set(VERBS) - {"demo"}  # which is the verbs above, one after the other
    undo, found = shrink(), {}
    monkeypatch.setattr(display.Display, "conclude", lambda self, result: found.setdefault("last", result))  # times left out
    results, files = {}, {}
    try:
        for name, more in (("quiet", ["--quiet"]), ("shown", shown)):
            place = tmp_path / name
            place.mkdir()
            furnish(place)
            monkeypatch.chdir(place)
            for line in lines:
                found.clear()
                assert main([*line.split(), *more]) == 0, (line, more, capsys.readouterr().err[-1500:])
                results[name, line] = settled(json.loads(json.dumps(found["last"], default=str)))
                said = capsys.readouterr().out
                if "--json" in more:
                    assert isinstance(json.loads(said), dict | list), line
            kept = [p for p in sorted(place.rglob("*")) if p.suffix in (".json", ".safetensors", ".yaml", ".csv")]
            files[name] = {named(p.relative_to(place)): content(p) for p in kept if p.name != "manifest.json"}
    finally:
        undo()
    for line in lines:
        if not line.startswith("doctor"):  # its numbers are times
            assert results["shown", line] == results["quiet", line], line
    assert files["shown"].keys() == files["quiet"].keys()
    for path, held in files["shown"].items():
        assert held == files["quiet"][path], path
