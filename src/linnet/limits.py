r"""Kernels of infinitely wide fully connected networks, in closed form, as a GPyTorch kernel.

A network with L hidden layers, weights from :math:`N(0, \sigma_w^2 / \text{fan-in})` and biases from
:math:`N(0, \sigma_b^2)` becomes, as its layers widen, a Gaussian process with the NNGP kernel :math:`K^L` (Neal 1996;
de G. Matthews et al. 2018; Lee et al. 2018). The linearized network, with the same variances as its prior, has the NTK
:math:`\Theta^L` (Jacot et al. 2018):

.. math:: K^0 = \Theta^0 = \sigma_b^2 + \sigma_w^2 \, x^\top x' / d, \qquad
          K^l = \sigma_b^2 + \sigma_w^2 \, \mathrm{E}[\phi(u) \phi(v)], \qquad
          \Theta^l = K^l + \sigma_w^2 \, \mathrm{E}[\phi'(u) \phi'(v)] \, \Theta^{l-1}

with (u, v) normal of covariance :math:`K^{l-1}`. The expectations are the arc-cosine kernels for ReLU (Cho and Saul
2009) and the arcsine kernel for erf (Williams 1997). :math:`K^L` is the limit of the kernel of the last layer's
Jacobian, and :math:`\Theta^L` the limit of the kernel of the whole Jacobian.

Importing this module imports GPyTorch; linnet itself does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from linnet._common import needs_extra, without_scripting_warnings
from linnet.jacobian import Linearization

with needs_extra("gpytorch", "linnet.limits"), without_scripting_warnings():
    from gpytorch.constraints import Positive
    from gpytorch.kernels import Kernel

__all__ = ["InfiniteWidth", "infinite_width"]

Activation = Literal["relu", "erf"]
Limit = Literal["ntk", "nngp"]
Expectations = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the covariance c of u and v and their variances a, b to ``E[phi(u) phi(v)]`` and ``E[phi'(u) phi'(v)]``."""


def infinite_width(
    x1: Tensor,
    x2: Tensor,
    *,
    depth: int,
    activation: Activation = "relu",
    kernel: Limit = "ntk",
    weight_variance: float | Tensor = 2.0,
    bias_variance: float | Tensor = 0.0,
    diag: bool = False,
) -> Tensor:
    """The kernel of inputs (..., n, d) and (..., m, d): (..., n, m), or the diagonal (..., n) where n = m.

    The kernel is differentiable in all tensors. The ReLU NTK has a cusp where two inputs are parallel; the infinite
    part of its gradient there is left out.

    Args:
        x1: The first inputs.
        x2: The second inputs.
        depth: Number of hidden layers.
        activation: "relu" or "erf".
        kernel: "ntk" or "nngp".
        weight_variance: Variance of the weights, before division by the fan-in; a tensor broadcasts against the result.
        bias_variance: Variance of the biases.
        diag: Whether to take only x1[i] with x2[i].

    Example:
        >>> x = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> infinite_width(x, x, depth=1, kernel="nngp")
        tensor([[2.0000, 0.6366],
                [0.6366, 2.0000]])
        >>> infinite_width(x, x, depth=1, diag=True)
        tensor([4., 4.])
    """
    _check_options(depth, activation, kernel)
    d = x1.shape[-1]
    if x2.shape[-1] != d or x1.ndim < 2 or x2.ndim < 2 or (diag and x1.shape[-2] != x2.shape[-2]):
        raise ValueError(
            f"A kernel needs inputs (..., n, d) and (..., m, d), with n = m for a diagonal; got {tuple(x1.shape)} and "
            f"{tuple(x2.shape)}."
        )
    inner = (x1 * x2).sum(-1) if diag else x1 @ x2.mT
    a, b = (x.square().sum(-1) for x in (x1, x2))
    if not diag:
        a, b = a[..., :, None], b[..., None, :]
        if x1 is x2 or (x1.shape == x2.shape and torch.equal(x1, x2)):
            # The product rounds otherwise than the sums. Only the value changes; the gradient is that of the product.
            eye = torch.eye(x1.shape[-2], dtype=x1.dtype, device=x1.device)
            inner = inner + eye * (a - inner).detach()
    c, a, b = (bias_variance + weight_variance * value / d for value in (inner, a, b))
    expectations = _EXPECTATIONS[activation]
    theta = c
    for _ in range(depth):
        value, slope = expectations(c, a, b)
        c = bias_variance + weight_variance * value
        theta = c + weight_variance * slope * theta
        a, b = (bias_variance + weight_variance * expectations(q, q, q)[0] for q in (a, b))
    return theta if kernel == "ntk" else c


