"""The mode by passes over the data: the one that dense features give, in passes that are counted."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet import linearize
from linnet.inference import SolverSettings
from linnet.inference.mode import by_passes
from linnet.inference.mode.newton import pass_space, weight_space
from linnet.linalg import LowRankPreconditioner, Matrix, as_weight, cg, sketch
from linnet.probability import Bernoulli, Categorical, Gaussian, Likelihood
from tests.support.counted import Counted
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


@pytest.mark.parametrize("preconditioned", [True, False])
@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_it_is_the_mode_of_dense_features(likelihood: Likelihood, c: int, preconditioned: bool) -> None:
    A, variance, mean, y = problem(likelihood, c)
    given: dict[str, Any] = {"mean": mean, "likelihood": likelihood}
    wanted = weight_space(A * variance.sqrt(), y, tolerance=1e-12, **given).checked()
    J = Counted(A)
    solve = at_mean(A, variance, mean, likelihood).solve if preconditioned else None
    mode = pass_space(J, y, variance=variance, solve=solve, tolerance=1e-11, **given).checked()
    assert mode.u is not None and wanted.u is not None
    assert mode.gradient <= 1e-11
    assert mode.passes == J.passes
    assert (mode.u - wanted.u).norm() <= 1e-9 * wanted.u.norm()
    assert (mode.f - wanted.f).norm() <= 1e-9 * wanted.f.norm()
    assert (A.T @ mode.alpha * variance.sqrt() - mode.u).norm() <= 1e-9 * wanted.u.norm()
    assert mode.objective == pytest.approx(wanted.objective, rel=1e-12)


def test_a_step_takes_one_pass_where_its_length_is_the_last_one() -> None:
    A, variance, mean, y = problem(Categorical(), C)
    solve = at_mean(A, variance, mean, Categorical()).solve
    given: dict[str, Any] = {"variance": variance, "mean": mean, "likelihood": Categorical(), "solve": solve}
    mode = pass_space(Counted(A), y, tolerance=1e-6, **given).checked()
    assert mode.iterations < mode.passes <= 1.5 * mode.iterations


def test_preconditioners_are_made_where_steps_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the curvature there, and with more columns where it is nearly that of the last; every pass is counted."""
    monkeypatch.setattr(by_passes, "COLUMNS", {"cpu": 2})
    J = linearize(torch.nn.Linear(9, C).double()).jacobian(normal(N, 9) * torch.logspace(0, 2, 9).double())
    y = (J.dense() @ (10 * normal(J.shape[1], seed=5))).view(N, C).argmax(1)  # the features tell them all
    made: list[tuple[float, int]] = []

    def noted(Phi: Any, root: Tensor, *, rank: int, generator: torch.Generator) -> LowRankPreconditioner:
        made.append((float(root.square().sum()), rank))
        return sketch(Phi, root, rank=rank, generator=generator)

    monkeypatch.setattr(by_passes, "sketch", noted)
    monkeypatch.setattr(by_passes, "find_informative_examples", lambda root, J: None)
    given: dict[str, Any] = {"variance": torch.full((J.shape[1],), 4.0).double(), "mean": torch.zeros(N, C).double()}
    mode, P = by_passes.mode_by_passes(
        J, y, likelihood=Categorical(), settings=SolverSettings(), tolerance=1e-9, **given
    )
    assert made and P is not None and P.rank <= made[-1][1]
    columns = 2
    for (before, _), (trace, rank) in pairwise([(math.nan, 2), *made]):
        columns *= 4 if 0.9 * before <= trace <= before / 0.9 else 1
        assert rank == columns
    wanted = weight_space(J.dense() * 2, y, mean=given["mean"], likelihood=Categorical(), tolerance=1e-12)
    assert (mode.f - wanted.f).norm() <= 1e-6 * wanted.f.norm()
    plain = pass_space(J, y, likelihood=Categorical(), tolerance=1e-9, **given).checked()
    assert mode.passes < plain.passes


def test_a_preconditioner_that_is_named_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_passes, "sketch", None)
    J = linearize(torch.nn.Linear(4, C).double()).jacobian(normal(N, 4) * torch.logspace(0, 2, 4).double())
    given: dict[str, Any] = {"variance": torch.ones(J.shape[1]).double(), "mean": J.outputs()}
    for settings in (SolverSettings(preconditioner="none"), SolverSettings(preconditioner="nystrom", rank=1)):
        y = torch.arange(N) % C
        mode, _ = by_passes.mode_by_passes(J, y, likelihood=Categorical(), settings=settings, **given)
        assert mode.converged


