"""Train a small model on books, as a second one for the quality tables (minutes on one core).

    python -m benchmarks.train_second_model --books FOLDER --out FOLDER [--minutes 6] [--architecture gemma2]
    python -m benchmarks.train_second_model --books FOLDER --wikitext FOLDER --python --large --architecture qwen3_moe \
        --minutes 24 --threads 2 --out FOLDER

Of every book the first 90 % is training text, the next 5 % calibration.txt, the last 5 % evaluation.txt. --wikitext adds
WikiText-2 (its own train, validation and test files) and --python the standard library's groups, cut to the size of the
books' parts where they are held out. --large: rows of 256 and its multiples, 10 to 12 million weights, 4,096 tokens.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = {
    "mistral": {"sliding_window": None},
    "llama": {},
    "gemma2": {"sliding_window": 512},  # post-norms, gelu, capped logits
    "gemma3_text": {"sliding_window": 512},
    "qwen3": {},
    "glm4_moe": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "moe_intermediate_size": 96,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 1.0,
        "use_qk_norm": True,
    },  # sigmoid routing, a shared expert
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "router_aux_loss_coef": 0.01},
}
WIKITEXT = {
    "train": "wikitext2_raw_train_first1MB.txt",
    "calibration": "wikitext-2_valid.txt",
    "evaluation": "wikitext-2_test.txt",
}


def split(folder: Path, wikitext: Path | None, python: bool):
    """The three parts: lists of texts by name. Where others join the books, their held-out parts are as long as a book's."""
    parts = {"train": [], "calibration": [], "evaluation": []}
    for file in sorted(folder.glob("*.txt")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        a, b = int(0.9 * len(text)), int(0.95 * len(text))
        for name, piece in zip(parts, (text[:a], text[a:b], text[b:]), strict=True):
            parts[name].append(piece)
    most = {"train": 5_000_000, "calibration": 150_000, "evaluation": 150_000}
    for name in parts:
        if wikitext is not None:
            parts[name].append((wikitext / WIKITEXT[name]).read_text(encoding="utf-8")[: most[name]])
        if python:
            from layerbudget.data import stdlib

            group = stdlib.read("training" if name == "train" else name)[0]
            parts[name].append("\n".join(text for _, text in group)[: most[name]])
    return parts


def configuration(architecture: str, large: bool, vocabulary: int, length: int):
    from transformers import AutoConfig

    sizes, more = dict(LARGE if large else SMALL), dict(ARCHITECTURES[architecture])
    width = more.get("hidden_size", sizes["hidden_size"]) // sizes["num_attention_heads"]
    if architecture.startswith("gemma"):
        more["query_pre_attn_scalar"] = width
    if architecture == "qwen3_moe":
        more["moe_intermediate_size"] = sizes["hidden_size"]
        sizes["num_hidden_layers"] //= 2
    return AutoConfig.for_model(
        architecture, vocab_size=vocabulary, head_dim=width, max_position_embeddings=max(512, length), tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **{**sizes, **more},
    )  # fmt: skip


def perplexity(model, ids, length=256, most=64):
    """Perplexity on up to ``most`` windows spread evenly over a stream."""
    import torch

    model.eval()
    starts = torch.linspace(0, len(ids) - length, most).long()
    with torch.no_grad():
        total = sum(float(model(input_ids=ids[None, i : i + length], labels=ids[None, i : i + length]).loss) for i in starts)
    return math.exp(total / most)


def balance(model, speed=0.002):
    """Let correction biases follow the load, as DeepSeek-V3 trains them: experts with few tokens are chosen more often."""
    import torch

    def follow(router, given, output):
        if router.training:
            load = torch.bincount(output[2].flatten(), minlength=len(router.e_score_correction_bias)).float()
            router.e_score_correction_bias += speed * torch.sign(load.mean() - load)

    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(follow)


def tokenizer_of(texts, size):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="of processor time, where no steps are given")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="mistral")
    parser.add_argument("--wikitext", type=Path, help="folder of WikiText-2's files, to train on as well")
    parser.add_argument("--python", action="store_true", help="train on the standard library's source as well")
    parser.add_argument("--large", action="store_true", help="256 wide and 4,096 tokens instead of 128 and 2,048")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", type=float, default=3e-3, help="learning rate after the warm-up")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many: a model that can be made again")
    parser.add_argument("--single", action="store_true", help="fp32 instead of bf16 autocast")
    a = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(a.threads)
    parts = split(a.books, a.wikitext, a.python)
    a.out.mkdir(parents=True, exist_ok=True)
    for name in ("calibration", "evaluation"):
        (a.out / f"{name}.txt").write_text("\n".join(parts[name]), encoding="utf-8")
    tokenizer = tokenizer_of(parts["train"], 4096 if a.large else 2048)
    tokenizer.save_pretrained(a.out)
    stream = torch.tensor(tokenizer("\n".join(parts["train"]), verbose=False)["input_ids"])
    config = configuration(a.architecture, a.large, len(tokenizer), a.length)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    balance(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=a.peak, betas=(0.9, 0.95), weight_decay=0.05)
    started, step, done = time.process_time(), 0, 0.0
    generator = torch.Generator().manual_seed(1)
    while done < 1:
        done = (step + 1) / a.steps if a.steps else (time.process_time() - started) / (60 * a.minutes)
        for group in optimiser.param_groups:
            group["lr"] = a.peak * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1))) / 2)
        at = torch.randint(0, len(stream) - a.length, (a.batch,), generator=generator)
        ids = torch.stack([stream[i : i + a.length] for i in at])
        with torch.autocast("cpu", torch.bfloat16, enabled=not a.single):
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
    held = torch.tensor(tokenizer("\n".join(parts["evaluation"]), verbose=False)["input_ids"])
    print(f"{time.process_time() - started:.0f} s of processor; held-out perplexity {perplexity(model, held):.2f} a token")


if __name__ == "__main__":
    main()
