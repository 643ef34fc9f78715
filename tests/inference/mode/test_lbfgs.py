"""The mode by descent: the one that Newton's method finds, in passes that are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linnet import linearize
from linnet.inference.mode import by_passes as passing
from linnet.inference.mode.lbfgs import descend
from linnet.inference.mode.newton import weight_space
from linnet.inference.mode.spaces import LAGGING
from linnet.inference.problem import Settings
from linnet.linalg.matrices import Matrix
from linnet.linalg.preconditioners.low_rank import LowRankPreconditioner
from linnet.linalg.preconditioners.randomized import Sketch, sketch
from linnet.linalg.row_weights import as_weight
from linnet.probability.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from tests.support.counted import Counted, Given
from tests.support.drawn import normal

N, C, P = 40, 3, 30
CASES = [
    pytest.param(Bernoulli(), 1, id="binary"),
    pytest.param(Bernoulli(), 3, id="multilabel"),
    pytest.param(Categorical(), 3, id="categorical"),
]


def problem(likelihood: Likelihood, c: int, *, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (N c, P) of very different sizes, variances, a mean (N, c), and targets drawn from the model."""
    A, mean = normal(N * c, P) * torch.logspace(-1, 0.5, P, dtype=torch.float64), spread * normal(N, c, seed=1)
    variance = torch.linspace(0.5, 2.0, P, dtype=torch.float64)
    f = mean + (A @ (variance.sqrt() * normal(P, seed=2))).view(N, c)
    return A, variance, mean, likelihood.sample(f, torch.Generator().manual_seed(0))


def at_mean(A: Tensor, variance: Tensor, mean: Tensor, likelihood: Likelihood, rank: int = 10) -> LowRankPreconditioner:
    root = likelihood.root(mean)
    generator = torch.Generator().manual_seed(3)
    return sketch(
        Matrix(A * variance.sqrt()), root.flatten() if root.ndim == 2 else root, rank=rank, generator=generator
    )


def none() -> LowRankPreconditioner:
    return LowRankPreconditioner(torch.zeros(P, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))


@pytest.mark.parametrize("preconditioned", [True, False])
@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_it_is_the_mode_that_newton_finds(likelihood: Likelihood, c: int, preconditioned: bool) -> None:
    A, variance, mean, y = problem(likelihood, c)
    given: dict[str, Any] = {"mean": mean, "likelihood": likelihood}
    wanted = weight_space(A * variance.sqrt(), y, tolerance=1e-12, **given).checked()
    J = Counted(A)
    P = at_mean(A, variance, mean, likelihood) if preconditioned else none()
    mode = descend(J, y, variance=variance, preconditioner=P, tolerance=1e-11, **given).checked()
    assert mode.u is not None and wanted.u is not None
    assert mode.gradient <= 1e-11
    assert mode.passes == J.passes
    assert (mode.u - wanted.u).norm() <= 1e-9 * wanted.u.norm()
    assert (mode.f - wanted.f).norm() <= 1e-9 * wanted.f.norm()
    assert (A.T @ mode.alpha * variance.sqrt() - mode.u).norm() <= 1e-9 * wanted.u.norm()
    assert mode.objective == pytest.approx(wanted.objective, rel=1e-12)


def test_a_step_takes_one_pass_where_its_length_is_the_last_one() -> None:
    A, variance, mean, y = problem(Categorical(), C)
    P = at_mean(A, variance, mean, Categorical())
    given: dict[str, Any] = {"variance": variance, "mean": mean, "likelihood": Categorical(), "preconditioner": P}
    mode = descend(Counted(A), y, tolerance=1e-6, **given).checked()
    assert mode.iterations < mode.passes <= 1.5 * mode.iterations


def test_a_preconditioner_is_renewed_where_the_curvature_is_another() -> None:
    likelihood = Categorical()
    A, variance, mean, _ = problem(likelihood, C, spread=0.0)
    y = (A @ (10 * normal(P, seed=5))).view(N, C).argmax(1)  # the features tell them all
    asked: list[tuple[float, int]] = []

    def renew(root: Tensor, better: int) -> Given:
        asked.append((float(root.square().sum()), better))
        generator = torch.Generator().manual_seed(len(asked))
        return Given(Sketch(J.scaled(variance.sqrt()), root, rank=10, generator=generator).at, 2.0)

    J = Counted(A)
    given: dict[str, Any] = {"variance": variance, "mean": mean, "likelihood": likelihood, "tolerance": 1e-10}
    mode = descend(J, y, preconditioner=at_mean(A, variance, mean, likelihood), renew=renew, **given).checked()
    assert asked and asked[0][0] < float(likelihood.root(mean).square().sum()) / LAGGING
    assert all(better == 0 for _, better in asked)
    assert mode.passes == J.passes  # two of them for each


