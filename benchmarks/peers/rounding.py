"""KL of matrices that other projects' code rounded, beside our own methods in the same formats and bytes.

    python -m benchmarks.peers rounding MODEL --fit FILE --held-out FILE --peers auto-round toolkit --weights FOLDER --path CHECKOUT

Model, layers, texts and KL are those of ``python -m benchmarks.bits rounding``. ``auto-round`` is the package of that name, on the
processor: the other layers are given 16 bits, and its weights, dequantised, are kept in ``--weights``. ``toolkit`` is a checkout
of IST-DASLab/gptq-gguf-toolkit: its GPTQ class gets our sums of X'X of the dense model, and its own packing writes the bytes that
the package ``gguf`` reads again; these are measured. A peer that is not installed is skipped. Rows are kept under
``results/rows`` and not measured again; a run that was cut has left the most useful ones.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.bits.rounding import METHODS, Bench, Way, lines_of
from benchmarks.peers.references import _on_path
from benchmarks.stamp import RESULTS, keep_row, peak_gib, read_rows, write_section

import layerbudget as lb
from layerbudget.compressors import descent, quantisers
from layerbudget.compressors.formats import find_format
from layerbudget.models.blocks import weight_of

TITLES = {"auto-round": "AutoRound", "toolkit": "IST-DASLab/gptq-gguf-toolkit"}
FORMATS = {"auto-round": ("w4-g32", "w3-g32"), "toolkit": ("Q4_K", "Q2_K", "Q3_K", "Q6_K", "Q5_K")}
#: Options of a peer's own runs.
THEIRS: dict[str, dict[str, dict[str, Any]]] = {
    "auto-round": {"AutoRound, 200 iterations": {"iters": 200}, "AutoRound, RTN": {"iters": 0}},
    "toolkit": {"its GPTQ": {}, "its GPTQ, act order, static groups": {"act_order": True, "static_groups": True}},
}
Rounded = dict[str, Any]  #: Weights by the name of their matrix, seconds of the processor, GiB at most.
_grid_of = quantisers.grid_of


def _above_zero(*given: Any, signed: bool = False) -> quantisers.QuantGrid:
    """A grid whose scale is above zero."""
    return _grid_of(*given)


_UNSIGNED = ((quantisers, "grid_of", _above_zero), (descent.Layout, "signed", False))
OURS: dict[str, dict[str, Way]] = {
    "auto-round": {
        **{m: METHODS[m] for m in ("descent", "weighted")},
        **{f"{m}, scales above zero": (m, {}, _UNSIGNED) for m in ("gptq", "descent", "weighted")},
    },
    "toolkit": {m: METHODS[m] for m in ("descent", "weighted")},
}


def auto_round(a: argparse.Namespace, form: str, options: dict[str, Any]) -> Rounded:
    """Weights of one layer in ``a.every`` that AutoRound tuned to a symmetric format, the rest at 16 bits."""
    kept = a.weights / f"{form}-{options['iters']}.pt"
    if not kept.is_file():
        from auto_round import AutoRound

        tokenizer, model, own = lb.load_tokenizer(a.model), lb.load_model(a.model, dtype="float32"), find_format(form)
        ids = lb.calibration(a.fit, tokenizer, samples=a.samples, length=a.length).input_ids
        names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n]
        others = {n: {"bits": 16} for n in names if int(n.split(".layers.")[1].split(".")[0]) % a.every}
        start = time.process_time()
        AutoRound(
            model, tokenizer, scheme="W4A16", bits=own.bits, group_size=own.group, sym=True, nsamples=a.samples, seqlen=a.length,
            batch_size=8, dataset=[row[None] for row in ids], layer_config=others, device_map="cpu", enable_torch_compile=False,
            **options,
        ).quantize()  # fmt: skip
        spent = {"cpu": time.process_time() - start, "peak": peak_gib()}
        found = {n: model.get_submodule(n).weight.detach().clone() for n in names if n not in others}
        a.weights.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": found, **spent}, kept)
    return torch.load(kept, weights_only=True)


def toolkit(a: argparse.Namespace, form: str, options: dict[str, Any], bench: Bench) -> Rounded:
    """Weights that the toolkit's GPTQ rounds from our moments, as the bytes that it packs are read by ``gguf``."""
    import gguf

    found, spent, off, lost = {}, 0.0, 0.0, 0
    with _on_path(a.path / "quant" / "gptq", ("src",)):
        from src import gptq, packing_utils, quant_utils

        kind, packed = quant_utils.GGMLQuantizationType[form], getattr(packing_utils, f"pack_{form.replace('_', '')}")
        for name, module in fitting(bench, form):
            layer = torch.nn.Linear(module.d_in, module.d_out, bias=False)
            layer.weight.data.copy_(weight_of(bench.model, name)[1])
            start = time.process_time()
            handle = gptq.GPTQ(layer, rel_damp=0.01, block_size=128, **options)
            handle.H, handle.num_samples = bench.found[False][name][0].value * (2 / a.samples), a.samples
            made = handle.quantize(kind)
            spent += time.process_time() - start
            floats = quant_utils.dequantize_linear_weight(kind, *made)
            data = packed(*(part.clone() for part in (made if form in ("Q2_K", "Q4_K", "Q5_K") else made[:3])))
            found[name] = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[form]))
            off = max(off, float((found[name] - floats).abs().max() / floats.abs().max()))
            lost += hasattr(handle, "issue_non_invertible")
    return {"weights": found, "cpu": spent, "off": off, "lost": lost}


