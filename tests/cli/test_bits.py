"""``plan bits`` and ``quantize`` from end to end, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.decisions.memory.plan import files_of
from layerbudget.errors import InvalidInput

pytest.importorskip("compressed_tensors")
pytest.importorskip("gguf")
SMALL = ["--samples", "4", "--length", "32", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bits")


@pytest.fixture(scope="module")
def plan(folder):
    words = [
        "--bits",
        "4.0",
        "--group",
        "32",
        "--draws",
        "1",
        "--check",
        "2",
        "--save-scores",
        str(folder / "scores.json"),
    ]
    assert main(["plan", "bits", "demo", *words, *SMALL, "-o", str(folder / "bits.json")]) == 0
    return folder / "bits.json"


@pytest.fixture(scope="module")
def source(folder):
    """A GGUF file of the model in 16 bits, as a conversion writes it."""
    plan, quick = str(folder / "f16.json"), [*SMALL, "--draws", "1", "--check", "0"]
    assert main(["plan", "bits", "demo", "--bits", "16", "--format", "gguf", "--formats", "F16", *quick, "-o", plan]) == 0
    assert main(["apply", "demo", plan, "--quiet", "-o", str(folder / "F16")]) == 0
    return folder / "F16" / "model.gguf"


def document(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def sentence(capsys, *words):
    assert main([str(w) for w in words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_plan_write_count_and_measure(folder, plan, capsys):
    done = document(capsys, "apply", "demo", plan, "-o", folder / "written", "--quiet")
    made = json.loads(plan.read_text())
    assert done["bytes"] == done["planned"] == made["budget"]["spent"] <= made["budget"]["limit"]
    assert done["tensors"] == made["budget"]["tensors"]
    assert sum(f.stat().st_size for f in (folder / "written").glob("*.safetensors")) == done["file"]
    result = document(capsys, "evaluate", folder / "written", "--windows", 4, "--length", 64, "--quiet")
    assert result["perplexity"]["stdlib"]["value"] < 60
    told = document(capsys, "explain", plan)
    assert made["extra"]["check"]["verdict"] in told["sentences"]
    main(["report", str(folder), "-o", str(folder / "page.html")])
    assert "bits, rule" in (folder / "page.html").read_text()


def test_a_model_that_float32_would_copy_stays_in_its_file(folder, capsys, monkeypatch):
    """What would be a copy of more than .75 GiB is computed, rounded and written a layer at a time, to the same bytes."""
    model, name = lb.load_model("demo"), str(folder / "halved")
    lb.write_model(model.to(torch.bfloat16), lb.load_tokenizer("demo"), name)
    cheap = ["--rule", "mix", "--samples", 1, "--length", 32, "--check", 0]
    document(capsys, "plan", "bits", name, "--like", "Q4_K_M", *cheap, "-o", folder / "mix.json")
    evaluate = ["evaluate", name, "--dtype", "float32", "--windows", 2, "--length", 32]
    made = []
    for room, out in ((1 << 30, "whole"), (0, "streamed")):
        monkeypatch.setattr("layerbudget.models.loading._COPY", room)
        applied = document(capsys, "apply", name, folder / "mix.json", "-o", folder / out)
        evaluated = document(capsys, *evaluate)
        assert (applied["expected"]["how"] == "streamed") == (evaluated["expected"]["how"] == "streamed") == (out == "streamed")
        made.append(((folder / out / "model.gguf").read_bytes(), applied["llama_cpp"], evaluated["perplexity"]))
    assert made[0] == made[1]


def test_every_number_of_bytes_says_of_what_it_is(folder, plan, capsys):
    """``apply`` told the bytes of the matrices and those of the file in one sentence: 5.85 and 7.99 MB, and not why."""
    commands = (
        ("plan", "bits", folder / "scores.json", "--bits", 4, "-o", folder / "told.json"),
        ("explain", plan),
        ("explain", "diff", plan, folder / "told.json"),
        ("explain", "sweep", folder / "scores.json", "--kind", "bits", "--budgets", 3, 4),
        ("apply", "demo", plan, "-o", folder / "told", "--quiet"),
    )
    for words in commands:
        assert main([str(w) for w in words]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        alone = [
            shown[max(0, m.start() - 60) : m.end() + 20] for m in re.finditer(r"[\d,]{4,} bytes(?! of | that are left)", shown)
        ]
        assert all("whole file has" in words or "a file of" in words for words in alone), alone
    receipt = json.loads((folder / "told" / "receipt.json").read_text())
    assert f"Recounted {receipt['bytes']:,} bytes of the planned matrices" in shown
    assert f"The whole file has {receipt['file']:,} bytes: {receipt['tensors'] - receipt['bytes']:,} more for tensors" in shown


def test_a_file_that_would_not_fit_on_the_disk_is_not_made(folder, plan, capsys, monkeypatch):
    sound = shutil.disk_usage
    monkeypatch.setattr("layerbudget.storage.writing.shutil.disk_usage", lambda path: sound(path)._replace(free=20_000))
    assert "are free" in sentence(capsys, "apply", "demo", plan, "-o", folder / "nowhere", "--quiet")
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("method", ["gptq", "descent"])
def test_a_gguf_file_gets_its_rounding_from_the_inputs_of_its_model(tmp_path, capsys, method):
    """The same tensors as the model's own file; text beside a file alone is refused with what works."""
    gguf = pytest.importorskip("gguf")
    folder, model, quick = tmp_path, tmp_path / "model", [*SMALL, "--draws", "1", "--check", "0", "--format", "gguf"]
    few = ["--formats", "Q4_0,Q5_1,Q8_0", "--rows", "4"]
    zoo.build("llama", hidden_size=64, intermediate_size=64, vocab_size=2048).save_pretrained(model)
    lb.load_tokenizer("demo").save_pretrained(model)
    plain, fine, place = folder / "f16.json", folder / "feedback.json", folder / "own"
    document(capsys, "plan", "bits", model, "--bits", "16", "--formats", "F16", *quick, "-o", plain)
    document(capsys, "apply", model, plain, "--quiet", "-o", folder / "F16")
    told = document(capsys, "plan", "bits", model, "--bits", "6", "--method", method, *few, *quick, "-o", fine)
    assert told["next"] == f"layerbudget apply {model} {fine} -o DIR"
    document(capsys, "apply", model, fine, *SMALL, "-o", place)
    source, out = folder / "F16" / "model.gguf", folder / "planned.gguf"
    done = document(capsys, "apply", source, fine, "--inputs", str(model), *SMALL, "-o", out)
    assert done["method"] == method and done["planned"] == done["bytes"]
    own, placed = ({t.name: t.data.tobytes() for t in gguf.GGUFReader(f).tensors} for f in (place / "model.gguf", out))
    assert own == placed
    assert "Add --inputs MODEL" in sentence(capsys, "apply", source, fine, "-o", folder / "no.gguf")
    read_late = "--inputs", folder / "no-model"  # the file is looked at before the model is loaded
    assert "There is no file" in sentence(capsys, "apply", folder / "none.gguf", fine, *read_late, "-o", folder / "no.gguf")
    said = sentence(capsys, "apply", source, fine, "--method", "rtn", "--data", "stdlib", "-o", folder / "no.gguf")
    assert "--inputs MODEL reads text" in said and not (folder / "no.gguf").exists()


