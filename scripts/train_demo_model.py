"""Train the embedded model on the standard library's source code.

    python scripts/train_demo_model.py --work WORK --out src/layerbudget/demo/model

Seeded, resumable (rerun the same command), with a progress bar and a log. Two stages: a byte-level BPE tokenizer,
then a Mistral-architecture model in fp32 with bf16 autocast; the result is stored as bf16 safetensors with a card
that states held-out bits per byte beside a unigram model's. The cost of the committed weights stands in the card.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from layerbudget.data import stdlib


def build_tokenizer(path: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train (or load) the byte-level BPE tokenizer on the training group."""
    if not (path / "tokenizer.json").exists():
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<s>", "</s>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tok.train_from_iterator((text for _, text in stdlib.read("training")[0]), trainer)
        tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
        fast.save_pretrained(path)
    return PreTrainedTokenizerFast.from_pretrained(path)


def token_stream(tokenizer: PreTrainedTokenizerFast, group: str) -> tuple[np.ndarray, int]:
    """Token stream (documents joined with the BOS token) and the number of bytes that it encodes."""
    documents, _ = stdlib.read(group)
    ids = [np.asarray(e.ids, dtype=np.uint16) for e in tokenizer.backend_tokenizer.encode_batch([t for _, t in documents])]
    return np.concatenate(ids), sum(len(t.encode()) for _, t in documents)


def build_model(vocabulary: int, seed: int) -> MistralForCausalLM:
    """Return the 12-layer grouped-query model, randomly initialised (tied embeddings)."""
    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=vocabulary, hidden_size=192, intermediate_size=320, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rope_theta=10000.0, sliding_window=None,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.02,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    model.set_attn_implementation("eager")  # the fused CPU kernel's backward pass is slower at this length
    return model


@torch.no_grad()
def bits_per_byte(model: MistralForCausalLM, stream: np.ndarray, n_bytes: int, length: int = 256) -> float:
    """Bits per byte on non-overlapping windows of the whole stream."""
    model.eval()
    rows = len(stream) // length
    ids = torch.from_numpy(stream[: rows * length].astype(np.int64)).view(rows, length)
    total = 0.0
    for chunk in ids.split(32):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(chunk).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum").item()
    model.train()
    per_token = total / (rows * (length - 1))
    return per_token * len(stream) / n_bytes / math.log(2)


def unigram_bits_per_byte(train: np.ndarray, held_out: np.ndarray, n_bytes: int, vocabulary: int) -> float:
    """Bits per byte of an add-one unigram model over the same tokens."""
    p = (np.bincount(train, minlength=vocabulary) + 1.0) / (len(train) + vocabulary)
    return float(-np.log2(p[held_out]).sum() / n_bytes)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then cosine decay to a twentieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    t = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * t)))


def train(arguments: argparse.Namespace) -> None:
    """Run both stages and write the model folder."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(work / "tokenizer", arguments.vocabulary)
    train_ids, _ = token_stream(tokenizer, "training")
    eval_ids, eval_bytes = token_stream(tokenizer, "evaluation")
    model = build_model(len(tokenizer), arguments.seed)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
    )
    start, seconds = 0, 0.0
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, seconds = state["step"], state["seconds"]
    forward = torch.compile(model) if arguments.compile else model
    columns = (
        TextColumn("{task.description}"),
        *Progress.get_default_columns()[1:3],
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    log = (work / "log.jsonl").open("a")
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=arguments.steps, completed=start)
        began, smooth = time.time(), None
        for step in range(start, arguments.steps):
            rng = np.random.default_rng((arguments.seed, step))
            starts = rng.integers(0, len(train_ids) - arguments.length, arguments.batch)
            ids = torch.from_numpy(np.stack([train_ids[s : s + arguments.length] for s in starts]).astype(np.int64))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, arguments.steps, arguments.lr)
            with torch.autocast("cpu", torch.bfloat16):
                logits = forward(ids).logits
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            progress.update(bar, advance=1, description=f"training loss {smooth:.3f}")
            if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
                elapsed = seconds + time.time() - began
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "seconds": elapsed}
                torch.save(state, checkpoint.with_suffix(".tmp"))
                os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
                held = bits_per_byte(model, eval_ids[: 256 * 128], int(eval_bytes * 256 * 128 / len(eval_ids)))
                log.write(json.dumps({"step": step + 1, "loss": smooth, "bits_per_byte": held, "seconds": elapsed}) + "\n")
                log.flush()
        seconds += time.time() - began
    export(model, tokenizer, train_ids, eval_ids, eval_bytes, seconds, arguments)


def export(model, tokenizer, train_ids, eval_ids, eval_bytes, seconds, arguments) -> None:
    """Store bf16 weights, the tokenizer and the model card; measure the *stored* weights."""
    model = model.to(torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    stored = MistralForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    held = bits_per_byte(stored, eval_ids, eval_bytes)
    unigram = unigram_bits_per_byte(train_ids, eval_ids, eval_bytes, len(tokenizer))
    numel = sum(p.numel() for p in stored.parameters())
    tokens = arguments.steps * arguments.batch * arguments.length
    card = f"""# The embedded model

A Mistral-architecture causal language model (12 decoder layers, hidden size 192, 6 query heads and 2 key/value heads of
size 32, MLP width 320, tied embeddings, {numel:,} parameters, byte-level BPE of {len(tokenizer)} tokens), trained from
scratch on the source code of the standard library of Python {platform.python_version()} (`layerbudget.data.stdlib`, group
`training`). It exists so that every command of layerbudget runs on a really trained network without a download. It is
not useful for writing code.

| held-out text (group `evaluation`, {eval_bytes:,} bytes) | bits per byte |
|---|---|
| this model, windows of 256 tokens | {held:.3f} |
| unigram model over the same tokens | {unigram:.3f} |

Training: `scripts/train_demo_model.py`, seed {arguments.seed}, {arguments.steps:,} steps of {arguments.batch} x
{arguments.length} tokens ({tokens / 1e6:.1f} M tokens, {tokens / len(train_ids):.1f} passes over {len(train_ids) / 1e6:.1f} M),
AdamW,
peak learning rate {arguments.lr}, bf16 autocast; {seconds / 60:.0f} minutes on {torch.get_num_threads()} shared CPU
threads. Weights are stored as bfloat16. Licence: Apache-2.0; the training text is under the Python Software Foundation
licence.
"""
    (arguments.out / "README.md").write_text(card)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint, the tokenizer and the log")
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--compile", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
