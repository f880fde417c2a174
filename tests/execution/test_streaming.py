"""Weights that stay in their files: the same scores, masks, checkpoints and perplexities, in bounded memory."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from tests.execution.test_backward import ESTIMATORS, data_for, numbers

import layerbudget as lb
from layerbudget.decisions.expert_pruning.plan import plan_expert_pruning
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.decisions.sparsity.save import save_pruned
from layerbudget.errors import BadModel, CorruptFile, CoverageError, InvalidInput, ModelMismatch, NotFound
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.execution.inputs import InputMoments
from layerbudget.models.blocks import fingerprint, partition
from layerbudget.models.loading import load_model
from layerbudget.models.offload import Mapped, mapped
from layerbudget.sensitivity.gain import score

MODELS = ("llama-tied", "gemma2", "gpt2", "phi3", "bert")
PAIRS = [*(("bfloat16", name) for name in MODELS), ("float32", "llama-tied"), ("float32", "gpt2")]
# What reads layers from files is one code for all: further shapes of layers take the longer way.
FEW = [p if p[1] in ("llama-tied", "gpt2", "mixtral") else pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints in several shards, by architecture and precision."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}
    for name in (*MODELS, "mixtral"):
        for dtype in (torch.float32, torch.bfloat16):
            folder = root / f"{name}-{str(dtype)[6:]}"
            zoo.build(name).to(dtype).save_pretrained(folder, max_shard_size="20KB")
            made[name, str(dtype)[6:]] = folder
    return made


@pytest.mark.parametrize("stored, name", PAIRS)
def test_scores_masks_and_perplexity_are_those_of_the_whole_model(folders, name, stored, tmp_path):
    """Stored in bfloat16 and computed in float32, every layer comes and goes; stored in float32, it is mapped."""
    folder = str(folders[name, stored])
    whole, streamed = (load_model(folder, dtype="float32", stream=s) for s in (False, True))
    assert mapped(whole) is None and mapped(streamed).converts == (stored == "bfloat16")
    assert fingerprint(whole) == fingerprint(streamed)
    data, blocks = data_for(whole, name), partition(whole, "layer")
    assert [b.to_dict() for b in partition(streamed, "layer")] == [b.to_dict() for b in blocks]
    labels = ESTIMATORS if name == "llama-tied" else ("fisher-gram", "ekfac", "rank-gain", "layerif")
    for label, options in ((label, ESTIMATORS[label]) for label in labels):
        a, b = (numbers(score(m, data, blocks, label.split()[0], walk="layers", **options)) for m in (whole, streamed))
        assert np.allclose(a, b, rtol=1e-5, atol=1e-7 * np.nanmax(np.abs(a)), equal_nan=True), label
    for estimator in ("outlier-ratio", "spectral-tail", "block-influence", "ablation"):
        a, b = (numbers(score(m, data, blocks, estimator)) for m in (whole, streamed))
        assert np.allclose(a, b, rtol=1e-5, equal_nan=True), estimator
    if name != "bert":
        text = zoo.tokens()
        assert perplexity(streamed, text).value == pytest.approx(perplexity(whole, text).value, rel=1e-6)
    plan = plan_sparsity(score(whole, data, blocks, "fisher-trace"), sparsity=0.5)
    for method in ("magnitude", "wanda", "sparsegpt"):
        dense, lean = (load_model(folder, dtype="float32", stream=s) for s in (False, True))
        receipts = [prune(m, plan, None if method == "magnitude" else data, method) for m in (dense, lean)]
        assert receipts[0].sparsity == receipts[1].sparsity
        out = save_pruned(lean, None, plan, receipts[1], tmp_path / method)
        again = load_model(str(out), dtype="float32")
        theirs = dict(again.named_parameters())
        for key, p in dense.named_parameters():
            assert torch.equal(p == 0, theirs[key] == 0), (method, key)
            assert torch.allclose(p, theirs[key], rtol=1e-5, atol=1e-6), (method, key)
    fresh = load_model(folder, dtype="float32")
    assert fingerprint(fresh) == fingerprint(whole)  # the files were not written to


def test_a_pruning_run_resumes_on_a_streamed_model(folders, tmp_path):
    folder = str(folders["llama-tied", "float32"])
    model = load_model(folder, stream=True)
    data, blocks = zoo.tokens(padded=True), partition(model, "layer")
    plan = plan_sparsity(score(model, data, blocks, "fisher-trace"), sparsity=0.5)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(model, plan, data, "wanda", resume=tmp_path / "parts", progress=stop)
    again, whole = (load_model(folder, stream=s) for s in (True, False))
    prune(again, plan, data, "wanda", resume=tmp_path / "parts")
    prune(whole, plan, data, "wanda")
    for (name, a), b in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_fused_experts_are_converted_by_transformers_and_scored(folders):
    for stored in ("float32", "bfloat16"):
        folder = str(folders["mixtral", stored])
        whole, streamed = (load_model(folder, dtype="float32", stream=s) for s in (False, True))
        data, blocks = zoo.tokens(4, 8), partition(whole, "layer")
        for estimator in ("fisher-gram", "fisher-trace"):
            a, b = (score(m, data, blocks, estimator, walk="layers").gain for m in (whole, streamed))
            assert np.allclose(a, b, rtol=1e-4), (stored, estimator)


def test_experts_that_stay_are_chosen_from_files_with_both_ends_at_rest(tmp_path, monkeypatch):
    """Stored in bfloat16 with a tensor for every expert, computed in float32: stacks lie in files, ends come when they run."""
    from layerbudget.models import offload

    zoo.build("qwen3-moe").to(torch.bfloat16).save_pretrained(tmp_path)
    spilled, zeros = [], offload.zeros_in_file
    monkeypatch.setattr(offload, "zeros_in_file", lambda shape, *more: spilled.append(tuple(shape)) or zeros(shape, *more))
    plans = []
    for stream in (False, True):
        model = load_model(str(tmp_path), dtype="float32", stream=stream)
        plans.append(plan_expert_pruning(model, zoo.tokens(4, 12, vocabulary=61), 0.5))
    stacks = [tuple(p.shape) for p in model.parameters() if p.ndim == 3]
    assert sorted(spilled) == sorted(stacks) and stacks
    dense, lean = plans
    assert dense.payload.kept == lean.payload.kept
    assert lean.payload.measured_here == pytest.approx(dense.payload.measured_here, rel=1e-4)
    kinds = {p.dtype for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    assert torch.bfloat16 in kinds and {p.dtype for p in model.model.layers[0].parameters()} == {torch.bfloat16}
    mapped(model).hold_ends()
    ends = [end.weight for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    assert {end.dtype for end in ends} == {torch.float32} and sorted(spilled[len(stacks) :]) == [tuple(e.shape) for e in ends]
    monkeypatch.setattr("layerbudget.storage.writing.shutil.disk_usage", lambda where: type("Disk", (), {"free": 10})())
    with pytest.raises(InvalidInput, match="are free in"):
        load_model(str(tmp_path), stream=True)


def test_moments_of_many_inputs_lie_among_temporary_files(tmp_path, monkeypatch):
    from layerbudget.execution import inputs

    x, places, zeros = torch.randn(30, 12), [], inputs.zeros_in_file
    in_memory = inputs.InputMoments("gram")
    in_memory.add(x)
    monkeypatch.setattr(inputs, "EXACT", 8)
    monkeypatch.setattr(inputs.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(inputs, "zeros_in_file", lambda n, at, kind: places.append(at) or zeros(n, at, kind))
    wide, narrow = inputs.InputMoments("gram"), inputs.InputMoments("gram")
    wide.add(x)
    narrow.add(x[:, :8])
    assert places == [tmp_path, None] and not list(tmp_path.iterdir())
    assert torch.allclose(wide.value, in_memory.value, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("layerbudget.storage.writing.shutil.disk_usage", lambda where: type("Disk", (), {"free": 10})())
    with pytest.raises(InvalidInput, match="are free in"):
        inputs.InputMoments("gram").add(x)


def test_every_token_counts_the_same_in_moments_that_say_so():
    x, lengths = torch.randn(30, 12), torch.rand(30, 1) * 1e4 + 1e-3
    made = []
    for tokens in (x, x * lengths, torch.cat([x, torch.zeros(2, 12)])):
        moments = InputMoments("gram", equal_tokens=True)
        moments.add(tokens)
        made.append(moments)
    plain = InputMoments("gram")
    plain.add(x / x.square().mean(1, keepdim=True).sqrt())
    for moments in made:
        assert torch.allclose(moments.value, plain.value, rtol=1e-5, atol=1e-5)
        assert float(moments.value.diagonal().sum()) == pytest.approx(30 * 12, rel=1e-5)
    assert made[2].rows == 32 and made[0].copy().equal_tokens


def test_what_needs_the_whole_graph_refuses_a_streamed_model(folders):
    model = load_model(str(folders["llama-tied", "bfloat16"]), dtype="float32", stream=True)
    data, blocks = zoo.tokens(), partition(model, "layer")
    with pytest.raises(CoverageError, match="one at a time"):
        score(model, data, blocks, "fisher-gram", walk="whole")
    for estimator in ("ggn", "hessian"):
        with pytest.raises(CoverageError, match="stream"):
            score(model, data, blocks, estimator)


@pytest.mark.parametrize(
    "stored, name", [*FEW, ("bfloat16", "mixtral"), pytest.param("float32", "mixtral", marks=pytest.mark.slow)]
)
def test_plans_by_directional_damage_are_those_of_the_whole_model(folders, name, stored):
    """Layers are treated when they come: mapped ones are dense again behind it, converted ones are dropped."""
    data, found = zoo.tokens(samples=5, padded=True), []
    for stream in (False, True):
        model = load_model(str(folders[name, stored]), dtype="float32", stream=stream)
        before = fingerprint(model)
        given = {"sparsity": 0.5, "passes": 6, "batch_size": 2, "method": "magnitude" if name == "bert" else "wanda"}
        found.append([plan_sparsity(model, data, by=by, **given) for by in ("layer", "rows:4")])
        assert fingerprint(model) == before
        assert not any(module._forward_pre_hooks for module in model.modules()) or mapped(model).converts
    assert [p.digest for p in found[0]] == [p.digest for p in found[1]]


def test_bad_checkpoints_are_refused_in_a_sentence(folders, tmp_path):
    with pytest.raises((InvalidInput, BadModel), match="safetensors"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "config.json").write_text((folders["llama-tied", "float32"] / "config.json").read_text())
        load_model(str(tmp_path / "empty"), stream=True)
    broken = tmp_path / "broken"
    zoo.build("mistral").save_pretrained(broken, max_shard_size="20KB")
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises((CorruptFile, BadModel)):
        load_model(str(broken), stream=True)
    shard.unlink()
    with pytest.raises(NotFound, match=f"lacks 1 of the .* first {shard.name}"):
        load_model(str(broken), stream=True)


def test_streaming_is_chosen_by_itself_where_memory_is_short(folders, monkeypatch):
    folder = str(folders["llama-tied", "float32"])
    assert mapped(load_model(folder, stream=None)) is None
    monkeypatch.setattr("layerbudget.models.loading.free_bytes", lambda place: 1 << 16)
    assert mapped(load_model(folder, stream=None)) is not None
    assert mapped(load_model(folder)) is None  # the library does what it is told


def test_the_command_line_streams(shards, tmp_path):
    from layerbudget.cli import main

    given = [str(shards), "--samples", "4", "--length", "32", "--dtype", "float32"]
    for way in ("--stream", "--no-stream"):
        out = tmp_path / f"{way}.json"
        assert main(["score", *given, way, "--quiet", "--estimator", "rank-gain", "--by", "linear", "-o", str(out)]) == 0
    a, b = (json.loads((tmp_path / f"{way}.json").read_text()) for way in ("--stream", "--no-stream"))
    assert np.allclose(a["gain"], b["gain"], rtol=1e-4) and a["model"]["digest"] == b["model"]["digest"]


MEMORY = """
import sys, torch
sys.modules["hqq"] = None  # transformers imports it where it is installed, and with it torch's compilers, for seconds
from layerbudget.models.loading import load_model
from layerbudget.models.blocks import partition
from layerbudget.sensitivity.gain import score
from layerbudget.data.calibration import CalibrationSet
def anonymous(*_):
    peak.append(next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024)
