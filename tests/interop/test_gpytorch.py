"""The tangent kernel inside GPyTorch, against dense Jacobians and closed forms."""

from __future__ import annotations

import copy
import importlib
import math
import sys

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import ScaleKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import linnet
from linnet.data import Batch
from linnet.interop.gpytorch import TangentGram, TangentKernel
from linnet.testing.case import Net
from tests.support.drawn import double, normal

D = 3


def network(c: int = 1) -> nn.Module:
    return double(nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, c)))


def dense(model: nn.Module, x: Tensor) -> Tensor:
    """J of inputs (n, d), by torch alone."""
    theta = {name: t.detach() for name, t in model.named_parameters()}
    found = jacrev(lambda th: functional_call(model, th, (x,)).flatten())(theta)
    return torch.cat([found[name].flatten(1) for name in theta], 1).detach()


def close(a: Tensor, b: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


class Process(gpytorch.models.ExactGP):
    def __init__(self, kernel: TangentKernel, x: Tensor, y: Tensor) -> None:
        c = 1 if y.ndim == 1 else y.shape[1]
        likelihood = (
            gpytorch.likelihoods.GaussianLikelihood()
            if c == 1
            else gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=c, has_global_noise=False)
        )
        super().__init__(x, y, likelihood)
        mean = gpytorch.means.ConstantMean()
        self.mean_module = mean if c == 1 else gpytorch.means.MultitaskMean(mean, num_tasks=c)
        self.covar_module = ScaleKernel(kernel)
        self.distribution = MultivariateNormal if c == 1 else MultitaskMultivariateNormal

    def forward(self, x: Tensor) -> MultivariateNormal:
        return self.distribution(self.mean_module(x), self.covar_module(x))


def trained(process: Process, steps: int = 30) -> list[float]:
    """Log marginal likelihoods along the way."""
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
    optimizer = torch.optim.Adam(process.parameters(), lr=0.1)
    process.train()
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = objective(process(*process.train_inputs), process.train_targets)
        (-value).backward()
        optimizer.step()
        values.append(value.item())
    process.eval()
    return values


@pytest.mark.parametrize("c", [1, 2])
@pytest.mark.parametrize("prior", ["unit", "ntk", "tensor"])
def test_kernel_is_the_gram_matrix_of_dense_rows(c: int, prior: str) -> None:
    model, x, z = network(c), normal(5, D), normal(4, D, seed=1)
    p = sum(t.numel() for t in model.parameters())
    chosen = normal(p).square() if prior == "tensor" else prior
    kernel = TangentKernel(model, prior=chosen)
    A, B = dense(model, x), dense(model, z)
    S = kernel.variances
    assert kernel.num_outputs_per_input(x, x) == c
    assert kernel(x).shape == (5 * c, 5 * c)
    close(kernel(x).to_dense(), (A * S) @ A.T)
    close(kernel(x, z).to_dense(), (A * S) @ B.T)
    close(kernel(x, diag=True), ((A * S) * A).sum(1))
    close(kernel(x[:4], z, diag=True), ((A[: 4 * c] * S) * B).sum(1))
    close(kernel(x).diagonal(), ((A * S) * A).sum(1))
    close(kernel(x)[2 * c :, : 2 * c].to_dense(), ((A * S) @ A.T)[2 * c :, : 2 * c])
    if prior == "tensor":
        close(S, chosen)
    if prior == "ntk":
        close(S[:D], torch.full((D,), 1 / D, dtype=torch.float64))


