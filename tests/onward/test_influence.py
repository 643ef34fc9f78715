"""Changes by each training example against dense matrices and against fits without the example; streams, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet import Laplace, TangentClassifier, TangentGLM, TangentRegressor, attribution
from linnet.inference import solve_posterior
from linnet.onward import influence
from tests.support import laplace_cases
from tests.support.drawn import double, normal
from tests.support.sharded import start

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")

X, CLASSES, NUMBERS, NEW = laplace_cases.X, laplace_cases.CLASSES, laplace_cases.NUMBERS, laplace_cases.NEW
NEW_CLASSES, NEW_NUMBERS = torch.tensor([0, 1, 2, 0, 1, 2]), normal(6, 2, seed=6)
STRUCTURES = ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]
WHOLE_STEP = ["full", "function", "subnetwork"]
OPTIONS = {"samples": {"tolerance": 1e-8}, "lowrank": {"rank": 12}, "subnetwork": {"size": 9}}


def net(outputs: int) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)), 0)


def close(a: Tensor, b: Tensor, rtol: float = 1e-9) -> bool:
    return bool((a - b).abs().max() <= rtol * b.abs().max())


def dense_changes(la: Laplace, *, first_order: bool) -> Tensor:
    """The change of each output at NEW without each example, (m c, n), by matrices that are written out."""
    J, new = la.lin_.jacobian(X).dense(), la.lin_.jacobian(NEW).dense()
    f, likelihood = la.lin_.jacobian(X).outputs(), la.likelihood_
    y = likelihood.targets(CLASSES if la.likelihood_.diagonal is False else la._y, *f.shape, dtype=f.dtype)
    r, B = likelihood.residual(f, y), likelihood.observed_curvature(f, y)
    B = torch.diag_embed(B) if B.ndim == 2 else B
    n, c = f.shape
    if la.structure_ in ("full", "function", "samples"):
        C = torch.linalg.inv(J.T @ torch.block_diag(*B) @ J + torch.diag(1 / la.prior_variance_))
    else:  # the covariance of draws of all unit vectors, by another way than products with it
        C = covariance_of(la)
    out = []
    for i in range(n):
        own = J[i * c : (i + 1) * c]
        eye = torch.eye(c, dtype=torch.float64)
        r_i = r[i] if first_order else torch.linalg.solve(eye - B[i] @ own @ C @ own.T, r[i])
        out.append(-new @ C @ own.T @ r_i)
    return torch.stack(out, 1)


def covariance_of(la: Laplace) -> Tensor:
    """The covariance (p, p) of the posterior, from its D, coordinates, features and signs."""
    posterior, p = la.posterior_, len(la.prior_variance_)

    class Unit:
        """The Jacobian whose rows are unit vectors."""

        shape, dtype, device, n, c = (p, p), torch.float64, torch.device("cpu"), p, 1

        def __matmul__(self, V: Tensor) -> Tensor:
            return V

        def columns(self, index: Tensor) -> Tensor:
            return torch.eye(p, dtype=torch.float64)[:, index]

    T = posterior.features(Unit())
    out = (posterior.weights * T) @ T.T
    if posterior.D is not None:
        Q = torch.eye(p, dtype=torch.float64)
        Q = Q if posterior.rotation is None else posterior.rotation.rows(Q)
        out = out + (Q * posterior.D) @ Q.T
    return out


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", ["softmax", "numbers", "labels"])
def test_every_structure_against_dense_matrices(case: str, structure: str) -> None:
    la = laplace_cases.fitted(case, structure, **OPTIONS.get(structure, {}))[0]
    found = attribution(la, NEW)
    flat = found.reshape(-1, len(X))
    assert close(flat, dense_changes(la, first_order=structure not in WHOLE_STEP))
    first = attribution(la, NEW, change="up-weight").reshape(-1, len(X))
    assert close(-first, dense_changes(la, first_order=True))
    parts = attribution(la, NEW, by="layer")
    assert list(parts) == ["0", "2"] and close(sum(parts.values()), found)
    best = attribution(la, NEW, top=4)
    order = found.abs().topk(4, -1).indices
    assert torch.equal(best.indices, order) and torch.equal(best.changes, found.gather(-1, order))


@pytest.mark.parametrize("case", ["softmax", "numbers"])
def test_losses_and_functions_are_of_first_order_in_the_outputs(case: str) -> None:
    la = laplace_cases.fitted(case, "kron")[0]
    y = NEW_CLASSES if case == "softmax" else NEW_NUMBERS
    changes, f = attribution(la, NEW), la.lin_.jacobian(NEW).outputs()
    gradient = -la.likelihood_.residual(f, la.likelihood_.targets(y, *f.shape, dtype=f.dtype))
    expected = torch.einsum("mc,mcn->mn", gradient, changes)
    assert close(attribution(la, NEW, y, of="loss"), expected)
    given = attribution(la, NEW, y, of=lambda f, y: -la.likelihood_.log_prob(f, y))
    assert close(given, expected)
    assert close(attribution(la, NEW, of=lambda f: f[:, 1] - f[:, 0]), changes[:, 1] - changes[:, 0])


@pytest.mark.parametrize("top", [3, 30])
@pytest.mark.parametrize("of", ["output", "loss"])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_the_first_examples_of_numbers_in_closed_form(
    top: int, of: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reg = TangentRegressor(net(2), noise=0.1, prior=0.5).fit(X, NUMBERS)
    monkeypatch.setattr(influence, "KERNEL", at_once * 2 * 2 * len(X))  # inputs that are asked about at a time
    given = (NEW[:3], NEW_NUMBERS[:3]) if of == "loss" else (NEW[:3],)
    found, best = attribution(reg, *given, of=of), attribution(reg, *given, of=of, top=top)
    order = found.abs().argsort(-1, descending=True)[..., :top]
    assert torch.equal(best.indices, order) and close(best.changes, found.gather(-1, order))


# Against fits without the example.


def without(i: int, *tensors: Tensor) -> list[Tensor]:
    keep = torch.arange(len(tensors[0])) != i
    return [t[keep] for t in tensors]


@pytest.mark.parametrize("solver", ["function", "weight"])
@pytest.mark.parametrize("weights", [False, True])
def test_numbers_equal_fits_without_the_example(solver: str, weights: bool) -> None:
    w = 1 + torch.arange(len(X)).double() % 3 if weights else torch.ones(len(X)).double()
    options: Any = {"noise": [0.3, 0.1], "prior": 0.5, "mean": "network"}
    reg = TangentRegressor(net(2), solver=solver, **options).fit(X, NUMBERS, w)
    before, found = reg.predict(NEW), attribution(reg, NEW)
    assert torch.equal(found, -reg.influence(NEW))
    given = attribution(reg, NEW, data=(X, NUMBERS, w))  # by weights instead of kernels
    layers = attribution(reg, NEW, by="layer")
    for i in (0, 7):
        x, y, v = without(i, X, NUMBERS, w)
        change = TangentRegressor(net(2), **options).fit(x, y, v).predict(NEW) - before
        for one in (found, given, sum(layers.values())):
            assert close(one[..., i], change, 1e-8)
    more = attribution(reg, NEW, change="up-weight")
    v = w.clone()
    v[3] += 1e-6
    slope = (TangentRegressor(net(2), **options).fit(X, NUMBERS, v).predict(NEW) - before) / 1e-6
    assert close(more[..., 3], slope, 1e-5)


def test_a_linear_network_at_its_mode_equals_fits_without_the_example() -> None:
    noise, prior = 0.2, 0.5
    A = torch.cat([X, torch.ones(len(X), 1)], 1).double()

    def ridge(A: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.solve(A.T @ A / noise + torch.eye(4).double() / prior, A.T @ y / noise)

    def make(theta: Tensor) -> nn.Module:
        layer = nn.Linear(3, 1).double()
        with torch.no_grad():
            layer.weight.copy_(theta[None, :3])
            layer.bias.copy_(theta[3:])
        return layer

    y = NUMBERS[:, 0]
    for structure in ("full", "function"):
        la = Laplace(make(ridge(A, y)), "regression", structure, prior, noise=noise).fit(X, y)
        found = attribution(la, NEW)
        loss = attribution(la, NEW, NEW_NUMBERS[:, 0], of="loss")
        for i in range(0, len(X), 5):
            theta = ridge(*without(i, A, y)) - ridge(A, y)
            change = NEW @ theta[:3] + theta[3]
            assert close(found[:, i], change)
            f = la.predict(NEW)
            assert close(loss[:, i], (f - NEW_NUMBERS[:, 0]) / noise * change)


@pytest.mark.parametrize("inference", ["laplace", "vi"])
def test_classes_are_a_newton_step_from_fits_without_the_example(inference: str) -> None:
    def fit(x: Tensor, y: Tensor) -> Tensor:
        clf = TangentClassifier(
            net(3), inference=inference, prior=0.3, tolerance=1e-9, classes=[0, 1, 2], mean="network"
        ).fit(x, y)
        return clf, clf._predict(NEW)[0]

    clf, before = fit(X, CLASSES)
    found, first = attribution(clf, NEW), -attribution(clf, NEW, change="up-weight")
    errors = []
    for i in range(0, len(X), 6):
        change = fit(*without(i, X, CLASSES))[1] - before
        size = change.norm()
        errors.append([float((one[..., i] - change).norm() / size) for one in (found, first)])
    step, linear = np.array(errors).T
    # Laplace: what the third derivative leaves; VI: the same, and that the covariance stays and expectations are drawn.
    assert (step < (0.1 if inference == "laplace" else 0.25)).all()
    assert step.mean() < linear.mean()


def test_counts() -> None:
    glm = TangentGLM(net(1), "poisson", prior=0.1, inference="laplace").fit(X, CLASSES)
    x, y = without(2, X, CLASSES)
    change = TangentGLM(net(1), "poisson", prior=0.1, inference="laplace").fit(x, y).predict_outputs(NEW)
    change = change - glm.predict_outputs(NEW)
    assert close(attribution(glm, NEW)[:, 2], change[:, 0], 0.1)


# Solves, sites, data of every kind.


def test_conjugate_gradients_solve_exactly() -> None:
    reg = TangentRegressor(net(1), noise=0.3, prior=0.5).fit(X, NUMBERS[:, 0])
    other = TangentRegressor(net(1), noise=0.3, prior=0.5, solver="cg-weight", mean=reg.mean_, tolerance=1e-10)
    first = -attribution(reg, NEW, change="up-weight")
    assert close(attribution(other.fit(X, NUMBERS[:, 0]), NEW), first, 1e-6)
    la = laplace_cases.fitted("softmax", "samples", tolerance=1e-6)[0]
    J, S = la.lin_.jacobian(X), la.prior_variance_
    L, V = la.likelihood_.root(J.outputs()), normal(len(S), 3)
    exact = solve_posterior(J, S, L, V, space="function")
    assert close(solve_posterior(J, S, L, V, space="weight", tolerance=1e-12), exact)
    B = torch.block_diag(*(L @ L.mT))
    assert close(exact, torch.linalg.solve(J.dense().T @ B @ J.dense() + torch.diag(1 / S), V))


class Tagger(nn.Module):
    """A class for each of four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(7, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(torch.tanh(self.mix(h + h.mean(1, keepdim=True)))).mT  # (n, classes, tokens)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_labels_of_tokens(structure: Any) -> None:
    ids = torch.randint(7, (9, 4), generator=torch.Generator().manual_seed(0))
    la = Laplace(double(Tagger(), 0), structure=structure, prior=0.5).fit(ids, ids % 2)
    found, whole = (
        attribution(la, ids[:2], ids[:2] % 2, of="loss", by=by, change="up-weight") for by in ("site", None)
    )
    assert found.shape == (2, 9, 4) and close(found.sum(2), whole)
    best = attribution(la, ids[:2], ids[:2] % 2, of="loss", by="site", change="up-weight", top=3, rank="highest")
    order = found.flatten(1).topk(3).indices
    assert torch.equal(best.indices * 4 + best.sites, order)
    # The label of one token is left out: the others of its example stay.
    left = attribution(la, ids[:1], by="site")
    y = (ids % 2).clone()
    y[5, 2] = -100
    J, new = la.lin_.jacobian(ids), la.lin_.jacobian(ids[:1]).dense()
    likelihood = la.likelihood_
    f = J.outputs()
    r = likelihood.residual(f, la._y)[5].view(4, 2)[2]
    own = J.dense().view(9, 4, 2, -1)[5, 2]
    C = torch.eye(len(la.prior_variance_), dtype=torch.float64)
    C = la.posterior_.multiply(C)
    if structure == "full":
        B = likelihood.observed_curvature(f, la._y)[5][4:6, 4:6]
        r = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - B @ own @ C @ own.T, r)
    assert close(left[..., 5, 2].flatten(), -new @ C @ own.T @ r)


