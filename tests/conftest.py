"""What tests share beside the zoo: a tiny tokenizer, saved models, and the folder of benchmark data."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.collect_env
from hypothesis import HealthCheck, settings
from tests import zoo

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)
# Waiting for a disk shows nothing here: a killed process loses no written bytes, only a machine without power does.
os.fsync = lambda _: None
# lm-eval lists all installed packages, by a process of its own, for every task that it asks; no test reads that list.
torch.utils.collect_env.get_pip_packages = lambda *_: ("pip", "")

# Examples are those of every other run, and no clock ends one: a test that fails here fails everywhere.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Every test has the same random numbers, whichever tests ran before it in its process."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


SHARED = Path(os.environ.get("LAYERBUDGET_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of benchmark data."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the folder of benchmark data (shared/data beside the checkout, or LAYERBUDGET_SHARED) is absent")
    return SHARED / "data"


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of single letters, 96 tokens, with a beginning-of-text token; for ``zoo.speaker``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<pad>", "<unk>"]
    letters = [chr(c) for c in range(32, 124)]
    tok = Tokenizer(models.WordLevel({s: i for i, s in enumerate(specials + letters)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tok.decoder = decoders.Fuse()
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<unk>"
    )


WHOLE = ("data", "demo", "golden", "paper")  # folders of tests that read the whole embedded corpus


@pytest.fixture(scope="module", autouse=True)
def short_corpus(request):
    """A few modules of the standard library in each group: ``stdlib`` is tokenised whole, however few samples are drawn."""
    from layerbudget.data import stdlib

    with pytest.MonkeyPatch.context() as patch:
        if Path(request.fspath).parent.name not in WHOLE:
            patch.setattr(stdlib, "CALIBRATION", ("csv", "statistics"))
            patch.setattr(stdlib, "EVALUATION", ("fractions", "textwrap"))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_prices():
    """Prices take lattices of two bits for ``IQ3_S``: ggml prepares them for seconds in every process."""
    from layerbudget.cost import timing

    timed = timing.treating_seconds
    with pytest.MonkeyPatch.context() as patch:
        same = {f"IQ{name}": "IQ3_S" for name in ("1_S", "1_M", "2_XXS", "2_XS", "2_S")}
        patch.setattr(timing, "treating_seconds", lambda find, way, form, *size: timed(find, way, same.get(form, form), *size))
        yield


@pytest.fixture
def saved_model(tmp_path, tokenizer):
    """A function that saves a model with its tokenizer and returns the folder."""

    def save(kind: str) -> Path:
        folder = tmp_path / kind
        zoo.speaker(kind).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def folder(tmp_path):
    """A folder with a saved tiny Llama, its tokenizer of words, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    zoo.build("llama").save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{(7 * i * i + 3 * i) % 97}" for i in range(400)))
    return tmp_path


@pytest.fixture
def mistral():
    """A Mistral of three layers that matter."""
    return zoo.mistral()


@pytest.fixture
def gpt2():
    """A GPT-2, whose matrices are Conv1D."""
    return zoo.tiny("gpt2", seed=1, attention="sdpa", vocab_size=61, n_positions=32, n_embd=24, initializer_range=0.12)


@pytest.fixture
def gemma():
    """A Gemma with wide heads."""
    return zoo.tiny("gemma", seed=4, attention="sdpa", vocab_size=61, hidden_size=24, intermediate_size=40,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.12)  # fmt: skip


@pytest.fixture
def bert():
    """A BERT with a head of three classes."""
    return zoo.tiny("bert-classifier", seed=2, attention="sdpa", vocab_size=61, hidden_size=24, intermediate_size=40,
                    max_position_embeddings=32, num_labels=3, initializer_range=0.12)  # fmt: skip


@pytest.fixture
def data():
    """Tokens for the models above."""
    return zoo.text()


@pytest.fixture
def padded():
    """The same with rows of different lengths."""
    return zoo.text(padded=True)


@pytest.fixture
def rng():
    """A seeded generator."""
    return np.random.default_rng(20240501)
