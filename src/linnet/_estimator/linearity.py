"""How linear a network is between two sets of weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Linearity:
    """The adapted linear model next to the network with the adapted weights.

    Attributes:
        before: (n, c), the network's outputs at theta0.
        linear: (n, c), those of the linear model at theta0 + delta.
        network: (n, c), those of the network at theta0 + delta.
    """

    before: Tensor
    linear: Tensor
    network: Tensor

    @property
    def by_example(self) -> Tensor:
        """Distance of the two models relative to the length of the step that the linear one makes, (n,)."""
        return (self.network - self.linear).norm(dim=1) / (self.linear - self.before).norm(dim=1)

    @property
    def relative_error(self) -> float:
        """The same over all examples; 0 means linear, 1 that the network does something else altogether."""
        step = float((self.linear - self.before).norm())
        return float((self.network - self.linear).norm()) / step if step > 0 else 0.0

    @property
    def agreement(self) -> float:
        """The share of examples for which both models have the same largest output; for classifiers."""
        if self.linear.shape[1] == 1:
            return float(((self.linear > 0) == (self.network > 0)).double().mean())
        return float((self.linear.argmax(1) == self.network.argmax(1)).double().mean())

    def __repr__(self) -> str:
        return f"Linearity(relative_error={self.relative_error:.3g}, n={len(self.linear)})"
