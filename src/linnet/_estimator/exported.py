r"""Predictions with error bars as a module of plain torch operations, which `torch.export` and ONNX take.

Where the parameters are those of the last layer, f = W h + b, a row of the Jacobian holds h, and an output has the
variance :math:`\sum_k (h^\top V_{jk} + v_{jk})^2` for a root V of the covariance of the parameters. That is one more
linear layer of the same input, exact for every form of the posterior.

For other parameters the module makes the rows of the Jacobian (see `linnet.network.plain_graph`), and takes the
variance :math:`\sum_i D_i R_i^2 + \sum_k s_k (J A)_k^2` of each row in the form of `linnet.probability.posteriors`.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet._common import atomic_write, check_fits, messages
from linnet.data import Batch
from linnet.jacobian import Rotation
from linnet.linalg import solve_upper, weigh
from linnet.network import FunctionalModel, Layout, check_whole, checks, find_input_tensors, trace_rows
from linnet.probability import (
    DiagonalPosterior,
    FunctionPosterior,
    KernelPosterior,
    LowRankPosterior,
    Posterior,
    SubnetworkPosterior,
    TurnedPosterior,
    square_root,
)

Form = Literal["numbers", "one number", "classes", "one logit", "labels"]
"""What a module returns: mean and standard deviation, in the shape (n, c) or (n,); or probabilities: of classes, of
both classes of one logit, or of labels that are on or off."""

ROUNDING = 1e4
"""Times eps by which the module may differ from the network on its own inputs."""

LARGEST = 0.05
"""Relative difference that counts as more than rounding for every dtype."""


class PredictiveModule(nn.Module):
    """Mean and standard deviation, or class probabilities, from one forward pass of a network without hooks or state.

    Args:
        network: The network; its last layer gives means and variances, one after another.
        read: Reads what the network returns as (n, 2 c).
        form: What is returned.
    """

    def __init__(self, network: nn.Module, read: Callable[[Any], Tensor], form: Form) -> None:
        super().__init__()
        self.network, self.read, self.form = network, read, form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mean, variance = self.read(self.network(*args, **kwargs)).chunk(2, -1)
        if self.form == "numbers":
            return mean, variance.sqrt()
        if self.form == "one number":
            return mean[:, 0], variance[:, 0].sqrt()
        scaled = mean / (1 + math.pi / 8 * variance).sqrt()
        if self.form == "classes":
            return scaled.softmax(-1)
        p = scaled.sigmoid()
        return p if self.form == "labels" else torch.cat([1 - p, p], -1)

    def export(self, path: str | os.PathLike[str], *inputs: Tensor) -> None:
        """Write the module to a file that needs neither linnet nor the code of the network.

        Args:
            path: A .pt2 file, which `torch.export.load` reads, or an .onnx file for ONNX runtimes.
            inputs: Two or more examples; the file takes batches of any size.
        """
        path = Path(path)
        if path.suffix not in (".pt2", ".onnx"):
            raise ValueError(f"export writes .pt2 files (torch.export) and .onnx files; got {path}.")
        if not inputs or not all(isinstance(x, Tensor) and x.ndim and len(x) > 1 for x in inputs):
            raise ValueError("export needs inputs of the network, as tensors of two or more examples.")
        messages.check_writable(path, "path")
        if path.suffix == ".onnx" and importlib.util.find_spec("onnxscript") is None:
            raise ImportError(
                "ONNX files need onnx and onnxscript: pip install 'linnet[onnx]'. A .pt2 file needs none."
            )
        shapes = (tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs),)
        program = torch.export.export(self, inputs, dynamic_shapes=shapes, strict=False)
        self._check_program(program, inputs)
        with atomic_write(path) as temporary:
            if path.suffix == ".pt2":
                torch.export.save(program, temporary)
            else:
                _make_onnx(program, inputs).save(temporary, external_data=False)

    def _check_program(self, program: torch.export.ExportedProgram, inputs: tuple[Tensor, ...]) -> None:
        """Raise unless the exported program gives the answers of the module for batches of other sizes."""
        loaded = program.module()
        for some in (tuple(x[:1] for x in inputs), tuple(torch.cat([x, x[:1]]) for x in inputs)):
            found, expected = loaded(*some), self(*some)
            both = ((found, expected),) if isinstance(found, Tensor) else zip(found, expected, strict=True)
            for a, b in both:
                limit = min(ROUNDING * torch.finfo(b.dtype).eps, LARGEST) * float(b.abs().max())
                if a.shape != b.shape or not bool((a - b).abs().max() <= limit):
                    raise NotImplementedError(
                        f"The file would give other answers than the module for a batch of {len(some[0])}: "
                        "torch.export has written the size of the batch into the file. Choose params='last_layer'."
                    )


def _make_onnx(program: torch.export.ExportedProgram, inputs: tuple[Tensor, ...]) -> Any:
    """An exported program as an ONNX program."""
    way_out = "Write a .pt2 file instead, or choose params='last_layer'."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about its own parts
            found = torch.onnx.export(program, inputs, dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        named = re.search(r"target=torch\.ops\.([\w.]+)", f"{error} {error.__cause__}")
        name = named.group(1) if named else "that the error above names"
        raise NotImplementedError(f"ONNX has no form of the operation {name}. {way_out}") from error
    assert found is not None and found.exported_program is not None
    names = {str(node.target) for node in found.exported_program.graph.nodes}
    if any("as_strided" in name for name in names):
        raise NotImplementedError(f"The operation as_strided reads the memory of a tensor, which ONNX hides. {way_out}")
    return found


class HeadWithVariance(nn.Module):
    """A linear layer that returns its outputs and their variances, (..., 2 c).

    Args:
        weight: (c, d), of the mean.
        bias: (c,), of the mean.
        root: (c, d + 1, k), roots of the covariance of the parameters of each output, the bias last; or None.
        squares: (c, d + 1), variances of independent parameters; or None.
    """

    weight: Tensor
    bias: Tensor
    root: Tensor | None
    squares: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor, root: Tensor | None, squares: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("root", None if root is None else root.movedim(1, 2).flatten(0, 1).contiguous())
        self.register_buffer("squares", squares)
        self.outputs = len(weight)

    def forward(self, h: Tensor) -> Tensor:
        mean = F.linear(h, self.weight, self.bias)
        if self.squares is not None:
            variance = F.linear(h.square(), self.squares[:, :-1], self.squares[:, -1])
        else:
            assert self.root is not None
            T = F.linear(h, self.root[:, :-1], self.root[:, -1])
            variance = T.unflatten(-1, (self.outputs, -1)).square().sum(-1)
        return torch.cat([mean, variance], -1)


class RowsWithVariance(nn.Module):
    r"""Means and variances (n, 2 c) from outputs of a network and rows of its Jacobian, n c p numbers.

    A row has the variance :math:`\sum_i D_i R_i^2 + \sum_k s_k (J A)_k^2`, with R the row in rotated coordinates. Where
    A is given, products are made in the dtype of A, since the sum may be a difference.

    Args:
        rows: From inputs to outputs (n, c) and rows (n, c, p).
        keywords: Names of the inputs that have names, in their order.
        delta: (p,), of the mean.
        D: (p,), or None for zero.
        rotation: Coordinates of D; None for the parameters' own.
        A: (p, k), or None for zero.
        weights: s, (k,).
        with_network: Whether the mean holds the outputs of the network itself.
        level: (c,), added to the mean; None for nothing.
    """

    delta: Tensor
    D: Tensor | None
    A: Tensor | None
    weights: Tensor | None
    level: Tensor | None

    def __init__(
        self,
        rows: nn.Module,
        keywords: Sequence[str],
        delta: Tensor,
        *,
        D: Tensor | None,
        rotation: Rotation | None,
        A: Tensor | None,
        weights: Tensor | None,
        with_network: bool,
        level: Tensor | None,
    ) -> None:
        super().__init__()
        self.rows, self.keywords, self.with_network = rows, tuple(keywords), with_network
        tensors = {"delta": delta, "D": D, "A": A, "weights": weights, "level": level}
        for name, t in tensors.items():
            self.register_buffer(name, None if t is None else t.clone())
        self.layout: Layout | None = None if rotation is None else rotation.layout
        turns = {} if rotation is None else rotation.tensors()
        self.turns = tuple(turns)
        for i, t in enumerate(turns.values()):
            self.register_buffer(f"turn_{i}", t.to(delta.dtype, copy=True).contiguous())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        named = {name: kwargs.pop(name) for name in self.keywords if name in kwargs}
        if kwargs:
            raise TypeError(f"The module takes the inputs {', '.join(self.keywords)}; got {', '.join(kwargs)}.")
        f, J = self.rows(*find_input_tensors(args, named))
        dtype, f, J = f.dtype, f.to(self.delta.dtype), J.to(self.delta.dtype)
        mean = J @ self.delta
        mean = mean + f if self.with_network else mean
        mean = mean if self.level is None else mean + self.level
        variance = torch.zeros_like(mean)
        if self.D is not None:
            variance = self._turn(J).square() @ self.D
        if self.A is not None:
            variance = (variance + ((J @ self.A).square() * self.weights).sum(-1)).clamp_min(0)
        return torch.cat([mean, variance], -1).to(dtype)

    def _turn(self, J: Tensor) -> Tensor:
        """Rows in the coordinates of D."""
        if self.layout is None:
            return J
        tensors = {name: getattr(self, f"turn_{i}") for i, name in enumerate(self.turns)}
        rotation = Rotation.from_tensors(tensors, self.layout)
        return rotation.rows(J.flatten(0, 1)).unflatten(0, (-1, J.shape[1]))


def make_predictive_module(
    estimator: Any, form: Form, *, with_network: bool, level: Tensor | None, network: nn.Module | None = None
) -> PredictiveModule:
    """The module of a fitted estimator.

    Args:
        estimator: The estimator.
        form: What the module returns.
        with_network: Whether the mean holds the outputs of the network itself.
        level: (c,), added to the mean; None for nothing.
        network: The module that was linearized, if it is not the user's network; None for the user's network.
    """
    lin, posterior = estimator.lin_, estimator._error_bars
    if posterior.is_point:
        raise ValueError("The fit has a mode and no error bars. Fit with inference='vi' or 'laplace'.")
    lin.check_unchanged(contents=True)
    check_whole(lin.given, "to_module")
    expected = _predict_probe(estimator, level, with_network=with_network)
    name = _find_last_layer(lin)
    own = FunctionalModel.of(lin.given if network is None else network, list(lin.theta), output=lin.network.output)
    with own.in_precision("highest"):
        if name is not None:
            changed = _put_head(estimator, name, with_network=with_network, level=level)
            read = checks.output_tensor if lin.network.output is None else lin.network.output
            module = PredictiveModule(changed, read, form).eval()
            if _is_same(module, expected):
                return module
        module = PredictiveModule(_make_rows(estimator, own, expected, with_network, level), _as_given, form).eval()
        same = _is_same(module, expected)
    if not same:
        raise NotImplementedError(
            f"The module would differ from predict by more than rounding: it computes in {expected.dtype}, the dtype "
            "of the network. Fit a network in float64 (model.double()), or choose params='last_layer'."
        )
    return module


def _as_given(raw: Tensor) -> Tensor:
    return raw


def _put_head(estimator: Any, name: str, *, with_network: bool, level: Tensor | None) -> nn.Module:
    """The network with a layer that returns its outputs and their variances."""
    lin, posterior = estimator.lin_, estimator._error_bars
    network = copy.deepcopy(lin.given).eval().requires_grad_(False)
    head = network.get_submodule(name)
    assert isinstance(head, nn.Linear)
    where = lin.layout.unflatten(torch.arange(lin.p))
    at = where[f"{name}.weight".removeprefix(".")]
    bias_at = where.get(f"{name}.bias".removeprefix("."))

    def place(values: Tensor) -> Tensor:
        """Values (p, ...) of the parameters as (c, d + 1, ...); zero for a bias that is not random."""
        values = values.to(head.weight.device)
        last = values.new_zeros(len(at), *values.shape[1:]) if bias_at is None else values[bias_at]
        return torch.cat([values[at], last[:, None]], 1)

    root, squares = find_root(posterior, estimator.memory)
    moved = place(estimator.posterior_.delta)
    bias = torch.zeros_like(moved[:, -1]) if head.bias is None else head.bias.to(moved)
    weight, bias = (
        (head.weight.to(moved) + moved[:, :-1], bias + moved[:, -1]) if with_network else (moved[:, :-1], moved[:, -1])
    )
    bias = bias if level is None else bias + level.to(bias)
    parts = (None if values is None else place(values).to(head.weight) for values in (root, squares))
    new = HeadWithVariance(weight.to(head.weight), bias.to(head.weight), *parts)
    if not name:
        return new
    network.set_submodule(name, new)
    return network


def _make_rows(
    estimator: Any, own: FunctionalModel, expected: Expected, with_network: bool, level: Tensor | None
) -> nn.Module:
    """The module that makes rows of the Jacobian."""
    lin, posterior, batch = estimator.lin_, estimator._error_bars, expected.batch
    c, dtype = expected.f.shape[1], expected.dtype
    check_fits(
        20 * c * lin.p * dtype.itemsize,  # two copies of the rows of ten examples
        estimator.memory,
        lin.device,
        what=f"A module with rows of the Jacobian, {c} x {lin.p:,} numbers for each example,",
        instead="Choose params='last_layer', which needs no rows",
    )
    rows = trace_rows(own, batch)
    D, A, weights = find_form(posterior, estimator.memory)
    dtype = torch.promote_types(dtype, torch.float32)
    dtype = dtype if A is None else torch.promote_types(dtype, A.dtype)
    cast = {"D": D, "A": A, "weights": weights, "level": level}
    return RowsWithVariance(
        rows,
        tuple(batch.kwargs),
        estimator.posterior_.delta.to(dtype),
        rotation=posterior.rotation,
        with_network=with_network,
        **{name: None if t is None else t.to(lin.device, dtype) for name, t in cast.items()},
    )


def find_form(posterior: Posterior, memory: float | str) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """D (p,), A (p, k) and s (k,): a row J has the variance ``D R^2 + s (J A)^2``, R being the row, perhaps rotated."""
    S, p = posterior.D, len(posterior.delta)
    if not posterior.has_features:
        return S, None, None
    if S is None:
        root, _ = find_root(posterior, memory)
        assert root is not None
        return None, root, root.new_ones(root.shape[1])
    if isinstance(posterior, LowRankPosterior):
        eigenvalues, Q = torch.linalg.eigh(posterior.C - torch.eye(len(posterior.C)).to(posterior.C))
        return S, S.sqrt()[:, None] * (posterior.basis @ (Q * eigenvalues.abs().sqrt())), eigenvalues.sign()
    assert isinstance(posterior, FunctionPosterior | KernelPosterior)
    k = len(posterior.factor) if isinstance(posterior, FunctionPosterior) else posterior.R.shape[1]
    if p <= k:
        root, _ = find_root(posterior, memory)
        assert root is not None
        return None, root, root.new_ones(p)
    check_fits(
        3 * p * k * S.element_size(),
        memory,
        S.device,
        what=f"A module with products of {p:,} parameters with {k:,} outputs of the training data",
        instead="Fit with variance='samples', or Laplace with structure='diag', or choose params='last_layer'",
    )
    if isinstance(posterior, KernelPosterior):
        return S, S[:, None] * (posterior.J.T @ posterior.R), posterior.signs
    A = _whiten_training_data(posterior)
    return S, A, -A.new_ones(k)


def _whiten_training_data(posterior: FunctionPosterior) -> Tensor:
    """A (p, n c) with ``K_*X L C^-T = J* A`` and ``C C^T = M``."""
    eye = torch.eye(len(posterior.factor)).to(posterior.factor)
    half = weigh(solve_upper(posterior.factor, eye), posterior.root)
    return posterior.prior_variance[:, None] * (posterior.J.T @ half)


def find_root(posterior: Posterior, memory: float | str) -> tuple[Tensor | None, Tensor | None]:
    """A root V (p, k) of the covariance of the parameters, or their variances (p,) where they are independent."""
    if isinstance(posterior, DiagonalPosterior):
        return None, posterior.variances
    p = len(posterior.delta)
    if isinstance(posterior, SubnetworkPosterior):
        V = posterior.W.new_zeros(p, posterior.W.shape[1])
        V[posterior.index] = posterior.W
        return V, None
    if posterior.directions is not None:
        return posterior.directions * posterior.weights**0.5, None
    check_fits(
        4 * p**2 * posterior.delta.element_size(),
        memory,
        posterior.delta.device,
        what=f"The covariance of the {p:,} parameters",
        instead="Fit with variance='samples', or Laplace with structure='diag'",
    )
    if isinstance(posterior, TurnedPosterior):
        assert posterior.rotation is not None
        return posterior.rotation.back(torch.diag(posterior.variances.sqrt())), None
    if isinstance(posterior, LowRankPosterior):
        P, eye = posterior.basis, torch.eye(len(posterior.C)).to(posterior.C)
        change = P @ (square_root(posterior.C) - eye) @ P.T
        change.diagonal().add_(1)
        return posterior.prior_variance.sqrt()[:, None] * change, None
    if isinstance(posterior, KernelPosterior):
        A = posterior.prior_variance[:, None] * (posterior.J.T @ posterior.R)
        C = torch.diag(posterior.prior_variance) + (posterior.signs * A) @ A.T
        return square_root(C, float(posterior.prior_variance.sum())), None
    assert isinstance(posterior, FunctionPosterior)
    S, A = posterior.prior_variance, _whiten_training_data(posterior)
    return square_root(torch.diag(S) - A @ A.T, float(S.sum())), None


def _find_last_layer(lin: Any) -> str | None:
    """The name of the linear layer that has all selected parameters; None where there is no such layer."""
    names = {name.rpartition(".")[0] for name in lin.theta}
    kinds = {name.rpartition(".")[2] for name in lin.theta}
    if len(names) > 1 or not kinds <= {"weight", "bias"} or "weight" not in kinds:
        return None
    (name,) = names
    return name if isinstance(lin.given.get_submodule(name), nn.Linear) else None


@dataclass(frozen=True)
class Expected:
    """What an estimator predicts for two inputs that its fit has kept.

    Attributes:
        batch: The inputs, in the dtype of the network.
        f: (n, c), outputs of the network.
        mean: (n, c).
        variance: (n, c).
        prior: The largest variance beforehand, of which the data leave the variance; 0 where it is not the difference.
        dtype: The dtype of the network.
    """

    batch: Batch
    f: Tensor
    mean: Tensor
    variance: Tensor
    prior: float
    dtype: torch.dtype


def _predict_probe(estimator: Any, level: Tensor | None, *, with_network: bool) -> Expected:
    """Predictions that a module is compared with."""
    batch, lin = estimator._probe, estimator.lin_
    if batch is None:
        raise ValueError("The file of this fit holds no inputs to compare the module with. Fit again, and save.")
    dtype = next(lin.given.parameters()).dtype
    batch = batch.to(lin.device).with_inputs(lambda t: t.to(dtype) if t.is_floating_point() else t)
    J = lin.jacobian(batch.args[0] if len(batch.args) == 1 and not batch.kwargs else batch.kwargs or batch.args)
    posterior = estimator._error_bars
    f, shift, variance = posterior.predict(J, "variance")
    subtracts = isinstance(posterior, FunctionPosterior | KernelPosterior)
    prior = float(J.gram_diag(scale=posterior.D).amax()) if subtracts else 0.0
    mean = shift + (f if with_network else 0.0)
    return Expected(batch, f, mean if level is None else mean + level, variance, prior, dtype)


def _is_same(module: PredictiveModule, expected: Expected) -> bool:
    """Whether a module agrees with predictions to rounding."""
    batch = expected.batch
    try:
        with torch.no_grad():
            found = module.read(module.network(*batch.args, **batch.kwargs))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    if found.shape != (len(expected.f), 2 * expected.f.shape[1]):
        return False
    mean, variance = found.chunk(2, -1)
    limit = min(ROUNDING * torch.finfo(expected.dtype).eps, LARGEST)
    size = expected.mean.abs().amax() + expected.f.abs().amax()
    far = (mean - expected.mean).abs().amax() > limit * size
    # A standard deviation may be small beside the mean, and what data leave of a variance small beside the variance.
    left = limit * expected.variance.amax() + 64 * torch.finfo(expected.variance.dtype).eps * expected.prior
    return not bool(far) and bool((variance - expected.variance).abs().amax() <= left)
