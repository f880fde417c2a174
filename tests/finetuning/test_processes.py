"""Fine-tuning in two processes (gloo) gives one process's losses, predictions and adapters; what cannot be shared refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file
from tests import zoo
from tests.launching import free_port, launched
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.finetuning.training import FilledOrder


def command(folder, plan, out, *more):
    """Two epochs of 54 rows in batches of 16: the last step of an epoch has 6."""
    return [
        "finetune",
        str(folder / "model"),
        str(folder / plan),
        "-o",
        str(out),
        "--epochs",
        "2",
        "--batch",
        "16",
        "--device",
        "cpu",
        "--quiet",
        *more,
    ]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """The embedded model in a folder, plans of ranks and experts, rows with answers, rows with labels."""
    folder = tmp_path_factory.mktemp("speaker")
    model = lb.load_model("demo")
    model.save_pretrained(folder / "model")
    lb.load_tokenizer("demo").save_pretrained(folder / "model")
    zoo.linears(model, lambda n: 2 if "q_proj" in n or "v_proj" in n else 0).save(folder / "ranks.json")
    zoo.linears(model, lambda n: 3 if "q_proj" in n else 0, "lora-experts").save(folder / "experts.json")
    said = [{"prompt": f"say {chr(97 + i % 20)}{i}:", "completion": f" {chr(97 + i % 20) * (1 + i % 5)}"} for i in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, said)))
    labelled = [{"text": f"the film was {('bad', 'good')[i % 2]} , {i}", "label": ("no", "yes")[i % 2]} for i in range(60)]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """An encoder in a folder, a plan of ranks, rows with labels."""
    folder = tmp_path_factory.mktemp("encoder")
    words = {w: i for i, w in enumerate(["<pad>", "<unk>", "good", "bad", "film"])}
    tok = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    model = zoo.classifier(2)
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder / "model")
    zoo.linears(model, lambda n: 2 if "attention" in n else 0).save(folder / "ranks.json")
    rows = [{"text": " ".join(["film"] * (i % 7)) + f" {('bad', 'good')[i % 2]} {i}", "label": i % 2} for i in range(59)]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def fsdp(monkeypatch):
    """What `accelerate launch --use_fsdp --fsdp_version 2` sets."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")


def same(one, two, seeds=(0,)):
    """Largest difference of the adapters' entries, relative to the largest entry; numbers and files are compared on the way."""
    files = [sorted(str(f.relative_to(out)) for f in out.rglob("*") if "rng_state" not in f.name) for out in (one, two)]
    assert files[0] == files[1]
    worst = 0.0
    for seed in seeds:
        a, b = (json.loads((out / f"seed-{seed}" / "result.json").read_text()) for out in (one, two))
        assert b.pop("processes") == 2 and a.keys() == b.keys() and a["steps"] == b["steps"] and a["identity"] == b["identity"]
        assert a["training_loss"] == pytest.approx(b["training_loss"], rel=1e-4)
        for split, metrics in a["metrics"].items():
            assert b["metrics"][split] == pytest.approx(metrics, rel=1e-4)
        for what in ("losses", "predictions"):
            for split, values in a.get(what, {}).items():
                assert np.allclose(b[what][split], values, rtol=1e-3), (what, split)
        weights = [load_file(out / f"seed-{seed}" / "adapter" / "adapter_model.safetensors") for out in (one, two)]
        assert weights[0].keys() == weights[1].keys()
        largest = max(float(v.abs().max()) for v in weights[0].values())
        worst = max(worst, *(float((v - weights[1][k]).abs().max()) / largest for k, v in weights[0].items()))
    return worst


def continues(folder, out, kept, rows, launch):
    """A run whose last checkpoint is half written, taken up by ``launch`` (or by this process), ends in the same adapter."""
    adapter = out / "seed-0" / "adapter" / "adapter_model.safetensors"
    before = {k: v.clone() for k, v in load_file(adapter).items()}
    for name in ("result.json", "manifest.json", "adapter/adapter_model.safetensors"):
        (kept / "seed-0" / name).unlink(missing_ok=True)
    last = max((kept / "seed-0" / "checkpoints").iterdir(), key=lambda f: int(f.name[11:]))
    (last / "trainer_state.json").write_text("{")  # the one before it counts
    words = command(folder, "ranks.json", out, *rows, "--resume", str(kept), "--overwrite")
    if launch:
        done = launch(["-m", "layerbudget", *words])
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        assert main(words) == 0
    after = load_file(adapter)
    assert max(float((v - after[k]).abs().max()) for k, v in before.items()) < 1e-4


def both(folder, tmp_path, plan, *more):
    """Run alone and in two processes."""
    assert main(command(folder, plan, tmp_path / "one", *more)) == 0
    done = launched(["-m", "layerbudget", *command(folder, plan, tmp_path / "two", *more)])
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_an_epoch_is_the_order_of_one_process_and_then_rows_that_teach_nothing():
    alone, shared = FilledOrder(11, 1, 7), FilledOrder(11, 4, 7)
    for epoch in (0, 1):
        for order in (alone, shared):
            order.set_epoch(epoch)
        expected = list(alone)
        alone.set_epoch(epoch)
        assert sorted(expected) == list(range(11)) and list(shared) == [*expected, 11] and len(shared) == 12


