"""Fine-tuning end to end on tiny models: a head and a causal LM, resume, comparison, refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from tests.cards import card_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.integrations import integration_utils

from layerbudget.data.tasks import load_task
from layerbudget.errors import AlreadyExists, CorruptFile, InvalidInput, MissingDependency, ModelMismatch, NotFound
from layerbudget.finetuning.adapters import NamedLoader, adapt, classifier_loader, fit_names, started
from layerbudget.finetuning.finetune import compare, finetune
from layerbudget.finetuning.protocol import PRESETS, Protocol
from layerbudget.finetuning.rows import Rows

WORDS = ("good", "bad", "the", "a", "film", "was", "is", "very", "so", "Answer", ":", "yes", "no", "one", "of", ".", ",")


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<unk>", "</s>", *WORDS])}
    tok = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Sentences whose label is one word of theirs."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(120):
        word = ("bad", "good")[i % 2]
        filler = " ".join(rng.choice(["the", "a", "film", "was", "is", "very", "so"], size=4))
        rows.append({"text": f"{filler} {word} , {i}", "label": "yes" if word == "good" else "no"})
    path = tmp_path_factory.mktemp("task") / "words.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_task(str(path))


QUICK = Protocol(lr=2e-2, epochs=10, batch=16, warmup=2, cutoff=48)


@pytest.fixture(scope="module")
def encoder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    zoo.classifier(2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tuned(arguments, out, **options):
    load, tokenizer, plan, task = arguments
    return finetune(load, plan, task, out, tokenizer=tokenizer, **options)


def test_a_head_learns_and_the_results_are_kept(encoder, tokenizer, task, tmp_path):
    plan = zoo.linears(zoo.classifier(2), lambda n: 4 if "attention" in n else 0)
    out = tmp_path / "out"
    result = tuned((classifier_loader(encoder, 2), tokenizer, plan, task), out, protocol=QUICK, seeds=[0, 1])
    accuracy = result["metrics"]["held_out"]["accuracy"]
    assert accuracy["value"] > 0.9 and len(accuracy["by_seed"]) == 2 and accuracy["stderr"] is not None
    stored = json.loads((out / "seed-0" / "result.json").read_text())
    truth = json.loads((out / "labels.json").read_text())["held_out"]
    assert len(stored["predictions"]["held_out"]) == len(truth) == len(task.evaluation["held_out"])
    assert np.mean(np.array(stored["predictions"]["held_out"]) == truth) == accuracy["by_seed"][0]
    assert (out / "seed-1" / "adapter" / "adapter_model.safetensors").is_file()
    card = card_of(out / "seed-1" / "adapter")
    assert f"| {accuracy['by_seed'][1]:.4f} |" in card.text and card.data.library_name == "peft"
    assert card.data.pipeline_tag == "text-classification" and "AutoModelForSequenceClassification" in card.text

    with pytest.raises(AlreadyExists, match="overwrite=True"):
        tuned((classifier_loader(encoder, 2), tokenizer, plan, task), out, protocol=QUICK)

    untrained = Protocol(lr=1e-9, epochs=1, batch=16)
    other = {"protocol": untrained, "seeds": [0, 1], "against": out}
    idle = tuned((classifier_loader(encoder, 2), tokenizer, plan, task), tmp_path / "idle", **other)
    assert idle["against"] == json.loads((tmp_path / "idle" / "against.json").read_text()) == compare(tmp_path / "idle", out)
    with pytest.raises(InvalidInput, match="shared seed"):
        tuned((classifier_loader(encoder, 2), tokenizer, plan, task), tmp_path / "other", protocol=untrained, seeds=[7])
        compare(out, tmp_path / "other")
    tests = compare(out, tmp_path / "idle")["held_out"]
    assert tests["samples"]["difference"] > 0.1 and "out" in tests["samples"]["sentence"]
    assert tests["seeds"]["n"] == 2
    with pytest.raises(NotFound, match="result.json"):
        compare(out, tmp_path)


def test_trackers_of_transformers_get_the_loss(encoder, tokenizer, task, tmp_path, monkeypatch, capsys):
    """What is logged goes to the named tracker, one run per seed; what it prints stays off stdout. Numbers do not change."""
    seen = []

    class Tracker(TrainerCallback):
        def __init__(self):
            print("the tracker speaks")

        def on_log(self, args, state, control, logs=None, **kwargs):
            print("the tracker speaks")
            seen.append((args.run_name, logs))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", Tracker)
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["trackio"])
    plan = zoo.linears(classifier_loader(encoder, 2)(0), 2)
    arguments = (classifier_loader(encoder, 2), tokenizer, plan, task)
    short = dataclasses.replace(QUICK, epochs=2)
    plain = tuned(arguments, tmp_path / "plain", protocol=short)
    told = tuned(arguments, tmp_path / "told", protocol=short, report_to=["trackio"])
    assert {name for name, _ in seen} == {"seed-0"} and any("loss" in logs for _, logs in seen)
    assert "speaks" not in capsys.readouterr().out and told["metrics"] == plain["metrics"]
    for name, error, words in (
        ("wandb", MissingDependency, "pip install wandb"),
        ("wandbb", InvalidInput, "no tracker"),
        ("tensorboard", InvalidInput, "keep nothing"),
    ):
        with pytest.raises(error, match=words):
            tuned(arguments, tmp_path / "no", protocol=QUICK, report_to=[name])
    assert not (tmp_path / "no").exists()


def test_the_protocol_sets_how_the_scale_follows_the_rank(encoder):
    """A rank of 2 and one of 8 under rsLoRA differ by a factor of two in scale, under one ratio not at all."""
    plan = zoo.linears(zoo.classifier(2), lambda n: 2 if "query" in n else 8)
    for policy, quotient in (("rslora", 2.0), ("constant-alpha", 4.0), ("constant-ratio", 1.0)):
        model = adapt(classifier_loader(encoder, 2)(0), plan, Protocol(alpha_policy=policy, ratio=3))
        layers = [m for m in model.modules() if hasattr(m, "lora_A") and "default" in m.lora_A]
        scales = {m.r["default"]: m.scaling["default"] for m in layers}
        assert scales.keys() == {2, 8} and scales[2] / scales[8] == pytest.approx(quotient), policy
        assert scales[8] <= 3 <= scales[2]
    with pytest.raises(InvalidInput, match="one of constant-ratio"):
        Protocol(alpha_policy="linear")


def test_a_base_in_bfloat16_trains_in_float32_and_checkpointing_changes_nothing(encoder, tokenizer, task, tmp_path):
    """Adapters and head of a half-precision base stay float32; recomputed activations give the same adapter."""
    plan = zoo.linears(zoo.classifier(2), lambda n: 4 if "attention" in n else 0)
    load = classifier_loader(encoder, 2, dtype="bfloat16", device="auto")
    half = dataclasses.replace(QUICK, epochs=6)
    found = tuned((load, tokenizer, plan, task), tmp_path / "half", protocol=half)
    assert found["metrics"]["held_out"]["accuracy"]["value"] > 0.8
    model = adapt(load(0), plan, half)
    kinds = {
        p.requires_grad: {q.dtype for q in model.parameters() if q.requires_grad == p.requires_grad} for p in model.parameters()
    }
    assert kinds == {True: {torch.float32}, False: {torch.bfloat16}}

    short, saved = dataclasses.replace(QUICK, epochs=1), []
    for name, checkpointing in (("kept", False), ("again", True)):
        tuned(
            (classifier_loader(encoder, 2), tokenizer, plan, task), tmp_path / name, protocol=short, checkpointing=checkpointing
        )
        saved.append(load_file(tmp_path / name / "seed-0" / "adapter" / "adapter_model.safetensors"))
    assert all(torch.allclose(value, saved[1][key], atol=1e-6) for key, value in saved[0].items())


def test_a_protocol_is_changed_by_name_and_type():
    assert Protocol().changed({"dropout": 0.1, "cutoff": 512, "ratio": 1}) == Protocol(dropout=0.1, cutoff=512, ratio=1)
    for values, message in (
        ({"droput": 0.1}, "no option droput"),
        ({"cutoff": 12.5}, "a whole number"),
        ({"dropout": "much"}, "a number"),
        ({"on_prompt": 1}, "true or false"),
        ({"dropout": 1.0}, "lies in"),
        ({"warmup": -1}, "lies in"),
        ({"clip": 0}, "positive"),
        ({"lr": float("inf")}, "positive"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Protocol().changed(values)


def test_where_and_how_the_base_is_held_is_checked(encoder, monkeypatch, tmp_path, tokenizer, task):
    for options in ({"device": "tpu"}, {"dtype": "float16"}):
        with pytest.raises(InvalidInput, match="one of auto, cpu, cuda|float32 or bfloat16"):
            classifier_loader(encoder, 2, **options)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="'cuda' cannot be used"):
            classifier_loader(encoder, 2, device="cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = (classifier_loader(encoder, 2), tokenizer, zoo.linears(zoo.classifier(2), 2), task)
    with pytest.raises(InvalidInput, match="one of 2 processes"):
        tuned(given, tmp_path / "x", protocol=QUICK)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_the_head_of_an_encoder_in_four_bits_is_trained(tokenizer, task, tmp_path):
    encoder = zoo.classifier(2, hidden_size=64, intermediate_size=128)
    plan = zoo.linears(encoder, lambda n: 4 if "attention" in n else 0)
    encoder.save_pretrained(tmp_path / "bert")
    load = classifier_loader(str(tmp_path / "bert"), 2, dtype="bfloat16", four_bit=True)
    found = tuned((load, tokenizer, plan, task), tmp_path / "out", protocol=QUICK)
    assert found["metrics"]["held_out"]["accuracy"]["value"] > 0.8
    saved = load_file(tmp_path / "out" / "seed-0" / "adapter" / "adapter_model.safetensors")
    assert {v.dtype for v in saved.values()} == {torch.float32} and any("classifier" in k for k in saved)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("start", ["default", "gradients"])
def test_a_base_in_four_bits_is_fine_tuned(tokenizer, task, tmp_path, start):
    big = zoo.adaptable(2, hidden_size=128, intermediate_size=128, head_dim=32, num_key_value_heads=4)
    plan = zoo.linears(big, lambda n: 4 if n.endswith(("q_proj", "down_proj")) else 0)
    big.save_pretrained(tmp_path / "lm")
    load = classifier_loader(str(tmp_path / "lm"), 2, dtype="bfloat16", four_bit=True)
    quick = Protocol(lr=1e-2, epochs=1, batch=16, warmup=2, cutoff=48, start=start)
    found = tuned((load, tokenizer, plan, task), tmp_path / "out", protocol=quick)
    assert np.isfinite(found["metrics"]["held_out"]["accuracy"]["value"])
    assert found["trained_parameters"] == 2 * 4 * (2 * 128 + 2 * 128)


def test_a_start_in_the_gradients_directions(encoder, tokenizer, task):
    """Rows of A are the top right singular vectors of the task's gradient, taken independently by autograd; B is zero."""
    load = classifier_loader(encoder, 2)
    plan = zoo.linears(zoo.classifier(2), lambda n: 4 if "attention" in n else 0)
    rows = Rows(task, tokenizer, causal=False, cutoff=16)
    protocol = Protocol(start="gradients")
    model = started(load(0), plan, protocol, rows, task)

    plain = load(0).eval()
    count = len(task.train)
    assert count <= 128
    batch = rows.collate(rows.encoded(task.train))
    plain(**batch).loss.backward()
    name = next(m for b in fit_names(plan, plain).blocks if b.count for m in b.modules)
    expected = torch.linalg.svd(plain.get_submodule(name).weight.grad)[2][:4]
    leaf = model.get_base_model().get_submodule(name)
    a = leaf.lora_A["default"].weight.detach()
    assert torch.allclose((a / a.norm(dim=1, keepdim=True) @ expected.T).abs(), torch.eye(4), atol=1e-3)
    torch.testing.assert_close(a.norm(dim=1), a.norm(dim=1).mean().expand(4))  # one factor for the module
    assert not torch.isclose(a.norm(dim=1).mean(), torch.tensor(3**-0.5), rtol=0.05)
    assert not leaf.lora_B["default"].weight.any()
    with pytest.raises(InvalidInput, match="A plan of lora-experts does not read start"):
        started(load(0), dataclasses.replace(plan, kind="lora-experts", payload=None), protocol, rows, task)
    with pytest.raises(InvalidInput, match="one of default, gradients"):
        Protocol(start="svd")


