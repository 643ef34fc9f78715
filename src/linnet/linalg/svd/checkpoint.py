"""The state of a subspace method in a file: saved after each pass, loaded after an interruption."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property

import torch
from torch import Tensor

from linnet._common import files
from linnet.linalg.operator import LinearOperator
from linnet.linalg.svd.block_krylov import KrylovSpace


class Resumable:
    """Saves and loads a `KrylovSpace`; one rank writes, all ranks read.

    The settings and all that the operator says about itself (`LinearOperator.fingerprint` and
    `LinearOperator.checksums`) must be the same to the bit. Numbers computed from the data, such as Fisher statistics,
    must agree to rounding on a few examples: sums over other chunks differ in the last digits.

    Args:
        V: The operator.
        path: The file; None turns every method into a no-op.
        identity: The settings, in words.
    """

    def __init__(self, V: LinearOperator, path: str | os.PathLike[str] | None, identity: str) -> None:
        self.V, self.writes = V, path is not None and V.ranks.rank == 0
        mark = "" if path is None else f"{identity} {V.shape} {V.dtype} {V.fingerprint()}"
        self.file = files.Checkpoint(path, kind="low rank", fingerprint=hashlib.sha256(mark.encode()).hexdigest())

    def save(self, state: KrylovSpace) -> None:
        """Replace the saved state."""
        if self.file.path is None:
            return
        probe, codes = self._probe, self._checksums  # by all ranks
        if self.writes:
            tensors = {"X": state.X, "T": state.T, "probe": probe}
            tensors |= {f"Q{i}": Q for i, Q in enumerate(state.Q)} | {f"U{i}": U for i, U in enumerate(state.U)}
            kept = {name: getattr(state, name) for name in ("passes", "coarse", "rest")}
            self.file.save(tensors, {"blocks": len(state.Q), **kept, "codes": codes})

    def load(self) -> KrylovSpace | None:
        """The state that was saved last, or None."""
        found = self.file.load(device=self.V.device)
        self._agree(found is not None)
        if found is None:
            return None
        tensors, meta = found
        for name, code in meta.get("codes", {}).items():  # files of older versions have none
            if code != self._checksums.get(name):
                raise ValueError(
                    f"{self.file.path} belongs to another computation: {name} have changed since it was written, "
                    "if only in one number. Remove the file or name another."
                )
        probe, here = tensors["probe"], self._probe
        close = 1e-8 if self.V.eps == torch.finfo(torch.float64).eps else 1e-3
        if probe.shape != here.shape or not bool((probe - here).norm() <= close * here.norm()):
            raise ValueError(
                f"{self.file.path} belongs to another computation: its operator has other rows than this one. The data "
                "or the statistics have changed; remove the file or name another."
            )
        Q, U = ([tensors[f"{name}{i}"] for i in range(meta["blocks"])] for name in "QU")
        return KrylovSpace(tensors["X"], Q, U, tensors["T"], meta["passes"], meta["coarse"], meta["rest"])

    def remove(self) -> None:
        """Remove the file."""
        if self.writes:
            self.file.remove()

    @cached_property
    def _probe(self) -> Tensor:
        """Products of a few rows of V with one vector."""
        c = self.V.block or 1
        n = self.V.shape[0] // c
        few = self.V.rows(torch.linspace(0, n - 1, min(n, 8)).round().long())
        v = torch.randn(self.V.shape[1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        v = v.to(self.V.device, self.V.dtype)
        return v.new_zeros(0) if few is None else few._matmul(v)[:, 0]

    @cached_property
    def _checksums(self) -> dict[str, str]:
        return self.V.checksums()

    def _agree(self, found: bool) -> None:
        """Raise on all ranks if only some have found the file."""
        count, world = self.V.ranks.count(found), self.V.ranks.world
        if count not in (0, world):
            raise FileNotFoundError(
                f"{count} of {world} ranks find the checkpoint {self.file.path}. Put it where all of them see it."
            )
