"""Saved adapters on a fresh base: ranks and mixtures, and what does not fit."""

import json
import pathlib

import pytest
import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.lora_experts.method import add_lora_experts
from layerbudget.decisions.ranks.apply import add_ranks
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import BadModel, CorruptFile, NotFound
from layerbudget.finetuning.adapters import adapt, classifier_loader, load_adapter, started
from layerbudget.finetuning.protocol import Protocol
from layerbudget.finetuning.rows import TextRows
from layerbudget.models.blocks import partition
from layerbudget.models.experts import cut_experts, find_experts


def ids():
    return torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def saved(tmp_path):
    """Logits of an adapted model and the folder of its adapter, for ranks and for experts."""
    found = {}
    for kind in ("ranks", "lora-experts"):
        base = zoo.adaptable().double()
        if kind == "ranks":
            model = add_ranks(base, zoo.linears(base, lambda n: 3 if "proj" in n else 0))
        else:
            model = add_lora_experts(base, zoo.layers(base, [2] * base.config.num_hidden_layers))
        model = model.double().eval()
        zoo.perturb(model)
        with torch.no_grad():
            found[kind] = model(input_ids=ids()).logits
        model.save_pretrained(tmp_path / kind)
    return tmp_path, found


def test_a_saved_adapter_computes_the_same_and_ranks_merge(saved):
    folder, expected = saved
    for kind, logits in expected.items():
        for merge in (False, True) if kind == "ranks" else (False,):
            model = load_adapter(zoo.adaptable().double(), folder / kind, merge=merge).double()
            assert not model.training
            with torch.no_grad():
                assert torch.allclose(model(input_ids=ids()).logits, logits, atol=1e-12), (kind, merge)
            assert hasattr(model, "peft_config") != merge
    with pytest.raises(BadModel, match="cannot be merged"):
        load_adapter(zoo.adaptable(), folder / "lora-experts", merge=True)


def test_a_trained_head_is_loaded_onto_a_base_in_half_precision(tmp_path):
    zoo.classifier(2).save_pretrained(tmp_path / "bert")
    load = classifier_loader(str(tmp_path / "bert"), 2)
    model = adapt(load(0), zoo.linears(zoo.classifier(2), lambda n: 2 if "attention" in n else 0), Protocol())
    zoo.perturb(model)
    model.save_pretrained(tmp_path / "adapter")
    half = load_adapter(classifier_loader(str(tmp_path / "bert"), 2, dtype="bfloat16")(1), tmp_path / "adapter")
    whole = load_adapter(load(1), tmp_path / "adapter")
    with torch.no_grad():
        expected = model.eval()(input_ids=ids()).logits
        assert torch.allclose(whole(input_ids=ids()).logits, expected, atol=1e-6)
        assert torch.allclose(half(input_ids=ids()).logits.float(), expected, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("head", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_a_base_whose_layers_keep_different_experts_is_loaded_with_its_weights(head, tmp_path):
    """It got a fresh head, and experts of random numbers where a layer had fewer than another."""
    config = zoo.tiny("qwen3-moe").config
    model = getattr(transformers, head).from_config(config).eval()
    cut_experts(model, {e.name: list(range(8 - i)) for i, e in enumerate(find_experts(model))})
    model.save_pretrained(tmp_path / "uneven")
    loaded = dict(classifier_loader(str(tmp_path / "uneven"), 2)(0).named_parameters())
    own = dict(model.named_parameters())
    assert list(loaded) == list(own)
    assert all(torch.equal(loaded[name], p) for name, p in own.items())


@pytest.mark.parametrize("wrong", ["another shape", "too few"])
def test_a_classifier_whose_base_is_not_all_of_the_checkpoint_is_refused(wrong, tmp_path):
    """Its base was filled with random numbers without a word; a head of another number of labels is fresh, as it should be."""
    folder = tmp_path / "bert"
    zoo.classifier(2).save_pretrained(folder)
    assert classifier_loader(str(folder), 3)(0).config.num_labels == 3
    if wrong == "too few":
        tensors = load_file(folder / "model.safetensors")
        kept = {k: v for k, v in tensors.items() if "layer.1.attention.self.query" not in k}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        match = "lacks 2 tensors, first bert.encoder.layer.1.attention.self.query.bias"
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
        match = r"bert.encoder.layer.0.intermediate.dense.bias in .* has the shape"
    with pytest.raises(BadModel, match=match):
        classifier_loader(str(folder), 2)(0)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
def test_what_does_not_fit_is_refused(saved, tmp_path):
    folder, _ = saved
    for base in (zoo.adaptable(1), zoo.adaptable(hidden_size=48, head_dim=12), zoo.classifier(2)):
        before, flags = {n: p.clone() for n, p in base.state_dict().items()}, [p.requires_grad for p in base.parameters()]
        with pytest.raises(BadModel, match="does not fit|no place"):
            load_adapter(base.train(), folder / "ranks")
        after = base.state_dict()
        assert list(after) == list(before) and all(torch.equal(p, before[n]) for n, p in after.items())
        assert [p.requires_grad for p in base.parameters()] == flags and base.training and not hasattr(base, "peft_config")
    (tmp_path / "run" / "seed-0").mkdir(parents=True)
    (folder / "ranks").rename(tmp_path / "run" / "seed-0" / "adapter")
    with pytest.raises(NotFound, match=r"Point to .*seed-0"):
        load_adapter(zoo.adaptable(), tmp_path / "run")
    place = tmp_path / "run" / "seed-0" / "adapter"
    tensors = load_file(place / "adapter_model.safetensors")
    save_file(
        {**tensors, "base_model.model.model.layers.7.q_proj.lora_A.weight": torch.ones(3, 4)},
        place / "adapter_model.safetensors",
    )
    with pytest.raises(BadModel, match="have no place"):
        load_adapter(zoo.adaptable(), place)


def test_weights_in_a_pickle_are_read_and_one_that_runs_code_is_not(saved):
    folder, expected = saved
    place = folder / "ranks"
    torch.save(load_file(place / "adapter_model.safetensors"), place / "adapter_model.bin")
    (place / "adapter_model.safetensors").unlink()
    with torch.no_grad():
        logits = load_adapter(zoo.adaptable().double(), place).double()(input_ids=ids()).logits
    assert torch.allclose(logits, expected["ranks"], atol=1e-12)
    torch.save({"a": pathlib.PurePosixPath}, place / "adapter_model.bin")
    with pytest.raises(BadModel, match="cannot be read"):
        load_adapter(zoo.adaptable(), place)
    (place / "adapter_model.bin").unlink()
    with pytest.raises(NotFound, match=r"neither adapter_model\.safetensors nor"):
        load_adapter(zoo.adaptable(), place)


@pytest.mark.parametrize("tokens", [57, 64])
@pytest.mark.parametrize(
    ("tied", "how"),
    [
        (False, {}),
        (True, {}),
        (False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        (True, {"target_modules": ["embed_tokens"]}),  # PEFT leaves out the head of a base that does not share it
    ],
)
def test_a_vocabulary_of_another_size_is_that_of_the_adapter(tmp_path, caplog, tokens, tied, how):
    other = zoo.adaptable(1, tie_word_embeddings=tied)
    other.resize_token_embeddings(tokens)
    model = get_peft_model(other, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **how})).eval()
    zoo.perturb(model)
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    loaded = load_adapter(zoo.adaptable(1, tie_word_embeddings=tied), tmp_path)
    rows = torch.arange(3, tokens)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=rows).logits, model(input_ids=rows).logits, atol=1e-6)
    assert loaded.config.vocab_size == tokens and f"from 61 to {tokens} tokens" in caplog.text


