"""A network as a function of its selected parameters: linnet's own copy of it, and what it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linnet._common import messages
from linnet._common.torch_settings import Precision, alone, arithmetic, network, of_network
from linnet.data.batch import Batch, leaves
from linnet.jacobian.cuda.float32_convolution import Convolving
from linnet.network.copies import copy_sharing_parameters
from linnet.network.parameter_guard import address
from linnet.network.parameters import Layout, Params, select
from linnet.network.weight_watch import Watch

Output = Callable[[Any], Tensor]
"""From what a model returns to a tensor (n, c) or (n,)."""


class Functional:
    """What `linnet.jacobian.linearization.Linearization` is made of: the network, its parameters, and the watch over
    them.

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

    steady = False  # see `linnet.jacobian.cuda.float32_convolution`

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
        self._originals = list(selected.items())  # nothing may read them: a pass has other tensors in their place
        self._elsewhere: list[tuple[str, Tensor]] = []  # the same of the network that this one was cast from
        self._unused = copy_sharing_parameters(self._model)  # as it was at first
        self._at_first: list[tuple[Any, ...]] | None = _state(self._model)
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
        batch = batch.with_inputs(partial(_copied, dtype=self._cast))  # the network may write into its inputs
        full = {place: theta.get(name, self.theta[name]) for place, name in self._places.items()}
        try:
            with alone(self._model):
                raw = functional_call(self._model, full, batch.args, batch.kwargs, tie_weights=False)
        except (RuntimeError, TypeError, AttributeError) as error:
            messages.explain_forward(error, leaves((batch.args, batch.kwargs), "the inputs"), self.theta)
            raise
        return self._matrix(raw, batch.n)

    def _matrix(self, raw: Any, n: int) -> Tensor:
        """What the network returned, as (n, c)."""
        out = messages.output_tensor(raw) if self._output is None else self._output(raw)
        return messages.output_matrix(out, n)

    def plain_outputs(self, batch: Batch) -> Tensor | None:
        """Outputs (n, c) by the network with its own parameters; None if this is a linearization around other ones."""
        moved = any(address(t) != address(self.theta[name]) for name, t in self._originals if name in self.theta)
        if self._at_first is None or moved:
            return None
        fresh = self._as_at_first()
        batch = batch.with_inputs(partial(_copied, dtype=self._cast))
        return fresh._matrix(fresh._model(*batch.args, **batch.kwargs), batch.n)

    @property
    def stateful(self) -> bool:
        """Whether forward passes have left something behind in the modules: buffers, counters, caches."""
        if self._at_first is None:
            return False
        now = _state(self._model)
        pairs = zip(now, self._at_first, strict=False)
        same = all(a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in pairs)
        return not same or len(now) != len(self._at_first)

    def _as_at_first(self) -> Functional:
        """The same function by a copy of the network that has never run."""
        fresh = copy.copy(self)
        fresh._model = copy_sharing_parameters(self._unused)
        return fresh

    def _storages(self) -> dict[int, str]:
        """Names of all parameters of the network, by the address of their memory."""
        tensors = (*self._model.named_parameters(), *self.theta.items())
        return {address(t): name for name, t in tensors}

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Raise if a weight of the model has changed since it was linearized.

        Args:
            contents: Whether to compare the bytes of all weights, which reads them once; see
                `linnet.network.weight_watch`.
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
        shadow = copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"linnet works on a copy of the module's structure, and {type(model).__name__} cannot be copied "
            f"({error}). Remove what copy.deepcopy cannot handle, such as tensors with a graph kept as attributes."
        ) from error
    own = {id(module) for module in model.modules()}
    for name, module in shadow.named_modules():
        if id(module) in own:
            raise TypeError(
                f"linnet works on a copy of the module's structure, and copy.deepcopy returns the module "
                f"{name or type(model).__name__!r} itself. Remove its __deepcopy__, so that linnet leaves it as it is."
            )
        if getattr(module, "max_norm", None) is not None:
            _release_max_norm(name, module)
    return shadow.eval()


def _release_max_norm(name: str, module: nn.Module) -> None:
    """Switch off an embedding's ``max_norm``, which would write into the weights, where it has nothing to do."""
    weight, limit, kind = module.weight, float(module.max_norm), float(getattr(module, "norm_type", 2.0))  # type: ignore[arg-type]
    if bool((weight.detach().norm(p=kind, dim=1) > limit).any()):  # type: ignore[operator]
        raise messages.renormalizes(name)
    module.max_norm = None  # type: ignore[assignment]


def _state(model: nn.Module) -> list[tuple[Any, ...]]:
    """What the modules hold besides parameters: to see whether a forward pass has changed any of it."""
    return [
        (key, value, value._version if isinstance(value, Tensor) else len(value) if isinstance(value, Sized) else 0)
        for module in model.modules()
        for held in (module.__dict__, module._buffers)
        for key, value in held.items()
    ]


def _places(model: nn.Module, selected: Mapping[str, Tensor]) -> dict[str, str]:
    """Every place where a selected parameter hangs in the module tree, to its name; each module once."""
    names = {id(t): name for name, t in selected.items()}
    return {
        f"{prefix}.{key}" if prefix else key: names[id(t)]
        for prefix, module in model.named_modules()
        for key, t in module._parameters.items()
        if t is not None and id(t) in names
    }


def _copied(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy of a tensor, in a dtype if one is given."""
    cast = t if dtype is None else as_dtype(t, dtype)
    return t.clone() if cast is t else cast


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in a dtype, a complex one in the complex dtype beside it, any other as it is."""
    if t.is_floating_point():
        return t.to(dtype)
    return t.to(dtype.to_complex()) if t.is_complex() else t
