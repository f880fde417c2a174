"""No option is ignored: every one of ``plan`` and ``score`` under every rule and estimator changes something or is refused."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from tests.cli.helpers import command_result

from layerbudget.cli.commands import requests_of_all
from layerbudget.cli.parser import WrongCommand, parse
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.rules import OPTIONS, rules_of
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.models.blocks import partition
from layerbudget.models.loading import blocks_from_config
from layerbudget.requests import EVERY, flag_of, positional
from layerbudget.scores import Scores
from layerbudget.sensitivity.estimators import ESTIMATORS, SHARED
from layerbudget.sensitivity.gain import score
from layerbudget.sensitivity.noise import subtract_floor

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

REFUSED = ("has no option", "does not read", "has no meaning", "are the penalty", "Unknown option")
# flag: what is given without it, and with it. The rest of the command makes its effect visible.
SPARSITY = {
    "--sparsity": (["--sparsity", 0.5], ["--sparsity", 0.4]), "--max-sparsity": ([], ["--max-sparsity", 0.52]),
    "--min-sparsity": ([], ["--min-sparsity", 0.48]), "--exponent": ([], ["--exponent", 2]),
    "--exponent-on": (["--exponent", 2], ["--exponent", 2, "--exponent-on", "block"]), "--damping": ([], ["--damping", 1.0]),
    "--smoothing": ([], ["--smoothing", 0.5]), "--penalty": ([], ["--penalty", "log-barrier"]),
    "--curves": ([], ["--curves", "curves.json"]), "--seed": (["--seed", 1], ["--seed", 2]), "--width": ([], ["--width", 0.05]),
    "--exclude": ([], ["--exclude", "q_proj"]),
    "--fix": ([], ["--fix", "k_proj=0.3"]), "strange": ([], ["strange", 1]), "--bits": ([], ["--bits", 4]),
    "--eta": ([], ["--eta", 5]), "--units": ([], ["--units", "literal"]), "--spend": ([], ["--spend", "at_least"]),
}  # fmt: skip
CAPACITY = {
    "--exponent": ([], ["--exponent", 3]), "--exponent-on": (["--exponent", 2], ["--exponent", 2, "--exponent-on", "block"]),
    "--damping": ([], ["--damping", 1.0]), "--smoothing": ([], ["--smoothing", 3]),
    "--utility": ([], ["--utility", "power"]), "--spend": ([], ["--spend", "at_most"]),
    "--method": ([], ["--method", "floor"]), "--seed": (["--seed", 1], ["--seed", 2]), "--fix": ([], ["--fix", "k_proj=2"]),
    "strange": ([], ["strange", 1]), "--alpha": ([], ["--alpha", 2]), "--gamma": ([], ["--gamma", 3]),
    "--units": ([], ["--units", "literal"]),
}  # fmt: skip
EXPERTS = {
    "--total": (["--total", 61], ["--total", 71]),
    "--budget": (["--total", 61], ["--budget", "90k params"]), "--min-experts": ([], ["--min-experts", 3]),
    "--max-experts": ([], ["--max-experts", 5]),
    "--expert-rank": (["--budget", "90k params"], ["--budget", "90k params", "--expert-rank", 4]),
    "--latency": (["--budget", "90k params"], ["--budget", "0.08 s", "--latency", "latency.json"]),
    "--lower": ([], ["--lower", 3]),
    "--bytes-per-parameter": (["--budget", "180 KB"], ["--budget", "180 KB", "--bytes-per-parameter", 4]),
    **CAPACITY,
    "--exponent-on": (
        ["--budget", "90k params", "--exponent", 2], ["--budget", "90k params", "--exponent", 2, "--exponent-on", "block"]
    ),  # with one price for all the two are the same
}  # fmt: skip
RANKS = {
    "--mean-rank": (["--mean-rank", 6.3], ["--mean-rank", 7.1]), 
    "--budget": (["--mean-rank", 6.3], ["--budget", "23 KB"]), "--multiple": ([], ["--multiple", 4]),
    "--min-rank": ([], ["--min-rank", 5]), "--max-rank": ([], ["--max-rank", 6]),
    "--latency": (["--mean-rank", 6.3], ["--budget", "0.08 s", "--latency", "latency.json"]),
    "--bytes-per-parameter": (["--budget", "23 KB"], ["--budget", "23 KB", "--bytes-per-parameter", 4]), **CAPACITY,
}  # fmt: skip
JOINT = {
    "--budget": (["--budget=-8KiB"], ["--budget=-6KiB"]), "--capacity": ([], ["--capacity", "lora-experts"]),
    "--expert-rank": (["--capacity", "lora-experts"], ["--capacity", "lora-experts", "--expert-rank", 2]),
    "--max-sparsity": ([], ["--max-sparsity", 0.5]), "--gamma": ([], ["--gamma", 5]), "--eta": ([], ["--eta", 20]),
    "--spend": (["--budget", "20KiB"], ["--budget", "20KiB", "--spend", "at_most"]), "--exponent": ([], ["--exponent", 3]),
    "--exponent-on": (["--exponent", 2], ["--exponent", 2, "--exponent-on", "block"]), "--damping": ([], ["--damping", 1.0]),
    "--alpha": ([], ["--alpha", 3]), "--min-capacity": ([], ["--min-capacity", 4]),
    "--max-capacity": ([], ["--max-capacity", 2]), "--bytes-per-parameter": ([], ["--bytes-per-parameter", 4]),
}  # fmt: skip
SWEEP = {
    "--budgets": (["--budgets", 0.3], ["--budgets", 0.4]), "--exponents": ([], ["--exponents", 2]),
    "--rule": ([], ["--rule", "permuted"]), "--max-sparsity": ([], ["--max-sparsity", 0.35]),
    "--damping": ([], ["--damping", 1.0]), "--smoothing": ([], ["--smoothing", 0.5]),
    "--kind": ([], ["--kind", "ranks", "--budgets", 6]),
}  # fmt: skip
TRANSFER = {
    "--sparsity": ([], ["--sparsity", 0.3]), "--max-sparsity": ([], ["--max-sparsity", 0.55]),
    "--budget": ([], ["--budget", "80 experts"]), "--max-experts": ([], ["--max-experts", 5]),
    "--exponent-on": (["--exponent", 2], ["--exponent", 2, "--exponent-on", "block"]), "--damping": ([], ["--damping", 1.0]),
    "--smoothing": ([], ["--smoothing", 0.5]), "--exponent": ([], ["--exponent", 2]), "--utility": ([], ["--utility", "power"]),
    "--penalty": ([], ["--penalty", "log-barrier"]),
}  # fmt: skip
TIGHT = {
    "--lower": 30,
    "--max-sparsity": 0.2,
    "--min-sparsity": 0.6,
    "--min-experts": 30,
    "--max-experts": 2,
    "--min-rank": 30,
    "--max-rank": 2,
}
ALWAYS = {"sparsity": [], "lora-experts": ["--total", 61], "ranks": ["--mean-rank", 6.3], "joint": ["--budget=-8KiB"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Scores with several dampings and the gain of every further rank, measured curves, latencies."""
    folder, rng = tmp_path_factory.mktemp("options"), np.random.default_rng(3)
    order = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    blocks = sorted(blocks_from_config(CONFIG, by="linear"), key=lambda b: (b.name[:14], order.index(b.name.split(".")[-1])))
    gain = [(rng.random(len(blocks)) + 0.05).tolist() for _ in range(3)]
    curves = [[np.sort(rng.gamma(1.0, size=24))[::-1].tolist() for _ in blocks] for _ in range(3)]
    for name, flip in (("scores", 1), ("other", -1)):
        Scores(
            estimator="rank-gain", blocks=blocks, damping=(1.0, 2.0, 4.0), gain=[g[::flip] for g in gain],
            extra={"increments": curves},
        ).save(folder / f"{name}.json")  # fmt: skip
    measured = {b.name: [[0.2, 0.4, 0.6, 0.8], np.cumsum(np.sort(rng.random(4))).tolist()] for b in blocks}
    (folder / "curves.json").write_text(json.dumps({"curves": measured}))
    (folder / "latency.json").write_text(json.dumps({b.name: 1e-3 * (1 + i % 3) for i, b in enumerate(blocks)}))
    return folder


