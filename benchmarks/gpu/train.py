"""Train a language model of about 100 million parameters on the Python sources that are installed.

python -m benchmarks.gpu.train OUT --steps 1500
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def main() -> None:
    """Train, save, and say the loss on held-out text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=6e-4)
    given = parser.parse_args()
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    import layerbudget as lb

    tokenizer = lb.load_tokenizer("demo")
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=given.width, intermediate_size=given.width * 8 // 3 // 16 * 16,
        num_hidden_layers=given.depth, num_attention_heads=max(given.width // 64, 1),
        num_key_value_heads=max(given.width // 64, 1), max_position_embeddings=2 * given.length, sliding_window=None,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).to(given.device)
    windows = lb.evaluation_set("stdlib", tokenizer, length=given.length, windows=64)
    text = lb.calibration("stdlib", tokenizer, samples=min(given.steps * given.batch, 20000), length=given.length).input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.rate, total_steps=given.steps, pct_start=0.1)
    generator, start = torch.Generator().manual_seed(0), time.perf_counter()
    for step in range(given.steps):
        rows = text[torch.randint(len(text), (given.batch,), generator=generator)].to(given.device)
        with torch.autocast(given.device.split(":")[0], torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == given.steps - 1:
            print(f"{step} {loss.item():.3f} {time.perf_counter() - start:.0f} s", flush=True)
    model.eval()
    model.config.architectures = ["MistralForCausalLM"]
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    print(
        f"perplexity {lb.perplexity(model, windows).value:.2f}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
    )


if __name__ == "__main__":
    main()
