"""What figure 2 times: log evidences and Fisher-vector products by linnet, and the ways others compute them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import linnet
from benchmarks.models import Model, WideResNet
from linnet._common import arithmetic, memory
from linnet.testing.architectures.dense import mlp

TOLERANCE = 1e-3
"""Relative residual of every iterative solver."""
NOISE = 1e-2
"""Noise variance, relative to the mean of the kernel's diagonal."""


class TooSlow(Exception):
    """A contender has used up its time."""


# Log evidence of regression data under a given prior variance (one) and noise.


@dataclass(frozen=True)
class Problem:
    """A network with one output, data and noise variance."""

    model: nn.Module  # in float32, as it was trained; every contender computes in float64
    X: Tensor  # inputs (n, 5)
    y: Tensor  # targets (n,)
    noise: float  # noise variance of the observations, a hundredth of the kernel's mean diagonal

    @property
    def p(self) -> int:
        return sum(t.numel() for t in self.model.parameters())

    def precise(self) -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
        """A copy of the network, its parameters, inputs, and targets less its outputs, in float64."""
        state = {name: t.detach().double() for name, t in self.model.named_parameters()}
        X = self.X.double()
        with torch.no_grad():
            r = self.y.double() - functional_call(self.model, state, (X,))[:, 0]
        return self.model, state, X, r


def perceptron(h: int) -> nn.Sequential:
    """5 - h - 10 h - h - 1 with ELU: at h = 200 the largest network of Maddox et al. 2021, 803,601 parameters.

    >>> sum(p.numel() for p in perceptron(200).parameters())
    803601
    """
    return mlp(5, h, 10 * h, h, 1, activation=nn.ELU)


def problem(h: int, n: int, device: str) -> Problem:
    """Standard normal inputs, targets a smooth function of them with noise."""
    one = Model(lambda: perceptron(h), (5,))
    model, X = one.build().to(device), one.data(n)
    e = torch.randn(n, generator=torch.Generator().manual_seed(2))
    y = torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * e
    diagonal = linnet.linearize(model).jacobian(X[:1000].to(device), progress=False).gram_diag()
    return Problem(model, X.to(device), y.to(device), NOISE * float(diagonal.mean()))


def by_linnet(given: Problem, solver: str) -> dict[str, float]:
    """As anyone would call it; samples are for predictions, of which there are none here.

    Parameter space holds some ten blocks of p by 18 numbers: of 1e8 parameters only in float32, with few landmarks.
    """
    large = solver == "cg-weight" and given.p > 3e7
    reg = linnet.TangentRegressor(
        given.model,
        prior=1.0,
        noise=given.noise,
        solver=solver,
        dtype="float32" if large else "float64",
        tolerance=TOLERANCE,
        rank=64 if large else "auto",
        samples=1,
        progress=False,
    ).fit(given.X, given.y)
    found = {"log evidence": reg.log_evidence_, "standard error": reg.log_evidence_error_}
    return found if reg.solution_ is None else {**found, "iterations": reg.solution_.iterations}


