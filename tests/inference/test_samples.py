"""Posterior samples against dense algebra with the same draws, and statistically against exact posteriors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from linnet import linearize
from linnet.inference import SolverSettings
from linnet.inference import samples as sampling
from linnet.jacobian import Jacobian
from linnet.linalg import LowRankPreconditioner, sketch
from linnet.probability import Bernoulli, Categorical, Gaussian
from linnet.sampling import Samples, choose_space, effective_dimension, posterior_samples
from tests.support.drawn import double, normal

C = 3
LIKELIHOODS = {"gaussian": Gaussian(0.1), "bernoulli": Bernoulli(), "categorical": Categorical()}


def jacobian(n: int = 30, seed: int = 0, hidden: int = 12) -> Jacobian:
    model = double(nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, C)))
    return linearize(model).jacobian(normal(n, 4, seed=seed), progress=False)


def variances(p: int) -> Tensor:
    return 0.2 + torch.rand(p, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def blocks(L: Tensor) -> Tensor:
    """The root of all rows, (n c, n c)."""
    return torch.diag(L.flatten()) if L.ndim == 2 else torch.block_diag(*L)


def whitened(J: Jacobian, S: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """``G = L^T Phi`` and ``H = I + G^T G``."""
    G = blocks(L).T @ J.dense() * S.sqrt()
    return G, torch.eye(len(S), dtype=S.dtype) + G.T @ G


def draws(rows: int, k: int, seed: int, step: int) -> Tensor:
    return torch.randn(rows, k, dtype=torch.float64, generator=SolverSettings(seed=seed).generator(step))


def reference(J: Jacobian, S: Tensor, L: Tensor, k: int, seed: int = 0) -> Tensor:
    """``z`` of ``(J^T B J + A) z = J^T L e + A^(1/2) h``, with that system written out."""
    e, h = draws(J.shape[0], k, seed, 3), draws(J.shape[1], k, seed, 4)
    D, root = J.dense(), blocks(L)
    right = D.T @ root @ e + S.rsqrt()[:, None] * h
    return torch.linalg.solve(D.T @ root @ root.T @ D + torch.diag(1 / S), right)


# The same draws give the same samples everywhere.


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("space", ["function", "weight"])
@pytest.mark.parametrize("preconditioner", ["auto", "sketch", "nystrom", "pivoted-cholesky", "none"])
def test_samples_solve_their_system(name, space, preconditioner):
    J = jacobian()
    S, L = variances(J.shape[1]), LIKELIHOODS[name].root(J.outputs())
    found = posterior_samples(
        J, S, L, 5, tolerance=1e-12, space=space, preconditioner=preconditioner, rank=6, seed=3, progress=False
    )
    torch.testing.assert_close(found.Z, reference(J, S, L, 5, seed=3), rtol=1e-9, atol=1e-9)
    assert found.space == space and found.k == 5
    assert (found.solution is None) == (space == "function")


@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 12), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_function_space_is_weight_space(n, k, seed):
    J = jacobian(n, seed)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    one, two = (
        posterior_samples(J, S, L, k, seed=seed, space=space, tolerance=1e-12, progress=False)
        for space in ("function", "weight")
    )
    torch.testing.assert_close(one.Z, two.Z, rtol=1e-9, atol=1e-9)


def test_a_seed_is_a_draw():
    J = jacobian()
    S, L = variances(J.shape[1]), Gaussian(0.1).root(J.outputs())
    one, two, other = (posterior_samples(J, S, L, 4, seed=seed, progress=False).Z for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert (one - other).abs().min() > 0


def test_parameters_without_variance_stay():
    J = jacobian()
    S, L = variances(J.shape[1]), Gaussian(0.1).root(J.outputs())
    S[10:40] = 0
    for space in ("function", "weight"):
        found = posterior_samples(J, S, L, 4, space=space, tolerance=1e-10, progress=False)
        assert found.Z[10:40].abs().max() == 0
        kept = S > 0
        G, H = whitened(J, S, L)
        e, h = draws(J.shape[0], 4, 0, 3), draws(J.shape[1], 4, 0, 4)
        Z = S.sqrt()[:, None] * torch.linalg.solve(H, G.T @ e + h)
        torch.testing.assert_close(found.Z[kept], Z[kept], rtol=1e-7, atol=1e-7)
        each = found.effective_dimensions(J.lin.layout)
        assert all(torch.tensor(pair).isfinite().all() for pair in each.values())


def test_data_without_information_leaves_the_prior():
    J = jacobian()
    S, L = variances(J.shape[1]), torch.zeros(J.n, C).double()
    found = posterior_samples(J, S, L, 4, space="weight", progress=False)
    torch.testing.assert_close(found.Z, S.sqrt()[:, None] * draws(J.shape[1], 4, 0, 4))
    assert found.log_det == 0 and found.solution is not None and found.solution.iterations == 0


def test_directions_that_the_data_does_not_reach_are_exact_at_any_tolerance():
    J = jacobian(3)  # 9 rows, 99 parameters
    S, L = variances(J.shape[1]), Gaussian(1e-3).root(J.outputs())
    found = posterior_samples(J, S, L, 6, tolerance=0.1, space="weight", progress=False)
    G, _ = whitened(J, S, L)
    null = torch.linalg.svd(G).Vh[9:]
    h = draws(J.shape[1], 6, 0, 4)
    torch.testing.assert_close(null @ (found.Z / S.sqrt()[:, None]), null @ h, rtol=1e-9, atol=1e-9)


def test_the_residual_is_relative_to_what_comes_from_the_data():
    J = jacobian(3, hidden=60)
    # So little that 1 % of the whole right-hand side would be met by the prior.
    S, L = torch.full((J.shape[1],), 1e-3).double(), Gaussian(1.0).root(J.outputs())
    found = posterior_samples(J, S, L, 6, tolerance=1e-2, space="weight", preconditioner="none", progress=False)
    G, H = whitened(J, S, L)
    e, h = draws(J.shape[0], 6, 0, 3), draws(J.shape[1], 6, 0, 4)
    left = G.T @ e + h - H @ (found.Z / S.sqrt()[:, None])
    assert found.solution is not None and found.solution.tolerance == 1e-2
    assert float((left.norm(dim=0) / (G.T @ e).norm(dim=0)).max()) <= found.solution.residual * (1 + 1e-9) <= 0.0101
    assert found.solution.iterations > 0


# Another prior, another preconditioner.


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_start_saves_iterations_and_changes_nothing(layerwise):
    J = jacobian(40)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    before = posterior_samples(J, S, L, 5, tolerance=1e-8, space="weight", progress=False)
    new = S * 1.1
    if layerwise:
        new[J.lin.layout.slices["0.weight"]] *= 0.9
    how = {"tolerance": 1e-2, "space": "weight", "preconditioner": "none", "progress": False}
    cold, warm = (posterior_samples(J, new, L, 5, start=start, **how) for start in (None, before))
    assert cold.solution is not None and warm.solution is not None
    assert warm.solution.iterations < cold.solution.iterations
    exact = posterior_samples(J, new, L, 5, start=before, **{**how, "tolerance": 1e-12})
    torch.testing.assert_close(exact.Z, reference(J, new, L, 5), rtol=1e-9, atol=1e-9)


def test_a_preconditioner_can_be_used_again():
    J = jacobian(40)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    first = posterior_samples(J, S, L, 3, space="weight", progress=False)
    assert isinstance(first.preconditioner, LowRankPreconditioner) and first.preconditioner.rank > 10
    again = posterior_samples(J, S, L, 3, space="weight", preconditioner=first.preconditioner, progress=False)
    torch.testing.assert_close(again.Z, first.Z, rtol=1e-12, atol=1e-12)


def test_products_of_a_few_rows_serve_solves_and_not_probes():
    """Where a preconditioner is given, products of the rows that carry the curvature are refined by exact ones."""
    J = jacobian(40)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    L[5:] = 0
    P = posterior_samples(J, S, L, 3, space="weight", preconditioner="sketch", progress=False).preconditioner
    V, H = normal(J.shape[1], 2, seed=5), whitened(J, S, L)[1]
    for probes in (0, 4):
        system = sampling.make_system(J, S, L, 3, SolverSettings(), preconditioner=P, probes=probes)
        assert system.preconditioner is P and (system.exact is None) == bool(probes)
        torch.testing.assert_close((system.exact or system.product)(V), H @ V, rtol=1e-9, atol=1e-9)


def test_a_start_brings_its_preconditioner(monkeypatch):
    J = jacobian(40)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    how = {"space": "weight", "tolerance": 1e-12, "progress": False}
    before = posterior_samples(J, S, L, 3, **how)
    made = []
    monkeypatch.setattr(sampling, "sketch", lambda *given, **more: made.append(1) or sketch(*given, **more))
    new = S * torch.linspace(0.5, 2, len(S)).double()
    near = posterior_samples(J, new, 2 * L, 3, start=before, **how)
    assert not made and near.preconditioner is not None and near.preconditioner.rank > 10
    torch.testing.assert_close(near.Z, reference(J, new, 2 * L, 3), rtol=1e-9, atol=1e-9)
    far = posterior_samples(J, 100 * S, L, 3, start=before, **how)
    assert made
    torch.testing.assert_close(far.Z, reference(J, 100 * S, L, 3), rtol=1e-8, atol=1e-8)
    posterior_samples(J, new, L, 3, start=before, preconditioner="sketch", **how)
    assert len(made) == 2


def test_the_log_determinant_comes_beside():
    J = jacobian(40)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    exact = float(torch.logdet(whitened(J, S, L)[1]))
    dense = posterior_samples(J, S, L, 2, space="function", progress=False)
    assert dense.log_det == pytest.approx(exact, rel=1e-9) and dense.log_det_error == 0
    by_probes = posterior_samples(J, S, L, 2, space="weight", preconditioner="none", probes=32, progress=False)
    assert by_probes.log_det is not None and 0 < by_probes.log_det_error < 0.1 * exact
    assert abs(by_probes.log_det - exact) < 4 * by_probes.log_det_error
    assert posterior_samples(J, S, L, 2, space="weight", progress=False).log_det is None


# Statistics.


def test_variances_are_those_of_the_exact_posterior():
    """At least 99 % of them within three standard errors; 64 samples, 20 seeds, residual 1e-2."""
    J, new = jacobian(60), jacobian(25, seed=5)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    Phi = new.dense() * S.sqrt()
    exact = (Phi * torch.linalg.solve(whitened(J, S, L)[1], Phi.T).T).sum(1)
    kept = J.cached()
    off = []
    for seed in range(20):
        found = posterior_samples(kept, S, L, 64, seed=seed, space="weight", progress=False)
        off.append((found.posterior().variance(new).flatten() - exact) / (exact * (2 / 64) ** 0.5))
    z = torch.stack(off)
    assert (z.abs() <= 3).double().mean() >= 0.99
    assert abs(float(z.mean())) < 0.5  # no bias: seeds are 20, points of a seed nearly one
    assert 0.6 < float(z.std()) < 1.5


def test_joint_samples_have_the_joint_covariance():
    J, new = jacobian(60), jacobian(4, seed=5)
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    Phi = new.dense() * S.sqrt()
    exact = Phi @ torch.linalg.solve(whitened(J, S, L)[1], Phi.T)
    found = posterior_samples(J, S, L, 4000, space="function", progress=False)
    posterior = found.posterior()
    torch.testing.assert_close(posterior.covariance(new), exact, rtol=0, atol=0.1 * float(exact.diagonal().max()))
    f = posterior.sample(new, 10, generator=torch.Generator())
    torch.testing.assert_close(f.reshape(10, -1).T, new.dense() @ found.Z[:, :10], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_effective_dimensions(name):
    J = jacobian(60)
    S, L = variances(J.shape[1]), LIKELIHOODS[name].root(J.outputs())
    G, H = whitened(J, S, L)
    exact = torch.linalg.solve(H, G.T @ G).diagonal()
    layout = J.lin.layout
    z = []
    for seed in range(10):
        found = posterior_samples(J, S, L, 64, seed=seed, space="weight", progress=False)
        gamma, error = effective_dimension(J, L, found.Z)
        assert error < 2 * (2 * gamma / 64) ** 0.5
        z.append((gamma - float(exact.sum())) / error)
        each = found.effective_dimensions(layout)
        assert list(each) == ["0", "2"]
        for layer, (value, spread) in each.items():
            part = float(sum(exact[layout.slices[name]].sum() for name in layout.layers[layer]))
            assert spread < 2 * (3 * part / 64) ** 0.5
            z.append((value - part) / spread)
    assert torch.tensor(z).abs().max() < 4
    assert torch.tensor(z).mean().abs() < 0.7


def test_layers_that_the_data_hardly_moves_are_not_drowned():
    """Few rows, many parameters: the plain estimate p - a ||z||^2 has an error of sqrt(2 p / k)."""
    J = jacobian(2, hidden=200)
    S, L = variances(J.shape[1]), Gaussian(0.1).root(J.outputs())
    found = posterior_samples(J, S, L, 32, space="weight", progress=False)
    total = sum(value for value, _ in found.effective_dimensions(J.lin.layout).values())
    G, H = whitened(J, S, L)
    exact = float(torch.linalg.solve(H, G.T @ G).diagonal().sum())
    assert exact < 6
    assert abs(total - exact) < 4 * (3 * exact / 32) ** 0.5 < 0.5 * (2 * J.shape[1] / 32) ** 0.5


# Space, precision, errors.


def test_small_problems_are_solved_exactly():
    J = jacobian(10)
    assert choose_space(J, 64) == "function"
    assert choose_space(J, 64, memory=1000) == "weight"
    wide = linearize(double(nn.Linear(1, C))).jacobian(normal(50, 1), progress=False)
    assert choose_space(wide, 64) == "weight"  # six parameters, 150 rows


def test_many_outputs_are_taken_in_wide_chunks():
    """Column by column no rows are held, so that a chunk takes what the network's graph allows."""
    model = double(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 40)))
    J = linearize(model).jacobian(normal(30, 4), memory=200_000, progress=False)
    assert J.passes.chunk_size() < 15 and J.passes.chunk_size(columns=True) == 30
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    found = posterior_samples(J, S, L, 2, tolerance=1e-12, space="weight", rank=4, progress=False)
    assert J.passes.settings.used == 30
    torch.testing.assert_close(found.Z, reference(J, S, L, 2), rtol=1e-9, atol=1e-9)
    J.normal(normal(J.shape[1], 40))
    assert J.passes.settings.used < 15


