"""Damage along directions: against autograd, dense curvature, finite differences and brute force."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.errors import InvalidInput, LengthMismatch, UnknownBlock
from layerbudget.execution import loss as L
from layerbudget.models.blocks import weight_of
from layerbudget.sensitivity.directional import terms as D
from layerbudget.sensitivity.directional.directions import Apart, Int8Directions, Itself, Nested, Written, spread

NAMES = {
    "mistral": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.2.mlp.up_proj"],
    "gpt2": ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"],
    "mixtral": ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts.down_proj"],
    "mlp": ["0", "2"],
}


def matrix(model, name):
    """``(d_out, d_in)`` values of a weight, experts below each other."""
    owner, parameter = weight_of(model, name)
    data = parameter.detach()
    return data.T if type(owner).__name__ == "Conv1D" else data.flatten(0, -2) if data.ndim == 3 else data


def change(model, name, delta, scale=1.0):
    owner, parameter = weight_of(model, name)
    moved = delta.T if type(owner).__name__ == "Conv1D" else delta.reshape(parameter.shape)
    with torch.no_grad():
        parameter.add_(scale * moved)


def deltas(model, name, count=1, size=0.1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        n: [size * torch.randn(matrix(model, n).shape, generator=g, dtype=torch.float64) for _ in range(count)]
        for n in NAMES[name]
    }


def clean_of(model, data, size):
    held = copy.deepcopy(model)
    with torch.no_grad():
        found = [torch.log_softmax(L.logits_of(held, b), -1) for b in L.unlabelled(held, data, size)]
    return lambda i, places=slice(None): found[i][:, places]


def terms(model, data, moves, *, together=False, **options):
    """Both terms along written changes, each matrix a unit or all of them one."""
    written = {n: Written([d] if isinstance(d, torch.Tensor) else d) for n, d in moves.items()}
    units = {n: 0 if together else i for i, n in enumerate(written)}
    shape = (1 if together else len(written), next(iter(written.values())).levels)
    return D.quadratic_terms(model, data, units, written.__getitem__, shape, **options)


class Along:
    """Damage and error of every matrix by itself, at the dense point."""

    def __init__(self, model, data, moves, **options):
        self.found, self.names = terms(model, data, moves, **options), list(moves)

    def damage(self, name):
        return self.found.second[self.names.index(name)]

    def error(self, name):
        return self.found.error[self.names.index(name)]


def mean_divergence(model, data, clean, size=8):
    total = tokens = 0.0
    with torch.no_grad():
        for i, batch in enumerate(L.unlabelled(model, data, size)):
            total += float(D.divergence(L.logits_of(model, batch), clean(i), batch.targets))
            tokens += int((batch.targets != L.IGNORE).sum())
    return total / tokens


def gauss_newton(model, data, name, delta):
    """``1/(2N) sum_t (J delta)' (diag p - pp') (J delta)`` by a forward-mode derivative."""
    total, tokens, step = 0.0, 0, 1e-3
    for batch in L.unlabelled(model, data, 8):
        with torch.no_grad():
            p = L.logits_of(model, batch).softmax(-1)
            change(model, name, delta, step)
            high = L.logits_of(model, batch)
            change(model, name, delta, -2 * step)
            low = L.logits_of(model, batch)
            change(model, name, delta, step)
        v = (high - low) / (2 * step)
        real = (batch.targets != L.IGNORE).reshape(v.shape[:-1])
        total += float(((p * v**2).sum(-1) - (p * v).sum(-1) ** 2)[real].sum())
        tokens += int(real.sum())
    return total / (2 * tokens)


@pytest.mark.parametrize("name", list(NAMES))
def test_one_draw_is_the_square_of_the_sequence_gradient_along_the_change(name):
    """By plain autograd, one sequence at a time, labels drawn likewise: exact, padding included, tied calls and experts too."""
    model, data = zoo.dense(name), zoo.labelled(name)
    moves = deltas(model, name, 2)
    found = Along(model, data, moves, draws=1, batch_size=3)
    tokens, sums = np.zeros(data.samples), {n: np.zeros((2, data.samples)) for n in moves}
    for s, batch in enumerate(L.unlabelled(model, data, 1)):
        logits = L.logits_of(model, batch)
        loss = L.summed_loss(logits, L.sampled_targets(logits.detach(), batch, 0))
        tokens[s] = int((batch.targets != L.IGNORE).sum())
        for n, candidates in moves.items():
            owner, parameter = weight_of(model, n)
            (grad,) = torch.autograd.grad(loss, parameter, retain_graph=True)
            grad = grad.T if type(owner).__name__ == "Conv1D" else grad.reshape(-1, grad.shape[-1])
            sums[n][:, s] = [float((grad * d).sum()) ** 2 for d in candidates]
    for n, values in sums.items():
        damage = values.sum(1) / (2 * tokens.sum())
        assert found.damage(n) == pytest.approx(damage, rel=1e-9)
        rest = values / 2 - damage[:, None] * tokens  # of a ratio of sums
        error = np.sqrt(data.samples * rest.var(1, ddof=1)) / tokens.sum()
        assert found.error(n) == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize(("name", "draws"), [("mistral", 400), ("mlp", 2000)])
def test_many_draws_are_the_gauss_newton_form(name, draws):
    model, data = zoo.dense(name), zoo.labelled(name)
    moves = deltas(model, name)
    found = Along(model, data, moves, draws=draws)
    for n, (delta,) in moves.items():
        exact = gauss_newton(model, data, n, delta)
        assert found.damage(n)[0] == pytest.approx(exact, rel=6 / np.sqrt(draws)), n


def test_at_the_dense_point_it_is_the_damage_of_a_small_change():
    """Finite differences of D itself: the Gauss-Newton form is its Hessian there."""
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    clean, size = clean_of(model, data, 8), 1e-3
    for n, (delta,) in deltas(model, "mistral").items():
        moved = copy.deepcopy(model)
        change(moved, n, delta, size)
        assert mean_divergence(moved, data, clean) / size**2 == pytest.approx(gauss_newton(model, data, n, delta), rel=1e-2)


def test_the_first_term_is_the_derivative_of_the_divergence():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    clean = clean_of(model, data, 4)
    moves = deltas(model, "mistral", 2)
    for n, (delta, _) in deltas(model, "mistral", 2, seed=5).items():
        change(model, n, delta)
    forms = terms(model, data, moves, clean=clean, draws=0, batch_size=4)
    for i, (n, candidates) in enumerate(moves.items()):
        for j, delta in enumerate(candidates):
            values = []
            for sign in (1, -1):
                moved = copy.deepcopy(model)
                change(moved, n, delta, sign * 4e-3)
                values.append(mean_divergence(moved, data, clean, 4))
            assert forms.first[i, j] == pytest.approx((values[0] - values[1]) / 8e-3, rel=2e-3)  # norms run in float32
    assert not forms.second.any() and forms.passes == 3
    dense = terms(zoo.dense("mistral"), data, moves, clean=clean, draws=0, batch_size=4)
    assert np.abs(dense.first).max() < 1e-12


def brute(weight, order, present, count, rows, by_row):
    """The change of the weights, written down; counts must be whole per line."""
    out = torch.zeros_like(weight)
    size = len(weight) if rows is None else rows
    for g, start in enumerate(range(0, len(weight), size)):
        w, o, d = (x[start : start + size] for x in (weight, order, out))
        lines = [(w[r], o[r], d[r]) for r in range(len(w))] if by_row else [(w.reshape(-1), o.reshape(-1), d.reshape(-1))]
        for values, scores, change in lines:
            ranked = scores.argsort(dim=0, stable=True)
            now, then = (int(c[g]) // len(lines) for c in (present, count))
            change[ranked[now:then]] -= values[ranked[now:then]]
            change[ranked[then:now]] += values[ranked[then:now]]
    return out


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("rows", [None, 1, 3, 4])
def test_cumulative_sums_are_the_levels_one_by_one(rows, by_row):
    g = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(9, 14, generator=g), torch.randn(5, 9, 14, generator=g)
    order = (weight.abs() * torch.rand(14, generator=g)).round(decimals=1)  # with ties
    sizes = torch.tensor([len(range(9)[i : i + (rows or 9)]) for i in range(0, 9, rows or 9)])
    present = sizes * torch.randint(0, 15, (len(sizes),), generator=g)
    counts = sizes[:, None] * torch.randint(0, 15, (len(sizes), 6), generator=g)
    counts[:, 0], counts[:, 1], counts[:, 2] = 0, sizes * 14, present
    found = Nested(weight, order, present, counts, rows=rows, by_row=by_row).along(gradient)
    written = Written([brute(weight, order, present, c, rows, by_row) for c in counts.T], rows).along(gradient)
    assert found.shape == (5, len(sizes), 6)
    assert torch.allclose(found, written, atol=1e-5)
    assert not found[:, :, 2].any()


def test_a_group_between_two_whole_rows_is_between_their_damages():
    g = torch.Generator().manual_seed(1)
    weight, gradient = torch.randn(4, 6, generator=g), torch.randn(1, 4, 6, generator=g)
    counts = torch.tensor([[4, 6, 8]])
    low, middle, high = Nested(weight, weight.abs(), torch.tensor([0]), counts).along(gradient)[0, 0].tolist()
    assert middle == pytest.approx((low + high) / 2)


def test_batches_padding_and_order_change_nothing():
    model = zoo.dense("mistral")
    data = zoo.labelled("mistral")
    moves = deltas(model, "mistral", 2)
    wanted = Along(model, data, moves, draws=2, batch_size=6)
    left = dataclasses.replace(data, input_ids=data.input_ids.flip(1), attention_mask=data.attention_mask.flip(1))
    order = torch.argsort(left.attention_mask, dim=1, descending=False, stable=True)  # padding in front, tokens in order
    ids = torch.stack(
        [torch.cat((row[m == 0], row[m == 1])) for row, m in zip(data.input_ids, data.attention_mask, strict=True)]
    )
    left = dataclasses.replace(data, input_ids=ids, attention_mask=left.attention_mask.gather(1, order))
    others = {
        "batch": Along(model, data, moves, draws=2, batch_size=1),
        "layers": Along(model, data, moves, draws=2, batch_size=4, walk="layers"),
        "padding": Along(model, left, moves, draws=2, batch_size=4),
        "order": Along(model, data.select([3, 1, 5, 0, 2, 4]), dict(reversed(moves.items())), draws=2, batch_size=2),
    }
    for what, found in others.items():
        for n in moves:
            assert found.damage(n) == pytest.approx(wanted.damage(n), rel=1e-9), what
            assert found.error(n) == pytest.approx(wanted.error(n), rel=1e-6), what
    again = Along(model, data, moves, draws=2, seed=1)
    assert again.damage(NAMES["mistral"][0]) != pytest.approx(wanted.damage(NAMES["mistral"][0]), rel=1e-3)


def test_matrices_of_one_unit_move_together():
    """The square of the sum, cross terms included; and groups of rows of one matrix one by one."""
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    moves = deltas(model, "mistral")
    one, several = (terms(model, data, moves, together=t, draws=3).second for t in (True, False))
    assert one.shape == (1, 1) and abs(one[0, 0] - several.sum()) > 1e-3 * one[0, 0]
    name, (delta,) = next(iter(moves.items()))
    rows = D.quadratic_terms(model, data, {name: 0}, lambda _: Written([delta], 4), (-(-len(delta) // 4), 1), draws=3).second
    for g in range(len(rows)):
        only = torch.zeros_like(delta)
        only[4 * g : 4 * g + 4] = delta[4 * g : 4 * g + 4]
        assert Along(model, data, {name: only}, draws=3).damage(name) == pytest.approx(rows[g], rel=1e-9)


def test_the_model_is_left_as_it_was():
    model = zoo.dense("mistral")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    Along(model, zoo.labelled("mistral"), deltas(model, "mistral"), draws=1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_what_cannot_be_is_refused():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    moves = deltas(model, "mistral")
    with pytest.raises(InvalidInput, match="draws"):
        Along(model, data, moves, draws=0)
    with pytest.raises(UnknownBlock):
        Along(model, data, {"nothing": moves[NAMES["mistral"][0]]})
    with pytest.raises(LengthMismatch):
        Along(model, data, {n: d * (1 + i) for i, (n, d) in enumerate(moves.items())})
    with pytest.raises(LengthMismatch):
        Along(model, data, {NAMES["mistral"][0]: [torch.zeros(2, 2), torch.zeros(2, 3)]})


def test_a_byte_per_entry_is_enough():
    """Pieces of rows, a candidate that changes nothing, gradients whole and as products, tokens one by one, rows looked up."""
    generator = torch.Generator().manual_seed(0)
    delta = [torch.randn(9, 40, generator=generator) * s for s in (1e-8, 3.0)]
    a, b = torch.randn(2, 7, 40, generator=generator), torch.randn(2, 7, 9, generator=generator)
    held = Int8Directions((9, 40), [[delta[0][rows], None, delta[1][rows]] for rows in (slice(0, 4), slice(4, 9))])
    exact = Written([delta[0], torch.zeros(9, 40), delta[1]])

    def near(found, whole):
        return float((found - whole).norm() / whole.norm()) < 0.03

    for found, whole in ((held.along(b.mT @ a), exact.along(b.mT @ a)), (held.between(a, b), exact.between(a, b))):
        assert near(found[..., 0], whole[..., 0]) and near(found[..., 2], whole[..., 2]) and not found[..., 1].any()
    assert near(held.by_token(a, b).sum(1).double(), held.between(a, b)[:, 0])
    places, g = torch.randint(9, (2, 7), generator=generator), torch.randn(2, 7, 40, generator=generator)
    assert near(held.looked_up(places, g)[:, 0, 2], (delta[1][places] * g).sum((1, 2)).double())


def test_where_inputs_come_often_their_outputs_are_made_once(monkeypatch):
    """Draws that are more than the candidates, of a large matrix: the same derivatives, and no gradient of the matrix."""
    generator, made = torch.Generator().manual_seed(3), []
    delta = [torch.randn(600, 500, generator=generator) * s for s in (0.1, 3.0)]
    pieces = [[delta[0][rows], None, delta[1][rows]] for rows in (slice(0, 250), slice(250, 600))]
    once, again = Int8Directions((600, 500), pieces, draws=1), Int8Directions((600, 500), pieces, draws=3)
    outputs = again._outputs
    monkeypatch.setattr(again, "_outputs", lambda a: made.append(a) or outputs(a))
    monkeypatch.setattr(again, "_meet", None)
    for _ in range(2):
        a = torch.randn(2, 7, 500, generator=generator)
        for _ in range(3):
            b = torch.randn(2, 7, 600, generator=generator)
            assert torch.allclose(again.between(a, b), once.between(a, b), rtol=1e-4, atol=1e-3)
    assert len(made) == 2
    few = Int8Directions((300, 500), [[d[:300] for d in delta]], draws=3)
    assert not few._by_outputs and not Int8Directions((600, 500), pieces, draws=2)._by_outputs


def test_a_sample_of_rows_has_the_squares_of_all_rows_and_says_how_sure():
    """Independent errors of 4,096 rows: squares of 256 of them, over many texts, and the error that their parts tell."""
    generator = torch.Generator().manual_seed(1)
    delta, weight = torch.randn(4096, 24, generator=generator), torch.rand(4096, generator=generator) ** 4
    a, b = torch.randn(400, 5, 24, generator=generator), torch.randn(400, 5, 4096, generator=generator) * weight
    truth = float(Written([delta]).between(a, b).square().mean())
    off = []
    for seed in range(24):
        rows = torch.randperm(4096, generator=torch.Generator().manual_seed(seed))[:256].sort().values
        held = Int8Directions((256, 24), [[delta[rows]]], rows, 256 / 4096)
        found = held.between(a, b)
        assert torch.allclose(held.along(b[:9].mT @ a[:9]), found[:9], rtol=1e-4)
        parts = held.squares.sum(0)[0] / (400 + 9)
        error = float(np.sqrt(spread(held.squares, held.share))[0]) / (400 + 9)
        off.append(((parts - truth) / truth, error / truth))
        assert float(found.square().mean()) == pytest.approx(truth, rel=0.6)
    far, error = np.array(off).T
    assert abs(far.mean()) < 0.1 and 0.6 < far.std() / error.mean() < 1.6
    assert not spread(np.ones((16, 2)), 0.5).any() and not spread(np.eye(3), 1.0).any()


def test_a_matrix_is_a_direction_of_itself_and_joins_what_is_left_of_others():
    """By products of outputs: from gradients, inputs, tokens and looked-up rows; several copies; the last inputs are kept."""
    generator = torch.Generator().manual_seed(2)
    weight, delta = torch.randn(9, 40, generator=generator), torch.randn(9, 40, generator=generator)
    a, b = torch.randn(2, 7, 40, generator=generator), torch.randn(2, 7, 9, generator=generator)
    factors = [0.25, -0.5]
    both, exact = Apart(Written([delta, 2 * delta]), Itself(lambda: [weight]), factors), Written([delta, 2 * delta, weight])
    for found, whole in ((both.along(b.mT @ a), exact.along(b.mT @ a)), (both.between(a, b), exact.between(a, b))):
        assert torch.allclose(found[..., :3], whole, rtol=1e-4, atol=1e-4)
        assert torch.allclose(found[..., 3:], whole[..., :2] + torch.tensor(factors) * whole[..., 2:], rtol=1e-4, atol=1e-4)
    itself, other = Itself(lambda: [weight]), torch.randn(2, 7, 40, generator=generator)
    for inputs in (a, a, other):
        assert torch.allclose(itself.by_token(inputs, b)[..., 0], ((inputs @ weight.T) * b).sum(-1), rtol=1e-4, atol=1e-4)
    places, g = torch.randint(9, (2, 7), generator=generator), torch.randn(2, 7, 40, generator=generator)
    assert torch.allclose(itself.looked_up(places, g)[:, 0, 0], (weight[places] * g).sum((1, 2)).double(), rtol=1e-4)
    copies = torch.randn(3, 18, 40, generator=generator)
    stack = Itself(lambda: [weight, delta]).along(copies)
    assert torch.allclose(stack, Written([torch.cat((weight, delta))]).along(copies), rtol=1e-4, atol=1e-4)