def test_a_gguf_file_that_a_plan_was_made_on_has_the_inputs_that_its_method_reads(folder, source, capsys):
    """The command after ``Next:`` was refused; of rows in few bits it still is."""
    quick, out = [*SMALL, "--draws", "1", "--check", "0", "--format", "gguf"], folder / "itself"
    out.mkdir()
    capsys.readouterr()
    for bits, form, method in (("8.5", "Q8_0", "weighted"), ("6", "Q4_0,Q5_1", "gptq")):
        plan, file, again = out / f"{method}.json", out / f"{method}.gguf", out / "again.gguf"
        options = ["--bits", bits, "--formats", form, "--method", method, "--rows", "4", *quick]
        told = document(capsys, "plan", "bits", source, *options, "-o", plan)
        document(capsys, *shlex.split(told["next"].replace("DIR", str(file)))[1:], "--overwrite")
        document(capsys, "apply", source, plan, "--inputs", source, "-o", again, "--quiet", "--overwrite")
        assert file.read_bytes() == again.read_bytes()
        source = file  # the first one, in 8 bits, is planned and rounded too
    assert "Add --inputs MODEL" in sentence(capsys, "apply", file, plan, "-o", out / "no.gguf")


def test_a_gguf_file_that_gets_a_fit_is_said_to_cost_what_was_measured_of_both(folder, source, capsys):
    """The weights alone were named, which nothing had measured; and the command that follows left the cache out."""
    fit, quick = folder / "both.json", [*SMALL, "--draws", "1"]
    capsys.readouterr()
    given = ["--memory", "8 MiB", "--context", "64", "--formats", "Q4_0,Q8_0", "--check", "1"]
    document(capsys, "plan", "memory", "demo", *given, *quick, "-o", fit)
    done = document(capsys, "apply", source, fit, "-o", folder / "fit.gguf")
    check = json.loads(fit.read_text())["extra"]["check"]["rows"]
    cost = f"{check[json.loads(fit.read_text())['rule']]['kl']:.3g} nats per token were measured on held-out text"
    assert cost in done["verdict"] and "--cache-type-k" in done["next"]
    assert done["llama_cpp"].startswith("llama.cpp loads the file; ")
    document(capsys, "apply", source, fit, "--no-check", "-o", folder / "fit")
    assert json.loads((folder / "fit" / "receipt.json").read_text())["llama_cpp"] == ""
    beside = {name: (folder / "fit" / name).read_text() for name in ("cache.txt", "cache.json")}
    assert beside == files_of(lb.Plan.load(fit)) and "$(cat cache.txt)" in (folder / "fit" / "README.md").read_text()