def fitting(bench: Bench, form: str) -> Iterator[tuple[str, Any]]:
    """Matrices that a format divides."""
    return ((name, module) for name, module in bench.modules.items() if find_format(form).fits(module.d_in))


class Beside(Bench):
    """Rounds by our methods, or puts in what a peer made."""

    given: Rounded | None = None

    def round(self, form: str, method: str, options: Any) -> tuple[float, int]:
        """As the bench does; of a peer the time is its own."""
        if self.given is None:
            return super().round(form, method, options)
        names = dict(fitting(self, form))
        if set(names) != set(self.given["weights"]):
            raise ValueError(f"{method} rounded other matrices.")
        for name in names:
            weight_of(self.model, name)[1].data.copy_(self.given["weights"][name])
        return self.given["cpu"], sum(find_format(form).bytes(m.d_out, m.d_in) for m in names.values())


def measure(a: argparse.Namespace, peer: str, bench: Callable[[], Beside], methods: Iterable[str]) -> None:
    """Measure and keep rows of a peer and of ours in every format."""
    kept, formats = f"peers_rounding_{peer}", [f for f in FORMATS[peer] if not a.formats or f in a.formats]
    done = {(r["format"], r["method"]) for r in read_rows(kept, a.out)}
    ways = {"gptq": METHODS["gptq"], **OURS[peer], **dict.fromkeys(THEIRS[peer])}
    for form, method in itertools.product(formats, [m for m in methods if not a.ways or m in a.ways]):
        if (form, method) in done:
            continue
        row: dict[str, Any] = {"format": form, "method": method}
        if (way := ways[method]) is None:
            options = THEIRS[peer][method]
            given = auto_round(a, form, options) if peer == "auto-round" else toolkit(a, form, options, bench())
            bench().given = given
            row |= bench().row(form, method, {}) | {k: given[k] for k in ("peak", "off", "lost") if k in given}
        else:
            bench().given = None
            row |= bench().row(form, *way)
        keep_row(kept, row, a.out)
        print({k: v for k, v in row.items() if k not in ("kl", "tokens")}, sum(row["kl"]) / sum(row["tokens"]), flush=True)


def lines(a: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[str]:
    """A section: a table, and what was seen beside."""
    yield (
        f"All matrices of one layer in {a.every} that the format divides are rounded and the others stay. Inputs of {a.samples} x "
        f"{a.length} tokens of {Path(a.fit).name}; KL from the dense model, in nats per token, on {a.windows} windows of {a.window} "
        f"tokens of {Path(a.held_out).name}, paired by window."
    )
    yield ""
    yield from lines_of(rows, "method")
    yield ""
    for row in (r for r in rows if "peak" in r):
        yield f"{row['format']}, {row['method']}: at most {row['peak']:.1f} GiB, the model in float32 included."
    if own := [r for r in rows if "off" in r]:
        yield (
            f"Its floats differ from what `gguf` reads of its bytes by at most {max(r['off'] for r in own):.1g} of the largest; "
            f"moments that it could not invert: {max(r.get('lost', 0) for r in own)}."
        )
    if a.note:
        yield from ("", a.note.read_text().strip())


def main() -> None:
    """Parse and run."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--fit", required=True, help="text whose inputs decide")
    p.add_argument("--held-out", required=True, help="text that KL is measured on")
    p.add_argument("--peers", nargs="+", default=list(TITLES), choices=TITLES)
    p.add_argument("--formats", nargs="+", help="only these")
    p.add_argument("--ways", nargs="+", help="only these rows")
    p.add_argument("--path", type=Path, help="checkout of the toolkit")
    p.add_argument("--weights", type=Path, help="folder that keeps what AutoRound made")
    p.add_argument("--kept", action="store_true", help="write the sections of the rows that are kept, and measure none")
    p.add_argument("--note", type=Path, help="text that stands below the table")
    p.add_argument("--out", type=Path, default=RESULTS)
    for name, default in (("every", 3), ("samples", 64), ("length", 256), ("windows", 24), ("window", 256)):
        p.add_argument(f"--{name}", type=int, default=default)
    a = p.parse_args()
    a.methods, a.parts, a.ablation = ["gptq"], [], []
    torch.set_num_threads(1)
    bench = functools.cache(lambda: Beside(a))
    there = {
        "auto-round": a.weights is not None and importlib.util.find_spec("auto_round") is not None,
        "toolkit": a.path is not None and a.path.is_dir(),
    }
    peers = [peer for peer in a.peers if there[peer] and not a.kept]
    for first, peer in itertools.product((True, False), peers):
        measure(a, peer, bench, ("gptq", *THEIRS[peer]) if first else OURS[peer])
    for peer in a.peers:
        order = ["gptq", *THEIRS[peer], *OURS[peer]]
        rows = sorted(read_rows(f"peers_rounding_{peer}", a.out), key=lambda r: (r["format"], order.index(r["method"])))
        if not (there[peer] or a.kept):
            print(f"skipped: {peer} is not there.")
        elif rows:
            write_section(
                "peers", f"Rounding beside {TITLES[peer]}: {Path(a.model).name}", lines(a, rows), out=a.out, peers=("auto-round", "gguf")
            )  # fmt: skip


if __name__ == "__main__":
    main()