@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(1, 4),
    m=st.integers(1, 4),
    left=st.sampled_from([(), (1,), (3,), (2, 3)]),
    right=st.sampled_from([(), (1,), (3,), (2, 1)]),
    grad=st.booleans(),
    copies=st.booleans(),
)
def test_batches_broadcast(n: int, m: int, left: tuple, right: tuple, grad: bool, copies: bool) -> None:
    model = network(2)
    kernel = TangentKernel(model)
    x, z = normal(*left, n, D), normal(*right, m, D, seed=1)
    if copies:
        z = z.flatten(0, -2)[:m].expand(*right, m, D).contiguous()
    K = kernel(x.requires_grad_(grad), z).to_dense()
    batch = torch.broadcast_shapes(left, right)
    expected = torch.stack(
        [
            dense(model, a.detach()) @ dense(model, b).T
            for a, b in zip(
                x.expand(*batch, n, D).reshape(-1, n, D), z.expand(*batch, m, D).reshape(-1, m, D), strict=True
            )
        ]
    )
    assert K.requires_grad == grad
    close(K.detach(), expected.view(*batch, 2 * n, 2 * m))
    close(kernel(z, x).to_dense().detach(), expected.view(*batch, 2 * n, 2 * m).mT)


def test_batches_with_more_inputs_than_parameters_and_batch_diagonals() -> None:
    model = double(nn.Linear(D, 1))
    kernel, x = TangentKernel(model), normal(4, 5, D)
    J = dense(model, x.view(20, D)).view(4, 5, -1)
    close(kernel(x).to_dense(), J @ J.mT)
    close(kernel(x, diag=True), J.square().sum(-1))
    close(kernel(normal(4, 1, D)).to_dense(), TangentKernel(model)(normal(4, D)).to_dense().diagonal().view(4, 1, 1))


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_training_increases_the_evidence_and_predictions_have_the_closed_form(optimizer: str) -> None:
    model, x, z = network(), normal(20, D), normal(7, D, seed=1)
    y = x.sin().sum(1) + 0.1 * normal(20, seed=2)
    process = Process(TangentKernel(model), x, y).double()
    if optimizer == "adam":
        values = trained(process)
    else:
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
        steps = torch.optim.LBFGS(process.parameters(), lr=0.1, max_iter=10)
        values = []

        def closure() -> Tensor:
            steps.zero_grad()
            loss = -objective(process(x), y)
            loss.backward()
            values.append(-loss.item())
            return loss

        process.train()
        for _ in range(3):
            steps.step(closure)
        process.eval()
    assert values[-1] > values[0] + 0.1
    scale, noise = process.covar_module.outputscale.detach(), process.likelihood.noise.detach()
    constant = process.mean_module.constant.detach()
    assert scale != pytest.approx(math.log(2)) and noise != pytest.approx(math.log(2)) and constant != 0
    A, B = dense(model, x), dense(model, z)
    M = scale * A @ A.T + noise * torch.eye(20)
    mean = constant + scale * B @ A.T @ torch.linalg.solve(M, y - constant)
    cov = scale * B @ B.T - scale**2 * B @ A.T @ torch.linalg.solve(M, A @ B.T)
    with torch.no_grad():
        prediction = process(z)
        close(prediction.mean, mean, 1e-6)
        close(prediction.covariance_matrix, cov, 1e-6)
        close(process.likelihood(prediction).variance, cov.diagonal() + noise, 1e-6)
    loc, precision = y - constant, torch.linalg.inv(M)
    evidence = -0.5 * (loc @ precision @ loc + M.logdet() + 20 * math.log(2 * math.pi)) / 20
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
    process.train()
    close(objective(process(x), y).detach(), evidence, 1e-6)


def test_several_outputs_in_a_multitask_process() -> None:
    model, x, z, c = network(2), normal(12, D), normal(3, D, seed=1), 2
    y = torch.stack([x.sin().sum(1), x.cos().sum(1)], 1)
    process = Process(TangentKernel(model, prior="ntk"), x, y).double()
    values = trained(process)
    assert values[-1] > values[0]
    scale, noise = process.covar_module.outputscale.detach(), process.likelihood.task_noises.detach()
    offset = torch.stack([m.constant.detach() for m in process.mean_module.base_means])
    S = process.covar_module.base_kernel.variances
    A, B = dense(model, x), dense(model, z)
    M = scale * (A * S) @ A.T + torch.diag(noise.repeat(12))
    cross = scale * (B * S) @ A.T
    with torch.no_grad():
        prediction = process(z)
        mean = offset + (cross @ torch.linalg.solve(M, (y - offset).flatten())).view(3, c)
        close(prediction.mean, mean, 1e-6)
        close(prediction.covariance_matrix, scale * (B * S) @ B.T - cross @ torch.linalg.solve(M, cross.T), 1e-6)


