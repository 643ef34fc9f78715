"""Small networks, likelihoods and data for the tests of the Laplace approximation, and all of it in dense algebra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet import Laplace
from linnet.probability import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood
from tests.support.drawn import double, normal

N = 24
X, NEW = normal(N, 3), normal(6, 3, seed=5)
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
NUMBERS = torch.stack([X[:, 0].sin(), X[:, 1] * X[:, 2]], 1)
EXACT = ["full", "function"]


def net(outputs: int, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)), seed)


class Dense:
    """Everything in dense algebra."""

    def __init__(self, model: nn.Module, likelihood: Likelihood, y: Tensor, variance: Tensor | float) -> None:
        lin = linnet.linearize(model)
        J, self.lin = lin.jacobian(X), lin
        self.J, self.f, self.likelihood = J.dense(), J.outputs(), likelihood
        n, c = self.f.shape
        self.y = likelihood.targets(y, n, c, dtype=torch.float64)
        self.S = torch.as_tensor(variance, dtype=torch.float64).expand(lin.p)
        B = likelihood.curvature(self.f)
        B = torch.diag_embed(B) if B.ndim == 2 else B
        self.G = torch.einsum("nap,nab,nbq->pq", self.J.view(n, c, -1), B, self.J.view(n, c, -1))
        self.theta = lin.layout.flatten(lin.theta)

    @property
    def H(self) -> Tensor:
        return self.G + torch.diag(1 / self.S)

    def log_evidence(self, H: Tensor | None = None) -> float:
        H = self.H if H is None else H
        return float(
            self.likelihood.log_prob(self.f, self.y).sum()
            - 0.5 * (self.theta.square() / self.S).sum()
            - 0.5 * self.S.log().sum()
            - 0.5 * torch.logdet(H)
        )

    def covariance(self, H: Tensor | None = None) -> Tensor:
        new = self.lin.jacobian(NEW).dense()
        return new @ torch.linalg.inv(self.H if H is None else H) @ new.T


CASES: dict[str, tuple[int, Any, Likelihood, Tensor]] = {
    "softmax": (3, "classification", Categorical(), CLASSES),
    "one logit": (1, "classification", Bernoulli(), (CLASSES > 0).long()),
    "labels": (2, "classification", Bernoulli(), torch.stack([CLASSES > 0, CLASSES > 1], 1).double()),
    "numbers": (2, "regression", Gaussian(0.3), NUMBERS),
    "noise per output": (2, Gaussian(torch.tensor([0.3, 0.1])), Gaussian(torch.tensor([0.3, 0.1])), NUMBERS),
    "log variances": (4, "heteroscedastic", Heteroscedastic(), NUMBERS),
}


def fitted(case: str, structure: Any, prior: Any = 0.7, **options: Any) -> tuple[Laplace, Dense]:
    outputs, spec, likelihood, y = CASES[case]
    if spec == "regression":
        options.setdefault("noise", 0.3)
    model = net(outputs)
    variance = options.pop("variance", prior)
    la = Laplace(model, spec, structure, prior, **options).fit(X, y)
    return la, Dense(model, likelihood, y, variance)