data = CalibrationSet(input_ids=torch.randint(3, 97, (4, 8)))
for stream in (True, True, False):  # the first one also imports
    peak = []
    anonymous()
    model = load_model(sys.argv[1], dtype="float32", stream=stream)
    score(model, data, partition(model, "linear"), "fisher-trace", walk="layers", progress=anonymous)
    print(max(peak) - peak[0])
    del model
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
def test_anonymous_memory_is_that_of_a_layer(tmp_path):
    """A model of 80 MiB in float32 is scored while it stays in its file of bfloat16."""
    model = zoo.tiny("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=8).to(torch.bfloat16)
    size = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    model.save_pretrained(tmp_path, max_shard_size="10MB")
    own = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}  # set by a command that ran in this process
    own["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # what is held, not what the C library keeps of what was freed
    words = [sys.executable, "-c", MEMORY, str(tmp_path)]
    _, streamed, whole = map(float, subprocess.run(words, capture_output=True, text=True, check=True, env=own).stdout.split())
    assert streamed < whole - 0.5 * size, (streamed, whole, size)


def test_pruning_reads_the_masks_from_new_files(tmp_path, monkeypatch):
    """What a layer loses is written and mapped again, layer by layer."""
    zoo.build("mistral").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    model = load_model(str(tmp_path / "model"), stream=True)
    data, blocks = zoo.tokens(), partition(model, "layer")
    plan = plan_sparsity(score(model, data, blocks, "fisher-trace"), sparsity=0.5)
    lies = mapped(model)
    before = dict(lies.places)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prune(model, plan, data, "wanda")
    moved = {n for n, place in lies.places.items() if place != before[n]}
    assert moved == {f"{m.name}.weight" for b in blocks for m in b.modules}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    stored = {k: v for f in (tmp_path / "model").glob("*.safetensors") for k, v in load_file(f).items()}
    assert all(bool((stored[n] != 0).any(1).all()) for n in moved)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A small model in bfloat16, in several shards, with the tokenizer of the embedded one."""
    folder = tmp_path_factory.mktemp("shards")
    lb.load_tokenizer("demo").save_pretrained(folder)
    model = zoo.build("llama", hidden_size=64, intermediate_size=96, vocab_size=len(lb.load_tokenizer("demo")))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_plans_of_bits_are_those_of_the_whole_model(shards, tmp_path, dtype):
    """In float32 layers come and go, in bfloat16 they are the mapped pages."""
    from layerbudget.cli import main

    pytest.importorskip("compressed_tensors")
    given = [
        "plan",
        "bits",
        str(shards),
        "--bits",
        "4.5",
        "--group",
        "32",
        "--draws",
        "1",
        "--check",
        "0",
        "--quiet",
    ]
    given += ["--samples", "4", "--length", "32", "--dtype", dtype]
    found = []
    for way in ("--stream", "--no-stream"):
        kept = ["--save-scores", str(tmp_path / f"s{way}.json"), "-o", str(tmp_path / f"p{way}.json")]
        assert main([*given, way, *kept]) == 0
        found.append([json.loads((tmp_path / f"{k}{way}.json").read_text()) for k in "sp"])
    (a, p), (b, q) = found
    assert p["blocks"] == q["blocks"] and p["extra"]["formats"] == q["extra"]["formats"]
    damages = [np.array(s["extra"]["formats"]["damage"], dtype=float) for s in (a, b)]
    assert np.allclose(*damages, rtol=1e-3 if dtype == "float32" else 2e-2, equal_nan=True)
    assert a["extra"]["formats"]["size"] == b["extra"]["formats"]["size"] and a["model"]["digest"] == b["model"]["digest"]


def test_bits_of_streamed_weights_are_planned_checked_and_written(shards, tmp_path):
    from layerbudget.cli import main

    pytest.importorskip("compressed_tensors")
    small = ["--samples", "4", "--length", "32", "--group", "32", "--quiet", "-o", str(tmp_path / "p.json")]
    given = ["plan", "bits", str(shards), "--bits", "4.5", *small]
    assert main([*given, "--draws", "1", "--check", "2", "--stream"]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["extra"]["check"]["rows"]["exact"]["kl"] > 0
    assert main(["apply", str(shards), str(tmp_path / "p.json"), "--stream", "-o", str(tmp_path / "out")]) == 0
    assert any((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("method", ("rtn", "weighted", "gptq"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_check_of_a_streamed_model_holds_one_layer_and_gives_the_same_rows(shards, dtype, method):
    """Every layer is rounded, run on the text and dropped; the model is afterwards as it was."""
    from layerbudget.compressors.formats import find_runtime
    from layerbudget.decisions.bits.blocks import blocks_of
    from layerbudget.decisions.bits.sensitivity import DenseOutput

    pytest.importorskip("gguf")
    text = lb.calibration("stdlib", lb.load_tokenizer("demo"), samples=5, length=24)
    data, check = text.select(slice(0, 3)), text.select(slice(3, 5))
    found, outputs = [], []
    for stream in (False, True):
        model = lb.load_model(str(shards), dtype=dtype, stream=stream)
        names = [m.name for b in blocks_of(model, find_runtime("llama.cpp", "gguf")) for m in b.modules]
        formats = {name: ("Q4_0", "Q8_0", "Q5_1")[i % 3] for i, name in enumerate(names)}
        dense = DenseOutput(model, check, 1)
        found.append(dense.rows_of(model, formats, None if method == "rtn" else data, method))
        outputs.append([dense.rows(model), dense.own])
        found.append(dense.rows_of(model, formats, None if method == "rtn" else data, method))
    assert all(np.array_equal(rows, found[0]) for rows in found) and found[0][:, 0].min() > 0
    assert all(np.array_equal(after, own) for after, own in outputs)
    assert dtype == "bfloat16" or not [n for n, p in model.named_parameters() if p.dtype == torch.float32 and p.ndim > 1]


def test_a_large_model_is_streamed_where_a_copy_in_float32_would_be_made(shards, monkeypatch):
    from layerbudget.models import loading

    given = {"dtype": "float32", "stream": None}
    assert mapped(lb.load_model(str(shards), lean=True, **given)) is None
    monkeypatch.setattr(loading, "_COPY", 1 << 16)
    assert mapped(lb.load_model(str(shards), lean=True, **given)) is not None
    assert mapped(lb.load_model(str(shards), **given)) is None, "for work that does not take streamed models"
    assert mapped(lb.load_model(str(shards), dtype="bfloat16", stream=None, lean=True)) is None, "no copy is made"


def test_a_plan_of_bits_continues_with_the_damages_that_it_had(tmp_path, monkeypatch):
    from layerbudget.decisions.bits import plan as planning

    pytest.importorskip("compressed_tensors")
    model, data = zoo.build("llama", hidden_size=64, intermediate_size=96), zoo.tokens(6, 32)
    given = (model, data.select(slice(0, 4)), data.select(slice(4, 6)))
    options = {"bits": 4.5, "group": 32, "draws": 1}
    whole = lb.plan_bits(*given, **options)
    monkeypatch.setattr(planning.DenseOutput, "rows_of", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lb.plan_bits(*given, resume=tmp_path / "kept", **options)
    monkeypatch.undo()
    monkeypatch.setattr(planning, "rounding_damage", lambda *a, **k: pytest.fail("measured again"))
    again = lb.plan_bits(*given, resume=tmp_path / "kept", **options)
    assert again.blocks == whole.blocks and again.payload.check == whole.payload.check
    with pytest.raises(ModelMismatch):
        lb.plan_bits(*given, resume=tmp_path / "kept", **{**options, "draws": 2})


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs /proc")
def test_what_was_converted_leaves_the_process(tmp_path):
    """The pages of a layer that is at hand in float32 stayed beside it until the system needed room."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    zoo.build("llama", **wide).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", stream=True)
    file, one = tmp_path / "model.safetensors", sum(p.nbytes for p in model.model.layers[0].parameters())

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        starts = [i for i, line in enumerate(lines) if line.endswith(str(file))]
        return sum(int(next(r for r in lines[i:] if r.startswith("Rss:")).split()[1]) << 10 for i in starts)

    before, data = [p.clone() for p in model.parameters()], zoo.tokens()
    assert resident() > 6 * one  # all was read
    with torch.no_grad():
        logits = model(input_ids=data.input_ids).logits
    assert resident() < 2 * one
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(model(input_ids=data.input_ids).logits, logits)


def test_a_graph_remembers_which_weights_it_needs(folders, monkeypatch):
    """Run backwards it multiplies with what is at hand then, twice as large here in two products: no values were kept."""
    model = load_model(str(folders["llama-tied", "bfloat16"]), dtype="float32", stream=True)
    files, (name, layer), computed = mapped(model), mapped(model).layers[1], Mapped.computed
    x, slopes = torch.randn(1, 5, model.config.hidden_size, requires_grad=True), []
    for context in (contextlib.nullcontext, files.remembered):
        files.bring(name)
        with context():
            out = layer.mlp(x)
        for factor in (1.0, 2.0):
            files.leave()
            monkeypatch.setattr(Mapped, "computed", lambda self, parameter, f=factor: f * computed(self, parameter))
            files.bring(name)
            slopes.append(torch.autograd.grad(out.sum(), x, retain_graph=True)[0])
        monkeypatch.setattr(Mapped, "computed", computed)
        files.leave()
    kept, *same, doubled = slopes
    assert all(torch.equal(each, kept) for each in same) and torch.allclose(doubled, 4 * kept)
