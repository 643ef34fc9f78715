"""The few rows that carry the curvature, and posterior samples by way of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import linnet
from linnet.jacobian import (
    Jacobian,
    NetworkChunks,
    combine_outputs,
    estimate_column_norms,
    informative_rows,
    output_combinations,
    plan,
)
from linnet.jacobian.output_combinations import _groups
from linnet.linalg import Stack, weight_from_root
from linnet.probability import Categorical
from linnet.sampling import posterior_samples
from tests.support.drawn import double, normal

SMALL = 24
"""Outputs up to which these tests take all combinations of an example at once: the library's 256 would take long."""


@pytest.fixture(autouse=True)
def _few_outputs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linnet.jacobian.output_combinations.SMALL", SMALL)


def sure(c: int, n: int = 40, *, unsure: int = 5) -> tuple[Jacobian, Tensor]:
    """A Jacobian and the root of a categorical curvature that is near zero but for a few examples."""
    x = normal(n, 6)
    J = linnet.linearize(double(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, c)))).jacobian(x, 7)
    f = 30 * nn.functional.one_hot(torch.arange(n) % c, c).double() + normal(n, c, seed=1)
    f[:unsure] = 2 * normal(unsure, c, seed=2)
    return J, Categorical().root(f)


def curvature(J: Jacobian, L: Tensor) -> Tensor:
    A = J.dense().view(J.n, J.c, -1)
    return torch.einsum("ncp,ncd,nkd,nkq->pq", A, L, L, A)