@functools.cache
def flags_of(command):
    """The flags of a command."""
    request = requests_of_all()[command]
    known = {n: f for n, f in request.options().items() if f.metadata["group"] != EVERY and not positional(n, f)}
    return {flag_of(request, name) for name in known}


@pytest.fixture(scope="module")
def run(files):
    @functools.cache  # what a flag is compared with is the same for many
    def call(*words):
        command = words[:2]
        words = [str(files / w) if str(w).endswith(".json") else w for w in words[2:]]
        return command_result(*command, *("--strange" if w == "strange" else w for w in words))[0]

    return call


def cell(run, command, always, without, with_it) -> str:
    """``used`` where the flag changes the result (or makes it impossible), ``refused`` where it is; else the test fails."""

    def words(own):
        flags = {str(w).split("=")[0] for w in own}
        budget = {"--total", "--mean-rank", "--budget"}
        pairs = list(zip(always[::2], always[1::2], strict=True)) if "=" not in "".join(map(str, always)) else []
        kept = [w for k, v in pairs if k not in flags and not (k in budget and budget & flags) for w in (k, v)]
        kept += [w for w in always if str(w).startswith("--budget=") and "--budget" not in flags]
        return [*command, *kept, *own]

    first = run(*words(without))
    try:
        second = run(*words(with_it))
    except InfeasibleBudget:
        return "used"
    except (InvalidInput, WrongCommand) as error:
        if not any(part in str(error) for part in REFUSED):
            raise
        return "refused"
    strip = lambda r: {k: v for k, v in r.items() if k not in ("scores_digest", "hyperparameters")}  # noqa: E731
    if strip(first) == strip(second) and (tight := TIGHT.get(str(with_it[-2]))) is not None:
        with pytest.raises(InfeasibleBudget):  # equal values everywhere feel a bound only when it forbids them
            run(*words([*with_it[:-1], tight]))
        return "used"
    assert strip(first) != strip(second), f"{command} ignores {with_it}"
    return "used"