class InfiniteWidth(Kernel):
    r"""The kernel of an infinitely wide network for any GPyTorch model; see `infinite_width`.

    The two variances are hyperparameters, trained with the rest of the Gaussian process. A bias variance of zero stays
    zero: such a network has no biases.

    Args:
        depth: Number of hidden layers, at least 0.
        activation: "relu" or "erf".
        kernel: "ntk", the limit of the tangent kernel, or "nngp", the limit of the network's own covariance and of the
            tangent kernel of its last layer.
        weight_variance: :math:`\sigma_w^2`; 2 keeps the variances of a ReLU network from layer to layer.
        bias_variance: :math:`\sigma_b^2`.
        batch_shape: Batch shape of the GPyTorch kernel: one pair of variances for each entry.
        active_dims: Columns of the inputs that the GPyTorch kernel reads.

    Example:
        >>> kernel = InfiniteWidth(2, "erf", bias_variance=0.1)
        >>> kernel(torch.eye(3), torch.zeros(5, 3)).shape
        torch.Size([3, 5])
    """

    def __init__(
        self,
        depth: int,
        activation: Activation = "relu",
        *,
        kernel: Limit = "ntk",
        weight_variance: float = 2.0,
        bias_variance: float = 0.0,
        batch_shape: torch.Size | None = None,
        active_dims: tuple[int, ...] | None = None,
    ) -> None:
        _check_options(depth, activation, kernel)
        if not (0 < weight_variance < math.inf and 0 <= bias_variance < math.inf):
            raise ValueError(
                "weight_variance must be positive and bias_variance not negative, both finite; got "
                f"{weight_variance!r} and {bias_variance!r}."
            )
        super().__init__(batch_shape=batch_shape, active_dims=active_dims)
        self.depth, self.activation, self.kernel = depth, activation, kernel
        shape = (*self.batch_shape, 1, 1)
        for name, value in (("weight_variance", weight_variance), ("bias_variance", bias_variance)):
            if value > 0:
                constraint = Positive()
                raw = constraint.inverse_transform(torch.full(shape, float(value)))
                self.register_parameter(f"raw_{name}", nn.Parameter(raw))
                self.register_constraint(f"raw_{name}", constraint)

    @property
    def is_stationary(self) -> bool:
        return False

    @property
    def weight_variance(self) -> Tensor:
        """(*batch_shape, 1, 1)."""
        return self.raw_weight_variance_constraint.transform(self.raw_weight_variance)

    @property
    def bias_variance(self) -> Tensor:
        """(*batch_shape, 1, 1); zero where the network has no biases."""
        if not hasattr(self, "raw_bias_variance"):
            return torch.zeros_like(self.raw_weight_variance)
        return self.raw_bias_variance_constraint.transform(self.raw_bias_variance)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        """The kernel of inputs (..., n, d) and (..., m, d), or its diagonal.

        Args:
            x1: The first inputs.
            x2: The second inputs; as many as the first for a diagonal.
            diag: Whether to give only the diagonal.
            last_dim_is_batch: Not supported: the network takes all d numbers.
            params: None are known.
        """
        if last_dim_is_batch:
            raise NotImplementedError("InfiniteWidth reads all numbers of an input: it has no last_dim_is_batch.")
        weight, bias = self.weight_variance, self.bias_variance
        return infinite_width(
            x1,
            x2,
            depth=self.depth,
            activation=self.activation,
            kernel=self.kernel,
            weight_variance=weight[..., 0] if diag else weight,
            bias_variance=bias[..., 0] if diag else bias,
            diag=diag,
        )

    # Networks of finite width.

    def network(self, d: int, width: int, *, outputs: int = 1, seed: int = 0) -> nn.Sequential:
        """A network whose kernel comes close to this one as its width grows, in this kernel's dtype.

        Args:
            d: Length of an input.
            width: Width of each hidden layer.
            outputs: Number of outputs c.
            seed: Seed of the weights.

        Example:
            >>> InfiniteWidth(1, "relu").network(3, 100)
            Sequential(
              (0): Linear(in_features=3, out_features=100, bias=False)
              (1): ReLU()
              (2): Linear(in_features=100, out_features=1, bias=False)
            )
        """
        weight, bias = self._read_variances()
        generator = torch.Generator().manual_seed(seed)
        like = {"dtype": self.raw_weight_variance.dtype, "device": self.raw_weight_variance.device}
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise([d, *[width] * self.depth, outputs]):
            linear = nn.utils.skip_init(nn.Linear, a, b, bias=bias > 0, **like)
            for tensor, variance in ((linear.weight, weight / a), (linear.bias, bias)):
                if tensor is not None:
                    drawn = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
                    tensor.data.copy_(math.sqrt(variance) * drawn)
            layers += [linear, nn.ReLU() if self.activation == "relu" else Erf()]
        return nn.Sequential(*layers[:-1])

    def prior(self, lin: Linearization) -> Tensor:
        """The variances S (p,) for which the tangent kernel ``J S J^T`` of such a network has this limit.

        Args:
            lin: The linearized network. With ``params`` of its last layer only, the limit is the NNGP kernel.
        """
        weight, bias = self._read_variances()
        parts = [
            torch.full((math.prod(shape),), weight / shape[1] if len(shape) == 2 else bias)
            for shape in lin.layout.shapes.values()
        ]
        return torch.cat(parts).to(dtype=lin.dtype, device=lin.device)

    def _read_variances(self) -> tuple[float, float]:
        if self.batch_shape.numel() != 1:
            raise ValueError(f"A network has one pair of variances; this kernel has batch shape {self.batch_shape}.")
        return float(self.weight_variance.detach()), float(self.bias_variance.detach())


