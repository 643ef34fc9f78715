r"""Door 3: compact representations from any trained model, by its Fisher kernel (Zhang et al. 2022).

.. math:: V = (J - 1 Z^\top) \, \mathrm{diag}(I)^{-1/2}, \qquad K = V V^\top \approx E E^\top, \qquad E = V P

J is the Jacobian of a scalar score (`linnet.scores`), V the Fisher vectors, P the first right singular vectors.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from linnet import scores
from linnet._common import check_folder, check_precision, find_dense_budget, full_precision, messages, together
from linnet._estimator import (
    Dtypes,
    HubMixin,
    behavior,
    check_inputs,
    convert_like,
    draw_inputs,
    list_options,
    parse_dtype,
)
from linnet._estimator import files as saved
from linnet.data import Batch, Source, as_source
from linnet.fisher.statistics import Statistics, fisher_statistics
from linnet.jacobian import Jacobian, Linearization, linearize
from linnet.linalg import Decomposition, LinearOperator, TooFewComponents, low_rank
from linnet.network import Params, check_module

KIND = "fisher embedding"
ESTIMATORS = ("FisherEmbedding",)


class _Kernel(str):
    """The kernel's name; called, the kernel itself. The setting and the method of an embedding share their name."""

    estimator: FisherEmbedding

    def __call__(self, X: Any, Y: Any = None) -> Any:
        return self.estimator._kernel(X, Y)


class _KernelAttribute:
    """Keeps what the constructor was given, which `get_params` returns, and gives out a `_Kernel`."""

    def __get__(self, estimator: FisherEmbedding | None, owner: Any = None) -> Any:
        if estimator is None:
            return self
        found = _Kernel(vars(estimator)["kernel"])
        found.estimator = estimator
        return found

    def __set__(self, estimator: FisherEmbedding, value: Any) -> None:
        estimator.__dict__["kernel"] = value