def test_single_precision():
    model = double(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, C)))
    exact = linearize(model).jacobian(normal(30, 4), progress=False)
    J = linearize(model.float()).jacobian(normal(30, 4).float(), progress=False)
    S = variances(J.shape[1])
    L = Categorical().root(exact.outputs())
    for space in ("function", "weight"):
        found = posterior_samples(J, S.float(), L.float(), 4, tolerance=1e-5, space=space, progress=False)
        assert found.Z.dtype == torch.float32 and found.Z.isfinite().all()


def test_a_solve_that_does_not_converge_raises():
    J = jacobian(40)
    S, L = variances(J.shape[1]), Gaussian(1e-6).root(J.outputs())
    with pytest.raises(ArithmeticError, match="have not solved the system of the posterior samples"):
        posterior_samples(J, S, L, 3, space="weight", preconditioner="none", iterations=2, progress=False)


def test_bad_input():
    J = jacobian(5)
    p = J.shape[1]
    S, L = variances(p), Gaussian(0.1).root(J.outputs())
    with pytest.raises(ValueError, match=f"S needs shape \\({p},\\); got \\(3,\\)"):
        posterior_samples(J, S[:3], L, 2)
    with pytest.raises(ValueError, match=r"L needs shape \(5, 3\) or \(5, 3, 3\)"):
        posterior_samples(J, S, L.flatten(), 2)
    with pytest.raises(TypeError, match=r"S must be too; got torch.float32"):
        posterior_samples(J, S.float(), L, 2)
    with pytest.raises(ValueError, match="positive integer; got 0"):
        posterior_samples(J, S, L, 0)
    with pytest.raises(ValueError, match="at least 2 probes, or 0 for none; got 1"):
        posterior_samples(J, S, L, 2, probes=1)
    with pytest.raises(ValueError, match="must be finite and not negative"):
        posterior_samples(J, -S, L, 2)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        posterior_samples(J, S, L / 0, 2)
    with pytest.raises(ValueError, match="space must be one of 'auto', 'weight', 'function'; got 'dual'"):
        posterior_samples(J, S, L, 2, space="dual")
    with pytest.raises(ValueError, match=r"one of 'auto', 'sketch', .*; got 'jacobi'"):
        posterior_samples(J, S, L, 2, preconditioner="jacobi")
    made = posterior_samples(J, S, L, 2, progress=False)
    with pytest.raises(ValueError, match="start needs 2 samples of 99 parameters from seed 1"):
        posterior_samples(J, S, L, 2, seed=1, start=made)
    with pytest.raises(ValueError, match="at least 2 samples; got 1"):
        effective_dimension(J, L, made.Z[:, :1])
    with pytest.raises(ValueError, match="99 parameters and the layout 6"):
        made.effective_dimensions(linearize(nn.Linear(1, 3)).layout)
    assert isinstance(made, Samples)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_rounding_of_the_kernel_in_float32_is_refined_away(scale):
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, C))
    torch.nn.utils.vector_to_parameters(0.5 * normal(4 * 12 + 12 + 12 * C + C, seed=3).float(), model.parameters())
    J = linearize(model).jacobian(normal(20, 4).float(), progress=False)
    S, L = torch.full((J.shape[1],), scale), Gaussian(0.01).root(J.outputs())
    found = posterior_samples(J, S, L, 4, space="function", tolerance=1e-3)
    assert found.solution is not None
    e, h = (
        torch.randn(rows, 4, generator=SolverSettings(seed=0).generator(step)).double()
        for rows, step in ((J.shape[0], 3), (J.shape[1], 4))
    )
    G = blocks(L.double()).T @ J.dense().double() * scale**0.5
    u = found.Z.double() / scale**0.5
    left = (G.T @ e + h - u - G.T @ (G @ u)).norm(dim=0) / (G.T @ e).norm(dim=0)
    assert float(left.max()) <= 2e-3
    assert found.solution.residual <= 1e-3