class Erf(nn.Module):
    """The error function, an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


# Expectations.


def _expect_relu(c: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""The arc-cosine kernels of order one and zero, with t the angle between u and v.

    .. math:: \frac{\sqrt{ab}}{2\pi} (\sin t + (\pi - t) \cos t), \qquad \frac{\pi - t}{2\pi}
    """
    square = a * b - c * c
    # Inputs that are parallel up to rounding have a branch of their own: the derivative of the root is infinite there.
    apart = square > 4 * torch.finfo(c.dtype).eps * a * b
    sine = torch.where(apart, square, 1.0).sqrt()
    angle = torch.atan2(sine, c)
    flat = c > 0  # t is zero or pi
    value = torch.where(apart, (sine + c * (math.pi - angle)) / (2 * math.pi), torch.where(flat, c / 2, 0.0 * c))
    slope = torch.where(apart, (math.pi - angle) / (2 * math.pi), torch.where(flat, 0.5, 0.0))
    return value, slope


def _expect_erf(c: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`\frac2\pi \arcsin \frac{2c}{\sqrt{(1 + 2a)(1 + 2b)}}` and its derivative in c."""
    # (1 + 2 a) (1 + 2 b) - 4 c^2, without the cancellation of the large squares.
    rest = 1 + 2 * (a + b) + 4 * (a * b - c * c)
    value = 2 / math.pi * torch.atan2(2 * c, rest.sqrt())
    return value, 4 / math.pi * rest.rsqrt()


_EXPECTATIONS: dict[str, Expectations] = {"relu": _expect_relu, "erf": _expect_erf}


def _check_options(depth: int, activation: str, kernel: str) -> None:
    if not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth is the number of hidden layers, 0 or more; got {depth!r}.")
    if activation not in _EXPECTATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, _EXPECTATIONS))}; got {activation!r}.")
    if kernel not in get_args(Limit):
        raise ValueError(f"kernel must be one of {', '.join(map(repr, get_args(Limit)))}; got {kernel!r}.")
