r"""Priors on the displacement: ``theta - theta0 ~ N(0, diag(variance))``, with variances that are shared by groups.

=============  =====================================================================  =====================
name           variance of a parameter                                                chosen by the evidence
=============  =====================================================================  =====================
``unit``       1                                                                      nothing
``shared``     s                                                                      s
``ntk``        s / fan-in for weights, s for biases, norm scales and embeddings       s
``balanced``   s / (average variance that a unit prior on its layer gives to f)       s
``layerwise``  s_l                                                                    one s_l for each layer
=============  =====================================================================  =====================

A positive number is a shared variance, and ``{glob: variance}`` one for each layer or parameter; both are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite, prod
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from linnet._common import messages
from linnet.jacobian import Jacobian, estimate_column_norms

if TYPE_CHECKING:
    from linnet.jacobian import Linearization
    from linnet.linalg import LinearOperator
    from linnet.network import Layout

PriorSpec = str | float | Mapping[str, float]
"""What users may write for a prior."""

NAMES = ("unit", "shared", "ntk", "balanced", "layerwise")

_EMBEDDING = nn.Embedding | nn.EmbeddingBag
_TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True)
class Prior:
    """Variances up to the scales that the evidence chooses.

    Attributes:
        name: As the user wrote it.
        base: (p,), the variances where every scale is one.
        scales: Names of the scales; none where the prior is fixed.
        group: (p,), the number of the scale that a parameter belongs to; None where there is at most one.
    """

    name: str
    base: Tensor
    scales: tuple[str, ...] = ()
    group: Tensor | None = None

    def variance(self, scales: Sequence[float] | Tensor = ()) -> Tensor:
        """The variances (p,) for given scales.

        >>> Prior("shared", torch.ones(3), ("all",)).variance([0.5])
        tensor([0.5000, 0.5000, 0.5000])
        """
        if len(scales) != len(self.scales):
            raise ValueError(f"The prior {self.name!r} has {len(self.scales)} scales; got {len(scales)}.")
        if not self.scales:
            return self.base
        s = torch.as_tensor(scales, dtype=self.base.dtype, device=self.base.device)
        return self.base * (s[0] if self.group is None else s[self.group])


def check_prior(spec: PriorSpec, lin: Linearization | None = None) -> None:
    """Raise unless ``spec`` is a name, a positive number or a dict of positive numbers.

    Where a linearization is given, the dict must have a variance for each of its parameters, and no glob too many.
    """
    if isinstance(spec, str):
        if spec not in NAMES:
            raise ValueError(
                f"prior must be one of {', '.join(map(repr, NAMES))}, a positive variance, or a dict from layer globs "
                f"to variances; got {spec!r}."
            )
    elif hasattr(spec, "posterior_"):
        raise NotImplementedError(
            f"prior= of a tangent estimator is a variance; got a fitted {type(spec).__name__}. An earlier posterior is "
            "the prior of linnet.Laplace(prior=earlier). For one linear model use fit(X, y, source=earlier), or "
            "linnet.merge."
        )
    elif isinstance(spec, Mapping):
        for glob, value in spec.items():
            _check_variance(value, f"prior[{glob!r}]")
        if not spec:
            raise ValueError("prior is an empty dict; name at least one layer, as in {'*': 1.0}.")
        if lin is not None:
            _by_glob(lin.layout, spec, torch.ones(lin.p))
    else:
        _check_variance(spec, "prior")


def make_prior(
    lin: Linearization, spec: PriorSpec, *, J: LinearOperator | None = None, weight: Tensor | None = None
) -> Prior:
    """The prior of a linearization.

    Args:
        lin: Whose parameters it is on.
        spec: A name, a variance, or variances by layer glob.
        J: The Jacobian of the training data, which ``balanced`` reads once; of many outputs it reads random
            combinations.
        weight: How many times each row of J counts, (n c,); None for once.

    Example:
        >>> from linnet import linearize
        >>> lin = linearize(nn.Linear(4, 2))
        >>> make_prior(lin, "ntk").variance([1.0])
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 1.0000, 1.0000])
        >>> make_prior(lin, {"weight": 2.0, "bias": 3.0}).base[-3:]
        tensor([2., 3., 3.])
    """
    check_prior(spec)
    ones = torch.ones(lin.p, dtype=lin.dtype, device=lin.device)
    if isinstance(spec, Mapping):
        return Prior("given", _by_glob(lin.layout, spec, ones))
    if not isinstance(spec, str):
        return Prior("given", ones * float(spec))
    if spec == "unit":
        return Prior(spec, ones)
    if spec == "shared":
        return Prior(spec, ones, ("all",))
    if spec == "ntk":
        return Prior(spec, ntk_variances(lin), ("all",))
    if spec == "layerwise":
        group = torch.empty(lin.p, dtype=torch.long, device=lin.device)
        for i, names in enumerate(lin.layout.layers.values()):
            for name in names:
                group[lin.layout.slices[name]] = i
        return Prior(spec, ones, tuple(lin.layout.layers), group)
    if J is None:
        raise ValueError("The prior 'balanced' measures the layers on the training data; pass its Jacobian as J.")
    return Prior(spec, _balanced(lin.layout, J, ones, weight), ("all",))


def ntk_variances(lin: Linearization) -> Tensor:
    """1 / fan-in for weights, 1 for all else, (p,): the kernel of the same network in NTK parametrization.

    Fan-in is the number of inputs that one output of the layer sums over. Parameters that no known layer owns count as
    weights where the network multiplies by them, which holds for matrices only.
    """
    out = torch.ones(lin.p, dtype=lin.dtype, device=lin.device)
    modules = dict(lin.module.named_modules())
    for name, shape in lin.layout.shapes.items():
        owner, _, leaf = name.rpartition(".")
        out[lin.layout.slices[name]] = 1 / _fan_in(modules.get(owner), leaf, shape)
    return out


def layer_sums(layout: Layout, vector: Tensor) -> dict[str, float]:
    """The sum of a vector (p,) over each layer."""
    return {
        layer: float(sum(vector[layout.slices[name]].sum() for name in names)) for layer, names in layout.layers.items()
    }


def prior_variances(lin: Linearization, prior: PriorSpec | Tensor, *, J: LinearOperator | None = None) -> Tensor:
    """Prior variances (p,), up to the scale that a named prior leaves open.

    Args:
        lin: Whose parameters they are.
        prior: "unit" or "shared" (ones), "ntk", "balanced", a variance, variances by layer glob, or a tensor (p,).
        J: The Jacobian of the training data, which "balanced" reads.
    """
    if isinstance(prior, Tensor):
        if prior.shape != (lin.p,) or not prior.is_floating_point():
            raise ValueError(
                f"The network has {lin.p} selected parameters, so a prior tensor holds their variances, shape "
                f"({lin.p},); got {prior.dtype} of shape {tuple(prior.shape)}."
            )
        if not bool(torch.isfinite(prior).all()) or bool((prior < 0).any()):
            raise ValueError("A prior tensor holds variances: finite and not negative. Check the tensor.")
        return prior.detach().to(lin.dtype).to(lin.device)
    if prior == "balanced" and J is None:
        raise ValueError(
            "The prior 'balanced' measures the layers on training data, which a kernel does not have. Use 'unit' or "
            "'ntk', or pass variances by layer: {'layer glob': variance}."
        )
    found = make_prior(lin, prior, J=J)
    if len(found.scales) > 1:
        raise ValueError(
            f"The prior {prior!r} has {len(found.scales)} scales for the evidence to choose, and a kernel has one. Fit "
            "a linnet.TangentRegressor, or pass variances by layer: {'layer glob': variance}."
        )
    return found.base


def _fan_in(module: nn.Module | None, leaf: str, shape: torch.Size) -> int:
    if len(shape) < 2 or isinstance(module, _EMBEDDING) or (module is not None and "Norm" in type(module).__name__):
        return 1
    if isinstance(module, _TRANSPOSED):
        return shape[0] * prod(shape[2:]) // module.groups
    if isinstance(module, nn.Bilinear):
        return shape[1] * shape[2]
    if module is not None and type(module).__name__ == "Conv1D" and leaf == "weight":  # Hugging Face: (in, out)
        return shape[0]
    known = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention
    if isinstance(module, known) and not leaf.startswith("bias"):
        return prod(shape[1:])
    # A parameter of a module of the user's own: class tokens and positions begin with an axis of length one.
    return 1 if shape[0] == 1 else prod(shape[1:])


def _by_glob(layout: Layout, spec: Mapping[str, float], ones: Tensor) -> Tensor:
    out, missing = torch.zeros_like(ones), []
    used: set[str] = set()
    for layer, names in layout.layers.items():
        for name in names:
            found = [g for g in spec if fnmatchcase(name, g) or fnmatchcase(layer, g)]
            if not found:
                missing.append(name)
                continue
            used.add(found[0])
            out[layout.slices[name]] = float(spec[found[0]])
    if missing:
        raise ValueError(
            f"prior gives no variance for {messages.listing(missing)}. Add a glob for them, such as '*' as the last "
            "one (the first that matches counts), or leave them out with params=."
        )
    unused = [g for g in spec if g not in used]
    if unused:
        raise ValueError(
            f"prior names {messages.listing(unused)}, which match no selected layer or come after another that "
            f"matches; the layers are {messages.listing(list(layout.layers))}."
        )
    return out


def _balanced(layout: Layout, J: LinearOperator, ones: Tensor, weight: Tensor | None) -> Tensor:
    out = torch.zeros_like(ones)
    if isinstance(J, Jacobian):
        norms = estimate_column_norms(J, None if weight is None else weight.sqrt().view(J.n, J.c))
    else:
        norms = J.column_norms(weight)
    rows = J.shape[0] if weight is None else float(weight.sum())
    shares = layer_sums(layout, norms)
    for layer, names in layout.layers.items():
        average = shares[layer] / rows
        for name in names:  # a layer that no example reaches stays where it is: variance zero
            out[layout.slices[name]] = 1 / average if average > 0 else 0.0
    return out


def _check_variance(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value) or value <= 0:
        raise ValueError(f"{name} is a variance and must be a positive number; got {value!r}.")
