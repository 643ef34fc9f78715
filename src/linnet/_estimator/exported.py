r"""Predictions with error bars as a module of plain torch operations, which `torch.export` and ONNX take.

Where the parameters are those of the last layer, f = W h + b, a row of the Jacobian holds h, and an output has the
variance :math:`\sum_k (h^\top V_{jk} + v_{jk})^2` for a root V of the covariance of the parameters. That is one more
linear layer of the same input, exact for every form of the posterior. Parameters below the last layer need products
with the Jacobian, which neither exporter writes for batches of any size.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet._common import atomic_write, check_fits, messages
from linnet.linalg import solve_upper, weigh
from linnet.network import check_whole, checks
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
        with atomic_write(path) as temporary:
            if path.suffix == ".pt2":
                torch.export.save(program, temporary)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the exporter, about its own parts
                    torch.onnx.export(program, inputs, temporary, dynamo=True, verbose=False, external_data=False)


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


def make_predictive_module(estimator: Any, form: Form, *, with_network: bool, level: Tensor | None) -> PredictiveModule:
    """The module of a fitted estimator whose parameters are those of the last layer.

    Args:
        estimator: The estimator.
        form: What the module returns.
        with_network: Whether the mean holds the outputs of the network itself.
        level: (c,), added to the mean; None for nothing.
    """
    lin, posterior = estimator.lin_, estimator._error_bars
    if posterior.is_point:
        raise ValueError("The fit has a mode and no error bars. Fit with inference='vi' or 'laplace'.")
    lin.check_unchanged(contents=True)
    check_whole(lin.given, "to_module")
    name = _find_last_layer(lin)
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
    if name:
        network.set_submodule(name, new)
    else:
        network = new
    read = checks.output_tensor if lin.network.output is None else lin.network.output
    module = PredictiveModule(network, read, form).eval()
    _check_same(module, estimator, level, with_network=with_network)
    return module


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
        what=f"The covariance of the {p:,} parameters of the last layer",
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
    S, eye = posterior.prior_variance, torch.eye(len(posterior.factor)).to(posterior.factor)
    # K_*X L C^-T = J* A with C C^T = M.
    A = S[:, None] * (posterior.J.T @ weigh(solve_upper(posterior.factor, eye), posterior.root))
    return square_root(torch.diag(S) - A @ A.T, float(S.sum())), None


def _find_last_layer(lin: Any) -> str:
    """The name of the linear layer that has all selected parameters."""
    names = {name.rpartition(".")[0] for name in lin.theta}
    kinds = {name.rpartition(".")[2] for name in lin.theta}
    (name, *others) = sorted(names)
    if others or "weight" not in kinds or not isinstance(lin.given.get_submodule(name), nn.Linear):
        shown = ", ".join(list(lin.theta)[:3])
        raise NotImplementedError(
            f"A module with error bars is known for the weights of the last layer, an nn.Linear; the fit has {lin.p:,} "
            f"parameters, such as {shown}. Choose the last layer with params=, as in params='head.*' or 'fc.*'; "
            "predict has error bars for all parameters."
        )
    return name


def _check_same(module: PredictiveModule, estimator: Any, level: Tensor | None, *, with_network: bool) -> None:
    """Raise unless the layer gives the outputs of the network as they are: compare on two inputs."""
    batch, lin = estimator._probe, estimator.lin_
    if batch is None:
        raise ValueError("The file of this fit holds no inputs to compare the module with. Fit again, and save.")
    refused = NotImplementedError(
        "The selected layer is not the last of the network: its outputs are changed, or pooled, before they are "
        "returned. A module with error bars is known for the last layer alone; choose it with params=."
    )
    dtype, device = next(lin.given.parameters()).dtype, lin.device
    batch = batch.to(device).with_inputs(lambda t: t.to(dtype) if t.is_floating_point() else t)
    try:
        with torch.no_grad():
            found = module.read(module.network(*batch.args, **batch.kwargs))
    except (RuntimeError, ValueError, IndexError) as error:
        raise refused from error
    J = lin.jacobian(batch.args[0] if len(batch.args) == 1 and not batch.kwargs else batch.kwargs or batch.args)
    f, shift, variance = estimator._error_bars.predict(J, "variance")
    mean = shift + (f if with_network else 0.0)
    mean = mean if level is None else mean + level
    expected = torch.cat([mean, variance], -1)
    size = expected.abs().amax() + f.abs().amax()
    limit = ROUNDING * torch.finfo(dtype).eps * float(size)
    if found.shape != expected.shape or not bool((found - expected).abs().max() <= limit):
        raise refused