def test_ranking_in_both_directions_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    la = laplace_cases.fitted("softmax", "ekfac", batch_size=5)[0]
    found = attribution(la, NEW, NEW_CLASSES, of="loss")
    monkeypatch.setattr(linnet.onward.influence, "_columns_at_once", lambda estimator, J: 4)
    again = attribution(la, NEW, NEW_CLASSES, of="loss")
    assert close(again, found)
    for rank, sign in (("highest", 1), ("lowest", -1)):
        best = attribution(la, NEW, NEW_CLASSES, of="loss", top=30, rank=rank)  # more than there are
        order = (sign * found).argsort(1, descending=True)
        assert torch.equal(best.indices, order) and close(best.changes, found.gather(1, order))


def test_kinds_of_data_and_files(tmp_path: Any) -> None:
    model = net(3)
    la = Laplace(model, structure="kron", prior=0.5).fit(X, CLASSES)
    found = attribution(la, NEW)
    array = attribution(Laplace(model, structure="kron", prior=0.5).fit(X.numpy(), CLASSES.numpy()), NEW.numpy())
    assert isinstance(array, np.ndarray) and close(torch.as_tensor(array), found)
    loader = DataLoader(TensorDataset(X, CLASSES), batch_size=7)
    streamed = Laplace(model, structure="kron", prior=0.5).fit(loader)
    assert close(attribution(streamed, DataLoader(TensorDataset(NEW), batch_size=4)), found)
    la.save(tmp_path / "la")
    loaded = linnet.load(tmp_path / "la", model)
    with pytest.raises(ValueError, match=r"needs the training examples.*data=\(X, y\)"):
        attribution(loaded, NEW)
    assert close(attribution(loaded, NEW, data=(X, CLASSES)), found)
    assert close(attribution(loaded, NEW, data=TensorDataset(X, CLASSES)), found)
    samples = laplace_cases.fitted("softmax", "samples")[0]
    samples.save(tmp_path / "samples")
    again = linnet.load(tmp_path / "samples", samples.model)
    assert close(attribution(again, NEW, data=(X, CLASSES)), attribution(samples, NEW))
    for clf in (TangentClassifier(model, inference="laplace", prior=0.5), TangentClassifier(model, prior=0.5)):
        names = np.array(["a", "b", "c"])[CLASSES.numpy()]
        clf.fit(X.numpy(), names)
        clf.save(tmp_path / "clf")
        again = linnet.load(tmp_path / "clf", model)
        one, two = attribution(again, NEW.numpy(), data=(X.numpy(), names)), attribution(clf, NEW.numpy())
        assert close(torch.as_tensor(one), torch.as_tensor(two))
        assert isinstance(clf.predict(NEW.numpy()), np.ndarray)


