"""The jobs of the comparison and their networks; imported on both sides, so it must not import linnet."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from benchmarks.laplace_peer import network as small_network

PACKAGES = {"curvlinops": "curvlinops-for-pytorch", "laplace-torch": "laplace-torch", "gpytorch": "gpytorch"}
"""Peers, and what they are called by pip."""

MODULES = {"curvlinops": "curvlinops", "laplace-torch": "laplace", "gpytorch": "gpytorch"}
"""And what Python imports."""


@dataclass(frozen=True)
class Job:
    """What both sides do, in float64.

    Attributes:
        name: In the table.
        peer: Who else does it.
        task: "product", "diagonal", "laplace" or "gp": a function of `ours` and of `theirs`.
        network: As `network` takes it.
        n: Examples.
        new: Examples that are predicted.
        columns: Of the matrix that the GGN is multiplied with.
        structure: Of the Laplace approximation: "full", "kron" or "diag".
        last_layer: Whether only the last layer has error bars.
        backend: laplace-torch's own, or "BackPackGGN".
        batch: Examples that the peer takes at a time; linnet chooses for itself.
        prior: Variance.
        noise: Variance.
    """

    name: str
    peer: str
    task: str
    network: str | tuple[int, ...]
    n: int
    new: int = 0
    columns: int = 0
    structure: str = ""
    last_layer: bool = False
    backend: str = ""
    batch: int = 100
    prior: float = 0.4
    noise: float = 0.05

    def told(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)

    def quick(self) -> Job:
        """The same with fewer examples."""
        return replace(self, n=min(self.n, 40), new=min(self.new, 10), columns=min(self.columns, 4))


JOBS = (
    Job("GGN product, 1 column", "curvlinops", "product", "digits-cnn", 300, columns=1),
    Job("GGN product, 1 column", "curvlinops", "product", "digits-cnn", 797, columns=1),
    Job("GGN product, 32 columns", "curvlinops", "product", "digits-cnn", 797, columns=32),
    Job("GGN product, 32 columns", "curvlinops", "product", "digits", 797, columns=32),
    Job("GGN diagonal", "laplace-torch", "diagonal", "digits", 300),
    Job("GGN diagonal, by BackPACK", "laplace-torch", "diagonal", "digits", 300, backend="BackPackGGN"),
    Job("GGN diagonal, by BackPACK", "laplace-torch", "diagonal", "digits", 797, backend="BackPackGGN"),
    Job("Laplace, Kronecker factors", "laplace-torch", "laplace", "digits", 797, 50, structure="kron"),
    Job("Laplace, full", "laplace-torch", "laplace", (64, 12, 10), 300, 50, structure="full"),
    Job("Laplace, full", "laplace-torch", "laplace", (64, 16, 10), 797, 50, structure="full"),
    Job("Laplace, last layer, full", "laplace-torch", "laplace", "digits", 797, 50, structure="full", last_layer=True),
    Job("GP with the tangent kernel", "gpytorch", "gp", (64, 64, 64, 1), 700, 200),
    Job("GP with the tangent kernel", "gpytorch", "gp", "number-cnn", 300, 100),
    Job("GP with the tangent kernel", "gpytorch", "gp", "number-cnn", 500, 100),
)
"""Jobs that the two sides do about equally fast come in two sizes."""


def network(name: str | tuple[int, ...] | list[int]) -> nn.Module:
    """Networks of 8 x 8 digits, given as 64 numbers.

    >>> [sum(p.numel() for p in network(name).parameters()) for name in ("digits", "digits-cnn", "number-cnn")]
    [26122, 9930, 38593]
    """
    if name in ("digits-cnn", "number-cnn"):
        width, outputs = (16, 10) if name == "digits-cnn" else (64, 1)
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width if outputs > 1 else width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear((2 * width if outputs > 1 else width) * 16, outputs),
        )
    return small_network(name if isinstance(name, str) else list(name))


def in_words(name: str | tuple[int, ...] | list[int]) -> str:
    """A network in a few words.

    >>> in_words("digits"), in_words((64, 12, 10))
    ('MLP 64-128-128-10', 'MLP 64-12-10')
    """
    if isinstance(name, str):
        return {"digits": "MLP 64-128-128-10", "digits-cnn": "CNN, 10 outputs", "number-cnn": "CNN, 1 output"}[name]
    return "MLP " + "-".join(map(str, name))
