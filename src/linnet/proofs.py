"""What a chunk of the Jacobian is held against, the first time that the chunk is seen.

Layer rules, forward mode and vectorized rows are fast ways to the numbers that reverse mode defines. A few examples
show which way serves a network. The other examples may still take another branch of it. So each chunk is compared once
with one backward pass through the network, whose seed u (n, c) is random: the pass gives ``J^T u``, and the columns of
the chunk must give the same. Where they do not, the chunk is made again in a slower way.

The outputs of each chunk are compared once with those of some of its examples in another batch, since a row of the
Jacobian means nothing where examples interact or outputs are random.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from linnet.batch import Batch
from linnet.contexts import Precision
from linnet.factors import Factor, Range
from linnet.params import Layout

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest relative disagreement with autodiff that is rounding, by the model's dtype."""


def tolerance_of(dtype: torch.dtype, precision: Precision) -> float:
    """The largest relative disagreement that is rounding, for a network that runs in a precision."""
    if precision == "bf16":
        return max(TOLERANCE[dtype], TOLERANCE[torch.bfloat16])
    if precision in ("high", "products"):  # tf32 has as many bits as float16
        return max(TOLERANCE[dtype], TOLERANCE[torch.float16])
    return TOLERANCE[dtype]


class Disproved(Exception):
    """A way to the Jacobian gave other numbers than reverse mode, or failed; the pass must be made without it.

    Args:
        ability: "forward_mode" or "vectorize".
    """

    def __init__(self, ability: str) -> None:
        super().__init__(ability)
        self.ability = ability


class Rotates(Protocol):
    """A change of the parameters' coordinates."""

    def rows(self, R: Tensor) -> Tensor: ...


def random_signs(*shape: int, seed: int, like: Tensor) -> Tensor:
    """Random numbers of both signs and sizes from 0.5 to 1.5, so that no entry counts for nothing."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    sign = torch.randint(2, shape, generator=generator) * 2 - 1
    return (size * sign).to(like)


@dataclass(frozen=True)
class Truth:
    """``J^T u`` of a chunk by one backward pass through the network.

    Attributes:
        u: The seed, (n, c).
        g: ``J^T u``, (p,).
        layout: Places of the parameters.
        tolerance: Largest relative disagreement that is rounding.
    """

    u: Tensor
    g: Tensor
    layout: Layout
    tolerance: float

    def disagreeing(self, factors: Sequence[Factor], rotation: Rotates | None = None) -> list[str]:
        """Parameters whose columns in the factors, or without a factor their zeros, are not the truth."""
        found = self.g.new_zeros(len(self.g), 1)
        for factor in factors:
            factor.rmatmul(self.u[..., None].to(found), found)
        truth = self.g if rotation is None else rotation.rows(self.g[None])[0]
        return self._different(found[:, 0], truth, self.layout.names)

    def differs_from(self, other: Truth) -> bool:
        """Whether another network has another ``J^T u`` for the same u."""
        return bool(self._different(other.g, self.g, self.layout.names))

    def has_rows(self, ranges: Sequence[Range], parts: Sequence[Tensor]) -> bool:
        """Whether explicit rows, one (n, c, q) tensor for each range, give the truth."""
        found = self.g.new_zeros(len(self.g))
        for (start, stop), part in zip(ranges, parts, strict=True):
            found[start:stop] = torch.einsum("nc,ncq->q", self.u.to(part), part)
        names = [n for n in self.layout.names if any(r[0] == self.layout.slices[n].start for r in ranges)]
        return not self._different(found, self.g, names)

    def has_product(self, ranges: Sequence[Range], V: Tensor, JV: Tensor) -> bool:
        """Whether ``J V`` (n, c, k) over some columns has the right inner product with u: <u, J V r> = <J^T u, V r>."""
        r = random_signs(V.shape[1], seed=1, like=self.g).double()
        along = JV.double() @ r
        expected = sum(((self.g[a:b].double() @ V[a:b].double()) @ r for a, b in ranges), start=r.new_zeros(()))
        error = (self.u.double() * along).sum() - expected
        # Both sides round by about eps of each entry of J V r, with random signs.
        size = max(float(along.norm()), float(expected.abs()) / max(1, self.u.numel()) ** 0.5)
        return float(error.abs()) <= self.tolerance * size or not size

    def _different(self, found: Tensor, truth: Tensor, names: Sequence[str]) -> list[str]:
        parts = [self.layout.slices[name] for name in names]
        errors = torch.stack([(found[s] - truth[s]).norm() for s in parts]).tolist() if parts else []
        sizes = torch.stack([truth[s].norm() for s in parts]).tolist() if parts else []
        # A parameter whose gradient is zero but for rounding is held against the others.
        floor = 1e-3 * max(sizes, default=0.0)
        pairs = zip(names, errors, sizes, strict=True)
        return [name for name, error, size in pairs if not error <= self.tolerance * max(size, floor)]


@dataclass(frozen=True)
class Apart:
    """Outputs of a chunk's examples in other batches.

    Attributes:
        outputs: Places in the chunk, with the outputs of the examples there.
        draws: Whether the network used a random generator of its own.
    """

    outputs: list[tuple[Tensor, Tensor]]
    draws: bool


class Proofs:
    """Which chunks have been compared, and by which way they were made."""

    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()

    def claim(self, way: str, batch: Batch) -> bool:
        """Whether a chunk made in this way is new; from then on it is not."""
        key = (way, *_composition(batch))
        new = key not in self._seen
        self._seen.add(key)
        return new

    def forget(self) -> None:
        """All chunks are new again: a pass broke off, and its claims were not all met."""
        self._seen.clear()


def _composition(batch: Batch) -> tuple[Any, ...]:
    """Which examples a batch holds, in which order."""
    if batch.positions is None:
        return batch.start, batch.n
    positions = batch.positions.cpu().contiguous().numpy()
    return batch.n, hashlib.blake2b(positions.tobytes(), digest_size=16).digest()


class RandomState:
    """The states of the global random generators, to see whether code has drawn from them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._states()

    def _states(self) -> tuple[Any, ...]:
        kind, keys, *rest = np.random.get_state()
        cuda = torch.cuda.get_rng_state(self._device).numpy().tobytes() if self._device.type == "cuda" else b""
        torch_state = torch.get_rng_state().numpy().tobytes()
        return torch_state, cuda, random.getstate(), kind, np.asarray(keys).tobytes(), *rest

    def moved(self) -> bool:
        """Whether a random number has been drawn since."""
        return self._states() != self._before
