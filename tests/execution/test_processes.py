"""One process and two give the same numbers, masks and plans; process 0 writes; what cannot be shared refuses."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import zoo
from tests.execution.test_backward import ESTIMATORS, data_for, numbers
from tests.launching import launched

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.decisions.shapes.apply import apply_shapes, remove_units
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InvalidInput, LayerbudgetError
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.execution import processes
from layerbudget.models.blocks import partition
from layerbudget.sensitivity.gain import score

ROOT = Path(__file__).parents[2]
SHAPES = ["--save", "15% params", "--passes", 15, "--by", "groups", "--strides", 1, "--draws", 1]
EXPERTS = ["--keep", 0.75, "--draws", 1]
CACHE = ["--bits", 6, "--context", 64, "--check", 3, "--draws", 1]
LAUNCHED = """
import json, sys
sys.path.insert(0, {root!r})
sys.modules["hqq"] = None  # transformers imports it where it is installed, and with it torch's compilers, for seconds
from layerbudget.cli import main
from layerbudget.execution.processes import EXCHANGED, join, shutdown
from tests.execution.test_processes import everything
group = join("cpu")
out, codes, sent = everything(), [], []
for words in json.loads(sys.argv[1]):
    before = EXCHANGED.bytes
    codes.append(main(words))
    sent.append(EXCHANGED.bytes - before)
    join("cpu").barrier()  # the next command reads what the main process has written
if group.is_main:
    open(sys.argv[2], "w").write(json.dumps([out, codes, sent]))
