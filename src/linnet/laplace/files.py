"""Fitted Laplace approximations in files, bound to the weights of the network they are around."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from linnet._estimator import Dtypes, behavior
from linnet._estimator import files as saved
from linnet.laplace.search import Step
from linnet.probability import (
    EarlierPosterior,
    Gaussian,
    KnownNoise,
    Likelihood,
    Sites,
    describe_likelihood,
    posterior_from,
    precision_from,
    restore_likelihood,
)

if TYPE_CHECKING:
    from linnet.jacobian import Linearization
    from linnet.laplace.estimator import Laplace

KIND = "laplace approximation"
ESTIMATORS = ("Laplace",)


def save(la: Laplace, path: str | os.PathLike[str]) -> None:
    """Write a fitted approximation to one file."""
    saved.write(la.lin_, path, *pack(la), kind=KIND)


def pack(la: Laplace) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON of a file; a posterior in function space takes the training inputs along."""
    found = la.posterior_
    name = type(found).__name__
    tensors = saved.posterior_tensors(found)
    tensors["prior_variance"] = la.prior_variance_
    if la._noise_base is not None:
        tensors["noise"] = la._noise_base * la._noise
    inner = la._predictive.inner
    if la._weight is not None:
        tensors["weight"] = la._weight
    if isinstance(inner, KnownNoise):
        tensors["noise_each"] = la._noise_each
    codes = la._codes_of_examples()
    tensors |= {} if codes is None else {"seen": codes}
    traces = la._traces_of_inputs()
    tensors |= {} if traces is None else {f"traces.{a}-{b}": t for (a, b), t in traces.items()}
    described = describe_likelihood(inner)
    if isinstance(inner, Gaussian):
        described["settings"] = {}  # its noise is a tensor
    form = None
    if name == "FunctionPosterior":
        inputs = saved.flatten_inputs(la._train_inputs)
        if inputs is None:
            raise TypeError(
                "Saving structure='function' takes the training inputs along, and they are not in memory (a Dataset or "
                "DataLoader). Fit on tensors or arrays, or with another structure."
            )
        tensors |= {f"inputs.{key}": value for key, value in inputs[0].items()}
        form = inputs[1]
    kept, seen = behavior.record(la.lin_, la._probe)
    apart: tuple[str, ...] = ("model", "params", "output", "dtype", "likelihood", "checkpoint")
    carried = None
    if la._earlier is not None:
        apart = (*apart, "prior")
        more, carried = pack_earlier(la._earlier)
        tensors |= more
    meta = {
        "estimator": "Laplace",
        "settings": saved.settings_of(la, apart=apart),
        "earlier": carried,
        "needs_output": la.output is not None,
        "parameters": list(la.lin_.theta),
        **la._dtypes.meta(),
        "posterior": name,
        "base": saved.base_of(la),
        "likelihood": described["name"],
        "likelihood_described": described,
        "classes": None if not hasattr(la, "classes_") else [la.classes_.tolist(), la.classes_.dtype.str],
        "shape": list(la._read.shape),
        "one_column": la._one_column,
        "inputs": form,
        "behavior": seen,
        "state": {
            "structure": la.structure_,
            "scales": {key: float(value) for key, value in la.scales_.items()},
            "effective_dimension": _known(la.effective_dimension_),
            "gradient_norm": _known(la.gradient_norm_),
            "gradient_ratio": _known(la.gradient_ratio_),
            "narrowed": la.narrowed_,
            "variance": la.variance_,
            "draws": la.draws_,
            "forgotten": la._forgotten,
            "lost": la._lost,
            "log_evidence": la.log_evidence(),
            "path": [[step.log_evidence, list(step.scales), step.noise, step.dimension] for step in la.tune_path_],
            "n_features_in": getattr(la, "n_features_in_", None),
        },
    }
    return tensors | kept, meta


