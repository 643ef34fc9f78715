"""`linnet.Laplace` with the calls of laplace-torch, for code and libraries that are written for laplace-torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linnet.interop.batches import split_targets
from linnet.laplace import Laplace as LinnetLaplace

__all__ = ["Laplace"]

SUBSETS = {"all": None, "last_layer": "last_layer"}
STRUCTURES = {"full": "full", "kron": "kron", "diag": "diag", "lowrank": "lowrank", "gp": "function"}
PRIORS = {"scalar": "shared", "layerwise": "layerwise"}
LINKS = ("probit", "mc", "bridge")


class Laplace:
    """The posterior of a trained network around its weights, by the names that laplace-torch has for its calls.

    `from linnet.interop.laplace_torch import Laplace` takes the place of `from laplace import Laplace`. The fit is a
    `linnet.Laplace`, which `laplace_` holds: it has error bars for more structures, files, attribution and merging.
    Numbers agree with laplace-torch up to what each library approximates; the prior is chosen by `linnet.Laplace.tune`.
    Predictions are those of the linearized network, ``pred_type="glm"``.

    Args:
        model: The trained network.
        likelihood: "classification" or "regression".
        subset_of_weights: "last_layer" or "all".
        hessian_structure: "kron", "full", "diag", "lowrank" or "gp".
        sigma_noise: Standard deviation of the noise of a regression.
        prior_precision: One over the variance of the prior.
        enable_backprop: Whether predictions at inputs that require a gradient have one.
        dict_key_y: Key of the targets, where batches are dicts. The other keys are arguments of the network.

    Example:
        >>> X, y = torch.randn(40, 2), torch.arange(40) % 2
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=8)
        >>> la = Laplace(nn.Linear(2, 2), "classification", prior_precision=5.0)
        >>> la.fit(loader)
        >>> la(X[:3], link_approx="probit").shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_y: str = "labels",
    ) -> None:
        # No other names here: libraries read the names of this function as those of its arguments.
        self.likelihood = _choose("likelihood", likelihood, ("classification", "regression"))
        self.subset_of_weights = _choose("subset_of_weights", subset_of_weights, SUBSETS)
        self.hessian_structure = _choose("hessian_structure", hessian_structure, STRUCTURES)
        self.model, self.enable_backprop, self.dict_key_y = model, enable_backprop, dict_key_y
        self.sigma_noise = _as_number("sigma_noise", sigma_noise)
        self.prior_precision = _as_number("prior_precision", prior_precision)
        self.laplace_: LinnetLaplace | None = None

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Fit to the training data.

        Args:
            train_loader: DataLoader of pairs of inputs and targets, or of dicts with ``dict_key_y``.
            override: False would add to an earlier fit, which `linnet.Laplace.condition` does.
            progress_bar: Whether to show progress.
        """
        if not override:
            raise NotImplementedError(
                "override=False is not known here. laplace_.condition(X, y) adds examples to a fit."
            )
        self.laplace_ = LinnetLaplace(
            self.model,
            self.likelihood,
            STRUCTURES[self.hessian_structure],  # type: ignore[arg-type]
            1 / float(self.prior_precision),
            SUBSETS[self.subset_of_weights],
            noise=float(self.sigma_noise) ** 2 if self.likelihood == "regression" else None,
            progress=progress_bar,
        ).fit(split_targets(train_loader, self.dict_key_y))

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        *,
        prior_structure: str = "scalar",
        val_loader: Any = None,
        link_approx: str = "probit",
        **search: Any,
    ) -> None:
        """Choose the prior by the evidence, or by validation data; see `linnet.Laplace.tune`.

        Args:
            pred_type: "glm".
            method: "marglik", or "gridsearch" with ``val_loader``.
            prior_structure: "scalar" or "layerwise".
            val_loader: Loader of data that the network was not trained on.
            link_approx: For laplace-torch's signature; the prior does not depend on the link.
            search: Settings of laplace-torch's search, such as ``lr`` and ``n_steps``, which linnet's search does not
                have; a warning names them.
        """
        _check_kind(pred_type)
        _choose("link_approx", link_approx, LINKS)
        _choose("method", method, ("marglik", "gridsearch"))
        prior = PRIORS[_choose("prior_structure", prior_structure, PRIORS)]
        if search:
            warnings.warn(
                f"linnet's search for the prior has no setting {', '.join(sorted(search))}.", UserWarning, stacklevel=2
            )
        if (method == "gridsearch") != (val_loader is not None):
            raise ValueError('method="gridsearch" needs val_loader, and method="marglik" takes none.')
        found = self._fitted()
        noise = False if self.likelihood == "regression" else None
        held_out = None if val_loader is None else split_targets(val_loader, self.dict_key_y)
        found.tune(prior, noise=noise, validation=held_out)
        variances = found.prior_variance_
        self.prior_precision = 1 / (variances[:1] if bool((variances == variances[0]).all()) else variances)

    def __call__(
        self,
        x: Tensor | Mapping[str, Any],
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
    ) -> Any:
        """Predictions: probabilities (n, c) of classes; or means (n, c) and covariances (n, c, c) without the noise.

        Args:
            x: Inputs.
            pred_type: "glm".
            joint: Whether a regression returns the means (n c,) and the joint covariance (n c, n c) of all inputs.
            link_approx: "probit", "mc" or "bridge".
            n_samples: Number of draws of "mc".
            diagonal_output: Whether a regression returns variances (n, c) in place of covariances.
        """
        _check_kind(pred_type)
        found, x = self._fitted(), self._read(x)
        if self.likelihood == "classification":
            return self._cast(found.predict_proba(x, link=_choose("link_approx", link_approx, LINKS), draws=n_samples))
        if joint:
            mean, C = found.predict(x, return_cov=True)
            return self._cast(mean.flatten()), self._cast(C)
        f, spread = found._outputs_and_spread(x, "variance" if diagonal_output else "blocks")
        return self._cast(f), self._cast(spread)

    def functional_samples(self, x: Any, pred_type: str = "glm", n_samples: int = 100) -> Tensor:
        """Samples of the outputs, (n_samples, n, c); all inputs of a sample have the same weights."""
        _check_kind(pred_type)
        found = self._cast(self._fitted().sample(self._read(x), n_samples))
        return found if found.ndim > 2 else found[..., None]

    def predictive_samples(self, x: Any, pred_type: str = "glm", n_samples: int = 100) -> Tensor:
        """Samples of the outputs of a regression, or of the probabilities of classes, (n_samples, n, c)."""
        f = self.functional_samples(x, pred_type, n_samples)
        if self.likelihood == "regression":
            return f
        return f.softmax(-1) if f.shape[-1] > 1 else torch.cat([torch.sigmoid(-f), torch.sigmoid(f)], -1)

    def log_marginal_likelihood(self, prior_precision: Any = None, sigma_noise: Any = None) -> Tensor:
        """The log evidence, at another prior precision or noise where given; without derivatives."""
        for name, value in (("prior_precision", prior_precision), ("sigma_noise", sigma_noise)):
            if isinstance(value, Tensor) and value.requires_grad:
                raise NotImplementedError(
                    f"log_marginal_likelihood has no derivative in {name}. optimize_prior_precision chooses the prior, "
                    "and linnet.Laplace(noise=None) the noise."
                )
        prior = None if prior_precision is None else 1 / float(prior_precision)
        noise = None if sigma_noise is None else float(sigma_noise) ** 2
        return torch.tensor(self._fitted().log_evidence(prior=prior, noise=noise), dtype=torch.float64)

    def _fitted(self) -> LinnetLaplace:
        if self.laplace_ is None:
            raise RuntimeError("The posterior is not fitted yet. Call fit(train_loader) first.")
        return self.laplace_

    def _cast(self, values: Tensor) -> Tensor:
        """Values in the dtype of the network, which laplace-torch returns."""
        return values.to(next(self.model.parameters()).dtype)

    def _read(self, x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: value for key, value in x.items() if key != self.dict_key_y}
        return x if self.enable_backprop or not isinstance(x, Tensor) else x.detach()


def _choose(name: str, value: Any, known: Any) -> str:
    text = str(getattr(value, "value", value))  # laplace-torch has enums of strings
    if text not in known:
        raise NotImplementedError(f"{name}={text!r} is not known here; known are {', '.join(map(repr, known))}.")
    return text


def _check_kind(pred_type: Any) -> None:
    if str(getattr(pred_type, "value", pred_type)) != "glm":
        raise NotImplementedError(
            'Predictions are those of the linearized network, pred_type="glm". laplace_.posterior_ draws weights for '
            "networks that are not linearized."
        )


def _as_number(name: str, value: Any) -> Tensor:
    found = torch.as_tensor(value, dtype=torch.float64).detach().flatten()
    if found.numel() != 1 or not bool(found > 0):
        raise ValueError(f"{name} must be one positive number; got {value!r}. linnet.Laplace takes variances by layer.")
    return found
