"""KL of files in llama.cpp's types at the bytes of its own mixes: the mix, uniform, and scores under one exact program.

    python -m benchmarks.bits ggml_types MODEL --base model-f32.gguf --quantise llama-quantize --scratch FOLDER [--like Q4_K_M ...]

MODEL is a transformers folder with calibration.txt and evaluation.txt (``train_second_model.py``); ``--base`` the same model as
GGUF in F32. llama-quantize makes every mix with our importance matrix; the bytes of its planned tensors are the budget. Every
score gives damages of the same types to the same exact program, so that only the damage differs. Weights are those of the file:
ggml's rounding with the importance matrix (``weighted``), or with error feedback (``gptq``). Held-out windows decide nothing; KL
is in nats per token from the dense model, and differences are paired by window. Passes are forward equivalents (a backward is
two). Rounded matrices and finished rows are kept in ``--scratch`` and not made again.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section

import gguf
import layerbudget as lb
from layerbudget.compressors import ggml, quantisers
from layerbudget.compressors.base import Level
from layerbudget.compressors.formats import find_format
from layerbudget.compressors.treating import LayerCompressor, matrices
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.bits.blocks import formats_table
from layerbudget.decisions.bits.pieces import quantiser_of
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.formats.baselines import uniform
from layerbudget.decisions.formats.table import FormatTable
from layerbudget.execution.inputs import InputStatistics
from layerbudget.execution.modes import inference
from layerbudget.execution.walk import Walk
from layerbudget.gguf.tensors import unpermute
from layerbudget.llama_cpp.imatrix import counted, entries, write_imatrix
from layerbudget.models.blocks import config_of, describe, weight_of
from layerbudget.sensitivity.directional.terms import DirectionalSums
from layerbudget.solvers.choices import choose

MIXES = ("Q2_K", "IQ2_M", "Q3_K_M", "IQ3_M", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_M")
MENU = "IQ2_XXS IQ2_XS IQ2_S Q2_K IQ3_XXS IQ3_S Q3_K IQ4_XS IQ4_NL Q4_K Q5_K Q6_K Q8_0".split()
NARROW = ["Q4_1", "Q5_0", "Q5_1"]  # beside them where 256 does not divide all rows
METHODS = ("weighted", "gptq")
SIMPLE = ("relative", "row-error", "gradient", "squared")
EVERY = "directional, every type"  # along the errors of every type, none interpolated: --whole
RULES = ("mix", "uniform", "relative", "row-error", "gradient", "squared", "measured", "directional", EVERY)
SAID = {
    "relative": "#15550's score",
    "row-error": "row error",
    "gradient": "gradient x change",
    "squared": "squared gradient x squared error",
    "measured": "measured singly",
}
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


# ---- GGUF files: where a matrix lies, what it holds, importance matrices


def places(model: torch.nn.Module, names: list[str]) -> dict[str, list[str]]:
    """Tensors of the file that hold a matrix, several where the file keeps parts of it apart."""
    config = config_of(model)
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[ARCHITECTURES[config.model_type]]
    known, found = gguf.get_tensor_name_map(arch, config.num_hidden_layers), {}
    for name in names:
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj"):
            found[name] = [f"blk.{layer}.ffn_gate_exps.weight", f"blk.{layer}.ffn_up_exps.weight"]
        elif name.endswith("experts.down_proj"):
            found[name] = [f"blk.{layer}.ffn_down_exps.weight"]
        else:
            found[name] = [f"{known.get_name(name)}.weight"]
    return found


def from_file(
    model: torch.nn.Module, file: Path, names: list[str]
) -> tuple[dict[str, list[torch.Tensor]], dict[str, str], int]:
    """Weights of some matrices in a file, one per copy, their types, and the bytes that they take."""
    held, config = {t.name: t for t in gguf.GGUFReader(file).tensors}, config_of(model)
    weights, types, size = {}, {}, 0
    for name, parts in places(model, names).items():
        read = [torch.from_numpy(gguf.dequantize(held[p].data, held[p].tensor_type).copy()) for p in parts]
        whole = torch.cat(read, -2)
        if config.model_type == "llama" and name.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if name.endswith("q_proj") else config.num_key_value_heads
            whole = unpermute(whole, heads)
        weights[name] = list(whole) if whole.ndim == 3 else [whole]
        types[name] = held[parts[0]].tensor_type.name
        size += sum(-(-int(held[p].n_bytes) // 32) * 32 for p in parts)
    return weights, types, size


def remembered(folder: Path) -> None:
    """Let ggml keep what it rounds, by content: damages, plans and files round the same matrices."""

    def keep(call: Any) -> Any:
        @functools.wraps(call)
        def kept(weight: Any, *rest: Any, **more: Any) -> np.ndarray:
            parts = (getattr(x, "moment", x) for x in (weight, *rest))
            given = [np.ascontiguousarray(x) for x in parts if isinstance(x, np.ndarray | torch.Tensor)]
            key = hashlib.blake2b(digest_size=16)
            for part in (call.__name__, *(x for x in rest if isinstance(x, str)), *given):
                key.update(part.encode() if isinstance(part, str) else part.tobytes())
            file = folder / key.hexdigest()[:2] / f"{key.hexdigest()}.npy"
            if file.is_file():
                return np.load(file)
            made = call(weight, *rest, **more)
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part.npy")
            np.save(part, made)
            part.rename(file)
            return made

        return kept

    ggml.quantise, quantisers.feed_back = keep(ggml.quantise), keep(quantisers.feed_back)


# ---- one model


class Bench:
    """A model, its calibration text, held-out windows, and its matrices in every type."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.name = a, Path(a.model).name
        self.tokenizer = tokenizer = lb.load_tokenizer(a.model)
        self.model = lb.load_model(a.model, dtype="float32").eval()
        self.fit = lb.calibration(f"{a.model}/calibration.txt", tokenizer, samples=a.samples, length=a.length, seed=a.seed)
        stream = torch.tensor(tokenizer(Path(a.model, "evaluation.txt").read_text(), verbose=False)["input_ids"])
        starts = torch.linspace(0, len(stream) - a.length, a.windows).long()
        self.held = torch.stack([stream[i : i + a.length] for i in starts])
        widths = {m.d_in for b in self._table(["Q8_0"], "weighted").blocks for m in b.modules}
        self.menu = a.menu or [*MENU, *(NARROW if any(w % 256 for w in widths) else [])]
        self.table = self._table(self.menu, "weighted")
        self.modules = {m.name: m for b in self.table.blocks for m in b.modules}
        self.dense = {n: [v.clone() for v in self.views(n)] for n in self.modules}
        self.clean = self.log_probabilities(self.held)
        self.moments = {}
        self.treating = {method: LayerCompressor(self.model, quantiser_of(method)) for method in METHODS}
        for method in METHODS:
            self._moments(method)
        self.imatrix = a.scratch / f"{self.name}-{a.seed}.imatrix.gguf"
        named = places(self.model, list(self.modules))
        sums = [entries(own, self.modules[n].d_in, named[n]) for n, own in self.moments["weighted"].items()]
        write_imatrix(self.imatrix, {k: v for each in sums for k, v in each.items()}, self.fit.describe())
        self._tables: dict[tuple[str, str], tuple[FormatTable, float]] = {}
        self._made: dict[tuple[str, str, str], list[np.ndarray]] = {}
        self._prepared: dict[Any, Any] = {}

    def _table(self, menu: list[str], method: str) -> FormatTable:
        return formats_table(self.model, formats=menu, family="gguf", method=method, unwritten="plan")

    def views(self, name: str) -> list[torch.Tensor]:
        return matrices(*weight_of(self.model, name))

    @torch.no_grad()
    def put(self, weights: Mapping[str, list[torch.Tensor]]) -> None:
        """The dense model, with some matrices as given."""
        for name, dense in self.dense.items():
            for view, new in zip(self.views(name), weights.get(name, dense), strict=True):
                view.copy_(new)

    @torch.no_grad()
    def log_probabilities(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [torch.log_softmax(self.model(input_ids=part).logits.float(), -1) for part in ids.split(4)]

    def _moments(self, method: str) -> None:
        """Second moments of every matrix's inputs in the dense model, and the mean squares of the head's."""
        found, treating = self.moments.setdefault(method, {}), self.treating[method]
        with inference(self.model):
            walk = Walk(self.model, self.fit, batch_size=8)
            walk.capture()
            for layer, (prefix, _) in enumerate(walk.layers):
                found |= treating.collect(walk, [m for n, m in self.modules.items() if n.startswith(f"{prefix}.")]).found
                if layer + 1 < len(walk):
                    walk.advance()
            ends = InputStatistics(
                self.model, [m for n, m in self.modules.items() if ".layers." not in n], treating.treatment.statistic
            )
            for batch, hidden in enumerate(walk.finals()):
                with ends.listening(None):
                    walk.tail(len(walk), batch, hidden)
            walk.close()
        found |= ends.found

    def rounded(self, name: str, kind: str, method: str) -> list[torch.Tensor]:
        """A matrix in a type with the dense model's inputs, one tensor per copy."""
        if find_format(kind).plain:
            return [v.half().float() for v in self.dense[name]]
        if (name, kind, method) not in self._made:
            treating, own, made = self.treating[method], self.moments[method].get(name), []
            if own and method == "weighted":  # experts that no token reached count alike, as in llama-quantize and apply
                own = counted(own, self.modules[name].d_in)
            for i, view in enumerate(self.dense[name]):
                prepared = treating.prepared(own and own[i], self._prepared)
                made.append(quantiser_of(method).quantise(view, prepared, Level(format=kind)).data)
            self._made[name, kind, method] = made
        return [torch.from_numpy(ggml.dequantise(d, kind)) for d in self._made[name, kind, method]]

    def written(self, types: Mapping[str, str], method: str) -> dict[str, list[torch.Tensor]]:
        return {n: self.rounded(n, kind, method) for n, kind in types.items()}

    # ---- what a plan does to the output

    @torch.no_grad()
    def outcome(self) -> dict[str, Any]:
        """The model as it is now beside the dense one, on the held-out windows."""
        each, same, loss = [], [], []
        for ids, clean in zip(self.held.split(4), self.clean, strict=True):
            now = torch.log_softmax(self.model(input_ids=ids).logits.float(), -1)
            each.append((clean.exp() * (clean - now)).sum(-1))
            same.append((clean.argmax(-1) == now.argmax(-1)).float())
            loss.append(-now[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1))
        kl, same, loss = (torch.cat(x).double().numpy() for x in (each, same, loss))
        return {"kl": kl.mean(), "kl_error": kl.mean(1).std(ddof=1) / len(kl) ** 0.5, "kl_999": np.quantile(kl, 0.999),
                "same_top": same.mean(), "perplexity": np.exp(loss.mean()), "windows": kl.mean(1).tolist()}  # fmt: skip

    # ---- damages

    def damages(self, rule: str, method: str) -> tuple[FormatTable, float]:
        """Damages by a score, and the passes that it took; kept on disk."""
        if (rule, method) not in self._tables:
            kept = {r: self.a.scratch / f"{self.name}-{self.a.seed}-{method}-{r}.npz" for r in (rule, *SIMPLE)}
            if not kept[rule].is_file():
                self.put({})
                make = {"directional": self._directional, EVERY: self._every, "measured": self._measured}
                made = {rule: make[rule](method)} if rule in make else self._simple(method)
                for name, (damage, passes, seconds) in made.items():
                    np.savez(kept[name], damage=damage, passes=passes, seconds=seconds)
            held = np.load(kept[rule])
            self._tables[rule, method] = self._with(held["damage"], method), float(held["passes"])
        return self._tables[rule, method]

    def _with(self, damage: np.ndarray, method: str) -> FormatTable:
        kept = np.where(self.table.has, damage, np.inf)
        return FormatTable(
            **{**{f: getattr(self.table, f) for f in self.table.__dataclass_fields__}, "damage": kept, "method": method}
        )

    def _every(self, method: str) -> tuple[np.ndarray, float, float]:
        """Every type along its own errors; what every draw gives along them is kept, so that sums of matrices can be squared."""
        finish, found = DirectionalSums.finish, list[np.ndarray]()

        def keep(own: DirectionalSums, batch: Any, loss: int) -> None:
            if not found:
                found.append(np.zeros((2, len(own.losses), *own.rows.shape), dtype=np.float32))
            sums = found[0]
            for part, held in enumerate((own._along, own._squares)):
                for first, along in held.items():
                    sums[part, loss, own.places[batch.rows], first] += along[:, 0].cpu().numpy()
            finish(own, batch, loss)

        DirectionalSums.finish = keep
        try:
            return self._directional(method, whole=True)
        finally:
            DirectionalSums.finish = finish
            np.save(self._sums(method), found[0])

    def _sums(self, method: str) -> Path:
        return self.a.scratch / f"{self.name}-{self.a.seed}-{method}-along.npy"

    def joint(self, chosen: np.ndarray, method: str) -> float:
        """The Fisher form along the sum of all changes of a plan: changes of several matrices may add up."""
        along, apart = np.load(self._sums(method)).astype(np.float64)[..., np.arange(len(chosen)), chosen]
        squares = (along.sum(-1) ** 2 + apart.sum(-1)).mean(0)  # of every sequence that tells damage
        return float(squares.sum() / (2 * len(squares) * (self.fit.input_ids.shape[1] - 1)))

    def _directional(self, method: str, whole: bool = False) -> tuple[np.ndarray, float, float]:
        start, own = time.process_time(), {"method": method, "unwritten": "plan", "whole": whole}
        found = rounding_damage(self.model, self.fit, family="gguf", formats=self.menu, **own)
        return FormatTable.of(found).damage, found.extra["formats"]["passes"], time.process_time() - start

    def _levels(self) -> Iterator[tuple[int, int, str, str]]:
        for i, block in enumerate(self.table.blocks):
            for j in np.flatnonzero(self.table.has[i]):
                for module in block.modules:
                    yield i, j, module.name, self.table.formats[j]

    def _simple(self, method: str) -> dict[str, tuple[np.ndarray, float, float]]:
        """Scores of rounding errors and single numbers per weight or column.

        row-error: squared errors, columns weighted by the importance matrix (embedding and head: by the head's inputs).
        relative: the same of every row over the row's own weighted squares, as llama.cpp's #15550 sums it (without importances
        all columns count alike).
        gradient: |gradient of the loss x rounding error|. squared: half the squared gradients of sequences x squared errors.
        """
        start, parameters = time.process_time(), {n: weight_of(self.model, n)[1] for n in self.modules}
        tokens = self.fit.input_ids.numel()
        squares = {n: torch.zeros_like(p) for n, p in parameters.items()}
        sums = {n: torch.zeros_like(p) for n, p in parameters.items()}
        for ids in self.fit.input_ids:
            self.model.zero_grad()
            loss = self.model(input_ids=ids[None], labels=ids[None]).loss * (len(ids) - 1)
            loss.backward()
            for n, p in parameters.items():
                if p.grad is not None:
                    sums[n] += p.grad / tokens
                    squares[n] += p.grad.square() / (2 * tokens)
        self.model.zero_grad()
        damage = {rule: np.zeros(self.table.damage.shape) for rule in SIMPLE}
        for i, j, name, kind in self._levels():
            gradient = torch.stack(list(sums[name])) if sums[name].ndim == 3 else sums[name][None]
            square = squares[name] if squares[name].ndim == 3 else squares[name][None]
            for copy, (dense, new) in enumerate(zip(self.dense[name], self.rounded(name, kind, method), strict=True)):
                change, own = new - dense, self.moments["weighted"].get(name)
                seen = None if own is None or own[copy].value is None else own[copy]
                weigh = None if seen is None else seen.value / seen.rows
                own = 1.0 if seen is None else seen.value / seen.rows
                rows = (change.square() * own).sum(1) / ((dense.square() * own).sum(1) + 1e-12)
                damage["relative"][i, j] += float(rows.double().sum())
                damage["row-error"][i, j] += float((change.square() * (1.0 if weigh is None else weigh)).double().sum())
                damage["gradient"][i, j] += float((change * gradient[copy]).abs().double().sum())
                damage["squared"][i, j] += float((change.square() * square[copy]).double().sum())
        return {r: (d, 1.0 if r in ("relative", "row-error") else 3.0, time.process_time() - start) for r, d in damage.items()}

    def _measured(self, method: str) -> tuple[np.ndarray, float, float]:
        """KL on the calibration text with one block in one type; forwards begin at the block's layer and count whole."""
        start, passes = time.process_time(), 1.0 + float(self.table.has[:, :-1].sum())
        data = CalibrationSet(input_ids=self.fit.input_ids[: self.a.measured_samples])
        damage = np.zeros(self.table.damage.shape)
        clean = self.log_probabilities(data.input_ids)
        with inference(self.model):
            walk = Walk(self.model, data, batch_size=4)
            walk.capture()
            for layer, (prefix, _) in enumerate(walk.layers):
                ends = [n for n in self.modules if ".layers." not in n] if layer == 0 else []
                inside = {n for n in self.modules if n.startswith(f"{prefix}.")} | set(ends)
                for i, j, name, kind in self._levels():
                    if name not in inside:
                        continue
                    for view, new in zip(self.views(name), self.rounded(name, kind, method), strict=True):
                        view.copy_(new)
                    total = 0.0
                    for batch in range(walk.batches):
                        output = self.model(**walk.inputs(batch)) if name in ends else walk.tail(layer, batch)
                        now = torch.log_softmax(output.logits.float(), -1)
                        total += float((clean[batch].exp() * (clean[batch] - now)).sum())
                    damage[i, j] = total / data.input_ids.numel()
                    for view, old in zip(self.views(name), self.dense[name], strict=True):
                        view.copy_(old)
                if layer + 1 < len(walk):
                    walk.advance()
            walk.close()
        return damage, passes, time.process_time() - start

    # ---- plans

    def mix(self, like: str) -> tuple[dict[str, list[torch.Tensor]], dict[str, str], int, int]:
        """llama.cpp's own mix: its weights, types, the bytes of its planned tensors, and of the file."""
        file = self.a.scratch / f"{self.name}-{self.a.seed}-{like}.gguf"
        if not file.is_file():
            command = [str(self.a.quantise), "--imatrix", str(self.imatrix), str(self.a.base), str(file), like, "1"]
            subprocess.run(command, check=True, capture_output=True)
        weights, types, size = from_file(self.model, file, list(self.modules))
        return weights, types, size, file.stat().st_size

    def choice(self, like: str, method: str, rule: str) -> tuple[FormatTable, np.ndarray, float | None, float]:
        """The table and the types chosen in it, their predicted damage and the passes that it took."""
        limit, passes = self.mix(like)[2], 1.0
        if rule == "uniform":
            return self.table, uniform(self.table, limit), None, passes
        table, passes = self.damages(rule, method)
        chosen = choose(table.damage, table.size, limit).chosen
        return table, chosen, float(table.damage[np.arange(len(chosen)), chosen].sum()), passes

    def types(self, like: str, method: str, rule: str) -> dict[str, str]:
        """The type of every matrix."""
        if rule == "mix":
            return self.mix(like)[1]
        table, chosen, *_ = self.choice(like, method, rule)
        return {m.name: table.formats[j] for b, j in zip(table.blocks, chosen, strict=True) for m in b.modules}

    def row(self, like: str, method: str, rule: str) -> dict[str, Any]:
        """One plan, in the model as a whole."""
        weights, types, limit, file = self.mix(like)
        passes, predicted, joint, spent = 1.0, None, None, limit
        if rule == "mix":
            weights = weights if method == "weighted" else self.written(types, method)
        else:
            table, chosen, predicted, passes = self.choice(like, method, rule)
            types, joint = self.types(like, method, rule), self.joint(chosen, method) if rule == EVERY else None
            spent = int(table.size[np.arange(len(chosen)), chosen].sum())
            weights = self.written(types, method)
        self.put(weights)
        found = self.outcome()
        self.put({})
        kinds = {k: sum(v == k for v in types.values()) for k in sorted(set(types.values()))}
        return {"model": self.name, "seed": self.a.seed, "like": like, "method": method, "rule": rule, "bytes": spent,
                "file": file - limit + spent, "passes": passes, "predicted": predicted, "joint": joint, "types": kinds, **found}  # fmt: skip

    # ---- the same in llama.cpp

    def in_runtime(self, like: str, rule: str, chunks: int = 24) -> dict[str, Any]:
        """A plan's file by llama-quantize, and its KLD by llama-perplexity beside ours on the same tokens.

        llama-perplexity reads chunks of a text and compares the second half of each; so do we here.
        """
        types = self.types(like, "weighted", rule)
        names, file = places(self.model, list(types)), self.a.scratch / f"{self.name}-{like}-{rule}.gguf"
        lines = [f"^{re.escape(t)}$={kind.lower()}" for n, kind in types.items() for t in names[n]]
        file.with_suffix(".types").write_text("\n".join(lines) + "\n")
        options = ["--imatrix", str(self.imatrix), "--tensor-type-file", str(file.with_suffix(".types"))]
        subprocess.run(
            [str(self.a.quantise), *options, str(self.a.base), str(file), "Q8_0", "1"], check=True, capture_output=True
        )
        weights, _, _ = from_file(self.model, file, list(types))
        same = sum(all(map(torch.equal, weights[n], self.rounded(n, kind, "weighted"))) for n, kind in types.items())
        text = Path(self.a.model, "evaluation.txt").read_text().splitlines(keepends=True)
        part, step = [], len(text) // 8
        for start in range(0, 8 * step, step):  # eight places of the text, so that all sources are there
            part += text[start : start + step // 8]
        source = self.a.scratch / f"{self.name}-runtime.txt"
        source.write_text("".join(part))
        ids = torch.tensor(self.tokenizer("".join(part), verbose=False)["input_ids"])
        ids = ids[: min(chunks, len(ids) // self.a.length) * self.a.length].view(-1, self.a.length)
        half = slice(self.a.length // 2, self.a.length - 1)
        self.put({})
        dense = [x[:, half] for x in self.log_probabilities(ids)]
        self.put(weights)
        now = [x[:, half] for x in self.log_probabilities(ids)]
        self.put({})
        kl = torch.cat([(c.exp() * (c - n)).sum(-1) for c, n in zip(dense, now, strict=True)]).double().numpy()
        logits, run = (
            file.with_suffix(".logits"),
            [str(self.a.perplexity), "-f", str(source), "-c", str(self.a.length), "-t", "1"],
        )
        run += ["--chunks", str(len(ids)), "--kl-divergence-base", str(logits)]
        subprocess.run([*run, "-m", str(self.a.base)], check=True, capture_output=True)
        told = subprocess.run([*run, "-m", str(file), "--kl-divergence"], check=True, capture_output=True, text=True)
        logits.unlink()
        found = kld_of(told.stdout + told.stderr)
        return {"model": self.name, "like": like, "rule": rule, "tensors": len(types), "identical": same, "chunks": len(ids),
                "kl": kl.mean(), "kl_error": kl.std(ddof=1) / len(kl.ravel()) ** 0.5, "kl_llama": found[0],
                "kl_llama_error": found[1], "file": file.stat().st_size}  # fmt: skip


def kld_of(told: str) -> tuple[float, float]:
    """The mean KLD in the output of llama-perplexity and its standard error; output that lacks them ends the run."""
    found = re.search(r"Mean\s+KLD:\s+([-\d.]+)\s+\S+\s+([\d.]+)", told)
    if found is None:
        last = "\n".join(told.splitlines()[-8:])
        raise SystemExit(
            f"llama-perplexity printed no mean KLD: its output is incomplete. Run it again. Its last lines:\n{last}"
        )
    return float(found[1]), float(found[2])


# ---- tables


def paired(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """Difference of KL and its standard error over windows."""
    each = np.array(row["windows"]) - np.array(other["windows"])
    return float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5)


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """A section for every model; rows with their windows stay in the scratch folder."""
    for model, seed in dict.fromkeys((r["model"], r["seed"]) for r in rows):
        own = {(r["method"], r["rule"], r["like"]): r for r in rows if (r["model"], r["seed"]) == (model, seed)}
        title = f"llama.cpp's types at the bytes of its mixes: {model}, calibration seed {seed}"
        write_section("bits", title, [*_overview(own), "", *_details(own)], out=out, peers=("gguf",))


def _overview(own: Mapping[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    """KL of every rule at every budget."""
    likes = list(dict.fromkeys(like for _, _, like in own))
    text = [f"| rounding | types by | passes | {' | '.join(likes)} |", "|---" * (3 + len(likes)) + "|"]
    for method, rule in dict.fromkeys((m, r) for m, r, _ in own):
        cells = []
        for like in likes:
            r, mix = own.get((method, rule, like)), own["weighted", "mix", like]
            cells.append("" if r is None else f"{r['kl']:.3g} ({r['kl'] / mix['kl'] - 1:+.0%})")
        passes = next(f"{own[method, rule, like]['passes']:.0f}" for like in likes if (method, rule, like) in own)
        words = "ggml" if method == "weighted" else "feedback"
        text.append(f"| {words} | {SAID.get(rule, rule)} | {passes} | {' | '.join(cells)} |")
    return text


def _details(own: Mapping[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    """The mix and the directional plans, with errors, tails, bytes and predictions."""
    text = [
        "| bytes of | rounding | types by | file | KL | - mix | - #15550 | 99.9 % | same top | perplexity | predicted / measured | joint / measured |",
        "|---" * 12 + "|",
    ]
    for (method, rule, like), r in own.items():
        if rule != "mix" and not rule.startswith("directional"):
            continue
        beside = []
        for other in (("weighted", "mix", like), (method, "relative", like)):
            difference = paired(r, own[other]) if other in own and own[other] is not r else None
            beside.append("" if difference is None else "{:+.2g} +- {:.1g}".format(*difference))
        ratio, joint = ("" if r[k] is None else f"{r[k] / r['kl']:.2f}" for k in ("predicted", "joint"))
        text.append(
            f"| {like} | {'ggml' if method == 'weighted' else 'feedback'} | {SAID.get(rule, rule)} | {r['file']:,} | "
            f"{r['kl']:.3g} +- {r['kl_error']:.1g} | {' | '.join(beside)} | {r['kl_999']:.2g} | {r['same_top']:.2%} | "
            f"{r['perplexity']:.3f} | {ratio} | {joint} |"
        )
    return text


def write_checked(out: Path, rows: list[dict[str, Any]]) -> None:
    """The rows by llama.cpp."""
    text = [
        "KL in nats per token of one file on the same tokens: by torch from the file's weights, and by llama-perplexity. Identical",
        "are tensors of llama-quantize's file that equal our rounding.", "",
        "| model | bytes of | types by | file | tensors | identical | KL by torch | KL by llama-perplexity |", "|---" * 8 + "|",
    ]  # fmt: skip
    for r in rows:
        text.append(
            f"| {r['model']} | {r['like']} | {r['rule']} | {r['file']:,} | {r['tensors']} | {r['identical']} | "
            f"{r['kl']:.6f} +- {r['kl_error']:.6f} | {r['kl_llama']:.6f} +- {r['kl_llama_error']:.6f} |"
        )
    text += [
        "",
        "llama-perplexity keeps the dense model's log-probabilities in 16 bits and multiplies quantised activations: its KL is "
        "above torch's, and that may be the reason (not tested).",
    ]
    write_section("bits", f"The same files in llama.cpp: {rows[0]['model']}", text, out=out, peers=("gguf",))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", help="folder of the model; without one only the table is written")
    p.add_argument("--base", type=Path, help="the model as GGUF in F32; without it only damages are made")
    p.add_argument("--quantise", type=Path, help="path of llama-quantize")
    p.add_argument(
        "--perplexity", type=Path, help="path of llama-perplexity: the rows of --like and --rules by llama.cpp, nothing else"
    )
    p.add_argument("--like", nargs="+", default=list(MIXES))
    p.add_argument("--menu", nargs="+", help="types to choose among; by default thirteen, of the legacy ones Q8_0")
    p.add_argument("--methods", nargs="+", default=list(METHODS))
    p.add_argument("--rules", nargs="+", default=[r for r in RULES if r != "measured"])
    p.add_argument("--samples", type=int, default=16)
    p.add_argument("--measured-samples", type=int, default=16)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--windows", type=int, default=16)
    p.add_argument("--seed", type=int, default=0, help="of the calibration text")
    p.add_argument("--scratch", type=Path, required=True)
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    a.scratch.mkdir(parents=True, exist_ok=True)
    remembered(a.scratch / "rounded")
    if a.model:
        bench, log = Bench(a), a.scratch / f"{Path(a.model).name}.jsonl"
        for method in a.methods if a.base is None else []:
            for rule in [r for r in a.rules if r not in ("mix", "uniform")]:
                bench.damages(rule, method)
                print(method, rule, f"{time.process_time():.0f} s", flush=True)
        if a.perplexity is not None:
            checked = [bench.in_runtime(like, rule) for like in a.like for rule in a.rules]
            return write_checked(a.out, checked)
        held = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
        done = {(r["seed"], r["like"], r["method"], r["rule"]) for r in held}
        wanted = [(m, r, k) for m in a.methods for r in a.rules for k in a.like if (a.seed, k, m, r) not in done]
        wanted = wanted if a.base is not None else []
        for method, rule, like in wanted:
            start = time.process_time()
            row = bench.row(like, method, rule) | {"model_digest": describe(bench.model)["digest"]}
            with open(log, "a") as f:
                f.write(json.dumps(row) + "\n")
            print(like, method, rule, f"{row['kl']:.5f}", row["bytes"], f"{time.process_time() - start:.1f} s", flush=True)
    rows = [json.loads(line) for f in sorted(a.scratch.glob("*.jsonl")) for line in f.read_text().splitlines()]
    order = {name: i for i, name in enumerate((*MIXES, *METHODS, *RULES))}
    rows = list({(r["model"], r["seed"], r["like"], r["method"], r["rule"]): r for r in rows}.values())
    rows.sort(key=lambda r: (r["model"], r["seed"], order[r["like"]], order[r["method"]], order[r["rule"]]))
    write(a.out, rows)


if __name__ == "__main__":
    main()