def test_a_vocabulary_whose_embeddings_are_not_in_the_file_is_refused(tmp_path):
    other = zoo.adaptable(1)
    other.resize_token_embeddings(64)
    model = get_peft_model(other, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(BadModel, match=r"64 tokens, the base has 61.*save_embedding_layers=True"):
        load_adapter(zoo.adaptable(1), tmp_path)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_trained_prompts_are_refused_by_their_type(tmp_path, kind, merge):
    get_peft_model(zoo.adaptable(1), kind(num_virtual_tokens=2, task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    with pytest.raises(BadModel, match=r"of the type (PROMPT|PREFIX|P)_TUNING\."):
        load_adapter(zoo.adaptable(1), tmp_path, merge=merge)


@pytest.mark.parametrize("name", ["name", "checkpoint-7", "deep/name"])
def test_an_adapter_in_a_folder_below_is_named(saved, tmp_path, name):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (saved[0] / "ranks").rename(tmp_path / "run" / name)
    with pytest.raises(NotFound, match=f"Point to .*run/{name}"):
        load_adapter(zoo.adaptable(), tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda first: first.to(torch.int8), BadModel, "is stored as int8"),
        (lambda first: first.fill_(float("nan")), BadModel, "holds values that are not finite.*earlier checkpoint"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", CorruptFile, "is a pointer of Git LFS"),
        ("no tensors at all", CorruptFile, "adapter_model.safetensors does not read as safetensors"),
        ({"peft_type": "LATER"}, BadModel, "names the type LATER.*Install a later peft"),
        ({"peft_type": None}, BadModel, "names no peft_type"),
    ],
)
def test_an_adapter_whose_files_are_no_weights_is_refused(saved, change, error, words):
    place = saved[0] / "ranks"
    weights, record = place / "adapter_model.safetensors", place / "adapter_config.json"
    if isinstance(change, dict):
        record.write_text(json.dumps(json.loads(record.read_text()) | change))
    elif isinstance(change, str):
        weights.write_text(change)
    else:
        held = load_file(weights)
        first = sorted(held)[0]
        save_file(held | {first: change(held[first])}, weights)
    with pytest.raises(error, match=words):
        load_adapter(zoo.adaptable(), place)


def test_an_adapter_of_another_base_of_the_same_shapes_is_said(saved, caplog):
    place = saved[0] / "ranks"
    record = json.loads((place / "adapter_config.json").read_text())
    for named, base, said in (
        ("org/Model-1B", "/models/model-1b/", False),
        ("/cache/models--org--model-1b/snapshots/0123", "model-1b", False),
        ("org/model-1b", "", False),
        ("org/model-1b-instruct", "/models/model-1b", True),
    ):
        caplog.clear()
        (place / "adapter_config.json").write_text(json.dumps({**record, "base_model_name_or_path": named, "revision": "x"}))
        model = zoo.adaptable()
        model.config._name_or_path = base
        load_adapter(model, place)
        assert ("was trained on" in caplog.text) is said, (named, base)


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
def test_a_file_of_another_tool_is_read_or_what_it_lacks_is_said(saved):
    folder, expected = saved
    place = folder / "ranks"
    record = json.loads((place / "adapter_config.json").read_text())
    record |= {"unsloth_fixed": True, "auto_mapping": {"parent_library": "x"}}
    (place / "adapter_config.json").write_text(json.dumps(record))
    tensors = load_file(place / "adapter_model.safetensors")
    save_file({n: t.float() for n, t in tensors.items()}, place / "adapter_model.safetensors")
    with torch.no_grad():
        assert torch.allclose(
            load_adapter(zoo.adaptable().double(), place)(input_ids=ids()).logits, expected["ranks"], atol=1e-4
        )
    save_file(dict(list(tensors.items())[1:]), place / "adapter_model.safetensors")
    with pytest.raises(BadModel, match="missing adapter keys"):
        load_adapter(zoo.adaptable(), place)


@pytest.mark.parametrize("name", ["bert-classifier", "causal"])
def test_a_head_with_other_labels_is_said_as_such(tmp_path, name):
    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    get_peft_model(zoo.classifier(1, num_labels=3), config).save_pretrained(tmp_path)
    model = zoo.classifier(1) if name == "bert-classifier" else zoo.tiny("bert")
    with pytest.raises(BadModel, match=r"head for 3 labels, .*num_labels=3"):
        load_adapter(model, tmp_path)


def test_a_pruned_base_is_said_before_it_is_trained_on(caplog, tokenizer):
    model = zoo.adaptable(1)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[:, ::2] = 0
    rows = TextRows(None, tokenizer)
    started(model, zoo.linears(model, lambda n: 2 if "q_proj" in n else 0), Protocol(), rows, None)
    assert "50 % of the base's weights that get adapters are zeros" in caplog.text


def test_perplexity_with_an_adapter(tmp_path, capsys):
    from layerbudget.decisions.ranks.plan import plan_ranks
    from layerbudget.models.blocks import partition
    from layerbudget.models.loading import load_model

    model = load_model("demo")
    plan = plan_ranks(partition(model, "linear", exclude="lm_head"), mean_rank=2, rule="uniform")
    adapted = add_ranks(model, plan, task_type="CAUSAL_LM", validate=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapter")
    words = ["evaluate", "demo", "--perplexity", "stdlib", "--windows", "2", "--length", "32", "--json", "--quiet"]
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--adapter", str(tmp_path / "adapter")]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert plain["adapter"] is None and changed["adapter"].endswith("adapter")
    assert plain["perplexity"]["stdlib"]["value"] != changed["perplexity"]["stdlib"]["value"]
    assert main([*words, "--adapter", str(tmp_path)]) == 2
    assert "adapter_config.json" in capsys.readouterr().err


def test_what_an_adapter_puts_beside_weights_is_no_block(saved):
    """Half of a trained update was pruned with the weights."""
    folder, _ = saved
    base = zoo.adaptable()
    sizes = [(b.name, b.numel) for b in partition(base)]
    adapted = load_adapter(base, folder / "ranks")
    found = partition(adapted)
    assert [(b.name.removeprefix("base_model.model."), b.numel) for b in found] == sizes
    factors = {n: p.clone() for n, p in adapted.named_parameters() if "lora_" in n}
    prune(adapted, plan_sparsity(found, sparsity=0.5, rule="uniform"), method="magnitude")
    assert all(torch.equal(p, factors[n]) for n, p in adapted.named_parameters() if n in factors)
    assert partition(load_adapter(zoo.adaptable(), folder / "lora-experts"))[0].numel == found[0].numel
    with pytest.raises(BadModel, match="merge=True"):
        plan_bits(adapted, zoo.tokens(2, 8, vocabulary=61), rule="uniform", bits=8)
