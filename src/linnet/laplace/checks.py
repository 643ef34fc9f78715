"""What `linnet.Laplace` checks of its options and of a likelihood's curvature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from linnet._common import messages
from linnet._common.memory import check_fits, dense_budget
from linnet.network import checks
from linnet.probability.likelihoods import Likelihood
from linnet.probability.priors import check_prior

if TYPE_CHECKING:
    from linnet.jacobian.jacobian import Jacobian
    from linnet.laplace.estimator import Laplace

StructureName = Literal["auto", "full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]


def check_options(la: Laplace) -> None:
    """Raise unless all options are of their kinds."""
    checks.check_module(la.model)
    check_prior(la.prior)
    if la.structure not in get_args(StructureName):
        known = ", ".join(map(repr, get_args(StructureName)))
        raise ValueError(f"structure must be one of {known}; got {la.structure!r}.")
    kinds = ("classification", "regression", "heteroscedastic")
    if not isinstance(la.likelihood, Likelihood) and la.likelihood not in kinds:
        raise ValueError(
            f"likelihood must be one of {', '.join(map(repr, kinds))} or a linnet.likelihoods.Likelihood; got "
            f"{la.likelihood!r}."
        )
    if la.noise is not None and la.likelihood != "regression":
        raise ValueError(f"noise= belongs to likelihood='regression'; got likelihood={la.likelihood!r}.")
    if isinstance(la.noise, str) and la.noise not in ("evidence", "per-output"):
        raise ValueError(f"noise must be 'evidence', 'per-output' or variances; got {la.noise!r}.")
    for name in ("rank", "size", "samples"):
        value = getattr(la, name)
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a positive number; got {value!r}.")
    if la.draws is not None and (not isinstance(la.draws, int) or la.draws < 1):
        raise ValueError(f"draws must be None or a positive number; got {la.draws!r}.")
    messages.check_memory(la.memory)
    messages.check_seed(la.seed)
    if not la.tolerance > 0:
        raise ValueError(f"tolerance must be positive; got {la.tolerance!r}.")
    if isinstance(la.dtype, str) and la.dtype not in ("auto", "float32", "float64"):
        raise ValueError(f"dtype must be 'auto', 'float32' or 'float64'; got {la.dtype!r}.")


def check_structure_fits(la: Laplace, J: Jacobian) -> None:
    """Raise where the dense matrices of the structure that was asked for do not fit memory."""
    n, c, p = J.n, J.c, J.shape[1]
    kernels = len(J.lin.layout.layers) + 1 if la.prior == "layerwise" else 1
    sides = {  # of the square matrices, and how many of them there are at once
        "full": (p, 4),
        "function": (n * (la.draws or c), 2 + kernels),
        "subnetwork": (min(la.size, p), 4),
    }
    if la.structure in sides:
        side, count = sides[la.structure]
        check_fits(
            count * side**2 * J.dtype.itemsize,
            la.memory,
            J.device,
            what=f"structure={la.structure!r} with {n:,} examples, {c:,} outputs and {p:,} parameters",
            instead="Use structure='samples', 'kron' or 'diag', or fewer parameters (params=)",
        )


def check_curvature(unit: Likelihood, f: Tensor, memory: float | str) -> None:
    """Raise where the curvature of all examples does not fit memory, or is none."""
    n, c = f.shape
    size, limit = 3 * n * c * c * f.element_size(), dense_budget(memory, f.device)
    if not unit.diagonal and size > limit:
        raise MemoryError(
            f"The curvature of {n:,} examples with {c:,} outputs takes {size / 2**30:.1f} GiB, and there are "
            f"{limit / 2**30:.1f} GiB. Draw the Fisher information instead, with draws=1 or a few, or allow more "
            "with memory=."
        )
    few = f[:256]
    root, B = unit.root(few), unit.curvature(few)
    found = root.square() if root.ndim == 2 else root @ root.mT
    if not torch.allclose(found, B, rtol=1e-3, atol=1e-5 * float(B.abs().max())):
        raise ValueError(
            f"The curvature of {unit!r} is not positive semi-definite: its root times itself is something "
            "else. Use the Fisher information in place of the second derivative."
        )