def test_it_says_how_far_it_came() -> None:
    A, variance, mean, y = problem(Categorical(), C)
    mode = pass_space(Matrix(A), y, variance=variance, mean=mean, likelihood=Categorical(), iterations=5)
    assert not mode.converged and mode.iterations == 5 and 6 <= mode.passes <= 11
    with pytest.raises(ArithmeticError, match="relative gradient"):
        mode.checked()


def test_rounding_ends_it() -> None:
    A, variance, mean, y = problem(Categorical(), C)
    given: dict[str, Any] = {"likelihood": Categorical(), "tolerance": 1e-13}
    given |= {"variance": variance.float(), "mean": mean.float()}
    P = at_mean(A, variance, mean, Categorical())
    mode = pass_space(Matrix(A.float()), y, solve=LowRankPreconditioner(P.U.float(), P.lam.float()).solve, **given)
    assert not mode.converged
    assert mode.gradient < 1e-4
    assert mode.passes < 150


def test_gaussian_noise_takes_the_passes_of_conjugate_gradients() -> None:
    A = normal(N * 2, P) * torch.logspace(-1, 1, P, dtype=torch.float64)
    y, given = normal(N, 2, seed=1), {"mean": torch.zeros(N, 2).double(), "variance": torch.ones(P).double()}
    mode = pass_space(Counted(A), y, likelihood=Gaussian(0.1), tolerance=1e-8, **given).checked()
    b = 10 * A.T @ y.flatten()
    solution = cg(lambda V: V + 10 * A.T @ (A @ V), b[:, None], tolerance=1e-8, verify=False)
    assert mode.passes <= solution.iterations + 2
    assert mode.u is not None
    H = torch.eye(P).double() + 10 * A.T @ A
    assert (mode.u - torch.linalg.solve(H, b)).norm() <= 1e-7 * b.norm()


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_a_sketch_reads_the_examples_that_carry_the_curvature(likelihood: Likelihood) -> None:
    J = linearize(torch.nn.Linear(4, C).double()).jacobian(normal(N, 4))
    f = 30 * normal(N, C, seed=1)
    f[3], f[17] = 0, 0.1  # sure of all labels but these
    root = as_weight(likelihood.root(f))
    assert by_passes.find_informative_examples(as_weight(likelihood.root(torch.zeros(N, C).double())), J) is None
    index = by_passes.find_informative_examples(root, J)
    assert index is not None and {3, 17} <= set(index.tolist()) and len(index) < N / 2
    each = root.square().view(N, -1).sum(1)
    assert float(each[index].sum()) >= by_passes.SHARE * float(each.sum())
    assert float(each[index].sum() - each[index].min()) < by_passes.SHARE * float(each.sum())
    scale = torch.linspace(0.5, 2.0, J.shape[1]).double()
    maker = by_passes._PreconditionerMaker(J, scale, None, SolverSettings())
    maker.make(root)
    assert maker.last is not None and maker.passes == 2 * len(index) / N
    weight = as_weight(likelihood.curvature(f)).view(N, C, -1)[index]
    blocks = torch.diag_embed(weight[..., 0]) if weight.shape[2] == 1 else weight
    rows = J.dense().view(N, C, -1)[index] * scale
    H = torch.eye(J.shape[1]).double() + torch.einsum("ncp,ncd,ndq->pq", rows, blocks, rows)
    eye = torch.eye(J.shape[1]).double()
    # Directions below 0.01 are left out.
    torch.testing.assert_close(maker.last.multiply(eye), H, rtol=0, atol=0.01)


def test_a_copy_of_factors_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    J = linearize(torch.nn.Linear(4, C).double()).jacobian(normal(N, 4)).cached()
    root = torch.zeros(N * C).double()
    root[:6] = 1
    assert by_passes.find_informative_examples(root, J).tolist() == [0, 1]  # type: ignore[union-attr]
    monkeypatch.setattr(by_passes, "cache_limit", lambda *_: 0)
    assert by_passes.find_informative_examples(root, J) is None