@pytest.mark.slow
def test_two_processes_train_the_adapter_of_one_with_shared_weights_too_and_refuse_what_they_cannot_share(speaker, tmp_path):
    """The refusals, DDP and FSDP in one start; there is one batch of held-out rows, which one process runs for both."""
    rows = ("--data", str(speaker / "rows.jsonl"))
    assert main(command(speaker, "ranks.json", tmp_path / "one", *rows)) == 0
    runs = {name: command(speaker, "ranks.json", tmp_path / name, *rows, "--json") for name in ("ddp", "fsdp")}
    script = tmp_path / "all.py"
    script.write_text(
        "import os, sys\nfrom accelerate.state import AcceleratorState\nfrom layerbudget.cli import main\n"
        "from layerbudget.finetuning import training\n"
        f"runs = {runs!r}\n"
        "wrong = (['--batch', '15'], ['--batch', '9', '--accumulation', '9'], ['--start', 'gradients'])\n"
        "codes = [main([*runs['ddp'], *more]) for more in wrong]\n"
        "os.environ['ACCELERATE_USE_DEEPSPEED'] = 'true'\ncodes.append(main(runs['ddp']))\n"
        "os.environ |= {'ACCELERATE_USE_DEEPSPEED': 'false', 'ACCELERATE_USE_FSDP': 'true', 'FSDP_VERSION': '1'}\n"
        "codes.append(main(runs['fsdp']))\n"
        "os.environ |= {'FSDP_VERSION': '2', 'FSDP_OFFLOAD_PARAMS': 'true'}\ncodes.append(main(runs['fsdp']))\n"
        f"made = os.path.exists({str(tmp_path / 'ddp')!r}) or os.path.exists({str(tmp_path / 'fsdp')!r})\n"
        "del os.environ['FSDP_OFFLOAD_PARAMS']\nos.environ['ACCELERATE_USE_FSDP'] = 'false'\n"
        "trained = main(runs['ddp'])\n"
        "os.environ['ACCELERATE_USE_FSDP'] = 'true'\nAcceleratorState._reset_state()\n"
        "held, gather = [], training.trained\n"  # a process holds half of everything while it trains
        "def seen(model):\n"
        "    held.append(sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters()))\n"
        "    return gather(model)\n"
        "training.trained = seen\ntrained = trained or main(runs['fsdp'])\n"
        "sys.exit(trained or codes != [2] * 6 or made or not held or max(held) > 0.6)\n"
    )
    done = launched([str(script)])
    said = " ".join(done.stderr.split())
    assert done.returncode == 0, done.stderr[-3000:]
    for sentence in (
        "A batch of 15 rows does not divide between 2 processes",
        "A batch of 9 rows in 9 passes does not divide",
        "DeepSpeed cannot be used",
        "gradients cannot be used",
        "--batch 14",
        "Version 1 of FSDP cannot be used",
        "Add --fsdp_version 2",
        "--fsdp_offload_params cannot be used",
    ):
        assert sentence in said, sentence
    documents = [json.loads(text) for text in done.stdout.replace("}\n{", "}\0{").split("\0")]  # of process 0 alone
    assert [d["metrics"]["held_out"]["loss"]["value"] > 0 for d in documents] == [True, True]
    for name in runs:
        assert same(tmp_path / "one", tmp_path / name) < 1e-3


def test_commands_train_a_seed_each_and_one_puts_them_together(speaker, tmp_path):
    few = ("--data", str(speaker / "rows.jsonl"), "--train-rows", "16", "--resume", str(tmp_path / "kept"))
    for seed in ("0", "1"):
        assert main(command(speaker, "ranks.json", tmp_path / seed, *few, "--seeds", seed)) == 0
    results = [tmp_path / "kept" / f"seed-{seed}" / "result.json" for seed in (0, 1)]
    before = [file.stat().st_mtime_ns for file in results]
    assert main(command(speaker, "ranks.json", tmp_path / "both", *few, "--seeds", "0", "1")) == 0
    assert before == [file.stat().st_mtime_ns for file in results]
    assert json.loads((tmp_path / "both" / "result.json").read_text())["seeds"] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, more",
    [
        (
            "ranks.json",
            ("--accumulation", "2", "--seeds", "0", "1", "--alpha-policy", "rslora", "--gradient-checkpointing"),
        ),
    ],
)
def test_every_way_of_training_text_is_shared(speaker, tmp_path, plan, more):
    both(speaker, tmp_path, plan, "--data", str(speaker / "rows.jsonl"), *more)
    assert same(tmp_path / "one", tmp_path / "two", (0, 1) if "--seeds" in more else (0,)) < 1e-3


