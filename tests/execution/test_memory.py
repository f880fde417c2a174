"""What a walk holds at once: inputs of all sequences in files where memory is short, and few copies of a wide factor."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests import zoo
from torch import nn

from layerbudget.decisions.bits.rounding import RoundingErrors
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import InvalidInput
from layerbudget.execution import backward, memory
from layerbudget.execution.inputs import InputStatistics
from layerbudget.execution.memory import Store
from layerbudget.models.blocks import partition
from layerbudget.records import Module
from layerbudget.sensitivity.directional.directions import Int8Directions
from layerbudget.sensitivity.gain import score


def test_inputs_go_to_files_where_memory_is_short_and_nothing_changes(monkeypatch):
    model, data, places = zoo.build("llama"), zoo.tokens(samples=6), []
    blocks = partition(model, "linear")

    class Watched(Store):
        def __init__(self, where, folder=None):
            places.append(where)
            super().__init__(where, folder)

    monkeypatch.setattr(backward, "Store", Watched)
    held = score(model, data, blocks, "rank-gain", walk="layers")
    need = memory.hidden_bytes(model, list(backward.batches(model, data, 8)))
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 2 * need)  # twice one layer's inputs, not those of all layers
    spilled = score(model, data, blocks, "rank-gain", walk="layers")
    assert "device" in places and places[-1] == "disk"
    np.testing.assert_allclose(spilled.values(), held.values(), rtol=1e-5)
    monkeypatch.setattr(memory, "check_space", refuse)
    with pytest.raises(InvalidInput, match="no room"):
        score(model, data, blocks, "rank-gain", walk="layers")


def refuse(needs):
    assert all(bytes_ > 0 for bytes_ in needs.values())
    raise InvalidInput("no room")


PEAK = """
import sys, torch
sys.modules["hqq"] = None  # it brings torch's compilers, for seconds
from tests import zoo
from layerbudget.records import Module
from layerbudget.sensitivity.curvature.kronecker import Factors, _Output
from layerbudget.sensitivity.rank_gain import whitened
torch.set_num_threads(1)
d, n = 300, 2400
factors = Factors(zoo.dense("mlp", torch.float32), zoo.labelled("mlp"), [])
held = _Output(Module(name="m", d_in=d, d_out=n), False)
held.sums, held.parts = torch.eye(n), torch.randn(2, n, d)
torch.linalg.cholesky_ex(torch.eye(64).double())
def peak():  # of this program: getrusage begins with that of the one that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
before = peak()
whitened(factors._sums(held, torch.eye(d, dtype=torch.float64), {}), 0.1, 0.1, 8)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_two_copies_of_a_wide_factor_are_held_while_its_matrix_is_settled():
    """Of 2400 x 2400 in float64, 44 MiB each: the factor and its Cholesky factor; there were four."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 44 < float(done.stdout) < 2.8 * 44, done.stdout


def test_errors_with_feedback_stand_before_there_is_a_graph(monkeypatch):
    """What they are made of, squares of wide inputs and their factors, is gone when gradients come; so are a piece's logits."""
    model, data, events, held, given = zoo.build("llama", intermediate_size=64), zoo.tokens(6, 12), list[str](), [], []
    made, between, settle = RoundingErrors._make, Int8Directions.between, RoundingErrors.settle

    def note(letter, function):
        def noted(self, *arguments):
            if letter == "m":
                held.append(self)
            else:
                events.append(f"{len(held[-1]._made)} factors" if letter == "g" and held[-1]._made else "")
            events.append(letter)
            return function(self, *arguments)

        return noted

    monkeypatch.setattr(RoundingErrors, "_make", note("m", made))
    monkeypatch.setattr(RoundingErrors, "settle", note("s", settle))
    monkeypatch.setattr(Int8Directions, "between", note("g", between))
    monkeypatch.setattr(backward, "fits_whole", lambda *_: False)
    monkeypatch.setattr(backward, "give_back", lambda: given.append(None))
    monkeypatch.setattr(memory, "HEAD", 4 * 3 * 4 * model.config.vocab_size)  # four positions of the three sequences
    rounding_damage(model, data, family="gguf", method="gptq", draws=1)
    seen = "".join(events)
    assert "g" in seen and "gm" not in seen and "factors" not in seen, seen
    assert len(given) == 3


@pytest.mark.parametrize("kind", ["diagonal", "gram"])
def test_a_matrix_that_runs_twice_in_a_forward_has_moments_of_its_own(kind):
    """As Zaya's delayed values: the input that others read too, then one that is their own."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.first(x) + self.second(x) + self.second(2 * x[:, :1])

    model, x = nn.Sequential(Layer()), torch.randn(3, 2, 5, 4)
    found = InputStatistics(model, [Module(name=f"0.{n}", d_in=4, d_out=3) for n in ("first", "second")], kind)
    for batch in x:
        with found.listening(None):
            model(batch)
    for name, tokens in (("first", x.reshape(-1, 4)), ("second", torch.cat([x.reshape(-1, 4), 2 * x[:, :, 0].reshape(-1, 4)]))):
        (own,) = found.found[f"0.{name}"]
        wanted = tokens.T @ tokens
        assert own.rows == len(tokens)
        torch.testing.assert_close(own.value, wanted.diagonal() if kind == "diagonal" else own.value.tril(-1) + wanted.triu())