shutdown()
"""


def everything():
    """Scores, masks, plans and perplexities, by what they are of."""
    out = {}
    for name in ("llama-tied", "bert", "mixtral"):
        more = {"experts_implementation": "eager"} if name == "mixtral" else {}
        model = zoo.build(name, **more).double()
        data = data_for(model, name, samples=7)
        blocks = partition(model, "layer")
        for i, (label, options) in enumerate(ESTIMATORS.items()):
            if name == "bert" and i % 3 or name == "mixtral" and label.split("-")[0] not in ("fisher", "gradient", "kfac"):
                continue  # every sharing is seen on the first model, labels and fused experts on the others
            for walk in ("whole", "layers") if name == "llama-tied" and not i % 3 else ("layers",):
                if label == "layerif":
                    options = {**options, "validation": data.select([0, 1, 2])}
                try:
                    found = score(model, data, blocks, label.split()[0], walk=walk, batch_size=2, **options)
                except LayerbudgetError as error:
                    out[f"{name} {label} {walk}"] = type(error).__name__
                    continue
                gain = list(found.gain[0]) if label == "gradient-norm" else numbers(found).tolist()
                out[f"{name} {label} {walk}"] = gain
        plan = plan_sparsity(score(model, data, blocks, "fisher-trace"), sparsity=0.5)
        out[f"{name} digest"] = plan.digest
        for method in ("magnitude", "wanda", "sparsegpt") if name == "llama-tied" else ("wanda",):
            pruned = zoo.build(name, **more)
            own = plan_sparsity(score(pruned, data, blocks, "fisher-trace"), sparsity=0.5)
            prune(pruned, own, data if method != "magnitude" else None, method)
            out[f"{name} {method}"] = [v for p in pruned.parameters() for v in (p == 0).int().flatten().tolist()]
        if name == "llama-tied":
            short = zoo.tokens(7, length=3)  # inputs and output gradients are smaller than gradients
            for walk in ("whole", "layers"):
                found = score(model, short, blocks, "fisher-gram", walk=walk, batch_size=2)
                out[f"{name} short {walk}"] = numbers(found).tolist()
            text = zoo.tokens(8, padded=True)
            smaller = zoo.build(name).double()
            remove_units(smaller, text, 0.5, kind="mlp", batch_size=2)
            out[f"{name} refit damage"] = [float(p.detach().abs().sum()) for p in smaller.parameters()]
            smaller, few = zoo.build(name).double(), {"by": "groups", "strides": 1, "draws": 1, "batch_size": 2}
            shapes = plan_shapes(smaller, text, "20% params", passes=16, **few)
            out[f"{name} shapes {shapes.hyperparameters['compensate']}"] = shapes.digest
            apply_shapes(smaller, shapes, text, batch_size=2)
            out[f"{name} stream damage"] = [float(p.detach().abs().sum()) for p in smaller.parameters()]
        text = zoo.tokens(8, padded=True)
        for by in ("linear", "rows:4") if name == "llama-tied" else ("rows:4",):
            plan = plan_sparsity(model, text, by=by, passes=8, batch_size=4, method="magnitude" if name == "bert" else "wanda")
            out[f"{name} {by} measure"] = [*plan.counts.tolist(), plan.payload.forward_passes]
            out[f"{name} {by} damage"] = [plan.payload.measured, *(e["divergence"] for e in plan.payload.path)]
        if name != "bert":
            out[f"{name} perplexity"] = [perplexity(model, zoo.tokens(7), batch_size=2).value]
    return out


def jobs_of(folder, shards):
    """Commands that score, prune and measure; and the plan that they follow."""
    mixture = folder.parent / "mixture"
    few, plan, text = ["--length", 32, "--device", "cpu", "--quiet"], folder.parent / "plan.json", folder.parent / "text.txt"
    read = ["--samples", 6, "--data", text, *few]
    jobs = [
        [
            "score",
            shards,
            *read,
            "--estimator",
            "fisher-gram",
            "--stream",
            "--resume",
            folder / "stage",
            "-o",
            folder / "scores.json",
        ],
        ["apply", shards, plan, *read, "--stream", "-o", folder / "pruned"],
        ["evaluate", folder / "pruned", "--perplexity", text, "--windows", 6, *few, "-o", folder / "result.json"],
        ["plan", "cache", shards, *CACHE, *few, "--data", text, "--samples", 3, "-o", folder / "cache.json"],
        ["plan", "shapes", shards, *SHAPES, *few, "--data", text, "--samples", 4, "-o", folder / "shapes.json"],
        ["plan", "expert-pruning", mixture, *EXPERTS, *few, "--data", text, "--samples", 4, "-o", folder / "experts.json"],
    ]
    return [[str(w) for w in job] for job in jobs], str(plan)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of what the commands left in one and two processes, their numbers, codes, words, and bytes that they sent."""
    root = tmp_path_factory.mktemp("processes")
    shards = root / "model"
    tokenizer = lb.load_tokenizer("demo")
    small = zoo.build("llama", hidden_size=64, intermediate_size=96, vocab_size=len(tokenizer))
    small.save_pretrained(shards, max_shard_size="100KB")
    zoo.build("mixtral", vocab_size=len(tokenizer)).save_pretrained(root / "mixture")
    for folder in (shards, root / "mixture"):
        tokenizer.save_pretrained(folder)
    (root / "text.txt").write_text(Path(csv.__file__).read_text())
    for way in ("one", "two"):
        (root / way).mkdir()
    alone, plan = jobs_of(root / "one", str(shards))
    made = ["plan", "sparsity", str(root / "one" / "scores.json"), "--sparsity", "0.5", "--quiet", "-o", plan]
    assert all(main(job) == 0 for job in (alone[0], made, *alone[1:]))
    few = ["--samples", "1", "--length", "16", "--device", "cpu"]
    refused = [
        ["explain", plan],
        ["score", str(shards), *few, "--estimator", "fisher-trace", "-o", str(root / "s.json")],
        ["plan", "cache", str(shards), *few, *map(str, CACHE), "-o", str(root / "c.json")],
        ["plan", "shapes", str(shards), *few, *map(str, SHAPES), "-o", str(root / "h.json")],
        ["plan", "expert-pruning", str(root / "mixture"), *few, *map(str, EXPERTS), "-o", str(root / "e.json")],
    ]
    (root / "work.py").write_text(LAUNCHED.format(root=str(ROOT)))
    jobs = json.dumps([*jobs_of(root / "two", str(shards))[0], *refused])
    done = launched([str(root / "work.py"), jobs, str(root / "found")])
    assert done.returncode == 0, done.stderr[-3000:]
    found, codes, sent = json.loads((root / "found").read_text())
    return root, found, codes, done, sent


