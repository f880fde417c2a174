"""``--dry-run`` says what a long verb would do, runs no layer, writes nothing, and refuses what the verb itself refuses."""

import json

import pytest
import torch
from tests import zoo

from layerbudget.cli import main
from layerbudget.cost import timing

TEXT = ["--data", "text.txt", "--samples", "4", "--length", "16"]
BITS = ["--group", "16", "--draws", "1", "--check", "0"]
LONG = {
    "score": ["score", "MODEL", *TEXT, "-o", "OUT", "--resume", "PARTS"],
    "sparsity": ["plan", "sparsity", "MODEL", *TEXT, "-o", "OUT", "--resume", "PARTS"],
    "bits": ["plan", "bits", "MODEL", "--bits", "4.5", *BITS, *TEXT, "-o", "OUT", "--save-scores", "KEPT"],
    "cache": ["plan", "cache", "MODEL", "--bits", "8", "--context", "16", "--group", "8", *TEXT, "-o", "OUT"],
    "fit": ["plan", "memory", "MODEL", "--memory", "1 GiB", "--context", "16", *TEXT, "-o", "OUT", "--save-scores", "KEPT"],
    "shapes": ["plan", "shapes", "MODEL", "--save", "20%flops", "--even", *TEXT, "-o", "OUT", "--resume", "PARTS"],
    "expert-pruning": ["plan", "expert-pruning", "MIXTURE", "--keep", "0.5", *TEXT, "-o", "OUT"],
    "apply sparsity": ["apply", "MODEL", "zeros.json", *TEXT, "-o", "OUT", "--resume", "PARTS"],
    "apply magnitude": ["apply", "MODEL", "zeros.json", "--method", "magnitude", "-o", "OUT"],
    "apply bits": ["apply", "MODEL", "bits.json", "-o", "OUT"],
    "apply expert-pruning": ["apply", "MIXTURE", "kept.json", "-o", "OUT"],
    "finetune": ["finetune", "MODEL", "ranks.json", "--data", "rows.jsonl", "-o", "OUT", "--resume", "PARTS"],
    "evaluate": ["evaluate", "MODEL", "--perplexity", "text.txt", "--length", "16", "-o", "OUT"],
    "compare": ["compare", "MODEL", "--scores", "owl", "--sparsity", "0.5", *TEXT, "--windows", "2", "-o", "OUT"],
    "certify": ["explain", "certify", "MODEL", *TEXT, "-o", "OUT"],
}
WRONG = {
    "an output that exists": ["score", "MODEL", *TEXT, "-o", "bits.json"],
    "passes that allow no step": ["plan", "sparsity", "MODEL", "--passes", "2", *TEXT, "-o", "OUT"],
    "too few bits": ["plan", "bits", "MODEL", "--bits", "1.5", *BITS, *TEXT, "-o", "OUT"],
    "more than there is": ["plan", "shapes", "MODEL", "--save", "99%flops", *TEXT, "-o", "OUT"],
    "too few experts": ["plan", "expert-pruning", "MIXTURE", "--keep", "3 experts", *TEXT, "-o", "OUT"],
    "no experts": ["plan", "expert-pruning", "MODEL", "--keep", "0.5", *TEXT, "-o", "OUT"],
    "another model, pruned": ["apply", "MIXTURE", "zeros.json", *TEXT, "-o", "OUT"],
    "another model, rounded": ["apply", "MIXTURE", "bits.json", "-o", "OUT"],
    "another model, trained": ["finetune", "MIXTURE", "ranks.json", "--data", "rows.jsonl", "-o", "OUT"],
    "an option that nothing reads": ["finetune", "MODEL", "ranks.json", "--data", "rows.jsonl", "--top-k", "1", "-o", "OUT"],
    "no such score": ["compare", "MODEL", "--scores", "owl,wol", "--sparsity", "0.5", *TEXT, "-o", "OUT"],
    "no such rule": ["compare", "MODEL", "--scores", "owl", "--rules", "x", "--sparsity", "0.5", *TEXT, "-o", "OUT"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """Two models, a text, rows, and a plan of every kind that is applied."""
    folder = tmp_path_factory.mktemp("dry")
    model = zoo.speaker("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    for name, each in (("MODEL", model), ("MIXTURE", zoo.speaker("qwen3-moe"))):
        each.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text("".join(chr(33 + (7 * i * i + 3 * i) % 80) for i in range(2000)))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i} of {i * i}"}) + "\n" for i in range(20)))
    zoo.plan(model).save(folder / "zeros.json")
    zoo.linears(model, 2).save(folder / "ranks.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        bits = ["plan", "bits", "MODEL", "--bits", "4.5", *BITS, *TEXT, "-o", "bits.json"]
        kept = ["plan", "expert-pruning", "MIXTURE", "--keep", "0.5", "--draws", "1", *TEXT, "-o", "kept.json"]
        assert main([*bits, "--quiet"]) == main([*kept, "--quiet"]) == 0
    return folder


@pytest.fixture
def idle(monkeypatch):
    """The layers that ran, beside those that were timed for the cost."""
    ran = []
    pace = timing.Pace(forward=1e-6, backward=1e-6, head=1e-6, head_backward=1e-6)
    monkeypatch.setattr(timing, "pace_of", lambda *_: pace)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
    yield ran
    hook.remove()


@pytest.mark.parametrize("verb", LONG)
def test_a_dry_run_says_what_would_be_done_and_does_nothing(place, idle, monkeypatch, capsys, verb):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    code, shown = main([*LONG[verb], "--dry-run", "--json"]), capsys.readouterr()
    assert code == 0, shown.err
    said = json.loads(shown.out)
    assert said["dry_run"] and "OUT" in said["writes"] and next(w for w in LONG[verb] if w.isupper()) in said["reads"][0]
    assert said["writes"][1:] == [w for w in LONG[verb] if w in ("KEPT", "PARTS")]
    assert sum("DecoderLayer" in name for name in idle) <= 9  # looks at one sequence, for what the layers are
    assert sorted(place.rglob("*")) == before
    if verb not in ("apply expert-pruning", "compare"):  # nobody knows, and it does not train
        assert said["expected"]["seconds"] > 0
        assert (said["expected"]["forwards"] > 0) != (verb == "apply bits"), "rounding to nearest runs no layer"
    assert main([*LONG[verb], "--dry-run", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("Would read: ", "Would run: ", "Would write: OUT", "Nothing was run"))


def test_a_dry_run_names_every_file_that_would_be_read(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    train = ["finetune", "MODEL", "ranks.json", "--data", "rows.jsonl", "--held-out", "text.txt", "-o", "OUT"]
    compare = ["evaluate", "MODEL", "--against", "MIXTURE", "--perplexity", "text.txt", "--length", "16", "-o", "OUT"]
    ranked = ["compare", "MODEL", "--scores", "gradient-norm,mine.csv", "--sparsity", "0.5", "--evaluate", "text.txt"]
    ranked += [*TEXT, "--windows", "1", "-o", "OUT"]
    (place / "mine.csv").write_text("name,score\nmodel.layers.0,1\nmodel.layers.1,2\nmodel.layers.2,3\n")
    commands = (
        (train, {"ranks.json", "rows.jsonl", "text.txt"}),
        (compare, {"MIXTURE", "text.txt"}),
        (ranked, {"mine.csv", "text.txt"}),
    )
    for words, files in commands:
        assert main([*words, "--dry-run", "--json"]) == 0
        assert set(json.loads(capsys.readouterr().out)["reads"][1:]) == files


@pytest.mark.parametrize("what", WRONG)
def test_a_dry_run_refuses_what_the_run_refuses_before_its_work(place, idle, monkeypatch, capsys, what):
    monkeypatch.chdir(place)
    said = []
    for more in (["--dry-run"], []):
        assert main([*WRONG[what], *more, "--quiet"]) == 2
        said.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("layerbudget")])
    assert said[0] == said[1] != [] and not (place / "OUT").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "ranks", "scores.json", "--mean-rank", "2"], ["plan", "bits", "scores.json", "--bits", "4"],
        ["plan", "sparsity", "scores.json"], ["explain", "ranks.json"], ["explain", "diff", "ranks.json", "ranks.json"],
        ["export", "ranks.json"], ["report", "."], ["doctor", "MODEL"],
    ],
)  # fmt: skip
def test_a_verb_without_long_work_refuses_it(place, monkeypatch, capsys, words):
    monkeypatch.chdir(place)
    (place / "scores.json").write_text("{}")
    assert main([*words, "--dry-run"]) == 2
    assert "--dry-run has no meaning for" in capsys.readouterr().err
    (place / "scores.json").unlink()
