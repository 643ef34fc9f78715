"""The network in its own dtype, float64 for what is small."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from linnet._estimator import dtypes

STRUCTURES = ("kron", "ekfac", "diag", "full", "function", "lowrank", "samples")


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, outputs))


def trained(outputs: int, X: Tensor, y: Tensor) -> nn.Module:
    net = perceptron(outputs)
    loss = F.mse_loss if y.is_floating_point() else F.cross_entropy
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(net(X), y).backward()
        optimizer.step()
    return net


class NamesDtype(nn.Module):
    """A network whose forward runs in float32 alone."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 20), nn.Linear(20, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.float())))


class Adapted(nn.Module):
    """A frozen half-precision layer with a low-rank adapter, and a head, in float32."""

    def __init__(self, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(64, 512).to(dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 512, bias=False)
        self.head = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x.float()))
        return self.head(torch.tanh(h))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All networks count as large: "auto" runs them in their own dtype."""
    monkeypatch.setattr(dtypes, "SMALL", 0)


@pytest.fixture
def data() -> tuple[Tensor, Tensor, Tensor]:
    X = torch.randn(80, 3)
    return X, torch.sin(2 * X[:, 0]) + 0.1 * torch.randn(80), (X[:, 0] > X[:, 1]).long() + (X[:, 2] > 1).long()


@pytest.mark.parametrize(
    ("dtype", "network"),
    [("auto", torch.float64), ("float32", torch.float32), ("float64", torch.float64), (torch.float32, torch.float32)],
)
def test_small_networks_on_a_cpu(dtype, network):
    assert dtypes.choose_dtypes(perceptron(1), dtype) == dtypes.Dtypes(network, torch.float64)


def test_large_half_and_mixed_networks_stay_as_they_are(large):
    own = dtypes.Dtypes(None, torch.float64)
    for net in (perceptron(1), perceptron(1).bfloat16(), Adapted(1, torch.float16), perceptron(1).double()):
        assert dtypes.choose_dtypes(net, "auto") == own
    with pytest.raises(ValueError, match="dtype must be 'auto', 'float32' or 'float64'; got 'bfloat16'"):
        dtypes.choose_dtypes(perceptron(1), "bfloat16")


def test_files_of_before_have_one_dtype():
    assert dtypes.Dtypes.from_meta({"dtype": "float32"}) == dtypes.Dtypes(torch.float32, torch.float32)
    for chosen in (dtypes.Dtypes(None, torch.float64), dtypes.Dtypes(torch.float32, torch.float64)):
        assert dtypes.Dtypes.from_meta(chosen.meta()) == chosen


def close(found, exact, tolerance=1e-5):
    found, exact = (np.asarray(x, dtype=float) for x in (found, exact))
    assert np.abs(found - exact).max() <= tolerance * np.abs(exact).max()


def test_regression_in_float32_is_close_to_float64(large, data, tmp_path):
    X, y, _ = data
    net = trained(1, X[:40], y[:40, None])
    for options in ({}, {"prior": "layerwise"}, {"solver": "weight"}, {"mean": "zero", "solver": "cg-function"}):
        own = linnet.TangentRegressor(net, **options).fit(X[40:], y[40:])
        exact = linnet.TangentRegressor(net, dtype="float64", **options).fit(X[40:], y[40:])
        assert (own.lin_.model_dtype, own.lin_.dtype) == (torch.float32, torch.float64)
        loose = 1e-5 if "cg" not in own.solver_ else 2e-3  # as exact as its tolerance, 1e-4
        for a, b in zip(own.predict(X, return_std=True), exact.predict(X, return_std=True), strict=True):
            assert a.dtype == torch.float64
            close(a, b, loose)
        close(own.log_evidence_, exact.log_evidence_, loose)
    own = linnet.TangentRegressor(net).fit(X[40:], y[40:])
    own.save(tmp_path / "regressor")
    close(linnet.load(tmp_path / "regressor", net).predict(X), own.predict(X), 1e-9)
    moved, exact = (linnet.TangentRegressor(net, mean="zero", dtype=d).fit(X, y) for d in ("auto", "float64"))
    close(moved.linearity(X).relative_error, exact.linearity(X).relative_error, 1e-4)
    close(own.to_module()(X), own.predict(X)[:, None], 1e-6)
    assert all(t.dtype == torch.float32 for t in own.apply().parameters())


@pytest.mark.parametrize("inference", ["vi", "laplace", "map"])
@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
def test_classification_in_float32_is_close_to_float64(large, data, tmp_path, inference, solver):
    X, _, y = data
    net = trained(3, X[:40], y[:40])
    options = {"inference": inference, "solver": solver, "seed": 1}
    own = linnet.TangentClassifier(net, **options).fit(X[40:], y[40:])
    exact = linnet.TangentClassifier(net, dtype="float64", **options).fit(X[40:], y[40:])
    close(own.predict_proba(X), exact.predict_proba(X), 1e-5 if solver != "cg-weight" else 5e-3)
    own.save(tmp_path / "classifier")
    close(linnet.load(tmp_path / "classifier", net).predict_proba(X), own.predict_proba(X), 1e-9)


def test_minibatches_are_in_the_dtype_of_the_network(large, data):
    X, _, y = data
    net = trained(3, X[:40], y[:40])
    options = {"inference": "map", "solver": "adam", "epochs": 20, "minibatch": 20, "prior": 1.0}
    own = linnet.TangentClassifier(net, **options).fit(X[40:], y[40:])
    exact = linnet.TangentClassifier(net, dtype="float64", **options).fit(X[40:], y[40:])
    assert (own.mode_.u.dtype, own.posterior_.delta.dtype) == (torch.float32, torch.float64)
    close(own.predict_proba(X), exact.predict_proba(X), 1e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_error_bars_in_float32_are_close_to_float64(large, data, tmp_path, structure):
    X, _, y = data
    net = trained(3, X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how far the network is from a mode
        own = linnet.Laplace(net, structure=structure, seed=1).fit(X, y)
        exact = linnet.Laplace(net, structure=structure, seed=1, dtype="float64").fit(X, y)
    assert (own.lin_.model_dtype, own.lin_.dtype) == (torch.float32, torch.float64)
    loose = 1e-5 if structure != "samples" else 2e-2  # the tolerance of its solve is 1e-2
    close(own.predict_proba(X), exact.predict_proba(X), loose)
    close(own.log_evidence(), exact.log_evidence(), loose)
    own.save(tmp_path / "laplace")
    close(linnet.load(tmp_path / "laplace", net).predict_proba(X), own.predict_proba(X), 1e-6)
    assert len(own.linearity(X, 2)) == 2


def test_embeddings_in_float32_are_close_to_float64(data):
    X, _, y = data
    net = trained(3, X, y)
    own, exact = (linnet.FisherEmbedding(net, 5, dtype=dtype).fit(X) for dtype in ("auto", "float64"))
    assert own.lin_.dtype == torch.float32
    close(own.eigenvalues_, exact.eigenvalues_, 1e-4)


def test_inputs_are_cast_to_the_dtype_of_the_network(large, data):
    X, y, _ = data
    reg = linnet.TangentRegressor(perceptron(1)).fit(X.double().numpy(), y.double().numpy())
    assert isinstance(reg.predict(X.double().numpy()), np.ndarray)


class TwoDtypes(nn.Module):
    """A layer in one dtype, and a head in another."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8, dtype=first), nn.Linear(8, 1, dtype=second)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).to(self.second.weight.dtype))


