"""Train a small model on books, as a second one for the quality tables (minutes on one core).

    python benchmarks/train_second_model.py --books FOLDER --out FOLDER [--minutes 6] [--architecture gemma2]

Of every book the first 90 % is training text, the next 5 % calibration.txt, the last 5 % evaluation.txt.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ARCHITECTURES = {
    "mistral": {"sliding_window": None},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 512},  # post-norms, gelu, capped logits
    "qwen3": {"head_dim": 32},
}


def split(folder: Path):
    parts = {"train": [], "calibration": [], "evaluation": []}
    for file in sorted(folder.glob("*.txt")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        a, b = int(0.9 * len(text)), int(0.95 * len(text))
        for name, piece in zip(parts, (text[:a], text[a:b], text[b:]), strict=True):
            parts[name].append(piece)
    return parts


def tokenizer_of(texts, size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="of processor time")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="mistral")
    a = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = split(a.books)
    a.out.mkdir(parents=True, exist_ok=True)
    for name in ("calibration", "evaluation"):
        (a.out / f"{name}.txt").write_text("\n".join(parts[name]), encoding="utf-8")
    tokenizer = tokenizer_of(parts["train"], 2048)
    tokenizer.save_pretrained(a.out)
    stream = torch.tensor(tokenizer("\n".join(parts["train"]), verbose=False)["input_ids"])
    config = AutoConfig.for_model(
        a.architecture, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **ARCHITECTURES[a.architecture],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    started, step, done = time.process_time(), 0, 0.0
    generator = torch.Generator().manual_seed(1)
    while done < 1:
        done = (time.process_time() - started) / (60 * a.minutes)
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1))) / 2)
        at = torch.randint(0, len(stream) - a.length, (a.batch,), generator=generator)
        ids = torch.stack([stream[i : i + a.length] for i in at])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0:
            print(step, f"{float(loss.detach()):.3f}", f"{100 * done:.0f} %", flush=True)
    model.eval().save_pretrained(a.out)
    print(f"{step} steps, {sum(p.numel() for p in model.parameters())} parameters, saved to {a.out}")


if __name__ == "__main__":
    main()
