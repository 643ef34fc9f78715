r"""More and fewer training examples for a Laplace approximation around the same weights, with the same prior and noise.

The curvature is a sum over the examples. Four structures keep the sum itself, or a factor of it:

==========  ===============================================================  =======================================
structure   without some examples                                            cost
==========  ===============================================================  =======================================
full        ``G - J_B^T B J_B``                                              the rows that go, decompositions (p, p)
function    the Cholesky factor of the kernel without their rows             ``(n c)^2`` times the rows that go
diag        the diagonal of G less theirs                                    the rows that go
kron        the factors less theirs, decomposed again                        the rows that go, decompositions (d, d)
others      made again from the examples that stay, prior and noise given    a fit without its search
==========  ===============================================================  =======================================

The others keep what is no sum over the examples: the curvature along eigenvectors that change (ekfac), leading
eigenpairs, the parameters of a subnetwork, posterior samples (whose solve starts at the old ones). Made again are also
a structure whose prior is an earlier posterior, and Kronecker factors that are sketched or of layers without curvature.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from linnet._estimator import (
    as_targets,
    check_inputs,
    draw_inputs,
    example_codes,
    files,
    find_kept,
    join_inputs,
    leave_out_weightless,
    take_parts,
)
from linnet.data import as_source
from linnet.inference import CHOSEN, TRAINED, Certificate, LogDet, bound_rounding
from linnet.jacobian import Decomposed, Jacobian
from linnet.laplace.structures import (
    CurvatureStructure,
    DiagonalCurvature,
    FullCurvature,
    KernelCurvature,
    KroneckerCurvature,
    SampledCurvature,
)
from linnet.linalg import remove_rows, solve_lower, weight_from_root
from linnet.probability import (
    DiagonalPosterior,
    FunctionPosterior,
    KnownNoise,
    Posterior,
    Prior,
    TurnedPosterior,
    Weighted,
    WeightPosterior,
    as_continuous,
    as_variances,
    without_weights,
)

if TYPE_CHECKING:
    from linnet.laplace.estimator import Laplace

CARRIED = (
    *("lin_", "_dtypes", "_read", "_one_column", "n_features_in_", "feature_names_in_", "classes_"),  # of the network
    *("_unit", "_noise_base", "_noise", "structure_", "draws_", "narrowed_"),
    *("_prior", "_scales", "prior_variance_", "scales_", "noise_", "likelihood_", "theta_", "_forgotten", "_lost"),
)
"""Attributes that an approximation has in common with one of other examples."""

SUMS = ("full", "function", "diag", "kron")
"""Structures that go on without some examples at a cost that grows with these."""


# Examples.


def forget(la: Laplace, examples: Any, y: Any) -> Laplace:
    """The approximation without some examples; see `Laplace.forget`."""
    if not hasattr(la, "_structure"):
        return _forget_in_file(la, examples, y)
    la.lin_.check_unchanged(contents=True)
    targets = plain_targets(la, la._y)
    inputs = [la._train_inputs]

    def encode(X: Any, y: Any) -> Tensor:
        return _encode(la, la._jacobian(X), y)

    kept = find_kept(la, examples, y, seen=inputs, targets=targets, encode=encode)
    (rest,) = take_parts(inputs, kept, la.lin_.module.forward)
    out = torch.ones(len(targets), dtype=torch.bool)
    out[kept] = False
    gone = out.nonzero()[:, 0]
    other = _carry(la)
    other._forgotten = la._forgotten + len(gone)
    there = kept.to(la._y.device)
    _set_examples(other, rest, la._y[there], None if la._weight is None else la._weight[kept])
    if la._y_is_known_noise:
        other._noise_each = la._noise_each[kept]
        other.noise = other._noise_each
    if la.structure_ not in SUMS or la.draws_ is not None or la._earlier is not None:
        _make_again(other, other._jacobian(rest), start=la)
        return other
    other._f, other._J = la._f[there], la._J.subset(kept)
    J, root = la._J.subset(gone), la._root(la._f[gone], la._y[gone])
    changed = _subtract(la._structure, la.posterior_, J, root, kept, other, 1 / la._noise)
    if changed is None:
        _make_again(other, other._jacobian(rest), start=la)
        return other
    _accept(other, *changed, la)
    residual = la._with_noise(la._noise).residual(la._f[gone], la._y[gone])
    other._measure_distance(la._gradient - J.T @ residual.flatten())
    return other


def condition(la: Laplace, X: Any, y: Any, sample_weight: Any) -> Laplace:
    """The approximation with more examples; see `Laplace.condition`."""
    la._check_data("condition")
    forward = la.lin_.module.forward
    X, weight, counted = leave_out_weightless(check_inputs(la, X, reset=False), sample_weight, forward)
    if la._y_is_known_noise:
        raise NotImplementedError(
            "The fit has a noise for each observation, and condition does not take those of new ones. Fit again with "
            "all examples."
        )
    X, J, targets, labeled = la._labeled(X, la._jacobian(X), counted.take(y))
    weight = labeled.take(weight)
    new = _encode(la, J, targets)
    other = _carry(la)
    if weight is not None or isinstance(la._unit, Weighted):
        inner, old = without_weights(la._unit), la._split(la._y)
        w = torch.ones(J.n) if weight is None else weight
        other._unit, new = Weighted.pack(inner, new, w.to(J.device, J.dtype))
        ys = torch.cat([Weighted.pack(inner, *old)[1], new])
        weight = torch.cat([old[1].cpu().double(), w.cpu().double()])
    else:
        ys = torch.cat([la._y, new])
    _set_examples(other, join_inputs(la._train_inputs, X, forward), ys, weight)
    whole = other._jacobian(other._train_inputs)
    if la.structure_ not in ("full", "diag", "kron") or la.draws_ is not None or la._earlier is not None:
        _make_again(other, whole, start=la)
        return other
    f = J.outputs()
    other._f, other._J = torch.cat([la._f, f]), whole
    root, y = other._root(f, ys[-J.n :]), ys[-J.n :]
    structure: CurvatureStructure | None
    if isinstance(la._structure, FullCurvature):
        structure = FullCurvature(None, None, G=la._structure.G + FullCurvature(J, root).G)
    elif isinstance(la._structure, DiagonalCurvature):
        structure = DiagonalCurvature(None, None, values=la._structure.values + DiagonalCurvature(J, root).values)
    else:
        assert isinstance(la._structure, KroneckerCurvature)
        structure = _join(la._structure, J, root, 1)
    if structure is None:
        _make_again(other, whole, start=la)
        return other
    _accept(other, structure, structure.posterior(la.prior_variance_, 1 / la._noise), la)
    residual = other._with_noise(la._noise).residual(f, y)
    other._measure_distance(la._gradient + J.T @ residual.flatten())
    return other


def certify(la: Laplace) -> Certificate:
    """What the certificate says of the last posterior."""
    remains = (TRAINED, CHOSEN) if la._forgotten else (TRAINED,)
    posterior = la.posterior_
    if isinstance(posterior, WeightPosterior | FunctionPosterior):
        return Certificate(la._forgotten, 0.0, bound_rounding(posterior.factor) + la._lost, remains)
    if isinstance(posterior, DiagonalPosterior) or la.structure_ == "kron":
        return Certificate(la._forgotten, 0.0, la._lost, remains)
    return Certificate(la._forgotten, 0.0, None, remains)  # the structure was made again


def codes_of_examples(la: Laplace) -> Tensor | None:
    """What a file keeps to tell which examples an approximation has seen; None for data not in memory."""
    if not hasattr(la, "_structure"):
        return la._seen
    if files.flatten_inputs(la._train_inputs) is None:
        return None
    return codes_of(la, la._train_inputs, plain_targets(la, la._y))


def codes_of(la: Laplace, X: Any, y: Tensor) -> Tensor:
    """A checksum of each example with its target, (n,), by which a file tells what it has seen."""
    inputs = example_codes(as_source(X, la.lin_.module.forward))
    targets = example_codes(as_source({"y": y.float().reshape(len(y), -1).cpu()}, _takes_targets))
    return inputs + 3 * targets


def _takes_targets(y: Tensor) -> Tensor:
    return y


def plain_targets(la: Laplace, y: Tensor) -> Tensor:
    """Targets without weights and without the noise of each observation."""
    y = la._split(y)[0]
    return y[:, : y.shape[1] // 2] if la._y_is_known_noise else y


def _encode(la: Laplace, J: Jacobian, y: Any) -> Tensor:
    """Targets of a user as `plain_targets` has them."""
    targets = as_targets(la._encode_labels(y, J), J)
    if la._y_is_known_noise:
        return as_continuous("regression", targets, J.n, J.c, J.dtype, J.device).view(J.n, J.c)
    return without_weights(la._unit).targets(targets, J.n, J.c, dtype=J.dtype, device=J.device)


def _carry(la: Laplace) -> Laplace:
    other = type(la)(**la.get_params(deep=False))
    for name in CARRIED:
        if name in vars(la):
            setattr(other, name, vars(la)[name])
    other.tune_path_ = ()
    return other


def _set_examples(la: Laplace, inputs: Any, y: Tensor, weight: Tensor | None) -> None:
    la._train_inputs, la._y, la._weight = inputs, y, weight
    la._probe = draw_inputs(as_source(inputs, la.lin_.module.forward))


# The posterior.


def _make_again(la: Laplace, J: Jacobian, *, start: Laplace) -> None:
    """Fit the structure to the examples of J, without a search."""
    sums = la._pass_over(J)
    root = la._root(la._f, la._y) if sums is None or la.structure_ == "ekfac" else None
    la._structure = la._fitted(root, sums)
    if isinstance(la._structure, SampledCurvature) and isinstance(start._structure, SampledCurvature):
        known = start._structure._last
        la._structure._last = None if known is None else (math.nan, known[1])
    la._log_det = la._structure.log_det(la._prior)
    la._refresh()
    la._measure_distance(None)


def _subtract(
    structure: CurvatureStructure,
    posterior: Posterior,
    J: Jacobian,
    root: Any,
    kept: Tensor,
    other: Laplace,
    t: float,
) -> tuple[CurvatureStructure, Posterior] | None:
    """The structure and the posterior without the examples of J, whose curvature has a root; None for no such sum.

    Args:
        structure: The structure.
        posterior: Its posterior.
        J: Of the examples that go.
        root: Of their curvature.
        kept: The examples that stay.
        other: The approximation that the result is for, with the Jacobian of the examples that stay where it is there.
        t: One over the noise.
    """
    variance = other.prior_variance_
    if isinstance(structure, FullCurvature):
        part = J.normal_matrix(weight_from_root(root))
        less = FullCurvature(J, root, G=structure.G - 0.5 * (part + part.T))
        assert isinstance(posterior, WeightPosterior)
        other._lost += bound_rounding(posterior.factor)
        return less, less.posterior(variance, t)
    if isinstance(structure, DiagonalCurvature):
        values = structure.values - J.column_norms(weight_from_root(root))
        rounding = len(kept) * torch.finfo(values.dtype).eps * structure.values
        if bool((values < -rounding).any()):
            raise ValueError(
                "The curvature of the examples is larger than that of all examples that the posterior has seen: these "
                "examples were never there. Give examples as fit was given them."
            )
        other._lost += float((t * variance * rounding).max())
        diagonal = DiagonalCurvature(J, root, values=values.clamp_min(0))
        return diagonal, diagonal.posterior(variance, t)
    if isinstance(structure, KroneckerCurvature):
        joined = _join(structure, J, root, -1)
        if joined is None:
            return None
        other._lost += t * _bound_join(structure, variance)
        return joined, joined.posterior(variance, t)
    assert isinstance(structure, KernelCurvature) and isinstance(posterior, FunctionPosterior)
    c = J.c
    rows = (kept[:, None] * c + torch.arange(c)).flatten()
    factor = remove_rows(posterior.factor, rows)
    blocks = structure.root.ndim > 1
    kernel = KernelCurvature(other._J, structure.root[(kept if blocks else rows).to(structure.root.device)])
    found = FunctionPosterior(kernel.J, variance, torch.zeros_like(variance), root=kernel.root * t**0.5, factor=factor)
    return kernel, found


def _join(structure: KroneckerCurvature, J: Jacobian, root: Any, sign: int) -> KroneckerCurvature | None:
    """The structure with the examples of J, or without them; None where factors of it are no sums that are known."""
    factors, earlier = J.kronecker(root), structure.factors
    if earlier is None or not earlier.matches(factors):
        return None
    factors.join(earlier, sign)
    return KroneckerCurvature(None, None, factors=factors)


def _bound_join(structure: KroneckerCurvature, variance: Tensor) -> float:
    """What rounding of the factors can do to variances at noise one, in units of the prior variance."""
    turns = structure.rotation.turns
    eps, rest = torch.finfo(structure.values.dtype).eps, (variance * structure.values).clone()
    bound = 0.0
    for r, turn in turns.items():
        d = turn.Qg.d + (0 if turn.Qx is None else turn.Qx.d)
        bound = max(bound, d * eps * float(rest[slice(*r)].max()))
        rest[slice(*r)] = 0
    return max(bound, len(structure.values) * eps * float(rest.max()))


def _accept(la: Laplace, structure: CurvatureStructure, posterior: Posterior, before: Laplace) -> None:
    """Take over a structure and its posterior at the prior and the noise that there are."""
    la._structure, la.posterior_ = structure, posterior
    la._log_det = KnownLogDet(structure, posterior, la._prior, la._scales, 1 / la._noise)
    la.variance_ = before.variance_
    la.effective_dimension_ = sum(la._log_det(la._scales, 1 / la._noise)[1])


@final
class KnownLogDet(LogDet):
    """The log determinant of a posterior whose factor is known; at other scales that of the structure, when asked for.

    Args:
        structure: The structure.
        posterior: Its posterior.
        prior: The prior.
        scales: The scales of the posterior.
        t: One over its noise.
    """

    def __init__(
        self, structure: CurvatureStructure, posterior: Posterior, prior: Prior, scales: Sequence[float], t: float
    ) -> None:
        self.structure, self.prior, self.at = structure, prior, (tuple(scales), t)
        self.factor = getattr(posterior, "factor", None) if len(scales) == 1 else None
        self.count = max(1, len(prior.scales))

    @cached_property
    def whole(self) -> LogDet:
        """That of the structure."""
        return self.structure.log_det(self.prior)

    def __call__(self, scales: Sequence[float], t: float) -> tuple[float, list[float]]:
        if self.factor is None or (tuple(scales), t) != self.at:
            return self.whole(scales, t)
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
        inverse = solve_lower(self.factor, eye, overwrite=True)
        value = 2 * float(self.factor.diagonal().double().log().sum())
        return value, [len(eye) - float(inverse.square().sum())]

    def traces(self) -> list[float]:
        if self.factor is None:
            return self.whole.traces()
        (scale,), t = self.at
        return [(float(self.factor.tril().square().sum()) - len(self.factor)) / (t * scale)]


# Approximations from files, which hold no training data.


def _forget_in_file(la: Laplace, X: Any, y: Any) -> Laplace:
    if la._earlier is not None:
        raise NotImplementedError(
            "An approximation with an earlier posterior as its prior is made again from the examples that stay, and a "
            "file does not hold them. Fit again without the examples: Laplace(model, prior=earlier).fit(X, y)."
        )
    if la.structure_ not in SUMS or la.draws_ is not None:
        raise NotImplementedError(
            f"structure={la.structure_!r} is made again from the examples that stay, and a file does not hold them. "
            f"Fit again without the examples, or use one of {', '.join(map(repr, SUMS))}."
        )
    if la.structure_ == "kron" and la._traces is None:
        raise NotImplementedError(
            "The file does not say what its Kronecker factors were made of: an earlier version wrote it, a factor is "
            "sketched, or a layer has no curvature. Fit again without the examples, or use structure='diag'."
        )
    if la._seen is None:
        raise ValueError(
            "The file cannot tell which examples the approximation has seen: it was written by an earlier version, or "
            "the training data were not tensors or arrays. Fit again without the examples."
        )
    if y is None:
        raise ValueError(
            "A file holds no training data, so that positions say nothing: give the examples themselves, forget(X, y)."
        )
    X = check_inputs(la, X, reset=False)
    J = la._jacobian(X)
    targets = _encode(la, J, y)
    gone = _find_codes(la._seen, codes_of(la, X, targets))
    kept = torch.ones(len(la._seen), dtype=torch.bool)
    kept[gone] = False
    if not bool(kept.any()):
        raise ValueError(
            f"The posterior has seen {len(kept):,} examples, and all of them are to be forgotten: nothing but the "
            "prior is left. Use an estimator that is not fitted."
        )
    rest = kept.nonzero()[:, 0]
    unit, f = la._unit, J.outputs()
    if la._y_is_known_noise:
        targets = KnownNoise.pack(targets, as_variances(la._noise_each[gone], J.n, J.c).to(targets))
    if la._weight is not None:
        unit, targets = Weighted.pack(unit, targets, la._weight[gone].to(J.device, J.dtype))
    other = _carry(la)
    other._unit = unit
    root = other._root(f, targets)
    lost = float(other._unit.log_prob(f, targets).sum())
    other._unit = la._unit
    other._forgotten = la._forgotten + len(gone)
    other._seen, other._weight = la._seen[rest], None if la._weight is None else la._weight[rest]
    if la._y_is_known_noise:
        other._noise_each = la._noise_each[rest]
        other.noise, other.noise_ = other._noise_each, other._noise_each.cpu().numpy()
    before, variance = _structure_of(la), la.prior_variance_
    if la.structure_ == "function":
        (other._train_inputs,) = take_parts([la._train_inputs], rest, la.lin_.module.forward)
        other._J = other._jacobian(other._train_inputs).cached()
        other._probe = draw_inputs(as_source(other._train_inputs, la.lin_.module.forward))
    else:
        other._probe = None
    changed = _subtract(before, la.posterior_, J, root, rest, other, 1.0)
    if changed is None:
        raise NotImplementedError(
            "The examples reach the layers of the network in another form than the first training examples did, so "
            "that the Kronecker factors in the file do not fit. Fit again without the examples."
        )
    structure, other.posterior_ = changed
    other._traces = traces_of(structure)
    prior = Prior("given", variance)
    old = KnownLogDet(before, la.posterior_, prior, (1.0,), 1.0)((1.0,), 1.0)[0]
    new, gamma = KnownLogDet(structure, other.posterior_, prior, (1.0,), 1.0)((1.0,), 1.0)
    other._known_evidence = la._known_evidence - lost + 0.5 * (old - new)
    other.variance_, other.effective_dimension_ = la.variance_, sum(gamma)
    other.gradient_norm_ = other.gradient_ratio_ = math.nan  # of the training data
    return other


def _structure_of(la: Laplace) -> CurvatureStructure:
    """The structure that a posterior was made from, at noise one."""
    posterior, S = la.posterior_, la.prior_variance_
    safe = torch.where(S > 0, S, 1.0)
    if isinstance(posterior, WeightPosterior):
        H = posterior.factor.tril() @ posterior.factor.tril().T
        H.diagonal().sub_(1)
        d = safe.rsqrt()
        return FullCurvature(None, None, G=d[:, None] * H * d)
    if isinstance(posterior, DiagonalPosterior):
        values = torch.where(S > 0, 1 / torch.where(S > 0, posterior.variances, 1.0) - 1 / safe, 0.0)
        return DiagonalCurvature(None, None, values=values.clamp_min(0))
    if isinstance(posterior, TurnedPosterior):
        values = torch.where(S > 0, 1 / torch.where(S > 0, posterior.variances, 1.0) - 1 / safe, 0.0).clamp_min(0)
        assert posterior.rotation is not None and la._traces is not None and la._seen is not None
        factors = Decomposed(posterior.rotation, values, la._traces, len(la._seen))
        return KroneckerCurvature(None, None, factors=factors)
    assert isinstance(posterior, FunctionPosterior)
    return KernelCurvature(posterior.J, posterior.root)  # type: ignore[arg-type]


def traces_of(structure: CurvatureStructure) -> dict[tuple[int, int], Tensor] | None:
    """What a file keeps to make the sums of Kronecker factors again; None where the sums are not known."""
    if not isinstance(structure, KroneckerCurvature) or structure.factors is None or not structure.factors.complete:
        return None
    return dict(structure.factors.traces)


def _find_codes(seen: Tensor, wanted: Tensor) -> Tensor:
    """Positions in ``seen`` of some codes, each once."""
    places = defaultdict(list)
    for i, code in enumerate(seen.tolist()):
        places[code].append(i)
    missing = []
    found = []
    for i, code in enumerate(wanted.tolist()):
        if places.get(code):
            found.append(places[code].pop())
        else:
            missing.append(i)
    if missing:
        raise ValueError(
            f"{len(missing):,} of the {len(wanted):,} examples to forget are not among the {len(seen):,} that the "
            f"posterior has seen; the first of them is example {missing[0]}: it was never there with this target. Give "
            "examples as fit was given them, each as often as it is to be forgotten."
        )
    return torch.tensor(found)