SHORT = {"protocol": Protocol(lr=2e-2, epochs=3, batch=32, warmup=2, cutoff=48), "seeds": [0]}


@pytest.fixture(scope="module")
def arguments(encoder, tokenizer, task):
    plan = zoo.linears(zoo.classifier(2), lambda n: 3 if "attention" in n else 0)
    return classifier_loader(encoder, 2), tokenizer, plan, task


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """Folder and result of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    return folder, tuned(arguments, folder, **SHORT)


class Stop(TrainerCallback):
    """Ends a run in the third epoch."""

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.epoch >= 3:
            raise KeyboardInterrupt


def cut(arguments, out, resume, **options):
    """Checkpoints of a run that was stopped."""
    with pytest.raises(KeyboardInterrupt):
        tuned(arguments, out, resume=resume, callbacks=[Stop()], **{**SHORT, **options})
    assert not out.exists()
    return checkpoints(resume)


def checkpoints(resume):
    return sorted((resume / "seed-0" / "checkpoints").glob("checkpoint-*"), key=lambda f: int(f.name[11:]))


@pytest.fixture(scope="module")
def stopped(arguments, tmp_path_factory):
    """What a run keeps that was stopped behind its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    assert len(cut(arguments, folder / "cut", folder / "kept")) == 2
    return folder / "kept"