def by_dense(given: Problem) -> dict[str, float]:
    """All rows of the Jacobian by `vmap(grad)`, then the kernel and torch's Cholesky decomposition."""
    n, p = len(given.y), given.p
    check_fits(8 * (n * p + 3 * n * n) + 2**28, given.X.device)
    model, theta, X, r = given.precise()

    def f(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, theta, (x[None],))[0, 0]

    J = torch.empty(n, p, dtype=torch.float64, device=X.device)
    size = max(1, 2**27 // (8 * p))
    for start in range(0, n, size):
        rows = vmap(grad(f), in_dims=(None, 0))(theta, X[start : start + size])
        J[start : start + size] = torch.cat([t.flatten(1) for t in rows.values()], 1)
    K = J @ J.T
    del J
    K.diagonal().add_(given.noise)
    L = torch.linalg.cholesky(K)
    half = torch.linalg.solve_triangular(L, r[:, None], upper=False)
    log_det = 2 * L.diagonal().log().sum()
    return {"log evidence": -0.5 * float(half.square().sum() + log_det + n * math.log(2 * math.pi))}


def by_published(given: Problem, *, seconds: float, probes: int = 10, steps: int = 20) -> dict[str, float]:
    """The paper's way: linear_operator's conjugate gradients on products ``J (J^T v)`` by forward and reverse mode.

    Ten probes and twenty Lanczos steps for the log determinant are GPyTorch's defaults; the pullback is kept.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        from linear_operator.utils.linear_cg import linear_cg
        from linear_operator.utils.warnings import NumericalWarning
    model, theta, X, r = given.precise()
    n, p, deadline = len(r), given.p, time.perf_counter() + seconds
    # Tangents of the activations, three for each unit, and of the parameters: for so many columns at once.
    units = sum(layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear))
    columns = max(1, 2 ** (34 if X.device.type == "cuda" else 31) // (8 * (3 * n * units + p)))
    products = 0

    def f(theta: dict[str, Tensor]) -> Tensor:
        return functional_call(model, theta, (X,))[:, 0]

    pull = vjp(f, theta)[1]

    def push(tangent: dict[str, Tensor]) -> Tensor:
        return jvp(f, (theta,), (tangent,))[1]

    def product(V: Tensor) -> Tensor:
        nonlocal products
        products += 1
        if time.perf_counter() > deadline:
            raise TooSlow(f"stopped after {products} products in {seconds:.0f} s")
        parts = [vmap(lambda v: push(pull(v)[0]))(part.T) for part in V.split(columns, 1)]
        return torch.cat(parts).T + given.noise * V

    z = torch.randn(n, probes, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(X.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        warnings.filterwarnings("error", category=NumericalWarning)
        try:
            x, T = linear_cg(
                product,
                torch.cat([z, r[:, None]], 1),
                n_tridiag=probes,
                tolerance=TOLERANCE,
                max_iter=1000,
                max_tridiag_iter=steps,
            )
        except NumericalWarning as warning:
            raise ArithmeticError(str(warning).split(".")[0]) from None
    nodes, vectors = torch.linalg.eigh(T)
    each = (vectors[..., 0, :].square() * nodes.clamp_min(1e-30).log()).sum(-1)
    value = -0.5 * float(r @ x[:, -1] + n * each.mean() + n * math.log(2 * math.pi))
    return {"log evidence": value, "iterations": products - 1}


def check_fits(needed: float, device: torch.device) -> None:
    """Raise rather than be killed by the system."""
    free = memory.free_memory(device)
    if needed > 0.95 * free:
        raise MemoryError(f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")


# Fisher-vector products of classifiers of 32 x 32 images.


class AlexNet(nn.Module):
    """Krizhevsky's network in its usual form for 32 x 32 images: five convolutions, one linear layer.

    >>> sum(p.numel() for p in AlexNet().parameters())
    2472266
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b, size, stride, padding, pool in (
            (3, 64, 11, 4, 5, True),
            (64, 192, 5, 1, 2, True),
            (192, 384, 3, 1, 1, False),
            (384, 256, 3, 1, 1, False),
            (256, 256, 3, 1, 1, True),
        ):
            layers += [nn.Conv2d(a, b, size, stride=stride, padding=padding), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if pool else []
        self.features, self.fc = nn.Sequential(*layers), nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).flatten(1))


# A wide residual network of width 1 is a pre-activation one; its depth counts the two convolutions of the shortcuts.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "AlexNet": AlexNet,
    "PreResNet-20": lambda: WideResNet(22, 1),
    "PreResNet-56": lambda: WideResNet(58, 1),
    "PreResNet-110": lambda: WideResNet(112, 1),
    "WRN-16-2": lambda: WideResNet(16, 2),
    "WRN-28-10": lambda: WideResNet(28, 10),
}


def classifier(name: str, n: int, device: str) -> tuple[nn.Module, Tensor]:
    """A network with random weights, whose batch norms have seen the images, and n random images."""
    one = Model(NETWORKS[name], (3, 32, 32))
    model, x = one.build().to(device), one.data(n).to(device)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # the average over all batches, of which there is one
    with torch.no_grad():
        model.train()(x[:128])
    return model.eval(), x


def double_backward(model: nn.Module, x: Tensor, V: Tensor) -> Tensor:
    """The standard implementation: the gradient of <gradient of the KL divergence, v>, for each column v of V (p, k).

    The first gradient and its graph serve all columns.
    """
    parameters = list(model.parameters())
    sizes = [t.numel() for t in parameters]
    with arithmetic("highest", x.device), torch.enable_grad():
        log_p = torch.log_softmax(model(x), 1)
        fixed = log_p.detach()
        divergence = (fixed.exp() * (fixed - log_p)).sum()
        gradient = torch.autograd.grad(divergence, parameters, create_graph=True)
        columns = []
        for j, v in enumerate(V.unbind(1)):
            parts = zip(gradient, v.split(sizes), strict=True)
            along = sum((g.flatten() * part).sum() for g, part in parts)
            found = torch.autograd.grad(along, parameters, retain_graph=j + 1 < V.shape[1])  # type: ignore[arg-type]
            columns.append(torch.cat([t.flatten() for t in found]))
    return torch.stack(columns, 1)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The largest over the columns."""
    value, reference = value.double(), reference.double()
    return float(((value - reference).norm(dim=0) / reference.norm(dim=0)).max())
