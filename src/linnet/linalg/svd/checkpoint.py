"""The state of a subspace method: saved after each pass, loaded after an interruption."""

from __future__ import annotations

import os
from functools import cached_property

import torch
from torch import Tensor

from linnet._common import Checkpoint
from linnet.linalg.operator import LinearOperator
from linnet.linalg.svd.block_krylov import KrylovSpace


class Resumable:
    """Saves and loads a `KrylovSpace`, with any number of ranks.

    The settings and all that the operator says about itself (`LinearOperator.identity`) must be the same to the bit.
    Numbers computed from the data, such as Fisher statistics, must agree to rounding on a few examples: sums over other
    chunks differ in the last digits.

    Args:
        V: The operator.
        path: The folder; None turns every method into a no-op.
        settings: The settings, in words.
    """

    def __init__(self, V: LinearOperator, path: str | os.PathLike[str] | None, settings: str) -> None:
        self.V = V
        self.checkpoint = Checkpoint(path, kind="low rank", identity=lambda: V.identity(settings), ranks=V.ranks)

    def save(self, state: KrylovSpace) -> None:
        """Replace the saved state."""
        if self.checkpoint.path is None:
            return
        tensors, (n, p) = {"X": state.X, "T": state.T, "probe": self._probe}, self.V.shape
        parts = {f"Q{i}": (Q, p) for i, Q in enumerate(state.Q)} | {f"U{i}": (U, n) for i, U in enumerate(state.U)}
        kept = {name: getattr(state, name) for name in ("passes", "coarse", "rest")}
        self.checkpoint.save(tensors, {"blocks": len(state.Q), **kept}, parts)

    def load(self) -> KrylovSpace | None:
        """The state that was saved last, or None."""
        found = self.checkpoint.load(device=self.V.device)
        if found is None:
            return None
        tensors, meta = found
        probe, here = tensors["probe"], self._probe
        close = 1e-8 if self.V.eps == torch.finfo(torch.float64).eps else 1e-3
        if probe.shape != here.shape or not bool((probe - here).norm() <= close * here.norm()):
            raise ValueError(
                f"{self.checkpoint.path} belongs to another computation: its operator has other rows than this one. "
                "The data or the statistics have changed; remove the folder or name another."
            )
        Q, U = ([tensors[f"{name}{i}"] for i in range(meta["blocks"])] for name in "QU")
        return KrylovSpace(tensors["X"], Q, U, tensors["T"], meta["passes"], meta["coarse"], meta["rest"])

    def remove(self) -> None:
        """Remove the folder."""
        self.checkpoint.remove()

    @cached_property
    def _probe(self) -> Tensor:
        """Products of a few rows of V with one vector."""
        c = self.V.block or 1
        n = self.V.shape[0] // c
        few = self.V.rows(torch.linspace(0, n - 1, min(n, 8)).round().long())
        v = torch.randn(self.V.shape[1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        v = v.to(self.V.device, self.V.dtype)
        return v.new_zeros(0) if few is None else few._matmul(v)[:, 0]
