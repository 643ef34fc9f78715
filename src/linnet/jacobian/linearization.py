"""A trained network as the linear model it is to first order around its own weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linnet._common.torch_settings import Precision
from linnet.data.sources import as_source
from linnet.jacobian.chunk import Chunks
from linnet.network.functional_model import Output, as_dtype
from linnet.network.parameters import Params

if TYPE_CHECKING:
    from linnet.jacobian.jacobian import Jacobian


def linearize(model: nn.Module, params: Params = None, output: Output | None = None) -> Linearization:
    """The network as a linear model around its own weights, f(x; theta) ~ f(x; theta0) + J(x) (theta - theta0).

    The module is never modified: linnet works on a copy of its structure that shares the parameters and is in eval
    mode. Parameters and buffers that change afterwards (more training) are noticed, and refused: here and wherever data
    is first used, the bytes of all weights are compared (see `linnet.network.weight_watch`).

    Args:
        model: Any module.
        params: Which parameters: None for all trainable ones, a glob or a list of globs over their names, or a
            callable ``(name, tensor) -> bool``.
        output: From what the model returns to a tensor (n, c) or (n,). By default tensors are taken as they are, and
            Hugging Face's outputs by their ``logits``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> lin = linearize(model)
        >>> lin.p, lin(torch.zeros(5, 4)).shape
        (67, torch.Size([5, 3]))
        >>> linearize(model, "2.*").p
        27
    """
    return Linearization(model, params, output=output)


class Linearization(Chunks):
    """See `linearize`.

    Attributes:
        theta: The selected parameters, by name.
        layout: Their places in the flat vector.
        p: Their number.
        dtype: Dtype of the Jacobian: the parameters', but at least float32.
        device: Where the model is.
    """

    def __repr__(self) -> str:
        layers = len(self.layout.layers)
        return f"Linearization({type(self._model).__name__}, p={self.p:,} in {layers} layers, {self.dtype})"

    def __call__(self, x: Any) -> Tensor:
        """f(x; theta0) as (n, c), for anything that the model takes: a tensor, an array, a tuple or a dict."""
        self.check_unchanged(contents=True)
        source = as_source(x, self._model.forward)
        with torch.no_grad(), self._setting("highest"):
            return torch.cat([self.forward({}, b.to(self.device)) for b in source.batches(source.n)])

    def jacobian(
        self,
        data: Any,
        batch_size: int | str = "auto",
        memory: float | str = "auto",
        *,
        precision: Precision = "highest",
        engine: str = "auto",
        progress: bool | None = None,
    ) -> Jacobian:
        """The Jacobian over a data set, (n * c, p), rows by example; a linear operator that is never stored.

        Args:
            data: Tensors, arrays, tuples, dicts, a Dataset or a DataLoader; see `linnet.data.sources.as_source`.
            batch_size: Examples per chunk, or "auto" for as many as the memory allows.
            memory: Bytes that a pass may use for its chunk, or "auto" for a fraction of what is free.
            precision: "highest" (IEEE float32, or the model's own dtype), "products" (the network as it is, products
                with many columns in tf32), "high" (tf32) or "bf16".
            engine: "auto", or one of "rows", "bilinear", "ghost", "autodiff" to use it wherever it can serve.
            progress: False for no progress bar; True or None for one on a terminal after two seconds.

        Example:
            >>> lin = linearize(nn.Linear(4, 3))
            >>> J = lin.jacobian(torch.ones(5, 4))
            >>> J.shape, (J @ torch.ones(lin.p)).shape, J.gram().shape
            ((15, 15), torch.Size([15]), torch.Size([15, 15]))
        """
        from linnet.jacobian.jacobian import Jacobian

        self.check_unchanged(contents=True)
        source = as_source(data, self._model.forward)
        return Jacobian(
            self,
            source,
            batch_size=batch_size,
            memory=memory,
            precision=precision,
            engine=engine,
            progress=progress,
        )

    def to(self, dtype: torch.dtype) -> Linearization:
        """The same linear model in another precision, around a copy of the weights.

        The copy casts floating inputs to its dtype, so that the same data serves both; integers stay as they are. The
        module itself and this linearization are untouched, and later changes of the module's parameters are refused by
        the copy too.

        Args:
            dtype: ``torch.float32`` or ``torch.float64``.

        Example:
            >>> lin = linearize(nn.Linear(4, 3)).to(torch.float64)
            >>> lin(torch.zeros(5, 4)).dtype, lin.theta["weight"].dtype
            (torch.float64, torch.float64)
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"A linearization computes in torch.float32 or torch.float64; got {dtype}. Pass one of them."
            )
        self.check_unchanged(contents=True)

        def cast(t: Tensor) -> Tensor:
            return as_dtype(t, dtype)

        # Parameters are cast one by one into the copy; those in the dtype already are shared with the module.
        memo: dict[int, Any] = {
            id(t): nn.Parameter(cast(t.detach()), requires_grad=t.requires_grad) for t in self._model.parameters()
        }
        model = copy.deepcopy(self._unused, memo)._apply(cast)
        other = Linearization(model, list(self.theta), output=self._output)
        other._watched, other._cast = self._watched, dtype
        other._elsewhere = self._originals + self._elsewhere
        return other

    def at(self, theta: Mapping[str, Tensor]) -> Linearization:
        """The same network around other weights, in the same precision; those not given stay as they are.

        The module's own parameters are not touched, and the watch over them goes on.

        Args:
            theta: Some of the selected parameters, by name.

        Example:
            >>> lin = linearize(nn.Linear(4, 3))
            >>> lin.at({"bias": torch.ones(3)}).theta["bias"]
            tensor([1., 1., 1.])
        """
        for name, t in theta.items():
            known = self.theta.get(name)
            if known is None:
                raise ValueError(f"{name!r} is not a selected parameter; these are {', '.join(self.theta)}.")
            if t.shape != known.shape or t.dtype != known.dtype or t.device != known.device:
                raise ValueError(
                    f"{name!r} has shape {tuple(known.shape)} in {known.dtype} on {known.device}; got "
                    f"{tuple(t.shape)} in {t.dtype} on {t.device}."
                )
        moved = copy.copy(self)
        moved.theta = {name: theta.get(name, t).detach() for name, t in self.theta.items()}
        return moved
