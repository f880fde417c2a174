"""Plans of bits and of memory, and files of them: two processes give what one gives, and continue what one began."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from tests.launching import launched

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.compressors.formats import GGUF, PACKED
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.memory.plan import plan_memory
from layerbudget.errors import InvalidInput
from layerbudget.execution.processes import ProcessGroup
from layerbudget.execution.sharing import Part, deal

ROOT = Path(__file__).parents[2]
CASES = {  # as many whole batches of two as processes: every batch is then that of one process
    "rtn": {"bits": 5.0, "family": GGUF},
    "weighted": {"bits": 4.5, "family": PACKED, "method": "weighted"},
    "gptq": {"bits": 5.0, "family": GGUF, "method": "gptq", "formats": ["Q4_0", "IQ4_NL", "Q5_1"]},
    "gptq by groups": {"bits": 4.5, "family": PACKED, "method": "gptq", "formats": ["w3-g32", "w4-g32", "w8-g32"]},
    "descent": {"bits": 4.5, "family": PACKED, "method": "descent", "formats": ["w3-g32", "w4-g32", "w8-g32"]},
}
WRITTEN = ("rtn", "weighted", "gptq", "gptq by groups")
LAUNCHED = """
import json, sys
sys.path.insert(0, {root!r})
sys.modules["hqq"] = None  # transformers imports it where it is installed, and with it torch's compilers, for seconds
from layerbudget.cli import main
from layerbudget.execution.processes import EXCHANGED, join, shutdown
from tests.decisions.test_shared_plans import everything
group = join("cpu")
out, codes, sent = everything(sys.argv[1], sys.argv[2]), [], []
for words in json.loads(sys.argv[3]):
    before = EXCHANGED.bytes
    codes.append(main(words))
    sent.append(EXCHANGED.bytes - before)
    join("cpu").barrier()
open(f"{{sys.argv[4]}}-{{group.rank}}", "w").write(json.dumps([out, codes, sent]))
shutdown()
"""


def everything(begun, own):
    """Plans by their names, digests, formats and check; ``begun`` is the folder of a run, ``own`` one for a new run."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = zoo.build("llama-tied", **sizes)
    data, check = zoo.tokens(8), zoo.tokens(4, seed=1)
    plans = {name: plan_bits(model, data, check, draws=1, batch_size=2, **options) for name, options in CASES.items()}
    for name in WRITTEN:
        text, kept = None if name == "rtn" else data, f"{begun}-parts" if name == "gptq by groups" else None
        write_bits(zoo.build("llama-tied", **sizes), plans[name], f"{own}-{name}", text, batch_size=2, resume=kept, check=False)
    few, fewer, resumed = zoo.tokens(5, padded=True), zoo.tokens(3, seed=1), {**CASES["weighted"], "draws": 1}
    plans["other batches"] = plan_bits(model, few, fewer, resume=own, **resumed)
    plans["resumed"] = plan_bits(model, few, fewer, resume=begun, **resumed)
    experts = {"bits": 6.0, "family": PACKED, "group": 32, "unwritten": "plan", "draws": 1, "batch_size": 2}
    plans["experts"] = plan_bits(zoo.build("mixtral", hidden_size=64, intermediate_size=96), data, check, **experts)
    room = {"memory": f"{zoo.buffers(64) + 60000} bytes", "context": 64, "runtime": "transformers"}
    plans["memory"] = plan_memory(model, data, check, draws=1, batch_size=2, method="weighted", **room)
    return {name: described(plan) for name, plan in plans.items()}


def described(plan):
    """The digest of a plan, its formats, and the divergence of every plan that was checked."""
    rows = {rule: row.kl for rule, row in plan.payload.check.rows.items()}
    return [plan.digest, dict(plan.payload.formats), plan.payload.predicted, rows]


def stored(folder):
    """Tensors of the parts in a folder, by part and name; the order of words in a file's header is not always the same."""
    return {file.name.split(".")[0]: load_file(file) for file in folder.glob("*.safetensors")}