def weights(out):
    held = load_file(out / "seed-0" / "adapter" / "adapter_model.safetensors")
    return {k: v.clone() for k, v in held.items()}  # they are mapped from a file that will be broken


def same_weights(one, two):
    one, two = weights(one), weights(two)
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_overwriting_removes_earlier_results_and_nothing_else(arguments, tmp_path):
    out, quick = tmp_path / "out", {"protocol": Protocol(lr=1e-3, epochs=1, batch=32)}
    tuned(arguments, out, seeds=[0, 1], **quick)
    (out / "notes.txt").write_text("keep")
    before = (out / "seed-0" / "result.json").read_text()

    def broken(seed):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):  # nothing is lost to a run that fails
        tuned((broken, *arguments[1:]), out, seeds=[2, 3], overwrite=True, **quick)
    assert (out / "seed-0" / "result.json").read_text() == before and (out / "result.json").is_file()
    tuned(arguments, out, seeds=[2], overwrite=True, **quick)
    left = sorted(f.relative_to(out).as_posix() for f in out.rglob("*") if f.is_file() and f.name != "README.md")
    adapter = [f"seed-2/adapter/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")]
    assert left == ["labels.json", "manifest.json", "notes.txt", "plan.json", "result.json", *adapter, "seed-2/result.json"]