def trained(classes: bool) -> nn.Module:
    """A network that has fitted its labels closely: its prior is narrowed."""
    model = net(3 if classes else 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60)

    def loss() -> Tensor:
        optimizer.zero_grad()
        f = model(X)
        value = nn.functional.cross_entropy(f, CLASSES) if classes else (f - NUMBERS).square().mean()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("structure", "prior", "classes"),
    [
        *((one, "shared", True) for one in ("full", "kron", "diag")),
        *((one, "layerwise", False) for one in ("full", "function", "lowrank", "subnetwork")),
    ],
)
@pytest.mark.filterwarnings("ignore:The prior that the evidence chose")
def test_the_prior_is_that_of_largest_evidence(structure: Any, prior: Any, classes: bool, tmp_path: Any) -> None:
    model, y = trained(classes), CLASSES if classes else NUMBERS
    kind = "classification" if classes else "regression"
    options: Any = {"progress": False, **OPTIONS.get(structure, {})}
    la = Laplace(model, kind, structure, prior, **options).fit(X, y)
    found = attribution(la, NEW)
    assert la.narrowed_ < 0.99  # else this test says nothing
    wide = Laplace(model, kind, structure, prior, **options).fit(X, y)
    wide._accept(wide._prior, wide._log_det, wide.tune_path_[:-1])
    wide.narrowed_ = 1.0
    assert close(found, attribution(wide, NEW))
    la.save(tmp_path / "la")
    assert close(attribution(linnet.load(tmp_path / "la", model), NEW, data=(X, y)), found, 1e-8)