def test_two_processes_give_the_numbers_of_one(runs):
    two, alone = runs[1], json.loads(json.dumps(everything()))
    assert alone.keys() == two.keys()
    for key, expected in alone.items():
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


def test_the_command_line_is_shared_by_torchrun(runs):
    root, _, codes, *_ = runs
    assert codes[:6] == [0] * 6
    records = [json.loads((root / way / "scores.json").read_text()) for way in ("one", "two")]
    assert np.allclose(records[0]["gain"], records[1]["gain"], rtol=1e-4)
    kept = [sorted(file.name.split(".")[0] for file in (root / way / "stage").iterdir()) for way in ("one", "two")]
    assert kept[0] == kept[1] and sum(name.startswith("rows-") for name in kept[0]) == 6  # each process has kept its own
    results = [
        json.loads((root / way / "result.json").read_text())["perplexity"][str(root / "text.txt")] for way in ("one", "two")
    ]
    assert results[0]["value"] == pytest.approx(results[1]["value"], rel=1e-3) and results[0]["windows"] == 6
    a, b = (lb.load_model(str(root / way / "pruned")) for way in ("one", "two"))
    different = sum(int(((p == 0) != (q == 0)).sum()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert different <= sum(p.numel() for p in a.parameters()) / 1000  # entries at the threshold, by the order of sums
    assert torch.equal(a.get_input_embeddings().weight, b.get_input_embeddings().weight)


def test_a_plan_of_the_cache_is_that_of_one_process(runs):
    """Three sequences that decide and three that check, over two processes."""
    one, two = (lb.Plan.load(runs[0] / way / "cache.json") for way in ("one", "two"))
    assert two.payload.formats == one.payload.formats and two.counts.tolist() == one.counts.tolist()
    assert len(set(one.payload.formats.values())) > 1 and one.payload.check.rows.keys() == two.payload.check.rows.keys()
    assert two.payload.check.taken == one.payload.check.taken
    for rule, row in one.payload.check.rows.items():
        assert two.payload.check.rows[rule].kl == pytest.approx(row.kl, rel=1e-5), rule
        assert two.payload.check.rows[rule].kl_error == pytest.approx(row.kl_error, rel=1e-5), rule
    assert two.payload.predicted == pytest.approx(one.payload.predicted, rel=1e-6)


@pytest.mark.parametrize("name", ["shapes", "experts"])
def test_a_plan_is_that_of_one_process_to_the_bit(runs, name):
    one, two = (json.loads((runs[0] / way / f"{name}.json").read_text()) for way in ("one", "two"))
    assert one.pop("made_by").replace("/one/", "/two/") == two.pop("made_by") and one == two
    assert lb.Plan.load(runs[0] / "one" / f"{name}.json").digest == lb.Plan.load(runs[0] / "two" / f"{name}.json").digest
    assert one["extra"]["measured"] > 0


def test_a_plan_of_shapes_exchanges_what_its_dry_run_says(runs, capsys):
    """Moments of every part of the text, at every point."""
    root, *_, sent = runs
    job = [w for w in jobs_of(root / "dry", str(root / "model"))[0][4] if w != "--quiet"]
    assert main([*job, "--dry-run", "--machines", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"]["sent"] == pytest.approx(sent[4], rel=0.35)


def test_what_cannot_be_shared_refuses_in_a_sentence(runs):
    root, _, codes, done, _ = runs
    assert set(codes[6:]) == {2} and "Traceback (most recent call last):\n  File" not in done.stdout
    assert "explain plan runs in one process" in done.stderr and "cannot be shared between 2 processes" in done.stderr
    assert not any((root / name).exists() for name in ("s.json", "c.json", "h.json", "e.json"))


@pytest.mark.parametrize(
    ("size", "parts", "what", "said"),
    [
        (3, [2], "", "2 sequences cannot be shared between 3 processes. Every process needs one. "
         "Give more text (--samples 3 or more), or start at most 2."),
        (3, [3, 1], "halves", "1 sequence in the smallest of 2 halves cannot be shared between 3 processes. "
         "Every process needs one. Give more text (--samples 6 or more), or start at most 1."),
    ],
)  # fmt: skip
def test_too_few_sequences_are_refused_with_a_remedy(size, parts, what, said):
    with pytest.raises(InvalidInput) as error:
        processes.ProcessGroup(0, size).check_shares(parts, what)
    assert str(error.value) == said
    samples = int(said.split("--samples ")[1].split()[0])
    processes.ProcessGroup(0, size).check_shares([samples // len(parts)] * len(parts), what)
    processes.ProcessGroup(0, int(said.split("at most ")[1].rstrip("."))).check_shares(parts, what)


@pytest.mark.parametrize(("size", "sizes"), [(5, [1, 1, 1, 2]), (9, [2, 2, 2, 2]), (3, [2])])
def test_teams_that_have_too_few_sequences_are_refused_with_a_remedy(monkeypatch, size, sizes):
    monkeypatch.setattr(processes, "process_group", lambda: processes.ProcessGroup(0, size))
    with pytest.raises(InvalidInput) as error:
        processes.Teams.check(sizes, "parts")
    samples, fewer = (int(str(error.value).split(word)[1].split()[0].rstrip(".")) for word in ("--samples ", "at most "))
    processes.Teams.check([samples // len(sizes)] * len(sizes), "parts")
    monkeypatch.setattr(processes, "process_group", lambda: processes.ProcessGroup(0, fewer))
    processes.Teams.check(sizes, "parts")


def test_up_to_four_processes_have_the_batches_of_one():
    for samples in range(1, 40):
        for size in range(1, samples + 1):
            batch = processes.ProcessGroup(0, size).batch_alike(samples, 8)
            assert 1 <= batch <= 8 and -(-samples // batch) >= size
            alike = processes.ProcessGroup().batch_alike(samples, 8)
            assert batch == alike or size > processes.ALIKE


@pytest.mark.parametrize("size", [1, 2])
def test_a_sum_is_a_new_array_on_every_device(monkeypatch, size):
    monkeypatch.setattr(processes.dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    monkeypatch.setattr(processes.ProcessGroup, "device", torch.device("cpu"))
    own = np.array([1.0, 2.0])
    found = processes.ProcessGroup(0, size).sum(own)
    assert found.tolist() == [size, 2 * size] and own.tolist() == [1, 2]
    found += 1
    assert own.tolist() == [1, 2]


def test_perplexity_divides_the_loss_of_all_processes_by_the_tokens_of_all(monkeypatch):
    """Where a sum lies in other memory than its terms, as on a GPU."""
    model, data = zoo.build("llama-tied").eval(), zoo.tokens(6)
    alone = perplexity(model, data)
    whole = np.array(alone.nll) * np.array(alone.counts)

    class First(processes.ProcessGroup):
        def sum(self, values):
            assert (values[1::2] == 0).all() and (values[::2] > 0).all()
            return whole.copy()

    for module in (processes, sys.modules["layerbudget.evaluation.perplexity"]):
        monkeypatch.setattr(module, "process_group", lambda: First(0, 2))
    found = perplexity(model, data)
    assert found.value == pytest.approx(alone.value, rel=1e-9) and found.nll == pytest.approx(alone.nll)
    assert found.standard_error == pytest.approx(alone.standard_error, rel=1e-9)