def table_of(run, kind, flags):
    rows = {}
    for rule in rules_of(kind):
        command = ["plan", kind, "scores.json", "--rule", rule]
        if rule.startswith("calibrated"):
            continue  # what --curves makes of mdl and permuted; below
        rows[rule] = {}
        for flag, (without, with_it) in flags.items():
            try:
                rows[rule][flag] = cell(run, command, ALWAYS[kind], without, with_it)
            except (InvalidInput, WrongCommand) as error:
                if not any(
                    p in str(error) for p in ("has no option", "does not read", "Unknown option")
                ):  # the flag that makes the effect visible is itself refused
                    raise
                rows[rule][flag] = cell(run, command, ALWAYS[kind], [], alone(flag, with_it))
    return rows


def alone(flag, words):
    """A flag with its value, without what makes its effect visible."""
    start = words.index(flag)
    stop = next((i for i in range(start + 1, len(words)) if str(words[i]).startswith("--")), len(words))
    return words[start:stop]


@pytest.fixture(scope="module")
def tables(run):
    found = {
        kind: table_of(run, kind, flags)
        for kind, flags in (("sparsity", SPARSITY), ("lora-experts", EXPERTS), ("ranks", RANKS))
    }
    for rule in ("mdl", "permuted"):
        command = ["plan", "sparsity", "scores.json", "--rule", rule, "--curves", "curves.json"]
        own = {f: pair for f, pair in SPARSITY.items() if f != "--curves"}
        found["sparsity"][f"{rule} --curves"] = {"--curves": "used"}
        for flag, (without, with_it) in own.items():
            bare = flag == "--exponent-on" or (flag == "--seed" and rule == "mdl")
            pair = ([], alone(flag, with_it)) if bare else (without, with_it)
            found["sparsity"][f"{rule} --curves"][flag] = cell(run, command, [], *pair)
    found["joint"] = {"mdl": {f: cell(run, ["plan", "joint", "scores.json"], ALWAYS["joint"], *p) for f, p in JOINT.items()}}
    found["sweep"] = {
        "sparsity": {f: cell(run, ["explain", "sweep", "scores.json"], ["--budgets", 0.3], *p) for f, p in SWEEP.items()}
    }
    found["transfer"] = {
        program: {
            f: cell(
                run,
                ["explain", "transfer", "scores.json", "other.json", "--program", program],
                [],
                *([*priced, *w] for w in pair),
            )
            for f, pair in TRANSFER.items()
            for priced in [["--budget", "90k params"] if (program, f) == ("lora-experts", "--exponent-on") else []]
        }
        for program in ("sparsity", "lora-experts")
    }
    return found


