"""What tracking the gains costs during fine-tuning, and what a run looks like.

    python -m benchmarks.scores tracker [--model DIR] [--tokenizer DIR] [--text FILE ...] [--steps 150] [--length 128] [--batch 8]

LoRA (rank 8, every Linear) on the calibration group of the standard library, or on text of one's own, with the Trainer of
transformers. The cost is the CPU time spent inside the tracker's own methods over the CPU time of everything else in the
same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from benchmarks.stamp import RESULTS, write_section
from transformers import Trainer, TrainingArguments

from layerbudget.data import stdlib
from layerbudget.finetuning.tracking import GainTracker


class Timed(GainTracker):
    """A tracker that adds up its own CPU time."""

    spent = 0.0

    def on_step_end(self, *arguments, **kwargs):
        """Time the parent's work."""
        start = time.process_time()
        super().on_step_end(*arguments, **kwargs)
        self.spent += time.process_time() - start


def load(path: str | None) -> transformers.PreTrainedModel:
    """The trained model, or one of the same shape with random weights."""
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=320, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, sliding_window=None, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


def rows(tokenizer: str, files: list[str] | None, length: int) -> list[dict[str, torch.Tensor]]:
    """Windows of ``length`` tokens."""
    encode = transformers.AutoTokenizer.from_pretrained(tokenizer)
    texts = [Path(f).read_text() for f in files] if files else [t for _, t in stdlib.read("calibration")[0]]
    ids = torch.tensor([i for text in texts for i in encode(text, verbose=False)["input_ids"]])
    windows = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": w, "labels": w} for w in windows]


def train(model, data, arguments, tracker: Timed, steps: int) -> dict:
    """Fine-tune; CPU seconds per step, without and with the tracker."""
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=arguments.batch, learning_rate=1e-3, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=options, train_dataset=data, callbacks=[tracker])
        start = time.process_time()
        loss = trainer.train().training_loss
        total = time.process_time() - start
    return {
        "steps": steps, "every": tracker.every, "loss": loss,
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "step_seconds": (total - tracker.spent) / steps, "ratio": total / (total - tracker.spent),
        "update_milliseconds": 1e3 * tracker.spent / max(1, len(tracker.history)),
    }  # fmt: skip


def main() -> None:
    """Run and write the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--text", nargs="+")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--short", type=int, default=20)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import peft

    data = rows(arguments.tokenizer or arguments.model, arguments.text, arguments.length)

    def lora():
        return peft.get_peft_model(load(arguments.model), peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))

    runs: list[dict] = []
    for name, build, options in (
        ("LoRA, Adam's state, every 10 steps", lora, {"every": 10}),
        ("LoRA, Adam's state, every step", lora, {"every": 1}),
        ("all weights, Adam's state, every 10 steps", lambda: load(arguments.model), {"every": 10}),
    ):
        main_run = not runs
        tracker = Timed(budget=12 * 8, **options)
        result = train(build(), data, arguments, tracker, arguments.steps if main_run else arguments.short)
        runs.append({"name": name, **result})
        print(json.dumps(runs[-1]), flush=True)
        if main_run:
            history = tracker.history
    text = ", ".join(Path(f).name for f in arguments.text) if arguments.text else "standard library, calibration group"
    weights = "trained" if arguments.model else "random"
    lines = [
        f"12-layer model ({weights} weights), {text}, {arguments.batch} x {arguments.length} tokens.", "",
        "| run | trainable | steps | step, CPU s | step time with / without | one update, ms |", "|---|---|---|---|---|---|",
        *(f"| {r['name']} | {r['trainable']:,} | {r['steps']} | {r['step_seconds']:.3f} | {r['ratio']:.4f} "
          f"| {r['update_milliseconds']:.1f} |" for r in runs),
        "", f"Main run ({history[0]['step']} to {history[-1]['step']} steps): regret of the plan made at the first update "
        f"{100 * history[-1]['relative_regret']:.1f} % at the end, {history[-1]['moved']} of 96 units would move, rank "
        f"correlation with the first weights {history[-1]['rank_correlation']:.2f}.",
    ]  # fmt: skip
    write_section("scores", "Cost of following gains during fine-tuning", lines, out=arguments.out, peers=("peft",))


if __name__ == "__main__":
    main()
