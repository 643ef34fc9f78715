r"""What each training example does to a prediction or to a loss, from the posterior of a fitted estimator.

Around the fit, the weights minimize the quadratic whose Hessian is the inverse covariance of the posterior,
:math:`H = \sum_j J_j^\top B_j J_j + S^{-1}`. An example i has the residual :math:`r_i`, the gradient of log p in the
outputs, and the curvature :math:`B_i`. Without the example the weights move by one Newton step, and a number with the
gradient g in the weights moves by

.. math:: -g^\top H^{-1} J_i^\top (I - B_i C_{ii})^{-1} r_i, \qquad C_{ii} = J_i H^{-1} J_i^\top .

With Gaussian noise this is exact: the number that a refit without the example gives, with prior and noise kept. For
other likelihoods the step ends where the curvature of the others is taken for constant. To first order the change is
:math:`-g^\top H^{-1} J_i^\top r_i`, and the derivative in the weight of the example is minus that.

S is the prior of the fit, whose scales the evidence has chosen: nothing else is added to H. For `Laplace` these are the
scales of largest evidence, before they were narrowed (`linnet.Laplace.tune`): narrowing is for averages of predictions
over the posterior, and there are none here.

============================================  ====================================================================
posterior                                     "leave-out"
============================================  ====================================================================
dense ("full", "function", solvers            the whole step
"function" and "weight"), "subnetwork"
"kron", "ekfac", "diag", "lowrank"            first order: the leverage of an example is not known from them
"samples", conjugate gradients                first order, with exact solves in the place of the draws
variational                                   the step of the mean, with averages of residual and curvature over the
                                              posterior and the covariance kept; the whole step where it is dense
============================================  ====================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from linnet._common import check_fits, find_dense_budget, show_progress, together
from linnet._estimator import (
    as_targets,
    check_inputs,
    convert_like,
    example_codes,
    files,
    is_ensemble,
    leave_out_weightless,
)
from linnet.data import Batch, as_source
from linnet.inference import solve_posterior
from linnet.jacobian import Jacobian, combine_outputs
from linnet.laplace import Laplace, codes_of, codes_of_examples
from linnet.probability import (
    KnownNoise,
    Likelihood,
    Posterior,
    Sites,
    SubnetworkPosterior,
    take_expectations,
)
from linnet.tangent import TangentClassifier, TangentGLM, TangentRegressor

__all__ = ["Ranking", "attribution"]

Change = Literal["leave-out", "up-weight"]
Rank = Literal["absolute", "highest", "lowest"]
Parts = Literal["layer", "site"]

DRAWS = 256
"""Draws of the logits of an example for averages over a variational posterior: memory against noise in a residual."""

KERNEL = 2**26
"""Numbers of a kernel with the training data that are held at a time: memory against passes over these data."""


class Ranking(NamedTuple):
    """The training examples that change each number most.

    Attributes:
        indices: Positions among the training examples, (m, k) or (m, c, k), first those that come first in the order
            that was asked for.
        changes: Their changes, in the same shape.
        sites: With ``by="site"``, which site of the example; else None.
    """

    indices: Any
    changes: Any
    sites: Any = None


@together
@torch.no_grad()
def attribution(
    estimator: Any,
    X: Any,
    y: Any = None,
    *,
    of: Any = "output",
    change: Change = "leave-out",
    by: Parts | None = None,
    top: int | None = None,
    rank: Rank = "absolute",
    data: Any = None,
) -> Any:
    """How outputs or losses at X change when each training example is left out, or counts for more.

    Changes are in the units of what changes. A positive change of an output, or of a loss, means that it is larger
    without the example: an example that lowers the loss, which is a helpful one, has a positive change.
    `linnet.onward.influence` has the formula.

    Args:
        estimator: A fitted `Laplace`, `TangentRegressor`, `TangentClassifier` or `TangentGLM`.
        X: Inputs, as the estimator's predict takes them.
        y: Targets at X, for a loss.
        of: What changes. "output" is each output f of the linearized network: a number, or a logit. "loss" is minus the
            log probability of the target, in nats, to first order in the change of the outputs. A function of the
            outputs (m, c) of m examples, or of outputs and targets, returns a number for each example, (m,); its
            change is of first order too.
        change: "leave-out", what happens when the example is left out; or "up-weight", the derivative in the weight of
            the example: what one more copy of the example would do, to first order.
        by: None for whole examples; "layer" for the part of each layer, which add up; "site" for the label of each
            site (token, pixel) of a training example.
        top: Only the ``top`` examples that change each number most. Memory then does not grow with the number of
            training examples, beyond their outputs and targets.
        rank: Which ones these are: "absolute" (the largest changes of both signs), "highest" or "lowest".
        data: The training data of the fit, ``(X, y)`` or a Dataset, for an estimator that was loaded from a file. With
            ``change="up-weight"`` any labeled examples: those that might be added.

    Returns:
        Changes (m, n) for m inputs with one number each and n training examples; of several outputs (m, c, n). With
        ``by="layer"`` a dict of these by layer, with ``by="site"`` a last axis of sites. With ``top`` a `Ranking` in
        the place of each. Examples of weight zero, and ignored ones, are not counted among the n.

    Example:
        >>> from torch import nn
        >>> X = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double()
        >>> reg = TangentRegressor(model, noise=0.01, prior=1.0).fit(X, torch.sin(2 * X[:, 0]))
        >>> changes = attribution(reg, X[:3] + 0.1)
        >>> changes.shape, bool(torch.allclose(changes, -reg.influence(X[:3] + 0.1)))
        (torch.Size([3, 20]), True)
        >>> attribution(reg, X[:3] + 0.1, top=2).indices.shape
        torch.Size([3, 2])
    """
    _check_arguments(estimator, of, change, by, top, rank)
    fitted = _Fitted(estimator)
    J = estimator._jacobian(_checked(estimator, X))
    f = fitted.outputs(J)
    gradients = _gradients(fitted, J, f, y, of)  # (m, c); None for each output
    numbers = J.n * (J.c if gradients is None else 1)
    shape = (J.n,) if gradients is not None or fitted.one_column else (J.n, J.c)
    if data is None and by is None and change == "leave-out" and fitted.has_closed_form:
        return _shaped(X, _closed_form(estimator, J, gradients, top, rank), shape, None)
    parts = fitted.training(data, change=change, by=by)
    sites = parts[0].sites
    rows = sum(part.n for part in parts) * sites
    layers = list(J.lin.layout.layers) if by == "layer" else None
    collect: _Collector
    count = 1 if layers is None else len(layers)
    if top is None:
        check_fits(
            count * rows * numbers * J.lin.network.row_dtype.itemsize,
            estimator.memory,
            J.device,
            what=f"The changes of {numbers:,} numbers by {rows:,} training "
            + ("sites" if by == "site" else "examples")
            + (f" and {count} layers" if layers else ""),
            instead="Ask for the largest changes alone, with top=",
        )
        collect = _Matrix(count, rows, numbers)
    else:
        collect = _Best(count, min(top, rows), rank)
    columns = _columns_at_once(estimator, J)
    with show_progress(numbers, "numbers to explain", progress=estimator.progress) as tick:
        for place, G in _blocks(J, gradients, columns):
            V = fitted.multiply(G)
            del G
            before = 0
            for part in parts:
                part.add(V, place, before * sites, collect, by_layer=by == "layer")
                before += part.n
            tick(V.shape[1])
    found = collect.found(parts[0].ranks)
    names: Any = [None] if layers is None else layers
    answers = {
        name: _shaped(X, one, shape, sites if by == "site" else None) for name, one in zip(names, found, strict=True)
    }
    return answers if layers is not None else answers[None]


# The fit.


class _Part:
    """Training examples that were read together.

    Args:
        J: (n c, p).
        U: (n, c, s): the change is ``U^T J V``, in s parts.
    """

    def __init__(self, J: Jacobian, U: Tensor) -> None:
        self.n, self.sites, self.ranks = J.n, U.shape[2], J.ranks
        # One backward pass for each part of an example, in the place of one for each output.
        whole = J.c == 1 == self.sites
        self.rows = (J if whole else combine_outputs(J, U.to(J.dtype))).in_row_dtype()
        self.u = U[:, 0].to(self.rows.dtype) if whole else None

    def add(self, V: Tensor, place: slice, before: int, collect: _Collector, *, by_layer: bool) -> None:
        """Show the changes of all numbers to a collector.

        Args:
            V: ``H^-1 G``, (p, k).
            place: The numbers that the columns of V belong to.
            before: Rows of the parts before.
            collect: Takes the changes.
            by_layer: Whether it takes the part of each layer.
        """
        s = self.sites

        def take(state: Any, JV: Tensor, batch: Batch) -> Any:
            changes = JV if self.u is None else JV * self.u[batch.start : batch.start + batch.n]
            rows = slice(before + batch.start * s, before + (batch.start + batch.n) * s)
            return collect.take(state, changes if by_layer else changes[None], rows, place)

        V = V.to(self.rows.dtype)
        state = self.rows.fold_product(take, V, lambda: collect.state(place), by_layer=by_layer)
        collect.keep(state, place, self, rows=slice(before, before + self.n * s))


@dataclass
class _Examples:
    """Labeled examples at the fit.

    Attributes:
        J: (n c, p).
        f: (n, c), outputs of the linearized network.
        y: Targets, without weights.
        weight: How many times each example counts, (n,); None for once.
    """

    J: Jacobian
    f: Tensor
    y: Tensor
    weight: Tensor | None


class _Fitted:
    """What attribution asks of an estimator: outputs, residuals, and products with the covariance of the posterior."""

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.posterior: Posterior = estimator.posterior_
        self.variance: Tensor = estimator.prior_variance_
        if isinstance(estimator, Laplace):
            self.posterior, self.variance = estimator._evidence_posterior(), estimator._evidence_variance
        elif isinstance(estimator, TangentRegressor) and hasattr(estimator, "_fit_"):
            self.posterior = estimator._point_fit().posterior
        # That is `TangentRegressor.influence`.
        self.has_closed_form = self.posterior.factored and hasattr(estimator, "_fit_")
        self.one_column: bool = getattr(estimator, "_one_column", False)
        self.known: Any = None  # J and a root of the curvature, for solves
        drawn = isinstance(estimator, Laplace) and estimator.draws_ is not None
        # The Hessian has the curvature of each example in it, so that no leverage reaches one.
        dense = self.posterior.factored or isinstance(self.posterior, SubnetworkPosterior)
        self.has_leverage = dense and not drawn
        self.variational = getattr(estimator, "inference", None) == "vi"

    def likelihood(self) -> Likelihood:
        if isinstance(self.estimator, TangentRegressor):
            raise AssertionError("A regressor has noise, not a likelihood.")
        found: Likelihood = self.estimator.likelihood_
        return found

    def outputs(self, J: Jacobian) -> Tensor:
        """The outputs of the linearized network at its posterior mean, (n, c)."""
        if isinstance(self.estimator, Laplace):
            return J.outputs()
        found = self.posterior.predict(J)
        out: Tensor = self.estimator._mean_function(found.f) + found.shift
        return out

    def loss_gradients(self, J: Jacobian, f: Tensor, y: Any) -> Tensor:
        """The gradient of minus log p in the outputs, (m, c)."""
        e = self.estimator
        if isinstance(e, TangentRegressor):
            targets = e._targets(y, J).view(J.n, J.c)
            self._check_one_noise(e, "at X. Use of='output', or a function of outputs and targets")
            return (f - targets) / e._noise_at(f, None)
        likelihood = self.likelihood()
        if isinstance(likelihood, KnownNoise):
            raise NotImplementedError(
                "The fit has a noise for each observation, and it does not know that of X. Use of='output', or a "
                "function of outputs and targets."
            )
        return -likelihood.residual(f, self.targets(y, J))

    def _check_one_noise(self, e: TangentRegressor, where: str) -> None:
        if e._noise_each or e._noise_name == "heteroscedastic":
            raise NotImplementedError(
                f"The noise of this regressor differs between observations: none is known {where}."
            )

    def targets(self, y: Any, J: Jacobian) -> Tensor:
        """Targets of new examples, as the likelihood takes them."""
        e = self.estimator
        if isinstance(e, TangentRegressor):
            found: Tensor = e._targets(y, J).view(J.n, J.c)
            return found
        if isinstance(e, Laplace):
            return e.likelihood_.targets(
                as_targets(e._encode_labels(y, J), J), J.n, J.c, dtype=J.dtype, device=J.device
            )
        encoded: Tensor = e._new_targets(y, J)
        return encoded

    # Training examples.

    def training(self, data: Any, *, change: Change, by: str | None) -> list[_Part]:
        """The training examples, with what their rows of J are to be combined by."""
        e = self.estimator
        sites = None if isinstance(e, TangentRegressor) else self.likelihood()
        if by == "site" and not isinstance(sites, Sites):
            raise ValueError(
                "by='site' is for networks with a label for each site (token, pixel) of an example: outputs of three "
                "or more axes. Leave by= out."
            )
        if isinstance(e, TangentRegressor):
            if data is None:
                return self._regressor_parts(change)
            self._check_one_noise(e, "in data=. Leave data= out, with the estimator that was fitted")
        examples = self._own() if data is None else self._given(data)
        J, f, y, w = examples.J, examples.f, examples.y, examples.weight
        B: Tensor | None
        if isinstance(e, TangentRegressor):
            precision = 1 / e._noise_at(f, None)
            r, B = (y - f) * precision, precision
            likelihood = None
        else:
            likelihood = self.likelihood()
            r, B = self._derivatives(likelihood, examples, leverage=change == "leave-out" and self.has_leverage)
        if self.posterior.known_from_samples:
            self.known = self._system(examples, likelihood)
        U = self._combinations(J, r, B, w, change=change, likelihood=likelihood, by=by)
        source = getattr(e, "_source", None)
        if source is not None and data is None:  # the examples of the source are not those of the task
            kept = torch.tensor([i for i in range(J.n) if i not in source])
            J, U = J.subset(kept), U[kept.to(U.device)]
        return [_Part(J, U)]

    def _own(self) -> _Examples:
        """Those that the estimator was fitted to."""
        e = self.estimator
        y = getattr(e, "_y" if isinstance(e, Laplace) else "_observed", None)
        if y is None or not (isinstance(e, Laplace) or e._train_inputs):
            raise ValueError(
                f"attribution needs the training examples, which this {type(e).__name__} does not hold: it was loaded "
                "from a file, or merged. Give them as data=(X, y)."
            )
        if isinstance(e, Laplace):
            labels, w = e._split(y)
            return _Examples(e._jacobian(e._train_inputs), e._f, labels, None if e._weight is None else w)
        J = e._jacobian(e._train_inputs[0])
        return _Examples(J, self.outputs(J), y, e._weight)

    def _given(self, data: Any) -> _Examples:
        e = self.estimator
        X, y, *rest = data if isinstance(data, tuple) else (data, None)
        weight = rest[0] if rest else None
        inputs, w, kept = leave_out_weightless(_checked(e, X), weight, e.lin_.module.forward)
        y = kept.take(y)
        J = e._jacobian(inputs)
        if isinstance(e, Laplace):
            if isinstance(e._predictive.inner, KnownNoise):
                raise NotImplementedError(
                    "The fit has a noise for each observation, which data= does not carry. Use the estimator that was "
                    "fitted, without data=."
                )
            inputs, J, y, labeled = e._labeled(inputs, J, y)
            w = labeled.take(w)
        y = self.targets(y, J)
        self._check_seen(inputs, y)
        return _Examples(J, self.outputs(J), y, None if w is None else w.to(J.device, J.dtype))

    def _check_seen(self, inputs: Any, y: Tensor) -> None:
        """Raise unless the fit has seen these examples, where the estimator can tell."""
        e, forward = self.estimator, self.estimator.lin_.module.forward
        if isinstance(e, Laplace):
            seen = codes_of_examples(e)
            given = None if seen is None else codes_of(e, inputs, y)
        else:
            parts = [*e._train_inputs, inputs]
            if len(parts) == 1 or any(files.flatten_inputs(X) is None for X in parts):
                return
            *known, given = (example_codes(as_source(X, forward)) for X in parts)
            seen = torch.cat(known)
        if seen is None or given is None:
            return
        others = (~torch.isin(given.cpu(), seen.cpu())).nonzero()[:, 0]
        if len(others):
            raise ValueError(
                f"{len(others):,} of the {len(given):,} examples in data= are not among the {len(seen):,} that the fit "
                f"has seen; the first of them is example {int(others[0])}. Give the data of the fit."
            )

    def _regressor_parts(self, change: Change) -> list[_Part]:
        """The examples of a regressor, which may have been added later."""
        e = self.estimator
        if not hasattr(e, "_fit_") or not e._train_inputs:
            raise ValueError(
                "attribution needs the training examples, which this TangentRegressor does not hold: it was loaded "
                "from a file, or merged. Give them as data=(X, y)."
            )
        fit, noise, c = e._point_fit(), e._train.noise, e._train.base.shape[1]
        u = fit.alpha.view(-1, c)
        B = 1 / fit.noise_rows.view(-1, c)
        w = None if noise.weight is None else noise.weight.view(-1, c)[:, 0]
        if change == "up-weight" and w is not None:
            u = u / w[:, None]
        own, parts, start = e._task_examples(len(u)), [], 0
        for X in e._train_inputs:
            J = e._jacobian(X)
            here, stop = slice(start, start + J.n), start + J.n
            found = u[here]
            if change == "leave-out" and self.has_leverage:
                found = _with_leverage(found, B[here], self._covariances(J))
            kept = own[(own >= start) & (own < stop)] - start
            if len(kept) < J.n:
                J, found = J.subset(kept), found[kept.to(found.device)]
            sign = -1 if change == "leave-out" else 1
            parts.append(_Part(J, sign * found[..., None]))
            start = stop
        if self.posterior.known_from_samples:
            self.known = e._train.J, (1 / fit.noise_rows).sqrt().view(-1, c)
        return parts

    def _derivatives(
        self, likelihood: Likelihood, examples: _Examples, *, leverage: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Residual (n, c) and curvature of an example of weight one, or their averages over a variational posterior."""
        J, f, y = examples.J, examples.f, examples.y
        if leverage and not likelihood.diagonal:
            self._check_blocks(J)
        if not self.variational:
            B = likelihood.observed_curvature(f, y) if leverage else None
            return likelihood.residual(f, y), B
        self._check_blocks(J)
        C = self._covariances(J)
        if likelihood.diagonal:
            found = take_expectations(likelihood, f, C.diagonal(dim1=1, dim2=2).contiguous(), y)
            return found.residual, found.curvature
        half = torch.randn(DRAWS // 2, 1, J.c, dtype=f.dtype, generator=torch.Generator().manual_seed(0)).to(f.device)
        parts = torch.arange(J.n, device=f.device).split(max(1, 2**22 // (DRAWS * J.c)))
        eps = torch.cat([half, -half])
        each = [take_expectations(likelihood, f[some], C[some], y[some], eps) for some in parts]
        return torch.cat([one.residual for one in each]), torch.cat([one.curvature for one in each])

    def _check_blocks(self, J: Jacobian) -> None:
        check_fits(
            4 * J.n * J.c**2 * J.dtype.itemsize,
            self.estimator.memory,
            J.device,
            what=f"Leaving out each of {J.n:,} examples with {J.c:,} outputs, by one Newton step,",
            instead="Use change='up-weight', whose minus is the first order of it",
        )

    def _covariances(self, J: Jacobian) -> Tensor:
        """C of each example, (n, c, c)."""
        return self.posterior.blocks(J)

    def _combinations(
        self,
        J: Jacobian,
        r: Tensor,
        B: Tensor | None,
        w: Tensor | None,
        *,
        change: Change,
        likelihood: Likelihood | None,
        by: str | None,
    ) -> Tensor:
        """U (n, c, s)."""
        sites = likelihood if isinstance(likelihood, Sites) and by == "site" else None
        if change == "up-weight":
            return r[..., None] if sites is None else _by_site(sites, r)
        r = r if w is None else w[:, None] * r
        if self.has_leverage:
            assert B is not None
            B = B if w is None else B * w.view(-1, *(1,) * (B.ndim - 1))
            C = self._covariances(J)
            if sites is not None:  # each label is left out by itself
                S = sites.split(r).shape[1]
                B = sites.split(B).flatten(0, 1) if B.ndim == 2 else sites.site_blocks(B)
                parts = _with_leverage(sites.split(r).flatten(0, 1), B, sites.site_blocks(C))
                return -_by_site(sites, parts.view(len(r), S, -1).flatten(1))
            r = _with_leverage(r, B, C)
        return -(r[..., None] if sites is None else _by_site(sites, r))

    # Products with the covariance.

    def _system(self, examples: _Examples, likelihood: Likelihood | None) -> tuple[Any, Any]:
        """J and a root of the curvature of all training examples."""
        e = self.estimator
        structure = getattr(e, "_structure", None)
        if structure is not None:
            return structure.J, structure.root * (1 / e._noise) ** 0.5
        J, f, y, w = examples.J, examples.f, examples.y, examples.weight
        if likelihood is None:
            return J, (1 / e._noise_at(f, None)).sqrt()
        root = likelihood.observed_root(f, y)
        return J, root if w is None else root * w.sqrt().view(-1, *(1,) * (root.ndim - 1))

    def multiply(self, G: Tensor) -> Tensor:
        """``H^-1 G``, (p, k)."""
        if self.known is None:
            return self.posterior.multiply(G)
        e, (J, root) = self.estimator, self.known
        options = {"seed": e.seed, "memory": e._memory if isinstance(e, Laplace) else e.memory, "progress": e.progress}
        return solve_posterior(J, self.variance, root, G, tolerance=max(1e-6, 1e3 * J.eps), **options)


def _with_leverage(r: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """``(I - B C)^-1 r``: the residual of an example where the example itself was left out."""
    BC = B[..., None] * C if B.ndim == 2 else B @ C
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    return torch.linalg.solve(eye - BC, r[..., None])[..., 0]


def _by_site(sites: Sites, r: Tensor) -> Tensor:
    """Residuals (n, sites c) as a column for each site, (n, sites c, sites)."""
    each = sites.split(r)  # (n, sites, c)
    return torch.diag_embed(each.mT).permute(0, 2, 1, 3).flatten(1, 2)


# Numbers to explain.


def _gradients(fitted: _Fitted, J: Jacobian, f: Tensor, y: Any, of: Any) -> Tensor | None:
    """The gradient of each number in the outputs, (m, c); None where the outputs are the numbers."""
    if isinstance(of, str):
        return None if of == "output" else fitted.loss_gradients(J, f, y)
    given = [] if y is None else [fitted.targets(y, J)]
    if y is None and len(inspect.signature(of).parameters) > 1:
        raise ValueError("of= is a function of outputs and targets, so it needs the targets y at X.")
    with torch.enable_grad():
        g = f.detach().requires_grad_()
        value = of(g, *given)
        if not isinstance(value, Tensor) or tuple(value.shape) != (J.n,):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"of= must return one number for each of the {J.n} inputs, ({J.n},); got {shape}.")
        (found,) = torch.autograd.grad(value.sum(), g)
    return found.detach()


def _columns_at_once(estimator: Any, J: Jacobian) -> int:
    """How many gradients are held at once: four blocks of them fit memory beside a chunk."""
    return max(1, int(0.5 * find_dense_budget(estimator.memory, J.device)) // (4 * J.shape[1] * J.dtype.itemsize))


def _blocks(J: Jacobian, gradients: Tensor | None, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """Which numbers, and their gradients in the weights (p, k), some at a time."""
    each = J.c if gradients is None else 1
    size = max(1, columns // each)
    if J.n > size and not J.by_position:
        check_fits(
            4 * J.n * each * J.shape[1] * J.dtype.itemsize,
            columns * 4 * J.shape[1] * J.dtype.itemsize,
            J.device,
            what=f"The gradients of {J.n * each:,} numbers in {J.shape[1]:,} parameters",
            instead="Give X as tensors, which can be read by position, or fewer inputs",
        )
    for start in range(0, J.n, size):
        part = J if J.n <= size else J.subset(torch.arange(start, min(start + size, J.n)))
        if gradients is not None:
            one = gradients[start : start + size]
            part = part if J.c == 1 else combine_outputs(part, one[..., None].to(J.dtype))
        G = part.dense(limit=2**62)
        if gradients is not None and J.c == 1:
            G = gradients[start : start + size] * G
        yield slice(start * each, start * each + len(G)), G.T.contiguous()


# What is kept of the changes.


class _Collector:
    """Takes changes of numbers, (layers, rows, k) at a time."""

    def state(self, place: slice) -> Any:
        """What a pass over some of the examples begins with, for some of the numbers."""

    def take(self, state: Any, changes: Tensor, rows: slice, place: slice) -> Any:
        """The next state."""
        raise NotImplementedError

    def keep(self, state: Any, place: slice, part: _Part, *, rows: slice) -> None:
        """A pass has ended."""

    def found(self, ranks: Any) -> list[Any]:
        """The answer of each layer."""
        raise NotImplementedError


class _Matrix(_Collector):
    """All changes."""

    def __init__(self, layers: int, rows: int, numbers: int) -> None:
        self.shape = layers, rows, numbers
        self.out: Tensor | None = None

    def take(self, state: Any, changes: Tensor, rows: slice, place: slice) -> Any:
        if self.out is None:
            self.out = changes.new_zeros(self.shape)
        self.out[:, rows, place] = changes

    def keep(self, state: Any, place: slice, part: _Part, *, rows: slice) -> None:
        if part.ranks.world > 1:
            if self.out is None:  # this rank has none of the examples
                self.out = torch.zeros(self.shape, dtype=part.rows.dtype, device=part.rows.device)
            for layer in self.out:
                own = layer[rows, place].contiguous()
                part.ranks.share_rows(own, part.n, part.sites)
                layer[rows, place] = own

    def found(self, ranks: Any) -> list[Any]:
        assert self.out is not None
        return [layer.T for layer in self.out]


class _Best(_Collector):
    """The changes that come first, in the memory of as many."""

    def __init__(self, layers: int, top: int, rank: Rank) -> None:
        self.layers, self.top, self.rank = layers, top, rank
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # changes and rows (layers, k, some), by the first number

    def state(self, place: slice) -> Any:
        return self.kept.get(place.start)

    def choose(self, changes: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those that come first, and their rows; rows below zero are none."""
        key = {"absolute": changes.abs(), "highest": changes, "lowest": -changes}[self.rank]
        order = key.masked_fill(rows < 0, -torch.inf).topk(min(self.top, changes.shape[1]), dim=1).indices
        return changes.gather(1, order), rows.gather(1, order)

    def take(self, state: Any, changes: Tensor, rows: slice, place: slice) -> Any:
        index = torch.arange(rows.start, rows.stop, device=changes.device)[:, None].expand(changes.shape)
        if state is None:
            return self.choose(changes, index)
        first = self.choose(changes, index)
        return self.choose(*(torch.cat(pair, 1) for pair in zip(state, first, strict=True)))

    def keep(self, state: Any, place: slice, part: _Part, *, rows: slice) -> None:
        if state is None:  # this rank has none of the examples
            none = torch.zeros(self.layers, 0, place.stop - place.start, device=part.rows.device)
            state = none.to(part.rows.dtype), none.long()
        self.kept[place.start] = state

    def found(self, ranks: Any) -> list[Any]:
        pairs = [self._of_all_ranks(*self.kept[start], ranks) for start in sorted(self.kept)]
        changes, rows = (torch.cat(column, 2) for column in zip(*pairs, strict=True))
        return [(r.T, v.T) for r, v in zip(rows, changes, strict=True)]

    def _of_all_ranks(self, changes: Tensor, rows: Tensor, ranks: Any) -> tuple[Tensor, Tensor]:
        if ranks.world == 1:
            return changes, rows
        missing = self.top - changes.shape[1]  # a collective takes parts of one size
        changes, rows = F.pad(changes, (0, 0, 0, missing)), F.pad(rows, (0, 0, 0, missing), value=-1)
        both = [ranks.gather_parts(t.movedim(1, 0).contiguous(), ranks.world * self.top) for t in (changes, rows)]
        return self.choose(*(t.movedim(0, 1) for t in both))


def _closed_form(estimator: Any, J: Jacobian, gradients: Tensor | None, top: int | None, rank: Rank) -> Any:
    """The changes that `TangentRegressor.influence` knows, some inputs at a time where few of them are kept."""
    size = J.n if top is None or not J.by_position else max(1, KERNEL // (J.c * estimator._train.J.shape[0]))
    whole: list[Any] = []
    for index in torch.arange(J.n).split(size):
        part = J if len(index) == J.n else J.subset(index)
        changes = -estimator._influence(part)  # (m, c, n)
        if gradients is not None:
            changes = (gradients[index.to(gradients.device)][..., None] * changes).sum(1, keepdim=True)
        changes = changes.flatten(0, 1)
        if top is not None:
            best = _Best(1, top, rank)
            values, rows = best.take(None, changes.T[None], slice(0, changes.shape[1]), slice(0, len(changes)))
            whole.append((rows[0].T, values[0].T))
        else:
            whole.append(changes)
    if top is None:
        return torch.cat(whole)
    return tuple(torch.cat(column) for column in zip(*whole, strict=True))


def _shaped(X: Any, found: Any, shape: tuple[int, ...], sites: int | None) -> Any:
    """Changes of numbers in the order of X, as the user's data are."""
    if isinstance(found, Tensor):
        last = (found.shape[1],) if sites is None else (found.shape[1] // sites, sites)
        return convert_like(X, found.reshape(*shape, *last))
    rows, values = (t.reshape(*shape, -1) for t in found)
    if sites is None:
        return Ranking(convert_like(X, rows), convert_like(X, values))
    return Ranking(*(convert_like(X, t) for t in (rows // sites, values, rows % sites)))


def _checked(estimator: Any, X: Any) -> Any:
    return check_inputs(estimator, X, reset=False, flat=getattr(estimator, "model", None) is None)


def _check_arguments(estimator: Any, of: Any, change: Any, by: Any, top: Any, rank: Any) -> None:
    if not isinstance(estimator, TangentRegressor | TangentClassifier | TangentGLM | Laplace):
        raise TypeError(
            "attribution takes a fitted TangentRegressor, TangentClassifier, TangentGLM or Laplace; got "
            f"{type(estimator).__name__}."
        )
    name = type(estimator).__name__
    if is_ensemble(estimator):
        raise NotImplementedError(
            f"attribution is for one network, and this {name} is an ensemble. Ask each of its members_."
        )
    check_is_fitted(estimator)
    if estimator.posterior_.is_point:
        raise ValueError(
            f"attribution needs the curvature, and this {name} has a mode alone. Fit it with inference='laplace' or "
            "'vi'."
        )
    if not callable(of) and of not in ("output", "loss"):
        raise ValueError(f"of must be 'output', 'loss' or a function of the outputs; got {of!r}.")
    for value, kind, names in (
        (change, "change", get_args(Change)),
        (by, "by", (None, *get_args(Parts))),
        (rank, "rank", get_args(Rank)),
    ):
        if value not in names:
            raise ValueError(f"{kind} must be one of {', '.join(map(repr, names))}; got {value!r}.")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int | np.integer) or top < 1):
        raise ValueError(f"top is a number of examples and must be positive; got {top!r}.")
