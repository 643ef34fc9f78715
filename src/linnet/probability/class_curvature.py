"""The curvature of a likelihood as weights of the rows of a Jacobian; of many classes without (n, c, c) numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet._common import TEMPORARY
from linnet.linalg import ClassBlocks, as_weight
from linnet.probability.likelihoods import Categorical, Likelihood
from linnet.probability.per_site import Sites


def row_root(likelihood: Likelihood, f: Tensor) -> Any:
    """A root L of the curvature at outputs f (n, c), as operators take it: (n c,), (n, c, c), or `ClassBlocks`.

    >>> row_root(Categorical(), torch.zeros(5, 2)).shape, type(row_root(Categorical(), torch.zeros(1, 5000))).__name__
    (torch.Size([5, 2, 2]), 'ClassBlocks')
    """
    found = _class_blocks(likelihood, f)
    return as_weight(likelihood.root(f)) if found is None else found


def row_curvature(likelihood: Likelihood, f: Tensor) -> Any:
    """The curvature B = L L^T, in the same form."""
    found = _class_blocks(likelihood, f)
    return as_weight(likelihood.curvature(f)) if found is None else found.as_form("curvature")


def _class_blocks(likelihood: Likelihood, f: Tensor) -> ClassBlocks | None:
    """The root by formula, for classes whose blocks would hold many numbers."""
    inner = likelihood.inner if isinstance(likelihood, Sites) else likelihood
    n, c = f.shape
    if not isinstance(inner, Categorical) or n * c * c <= TEMPORARY:
        return None
    logits = likelihood.split(f).flatten(0, 1) if isinstance(likelihood, Sites) else f
    return ClassBlocks(torch.softmax(logits, -1))
