"""An earlier posterior as the prior of a new fit, and as a penalty, against dense algebra; files and errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.base import clone
from torch import Tensor, nn

import linnet
from linnet import Laplace
from linnet.probability import DiagonalPrecision, add_precisions, precision_of
from tests.support import laplace_cases
from tests.support.drawn import check_close, double, normal
from tests.support.laplace_cases import CASES, NEW, X

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")

STRUCTURES = ["full", "diag", "kron", "ekfac", "lowrank"]
FIRST, SECOND = slice(0, 11), slice(11, 24)


def net(outputs: int, seed: int) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, outputs)), seed)


def pair(case: str, structure: Any, **options: Any) -> tuple[Laplace, Laplace]:
    """A fit to some examples, and a fit of another network to the others with the first as its prior."""
    outputs, spec, _, y = CASES[case]
    noise = {"noise": options.pop("noise", 0.3)} if spec == "regression" else {}
    how: dict[str, Any] = {"rank": 100, **noise, **options}
    earlier = Laplace(net(outputs, 0), spec, structure, 0.7, **how).fit(X[FIRST], y[FIRST])
    return earlier, Laplace(net(outputs, 1), spec, structure, earlier, **how).fit(X[SECOND], y[SECOND])


class Reference:
    """The new fit in dense algebra, with the curvature in the form that its structure has."""

    def __init__(self, case: str, earlier: Laplace, la: Laplace) -> None:
        likelihood = CASES[case][2]
        lin = linnet.linearize(la.model)
        J, self.new = lin.jacobian(X[SECOND]), lin.jacobian(NEW).dense()
        f, c = J.outputs(), J.c
        y = likelihood.targets(CASES[case][3][SECOND], J.n, c, dtype=torch.float64)
        B = likelihood.curvature(f)
        B = torch.diag_embed(B) if B.ndim == 2 else B
        rows = J.dense().view(J.n, c, -1)
        G = torch.einsum("nap,nab,nbq->pq", rows, B, rows)
        self.P = precision_of(earlier.posterior_).dense()
        step = lin.flat_theta - earlier.theta_
        P, H = self.P, self.P + G
        if la.structure_ == "diag":
            H = H.diagonal().diag()
        if la.structure_ in ("kron", "ekfac"):
            rotation = la.posterior_.rotation
            assert rotation is not None
            Q = rotation.back(torch.eye(lin.p).double())
            if la.structure_ == "kron":
                turn, values = J.kronecker(likelihood.root(f)).decomposed()
                G = DiagonalPrecision(values, turn).dense()
            diagonals = [(Q.T @ M @ Q).diagonal() for M in (P, G)]
            P, H = (Q @ torch.diag(values) @ Q.T for values in (diagonals[0], sum(diagonals)))
        self.H = H
        self.log_evidence = float(
            likelihood.log_prob(f, y).sum() - 0.5 * step @ self.P @ step + 0.5 * torch.logdet(P) - 0.5 * torch.logdet(H)
        )
        self.dimension = lin.p - float(torch.trace(torch.linalg.solve(H, P)))

    @property
    def covariance(self) -> Tensor:
        return self.new @ torch.linalg.inv(self.H) @ self.new.T


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", ["softmax", "numbers"])
def test_evidence_and_error_bars_are_those_of_dense_algebra(case: str, structure: str, tmp_path: Path) -> None:
    earlier, la = pair(case, structure)
    dense = Reference(case, earlier, la)
    check_close(la.log_evidence(), dense.log_evidence)
    check_close(la.effective_dimension_, dense.dimension)
    check_close(la.posterior_.covariance(la.lin_.jacobian(NEW)), dense.covariance)
    check_close(la.prior_variance_, torch.linalg.inv(dense.P).diagonal())
    mean, std = la.predict(NEW, return_std=True)
    check_close(mean, la.model(NEW).detach())
    check_close(std.flatten(), dense.covariance.diagonal().sqrt())
    # Once more: the posterior is the next prior, as it is and from a file.
    la.save(tmp_path / "one")
    loaded = linnet.load(tmp_path / "one", la.model)
    y = CASES[case][3]
    third = [clone(la).set_params(prior=prior).fit(X[FIRST], y[FIRST]) for prior in (la, loaded)]
    check_close(third[0].log_evidence(), third[1].log_evidence())
    check_close(loaded.predict(NEW, return_std=True)[1], std)
    assert third[0].log_evidence() != la.log_evidence()


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_the_noise_of_largest_evidence(structure: str) -> None:
    earlier, la = pair("numbers", structure, noise="evidence")
    noise = float(la.noise_)
    here = la.log_evidence()
    if structure == "full":  # others have a smaller noise; see `tune`
        for factor in (0.9, 1.1):
            assert la.log_evidence(noise=factor * noise) < here
    _, spec, _, y = CASES["numbers"]
    fixed = Laplace(la.model, spec, structure, earlier, noise=noise).fit(X[SECOND], y[SECOND])
    if structure != "kron":  # whose coordinates are those of another noise
        check_close(fixed.log_evidence(), here)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_prior_around_zero_is_the_same_as_an_earlier_posterior_without_data(structure: str) -> None:
    y = CASES["softmax"][3]
    la = Laplace(net(3, 1), structure=structure, prior=0.7, rank=100).fit(X, y)
    prior = linnet.probability.EarlierPosterior.of(
        torch.zeros_like(la.theta_), DiagonalPrecision(1 / la.prior_variance_), la.lin_.layout
    )
    same = Laplace(net(3, 1), structure=structure, prior=prior, rank=100).fit(X, y)
    check_close(same.log_evidence(), la.log_evidence())
    check_close(same.predict(NEW, return_std=True)[1], la.predict(NEW, return_std=True)[1])
    check_close(same.gradient_norm_, la.gradient_norm_)


def test_a_factor_of_the_earlier_variances_is_chosen_by_the_evidence() -> None:
    earlier, la = pair("softmax", "full")
    before = la.log_evidence()
    la.tune()
    (factor,) = la.scales_.values()
    assert la.log_evidence() >= before and factor != 1
    G = precision_of(la.posterior_).dense() - precision_of(earlier.posterior_).dense() / factor
    check_close(
        G, precision_of(pair("softmax", "full")[1].posterior_).dense() - precision_of(earlier.posterior_).dense()
    )


def test_structures_that_hold_the_earlier_one_and_those_that_do_not() -> None:
    y = CASES["softmax"][3]
    fits = {s: Laplace(net(3, 0), structure=s, prior=0.7, rank=100).fit(X[FIRST], y[FIRST]) for s in STRUCTURES}
    fits["function"] = Laplace(net(3, 0), structure="function", prior=0.7).fit(X[FIRST], y[FIRST])

    def fit(prior: Laplace, structure: Any) -> Laplace:
        return Laplace(net(3, 1), structure=structure, prior=prior, rank=100).fit(X[SECOND], y[SECOND])

    chosen = {name: fit(prior, "auto").structure_ for name, prior in fits.items()}
    assert chosen == {name: name for name in STRUCTURES} | {"function": "full"}
    check_close(fit(fits["function"], "auto").log_evidence(), fit(fits["full"], "full").log_evidence())
    for name in ("diag", "kron", "ekfac", "lowrank"):  # a dense matrix holds all of them
        found = precision_of(fit(fits[name], "full").posterior_).dense() - precision_of(fits[name].posterior_).dense()
        check_close(
            found,
            precision_of(fit(fits["full"], "full").posterior_).dense() - precision_of(fits["full"].posterior_).dense(),
        )
    for prior, structure, form in [
        ("full", "diag", "a dense matrix"),
        ("kron", "diag", "Kronecker factors"),
        ("lowrank", "kron", "a low rank"),
    ]:
        with pytest.raises(ValueError, match=f"has the form of {form}, which structure='{structure}' cannot hold"):
            fit(fits[prior], structure)
    for structure in ("function", "samples", "subnetwork"):
        with pytest.raises(NotImplementedError, match=f"structure='{structure}' does not take an earlier posterior"):
            fit(fits["full"], structure)


def test_the_earlier_one_stays_as_it_was_when_its_network_trains_on() -> None:
    y, model = CASES["softmax"][3], net(3, 0)
    earlier = Laplace(model, structure="kron", prior=0.7).fit(X[FIRST], y[FIRST])
    apart = copy.deepcopy(earlier)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    la = Laplace(model, structure="kron", prior=earlier).fit(X[SECOND], y[SECOND])
    other = Laplace(copy.deepcopy(model), structure="kron", prior=apart).fit(X[SECOND], y[SECOND])
    check_close(la.log_evidence(), other.log_evidence())
    step = torch.full_like(la.theta_, 0.1)
    check_close(earlier.penalty()(model).detach(), 0.5 * precision_of(earlier.posterior_).quadratic(step))


def test_errors_of_priors() -> None:
    y = CASES["softmax"][3]
    earlier = Laplace(net(3, 0), structure="diag", prior=0.7).fit(X, y)
    with pytest.raises(
        ValueError, match=r"over other parameters: .*0.weight has shape \(5, 3\) here and \(4, 3\) there"
    ):
        Laplace(laplace_cases.net(3), structure="diag", prior=earlier).fit(X, y)
    with pytest.raises(ValueError, match=r"0.bias has shape nothing here and \(4,\) there.* same params="):
        Laplace(net(3, 1), structure="diag", prior=earlier, params="3.*").fit(X, y)
    with pytest.raises(Exception, match="fit the earlier one to its data first"):
        Laplace(net(3, 1), prior=Laplace(net(3, 0))).fit(X, y)
    la = Laplace(net(3, 1), prior=earlier).fit(X, y)
    with pytest.raises(NotImplementedError, match="known at the network only"):
        la.log_evidence("linear_mode")
    for act in (lambda: la.log_evidence(prior=1.0), lambda: la.tune(1.0), lambda: earlier.tune(la)):
        with pytest.raises(NotImplementedError, match="Fit again, with the prior in the constructor"):
            act()
    ensemble = Laplace([net(3, 0), net(3, 1)], structure="diag", prior=0.7).fit(X, y)
    with pytest.raises(NotImplementedError, match="a mixture of Gaussians, and a prior is one Gaussian"):
        Laplace(net(3, 1), prior=ensemble).fit(X, y)
    for structure in ("samples", "subnetwork"):
        known = Laplace(net(3, 0), structure=structure, prior=0.7, size=10).fit(X, y)
        with pytest.raises(NotImplementedError, match="does not know its precision"):
            Laplace(net(3, 1), prior=known).fit(X, y)


def test_a_clone_keeps_the_earlier_posterior_and_a_new_fit_may_have_another_prior() -> None:
    earlier, la = pair("softmax", "diag")
    again = clone(la).fit(X, CASES["softmax"][3]).set_params(prior=0.7).fit(X, CASES["softmax"][3])
    check_close(
        again.log_evidence(), Laplace(net(3, 1), structure="diag", prior=0.7).fit(X, CASES["softmax"][3]).log_evidence()
    )
    assert clone(la).prior is earlier and not hasattr(clone(la), "posterior_")
    assert clone(earlier).prior == 0.7


# The penalty.


@pytest.mark.parametrize("structure", [*STRUCTURES, "function"])
def test_the_penalty_is_the_quadratic_of_the_posterior(structure: str) -> None:
    y, model = CASES["softmax"][3], net(3, 0)
    la = Laplace(model, structure=structure, prior=0.7, rank=100).fit(X, y)
    other = net(3, 5)
    term, lin = la.penalty(weight=0.25), linnet.linearize(other)
    H, step = precision_of(la.posterior_).dense(), lin.flat_theta - la.theta_
    found = term(other)
    check_close(found.detach(), 0.125 * step @ H @ step)
    check_close(term(dict(other.named_parameters())).detach(), found.detach())
    found.backward()
    gradient = torch.cat([p.grad.flatten() for p in other.parameters() if p.grad is not None])
    check_close(gradient, 0.25 * H @ step)
    assert term(model).item() == 0
    # The state holds all of it, and dtypes follow.
    blank = Laplace(net(3, 9), structure=structure, prior=0.7, rank=100).fit(X, y).penalty(weight=0.25)
    blank.load_state_dict(term.state_dict())
    check_close(blank(other).detach(), found.detach())
    single = copy.deepcopy(term).float()(copy.deepcopy(other).float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.detach().double(), found.detach(), rtol=1e-5, atol=0.0)


def test_a_diagonal_penalty_is_elastic_weight_consolidation() -> None:
    y, model = CASES["softmax"][3], net(3, 0)
    la, other = Laplace(model, structure="diag", prior=0.7).fit(X, y), net(3, 5)
    probabilities = model(X).softmax(1)
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(X)):
        for k in range(3):
            gradients = torch.autograd.grad(model(X[i : i + 1]).log_softmax(1)[0, k], list(model.parameters()))
            for total, g in zip(fisher, gradients, strict=True):
                total += probabilities[i, k].detach() * g.square()
    steps = [a - b for a, b in zip(other.parameters(), model.parameters(), strict=True)]
    expected = sum(0.5 * ((F + 1 / 0.7) * d.square()).sum() for F, d in zip(fisher, steps, strict=True))
    check_close(la.penalty()(other).detach(), expected.detach())  # type: ignore[union-attr]


def test_some_parameters_alone_and_errors_of_penalties() -> None:
    y, model = CASES["softmax"][3], net(3, 0)
    la = Laplace(model, structure="kron", prior=0.7, params="3.*").fit(X, y)
    term = la.penalty()
    assert "p=15" in repr(term) and "weight=1" in repr(term)
    with pytest.raises(ValueError, match=r"on 3.weight of shape \(3, 4\), and the network has nothing of this name"):
        term(nn.DataParallel(model))
    with pytest.raises(ValueError, match=r"the network has a tensor of shape \(2, 4\)"):
        term(net(2, 0))
    with pytest.raises(TypeError, match="takes a network, or its parameters by name; got a list"):
        term([1.0])
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        la.penalty(weight=-1)


def test_training_with_the_penalty_of_the_data_is_training_on_both_where_the_network_is_linear() -> None:
    """The mode of the second likelihood and the penalty, for a linear network, is that of all data at once."""
    model, y = double(nn.Linear(3, 1), 0), normal(24, seed=3)

    def minimize(loss: Any, start: nn.Module) -> nn.Module:
        found = copy.deepcopy(start)
        steps = torch.optim.LBFGS(
            found.parameters(), max_iter=200, tolerance_grad=1e-14, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            steps.zero_grad()
            value = loss(found)
            value.backward()
            return value

        steps.step(closure)
        return found

    def nll(part: slice) -> Any:
        return lambda m: (m(X[part])[:, 0] - y[part]).square().sum() / (2 * 0.3)

    def decay(m: nn.Module) -> Tensor:
        return sum(0.5 * p.square().sum() / 0.7 for p in m.parameters())  # type: ignore[return-value]

    first = minimize(lambda m: nll(FIRST)(m) + decay(m), model)
    la = Laplace(first, "regression", "full", 0.7, noise=0.3).fit(X[FIRST], y[FIRST])
    term = la.penalty()
    second = minimize(lambda m: nll(SECOND)(m) + term(m), first)
    whole = minimize(lambda m: nll(slice(0, 24))(m) + decay(m), model)
    for a, b in zip(second.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    carried = Laplace(whole, "regression", "full", la, noise=0.3).fit(X[SECOND], y[SECOND])
    once = Laplace(whole, "regression", "full", 0.7, noise=0.3).fit(X, y)
    check_close(carried.predict(NEW, return_std=True)[1], once.predict(NEW, return_std=True)[1])
    torch.testing.assert_close(carried.log_evidence() + la.log_evidence(), once.log_evidence(), rtol=1e-9, atol=0.0)


def test_sums_of_terms_are_not_in_place() -> None:
    one = DiagonalPrecision(torch.ones(3).double())
    add_precisions([(1.0, one), (1.0, one)])
    assert bool((one.values == 1).all())