@pytest.mark.parametrize(("first", "second"), [("float32", "float64"), ("bfloat16", "float32")])
def test_inputs_of_a_mixed_network_are_cast_to_what_its_first_layer_takes(first, second, tmp_path):
    net = TwoDtypes(getattr(torch, first), getattr(torch, second))
    X = np.random.default_rng(0).standard_normal((20, 3))
    y, own = X[:, 0], torch.from_numpy(X).to(net.first.weight.dtype)
    given = {"prior": 1.0, "noise": 0.1, "progress": False}
    fitted = linnet.TangentRegressor(net, **given).fit(X, y)
    wanted = linnet.TangentRegressor(net, **given).fit(own, torch.from_numpy(y))
    np.testing.assert_allclose(fitted.predict(X), wanted.predict(own), rtol=1e-9)
    np.testing.assert_allclose(wanted.predict(X), wanted.predict(own), rtol=1e-9)  # fitted to what the layer takes
    fitted.save(tmp_path / "fit.safetensors")
    np.testing.assert_allclose(linnet.load(tmp_path / "fit.safetensors", net).predict(X), fitted.predict(X), rtol=1e-9)
    Z = linnet.FisherEmbedding(net, 2, score=lambda f: f[:, 0]).fit_transform(X)
    assert np.isfinite(Z).all()
    with pytest.raises(RuntimeError, match="dtype") as caught:
        linnet.linearize(net).jacobian(torch.from_numpy(X)).gram()
    assert f"are torch.float64 and the model's parameters torch.{first} ('first.weight')" in caught.value.__notes__[0]


def test_a_network_that_names_a_dtype_runs_in_that(data):
    X, y, labels = data
    regressor = linnet.TangentRegressor(NamesDtype(1)).fit(X, y)
    classifier = linnet.TangentClassifier(NamesDtype(3)).fit(X, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laplace = linnet.Laplace(NamesDtype(3), structure="kron").fit(X, labels)
    for fitted in (regressor, classifier, laplace):
        assert (fitted.lin_.model_dtype, fitted.lin_.dtype) == (torch.float32, torch.float64)
        assert len(fitted.predict(X)) == len(X)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_estimator_copies_a_half_precision_base(dtype):
    X, model = torch.randn(24, 64), Adapted(2, dtype)
    labels, y = torch.arange(24) % 2, torch.randn(24, 2)
    own = {t.untyped_storage().data_ptr() for t in model.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the network is not trained
        fitted = [
            linnet.TangentRegressor(model).fit(X, y),
            linnet.TangentClassifier(model, inference="laplace").fit(X, labels),
            *(linnet.Laplace(model, structure=name).fit(X, labels) for name in ("kron", "diag", "function")),
            linnet.FisherEmbedding(model, 3).fit(X),
        ]
    for one in fitted:
        _ = one.transform(X) if isinstance(one, linnet.FisherEmbedding) else one.predict(X)
        assert {t.untyped_storage().data_ptr() for t in one.lin_.module.parameters()} == own
        held = [t for t in one.lin_.module.state_dict().values() if t.dtype == torch.float64]
        assert not held


def test_too_little_noise_for_float32_is_fitted_again_in_float64(large, data):
    X = torch.linspace(-1, 1, 40)[:, None].expand(-1, 3).contiguous()
    y, net = torch.sin(4 * X[:, 0]), perceptron(1)
    with pytest.warns(UserWarning, match="runs in float32, and with so little noise .* again with a copy .* float64"):
        own = linnet.TangentRegressor(net, noise=1e-9, prior=1.0).fit(X, y)
    exact = linnet.TangentRegressor(net, noise=1e-9, prior=1.0, dtype="float64").fit(X, y)
    assert own.lin_.model_dtype == torch.float64
    close(own.predict(X), exact.predict(X), 1e-9)
    with pytest.warns(UserWarning, match="Give more noise, or run the network with more digits"):
        linnet.TangentRegressor(NamesDtype(1), noise=1e-12, prior=1.0).fit(X, y)