@pytest.mark.slow
def test_experts_are_as_near_as_one_process_is_to_itself_in_two_passes(speaker, tmp_path):
    """Choices of experts turn on rounding, so the yardstick is the same sum in another order within one process."""
    rows = ("--data", str(speaker / "rows.jsonl"))
    both(speaker, tmp_path, "experts.json", *rows)
    assert main(command(speaker, "experts.json", tmp_path / "passes", *rows, "--accumulation", "2")) == 0
    a, b = (load_file(tmp_path / o / "seed-0" / "adapter" / "adapter_model.safetensors") for o in ("one", "passes"))
    largest = max(float(v.abs().max()) for v in a.values())
    yardstick = max(float((v - b[k]).abs().max()) / largest for k, v in a.items())
    assert same(tmp_path / "one", tmp_path / "two") < 3 * yardstick < 1e-2


@pytest.mark.slow
def test_labels_are_shared_by_a_head_and_by_a_language_model(encoder, speaker, tmp_path):
    for folder in (encoder, speaker):
        place = tmp_path / folder.name
        both(folder, place, "ranks.json", "--task", str(folder / "labels.jsonl"))
        assert same(place / "one", place / "two") < 1e-3


@pytest.mark.slow
def test_resume_overwrite_and_accelerate(speaker, tmp_path):
    """Two processes continue what one began, and the other way round; `accelerate launch` starts them too."""
    rows = ("--data", str(speaker / "rows.jsonl"))
    for name, run in (("one", None), ("two", launched)):
        words = command(speaker, "ranks.json", tmp_path / name, *rows, "--resume", str(tmp_path / f"{name}-kept"))
        assert (main(words) if run is None else run(["-m", "layerbudget", *words]).returncode) == 0
    for name, launch in (("one", launched), ("two", None)):
        continues(speaker, tmp_path / name, tmp_path / f"{name}-kept", rows, launch)
    words = ["-m", "layerbudget", *command(speaker, "ranks.json", tmp_path / "two", *rows)]
    refused = launched(words)
    assert refused.returncode != 0 and "exists already" in " ".join(refused.stderr.split())
    start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    start += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1", "--main_process_port", free_port()]
    done = subprocess.run(
        [*start, *words, "--overwrite"], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert main(command(speaker, "ranks.json", tmp_path / "one", *rows, "--overwrite")) == 0
    assert same(tmp_path / "one", tmp_path / "two") < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["experts", "labels", "head", "accumulation"])
def test_every_way_of_training_shares_weights(speaker, encoder, tmp_path, fsdp, monkeypatch, way):
    """FSDP against DDP in as many processes: the same sums."""
    folder = encoder if way == "head" else speaker
    learned = ("--task", str(folder / "labels.jsonl")) if way in ("head", "labels") else ("--data", str(folder / "rows.jsonl"))
    more = {
        "accumulation": ("--accumulation", "2", "--alpha-policy", "rslora", "--gradient-checkpointing"),
    }.get(way, ())
    for name in ("fsdp", "ddp"):
        words = command(folder, "experts.json" if way == "experts" else "ranks.json", tmp_path / name, *learned, *more)
        done = launched(["-m", "layerbudget", *words])
        assert done.returncode == 0, done.stderr[-3000:]
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    one = tmp_path / "ddp" / "seed-0" / "result.json"
    record = json.loads(one.read_text())
    assert record.pop("processes") == 2
    one.write_text(json.dumps(record))
    assert same(tmp_path / "ddp", tmp_path / "fsdp") < 1e-3


@pytest.mark.slow
def test_one_process_continues_what_shared_weights_began_and_the_other_way_round(speaker, tmp_path, fsdp):
    """`accelerate launch --use_fsdp` starts it; checkpoints are those of one process."""
    rows = ("--data", str(speaker / "rows.jsonl"))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port(), "--use_fsdp"]
    environment = {k: v for k, v in os.environ.items() if "FSDP" not in k} | {"OMP_NUM_THREADS": "1"}
    kept = {name: tmp_path / f"{name}-kept" for name in ("one", "two")}
    words = ["-m", "layerbudget", *command(speaker, "ranks.json", tmp_path / "two", *rows, "--resume", str(kept["two"]))]
    for version, code in (("1", 2), ("2", 0)):
        start = [*launch, "--fsdp_version", version, *words]
        done = subprocess.run(start, capture_output=True, text=True, env=environment, timeout=500)
        assert bool(done.returncode) == bool(code), done.stderr[-3000:]
        assert code == 0 or "Version 1 of FSDP" in " ".join(done.stderr.split())
    assert main(command(speaker, "ranks.json", tmp_path / "one", *rows, "--resume", str(kept["one"]))) == 0
    assert same(tmp_path / "one", tmp_path / "two") < 1e-3
    for name, launch in (("one", launched), ("two", None)):
        continues(speaker, tmp_path / name, kept[name], rows, launch)