def test_a_model_that_is_not_written_as_gguf_gets_the_way_that_works(tmp_path, capsys):
    model, tokenizer = zoo.build("gpt-neox", hidden_size=64, intermediate_size=64, vocab_size=2048), lb.load_tokenizer("demo")
    model.save_pretrained(tmp_path / "neox")
    tokenizer.save_pretrained(tmp_path / "neox")
    quick, out = [*SMALL, "--draws", "1", "--check", "0"], tmp_path / "bits.json"
    told = document(
        capsys, "plan", "bits", tmp_path / "neox", "--bits", "6", "--format", "gguf", "--method", "gptq", *quick, "-o", out
    )
    assert told["next"] == f"layerbudget apply model-f16.gguf {out} --inputs {tmp_path / 'neox'} -o planned.gguf"
    assert "convert_hf_to_gguf.py" in sentence(capsys, "apply", tmp_path / "neox", out, *SMALL, "-o", tmp_path / "no")
    fit, terms = tmp_path / "fit.json", ["--memory", "1500 KiB", "--context", "32", "--cache", "F16"]
    told = document(capsys, "plan", "memory", tmp_path / "neox", *terms, *quick, "-o", fit)
    assert told["next"] == f"layerbudget apply model-f16.gguf {fit} -o planned.gguf"


@pytest.mark.parametrize(
    ("method", "options"), [("gptq", []), ("gptq", ["--equal-tokens"]), ("descent", ["--sweeps", "1", "--shrinkage", "0.1"])]
)
def test_a_method_reads_its_data(saved_model, tmp_path, capsys, method, options):
    model, plan, quick = saved_model("llama"), tmp_path / "plan.json", ["--group", "16", "--draws", "1", "--check", "0"]
    document(capsys, "plan", "bits", model, "--bits", "5", *quick, *SMALL, "-o", plan)
    words = ("--method", method, "--damping", "0.1", *options, *SMALL)
    done = document(capsys, "apply", model, plan, *words, "-o", tmp_path / method)
    assert done["method"] == method and done["bytes"] == done["planned"]