def test_examples_that_were_added_and_those_of_a_source() -> None:
    y = NUMBERS[:, 0]
    reg = TangentRegressor(net(1), noise=0.3, prior=0.5, mean="network").fit(X[:14], y[:14]).condition(X[14:], y[14:])
    whole = TangentRegressor(net(1), noise=0.3, prior=0.5, mean="network").fit(X, y)
    assert close(attribution(reg, NEW, by="layer")["0"], attribution(whole, NEW, by="layer")["0"], 1e-8)
    with_source = TangentRegressor(net(1), noise=0.3, prior=0.5).fit(X[:5], y[:5], source=(X[5:], y[5:]))
    found = attribution(with_source, NEW, by="layer")
    assert found["0"].shape == (6, 5)
    assert close(sum(found.values()), attribution(with_source, NEW))
    clf = TangentClassifier(net(3), inference="laplace", prior=0.5)
    clf.fit(X[:9], CLASSES[:9], source=(X[9:], CLASSES[9:]))
    given = attribution(clf, NEW, data=(torch.cat([X[:9], X[9:]]), torch.cat([CLASSES[:9], CLASSES[9:]])))
    assert close(attribution(clf, NEW), given[..., :9])


def test_weights_and_ignored_labels() -> None:
    y = CLASSES.clone()
    y[4] = -100
    w = torch.ones(len(X)).double()
    w[2], w[9] = 0.0, 2.0
    la = Laplace(net(3), structure="ekfac", prior=0.5).fit(X, y, w)
    found = attribution(la, NEW)
    assert found.shape == (6, 3, len(X) - 2)
    more = attribution(la, NEW, change="up-weight")
    kept = [i for i in range(len(X)) if i not in (2, 4)]
    assert close(-found[..., kept.index(9)], 2 * more[..., kept.index(9)])
    assert close(attribution(la, NEW, data=(X, y, w)), found)