def read(
    path: Any,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    model: nn.Module | None,
    *,
    output: Any,
    score: Any,
    likelihood: Any,
) -> Laplace:
    """The approximation that `save` wrote."""
    from linnet.laplace.estimator import Laplace

    saved.check_base(path, meta["base"], model)
    saved.check_given(path, "output", meta["needs_output"], output)
    saved.check_given(path, "score", False, score)
    assert model is not None
    device = next(model.parameters()).device
    tensors = {key: value.to(device) for key, value in tensors.items()}
    noise = tensors.get("noise")
    described = meta.get("likelihood_described") or {"name": meta["likelihood"], "settings": {}, "own": False}
    if noise is not None:
        saved.check_given(path, "likelihood", False, likelihood)
        unit: Likelihood = Gaussian(noise if noise.ndim else float(noise))
    else:
        unit = restore_likelihood(path, described, likelihood)
    dtypes = Dtypes.from_meta(meta)
    dtype = "auto" if dtypes.network is None else meta["dtype"]
    settings = meta["settings"] | {"params": meta["parameters"], "dtype": dtype, "noise": None}
    la = Laplace(model, unit, output=output, **settings)
    la._attach(model, dtypes)
    la._probe = behavior.check(path, la.lin_, tensors, meta.get("behavior"))
    la._read.shape = shape = tuple(meta["shape"])
    if meta.get("classes") is not None:
        la.classes_ = np.array(meta["classes"][0], dtype=meta["classes"][1])
    la._unit = la.likelihood_ = Sites(unit, shape, la.ignore_index) if shape else unit
    la._noise_base, la._noise, la._one_column = noise, 1.0, meta["one_column"]
    la.noise_ = None if noise is None else float(noise) if noise.ndim == 0 else noise.cpu().numpy()
    la._weight = tensors.get("weight")
    if "noise_each" in tensors:
        la._noise_each = tensors["noise_each"]
        la.noise_ = la._noise_each.cpu().numpy()
    la.theta_ = la.lin_.flat_theta.detach().clone()
    if meta.get("earlier") is not None:
        la.prior = la._prior = restore_earlier(meta["earlier"], saved.strip("earlier.", tensors), la.lin_)
    state = meta["state"]
    la.structure_, la.scales_, la.prior_variance_ = state["structure"], state["scales"], tensors["prior_variance"]
    numbers = (state[name] for name in ("effective_dimension", "gradient_norm", "gradient_ratio"))
    found = [math.nan if value is None else value for value in numbers]
    la.effective_dimension_, la.gradient_norm_, la.gradient_ratio_ = found
    la.tune_path_ = tuple(Step(value, tuple(scales), v, d) for value, scales, v, d in state["path"])
    la.narrowed_ = state.get("narrowed", 1.0)
    la._known_evidence = state["log_evidence"]
    if state["n_features_in"] is not None:
        la.n_features_in_ = state["n_features_in"]
    J = None
    if meta["posterior"] == "FunctionPosterior":
        la._train_inputs = saved.restore_inputs(saved.strip("inputs.", tensors), meta["inputs"])
        J = la._jacobian(la._train_inputs).cached()
    turns = {key: value for key, value in tensors.items() if key.startswith("rotation.")}
    parts = saved.strip("posterior.", tensors) | turns
    la.posterior_ = posterior_from(meta["posterior"], parts, J=J, layout=la.lin_.layout)
    la.variance_ = state.get("variance", "samples" if la.posterior_.known_from_samples else "exact")
    la.draws_ = state.get("draws", la.draws)
    traces = {tuple(map(int, r.split("-"))): t for r, t in saved.strip("traces.", tensors).items()}
    la._traces = traces or None  # type: ignore[assignment]
    la._seen, la._forgotten, la._lost = tensors.get("seen"), state.get("forgotten", 0), state.get("lost", 0.0)
    return la


def _known(value: float) -> float | None:
    """A number as JSON holds it; None for what is not known."""
    return None if math.isnan(value) else value


# An earlier posterior as the prior.


def pack_earlier(prior: EarlierPosterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A prior as named tensors and JSON."""
    tensors = {f"earlier.{name}": t for name, t in prior.precision.tensors().items()}
    return tensors | {"earlier.mean": prior.mean}, {"form": type(prior.precision).__name__}


def restore_earlier(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], lin: Linearization) -> EarlierPosterior:
    """The inverse of `pack_earlier`, of tensors without their prefix."""
    return EarlierPosterior.of(tensors["mean"], precision_from(meta["form"], tensors, layout=lin.layout), lin.layout)
