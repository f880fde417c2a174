"""One process and two give the same numbers, masks and plans; process 0 writes; what cannot be shared refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
WORK = """
import json, sys
sys.path.insert(0, {root!r})
import numpy as np, torch
from tests import zoo
from tests.execution.test_backward import ESTIMATORS, data_for, numbers
from layerbudget.models.blocks import partition
from layerbudget.errors import LayerbudgetError
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.execution.processes import is_main, join, leave
from layerbudget.sensitivity.gain import score
from layerbudget.decisions.shapes.apply import remove_units
join("cpu")
out = {{}}
for name in ("llama-tied", "bert", "mixtral"):
    more = {{"experts_implementation": "eager"}} if name == "mixtral" else {{}}
    model = zoo.build(name, **more).double()
    data = data_for(model, name, samples=7)
    blocks = partition(model, "layer")
    for i, (label, options) in enumerate(ESTIMATORS.items()):
        if name == "bert" and i % 3 or name == "mixtral" and label.split("-")[0] not in ("fisher", "gradient", "kfac"):
            continue  # every sharing is seen on the first model, labels and fused experts on the others
        for walk in ("whole", "layers") if name == "llama-tied" and not i % 3 else ("layers",):
            if label == "layerif":
                options = {{**options, "validation": data.select([0, 1, 2])}}
            try:
                found = score(model, data, blocks, label.split()[0], walk=walk, batch_size=2, **options)
            except LayerbudgetError as error:
                out[f"{{name}} {{label}} {{walk}}"] = type(error).__name__
                continue
            gain = list(found.gain[0]) if label == "gradient-norm" else numbers(found).tolist()
            out[f"{{name}} {{label}} {{walk}}"] = gain
    plan = plan_sparsity(score(model, data, blocks, "fisher-trace"), sparsity=0.5)
    out[f"{{name}} digest"] = plan.digest
    for method in ("magnitude", "wanda", "sparsegpt") if name == "llama-tied" else ("wanda",):
        pruned = zoo.build(name, **more)
        own = plan_sparsity(score(pruned, data, blocks, "fisher-trace"), sparsity=0.5)
        prune(pruned, own, data if method != "magnitude" else None, method)
        out[f"{{name}} {{method}}"] = [int(v) for p in pruned.parameters() for v in (p == 0).flatten()]
    if name == "llama-tied":
        text = zoo.tokens(8, padded=True)
        smaller = zoo.build(name).double()
        remove_units(smaller, text, 0.5, kind="mlp", batch_size=2)
        out[f"{{name}} refit damage"] = [float(p.abs().sum()) for p in smaller.parameters()]
    text = zoo.tokens(8, padded=True)
    for by in ("linear", "rows:4") if name == "llama-tied" else ("rows:4",):
        plan = plan_sparsity(model, text, by=by, passes=8, batch_size=4, method="magnitude" if name == "bert" else "wanda")
        out[f"{{name}} {{by}} measure"] = [*plan.counts.tolist(), plan.extra["forward_passes"]]
        out[f"{{name}} {{by}} damage"] = [plan.extra["measured"], *(e["divergence"] for e in plan.extra["path"])]
    if name != "bert":
        out[f"{{name}} perplexity"] = [perplexity(model, zoo.tokens(7), batch_size=2).value]
if is_main():
    open(sys.argv[1], "w").write(json.dumps(out))
leave()
"""


def launched(arguments, processes=2, cwd=None):
    """Run Python under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command[3:3] = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # any free port
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=500)


