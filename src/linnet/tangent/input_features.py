r"""Features of the inputs beside the network: an RBF kernel as more columns of the linear model.

.. math:: f(x) = m(x) + J(x) (\theta - \theta_0) + \phi(x)^\top w, \qquad
          \phi(x)^\top \phi(x') \approx \exp\left(-\frac{|z - z'|^2}{2 l^2 d}\right)

z are the d columns of the inputs in units of their standard deviations, at most `FAR` of them, and l is the length
scale. The features are cosines and sines of random projections (Rahimi and Recht 2007), with frequencies from a
scrambled Sobol sequence in place of independent draws. Their inner product is one for equal inputs, and differs from
the RBF kernel by about ``1 / sqrt(FREQUENCIES)`` elsewhere, less with few columns. The features hold no row of the
data, so that forgetting, conditioning and exports are those of any other linear model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linnet.network import output_tensor

FREQUENCIES = 512
"""Two features each. 256 of them lose the gain on sets with eleven or more columns."""

LENGTHS = (0.2, 0.4, 0.8)
"""Length scales that are compared. More of them measured no better on the development half of the scoreboard."""

SHARE = 10.0
"""Variance of the features' part beside the network's average variance, both beforehand. Anything from 1 to 100
measured better than no features; 10 was the one that lost nothing with ten labels."""

COLUMNS = 64
"""Columns of inputs up to which features are considered: of many columns all rows are equally far from each other."""

PER_COLUMN = 2
"""Rows for each column of the inputs up to which features are no candidates: so few rows do not tell length scales
apart. On the development sets of `experiments.calibration.coverage` they cost 0.09 nats with five rows."""

ROWS = 1024
"""Observations up to which features are considered: each length scale takes one more decomposition of the kernel."""

FAR = 32.0
"""Standard deviations from the mean beyond which a column is taken to be there: no row is farther from the mean of
`ROWS` rows, itself among them. Rounding of the phases of farther rows would depend on their batch."""

PREFIX, NAME = "network.", "input_features"


class InputFeatures(nn.Module):
    """Cosines and sines of projections of the inputs, (n, 2 m).

    Args:
        center: (d,), the means of the inputs.
        spread: (d,), their standard deviations.
        frequencies: (m, d), for inputs in these units.
        length: The length scale, in standard deviations of the inputs times the root of d.

    Example:
        >>> features = InputFeatures(torch.zeros(2), torch.ones(2), torch.randn(8, 2), 1.0)
        >>> phi = features(torch.randn(5, 2))
        >>> phi.shape, bool(torch.allclose(phi.square().sum(1), torch.ones(5)))
        (torch.Size([5, 16]), True)
    """

    center: Tensor
    spread: Tensor
    frequencies: Tensor

    def __init__(self, center: Tensor, spread: Tensor, frequencies: Tensor, length: float) -> None:
        super().__init__()
        self.register_buffer("center", center)
        self.register_buffer("spread", spread)
        self.register_buffer("frequencies", frequencies)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        z = ((x.to(self.center.dtype) - self.center) / self.spread).clamp(-FAR, FAR)
        phase = z @ self.frequencies.T
        return torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(len(self.frequencies))


class NetworkWithInputs(nn.Module):
    """A network plus a linear layer of features of its input; the weights of that layer are zero.

    Args:
        network: A network of one input (n, d).
        features: The features.
        outputs: The number of outputs.
        output: Reads what the network returns; None for a tensor.
    """

    def __init__(
        self,
        network: nn.Module,
        features: InputFeatures,
        outputs: int,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        center, count = features.center, 2 * len(features.frequencies)
        self.network, self.features, self.output = network, features, output
        layer = nn.utils.skip_init(nn.Linear, count, outputs, bias=False, dtype=center.dtype, device=center.device)
        nn.init.zeros_(layer.weight)
        self.input_features = layer
        self.train(network.training)

    @property
    def wrapped_forward(self) -> Callable[..., Any]:
        """The forward whose arguments this forward takes. Data is bound to them."""
        return self.network.forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raw = self.network(*args, **kwargs)
        f = output_tensor(raw) if self.output is None else self.output(raw)
        (x,) = (*args, *kwargs.values())
        return f + self.input_features(self.features(x)).view_as(f)


def own_name(name: str) -> str:
    """The name of a parameter or layer in the user's network; that of the features stays.

    >>> own_name("network.0.weight"), own_name("input_features.weight")
    ('0.weight', 'input_features.weight')
    """
    return name.removeprefix(PREFIX)


def propose_features(X: Tensor, weight: Tensor | None, *, dtype: torch.dtype, seed: int) -> list[InputFeatures]:
    """Features of inputs (n, d), for each of `LENGTHS`.

    Args:
        X: The inputs.
        weight: How many times each of them counts, (n,); None for once.
        dtype: Of the network.
        seed: Of the frequencies.
    """
    X, d = X.double(), X.shape[1]
    w = torch.ones(len(X)).to(X) if weight is None else weight.to(X)
    w = w / w.sum()
    center = w @ X
    spread = (w @ (X - center).square()).sqrt()
    eps = torch.finfo(torch.float64).eps
    # A column that is constant but for rounding stays in its own units.
    rounding = (len(X) * eps + 4 * torch.finfo(dtype).eps) * X.abs().amax(0)
    spread = torch.where(spread > rounding, spread, 1.0)
    uniform = torch.quasirandom.SobolEngine(d, scramble=True, seed=seed).draw(FREQUENCIES, dtype=torch.float64)
    normal = torch.special.ndtri(uniform.clamp(eps, 1 - eps)).to(X.device)
    return [
        InputFeatures(center.to(dtype), spread.to(dtype), (normal / (length * math.sqrt(d))).to(dtype), length)
        for length in LENGTHS
    ]
