"""A trained network as the linear model it is to first order around its own weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from linnet._common import Precision, Ranks, __version__, check_precision, find_dense_budget, messages
from linnet.data import Batch, Source, as_source
from linnet.jacobian.chunk import ChunkBuilder, NetworkChunks
from linnet.jacobian.cuda.float32_convolution import ExactConvolution
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.passes import PassSettings
from linnet.jacobian.plan import check_engine
from linnet.jacobian.rule_selection import RuleSelection
from linnet.network import FunctionalModel, Output, Params, Watch, lies_in_parts


def linearize(
    model: nn.Module, params: Params = None, output: Output | None = None, *, mesh: DeviceMesh | None = None
) -> Linearization:
    """The network as a linear model around its own weights, f(x; theta) ~ f(x; theta0) + J(x) (theta - theta0).

    The module is never modified: linnet works on a copy of its structure that shares the parameters and is in eval
    mode. Parameters and buffers that change afterwards (more training) are noticed, and refused: here and wherever data
    is first used, the bytes of all weights are compared (see `linnet.network.functional_model.Watch`).

    Args:
        model: Any module.
        params: Which parameters: None for all trainable ones, a glob or a list of globs over their names, or a
            callable ``(name, tensor) -> bool``.
        output: From what the model returns to a tensor (n, c) or (n,). By default tensors are taken as they are, and
            Hugging Face's outputs by their ``logits``.
        mesh: The processes that share the examples out, as a mesh of one dimension, or the dimension "data" or "dp" of
            a mesh. None for all processes of torch.distributed. For a sharded model it is the whole mesh on which the
            model was sharded, and all of its processes share the examples out.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> lin = linearize(model)
        >>> lin.p, lin(torch.zeros(5, 4)).shape
        (67, torch.Size([5, 3]))
        >>> linearize(model, "2.*").p
        27
    """
    ranks = Ranks.of_all(mesh) if lies_in_parts(model) else Ranks.of(mesh)
    network = FunctionalModel.of(model, params, output=output, convolutions=ExactConvolution, ranks=ranks)
    return Linearization(network, ranks=ranks)


@final
class Linearization:
    """See `linearize`.

    Args:
        network: The network as a function of its parameters.
        rules: Which layer rules serve the network; None if nothing is known yet.
        ranks: The processes that share the examples out; None for all processes of torch.distributed.

    Attributes:
        theta: The selected parameters, by name.
        layout: Places of the selected parameters in the flat vector.
        p: The number of selected parameters.
        dtype: Dtype of products with the Jacobian: it holds the dtypes of all selected parameters, and is at least
            float32; see `with_products`.
        model_dtype: Dtype of the selected parameters; of several dtypes the one with the fewest digits.
        device: The device of the network.
        network: The network as a function of its parameters.
        rules: Which layer rules serve the network.
        ranks: The processes that share the examples out.
        chunks: Turns a batch into the columns of its Jacobian.
    """

    def __init__(
        self, network: FunctionalModel, rules: RuleSelection | None = None, ranks: Ranks | None = None
    ) -> None:
        self.network = network
        self.ranks = Ranks() if ranks is None else ranks
        self.rules = RuleSelection(network) if rules is None else rules
        self.chunks = ChunkBuilder(network, self.rules)
        self.theta, self.layout, self.p = network.theta, network.layout, network.p
        self.dtype, self.model_dtype, self.device = network.dtype, network.model_dtype, network.device

    def __repr__(self) -> str:
        layers = len(self.layout.layers)
        return f"Linearization({type(self.module).__name__}, p={self.p:,} in {layers} layers, {self.dtype})"

    @property
    def module(self) -> nn.Module:
        """linnet's own copy of the module, in eval mode; it shares the parameters unless the dtype was changed."""
        return self.network.module

    @property
    def given(self) -> nn.Module:
        """The module as the user gave it, whose weights are watched."""
        return self.network.watch.model

    @property
    def flat_theta(self) -> Tensor:
        """The selected parameters as one vector (p,) in ``dtype``."""
        return torch.cat([t.flatten().to(self.dtype) for t in self.theta.values()])

    def move_theta(self, delta: Tensor) -> dict[str, Tensor]:
        """The selected parameters, each in its own dtype, with a displacement (p,) added to them.

        >>> lin = linearize(nn.Linear(1, 1)).with_products(torch.float64)
        >>> moved = lin.move_theta(torch.ones(2).double())
        >>> moved["bias"].dtype, bool((moved["bias"] == lin.theta["bias"] + 1).all())
        (torch.float32, True)
        """
        steps = self.layout.unflatten(delta)
        return {name: (t + steps[name]).to(t.dtype) for name, t in self.theta.items()}

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Raise if a weight of the model has changed since it was linearized.

        Args:
            contents: Whether to compare the bytes of all weights, which reads them once; see
                `linnet.network.functional_model.Watch`.
        """
        self.network.check_unchanged(contents=contents)

    def check_ranks_agree(self, source: Source | None = None, **more: Any) -> None:
        """Raise on all ranks unless all have the same weights, the same data and the same of anything else.

        Each rank reads its own part of the data, so that all need all of it; a Dataset is compared by its length and a
        few of its examples. All ranks call this together.

        Args:
            source: The data; None for no data.
            more: Other values that must be the same, by name: tensors, or values that print alike.

        Raises:
            ValueError: Says what differs, and on which ranks.
        """
        if self.ranks.world == 1:
            return
        values: dict[str, Any] = {
            "the version of linnet": __version__,
            "the version of torch": torch.__version__,
            "the selected parameters": self.layout.shapes,
            "the dtype of products": self.dtype,
            "the weights of the model": self.network.code,
        }
        if source is not None:
            values |= {"the number of examples": source.n, "the data": source.glimpse()}
        self.ranks.check_same(values | more)

    def together(self) -> AbstractContextManager[None]:
        """A block in which the network runs: an error in it reaches all ranks.

        A rank that has parts of the weights stays in the block until no other rank needs them.
        """
        return self.ranks.telling() if self.network.shards is None else self.network.together()

    def agree_on_memory(self, memory: float | str) -> float | str:
        """Bytes that dense matrices may take on every rank, so that all ranks choose the same solver.

        Args:
            memory: As the user gave it: bytes, or "auto". It stays as it is where there is one rank.
        """
        alone = self.ranks.world == 1
        return memory if alone else self.ranks.smallest(find_dense_budget(memory, self.device))

    def forward(self, theta: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Outputs (n, c) of a batch with some parameters replaced."""
        return self.network.forward(theta, batch)

    def __call__(self, x: Any) -> Tensor:
        """f(x; theta0) as (n, c), for anything that the model takes: a tensor, an array, a tuple or a dict."""
        self.check_unchanged(contents=True)
        source = as_source(x, self.module.forward)
        batches = [b.to(self.device) for b in source.batches(source.n)]
        with self.together(), torch.no_grad():
            self.network.find_autocast(batches[0])
            with self.network.in_precision("highest"):
                return torch.cat([self.network.forward({}, b) for b in batches])

    def jacobian(
        self,
        data: Any,
        batch_size: int | str = "auto",
        memory: float | str = "auto",
        *,
        precision: Precision = "highest",
        engine: str = "auto",
        progress: bool | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Jacobian:
        """The Jacobian over a data set, (n * c, p), rows by example; a linear operator that is never stored.

        Args:
            data: Tensors, arrays, tuples, dicts, a Dataset or a DataLoader; see `linnet.data.sources.as_source`.
            batch_size: Examples per chunk, or "auto" for as many as the memory allows.
            memory: Bytes that a pass may use beside its result, or "auto" for a fraction of what is free. A chunk has
                one example at least.
            precision: "highest" (IEEE float32, or the model's own dtype), "products" (the network as it is, products
                with many columns in tf32), "high" (tf32) or "bf16".
            engine: "auto", or one of "rows", "bilinear", "ghost", "autodiff" to use it wherever it can serve.
            progress: False for no progress bar; True or None for one on a terminal after two seconds.
            mesh: The processes that share these examples out, as in `linearize`; None for the processes that share all
                data of this linearization.

        Example:
            >>> lin = linearize(nn.Linear(4, 3))
            >>> J = lin.jacobian(torch.ones(5, 4))
            >>> J.shape, (J @ torch.ones(lin.p)).shape, J.gram().shape
            ((15, 15), torch.Size([15]), torch.Size([15, 15]))
        """
        check_precision(precision)
        check_engine(engine)
        messages.check_batch_size(batch_size)
        messages.check_memory(memory)
        self.check_unchanged(contents=True)
        source = as_source(data, self.module.forward)
        settings = PassSettings(batch_size, memory, precision, engine, progress)  # type: ignore[arg-type]
        if mesh is not None and self.network.shards is not None:
            raise ValueError("The weights of the model lie in parts on the ranks: give mesh= to linnet.linearize.")
        lin = self if mesh is None else Linearization(self.network, self.rules, Ranks.of(mesh))
        return Jacobian(NetworkChunks(lin, source, settings))

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
        _check_dtype(dtype)
        self.check_unchanged(contents=True)
        return self.with_network(self.network.to(dtype))

    def with_products(self, dtype: torch.dtype) -> Linearization:
        """The same linear model with products in another dtype; the network stays as it is, and nothing is copied.

        The network runs in its own dtype. Rows of the Jacobian are made in that dtype, or in float32 if that has more
        digits. Gram matrices and products of the rows are then added up in ``dtype``. So a Gram matrix in float64 is
        positive semidefinite to the rounding of float64, also where the rows come from float32.

        Args:
            dtype: ``torch.float32`` or ``torch.float64``. Products never have fewer digits than the rows.

        Example:
            >>> lin = linearize(nn.Linear(4, 3)).with_products(torch.float64)
            >>> lin(torch.zeros(5, 4)).dtype, lin.jacobian(torch.ones(2, 4)).gram().dtype
            (torch.float32, torch.float64)
        """
        _check_dtype(dtype)
        return self.with_network(replace(self.network, products=dtype))

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
        return self.with_network(self.network.at(theta))

    def with_network(self, network: FunctionalModel) -> Linearization:
        """The linear model of another form of the network; what passes have shown stays where the module does."""
        same = network.module is self.network.module
        return Linearization(network, self.rules.of(network) if same else None, self.ranks)

    def watching(self, model: nn.Module) -> Linearization:
        """The same linear model that notices changes of the weights of another module."""
        return self.with_network(replace(self.network, watch=Watch(model)))

    def steady(self) -> Linearization:
        """The same linear model with convolutions in float64; see `linnet.jacobian.cuda.float32_convolution`."""
        return self.with_network(replace(self.network, convolutions=partial(ExactConvolution, steady=True)))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"A linearization computes in torch.float32 or torch.float64; got {dtype}. Pass one of them.")
