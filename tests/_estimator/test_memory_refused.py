"""Dense matrices that do not fit are refused before they are made, and before any pass."""

from types import SimpleNamespace

import pytest
import torch

from linnet import Laplace, TangentClassifier, TangentRegressor
from linnet._common import memory
from linnet.inference import SolverSettings, choose_solver
from tests.support.counted import Counting

CPU = torch.device("cpu")
N = 100
X = torch.randn(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
y, labels = X[:, 0], torch.arange(N) % 3
LITTLE = 50_000.0  # bytes: less than any square matrix below takes


ONE, THREE = Counting(1, 20).double(), Counting(3, 20).double()
FITS = {
    "regressor, function": (lambda **o: TangentRegressor(ONE, solver="function", **o).fit(X, y), 24 * N**2),
    "regressor, layers": (
        lambda **o: TangentRegressor(ONE, solver="function", prior="layerwise", **o).fit(X, y),
        8 * 4 * N**2,
    ),
    "regressor, weight": (lambda **o: TangentRegressor(ONE, solver="weight", **o).fit(X, y), 32 * 121**2),
    "classifier, function": (
        lambda **o: TangentClassifier(THREE, solver="function", **o).fit(X, labels),
        8 * 4 * (3 * N) ** 2,
    ),
    "classifier, weight": (
        lambda **o: TangentClassifier(THREE, solver="weight", **o).fit(X, labels),
        8 * (4 * 163**2 + 2 * 3 * N * 163),
    ),
    "laplace, full": (lambda **o: Laplace(THREE, structure="full", **o).fit(X, labels), 32 * 163**2),
    "laplace, function": (lambda **o: Laplace(THREE, structure="function", **o).fit(X, labels), 24 * (3 * N) ** 2),
    "laplace, layers": (
        lambda **o: Laplace(THREE, structure="function", prior="layerwise", **o).fit(X, labels),
        8 * 5 * (3 * N) ** 2,
    ),
    "laplace, subnetwork": (
        lambda **o: Laplace(THREE, structure="subnetwork", size=100, **o).fit(X, labels),
        32 * 100**2,
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_dense_matrix_above_the_memory_given_is_refused_before_any_pass(name, monkeypatch):
    fit, needed = FITS[name]
    monkeypatch.setattr(Counting, "seen", 0)
    with pytest.raises(MemoryError, match=r"memory= allows 48.8 KiB. Use .*, or allow more with memory=") as caught:
        fit(memory=LITTLE)
    assert f"takes {memory.format_bytes(needed)}" in str(caught.value)
    assert Counting.seen <= 40  # a few probe examples, several times over


@pytest.mark.parametrize("name", FITS)
def test_a_dense_matrix_above_what_is_free_is_refused(name, monkeypatch):
    fit, _ = FITS[name]
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=int(LITTLE)))
    with pytest.raises(MemoryError, match=r"48.8 KiB are free"):
        fit()


def test_a_joint_covariance_that_does_not_fit_is_refused(monkeypatch):
    reg = TangentRegressor(ONE, memory=1e7).fit(X, y)
    la = Laplace(THREE, structure="diag", memory=1e7).fit(X, labels)
    many = X.repeat(20, 1)
    for fitted in (reg, la):
        monkeypatch.setattr(Counting, "seen", 0)
        with pytest.raises(MemoryError, match=r"return_cov=True for 2,000 inputs .* Ask for return_std=True"):
            fitted.predict(many, return_cov=True)
        assert Counting.seen <= 40
        mean, std = fitted.predict(many, return_std=True)
        assert mean.shape == std.shape


def test_iterative_solvers_take_no_dense_matrix():
    for solver in ("cg-function", "cg-weight"):
        assert choose_solver(10**6, 10**6, SolverSettings(solver=solver, memory=1e6), device=CPU) == solver
    with pytest.raises(MemoryError, match=r"solver='function' with 1,000,000 rows and 50 parameters takes 7823.1 GiB"):
        choose_solver(10**6, 50, SolverSettings(solver="function", memory=1e9), device=CPU)


def test_features_count_in_weight_space():
    sizes = {"device": CPU, "features": 10**6}
    assert choose_solver(10**6, 100, SolverSettings(memory=1e8), device=CPU) == "weight"
    assert choose_solver(10**6, 100, SolverSettings(memory=1e8), **sizes) == "cg-weight"


@pytest.mark.parametrize(
    "fit",
    [
        lambda: TangentRegressor(ONE).fit(X, y),
        lambda: TangentClassifier(THREE, inference="map").fit(X, labels),
        lambda: Laplace(THREE, structure="diag").fit(X, labels),
    ],
)
def test_outputs_that_do_not_fit_are_refused_with_a_way_out(fit, monkeypatch):
    monkeypatch.setattr(Counting, "seen", 0)
    monkeypatch.setattr("linnet.inference.problem.free_memory", lambda device: 3000)
    with pytest.raises(MemoryError, match=r"The outputs of 100 examples, \d numbers each, .* with output=, such as"):
        fit()
    assert Counting.seen <= 40


def test_variational_covariances_that_do_not_fit_are_refused():
    with pytest.raises(MemoryError, match=r"inference='vi' with 100 examples and 3 classes takes 28\.1 KiB"):
        TangentClassifier(THREE, solver="cg-weight", memory=20_000).fit(X, labels)
    assert TangentClassifier(THREE, solver="cg-weight", inference="map", memory=20_000).fit(X, labels).passes_ > 0
