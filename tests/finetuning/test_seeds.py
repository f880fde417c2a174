"""Fine-tuning in rough weather: broken checkpoints, files of the user's, kills while results are replaced."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from tests.finetuning.test_finetune import encoder, task, tokenizer  # noqa: F401
from tests.killing import killed_at
from transformers import TrainerCallback

from layerbudget.errors import AlreadyExists
from layerbudget.finetuning import seeds
from layerbudget.finetuning.base import classifier_loader
from layerbudget.finetuning.finetune import finetune
from layerbudget.finetuning.protocol import Protocol
from layerbudget.finetuning.replan import Replan

SHORT = {"protocol": Protocol(lr=2e-2, epochs=3, batch=32, warmup=2, cutoff=48), "seeds": [0]}


class Stop(TrainerCallback):
    """Ends a run in the third epoch."""

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.epoch >= 3:
            raise KeyboardInterrupt


@pytest.fixture
def arguments(encoder, tokenizer, task):  # noqa: F811
    plan = zoo.linears(zoo.classifier(2), lambda n: 3 if "attention" in n else 0)
    return classifier_loader(encoder, 2), tokenizer, plan, task


def weights(out):
    held = load_file(out / "seed-0" / "adapter" / "adapter_model.safetensors")
    return {k: v.clone() for k, v in held.items()}  # they are mapped from a file that will be broken


def cut(arguments, out, *callbacks, keep=()):
    with pytest.raises(KeyboardInterrupt):
        finetune(*arguments, out, callbacks=lambda: (*(make() for make in keep), Stop()), **SHORT)
    return sorted((out / "seed-0" / "checkpoints").glob("checkpoint-*"), key=lambda f: int(f.name[11:]))


HARMS = {
    "manifest": lambda f: (f / "manifest.json").unlink(),
    "half": lambda f: (f / "optimizer.pt").write_bytes((f / "optimizer.pt").read_bytes()[:100]),
    "state": lambda f: (f / "trainer_state.json").unlink(),
    "flip": lambda f: (f / "adapter_model.safetensors").write_bytes(
        (f / "adapter_model.safetensors").read_bytes()[:-1] + b"\x55"
    ),
    "empty": lambda f: [shutil.rmtree(f), f.mkdir()],
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_broken_checkpoint_gives_way_to_the_one_before_or_to_a_new_beginning(arguments, tmp_path, caplog, harm, all_of_them):
    whole = finetune(*arguments, tmp_path / "whole", **SHORT)
    found = cut(arguments, tmp_path / "cut")
    assert len(found) == 2
    for checkpoint in found if all_of_them else found[-1:]:
        HARMS[harm](checkpoint)
    resumed = finetune(*arguments, tmp_path / "cut", resume=True, **SHORT)
    assert ("begins anew" in caplog.text) == all_of_them and "half written or broken" in caplog.text
    assert resumed["metrics"] == whole["metrics"]
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "result.json", "identity.json", "manifest.json"])
@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_a_finished_seed_that_is_broken_is_trained_again(arguments, tmp_path, caplog, name, content):
    quick = {**SHORT, "protocol": Protocol(lr=2e-2, epochs=1, batch=120, warmup=2, cutoff=48)}
    first = finetune(*arguments, tmp_path / "out", **quick)
    before = weights(tmp_path / "out")
    file = tmp_path / "out" / "seed-0" / name
    file.unlink() if content is None else file.write_bytes(content)
    again = finetune(*arguments, tmp_path / "out", resume=True, **quick)
    assert again["metrics"] == first["metrics"] and ("trained again" in caplog.text or name == "result.json")
    assert all(torch.equal(v, before[k]) for k, v in weights(tmp_path / "out").items())


def test_a_run_that_moved_its_ranks_resumes_to_the_same_result(arguments, tmp_path):
    def moving():
        return Replan(arguments[2], fraction=0.4)

    whole = finetune(*arguments, tmp_path / "whole", callbacks=lambda: (moving(),), **SHORT)
    last = cut(arguments, tmp_path / "cut", keep=(moving,))[-1]
    assert json.loads((last / "replan.json").read_text())["counts"]
    resumed = finetune(*arguments, tmp_path / "cut", callbacks=lambda: (moving(),), resume=True, **SHORT)
    assert resumed["metrics"] == whole["metrics"]
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert len({v.shape for v in one.values()}) > 4 and all(torch.equal(one[k], two[k]) for k in one)
    with pytest.raises(AlreadyExists, match="another callbacks"):
        finetune(*arguments, tmp_path / "cut", callbacks=lambda: (Replan(arguments[2], fraction=0.6),), resume=True, **SHORT)


def earlier(out):
    """Results as an earlier run leaves them, with files of the user's among them."""
    for seed in (0, 1):
        folder = out / f"seed-{seed}"
        (folder / "adapter").mkdir(parents=True)
        (folder / "adapter" / "adapter_config.json").write_text("{}")
        seeds.begin(folder, {"plan": "old"})
        seeds.finish(folder, {"identity": {"plan": "old"}, "seed": seed})
        (folder / "checkpoints" / "checkpoint-3").mkdir(parents=True)
        (folder / "checkpoints" / "checkpoint-3" / "x.pt").write_text("x")
    (out / "result.json").write_text('{"identity": {}, "schema_version": 1}')
    seeds.seal_summary(out)
    for name in ("notes.txt", "seed-0/notes.txt", "seed-0/adapter/README.md", "seed-1/checkpoints/mine"):
        (out / name).write_text("mine")
    (out / "seed-1" / "adapter" / "adapter_config.json").write_text("changed by me")


def replaced(out):
    with seeds.replacing(out):
        (out / "seed-0" / "adapter").mkdir(parents=True, exist_ok=True)
        seeds.begin(out / "seed-0", {"plan": "new"})
        seeds.finish(out / "seed-0", {"identity": {"plan": "new"}})
        (out / "result.json").write_text('{"identity": {}, "schema_version": 1}')
        seeds.seal_summary(out)


def files(out):
    return {f.relative_to(out).as_posix(): f.read_text() for f in out.rglob("*") if f.is_file()}


def test_replacing_keeps_what_the_user_wrote_and_changed(tmp_path):
    earlier(tmp_path)
    replaced(tmp_path)
    found = files(tmp_path)
    kept = [n for n, text in found.items() if text in ("mine", "changed by me")]
    assert sorted(kept) == [
        "notes.txt", "seed-0/adapter/README.md", "seed-0/notes.txt", "seed-1/adapter/adapter_config.json",
        "seed-1/checkpoints/mine",
    ]  # fmt: skip
    assert sorted(set(found) - set(kept)) == [
        "manifest.json",
        "result.json",
        "seed-0/identity.json",
        "seed-0/manifest.json",
        "seed-0/result.json",
    ]


@pytest.mark.parametrize("step", range(1, 60, 4))
def test_a_kill_while_results_are_replaced_loses_nothing_of_the_user(tmp_path, step):
    earlier(tmp_path)
    killed_at(step, lambda: replaced(tmp_path))
    replaced(tmp_path)
    found = files(tmp_path)
    assert sum(text in ("mine", "changed by me") for text in found.values()) == 5
    assert json.loads(found["seed-0/result.json"])["identity"] == {"plan": "new"}
    assert not [n for n in found if n.startswith(".")]


def test_a_result_that_is_not_ours_is_in_the_way(tmp_path):
    (tmp_path / "result.json").write_text('{"mine": 1}')
    for options in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(AlreadyExists, match="not written by a fine-tuning"):
            seeds.check_free(tmp_path, **options)