MEASURED = {"--by", "--method", "--passes", "--pattern", "--resume", "--data", "--samples", "--length"}
MEASURED |= {"--batch-size", "--dtype", "--device", "--stream", "--no-stream", "--trust"}


def options_of_command(command, kind=None) -> set[str]:
    """Options of a command on scores, beside those of input and output, and what rules of its kind read."""
    flags = flags_of(" ".join(command))
    read = {f"--{n.replace('_', '-')}" for r in rules_of(kind).values() for n in r.options if n in OPTIONS} if kind else set()
    return (flags | read) - {"--out", "--rule", "--program"} - (MEASURED if kind == "sparsity" else set())


@pytest.mark.parametrize("kind", ["sparsity", "lora-experts", "ranks", "joint", "sweep"])
def test_every_flag_of_plan_has_a_cell_under_every_rule(tables, kind):
    ruled = kind if kind in ("sparsity", "lora-experts", "ranks") else None
    command = ["explain" if kind == "sweep" else "plan", kind]
    for rule, row in tables[kind].items():
        extra = {"--rule"} if kind == "sweep" else set()
        assert set(row) >= options_of_command(command, ruled) | extra, rule
        assert set(row.values()) <= {"used", "refused"}


def test_every_flag_of_transfer_has_a_cell(tables):
    for row in tables["transfer"].values():
        assert set(row) >= options_of_command(["explain", "transfer"])


def test_the_rules_that_read_nothing_refuse_everything(tables):
    for kind, rule, used in (
        ("sparsity", "uniform", {"--sparsity", "--max-sparsity", "--min-sparsity", "--exclude", "--fix"}),
        ("lora-experts", "mola-2468", {"--total", "--budget", "--min-experts", "--max-experts",
                                  "--expert-rank", "--latency", "--lower", "--bytes-per-parameter", "--fix"}),
        ("ranks", "by-rank", {"--mean-rank", "--budget", "--multiple", "--min-rank", "--max-rank", "--latency",
                              "--bytes-per-parameter", "--fix", "--damping"}),
    ):  # fmt: skip
        assert {f for f, what in tables[kind][rule].items() if what == "used"} == used


# --- score ------------------------------------------------------------------------------------------------------------------

# An option of an estimator's own: a value that shows, and what must be given with it for that.
OWN = {
    "fisher-gram": {"sketch": (2, {}), "replicates": (3, {})}, "fisher-mc": {"draws": (2, {})},
    "kfac": {"labels": ("data", {}), "draws": (2, {})}, "ekfac": {"labels": ("data", {}), "draws": (2, {})},
    "ggn": {"steps": (2, {}), "tolerance": (0.5, {})},
    "hessian": {"steps": (3, {}), "tolerance": (0.9, {"absolute": True}), "absolute": (True, {})},
    "adapter": {"rank": (2, {}), "scaling": (2.0, {"damping_unit": "absolute", "damping": 0.1}), "replicates": (3, {})},
    "rank-gain": {"largest": (3, {})},
    "layerif": {"validation": ("other", {}), "aggregation": ("positive", {})},
    "outlier-ratio": {"multiple": (2.0, {})},
}  # fmt: skip
VALUES = {"damping": 0.7, "damping_unit": "absolute", "batch_size": 1, "seed": 5}
WITH = {"damping_unit": {"damping": 0.7}}
QUICK = {"ggn": {"steps": 3}, "hessian": {"steps": 2}}  # few steps show as much
WALKED = ("gradient-norm", "fisher-diagonal", "fisher-gram", "fisher-mc", "kfac", "ekfac", "adapter", "rank-gain", "layerif",
          "fisher-trace")  # fmt: skip
for _name in WALKED:
    OWN[_name] = {**OWN.get(_name, {}), "walk": ("layers", {})}
PASSES = ("batch_size", "walk")  # decide how many passes there are, and no number


