"""Class curvature by formula: products, traces and blocks against the dense ones, and fits that use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet import Laplace, TangentClassifier, linearize
from linnet.jacobian import informative_rows
from linnet.linalg import ClassBlocks, blocks_of_chunk, square_sums, weigh, weight_from_root
from linnet.probability import Bernoulli, Categorical, Sites, row_curvature, row_root
from tests.support.drawn import check_close, double, normal
from tests.support.laplace_cases import CLASSES, NEW, X, net

MODULE = "linnet.probability.class_curvature.TEMPORARY"


# The networks here are drawn, not trained.
pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode:UserWarning")


def test_products_are_those_of_the_blocks():
    f, U = 3 * normal(5, 4, seed=1), normal(20, 3, seed=2)
    L = Categorical().root(f)
    blocks = ClassBlocks(torch.softmax(f, -1))
    for mine, dense in ((blocks, L), (weight_from_root(blocks), L @ L.mT)):
        assert mine.shape == dense.shape and len(mine) == 5
        check_close(mine.dense(), dense)
        for transpose in (False, True):
            check_close(weigh(U, mine, transpose=transpose), weigh(U, dense, transpose=transpose))
            check_close(
                weigh(U[4:12], mine, slice(4, 12), transpose=transpose), weigh(U, dense, transpose=transpose)[4:12]
            )
        check_close(weigh(U[:, 0], mine), weigh(U[:, 0], dense))
        check_close(mine.mT.dense(), dense.mT)
    check_close(square_sums(blocks, 5), L.square().sum((1, 2)))
    w = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.5]).double()
    check_close((blocks * w).dense(), w[:, None, None] * L)
    check_close(weight_from_root(blocks * w * 2.0).dense(), 4 * w[:, None, None] ** 2 * (L @ L.mT))
    check_close((blocks * w).sizes(), (w[:, None, None] * L).square().sum((1, 2)))
    check_close(blocks[torch.tensor([3, 1])].dense(), L[[3, 1]])


def test_nothing_cancels_where_a_network_is_sure():
    f = torch.tensor([[30.0, 0.0, -2.0]])
    exact, blocks = Categorical().root(f.double()), ClassBlocks(torch.softmax(f, -1))
    for mine, dense in ((blocks, exact), (blocks.mT, exact.mT), (weight_from_root(blocks), exact @ exact.mT)):
        error = (mine.dense().double() - dense).abs().max()
        assert error < 8 * torch.finfo(torch.float32).eps * dense.abs().max()
    assert float(blocks.sizes()) == pytest.approx(float(exact.square().sum()), rel=1e-5)


def test_the_form_goes_by_the_number_of_numbers(monkeypatch):
    f = normal(6, 4)
    assert isinstance(row_root(Categorical(), f), Tensor)
    monkeypatch.setattr(MODULE, 90)
    found = row_root(Categorical(), f)
    assert isinstance(found, ClassBlocks) and isinstance(row_root(Bernoulli(), f), Tensor)
    check_close(found.dense(), Categorical().root(f))
    check_close(row_curvature(Categorical(), f).dense(), Categorical().curvature(f))
    sites = Sites(Categorical(), (2, 2))
    blocks = row_root(sites, f)
    assert blocks.shape == (12, 2, 2)
    check_close(blocks_of_chunk(blocks, 1, 5, 4), sites.root(f)[1:5])
    check_close(weigh(normal(24, 2), blocks), weigh(normal(24, 2), sites.root(f)))


@pytest.mark.parametrize("structure", ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"])
def test_a_fit_by_formula_is_the_fit_by_blocks(structure, monkeypatch):
    given: dict[str, Any] = {"structure": structure, "prior": 0.7, "size": 20, "rank": 9, "samples": 8}
    given |= {"tolerance": 1e-12} if structure == "samples" else {}
    plain = Laplace(net(3), **given).fit(X, CLASSES)
    monkeypatch.setattr(MODULE, 0)
    la = Laplace(net(3), **given).fit(X, CLASSES)
    check_close(la.predict(NEW, return_std=True)[1], plain.predict(NEW, return_std=True)[1])
    assert la.log_evidence() == pytest.approx(plain.log_evidence(), rel=1e-9)
    assert la.gradient_ratio_ == pytest.approx(plain.gradient_ratio_, rel=1e-9)


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_sites_by_formula(structure, monkeypatch):
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 3, padding=1).double()
    images, labels = normal(8, 1, 4, 4), torch.randint(3, (8, 4, 4), generator=torch.Generator().manual_seed(0))
    labels[0, 0], labels[3, 2, 2] = -100, -100
    given = {"structure": structure, "prior": 0.3, "rank": 9}
    plain = Laplace(model, **given).fit(images, labels)
    monkeypatch.setattr(MODULE, 0)
    la = Laplace(model, **given).fit(images, labels)
    assert la.log_evidence() == pytest.approx(plain.log_evidence(), rel=1e-9)
    check_close(la.predict(images, return_std=True)[1], plain.predict(images, return_std=True)[1])


@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
@pytest.mark.parametrize("inference", ["map", "laplace"])
def test_classifiers_by_formula(solver, inference, monkeypatch):
    given: dict[str, Any] = {"inference": inference, "solver": solver, "prior": 0.7, "tolerance": 1e-10}
    plain = TangentClassifier(net(3), **given).fit(X, CLASSES)
    monkeypatch.setattr(MODULE, 0)
    clf = TangentClassifier(net(3), **given).fit(X, CLASSES)
    torch.testing.assert_close(clf.predict_proba(NEW), plain.predict_proba(NEW), rtol=1e-7, atol=1e-9)


def test_informative_rows_by_parts(monkeypatch):
    J = linearize(double(nn.Linear(3, 4))).jacobian(X)
    f = 30 * normal(24, 4, seed=1)
    whole = informative_rows(J, Categorical().root(f))
    monkeypatch.setattr("linnet.jacobian.output_combinations.TEMPORARY", 40)
    parts = informative_rows(J, ClassBlocks(torch.softmax(f, -1)))
    assert whole is not None and parts is not None and whole.shape == parts.shape
    check_close(parts.dense().T @ parts.dense(), whole.dense().T @ whole.dense())