def test_steps_on_hyperparameters_run_no_network_again() -> None:
    model, x = network(), normal(10, D)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    process = Process(TangentKernel(model), x, x.sum(1)).double()
    trained(process, steps=1)
    before = len(calls)
    trained(process, steps=5)
    assert before > 0 and len(calls) == before


def test_a_kernel_matrix_that_was_written_into_is_made_anew() -> None:
    kernel, x = TangentKernel(network()), normal(4, D)
    K = kernel(x).to_dense()
    assert kernel(x).to_dense().data_ptr() == K.data_ptr()
    kept = K.clone()
    K.zero_()
    close(kernel(x).to_dense(), kept)
    x += 1.0
    assert not torch.allclose(kernel(x).to_dense(), kept)


@pytest.mark.parametrize("c", [1, 2])
def test_large_matrices_are_products(c: int) -> None:
    model, x, z = network(c), normal(8, D), normal(5, D, seed=1)
    kernel = TangentKernel(model, max_dense=0)
    A, B = dense(model, x), dense(model, z)
    K, C = A @ A.T, A @ B.T
    op, cross = kernel(x).evaluate_kernel(), kernel(x, z).evaluate_kernel()
    assert isinstance(op, TangentGram) and isinstance(cross, TangentGram)
    close(op.to_dense(), K)
    close(cross.mT.to_dense(), C.T)
    close(op.diagonal(), K.diagonal())
    close(cross[: 5 * c].diagonal(), C[: 5 * c].diagonal())
    close(op @ normal(8 * c, 3), K @ normal(8 * c, 3))
    close(op @ normal(8 * c), K @ normal(8 * c))
    close(op.matmul(normal(2, 8 * c, 3)), K @ normal(2, 8 * c, 3))
    i = torch.tensor([3, 0, 3])
    close(op[i, torch.tensor([1, 1, 2])], K[i, torch.tensor([1, 1, 2])])
    close(op[1], K[1])
    part = op[2 * c : 6 * c, 2 * c : 6 * c]
    assert isinstance(part, TangentGram) and part.left is part.right
    close(part.to_dense(), K[2 * c : 6 * c, 2 * c : 6 * c])
    close(op[1:, i].to_dense(), K[1:, i])
    close(op.expand(3, 8 * c, 8 * c).to_dense(), K.expand(3, 8 * c, 8 * c))
    close(op.unsqueeze(0).to_dense(), K[None])
    batch = op.expand(3, 8 * c, 8 * c)
    close(batch[:2, c:, c:].to_dense(), K[c:, c:].expand(2, 7 * c, 7 * c))
    close(batch[0, 1:, 1:].to_dense(), K[1:, 1:])
    close(batch @ normal(8 * c, 2), (K @ normal(8 * c, 2)).expand(3, 8 * c, 2))
    close(batch.diagonal(dim1=-2, dim2=-1), K.diagonal().expand(3, 8 * c))
    close(batch.unsqueeze(1).permute(1, 0, 2, 3).to_dense(), K.expand(1, 3, 8 * c, 8 * c))
    close(kernel(x.expand(3, 8, D)).to_dense(), K.expand(3, 8 * c, 8 * c))


@pytest.mark.parametrize(("size", "kind"), [(12, Tensor), (11, TangentGram)])
def test_a_matrix_of_as_many_entries_as_are_allowed_is_a_tensor(size: int, kind: type) -> None:
    kernel = TangentKernel(network(2), max_dense=size)
    assert isinstance(kernel.forward(normal(4, D), normal(9, D, seed=1)), kind)  # 4 * 9 * 2**2 entries are 12**2