# Iterations in a cheaper precision.


def test_a_coarse_jacobian_gives_the_same_samples():
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, C))
    torch.nn.utils.vector_to_parameters(0.5 * normal(4 * 12 + 12 + 12 * C + C, seed=3).float(), model.parameters())
    lin, X = linearize(model), normal(30, 4).float()
    J, coarse = (lin.jacobian(X, precision=precision, progress=False) for precision in ("highest", "bf16"))
    S = variances(J.shape[1]).float()
    L = Categorical().root(J.outputs())
    assert not torch.allclose(J.dense(), coarse.dense(), rtol=1e-4, atol=1e-5)
    exact = posterior_samples(J, S, L, 4, space="function").Z
    found = posterior_samples(J, S, L, 4, space="weight", coarse=coarse, tolerance=1e-5, rank=2)
    assert found.solution is not None and found.solution.residual <= 1e-5
    torch.testing.assert_close(found.Z, exact, rtol=1e-3, atol=1e-4)


def test_a_coarse_jacobian_must_be_of_the_same_data():
    J = jacobian()
    S, L = variances(J.shape[1]), Categorical().root(J.outputs())
    with pytest.raises(ValueError, match="in another precision"):
        posterior_samples(J, S, L, 2, coarse=jacobian(n=29))
    with pytest.raises(ValueError, match="no probes"):
        posterior_samples(J, S, L, 2, coarse=J, probes=4)


