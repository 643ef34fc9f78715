"""Proofs of a chunk of the Jacobian: comparisons that are made the first time that the chunk is seen.

Layer rules, forward mode and vectorized rows are fast ways to the numbers that reverse mode defines. A few examples
show which way serves a network. The other examples may still take another branch of it. So each chunk is compared once
with one backward pass through the network, whose seed u (n, c) is random: the pass gives ``J^T u``, and the columns of
the chunk must give the same. Where they do not, the chunk is made again in a slower way.

A row of the Jacobian means nothing where examples interact or outputs are random. So some examples of each chunk, all
of them where the chunk is small, are run once more in another batch. Their outputs, and ``J^T u`` for a u that is zero
for the others, must be the same. Where they are not, the network is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from linnet.network import coarser

if TYPE_CHECKING:
    from linnet._common import Precision
    from linnet.jacobian.blocks.base import ColumnBlock, Range
    from linnet.network import Layout

PROBE = 3
"""Examples on which the rules are checked."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest relative disagreement with autodiff that is rounding, by the model's dtype."""


def rounds_to(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    """The dtype with the fewest digits of a network with that dtype that runs in a precision."""
    if precision == "bf16":
        return coarser(dtype, torch.bfloat16)
    if precision in ("high", "products"):  # tf32 has as many bits as float16
        return coarser(dtype, torch.float16)
    return dtype


class Rotates(Protocol):
    """A change of the parameters' coordinates."""

    def rows(self, R: Tensor) -> Tensor: ...


def random_signs(*shape: int, seed: int, like: Tensor) -> Tensor:
    """Random numbers of both signs and sizes from 0.5 to 1.5, so that no entry counts for nothing."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    sign = torch.randint(2, shape, generator=generator) * 2 - 1
    return (size * sign).to(like, non_blocking=like.is_cuda)


@dataclass(frozen=True)
class Truth:
    """``J^T u`` of a chunk by reverse mode, for a few u.

    Attributes:
        U: The seeds, (n, c, m).
        G: ``J^T U``, (p, m).
        layout: Places of the parameters.
        tolerances: Largest relative disagreement that is rounding, for each of the m.
        eps: Relative rounding of one number in the passes.
        natural: A size that gradients have where nothing cancels: outputs over parameters.
    """

    U: Tensor
    G: Tensor
    layout: Layout
    tolerances: tuple[float, ...]
    eps: float
    natural: Tensor

    @property
    def judges(self) -> bool:
        """Whether the gradients are numbers that others can be compared with."""
        return bool(self.G.isfinite().all())

    def beside(self, other: Truth) -> Truth:
        """Both, one beside the other."""
        U, G = torch.cat([self.U, other.U], 2), torch.cat([self.G, other.G], 1)
        return replace(self, U=U, G=G, tolerances=self.tolerances + other.tolerances)

    def disagreeing(self, blocks: Sequence[ColumnBlock], rotation: Rotates | None = None) -> list[set[str]]:
        """Parameters whose columns in the blocks, or without a block their zeros, are not the truth; for each u."""
        found = torch.zeros_like(self.G)
        for block in blocks:
            block.in_dtype(found.dtype).rmatmul(self.U, found)
        return self.different(found, self.G if rotation is None else rotation.rows(self.G.T).T)

    def has_rows(self, ranges: Sequence[Range], parts: Sequence[Tensor]) -> list[bool]:
        """Whether explicit rows, one (n, c, q) tensor for each range, give the truth; for each u."""
        found = self.G.clone()
        for (start, stop), part in zip(ranges, parts, strict=True):
            found[start:stop] = part.flatten(0, 1).T @ self.U.to(part).flatten(0, 1)
        return [not names for names in self.different(found)]

    def has_product(self, ranges: Sequence[Range], V: Tensor, JV: Tensor) -> list[bool]:
        """Whether ``J V`` (n, c, k) over some columns has <u, J V r> = <J^T u, V r> for a random r; for each u."""
        r = random_signs(V.shape[1], seed=1, like=self.G).double()
        along, U = JV.double() @ r, self.U.double()
        expected = sum((self.G[a:b].double().T @ (V[a:b].double() @ r) for a, b in ranges), start=r.new_zeros(()))
        errors = (torch.einsum("nc,ncm->m", along, U) - expected).abs().tolist()
        # Both sides round by about eps of each entry of J V r, with random signs.
        sizes = (along[..., None] * U).flatten(0, 1).norm(dim=0)
        least = expected.abs() / max(1, along.numel()) ** 0.5 + self.natural * torch.finfo(JV.dtype).eps
        bounds = torch.maximum(sizes, least).tolist()
        known = expected.isfinite().tolist()  # else V is not finite, and nothing can be said
        return [
            e <= t * size or not judged
            for e, t, size, judged in zip(errors, self.tolerances, bounds, known, strict=True)
        ]

    def different(self, found: Tensor, truth: Tensor | None = None) -> list[set[str]]:
        """Parameters for which other gradients (p, m) are not the truth; for each u."""
        truth = self.G if truth is None else truth
        slices = self.layout.slices
        errors = torch.stack([(found[s] - truth[s]).norm(dim=0) for s in slices.values()])
        sizes = torch.stack([truth[s].norm(dim=0) for s in slices.values()])
        # A parameter whose gradient is zero but for rounding is held against the others, or against the outputs.
        biggest = sizes.amax(0).clamp(min=self.natural)
        bounds = torch.maximum(sizes, 1e-3 * biggest) * errors.new_tensor(self.tolerances)
        wrong = ~(errors <= torch.maximum(bounds, 2 * self.eps * biggest))  # what is not a number is wrong
        return [{name for name, bad in zip(slices, column, strict=True) if bad} for column in wrong.T.tolist()]


@dataclass(frozen=True)
class OtherBatches:
    """Examples of a chunk in other batches.

    Attributes:
        outputs: Places in the chunk, with the outputs of the examples there.
        truth: ``J^T u`` of those examples; None where nobody asked for that.
        draws: Whether the network used a random generator of its own.
    """

    outputs: list[tuple[Tensor, Tensor]]
    truth: Truth | None
    draws: bool


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