def test_conjugate_gradients_on_products_agree_with_the_dense_process() -> None:
    model, x, z = network(), normal(40, D), normal(6, D, seed=1)
    y = x.sin().sum(1)
    processes = [Process(TangentKernel(model, max_dense=size), x, y).double() for size in (0, 100)]
    found = []
    with (
        gpytorch.settings.max_cholesky_size(1),
        gpytorch.settings.cg_tolerance(1e-5),
        gpytorch.settings.eval_cg_tolerance(1e-5),
        gpytorch.settings.min_preconditioning_size(10),
        gpytorch.settings.max_cg_iterations(200),
        gpytorch.settings.num_trace_samples(50),
        gpytorch.settings.skip_posterior_variances(True),
    ):
        for process in processes:
            torch.manual_seed(0)
            objective = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
            process.train()
            objective(process(x), y).backward()
            slope = process.covar_module.raw_outputscale.grad
            process.eval()
            with torch.no_grad():
                found.append((process(z).mean, slope))
    close(found[0][0], found[1][0], 1e-6)
    close(found[0][1], found[1][1], 1e-6)


@pytest.mark.parametrize("c", [1, 2])
def test_gradients_with_respect_to_inputs(c: int) -> None:
    model = network(c)
    kernel, z = TangentKernel(model, prior="ntk"), normal(4, D, seed=1)
    x = normal(2, D).requires_grad_()

    def entries(x: Tensor) -> tuple[Tensor, ...]:
        return kernel(x, z).to_dense(), kernel(x).to_dense(), kernel(z, x).to_dense(), kernel(x, diag=True)

    assert torch.autograd.gradcheck(entries, (x,))
    assert torch.autograd.gradcheck(lambda x: kernel(x.expand(3, 2, D), z).to_dense(), (x,))
    assert torch.autograd.gradgradcheck(lambda x: kernel(x, z).to_dense(), (x,))
    with torch.no_grad():
        assert not kernel(x, z).to_dense().requires_grad


def test_predictions_of_a_process_are_differentiable_in_the_inputs() -> None:
    model, x = network(), normal(9, D)
    process = Process(TangentKernel(model), x, x.sin().sum(1)).double().eval()
    z = normal(2, D, seed=1).requires_grad_()
    with torch.no_grad():
        process(z.detach())  # fills the caches

    def moments(z: Tensor) -> tuple[Tensor, Tensor]:
        prediction = process(z)
        return prediction.mean, prediction.variance

    assert torch.autograd.gradcheck(moments, (z,), rtol=1e-4)


def reads(m: nn.Module, x: Tensor) -> Tensor:
    """A network that reads a number from its input, so that torch cannot vectorize it over examples."""
    y = m.inner(x).tanh()
    return y if y.sum().item() < 1e9 else y + m.unused


@pytest.mark.parametrize(
    ("model", "vectorized"),
    [
        # torch 2.13's vmap is wrong.
        (nn.Sequential(nn.Linear(D, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)), None),
        (Net(reads, inner=nn.Linear(D, 2), unused=nn.Parameter(torch.zeros(2))), False),
        (nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.BatchNorm1d(6), nn.Linear(6, 2)), True),
        (nn.Linear(D, 2), True),
    ],
)
def test_derivatives_of_rows_are_checked_before_they_are_vectorized(model: nn.Module, vectorized: bool | None) -> None:
    kernel, z = TangentKernel(double(model)), normal(4, D, seed=1)
    x = normal(3, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: (kernel(x, z).to_dense(), kernel(x[:1]).to_dense()), (x,))
    features = kernel._features
    able = features._vectorizes and features.lin.rules.can(
        "vectorize", Batch((x.detach(),), {}, None, start=0, n=len(x))
    )
    assert vectorized is None or able == vectorized
    close(kernel(x, z).to_dense().detach(), kernel(x.detach(), z).to_dense())


