"""Means and Fisher information of scores against dense float64 algebra."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import linnet
from linnet.fisher import Statistics, fisher_statistics
from linnet.jacobian import Jacobian, column_moments
from linnet.linalg.svd.truncated import squared_norm
from linnet.testing.case import Net
from tests.support.drawn import double, normal


def total(f: Tensor) -> Tensor:
    return f.sum(1)


def energy(f: Tensor) -> Tensor:
    return f.logsumexp(1)


def convolutional() -> nn.Module:
    return Net(
        lambda m, x: m.fc(torch.tanh(m.norm(m.conv(x.view(-1, 1, 4, 4)))).flatten(1)) * m.scale.exp(),
        conv=nn.Conv2d(1, 4, 3),
        norm=nn.GroupNorm(2, 4),
        fc=nn.Linear(16, 3),
        scale=nn.Parameter(torch.zeros(3)),
    )


def tied() -> nn.Module:
    return Net(lambda m, x: m.first(m.first(x).tanh()), first=nn.Linear(16, 16))


def switched() -> nn.Module:
    """A layer that only some examples use, so that whole chunks have no rows for it."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        far = x[:, :1] > 0.5
        h = m.near(x)
        return m.head((torch.where(far, m.far(x), h) if bool(far.any()) else h).tanh())

    return Net(forward, near=nn.Linear(16, 5), far=nn.Linear(16, 5), head=nn.Linear(5, 2))


def words() -> nn.Module:
    return Net(
        lambda m, ids: m.out(m.table(ids).tanh().mean(1)), table=nn.Embedding(11, 4, padding_idx=0), out=nn.Linear(4, 3)
    )


MODELS = {"convolutional": convolutional, "tied": tied, "switched": switched, "words": words}


def inputs(name: str, n: int) -> Tensor:
    if name == "words":
        return torch.randint(0, 11, (n, 6), generator=torch.Generator().manual_seed(0))
    return normal(n, 16, seed=1)


def case(name: str, n: int = 13, batch_size: int | str = "auto", output=energy) -> tuple[Jacobian, Tensor]:
    """A Jacobian, and the same as a dense matrix."""
    lin = linnet.linearize(double(MODELS[name]()), output=output)
    x = inputs(name, n)
    return lin.jacobian(x, batch_size), lin.jacobian(x).dense()


def reference(A: Tensor, *, centered: bool) -> tuple[Tensor, Tensor]:
    mean = A.mean(0) if centered else torch.zeros(A.shape[1], dtype=A.dtype)
    return mean, (A - mean).square().mean(0)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return float((a - b).abs().max()) <= tolerance * max(float(b.abs().max()), 1e-300)


