"""The curvature of a likelihood as weights of the rows of a Jacobian; of many classes without (n, c, c) numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet._common import TEMPORARY
from linnet.linalg import ClassBlocks, as_weight
from linnet.probability.likelihoods import Categorical, Likelihood, Weighted, without_weights
from linnet.probability.per_site import Sites


def row_root(likelihood: Likelihood, f: Tensor, y: Tensor | None = None, *, most: int | None = None) -> Any:
    """A root L of the curvature at outputs f (n, c), as operators take it: (n c,), (n, c, c), or `ClassBlocks`.

    The curvature is that of the targets y; without y it is the Fisher information. Blocks of classes with more than
    ``most`` numbers, or than a temporary may have, are `ClassBlocks`.

    >>> row_root(Categorical(), torch.zeros(5, 2)).shape, type(row_root(Categorical(), torch.zeros(1, 5000))).__name__
    (torch.Size([5, 2, 2]), 'ClassBlocks')
    """
    found = _class_blocks(likelihood, f, y, most)
    if found is None:
        return as_weight(likelihood.root(f) if y is None else likelihood.observed_root(f, y))
    return found


def row_curvature(likelihood: Likelihood, f: Tensor, y: Tensor | None = None, *, most: int | None = None) -> Any:
    """The curvature B = L L^T, in the same form."""
    found = _class_blocks(likelihood, f, y, most)
    if found is None:
        return as_weight(likelihood.curvature(f) if y is None else likelihood.observed_curvature(f, y))
    return found.as_form("curvature")


def _class_blocks(likelihood: Likelihood, f: Tensor, y: Tensor | None, most: int | None) -> ClassBlocks | None:
    """The root by formula, for classes whose blocks would hold many numbers."""
    sites = without_weights(likelihood)
    inner = sites.inner if isinstance(sites, Sites) else sites
    n, c = f.shape
    if not isinstance(inner, Categorical) or n * c * c <= (TEMPORARY if most is None else most):
        return None
    logits = sites.split(f).flatten(0, 1) if isinstance(sites, Sites) else f
    found = ClassBlocks(torch.softmax(logits, -1))
    if y is None:
        return found
    y, w = likelihood.split(y) if isinstance(likelihood, Weighted) else (y, None)
    count = len(found) // n
    if w is not None:
        found = found * w.sqrt().repeat_interleave(count)
    kept = sites.is_kept(y) if isinstance(sites, Sites) else None
    return found if kept is None else found * kept.flatten().to(found.pi)