def spread(rank: int, folder: str) -> None:
    la = Laplace(net(3), structure="ekfac", prior=0.5, batch_size=5, progress=False).fit(X, CLASSES)
    found = attribution(la, NEW, NEW_CLASSES, of="loss")
    best = attribution(la, NEW, NEW_CLASSES, of="loss", top=15)
    torch.save((found, best.indices, best.changes), f"{folder}/{rank}")


def test_ranks_give_the_same_answers(tmp_path: Any) -> None:
    start(spread, 2, tmp_path)
    la = Laplace(net(3), structure="ekfac", prior=0.5).fit(X, CLASSES)
    found, best = attribution(la, NEW, NEW_CLASSES, of="loss"), attribution(la, NEW, NEW_CLASSES, of="loss", top=15)
    for rank in (0, 1):
        one, indices, changes = torch.load(tmp_path / str(rank))
        assert close(one, found) and torch.equal(indices, best.indices) and close(changes, best.changes)


def test_errors() -> None:
    y = NUMBERS[:, 0]
    reg = TangentRegressor(net(1), noise=0.3)
    each = Laplace(net(2), "regression", noise=torch.full((len(X),), 0.1).double()).fit(X, NUMBERS)
    assert attribution(each, NEW).shape == (len(NEW), 2, len(X))
    with pytest.raises(NotImplementedError, match="a noise for each observation, which data= does not carry"):
        attribution(each, NEW, data=(X, NUMBERS))
    with pytest.raises(ValueError, match="not fitted"):
        attribution(reg, NEW)
    with pytest.raises(TypeError, match="attribution takes a fitted TangentRegressor"):
        attribution(nn.Linear(1, 1), NEW)
    reg.fit(X, y)
    for bad, text in (
        ({"of": "logit"}, "of must be 'output', 'loss'"),
        ({"change": "add"}, "change must be one of 'leave-out'"),
        ({"by": "token"}, "by must be one of None, 'layer'"),
        ({"rank": "best"}, "rank must be one of 'absolute'"),
        ({"top": 0}, "top is a number of examples"),
        ({"by": "site"}, "by='site' is for networks with a label for each site"),
        ({"of": lambda f, y: f[:, 0]}, "needs the targets y"),
        ({"of": lambda f: f}, r"one number for each of the 6 inputs, \(6,\); got \(6, 1\)"),
    ):
        with pytest.raises(ValueError, match=text):
            attribution(reg, NEW, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode alone"):
        attribution(TangentClassifier(net(3), inference="map", prior=0.5).fit(X, CLASSES), NEW)
    both = Laplace([net(3), double(net(3), 1)], structure="diag", prior=0.5).fit(X, CLASSES)
    with pytest.raises(NotImplementedError, match="members_"):
        attribution(both, NEW)
    assert attribution(both.members_[0], NEW).shape == (6, 3, len(X))
    each = Laplace(net(1), "regression", "diag", 0.5, noise=[0.1] * len(X)).fit(X, y)
    with pytest.raises(NotImplementedError, match="noise for each observation"):
        attribution(each, NEW, y[:6], of="loss")
    assert attribution(each, NEW).shape == (6, len(X))
    own = TangentRegressor(net(1), noise=[0.1] * len(X)).fit(X, y)
    for options in ({"y": y[:6], "of": "loss"}, {"data": (X, y)}):
        with pytest.raises(NotImplementedError, match="differs between observations"):
            attribution(own, NEW, **options)
    small = Laplace(net(3), structure="diag", prior=0.5, memory=2000).fit(X, CLASSES)
    with pytest.raises(MemoryError, match=r"changes of 18 numbers by 24 training examples.*top="):
        attribution(small, NEW)
    assert attribution(small, NEW, top=2).indices.shape == (6, 3, 2)
    clf = TangentClassifier(net(3), inference="laplace", prior=0.5, classes=["a", "b", "c"])
    clf.fit(X.numpy(), np.array(["a", "b", "c"])[CLASSES.numpy()])
    with pytest.raises(ValueError, match="Labels z are not among the classes"):
        attribution(clf, NEW.numpy(), np.array(["z"] * 6), of="loss")


@pytest.mark.parametrize("kind", ["regressor", "classifier", "kron"])
def test_data_that_the_fit_has_not_seen(tmp_path, kind):
    if kind == "regressor":
        fitted, y, model = TangentRegressor(net(2), noise=0.3).fit(X, NUMBERS), NUMBERS, net(2)
    elif kind == "classifier":
        fitted, y, model = TangentClassifier(net(3), inference="laplace").fit(X, CLASSES), CLASSES, net(3)
    else:
        fitted, y, model = linnet.Laplace(net(3), structure="kron").fit(X, CLASSES), CLASSES, net(3)
    fitted.save(tmp_path / "fit")
    for one in (fitted, linnet.load(tmp_path / "fit", model)):
        some = attribution(one, NEW, data=(X[5:], y[5:]))  # at the fit of all examples
        assert close(some, attribution(one, NEW, data=(X, y))[..., 5:])
        other = X.clone()
        other[3] += 1
        with pytest.raises(
            ValueError, match=r"1 of the .* in data= are not among the .*; the first of them is example 3"
        ):
            attribution(one, NEW, data=(other, y))