class FisherEmbedding(HubMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""The leading principal components of a model's Fisher vectors, as a scikit-learn transformer.

    ``kernel(X, Y=None)`` is the kernel that the embedding approximates with, ``transform(X) @ transform(Y).T``.

    Args:
        model: The trained model.
        n_components: How many, or all where the data have fewer; or, as a number between 0 and 1, how much of the
            variance they have to explain.
        score: What is differentiated: one of `linnet.scores`, or a callable from the model's output to (n,), which is
            taken as an energy. None is ``linnet.scores.classifier()``.
        kernel: "nfk", the Fisher kernel; or "ntk", the tangent kernel J J^T of the score, without Z and I.
        params: Which parameters; see `linnet.linearize`.
        method: How the components are found: "auto", "krylov", "power", "nystrom" or "exact"; see
            `linnet.linalg.svd.truncated.low_rank`.
        dtype: Dtype of the model and of products with its Jacobian: "float32" or "float64" runs a copy; "auto" runs the
            model as it is. Floating inputs are cast to the dtype of the model.
        precision: Of the passes that look for the components: "highest", "high" (tf32) or "bf16"; see
            `linnet.Linearization.jacobian`. The statistics and the last pass, and with them eigenvalues and embeddings,
            are always in full precision.
        tolerance: Relative error of the eigenvalues to stop at; None for 1e-7 in float64, 1e-5 in float32.
        block: Vectors that a pass multiplies; None for as many as serve.
        passes: Take what so many passes find, converged or not; None for as many as it takes.
        checkpoint: A folder that keeps the state after each pass. A fit that was interrupted goes on from the state,
            also with another number of ranks.
        memory: Bytes that the basis or a dense kernel may take, or "auto".
        batch_size: Number of examples per chunk, or "auto".
        seed: Seed of the random start of the method.
        progress: False for no progress bars.

    Attributes:
        eigenvalues_: Of V V^T, (n_components,), descending; not divided by n.
        explained_variance_ratio_: Each one's share in the trace of V V^T.
        n_components_: Their number.
        right_vectors_: P, one row for each column that was kept.
        statistics_: Z, I and the kept columns; None for "ntk".
        dropped_columns_: How many parameters are left out: the scores do not depend on them, or by rounding only; see
            `linnet.fisher.statistics.fisher_statistics`.
        passes_: Passes over the data, without the one for the statistics.
        method_: The method used; ``residuals_`` are the errors that it left.
        lin_: The linearized model.

    Example:
        >>> import linnet
        >>> X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> emb = FisherEmbedding(model, n_components=5).fit(X)
        >>> emb.transform(X).shape, emb.kernel(X[:2], X).shape, emb.kernel == "nfk"
        (torch.Size([60, 5]), torch.Size([2, 60]), True)
    """

    kernel = _KernelAttribute()

    lin_: Linearization
    statistics_: Statistics | None
    right_vectors_: Tensor
    _probe: Batch | None

    def __init__(
        self,
        model: nn.Module,
        n_components: int | float = 128,
        score: Any = None,
        kernel: str = "nfk",
        params: Params = None,
        method: str = "auto",
        *,
        dtype: Any = "auto",
        precision: str = "highest",
        tolerance: float | None = None,
        block: int | None = None,
        passes: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        memory: float | str = "auto",
        batch_size: int | str = "auto",
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.model, self.n_components, self.score, self.kernel = model, n_components, score, kernel
        self.params, self.method, self.dtype, self.precision = params, method, dtype, precision
        self.tolerance, self.block, self.passes, self.checkpoint = tolerance, block, passes, checkpoint
        self.memory, self.batch_size, self.seed, self.progress = memory, batch_size, seed, progress

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return super().get_params(deep) | {"kernel": vars(self)["kernel"]}

    # Fitting.

    @together
    def fit(self, X: Any, y: Any = None) -> FisherEmbedding:
        """Find the components of the data; y is not used."""
        self._fit(X)
        return self

    @together
    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Fit, and the embedding of the same data, (n, n_components), which takes no further pass."""
        return convert_like(X, self._fit(X))

    @torch.no_grad()
    @together
    def exact_eigenvalues(self, X: Any) -> Any:
        """All eigenvalues of V V^T of these data, (n,), descending, from the dense kernel; nothing is fitted.

        For spectra: components are not formed, and where many of them matter they cost far more than the kernel does.
        ``n_components`` plays no part. Eigenvalues that are zero come out as rounding, of either sign.
        """
        probe = FisherEmbedding(**self.get_params(deep=False))  # a fit sets its attributes there
        _, V, _ = probe._vectors(X, at_least=1)
        n, limit = V.shape[0], find_dense_budget(self.memory, V.device)
        if 24 * n * n > limit:
            raise MemoryError(
                f"The dense kernel of {n} examples and its eigenvalues take {24 * n * n:,} bytes, and {limit:,} are "
                "allowed. Take fewer examples, allow more with memory=, or fit the leading components instead."
            )
        with full_precision(V.device):
            return convert_like(X, torch.linalg.eigvalsh(V.gram().double()).flip(0))

    def _vectors(self, X: Any, *, at_least: int | float) -> tuple[Source, LinearOperator, float | None]:
        """The data, their Fisher vectors with room for so many components, and the trace of V V^T where it is known."""
        if self.kernel not in ("nfk", "ntk"):
            raise ValueError(f"kernel must be 'nfk' or 'ntk'; got {vars(self)['kernel']!r}.")
        messages.check_memory(self.memory)
        messages.check_seed(self.seed)
        if self.checkpoint is not None:
            check_folder(self.checkpoint, "checkpoint")
        score = scores.as_score(self.score)
        self._attach(score)
        source = as_source(check_inputs(self, X, reset=True), self.lin_.module.forward)
        J = self._jacobian(source)
        self._probe = draw_inputs(source)
        # Passes after the first one touch neither the network nor the data, where the factors fit memory. A checkpoint
        # is of the data itself, and a cheaper precision makes factors of its own.
        kept = J.cached_if_fits() if self.checkpoint is None and self.precision == "highest" else J
        self.statistics_, trace = self._statistics(score, source, J, kept)
        return source, self._fisher_vectors(kept), trace

    def _fit(self, X: Any) -> Tensor:
        source, V, trace = self._vectors(X, at_least=_asked(self.n_components))
        found = self._low_rank(V, trace, self._coarse(source))
        # Singular vectors have no sign of their own: the largest entry of each is made positive.
        sign = torch.where(found.P.gather(0, found.P.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0).to(found.P)
        self.right_vectors_ = found.P * sign
        self.method_, self.residuals_ = found.method, convert_like(X, found.residuals)
        self.lin_.check_unchanged(contents=True)
        self._set(convert_like(X, found.eigenvalues), found.trace, found.passes)
        return found.U * sign

    def _set(self, eigenvalues: Any, trace: float, passes: int) -> None:
        self.eigenvalues_, self._trace, self.passes_ = eigenvalues, trace, passes
        self.explained_variance_ratio_ = eigenvalues / trace
        self.n_components_ = len(eigenvalues)
        self.dropped_columns_ = 0 if self.statistics_ is None else self.statistics_.dropped

    def _attach(self, score: scores.Score) -> None:
        """Linearize the score of the model."""
        model = check_module(self.model)
        module, output = score.bind(model)
        lin = linearize(module, self.params, output)
        # A score may have put another module around the model.
        lin = lin.watching(model)
        # Products have the dtype of the rows: passes with many columns are most of the work.
        self.lin_ = Dtypes(parse_dtype(self.dtype), torch.float32).apply(lin)

    def _jacobian(self, X: Any, precision: Any = "highest") -> Jacobian:
        J = self.lin_.jacobian(X, self.batch_size, precision=precision, progress=self.progress)
        self.lin_.check_ranks_agree(J._source, options=list_options(self))
        return J

    def _coarse(self, source: Source) -> LinearOperator | None:
        """The Fisher vectors in the precision asked for, where that is not the full one."""
        check_precision(self.precision)
        if self.precision == "highest":
            return None
        if self.method not in ("auto", "krylov"):
            raise ValueError(
                f"precision={self.precision!r} serves method='krylov' (or 'auto'), whose last pass is in full "
                f"precision; got method={self.method!r}."
            )
        return self._fisher_vectors(self._jacobian(source, self.precision))

    def _statistics(
        self, score: scores.Score, source: Source, J: Jacobian, kept: Jacobian
    ) -> tuple[Statistics | None, float | None]:
        """Z and I, and the trace of V V^T where it follows from them; ``kept`` is J, perhaps in memory."""
        if self.kernel == "ntk":
            return None, None
        reference = score.reference(check_module(self.model), self.lin_, source)
        if reference is None:
            found = fisher_statistics(J, centered=score.centered, stored=kept)
            return found, found.trace
        return fisher_statistics(self._jacobian(reference), centered=score.centered), None

    def _fisher_vectors(self, J: Jacobian) -> LinearOperator:
        return J if self.statistics_ is None else self.statistics_.vectors(J)

    def _low_rank(self, V: LinearOperator, trace: float | None, coarse: LinearOperator | None) -> Decomposition:
        """The leading components: as many as are asked for, or all that there are."""
        asked = _asked(self.n_components)
        most = min(asked, *V.shape) if isinstance(asked, int) else asked
        try:
            found = self._decompose(V, most, trace, coarse)
        except TooFewComponents as error:
            if not error.rank:
                raise
            found = self._decompose(V, error.rank, trace, coarse)
        if isinstance(asked, int) and len(found.eigenvalues) < asked:
            warnings.warn(
                f"The data have {len(found.eigenvalues)} components above rounding, fewer than n_components={asked}: "
                "all of them are computed.",
                stacklevel=4,
            )
        return found

    def _decompose(
        self, V: LinearOperator, count: int | float, trace: float | None, coarse: LinearOperator | None
    ) -> Decomposition:
        return low_rank(
            V,
            count,
            method=self.method,
            tolerance=self.tolerance,
            block=self.block,
            passes=self.passes,
            seed=self.seed,
            checkpoint=self.checkpoint,
            progress=self.progress,
            trace=trace,
            memory=self.memory,
            coarse=coarse,
        )

    # The embedding.

    @together
    def transform(self, X: Any) -> Any:
        """The embedding E = V_x P of any data, (n, n_components), in one pass."""
        return convert_like(X, self._embed(X))

    def _embed(self, X: Any) -> Tensor:
        check_is_fitted(self)
        J = self._jacobian(check_inputs(self, X, reset=False))
        return self._fisher_vectors(J) @ self.right_vectors_

    @torch.no_grad()
    @together
    def gram(self, X: Any, Y: Any = None) -> Any:
        """The whole kernel of examples, V_X V_Y^T, (n, m): what `kernel` approximates with the leading components.

        Each pair of examples costs a product of two rows of p numbers; `linnet.fisher.probes.kernel_features` takes it.
        """
        check_is_fitted(self)
        V, W = (
            None if x is None else self._fisher_vectors(self._jacobian(check_inputs(self, x, reset=False)))
            for x in (X, Y)
        )
        assert V is not None
        return convert_like(X, V.gram(W))

    def _kernel(self, X: Any, Y: Any = None) -> Any:
        left = self._embed(X)
        right = left if Y is None else self._embed(Y)
        return convert_like(X, left @ right.T)

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    # Files.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was fitted to one file; `linnet.load` reads it, given the same model."""
        check_is_fitted(self)
        tensors = {
            "P": self.right_vectors_,
            "eigenvalues": torch.as_tensor(self.eigenvalues_),
            "residuals": torch.as_tensor(self.residuals_),
        }
        if self.statistics_ is not None:
            tensors |= {"Z": self.statistics_.Z, "I": self.statistics_.I, "kept": self.statistics_.kept}
        kept, seen = behavior.record(self.lin_, self._probe)
        meta = {
            "estimator": "FisherEmbedding",
            "settings": saved.settings_of(self, apart=("model", "params", "score", "dtype", "checkpoint")),
            "score": scores.as_score(self.score).settings(),
            "parameters": list(self.lin_.theta),
            "dtype": self.dtype if isinstance(self.dtype, str) else str(self.dtype).removeprefix("torch."),
            "base": saved.base_of(self),
            "n": None if self.statistics_ is None else self.statistics_.n,
            "trace": self._trace,
            "passes": self.passes_,
            "method": self.method_,
            "arrays": not isinstance(self.eigenvalues_, Tensor),
            "n_features_in": getattr(self, "n_features_in_", None),
            "behavior": seen,
        }
        saved.write(self.lin_, path, tensors | kept, meta, kind=KIND)


def read(
    path: Any,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    model: nn.Module | None,
    *,
    output: Any,
    score: Any,
    likelihood: Any,
) -> FisherEmbedding:
    """The embedding that `FisherEmbedding.save` wrote."""
    saved.check_base(path, meta["base"], model)
    saved.check_given(path, "output", False, output)
    saved.check_given(path, "likelihood", False, likelihood)
    saved.check_given(path, "score", meta["score"] is None, score)
    assert model is not None  # else refused before
    score = scores.from_settings(meta["score"]) if score is None else score
    settings = meta["settings"] | {"params": meta["parameters"], "dtype": meta["dtype"]}
    found = FisherEmbedding(model, score=score, **settings)
    found._attach(scores.as_score(score))
    found._probe = behavior.check(path, found.lin_, tensors, meta.get("behavior"))
    tensors = {name: t.to(found.lin_.device) for name, t in tensors.items()}
    found.statistics_ = None
    if meta["n"] is not None:
        dropped = int((~tensors["kept"]).sum())
        found.statistics_ = Statistics(tensors["Z"], tensors["I"], tensors["kept"], dropped, meta["n"])
    found.right_vectors_ = tensors["P"]
    eigenvalues, residuals = (
        tensors[name].cpu().numpy() if meta["arrays"] else tensors[name] for name in ("eigenvalues", "residuals")
    )
    found._set(eigenvalues, meta["trace"], meta["passes"])
    found.method_, found.residuals_ = meta["method"], residuals
    if meta["n_features_in"] is not None:
        found.n_features_in_ = meta["n_features_in"]
    return found


def _asked(count: Any) -> int | float:
    """A number of components, or a share of the variance to explain."""
    whole, share = isinstance(count, int | np.integer), isinstance(count, float | np.floating)
    if whole and not isinstance(count, bool) and count >= 1:
        return int(count)
    if share and 0 < count < 1:
        return float(count)
    raise ValueError(
        "n_components must be a positive whole number, or the share of the variance to explain, between 0 and 1; got "
        f"{count!r}."
    )