# Moments.


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("size", [1, 4, "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_moments_are_those_of_the_dense_matrix(name, size, centered):
    J, A = case(name, batch_size=size)
    for found, expected in zip(J.moments(centered=centered), reference(A, centered=centered), strict=True):
        assert found.dtype == torch.float64
        assert close(found, expected)


@pytest.mark.parametrize("name", ["convolutional", "words"])
def test_moments_of_many_outputs_and_of_kept_factors(name):
    J, A = case(name, output=None, batch_size=5)
    expected = reference(A, centered=True)
    for operator in (J, J.cached(), J.cached().subset(torch.arange(13))):
        for found, value in zip(operator.moments(), expected, strict=True):
            assert close(found, value)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_moments_do_not_depend_on_how_rows_are_cut(name, centered, monkeypatch):
    J, A = case(name)
    monkeypatch.setattr("linnet.jacobian.blocks.base.TEMPORARY", 40)
    for found, expected in zip(J.moments(centered=centered), reference(A, centered=centered), strict=True):
        assert close(found, expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 1000))
def test_chunks_in_any_cut_give_one_answer(sizes, seed):
    A = normal(sum(sizes), 3, seed=seed) + 10
    found = column_moments.Moments(4, centered=True, device="cpu")
    for part in A.split(sizes):
        found.add([column_moments.DenseBlock([(1, 4)], [part[:, None]])], len(part))
    assert found.count == len(A)
    assert close(found.mean[1:], A.mean(0), 1e-13)
    assert close(found.squares[1:], (A - A.mean(0)).square().sum(0), 1e-12)
    assert found.mean[0] == 0 and found.squares[0] == 0


def test_nothing_cancels_when_the_mean_is_far_from_zero():
    # A spread of 1e-3 about 1e8: squares of the entries would leave no digit of it.
    x = 1e8 + 1e-3 * normal(64, 1)
    J = linnet.linearize(nn.Linear(1, 1).double()).jacobian(x, 7)
    exact = x.numpy().astype(np.longdouble)
    variance = ((exact - exact.mean(0)) ** 2).mean(0)
    found = J.moments()[1][0]
    assert abs(float(found) / float(variance[0]) - 1) < 1e-9


@pytest.mark.parametrize("centered", [True, False])
def test_sums_of_float32_rows_are_in_float64(centered):
    x = (1 + 1e-3 * normal(20_000, 1)).float()
    J = linnet.linearize(nn.Linear(1, 1)).jacobian(x)
    mean, squares = reference(x.double(), centered=centered)
    found = J.moments(centered=centered)
    assert abs(float(found[0][0]) - float(mean[0])) <= 1e-13
    assert abs(float(found[1][0] / squares[0]) - 1) <= 1e-11


# Statistics.


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_fisher_vectors_are_those_of_the_dense_formula(name, centered):
    J, A = case(name, n=17, batch_size=5)
    found = fisher_statistics(J, centered=centered)
    Z, I = reference(A, centered=centered)  # noqa: E741
    assert found.n == 17 and found.dropped == int((~found.kept).sum())
    assert close(found.Z, Z) and close(found.I, I)
    assert bool((I[found.kept] > 1e-25 * I.max()).all())
    expected = ((A - Z) / I.sqrt())[:, found.kept]
    V = found.vectors(J)
    assert V.shape == (17, int(found.kept.sum()))
    assert close(V.dense(), expected)
    # V M = J (D M) - 1 (Z^T D M) and V^T U = D (J^T U - Z (1^T U)): the shapes that the printed algorithm mixes up
    M, U = normal(V.shape[1], 2), normal(17, 2, seed=3)
    assert close(V @ M, expected @ M) and close(V.T @ U, expected.T @ U)
    assert close(V.normal(M), expected.T @ (expected @ M))


@pytest.mark.parametrize("centered", [True, False])
def test_the_trace_is_known_from_the_statistics(centered):
    J, _ = case("convolutional", n=17)
    found = fisher_statistics(J, centered=centered)
    V = found.vectors(J)
    assert found.trace == 17 * int(found.kept.sum())
    assert abs(float(V.dense().square().sum()) / found.trace - 1) < 1e-12
    assert abs(squared_norm(V) / found.trace - 1) < 1e-12


def test_statistics_serve_other_data():
    J, A = case("tied", n=17)
    found = fisher_statistics(J, centered=True)
    other = J.subset(torch.tensor([3, 1]))
    expected = ((A[[3, 1]] - found.Z) / found.I.sqrt())[:, found.kept]
    assert close(found.vectors(other).dense(), expected)
    assert abs(squared_norm(found.vectors(other)) - float(expected.square().sum())) < 1e-9 * float(expected.norm()) ** 2


def free() -> nn.Module:
    """The bias before a normalization over each channel changes nothing: its gradient is zero but for rounding."""
    return Net(
        lambda m, x: m.fc(torch.tanh(m.norm(m.conv(x.view(-1, 1, 4, 4)))).flatten(1)),
        conv=nn.Conv2d(1, 4, 3),
        norm=nn.GroupNorm(4, 4),
        fc=nn.Linear(16, 3),
    )


def test_columns_of_rounding_are_dropped_and_counted():
    for dtype in (torch.float64, torch.float32):
        lin = linnet.linearize(double(free()).to(dtype), output=energy)
        J = lin.jacobian(normal(40, 16).to(dtype))
        found = fisher_statistics(J, centered=True)
        bias = lin.layout.slices["conv.bias"]
        assert bool((found.I[bias] > 0).any())
        assert not bool(found.kept[bias].any())
        assert found.dropped == 4
        assert bool(found.kept[lin.layout.slices["conv.weight"]].all())


def test_small_signals_are_kept_however_small():
    # Two modules whose gradients differ by 1e-20 in size, and two columns of one module that do.
    net = Net(lambda m, x: m.large(x) + 1e-20 * m.small(x), large=nn.Linear(3, 1), small=nn.Linear(3, 1))
    J = linnet.linearize(double(net)).jacobian(normal(9, 3))
    found = fisher_statistics(J, centered=True)
    layout = J.lin.layout
    assert bool(found.kept[layout.slices["small.weight"]].all())
    assert not bool(found.kept[layout.slices["small.bias"]].any())  # constant
    for dtype in (torch.float32, torch.float64):
        x = torch.cat([normal(9, 1), 1e-20 * normal(9, 1, seed=1)], 1).to(dtype)
        lin = linnet.linearize(nn.Linear(2, 1).to(dtype))
        assert fisher_statistics(lin.jacobian(x), centered=True).kept.tolist() == [True, True, False]


def normalized() -> nn.Module:
    """Channels of sizes 1 to 1e-7, and three ways in which a parameter changes nothing."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        size = torch.tensor([1.0, 1e-5, 1e-6, 1e-7], dtype=x.dtype)[:, None, None]
        h = m.norm(m.conv(x.view(-1, 4, 6, 6) * size)).tanh().flatten(2)  # the bias is normalized away
        h = h + m.attend(h, h, h, need_weights=False)[0]  # keys that are all shifted attend alike
        h = F.layer_norm(h + m.shift, h.shape[1:])  # a shift of all entries
        return m.fc(h.tanh().flatten(1))

    return Net(
        forward,
        conv=nn.Conv2d(4, 6, 3),
        norm=nn.GroupNorm(6, 6),
        attend=nn.MultiheadAttention(16, 2, batch_first=True),
        shift=nn.Parameter(torch.zeros(1)),
        fc=nn.Linear(96, 3),
    )


@pytest.mark.parametrize("memory", ["auto", 1000])  # the second has room for one example at a time
def test_rounding_is_told_from_signals_of_the_same_size(memory):
    model, X = double(normalized()), normal(60, 144)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.float())  # so that both precisions have the same network
    X = X.float().double()
    fine = linnet.linearize(model, output=energy).jacobian(X, memory=memory)
    coarse = linnet.linearize(copy.deepcopy(model).float(), output=energy).jacobian(X.float(), memory=memory)
    exact, found = (fisher_statistics(J, centered=True) for J in (fine, coarse))
    s = fine.lin.layout.slices
    noise = torch.zeros(fine.shape[1], dtype=torch.bool)
    noise[s["conv.bias"]] = noise[s["shift"]] = True
    noise[s["attend.in_proj_bias"]][16:32] = True
    # No size tells the biases, which are noise, from the weights on the smallest channel, which are not.
    small = found.I[s["conv.weight"]].view(6, 4, 9)[:, 3]
    assert float(found.I[s["conv.bias"]].max()) > float(small.min())
    for statistics in (exact, found):
        assert torch.equal(statistics.kept, ~noise)
        assert statistics.dropped == 6 + 16 + 1
    limit = torch.finfo(torch.float32).eps * fine.shape[1] ** 0.5  # of sums over the columns
    values = [torch.linalg.eigvalsh(t.vectors(J).gram().double()) for t, J in ((exact, fine), (found, coarse))]
    assert float((values[1] - values[0]).abs().max() / values[0].max()) <= limit


def test_columns_that_are_constant_but_for_rounding_are_dropped():
    # Class probabilities add up to one, but for rounding of their own at each example.
    net = Net(
        lambda m, x: m.fc(x) + m.fc(x).softmax(1).sum(1, keepdim=True) * m.scale,
        fc=nn.Linear(4, 50),
        scale=nn.Parameter(torch.ones(1)),
    )
    for dtype in (torch.float32, torch.float64):
        lin = linnet.linearize(double(net).to(dtype), output=lambda f: f[:, 0])
        found = fisher_statistics(lin.jacobian(normal(50, 4).to(dtype)), centered=True)
        assert float(found.I[lin.layout.slices["scale"]]) > 0
        assert not bool(found.kept[lin.layout.slices["scale"]])
        assert bool(found.kept[lin.layout.slices["fc.weight"]][:4].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_examples_with_larger_gradients_is_noise(dtype):
    # The examples that are judged, every other one, have a hundredth of the others' gradients.
    net = Net(lambda m, x: m.inner(x[:, :16]) * x[:, 16:], inner=double(free()))
    x = torch.cat([normal(32, 16), torch.tensor([1.0, 100.0]).double().repeat(16)[:, None]], 1)
    lin = linnet.linearize(net.to(dtype), output=lambda f: f.sum(1))
    found = fisher_statistics(lin.jacobian(x.to(dtype)), centered=True)
    bias = lin.layout.slices["inner.conv.bias"]
    assert not bool(found.kept[bias].any()) and bool(found.kept[lin.layout.slices["inner.conv.weight"]].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_signal_of_examples_that_are_not_judged_is_kept(dtype):
    # The biases change nothing but at one example, where they come after the normalization.
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = x[:, :16].view(-1, 1, 4, 4)
        shifted = m.norm(m.conv(h)) + x[:, 16, None, None, None] * m.conv(h)
        return m.fc(shifted.tanh().flatten(1))

    net = Net(forward, conv=nn.Conv2d(1, 4, 3), norm=nn.GroupNorm(4, 4), fc=nn.Linear(16, 3))
    lin = linnet.linearize(double(net).to(dtype), output=energy)
    x = torch.cat([normal(32, 16), torch.zeros(32, 1).double()], 1)
    assert fisher_statistics(lin.jacobian(x.to(dtype)), centered=True).dropped == 4
    x[31, 16] = 1.0
    assert fisher_statistics(lin.jacobian(x.to(dtype)), centered=True).dropped == 0


def test_an_example_at_a_kink_drops_nothing():
    # One example alone reaches a unit, and does not where one of eight weights is moved by its rounding.
    net = Net(
        lambda m, x: m.first(x[:, 1:]).tanh() * (m.gate.amin() * x[:, :1] >= 1).to(x),
        first=nn.Linear(3, 1),
        gate=nn.Parameter(torch.ones(8)),
    )
    x = torch.cat([torch.zeros(32, 1), normal(32, 3).float()], 1)
    x[16, 0] = 1.0
    lin = linnet.linearize(net)
    found = fisher_statistics(lin.jacobian(x), centered=False)
    first = torch.cat([torch.arange(s.start, s.stop) for n, s in lin.layout.slices.items() if n != "gate"])
    assert bool((found.I[first] > 0).all()) and bool(found.kept[first].all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_has_one_precision_only_is_judged_in_that_precision(dtype):
    fixed = torch.ones(4, 1, dtype=dtype)
    net = Net(
        lambda m, x: torch.tanh(F.group_norm(m.conv(x.view(-1, 1, 4, 4)), 4)).sum((2, 3)) @ fixed,
        conv=nn.Conv2d(1, 4, 3),
    ).to(dtype)
    lin = linnet.linearize(net)
    found = fisher_statistics(lin.jacobian(normal(40, 16).to(dtype)), centered=True)
    assert bool((found.I[lin.layout.slices["conv.bias"]] > 0).any()) and found.dropped == 4
    assert bool(found.kept[lin.layout.slices["conv.weight"]].all())


def test_examples_that_come_in_order_are_judged():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(inputs("convolutional", 20))

    found = fisher_statistics(linnet.linearize(double(free()), output=energy).jacobian(Stream()), centered=True)
    assert found.dropped == 4


def test_unused_parameters_are_dropped():
    net = Net(lambda m, x: m.used(x), used=nn.Linear(3, 1), spare=nn.Linear(2, 2))
    found = fisher_statistics(linnet.linearize(double(net)).jacobian(normal(5, 3)), centered=False)
    assert found.kept.tolist() == [True] * 4 + [False] * 6


# Errors.


def test_more_than_one_score_per_example_is_refused():
    J, _ = case("convolutional", output=None)
    with pytest.raises(ValueError, match=r"need one score per example; the Jacobian has 3 outputs for each of 13"):
        fisher_statistics(J, centered=True)


def test_statistics_of_other_parameters_are_refused():
    found = Statistics(torch.zeros(5), torch.ones(5), torch.ones(5, dtype=torch.bool), 0, 3)
    J, _ = case("tied")
    with pytest.raises(ValueError, match=r"statistics are those of 5 parameters, so J needs as many columns"):
        found.vectors(J)


def test_scores_without_any_spread_have_no_vectors():
    J = linnet.linearize(nn.Linear(2, 1).double()).jacobian(torch.ones(4, 2, dtype=torch.float64))
    found = fisher_statistics(J, centered=True)
    assert found.dropped == 3
    with pytest.raises(ValueError, match=r"All 3 columns are constant over the 4 examples"):
        found.vectors(J)


def test_a_gradient_that_is_not_finite_names_the_parameter():
    net = Net(lambda m, x: m.head(m.root(x).sqrt()), root=nn.Linear(2, 2), head=nn.Linear(2, 1))
    with torch.no_grad():
        net.root.weight.fill_(1.0)
        net.root.bias.fill_(0.0)
    x = torch.ones(40, 2)
    x[-1] = 0.0
    J = linnet.linearize(net).jacobian(x)
    with pytest.raises(ValueError, match=r"gradient of the score with respect to 'root.weight' is not finite"):
        fisher_statistics(J, centered=True)