HARMS = {
    "manifest": lambda f: (f / "manifest.json").unlink(),
    "half": lambda f: (f / "optimizer.pt").write_bytes((f / "optimizer.pt").read_bytes()[:100]),
    "flip": lambda f: (f / "adapter_model.safetensors").write_bytes(
        (f / "adapter_model.safetensors").read_bytes()[:-1] + b"\x55"
    ),
}


@pytest.mark.parametrize("harm", [None, *HARMS, "all"])
def test_a_stopped_run_continues_to_the_same_result(arguments, whole, stopped, tmp_path, caplog, harm):
    """From its last checkpoint, from the one before where that is broken, anew where all are."""
    shutil.copytree(stopped, tmp_path / "kept")
    found = checkpoints(tmp_path / "kept")
    for checkpoint in found if harm == "all" else found[-1:]:
        HARMS.get("half" if harm == "all" else harm, lambda f: None)(checkpoint)
    resumed = tuned(arguments, tmp_path / "cut", resume=tmp_path / "kept", **SHORT)
    assert ("begins anew" in caplog.text) == (harm == "all") and ("half written or broken" in caplog.text) == bool(harm)
    folder, expected = whole
    assert resumed["metrics"] == expected["metrics"] and same_weights(folder, tmp_path / "cut")
    losses = [json.loads((d / "seed-0" / "result.json").read_text())["training_loss"] for d in (folder, tmp_path / "cut")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)  # the Trainer's own mean is over the resumed steps, divided by all