def test_combinations_of_a_rotated_jacobian_are_rotated_too():
    J, L = sure(4)
    rotation, _ = J.kronecker(L).decomposed()
    rows = J.rotated(rotation).dense().view(J.n, J.c, -1)
    expected = torch.einsum("ncm,ncp->nmp", L, rows).flatten(0, 1)
    torch.testing.assert_close(combine_outputs(J.rotated(rotation), L).dense(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("c", [4, SMALL + 3])
def test_little_is_left_out(c):
    J, L = sure(c)
    exact = curvature(J, L)
    errors, rows = [], []
    for share in (1e-1, 1e-3, 1e-6):
        R = informative_rows(J, L, share=share)
        assert R is not None and R.shape[1] == J.shape[1]
        A = R.dense()
        left = exact - A.T @ A
        assert float(torch.linalg.eigvalsh(left)[0]) >= -1e-9 * float(exact.trace())  # nothing counts twice
        errors.append(float(left.trace()))
        rows.append(len(A))
    assert errors[0] >= errors[1] >= errors[2] and errors[2] <= 1e-4 * float(exact.trace())
    assert rows[0] <= rows[1] <= rows[2] < 0.3 * J.shape[0]


def test_no_more_rows_than_there_is_memory_for():
    J, L = sure(4)
    wanted = informative_rows(J, L, share=1e-6)
    assert wanted is not None
    fewer = informative_rows(J, L, share=1e-6, most=wanted.shape[0] - 1)
    assert fewer is not None and 0 < fewer.shape[0] < wanted.shape[0]
    kept = float(curvature(J, L).trace()) - float(fewer.dense().square().sum())
    assert kept <= 0.3 * float(curvature(J, L).trace())
    assert informative_rows(J, L, share=1e-6, most=wanted.shape[0] - 1, largest=1e-6) is None
    assert informative_rows(J, L, most=1) is None  # which leaves out too much


def test_where_there_is_nothing_to_gain():
    J, L = sure(4)
    assert informative_rows(J, Categorical().root(normal(40, 4))) is None  # unsure of every example
    assert informative_rows(J, torch.zeros_like(L)) is None
    assert informative_rows(J, L[:, :, 0]) is None  # a diagonal root
    assert informative_rows(J.cached(), L) is None

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(normal(40, 6))

    assert (
        informative_rows(
            J.lin.jacobian(linnet.data.sources.as_source(torch.utils.data.DataLoader(Stream(), 8), J.lin.module)), L
        )
        is None
    )


def test_few_rows_of_a_trained_network():
    from experiments.common import DATA
    from experiments.common.data import cifar10
    from experiments.common.networks import resnet

    needed = DATA / "cifar10_train_1.npz", DATA / "weights" / "resnet20_cifar10.safetensors"
    if not all(file.exists() for file in needed):
        pytest.skip(f"{needed[0]} and {needed[1]} are not there")
    x, _ = cifar10(DATA, "train_1", count=200)
    J = linnet.linearize(resnet(DATA / "weights", 20)).jacobian(x, progress=False)
    L = Categorical().root(J.outputs())
    counts = [R.shape[0] for share in (1e-2, 1e-4) if (R := informative_rows(J, L, share=share)) is not None]
    assert len(counts) == 2 and counts[0] < 0.06 * J.shape[0] and counts[1] < 0.2 * J.shape[0]


@pytest.mark.parametrize("probes", [0, 4])
@pytest.mark.parametrize("c", [4, SMALL + 3])
def test_samples_are_those_of_all_rows(c, probes, monkeypatch):
    J, L = sure(c)
    S = torch.full((J.shape[1],), 0.5).double()
    assert informative_rows(J, L) is not None
    exact = posterior_samples(J, S, L, 3, space="function")
    found = posterior_samples(J, S, L, 3, space="weight", tolerance=1e-9, probes=probes, rank=20)
    torch.testing.assert_close(found.Z, exact.Z, rtol=1e-7, atol=1e-7)
    if probes:
        assert found.log_det == pytest.approx(exact.log_det, abs=6 * found.log_det_error + 1e-6)
    calls = []
    monkeypatch.setattr("linnet.inference.samples.informative_rows", lambda J, L, **how: calls.append(J.n))
    posterior_samples(J, S, L, 3, space="weight", preconditioner="none")
    assert not calls
    again = posterior_samples(J, S, L, 3, space="weight", tolerance=1e-9)
    assert calls == [40, 40]  # for a direct solve, and for a sketch
    torch.testing.assert_close(again.Z, exact.Z, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("memory", ["auto", 5e3])
def test_the_gram_matrix_of_all_parts_is_one_pass(monkeypatch, memory):
    """Every two chunks meet once, whatever parts they are of, and only those that do not fit are formed again."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(12, 4))
    J = linnet.linearize(net.double()).jacobian(normal(11, 1, 4, 4), memory=memory)
    parts = [
        combine_outputs(J.subset(index), normal(len(index), 4, q, seed=q))
        for q, index in ((1, torch.arange(5)), (3, torch.arange(5, 7)), (2, torch.arange(6, 11)))
    ]
    stack, S = Stack(parts), normal(J.shape[1], seed=9).square()
    dense = torch.cat([part.dense() for part in parts])
    formed, own = [], NetworkChunks.build
    monkeypatch.setattr(
        NetworkChunks, "build", lambda self, batch, *rest: (formed.append(batch.n), own(self, batch, *rest))[1]
    )
    for scale in (S, torch.full_like(S, 0.3), None):
        formed.clear()
        K = stack.gram(scale=scale)
        torch.testing.assert_close(K, dense * (1 if scale is None else scale) @ dense.T, rtol=1e-9, atol=1e-9)
        assert sum(formed) == 12 if memory == "auto" else sum(formed) > 12


def test_examples_go_together_by_the_rows_that_they_need():
    """With 0 to 7 rows each: groups of 1, 2, 3, 4, 6 and the most that any needs."""
    squares = 1e-9 + (torch.arange(7) < torch.tensor([3, 0, 7, 1, 5, 2, 6, 4, 1])[:, None]).double()
    found = {q: index.tolist() for index, q in _groups(squares, 1e-4)}
    assert found == {1: [3, 8], 2: [5], 3: [0], 4: [7], 6: [4, 6], 7: [2]}
    assert list(found) == sorted(found)


def test_a_share_of_the_trace_is_left_out_and_no_more():
    squares = torch.tensor([[8.0, 1.0], [7.0, 2.0], [2.0, 0.0]]).double()
    for share, kept in ((0.0, 5), (0.04, 5), (0.051, 4), (0.24, 4), (0.251, 2), (0.61, 1)):
        assert sum(len(index) * q for index, q in _groups(squares, share)) == kept


@pytest.mark.parametrize("form", ["none", "diagonal", "classes"])
def test_column_norms_of_many_outputs_are_unbiased(form, monkeypatch):
    model = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6)))
    J, f = linnet.linearize(model).jacobian(normal(9, 3)), normal(9, 6, seed=1)
    root = {"none": None, "diagonal": f.abs(), "classes": Categorical().root(f)}[form]
    exact = J.column_norms(None if root is None else weight_from_root(root))
    assert torch.equal(estimate_column_norms(J, root), exact)  # few outputs
    monkeypatch.setattr(plan, "MANY", 0)
    monkeypatch.setattr(plan, "CHEAP", 0.0)
    monkeypatch.setattr(output_combinations, "DRAWN_ROWS", 18)
    found = torch.stack([estimate_column_norms(J, root, seed=seed) for seed in range(60)])
    error = found.std(0) / 60**0.5
    assert ((found.mean(0) - exact).abs() <= 4.5 * error + 1e-9 * exact).all()  # of 46 numbers, about normal
    assert float(error.max()) > 0
