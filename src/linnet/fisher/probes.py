r"""What embeddings E (n, k) of examples are good for: linear probes, examples of a component, spectra.

Embeddings are tensors or arrays, as `linnet.FisherEmbedding` gives them. Their kernel is :math:`K = E E^\top`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from linnet._estimator import convert_like

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline


def linear_probe(E: Any, y: Any, *, C: float = 1.0, iterations: int = 1000) -> Pipeline:
    """Logistic regression on standardized embeddings, fitted: a scikit-learn pipeline with ``predict`` and ``score``.

    Args:
        E: Embeddings (n, k).
        y: Labels (n,).
        C: Inverse strength of the ridge penalty.
        iterations: Limit of the solver, which warns when it reaches the limit.

    Example:
        >>> E = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> linear_probe(E, [0, 0, 1, 1]).score(E, [0, 0, 1, 1])
        1.0
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    E, y = as_arrays(E, y)
    return make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=iterations)).fit(E, y)


def as_arrays(E: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and labels as arrays (n, k) and (n,)."""
    X = _as_array(E)
    labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if X.ndim != 2 or labels.shape != (len(X),):
        raise ValueError(f"A probe needs embeddings (n, k) and labels (n,); got {X.shape} and {labels.shape}.")
    return X, labels


def kernel_features(K: Any, *others: Any, tolerance: float = 1e-10) -> tuple[Any, ...]:
    r"""Features whose inner products are a kernel: a linear probe on them is one on all p Fisher scores at once.

    .. math:: K = U \Lambda U^\top, \qquad E = U \Lambda^{1/2}, \qquad E_* = K_* U \Lambda^{-1/2}

    Args:
        K: Kernel (n, n) of the examples to learn from, as `linnet.FisherEmbedding.gram` gives it.
        others: Kernels (m, n) of other examples with them.
        tolerance: Eigenvalues below this share of the largest are rounding, and are left out.

    Returns:
        The features (n, r), by descending eigenvalue, and the features (m, r) of the other examples.

    Example:
        >>> X = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 1.0]])
        >>> E, F = kernel_features(X @ X.T, X[:1] @ X.T)
        >>> torch.allclose(E @ E.T, (X @ X.T).double()), E.shape, torch.allclose(F, E[:1])
        (True, torch.Size([3, 2]), True)
    """
    k = torch.as_tensor(K).double()
    if k.ndim != 2 or k.shape[0] != k.shape[1] or any(o.shape[1:] != k.shape[1:] for o in others):
        shapes = [tuple(o.shape) for o in (K, *others)]
        raise ValueError(f"kernel_features needs a kernel (n, n), and others (m, n); got {shapes}.")
    values, U = torch.linalg.eigh((k + k.T) / 2)
    values, U = values.flip(0), U.flip(1)
    kept = values > tolerance * values[0]
    root, U = values[kept].sqrt(), U[:, kept]
    rest = (torch.as_tensor(other).to(U) @ U / root for other in others)
    return tuple(convert_like(K, t) for t in (U * root, *rest))


def top_projections(E: Any, count: int = 8, *, sign: str = "both") -> Any:
    """The examples with the largest projections on each component: positions (k, count), largest first.

    Args:
        E: Embeddings (n, k).
        count: Number of examples for each component.
        sign: "both" (by absolute value), "positive" or "negative".

    Example:
        >>> top_projections(torch.tensor([[1.0, 0.0], [-3.0, 2.0], [2.0, 1.0]]), 2)
        tensor([[1, 2],
                [1, 2]])
    """
    signs: dict[str, Callable[[Tensor], Tensor]] = {"both": torch.abs, "positive": torch.clone, "negative": torch.neg}
    if sign not in signs:
        raise ValueError(f"sign must be 'both', 'positive' or 'negative'; got {sign!r}.")
    t = torch.as_tensor(E)
    if not 1 <= count <= len(t):
        raise ValueError(f"There are {len(t)} examples, so count needs to be 1 to {len(t)}; got {count}.")
    return convert_like(E, signs[sign](t).topk(count, dim=0).indices.T)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a kernel, and the shares of its trace that they explain.

    Attributes:
        eigenvalues: (k,), descending.
        explained: (k,), the share of the trace that the first i of them make up.
    """

    eigenvalues: np.ndarray
    explained: np.ndarray

    def components(self, share: float) -> int:
        """How many eigenvalues make up a share of the trace, such as 0.995."""
        if not self.explained[-1] >= share:
            raise ValueError(
                f"{len(self.explained)} eigenvalues make up {self.explained[-1]:.4f} of the trace, less than {share}. "
                "Fit more components."
            )
        return int(np.argmax(self.explained >= share)) + 1

    @property
    def effective_rank(self) -> float:
        """``(sum l)^2 / sum l^2``: how many equal eigenvalues would be as spread out."""
        return float(self.eigenvalues.sum() ** 2 / np.square(self.eigenvalues).sum())


def spectrum(eigenvalues: Any, *, trace: float | None = None) -> Spectrum:
    """The spectrum of a kernel, from a fitted `linnet.FisherEmbedding` or from eigenvalues.

    Args:
        eigenvalues: The embedding, or (k,) numbers in any order.
        trace: Trace of the kernel, where the eigenvalues are not all; an embedding knows its own.

    Example:
        >>> spectrum([1.0, 8.0, 1.0]).components(0.9)
        2
    """
    if hasattr(eigenvalues, "explained_variance_ratio_"):
        values = _as_array(eigenvalues.eigenvalues_)
        return Spectrum(values, np.cumsum(_as_array(eigenvalues.explained_variance_ratio_)))
    values = np.sort(_as_array(eigenvalues))[::-1]
    return Spectrum(values, np.cumsum(values) / (values.sum() if trace is None else trace))


def _as_array(x: Any) -> np.ndarray:
    return x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=float)
