"""The tracker against its formula, under a real Trainer, with and without Adam, full and LoRA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import zoo
from torch import nn
from transformers import Trainer, TrainingArguments

from layerbudget.errors import CoverageError, InvalidInput
from layerbudget.finetuning.tracking import GainTracker, moment_gain
from layerbudget.models.blocks import partition
from layerbudget.scores import Scores

peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")


def train(model, data, tmp_path, tracker, steps=6, **options):
    rows = [{"input_ids": ids, "labels": ids} for ids in data.input_ids]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=steps,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
        seed=0,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[tracker])
    trainer.train()
    return trainer


class Recorder(GainTracker):
    """Keeps every gradient, for the plain formula."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seen = getattr(self, "seen", [])
        self.seen.append([[p.grad.double().clone() for p in group] for group in self._groups.values()])


def plain(seen, b1, b2, damping):
    """Weighted means written out; gain and floor of every block."""
    t = len(seen)
    w1 = np.array([(1 - b1) * b1 ** (t - 1 - i) for i in range(t)]) / (1 - b1**t)
    w2 = np.array([(1 - b2) * b2 ** (t - 1 - i) for i in range(t)]) / (1 - b2**t)
    rows = []
    for k in range(len(seen[0])):
        g = torch.stack([torch.cat([x.reshape(-1) for x in step[k]]) for step in seen]).numpy()
        m, v = w1 @ g, w2 @ g**2
        tau = damping * v.mean()
        rows.append((np.sum(m**2 / (v + tau)), np.sum(w1**2) * np.sum(v / (v + tau))))
    return np.array(rows).T


def test_gain_and_floor_are_the_formula(mistral, data, tmp_path):
    tracker = Recorder(partition(mistral), every=3, damping=0.5)
    train(mistral, data, tmp_path, tracker)
    assert [h["step"] for h in tracker.history] == [3, 6]
    gain, floor = plain(tracker.seen, 0.9, 0.999, 0.5)
    assert tracker.history[-1]["gain"] == pytest.approx(gain, rel=1e-4)
    assert tracker.history[-1]["floor"] == pytest.approx(floor, rel=1e-4)


def test_floor_is_what_random_signs_give(mistral):
    """Gradients without a mean: the gain averages to the floor."""
    p = mistral.model.layers[0].mlp.up_proj.weight
    torch.manual_seed(0)
    scale = torch.rand_like(p) ** 4
    ratios = []
    for _ in range(40):
        optimizer = torch.optim.Adam([p], lr=0.0, betas=(0.9, 0.9))
        for _ in range(30):
            p.grad = scale * (2.0 * torch.randint(0, 2, p.shape) - 1)
            optimizer.step()
        gain, floor = moment_gain(optimizer, [p], 1.0)
        ratios.append(gain / floor)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)


def test_lora_parameters_find_their_layer(mistral, data, tmp_path):
    model = peft.get_peft_model(mistral, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    tracker = GainTracker(every=2)
    train(model, data, tmp_path, tracker)
    assert [b.name for b in tracker.blocks] == [f"model.layers.{i}" for i in range(3)]
    assert all("lora_" in m.name for b in tracker.blocks for m in b.modules) and len(tracker.blocks[0].modules) == 4
    assert len(tracker.history) == 3


def test_training_is_not_changed(data, tmp_path):
    models = [zoo.mistral(), zoo.mistral()]
    tracker = GainTracker(every=1)
    train(models[0], data, tmp_path, tracker)
    rows = [{"input_ids": ids, "labels": ids} for ids in data.input_ids]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=6,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
        seed=0,
    )
    Trainer(model=models[1], args=arguments, train_dataset=rows).train()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert [h["step"] for h in tracker.history] == [1, 2, 3, 4, 5, 6]


def test_layer_that_stops_learning_loses_its_weight(mistral, data, tmp_path, caplog):
    """One layer's gradients vanish after step 4: the first plan becomes wrong and the tracker says so."""
    tracker = GainTracker(partition(mistral), every=2, tolerance=0.01)

    def silence(grad):
        return torch.zeros_like(grad) if len(tracker.history) >= 2 else grad

    for p in mistral.model.layers[0].parameters():
        p.register_hook(silence)
    with caplog.at_level("INFO", logger="layerbudget.finetuning.tracking"):
        train(mistral, data, tmp_path, tracker, steps=40, adam_beta1=0.5, adam_beta2=0.5)
    first, last = tracker.history[0], tracker.history[-1]
    assert first["regret"] == pytest.approx(0.0, abs=1e-12) and first["moved"] == 0
    assert last["weights"][0] < 1e-3 < first["weights"][0]
    assert last["relative_regret"] > 0.01 and last["moved"] > 0 and "would move" in caplog.text
    assert sum(last["counts"]) == 15


def test_regret_against_given_scores(mistral, data, tmp_path):
    blocks = partition(mistral)
    initial = Scores.from_values(blocks, {b.name: v for b, v in zip(blocks, (1.0, 1.0, 100.0), strict=True)})
    tracker = GainTracker(blocks, every=3, initial=initial, budget=30)
    train(mistral, data, tmp_path, tracker)
    assert tracker.history[0]["regret"] > 0 and sum(tracker.history[0]["counts"]) == 30


def test_latest_gains_as_scores(mistral, data, tmp_path):
    tracker = GainTracker(partition(mistral), every=3)
    with pytest.raises(InvalidInput, match="no update"):
        tracker.scores()
    train(mistral, data, tmp_path, tracker)
    scores = tracker.scores()
    last = tracker.history[-1]
    assert scores.names == [b.name for b in partition(mistral)] and scores.extra["gain"] == last["gain"]
    assert scores.weights() == pytest.approx(last["weights"])  # a plan made from them is the tracker's own
    excess = np.maximum(np.array(last["gain"]) - last["floor"], 0)
    assert scores.values() == pytest.approx(excess if excess.any() else last["gain"])
    scores.save(tmp_path / "scores.json")
    assert Scores.load(tmp_path / "scores.json").digest == scores.digest


def test_frozen_block_is_refused(mistral, data, tmp_path):
    for p in mistral.model.layers[1].parameters():
        p.requires_grad_(False)
    with pytest.raises(CoverageError, match="layers.1"):
        train(mistral, data, tmp_path, GainTracker(partition(mistral)))


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": 1.5}, {"damping": 0.0}, {"budget": 0}, {"tolerance": -1}, {"tolerance": float("nan")}]
)
def test_refusals(options):
    with pytest.raises(InvalidInput):
        GainTracker(**options)


def test_similar_layer_names_are_told_apart(tmp_path):
    """model.layers.1 is not model.layers.10."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(11)])
    tracker = GainTracker(partition(model))
    tracker.on_train_begin(None, None, None, model=model)
    assert [len(g) for g in tracker._groups.values()] == [1] * 11


def test_initial_scores_of_other_blocks_and_an_optimizer_without_moments_are_refused_at_the_start(mistral, data, tmp_path):
    others = partition(mistral, by="linear")
    initial = Scores.from_values(others, {b.name: 1.0 for b in others})
    with pytest.raises(InvalidInput, match="initial scores"):
        train(mistral, data, tmp_path, GainTracker(partition(mistral), initial=initial))
    with pytest.raises(InvalidInput, match="keeps no squares"):
        train(mistral, data, tmp_path, GainTracker(partition(mistral)), optim="sgd")