def test_what_was_measured_serves_other_budgets(folder, plan, capsys):
    scores = folder / "scores.json"
    again = document(capsys, "plan", "bits", scores, "--bits", "4.0", "-o", folder / "again.json")
    assert again["blocks"] == json.loads(plan.read_text())["blocks"] or json.loads(plan.read_text())["rule"] != "exact"
    rows = document(capsys, "explain", "sweep", scores, "--kind", "bits", "--budgets", 3, 4, 5)["rows"]
    assert [r["front"] for r in rows] == [1, 1, 1]
    given = ["--rule", "uniform", "--forbid", "w2-g32,w6-g32", "--keep", "q_proj=w8-g32"]
    assert main(["explain", "sweep", str(scores), "--kind", "bits", "--budgets", "5", "6", *given]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{scores} --bits 6 --rule uniform --forbid w2-g32,w6-g32 --keep q_proj=w8-g32 -o plan.json" in shown
    assert document(capsys, "explain", "diff", plan, folder / "again.json")["kind"] == "bits"


def test_exports_are_what_other_tools_read(folder, plan, capsys):
    document(capsys, "export", plan, "--to", "auto-round", "-o", folder / "layers.json")
    made, formats = json.loads((folder / "layers.json").read_text()), json.loads(plan.read_text())["extra"]["formats"]
    assert {n: f"w{w['bits']}-g32" for n, w in made.items() if w["bits"] < 16} == {
        n: f for n, f in formats.items() if f != "bf16"
    }
    assert "holds no gguf formats" in sentence(capsys, "export", plan, "--to", "tensor-types", "-o", folder / "types.txt")


def test_options_without_meaning_are_refused(folder, plan, capsys):
    scores = folder / "scores.json"
    flags = {"--formats": "w4-g32", "--by": "layer", "--group": "64", "--draws": "4", "--check": "0",
             "--samples": 3, "--save-scores": "x", "--resume": "x"}  # fmt: skip
    for flag, value in flags.items():
        assert f"{flag} has no meaning for scores" in sentence(capsys, "plan", "bits", scores, "--bits", 4, flag, value)
    assert "--samples has no meaning for the method rtn" in sentence(
        capsys, "apply", "demo", plan, "--samples", 3, "-o", folder / "no"
    )
    assert "rtn has no option damping" in sentence(
        capsys, "apply", "demo", plan, "--damping", "1", "-o", folder / "no", "--quiet"
    )
    assert not (folder / "no").exists()


def test_what_saved_scores_were_measured_with_may_be_named_again(folder, plan, capsys):
    """``--runtime`` beside saved scores was refused as without meaning, also where it was theirs."""
    scores = folder / "scores.json"
    own = {"--runtime": "transformers", "--format": "compressed-tensors", "--method": "rtn"}
    same = document(capsys, "plan", "bits", scores, "--bits", 4, *(w for pair in own.items() for w in pair))
    assert same["extra"]["runtime"] == "transformers"
    for flag, other in {"--runtime": "vllm", "--format": "gguf", "--method": "gptq"}.items():
        said = sentence(capsys, "plan", "bits", scores, "--bits", 4, flag, other)
        assert f"was measured with {flag} {own[flag]}, not {other}" in said
        assert f"Leave {flag} out, or measure again: layerbudget plan bits MODEL {flag} {other} --save-scores FILE." in said


def test_bad_input_is_one_sentence_and_nothing_is_written(folder, plan, capsys):
    scores, out = folder / "scores.json", folder / "none.json"
    assert "smallest plan takes" in sentence(capsys, "plan", "bits", scores, "--bits", 1.5, "-o", out)
    assert "not in bytes" in sentence(capsys, "plan", "bits", scores, "--budget", "3M params", "-o", out)
    assert "can be stored in w4-g128" in sentence(
        capsys, "plan", "bits", "demo", "--bits", 4, "--formats", "w4-g128", *SMALL, "-o", out
    )
    assert "no format 'q3_x'" in sentence(capsys, "plan", "bits", "demo", "--bits", 4, "--formats", "q3_x", *SMALL, "-o", out)
    assert "check is -1" in sentence(capsys, "plan", "bits", "demo", "--bits", 4, "--check", "-1", *SMALL, "-o", out)
    assert "exists already" in sentence(capsys, "plan", "bits", scores, "--bits", 4, "-o", plan)
    assert not out.exists()
    ranks = folder / "ranks.json"
    main(["plan", "ranks", str(_config(folder)), "--rule", "uniform", "--mean-rank", "4", "-o", str(ranks)])
    assert "layerbudget finetune, or make another" in sentence(capsys, "apply", "demo", ranks, "-o", folder / "none")
    cache = folder / "cache.json"
    main(
        [
            "plan",
            "cache",
            "demo",
            "--bits",
            "16",
            "--context",
            "32",
            "--rule",
            "uniform",
            "--check",
            "0",
            *SMALL,
            "-o",
            str(cache),
        ]
    )
    assert "layerbudget export, or make another" in sentence(capsys, "apply", "demo", cache, "-o", folder / "none")
    assert "--pattern has no meaning" in sentence(capsys, "apply", "demo", plan, "--pattern", "2:4", "-o", folder / "none")
    assert not (folder / "none").exists()


def _config(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}))
    return path


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("kind", ["bits", "memory"])
def test_a_plan_that_apply_writes_no_file_of_is_followed_by_an_export(saved_model, tmp_path, capsys, kind, name):
    """The command that followed was refused."""
    model, out = str(saved_model(name)), str(tmp_path / "plan.json")
    size = {
        "bits": ["--bits", "9"],
        "memory": ["--memory", "1 MiB", "--context", "32", "--cache", "bf16", "--forbid", "bf16"],
    }[kind]
    words = ["plan", kind, model, *size, "--runtime", "transformers", "--samples", "2", "--length", "16", "--quiet", "--json"]
    words += ["--group", "16", "--draws", "1", "--check", "0", "-o", out]
    assert main([*words, "--unwritten", "plan"]) == 0
    follows = json.loads(capsys.readouterr().out)["next"]
    assert follows == f"layerbudget export {out} --to auto-round"
    assert main([*shlex.split(follows)[1:], "-o", str(tmp_path / "table")]) == 0


