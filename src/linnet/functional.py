"""A network as a function of its selected parameters: linnet's own copy of it, and what it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linnet import _checks
from linnet.batch import Batch, leaves
from linnet.contexts import Precision, arithmetic, network, of_network
from linnet.ieee import Convolving
from linnet.params import Layout, Params, select
from linnet.watch import Watch

Output = Callable[[Any], Tensor]
"""From what a model returns to a tensor (n, c) or (n,)."""


class Functional:
    """What `linnet.linearize.Linearization` is made of: the network, its parameters, and the watch over them.

    Attributes:
        theta: The selected parameters, by name.
        layout: Their places in the flat vector.
        p: Their number.
        dtype: Dtype of the Jacobian: the parameters', but at least float32.
        model_dtype: The parameters' own.
        device: Where the model is.
        has_convolutions: Whether the network has convolution layers.
        steady: Whether outputs of layers must not depend on what else is in a batch.
    """

    steady = False  # see `linnet.ieee`

    def __init__(self, model: nn.Module, params: Params = None, *, output: Output | None = None) -> None:
        self.theta = {name: t.detach() for name, t in select(model, params).items()}
        self.layout = Layout(self.theta)
        self.p = self.layout.p
        first = next(iter(self.theta.values()))
        self.device = first.device
        self.model_dtype = first.dtype
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self._output = output
        self._cast: torch.dtype | None = None  # what floating inputs are cast to
        selected = select(model, params)
        self._model = _shadow(model, selected)
        self._places = _places(self._model, selected)
        self._watched = Watch(model)
        self.has_convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in self._model.modules())

    @property
    def module(self) -> nn.Module:
        """linnet's own copy of the module, in eval mode; it shares the parameters unless the dtype was changed."""
        return self._model

    @property
    def given(self) -> nn.Module:
        """The module as the user gave it, whose weights are watched."""
        return self._watched.model

    def forward(self, theta: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Outputs (n, c) of a batch with some parameters replaced."""
        batch = batch if self._cast is None else batch.with_inputs(partial(as_dtype, dtype=self._cast))
        full = {place: theta.get(name, self.theta[name]) for place, name in self._places.items()}
        try:
            raw = functional_call(self._model, full, batch.args, batch.kwargs, tie_weights=False)
        except (RuntimeError, TypeError) as error:
            _checks.explain_forward(error, leaves((batch.args, batch.kwargs), "the inputs"), self.theta)
            raise
        out = _checks.output_tensor(raw) if self._output is None else self._output(raw)
        return _checks.output_matrix(out, batch.n)

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Raise if a weight of the model has changed since it was linearized.

        Args:
            contents: Whether to compare the bytes of all weights, which reads them once; see `linnet.watch`.
        """
        self._watched.check(contents=contents)

    def convolves(self, precision: Precision) -> bool:
        """Whether a network that runs in this precision convolves in float32 on a GPU."""
        exact = of_network(precision) == "highest" and self.model_dtype == torch.float32
        return self.device.type == "cuda" and exact and self.has_convolutions

    @contextmanager
    def _setting(self, precision: Precision) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(arithmetic(of_network(precision), self.device))
            stack.enter_context(network(self._model, precision, self.device))
            if self.convolves(precision):
                stack.enter_context(Convolving(steady=self.steady))
            yield


def _shadow(model: nn.Module, selected: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module's structure in eval mode that shares its parameters; buffers are copied."""
    kept = {id(t) for t in selected.values()}
    # Those not selected share their memory but ask for no gradient: below the first selected layer nothing is recorded.
    memo = {
        id(t): nn.Parameter(t.detach(), requires_grad=False) if t.requires_grad and id(t) not in kept else t
        for t in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:
        raise TypeError(
            f"linnet works on a copy of the module's structure, and {type(model).__name__} cannot be copied "
            f"({error}). Remove what copy.deepcopy cannot handle, such as tensors with a graph kept as attributes."
        ) from error


def _places(model: nn.Module, selected: Mapping[str, Tensor]) -> dict[str, str]:
    """Every place where a selected parameter hangs in the module tree, to its name; each module once."""
    names = {id(t): name for name, t in selected.items()}
    return {
        f"{prefix}.{key}" if prefix else key: names[id(t)]
        for prefix, module in model.named_modules()
        for key, t in module._parameters.items()
        if t is not None and id(t) in names
    }


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in a dtype, a complex one in the complex dtype beside it, any other as it is."""
    if t.is_floating_point():
        return t.to(dtype)
    return t.to(dtype.to_complex()) if t.is_complex() else t
