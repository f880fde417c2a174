"""LayerIF in one pass against the paper's procedure, layer by layer, on the same model, data and definition.

    python -m benchmarks.scores influence [--model DIR] [--tokenizer DIR] [--train 48] [--validation 12] [--length 128]
        [--layers 32] [--peer FILE]

The procedure that is measured against: for each layer, run every sample again (batch of one, gradients of all parameters),
keep the flattened self-attention gradients, then loop over validation samples x tensors x training samples for the
averaged inverse and over all pairs for the influence. ``lambda`` is recomputed for every validation sample, as published;
a second figure computes it once. With ``--peer`` (``src/influence.py`` of DataInf) its own class runs on the gradients of
one layer, for agreement and time. Times are of one thread, wall and CPU; ratios are taken within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from benchmarks.stamp import RESULTS, write_section

from layerbudget.data import stdlib
from layerbudget.data.calibration import CalibrationSet
from layerbudget.models.blocks import partition
from layerbudget.sensitivity.influence import aggregate, influence


def load(path: str | None, layers: int = 12) -> transformers.PreTrainedModel:
    """The trained model, or one of the same shape with random weights."""
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=320, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, sliding_window=None, tie_word_embeddings=True,
        pad_token_id=2,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


def samples(tokenizer: str | None, group: str, count: int, length: int) -> CalibrationSet:
    """Pieces of the standard library of differing lengths, padded on the right; padding has no loss."""
    rng = np.random.default_rng({"training": 0, "calibration": 1}[group])
    if tokenizer:
        encode = transformers.AutoTokenizer.from_pretrained(tokenizer)
        documents = stdlib.read("calibration")[0]
        texts = [documents[i][1] for i in rng.permutation(len(documents))]
        ids = [i for text in texts[:40] for i in encode(text, add_special_tokens=False)["input_ids"]]
    else:
        ids = rng.integers(3, 2048, 200_000).tolist()
    rows, mask = np.full((count, length), 2), np.zeros((count, length), dtype=np.int64)
    start = 0 if group == "training" else len(ids) // 2
    for i in range(count):
        real = int(rng.integers(length * 3 // 4, length + 1)) if i else length
        rows[i, :real], mask[i, :real] = ids[start : start + real], 1
        start += real
    return CalibrationSet(input_ids=torch.as_tensor(rows), attention_mask=torch.as_tensor(mask), source=f"stdlib {group}")


def layer_gradients(model, data: CalibrationSet, layer: int) -> list[dict[str, torch.Tensor]]:
    """One backward pass per sample; the flattened gradients of the self-attention weights of one layer."""
    kept = []
    for i in range(data.samples):
        model.zero_grad()
        ids, mask = data.input_ids[i : i + 1], data.attention_mask[i : i + 1]
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        kept.append({
            name: p.grad.flatten().clone()
            for name, p in model.named_parameters()
            if "self_attn" in name and f".{layer}." in name
        })  # fmt: skip
    return kept


def pair_loop(g: list[dict[str, torch.Tensor]], v: list[dict[str, torch.Tensor]], *, published: bool) -> np.ndarray:
    """Averaged inverses per validation sample and tensor, then every pair."""
    lam: dict[str, torch.Tensor] = {}
    inverse: list[dict[str, torch.Tensor]] = []
    for vj in v:
        own = {}
        for name, value in vj.items():
            if published or name not in lam:
                lam[name] = torch.stack([x[name].square().mean() for x in g]).mean() / 10
            h = torch.zeros_like(value)
            for x in g:
                c = torch.sum(value * x[name]) / (lam[name] + torch.sum(x[name] ** 2))
                h += (value - c * x[name]) / (len(g) * lam[name])
            own[name] = h
        inverse.append(own)
    table = np.zeros((len(v), len(g)))
    for k, x in enumerate(g):
        for j, h in enumerate(inverse):
            table[j, k] = -sum(torch.sum(h[name] * x[name]).item() for name in x)
    return table


class Clock:
    """Wall and CPU seconds of a with-block."""

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu


def peer_table(path: str, g, v) -> tuple[np.ndarray, float]:
    """DataInf's own class on the same gradients."""
    spec = importlib.util.spec_from_file_location("datainf_peer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = module.IFEngineGeneration()
    engine.preprocess_gradients(dict(enumerate(g)), dict(enumerate(v)))
    with Clock() as clock, contextlib.redirect_stdout(io.StringIO()):
        engine.compute_hvp_proposed()
        engine.compute_IF()
    return np.array(engine.IF_dict["proposed"], dtype=float), clock.cpu


def per_layer(model, train, validation, layers: int) -> tuple[list[np.ndarray], dict[str, list[float]], tuple]:
    """Tables and seconds of the per-layer procedure, by part."""
    tables, seconds, last = [], {"gradients": [], "loop": [], "loop, lambda once": [], "wall": []}, ()
    for layer in range(layers):
        with Clock() as whole:
            with Clock() as first:
                g, v = layer_gradients(model, train, layer), layer_gradients(model, validation, layer)
            with Clock() as second:
                tables.append(pair_loop(g, v, published=True))
        with Clock() as third:
            pair_loop(g, v, published=False)
        for name, value in (("gradients", first.cpu), ("loop", second.cpu), ("loop, lambda once", third.cpu)):
            seconds[name].append(value)
        seconds["wall"].append(whole.wall)
        last = (g, v)
        print(f"layer {layer}: gradients {first.cpu:.1f} s, loop {second.cpu:.1f} s, lambda once {third.cpu:.1f} s", flush=True)
    return tables, seconds, last


def main() -> None:
    """Run and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--train", type=int, default=48)
    parser.add_argument("--validation", type=int, default=12)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="depth of the random model (without --model)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(arguments.model, arguments.layers)
    tokenizer = arguments.tokenizer or arguments.model
    train = samples(tokenizer, "training", arguments.train, arguments.length)
    validation = samples(tokenizer, "calibration", arguments.validation, arguments.length)
    blocks = partition(model, include="self_attn")

    def ours():
        with Clock() as clock:
            found = influence(model, train, validation, blocks, batch_size=arguments.batch_size)
        return found, clock

    ours()
    before = [ours() for _ in range(arguments.repeat)]
    tables, seconds, (g, v) = per_layer(model, train, validation, len(blocks))
    after = [ours() for _ in range(arguments.repeat)]
    found = before[0][0]
    errors = [np.abs(found[b.name][0] - t).max() / np.abs(t).max() for b, t in zip(blocks, tables, strict=True)]
    scores = {w: [aggregate(found[b.name][0], w) for b in blocks] for w in ("all", "positive")}
    wanted = {w: [aggregate(t, w) for t in tables] for w in scores}
    score_error = max(np.max(np.abs(np.array(scores[w]) / wanted[w] - 1)) for w in scores)
    cpu = statistics.median(c.cpu for _, c in before + after)
    wall = statistics.median(c.wall for _, c in before + after)
    total, once = (sum(seconds["gradients"]) + sum(seconds[k]) for k in ("loop", "loop, lambda once"))
    record = {
        "shape": {k: getattr(arguments, k) for k in ("train", "validation", "length")} | {"layers": len(blocks)},
        "weights": "trained" if arguments.model else "random",
        "one_pass_seconds": {"cpu": cpu, "wall": wall, "cpu_runs": [c.cpu for _, c in before + after]},
        "per_layer_seconds": {"cpu": total, "wall": sum(seconds["wall"]), "gradients": sum(seconds["gradients"]),
                              "loop": sum(seconds["loop"]), "loop_lambda_once": sum(seconds["loop, lambda once"])},
        "ratio": {"cpu": total / cpu, "wall": sum(seconds["wall"]) / wall, "cpu, lambda computed once": once / cpu},
        "largest_table_error": float(max(errors)), "largest_score_error": float(score_error),
    }  # fmt: skip
    if arguments.peer:
        table, spent = peer_table(arguments.peer, g, v)
        record["peer"] = {
            "largest_table_error": float(np.abs(found[blocks[-1].name][0] - table).max() / np.abs(table).max()),
            "loop_seconds_last_layer": spent, "own_plain_loop_seconds_last_layer": seconds["loop"][-1],
        }  # fmt: skip
    write(record, arguments.out)


def write(record: dict, out: Path) -> None:
    """Write the section."""
    s, one, many, ratio = (record[k] for k in ("shape", "one_pass_seconds", "per_layer_seconds", "ratio"))
    lines = [
        f"{s['layers']} layers, {s['train']} training and {s['validation']} validation samples of {s['length']} tokens, "
        f"{record['weights']} weights, of self-attention.",
        "",
        "| | CPU s | wall s |",
        "|---|---|---|",
        f"| one pass, this package (median of {len(one['cpu_runs'])}) | {one['cpu']:.2f} | {one['wall']:.2f} |",
        f"| per layer: gradients of every sample again | {many['gradients']:.1f} | |",
        f"| per layer: loop over pairs, lambda per validation sample (as published) | {many['loop']:.1f} | |",
        f"| per layer: loop over pairs, lambda once | {many['loop_lambda_once']:.1f} | |",
        f"| per-layer procedure as published, total | {many['cpu']:.1f} | {many['wall']:.1f} |",
        "",
        f"Ratio: **{ratio['cpu']:.0f}x** in CPU time, {ratio['wall']:.0f}x in wall time, "
        f"{ratio['cpu, lambda computed once']:.0f}x against the loop with lambda computed once.",
        f"That is {ratio['cpu'] / s['layers']:.1f} per layer: the per-layer procedure runs every sample once per layer, so the "
        f"ratio grows with depth (50 needs about {50 * s['layers'] / ratio['cpu']:.0f} layers at this size; Mistral-7B has 32)."
        " CPU time is the fair figure where other work shares the machine.",
        f"Largest difference: {record['largest_table_error']:.1e} of the largest entry of a layer's table, "
        f"{record['largest_score_error']:.1e} of a layer score ('All' and '+ve').",
    ]
    if "peer" in record:
        p = record["peer"]
        lines.append(
            f"DataInf's own class on the last layer's gradients: difference {p['largest_table_error']:.1e}; its loop took "
            f"{p['loop_seconds_last_layer']:.1f} CPU s, the plain loop above {p['own_plain_loop_seconds_last_layer']:.1f}."
        )
    title = f"LayerIF: one pass against the paper's per-layer procedure, {s['layers']} layers"
    write_section("scores", title, lines, out=out)


if __name__ == "__main__":
    main()