def test_finished_seeds_are_kept_and_broken_ones_trained_again(arguments, tmp_path, caplog):
    quick = {"protocol": Protocol(lr=2e-2, epochs=1, batch=120, warmup=2, cutoff=48), "resume": tmp_path / "kept"}
    first = tuned(arguments, tmp_path / "one", **quick)
    kept = tmp_path / "kept" / "seed-0"
    before = (kept / "result.json").stat().st_mtime_ns
    two = tuned(arguments, tmp_path / "two", seeds=[0, 1], **quick)
    assert two["seeds"] == [0, 1] and (kept / "result.json").stat().st_mtime_ns == before
    assert two["metrics"]["held_out"]["accuracy"]["by_seed"][0] == first["metrics"]["held_out"]["accuracy"]["value"]
    harms = {"adapter/adapter_model.safetensors": b"{", "manifest.json": None, "result.json": b"{"}
    for i, (name, content) in enumerate(harms.items()):
        (kept / name).unlink() if content is None else (kept / name).write_bytes(content)
        caplog.clear()
        again = tuned(arguments, tmp_path / f"again-{i}", **quick)
        assert again["metrics"] == first["metrics"] and same_weights(tmp_path / "one", tmp_path / f"again-{i}")
        assert "trained again" in caplog.text


def test_seeds_of_two_runs_are_not_averaged(arguments, encoder, tmp_path):
    quick = {"protocol": Protocol(lr=1e-3, epochs=1, batch=120), "resume": tmp_path / "kept"}
    tuned(arguments, tmp_path / "out", **quick)
    half = classifier_loader(encoder, 2, dtype="bfloat16")
    other = zoo.linears(zoo.classifier(2), lambda n: 2 if "attention" in n else 0)
    for given, changed in (
        ((half, *arguments[1:]), {}),
        ((lambda seed: half(seed), *arguments[1:]), {}),  # a function that says nothing of what it loads
        ((*arguments[:2], other, arguments[3]), {}),
        (arguments, {"bf16": True}),
        (arguments, {"protocol": Protocol(lr=1e-4, epochs=1)}),
    ):
        with pytest.raises(ModelMismatch, match="holds a run with another plan"):
            tuned(given, tmp_path / "other", **{**quick, **changed})
    assert not (tmp_path / "other").exists()
    with pytest.raises(InvalidInput, match=r"seeds are \[0, 0\]"):
        tuned(arguments, tmp_path / "other", protocol=QUICK, seeds=[0, 0])


