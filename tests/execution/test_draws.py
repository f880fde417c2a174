"""Several draws of labels at the head, from one product with its rows."""

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.execution.draws import HeadDraws
from layerbudget.models.blocks import end_modules, partition
from layerbudget.sensitivity.directional.directions import Written
from layerbudget.sensitivity.directional.terms import Watch, quadratic_terms


class ByLabels(Watch):
    """Asks for the labels of heads, and for a change of their rows."""

    def __init__(self, model, asked):
        self.model, self.asked = model, asked

    def by_labels(self, name):
        return self.asked

    def of_labels(self, name, rows):
        return Rows([_change(self.model, name)])


class Rows(Written):
    def looked_up(self, rows, b):
        return torch.stack([(d[rows] * b).sum(-1).double().sum(-1) for d in self.deltas], -1)[:, None]

    def by_token(self, a, b):
        return torch.stack([(a @ d.T * b).sum(-1) for d in self.deltas], -1)


def _change(model, name):
    weight = model.get_submodule(name).weight.detach()
    return 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).to(weight)


def _terms(model, data, *, ends=True, asked=True, size=2):
    names = [m.name for b in partition(model, "layer") for m in b.modules]
    names += [m.name for m in end_modules(model) if m.name == "lm_head"] if ends else []
    units = {name: k for k, name in enumerate(names)}
    return quadratic_terms(
        model, data, units, lambda name: Rows([_change(model, name)]), (len(names), 1),
        draws=3, batch_size=size, walk="layers", watch=ByLabels(model, asked),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2"])
@pytest.mark.parametrize("ends", [True, False])
def test_draws_together_give_what_each_gives_by_itself(name, ends, monkeypatch):
    """With a head that is only a matrix, one whose logits are scaled, and one whose logits go through a function."""
    model, data = zoo.build(name), zoo.tokens(5, 12, padded=True)
    made, of = [], HeadDraws.of
    monkeypatch.setattr(HeadDraws, "of", lambda *given: made.append(of(*given)) or made[-1])
    together = _terms(model, data, ends=ends)
    assert made and all(each is not None for each in made)
    monkeypatch.setattr(HeadDraws, "of", lambda *given: None)
    apart = _terms(model, data, ends=ends)
    assert zoo.relative(torch.tensor(together.second), torch.tensor(apart.second)) < 1e-5
    assert np.allclose(together.rest, apart.rest, rtol=1e-3, atol=1e-5 * np.abs(apart.rest).max())


def test_pieces_of_positions_give_the_same(monkeypatch):
    model, data = zoo.build("llama"), zoo.tokens(4, 12)
    whole = _terms(model, data)
    monkeypatch.setattr("layerbudget.execution.memory.HEAD", 4 * 97 * 5)
    pieces = _terms(model, data)
    assert zoo.relative(torch.tensor(pieces.second), torch.tensor(whole.second)) < 1e-5


def test_a_head_whose_rows_lead_elsewhere_is_run_backwards_as_a_whole(monkeypatch):
    """What the hidden states add to the logits beside the head is in the gradients."""
    model, data = zoo.build("llama"), zoo.tokens(4, 12)
    forward = type(model).forward

    def more(self, *given, **named):
        out = forward(self, *given, **named)
        return type(out)(logits=out.logits + torch.tanh(out.logits).cumsum(-1))

    monkeypatch.setattr(type(model), "forward", more)
    made, of = [], HeadDraws.of
    monkeypatch.setattr(HeadDraws, "of", lambda *given: made.append(of(*given)) or made[-1])
    found = _terms(model, data, ends=False)
    assert made == [None] * len(made) and made and (found.second > 0).all()


def test_who_asks_for_the_output_gradients_of_a_head_gets_them(monkeypatch):
    monkeypatch.setattr(HeadDraws, "of", lambda *given: pytest.fail("labels are not enough"))
    assert (_terms(zoo.build("llama"), zoo.tokens(4, 12), asked=False).second > 0).all()