def test_apply_reads_the_text_of_the_plan_and_never_that_of_its_check(folder, plan, capsys, monkeypatch):
    """128 sequences were read, and among them those that the plan was checked on."""
    import layerbudget.decisions.bits.apply as module

    whole = lb.calibration("stdlib", lb.load_tokenizer("demo"), samples=6, length=32)
    decided, checked = ({tuple(r.tolist()) for r in part} for part in (whole.input_ids[:4], whole.input_ids[4:]))
    given = []

    def spied(model, plan, out, data=None, **options):
        given.append({tuple(r.tolist()) for r in data.input_ids})
        raise InvalidInput("Seen.", "", "")

    monkeypatch.setattr(module, "write_bits", spied)
    words = ("apply", "demo", plan, "--method", "gptq", "-o", folder / "alike")
    assert "Seen" in sentence(capsys, *words, "--samples", 4) and given[-1] == decided
    said = sentence(capsys, *words)  # rounding to nearest, which the plan was measured with, learns no inputs
    assert re.search(r"gptq wants 4 tokens for each of the [\d,]+ columns .* samples of 32 tokens are taken, not 4", said)
    assert given[-1] > decided and not given[-1] & checked
    said = sentence(capsys, *words, "--samples", 12)
    assert len(given[-1]) == 12 and given[-1] > decided and not given[-1] & checked
    assert "The 2 sequences that checked the plan are left out" in said
    assert "may be read" in sentence(capsys, *words, "--length", 16)
    sentence(capsys, *words, "--data", "README.md", "--length", 16)
    assert not given[-1] & decided and len(given[-1]) > 4  # of another text as much as of any


def test_a_plan_from_scores_that_were_kept_knows_its_text(folder, plan, capsys):
    out = folder / "text.json"
    document(capsys, "plan", "bits", folder / "scores.json", "--bits", "5", "-o", out)
    again, first = lb.Plan.load(out), lb.Plan.load(plan)
    assert again.data == first.data and again.data["samples"] == 4 and again.data["length"] == 32
    assert "--samples" not in again.made_by


def test_one_file_is_replaced_and_never_the_one_that_is_read(source, capsys, tmp_path):
    gguf = pytest.importorskip("gguf")
    quick = [*SMALL, "--draws", "1", "--check", "0", "--format", "gguf"]
    eight, place = tmp_path / "q8.json", tmp_path / "F16"
    shutil.copytree(source.parent, place)
    capsys.readouterr()
    document(capsys, "plan", "bits", "demo", "--bits", "9", "--formats", "Q8_0", *quick, "-o", eight)
    source, out = place / "model.gguf", tmp_path / "planned.gguf"
    out.write_bytes(b"GGUF of somebody else")
    assert "exists already" in sentence(capsys, "apply", source, eight, "-o", out)
    for _ in range(2):
        document(capsys, "apply", source, eight, "-o", out, "--overwrite")
        assert "Q8_0" in {t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    (tmp_path / "link.gguf").symlink_to(source)
    (tmp_path / "twin.gguf").hardlink_to(source)
    before = source.read_bytes()
    for same in (source, tmp_path / "link.gguf", tmp_path / "twin.gguf", place / ".." / "F16" / "model.gguf"):
        assert "is the same" in sentence(capsys, "apply", source, eight, "-o", same, "--overwrite")
    assert "is the same" in sentence(capsys, "apply", source, eight, "-o", place, "--overwrite")
    assert "is the same" in sentence(capsys, "apply", place, eight, "-o", place, "--overwrite")
    assert source.read_bytes() == before
    assert "becomes a folder" in sentence(capsys, "apply", "demo", eight, "-o", tmp_path / "demo.gguf")


def test_no_command_writes_over_what_it_reads(folder, plan, capsys, tmp_path):
    kept, made = tmp_path / "scores.json", tmp_path / "plan.json"
    shutil.copy(folder / "scores.json", kept)
    shutil.copy(plan, made)
    for words in (
        ("plan", "bits", kept, "--bits", "5", "-o", kept),
        ("export", made, "-o", made),
        ("plan", "bits", "demo", "--bits", "5", "--data", made, "-o", made),
        ("plan", "bits", "demo", "--bits", "5", "--imatrix", str(kept), "-o", kept),
        ("evaluate", "demo", "--against", made, "-o", made),
    ):
        assert "is the same" in sentence(capsys, *words, "--overwrite")
    assert "is the same" in sentence(capsys, "export", tmp_path, "-o", made, "--overwrite")
    words = ("plan", "bits", "demo", "--bits", "5", "-o", tmp_path / "x.json", "--save-scores", tmp_path / "x.json")
    assert "--save-scores and --out are both" in sentence(capsys, *words)
    assert kept.read_text() == (folder / "scores.json").read_text() and made.read_text() == plan.read_text()
