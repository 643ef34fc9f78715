"""The calls of laplace-torch: the numbers of `linnet.Laplace`, the shapes of laplace-torch, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet.interop.laplace_torch import Laplace

generator = torch.Generator().manual_seed(0)
X = torch.randn(60, 2, generator=generator, dtype=torch.float64)
LABELS = (X[:, 0] + 0.3 * torch.randn(60, generator=generator) > 0).long() + (X[:, 1] > 0.8).long()
NUMBERS = torch.stack([torch.sin(2 * X[:, 0]), X[:, 1]], 1) + 0.1 * torch.randn(60, 2, generator=generator)
NEW = torch.randn(7, 2, generator=generator, dtype=torch.float64)


def train(outputs: int, targets: Tensor) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.03, weight_decay=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        f = net(X)
        (
            nn.functional.cross_entropy(f, targets) if targets.ndim == 1 else nn.functional.mse_loss(f, targets)
        ).backward()
        optimizer.step()
    return net


CLASSIFIER, REGRESSOR = train(3, LABELS), train(2, NUMBERS)


def loader(targets: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, targets), **{"batch_size": 16, "shuffle": True, **options})


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "gp"])
def test_classes(subset, structure):
    la = Laplace(CLASSIFIER, "classification", subset, structure, prior_precision=4.0)
    la.fit(loader(LABELS))
    params = None if subset == "all" else "2.*"
    expected = linnet.Laplace(
        CLASSIFIER, "classification", "function" if structure == "gp" else structure, 0.25, params
    )
    expected.fit(X, LABELS)
    for link in ("probit", "bridge", "mc"):
        torch.testing.assert_close(
            la(NEW, link_approx=link, n_samples=50),
            expected.predict_proba(NEW, link=link, draws=50),
            rtol=1e-9,
            atol=0.0,
        )
    f = la.functional_samples(NEW, n_samples=6)
    torch.testing.assert_close(f, expected.sample(NEW, 6), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.predictive_samples(NEW, n_samples=6), f.softmax(-1))
    assert float(la.log_marginal_likelihood()) == pytest.approx(expected.log_evidence(), rel=1e-9)


def test_numbers():
    la = Laplace(REGRESSOR, "regression", "all", "full", sigma_noise=0.3, prior_precision=torch.tensor(2.0))
    la.fit(loader(NUMBERS, shuffle=False))
    expected = linnet.Laplace(REGRESSOR, "regression", "full", 0.5, noise=0.09).fit(X, NUMBERS)
    mean, C = expected.predict(NEW, return_cov=True)
    f, blocks = la(NEW)
    assert f.shape == (7, 2) and blocks.shape == (7, 2, 2)
    torch.testing.assert_close(f, mean)
    whole = C.reshape(7, 2, 7, 2)
    torch.testing.assert_close(blocks, torch.stack([whole[i, :, i] for i in range(7)]), rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(la(NEW, diagonal_output=True)[1], blocks.diagonal(dim1=1, dim2=2), rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(la(NEW, joint=True), (mean.flatten(), C))
    assert la.predictive_samples(NEW, n_samples=5).shape == (5, 7, 2)
    at = la.log_marginal_likelihood(3.0, torch.tensor(0.5))
    assert float(at) == pytest.approx(expected.log_evidence(prior=1 / 3, noise=0.25), rel=1e-9)


def test_the_prior_is_chosen():
    la = Laplace(REGRESSOR, "regression", "all", "full", sigma_noise=0.1)
    la.fit(loader(NUMBERS))
    before = float(la.log_marginal_likelihood())
    la.optimize_prior_precision(method="marglik", link_approx="mc")
    assert float(la.log_marginal_likelihood()) > before and la.prior_precision.shape == (1,)
    assert float(la.prior_precision) == pytest.approx(1 / float(la.laplace_.prior_variance_[0]))
    assert la.laplace_.noise_ == pytest.approx(0.01)
    la.optimize_prior_precision(prior_structure="layerwise")
    assert len(la.prior_precision) == la.laplace_.lin_.p
    classes = Laplace(CLASSIFIER, "classification", "all")
    classes.fit(loader(LABELS))
    classes.optimize_prior_precision(method="gridsearch", val_loader=DataLoader(TensorDataset(NEW, LABELS[:7])))
    expected = linnet.Laplace(CLASSIFIER, structure="kron", prior=1.0).fit(X, LABELS)
    expected.tune("shared", validation=(NEW, LABELS[:7]))
    torch.testing.assert_close(classes(NEW), expected.predict_proba(NEW), rtol=1e-7, atol=0.0)
    with pytest.warns(UserWarning, match="has no setting lr, n_steps"):
        classes.optimize_prior_precision(lr=0.1, n_steps=3)


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": X[i], "answers": LABELS[i]}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = copy.deepcopy(CLASSIFIER)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_batches_that_are_dicts():
    la = Laplace(Named(), "classification", dict_key_y="answers")
    la.fit(DataLoader(Dicts(), batch_size=8, shuffle=True))
    plain = Laplace(CLASSIFIER, "classification")
    plain.fit(loader(LABELS))
    torch.testing.assert_close(la({"x": NEW, "answers": LABELS[:7]}), plain(NEW), rtol=1e-9, atol=0.0)
    with pytest.raises(TypeError, match="must have 'labels', which are the targets; got x, answers"):
        Laplace(Named(), "classification").fit(DataLoader(Dicts()))


def test_derivatives_only_where_they_are_asked_for():
    x = NEW.clone().requires_grad_()
    for backprop in (True, False):
        la = Laplace(REGRESSOR, "regression", "all", "full", enable_backprop=backprop)
        la.fit(loader(NUMBERS))
        assert la(x)[1].requires_grad == backprop


def test_results_have_the_dtype_of_the_network():
    la = Laplace(copy.deepcopy(CLASSIFIER).float(), "classification")
    la.fit(DataLoader(TensorDataset(X.float(), LABELS), batch_size=10))
    assert la(NEW.float()).dtype == la.predictive_samples(NEW.float(), n_samples=2).dtype == torch.float32


def test_copies_by_the_names_of_the_arguments():
    la = Laplace(REGRESSOR, "regression", sigma_noise=0.2)
    names = la.__init__.__code__.co_varnames
    given = {name: getattr(la, name) for name in names if hasattr(la, name) and name != "model"}
    again = type(la)(model=copy.deepcopy(la.model), **given)
    assert float(again.sigma_noise) == pytest.approx(0.2) and again.subset_of_weights == "last_layer"


def test_what_is_refused():
    def make(**options: Any) -> Laplace:
        return Laplace(CLASSIFIER, **{"likelihood": "classification", **options})

    for options, text in (
        (
            {"likelihood": "reward_modeling"},
            "likelihood='reward_modeling' is not known here; known are 'classification'",
        ),
        ({"subset_of_weights": "subnetwork"}, "subset_of_weights='subnetwork' is not known"),
        ({"hessian_structure": "x"}, "hessian_structure='x' is not known here; known are 'full', 'kron'"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            make(**options)
    with pytest.raises(ValueError, match="prior_precision must be one positive number"):
        make(prior_precision=torch.ones(4))
    la = make()
    with pytest.raises(RuntimeError, match="not fitted yet"):
        la(NEW)
    with pytest.raises(TypeError, match="are a list, not a DataLoader"):
        la.fit([(X, LABELS)])
    with pytest.raises(NotImplementedError, match="condition"):
        la.fit(loader(LABELS), override=False)
    la.fit(loader(LABELS))
    with pytest.raises(NotImplementedError, match='pred_type="glm"'):
        la(NEW, pred_type="nn")
    with pytest.raises(NotImplementedError, match="link_approx='bridge_norm'"):
        la(NEW, link_approx="bridge_norm")
    with pytest.raises(NotImplementedError, match="prior_structure='diag'"):
        la.optimize_prior_precision(prior_structure="diag")
    with pytest.raises(ValueError, match="needs val_loader"):
        la.optimize_prior_precision(method="gridsearch")
    with pytest.raises(NotImplementedError, match="has no derivative in prior_precision"):
        la.log_marginal_likelihood(torch.ones(1, requires_grad=True))


@pytest.mark.skipif(importlib.util.find_spec("laplace") is None, reason="laplace-torch is not installed")
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_numbers_of_laplace_torch(subset, structure):
    import laplace

    theirs = laplace.Laplace(REGRESSOR, "regression", subset, structure, sigma_noise=0.3, prior_precision=2.0)
    theirs.fit(loader(NUMBERS, batch_size=60, shuffle=False))
    ours = Laplace(REGRESSOR, "regression", subset, structure, sigma_noise=0.3, prior_precision=2.0)
    ours.fit(loader(NUMBERS))
    for a, b in zip(ours(NEW), theirs(NEW), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)