def counted_job(root):
    """A plan in groups of 32, which is all that rows of 96 inputs allow."""
    few = ["--samples", "4", "--length", "16", "--check", "2", "--device", "cpu", "--quiet"]
    return ["plan", "bits", str(root / "small"), *few, "--bits", "5", "--method", "gptq", "--runtime", "transformers"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder, what one process gave, what each of two gave, and what the two said."""
    root = tmp_path_factory.mktemp("shared")
    alone = json.loads(json.dumps(everything(str(root / "begun"), str(root / "one"))))
    kept = stored(root / "begun-parts")
    next((root / "begun-parts").glob("layer-1.*")).unlink()  # as if the run had been stopped
    scores, few = root / "scores.json", ["--length", "16", "--device", "cpu", "--quiet"]
    small, tokenizer = str(root / "small"), lb.load_tokenizer("demo")
    zoo.build("llama", hidden_size=64, intermediate_size=96, vocab_size=len(tokenizer)).save_pretrained(small)
    tokenizer.save_pretrained(small)
    grouped = [*few, "--group", "32"]
    assert main(["plan", "bits", small, *grouped, "--samples", "2", "--bits", "4", "--check", "0",
                 "--save-scores", str(scores), "-o", str(root / "p.json")]) == 0  # fmt: skip
    jobs = [
        ["plan", "bits", str(scores), "--bits", "5", "--quiet", "-o", str(root / "of-scores.json")],
        ["plan", "bits", small, *grouped, "--samples", "3", "--bits", "4", "--method", "gptq", "-o", str(root / "few.json")],
        ["plan", "memory", small, *few, "--check", "1", "--memory", "2MiB", "--context", "64", "-o", str(root / "m.json")],
        ["apply", small, str(root / "of-scores.json"), *few, "--samples", "1", "--method", "gptq", "-o", str(root / "short")],
        ["apply", "some.gguf", str(root / "of-scores.json"), "--quiet", "-o", str(root / "again.gguf")],
        [*counted_job(root), "-o", str(root / "counted.json")],
    ]
    (root / "work.py").write_text(LAUNCHED.format(root=str(ROOT)))
    words = [root / "work.py", root / "begun", root / "two", json.dumps(jobs), root / "found"]
    names = [sorted(file.name for file in (root / "begun").iterdir()), kept]
    done = launched(list(map(str, words)))
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((root / f"found-{rank}").read_text()) for rank in range(2)]
    return root, alone, found, done, names


@pytest.mark.parametrize("name", [*CASES, "resumed", "experts", "memory"])
def test_two_processes_make_the_plan_of_one(runs, name):
    """Damages, choice and check, to the last digit."""
    assert all(out[name] == runs[1][name] for out, *_ in runs[2])


@pytest.mark.parametrize("name", WRITTEN)
def test_two_processes_write_the_files_of_one(runs, name):
    """All files but those that say how they were made, to the byte; the last run continues what one process began."""
    one, two = ({f.name: f.read_bytes() for f in (runs[0] / f"{n}-{name}").iterdir()} for n in ("one", "two"))
    assert one.keys() == two.keys() and {"model.gguf", "model.safetensors"} & one.keys()
    assert [f for f in one if one[f] != two[f] and f not in ("README.md", "receipt.json", "manifest.json")] == []
    mine, other = (json.loads(made["receipt.json"]) for made in (one, two))
    assert mine | {"made_by": ""} == other | {"made_by": ""}


def test_other_batches_change_no_more_than_the_last_digits(runs):
    """Five sequences are a batch of one process, and three and two of two."""
    for out, *_ in runs[2]:
        for mine, one in zip(out["other batches"][1:], runs[1]["other batches"][1:], strict=True):
            assert mine == (one if isinstance(one, dict) and "exact" not in one else pytest.approx(one, rel=1e-6))


def test_a_run_continues_with_another_number_of_processes(runs):
    """What one process kept is what two read, and nothing is made again; of their own, the main one keeps the parts."""
    root, _, _, _, (names, kept) = runs
    assert sorted(file.name for file in (root / "begun").iterdir()) == names and len(names) > 2
    again = stored(root / "begun-parts")
    assert again.keys() == kept.keys() and sum(map(len, kept.values())) > 20
    for file, tensors in kept.items():
        assert all(torch.equal(again[file][name], tensor) for name, tensor in tensors.items()), file
    assert len(list((root / "two").iterdir())) == len(names)


def test_the_main_process_writes_and_texts_that_are_too_short_are_refused(runs):
    root, _, found, done, _ = runs
    assert [codes for _, codes, _ in found] == [[0, 2, 2, 2, 2, 0]] * 2
    assert lb.Plan.load(root / "of-scores.json").payload.formats
    assert "gptq needs 4 or more. Give more of them (--samples)" in done.stderr
    assert "The text that checks the plan has 1 sequences" in done.stderr
    assert "1 sequence cannot be shared between 2 processes" in done.stderr
    assert "A GGUF file gets other types in one process" in done.stderr
    assert not any((root / name).exists() for name in ("few.json", "m.json", "short", "again.gguf"))


def test_a_plan_of_bits_exchanges_what_its_dry_run_says(runs, capsys):
    """Errors in the formats of the menu, whose groups the rows of the model decide."""
    root, _, found, *_ = runs
    assert main([*counted_job(root), "--dry-run", "--machines", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"]["sent"] == pytest.approx(found[0][2][5], rel=0.1)


def test_what_needs_the_same_input_stays_together_where_that_is_quicker():
    parts = [Part(1.0, "a", 5.0), Part(1.0, "a", 5.0), Part(4.0, "b"), Part(2.0, "c")]
    owners = deal(parts, ProcessGroup(0, 2))
    assert owners[0] == owners[1] != owners[2]
    assert deal(parts, ProcessGroup(1, 2)) == owners and set(deal(parts, ProcessGroup())) == {0}


@pytest.mark.parametrize("samples", range(1, 40))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_batches_are_as_many_in_every_process(samples, size):
    groups = [ProcessGroup(rank, size) for rank in range(size)]
    for batch in (1, 4, 8):
        run = groups[0].batch(samples, batch)
        assert 1 <= run <= batch
        if samples < size:
            with pytest.raises(InvalidInput, match="cannot be shared"):
                groups[0].places(samples, run)
            continue
        places = [group.places(samples, run) for group in groups]
        assert sorted(sum(places, [])) == list(range(samples))
        turns = [-(-len(each) // run) for each in places]
        assert max(turns) - min(turns) <= 1 and np.ptp([len(p) for p in places]) <= max(run, 1)
        assert size > 1 or run == batch or samples < batch
