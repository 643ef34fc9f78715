"""Fitted Laplace approximations in files, bound to the weights of the network they are around."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from linnet._common import files
from linnet._estimator import behavior
from linnet._estimator import files as saved
from linnet.jacobian.kronecker import Rotation
from linnet.laplace.search import Step
from linnet.probability import posteriors
from linnet.probability.coordinates import SubnetworkPosterior, TurnedPosterior
from linnet.probability.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood
from linnet.probability.per_site import Sites
from linnet.probability.posteriors import Posterior

if TYPE_CHECKING:
    from linnet.laplace.estimator import Laplace

KIND = "laplace approximation"

PARTS: dict[str, tuple[str, ...]] = {
    **saved._PARTS,
    "TurnedPosterior": ("delta", "variances"),
    "SubnetworkPosterior": ("delta", "index", "W"),
}

LIKELIHOODS: dict[str, type[Likelihood]] = {
    kind.__name__: kind for kind in (Gaussian, Heteroscedastic, Bernoulli, Categorical)
}


def save(la: Laplace, path: str | os.PathLike[str]) -> None:
    """Write a fitted approximation; see `linnet._estimator.files.save` for what a posterior in function space takes
    along."""
    found = la.posterior_
    name = type(found).__name__
    tensors = {f"posterior.{part}": saved._part(found, part) for part in PARTS[name]}
    if isinstance(found, TurnedPosterior):
        tensors |= {f"rotation.{key}": value for key, value in found.rotation.tensors().items()}
    tensors["prior_variance"] = la.prior_variance_
    if la._noise_base is not None:
        tensors["noise"] = la._noise_base * la._noise
    inner = la._inner
    if type(inner).__name__ not in LIKELIHOODS:
        raise TypeError(f"{type(inner).__name__} is not one of linnet's likelihoods, so that it cannot be saved.")
    form = None
    if name == "FunctionPosterior":
        inputs = saved._flat_inputs(la._train_inputs)
        if inputs is None:
            raise TypeError(
                "Saving structure='function' takes the training inputs along, and they are not in memory (a Dataset or "
                "DataLoader). Fit on tensors or arrays, or with another structure."
            )
        tensors |= {f"inputs.{key}": value for key, value in inputs[0].items()}
        form = inputs[1]
    kept, seen = behavior.record(la.lin_, la._probe)
    apart = ("model", "params", "output", "dtype", "likelihood")
    meta = {
        "estimator": "Laplace",
        "settings": saved.settings_of(la, apart=apart),
        "needs_output": la.output is not None,
        "parameters": list(la.lin_.theta),
        "dtype": str(la.lin_.dtype).removeprefix("torch."),
        "posterior": name,
        "base": saved.base_of(la),
        "likelihood": type(inner).__name__,
        "shape": list(la._read.shape),
        "one_column": la._one_column,
        "inputs": form,
        "behavior": seen,
        "state": {
            "structure": la.structure_,
            "scales": {key: float(value) for key, value in la.scales_.items()},
            "effective_dimension": la.effective_dimension_,
            "gradient_norm": la.gradient_norm_,
            "gradient_ratio": la.gradient_ratio_,
            "narrowed": la.narrowed_,
            "log_evidence": la.log_evidence(),
            "path": [[step.log_evidence, list(step.scales), step.noise, step.dimension] for step in la.tune_path_],
            "n_features_in": getattr(la, "n_features_in_", None),
        },
    }
    files.save(path, tensors | kept, meta, kind=KIND)


def _read(
    path: Any, tensors: dict[str, Tensor], meta: dict[str, Any], model: nn.Module | None, *, output: Any, score: Any
) -> Laplace:
    from linnet.laplace.estimator import Laplace

    saved.check_base(path, meta["base"], model)
    saved.check_given(path, "output", meta["needs_output"], output)
    saved.check_given(path, "score", False, score)
    assert model is not None
    device = next(model.parameters()).device
    tensors = {key: value.to(device) for key, value in tensors.items()}
    noise = tensors.get("noise")
    kind = LIKELIHOODS[meta["likelihood"]]
    unit = Gaussian(noise if noise.ndim else float(noise)) if noise is not None else kind()
    settings = meta["settings"] | {"params": meta["parameters"], "dtype": meta["dtype"], "noise": None}
    la = Laplace(model, unit, output=output, **settings)
    la._attach(model)
    la._probe = behavior.check(path, la.lin_, tensors, meta.get("behavior"))
    la._read.shape = shape = tuple(meta["shape"])
    la._unit = la.likelihood_ = Sites(unit, shape) if shape else unit
    la._noise_base, la._noise, la._one_column = noise, 1.0, meta["one_column"]
    la.noise_ = None if noise is None else float(noise) if noise.ndim == 0 else noise.cpu().numpy()
    state = meta["state"]
    la.structure_, la.scales_, la.prior_variance_ = state["structure"], state["scales"], tensors["prior_variance"]
    la.effective_dimension_ = state["effective_dimension"]
    la.gradient_norm_, la.gradient_ratio_ = state["gradient_norm"], state["gradient_ratio"]
    la.tune_path_ = tuple(Step(value, tuple(scales), v, d) for value, scales, v, d in state["path"])
    la.narrowed_ = state.get("narrowed", 1.0)
    la._known_evidence = state["log_evidence"]
    if state["n_features_in"] is not None:
        la.n_features_in_ = state["n_features_in"]
    la.posterior_ = _posterior(la, tensors, meta)
    return la


def _posterior(la: Laplace, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Posterior:
    name = meta["posterior"]
    parts = {part: tensors[f"posterior.{part}"] for part in PARTS[name]}
    if name == "TurnedPosterior":
        prefix = "rotation."
        turns = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        rotation = Rotation.from_tensors(turns, la.lin_.layout)
        return TurnedPosterior(**parts, rotation=rotation)
    if name == "SubnetworkPosterior":
        return SubnetworkPosterior(**parts)
    kind = getattr(posteriors, name)
    if name != "FunctionPosterior":
        found: Posterior = kind(**parts)
        return found
    X = saved._inputs(tensors, "inputs.", meta["inputs"])
    la._train_inputs = X
    return kind(la._jacobian(X).cached(), **parts)


saved.register("Laplace", _read, kind=KIND)