def normed(m: nn.Module, x: Tensor) -> Tensor:
    """A network with a layer norm where the first input is large: vmap's rule for it is wrong there alone."""
    h = m.a(x)
    return m.b(torch.where(x[:, :1] > 1, m.norm(h), h))


def test_rows_are_checked_on_the_inputs_that_they_are_asked_for() -> None:
    model = double(Net(normed, a=nn.Linear(D, 6), norm=nn.LayerNorm(6), b=nn.Linear(6, 2)))
    features, small = TangentKernel(model)._features, normal(3, D).clamp(-1, 0.5)
    for x in (small, small + 3):  # what the first inputs do not show
        x = x.clone().requires_grad_()
        found = features.rows(x)
        each = [torch.autograd.grad(f, model.parameters(), create_graph=True) for f in model(x).flatten()]
        exact = torch.stack([torch.cat([g.flatten() for g in one]) for one in each])
        close(found, exact)
        u = normal(*found.shape, seed=2)
        slopes = [torch.autograd.grad((rows * u).sum(), x, retain_graph=True)[0] for rows in (found, exact)]
        close(*slopes)


def test_a_kernel_that_does_not_depend_on_the_input() -> None:
    kernel = TangentKernel(double(nn.Linear(D, 1)), "bias")
    x = normal(2, D).requires_grad_()
    close(kernel(x).to_dense().detach(), torch.ones(2, 2, dtype=torch.float64))


def test_the_kernel_follows_the_dtype_of_its_model_and_copies_share_the_network() -> None:
    model = nn.Linear(D, 1)
    kernel = ScaleKernel(TangentKernel(model))
    assert kernel.base_kernel.dtype == torch.float32
    kernel.double()
    x = normal(3, D)
    assert kernel.base_kernel.dtype == torch.float64 and model.weight.dtype == torch.float32
    close(kernel.base_kernel(x).to_dense(), x @ x.T + 1)
    twin = copy.deepcopy(kernel)
    assert twin.base_kernel.lin is kernel.base_kernel.lin
    assert list(kernel.base_kernel.parameters()) == []
    with pytest.raises(RuntimeError, match="cannot be moved to meta"):
        kernel.to("meta")


def test_a_linearization_may_be_given() -> None:
    model = network()
    lin = linnet.linearize(model, "2.*")
    x = normal(3, D)
    close(TangentKernel(lin)(x).to_dense(), TangentKernel(model, "2.*")(x).to_dense())
    assert TangentKernel(lin).variances.shape == (7,)


def test_botorch_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("botorch", "botorch.models.model", "botorch.posteriors"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "linnet.interop.botorch", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'linnet\[botorch\]'"):
        importlib.import_module("linnet.interop.botorch")


def test_errors() -> None:
    model, x = network(), normal(3, D)
    kernel = TangentKernel(model)
    assert kernel(x).shape == (3, 3)
    with pytest.raises(ValueError, match=r"shape \(31,\); got torch.float32 of shape \(3,\)"):
        TangentKernel(model, prior=torch.ones(3))
    with pytest.raises(ValueError, match="finite and not negative"):
        TangentKernel(model, prior=-torch.ones(31))
    with pytest.raises(ValueError, match="2 scales for the evidence to choose"):
        TangentKernel(model, prior="layerwise")
    with pytest.raises(ValueError, match="a kernel does not have"):
        TangentKernel(model, prior="balanced")
    with pytest.raises(ValueError, match="prior must be one of"):
        TangentKernel(model, prior="flat")
    with pytest.raises(ValueError, match="has its parameters and its output already"):
        TangentKernel(kernel.lin, "2.*")
    with pytest.raises(NotImplementedError, match="no last_dim_is_batch"):
        kernel.forward(x, x, last_dim_is_batch=True)
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        kernel(x).to_dense()
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        kernel(x.requires_grad_()).to_dense()
