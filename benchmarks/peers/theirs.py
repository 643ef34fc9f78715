"""The jobs by the peers, each as its documentation does it; runs where linnet need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

Found = dict[str, Tensor]


def product(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor, V: Tensor) -> Found:
    """curvlinops: `GGNLinearOperator`, without the checks of determinism that it makes by default."""
    from curvlinops import GGNLinearOperator

    batches = list(zip(X.split(told["batch"]), y.split(told["batch"]), strict=True))
    loss, params = nn.CrossEntropyLoss(reduction="sum"), list(model.parameters())
    return {"product": GGNLinearOperator(model, loss, params, batches, check_deterministic=False) @ V}


def diagonal(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor) -> Found:
    """laplace-torch: the curvature that a diagonal approximation adds up."""
    return {"diagonal": _fitted(model, told | {"structure": "diag"}, X, y).H}


def laplace(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor, new: Tensor) -> Found:
    """laplace-torch: fit, log evidence, and probabilities of new examples."""
    la = _fitted(model, told, X, y)
    probabilities = [la(x, pred_type="glm", link_approx="probit").detach() for x in new.split(told["batch"])]
    return {"log evidence": la.log_marginal_likelihood().detach(), "probabilities": torch.cat(probabilities)}


def gp(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor, new: Tensor) -> Found:
    """GPyTorch: an `ExactGP` on each example's gradient; its mean is the network.

    The kernel is dense: GPyTorch's own `LinearKernel` predicts with matrices (p, p), and here p > n.
    """
    import gpytorch

    class Dot(gpytorch.kernels.Kernel):
        def forward(self, a: Tensor, b: Tensor, diag: bool = False, **params: Any) -> Tensor:
            return told["prior"] * ((a * b).sum(-1) if diag else a @ b.mT)

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, rows: Tensor, target: Tensor, likelihood: Any) -> None:
            super().__init__(rows, target, likelihood)
            self.mean, self.kernel = gpytorch.means.ZeroMean(), Dot()

        def forward(self, rows: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(rows), self.kernel(rows))

    with torch.no_grad():
        target, base = y - model(X)[:, 0], model(new)[:, 0]
    rows, new_rows = _rows(model, X), _rows(model, new)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    process = Exact(rows, target, likelihood).double()
    likelihood.noise = torch.tensor(told["noise"], dtype=torch.float64)  # a number would be rounded to float32
    with torch.no_grad():
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)(process(rows), target) * len(y)
        posterior = process.eval()(new_rows)
        return {"log evidence": evidence, "mean": base + posterior.mean, "variance": posterior.variance}


def _fitted(model: nn.Module, told: dict[str, Any], X: Tensor, y: Tensor) -> Any:
    laplace_torch = importlib.import_module("laplace")
    backend = told["backend"]
    given = {"backend": getattr(importlib.import_module("laplace.curvature"), backend)} if backend else {}
    la = laplace_torch.Laplace(
        model,
        "classification",
        subset_of_weights="last_layer" if told["last_layer"] else "all",
        hessian_structure=told["structure"],
        prior_precision=1 / told["prior"],
        **given,
    )
    la.fit(DataLoader(TensorDataset(X, y), batch_size=told["batch"]))
    return la


def _rows(model: nn.Module, X: Tensor) -> Tensor:
    """The gradient of the only output by all parameters, (n, p)."""
    theta = {name: t.detach() for name, t in model.named_parameters()}

    def f(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, theta, (x[None],))[0, 0]

    by_name = vmap(grad(f), (None, 0))(theta, X)
    return torch.cat([by_name[name].flatten(1) for name in theta], 1)