def test_two_processes_give_the_numbers_of_one(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(WORK.format(root=str(ROOT)))
    alone = subprocess.run([sys.executable, str(script), str(tmp_path / "1.json")], capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr[-2000:]
    shared = launched([str(script), str(tmp_path / "2.json")])
    assert shared.returncode == 0, shared.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert one.keys() == two.keys()
    for key, expected in one.items():
        found = two[key]
        if isinstance(expected, str):
            assert found == expected, key
        elif key.split()[-1] == "measure":
            assert found == expected, key
        elif key.split()[-1] == "damage":
            assert found == pytest.approx(expected, rel=1e-6), key
        elif key.split()[1] in ("magnitude", "wanda", "sparsegpt"):
            assert found == expected, key
        else:
            a, b = (np.array([np.nan if v is None else v for v in x], dtype=float) for x in (expected, found))
            assert np.allclose(a, b, rtol=1e-8, atol=1e-12 * np.nanmax(np.abs(a)), equal_nan=True), key


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    import layerbudget as lb

    folder = tmp_path_factory.mktemp("model") / "model"
    lb.load_model("demo").save_pretrained(folder, max_shard_size="1MB")
    lb.load_tokenizer("demo").save_pretrained(folder)
    return folder


COMMANDS = """
import json, os, sys
from layerbudget.cli import main
from layerbudget.execution.processes import join
codes = []
for words in json.loads(sys.argv[1]):
    codes.append(main(words))
    join("cpu").barrier()  # the next command reads what the main process has written
if os.environ["RANK"] == "0":
    open(sys.argv[2], "w").write(json.dumps(codes))
"""


def commands(folder, *jobs):
    """Exit codes of commands in two processes, one after the other, and what they said."""
    (folder / "commands.py").write_text(COMMANDS)
    words = json.dumps([[str(w) for w in job] for job in jobs])
    done = launched([str(folder / "commands.py"), words, str(folder / "codes")])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "codes").read_text()), done


def test_the_command_line_is_shared_by_torchrun(shards, tmp_path):
    from layerbudget.cli import main

    few = ["--samples", 6, "--length", 32, "--device", "cpu", "--quiet"]
    plan = tmp_path / "one" / "plan.json"
    for way in ("one", "two"):
        out = tmp_path / way
        out.mkdir()
        jobs = [
            ["score", shards, *few, "--estimator", "fisher-gram", "--stream", "-o", out / "scores.json"],
            ["plan", "sparsity", out / "scores.json", "--sparsity", 0.5, "--quiet", "-o", plan],
            ["apply", shards, plan, *few, "--stream", "-o", out / "pruned"],
            ["evaluate", out / "pruned", "--windows", 6, *few[2:], "-o", out / "result.json"],
        ]
        if way == "one":
            assert all(main([str(w) for w in job]) == 0 for job in jobs)
        else:
            assert commands(tmp_path, jobs[0], *jobs[2:])[0] == [0, 0, 0]
    records = [json.loads((tmp_path / way / "scores.json").read_text()) for way in ("one", "two")]
    assert np.allclose(records[0]["gain"], records[1]["gain"], rtol=1e-4)
    results = [json.loads((tmp_path / way / "result.json").read_text())["perplexity"]["stdlib"] for way in ("one", "two")]
    assert results[0]["value"] == pytest.approx(results[1]["value"], rel=1e-3) and results[0]["windows"] == 6
    import layerbudget as lb

    a, b = (lb.load_model(str(tmp_path / way / "pruned")) for way in ("one", "two"))
    different = sum(int(((p == 0) != (q == 0)).sum()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert different <= 20  # entries at the threshold, by the order of sums
    assert torch.equal(a.get_input_embeddings().weight, b.get_input_embeddings().weight)


def test_what_cannot_be_shared_refuses_in_a_sentence(shards, tmp_path):
    few = ["--samples", 1, "--length", 16, "--device", "cpu"]
    codes, done = commands(
        tmp_path,
        ["plan", "bits", shards, "--bits", 4, "-o", tmp_path / "plan.json"],
        ["score", shards, *few, "--estimator", "fisher-trace", "-o", tmp_path / "s.json"],
    )
    assert 0 not in codes and "Traceback (most recent call last):\n  File" not in done.stdout
    assert "plan bits runs in one process" in done.stderr and "cannot be shared between 2 processes" in done.stderr
    assert not list(tmp_path.glob("*.json"))