def test_the_estimates_of_samples_by_hand():
    """Means over the draws and their standard errors, which one draw does not have."""
    J = jacobian(10)
    S, L = variances(J.shape[1]), Gaussian(0.1).root(J.outputs())
    found = posterior_samples(J, S, L, 2, seed=2, space="function", progress=False)
    each = (blocks(L).T @ J.dense() @ found.Z).square().sum(0)
    gamma, error = effective_dimension(J, L, found.Z)
    assert (gamma, error) == pytest.approx((float(each.mean()), float(each.std()) / 2**0.5), rel=1e-9)
    h = draws(J.shape[1], 2, 2, 4)
    part = h * (h - found.Z / S.sqrt()[:, None])
    for layer, names in J.lin.layout.layers.items():
        each = sum(part[J.lin.layout.slices[name]].sum(0) for name in names)
        wanted = float(each.mean()), float(each.std()) / 2**0.5
        assert found.effective_dimensions(J.lin.layout)[layer] == pytest.approx(wanted, rel=1e-9)
    one = posterior_samples(J, S, L, 1, space="function", progress=False)
    with pytest.raises(ValueError, match="at least 2 samples; got 1"):
        one.effective_dimensions(J.lin.layout)
    with pytest.raises(ValueError, match="at least 2 samples; got 1"):
        effective_dimension(J, L, one.Z)