def test_better_ones_are_asked_for_where_it_takes_many_steps() -> None:
    # Every curvature beside one is far from it, and the preconditioner knows none.
    A = torch.diag(torch.logspace(0, 3, 60, dtype=torch.float64))
    asked: list[int] = []
    given: dict[str, Any] = {
        "variance": torch.ones(60, dtype=torch.float64),
        "mean": torch.zeros(60, 1, dtype=torch.float64),
        "likelihood": Gaussian(1.0),
        "preconditioner": LowRankPreconditioner(torch.zeros(60, 0).double(), torch.zeros(0).double()),
    }

    def renew(root: Tensor, better: int) -> Given:
        asked.append(better)
        return Given(lambda root: given["preconditioner"])

    descend(Matrix(A), normal(60, 1), renew=renew, tolerance=1e-14, passes=150, **given)
    assert asked == [0, 1, 2][: len(asked)] and len(asked) > 1


def test_it_says_how_far_it_came() -> None:
    A, variance, mean, y = problem(Categorical(), C)
    given: dict[str, Any] = {"variance": variance, "mean": mean, "likelihood": Categorical(), "preconditioner": none()}
    mode = descend(Matrix(A), y, passes=5, **given)
    assert not mode.converged and 5 <= mode.passes <= 6
    with pytest.raises(ArithmeticError, match="relative gradient"):
        mode.checked()


def test_rounding_ends_it() -> None:
    A, variance, mean, y = problem(Categorical(), C)
    given: dict[str, Any] = {"likelihood": Categorical(), "tolerance": 1e-13}
    given |= {"variance": variance.float(), "mean": mean.float()}
    P = at_mean(A, variance, mean, Categorical())
    mode = descend(Matrix(A.float()), y, preconditioner=LowRankPreconditioner(P.U.float(), P.lam.float()), **given)
    assert not mode.converged
    assert mode.gradient < 1e-4
    assert mode.passes < 150


def test_newton_goes_on_where_descent_came_to_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, C)).double()
    x, y = normal(N, 4), torch.arange(N) % C
    J = linearize(model).jacobian(x)
    given: dict[str, Any] = {
        "variance": torch.ones(J.shape[1]).double(),
        "mean": J.outputs(),
        "likelihood": Categorical(),
    }
    whole, P = passing.mode_by_passes(J, y, settings=Settings(), tolerance=1e-9, **given)
    assert whole.converged and P is not None
    short = passing.descend
    monkeypatch.setattr(passing, "descend", lambda *args, **how: short(*args, **how, passes=4))
    mode, _ = passing.mode_by_passes(J, y, settings=Settings(), tolerance=1e-9, **given)
    assert mode.converged and mode.u is not None and whole.u is not None
    assert (mode.u - whole.u).norm() <= 1e-7 * whole.u.norm()
    assert mode.passes > 6


def test_a_curvature_that_stays_is_solved_with(monkeypatch: pytest.MonkeyPatch) -> None:
    J = linearize(torch.nn.Linear(4, 2).double()).jacobian(normal(N, 4))
    given: dict[str, Any] = {"variance": torch.ones(J.shape[1]).double(), "mean": J.outputs()}
    monkeypatch.setattr(passing, "descend", None)
    mode, _ = passing.mode_by_passes(J, normal(N, 2), likelihood=Gaussian(0.1), settings=Settings(), **given)
    assert mode.converged


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_a_sketch_reads_the_examples_that_carry_the_curvature(likelihood: Likelihood) -> None:
    J = linearize(torch.nn.Linear(4, C).double()).jacobian(normal(N, 4))
    f = 30 * normal(N, C, seed=1)
    f[3], f[17] = 0, 0.1  # sure of all labels but these
    root = as_weight(likelihood.root(f))
    assert passing.carrying(as_weight(likelihood.root(torch.zeros(N, C).double())), J) is None
    index = passing.carrying(root, J)
    assert index is not None and {3, 17} <= set(index.tolist()) and len(index) < N / 2
    each = root.square().view(N, -1).sum(1)
    assert float(each[index].sum()) >= passing.SHARE * float(each.sum())
    assert float(each[index].sum() - each[index].min()) < passing.SHARE * float(each.sum())
    scale = torch.linspace(0.5, 2.0, J.shape[1]).double()
    found = passing._Leading(J, scale, root, 100, torch.Generator().manual_seed(0))
    assert found.passes == 2 * len(index) / N
    weight = as_weight(likelihood.curvature(f)).view(N, C, -1)[index]
    blocks = torch.diag_embed(weight[..., 0]) if weight.shape[2] == 1 else weight
    rows = J.dense().view(N, C, -1)[index] * scale
    H = torch.eye(J.shape[1]).double() + torch.einsum("ncp,ncd,ndq->pq", rows, blocks, rows)
    eye = torch.eye(J.shape[1]).double()
    # Directions below 0.01 are left out.
    torch.testing.assert_close(found.at(root).multiply(eye), H, rtol=0, atol=0.01)


def test_a_copy_of_factors_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    J = linearize(torch.nn.Linear(4, C).double()).jacobian(normal(N, 4)).cached()
    root = torch.zeros(N * C).double()
    root[:6] = 1
    assert passing.carrying(root, J).tolist() == [0, 1]  # type: ignore[union-attr]
    monkeypatch.setattr(passing, "cache_limit", lambda *_: 0)
    assert passing.carrying(root, J) is None