def test_a_causal_lm_is_trained_with_experts_and_judged_by_likelihood(tokenizer, task, tmp_path):
    model = zoo.adaptable(2, eos_token_id=2, bos_token_id=None)
    model.save_pretrained(tmp_path / "lm")
    plan = zoo.layers(model, [2, 3])
    protocol = Protocol(lr=2e-2, epochs=8, batch=16, warmup=2, cutoff=48, balance=0.001)
    load = classifier_loader(str(tmp_path / "lm"), 2)
    result = tuned((load, tokenizer, plan, task), tmp_path / "out", protocol=protocol)
    assert result["kind"] == "lora-experts"
    stored = json.loads((tmp_path / "out" / "seed-0" / "result.json").read_text())
    assert stored["training_loss"] < 3.9  # a uniform guess over the vocabulary costs log 61 = 4.1
    from peft import PeftModel

    trained = PeftModel.from_pretrained(load(0), tmp_path / "out" / "seed-0" / "adapter").eval()
    for example, predicted in zip(task.evaluation["held_out"], stored["predictions"]["held_out"], strict=True):
        chances = []
        for answer in task.answers:
            said = tokenizer(answer)["input_ids"] + [2]
            ids = (tokenizer(example.prompt)["input_ids"] + said)[-48:]
            with torch.no_grad():
                table = trained(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            chances.append(sum(table[i - 1, ids[i]].item() for i in range(len(ids) - len(said), len(ids))))
        if abs(chances[0] - chances[1]) > 1e-4:
            assert predicted == int(np.argmax(chances))


def test_prompt_and_answer_of_a_causal_row(tokenizer, task):
    example = task.train[0]
    row = Rows(task, tokenizer, causal=True, cutoff=200).encode(example)
    answered = sum(label != -100 for label in row["labels"])
    assert tokenizer.decode(row["input_ids"][-answered:]) == f"Answer : {task.labels[example.label]} </s>"
    short = Rows(task, tokenizer, causal=True, cutoff=12, on_prompt=True).encode(example)
    assert len(short["input_ids"]) == 12 and short["labels"] == short["input_ids"]
    assert short["input_ids"][-answered:] == row["input_ids"][-answered:]


def test_a_plan_of_a_bare_encoder_fits_the_model_with_a_head():
    from transformers import BertModel

    bare = BertModel(zoo.classifier(2).config)
    plan = zoo.layers(bare, [2, 1])
    assert plan.blocks[0].modules[0].startswith("encoder.layer.0.")
    model = zoo.classifier(2)
    assert fit_names(plan, model).blocks[0].modules[0].startswith("bert.encoder.layer.0.")
    adapted = adapt(model, plan, Protocol())
    assert any("pooler.modules_to_save" in n for n, p in adapted.named_parameters() if p.requires_grad)


def test_the_papers_protocol_and_impossible_ones():
    paper = PRESETS["paper"]
    assert (paper.lr, paper.alpha, paper.dropout, paper.cutoff, paper.warmup, paper.epochs) == (3e-4, 16, 0.05, 256, 100, 5)
    with pytest.raises(InvalidInput, match="must be positive"):
        Protocol(lr=0.0)
    with pytest.raises(InvalidInput, match="split"):
        Protocol(batch=10, accumulation=3)


def test_accumulation_with_a_head_is_refused(encoder, tokenizer, task, tmp_path):
    given = (classifier_loader(encoder, 2), tokenizer, zoo.linears(zoo.classifier(2), 2), task)
    with pytest.raises(InvalidInput, match="classification head"):
        tuned(given, tmp_path / "x", protocol=Protocol(batch=16, accumulation=2))


@pytest.mark.parametrize("spare", [0, -1, 1])
def test_an_answer_as_long_as_the_cutoff_leaves_no_prompt(tokenizer, task, spare):
    answered = sum(label != -100 for label in Rows(task, tokenizer, causal=True, cutoff=200).encode(task.train[0])["labels"])
    row = Rows(task, tokenizer, causal=True, cutoff=answered + spare).encode(task.train[0])
    assert len(row["input_ids"]) == answered + max(spare, 0)


def test_a_folder_of_something_else_is_no_comparison(tmp_path):
    for name, record in (("demo", '{"rows": []}'), ("ours", '{"schema_version": 1, "rows": []}'), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(record)
        with pytest.raises(CorruptFile, match="result.json"):
            compare(tmp_path / name, tmp_path / name)


@pytest.mark.parametrize(
    ("seed", "harm", "refused", "said"),
    [
        (7, {}, InvalidInput, r"with seeds \[7\]"),
        (0, {"result.json": ("task", "other")}, InvalidInput, "of other rows"),
        (0, {"result.json": ("seeds", 0)}, CorruptFile, "holds no fine-tuning"),
        (0, {"seed-0/result.json": None}, NotFound, "has no seed-0/result.json"),
        (0, {"seed-0/result.json": ("metrics", {})}, CorruptFile, "does not have the accuracy"),
        (0, {"seed-0/result.json": ("predictions", {"held_out": [1]})}, CorruptFile, "the 12 rows of held_out"),
        (0, {"seed-0/result.json": ("predictions", [1])}, CorruptFile, "does not parse"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_training(arguments, whole, tmp_path, seed, harm, refused, said):
    def untouched(seed):
        raise AssertionError("a model was loaded")

    shutil.copytree(whole[0], tmp_path / "other")
    for name, change in harm.items():
        file = tmp_path / "other" / name
        record = json.loads(file.read_text())
        file.unlink()
        if change is not None:
            key, value = change
            (record["identity"] if key == "task" else record)[key] = value
            file.write_text(json.dumps(record))
    given = (NamedLoader(untouched, {}), *arguments[1:])
    with pytest.raises(refused, match=said):
        tuned(given, tmp_path / "out", **{**SHORT, "seeds": [seed]}, against=tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_a_partner_that_is_lost_while_training_costs_the_comparison_alone(arguments, whole, tmp_path, caplog):
    class Lose(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            (tmp_path / "other" / "seed-0" / "result.json").unlink()

    shutil.copytree(whole[0], tmp_path / "other")
    brief = {"protocol": Protocol(epochs=1, batch=120), "callbacks": [Lose()], "against": tmp_path / "other"}
    result = tuned(arguments, tmp_path / "out", **brief)
    assert "without the comparison" in caplog.text and "against" not in result
    assert (tmp_path / "out" / "seed-0" / "adapter").is_dir() and not (tmp_path / "out" / "against.json").exists()
