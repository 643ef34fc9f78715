"""What a Laplace approximation predicts, for outputs of every shape, and its files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet import Laplace
from linnet.jacobian import combine_outputs
from linnet.laplace import draw_groups, joint_log_likelihood
from linnet.laplace.predictive import log_score, sample_root
from linnet.probability import Bernoulli, Categorical, Gaussian, Heteroscedastic, compute_probabilities
from tests.support.drawn import double, normal
from tests.support.laplace_cases import CASES, CLASSES, NEW, NUMBERS, N, X, fitted, net


@pytest.fixture(autouse=True)
def untrained() -> Iterator[None]:
    """The networks here are drawn, not trained, which is not what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network is far from a mode", UserWarning)
        yield


def test_probabilities_by_three_links() -> None:
    la, dense = fitted("softmax", "full")
    mean, std = la.predict(NEW, return_std=True)
    probit = torch.softmax(mean / (1 + math.pi / 8 * std.square()).sqrt(), 1)
    torch.testing.assert_close(la.predict_proba(NEW), probit, rtol=1e-9, atol=0)
    C = dense.covariance().view(6, 3, 6, 3)
    at = torch.arange(6)
    draws = torch.distributions.MultivariateNormal(mean, C[at, :, at] + 1e-10 * torch.eye(3)).sample((20000,))
    mc = la.predict_proba(NEW, "mc", draws=20000)
    torch.testing.assert_close(mc, draws.softmax(-1).mean(0), rtol=0, atol=0.02)
    bridge = la.predict_proba(NEW, "bridge")
    torch.testing.assert_close(bridge.sum(1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(bridge, mc, rtol=0, atol=0.15)
    one, _ = fitted("one logit", "full")
    assert one.predict_proba(NEW).shape == (6, 2)
    several, _ = fitted("labels", "full")
    assert several.predict_proba(NEW).shape == (6, 2)
    assert not torch.allclose(several.predict_proba(NEW).sum(1), torch.ones(6).double())
    with pytest.raises(TypeError, match="several classes"):
        one.predict_proba(NEW, "bridge")
    with pytest.raises(ValueError, match="'probit', 'centered', 'bridge' or 'mc'"):
        la.predict_proba(NEW, "logit")
    with pytest.raises(ValueError, match="is for classes"):
        fitted("numbers", "full")[0].predict_proba(NEW)


def test_the_centered_link_leaves_out_what_moves_all_logits_together() -> None:
    la, _ = fitted("softmax", "full")
    f, C = la.predict(NEW, return_cov=True)
    n, c = f.shape
    P = torch.eye(c, dtype=torch.float64) - 1 / c
    each = torch.stack([C[i * c : (i + 1) * c, i * c : (i + 1) * c] for i in range(n)])
    v = (P @ each @ P).diagonal(dim1=1, dim2=2)
    expected = torch.softmax(f @ P / (1 + math.pi / 8 * v).sqrt(), 1)
    torch.testing.assert_close(la.predict_proba(NEW, link="centered"), expected, rtol=1e-9, atol=0)
    shifted = compute_probabilities(Categorical(), f, each + 7.0, link="centered")
    torch.testing.assert_close(shifted, expected, rtol=1e-9, atol=0)
    assert float((compute_probabilities(Categorical(), f, each + 7.0) - la.predict_proba(NEW)).abs().max()) > 1e-3
    one, _ = fitted("one logit", "full")
    torch.testing.assert_close(one.predict_proba(NEW, link="centered"), one.predict_proba(NEW), rtol=1e-9, atol=0)


@pytest.mark.parametrize("structure", ["full", "function", "kron", "diag", "lowrank", "subnetwork", "samples"])
def test_samples_are_joint_over_inputs(structure: Any) -> None:
    la, _ = fitted("softmax", structure, rank=8, size=10, samples=2000)
    mean, cov = la.predict(NEW, return_cov=True)
    k = 2000
    f = la.sample(NEW, k) - mean
    seen = f.reshape(k, -1).T @ f.reshape(k, -1) / k
    size = cov.diagonal().sqrt()
    assert float(((seen - cov) / size[:, None] / size).abs().max()) < 0.15
    twice = la.sample(torch.cat([NEW, NEW]), 3)
    torch.testing.assert_close(twice[:, :6], twice[:, 6:], rtol=1e-9, atol=1e-12)
    assert torch.equal(la.sample(NEW, 3, seed=4), la.sample(NEW, 3, seed=4))


def test_noise_is_added_where_it_is_asked_for() -> None:
    la, _ = fitted("numbers", "full")
    _, std = la.predict(NEW, return_std=True)
    _, with_noise = la.predict(NEW, return_std=True, noise=True)
    torch.testing.assert_close(with_noise.square(), std.square() + 0.3)
    cov, more = la.predict(NEW, return_cov=True)[1], la.predict(NEW, return_cov=True, noise=True)[1]
    torch.testing.assert_close(more, cov + 0.3 * torch.eye(12))
    f = la.sample(NEW, 4000, noise=True)
    torch.testing.assert_close(f.std(0), with_noise, rtol=0.06, atol=0)
    hetero, dense = fitted("log variances", "full")
    _, std = hetero.predict(NEW, return_std=True)
    _, with_noise = hetero.predict(NEW, return_std=True, noise=True)
    torch.testing.assert_close(with_noise.square(), std.square() + dense.lin(NEW)[:, 2:].exp())
    with pytest.raises(ValueError, match=r"Categorical.* has none"):
        fitted("softmax", "full")[0].predict(NEW, return_std=True, noise=True)


def test_one_column_and_arrays_come_back_as_they_came() -> None:
    model = net(1)
    la = Laplace(model, "regression", prior=1.0, noise=0.1).fit(X.numpy(), NUMBERS[:, 0].numpy())
    mean, std = la.predict(NEW.numpy(), return_std=True)
    assert isinstance(mean, np.ndarray)
    assert mean.shape == std.shape == (6,)
    assert la.predict(NEW.numpy(), return_cov=True)[1].shape == (6, 6)
    assert la.sample(NEW.numpy(), 4).shape == (4, 6)
    two = Laplace(model, "regression", prior=1.0, noise=0.1).fit(X, NUMBERS[:, :1])
    assert two.predict(NEW).shape == (6, 1)


def test_joint_log_likelihoods() -> None:
    la, _ = fitted("softmax", "full")
    one = la.joint_log_likelihood(X, CLASSES, 1, draws=4000)
    p = la.predict_proba(X, "mc", draws=4000)
    assert one == pytest.approx(float(p.gather(1, CLASSES[:, None]).log().mean()), abs=0.03)
    # Independent labels would multiply; what one label teaches about the next makes the joint one larger.
    several = la.joint_log_likelihood(X, CLASSES, 2, draws=4000)
    assert several > 10 * one
    exact, dense = fitted("numbers", "full")
    J = dense.J @ torch.linalg.inv(dense.H) @ dense.J.T + 0.3 * torch.eye(2 * N, dtype=torch.float64)
    r = (NUMBERS - dense.f).flatten()
    joint = torch.distributions.MultivariateNormal(torch.zeros(2 * N).double(), J).log_prob(r)
    assert exact.joint_log_likelihood(X, NUMBERS, N) == pytest.approx(float(joint), rel=1e-9)
    pairs = exact.joint_log_likelihood(X, NUMBERS, 2)
    assert pairs == pytest.approx(exact.joint_log_likelihood(X, NUMBERS, 2, labels=2, draws=20000), abs=6)
    assert la.joint_log_likelihood(X, CLASSES, 3, labels=2) < 0
    with pytest.raises(ValueError, match="kappa is a number of inputs, from 1 to the 24"):
        la.joint_log_likelihood(X, CLASSES, 25)
    with pytest.raises(ValueError, match="labels is a number of targets"):
        la.joint_log_likelihood(X, CLASSES, 2, labels=0)
    with pytest.raises(ValueError, match="Label 5 of example 0 is outside"):
        la.joint_log_likelihood(X, torch.full((N,), 5), 2)


@pytest.mark.parametrize("structure", ["full", "function", "kron", "ekfac", "diag", "lowrank", "subnetwork", "samples"])
def test_predictions_have_gradients_in_the_inputs(structure: Any) -> None:
    la, _ = fitted("softmax", structure, rank=8, size=10)
    x = NEW.clone().requires_grad_()
    mean, std = la.predict(x, return_std=True)
    plain_mean, plain_std = la.predict(NEW, return_std=True)
    torch.testing.assert_close(mean.detach(), plain_mean)
    torch.testing.assert_close(std.detach(), plain_std, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(la.predict(x, return_cov=True)[1].detach(), la.predict(NEW, return_cov=True)[1])
    (slope,) = torch.autograd.grad(std.sum() + la.predict_proba(x)[:, 0].sum(), x)
    step, direction = 1e-5, normal(6, 3, seed=9)

    def value(at: Tensor) -> float:
        return float(la.predict(at, return_std=True)[1].sum() + la.predict_proba(at)[:, 0].sum())

    difference = (value(NEW + step * direction) - value(NEW - step * direction)) / (2 * step)
    assert float((slope * direction).sum()) == pytest.approx(difference, rel=1e-4)


# Many classes, many sites.


def test_a_sampled_fisher_information_is_unbiased() -> None:
    f = normal(2, 4)
    for likelihood in (Categorical(), Bernoulli(), Gaussian(0.4), Heteroscedastic()):
        L = sample_root(likelihood, f, 4000, seed=1)
        B = likelihood.curvature(f)
        B = torch.diag_embed(B) if B.ndim == 2 else B
        torch.testing.assert_close(L @ L.mT, B, rtol=0, atol=0.12 * float(B.abs().max()))


@pytest.mark.parametrize("structure", ["full", "function", "lowrank", "samples", "kron", "ekfac", "diag", "subnetwork"])
def test_a_sampled_fisher_information_differentiates_the_draws_alone(structure: Any) -> None:
    options = {"rank": 40, "samples": 512, "tolerance": 1e-5}
    la, dense = fitted("softmax", structure, draws=2, size=10, **options)
    L = sample_root(Categorical(), dense.f, 2, seed=0)
    J = torch.einsum("ncm,ncp->nmp", L, dense.J.view(N, 3, -1)).flatten(0, 1)
    model = linnet.linearize(net(3)).jacobian(X)
    torch.testing.assert_close(combine_outputs(model, L).dense(), J, rtol=1e-10, atol=1e-12)
    assert list(combine_outputs(model, L).lin.theta) == list(model.lin.theta)
    H = J.T @ J + torch.diag(1 / dense.S)
    if structure in ("full", "function", "lowrank"):
        assert la.log_evidence() == pytest.approx(dense.log_evidence(H), rel=1e-6)
        torch.testing.assert_close(la.predict(NEW, return_cov=True)[1], dense.covariance(H), rtol=1e-5, atol=1e-6)
    elif structure == "samples":
        assert la.log_evidence() == pytest.approx(dense.log_evidence(H), abs=0.5)
        assert la.tune("layerwise").scales_.keys() == {"0", "2"}
    elif structure in ("diag", "ekfac"):
        assert float(la._structure.values.sum()) == pytest.approx(float(J.square().sum()), rel=1e-9)  # type: ignore[attr-defined]
    many = fitted("softmax", structure, draws=60, size=10, **options)[0]
    other = fitted("softmax", structure, size=10, **options)[0]
    assert many.log_evidence() == pytest.approx(other.log_evidence(), abs=1.5)
    assert la.predict(NEW, return_std=True)[1].shape == (6, 3)


def test_a_sampled_fisher_information_reads_any_data() -> None:
    model = net(3)
    one = Laplace(model, structure="kron", prior=0.7, draws=3).fit(X, CLASSES)
    two = Laplace(model, structure="kron", prior=0.7, draws=3).fit(DataLoader(TensorDataset(X, CLASSES), batch_size=5))
    assert one.log_evidence() == pytest.approx(two.log_evidence(), rel=1e-10)
    J = linnet.linearize(model).jacobian(X)
    L = sample_root(Categorical(), J.outputs(), 3, seed=0)
    part = combine_outputs(J, L).subset(torch.tensor([4, 2]))
    torch.testing.assert_close(part.dense(), combine_outputs(J, L).dense().view(N, 3, -1)[[4, 2]].flatten(0, 1))
    assert Laplace(model, prior=0.7, draws=1).fit(X, CLASSES).structure_ == "function"
    with pytest.raises(NotImplementedError, match="sampled Fisher information is known at the network only"):
        one.log_evidence("linear_mode")
    with pytest.raises(ValueError, match=r"root of shape \(24, 3, m\); got \(24, 3\)"):
        combine_outputs(J, torch.ones(24, 3))


class Map(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("kind", ["classes", "numbers", "labels"])
@pytest.mark.parametrize("structure", ["full", "function", "kron"])
def test_outputs_with_sites_are_flattened_by_the_rule(kind: str, structure: Any) -> None:
    images = normal(5, 1, 2, 3)
    outputs = {"classes": 3, "numbers": 2, "labels": 1}[kind]
    model = double(Map(outputs))
    y = {
        "classes": (images[:, 0] > 0).long() + (images[:, 0] > 1).long(),
        "numbers": normal(5, 2, 2, 3, seed=3),
        "labels": (images[:, 0] > 0).long(),
    }[kind]
    likelihood = "regression" if kind == "numbers" else "classification"
    options = {"noise": 0.2} if kind == "numbers" else {}
    la = Laplace(model, likelihood, structure, 0.5, **options).fit(images, y)

    class Flat(nn.Module):
        """The same network with one site per example: pixel i of image n as example 6 n + i."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.images = model, images

        def forward(self, which: Tensor) -> Tensor:
            f = self.net(self.images[which[:, 0] // 6])
            return f.flatten(2).gather(2, (which[:, :1] % 6)[:, None].expand(-1, f.shape[1], 1))[..., 0]

    which = torch.arange(30)[:, None]
    rows = y.movedim(1, -1).reshape(30, -1) if kind == "numbers" else y.reshape(30)
    if structure != "kron":
        one = Laplace(Flat(), likelihood, "full", 0.5, **options).fit(which, rows)
        assert la.log_evidence() == pytest.approx(one.log_evidence(), rel=1e-8)
        std = one.predict(which, return_std=True)[1].reshape(5, 2, 3, outputs)
        torch.testing.assert_close(la.predict(images, return_std=True)[1].movedim(1, -1), std, rtol=1e-7, atol=1e-10)
    assert la.predict(images).shape == (5, outputs, 2, 3)
    torch.testing.assert_close(la.predict(images), model(images).detach())
    assert la.sample(images, 2).shape == (2, 5, outputs, 2, 3)
    if kind != "numbers":
        p = la.predict_proba(images)
        assert p.shape == (5, 2 if kind == "labels" else outputs, 2, 3)
        torch.testing.assert_close(p.sum(1), torch.ones(5, 2, 3, dtype=torch.float64))
        mc = la.predict_proba(images, "mc", draws=20000)
        torch.testing.assert_close(mc, p, rtol=0, atol=0.1)
    with pytest.raises(ValueError, match="so targets need shape"):
        Laplace(model, likelihood, structure, 0.5, **options).fit(images, torch.zeros(5, 7))


# Files.


@pytest.mark.parametrize("structure", ["full", "function", "kron", "ekfac", "diag", "lowrank", "subnetwork", "samples"])
@pytest.mark.parametrize("case", ["softmax", "numbers", "one logit", "noise per output", "log variances"])
def test_files(case: str, structure: Any, tmp_path: Path) -> None:
    la, _ = fitted(case, structure, "shared", variance=1.0, rank=6, size=8)
    la.save(tmp_path / "la.safetensors")
    outputs = CASES[case][0]
    again = linnet.load(tmp_path / "la.safetensors", net(outputs))
    assert again.log_evidence() == pytest.approx(la.log_evidence(), rel=1e-12)
    for one, two in zip(la.predict(NEW, return_cov=True), again.predict(NEW, return_cov=True), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(again.sample(NEW, 3), la.sample(NEW, 3), rtol=1e-8, atol=1e-10)
    if case == "softmax":
        torch.testing.assert_close(again.predict_proba(NEW, "mc"), la.predict_proba(NEW, "mc"))
        assert again.joint_log_likelihood(X, CLASSES, 2) == pytest.approx(la.joint_log_likelihood(X, CLASSES, 2))
    if case in ("numbers", "log variances"):
        torch.testing.assert_close(again.predict(NEW, True, noise=True)[1], la.predict(NEW, True, noise=True)[1])
    assert again.scales_ == la.scales_
    assert again.tune_path_ == la.tune_path_
    assert again.structure_ == structure
    with pytest.raises(ValueError, match="tune needs the training data"):
        again.tune()
    with pytest.raises(ValueError, match="fitted around other weights"):
        linnet.load(tmp_path / "la.safetensors", net(outputs, seed=3))


def test_files_of_sites_and_what_they_refuse(tmp_path: Path) -> None:
    images = normal(5, 1, 2, 3)
    la = Laplace(double(Map(3)), structure="kron", prior=0.5).fit(images, (images[:, 0] > 0).long())
    la.save(tmp_path / "la")
    again = linnet.load(tmp_path / "la", double(Map(3)))
    torch.testing.assert_close(again.predict_proba(images), la.predict_proba(images))
    with pytest.raises(ValueError, match="outputs without sites"):
        Laplace(double(Map(2)), "regression", noise="per-output").fit(images, normal(5, 2, 2, 3))
    streamed = Laplace(net(3), structure="function", prior=0.7)
    with pytest.raises(TypeError, match="takes the training inputs along"):
        streamed.fit(DataLoader(TensorDataset(X, CLASSES), batch_size=7)).save(tmp_path / "no")
    with pytest.raises(Exception, match="not fitted"):
        Laplace(net(3)).save(tmp_path / "no")


def test_linearity_of_a_linear_network_is_exact() -> None:
    """The linear model and the network with the same weights, drawn from the posterior, on the same side."""
    model = double(nn.Linear(3, 2))
    la = Laplace(model, "regression", "full", 0.7, noise=0.3).fit(X, NUMBERS)
    found = la.linearity(NEW, 3, seed=4)
    assert len(found) == 3
    Z = la.posterior_.draw(3, generator=torch.Generator().manual_seed(4))
    for z, at in zip(Z.T, found, strict=True):
        torch.testing.assert_close(at.before, model(NEW).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(at.linear, at.network, rtol=1e-10, atol=1e-10)
        moved = NEW @ (model.weight + z[:6].view(2, 3)).T.detach() + (model.bias + z[6:]).detach()
        torch.testing.assert_close(at.network, moved, rtol=1e-10, atol=1e-10)
        assert at.relative_error < 1e-9 < float((at.linear - at.before).norm())


def test_a_joint_covariance_of_log_variances_is_that_of_the_means() -> None:
    la, dense = fitted("log variances", "full")
    mean, C = la.predict(NEW, return_cov=True)
    same, std = la.predict(NEW, return_std=True)
    torch.testing.assert_close(mean, same)
    torch.testing.assert_close(C.diagonal().view_as(std), std.square(), rtol=1e-9, atol=1e-12)
    rows = (torch.arange(24).view(6, 4)[:, :2]).flatten()
    torch.testing.assert_close(C, dense.covariance()[rows][:, rows], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["sample", "linearity"])
def test_a_seed_that_is_given_takes_the_place_of_the_estimators(method: str) -> None:
    def asked(la: Laplace, seed: int | None) -> Tensor:
        found = getattr(la, method)(NEW, 2, seed=seed)
        return found if isinstance(found, Tensor) else torch.stack([at.linear for at in found])

    la, other = fitted("numbers", "full")[0], fitted("numbers", "full", seed=5)[0]
    assert torch.equal(asked(la, 5), asked(other, None)) and torch.equal(asked(la, None), asked(other, 0))
    assert not torch.allclose(asked(la, 5), asked(la, None))


def test_samples_in_parts_are_draws_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    la, _ = fitted("numbers", "full")
    monkeypatch.setattr("linnet.laplace.predictive.DRAWN", 2 * la.lin_.p)
    found = la.sample(NEW, 5)
    assert found.shape == (5, 6, 2)
    distances = torch.cdist(found.flatten(1), found.flatten(1)) + torch.eye(5)
    assert float(distances.min()) > 1e-3


def test_groups_of_inputs_and_their_labels() -> None:
    def groups(kappa: int, labels: int | None, classes: bool) -> Tensor:
        return draw_groups(50, kappa, labels, classes=classes, generator=torch.Generator().manual_seed(0))

    alone = groups(1, None, True)
    assert alone.shape == (50, 1) and sorted(alone.flatten().tolist()) == list(range(50))
    assert alone.flatten().tolist() != list(range(50))
    pairs = groups(4, None, False)
    assert pairs.shape == (12, 4) and len(set(pairs.flatten().tolist())) == 48
    drawn = groups(4, None, True)
    assert drawn.shape == (12, 30)
    for labels, inputs in zip(drawn.tolist(), pairs.tolist(), strict=True):
        assert set(labels) <= set(inputs) and len(set(labels)) > 1
    assert groups(4, 7, True).shape == groups(4, 7, False).shape == (12, 7)


def test_the_joint_probability_of_labels_by_hand() -> None:
    """log of the mean over draws of the product over a group, averaged over groups; draws may come in parts."""
    f, y, groups = normal(4, 5, 3), torch.tensor([0, 2, 1, 1, 0]), torch.tensor([[0, 3, 3], [1, 4, 2]])
    p = f.softmax(-1)[:, torch.arange(5), y]  # (draws, examples)
    wanted = torch.stack([p[:, group].prod(1).mean().log() for group in groups]).mean()
    for samples in ([f], [f[:1], f[1:]]):
        assert joint_log_likelihood(Categorical(), samples, y, groups) == pytest.approx(float(wanted), rel=1e-10)


def test_joint_densities_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    la, _ = fitted("numbers", "full")
    whole = la.joint_log_likelihood(X, NUMBERS, 4)
    monkeypatch.setattr("linnet.laplace.predictive.ROWS", 16)  # two groups of four examples with two outputs
    assert la.joint_log_likelihood(X, NUMBERS, 4) == pytest.approx(whole, rel=1e-10)


def test_log_scores_by_hand() -> None:
    """Gaussian noise beside the variance of f, given or an output; probit for classes."""
    f, v, y = normal(5, 2), normal(5, 2, seed=1).square(), normal(5, 2, seed=2)
    wanted = torch.distributions.Normal(f, (v + 0.3).sqrt()).log_prob(y).sum()
    assert log_score(Gaussian(0.3), f, v, y) == pytest.approx(float(wanted), rel=1e-10)
    s = normal(5, 2, seed=3)
    wanted = torch.distributions.Normal(f, (v + s.exp()).sqrt()).log_prob(y).sum()
    found = log_score(Heteroscedastic(), torch.cat([f, s], 1), torch.cat([v, 7 * v], 1), y)
    assert found == pytest.approx(float(wanted), rel=1e-10)
    labels = torch.tensor([0, 1, 1, 0, 1])
    scaled = f / (1 + math.pi / 8 * v).sqrt()
    wanted = scaled.log_softmax(1).gather(1, labels[:, None]).sum()
    assert log_score(Categorical(), f, v, labels) == pytest.approx(float(wanted), rel=1e-10)