@pytest.fixture(scope="module")
def tiny():
    """A small model, text, and a counter of forward passes."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, initializer_range=0.3, sliding_window=None, attn_implementation="eager",
    )  # fmt: skip
    model = MistralForCausalLM(config).double().eval()
    ids = torch.randint(3, 41, (8, 7), generator=torch.Generator().manual_seed(1))
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    return model, CalibrationSet(input_ids=ids), CalibrationSet(input_ids=ids.flip(1)[:3]), passes, {}


def scored(tiny, name, **options):
    """A record without provenance, and how many forward passes it took."""
    model, data, other, passes, known = tiny
    key = json.dumps([name, options], sort_keys=True)
    if key not in known:
        known[key] = _scored(model, data, other, passes, name, options)
    return known[key]


def _scored(model, data, other, passes, name, options):
    options = {**(QUICK.get(name, {}) if "tolerance" not in options else {}), **options}
    if options.get("validation") == "other":
        options["validation"] = other
    passes.clear()
    found = score(model, data, partition(model), name, **options)
    record = dataclasses.replace(found, versions={}, model={}, data={}, seed=0, damping=(0.0,) * len(found.damping), unit="")
    extra = {k: v for k, v in found.extra.items() if k not in ("draws", "rank", "scaling", "multiple", "share", "width")}
    return json.loads(json.dumps(dataclasses.replace(record, extra=extra).to_dict(), default=str)), len(passes)


def score_cell(tiny, name, option, value, more) -> str:
    try:
        with_it, passes = scored(tiny, name, **{**more, option: value})
    except InvalidInput as error:
        if "has no option" not in str(error) and "what Lanczos on one block does not know" not in str(error):
            raise
        return "refused"
    without, before = scored(tiny, name, **more)
    changed = passes != before if option in PASSES else with_it != without
    assert changed, f"{name} ignores {option}"
    return "used"


@pytest.fixture(scope="module")
def score_tables(tiny):
    found = {}
    for name, one in ESTIMATORS.all().items():
        row = {}
        for option in SHARED:
            if option not in one.options:
                row[option] = score_cell(tiny, name, option, VALUES[option], {})
                assert row[option] == "refused"
                continue
            row[option] = score_cell(tiny, name, option, VALUES[option], WITH.get(option, {}))
        own = [o for o in one.options if o not in SHARED]
        assert set(own) == set(OWN.get(name, {})), f"{name}: say in OWN how each of {own} shows"
        for option in own:
            value, more = OWN[name][option]
            row[option] = score_cell(tiny, name, option, value, more)
        row["excess"] = excess_cell(tiny, name)
        found[name] = row
    return found


def excess_cell(tiny, name) -> str:
    model, data = tiny[:2]
    more = {"batch_size": 1} if name in ("gradient-norm", "kfac", "ekfac", "rank-gain") else {}
    found = score(model, data, partition(model), name, **more, **QUICK.get(name, {}))
    try:
        less = subtract_floor(found)
    except InvalidInput:
        return "refused"
    assert less.gain != found.gain
    if "increments" in found.extra:
        assert less.extra["increments"] != found.extra["increments"]
    return "used"


def test_every_option_of_score_is_heard_or_refused_by_every_estimator(score_tables):
    for name, row in score_tables.items():
        assert set(row.values()) <= {"used", "refused"}, name
    for name in ("layerif", "spectral-tail", "ablation", "gradient-norm", "fisher-trace", "outlier-ratio", "block-influence"):
        assert score_tables[name]["damping"] == score_tables[name]["damping_unit"] == "refused"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kfac", {"labels": "data", "draws": 2}), ("ekfac", {"labels": "data", "seed": 2}),
    ],
)  # fmt: skip
def test_options_that_another_one_silences_are_refused(tiny, name, options):
    with pytest.raises(InvalidInput):
        scored(tiny, name, **options)


# --- score, the flags beside those of estimators -----------------------------------------------------------------------------

SCORE_FLAGS = {
    "--data": ("--data", "more.txt"), "--samples": ("--samples", "5"), "--length": ("--length", "7"), "--seed": ("--seed", "4"),
    "--dtype": ("--dtype", "bfloat16"), "--device": ("--device", "nowhere"),
    "--by": ("--by", "linear"), "--include": ("--include", "mlp"), "--exclude": ("--exclude", "mlp"),
    "validation": ("--validation", "MORE"), "--resume": ("--resume", "stage"), "--import": ("--import", "own.csv"),
    "orientation": ("--orientation", "redundancy"), "nothing": ("--nothing", "1"), "--four-bit": ("--four-bit",),
}  # fmt: skip
COLUMNS = {"gradient-norm": ("--estimator", "gradient-norm"), "layerif": ("--estimator", "layerif"),
           "spectral-tail": ("--estimator", "spectral-tail"), "--import": ("--import", "own.csv")}  # fmt: skip


@pytest.fixture(scope="module")
def flag_table(tiny, tokenizer, tmp_path_factory):
    from layerbudget.cli import main

    folder = tmp_path_factory.mktemp("score")
    model = type(tiny[0])(type(tiny[0].config)(**{**tiny[0].config.to_dict(), "vocab_size": 96})).eval()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, shift in (("text", 0), ("more", 3)):
        (folder / f"{name}.txt").write_text("".join(chr(33 + (7 * i * i + shift * i) % 80) for i in range(900)))
    (folder / "own.csv").write_text("name,score\n" + "".join(f"{b.name},{i + 1}\n" for i, b in enumerate(partition(model))))
    (folder / "linear.csv").write_text("name,score\n" + "".join(f"{b.name},1\n" for b in partition(model, "linear")))

    def run(*words):
        out = folder / "scores.json"
        out.unlink(missing_ok=True)
        words = [
            str(folder / w) if (folder / w).exists() or w == "stage" else w.replace("MORE", str(folder / "more.txt"))
            for w in words
        ]
        rc = main(["score", str(folder / "model"), *words, "-o", str(out), "--quiet"])
        if rc:
            return rc
        record = json.loads(out.read_text())
        record.pop("versions")
        return record

    def text(column, *own):
        defaults = {"--data": "text.txt", "--samples": "9", "--length": "6"}
        left = {} if column in ("spectral-tail", "--import") else {k: v for k, v in defaults.items() if k not in own}
        return [w for pair in left.items() for w in pair]

    table = {}
    for column, words in COLUMNS.items():
        table[column] = {}
        plain = run(*words, *text(column))
        assert isinstance(plain, dict), column
        for flag, own in SCORE_FLAGS.items():
            if flag == column:
                table[column][flag] = "used"
                continue
            if (flag, column) == ("--by", "--import"):
                own, words = own, ("--import", "linear.csv")
            found = run(*words, *text(column, *own), *own)
            if flag == "--resume" and found != 2:
                assert found == plain and list((folder / "stage").iterdir())
                table[column][flag] = "used"
                continue
            assert found != plain, f"score {column} ignores {flag}"
            table[column][flag] = "refused" if found == 2 else "used"
            words = COLUMNS[column]
    return table


def test_flags_of_score_are_heard_or_refused(flag_table, capsys):
    refused = {column: {f for f, what in row.items() if what == "refused"} for column, row in flag_table.items()}
    local = {"--device", "--four-bit", "nothing"}  # no such device, no bitsandbytes, no such option
    own = {"orientation", "--import"}
    assert refused["gradient-norm"] == local | own | {"validation"}
    assert refused["layerif"] == local | own
    text = {"--data", "--samples", "--length", "--seed", "validation"}
    assert refused["spectral-tail"] == local | text | own
    assert refused["--import"] == local | text | {"--resume", "--dtype"}


@pytest.mark.parametrize("command", sorted(requests_of_all()))
def test_what_is_not_typed_is_named_with_what_it_is(command):
    """Option after option, as each is missed, until the command has all that it needs."""
    request, words, missed = requests_of_all()[command], [], []
    needed = {name: field for name, field in request.options().items() if field.default is dataclasses.MISSING}
    while len(missed) < len(needed):
        with pytest.raises(WrongCommand, match=" is missing: ") as error:
            parse(request, words, "")
        missed.append(str(error.value).split(" is missing: ")[0].split()[0])
        name = next(
            n for n, f in needed.items() if missed[-1] in (f.metadata["metavar"], flag_of(request, n), f.metadata["short"])
        )
        words += ["4"] if positional(name, needed[name]) else [flag_of(request, name), "4"]
    assert len(set(missed)) == len(needed)


def test_words_that_nothing_takes_are_named_beside_what_is_missing():
    with pytest.raises(WrongCommand, match=r"^-o DIR is missing: .*\. Nothing takes b.json --model x\.$"):
        parse(requests_of_all()["compare"], ["a.json", "b.json", "--model", "x"], "")
